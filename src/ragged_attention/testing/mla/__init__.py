"""Checks of attention over latent caches (MLA), and of the operations that create and fill such caches."""
