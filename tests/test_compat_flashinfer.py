"""Code written for FlashInfer's attention gets the results of FlashInfer's formulas in float64.

The contents of unused memory make no difference.
"""

import importlib
import inspect
import itertools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from ragged_attention.errors import InvalidInput, Unsupported
from tests.flashinfer_oracle import LN2, Batch, batch, dense, same
from tests.flashinfer_signatures import SIGNATURES

PACKAGE = "ragged_attention.compat.flashinfer"
flashinfer: Any = importlib.import_module(PACKAGE)  # typed as Any, because calls with wrong types are tested too
WORKSPACE = torch.empty(16, dtype=torch.uint8)
DECODES = [(1, 9), (1, 0), (1, 4), (1, 13)]
RAGGED = [(3, 9), (0, 5), (2, 0), (1, 4), (5, 13), (4, 2)]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def decode_planned(b: Batch, layout: str = "NHD", graph: bool = False, **settings: Any) -> Any:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, layout, use_cuda_graph=graph)
    settings = {"q_data_type": b.dtype} | settings
    wrapper.plan(b.indptr, b.indices, b.last, b.heads, b.kv_heads, b.dim, b.page_size, **settings)
    return wrapper


def prefill_planned(b: Batch, layout: str = "NHD", graph: bool = False, **settings: Any) -> Any:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, layout, use_cuda_graph=graph)
    settings = {"q_data_type": b.dtype} | settings
    wrapper.plan(b.qo_indptr, b.indptr, b.indices, b.last, b.heads, b.kv_heads, b.dim, b.page_size, **settings)
    return wrapper


def packed(b: Batch) -> tuple[Any, Any, Any]:
    """The concatenated keys and values of a batch's requests, and their row pointers."""
    edges = torch.tensor([0, *(len(k) for k in b.keys)]).cumsum(0).int()
    return torch.cat(b.keys).to(b.dtype), torch.cat(b.values).to(b.dtype), edges


def ragged_planned(b: Batch, kv_indptr: Any, **settings: Any) -> Any:
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    settings = {"q_data_type": b.dtype} | settings
    wrapper.plan(b.qo_indptr, kv_indptr, b.heads, b.kv_heads, b.dim, **settings)
    return wrapper


def expect(results: tuple[Any, Any], wanted: tuple[Any, Any], dtype: torch.dtype = torch.float32) -> None:
    assert results[0].dtype == dtype
    same(results[0], wanted[0], dtype)
    same(results[1], wanted[1])


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_flashinfers(name: str) -> None:
    module, *path = name.split(".")
    found: Any = importlib.import_module(f"{PACKAGE}.{module}")
    for part in path:
        found = inspect.getattr_static(found, part)
    found = getattr(found, "__func__", found)
    parameters = [each.replace(annotation=each.empty) for each in inspect.signature(found).parameters.values()]
    text = str(inspect.Signature(parameters))[1:-1]
    assert text.replace("<TopKTieBreak.NONE: 0>", "0") == SIGNATURES[name]


def test_names_are_where_flashinfer_has_them() -> None:
    for name in flashinfer.__all__:
        assert getattr(flashinfer, name) is not None
    decode, prefill = flashinfer.BatchDecodeWithPagedKVCacheWrapper, flashinfer.BatchPrefillWithPagedKVCacheWrapper
    ragged, cascade = flashinfer.BatchPrefillWithRaggedKVCacheWrapper, flashinfer.MultiLevelCascadeAttentionWrapper
    for wrapper in (decode, prefill, ragged, cascade):
        assert wrapper.begin_forward is wrapper.plan
    assert cascade.forward is cascade.run
    assert flashinfer.topk.topk is flashinfer.top_k


@pytest.mark.parametrize("form", ["pair", "one", "gaps"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_decode(page_size: int, layout: str, form: str) -> None:
    b = batch(DECODES, page_size, layout=layout, form=form)
    for settings, ours in (
        ({}, {}),
        ({"window_left": 5, "logits_soft_cap": 3.0, "sm_scale": 0.3}, {"window_left": 5, "cap": 3.0, "sm_scale": 0.3}),
        ({"window_left": 0, "logits_soft_cap": 0.0}, {"window_left": 0}),
    ):
        wrapper, wanted = decode_planned(b, layout, **settings), b.wanted(**ours)
        expect(wrapper.run(b.q, b.cache, return_lse=True), wanted)
        same(wrapper.run(b.q, b.cache), wanted[0])
        expect(wrapper.run_return_lse(b.q, b.cache), wanted)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_prefill_over_pages(page_size: int, layout: str, causal: bool) -> None:
    b = batch(RAGGED, page_size, layout=layout, form="one")
    for window, cap in ((-1, None), (3, 5.0)):
        wrapper = prefill_planned(b, layout, causal=causal, window_left=window, logits_soft_cap=cap)
        expect(wrapper.run(b.q, b.cache, return_lse=True), b.wanted(causal=causal, window_left=window, cap=cap))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [32, 264])
def test_prefill_of_packed_keys(causal: bool, dim: int) -> None:
    b = batch(RAGGED, dim=dim)
    k, v, kv_indptr = packed(b)
    for window, cap in ((-1, None), (3, 5.0)):
        wrapper = ragged_planned(b, kv_indptr, causal=causal, window_left=window, logits_soft_cap=cap)
        expect(wrapper.run(b.q, k, v, return_lse=True), b.wanted(causal=causal, window_left=window, cap=cap))
    heads_first = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, "HND")
    heads_first.plan(b.qo_indptr, kv_indptr, b.heads, b.kv_heads, dim, causal=causal, q_data_type=b.dtype)
    same(heads_first.run(b.q, k.transpose(0, 1), v.transpose(0, 1)), b.wanted(causal=causal)[0])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("lens", [(1, 9), (5, 13), (4, 2), (3, 0), (0, 3)])
def test_single_requests(lens: tuple[int, int], layout: str) -> None:
    b = batch([lens])
    k, v, _ = packed(b)
    if layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    for causal, window, cap in ((False, -1, None), (True, 2, 4.0)):
        wanted = b.wanted(causal=causal, window_left=window, cap=cap)
        settings: dict[str, Any] = dict(kv_layout=layout, window_left=window, logits_soft_cap=cap)
        got = flashinfer.single_prefill_with_kv_cache_return_lse(b.q, k, v, causal=causal, **settings)
        expect(got, wanted)
        if lens[0] == 1:
            out, lse = flashinfer.single_decode_with_kv_cache(b.q[0], k, v, return_lse=True, **settings)
            expect((out[None], lse[None]), wanted)
            same(flashinfer.single_decode_with_kv_cache(b.q[0], k, v, **settings)[None], wanted[0])


@pytest.mark.parametrize(
    ("heads", "powers"),
    [(8, [1, 2, 3, 4, 5, 6, 7, 8]), (2, [4, 8]), (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5])],
)
def test_alibi(heads: int, powers: list[float]) -> None:
    """ALiBi works with any number of heads; positions are relative to a request's first query."""
    slopes = 0.5 ** torch.tensor(powers)
    named: Any = {"pos_encoding_mode": "ALIBI"}
    b, d = (batch(lens, heads=heads) for lens in (RAGGED, DECODES))
    k, v, kv_indptr = packed(b)
    for causal in (False, True):
        wanted = b.wanted(causal=causal, slopes=slopes)
        expect(prefill_planned(b, causal=causal, **named).run(b.q, b.cache, return_lse=True), wanted)
        expect(ragged_planned(b, kv_indptr, causal=causal, **named).run(b.q, k, v, return_lse=True), wanted)
    expect(decode_planned(d, **named).run(d.q, d.cache, return_lse=True), d.wanted(slopes=slopes))


def test_alibi_is_refused_beside_what_knows_no_positions() -> None:
    b = batch([(3, 9)])
    k, v, _ = packed(b)
    with pytest.raises(Unsupported, match="expected logits_soft_cap=None with ALIBI, got 5"):
        flashinfer.single_prefill_with_kv_cache(b.q, k, v, pos_encoding_mode="ALIBI", logits_soft_cap=5.0)
    with pytest.raises(Unsupported, match="expected sinks=None with pos_encoding_mode='ALIBI', got a tensor"):
        prefill_planned(b, pos_encoding_mode="ALIBI").run(b.q, b.cache, sinks=torch.zeros(4))
    mask = torch.rand(3, 9, generator=torch.Generator().manual_seed(0)) < 0.5
    with pytest.raises(Unsupported, match="expected pos_encoding_mode='NONE' with a custom mask, got 'ALIBI'"):
        flashinfer.single_prefill_with_kv_cache(b.q, k, v, pos_encoding_mode="ALIBI", custom_mask=mask)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_results_of_another_dtype(dtype: torch.dtype) -> None:
    b = batch(RAGGED, dtype=dtype)
    k, v, kv_indptr = packed(b)
    wanted = b.wanted(causal=True)
    expect(prefill_planned(b, causal=True).run(b.q, b.cache, return_lse=True), wanted, dtype)
    expect(ragged_planned(b, kv_indptr, causal=True).run(b.q, k, v, return_lse=True), wanted, dtype)
    wide = prefill_planned(b, causal=True, o_data_type="float32").run(b.q, b.cache)
    assert wide.dtype == torch.float32
    same(wide, wanted[0], dtype)
    out = torch.empty(b.q.shape)
    ragged = ragged_planned(b, kv_indptr, causal=True, o_data_type=torch.float32)
    assert ragged.run(b.q, k, v, out=out) is out
    same(out, wanted[0], torch.float32)


@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2])
def test_8_bit_caches_and_scales(cache_dtype: torch.dtype) -> None:
    b = batch(DECODES, dtype=torch.bfloat16, cache_dtype=cache_dtype)
    settings: dict[str, Any] = dict(kv_data_type=cache_dtype)
    out, lse = b.wanted(sm_scale=b.dim**-0.5 * 0.5 * 0.75)
    wrapper = decode_planned(b, **settings)
    given: dict[str, Any] = dict(q_scale=0.75, return_lse=True)
    expect(wrapper.run(b.q, b.cache, k_scale=0.5, v_scale=2.0, **given), (out * 2, lse), torch.bfloat16)
    tensors = wrapper.run(b.q, b.cache, k_scale=torch.tensor([0.5]), v_scale=torch.tensor(2.0), **given)
    expect(tensors, (out * 2, lse), torch.bfloat16)
    k, v, kv_indptr = packed(b)
    ragged = ragged_planned(b, kv_indptr, **settings)
    got = ragged.run(b.q, k.to(cache_dtype), v.to(cache_dtype), k_scale=0.5, v_scale=2.0, **given)
    expect(got, (out * 2, lse), torch.bfloat16)
    one = flashinfer.single_decode_with_kv_cache(
        b.q[0], k[:9].to(cache_dtype), v[:9].to(cache_dtype), q_scale=0.75, k_scale=0.5, v_scale=2.0
    )
    same(one[None], out[:1] * 2, torch.bfloat16)


def test_scales_of_int8_caches() -> None:
    """Scales of int8 codes may be numbers or tensors. Without scales, the codes are the values."""
    b = batch(DECODES, dtype=torch.bfloat16, cache_dtype=torch.int8)
    wrapper = decode_planned(b, kv_data_type=torch.int8)
    expect(wrapper.run(b.q, b.cache, return_lse=True), b.wanted(), torch.bfloat16)
    out, lse = b.wanted(sm_scale=b.dim**-0.5 * 0.5)
    for k_scale, v_scale in ((0.5, 2.0), (torch.tensor([0.5]), torch.tensor(2.0))):
        got = wrapper.run(b.q, b.cache, k_scale=k_scale, v_scale=v_scale, return_lse=True)
        expect(got, (out * 2, lse), torch.bfloat16)


def test_8_bit_queries_with_scales_per_head() -> None:
    b = batch([(3, 9)], dtype=torch.bfloat16, cache_dtype=E4M3)
    q, (k, v, kv_indptr) = b.q.to(E4M3), packed(b)
    k, v = k.to(E4M3), v.to(E4M3)
    scale_q, scale_k, scale_v = torch.tensor([0.5, 1.0, 0.25, 2.0]), torch.tensor([1.5, 0.5]), torch.tensor([2.0, 0.5])
    per_head: Any = (1, -1, 1)
    exact = dense(
        q.float() * scale_q.view(per_head), k.float() * scale_k.view(per_head), v.float() * scale_v.view(per_head),
        causal=True,
    )  # fmt: skip
    single = flashinfer.single_prefill_with_kv_cache(
        q, k, v, scale_q, scale_k, scale_v, o_dtype=torch.bfloat16, causal=True, return_lse=True
    )
    same(single[0], exact[0], torch.bfloat16)
    settings: dict[str, Any] = dict(causal=True, q_data_type=E4M3, kv_data_type=E4M3, o_data_type=torch.bfloat16)
    paged = prefill_planned(b, **settings).run(q, b.cache, scale_q, scale_k, scale_v)
    same(paged, exact[0], torch.bfloat16)
    ragged = ragged_planned(b, kv_indptr, **settings).run(q, k, v, scale_q, scale_k, scale_v)
    same(ragged, exact[0], torch.bfloat16)
    coarse = b.q.to(E5M2)
    exact = dense(
        coarse.float() * scale_q.view(per_head), k.float() * scale_k.view(per_head), v.float() * scale_v.view(per_head),
        causal=True,
    )  # fmt: skip
    same(ragged_planned(b, kv_indptr, **settings | {"q_data_type": E5M2}).run(coarse, k, v, scale_q, scale_k, scale_v),
         exact[0], torch.bfloat16)  # fmt: skip
    with pytest.raises(InvalidInput, match=r"expected q_scale only with q of float8_e4m3fn, got q.dtype bfloat16"):
        flashinfer.single_prefill_with_kv_cache(b.q, k, v, scale_q)
    narrow = flashinfer.single_prefill_with_kv_cache(b.q.to(E5M2), k, v, causal=True)
    assert narrow.dtype == torch.bfloat16
    same(narrow, dense(b.q.to(E5M2).float(), k.float(), v.float(), causal=True)[0], torch.bfloat16)


def test_factors_of_packed_16_bit_keys() -> None:
    b = batch(RAGGED)
    k, v, kv_indptr = packed(b)
    out, lse = b.wanted(sm_scale=b.dim**-0.5 * 0.5)
    for k_scale, v_scale in ((0.5, 2.0), (torch.tensor(0.5), torch.tensor([2.0]))):
        buffer = torch.empty(b.q.shape)
        got = ragged_planned(b, kv_indptr).run(b.q, k, v, k_scale=k_scale, v_scale=v_scale, return_lse=True, out=buffer)
        assert got[0] is buffer
        expect(got, (out * 2, lse))
        same(ragged_planned(b, kv_indptr).run(b.q, k, v, k_scale=k_scale, v_scale=v_scale), out * 2)


def test_scales_per_head_of_packed_16_bit_keys() -> None:
    b = batch([(3, 9)])
    k, v, _ = packed(b)
    scale_k, scale_v = torch.tensor([1.5, 0.5]), torch.tensor([2.0, 0.25])
    wanted = dense(b.q, k * scale_k[:, None], v * scale_v[:, None], causal=True)
    given: Any = dict(causal=True, return_lse=True)
    expect(flashinfer.single_prefill_with_kv_cache(b.q, k, v, scale_k=scale_k, scale_v=scale_v, **given), wanted)


def test_several_queries_per_request_of_a_decode() -> None:
    b = batch([(3, 9), (3, 3), (3, 13)])
    for is_causal in (None, True, False):
        wrapper = decode_planned(b, q_len_per_req=3, is_causal=is_causal)
        expect(wrapper.run(b.q, b.cache, return_lse=True), b.wanted(causal=is_causal is not False))
    with pytest.warns(DeprecationWarning, match="q_len_per_req is an argument of plan"):
        decode_planned(b, q_len_per_req=3).run(b.q, b.cache, q_len_per_req=3)


def test_fast_plans_of_decodes() -> None:
    b = batch(DECODES)
    wrapper = decode_planned(batch([(1, 3)]))
    given = (b.indices, b.last, 4, 2, 32, 4, "NONE", 5, 3.0)
    wanted = b.wanted(window_left=5, cap=3.0)
    flashinfer.fast_decode_plan(wrapper, b.indptr, *given, q_data_type="float32")
    expect(wrapper.run(b.q, b.cache, return_lse=True), wanted)
    wrong = torch.zeros_like(b.indptr)
    flashinfer.fast_decode_plan(wrapper, wrong, *given, data_type=torch.float32, global_override_indptr_cpu=b.indptr)
    expect(wrapper.run(b.q, b.cache, return_lse=True), wanted)


@pytest.mark.parametrize("with_prefix", [False, True])
@pytest.mark.parametrize("window", [-1, 4])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_custom_masks(as_bytes: bool, window: int, with_prefix: bool) -> None:
    """Custom masks may hide keys before the new tokens. A mask that shows all of these keys runs as a draft mask."""
    b = batch(RAGGED)
    generator = torch.Generator().manual_seed(7)
    masks = [torch.rand(q_len, kv_len, generator=generator) < 0.6 for q_len, kv_len in b.lens]
    if with_prefix:
        for mask, (q_len, kv_len) in zip(masks, b.lens, strict=True):
            mask[:, : max(kv_len - q_len, 0)] = True
    parts = [
        dense(b.q[start : start + q_len], k, v, mask=mask, window_left=window)
        for start, k, v, mask, (q_len, _) in zip(b.qo_indptr.tolist(), b.keys, b.values, masks, b.lens, strict=False)
    ]
    wanted = torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
    k, v, kv_indptr = packed(b)
    flat = torch.cat([mask.flatten() for mask in masks])
    given: dict[str, Any] = {"custom_mask": flat, "window_left": window}
    if as_bytes:
        edges = torch.tensor([0, *(mask.numel() for mask in masks)]).cumsum(0).int()
        bits, _ = flashinfer.segment_packbits(flat, edges, bitorder="little")
        given = {"packed_custom_mask": bits, "window_left": window}
    for causal in (False, True):  # `causal` has no effect if there is a mask
        paged = prefill_planned(b, causal=causal, **given)
        assert (paged._mask.draft is not None) == with_prefix
        expect(paged.run(b.q, b.cache, return_lse=True), wanted)
        expect(ragged_planned(b, kv_indptr, causal=causal, **given).run(b.q, k, v, return_lse=True), wanted)
    q_len, kv_len = b.lens[4]
    start, first = b.qo_indptr[4], kv_indptr[4]
    one = {"packed_custom_mask": flashinfer.packbits(masks[4], "little")} if as_bytes else {"custom_mask": masks[4]}
    single = flashinfer.single_prefill_with_kv_cache(
        b.q[start : start + q_len], k[first : first + kv_len], v[first : first + kv_len], window_left=window,
        return_lse=True, **one,
    )  # fmt: skip
    expect(single, parts[4])


def test_no_page_of_a_masked_batch_is_read_outside() -> None:
    b = batch([(2, 9)])
    mask = torch.rand(18) < 0.5
    wrapper = prefill_planned(b, custom_mask=mask)
    wrapper._tables.page_indices[0, 1] = 2**30  # an invalid page: positions 4 to 7 have no keys
    seen = mask.view(2, 9).clone()
    seen[:, 4:8] = False
    k, v = (torch.where((torch.arange(9) // 4 == 1)[:, None, None], 0, each[0]) for each in (b.keys, b.values))
    expect(wrapper.run(b.q, b.cache, return_lse=True), dense(b.q, k, v, mask=seen))


def test_bits_are_packed_as_numpy_packs_them() -> None:
    bits = torch.rand(3, 7) < 0.5
    for order in ("big", "little"):
        want = np.packbits(bits.numpy().reshape(-1), bitorder=order)  # type: ignore[call-overload]
        assert flashinfer.packbits(bits, order).tolist() == want.tolist()
    packed_bits, edges = flashinfer.segment_packbits(bits.flatten(), torch.tensor([0, 3, 3, 21], dtype=torch.int32))
    assert edges.tolist() == [0, 1, 1, 4]
    assert packed_bits.tolist() == [*flashinfer.packbits(bits.flatten()[:3]), *flashinfer.packbits(bits.flatten()[3:])]


def test_sinks_count_in_the_log_sum_exp() -> None:
    b = batch(RAGGED)
    sinks = torch.tensor([0.5, -3.0, 4.0, -torch.inf])
    wanted = b.wanted(causal=True, sinks=sinks)
    expect(prefill_planned(b, causal=True).run(b.q, b.cache, sinks=sinks, return_lse=True), wanted)
    k, v, kv_indptr = packed(b)
    ragged = ragged_planned(b, kv_indptr, causal=True)
    ragged._sinks = sinks  # vLLM sets this attribute too
    expect(ragged.run(b.q, k, v, return_lse=True), wanted)
    d = batch(DECODES)
    expect(decode_planned(d).run(d.q, d.cache, sinks=sinks, return_lse=True), d.wanted(sinks=sinks))


def test_bases_layouts_and_buffers_of_results() -> None:
    b = batch(RAGGED)
    k, v, kv_indptr = packed(b)
    wanted = b.wanted(causal=True)
    paged, ragged = prefill_planned(b, causal=True), ragged_planned(b, kv_indptr, causal=True)
    for run in (lambda **given: paged.run(b.q, b.cache, **given), lambda **given: ragged.run(b.q, k, v, **given)):
        out, lse = torch.empty(b.q.shape), torch.empty(b.heads, len(b.q))
        got = run(out=out, lse=lse, return_lse=True, lse_base="ln", lse_layout="HN")
        assert got[0] is out
        assert got[1] is lse
        expect((out, lse.T), (wanted[0], wanted[1] * LN2))
        assert run(out=out, lse=lse.zero_(), lse_layout="HN") is out  # lse is written without return_lse too
        same(lse.T, wanted[1])
        with pytest.raises(InvalidInput, match="expected lse_base to be log2 or ln, got 'log10'"):
            run(return_lse=True, lse_base="log10")
        with pytest.raises(InvalidInput, match="expected lse_layout to be NH or HN, got 'TH'"):
            run(return_lse=True, lse_layout="TH")
        with pytest.raises(
            InvalidInput, match=r"expected lse to be torch.float32 \[15, 4\], got torch.float32 \[4, 15"
        ):
            run(return_lse=True, lse=lse)


def test_deprecated_forward_replaces_the_settings_of_the_plan() -> None:
    b, d = batch(RAGGED), batch(DECODES)
    k, v, kv_indptr = packed(b)
    given: dict[str, Any] = dict(window_left=3, logits_soft_cap=2.0, sm_scale=0.4)
    ours: dict[str, Any] = dict(window_left=3, cap=2.0, sm_scale=0.4)
    paged, ragged, decode = prefill_planned(b), ragged_planned(b, kv_indptr), decode_planned(d)
    expect(paged.forward_return_lse(b.q, b.cache, causal=True, **given), b.wanted(causal=True, **ours))
    same(paged.forward(b.q, b.cache, causal=True, **given), b.wanted(causal=True, **ours)[0])
    expect(ragged.forward_return_lse(b.q, k, v, causal=True, **given), b.wanted(causal=True, **ours))
    same(ragged.forward(b.q, k, v, **given), b.wanted(**ours)[0])
    expect(decode.forward_return_lse(d.q, d.cache, **given), d.wanted(**ours))
    same(decode.forward(d.q, d.cache, **given), d.wanted(**ours)[0])


def test_block_tables_and_lengths_replace_row_pointers() -> None:
    b = batch(RAGGED)
    rows = [b.indices[start:end] for start, end in zip(b.indptr.tolist(), b.indptr.tolist()[1:], strict=False)]
    table = torch.full((len(rows), 5), 2**30, dtype=torch.int32)
    for row, pages in zip(table, rows, strict=True):
        row[: len(pages)] = pages
    lens = torch.tensor([kv_len for _, kv_len in b.lens], dtype=torch.int32)
    b.indptr, b.indices, b.last = torch.zeros_like(b.indptr), b.indices[:0], torch.zeros_like(b.last)
    wrapper = prefill_planned(b, causal=True, block_tables=table, seq_lens=lens)
    expect(wrapper.run(b.q, b.cache, return_lse=True), b.wanted(causal=True))


def test_graphs_keep_the_tensors_of_the_first_plan() -> None:
    long, short = batch([(1, 30), (1, 9)]), batch([(1, 5), (1, 0)], seed=1)
    wrapper = decode_planned(long, graph=True)
    assert wrapper.is_cuda_graph_enabled
    kept = wrapper._tables
    addresses = [tensor.data_ptr() for tensor in (kept.cu_q_lens, kept.kv_lens, kept.page_indices)]
    given = [short.indptr, short.indices, short.last, 4, 2, 32, 4]
    wrapper.plan(*given, q_data_type="float32")
    now = wrapper._tables
    assert [tensor.data_ptr() for tensor in (now.cu_q_lens, now.kv_lens, now.page_indices)] == addresses
    assert (now.page_indices[:, 2:] == -1).all()
    expect(wrapper.run(short.q, short.cache, return_lse=True), short.wanted())
    longer, other = batch([(1, 40), (1, 9)]), batch(DECODES)
    with pytest.raises(InvalidInput, match="expected at most 8 pages per sequence with use_cuda_graph=True, got 10"):
        wrapper.plan(longer.indptr, longer.indices, longer.last, 4, 2, 32, 4, q_data_type="float32")
    with pytest.raises(InvalidInput, match="expected batch_size=2, which is fixed with use_cuda_graph=True, got 4"):
        wrapper.plan(other.indptr, other.indices, other.last, 4, 2, 32, 4, q_data_type="float32")
    with pytest.raises(InvalidInput, match="expected q_len_per_req=1, which is fixed with use_cuda_graph=True, got 2"):
        wrapper.plan(*given, q_data_type="float32", q_len_per_req=2)
    with pytest.raises(Unsupported, match=r"expected custom_mask=None, got a tensor of shape .*use_cuda_graph=True"):
        prefill_planned(batch([(1, 3)]), graph=True, custom_mask=torch.ones(3, dtype=torch.bool))


def test_graphs_have_room_for_as_many_pages_as_the_callers_buffer() -> None:
    empty, long = batch([(1, 0), (1, 0)]), batch([(1, 40), (1, 9)])
    buffer = torch.empty(21, dtype=torch.int32)
    decode = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, long.indptr, buffer, long.last)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        WORKSPACE, use_cuda_graph=True, paged_kv_indices_buf=buffer
    )
    latent = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE, True, kv_indices=buffer)
    for b in (empty, long):
        given = (b.indptr, b.indices, b.last, 4, 2, 32, 4)
        decode.plan(*given, q_data_type="float32")
        prefill.plan(b.qo_indptr, *given, q_data_type="float32")
        lens = torch.tensor([kv_len for _, kv_len in b.lens])
        latent.plan(b.qo_indptr, b.indptr, b.indices, lens, 4, 16, 16, 4, False, 32**-0.5, torch.float32, torch.float32)
        for wrapper in (decode, prefill, latent):
            assert list(wrapper._tables.page_indices.shape) == [2, 11]
        for wrapper in (decode, prefill):
            expect(wrapper.run(b.q, b.cache, return_lse=True), b.wanted())
        one = [k[:, :1] for k in b.keys]
        parts = [dense(b.q[[row]], one[row], one[row][..., :16]) for row in range(2)]
        keys = b.cache[0][:, :, 0]
        for cache in (keys, (keys[..., :16].clone(), keys[..., 16:].clone())):
            out, lse = latent.run(query=b.q, kv_cache=cache, return_lse=True)
            expect((out, lse), (torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])))


def test_graphs_over_packed_keys() -> None:
    first, second = batch([(3, 9), (2, 7)]), batch([(1, 4), (4, 6)], seed=1)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, use_cuda_graph=True)
    for b in (first, second):
        k, v, kv_indptr = packed(b)
        given = b.qo_indptr.clone()
        wrapper.plan(given, kv_indptr, 4, 2, 32, causal=True, q_data_type="float32")
        assert torch.equal(given, b.qo_indptr)
        expect(wrapper.run(b.q, k, v, return_lse=True), b.wanted(causal=True))
    with pytest.raises(InvalidInput, match="expected batch_size=2, which is fixed with use_cuda_graph=True, got 1"):
        wrapper.plan(given[:2], kv_indptr[:2], 4, 2, 32)
    with pytest.raises(
        Unsupported, match="expected 16-bit queries and keys with use_cuda_graph=True, got q_data_type="
    ):
        wrapper.plan(given, kv_indptr, 4, 2, 32, q_data_type=E4M3)
    assert flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, given, given, given).is_cuda_graph_enabled


def test_fixed_splits_are_batch_invariant() -> None:
    lens = [(1, 300), (1, 5), (1, 77)]
    b = batch(lens, page_size=16)
    every: Any = {"fixed_split_size": 4}, {"disable_split_kv": True}
    for settings in every:
        whole = decode_planned(b, **settings).run(b.q, b.cache)
        same(whole, b.wanted()[0])
        one = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
        one.plan(b.indptr[:2], b.indices, b.last[:1], 4, 2, 32, 16, q_data_type="float32", **settings)
        assert torch.equal(one.run(b.q[:1], b.cache)[0], whole[0])


def test_empty_batches() -> None:
    b = batch([])
    k, v, kv_indptr = torch.empty(0, 2, 32), torch.empty(0, 2, 32), torch.zeros(1, dtype=torch.int32)
    masks: Any = {}, {"custom_mask": torch.empty(0, dtype=torch.bool)}
    for given in masks:
        for got in (
            prefill_planned(b, causal=True, **given).run(b.q, b.cache, return_lse=True),
            ragged_planned(b, kv_indptr, **given).run(b.q, k, v, return_lse=True),
        ):
            assert [list(each.shape) for each in got] == [[0, 4, 32], [0, 4]]
    out, lse = decode_planned(b).run(b.q, b.cache, return_lse=True)
    assert (list(out.shape), list(lse.shape)) == ([0, 4, 32], [0, 4])


def test_pages_of_one_position_need_no_axis_for_it() -> None:
    b = batch(DECODES, 1, form="one")
    wrapper, wanted = decode_planned(b), b.wanted()
    expect(wrapper.run(b.q, b.cache[:, :, 0], return_lse=True), wanted)
    expect(wrapper.run(b.q, (b.cache[:, 0, 0], b.cache[:, 1, 0]), return_lse=True), wanted)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("cache_dtype", [torch.float32, E4M3])
def test_appending_keys(layout: str, cache_dtype: torch.dtype) -> None:
    b = batch([(3, 9), (2, 2), (0, 5), (4, 13)], layout=layout, form="one", cache_dtype=cache_dtype)
    lens = flashinfer.get_seq_lens(b.indptr, b.last, b.page_size)
    assert lens.tolist() == [9, 2, 5, 13]
    count = int(b.qo_indptr[-1])
    rows, positions = flashinfer.get_batch_indices_positions(b.qo_indptr, lens, count + 2)
    assert rows.tolist() == [0, 0, 0, 1, 1, 3, 3, 3, 3, -1, -1]
    assert positions.tolist() == [6, 7, 8, 0, 1, 9, 10, 11, 12, 0, 0]
    k, v = (
        torch.cat([each[kv - q :] for each, (q, kv) in zip(all_, b.lens, strict=True)]) for all_ in (b.keys, b.values)
    )
    padding = torch.full((2, 2, 32), torch.nan)
    k, v = torch.cat([k, padding]), torch.cat([v, padding])
    cache = torch.zeros_like(b.cache.float()).to(cache_dtype)
    given = (rows, positions, cache, b.indices, b.indptr, b.last, layout)
    flashinfer.append_paged_kv_cache(k, v, *given)
    view = cache.float().transpose(2, 3) if layout == "HND" else cache.float()
    for row, position, key, value in zip(rows.tolist()[:count], positions.tolist(), k, v, strict=False):
        page = int(b.indices[b.indptr[row] + position // 4])
        assert torch.equal(view[page, :, position % 4], torch.stack([key, value]))
        view[page, :, position % 4] = 0
    assert not view.any()


def test_rows_without_a_place_are_not_appended() -> None:
    cache = torch.zeros(3, 2, 4, 1, 16)
    row = torch.ones(4, 1, 16)
    request, position = torch.tensor([0, 0, 5, -1]), torch.tensor([-1, 4, 0, 0])
    tables = (torch.tensor([1, 2]), torch.tensor([0, 1]), torch.tensor([4]))
    flashinfer.append_paged_kv_cache(row, row, request, position, cache, *tables)
    assert not cache.any()
    nothing = (torch.tensor([], dtype=torch.int32), torch.tensor([0]), torch.tensor([], dtype=torch.int32))
    flashinfer.append_paged_kv_cache(row, row, request, position, cache, *nothing)
    assert not cache.any()
    buffers = torch.zeros(2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    got = flashinfer.get_batch_indices_positions(torch.tensor([0]), torch.tensor([]), 2, *buffers)
    assert got[0] is buffers[0]
    assert [each.tolist() for each in got] == [[-1, -1], [0, 0]]


def test_appending_latents() -> None:
    whole = torch.zeros(4, 4, 96)
    ckv, kpe = torch.randn(3, 64), torch.randn(3, 32)
    rows, positions = torch.tensor([0, 0, 1]), torch.tensor([3, 4, 0])
    tables = (torch.tensor([2, 0, 1]), torch.tensor([0, 2, 3]), torch.tensor([1, 1]))
    for joined in (True, False):
        caches = (whole[..., :64], whole[..., 64:]) if joined else (torch.zeros(4, 4, 64), torch.zeros(4, 4, 32))
        flashinfer.append_paged_mla_kv_cache(ckv, kpe, rows, positions, *caches, *tables)
        for cache, values in zip(caches, (ckv, kpe), strict=True):
            assert torch.equal(torch.stack([cache[2, 3], cache[0, 0], cache[1, 0]]), values)
            assert int(cache.any(-1).sum()) == 3
    flashinfer.append_paged_mla_kv_cache(ckv, kpe, rows, positions, None, caches[1], *tables)


def test_merges() -> None:
    b = batch([(3, 10)])
    k, v, _ = packed(b)
    cuts = (0, 4, 4, 7, 10)  # the second part is empty
    parts = [
        flashinfer.single_prefill_with_kv_cache(b.q, k[start:end], v[start:end], return_lse=True)
        for start, end in itertools.pairwise(cuts)
    ]
    wanted = b.wanted()
    outs, lses = torch.stack([out for out, _ in parts], 1), torch.stack([lse for _, lse in parts], 1)
    outs[:, 1] = torch.nan  # the empty part has no weight
    expect(flashinfer.merge_states(outs, lses), wanted)
    out, lse = parts[0]
    for other in (parts[2], parts[3]):
        out, lse = flashinfer.merge_state(out, lse, *other)
    expect((out, lse), wanted)
    out, lse = parts[0]
    first = out.clone(), lse.clone()
    flashinfer.merge_state_in_place(out, lse, *parts[2], mask=torch.tensor([True, False, True]))
    half = dense(b.q, k[:7], v[:7])
    expect((out[[0, 2]], lse[[0, 2]]), (half[0][[0, 2]], half[1][[0, 2]]))
    assert torch.equal(out[1], first[0][1])
    assert torch.equal(lse[1], first[1][1])
    flashinfer.merge_state_in_place(*first, *parts[2])
    expect(first, half)
    with pytest.raises(InvalidInput, match=r"expected v.shape and s.shape to be"):
        flashinfer.merge_states(outs, lses[:, :2])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_cascades(layout: str) -> None:
    """Cascades work for three requests that share a prefix of eight keys and prefill or decode their own keys."""
    b = batch([(7, 8), (3, 5), (0, 4), (4, 9)], layout=layout)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, WORKSPACE, layout)
    q, own = b.q[7:], b.qo_indptr[1:] - 7
    levels: Any = (
        [torch.tensor([0, 7], dtype=torch.int32), own],
        [b.indptr[:2], b.indptr[1:]],
        [b.indices, b.indices],
        [b.last[:1], b.last[1:]],
    )
    want = torch.cat(
        [
            dense_after(q[start:end], b.keys[0], b.values[0], k, v)
            for start, end, k, v in zip(own.tolist(), own.tolist()[1:], b.keys[1:], b.values[1:], strict=False)
        ]
    )
    wrapper.plan(*levels, 4, 2, 32, 4, causal=True, q_data_type="float32")
    same(wrapper.run(q, b.cache), want)
    same(wrapper.forward(q, b.cache), want)
    shared: list[Any] = [b.keys[0], b.values[0]]
    if layout == "HND":
        shared = [each.transpose(0, 1) for each in shared]
    prefix = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(WORKSPACE, layout)
    half: Any = tuple(pages.half() for pages in b.cache)
    prefix.begin_forward(own, b.indptr[1:], b.indices, b.last[1:], 4, 2, 32, 4)
    got = prefix.forward(q.half(), *(each.half() for each in shared), half, causal=True)
    torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)  # all operands are in half precision
    d = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(WORKSPACE, layout)
    d.begin_forward(b.indptr[1:], b.indices, b.last[1:], 4, 2, 32, 4, data_type="float32")
    rows = q[[0, 3, 4]]
    exact = [
        dense(row[None], torch.cat([b.keys[0], k]), torch.cat([b.values[0], v]))[0]
        for row, k, v in zip(rows, b.keys[1:], b.values[1:], strict=True)
    ]
    same(d.forward(rows, *shared, b.cache), torch.cat(exact))
    for each in (wrapper, prefix, d):
        buffers: Any = [None, None] if each is wrapper else None
        each.reset_workspace_buffer(WORKSPACE, buffers)
    with pytest.raises(Unsupported, match="expected window_left=-1, got 3: a window would count from the end of each"):
        wrapper.plan(*levels, 4, 2, 32, 4, window_left=3)
    with pytest.raises(InvalidInput, match=r"to have num_levels=2 tensors, got \[2, 2, 2, 1\]"):
        wrapper.plan(*levels[:3], levels[3][:1], 4, 2, 32, 4)


def dense_after(q: Any, prefix_k: Any, prefix_v: Any, k: Any, v: Any) -> Any:
    """Dense attention in which queries see the whole prefix, and their own keys causally."""
    return dense(q, torch.cat([prefix_k, k]), torch.cat([prefix_v, v]), causal=True)[0]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("form", ["views", "gap", "apart", "apart, in a large cache", "packed"])
def test_latents(form: str, page_size: int, causal: bool) -> None:
    b = batch(RAGGED, page_size, kv_heads=1, dim=96)
    keys, sm_scale = b.cache[0][:, :, 0], 0.1
    parts = [
        dense(b.q[start : start + q_len], k, k[..., :64], causal=causal, sm_scale=sm_scale)
        for start, k, (q_len, _) in zip(b.qo_indptr.tolist(), b.keys, b.lens, strict=False)
    ]
    wanted = torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
    lens = torch.tensor([kv_len for _, kv_len in b.lens], dtype=torch.int32)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    settings: dict[str, Any] = dict(
        num_heads=4, head_dim_ckv=64, head_dim_kpe=32, page_size=page_size, causal=causal, sm_scale=sm_scale,
        q_data_type=torch.float32, kv_data_type=torch.float32,
    )  # fmt: skip
    longer = torch.cat([b.indptr, torch.tensor([3, 2**30], dtype=torch.int32)])  # FlashInfer allows extra entries
    csr = flashinfer.mla.MLAPlanMetadata.csr(b.qo_indptr, longer, b.indices, lens)
    if form == "packed":
        query, cache = b.q, keys
        wrapper.plan(metadata=csr, **settings)
    else:
        query, cache = (b.q[..., :64], b.q[..., 64:]), (keys[..., :64], keys[..., 64:])
        if form == "gap":  # two views of one tensor that are not adjacent
            wide = torch.full((*keys.shape[:2], 104), torch.nan)
            wide[..., :64], wide[..., 72:] = cache
            cache = (wide[..., :64], wide[..., 72:])
        if form.startswith("apart"):
            query, cache = tuple(each.contiguous() for each in query), tuple(each.contiguous() for each in cache)
        if form == "apart, in a large cache":
            cache = tuple(torch.cat([each, torch.full((99, *each.shape[1:]), torch.nan)]) for each in cache)
        wrapper.plan(b.qo_indptr, b.indptr, b.indices, lens, *settings.values())
    expect(wrapper.run(query=query, kv_cache=cache, return_lse=True), wanted)
    if form != "packed":
        expect(wrapper.run(*query, *cache, return_lse=True), wanted)
        same(wrapper.run(*query, *cache), wanted[0])
        expect(wrapper.run_return_lse(*query, *cache, return_lse_base_on_e=True), (wanted[0], wanted[1] * LN2))
    table = wrapper._tables.page_indices
    dense_tables = flashinfer.mla.MLAPlanMetadata.dense(b.qo_indptr, table, lens, 5)
    both = flashinfer.mla.MLAPlanMetadata.dual(
        b.qo_indptr, b.indptr, b.indices, lens, cum_seq_lens_q=b.qo_indptr, block_tables=table, seq_lens=lens
    )
    for metadata in (dense_tables, both):
        wrapper.plan(metadata=metadata, **settings)
        expect(wrapper.run(query=query, kv_cache=cache, return_lse=True), wanted)
    wrapper.plan(cum_seq_lens_q=b.qo_indptr, block_tables=table, seq_lens=lens, **settings)
    sinks = torch.tensor([0.5, -3.0, 4.0, 0.0])
    out, lse = wrapper.run(query=query, kv_cache=cache, sinks=sinks, return_lse=True)
    factor = torch.sigmoid(wanted[1] * LN2 - sinks)
    expect((out, lse), (wanted[0] * factor[..., None], torch.logaddexp(wanted[1] * LN2, sinks.double()) / LN2))


@pytest.mark.parametrize("kpe_scale", [0.5, 3.0])
def test_8_bit_latents(kpe_scale: float) -> None:
    b = batch([(3, 9), (1, 5)], kv_heads=1, dim=96, dtype=torch.bfloat16, cache_dtype=E4M3)
    factor = torch.cat([torch.full((64,), 0.5), torch.full((32,), kpe_scale)])
    parts = [
        dense(b.q[start : start + q_len], k * factor, k[..., :64] * 0.5, causal=True)
        for start, k, (q_len, _) in zip(b.qo_indptr.tolist(), b.keys, b.lens, strict=False)
    ]
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    metadata = flashinfer.mla.MLAPlanMetadata.csr(b.qo_indptr, b.indptr, b.indices, torch.tensor([9, 5]))
    wrapper.plan(
        metadata=metadata, num_heads=4, head_dim_ckv=64, head_dim_kpe=32, page_size=4, causal=True, sm_scale=96**-0.5,
        q_data_type=torch.bfloat16, kv_data_type=E4M3,
    )  # fmt: skip
    cache = b.cache[0][:, :, 0]
    out = wrapper.run(query=b.q, kv_cache=cache, ckv_scale=0.5, kpe_scale=kpe_scale)
    assert out.dtype == torch.bfloat16
    same(out, torch.cat([each for each, _ in parts]), torch.bfloat16)
    with pytest.raises(InvalidInput, match="expected ckv_scale and kpe_scale with an 8-bit cache, got None"):
        wrapper.run(query=b.q, kv_cache=cache)
    with pytest.raises(InvalidInput, match=r"expected ckv_scale and kpe_scale together, got 0.5 and None"):
        wrapper.run(query=b.q, kv_cache=cache, ckv_scale=0.5)
    assert not wrapper.run(query=b.q, kv_cache=cache, ckv_scale=0.0, kpe_scale=kpe_scale).any()
    with pytest.raises(InvalidInput, match="expected kpe_scale to be finite, got inf"):
        wrapper.run(query=b.q, kv_cache=cache, ckv_scale=0.5, kpe_scale=float("inf"))
    with pytest.raises(TypeError, match="expected kpe_scale to be a number, got Tensor"):
        wrapper.run(query=b.q, kv_cache=cache, ckv_scale=0.5, kpe_scale=torch.ones(1))


@pytest.mark.parametrize("tie_break", list(flashinfer.TopKTieBreak))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_k(dtype: torch.dtype, tie_break: int) -> None:
    values = torch.tensor([[1.0, 5, 5, 2, 5, -torch.inf], [0.0, 0, 0, 0, 0, 0]], dtype=dtype)
    got, columns = flashinfer.top_k(values, 2, tie_break=tie_break)
    assert (got.dtype, columns.dtype) == (dtype, torch.int64)
    assert got.tolist() == [[5, 5], [0, 0]]
    assert torch.equal(columns, columns.sort(1)[0])
    assert torch.equal(values.gather(1, columns), got)
    wanted: Any = {1: [{1, 2}, {0, 1}], 2: [{2, 4}, {4, 5}]}
    if tie_break in wanted:
        assert [set(row.tolist()) for row in columns] == wanted[tie_break]
    every, columns = flashinfer.top_k(values, 6, tie_break=tie_break)
    assert torch.equal(every, values)
    assert columns.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    ranked, columns = flashinfer.top_k(values, 6, sorted=True, tie_break=tie_break)
    assert torch.equal(ranked, values.sort(1, descending=True)[0])
    assert torch.equal(values.gather(1, columns), ranked)
    with pytest.raises(InvalidInput, match=r"with 1 <= k <= d, got \[2, 6\], k=7"):
        flashinfer.top_k(values, 7)
    with pytest.raises(InvalidInput, match="expected tie_break to be 0, 1 or 2, got 3"):
        flashinfer.top_k(values, 2, tie_break=3)


@pytest.mark.parametrize("tie_break", list(flashinfer.TopKTieBreak))
@pytest.mark.parametrize("windows", [False, True])
def test_top_k_of_pages_and_packed_rows(windows: bool, tie_break: int) -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randint(0, 6, (5, 24), generator=generator).float()
    starts = torch.tensor([0, 3, 1, 0, 20], dtype=torch.int32) if windows else torch.zeros(5, dtype=torch.int32)
    lengths = torch.tensor([20, 4, 2, 0, 4], dtype=torch.int32)
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        scores[row, :start], scores[row, start + length :] = torch.nan, torch.nan
    k, offsets = 3, torch.tensor([0, 100, 200, 300, 400], dtype=torch.int32)
    sign = -1 if tie_break == flashinfer.TopKTieBreak.SMALL else 1
    chosen = []
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        ranked = sorted(range(length), key=lambda c, r=row, s=start: (float(scores[r, s + c]), sign * c), reverse=True)
        chosen.append(set(ranked[:k]))
    given: dict[str, Any] = dict(tie_break=tie_break, row_starts=starts if windows else None)
    flat = flashinfer.top_k_ragged_transform(scores, offsets, lengths, k, **given)
    assert (flat.dtype, list(flat.shape)) == (torch.int32, [5, 3])
    assert all(row == sorted(row, key=lambda each: (each == -1, each)) for row in flat.tolist())
    for row, offset, columns in zip(flat.tolist(), offsets.tolist(), chosen, strict=True):
        assert {each for each in row if each != -1} == {offset + column for column in columns}
    table = torch.randperm(80, generator=generator).int().view(2, 40)
    owner = torch.tensor([0, 1, 1, 0, 1], dtype=torch.int32)
    begin = torch.tensor([0, 2, 4, 0, 1], dtype=torch.int32)
    for page_size in (1, 4):
        out, raw = torch.empty(5, 3, dtype=torch.int32), torch.empty(5, 3, dtype=torch.int32)
        more: dict[str, Any] = dict(page_table_row_starts=begin) if windows else {}
        got = flashinfer.top_k_page_table_transform(
            scores, table, lengths, k, owner, page_size=page_size, out=out, out_raw_indices=raw, **given, **more
        )
        assert got is out
        for row, (slots, columns) in enumerate(zip(out.tolist(), raw.tolist(), strict=True)):
            assert {each for each in columns if each != -1} == chosen[row]
            first = int(begin[row]) if windows else 0
            for slot, column in zip(slots, columns, strict=True):
                page = int(table[owner[row], first + column // page_size]) if column >= 0 else 0
                assert slot == (page * page_size + column % page_size if column >= 0 else -1)


def test_top_k_of_rows_that_are_their_own_requests() -> None:
    scores, lengths = torch.tensor([[3.0, 1, 2, 0]]).half(), torch.tensor([4], dtype=torch.int32)
    table = torch.tensor([[7, 5, 3, 1]], dtype=torch.int32)
    assert sorted(flashinfer.top_k_page_table_transform(scores, table, lengths, 2).tolist()[0]) == [3, 7]
    assert flashinfer.top_k_page_table_transform(scores, table, lengths, 6).tolist() == [[7, 5, 3, 1, -1, -1]]
    outside = torch.tensor([1], dtype=torch.int32)
    assert flashinfer.top_k_page_table_transform(scores, table, lengths, 2, outside).tolist() == [[-1, -1]]
    with pytest.raises(
        InvalidInput, match="expected row_to_batch with more rows than block tables, got None and 2 rows"
    ):
        flashinfer.top_k_page_table_transform(scores.repeat(2, 1), table, lengths.repeat(2), 2)
    with pytest.raises(InvalidInput, match="expected page_size >= 1, got 0"):
        flashinfer.top_k_page_table_transform(scores, table, lengths, 2, page_size=0)
    with pytest.raises(
        InvalidInput, match="expected page_table_row_starts with page_size > 1 and row_starts, got None"
    ):
        flashinfer.top_k_page_table_transform(scores, table, lengths, 2, page_size=2, row_starts=lengths)
    with pytest.raises(InvalidInput, match=r"expected out to be torch.int32 \[1, 2\], got torch.int64 \[1, 2\]"):
        flashinfer.top_k_page_table_transform(scores, table, lengths, 2, out=torch.empty(1, 2, dtype=torch.int64))


REFUSED_BY_WRAPPERS: Any = {
    "jit_args": [1], "jit_kwargs": {"a": 1}, "variant_owns_mask": True,
}  # fmt: skip
REFUSED_BY_PLANS: Any = {
    "pos_encoding_mode": "ROPE_LLAMA", "prefix_len_ptr": torch.ones(1), "token_pos_in_items_ptr": torch.ones(1),
    "token_pos_in_items_len": 3, "max_item_len_ptr": torch.ones(1), "seq_lens_q": torch.ones(1),
    "o_data_type": torch.float8_e4m3fn,
}  # fmt: skip
REFUSED_BY_RUNS: Any = {"skip_softmax_threshold_scale_factor": 1.0}


def test_what_would_change_results_is_refused_by_name() -> None:
    b, d = batch(RAGGED), batch(DECODES)
    k, v, kv_indptr = packed(b)
    for name, value in REFUSED_BY_WRAPPERS.items():
        for wrapper in ("BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper"):
            with pytest.raises(Unsupported, match=f"expected {name}="):
                getattr(flashinfer, wrapper)(WORKSPACE, **{name: value})
    with pytest.raises(Unsupported, match=r"expected jit_args=None, got \[1\]: kernels with the caller's own code"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, jit_args=[1])
    for name, value in REFUSED_BY_PLANS.items():
        for run in (
            lambda **given: prefill_planned(b, **given).run(b.q, b.cache),
            lambda **given: ragged_planned(b, kv_indptr, **given).run(b.q, k, v),
        ):
            with pytest.raises(Unsupported, match=f"expected {name}"):
                run(**{name: value})
    for name in ("seq_lens", "v_indptr", "o_indptr"):
        with pytest.raises(Unsupported, match=f"expected {name}=None, got a tensor"):
            ragged_planned(b, kv_indptr, **{name: kv_indptr})
    for name, value in REFUSED_BY_RUNS.items():
        with pytest.raises(Unsupported, match=f"expected {name}=None, got"):
            prefill_planned(b).run(b.q, b.cache, **{name: value})
        with pytest.raises(Unsupported, match=f"expected {name}=None, got"):
            decode_planned(d).run(d.q, d.cache, **{name: value})
    with pytest.raises(Unsupported, match="expected o_scale=None, got"):
        ragged_planned(b, kv_indptr).run(b.q, k, v, o_scale=2.0)
    with pytest.raises(Unsupported, match="expected window_right=0, got -1: keys after a query are never seen"):
        decode_planned(d, window_right=-1)
    with pytest.raises(Unsupported, match="expected no positional arguments after the cache, except scale_q"):
        decode_planned(d).run(d.q, d.cache, 1.0)
    rotated: Any = {"pos_encoding_mode": "ROPE_LLAMA"}
    for run in (
        lambda: decode_planned(d, **rotated).run(d.q, d.cache),
        lambda: flashinfer.single_decode_with_kv_cache(b.q[0], k, v, **rotated),
        lambda: flashinfer.single_prefill_with_kv_cache(b.q, k, v, **rotated),
    ):
        with pytest.raises(Unsupported, match="expected pos_encoding_mode='NONE' or 'ALIBI', got 'ROPE_LLAMA'"):
            run()


def test_pages_of_latents_that_do_not_exist_are_not_seen() -> None:
    b = batch([(2, 9)], kv_heads=1, dim=96)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    lens = torch.tensor([9])
    wrapper.plan(b.qo_indptr, b.indptr, b.indices, lens, 4, 64, 32, 4, False, 0.1, torch.float32, torch.float32)
    wrapper._tables.page_indices[0, 1] = 2**30  # invalidates the page of positions 4 to 7
    keys = b.cache[0][:, :, 0]
    keys = torch.cat([keys, torch.ones(9, 4, 96)])  # the cache may have more pages than the table
    rows = torch.cat([b.keys[0][:4], b.keys[0][8:]])
    wanted = dense(b.q, rows, rows[..., :64], sm_scale=0.1)
    for cache in (keys, (keys[..., :64].clone(), keys[..., 64:].clone())):
        expect(wrapper.run(query=b.q, kv_cache=cache, return_lse=True), wanted)


def test_latents_of_a_cache_without_pages() -> None:
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    edges, none = torch.tensor([0, 2], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    wrapper.plan(edges, none, none[:0], none[:1], 4, 64, 32, 4, True, 0.1, torch.float32, torch.float32)
    parts = torch.ones(2, 4, 64), torch.ones(2, 4, 32), torch.empty(0, 4, 64), torch.empty(0, 4, 32)
    out, lse = wrapper.run(*parts, return_lse=True)
    assert not out.any()
    assert lse.isneginf().all()


def test_what_latent_attention_refuses() -> None:
    b = batch([(2, 9)], kv_heads=1, dim=96)
    cache, lens = b.cache[0][:, :, 0], torch.tensor([9])
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    metadata = flashinfer.mla.MLAPlanMetadata.csr(b.qo_indptr, b.indptr, b.indices, lens)
    given: dict[str, Any] = dict(
        metadata=metadata, num_heads=4, head_dim_ckv=64, head_dim_kpe=32, page_size=4, causal=True, sm_scale=0.1,
        q_data_type=torch.float32, kv_data_type=torch.float32,
    )  # fmt: skip
    for name, value in {"output_scale": "per-tensor", "skip_softmax": True, "scale_mode": "bmm-scalar"}.items():
        with pytest.raises(Unsupported, match=f"expected {name}="):
            wrapper.plan(**given, **{name: value})
    with pytest.raises(TypeError, match=r"expected page_size, causal in plan\(\), got None"):
        wrapper.plan(**given | {"page_size": None, "causal": None})
    with pytest.raises(TypeError, match="expected metadata to be an MLAPlanMetadata, got dict"):
        wrapper.plan(**given | {"metadata": {}})
    with pytest.raises(InvalidInput, match="expected metadata or its tensors as arguments, got both"):
        wrapper.plan(b.qo_indptr, **given)
    with pytest.raises(TypeError, match="expected metadata, or kv_indptr with kv_indices, or block_tables, got none"):
        wrapper.plan(**given | {"metadata": None})
    with pytest.raises(TypeError, match="expected qo_indptr and kv_len_arr with the pages, got None"):
        wrapper.plan(kv_indptr=b.indptr, kv_indices=b.indices, **given | {"metadata": None})
    wrapper.plan(**given)
    for name in ("kv_len", "page_table", "o_scale", "ckv_scale_arr", "bmm1_scale", "bmm2_scale"):
        with pytest.raises(Unsupported, match=f"expected {name}=None, got a tensor"):
            wrapper.run(query=b.q, kv_cache=cache, **{name: lens})
    with pytest.raises(Unsupported, match=r"expected skip_softmax_threshold_scale_factor=None, got 1\.0"):
        wrapper.run(query=b.q, kv_cache=cache, skip_softmax_threshold_scale_factor=1.0)
    with pytest.raises(
        InvalidInput, match=r"expected ckv_scale and kpe_scale only with an 8-bit cache, got torch.float32"
    ):
        wrapper.run(query=b.q, kv_cache=cache, ckv_scale=1.0, kpe_scale=1.0)
    with pytest.raises(TypeError, match="expected query, or q_nope and q_pe, got None"):
        wrapper.run(kv_cache=cache)
    with pytest.raises(TypeError, match="expected kv_cache, or ckv_cache and kpe_cache, got both"):
        wrapper.run(query=b.q, kv_cache=cache, ckv_cache=cache)
    with pytest.raises(TypeError, match="expected query to be a tensor or a pair of them, got list"):
        wrapper.run(query=[b.q], kv_cache=cache)
    with pytest.raises(
        InvalidInput, match=r"expected q_pe.dtype to be torch.float32 as in plan\(\), got torch.float16"
    ):
        wrapper.run(query=(b.q[..., :64], b.q[..., 64:].half()), kv_cache=cache)
    with pytest.raises(InvalidInput, match=r"expected page_size of kv_cache to be 4 as in plan\(\), got 2"):
        wrapper.run(query=b.q, kv_cache=cache[:, :2])


def test_invalid_arguments_are_said_in_flashinfers_words() -> None:
    b, d = batch(RAGGED), batch(DECODES)
    k, v, kv_indptr = packed(b)
    paged, decode, ragged = prefill_planned(b), decode_planned(d), ragged_planned(b, kv_indptr)
    calls: Any = (
        (r"expected kv_layout to be NHD or HND, got 'DHN'", lambda: decode_planned(d, "DHN")),
        (r"expected pos_encoding_mode to be NONE, ROPE_LLAMA or ALIBI, got 'ROPE'",
         lambda: decode_planned(d, pos_encoding_mode="ROPE").run(d.q, d.cache)),
        (r"expected q.shape to be \[15, 4, 32\] as in plan\(\), got \[14, 4, 32\]",
         lambda: paged.run(b.q[1:], b.cache)),
        (r"expected q.dtype to be torch.float32 as in plan\(\)", lambda: paged.run(b.q.half(), b.cache)),
        (r"expected q.shape to be \[15, 4, 32\] as in plan", lambda: ragged.run(b.q[1:], k, v)),
        (r"expected k.shape\[1:\] to be \[2, 32\] as in plan", lambda: ragged.run(b.q, k[:, 1:], v)),
        (r"expected v.shape\[1:\] to be \[2, 32\] as in plan", lambda: ragged.run(b.q, k, v[:, :, :16])),
        (r"expected k.dtype to be torch.float32 as in plan", lambda: ragged.run(b.q, k.half(), v)),
        (r"expected page_size of paged_kv_cache to be 4", lambda: paged.run(b.q, tuple(x[:, 1:] for x in b.cache))),
        (r"expected num_kv_heads of paged_kv_cache to be 2",
         lambda: paged.run(b.q, tuple(x[:, :, 1:] for x in b.cache))),
        (r"expected head_dim of paged_kv_cache\[1\] to be 32",
         lambda: paged.run(b.q, (b.cache[0], b.cache[1][..., 16:]))),
        (r"expected dtype of paged_kv_cache to be torch.float32",
         lambda: paged.run(b.q, tuple(x.half() for x in b.cache))),
        (r"expected paged_kv_cache.shape to be \[max_num_pages, 2", lambda: paged.run(b.q, b.cache[0][None])),
        (r"expected paged_kv_cache\[1\] to have 3 or 4 dim", lambda: paged.run(b.q, (b.cache[0], b.cache[1][None]))),
        (r"expected q_len_per_req >= 1, got 0", lambda: decode_planned(d, q_len_per_req=0)),
        (r"expected indptr.shape to be \[5\], got \[4\]",
         lambda: decode.plan(d.indptr[1:], d.indices, d.last, 4, 2, 32, 4)),
        (r"expected indices.dtype to be an integer one, got torch.float32",
         lambda: decode.plan(d.indptr, d.indices.float(), d.last, 4, 2, 32, 4)),
        (r"expected page_size >= 1, got 0", lambda: decode.plan(d.indptr, d.indices, d.last, 4, 2, 32, 0)),
        (r"expected qo_indptr.shape to be \[7\], got \[6\]",
         lambda: paged.plan(b.qo_indptr[1:], b.indptr, b.indices, b.last, 4, 2, 32, 4)),
        (r"expected paged_kv_indptr.shape to be \[7\], got \[6\]",
         lambda: paged.plan(b.qo_indptr, b.indptr[1:], b.indices, b.last, 4, 2, 32, 4)),
        (r"expected kv_indptr.shape to be \[7\], got \[6\]", lambda: ragged.plan(b.qo_indptr, kv_indptr[1:], 4, 2, 32)),
        (r"expected qo_indptr.shape to be \[batch_size \+ 1\], got \[0\]",
         lambda: ragged.plan(b.qo_indptr[:0], kv_indptr, 4, 2, 32)),
        (r"expected seq_lens to have batch_size=4 entries, got 3", lambda: decode_planned(d, seq_lens=torch.ones(3))),
        (r"expected block_tables.shape to be \[4, max_num_blocks_per_seq\], got \[4\]",
         lambda: decode_planned(d, block_tables=torch.ones(4, dtype=torch.int32))),
        (r"expected custom_mask to have a bit for each query and key, 104, got 4",
         lambda: prefill_planned(b, custom_mask=torch.ones(4, dtype=torch.bool))),
        (r"expected packed_custom_mask to have a bit for each query and key, \d+, got 32",
         lambda: prefill_planned(b, packed_custom_mask=torch.ones(4, dtype=torch.uint8))),
        (r"expected custom_mask.dtype to be bool, got float32",
         lambda: prefill_planned(b, custom_mask=torch.ones(200))),
        (r"expected packed_custom_mask.dtype to be uint8, got bool",
         lambda: prefill_planned(b, packed_custom_mask=torch.ones(200, dtype=torch.bool))),
        (r"expected q to have 2 dimensions, got 3", lambda: flashinfer.single_decode_with_kv_cache(b.q, k, v)),
        (r"expected k to have 3 dimensions, got 2", lambda: flashinfer.single_prefill_with_kv_cache(b.q, k[0], v)),
        (r"expected bitorder to be big or little, got 'middle'", lambda: flashinfer.packbits(k, "middle")),
        (r"expected positions to be torch.int32 \[2\], got torch.int64 \[2\]",
         lambda: flashinfer.get_batch_indices_positions(b.qo_indptr, b.last, 2, positions=torch.zeros(2).long())),
    )  # fmt: skip
    for text, call in calls:
        with pytest.raises(InvalidInput, match=text):
            call()


@pytest.mark.filterwarnings("ignore:q_len_per_req is an argument")
def test_values_of_wrong_types() -> None:
    d = batch(DECODES)
    decode = decode_planned(d)
    with pytest.raises(InvalidInput, match=r"expected q_len_per_req=1 as in plan\(\), got 2"):
        decode.run(d.q, d.cache, q_len_per_req=2)
    wrong: Any = (
        (r"expected float_workspace_buffer to be a torch.Tensor, got int",
         lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(8)),
        (r"expected indptr to be a torch.Tensor, got list", lambda: decode.plan([0], d.indices, d.last, 4, 2, 32, 4)),
        (r"expected indices to be a torch.Tensor, got list", lambda: decode.plan(d.indptr, [0], d.last, 4, 2, 32, 4)),
        (r"expected q_data_type to be a torch.dtype or its name, got 'half16'",
         lambda: decode_planned(d, q_data_type="half16")),
        (r"expected paged_kv_cache to be a tensor or a pair of them, got int", lambda: decode.run(d.q, 3)),
        (r"expected paged_kv_cache\[0\] to be a torch.Tensor, got int", lambda: decode.run(d.q, (3, 4))),
        (r"expected k_scale to be a number or a tensor, got str", lambda: decode.run(d.q, d.cache, k_scale="1")),
        (r"unexpected keyword argument 'swa'", lambda: decode.run(d.q, d.cache, swa=3)),
        (r"unexpected keyword argument 'swa'", lambda: decode_planned(d, swa=3)),
    )  # fmt: skip
    for text, call in wrong:
        with pytest.raises(TypeError, match=text):
            call()
    unplanned = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_tensor_cores=True)
    assert unplanned.use_tensor_cores
    with pytest.raises(RuntimeError, match=r"expected plan\(\) before run\(\) of BatchDecodeWithPagedKVCacheWrapper"):
        unplanned.run(d.q, d.cache)
