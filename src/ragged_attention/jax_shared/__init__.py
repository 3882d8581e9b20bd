"""Functions on jax arrays that the Pallas kernels, the XLA fallbacks and the jax front end share."""
