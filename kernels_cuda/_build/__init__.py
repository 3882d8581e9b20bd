"""How the kernels and the emulation of them become libraries: the tools, the recipes, the cache."""
