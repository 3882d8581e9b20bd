"""The operations' arguments: one frozen record for each operation. No other place lists arguments with their kinds.

A record is built from torch tensors, jax arrays or NumPy arrays. It reads only shapes and dtypes, so the arrays may be
traced or fake. Building a record checks everything that can be checked without reading an array. It raises
`InvalidInput`, or `TypeError` for a value of a wrong type. `check_values` checks the contents of the index arrays. It
runs only on request, because it has to read them back from the device.

Axes: T query tokens, S sequences, P pages, G page size, M pages per sequence, H query heads, K KV heads, D head size,
N selected keys.
"""

from ragged_attention.calls.base import NOWHERE as NOWHERE
from ragged_attention.calls.base import Call as Call
from ragged_attention.calls.base import Device as Device
from ragged_attention.calls.base import Result as Result
from ragged_attention.calls.base import WritingCall as WritingCall
from ragged_attention.calls.blocks import BlocksCall as BlocksCall
from ragged_attention.calls.blocks import BlockScores as BlockScores
from ragged_attention.calls.blocks import SelectBlocks as SelectBlocks
from ragged_attention.calls.blocks import TopKBlocks as TopKBlocks
from ragged_attention.calls.cache_formats import CACHE_FORMATS as CACHE_FORMATS
from ragged_attention.calls.cache_formats import CacheFormat as CacheFormat
from ragged_attention.calls.fields import FLOAT8 as FLOAT8
from ragged_attention.calls.fields import FLOATS as FLOATS
from ragged_attention.calls.fields import QUANTIZED as QUANTIZED
from ragged_attention.calls.fields import WIDE_FLOATS as WIDE_FLOATS
from ragged_attention.calls.fields import Array as Array
from ragged_attention.calls.fields import Arrays as Arrays
from ragged_attention.calls.fields import dtype_name as dtype_name
from ragged_attention.calls.fields import expect_bool as expect_bool
from ragged_attention.calls.fields import expect_count as expect_count
from ragged_attention.calls.fields import is_array as is_array
from ragged_attention.calls.fields import is_number as is_number
from ragged_attention.calls.heads_first import HeadsFirstCall as HeadsFirstCall
from ragged_attention.calls.heads_first import PagedAttention as PagedAttention
from ragged_attention.calls.heads_first import PrefillAttention as PrefillAttention
from ragged_attention.calls.heads_first import is_jax_quantized as is_jax_quantized
from ragged_attention.calls.indexer import IndexerCall as IndexerCall
from ragged_attention.calls.indexer import IndexerLogits as IndexerLogits
from ragged_attention.calls.indexer import IndexerLogitsBackward as IndexerLogitsBackward
from ragged_attention.calls.indexer import IndexerTopk as IndexerTopk
from ragged_attention.calls.indexer import QuantizeIndexerKeys as QuantizeIndexerKeys
from ragged_attention.calls.indexer import TopKIndices as TopKIndices
from ragged_attention.calls.indexer import WriteIndexerCache as WriteIndexerCache
from ragged_attention.calls.kv_rows import DequantizeKv as DequantizeKv
from ragged_attention.calls.kv_rows import QuantizeKv as QuantizeKv
from ragged_attention.calls.latent_norm_rope import LatentNormRopeWrite as LatentNormRopeWrite
from ragged_attention.calls.mla import MlaDecode as MlaDecode
from ragged_attention.calls.mla import RaggedMlaAttention as RaggedMlaAttention
from ragged_attention.calls.mla import SparseMlaPrefill as SparseMlaPrefill
from ragged_attention.calls.mla import SparseMlaPrefillBackward as SparseMlaPrefillBackward
from ragged_attention.calls.mla_cache import DequantizeMlaCache as DequantizeMlaCache
from ragged_attention.calls.mla_cache import PageIndicesToSlots as PageIndicesToSlots
from ragged_attention.calls.mla_cache import QuantizeMlaCache as QuantizeMlaCache
from ragged_attention.calls.mla_cache import WriteMlaCache as WriteMlaCache
from ragged_attention.calls.mla_schedule import DecodeSchedule as DecodeSchedule
from ragged_attention.calls.mla_schedule import MakeDecodeSchedule as MakeDecodeSchedule
from ragged_attention.calls.norm_rope import NormRopeWrite as NormRopeWrite
from ragged_attention.calls.paged import MergeAttentionStates as MergeAttentionStates
from ragged_attention.calls.paged import RaggedPagedAttention as RaggedPagedAttention
from ragged_attention.calls.paged import WriteKvPages as WriteKvPages
from ragged_attention.calls.targets import AttentionTarget as AttentionTarget
from ragged_attention.calls.varlen import VarlenAttention as VarlenAttention
from ragged_attention.calls.varlen import VarlenAttentionBackward as VarlenAttentionBackward
from ragged_attention.calls.varlen import VarlenCall as VarlenCall

CALLS: dict[str, type[Call]] = {
    record.OPERATION: record
    for record in (
        RaggedPagedAttention, WriteKvPages, NormRopeWrite, MergeAttentionStates, QuantizeKv, DequantizeKv,
        PagedAttention, PrefillAttention,
        VarlenAttention, VarlenAttentionBackward,
        SparseMlaPrefill, SparseMlaPrefillBackward, MlaDecode, RaggedMlaAttention, MakeDecodeSchedule,
        QuantizeMlaCache, DequantizeMlaCache, WriteMlaCache, LatentNormRopeWrite, PageIndicesToSlots,
        IndexerLogits, IndexerLogitsBackward, IndexerTopk, TopKIndices, QuantizeIndexerKeys, WriteIndexerCache,
        AttentionTarget,
        BlockScores, SelectBlocks, TopKBlocks,
    )
}  # fmt: skip
