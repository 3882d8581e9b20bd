"""The program that runs cases of vLLM's own tests works on a selection of them, with stand-ins for vLLM's classes."""

import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import ragged_attention as ra
from benchmarks import vllm_masks
from tests.test_integration_vllm import vllm_config


def small_cases() -> Iterator[vllm_masks.Case]:
    """Every fourth of the 20 smallest cases of each group."""
    every = sorted(vllm_masks.cases(), key=lambda case: sum(q * kv for q, kv in case.lens) * case.heads[0])
    for group in dict.fromkeys(case.group for case in every):
        yield from [case for case in every if case.group == group][:20:4]


CASES = [*small_cases()]


@pytest.fixture
def layers(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    config = types.ModuleType("vllm.config")
    config.__dict__["VllmConfig"] = vllm_config
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    with ra.use_backend("numba"):
        yield


def difference(case: vllm_masks.Case) -> float:
    step = vllm_masks.Step(case)
    return vllm_masks.cosine_difference(step.ours(), step.rule())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.group)
def test_our_layer_follows_the_rule(case: vllm_masks.Case, layers: None) -> None:
    assert difference(case) <= vllm_masks.BOUND


def test_a_span_without_its_last_token_is_found(layers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    masks = importlib.import_module("ragged_attention.integrations._vllm_masks")
    monkeypatch.setattr(masks, "spans_from_vllm", lambda spans: spans)
    case = next(case for case in CASES if case.group == "images" and case.spans.get(1))
    assert difference(case) > 100 * vllm_masks.BOUND


def test_keys_before_the_window_are_told_apart() -> None:
    """vLLM's kernel is not judged on cases in which an image makes keys before the window visible."""
    spans = {0: [(2, 40)]}
    long, short = (vllm_masks.Case("", [(50, 50)], window=window, spans=spans) for window in (38, 39))
    assert (long.is_beyond_window, short.is_beyond_window) == (True, False)
    assert not vllm_masks.Case("", [(50, 50)], window=8, spans=spans, clamp=True).is_beyond_window


def test_the_rule_is_one_of_whole_requests() -> None:
    """Every query sees its own key, in a mask with a row for each query and a column for each key."""
    for case in CASES:
        for row, (q_len, kv_len) in enumerate(case.lens):
            seen = torch.from_numpy(case.sees(row))
            assert seen.shape == (q_len, kv_len)
            assert seen[torch.arange(q_len), torch.arange(kv_len - q_len, kv_len)].all()
