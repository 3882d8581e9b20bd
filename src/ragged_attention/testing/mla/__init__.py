"""Attention over latent caches (MLA), and what makes and fills such caches."""
