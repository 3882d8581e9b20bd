"""Concerns of the host process: forks, kernels cached on disk, and launches that Triton's interpreter runs."""
