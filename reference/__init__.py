"""The reference: every operation in NumPy, to be read first. The test suite compares every other backend with it.

It supports every valid call, has nothing to tune, and computes one sequence after another.
"""
