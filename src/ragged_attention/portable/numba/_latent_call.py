"""Turns attention calls over latents into records of `_latent`'s kernel."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ragged_attention.calls import CacheFormat, MlaDecode, RaggedMlaAttention, SparseMlaPrefill, dtype_name
from ragged_attention.portable.numba import _latent
from ragged_attention.portable.numba._call import expect_tile, numbers_of_products
from ragged_attention.portable.numba._formats import CODES, FLOAT32
from ragged_attention.portable.numba._kernels import Kernel
from ragged_attention.portable.numba._latent_rows import rows_numbers
from ragged_attention.portable.numba._records import stride_names
from ragged_attention.portable.numba._vectors import LANES

KERNEL = Kernel("latent_attention", _latent.FIELDS, _latent.plan, _latent.work)
LatentCall = RaggedMlaAttention | MlaDecode | SparseMlaPrefill
SPLITS_PER_TOKEN = 4  # in batch-invariant mode
SIZE = 128 if LANES == 16 else 32  # rows and keys in a tile, which should fit the L2 cache


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """The tunable parameters of the gradient.

    Args:
        block_rows: query rows in a tile.
        block_kv: keys in a tile, a multiple of 8; the gradient's tile has room for at least `block_rows` keys.
    """

    block_rows: int
    block_kv: int
    __post_init__ = expect_tile


@dataclasses.dataclass(frozen=True, slots=True)
class Tile(Blocks):
    """The tunable parameters of `_latent`'s kernel.

    Args:
        num_splits: rows of a job with n query tokens have at most max(num_splits // n, 1) KV splits, whatever else the
            batch holds. 0: blocks of rows are split in proportion to their work.
    """

    num_splits: int = 0


def heuristic(call: LatentCall) -> Tile:
    del call
    return Tile(block_rows=SIZE, block_kv=SIZE)


def invariant_tile(call: LatentCall) -> Tile:
    """A tile that does not depend on the batch. Sparse prefill has enough queries to need no splits."""
    num_splits = 1 if call.OPERATION == "sparse_mla_prefill" else SPLITS_PER_TOKEN
    return dataclasses.replace(heuristic(call), num_splits=num_splits)


def cache_of(array: Any, form: CacheFormat, launch: Any) -> Any:
    """The cache, copied if it is quantised and its rows are not laid out as the kernels expect."""
    return launch.words(array, packed_rows=form.planar) if form.quantized else array


def is_exact(numbers: Mapping[str, int]) -> bool:
    """Whether bfloat16 represents queries and keys exactly, in the form in which they are multiplied.

    It does not if queries are multiplied by two scales, or if keys are products of a code and a float32 scale.
    """
    wide = [numbers.get(f"{of}_group") and numbers[f"{of}_scales"] == FLOAT32 for of in ("kv", "extra")]
    return not (numbers.get("scales_rope") or wide[0] or (numbers.get("extra_length") and wide[1]))


def run(
    call: LatentCall, tile: Tile, launch: Any, cache: Any, operands: dict[str, Any], numbers: dict[str, Any], *,
    axes: dict[str, str], lse_strides: tuple[int, int, int], results: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Launch the kernel; `operands`, `numbers` and `axes` are those in which the latent operations differ.

    `lse_strides` are the strides of sequence, query token and head. Returns the results by name.
    """
    cache = cache_of(cache, call.kv_format, launch)
    extra_cache = operands.get("extra_kv")
    if isinstance(call, MlaDecode) and extra_cache is not None:
        extra_cache = cache_of(extra_cache, call.extra_kv_format, launch)
        numbers |= rows_numbers("extra_", call.extra_kv_format, extra_cache.shape, launch.strides(extra_cache))
    numbers = {
        **numbers, **rows_numbers("kv_", call.kv_format, cache.shape, launch.strides(cache)),
        **dict(zip(stride_names("lse", "seq token head"), lse_strides, strict=True)),
        "head_dim": call.d_qk, "v_head_dim": call.d_v, "out_format": CODES[call.out_dtype or dtype_name(call.q)],
    }  # fmt: skip
    products = numbers_of_products(call.q, (numbers["kv_codes"],), call.d_qk, call.d_v, exact=is_exact(numbers))
    operands |= {"kv": cache, "extra_kv": extra_cache}
    return KERNEL.launch(launch, call, tile, operands, numbers | products, axes=axes, results=results)
