"""Code written for FlashInfer's 4-bit caches works: appends, attention over codes with scales, and packing alone.

The tests decode the codes by hand. Unused bytes are 255, which is NaN as a scale.
"""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import ragged_attention as ra
from ragged_attention.errors import InvalidInput, Unsupported
from tests.flashinfer_oracle import Batch, batch, same
from tests.test_compat_flashinfer import DECODES, RAGGED, decode_planned, expect, prefill_planned

flashinfer: Any = importlib.import_module("ragged_attention.compat.flashinfer")
BACKENDS = ("eager", "numba")
SCALES = (0.5, 0.25)
BYTES, E4M3 = torch.uint8, torch.float8_e4m3fn
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with ra.use_backend(request.param):
        yield request.param


def by_hand(codes: torch.Tensor, scales: torch.Tensor, factor: float) -> torch.Tensor:
    """The values [..., D] of codes, bytes [..., D / 2], and scales, bytes [..., D / 16]."""
    numbers = E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]
    return numbers * scales.view(E4M3).float().repeat_interleave(16, -1) * factor


def appended(b: Batch, layout: str = "NHD", form: str = "pair", dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """A 4-bit cache with a batch's keys and values. The stored values replace those in the batch."""
    num_pages, page, heads = b.cache[0].shape[:3]
    shape = (num_pages, 2, page, heads) if layout == "NHD" else (num_pages, 2, heads, page)
    codes, scales = (torch.full((*shape, b.dim // width), 255, dtype=BYTES) for width in (2, 16))
    scales = scales.view(E4M3)
    lens = torch.tensor([kv_len for _, kv_len in b.lens])
    edges = torch.tensor([0, *lens.tolist()]).cumsum(0).int()
    rows, positions = flashinfer.get_batch_indices_positions(edges, lens, int(edges[-1]))
    flashinfer.nvfp4_quantize_append_paged_kv_cache(
        torch.cat(b.keys).to(dtype), torch.cat(b.values).to(dtype), rows, positions, codes, scales, b.indices,
        b.indptr, b.last, *SCALES, kv_layout=layout,
    )  # fmt: skip
    held, places = (each if layout == "NHD" else each.transpose(2, 3) for each in (codes, scales.view(BYTES)))
    for side, kept, factor in ((0, b.keys, SCALES[0]), (1, b.values, SCALES[1])):
        for request, (_, kv_len) in enumerate(b.lens):
            at = torch.arange(kv_len)
            pages = b.indices[b.indptr[request] + at // page].long()
            kept[request] = by_hand(held[pages, side, at % page], places[pages, side, at % page], factor)
    if form == "pair":
        return codes.unbind(1), scales.unbind(1)
    return codes, scales if form == "one" else scales.view(BYTES)


@pytest.mark.parametrize("form", ["pair", "one", "bytes"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_decode(layout: str, form: str, backend: str) -> None:
    b = batch(DECODES, heads=4)
    keys = [each.clone() for each in b.keys]
    cache, scales = appended(b, layout, form)
    for stored, given in zip(b.keys, keys, strict=True):
        assert stored.isfinite().all()
        assert (stored - given).norm() <= 0.15 * given.norm()
    wrapper = decode_planned(b, layout, kv_data_type=BYTES)
    results = wrapper.run(
        b.q, cache, k_scale=SCALES[0], v_scale=SCALES[1], kv_cache_sf=scales, return_lse=True
    )  # fmt: skip
    expect(results, b.wanted())


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_prefill_over_pages(layout: str, backend: str) -> None:
    b = batch(RAGGED, page_size=2)
    cache, scales = appended(b, layout)
    wrapper = prefill_planned(b, layout, kv_data_type=BYTES, causal=True)
    k_scale, v_scale = torch.tensor([SCALES[0]]), torch.tensor([SCALES[1]])
    results = wrapper.run(b.q, cache, k_scale=k_scale, v_scale=v_scale, kv_cache_sf=scales, return_lse=True)
    expect(results, b.wanted(causal=True))


def test_a_mask_over_4_bit_pages(backend: str) -> None:
    b = batch([(3, 9), (2, 6)])
    cache, scales = appended(b)
    seen = [torch.rand(q_len, kv_len) < 0.6 for q_len, kv_len in b.lens]
    wrapper = prefill_planned(b, kv_data_type=BYTES, custom_mask=torch.cat([each.flatten() for each in seen]))
    out = wrapper.run(b.q, cache, k_scale=SCALES[0], v_scale=SCALES[1], kv_cache_sf=scales)
    wanted = [batch_of(b, request).wanted(mask=mask)[0] for request, mask in enumerate(seen)]
    same(out, torch.cat(wanted), torch.float32)


def batch_of(b: Batch, request: int) -> Batch:
    """A batch that has only one request of the batch `b`."""
    one = Batch(**vars(b))
    start, end = b.qo_indptr[request : request + 2].tolist()
    one.q, one.lens = b.q[start:end], [b.lens[request]]
    one.keys, one.values, one.qo_indptr = [b.keys[request]], [b.values[request]], torch.tensor([0, end - start])
    return one


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_packed_rows(layout: str, backend: str) -> None:
    b = batch([(3, 9), (2, 6)])
    (k_codes, v_codes), (k_scales, v_scales) = appended(b)
    kv_indptr = torch.tensor([0, 9, 15], dtype=torch.int32)

    def rows(pages: Any) -> Any:
        """The stored rows [T, K, n] of all requests, in order."""
        found = []
        for request, (_, kv_len) in enumerate(b.lens):
            at = torch.arange(kv_len)
            found.append(pages[b.indices[b.indptr[request] + at // 4].long(), at % 4])
        packed = torch.cat(found)
        return packed if layout == "NHD" else packed.transpose(0, 1).contiguous()

    packed = [rows(pages) for pages in (k_codes, v_codes)]
    scales = tuple(rows(pages.view(BYTES)).view(E4M3) for pages in (k_scales, v_scales))
    factors = {"k_scale": SCALES[0], "v_scale": SCALES[1], "return_lse": True}
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1), layout)
    wrapper.plan(
        b.qo_indptr, kv_indptr, 4, 2, 32, causal=True, q_data_type=torch.float32, kv_data_type=BYTES
    )  # fmt: skip
    expect(wrapper.run(b.q, *packed, kv_cache_sf=scales, **factors), b.wanted(causal=True))
    if layout == "NHD":
        stacked = torch.stack([each.view(BYTES) for each in scales], 1)
        expect(wrapper.run(b.q, *packed, kv_cache_sf=stacked, **factors), b.wanted(causal=True))
    first, places = ([each[:9] if layout == "NHD" else each[:, :9] for each in both] for both in (packed, scales))
    results = flashinfer.single_prefill_with_kv_cache(
        b.q[:3], *first, causal=True, kv_layout=layout, kv_cache_sf=places, **factors
    )
    expect(results, batch_of(b, 0).wanted(causal=True))


@pytest.mark.parametrize("as_tensors", [False, True])
def test_appends_by_slots(as_tensors: bool, backend: str) -> None:
    k, v = torch.randn(2, 5, 2, 32).bfloat16()
    codes, scales = torch.zeros(2, 4, 2, 2, 16, dtype=BYTES), torch.zeros(2, 4, 2, 2, 2, dtype=BYTES)
    pair = [(each[0], each[1]) for each in (codes, scales)]
    factors = [torch.tensor([each]) for each in SCALES] if as_tensors else SCALES
    slots = torch.tensor([7, -1, 0, 99])  # the fifth row is padding and has no slot
    flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(k, v, slots, *pair, *factors)
    other, places = torch.zeros_like(codes), torch.zeros_like(scales).view(E4M3)
    kept = torch.tensor([0, 2])
    for side, rows in enumerate((k, v)):
        flashinfer.nvfp4_quantize_append_paged_kv_cache(
            rows[kept], rows[kept], torch.tensor([0, 0]), torch.tensor([7, 0]), (other[side], other[side].clone()),
            (places[side], places[side].clone()), torch.tensor([0, 1, 2, 3]), torch.tensor([0, 4]), torch.tensor([2]),
            SCALES[side], SCALES[side],
        )  # fmt: skip
    assert torch.equal(codes, other)
    assert torch.equal(scales, places.view(BYTES))
    assert codes.any()
    assert not codes.view(2, 8, -1)[:, 1:7].any()


def test_rows_are_packed_and_unpacked() -> None:
    """Rows are packed into the recorded bytes of FlashInfer's append, except for numbers midway between two codes."""
    recorded = json.loads(Path(__file__).with_name("quantised_rows.json").read_text())
    rows = torch.frombuffer(bytearray.fromhex("".join(recorded["rows"])), dtype=torch.bfloat16).view(-1, 32)
    same_bytes = total = 0
    for name in (name for name in recorded if name.startswith("nvfp4")):
        factor = torch.tensor([recorded[name]["scale"]])
        codes, scales = flashinfer.nvfp4_kv_quantize(rows, factor)
        for got, key in ((codes, "codes"), (scales, "scales")):
            want = torch.frombuffer(bytearray.fromhex(recorded[name][key]), dtype=BYTES).view_as(got)
            same_bytes, total = same_bytes + int((got == want).sum()), total + want.numel()
        values = flashinfer.nvfp4_kv_dequantize(codes, scales, factor, torch.float16)
        assert torch.equal(values, by_hand(codes, scales, recorded[name]["scale"]).half())
        assert flashinfer.nvfp4_kv_dequantize(codes, scales, factor).dtype == torch.bfloat16
    assert same_bytes >= 0.99 * total
    x = torch.zeros(3, 16)
    x[0], x[1, 0], x[2, 3] = -0.0, 1e30, torch.nan
    codes, scales = flashinfer.nvfp4_kv_quantize(x, torch.ones(1))
    assert (codes[0] == 0x88).all()
    assert scales.tolist() == [[0], [126], [127]]
    assert codes[1].tolist() == [7, *[0] * 7]
    assert not codes[2].any()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_unpacking_pages(layout: str, backend: str) -> None:
    b = batch([(1, 9), (1, 0), (1, 4)])
    cache, scales = appended(b, layout)
    table = torch.full((3, 4), 99)
    for request, (_, kv_len) in enumerate(b.lens):
        count = -(-kv_len // 4)
        table[request, :count] = b.indices[b.indptr[request] : b.indptr[request] + count]
    outputs = [torch.full((3, 14, 2, 32), 7.0).bfloat16() for _ in range(2)]
    factors = [torch.tensor([each]) for each in SCALES]
    lens = torch.tensor([9, 0, 4], dtype=torch.int32)
    flashinfer.nvfp4_kv_dequantize_paged(cache, scales, table, lens, *factors, *outputs, kv_layout=layout)
    for output, kept in zip(outputs, (b.keys, b.values), strict=True):
        for got, rows in zip(output, kept, strict=True):
            assert torch.equal(got[: len(rows)], rows.bfloat16())
            assert (got[len(rows) :] == 7).all()
    table[0, 1] = -1  # removes a page
    again = [torch.full_like(each, 7.0) for each in outputs]
    flashinfer.nvfp4_kv_dequantize_paged(cache, scales, table, lens, *factors, *again, kv_layout=layout)
    assert (again[0][0, 4:8] == 7).all()
    assert torch.equal(again[0][0, :4], outputs[0][0, :4])


def test_what_4_bit_caches_refuse(backend: str) -> None:
    b = batch(DECODES)
    cache, scales = appended(b)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1), backend="trtllm-gen")
    wrapper.plan(b.indptr, b.indices, b.last, 4, 2, 32, 4, q_data_type=torch.float32, kv_data_type=BYTES)
    with pytest.raises(Unsupported, match="expected another backend with kv_cache_sf, got 'trtllm-gen', for which"):
        wrapper.run(b.q, cache, kv_cache_sf=scales)
    with pytest.raises(Unsupported, match="expected another backend with kv_cache_sf, got 'trtllm-gen', for which"):
        flashinfer.single_prefill_with_kv_cache(b.q, b.q, b.q, backend="trtllm-gen", kv_cache_sf=scales)
    wrapper = decode_planned(b, kv_data_type=BYTES)
    with pytest.raises(InvalidInput, match=r"expected kv_cache_sf\[0\] with paged_kv_cache\[0\] of uint8, got none"):
        wrapper.run(b.q, cache)
    with pytest.raises(TypeError, match="expected kv_cache_sf to be a tensor or a pair of them, got int"):
        wrapper.run(b.q, cache, kv_cache_sf=1)
    with pytest.raises(InvalidInput, match=r"expected kv_cache_sf\[1\] in nvfp4 to have 32 / 16 = 2"):
        wrapper.run(b.q, cache, kv_cache_sf=(scales[0], scales[1][..., :1]))
    with pytest.raises(InvalidInput, match=r"expected head_dim of paged_kv_cache\[1\] to be 32 as in plan\(\), got 16"):
        wrapper.run(b.q, tuple(each[..., :8] for each in cache), kv_cache_sf=scales)
    with pytest.raises(InvalidInput, match=r"expected kv_cache_sf\[0\]"):
        decode_planned(b).run(b.q, b.cache, kv_cache_sf=scales)
    row, one, none = torch.ones(1, 2, 32), torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    tables = (one, one, cache, scales, b.indices, none, one)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidInput, match=f"expected v_scale to be a positive finite number, got {bad}"):
            flashinfer.nvfp4_quantize_append_paged_kv_cache(row, row, *tables, 1.0, bad)
    with pytest.raises(InvalidInput, match=r"expected paged_kv_cache\[0\].dtype to be torch.uint8, got torch.float32"):
        flashinfer.nvfp4_quantize_append_paged_kv_cache(row, row, one, one, b.cache, *tables[3:], 1.0, 1.0)
    slots = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(InvalidInput, match=r"expected append_key and append_value of at least .*=3, got 1 rows"):
        flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(row, row, slots, cache, scales, 1.0, 1.0)
    factor = torch.ones(1)
    with pytest.raises(
        InvalidInput, match=r"expected input.shape to be \[M, K\] with K a multiple of 16, got \[2, 9\]"
    ):
        flashinfer.nvfp4_kv_quantize(torch.ones(2, 9), factor)
    with pytest.raises(InvalidInput, match=r"expected fp4_data.shape to be \[M, K / 2\] with .* 16, got \[2, 9\]"):
        flashinfer.nvfp4_kv_dequantize(torch.zeros(2, 9, dtype=BYTES), torch.zeros(2, 1, dtype=BYTES), factor)
    table, lens, output = torch.zeros(4, 1, dtype=torch.int32), torch.ones(4), torch.zeros(4, 4, 2, 32)
    given = (table, lens, factor, factor)
    with pytest.raises(
        InvalidInput, match=r"expected paged_kv_cache of torch.uint8 with kv_cache_sf, got torch.float32"
    ):
        flashinfer.nvfp4_kv_dequantize_paged(b.cache, scales, *given, output, output)
    with pytest.raises(InvalidInput, match=r"expected output_k.shape\[2:\] to be \[2, 32\], got \[2, 16\]"):
        flashinfer.nvfp4_kv_dequantize_paged(cache, scales, *given, output[..., :16], output)
    with pytest.raises(InvalidInput, match=r"expected block_tables with pages for max_seq_len=9, got \[4, 1\] of 4"):
        flashinfer.nvfp4_kv_dequantize_paged(cache, scales, *given, torch.zeros(4, 9, 2, 32), output)
