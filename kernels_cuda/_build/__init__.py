"""Building the kernels and their emulation: a search for the tools, recipes, and a cache of libraries."""
