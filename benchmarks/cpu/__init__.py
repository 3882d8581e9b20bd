"""Attention on a CPU beside the alternatives: `python -m benchmarks.cpu`."""
