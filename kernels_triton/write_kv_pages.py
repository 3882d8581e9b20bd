"""Writing this step's K and V into pages, in Triton. Each program writes a block of tokens of one KV head."""

import dataclasses
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragged_attention.calls import WriteKvPages
from ragged_attention.kernels_triton._constants import Constants
from ragged_attention.kernels_triton._formats import (
    array_heads,
    divided,
    encode,
    load_scale,
    narrow,
    number_format,
    scale_arguments,
)
from ragged_attention.kernels_triton._quantise import (
    in_blocks_of_e4m3,
    in_blocks_of_powers,
    in_pairs,
    shifted,
    symmetric,
)
from ragged_attention.kernels_triton._sequences import VARYING, PageTable, count_sequences, query_edge
from ragged_attention.kernels_triton._splits import Batch
from ragged_attention.kernels_triton._stored import RowPages, Stored, scale_page_arguments, stored_of
from ragged_attention.kernels_triton._tiles import (
    cdiv,
    expect_power_of_two,
    launchable,
    next_power_of_2,
    stride_arguments,
)

NO_TABLES = {"max_num_seqs": 0, "capacity": 0, "table_stride": 0, "search_steps": 0}  # for calls with a slot mapping
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e4m3fnuz": 224.0, "float8_e5m2": 57344.0}
FEATURES = frozenset({
    "slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "k_scale", "v_scale", "k_scale_pages",
    "v_scale_pages",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    block_t: int = 16  # tokens per program
    num_warps: int = 4

    def __post_init__(self) -> None:
        expect_power_of_two(self, block_t=(1, 256), num_warps=(1, 16))


def why_not(call: WriteKvPages) -> str | None:
    return launchable(call, write_kernel)


def heuristic(call: WriteKvPages) -> Tile:
    """About four thousand elements per program, or a quarter of that if rows are quantised with scales of their own."""
    width = next_power_of_2(max(call.head_dim, call.v_head_dim))
    return Tile(block_t=max(1, min((1024 if call.scaled else 4096) // width, next_power_of_2(call.num_tokens), 64)))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Element(Constants):
    """The storage format of K or V in pages."""

    FORMAT: str  # see `encode`
    PAGE_SIZE: int
    D: int  # the head size
    D_PAD: int  # D, rounded up to a power of two
    SCALE_STRIDE: int  # see `load_scale`
    LARGEST: float  # a row's scale is its largest magnitude / LARGEST, in formats with row scales but no zero points
    STORED: Stored


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Config(Constants):
    """The compile-time constants of a launch."""

    K: Element
    V: Element
    BLOCK_T: int  # tokens per program
    COMBINED: bool  # whether K and V are interleaved in one array
    HAS_SLOTS: bool  # whether the call has a slot mapping; otherwise slots follow from the page table
    HAS_NUM_SEQS: bool


class NewRows(NamedTuple):
    """The array of this step's K or V, [tokens, heads, width], and its scale; see `load_scale`."""

    ptr: tl.tensor
    token_stride: tl.tensor
    head_stride: tl.tensor
    scale_ptr: tl.tensor
    scale_factor: tl.tensor


class Tokens(NamedTuple):
    """A block of tokens and their slots."""

    token: tl.tensor
    slot: tl.tensor
    live: tl.tensor  # whether the token is written


@triton.jit
def slots_from_tables(token, batch, table, search_steps, PAGE_SIZE: tl.constexpr):
    """Each token's slot, or -1 for a token without a sequence or without a page."""
    low = tl.zeros_like(token)
    high = low + batch.num_seqs + 1
    for _ in range(search_steps):
        middle = (low + high) // 2
        later = (query_edge(batch.cu_q_lens_ptr, middle, batch.num_tokens) <= token) & (high - low > 1)
        high = tl.where(later | (high - low <= 1), high, middle)
        low = tl.where(later, middle, low)
    live = (low < batch.num_seqs) & (token < batch.num_tokens)
    seq = tl.where(live, low, 0)
    start = query_edge(batch.cu_q_lens_ptr, tl.where(live, seq, 0), batch.num_tokens)
    stop = query_edge(batch.cu_q_lens_ptr, tl.where(live, seq + 1, 0), batch.num_tokens)
    kv_len = tl.minimum(tl.maximum(tl.load(batch.kv_lens_ptr + seq, mask=live, other=0), 0), batch.capacity)
    position = kv_len - (stop - token)
    live = live & (token >= start) & (token < stop) & (position >= 0)
    entry = table.ptr + seq.to(tl.int64) * table.stride + position // PAGE_SIZE
    page = tl.load(entry, mask=live, other=-1)
    live = live & (page >= 0) & (page < table.num_pages)
    return tl.where(live, page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE, -1)


@triton.jit
def tokens_with(slot, token, num_tokens, num_pages, PAGE_SIZE: tl.constexpr):
    """Tokens with their slots; those with a slot outside the pages are not written."""
    live = (slot >= 0) & (slot // PAGE_SIZE < num_pages) & (token < num_tokens)
    return Tokens(token, tl.where(live, slot, 0), live)


@triton.jit
def write_rows(new, pages, tokens, kv_head, ELEMENT: tl.constexpr):
    """Write one KV head's K or V, divided by its scale and encoded, to the tokens' slots."""
    d = tl.arange(0, ELEMENT.D_PAD)
    mask = tokens.live[:, None] & (d < ELEMENT.D)[None, :]
    source = new.ptr + tokens.token.to(tl.int64) * new.token_stride + kv_head * new.head_stride
    numbers = tl.load(source[:, None] + d[None, :], mask=mask, other=0).to(tl.float32)
    if ELEMENT.STORED.SCALES != "":
        store_scaled(numbers, new, pages, tokens, kv_head, ELEMENT)
    else:
        store_rows(numbers, new, pages, tokens, kv_head, ELEMENT)


@triton.jit
def store_rows(numbers, new, pages, tokens, kv_head, ELEMENT: tl.constexpr):
    """Write float32 rows of one KV head, divided by the scale of `new` and encoded, to the tokens' slots."""
    PAGE_SIZE: tl.constexpr = ELEMENT.PAGE_SIZE
    d = tl.arange(0, ELEMENT.D_PAD)
    mask = tokens.live[:, None] & (d < ELEMENT.D)[None, :]
    scale = load_scale(new.scale_ptr, kv_head, new.scale_factor, ELEMENT.SCALE_STRIDE)
    numbers = divided(numbers, scale)
    target = pages.ptr + tokens.slot // PAGE_SIZE * pages.page_stride + tokens.slot % PAGE_SIZE * pages.slot_stride
    stored = encode(numbers, ELEMENT.FORMAT, pages.ptr.dtype.element_ty)
    tl.store(target[:, None] + d[None, :], stored, mask=mask)


@triton.jit
def store_scaled(numbers, new, pages, tokens, kv_head, ELEMENT: tl.constexpr):
    """Write float32 rows of one KV head, quantised with scales of their own, and those scales, to the tokens' slots."""
    STORED: tl.constexpr = ELEMENT.STORED
    PAGE_SIZE: tl.constexpr = ELEMENT.PAGE_SIZE
    D: tl.constexpr = ELEMENT.D
    PACKED: tl.constexpr = STORED.CODES == "e2m1" or STORED.CODES == "uint4"
    exists = (tl.arange(0, ELEMENT.D_PAD) < D)[None, :]
    scale = load_scale(new.scale_ptr, kv_head, new.scale_factor, ELEMENT.SCALE_STRIDE)
    page = tokens.slot // PAGE_SIZE
    slot = tokens.slot % PAGE_SIZE
    scales_ptr = pages.scales_ptr + page * STORED.PAGE_STRIDE + slot * STORED.SLOT_STRIDE
    if STORED.SCALES != "float8_e4m3fn":
        numbers = tl.where(exists, divided(numbers, scale), 0.0)
    if STORED.GROUP:
        BLOCKS: tl.constexpr = ELEMENT.D_PAD // STORED.GROUP
        blocks = tl.reshape(numbers, [numbers.shape[0], BLOCKS, STORED.GROUP])
        invalid = tl.max((blocks != blocks).to(tl.int32), 2) > 0
        if STORED.SCALES == "float8_e4m3fn":
            codes, scales = in_blocks_of_e4m3(blocks, invalid, scale)
        else:
            codes, scales = in_blocks_of_powers(blocks, invalid, PACKED)
        codes = tl.reshape(tl.where(invalid[:, :, None], 0, codes), [numbers.shape[0], ELEMENT.D_PAD])
        block = tl.arange(0, BLOCKS)
        mask = tokens.live[:, None] & (block < D // STORED.GROUP)[None, :]
        tl.store(scales_ptr[:, None] + block[None, :] * STORED.COLUMN_STRIDE, scales, mask=mask)
    else:
        invalid = tl.max((numbers != numbers).to(tl.int32), 1) > 0
        if STORED.ZERO != "":
            codes, scales, zeros = shifted(numbers, exists, invalid, STORED.ZERO)
            if STORED.ZERO == "stored":
                zeros = narrow(zeros, scales_ptr.dtype.element_ty)
                tl.store(scales_ptr + STORED.COLUMN_STRIDE, zeros, mask=tokens.live)
        else:
            codes, scales = symmetric(numbers, invalid, ELEMENT.LARGEST, ELEMENT.FORMAT)
        tl.store(scales_ptr, narrow(scales, scales_ptr.dtype.element_ty), mask=tokens.live)
    target = pages.ptr + page * pages.page_stride + slot * pages.slot_stride
    if PACKED:
        byte = tl.arange(0, ELEMENT.D_PAD // 2)
        mask = tokens.live[:, None] & (byte < D // 2)[None, :]
        tl.store(target[:, None] + byte[None, :], in_pairs(codes), mask=mask)
    else:
        column = tl.arange(0, ELEMENT.D_PAD)
        tl.store(
            target[:, None] + column[None, :], codes.to(pages.ptr.dtype.element_ty), mask=tokens.live[:, None] & exists
        )


@triton.jit
def scales_of_head(scales_ptr, stand_in_ptr, kv_head, stride, STORED: tl.constexpr):
    """The address of a KV head's scales; a stand-in if none are stored."""
    address = stand_in_ptr
    if STORED.SCALES != "":
        address = scales_ptr + kv_head * stride
    return address


@triton.jit(do_not_specialize=VARYING)
def write_kernel(
    k_ptr, v_ptr, slots_ptr, page_indices_ptr, kv_lens_ptr, cu_q_lens_ptr, num_seqs_ptr, k_scale_ptr, v_scale_ptr,
    given_pages_ptr, given_v_pages_ptr, given_k_scales_ptr, given_v_scales_ptr,
    k_pages_ptr, v_pages_ptr, k_scales_ptr, v_scales_ptr,
    num_tokens, max_num_seqs, num_pages, capacity, table_stride, search_steps, slots_stride,
    k_token_stride, k_new_head_stride, v_token_stride, v_new_head_stride,
    k_page_stride, k_slot_stride, k_head_stride, v_page_stride, v_slot_stride, v_head_stride,
    k_scales_stride, v_scales_stride, k_scale_factor, v_scale_factor, CONFIG: tl.constexpr,
):  # fmt: skip
    """Write a block of tokens of one KV head."""
    COMBINED: tl.constexpr = CONFIG.COMBINED
    if COMBINED:
        v_pages_ptr = k_pages_ptr
    PAGE_SIZE: tl.constexpr = CONFIG.K.PAGE_SIZE
    token = tl.program_id(0) * CONFIG.BLOCK_T + tl.arange(0, CONFIG.BLOCK_T)
    kv_head = tl.program_id(1).to(tl.int64)
    if CONFIG.HAS_SLOTS:
        slot = tl.load(slots_ptr + token.to(tl.int64) * slots_stride, mask=token < num_tokens, other=-1).to(tl.int64)
    else:
        num_seqs = count_sequences(num_seqs_ptr, max_num_seqs, CONFIG.HAS_NUM_SEQS)
        batch = Batch(cu_q_lens_ptr, kv_lens_ptr, num_seqs, max_num_seqs, num_tokens, capacity)
        table = PageTable(page_indices_ptr, table_stride, num_pages)
        slot = slots_from_tables(token, batch, table, search_steps, PAGE_SIZE)
    tokens = tokens_with(slot, token, num_tokens, num_pages, PAGE_SIZE)
    k_head, v_head = array_heads(kv_head, COMBINED)
    write_rows(
        NewRows(k_ptr, k_token_stride, k_new_head_stride, k_scale_ptr, k_scale_factor),
        RowPages(
            k_pages_ptr + k_head * k_head_stride, k_page_stride, k_slot_stride,
            scales_of_head(k_scales_ptr, k_pages_ptr, kv_head, k_scales_stride, CONFIG.K.STORED),
        ),
        tokens, kv_head, CONFIG.K,
    )  # fmt: skip
    write_rows(
        NewRows(v_ptr, v_token_stride, v_new_head_stride, v_scale_ptr, v_scale_factor),
        RowPages(
            v_pages_ptr + v_head * v_head_stride, v_page_stride, v_slot_stride,
            scales_of_head(v_scales_ptr, v_pages_ptr, kv_head, v_scales_stride, CONFIG.V.STORED),
        ),
        tokens, kv_head, CONFIG.V,
    )  # fmt: skip


def place_arguments(call: Any, launch: Any) -> tuple[tuple[Any, ...], dict[str, int]]:
    """(arrays, numbers) from which kernels find the slots of tokens: a slot mapping, or sequences and page tables."""
    if call.slot_mapping is not None:
        return (call.slot_mapping,) * 5, NO_TABLES
    page_indices, kv_lens, cu_q_lens = map(launch.packed, (call.page_indices, call.kv_lens, call.cu_q_lens))
    max_num_seqs = kv_lens.shape[0]
    arrays = (kv_lens, page_indices, kv_lens, cu_q_lens, kv_lens if call.num_seqs is None else call.num_seqs)
    return arrays, {
        "max_num_seqs": max_num_seqs,
        "capacity": call.capacity,
        "table_stride": launch.strides(page_indices)[0],
        "search_steps": (max_num_seqs + 1).bit_length() + 1,
    }


def elements_of(call: Any, strides: tuple[int, int], launch: Any) -> dict[str, Element]:
    """The `Element` of K and of V, by name; `strides` are those of the scales, see `load_scale`."""
    arch = call.device.arch
    return {
        side: Element(
            FORMAT="plain" if call.copies else number_format(form.codes, arch),
            PAGE_SIZE=call.page_size,
            D=width,
            D_PAD=next_power_of_2(width),
            SCALE_STRIDE=stride,
            LARGEST=LARGEST.get(form.codes, 0.0),
            STORED=stored_of(form, arch, scale_pages, launch),
        )
        for side, form, width, stride, scale_pages in zip(
            "KV",
            (call.k_format, call.v_format),
            (call.head_dim, call.v_head_dim),
            strides,
            call.scale_pages,
            strict=True,
        )
    }


def written_arrays(call: Any, stand_in: Any) -> tuple[list[Any], dict[str, None]]:
    """(pages and scale pages that a kernel writes, kernel arguments that are None for missing arrays).

    A call with scale pages has `stand_in` for a missing array, instead of None.
    """
    if call.scaled:
        arrays = [*call.sides, *call.scale_pages]
        arrays[1] = None if call.combined else arrays[1]
        return [stand_in if array is None else array for array in arrays], {}
    absent: dict[str, None] = {"v_pages_ptr": None} if call.combined else {}
    return [*call.caches], {**absent, "k_scales_ptr": None, "v_scales_ptr": None}


def run(call: WriteKvPages, tile: Tile, launch: Any) -> Any:
    """Enqueue the kernel; returns the page arrays."""
    k, v = launch.packed(call.k), launch.packed(call.v)
    k_pages, v_pages = call.sides
    strides = stride_arguments(launch, ("page", "slot", "head"), k=k_pages, v=v_pages)
    # 8-bit elements that are copied unchanged reach the kernel as integers, which float32 represents exactly.
    scales = (None, None) if call.copies else (call.k_scale, call.v_scale)
    (k_scale, k_factor, k_stride), (v_scale, v_factor, v_stride) = (
        scale_arguments(scale, k, launch) for scale in scales
    )
    places, numbers = place_arguments(call, launch)
    written, absent = written_arrays(call, k)
    inputs = (k, v, *places, k_scale, v_scale)
    results = launch(
        write_kernel,
        (cdiv(call.num_tokens, tile.block_t), call.num_kv_heads),
        (*inputs, *written, *[k] * (4 - len(written))),
        [],
        inplace=range(len(inputs), len(inputs) + len(written)),
        **absent,
        num_warps=tile.num_warps,
        num_stages=1,
        num_tokens=call.num_tokens,
        num_pages=call.num_pages,
        slots_stride=launch.strides(places[0])[0],
        **numbers,
        **dict(zip(("k_token_stride", "k_new_head_stride"), launch.strides(k), strict=False)),
        **dict(zip(("v_token_stride", "v_new_head_stride"), launch.strides(v), strict=False)),
        **strides,
        **scale_page_arguments(call, k, launch)[1],
        k_scale_factor=k_factor,
        v_scale_factor=v_factor,
        CONFIG=Config(
            **elements_of(call, (k_stride, v_stride), launch),
            BLOCK_T=tile.block_t,
            COMBINED=call.combined,
            HAS_SLOTS=call.slot_mapping is not None,
            HAS_NUM_SEQS=call.num_seqs is not None,
        ),
    )
    return [array for array, given in zip(results, written, strict=True) if given is not k]
