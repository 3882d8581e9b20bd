"""Tile sizes for attention over pages. For each GPU and head size, these compile without spills.

`make compile-matrix` compiles every one of them.
"""

from typing import Any

from ragged_attention.calls import dtype_name
from ragged_attention.kernels_triton._formats import decodes_by_integers
from ragged_attention.kernels_triton._splits import FEW_TOKENS
from ragged_attention.kernels_triton._tiles import (
    OLDER_COMPILER,
    WGMMA,
    cdiv,
    fit,
    item_size,
    next_power_of_2,
    on_cuda_cores,
)


def sizes(call: Any, split_block_q: int, rows: int | None = None) -> dict[str, int]:
    """The fields of a `Tile` except `num_splits`, for `rows` rows per KV head, or for any number if `rows` is None."""
    block_q, block_kv, edge_kv, num_warps, num_stages = tile_sizes(call)
    if rows is not None:
        block_q = min(block_q, max(16, next_power_of_2(rows)))
    if block_q < 64 and not on_cuda_cores(call):  # then single warps compute the products
        block_kv = min(block_kv, 64)
        if call.device.arch.startswith("sm_") and padded_width(call) <= 128:
            num_warps = 4
    block_kv, num_stages = fit_pages(call, block_q, block_kv, num_stages)
    split_block_kv, split_num_warps, split_num_stages = split_sizes(call, split_block_q)
    split_block_kv, split_num_stages = fit_pages(call, split_block_q, split_block_kv, split_num_stages)
    return {
        "block_q": block_q,
        "block_kv": block_kv,
        "edge_kv": edge_kv,
        "num_warps": num_warps,
        "num_stages": num_stages,
        "split_block_q": split_block_q,
        "split_block_kv": split_block_kv,
        "split_num_warps": split_num_warps,
        "split_num_stages": split_num_stages,
    }


def padded_width(call: Any) -> int:
    return next_power_of_2(max(call.head_dim, call.v_head_dim))


def tile_sizes(call: Any) -> tuple[int, int, int, int, int]:
    """(block_q, block_kv, edge_kv, num_warps, num_stages) of the tile kernel."""
    arch, width = call.device.arch, padded_width(call)
    if on_cuda_cores(call):
        return 16, 16, 16, 4 if arch in ("sm_80", "sm_86") else 8, 3 if arch.startswith("sm_") else 2
    if width > 256:
        if not arch.startswith("sm_"):
            return 32, 16, 16, 4, 2 if arch == "gfx950" else 1
        if arch == "sm_90" and leaves_registers(call):
            return 64, 32, 16, 8, 3 if dtype_name(call.q) == "bfloat16" and call.head_dim == width else 2
        return (32, 64, 32, 8, 2) if arch == "sm_90" else (32, 32, 32, 8, 2)
    if call.draft_mask is not None:  # the addresses of mask entries take registers
        return 32, 32, 16, 4, 3 if arch.startswith("sm_") else 2
    if width > 128:
        if arch == "sm_90":
            return 128, 32, 16, 8, 3
        return (64, 32, 32, 8, 2) if arch in WGMMA else (32, 32, 32, 4, 2)
    if arch == "sm_90":
        powers = all(n & (n - 1) == 0 for n in (call.group, call.page_size))
        windowed = call.sliding_window is not None and width > 64
        if call.kv_format.eight_bit or not powers or windowed:  # decoding, division and masks take registers
            return 128, 64, 32, 8, 3
        keys = 64 if call.page_size in (1, 32, 64) else 128
        return (256, 64, 32, 8, 3) if width <= 64 else (128, keys, 64, 8, 3)
    if call.device.platform == "cpu":
        return 128, 64, 32, 8, 3
    if arch in WGMMA:
        return 128, 32, 32, 8, 3
    if not arch.startswith("sm_"):
        return 128, 32, 32, 4, 2
    one_product = dtype_name(call.q) == call.cache_dtype == "float16"  # float16 needs no second weight term
    edge = 32 if call.kv_format.eight_bit else 64  # decoding takes registers
    return (64, 32, 32, 4, 3) if one_product else (64, 64, edge, 8, 3)


def leaves_registers(call: Any) -> bool:
    """Whether registers suffice for 64 rows of 512 columns.

    The accumulator alone takes half of them, so this holds only for loops that do little more than matrix products.
    """
    plain = not call.kv_format.eight_bit and call.soft_cap is None and call.draft_mask is None
    return plain and call.group & (call.group - 1) == 0 and not OLDER_COMPILER


def split_sizes(call: Any, rows: int) -> tuple[int, int, int]:
    """(split_block_kv, split_num_warps, split_num_stages) of the split kernel."""
    arch, width = call.device.arch, padded_width(call)
    if not arch.startswith("sm_"):
        return split_sizes_elsewhere(call, rows)
    if on_cuda_cores(call):
        return 16, max(8, rows // 8), 3
    if width > 256:
        return 32, 8, 3
    if width > 128 or call.draft_mask is not None:
        return 32, 4, 3
    # If single warps compute the products, blocks of 32 keys let more programs run at once. But 32 keys spill with a
    # window, with integer decoding of e4m3 and, on sm_80 and sm_86, if the group or page size is not a power of two.
    spills = call.sliding_window is not None or (decodes_by_integers(call) and not OLDER_COMPILER)
    wide = arch in WGMMA and not (OLDER_COMPILER and width <= 64)
    return 64 if wide or spills else 32, 4, 3


def split_sizes_elsewhere(call: Any, rows: int) -> tuple[int, int, int]:
    """`split_sizes` for AMD GPUs and unknown devices."""
    width = padded_width(call)
    if on_cuda_cores(call):
        return 16, 4 * max(1, rows // 32), 2
    if width > 256:
        return 16, 4, 2
    if call.draft_mask is not None:
        return 32, 4, 1  # Triton 3.6 cannot compile two stages
    return (32, 4, 3) if width > 128 else (64, 4, 2)


def fit_pages(call: Any, rows: int, keys: int, stages: int) -> tuple[int, int]:
    """Keys and stages, reduced until the K and V tiles, queries and weights fit the device's shared memory."""
    width = next_power_of_2(call.head_dim)
    both = width + next_power_of_2(call.v_head_dim)

    # A pipeline of n stages keeps n - 1 blocks in shared memory. With wgmma it keeps n, except in loops over WIDE rows,
    # which look up a block's pages in the iteration that uses it (`_pages.attend`). wgmma reads weights from registers,
    # so they take no shared memory.
    wide = call.device.arch in WGMMA and rows >= 64
    more = 0 if wide else 1
    fewer = 1 if width >= 512 else more

    def size(keys: int, stages: int) -> int:
        return (max(stages - fewer, 1) * keys * both + rows * (width + more * keys)) * item_size(call.q)

    return fit(call, keys, stages, size, good_keys=32)


def split_rows(call: Any) -> int:
    """The maximum rows of a short sequence.

    They are the rows of `max_q_len` tokens or, if it is unknown, of the average number of tokens. If that exceeds 8,
    they are the rows of FEW_TOKENS tokens.
    """
    tokens = cdiv(call.num_tokens, max(call.max_num_seqs, 1)) if call.max_q_len is None else call.max_q_len
    return most_split_rows(call, tokens if tokens <= 8 else FEW_TOKENS)


def most_split_rows(call: Any, tokens: int) -> int:
    return min(max(16, next_power_of_2(call.group * tokens)), 64 if call.group <= 64 else 128)
