"""What holds a kernel to its definition: strategies, comparator, laws, guarded memory; for kernels of others too."""
