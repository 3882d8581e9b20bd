"""What the kernels compile to. No GPU or TPU is needed to read it."""
