"""Measurements: named shapes of real models, the compile matrix, timings here and on a machine with a GPU."""
