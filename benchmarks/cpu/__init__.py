"""Times of our attention on a CPU and of other implementations: `python -m benchmarks.cpu`."""
