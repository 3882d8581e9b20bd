"""`ragged-attention demo`: continuous batching in miniature, with every token checked.

Read in this order: `pages.py` (who holds which page), `engine.py` (the parts of a step), `transformer.py` (the layers
of both models), `gqa.py` and `mla.py` (their two kinds of attention, each with its two calls per layer), `check.py`
(full attention as the judge). `torch_model.py` and `jax_model.py` run them on the arrays of a framework.
"""

from ragged_attention.demo.command import main as main
