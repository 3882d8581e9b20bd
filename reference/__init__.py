"""NumPy definitions of every operation: read them first; every other backend is judged against them.

A definition takes every valid call, has nothing to tune, and computes one sequence after the other.
"""
