"""Attention over packed sequences, and gradients, those of sparse latent attention included."""
