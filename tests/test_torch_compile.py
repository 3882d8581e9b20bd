"""Every operation of the torch front end compiles into one graph with `torch.compile`, and gives identical bits."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree

import ragged_attention.torch as rt
from ragged_attention.calls import CALLS
from tests.arrays import ints
from tests.test_features import CALLS_WITH, arguments_of

# The arguments of `make_decode_schedule`, which differ from those of its record.
SHAPES = {"batch_size": 2, "num_q_tokens": 2, "num_q_heads": 4, "num_kv_heads": 1, "num_parts": 3, "overhead": 2}
LISTS = {"topk": 8, "topk_lens": ints(3, 9), "extra_topk": 4, "extra_topk_lens": ints([1, 2], [0, 5])}
SCHEDULES: list[dict[str, Any]] = [SHAPES | {"kv_lens": ints(100, 7)}, SHAPES | LISTS | {"kv_lens": None}]

EACH = [("make_decode_schedule", index, False) for index in range(len(SCHEDULES))] + [
    (operation, index, into)
    for operation, calls in CALLS_WITH.items()
    if operation != "make_decode_schedule"
    for index in range(len(calls))
    for into in ((False, True) if CALLS[operation].TAKES_OUT else (False,))
]


def on_torch(operation: str, index: int) -> dict[str, Any]:
    """A call's arguments on new tensors, because some operations write to their arguments."""
    given = SCHEDULES[index] if operation == "make_decode_schedule" else arguments_of(operation, index)
    given = {name: value for name, value in given.items() if name != "schedule"}  # its schedule is not from torch
    return _pytree.tree_map(lambda value: torch.tensor(value) if isinstance(value, np.ndarray) else value, given)


def bits(values: Any) -> list[Any]:
    """The shape, dtype and bytes of each tensor."""
    leaves = [leaf for leaf in _pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [(leaf.shape, leaf.dtype, leaf.contiguous().view(torch.uint8).tolist()) for leaf in leaves]


def test_every_operation_is_compiled_here() -> None:
    assert {operation for operation, _, _ in EACH} == set(CALLS)


@pytest.mark.parametrize(("operation", "index", "into"), EACH)
def test_compiled_calls_have_the_bits_of_plain_ones(operation: str, index: int, into: bool) -> None:
    def call(given: dict[str, Any]) -> Any:
        return getattr(rt, operation)(**given, backend="eager")

    plain, traced = on_torch(operation, index), on_torch(operation, index)
    want = call(plain)
    if into:
        traced["out"] = torch.full_like(_pytree.tree_leaves(want)[0], torch.nan)
    torch._dynamo.reset()
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(traced)
    assert bits(got) == bits(want)
    if into:
        assert _pytree.tree_leaves(got)[0] is traced.pop("out")
    assert bits(traced) == bits(plain)


@pytest.mark.parametrize(("operation", "index"), [(operation, index) for operation, index, into in EACH if not into])
def test_numbers_and_sizes_may_be_left_open(operation: str, index: int) -> None:
    """Numbers and sizes may be symbolic.

    They are symbolic with `dynamic=True`, or after a compiled function was called with a second value, such as another
    layer's.
    """

    def call(given: dict[str, Any]) -> Any:
        return getattr(rt, operation)(**given, backend="eager")

    def with_floats_times(factor: float) -> dict[str, Any]:
        given = on_torch(operation, index)
        return {name: value * factor if type(value) is float else value for name, value in given.items()}

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for factor in (1.0, 1.25):
        plain, traced = with_floats_times(factor), with_floats_times(factor)
        assert bits(compiled(traced)) == bits(call(plain))
        assert bits(traced) == bits(plain)
