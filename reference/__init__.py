"""NumPy definitions of every operation: read them first; every other backend is judged against them."""
