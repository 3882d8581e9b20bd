"""Masks beyond causal attention in vLLM's decoders, through our classes, agree with vLLM's rule in NumPy.

There are image spans, causal flags of requests, windows on both sides, chunks after earlier chunks, and prompts that
stay visible. In the cache, pages that no query sees and slots after a request's last key are NaN.
"""

import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import ragged_attention as ra
from ragged_attention.errors import Unsupported
from ragged_attention.testing.compare import agrees
from tests import vllm_rank_fakes as ranks
from tests.test_integration_vllm import Step, implementation, metadata_builder, vllm_config
from tests.test_integration_vllm_ranks import HEADS, on_ranks

# (query length, length) of whole prompts, chunks after cached prefixes, decodes and a few drafts, in one step.
MIXED = [(1, 50), (9, 30), (1, 3), (40, 40), (4, 61), (33, 64)]
DECODE = [(1, 40), (1, 16), (1, 17), (1, 1)]
LENS = {"mixed": MIXED, "decode": DECODE}


@pytest.fixture(params=["eager", "numba"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with ra.use_backend(request.param):
        yield request.param


@dataclasses.dataclass
class Rule:
    """The mask of vLLM's unified attention, one pair of query position q and key position k at a time."""

    causal: bool | Sequence[bool] = True
    window: int | None = None
    lookback: int = -1
    spans: dict[int, list[tuple[int, int]]] = dataclasses.field(default_factory=dict)
    clamp: bool = False
    prefix_lens: Sequence[int] | None = None
    prefix_window: int | None = None

    def sees(self, row: int, q: int, k: int, kv_len: int) -> bool:
        causal = self.causal if isinstance(self.causal, bool) else self.causal[row]
        seen = k <= q if causal else k < kv_len
        if self.lookback > -1 and self.window is not None:
            chunk = self.window // (self.lookback + 1)
            seen &= q // chunk - k // chunk <= self.lookback
        elif self.prefix_lens is not None and self.prefix_window is not None:
            seen &= k < self.prefix_lens[row] or q - k < self.prefix_window
        elif self.window is not None:
            seen &= q - k < self.window and (causal or k - q < self.window)
        for first, last in self.spans.get(row, []):
            in_span = first < last and first <= q <= last and first <= k <= last
            seen |= in_span and not (self.clamp and self.window is not None and q - k >= self.window)
        return seen

    def masks(self, lens: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """The mask [query length, length] of each request."""
        return [
            torch.tensor([[self.sees(row, kv - q + i, k, kv) for k in range(kv)] for i in range(q)])
            for row, (q, kv) in enumerate(lens)
        ]


def apply(rule: Rule, step: Step, **options: Any) -> torch.Tensor:
    """The output of a layer's step under a rule, which our classes receive as vLLM would pass it."""
    impl, builder = prepared(rule, step, **options)
    return step.run(impl, builder)


def prepared(rule: Rule, step: Step, **options: Any) -> tuple[Any, Any]:
    causal = rule.causal
    step.common.causal = causal if isinstance(causal, bool) else torch.tensor(causal, dtype=torch.int32)
    step.common.mm_req_doc_ranges = rule.spans or None
    step.common.rswa_prefix_lens = None if rule.prefix_lens is None else torch.tensor(rule.prefix_lens)
    step.common.seq_lens_cpu_upper_bound = step.common.seq_lens
    step.layer.mm_prefix_clamp_sliding_window = rule.clamp
    impl = implementation(sliding_window=rule.window, chunk_lookback=rule.lookback, **options)
    step.layer.impl = impl
    builder = metadata_builder(
        layers={"layer": step.layer}, spans=bool(rule.spans), prefix_window=rule.prefix_window
    )  # fmt: skip
    return impl, builder


def drawn_spans(seed: int, lens: Sequence[tuple[int, int]]) -> dict[int, list[tuple[int, int]]]:
    """For each request up to four inclusive spans that do not overlap.

    Some spans have a single token, and some lie after the request's keys.
    """
    draw = np.random.default_rng(seed)
    spans = {}
    for row, (_, kv_len) in enumerate(lens):
        edges = np.sort(draw.choice(kv_len + 10, size=2 * int(draw.integers(0, 5)), replace=kv_len < 8))
        pairs = [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
        spans[row] = [pair for i, pair in enumerate(pairs) if i == 0 or pair[0] > pairs[i - 1][1]]
    return spans


@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
@pytest.mark.parametrize(("window", "clamp"), [(None, False), (7, False), (7, True), (24, True)])
@pytest.mark.parametrize("seed", range(3))
def test_spans(seed, window, clamp, lens, vllm, backend):
    rule = Rule(window=window, clamp=clamp, spans=drawn_spans(seed, lens))
    step = Step(lens)
    assert agrees(apply(rule, step), step.dense(seen=rule.masks(lens)), "float32")


@pytest.mark.parametrize("causal", [True, (True, False, True, False, False, True)], ids=["causal", "flags"])
def test_spans_that_a_model_takes_from_some_layers(causal, vllm, backend):
    """A model may remove the spans from some layers.

    vLLM's Gemma 4 does so for layers without a window, after their metadata has been built.
    """
    spans = {1: [(20, 29)], 3: [(0, 12), (20, 39)], 5: [(40, 60)]}
    for window in (None, 7):
        step = Step(MIXED)
        impl, builder = prepared(Rule(window=window, clamp=True, spans=spans, causal=causal), step)
        impl.do_kv_cache_update(step.layer, step.k, step.v, step.handed(), step.slots)
        metadata = builder.build(0, step.common)
        if window is None:
            for name in ("mm_prefix_range", "mm_prefix_range_tensor", "mm_prefix_query_range_tensor"):
                if hasattr(metadata, name):
                    setattr(metadata, name, None)
        out = impl.forward(
            step.layer, step.q, step.k, step.v, step.handed(), metadata, torch.empty_like(step.q)
        )  # fmt: skip
        rule = Rule(window=window, clamp=True, spans={} if window is None else spans, causal=causal)
        assert agrees(out[: step.tokens], step.dense(seen=rule.masks(MIXED)), "float32")


def test_spans_with_all_that_goes_with_them(vllm, backend):
    spans = {0: [(3, 9), (40, 45)], 1: [(20, 35)], 3: [(0, 12), (13, 13), (20, 39)], 5: [(30, 50)]}
    rule, sinks = Rule(window=16, spans=spans), torch.tensor([0.5, -1.0, 2.0, 0.0])
    step = Step(MIXED, dtype=torch.bfloat16, cache_dtype="fp8", scales=(0.5, 0.25))
    out = apply(rule, step, kv_cache_dtype="fp8", logits_soft_cap=1.5, sinks=sinks)
    assert agrees(out.float(), step.dense(cap=1.5, sinks=sinks, seen=rule.masks(MIXED)), "bfloat16")


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("causal", [(True, False, True, False, False, True), (False,) * 6, (True,) * 6])
def test_requests_that_are_causal_beside_those_that_are_not(causal, window, vllm, backend):
    rule, step = Rule(causal=causal, window=window), Step(MIXED)
    assert agrees(apply(rule, step), step.dense(seen=rule.masks(MIXED)), "float32")


@pytest.mark.parametrize("spans", [{}, {1: [(10, 28)], 3: [(2, 30)]}], ids=["plain", "spans"])
def test_a_window_on_both_sides(spans, vllm, backend):
    rule, step = Rule(causal=False, window=6, spans=spans), Step(MIXED)
    assert agrees(apply(rule, step), step.dense(seen=rule.masks(MIXED)), "float32")


@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
@pytest.mark.parametrize("lookback", [0, 1, 3])
def test_chunks_with_those_before(lookback, lens, vllm, backend):
    rule, step = Rule(window=16, lookback=lookback), Step(lens)
    assert agrees(apply(rule, step), step.dense(seen=rule.masks(lens)), "float32")


def test_chunks_without_a_window_are_none(vllm, backend):
    step = Step(MIXED)
    assert agrees(apply(Rule(lookback=1), step), step.dense(), "float32")


@pytest.mark.parametrize("window", [None, 5])
def test_a_prompt_that_stays_in_view(window, vllm, backend):
    """R-SWA, in which a prompt stays visible, replaces a layer's window; a query of the prompt is still causal."""
    rule = Rule(window=window, prefix_lens=[10, 30, 3, 40, 20, 64], prefix_window=8)
    step = Step(MIXED)
    seen = rule.masks(MIXED)
    assert not seen[4][:, 32:48].any()
    step.cache[step.table[4, 2]] = float("nan")  # vLLM frees pages like this one
    out = apply(rule, step)
    step.cache[step.table[4, 2]] = 0.0
    assert agrees(out, step.dense(seen=seen), "float32")


def test_lengths_of_prompts_without_a_reference_window_change_nothing(vllm, backend):
    """Lengths of prompts, which vLLM's newer runner passes for every model, have no effect without R-SWA."""
    step = Step(MIXED)
    step.common.rswa_prefix_lens = torch.tensor([length for _, length in MIXED])
    assert agrees(step.run(implementation(sliding_window=9)), step.dense(window=9), "float32")


def test_requests_that_only_pad_a_graph(vllm, backend):
    """Rows after the last request get empty ranges, and requests without queries need none."""
    rule = Rule(window=7, spans={1: [(20, 29)], 5: [(40, 70)]})
    step = Step(MIXED, padding=5)
    impl, builder = prepared(rule, step)
    common = step.common
    common.num_actual_tokens += 5
    common.query_start_loc = torch.cat((common.query_start_loc, torch.full((2,), step.tokens).int()))
    common.query_start_loc_cpu = common.query_start_loc
    common.seq_lens = torch.cat((common.seq_lens, torch.tensor([0, 0]).int()))
    common.seq_lens_cpu_upper_bound = common.seq_lens
    common.block_table_tensor = torch.cat((step.table, torch.full((2, step.table.shape[1]), 9999).int()))
    metadata = builder.build(0, common)
    ranges = impl.key_ranges(step.layer, metadata)
    assert ranges.shape == (step.tokens + 5, 1, 2)
    assert not ranges[step.tokens :].any()
    impl.do_kv_cache_update(step.layer, step.k, step.v, step.handed(), step.slots)
    output = torch.zeros_like(step.q)
    impl.forward(step.layer, step.q, step.k, step.v, step.handed(), metadata, output)
    assert agrees(output[: step.tokens], step.dense(seen=rule.masks(MIXED)), "float32")


def test_ranges_are_made_once_a_step_and_lie_where_they_lay(vllm, monkeypatch):
    """Ranges are made once per step.

    Layers with equal windows share an array of ranges, and later steps write to the same memory.
    """
    step, made = Step([(1, 50), (9, 30), (33, 64)]), []
    rule = Rule(window=7, spans={1: [(20, 29)]})
    prepared(rule, step)
    layers = {
        str(i): SimpleNamespace(impl=implementation(sliding_window=w), mm_prefix_clamp_sliding_window=clamp)
        for i, (w, clamp) in enumerate([(7, False), (None, False), (7, False), (7, True)])
    }
    builder = metadata_builder(layers=layers, spans=True)
    masks = importlib.import_module("ragged_attention.integrations._vllm_masks").StepMasks
    ranges_of = masks._ranges
    monkeypatch.setattr(masks, "_ranges", lambda self, mask: made.append(mask) or ranges_of(self, mask))
    first = builder.build(0, step.common)
    assert len(made) == 3
    arrays = [layer.impl.key_ranges(layer, first) for layer in layers.values()]
    assert len(made) == 3
    assert arrays[0] is arrays[2]
    where = [array.data_ptr() for array in arrays]
    assert len({*where}) == 3
    shared = builder.update_block_table(first, step.table + 1, step.slots)
    assert layers["0"].impl.key_ranges(layers["0"], shared) is arrays[0]
    step.common.mm_req_doc_ranges = None  # a step without images also has ranges, because a graph may expect them
    second = builder.build(0, step.common)
    again = [layer.impl.key_ranges(layer, second) for layer in layers.values()]
    assert [array.data_ptr() for array in again] == where
    assert again[1][:, 0, 0].eq(0).all()


def test_a_step_larger_than_any_graph_has_ranges_of_its_own(vllm, backend):
    lens = [(70, 70), (1, 30)]
    rule, step = Rule(window=30, spans={0: [(5, 40)]}), Step(lens)
    assert sum(q for q, _ in lens) > vllm_config().scheduler_config.max_num_batched_tokens
    assert agrees(apply(rule, step), step.dense(seen=rule.masks(lens)), "float32")


def test_a_bound_of_the_lengths_is_enough(vllm, backend):
    """Spans are right without a bound of the lengths, and with a bound that is too large for decodes."""
    spans = {0: [(3, 9)], 1: [(20, 29)], 3: [(0, 12), (20, 39)]}
    rule = Rule(window=7, spans=spans)
    for bound in (None, torch.tensor([53, 30, 6, 40, 70, 64], dtype=torch.int32)):
        step = Step(MIXED)
        impl, builder = prepared(rule, step)
        step.common.seq_lens_cpu_upper_bound = bound
        assert agrees(step.run(impl, builder), step.dense(seen=rule.masks(MIXED)), "float32")


@pytest.mark.parametrize("lens", [[(1, 34), (7, 30), (1, 3), (18, 18)], [(20, 20), (9, 9)]], ids=["mixed", "whole"])
@pytest.mark.parametrize("kind", ["spans", "flags"])
def test_over_ranks(kind, lens, vllm, backend):
    """Under context parallelism all queries see the earlier keys, and ranges cover only the new tokens."""
    spans = {0: [(2, 15)], 1: [(5, 8), (20, 27)], 3: [(0, 5), (7, 12)]}
    rule = Rule(spans={row: of_row for row, of_row in spans.items() if row < len(lens)})
    if kind == "flags":
        rule = Rule(causal=[row % 2 == 1 for row in range(len(lens))])
    whole = Step(lens, heads=(2 * HEADS, 1))
    prepared(rule, whole)
    out = on_ranks(whole, 2, 4, [{}] * 2, spans=kind == "spans")
    whole.common.causal, whole.common.mm_req_doc_ranges = True, None
    whole.run(
        implementation(num_heads=2 * HEADS, num_kv_heads=1)
    )  # writes the new keys to the cache that `dense` reads
    assert agrees(out, whole.dense(seen=rule.masks(lens)), "float32")


# Refusals


@pytest.mark.parametrize(
    ("rule", "got"),
    [
        (Rule(causal=False, window=16, lookback=1), "False"),
        (Rule(causal=(True,) * 4, window=16, lookback=1), "a flag for each request"),
        (Rule(causal=False, prefix_lens=[3] * 4, prefix_window=8), "False"),
    ],
)
def test_chunks_and_prompts_want_causal_attention(rule, got, vllm):
    step = Step(DECODE)
    with pytest.raises(Unsupported, match=f"expected causal=True with chunk_lookback or R-SWA for RAGGED, got {got}"):
        apply(rule, step)


def test_a_reference_window_over_ranks_is_refused(vllm):
    step = Step(DECODE)
    step.common.rswa_prefix_lens = torch.ones(4, dtype=torch.int32)

    def rank(group: ranks.Group) -> None:
        builder = metadata_builder(SimpleNamespace(), ranks=2, prefix_window=8)
        message = "expected no R-SWA under context parallelism for RAGGED, got rswa_prefix_lens"
        with pytest.raises(Unsupported, match=message):
            builder.build(0, step.common)

    ranks.on_ranks(2, rank)


def test_slopes_beside_ranges_are_refused(vllm):
    step = Step(DECODE)
    with pytest.raises(Unsupported, match="expected causal attention with alibi_slopes for RAGGED, got ranges of keys"):
        apply(Rule(spans={0: [(1, 8)]}), step, alibi_slopes=[0.5] * 4)
