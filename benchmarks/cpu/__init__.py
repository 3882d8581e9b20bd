"""Attention on a CPU beside what people would take instead: `python -m benchmarks.cpu`."""
