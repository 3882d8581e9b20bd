"""Other implementations of the same operations, by family."""
