"""Calls of attention over latents in the terms of `_latent`'s record."""

import dataclasses
from typing import Any

from ragged_attention.calls import CacheFormat, MlaDecode, RaggedMlaAttention, SparseMlaPrefill, dtype_name
from ragged_attention.errors import InvalidInput
from ragged_attention.portable.numba import _latent
from ragged_attention.portable.numba._formats import CODES
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._latent_rows import code_of
from ragged_attention.portable.numba._records import bits_of
from ragged_attention.portable.numba._scales import numbers_of
from ragged_attention.portable.numba._splits import expect_splits
from ragged_attention.portable.numba._vectors import LANES

KERNEL = Kernel("latent_attention", _latent.FIELDS, _latent.plan, _latent.work)
LatentCall = RaggedMlaAttention | MlaDecode | SparseMlaPrefill
OWN_SPLITS = 4  # of a job of one query token, where nothing depends on the others
SIZE = 4 * LANES  # rows of a tile, and its keys: what second caches hold, which are larger where vectors are


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """What may be tuned of the gradient.

    Args:
        block_rows: rows of queries that a program takes.
        block_kv: keys converted to float32 at a time, a multiple of 8.
    """

    block_rows: int
    block_kv: int

    def __post_init__(self) -> None:
        if not isinstance(self.block_rows, int) or not 1 <= self.block_rows <= 1024:
            raise InvalidInput(f"expected block_rows from 1 to 1024, got {self.block_rows!r}")
        if not isinstance(self.block_kv, int) or self.block_kv % 8 or not 8 <= self.block_kv <= 1024:
            raise InvalidInput(f"expected block_kv to be a multiple of 8 from 8 to 1024, got {self.block_kv!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class Tile(Blocks):
    """What may be tuned.

    Args:
        num_splits: parts at most of the keys of a query token, fewer where several tokens share them, by their number
            alone; 0: by the share that they are of all work.
    """

    num_splits: int = 0

    def __post_init__(self) -> None:
        Blocks.__post_init__(self)
        expect_splits(self.num_splits)


def heuristic(call: LatentCall) -> Tile:
    del call
    return Tile(block_rows=SIZE, block_kv=SIZE)


def invariant_tile(call: LatentCall) -> Tile:
    """No size depends on the batch. Of a sparse prefill there are enough queries without splits."""
    return dataclasses.replace(heuristic(call), num_splits=1 if call.OPERATION == "sparse_mla_prefill" else OWN_SPLITS)


def cache_of(array: Any, layout: CacheFormat | None, launch: Any) -> Any:
    """A cache whose rows the kernel can address, or packed rows as pages of one row."""
    return array if layout is None else launch.words(array, packed_rows=layout.planar)


def cache_numbers(prefix: str, array: Any, launch: Any) -> dict[str, int]:
    """The numbers of a cache [P, G, K, width], or of packed rows [s_kv, K, width]."""
    steps = launch.strides(array)
    paged = len(array.shape) == 4
    found = (array.shape[0], array.shape[1] if paged else 1, steps[0], steps[1] if paged else 0)
    return {prefix + name: number for name, number in zip(_latent.CACHE, found, strict=True)}


def steps_of(lens: Any, launch: Any) -> tuple[int, int]:
    """The strides of sequence and token of lengths [S] or [S, Q], 0 without any."""
    steps = (0, 0) if lens is None else (*launch.strides(lens), 0)
    return steps[0], steps[1]


def named(strides: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """The numbers of strides, which are those of sequence, token and head as far as they are given."""
    return {
        f"{name}_{axis}_stride": step
        for name, steps in strides.items()
        for axis, step in zip(("seq", "token", "head")[: len(steps)], steps, strict=True)
    }


def run(
    call: LatentCall, tile: Tile, launch: Any, *, cache: Any, lse_shape: Any,
    operands: dict[str, Any], numbers: dict[str, int], extra_cache: Any = None, max_logits: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Enqueue the kernel; `operands` and `numbers` are what only the operation knows, others than these are absent."""
    cache, extra_layout = cache_of(cache, call.layout, launch), call.layout
    if extra_cache is not None:
        extra_layout = call.extra_layout  # type: ignore[union-attr]
        extra_cache = cache_of(extra_cache, extra_layout, launch)
    kv_scale, scale_numbers = numbers_of("kv_scale", getattr(call, "kv_scale", None), launch)
    lse = None if lse_shape is None else (lse_shape, "float32")
    return launch.native(
        KERNEL,
        dict.fromkeys(KERNEL.fields.operands)
        | operands
        | {
            "kv": cache,
            "extra_kv": extra_cache,
            "sinks": None if call.sinks is None else launch.contiguous(call.sinks),
            "kv_scale": kv_scale,
        },
        {"out": (call.out_shape, call.result_dtype), "lse": lse, "max_logits": lse if max_logits else None},
        dict.fromkeys(KERNEL.fields.numbers, 0)
        | numbers
        | {
            "num_q_heads": call.num_q_heads,
            "num_kv_heads": call.num_kv_heads,
            "d_qk": call.d_qk,
            "d_v": call.d_v,
            "scale": bits_of(call.scale),
            **scale_numbers,
            "q_format": CODES[dtype_name(call.q)],
            "out_format": CODES[call.out_dtype or dtype_name(call.q)],
            "layout": code_of(call.layout),
            "extra_layout": code_of(extra_layout),
            "cache_format": CODES[dtype_name(cache)] if call.format == "plain" else CODES["int8"],
            "head_stride": launch.strides(cache)[-2],
            **cache_numbers("", cache, launch),
            **cache_numbers("extra_", cache if extra_cache is None else extra_cache, launch),
            "block_rows": tile.block_rows,
            "block_kv": tile.block_kv,
            "num_splits": tile.num_splits,
            "num_threads": launch.num_threads,
        },
    )
