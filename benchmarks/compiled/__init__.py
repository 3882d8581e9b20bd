"""What the kernels compile to, read without a GPU or TPU."""
