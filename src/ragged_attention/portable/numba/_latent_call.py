"""Calls of attention over latents in the terms of `_latent`'s record."""

import dataclasses
from typing import Any

from ragged_attention.calls import CacheFormat, MlaDecode, SparseMlaPrefill, dtype_name
from ragged_attention.errors import InvalidInput
from ragged_attention.portable.numba import _latent
from ragged_attention.portable.numba._formats import CODES
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._latent_rows import code_of
from ragged_attention.portable.numba._records import bits_of
from ragged_attention.portable.numba._splits import expect_splits

KERNEL = Kernel("latent_attention", _latent.FIELDS, _latent.plan, _latent.work)
OWN_SPLITS = 4  # of a job of decoding, where nothing depends on the others
ROWS = 32  # of a tile: with rows this wide, what a core's second cache holds beside a tile of keys


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
        num_splits: parts at most of a job's keys, by their number alone; 0: by the share that they are of all work.
    """

    num_splits: int = 0

    def __post_init__(self) -> None:
        Blocks.__post_init__(self)
        expect_splits(self.num_splits)


def heuristic(call: MlaDecode | SparseMlaPrefill) -> Tile:
    del call
    return Tile(block_rows=ROWS, block_kv=32)


def invariant_tile(call: MlaDecode | SparseMlaPrefill) -> Tile:
    """No size depends on the batch. Of a prefill there are enough queries without splits."""
    return dataclasses.replace(heuristic(call), num_splits=OWN_SPLITS if call.OPERATION == "mla_decode" else 1)


def cache_of(array: Any, layout: CacheFormat | None, launch: Any) -> Any:
    """A cache whose rows the kernel can address, or packed rows as pages of one row."""
    return array if layout is None else launch.words(array, packed_rows=layout.planar)


def cache_numbers(prefix: str, array: Any, launch: Any) -> dict[str, int]:
    """The numbers of a cache [P, G, K, width], or of packed rows [s_kv, K, width]."""
    steps = launch.strides(array)
    paged = len(array.shape) == 4
    found = (array.shape[0], array.shape[1] if paged else 1, steps[0], steps[1] if paged else 0)
    return {prefix + name: number for name, number in zip(_latent.CACHE, found, strict=True)}


def run(
    call: MlaDecode | SparseMlaPrefill, tile: Tile, launch: Any, *, q_shape: tuple[int, int, int, int],
    q_strides: tuple[int, int, int], lists: Any, list_strides: tuple[int, int, int], length: int, lens: Any,
    lse_shape: tuple[int, ...], lse_strides: tuple[int, int, int], q: Any, cache: Any, sparse: bool,
    causal: bool = False, extra_cache: Any = None, extra_lists: Any = None, extra_lens: Any = None,
    max_logits: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Enqueue the kernel; `q_shape` is [S, Q, H, d_qk], strides are those of sequence, token and head."""
    cache, extra_layout = cache_of(cache, call.layout, launch), call.layout
    if extra_cache is not None:
        extra_layout = call.extra_layout  # type: ignore[union-attr]
        extra_cache = cache_of(extra_cache, extra_layout, launch)
    extra_lists = None if extra_lists is None else launch.packed(extra_lists)
    extra_strides = (0, 0) if extra_lists is None else launch.strides(extra_lists)[:2]

    def steps_of(lens: Any) -> tuple[int, int]:
        steps = (0, 0) if lens is None else (*launch.strides(lens), 0)
        return steps[0], steps[1]

    lse = (lse_shape, "float32")
    return launch.native(
        KERNEL,
        {
            "q": q,
            "kv": cache,
            "extra_kv": extra_cache,
            "lists": lists,
            "extra_lists": extra_lists,
            "lens": lens,
            "extra_lens": extra_lens,
            "sinks": None if call.sinks is None else launch.contiguous(call.sinks),
        },
        {"out": (call.out_shape, call.q.dtype), "lse": lse, "max_logits": lse if max_logits else None},
        {
            **dict(zip(("num_seqs", "num_q_tokens", "num_q_heads", "d_qk"), q_shape, strict=True)),
            "num_kv_heads": call.num_kv_heads,
            "d_v": call.d_v,
            "sparse": sparse,
            "causal": causal,
            "scale": bits_of(call.scale),
            "q_format": CODES[dtype_name(call.q)],
            **dict(zip(("q_seq_stride", "q_token_stride", "q_head_stride"), q_strides, strict=True)),
            **dict(zip(("lse_seq_stride", "lse_token_stride", "lse_head_stride"), lse_strides, strict=True)),
            "layout": code_of(call.layout),
            "extra_layout": code_of(extra_layout),
            "cache_format": CODES[dtype_name(cache)] if call.format == "plain" else CODES["int8"],
            "head_stride": launch.strides(cache)[-2],
            **cache_numbers("", cache, launch),
            **cache_numbers("extra_", cache if extra_cache is None else extra_cache, launch),
            "length": length,
            **dict(zip(("list_seq_stride", "list_token_stride", "list_head_stride"), list_strides, strict=True)),
            **dict(zip(("lens_seq_stride", "lens_token_stride"), steps_of(lens), strict=True)),
            "extra_length": 0 if extra_lists is None else extra_lists.shape[-1],
            **dict(zip(("extra_list_seq_stride", "extra_list_token_stride"), extra_strides, strict=True)),
            **dict(zip(("extra_lens_seq_stride", "extra_lens_token_stride"), steps_of(extra_lens), strict=True)),
            "block_rows": tile.block_rows,
            "block_kv": tile.block_kv,
            "num_splits": tile.num_splits,
            "num_threads": launch.num_threads,
        },
    )
