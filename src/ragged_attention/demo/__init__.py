"""`ragged-attention demo`: continuous batching in miniature, with every token checked.

Read in this order: `pages.py` (who holds which page), `engine.py` (what a step is made of), `torch_layers.py` (what
both models are made of), `torch_gqa.py` and `torch_mla.py` (what they differ in, and the two calls per layer),
`check.py` (full attention as the judge). jax has modules of the same names.
"""

from ragged_attention.demo.command import main as main
