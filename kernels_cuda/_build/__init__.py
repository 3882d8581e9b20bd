"""Builds the kernels and their emulation: finds the tools, defines recipes, and caches the libraries."""
