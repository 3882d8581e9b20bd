"""The benchmark cases of attention without a cache: floors, inputs, checks of results and gradients, and peers."""

import dataclasses
import sys
import types
from typing import Any

import numpy as np
import pytest

from benchmarks import run
from benchmarks.cases import catalogue
from benchmarks.cases import varlen as varlen_cases
from benchmarks.cases.varlen import VarlenCase
from benchmarks.peers import varlen as varlen_peers
from ragged_attention.calls import NOWHERE
from ragged_attention.reference.varlen_attention import varlen_attention
from ragged_attention.reference.varlen_attention_backward import varlen_attention_backward

NAMES = ("mha_gqa_8x2k", "mha_everything_128", "mha_cross_96_72", "mha_two_ranges_bias_64")


def small(name: str, length: int = 20) -> VarlenCase:
    return catalogue.find(name).scaled_down(length=length, sequences=2)


@pytest.mark.parametrize("name", [*varlen_cases.CASES, *varlen_cases.COMPILED_ONLY])
def test_every_case_is_valid_whole_and_scaled_down(name: str) -> None:
    whole, less = catalogue.find(name), catalogue.find(f"{name}_small")
    for case in (whole, less):
        (call,) = case.calls(NOWHERE)
        assert case.operation == call.OPERATION
        assert len(case.q_lens) == len(case.kv_lens)
    assert max(less.kv_lens) <= 77
    assert less.num_q_heads // less.num_kv_heads == whole.num_q_heads // whole.num_kv_heads


def test_needed_work_is_counted_by_hand() -> None:
    case = VarlenCase(
        name="tiny", workload="-", q_lens=(3, 1), kv_lens=(5, 2), num_q_heads=4, num_kv_heads=2, head_dim=8, d_v=6
    )
    assert case.visible_pairs() == (3 + 4 + 5) + 2
    assert case.flops() == 2 * 14 * 4 * (8 + 6)
    assert case.needed_bytes() == 2 * (4 * 4 * (8 + 6) + 7 * 2 * (8 + 6)) + 4 * 4 * 4
    assert dataclasses.replace(case, causal=False).visible_pairs() == 3 * 5 + 2
    assert dataclasses.replace(case, sliding_window=2).visible_pairs() == 3 * 2 + 2
    assert dataclasses.replace(case, sliding_window=2, causal=False).visible_pairs() == (4 + 3 + 2) + 2
    assert dataclasses.replace(case, q_lens=(6, 1)).visible_pairs() == (0 + 1 + 2 + 3 + 4 + 5) + 2
    ranged = dataclasses.replace(case, causal=False, key_ranges=2)  # two ranges per query, of 3, 4, 5 and 2 keys
    assert ranged.visible_pairs() == 2 + 3 + 3 + 1
    assert ranged.needed_bytes() == case.needed_bytes() + 2 * 8 * 4
    backward = dataclasses.replace(case, backward=True)
    assert backward.flops() == 2 * 14 * 4 * (3 * 8 + 2 * 6)
    assert backward.needed_bytes() == 2 * 2 * (4 * 4 * (8 + 6) + 7 * 2 * (8 + 6)) + 4 * 4 * 4


def test_floors_on_an_h200() -> None:
    wanted = {"mha_128_4k": 393, "mha_128_8k_full": 1571, "mha_192_4k_backward": 1276, "mha_128_4k_backward": 982}
    for name, microseconds in wanted.items():
        floor, bound = varlen_cases.CASES[name].floor_seconds(4.3e12, 700e12)
        assert floor * 1e6 == pytest.approx(microseconds, rel=0.01), name
        assert bound == "arithmetic"


@pytest.mark.parametrize("name", ["mha_gqa_8x2k", "mha_everything_128"])
def test_inputs_are_the_same_values_in_every_framework(name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    from ragged_attention.jax._launcher import to_numpy as from_jax
    from ragged_attention.torch._launcher import to_numpy as from_torch

    case = small(name)
    plain, ours, theirs = (make(5) for make in (case.numpy_inputs, case.torch_inputs, case.jax_inputs))
    assert plain.keys() == ours.keys() == theirs.keys()
    for key, value in plain.items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(value, from_torch(ours[key])), key
            assert np.array_equal(value, from_jax(theirs[key])), key
        else:
            assert value == ours[key] == theirs[key]


def definition(case: VarlenCase, inputs: dict[str, Any]) -> Any:
    function = varlen_attention_backward if case.backward else varlen_attention
    return case.judged(function(**inputs))


@pytest.mark.parametrize("name", [*NAMES, *(f"{name}_backward" for name in NAMES)])
def test_the_check_passes_the_definition_and_nothing_else(name: str) -> None:
    case = small(name)
    inputs = case.numpy_inputs(1)
    results = definition(case, inputs)
    case.check(inputs, results, np.asarray)
    arrays = results if case.backward else [results]
    for changed_one in range(min(len(arrays), 3)):
        for wrong in (arrays[changed_one] * 1.02, np.roll(arrays[changed_one], 1, axis=0)):
            changed: Any = [wrong if index == changed_one else array for index, array in enumerate(arrays)]
            with pytest.raises(AssertionError, match=case.name):
                case.check(inputs, changed if case.backward else changed[0], np.asarray)


@pytest.mark.parametrize("name", ["mha_two_ranges_128", "mha_two_ranges_128_backward"])
def test_the_check_notices_that_ranges_of_keys_are_ignored(name: str) -> None:
    case = small(name)
    inputs = case.numpy_inputs(1)
    case.check(inputs, definition(case, inputs), np.asarray)
    with pytest.raises(AssertionError, match=case.name):
        case.check(inputs, definition(case, inputs | {"key_ranges": None}), np.asarray)


def test_other_lengths_have_their_own_ranges_of_keys() -> None:
    case = small("mha_two_ranges_128")
    inputs = case.numpy_inputs()
    for now, tables in case.changed():
        for key, table in tables.items():
            np.copyto(inputs[key], table)
        now.check(inputs, definition(now, inputs), np.asarray)


@pytest.mark.parametrize("backward", [False, True])
def test_torchs_own_attention_is_a_fair_peer(backward: bool) -> None:
    pytest.importorskip("torch")
    name = "mha_192_4k_full" + "_backward" * backward
    case = dataclasses.replace(catalogue.find(name), q_lens=(20, 20), kv_lens=(20, 20), dtype="float32", num_q_heads=4)
    case = dataclasses.replace(case, num_kv_heads=2, causal=backward)
    assert varlen_peers.sdpa_declines(case) is None
    inputs = case.torch_inputs(2)
    case.check(inputs, varlen_peers.sdpa(case, inputs)(), run.to_numpy)


def flash_attn_stand_in(recorded: dict[str, Any]) -> Any:
    """A stand-in for `flash_attn_varlen_func`. It computes with this package and stores its options in `recorded`."""

    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, *lens: Any, causal: bool, window_size: Any, softcap: float
    ) -> Any:
        import ragged_attention.torch as rt

        recorded.update(window_size=window_size, max_lens=lens[2:])
        window = None if window_size[0] < 0 else window_size[0] + 1
        assert window_size[1] == (0 if causal and window else -1)
        out = rt.varlen_attention(
            q, k, v, *lens[:2], causal=causal, sliding_window=window, soft_cap=softcap or None, backend="eager"
        )
        return (out, None)

    return flash_attn_varlen_func


@pytest.mark.parametrize("name", ["mha_packed", "mha_packed_backward", "mha_gemma_256"])
def test_flash_attention_is_called_as_it_wants_to_be(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    recorded: dict[str, Any] = {}
    module: Any = types.ModuleType("flash_attn_interface")
    module.flash_attn_varlen_func = flash_attn_stand_in(recorded)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    case = small(name)
    assert varlen_peers.refuses()(case) is None
    inputs = case.torch_inputs(2)
    case.check(inputs, varlen_peers.flash_attention(case, inputs, module.__name__)(), run.to_numpy)
    assert recorded["max_lens"] == (max(case.q_lens), max(case.kv_lens))


def test_the_carried_operator_is_called_by_position() -> None:
    torch = pytest.importorskip("torch")
    case = dataclasses.replace(small("mha_everything_128"), sinks=True)
    inputs = case.torch_inputs(2)

    def forward(*arguments: Any) -> Any:
        assert len(arguments) == 34
        q, k, v, starts, key_starts = (arguments[index] for index in (0, 1, 2, 7, 8))
        assert arguments[12:14] == (max(case.q_lens), max(case.kv_lens))
        assert arguments[23:28] == (128**-0.5, True, (case.sliding_window or 0) - 1, 0, case.soft_cap)
        import ragged_attention.torch as rt

        out = rt.varlen_attention(
            q, k, v, starts, key_starts, causal=True, sliding_window=case.sliding_window, soft_cap=case.soft_cap,
            sinks=arguments[33].to(torch.float32), backend="eager",
        )  # fmt: skip
        return (out,)

    operator: Any = forward
    operator.default = types.SimpleNamespace(_schema=types.SimpleNamespace(arguments=[None] * 34))
    case.check(inputs, varlen_peers.fa3(case, inputs, operator)(), run.to_numpy)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"q_lens": (3, 4), "kv_lens": (3, 4)}, "sequences must have one length here"),
        ({"kv_lens": (5, 5)}, "sequences must have one length here"),
        ({"sinks": True}, "does not take sinks"),
        ({"soft_cap": 3.0}, "does not take soft_cap"),
        ({"sliding_window": 3}, "does not take sliding_window"),
        ({"d_lse": True}, "does not take d_lse"),
    ],
)
def test_peers_say_what_they_do_not_take(fields: dict[str, Any], reason: str) -> None:
    case = dataclasses.replace(catalogue.find("mha_128_4k_backward"), q_lens=(4, 4), kv_lens=(4, 4))
    assert varlen_peers.sdpa_declines(case) is None
    assert varlen_peers.sdpa_declines(dataclasses.replace(case, **fields)) == reason
    assert varlen_peers.fa3_declines(case) == "as vLLM ships it, it has no gradient"
    assert varlen_peers.fa3_declines(dataclasses.replace(case, backward=False)) is None
