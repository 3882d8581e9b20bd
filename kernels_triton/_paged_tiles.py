"""Tile sizes for attention over pages. For each GPU and head size, kernels compile without spills.

`make compile-matrix` checks this.
"""

from typing import Any

from ragged_attention.calls import dtype_name
from ragged_attention.kernels_triton._bias import is_biased
from ragged_attention.kernels_triton._formats import decodes_by_integers
from ragged_attention.kernels_triton._mask import hides_first_keys
from ragged_attention.kernels_triton._max_logits import keeps_largest
from ragged_attention.kernels_triton._tiles import (
    OLDER_COMPILER,
    WGMMA,
    Sizes,
    fit,
    item_size,
    next_power_of_2,
    on_cuda_cores,
)


def tile_fields(call: Any, short_tokens: int, rows: int | None = None) -> dict[str, int]:
    """The fields of a `Tile` except `num_splits`, for `rows` rows per KV head, or for any number if `rows` is None."""
    tile = tile_sizes(call)
    if rows is not None:
        tile = tile._replace(rows=min(tile.rows, max(16, next_power_of_2(rows))))
    if tile.rows < 64 and not on_cuda_cores(call):  # without wgmma, each matrix instruction has one warp
        narrow = call.device.arch.startswith("sm_") and padded_width(call) <= 128
        tile = tile._replace(keys=min(tile.keys, 64), warps=4 if narrow else tile.warps)
    most = 32 if looks_up(call) else 64 if call.group <= 64 else 128
    split = split_sizes(call, rows_of_short(call, short_tokens, most))
    return fitting_pages(call, tile).fields("block_q") | fitting_pages(call, split).fields("block_q", "split_")


def rows_of_short(call: Any, tokens: int, most: int) -> int:
    """The number of rows per KV head of a short sequence with this many query tokens, at most `most`."""
    return min(max(16, next_power_of_2(call.group * tokens)), most)


def segment_fields(call: Any, short_tokens: int) -> dict[str, int]:
    """The fields of a `Tile` with segments.

    The tile kernel and the split kernel have equal sizes, with 64 rows for wgmma if they fit. A program has two softmax
    states, that of a segment and that of all segments before it, so it needs more warps. Of these fields, only
    `split_block_q` depends on `short_tokens`. No field depends on the pages.
    """
    width, nvidia = padded_width(call), call.device.arch.startswith("sm_")
    rows, changed = 64, looks_up_always(call)
    crowded = OLDER_COMPILER and nvidia and call.device.arch not in WGMMA and width > 64
    if on_cuda_cores(call) or width > 256 or (OLDER_COMPILER and (width > 128 or call.draft_mask is not None)):
        rows = 16
    elif changed or has_scales(call) or hides_first_keys(call) or crowded or width > 128:
        rows = 32
    sizes = split_sizes(call, rows, looked_up=changed)
    if nvidia:
        most = 16 if width > 256 else 64 if width <= 64 and call.device.arch in WGMMA else 32
        keys = sizes.keys if decodes(call) else min(sizes.keys, most)
        stages = 1 if on_cuda_cores(call) else sizes.stages  # with more stages, ptxas spills a few bytes
        sizes = sizes._replace(keys=keys, warps=max(sizes.warps, 8), stages=stages)
    elif hides_first_keys(call) or OLDER_COMPILER:
        sizes = sizes._replace(keys=min(sizes.keys, 32))
    fields = fitting_pages(call, sizes).fields("block_q")
    return {**fields, "split_block_q": rows_of_short(call, short_tokens, rows)}


def decodes(call: Any) -> bool:
    """Whether keys or values are codes, whose decoding takes registers."""
    return call.k_format.quantized or call.v_format.quantized


def has_scales(call: Any) -> bool:
    """Whether keys or values have stored scales, which take registers, too."""
    return call.k_format.scaled or call.v_format.scaled


def has_row_scales(call: Any) -> bool:
    """Whether scales of whole rows are stored, which multiply logits or weights."""
    return any(form.scaled and not form.group for form in (call.k_format, call.v_format))


def padded_width(call: Any) -> int:
    return next_power_of_2(max(call.head_dim, call.v_head_dim))


def tile_sizes(call: Any) -> Sizes:
    """The sizes of the tile kernel for many rows, whether or not they fit shared memory."""
    arch, width = call.device.arch, padded_width(call)
    if on_cuda_cores(call):
        few = arch in ("sm_80", "sm_86") and not has_scales(call)
        return Sizes(16, 16, 4 if few else 8, 3 if arch.startswith("sm_") else 2, edge_keys=16)
    if has_scales(call):
        return scaled_sizes(call)
    if width > 256:
        if not arch.startswith("sm_"):
            return Sizes(32, 16, 4, 2 if arch == "gfx950" else 1, edge_keys=16)
        if arch == "sm_90" and leaves_registers(call):
            stages = 3 if dtype_name(call.q) == "bfloat16" and call.head_dim == width else 2
            return Sizes(64, 32, 8, stages, edge_keys=16)
        return Sizes(32, 64 if arch == "sm_90" else 32, 8, 2, edge_keys=32)
    if looks_up(call):
        return Sizes(32, 32, 4, 3 if arch.startswith("sm_") else 2, edge_keys=16)
    if width > 128:
        if arch == "sm_90":
            return Sizes(128, 32, 8, 3, edge_keys=16)
        return Sizes(64, 32, 8, 2, edge_keys=32) if arch in WGMMA else Sizes(32, 32, 4, 2, edge_keys=32)
    if arch == "sm_90":
        powers = all(n & (n - 1) == 0 for n in (call.group, call.page_size))
        windowed = OLDER_COMPILER if call.key_ranges is not None else hides_first_keys(call) and width > 64
        # Decoding, division, masks and slopes take registers.
        if decodes(call) or not powers or windowed or is_biased(call):
            return Sizes(128, 64, 8, 3, edge_keys=32)
        keys = 64 if call.page_size in (1, 32, 64) else 128
        return Sizes(256, 64, 8, 3, edge_keys=32) if width <= 64 else Sizes(128, keys, 8, 3, edge_keys=64)
    if call.device.platform == "cpu":
        return Sizes(128, 64, 8, 3, edge_keys=32)
    if arch in WGMMA:
        return Sizes(128, 32, 8, 3, edge_keys=32)
    if not arch.startswith("sm_"):
        return Sizes(128, 32, 4, 2, edge_keys=32)
    one_product = dtype_name(call.q) == "float16" and not decodes(call)  # float16 needs no second weight term
    # Decoding takes registers, and so do ranges of keys with Triton 3.6.
    ranges = call.key_ranges is not None and OLDER_COMPILER
    edge = max(64 >> (decodes(call) + 2 * ranges), 16)
    return Sizes(64, 32, 4, 3, edge_keys=32) if one_product else Sizes(64, 64, 8, 3, edge_keys=edge)


def scaled_sizes(call: Any) -> Sizes:
    """`tile_sizes` for stored scales."""
    arch, width, ranges = call.device.arch, padded_width(call), call.key_ranges is not None
    if not arch.startswith("sm_"):
        wide = Sizes(32, 16, 4, 2 if width > 256 else 1, edge_keys=16)
        return wide if width > 128 else Sizes(64, 32, 4, 1, edge_keys=16)
    if width > 256:
        return Sizes(16 if OLDER_COMPILER else 32, 16, 8, 2, edge_keys=16)
    if width > 128:
        return Sizes(32, 32, 8, 2, edge_keys=16)
    if looks_up(call) or (ranges and OLDER_COMPILER and arch not in WGMMA):
        return Sizes(32, 32, 8, 3, edge_keys=16)
    edge = 16 if ranges and OLDER_COMPILER else 32
    rows = 128 if arch == "sm_90" or (arch in WGMMA and not OLDER_COMPILER) else 64
    return Sizes(rows, 32, 8, 3, edge_keys=edge)


def looks_up(call: Any) -> bool:
    """Whether the loop takes extra registers: to look up an array entry for each logit, or to keep logits twice.

    Blocks then have 32 rows. With 64 rows and a draft mask, Triton 3.6 to 3.9 cannot compile the loop on sm_90.
    """
    return call.draft_mask is not None or call.relative_bias is not None or keeps_largest(call)


def looks_up_always(call: Any) -> bool:
    """The result of `looks_up` as if the largest logits were requested.

    With segments, such a request must not change any bit of the other results.
    """
    return call.draft_mask is not None or call.soft_cap is not None or is_biased(call)


def leaves_registers(call: Any) -> bool:
    """Whether registers suffice for 64 rows of 512 columns, although the accumulator alone takes half of them."""
    plain = not decodes(call) and call.soft_cap is None and call.draft_mask is None
    plain = plain and not is_biased(call)
    return plain and call.group & (call.group - 1) == 0 and not OLDER_COMPILER


def split_sizes(call: Any, rows: int, *, looked_up: bool | None = None) -> Sizes:
    """The sizes of the split kernel for `rows` rows, whether or not they fit shared memory.

    `looked_up` replaces the result of `looks_up`, unless it is None.
    """
    looked_up = looks_up(call) if looked_up is None else looked_up
    arch, width = call.device.arch, padded_width(call)
    if not arch.startswith("sm_"):
        return split_sizes_elsewhere(call, rows, looked_up)
    if on_cuda_cores(call):
        return Sizes(rows, 16, max(8, rows // 8), 3)
    if has_scales(call):
        return scaled_split_sizes(call, rows, looked_up)
    if width > 256:
        return Sizes(rows, 32, 8, 3)
    if width > 128 or looked_up:
        return Sizes(rows, 32, 4 if width > 128 else 8, 3)
    # On GPUs without wgmma, blocks of 32 keys let more programs run at once than 64 keys. But with a window, or with
    # integer decoding of e4m3 by Triton 3.7 or newer, blocks of 32 keys would spill.
    spills = hides_first_keys(call) or (decodes_by_integers(call) and not OLDER_COMPILER)
    wide = arch in WGMMA and not (OLDER_COMPILER and width <= 64)
    crowded = arch == "sm_120" and call.key_ranges is not None and decodes(call)  # spills with three stages
    return Sizes(rows, 64 if wide or spills else 32, 4, 2 if crowded else 3)


def scaled_split_sizes(call: Any, rows: int, looked_up: bool) -> Sizes:
    """`split_sizes` for stored scales on an NVIDIA GPU."""
    width = padded_width(call)
    if width > 128:
        return Sizes(rows, 16 if width > 256 and call.device.arch in WGMMA and not OLDER_COMPILER else 32, 8, 2)
    if looked_up:
        return Sizes(rows, 16, 8, 3)
    if has_row_scales(call):
        return Sizes(rows, 16, 4, 3)
    if OLDER_COMPILER and call.device.arch not in WGMMA:
        return Sizes(rows, 16, 8 if call.key_ranges is not None else 4, 2)
    return Sizes(rows, 32, 4, 2)


def split_sizes_elsewhere(call: Any, rows: int, looked_up: bool) -> Sizes:
    """`split_sizes` for AMD GPUs and unknown devices."""
    width = padded_width(call)
    if on_cuda_cores(call):
        return Sizes(rows, 16, 4 * max(1, rows // 32), 2)
    if has_scales(call):
        return Sizes(rows, 16, 4, 2 if width > 256 else 1) if width > 128 else Sizes(rows, 32, 4, 1)
    if width > 256:
        return Sizes(rows, 16, 4, 2)
    if looked_up:
        return Sizes(rows, 32, 4, 1)  # Triton 3.6 cannot compile two stages
    return Sizes(rows, 32, 4, 3) if width > 128 else Sizes(rows, 64, 4, 2)


def fitting_pages(call: Any, sizes: Sizes) -> Sizes:
    """The sizes, reduced until the K and V tiles, queries and weights fit the device's shared memory."""
    rows = sizes.rows
    width = next_power_of_2(call.head_dim)
    both = width + next_power_of_2(call.v_head_dim)

    # A pipeline of n stages keeps n - 1 blocks in shared memory. With wgmma it keeps n, except in loops over WIDE rows,
    # which look up a block's pages in the iteration that uses it (`_pages.attend`). wgmma reads weights from registers,
    # so they take no shared memory.
    wgmma = call.device.arch in WGMMA and rows >= 64
    one_less = not wgmma or width >= 512

    codes = call.k_format.scaled and call.v_format.scaled  # decoded on the way from shared memory to registers
    stored = 1 if codes else item_size(call.q)

    def size(keys: int, stages: int) -> int:
        weights = 0 if wgmma else rows * keys
        return max(stages - one_less, 1) * keys * both * stored + (rows * width + weights) * item_size(call.q)

    keys, stages = fit(call, sizes.keys, sizes.stages, size, good_keys=32)
    return sizes._replace(keys=keys, stages=stages)
