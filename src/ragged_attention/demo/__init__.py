"""`ragged-attention demo`: continuous batching in miniature, with every token checked.

Read in this order: `pages.py` (the holders of each page), `engine.py` (the parts of a step), `transformer.py` (the
layers of both models), `gqa.py` and `mla.py` (their attention, with two calls per layer), `check.py` (full attention,
which checks every token). `torch_model.py` and `jax_model.py` run the models on the arrays of a framework.
"""

from ragged_attention.demo.command import main as main
