"""The attention over latent rows that `mla_decode` and `sparse_mla_prefill` share: an attention kernel and a combine.

A *job* is a list of keys and the rows of queries that share it. In a dense call a job is a sequence, and its rows are
query tokens times heads. In a sparse call a job is one query token, since every token has its own list, and its rows
are heads. So sparse prefill is sparse decode with one token per sequence. A program computes BLOCK_H rows of a job over
one split of its keys. Programs that share keys are neighbours in the grid, so that the second finds them in the cache.

A latent row is read once and serves as K and, transposed, as V. The columns that serve as V come in groups; others are
one more operand. If bfloat16 holds the product of a code and a scale exactly, that product is the operand. Otherwise
scales are folded: codes become float16 operands, exactly, and the scale of a group of columns multiplies the logits of
that group and the weights of that group's values. Such weights stay near 1 by a second running maximum, over logit plus
log2 of the key's scale. A sparse prefill whose lists name every slot many times decodes the cache once (`decoding`).

Logits are held in base 2. If rounding queries to the dtype of the keys' operands loses something, a second operand
holds what it lost, and is multiplied, too.
"""
