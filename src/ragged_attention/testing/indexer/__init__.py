"""Checks of the lightning indexer: its logits, the top-k of them, its quantised keys."""
