"""The reference backend: every operation in NumPy, written to be read. The tests compare all other backends with it.

It supports every valid call, has nothing to tune, and computes one sequence after another.
"""
