"""Checks of the lightning indexer: its logits, their top-k, and its quantised keys."""
