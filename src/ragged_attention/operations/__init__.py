"""The public functions of both front ends, torch and jax: signatures, docstrings, and the runs of their call records.

Each function is a method here, written once for arrays of any framework. A front end is an instance of `Operations`
for its own arrays, and its package offers the methods of that instance as functions.
"""

from ragged_attention.operations.base import Array, Memory
from ragged_attention.operations.blocks import Blocks
from ragged_attention.operations.heads_first import HeadsFirst
from ragged_attention.operations.indexer import Indexer
from ragged_attention.operations.kv_rows import KvRows
from ragged_attention.operations.mla import Latent
from ragged_attention.operations.norm_rope import NormRope
from ragged_attention.operations.paged import Paged
from ragged_attention.operations.ragged_mla import RaggedLatent
from ragged_attention.operations.targets import Targets
from ragged_attention.operations.varlen import Varlen


class Operations(
    Paged[Array, Memory],
    KvRows[Array, Memory],
    NormRope[Array, Memory],
    HeadsFirst[Array, Memory],
    Varlen[Array, Memory],
    Latent[Array, Memory],
    RaggedLatent[Array, Memory],
    Indexer[Array, Memory],
    Targets[Array, Memory],
    Blocks[Array, Memory],
):
    """Every operation, on arrays of one framework."""
