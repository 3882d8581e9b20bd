"""Every family of models in transformers, tiny, with our attention and with its own."""
