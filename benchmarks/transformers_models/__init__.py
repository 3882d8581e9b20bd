"""Runs of every model family in transformers, as a tiny model, with our attention and with transformers' own."""
