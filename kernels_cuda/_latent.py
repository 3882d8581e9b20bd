"""Attention over latent rows on Hopper, for `mla_decode` and `sparse_mla_prefill`: limits, KV splits and native calls.

All attention functions of the C ABI take the same record. They differ in how keys are found and stored. Sparse prefill
is sparse decode with one token per sequence, and packed rows are pages of one row. A *job* is a set of query rows that
share a list of keys: in a dense call, the query tokens and heads of one KV head of a sequence; in a sparse call, the
heads of one KV head of a query token. A thread block computes up to 64 rows of a job over one KV split, and occupies a
whole multiprocessor.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragged_attention.calls import CACHE_FORMATS, CacheFormat, Call, MlaDecode, SparseMlaPrefill, dtype_name
from ragged_attention.errors import InvalidInput
from ragged_attention.kernels_cuda import _abi, _native
from ragged_attention.kernels_cuda._native import NOT_EMULATING, Native

ROWS = 64  # query rows per thread block
BLOCK = 64  # keys per step
MAX_SPLITS = 128
# The costs of splitting. Their unit is the time in which a thread block computes one block of keys.
START_COST = 5  # cost of starting a thread block; a decode schedule assumes the same cost for each sequence
MERGE_COST = 3  # fixed cost of the kernel that merges splits
SPLITS_PER_BLOCK = 16  # number of splits that the merging kernel merges per unit of cost
# The kernel for few rows starts as soon as its first block has arrived, and its merge has more loads in flight.
NARROW_START_COST, NARROW_SPLITS_PER_BLOCK = 2, 32
ARCH = "sm_90"
D_QK, D_V = (576, 512), 512
MAX_OFFSET = 2**32 - 1  # the largest offset of a row, as a multiple of the rows' alignment
NOT_BY_DEFAULT = "not yet measured to beat Triton's kernel, so taken only where it is asked for by name"
PROVEN = Path(__file__).parent / "proven"  # written by `python -m benchmarks.device.publish`

Attention = MlaDecode | SparseMlaPrefill

DENSE = Native("ra_mla_decode_dense")
LISTS = Native("ra_sparse_mla_prefill")
V41 = Native("ra_mla_decode_sparse_v41")
LIST_FUNCTIONS = {  # for each cache format, the function for calls with lists
    _abi.PLAIN: LISTS,
    _abi.FP8_V32: Native("ra_mla_decode_sparse_fp8"),
    _abi.FP8_V4: Native("ra_mla_decode_sparse_fp8_v4"),
    _abi.FP8_V41: V41,
    _abi.FP8_V41_PAGE: V41,
    _abi.FP4_V41: V41,
    _abi.FP4_V41_PAGE: V41,
}
NARROW = {_abi.FP8_V32: Native("ra_mla_decode_sparse_fp8_narrow")}  # functions for at most NARROW_ROWS heads
NARROW_ROWS = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tunable parameters."""

    num_splits: int = 1  # maximum KV splits per job, without a schedule; with 1, results are batch-invariant
    narrow: bool = True  # whether calls with few heads use the kernel for few rows, if the cache format has one

    def __post_init__(self) -> None:
        if not isinstance(self.narrow, bool):
            raise InvalidInput(f"expected narrow to be a bool, got {self.narrow!r}")
        if not isinstance(self.num_splits, int) or not 1 <= self.num_splits <= 256:
            raise InvalidInput(f"expected num_splits from 1 to 256, got {self.num_splits!r}")


# ---- accepted calls


def cannot_run(call: Call) -> str | None:
    """Why these kernels cannot run on the device of a call, or None."""
    device = call.device
    if device.platform == "cpu":
        return NOT_EMULATING if _native.emulated() is None else None
    if device.platform != "cuda" or device.arch != ARCH:
        return f"runs on {ARCH} GPUs, got a call from {device.arch or device.platform}"
    return _native.why_not()


def why_not_by_default(call: Call, kind: str | None) -> str | None:
    """Why this backend is not the default for a call; None if the call's kind is proven on its device and framework.

    A kind of calls is proven if the test suite has passed for it, with this framework on this device. `kind` is the
    result of the operation's `kind_of`, or None if the operation has no proven kinds.
    """
    entry = _proven(call.OPERATION).get(call.device.name, {}).get(kind or "", {})
    return None if call.device.framework in entry.get("frameworks", ()) else NOT_BY_DEFAULT


@functools.cache
def _proven(operation: str) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """The proven kinds of an operation's calls, by device name and kind."""
    path = PROVEN / f"{operation}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def cannot_take(call: Attention, *, sparse: bool) -> str | None:
    """Why the kernels cannot take a call on any device, or None."""
    dtype, dense, form = dtype_name(call.q), "a dense call", call.kv_format
    for stored in (form, getattr(call, "extra_kv_format", form)):
        if _abi.code_of(stored) not in LIST_FUNCTIONS:
            names = [name for name, known in CACHE_FORMATS.items() if _abi.code_of(known) in LIST_FUNCTIONS]
            return f"takes cache_format {' or '.join(map(repr, ['plain', *names]))}, got {stored.name!r}"
    if form.quantized and not sparse:
        return f"takes cache_format 'plain' in {dense} (one without indices), got {form.name!r}"
    allowed = ("bfloat16",) if sparse else tuple(_abi.DTYPES)
    if dtype not in allowed:
        return f"takes q.dtype {' or '.join(allowed)} in {'a sparse call' if sparse else dense}, got {dtype}"
    if call.d_qk not in D_QK:
        return f"takes d_qk {' or '.join(map(str, D_QK))}, got {call.d_qk}"
    if call.d_v != D_V:
        return f"takes d_v {D_V}, got {call.d_v}"
    most = MAX_OFFSET * alignment(form)
    if (size := cache_bytes(call)) > most:
        return f"takes a cache of at most {most} bytes, got {size}"
    return None


def alignment(form: CacheFormat) -> int:
    """The alignment of a cache's rows, in bytes."""
    return math.gcd(16, form.token_bytes)


def cache_bytes(call: Attention) -> int:
    """The size in bytes of the larger cache, as if contiguous. The library checks the strides of caches itself."""
    form, extra = call.kv_format, getattr(call, "extra_kv_cache", None)
    extra_bytes = 0 if extra is None else math.prod(extra.shape) * (1 if form.quantized else 2)
    return max(call.num_slots * call.num_kv_heads * (form.token_bytes or 2 * call.d_qk), extra_bytes)


# ---- selecting the number of splits


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def is_narrow(call: Attention, tile: Tile | None = None) -> bool:
    """Whether the kernel for few rows computes a call with lists."""
    few_heads = call.num_q_heads <= NARROW_ROWS
    return few_heads and _abi.code_of(call.kv_format) in NARROW and (tile is None or tile.narrow)


def splits(call: Attention, jobs: int, rows: int, keys: int, *, narrow: bool = False) -> int:
    """The number of KV splits per job with the lowest cost, assuming that every list has its full length."""
    start_cost, at_once = (NARROW_START_COST, NARROW_SPLITS_PER_BLOCK) if narrow else (START_COST, SPLITS_PER_BLOCK)
    work, blocks = jobs * cdiv(rows, ROWS), max(1, cdiv(keys, BLOCK))
    slots = call.device.num_multiprocessors
    return min(
        range(1, min(MAX_SPLITS, blocks) + 1),
        key=lambda n: cdiv(work * n, slots) * (cdiv(blocks, n) + start_cost) + (n > 1) * (MERGE_COST + n / at_once),
    )


# ---- the native call


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """A cache and its lists as the C ABI takes them, and the integers of the record that describe them."""

    form: CacheFormat
    cache: Any
    lists: Any
    lens: Any
    numbers: dict[str, int]


def keys_of(
    cache: Any, form: CacheFormat, lists: Any, lens: Any, launch: Any, axes: tuple[str, ...] = ("seq", "token")
) -> Keys:
    """The keys of a cache [P, G, K, d_qk], [P, G, 1, bytes] or, if its rows are packed, [s_kv, K, d_qk].

    `lists` are i32 lists of slots, or the page table of a dense call. `axes` names all their dimensions except the last
    one: "seq", "token" or "head". `lens` are i32 [S] or [S, Q], or None.
    """
    cache, lists = aligned(cache, form, launch), launch.packed(lists)
    num_pages, *page_size, _, width = cache.shape
    page_stride, *slot_stride, head_stride, _ = strides_of(cache, launch)
    list_strides = dict(zip(axes, launch.strides(lists)[:-1], strict=True))
    lens_strides = () if lens is None else launch.strides(lens)
    numbers = {
        "num_pages": num_pages,
        "page_size": page_size[0] if page_size else 1,
        "page_stride": page_stride,
        "slot_stride": slot_stride[0] if slot_stride else width,
        "head_stride": head_stride,
        **{f"list_{axis}_stride": list_strides.get(axis, 0) for axis in ("seq", "token", "head")},
        "list_length": lists.shape[-1],
        "lens_seq_stride": lens_strides[0] if lens_strides else 0,
        "lens_token_stride": lens_strides[1] if len(lens_strides) > 1 else 0,
    }
    return Keys(form=form, cache=cache, lists=lists, lens=lens, numbers=numbers)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One call as the C ABI takes it."""

    function: Native
    q: Any  # its rows must begin at multiples of 16 bytes
    q_shape: tuple[int, int, int, int]  # sequences, query tokens per sequence, heads, d_qk
    q_strides: tuple[int, ...]  # the strides of the first three axes
    lse_shape: tuple[int, ...]
    keys: Keys
    causal: bool = False
    schedule: Any = None  # (parts, ...) or None
    extra: Keys | None = None  # a second cache with its own lists


def function_of(call: Attention, tile: Tile) -> Native:
    """The function that computes a call with lists."""
    return (NARROW if is_narrow(call, tile) else LIST_FUNCTIONS)[_abi.code_of(call.kv_format)]


def aligned(cache: Any, form: CacheFormat, launch: Any) -> Any:
    """A cache, copied if its rows are not aligned, or if a page whose scales follow its rows has gaps between rows."""
    if form.planar:
        cache = launch.words(cache, packed_rows=True)
    return launch.aligned(cache, alignment(form))


def strides_of(array: Any, launch: Any) -> tuple[int, ...]:
    """The strides of an array. An axis of size 1, whose stride is arbitrary, gets the stride of a packed row."""
    shape, strides = array.shape, launch.strides(array)
    if 1 not in shape:
        return strides
    return tuple([shape[-1] if size == 1 else step for size, step in zip(shape, strides, strict=True)])


def _numbers(work: Work, schedule: Any, num_splits: int) -> dict[str, int]:
    """The integers of the record."""
    num_seqs, num_q_tokens, num_q_heads, d_qk = work.q_shape
    extra = work.extra.numbers if work.extra else dict.fromkeys(work.keys.numbers, 0) | {"page_size": 1}
    extra = {f"extra_{name}": number for name, number in extra.items()}
    parts = schedule[0].shape[0] if schedule else num_seqs * num_splits
    return {
        "num_seqs": num_seqs,
        "num_q_tokens": num_q_tokens,
        "num_q_heads": num_q_heads,
        "num_kv_heads": work.keys.cache.shape[-2],
        "d_qk": d_qk,
        "dtype": _abi.DTYPES[dtype_name(work.q)],
        "format": _abi.code_of(work.keys.form),
        "extra_format": _abi.code_of((work.extra or work.keys).form),
        "sparse": work.function is not DENSE,
        "causal": work.causal,
        "q_seq_stride": work.q_strides[0],
        "q_token_stride": work.q_strides[1],
        "q_head_stride": work.q_strides[2],
        **work.keys.numbers,
        **{name: number for name, number in extra.items() if name in _abi.Latent.NUMBERS},  # no head strides
        "num_parts": parts,
        "num_splits": num_splits,
        "num_partials": 2 * parts if schedule else 0 if num_splits == 1 else parts,
    }


def run(call: Attention, work: Work, tile: Tile, launch: Any, *, max_logits: bool = False) -> dict[str, Any]:
    """Enqueue the kernels. Returns the results by name."""
    num_seqs, num_q_tokens, num_q_heads, _ = work.q_shape
    schedule, keys, extra = work.schedule, work.keys, work.extra
    if schedule and not (num_seqs and schedule[0].shape[0]):  # without sequences or without parts
        schedule = None
    numbers = _numbers(work, schedule, 1 if schedule else tile.num_splits)
    partials = (numbers["num_partials"], num_q_tokens, num_q_heads)
    lse, partial = (work.lse_shape, "float32"), (partials, "float32")
    split = partials[0] > 0
    return launch.native(
        work.function,
        {
            "q": work.q,
            "kv": keys.cache,
            "lists": keys.lists,
            "lens": keys.lens,
            "sinks": None if call.sinks is None else launch.packed(call.sinks),
            "parts": launch.contiguous(schedule[0]) if schedule else None,
            "extra_kv": extra and extra.cache,
            "extra_lists": extra and extra.lists,
            "extra_lens": extra and extra.lens,
        },
        {
            "out": (call.out_shape, call.q.dtype),
            "lse": lse,
            "max_logits": lse if max_logits else None,
            "partial_out": ((*partials, D_V), "float32") if split else None,
            "partial_lse": partial if split else None,
            "partial_max": partial if split and max_logits else None,
        },
        {**numbers, "sm_scale": call.scale},
    )
