"""Attention over latent rows: the kernel of `mla_decode` and `sparse_mla_prefill`, and its launch.

`ragged_mla_attention` has a kernel of its own around the same loop.

A *job* is a list of keys and the rows of queries that share it. In a dense call a job is a sequence, and its rows are
query tokens times heads. In a sparse call a job is one query token, since every token has its own list, and its rows
are heads. So sparse prefill is sparse decode with one token per sequence. A program computes BLOCK_H rows of a job over
one split of its keys. Programs that share keys are neighbours in the grid, so that the later program finds the keys in
L2.

A latent row is read once and serves as both K and V. The columns that serve as V are divided into groups; the remaining
columns are one more operand. If bfloat16 represents the product of a code and its scale exactly, that product is the
operand. Otherwise scales are *folded*: codes become exact float16 operands, and a group's scale multiplies the products
of that group with queries, and the weights of its values. A second running maximum, of the logit plus log2 of the key's
scale, keeps the scaled weights near 1. If the lists of a sparse prefill name every slot many times, the cache is
decoded once in advance (`decoding`).

Logits are in base 2. If rounding queries to the dtype of the keys' operands is inexact, a second product adds the
rounding errors of the queries.
"""
