"""`ragged-attention demo`: continuous batching in miniature, with every token checked.

Read in this order: `pages.py` (who holds which page), `engine.py` (what a step is made of), `torch_model.py` or
`jax_model.py` (the transformer, and the two calls per layer), `check.py` (full attention as the judge).
"""

from ragged_attention.demo.command import main as main
