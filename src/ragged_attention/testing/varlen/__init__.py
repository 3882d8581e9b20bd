"""Checks of attention over packed sequences, and of gradients, including those of sparse latent attention."""
