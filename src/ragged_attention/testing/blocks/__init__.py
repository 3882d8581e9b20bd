"""Checks of block selection: the scores of key blocks, and the top-k blocks."""
