"""How calls of attention over latents become records of `_latent`'s kernel."""

import dataclasses
from typing import Any

from ragged_attention.calls import CacheFormat, MlaDecode, RaggedMlaAttention, SparseMlaPrefill, dtype_name
from ragged_attention.portable.numba import _latent
from ragged_attention.portable.numba._call import expect_block
from ragged_attention.portable.numba._formats import CODES
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._latent_rows import element_bytes, rows_numbers
from ragged_attention.portable.numba._scales import numbers_of
from ragged_attention.portable.numba._splits import expect_splits
from ragged_attention.portable.numba._vectors import LANES

KERNEL = Kernel("latent_attention", _latent.FIELDS, _latent.plan, _latent.work)
LatentCall = RaggedMlaAttention | MlaDecode | SparseMlaPrefill
SPLITS_PER_TOKEN = 4  # in batch-invariant mode
SIZE = 4 * LANES  # rows and keys of a tile: they fit the second-level cache, which is larger where vectors are larger


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """The tunable parameters of the gradient.

    Args:
        block_rows: rows of queries that a program takes.
        block_kv: keys converted to float32 at a time, a multiple of 8.
    """

    block_rows: int
    block_kv: int

    def __post_init__(self) -> None:
        expect_block("block_rows", self.block_rows)
        expect_block("block_kv", self.block_kv, 8)


@dataclasses.dataclass(frozen=True, slots=True)
class Tile(Blocks):
    """The tunable parameters.

    Args:
        num_splits: the most splits of the keys of one query token; several tokens that share keys have fewer,
            depending on their number alone. 0: a job has splits according to its share of all work.
    """

    num_splits: int = 0

    def __post_init__(self) -> None:
        Blocks.__post_init__(self)
        expect_splits(self.num_splits)


def heuristic(call: LatentCall) -> Tile:
    del call
    return Tile(block_rows=SIZE, block_kv=SIZE)


def invariant_tile(call: LatentCall) -> Tile:
    """A tile that does not depend on the batch. Sparse prefill has enough queries to need no splits."""
    num_splits = 1 if call.OPERATION == "sparse_mla_prefill" else SPLITS_PER_TOKEN
    return dataclasses.replace(heuristic(call), num_splits=num_splits)


def cache_of(array: Any, form: CacheFormat, launch: Any) -> Any:
    """A cache whose rows the kernel can address."""
    return launch.words(array, packed_rows=form.planar) if form.quantized else array


def cache_numbers(array: Any, form: CacheFormat, width: int, launch: Any, prefix: str = "") -> dict[str, int]:
    """The numbers of a cache [P, G, K, width], or of packed rows [s_kv, K, width], which count as pages of one row."""
    steps = launch.strides(array)
    paged = len(array.shape) == 4
    num_pages, page_size = array.shape[0], array.shape[1] if paged else 1
    rows = rows_numbers(
        prefix or "kv_", form, width=width, page_size=page_size, page_stride=steps[0],
        slot_stride=steps[1] if paged else 0,
    )  # fmt: skip
    return {f"{prefix}num_pages": num_pages, f"{prefix}page_size": page_size, **rows}


def steps_of(lens: Any, launch: Any) -> tuple[int, int]:
    """The strides of sequence and token of lengths [S] or [S, Q]; 0 if there are no lengths."""
    steps = (0, 0) if lens is None else (*launch.strides(lens), 0)
    return steps[0], steps[1]


def named(strides: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """The numbers of strides, given for each array in the order sequence, token, head."""
    return {
        f"{name}_{axis}_stride": step
        for name, steps in strides.items()
        for axis, step in zip(("seq", "token", "head")[: len(steps)], steps, strict=True)
    }


def run(
    call: LatentCall, tile: Tile, launch: Any, *, cache: Any, lse_shape: Any,
    operands: dict[str, Any], numbers: dict[str, Any], extra_cache: Any = None, max_logits: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Enqueue the kernel; `operands` and `numbers` are those that only this operation has."""
    cache = cache_of(cache, call.kv_format, launch)
    cache_fields = cache_numbers(cache, call.kv_format, call.d_qk, launch)
    if isinstance(call, MlaDecode) and extra_cache is not None:
        extra_cache = cache_of(extra_cache, call.extra_kv_format, launch)
        cache_fields |= cache_numbers(extra_cache, call.extra_kv_format, call.d_qk, launch, "extra_")
    kv_scale, scale_numbers = numbers_of("kv_scale", getattr(call, "kv_scale", None), launch)
    lse = None if lse_shape is None else (lse_shape, "float32")
    return KERNEL.launch(
        launch,
        tile,
        operands
        | {
            "kv": cache,
            "extra_kv": extra_cache,
            "sinks": None if call.sinks is None else launch.contiguous(call.sinks),
            "kv_scale": kv_scale,
        },
        {"out": (call.out_shape, call.result_dtype), "lse": lse, "max_logits": lse if max_logits else None},
        {
            **numbers, **cache_fields, **scale_numbers,
            "num_q_heads": call.num_q_heads, "num_kv_heads": call.num_kv_heads,
            "head_dim": call.d_qk, "v_head_dim": call.d_v, "scale": call.scale, "q_format": CODES[dtype_name(call.q)],
            "out_format": CODES[call.out_dtype or dtype_name(call.q)],
            "head_step": element_bytes(call.kv_format) * launch.strides(cache)[-2],
        },
    )  # fmt: skip
