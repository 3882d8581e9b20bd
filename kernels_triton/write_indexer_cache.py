"""The quantisation of the indexer's keys in Triton: into pages of bytes or, for `quantize_indexer_keys`, into arrays.

Scales are stored byte by byte, because a page may begin at any byte. If the strides are multiples of the word size, the
compiler merges the byte stores.
"""

from typing import Any

import triton
import triton.language as tl

from ragged_attention.calls import WriteIndexerCache
from ragged_attention.kernels_triton._formats import encode_float8
from ragged_attention.kernels_triton._sequences import VARYING, PageTable, count_sequences
from ragged_attention.kernels_triton._splits import Batch
from ragged_attention.kernels_triton._tiles import cdiv, launchable, next_power_of_2
from ragged_attention.kernels_triton.write_kv_pages import Tile as Tile
from ragged_attention.kernels_triton.write_kv_pages import place_arguments, slots_from_tables
from ragged_attention.kernels_triton.write_mla_cache import group_scales, store_bytes

FEATURES = frozenset({"slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "power_of_two"})


def why_not(call: WriteIndexerCache) -> str | None:
    return launchable(call, write_keys_kernel)


def heuristic(call: WriteIndexerCache) -> Tile:
    return tile_for(*call.k.shape)


def tile_for(num_tokens: int, head_dim: int) -> Tile:
    """About two thousand elements per program."""
    return Tile(block_t=max(1, min(2048 // next_power_of_2(head_dim), next_power_of_2(num_tokens))))


@triton.jit
def quantized_rows(k_ptr, token, token_stride, live, POWER_OF_TWO: tl.constexpr, D: tl.constexpr,
                   D_PAD: tl.constexpr):  # fmt: skip
    """(e4m3 codes [rows, D_PAD], scales) of rows of keys. Scales are powers of two if POWER_OF_TWO."""
    d = tl.arange(0, D_PAD)
    mask = live[:, None] & (d < D)[None, :]
    rows = k_ptr + token * token_stride
    values = tl.load(rows[:, None] + d[None, :], mask=mask, other=0).to(tl.float32)
    scale = group_scales(values, POWER_OF_TWO)
    scaled = tl.div_rn(values, scale[:, None] + tl.zeros_like(values))
    code = encode_float8(scaled, 3, 7, 0x7E)
    return tl.where(scaled == scaled, code, 0x7F).to(tl.uint8), scale  # one code for NaNs: their sign is not portable


@triton.jit(do_not_specialize=VARYING)
def write_keys_kernel(
    k_ptr, slots_ptr, page_indices_ptr, kv_lens_ptr, cu_q_lens_ptr, num_seqs_ptr, given_cache_ptr, cache_ptr,
    num_tokens, num_slots, max_num_seqs, capacity, table_stride, search_steps, slots_stride, k_stride, page_stride,
    HAS_SLOTS: tl.constexpr, HAS_NUM_SEQS: tl.constexpr, POWER_OF_TWO: tl.constexpr, PAGE_SIZE: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Write rows to their slots. A page has the codes of all its keys, followed by their scales."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + token * slots_stride, mask=token < num_tokens, other=-1).to(tl.int64)
    else:
        num_seqs = count_sequences(num_seqs_ptr, max_num_seqs, HAS_NUM_SEQS)
        batch = Batch(cu_q_lens_ptr, kv_lens_ptr, num_seqs, max_num_seqs, num_tokens, capacity)
        table = PageTable(page_indices_ptr, table_stride, num_slots // PAGE_SIZE)
        slot = slots_from_tables(token.to(tl.int32), batch, table, search_steps, PAGE_SIZE)
    live = (slot >= 0) & (slot < num_slots)
    slot = tl.where(live, slot, 0)
    code, scale = quantized_rows(k_ptr, token, k_stride, live, POWER_OF_TWO, D, D_PAD)
    page = cache_ptr + slot // PAGE_SIZE * page_stride
    offset = slot % PAGE_SIZE
    d = tl.arange(0, D_PAD)
    tl.store((page + offset * D)[:, None] + d[None, :], code, mask=live[:, None] & (d < D)[None, :])
    store_bytes(page + PAGE_SIZE * D + offset * 4, scale.to(tl.uint32, bitcast=True)[:, None], live, 4)


@triton.jit(do_not_specialize=VARYING)
def quantize_keys_kernel(
    k_ptr, codes_ptr, scales_ptr, num_tokens, k_stride,
    POWER_OF_TWO: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Write the rows' codes and scales to arrays."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < num_tokens
    code, scale = quantized_rows(k_ptr, token, k_stride, live, POWER_OF_TWO, D, D_PAD)
    d = tl.arange(0, D_PAD)
    tl.store((codes_ptr + token * D)[:, None] + d[None, :], code, mask=live[:, None] & (d < D)[None, :])
    tl.store(scales_ptr + token, scale, mask=live)


def arguments_of(k: Any, power_of_two: bool, tile: Tile, launch: Any) -> dict[str, Any]:
    """The arguments that `write_keys_kernel` and `quantize_keys_kernel` share."""
    num_tokens, head_dim = k.shape
    return {
        "num_warps": tile.num_warps,
        "num_stages": 1,
        "num_tokens": num_tokens,
        "k_stride": launch.strides(k)[0],
        "POWER_OF_TWO": power_of_two,
        "D": head_dim,
        "D_PAD": next_power_of_2(head_dim),
        "BLOCK_T": tile.block_t,
    }


def run(call: WriteIndexerCache, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernel; returns the cache."""
    k = launch.packed(call.k)
    places, numbers = place_arguments(call, launch)
    (written,) = launch(
        write_keys_kernel,
        (cdiv(k.shape[0], tile.block_t),),
        (k, *places, call.cache),
        [],
        inplace=(6,),
        num_slots=call.num_slots,
        **numbers,
        slots_stride=launch.strides(places[0])[0],
        page_stride=launch.strides(call.cache)[0],
        HAS_SLOTS=call.slot_mapping is not None,
        HAS_NUM_SEQS=call.num_seqs is not None,
        PAGE_SIZE=call.page_size,
        **arguments_of(k, call.power_of_two, tile, launch),
    )
    return written
