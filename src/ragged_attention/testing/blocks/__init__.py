"""Checks of block selection: the scores of blocks of keys, and the top-k of them."""
