"""The operations' arguments: one frozen record each, the only place that lists them.

A record is built from torch tensors, jax arrays or NumPy arrays alike: it looks at shapes and dtypes only, so it
also stands for traced and fake arrays. Building one checks the static law and raises `InvalidInput` (or
`TypeError` for a value of a wrong kind). `check_values` checks the contents of the index arrays, which reads the
device back and is done only on request.

Axes: T query tokens, S sequences, P pages, G page size, M pages per sequence, H query heads, K KV heads, D head size,
N selected keys.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from ragged_attention.calls.base import FLOATS as FLOATS
from ragged_attention.calls.base import NOWHERE as NOWHERE
from ragged_attention.calls.base import QUANTIZED as QUANTIZED
from ragged_attention.calls.base import WIDE_FLOATS as WIDE_FLOATS
from ragged_attention.calls.base import Array as Array
from ragged_attention.calls.base import Call as Call
from ragged_attention.calls.base import Device as Device
from ragged_attention.calls.base import dtype_name as dtype_name
from ragged_attention.calls.base import expect_bool as expect_bool
from ragged_attention.calls.base import expect_count as expect_count
from ragged_attention.calls.base import is_array as is_array
from ragged_attention.calls.base import is_number as is_number
from ragged_attention.calls.base import wide_dtype as wide_dtype
from ragged_attention.calls.heads_first import ALIGNMENTS as ALIGNMENTS
from ragged_attention.calls.heads_first import JAX_LARGEST as JAX_LARGEST
from ragged_attention.calls.heads_first import HeadsFirstCall as HeadsFirstCall
from ragged_attention.calls.heads_first import PagedAttention as PagedAttention
from ragged_attention.calls.heads_first import PrefillAttention as PrefillAttention
from ragged_attention.calls.heads_first import RaggedHeadsFirst as RaggedHeadsFirst
from ragged_attention.calls.heads_first import expect_heads_first as expect_heads_first
from ragged_attention.calls.heads_first import expect_length as expect_length
from ragged_attention.calls.heads_first import is_jax_quantized as is_jax_quantized
from ragged_attention.calls.heads_first import taken_align as taken_align
from ragged_attention.calls.mla import CACHE_FORMATS as CACHE_FORMATS
from ragged_attention.calls.mla import CacheFormat as CacheFormat
from ragged_attention.calls.mla import DecodeSchedule as DecodeSchedule
from ragged_attention.calls.mla import DequantizeMlaCache as DequantizeMlaCache
from ragged_attention.calls.mla import MakeDecodeSchedule as MakeDecodeSchedule
from ragged_attention.calls.mla import MlaDecode as MlaDecode
from ragged_attention.calls.mla import PageIndicesToSlots as PageIndicesToSlots
from ragged_attention.calls.mla import QuantizeMlaCache as QuantizeMlaCache
from ragged_attention.calls.mla import SparseMlaPrefill as SparseMlaPrefill
from ragged_attention.calls.mla import SparseMlaPrefillBackward as SparseMlaPrefillBackward
from ragged_attention.calls.mla import WriteMlaCache as WriteMlaCache
from ragged_attention.calls.mla import schedule_arrays as schedule_arrays
from ragged_attention.calls.paged import MergeAttentionStates as MergeAttentionStates
from ragged_attention.calls.paged import PagedCall as PagedCall
from ragged_attention.calls.paged import RaggedPagedAttention as RaggedPagedAttention
from ragged_attention.calls.paged import WriteKvPages as WriteKvPages
from ragged_attention.calls.paged import expect_num_seqs as expect_num_seqs
from ragged_attention.calls.paged import expect_pages as expect_pages
from ragged_attention.calls.paged import expect_window as expect_window
from ragged_attention.calls.varlen import VarlenAttention as VarlenAttention
from ragged_attention.calls.varlen import VarlenAttentionBackward as VarlenAttentionBackward
from ragged_attention.calls.varlen import VarlenCall as VarlenCall

Function = TypeVar("Function", bound=Callable[..., Any])

CALLS: dict[str, type[Call]] = {
    record.OPERATION: record
    for record in (
        RaggedPagedAttention,
        WriteKvPages,
        MergeAttentionStates,
        PagedAttention,
        PrefillAttention,
        VarlenAttention,
        VarlenAttentionBackward,
        SparseMlaPrefill,
        SparseMlaPrefillBackward,
        MlaDecode,
        MakeDecodeSchedule,
        QuantizeMlaCache,
        DequantizeMlaCache,
        WriteMlaCache,
        PageIndicesToSlots,
    )
}


def documented(function: Function) -> Function:
    """Give a front end's function the docstring of its operation's record, the one place that describes it."""
    function.__doc__ = CALLS[function.__name__].__doc__
    return function
