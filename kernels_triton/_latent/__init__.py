"""The attention over latent rows that `mla_decode` and `sparse_mla_prefill` share: one kernel, and a combine.

A *job* is what shares a list of keys: in a dense call a sequence (its query tokens and heads are the rows), in a sparse
call one query token (its heads are the rows), since every token has its own list. Sparse prefill is sparse decode of
one token per sequence. A program computes BLOCK_H rows of a job over one split of its keys. Programs that share keys
stand next to each other in the grid, so that the second finds them in the cache.

A latent row is read once and serves as K and, transposed, as V. A plain or `fp8_v4` row becomes one operand of the
value's columns and one of the rest; `fp8_v4` scales are powers of two, so its bfloat16 operand is exact. An `fp8_v32`
row is never multiplied by its scales: its codes become float16 operands, exactly, and the scale of a group of 128
columns goes into the logits of that group and into the weights of that group's values. Such weights stay near 1
by a second running maximum, over logit plus log2 of the key's scale. A sparse prefill whose lists name every slot many
times decodes the cache once, before (`decoding`).

Logits are held in base 2. Queries that an 8-bit cache's operands would round, those of float16 beside bfloat16 and of
float32 beside either, come in two parts: what rounding leaves, and what it loses.
"""
