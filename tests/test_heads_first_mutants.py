"""The suite catches wrong kernels over heads-first pages, and updates that write or read wrong slots."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ragged_attention.reference import paged_attention as decode
from ragged_attention.reference import prefill_attention as prefill
from ragged_attention.testing.heads_first import suite as heads_first_suite
from ragged_attention.testing.paged import updates
from ragged_attention.testing.paged.specs import Batch, WriteBatch, like_pages, pages_of
from ragged_attention.testing.runner import Runner
from tests.planting import Function, failures

pytest.importorskip("torch", reason="the mutants run through the torch front end")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # mutants may produce NaN

honest_decode, honest_prefill = decode.paged_attention, prefill.prefill_attention


def one_key_more(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"lengths": arguments["lengths"] + 1}


def no_keys_are_one(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"lengths": np.maximum(arguments["lengths"], 1)}


def cap_forgotten(arguments: dict[str, Any]) -> dict[str, Any]:
    del arguments
    return {"soft_cap": None}


def scales_forgotten(arguments: dict[str, Any]) -> dict[str, Any]:
    return {n: a[0] if isinstance(a, tuple) else a for n, a in arguments.items() if n in ("k_pages", "v_pages")}


def scales_of_the_first_head(arguments: dict[str, Any]) -> dict[str, Any]:
    pairs = {name: arguments[name] for name in ("k_pages", "v_pages") if isinstance(arguments[name], tuple)}
    return {name: (codes, np.broadcast_to(scales[:1], scales.shape)) for name, (codes, scales) in pairs.items()}


def scales_of_the_first_slot(arguments: dict[str, Any]) -> dict[str, Any]:
    pairs = {name: arguments[name] for name in ("k_pages", "v_pages") if isinstance(arguments[name], tuple)}
    return {name: (codes, np.broadcast_to(scales[:, :, :1], scales.shape)) for name, (codes, scales) in pairs.items()}


def scales_of_k_for_v(arguments: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(arguments["k_pages"], tuple):
        return {}
    return {"v_pages": (arguments["v_pages"][0], arguments["k_pages"][1])}


def missing_pages_are_the_first(arguments: dict[str, Any]) -> dict[str, Any]:
    count = (arguments["k_pages"][0] if isinstance(arguments["k_pages"], tuple) else arguments["k_pages"]).shape[1]
    table = arguments["page_indices"]
    return {"page_indices": np.where((table < 0) | (table >= count), 0, table)}


def heads_and_pages_confused(arguments: dict[str, Any]) -> dict[str, Any]:
    """Pages whose memory is read as if their layout were [P, K, G, D]."""

    def confused(pages: Any) -> Any:
        if isinstance(pages, tuple):
            return tuple(map(confused, pages))
        return np.ascontiguousarray(pages).reshape(pages.shape[1], pages.shape[0], *pages.shape[2:]).swapaxes(0, 1)

    return {name: confused(arguments[name]) for name in ("k_pages", "v_pages")}


def always_at_the_end(arguments: dict[str, Any]) -> dict[str, Any]:
    del arguments
    return {"align": "end"}


def never_at_the_end(arguments: dict[str, Any]) -> dict[str, Any]:
    del arguments
    return {"align": "chunk"}


def window_one_too_wide(arguments: dict[str, Any]) -> dict[str, Any]:
    window = arguments["sliding_window"]
    return {"sliding_window": window and min(window + 1, 2**31 - 1)}


def rows_behind_the_length_see_all(**arguments: Any) -> Any:
    out = honest_prefill(**arguments)
    length, chunk = max(int(np.asarray(arguments["length"]).reshape(())), 0), len(out)
    live = prefill.rows_of_the_last_chunk(length, chunk)
    if arguments["align"] == "chunk" and 0 < live < chunk:
        out[live:] = out[live - 1]
    return out


def last_partial_page_dropped(arguments: dict[str, Any]) -> dict[str, Any]:
    pages = arguments["k_pages"]
    size = (pages[0] if isinstance(pages, tuple) else pages).shape[2]
    whole = np.asarray(arguments["length"]).reshape(()) // size
    return {"page_indices": np.where(np.arange(len(arguments["page_indices"])) < whole, arguments["page_indices"], -1)}


def given(honest: Function, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Function:
    """A mutant that calls the correct function `honest` with changed arguments."""
    return lambda **arguments: honest(**(arguments | change(arguments)))


BOTH = (
    cap_forgotten, scales_forgotten, scales_of_the_first_head, scales_of_the_first_slot, scales_of_k_for_v,
    missing_pages_are_the_first, heads_and_pages_confused,
)  # fmt: skip
DECODE = {m.__name__: given(honest_decode, m) for m in (one_key_more, no_keys_are_one, *BOTH)}
PREFILL = {
    m.__name__: given(honest_prefill, m)
    for m in (always_at_the_end, never_at_the_end, window_one_too_wide, last_partial_page_dropped, *BOTH)
} | {"rows_behind_the_length_see_all": rows_behind_the_length_see_all}


@pytest.mark.parametrize("name", DECODE)
def test_a_wrong_decode_is_caught(plant: Callable[..., Runner], name: str) -> None:
    runner = plant(paged_attention=DECODE[name])
    assert any(failures(runner, heads_first_suite.corners(), 1)), "no corner caught it"
    assert any(failures(runner, heads_first_suite.agreement(), 200)), "no drawn batch caught it"


@pytest.mark.parametrize("name", PREFILL)
def test_a_wrong_prefill_is_caught(plant: Callable[..., Runner], name: str) -> None:
    runner = plant(prefill_attention=PREFILL[name])
    assert any(failures(runner, heads_first_suite.corners(), 1)), "no corner caught it"
    assert any(failures(runner, heads_first_suite.agreement(), 200)), "no drawn batch caught it"


# For each mutant that a law catches without reference results, the beginning of that law's name.
NOTICED = {
    "one_key_more": "heads-first pages are a matter of layout",
    "heads_and_pages_confused": "heads-first pages are a matter of layout",
    "scales_of_the_first_slot": "pages with scales",
    "no_keys_are_one": "heads-first pages are a matter of layout",
}


@pytest.mark.parametrize("name", NOTICED)
def test_a_law_notices_without_an_oracle(plant: Callable[..., Runner], name: str) -> None:
    law = [check for check in heads_first_suite.laws() if check.name.startswith(NOTICED[name])]
    assert any(failures(plant(paged_attention=DECODE[name]), law, 300))


def test_a_law_notices_a_misplaced_chunk(plant: Callable[..., Runner]) -> None:
    runner = plant(prefill_attention=PREFILL["always_at_the_end"])
    assert len(list(failures(runner, heads_first_suite.laws(), 100))) == 2


# ---- updates

Update = tuple[np.ndarray, np.ndarray, Any]


class PagesAsGiven(Runner):
    """A runner that returns the pages without the update."""

    def update(self, batch: Batch, new: WriteBatch, **options: Any) -> Update:
        return *super().update(batch, new, **options)[:2], batch.kv_pages


class SeesTheOldPages(Runner):
    """A runner that attends before it writes the new keys and values."""

    def update(self, batch: Batch, new: WriteBatch, **options: Any) -> Update:
        return *self.run("ragged_paged_attention", batch, return_lse=True), super().update(batch, new, **options)[2]


class WritesOneSlotTooMany(Runner):
    """A runner that also writes the slot next to the last one, as a copy with a rounded-up size would."""

    def update(self, batch: Batch, new: WriteBatch, **options: Any) -> Update:
        out, lse, pages = super().update(batch, new, **options)
        arrays = [array.copy() for array in pages_of(pages)]
        for array in arrays:
            array[-1, -1] = 1
        return out, lse, like_pages(pages, arrays)


@pytest.mark.parametrize("wrong", [PagesAsGiven, SeesTheOldPages, WritesOneSlotTooMany])
def test_a_wrong_update_is_caught(wrong: type[Runner]) -> None:
    runner = wrong(framework="torch", backend="eager")
    assert any(failures(runner, updates.corners(), 1))
    assert any(failures(runner, updates.agreement(), 20))


def test_an_honest_update_passes() -> None:
    assert not any(failures(Runner(framework="torch", backend="eager"), updates.corners(), 1))
