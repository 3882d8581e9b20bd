"""Building the kernels and their emulation: finding the tools, the recipes, the cache of libraries."""
