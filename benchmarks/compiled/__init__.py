"""Reports on the machine code of our kernels. No GPU or TPU is needed."""
