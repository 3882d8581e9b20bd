"""Inputs of FlashMLA's test cases, expected results, and their comparison.

Inputs and comparison follow FlashMLA's own rules. An oracle in float32, which uses none of our code, computes the
expected results. The rules make memory hostile. Data that no query refers to is NaN, including the scales of quantised
caches. Pages are shuffled, every array is part of a larger one, page-table entries past a sequence's length are
garbage, and lists contain invalid indices.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.cases.flash_mla import D_V, Case, DecodeCase, Lists, MhaCase, PrefillCase
from ragged_attention.compat import flash_mla, quant
from ragged_attention.torch import quantize_mla_cache

GARBAGE = 2147480000
# invalid list entries; 0 is replaced by s_kv
NO_INDEX = (-(2**31), -123456, -1, 0, 114514, 1919810, GARBAGE, 2**31 - 1)
CHUNK = 2**26  # elements processed at a time
# The greatest absolute error, relative error and cosine difference.
BOUNDS = {
    "decode out": (8e-4, 2.01 / 128, 5e-6),
    "decode lse": (1e-6, 8.01 / 65536, 1e-7),
    "prefill out": (8e-4, 2.01 / 128, 7e-6),
    "prefill max_logits": (1e-6, 2.01 / 65536, 1e-7),
    "prefill lse": (1e-6, 2.01 / 65536, 1e-7),
    # With amplified keys, a softmax is close to one key, and rounding can change which key has the largest logit.
    "amplified out": (1.0, 1.0, 1e-5),
    "amplified max_logits": (1.0, 1.0, 1e-7),
    "amplified lse": (1e-5, 4.01 / 65536, 1e-7),
    "mha": (1e-3, 8.01 / 128, 7e-6),  # the bounds of out and of the gradients
    "mha lse": (1e-6, 2.01 / 65536, 1e-7),
}
REPEATS = 5  # runs of dense multi-head attention and its gradient that must all give the same bits


def close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Compare as FlashMLA does: positions of infinities and NaN, then each element, then the cosine difference."""
    absolute, relative, cosine = BOUNDS[what]
    if got.shape != want.shape or got.dtype != want.dtype:
        raise AssertionError(f"{what}: expected {want.dtype} {list(want.shape)}, got {got.dtype} {list(got.shape)}")
    got, want = got.double(), want.double()
    for name, where in (("+inf", torch.isposinf), ("-inf", torch.isneginf), ("NaN", torch.isnan)):
        if bool((differs := where(got) != where(want)).any()):
            raise AssertionError(f"{what}: {int(differs.sum())} of {differs.numel()} are {name} in only one array")
    got, want = (torch.where(torch.isfinite(values), values, 0.0) for values in (got, want))
    error = (got - want).abs()
    bad = (error >= absolute) & (error / (want.abs() + 1e-6) >= relative)
    if bool(bad.any()):
        worst = int(torch.where(bad, error, 0.0).argmax())
        raise AssertionError(
            f"{what}: expected {want.flatten()[worst]:.6g}, got {got.flatten()[worst]:.6g} at element {worst}; "
            f"{int(bad.sum())} of {bad.numel()} elements are out of bounds"
        )
    total = float((got * got + want * want).sum())
    difference = 1 - 2 * float((got * want).sum()) / total if total > 1e-12 else 0.0
    if difference > cosine:
        raise AssertionError(f"{what}: expected a cosine difference <= {cosine:g}, got {difference:.3g}")


def check(case: Case, device: str = "cpu", *, form: str | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
    """Run a case through `compat.flash_mla` and raise AssertionError if a result is wrong.

    `form` overrides the case's own call form.
    """
    CHECKS[case.OPERATION](case, device, form, dtype)


def _check_decode(case: DecodeCase, device: str, form: str | None, dtype: torch.dtype) -> None:
    arguments = decode_inputs(case, device, dtype)
    out, lse = flash_mla.flash_mla_with_kvcache(**arguments, **metadata(case, arguments, form or case.form))
    want_out, want_lse = decode_oracle(**arguments)
    close(out, want_out, "decode out")
    close(lse, want_lse, "decode lse")


def _check_prefill(case: PrefillCase, device: str, form: str | None, dtype: torch.dtype) -> None:
    arguments = prefill_inputs(case, device, dtype)
    convention = "base2" if (form or case.form) == "e0" else "natural"
    results = flash_mla.flash_mla_sparse_fwd(**arguments, convention=convention)
    wanted = prefill_oracle(**arguments, convention=convention)
    assert results[0].dtype == dtype
    for name, got, want in zip(("out", "max_logits", "lse"), results, wanted, strict=True):
        what = "amplified" if case.amplified else "prefill"
        close(got.float() if name == "out" else got, want, f"{what} {name}")


def _check_mha(case: MhaCase, device: str, form: str | None, dtype: torch.dtype) -> None:
    del form
    arguments, d_out = mha_inputs(case, device, dtype)
    results = mha_results(arguments, d_out)
    for _ in range(REPEATS):
        for name, one, other in zip(MHA_RESULTS, results, mha_results(arguments, d_out), strict=True):
            if not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
                raise AssertionError(f"mha {name}: expected the same bits in every run")
    for name, got, want in zip(MHA_RESULTS, results, mha_oracle(**arguments, d_out=d_out), strict=True):
        close(got.float(), want, "mha lse" if name == "lse" else "mha")


CHECKS: dict[str, Callable[[Any, str, str | None, torch.dtype], None]] = {
    "mla_decode": _check_decode,
    "sparse_mla_prefill": _check_prefill,
    "varlen_attention": _check_mha,
}
MHA_RESULTS = ("out", "lse", "dq", "dk", "dv")


def mha_results(arguments: dict[str, Any], d_out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The results of `flash_attn_varlen_func`, and the gradients of q, k and v for the output gradient `d_out`."""
    leaves = [arguments[name].detach().requires_grad_() for name in "qkv"]
    out, lse = flash_mla.flash_attn_varlen_func(**{**arguments, **dict(zip("qkv", leaves, strict=True))})
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, d_out)


def metadata(case: DecodeCase, arguments: dict[str, Any], form: str) -> dict[str, Any]:
    """The schedule arguments, from `get_mla_metadata`. Its own arguments depend on the release `form`."""
    if form != "e0":
        return dict(zip(("tile_scheduler_metadata", "num_splits"), flash_mla.get_mla_metadata(), strict=True))
    fp8 = arguments.get("is_fp8_kvcache", False)
    rows = case.s_q * case.h_q // case.h_kv
    parts, num_splits = flash_mla.get_mla_metadata(
        arguments["cache_seqlens"], rows, case.h_kv, case.h_q, fp8, case.topk
    )
    return {"tile_scheduler_metadata": parts, "num_splits": num_splits}


def inside_larger(values: torch.Tensor) -> torch.Tensor:
    """A copy of `values` inside a larger array: the last dimension is 128 longer, each other dimension 1 longer."""
    shape = [size + 1 for size in values.shape[:-1]] + [values.shape[-1] + 128]
    filler = math.nan if values.is_floating_point() else GARBAGE
    larger = values.new_full(shape, filler)[tuple(slice(size) for size in values.shape)]
    return larger.copy_(values)


def decode_inputs(case: DecodeCase, device: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """The arguments of `flash_mla_with_kvcache` except the schedule."""
    generator = torch.Generator(device).manual_seed(case.seed)
    maker = Maker(case, generator, dtype)
    q = maker.normal(case.b, case.s_q, case.h_q, case.d_qk)
    q = q.div_(10 if case.form != "e0" and not case.lists else 1).clamp_(-1, 1)
    scopes = [maker.scope(lists) for lists in case.lists or (None,)]
    main, extra = scopes[0], scopes[1] if len(scopes) > 1 else {}
    return {
        "q": inside_larger(q),
        "k_cache": main["cache"],
        "block_table": main["table"],
        "cache_seqlens": main["lens"],
        "head_dim_v": D_V,
        "softmax_scale": case.d_qk**-0.55 if case.form != "e0" and case.lists else None,
        "causal": case.causal,
        # Cases of the newest release pass `cache_layout`, and leave `is_fp8_kvcache` at its default.
        **({"cache_layout": case.layout} if case.form == "e4" else {"is_fp8_kvcache": case.quantized}),
        "indices": main.get("indices"),
        "attn_sink": maker.sinks(case.h_q) if case.sinks else None,
        "extra_k_cache": extra.get("cache"),
        "extra_indices_in_kvcache": extra.get("indices"),
        "topk_length": main.get("topk_length"),
        "extra_topk_length": extra.get("topk_length"),
    }


@dataclasses.dataclass(frozen=True)
class Maker:
    """A generator of the random parts of a decode case."""

    case: DecodeCase
    generator: torch.Generator
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.generator.device

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=dtype or self.dtype)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def sinks(self, h_q: int) -> torch.Tensor:
        return random_sinks(h_q, self.generator)

    def scope(self, lists: Lists | None) -> dict[str, Any]:
        """A cache with its page table and lengths. For a sparse case, the lists that select its keys are added."""
        case = self.case
        page_size = lists.page_size if lists else case.page_size
        lens = self.lens(lists.s_k if lists else case.s_k)
        pages = max(-(-int(lens.max()) // (4 * page_size)) * 4, 4)
        count = case.b * pages
        table = torch.randperm(count, generator=self.generator, device=self.device).view(case.b, pages)
        slots = (table[:, :, None] * page_size + torch.arange(page_size, device=self.device)).flatten(1)
        cache = self.normal(count, page_size, case.h_kv, case.d_qk).div_(10).clamp_(-1, 1)
        seen = torch.zeros(count * page_size, dtype=torch.bool, device=self.device)
        scope: dict[str, Any] = {"lens": lens.int()}
        if lists is None:
            positions = torch.arange(slots.shape[1], device=self.device)
            seen[slots[positions < lens[:, None]]] = True
            unused = torch.arange(pages, device=self.device) * page_size >= lens[:, None]
            table = table.masked_fill(unused, GARBAGE)
        else:
            indices = self.indices(lens, slots, lists.topk)
            listed = indices
            if lists.lengths:
                lengths = (self.uniform(case.b) * (lists.topk + 1)).int()
                scope["topk_length"] = lengths
                beyond = torch.arange(lists.topk, device=self.device) >= lengths[:, None, None]
                listed = indices.masked_fill(beyond, -1)
            seen[listed[listed >= 0]] = True
            scope["indices"] = inside_larger(indices.int())
        cache.masked_fill_(~seen.view(count, page_size, 1, 1), math.nan)
        scope["cache"] = (
            self.quantized(cache, lists is not None and lists.fp4) if case.quantized else inside_larger(cache)
        )
        scope["table"] = inside_larger(table.int())
        return scope

    def lens(self, s_k: int) -> torch.Tensor:
        case = self.case
        lens = torch.full((case.b,), s_k, dtype=torch.int64, device=self.device)
        if case.varlen:
            drawn = self.normal(case.b, dtype=torch.float32) * (s_k / 2) + s_k
            lens = drawn.long().clamp_(min=case.s_q)
        if case.zero_lens:
            lens = torch.where(self.uniform(case.b) < 0.5, 0, lens)
        return lens

    def indices(self, lens: torch.Tensor, slots: torch.Tensor, topk: int) -> torch.Tensor:
        """Lists of slots: distinct positions in random order, then -1.

        By the rules of "e0", each list is then shuffled, so -1 can be at any place.
        """
        case = self.case
        shape = (case.b, case.s_q, topk)
        indices = torch.full(shape, -1, dtype=torch.int64, device=self.device)
        count = min(topk, slots.shape[1])
        for seq in range(0 if not case.all_invalid else case.b, case.b):
            order = self.uniform(case.s_q, slots.shape[1])
            order.masked_fill_(torch.arange(slots.shape[1], device=self.device) >= lens[seq], 2.0)
            order, positions = order.sort(-1)
            indices[seq, :, :count] = torch.where(order < 2, slots[seq][positions], -1)[:, :count]
            if case.form == "e0":
                indices[seq] = indices[seq].gather(-1, self.uniform(case.s_q, topk).argsort(-1))
        return indices

    def quantized(self, cache: torch.Tensor, fp4: bool) -> torch.Tensor:
        """The quantised cache. In memory, one unused row follows each page.

        By the rules of "e0", scales can have any value. Otherwise they are powers of two.
        """
        form = self.case.form
        name = ("fp4_v41" if fp4 else "fp8_v41") if form == "e4" else {576: "fp8_v32", 512: "fp8_v4"}[cache.shape[-1]]
        width = cache.shape[-1]
        at_once = max(CHUNK // (cache.shape[1] * width), 1)
        pieces = [
            quant.quantize_k_cache(piece, D_V)
            if form == "e0"
            else quantize_mla_cache(piece, name, cache_layout=self.case.layout, backend="auto")
            for piece in cache.split(at_once)
        ]
        count, page_size, _, size = (sum(len(piece) for piece in pieces), *pieces[0].shape[1:])
        larger = torch.full((count, page_size + 1, 1, size), 0xFF, dtype=torch.uint8, device=self.device)
        larger[:, :page_size] = torch.cat([piece.view(torch.uint8) for piece in pieces])
        return larger.view(torch.float8_e4m3fn)[:, :page_size]


def random_sinks(h_q: int, generator: torch.Generator) -> torch.Tensor:
    """Normally distributed sinks, about 31 % of which are -inf and another 31 % +inf."""
    sinks = torch.randn(h_q, generator=generator, device=generator.device)
    draw = torch.randn(h_q, generator=generator, device=generator.device)
    return sinks.masked_fill(draw < -0.5, -math.inf).masked_fill(draw > 0.5, math.inf)


def prefill_inputs(case: PrefillCase, device: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """The arguments of `flash_mla_sparse_fwd`."""
    generator = torch.Generator(device).manual_seed(case.seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    def values(*shape: int) -> torch.Tensor:
        offset = (float(uniform(1)) - 0.5) / 10 if case.form != "e0" else 0.0
        drawn = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return drawn.div_(10).add_(offset).clamp_(-10, 10)

    q, kv = values(case.s_q, case.h_q, case.d_qk), values(case.s_kv, 1, case.d_qk)
    if case.amplified:
        is_large = uniform(case.s_kv, 1, 1) < 0.02
        kv = torch.where(is_large, kv * (1 + 255 * uniform(case.s_kv, 1, 1)), kv).to(dtype)
    indices = _prefill_lists(case, uniform)
    lengths = None
    if case.topk_lens:
        lengths = (uniform(case.s_q) * max(case.topk + 1, 64)).int().clamp(max=case.topk)
    listed = indices
    if lengths is not None:
        unused = torch.arange(case.topk, device=device) >= lengths[:, None]
        listed = indices.masked_fill(unused, -1)
    seen = torch.zeros(case.s_kv, dtype=torch.bool, device=device)
    seen[listed[(listed >= 0) & (listed < case.s_kv)]] = True
    kv.masked_fill_(~seen[:, None, None], math.nan)
    return {
        "q": inside_larger(q),
        "kv": inside_larger(kv),
        "indices": inside_larger(indices.int()[:, None]),
        "sm_scale": case.d_qk**-0.5 if case.form == "e0" else 0.5,
        "attn_sink": random_sinks(case.h_q, generator) if case.sinks else None,
        "topk_length": lengths,
    }


def _prefill_lists(case: PrefillCase, uniform: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Lists of distinct rows in random order, then invalid indices.

    By the rules of "e0", most rows are drawn from the last 20000 and may repeat, and the lists are shuffled.
    """
    step, count = max(CHUNK // case.s_kv, 1), min(case.topk, case.s_kv)
    rows = [min(step, case.s_q - first) for first in range(0, case.s_q, step)]
    selected = torch.cat([uniform(part, case.s_kv).argsort(-1)[:, :count] for part in rows])
    no_index = torch.tensor(NO_INDEX, device=selected.device)
    no_index[NO_INDEX.index(0)] = case.s_kv

    def invalid(*shape: int) -> torch.Tensor:
        return no_index[(uniform(*shape) * len(NO_INDEX)).long().clamp(max=len(NO_INDEX) - 1)]

    if case.form == "e0":
        near = max(case.s_kv - 20000, 0)
        late = (uniform(*selected.shape) * (case.s_kv - near)).long().clamp(max=case.s_kv - near - 1) + near
        selected = torch.where(uniform(*selected.shape) < 31 / 32, late, selected)
        tail = torch.full((case.s_q, case.topk - count), GARBAGE, device=selected.device)
        selected = torch.cat([selected, tail], -1)
        return selected.gather(-1, uniform(*selected.shape).argsort(-1))
    selected = torch.cat([selected, invalid(case.s_q, case.topk - count)], -1)
    if case.all_invalid:
        fully_masked = uniform(case.s_q) < 0.023
        selected = torch.where(fully_masked[:, None], invalid(case.s_q, 1), selected)
    return selected


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def rows_of_41(cache: torch.Tensor, slots: torch.Tensor, layout: str | None) -> torch.Tensor:
    """The rows of a cache with 528 or 288 bytes per token, decoded as in `rows_of`."""
    page, offset = slots // cache.shape[1], slots % cache.shape[1]
    codes, size = cache.view(torch.uint8), {528: 512, 288: 256}[cache.shape[-1]]
    tail = cache.shape[-1] - size
    if layout == "page":
        pages = codes.as_strided((len(codes), codes[0].numel()), (codes.stride(0), 1))

        def bytes_at(first: torch.Tensor, count: int) -> torch.Tensor:
            return pages[page[..., None], first[..., None] + torch.arange(count, device=cache.device)]

        values, scales = bytes_at(offset * size, size), bytes_at(cache.shape[1] * size + offset * tail, tail)
    else:
        values, scales = codes[page, offset, 0].split((size, tail), -1)
    if size == 512:
        powers = torch.where(scales == 255, math.nan, torch.exp2(scales.float() - 127))
        rows = values.contiguous().view(torch.float8_e4m3fn).float() * powers.repeat_interleave(32, -1)
        return rows[..., None, :]
    table = torch.tensor(E2M1, device=cache.device)
    rows = torch.stack([table[(values % 16).long()], table[(values // 16).long()]], -1).flatten(-2)
    return (rows * scales.contiguous().view(torch.float8_e4m3fn).float().repeat_interleave(16, -1))[..., None, :]


def rows_of(cache: torch.Tensor, slots: torch.Tensor, layout: str | None = None) -> torch.Tensor:
    """The rows of valid slots, float32 [..., h_kv, d_qk], decoded from the bytes without our code."""
    if cache.shape[-1] in (528, 288) and cache.element_size() == 1:
        return rows_of_41(cache, slots, layout)
    page, offset = slots // cache.shape[1], slots % cache.shape[1]
    if cache.element_size() > 1:
        return cache[page, offset].float()
    codes = cache.view(torch.uint8)
    if cache.shape[-1] == 656:
        rows = codes[page, offset, 0]
        scales = rows[..., 512:528].contiguous().view(torch.float32).repeat_interleave(128, -1)
        values, rotary = rows[..., :512], rows[..., 528:]
    else:
        pages = codes.as_strided((len(codes), codes[0].numel()), (codes.stride(0), 1))  # a page's bytes are contiguous

        def bytes_at(first: torch.Tensor, count: int) -> torch.Tensor:
            return pages[page[..., None], first[..., None] + torch.arange(count, device=cache.device)]

        rows, exponents = bytes_at(offset * 576, 576), bytes_at(cache.shape[1] * 576 + offset * 8, 7)
        scales = torch.where(exponents == 255, math.nan, torch.exp2(exponents.float() - 127)).repeat_interleave(64, -1)
        values, rotary = rows[..., :448], rows[..., 448:]
    values = values.contiguous().view(torch.float8_e4m3fn).float() * scales
    return torch.cat([values, rotary.contiguous().view(torch.bfloat16).float()], -1)[..., None, :]


def attend(
    q: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor, scale: float, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax attention in float32 of q [n, h_q, d] over the keys [n or 1, k, h_kv, d] that are `valid` [n, k].

    Returns out [n, h_q, D_V], and max_logits and lse [n, h_q], both to base e. Both are -inf if no key is valid.
    """
    n, h_q, d = q.shape
    if keys.shape[1] == 0:
        nothing = q.new_full((n, h_q), -math.inf, dtype=torch.float32)
        return q.new_zeros(n, h_q, D_V, dtype=torch.float32), nothing, nothing
    by_head = q.float().view(n, keys.shape[2], -1, d)
    logits = torch.matmul(by_head, keys.permute(0, 2, 3, 1)).mul_(scale)
    logits = logits.masked_fill_(~valid[:, None, None], -math.inf)
    highest = logits.amax(-1)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    out = torch.matmul(weights, keys[..., :D_V].permute(0, 2, 1, 3)).reshape(n, h_q, D_V)
    lse, highest = lse.view(n, h_q), highest.view(n, h_q)
    if sinks is not None:
        fully_masked = lse == -math.inf
        share = torch.sigmoid(torch.where(fully_masked, 0.0, lse) - sinks)
        out = out * torch.where(fully_masked, 0.0, share)[..., None]
    return out, highest, lse


def decode_oracle(
    *, q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor, cache_seqlens: torch.Tensor,
    head_dim_v: int, softmax_scale: float | None, causal: bool, indices: torch.Tensor | None,
    attn_sink: torch.Tensor | None, extra_k_cache: torch.Tensor | None, topk_length: torch.Tensor | None,
    extra_indices_in_kvcache: torch.Tensor | None, extra_topk_length: torch.Tensor | None,
    is_fp8_kvcache: bool | None = None, cache_layout: str | None = None, enable_batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The expected results of `flash_mla_with_kvcache`, computed sequence by sequence."""
    del is_fp8_kvcache, head_dim_v, enable_batch_invariant
    _, s_q, _, d = q.shape
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    outs, lses = [], []
    for seq, length in enumerate(cache_seqlens.tolist()):
        if indices is None:
            positions = torch.arange(length, device=q.device)
            page_size = k_cache.shape[1]
            slots = block_table[seq].long()[positions // page_size] * page_size + positions % page_size
            keys = rows_of(k_cache, slots, cache_layout)[None]
            later = torch.arange(s_q - 1, -1, -1, device=q.device) if causal else positions.new_zeros(s_q)
            valid = positions < length - later[:, None]
        else:
            selections = [_selected(k_cache, indices[seq], topk_length, seq, cache_layout)]
            if extra_k_cache is not None and extra_indices_in_kvcache is not None:
                second = extra_k_cache, extra_indices_in_kvcache[seq], extra_topk_length, seq, cache_layout
                selections.append(_selected(*second))
            keys, valid = (torch.cat(parts, 1) for parts in zip(*selections, strict=True))
        out, _, lse = attend(q[seq], keys, valid, scale, attn_sink)
        outs.append(out.to(q.dtype))
        lses.append(torch.where(lse == -math.inf, math.inf, lse).T)
    return torch.stack(outs), torch.stack(lses)


def _selected(
    cache: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor | None, seq: int, layout: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys [s_q, topk, 1, d] of lists [s_q, topk], mask of the valid entries). Keys of invalid entries are 0."""
    valid = (indices >= 0) & (indices < cache.shape[0] * cache.shape[1])
    if lengths is not None:
        valid &= torch.arange(indices.shape[1], device=indices.device) < lengths[seq].reshape(-1, 1)
    keys = rows_of(cache, torch.where(valid, indices, 0).long(), layout)
    return keys.masked_fill_(~valid[..., None, None], 0.0), valid


def prefill_oracle(
    *, q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None, convention: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The expected results of `flash_mla_sparse_fwd` under `convention`, except that `out` is float32.

    Queries are processed in chunks, which bounds the memory.
    """
    step = max(CHUNK // (indices.shape[2] * q.shape[2]), 1)
    parts = []
    for first in range(0, q.shape[0], step):
        part = indices[first : first + step, 0]
        lengths = None if topk_length is None else topk_length[None, first : first + step]
        keys, valid = _selected(kv[:, None], part, lengths, 0)
        parts.append(attend(q[first : first + step], keys, valid, sm_scale, attn_sink))
    out, highest, lse = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    if convention == "base2":
        return out, highest / math.log(2), lse / math.log(2)
    return out, highest, torch.where(lse == -math.inf, math.inf, lse)


def mha_inputs(case: MhaCase, device: str, dtype: torch.dtype) -> tuple[dict[str, Any], torch.Tensor]:
    """The arguments of `flash_attn_varlen_func`, and the gradient of `out`."""
    generator = torch.Generator(device).manual_seed(case.seed)

    def values(*shape: int) -> torch.Tensor:
        return inside_larger(torch.randn(shape, generator=generator, device=device, dtype=dtype).div_(10))

    def lens(mean: int) -> torch.Tensor:
        drawn = torch.randn(case.b, generator=generator, device=device) * (mean / 2) + mean
        return drawn.int().clamp(min=1) if case.varlen else torch.full_like(drawn, mean, dtype=torch.int32)

    def edges(lengths: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))

    q_lens = lens(case.s_q)
    kv_lens = torch.maximum(lens(case.s_k), q_lens)
    total_q, total_kv = int(q_lens.sum()), int(kv_lens.sum())
    arguments: dict[str, Any] = {
        "q": values(total_q, case.h_q, case.d_qk),
        "k": values(total_kv, case.h_kv, case.d_qk),
        "v": values(total_kv, case.h_kv, case.d_v),
        "cu_seqlens_qo": edges(q_lens),
        "cu_seqlens_kv": edges(kv_lens),
        "max_seqlen_qo": int(q_lens.max()),
        "max_seqlen_kv": int(kv_lens.max()),
        "softmax_scale": (case.d_qk + 100) ** -0.5,
        "causal": case.causal,
        "is_varlen": case.varlen,
    }
    return arguments, values(total_q, case.h_q, case.d_v)


def mha_oracle(
    *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_qo: torch.Tensor, cu_seqlens_kv: torch.Tensor,
    softmax_scale: float, causal: bool, d_out: torch.Tensor, **lengths: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """The `MHA_RESULTS` in float32. Torch differentiates one head of one sequence at a time."""
    del lengths
    out, lse, *grads = (torch.zeros(array.shape, device=q.device) for array in (d_out, d_out[..., 0], q, k, v))
    edges = (itertools.pairwise(cu_lens.tolist()) for cu_lens in (cu_seqlens_qo, cu_seqlens_kv))
    for (q_start, q_stop), (kv_start, kv_stop) in zip(*edges, strict=True):
        rows, keys = slice(q_start, q_stop), slice(kv_start, kv_stop)
        seen = torch.ones(q_stop - q_start, kv_stop - kv_start, dtype=torch.bool, device=q.device)
        seen = seen.tril((kv_stop - kv_start) - (q_stop - q_start)) if causal else seen
        for head in range(q.shape[1]):
            kv_head = head * k.shape[1] // q.shape[1]
            indices = ((rows, head), (keys, kv_head), (keys, kv_head))
            leaves = [array[index].float().requires_grad_() for array, index in zip((q, k, v), indices, strict=True)]
            logits = (leaves[0] @ leaves[1].T * softmax_scale).masked_fill(~seen, -math.inf)
            found = torch.softmax(logits, -1) @ leaves[2]
            out[rows, head], lse[rows, head] = found.detach(), torch.logsumexp(logits.detach(), -1)
            for total, index, part in zip(
                grads, indices, torch.autograd.grad(found, leaves, d_out[rows, head].float()), strict=True
            ):
                total[index] += part
    return [out, lse, *grads]
