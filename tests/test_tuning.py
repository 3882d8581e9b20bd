"""Tile sizes come from explicit options or, without options, from the backend's heuristic."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from ragged_attention import tuning
from ragged_attention.errors import InvalidInput
from ragged_attention.protocols import complete
from ragged_attention.tools.samples import Sample, device_of

CALL = Sample().call("merge_attention_states", device_of("torch", "sm_90"))


@dataclasses.dataclass(frozen=True)
class Tile:
    block_q: int = 16
    block_kv: int = 32

    def __post_init__(self) -> None:
        if self.block_q % 16:
            raise InvalidInput(f"expected block_q to be a multiple of 16, got {self.block_q}")


BACKEND = SimpleNamespace(Tile=Tile, heuristic=lambda call: Tile(64, 128), invariant_tile=lambda call: Tile(32, 32))


def tile(options: dict[str, Any], *, invariant: bool = False) -> Tile:
    return tuning.tile_for(BACKEND, CALL, options, invariant=invariant)


def test_options_override_the_heuristic_field_by_field() -> None:
    assert tile({}) == Tile(64, 128)
    assert tile({"block_q": 16}) == Tile(16, 128)
    assert tile({"block_q": 16, "block_kv": 16}) == Tile(16, 16)
    assert tile({"block_q": 16}, invariant=True) == Tile(16, 32)


def test_unknown_options_list_the_known() -> None:
    with pytest.raises(InvalidInput, match="expected options among block_q, block_kv for this backend, got 'block_k'"):
        tile({"block_k": 16})


def test_the_tile_checks_what_options_make_of_it() -> None:
    with pytest.raises(InvalidInput, match="expected block_q to be a multiple of 16, got 24"):
        tile({"block_q": 24})


def test_a_module_without_tunables_takes_no_options() -> None:
    module = complete(SimpleNamespace())
    assert tuning.tile_for(module, CALL, {}) == module.Tile()
    with pytest.raises(InvalidInput, match="expected options among none for this backend, got 'block_q'"):
        tuning.tile_for(module, CALL, {"block_q": 16})


def test_without_a_heuristic_a_tile_has_its_own_defaults() -> None:
    module = complete(SimpleNamespace(Tile=Tile, BATCH_INVARIANT=True))
    for invariant in (False, True):
        assert tuning.tile_for(module, CALL, {"block_q": 48}, invariant=invariant) == Tile(48, 32)


def test_what_a_module_offers_stays() -> None:
    offered = dict(vars(BACKEND), BATCH_INVARIANT=True, FEATURES=frozenset({"sinks"}), why_not=lambda call: "never")
    offered["why_not_by_default"] = lambda call: "not yet"
    assert vars(complete(SimpleNamespace(**offered))) == offered
