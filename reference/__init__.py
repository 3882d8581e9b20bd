"""NumPy definitions of every operation: read them first; every other room is judged against them."""
