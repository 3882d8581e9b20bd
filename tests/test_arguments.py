"""Every public function accepts or refuses unusual arguments: other kinds, dtypes and layouts, and overlapping memory.

The calls are those of `CALLS_WITH`, so that every new argument is tested here too.
"""

import dataclasses
import functools
import itertools
import operator
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import ragged_attention as ra
from ragged_attention import dispatch
from ragged_attention.calls import CALLS, QUANTIZED
from tests.arrays import ints
from tests.test_features import CALLS_WITH, EACH, arguments_of

torch: Any = pytest.importorskip("torch")
jax: Any = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import ragged_attention.jax as jax_front  # noqa: E402
import ragged_attention.torch as torch_front  # noqa: E402
from ragged_attention.compat.jax_arguments import as_int32  # noqa: E402
from ragged_attention.jax._lower import held_by_jax  # noqa: E402
from ragged_attention.torch import _plan  # noqa: E402
from tests import tensors  # noqa: E402

rj: Any = jax_front
rt: Any = torch_front
SCHEDULE = {
    "kv_lens": None, "batch_size": 2, "num_q_tokens": 2, "num_q_heads": 4, "num_kv_heads": 1, "topk": 8,
    "topk_lens": ints(3, 9),
}  # fmt: skip
Refused = (ra.InvalidInput, TypeError)


def given(operation: str, index: int, array: Callable[[Any], Any]) -> dict[str, Any]:
    """The arguments of a public call, with its NumPy arrays converted by `array`."""
    # `make_decode_schedule` takes other arguments than its record. The other operations get no schedule here, because
    # each front end must make its own.
    arguments = SCHEDULE if operation == "make_decode_schedule" else arguments_of(operation, index)
    return {name: mapped(array, value) for name, value in arguments.items() if name != "schedule"}


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """An argument with `change` applied to its array, or to each array of a tuple."""
    if isinstance(value, tuple):
        return tuple(mapped(change, item) for item in value)
    return change(value) if hasattr(value, "shape") else value


def arrays_of(arguments: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The names and values of the arguments that are arrays or tuples."""
    return ((name, value) for name, value in arguments.items() if hasattr(value, "shape") or isinstance(value, tuple))


EACH_CALL = pytest.mark.parametrize(("operation", "index"), EACH)
WRITES = [(name, index) for name, index in EACH if CALLS[name].WRITES]
EACH_WRITE = pytest.mark.parametrize(("operation", "index"), WRITES)


# ---- arguments of another kind


def of_other_kinds(value: Any, foreign: Callable[[Any], Any]) -> dict[str, Any]:
    if isinstance(value, tuple):
        return {"lists": tuple(item.tolist() for item in value), "foreign": tuple(map(foreign, value)), "text": "x"}
    return {"list": value.tolist(), "foreign": foreign(value), "text": "x"}


@pytest.mark.parametrize("front", [torch_front, jax_front])
@pytest.mark.parametrize("operation", CALLS)
def test_an_unknown_argument_is_refused_by_the_functions_own_name(operation: str, front: Any) -> None:
    function = getattr(front, operation)
    assert function.__qualname__ == operation
    with pytest.raises(TypeError, match=rf"^{operation}\(\) got an unexpected keyword argument 'draft_masks'$"):
        function(draft_masks=None)
    assert pickle.loads(pickle.dumps(function)).__name__ == operation


@pytest.mark.parametrize("front", [rt, rj])
@EACH_CALL
def test_what_is_no_array_is_refused_by_name(operation: str, index: int, front: Any) -> None:
    array, foreign = (
        (torch.tensor, np.asarray) if front is rt else (jnp.asarray, lambda value: torch.tensor(np.array(value)))
    )
    arguments = given(operation, index, array)
    for name, value in arrays_of(arguments):
        for wrong in of_other_kinds(value, foreign).values():
            with pytest.raises(Refused, match=rf"^expected {name}\b") as caught:
                getattr(front, operation)(**arguments | {name: wrong}, backend="reference")
            assert caught.value.__suppress_context__ or caught.value.__context__ is None
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("front", [rt, rj])
@EACH_CALL
def test_arrays_in_place_of_words_and_numbers_are_refused_by_name(operation: str, index: int, front: Any) -> None:
    arguments = given(operation, index, torch.tensor if front is rt else jnp.asarray)
    for name, value in arguments.items():
        if isinstance(value, (str, int, float)) and name not in (
            "length",
            "k_scale",
            "v_scale",
            "kv_scale",
            "rope_scale",
        ):
            with pytest.raises(Refused, match=rf"^expected {name}\b"):
                getattr(front, operation)(**arguments | {name: np.ones(3, np.float32)}, backend="reference")


@pytest.mark.parametrize("front", [rt, rj])
def test_parts_that_are_stacked_have_one_dtype_and_shape(front: Any) -> None:
    array = torch.tensor if front is rt else jnp.asarray
    outs, lses = [array(np.ones((3, 4, 16), np.float32))] * 2, [array(np.ones((3, 4), np.float32))] * 2
    for other, message in (
        (array(np.ones((3, 4, 16), np.float16)), r"expected outs\[1\].dtype to be float32, got float16"),
        (np.ones((3, 4, 16)), r"expected outs\[1\]"),
        (array(np.ones((3, 4, 8), np.float32)), r"expected outs\[1\].shape to be \[T, H, D_v\] = \[3, 4, 16\]"),
    ):
        with pytest.raises(Refused, match=message):
            front.merge_attention_states([outs[0], other], lses)


# ---- signaling NaNs


def signaling(array: Any) -> Any:
    """Signaling NaNs of an array's shape; converting them to another dtype raises the invalid flag."""
    return np.full(array.shape, 0x7FA00000, np.uint32).view(np.float32) if array.dtype == np.float32 else array


@pytest.mark.parametrize("front", [rt, rj])
@pytest.mark.parametrize(
    ("operation", "index", "backend"),
    [
        (*each, backend)
        for each, backend in itertools.product(EACH, ["reference", "numba"])
        if each[0] != "make_decode_schedule" and dispatch.backends_offering(each[0], backend)
    ],
)
def test_signaling_nans_make_no_warning(operation: str, index: int, front: Any, backend: str) -> None:
    """Signaling NaNs cause no Python warning; pytest turns warnings into errors."""
    array = torch.tensor if front is rt else jnp.asarray
    call = getattr(front, operation)
    call(**given(operation, index, lambda value: array(signaling(value))), backend=backend)
    for name, value in arrays_of(arguments := given(operation, index, np.asarray)):
        changed = arguments | {name: mapped(signaling, value)}
        call(**{key: mapped(array, value) for key, value in changed.items()}, backend=backend)


# ---- 64-bit dtypes, which jax does not support without jax_enable_x64


def with_dtype(kind: str, dtype: Any) -> Callable[[Any], Any]:
    return lambda array: array.astype(dtype) if array.dtype.kind == kind else array


@pytest.mark.parametrize("x64", [False, True])
@EACH_CALL
def test_wide_indices_are_seen_before_jax_narrows_them(operation: str, index: int, x64: bool) -> None:
    """Slots may always be int64, and a rotation's positions may be int64 under `jax_enable_x64`.

    No other index may be int64. torch has the same rules. They apply to plain and to traced calls.
    """
    arguments = given(operation, index, np.asarray)
    call = getattr(rj, operation)
    with jax.enable_x64(x64):
        for name, value in arrays_of(arguments):
            if isinstance(value, tuple) or value.dtype != np.int32:
                continue
            wide = functools.partial(call, **arguments | {name: value.astype(np.int64)})
            if name == "slot_mapping":
                want = call(**arguments, backend="reference")
                far = np.where(value < 0, [[2**32], [-(2**63)], [2**32 + 1]], value)
                for slots in far:
                    found = wide(**{name: slots}, backend="reference")
                    assert jax.tree.all(jax.tree.map(np.array_equal, found, want))
                with ra.use_backend(validate="full"), pytest.raises(ra.InvalidInput, match="to be -1 or between 0 and"):
                    wide(**{name: far[0]}, backend="reference")
                continue
            if x64 and name == "positions" and CALLS[operation].WRITES:
                want = call(**arguments, backend="reference")
                assert jax.tree.all(jax.tree.map(np.array_equal, wide(backend="reference"), want))
                continue
            for run in (wide, jax.jit(lambda wide=wide: wide())):
                with pytest.raises(ra.InvalidInput, match=rf"expected {name}\b.* (int32|jax_enable_x64).* got int64"):
                    run()


@EACH_CALL
def test_wide_floats_are_seen_before_jax_rounds_them(operation: str, index: int) -> None:
    arguments = given(operation, index, np.asarray)
    wide = {name: mapped(with_dtype("f", np.float64), value) for name, value in arguments.items()}
    if not any(array.dtype == np.float64 for array in jax.tree.leaves(dict(arrays_of(wide)))):
        return
    call = functools.partial(getattr(rj, operation), **wide)
    for run in (call, jax.jit(lambda: call())):
        with pytest.raises(ra.InvalidInput, match=r"expected .*dtype\b.* to be .*, got float64"):
            run()


@pytest.mark.parametrize("backend", ["xla", "numba", "reference"])
def test_wide_arrays_that_jax_held_before_are_no_other(backend: str) -> None:
    """An int64 array made under `jax_enable_x64` is still handled correctly after the option is switched off.

    Otherwise computations with it would wrap around.
    """
    k, pages = np.ones((4, 1, 16), np.float32), np.zeros((2, 4, 2, 16), np.float32)
    with jax.enable_x64(True):
        slots, q = jnp.asarray([2**32, 5, 2**32 + 1, -(2**63)]), jnp.ones((4, 1, 16), jnp.float64)
    assert slots.dtype == jnp.int64
    for write in (rj.write_kv_pages, jax.jit(rj.write_kv_pages, static_argnames="backend")):
        written = np.asarray(write(k, k, pages, slots, backend=backend))
        assert np.flatnonzero(written[:, :, 0].any(-1)).tolist() == [5]
    with pytest.raises(ra.InvalidInput, match=r"q\.dtype to be one that jax holds without jax_enable_x64, got float64"):
        rj.varlen_attention(q, q, q, ints(0, 4), ints(0, 4), backend=backend)


@pytest.mark.parametrize("front", [rt, rj])
@pytest.mark.parametrize("name", ["parts", "num_splits", "lens"])
def test_a_schedule_of_wide_integers_is_refused(front: Any, name: str) -> None:
    array = torch.tensor if front is rt else jnp.asarray
    tables = {"page_indices": array(ints([0, 1], [2, 3])), "kv_lens": array(ints(7, 3))}
    schedule = front.make_decode_schedule(tables["kv_lens"], 2, 1, 4, 1)
    wide = np.asarray(getattr(schedule, name)).astype(np.int64)
    schedule = dataclasses.replace(schedule, **{name: torch.tensor(wide) if front is rt else wide})
    rows = array(np.ones((2, 1, 4, 48), np.float32)), array(np.ones((4, 4, 1, 48), np.float32))
    with pytest.raises(ra.InvalidInput, match=f"expected schedule.{name}.dtype to be int32, got int64"):
        front.mla_decode(*rows, **tables, d_v=32, schedule=schedule)


def test_slots_that_only_int64_can_name_are_refused_without_it() -> None:
    class Huge:
        num_slots = 2**32

    with pytest.raises(
        ra.InvalidInput, match="expected slot_mapping within int32 without jax_enable_x64, got 2147483648"
    ):
        held_by_jax(Huge, "slot_mapping", np.array([3, 2**31]))
    assert held_by_jax(Huge, "slot_mapping", np.array([3, 2**32])).tolist() == [3, -1]


@pytest.mark.parametrize(
    ("dtype", "values", "held"),
    [
        (np.int64, [2**40, -(2**40), 5], [2**31 - 1, -(2**31), 5]),
        (np.uint64, [2**63, 5], [2**31 - 1, 5]),
        (np.uint32, [2**32 - 1, 5], [2**31 - 1, 5]),
        (np.int8, [-128, 127], [-128, 127]),
    ],
)
def test_the_drop_ins_clamp_indices_before_jax_narrows_them(dtype: Any, values: list[int], held: list[int]) -> None:
    found = as_int32("lengths", np.array(values, dtype))
    assert found.dtype == jnp.int32
    assert found.tolist() == held


# ---- jax's own machinery


@EACH_CALL
def test_no_call_keeps_a_tracer(operation: str, index: int) -> None:
    arguments = given(operation, index, jnp.asarray)
    arrays = dict(arrays_of(arguments))
    others = {name: value for name, value in arguments.items() if name not in arrays}
    with jax.check_tracer_leaks(True), ra.use_backend(validate="full"):
        jax.jit(lambda arrays: getattr(rj, operation)(**arrays, **others, backend="reference"))(arrays)


@EACH_CALL
def test_symbolic_sizes_are_refused_by_name(operation: str, index: int) -> None:
    arguments = given(operation, index, jnp.asarray)
    name, value = next((name, value) for name, value in arrays_of(arguments) if not isinstance(value, tuple))
    size = jax.export.symbolic_shape("size")
    of_any_size = jax.ShapeDtypeStruct((*size, *value.shape[1:]), value.dtype)
    function = jax.jit(lambda array: getattr(rj, operation)(**arguments | {name: array}))
    with pytest.raises(ra.InvalidInput, match=rf"expected {name} of known sizes, got \[size.*once for each shape"):
        jax.export.export(function)(of_any_size)


# ---- torch's layouts


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@EACH_CALL
def test_tensors_without_strides_are_refused_by_name(operation: str, index: int) -> None:
    arguments = given(operation, index, torch.tensor)
    for name, value in arrays_of(arguments):
        if isinstance(value, tuple):
            continue
        for wrong in (value.to_sparse(), torch.nested.nested_tensor([value, value])):
            with pytest.raises(ra.InvalidInput, match=rf"^expected {name}\b.* to be a dense tensor") as caught:
                getattr(rt, operation)(**arguments | {name: wrong}, backend="eager")
            assert caught.value.__suppress_context__ or caught.value.__context__ is None


def negated(value: Any) -> Any:
    return torch._neg_view(-value) if value.is_floating_point() and value.dtype != torch.float8_e4m3fn else value


@EACH_CALL
def test_negated_views_count_as_what_they_stand_for(operation: str, index: int) -> None:
    written = {name for name, kind in CALLS[operation].KINDS.items() if kind.written}
    written |= (
        {"kv_pages", "kv_cache"} & set(arguments_of(operation, index))
        if "new_kv" in CALLS_WITH[operation][index]
        else set()
    )
    plain, views = given(operation, index, torch.tensor), given(operation, index, torch.tensor)
    views = {name: value if name in written else mapped(negated, value) for name, value in views.items()}
    want, got = (getattr(rt, operation)(**arguments, backend="eager") for arguments in (plain, views))
    torch.testing.assert_close(as_list(got), as_list(want), rtol=0, atol=0)
    for name in written & plain.keys():
        before = given(operation, index, torch.tensor)
        target = torch._neg_view(before[name]) if before[name].is_floating_point() else None
        if target is None:
            continue
        with pytest.raises(ra.InvalidInput, match=rf"expected {name} to hold its values, got a view that negates them"):
            getattr(rt, operation)(**before | {name: target}, backend="eager")
        assert torch.equal(target, torch._neg_view(given(operation, index, torch.tensor)[name]))


def as_list(found: Any) -> list[Any]:
    if not isinstance(found, (tuple, list)):
        return [vars(found)["parts"]] if hasattr(found, "parts") else [found]
    return list(found)


def far_apart(tensor: Any) -> Any:
    """A tensor of equal values whose axes lie in memory in the opposite order."""
    axes = tuple(range(tensor.dim()))[::-1]
    return tensor.permute(axes).contiguous().permute(axes)


@pytest.mark.parametrize("backend", ["reference", "eager", "numba"])
@EACH_CALL
def test_results_lie_as_the_fake_kernels_say(operation: str, index: int, backend: str) -> None:
    """Results are packed whatever the strides of the arguments, as the fake kernels promise to compiled code."""
    if not dispatch.backends_offering(operation, backend):
        return
    plain = given(operation, index, torch.tensor)
    written = {name for name, kind in CALLS[operation].KINDS.items() if kind.written or kind.unit_stride}
    laid = {name: value if name in written else mapped(far_apart, value) for name, value in plain.items()}
    for result in as_list(getattr(rt, operation)(**laid, backend=backend)):
        if result is not None and not any(result is value for value in laid.values()):
            assert result.stride() == torch.empty(result.shape).stride()


# ---- writes


SOURCES = {
    "write_kv_pages": ("k", "v"),
    "norm_rope_write": ("q", "k", "v", "cos_sin"),
    "write_mla_cache": ("kv",),
    "latent_norm_rope_write": ("q", "kv"),
    "write_indexer_cache": ("k",),
}


@pytest.mark.parametrize("grad", [True, False])
@EACH_WRITE
def test_a_gradient_that_a_write_would_lose_is_refused(operation: str, index: int, grad: bool) -> None:
    for name in SOURCES[operation]:
        arguments = given(operation, index, torch.tensor)
        before = {other: mapped(torch.clone, value) for other, value in arguments.items()}
        arguments[name].requires_grad_()

        def write(arguments: dict[str, Any] = arguments) -> Any:
            return getattr(rt, operation)(**arguments, backend="eager")

        message = rf"{operation} has no gradient: .*; detach {name}, or write it under torch.no_grad\(\)"
        if grad:
            with pytest.raises(RuntimeError, match=message):
                write()
            with pytest.raises(Exception, match=message):
                torch.compile(write, backend="eager", fullgraph=True)()
            for other, value in before.items():
                assert not isinstance(value, torch.Tensor) or torch.equal(arguments[other], value)
        else:
            with torch.no_grad():
                write()
            with torch.inference_mode():
                write()


@pytest.mark.parametrize("operation", ["ragged_paged_attention", "ragged_mla_attention"])
def test_a_gradient_that_new_kv_would_lose_is_refused(operation: str) -> None:
    arguments = given(operation, 0, torch.tensor)
    arguments["new_kv"] = mapped(lambda value: value.requires_grad_(), arguments["new_kv"])
    cache = CALLS[operation].CACHE  # type: ignore[attr-defined]
    before = arguments[cache].clone()
    with pytest.raises(RuntimeError, match=r"write_\w+ has no gradient: it works on a KV cache, for inference; detach"):
        getattr(rt, operation)(**arguments, backend="eager")
    assert torch.equal(arguments[cache], before)


def test_a_gradient_is_refused_to_torchs_transforms() -> None:
    def loss(new: Any) -> Any:
        cache = torch.zeros(2, 4, 1, 64)
        return rt.write_mla_cache(new, cache, torch.tensor([0, 5]), backend="eager").sum()

    with pytest.raises(RuntimeError, match="write_mla_cache has no gradient"):
        torch.func.grad(loss)(torch.ones(2, 64))


MOVED = torch.tensor([1, 2, 3, 4, 5, 6, 7, -1])  # the slot of each row: the next slot, and none for the last row


@pytest.mark.parametrize("backend", ["reference", "eager", "numba", "triton"])
def test_rows_may_be_moved_within_a_cache(backend: str) -> None:
    """A write whose sources overlap its target reads the sources' values from before the write."""
    pages = torch.arange(8.0).view(2, 4, 1, 1).expand(2, 4, 2, 16).clone()
    want = pages.clone().view(8, 2, 16).roll(1, 0)
    want[0] = 0
    rows = pages.view(8, 2, 16)
    rt.write_kv_pages(rows[:, :1], rows[:, 1:], pages, MOVED, backend=backend)
    assert torch.equal(rows, want)
    pair = torch.ones(2, 4, 1, 16), torch.full((2, 4, 1, 16), 2.0)
    rt.write_kv_pages(pair[1].view(8, 1, 16), pair[0].view(8, 1, 16), pair, torch.arange(8), backend=backend)
    assert [page.unique().tolist() for page in pair] == [[2], [1]]  # keys and values are exchanged
    cache = torch.arange(8.0).view(2, 4, 1, 1).expand(2, 4, 1, 16).clone()
    rt.write_mla_cache(cache.view(8, 16), cache, MOVED, backend=backend)
    assert cache[..., 0].flatten().tolist() == [0, 0, 1, 2, 3, 4, 5, 6]
    swapped, q = cache.clone(), torch.ones(8, 1, 16)
    rt.ragged_mla_attention(
        q, swapped, tensors.ints(8), tensors.ints([1, 0]), tensors.ints(0, 8), new_kv=swapped.view(8, 16), d_v=16,
        backend=backend,
    )  # fmt: skip
    assert torch.equal(swapped, cache.flip(0))
    held = torch.zeros(1, 8, 1, 20, dtype=torch.uint8)
    keys = held.view(-1)[:128].view(torch.float32).view(2, 16)  # a view of the page's first bytes
    keys.copy_(torch.randn(2, 16))
    apart, want = keys.clone(), held.clone()
    rt.write_indexer_cache(apart, want, torch.tensor([1, 0]), backend=backend)
    rt.write_indexer_cache(keys, held, torch.tensor([1, 0]), backend=backend)
    assert torch.equal(held, want)


@pytest.mark.parametrize("operation", ["ragged_paged_attention", "ragged_mla_attention"])
def test_queries_are_read_as_they_were_before_new_kv_is_written(operation: str) -> None:
    held = torch.randn(2, 4, 2, 16)
    if operation == "ragged_mla_attention":
        held = held[:, :, :1].clone()
    new = torch.randn(3, 16) if operation == "ragged_mla_attention" else (torch.randn(3, 1, 16), torch.randn(3, 1, 16))
    tables = tensors.ints(8), tensors.ints([1, 0]), tensors.ints(0, 3)
    options: dict[str, Any] = {"d_v": 16} if operation == "ragged_mla_attention" else {}
    found = []
    for apart in (False, True):
        pages = held.clone()
        q = pages[0, 1:, :1]  # q is a view of the last positions, which the call overwrites
        q = q.clone() if apart else q
        found.append(getattr(rt, operation)(q, pages, *tables, new_kv=new, backend="eager", **options))
    assert not torch.equal(found[0][1], held)
    assert all(map(torch.equal, *found))


WIDTH = 16
ROWS = torch.zeros(6, 4, 2, 2 * (WIDTH + 4), dtype=torch.int8)  # each head's row is [K | scale | V | scale]
KEYS, VALUES = ROWS[..., :WIDTH], ROWS[..., WIDTH + 4 : 2 * WIDTH + 4]
as_scales = operator.methodcaller("view", torch.float32)
KEY_SCALES, VALUE_SCALES = (as_scales(ROWS[..., at : at + 4]) for at in (WIDTH, 2 * WIDTH + 4))
SHARED: list[tuple[str, str, dict[str, Any]]] = [
    ("kv_pages[0]", "kv_pages[1]", {"kv_pages": (KEYS, KEYS)}),
    ("kv_pages[0]", "kv_pages[1]", {"kv_pages": (KEYS, ROWS[..., 8 : WIDTH + 8])}),
    ("kv_pages[0]", "kv_pages[1]", {"kv_pages": (KEYS[:5], KEYS[1:])}),
    ("k_scale_pages", "v_scale_pages", {"k_scale_pages": KEY_SCALES, "v_scale_pages": KEY_SCALES[..., 0]}),
    ("kv_pages[0]", "k_scale_pages", {"kv_pages": (KEYS, VALUES), "k_scale_pages": as_scales(KEYS[..., 12:])}),
    ("kv_pages[1]", "k_scale_pages", {"kv_pages": (KEYS, VALUES), "k_scale_pages": as_scales(VALUES[..., :4])}),
    ("kv_pages", "v_scale_pages", {
        "kv_pages": ROWS.view(6, 4, 4, WIDTH + 4)[..., :WIDTH], "k_scale_pages": KEY_SCALES,
        "v_scale_pages": as_scales(KEYS[..., 4:8]),
    }),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second", "caches"), SHARED)
def test_written_tensors_that_share_bytes_are_refused(first: str, second: str, caches: dict[str, Any]) -> None:
    rows = torch.ones(3, 2, WIDTH)
    scales = {"k_scale_pages": KEY_SCALES.clone(), "v_scale_pages": VALUE_SCALES.clone()}
    pages = caches["kv_pages"] if "kv_pages" in caches else (KEYS.clone(), VALUES.clone())
    if not isinstance(pages, torch.Tensor):  # the scales must have as many pages as the cache
        scales = {name: value[: len(pages[0])] for name, value in scales.items()}
    caches = {**scales, **caches, "kv_pages": pages}
    message = rf"expected {re.escape(first)} and {re.escape(second)} without overlapping memory, got tensors that share"
    with pytest.raises(ra.InvalidInput, match=message):
        rt.write_kv_pages(rows, rows, slot_mapping=torch.arange(3), **caches)
    tables = torch.tensor([3]).int(), torch.tensor([[0]]).int(), torch.tensor([0, 3]).int()
    with pytest.raises(ra.InvalidInput, match=message):
        rt.ragged_paged_attention(rows, caches.pop("kv_pages"), *tables, **caches, new_kv=(rows, rows))
    assert not ROWS.any()


def test_tensors_that_are_only_read_may_share_bytes() -> None:
    pages, q = torch.randn(6, 4, 2, WIDTH), torch.randn(3, 4, WIDTH)
    tables = torch.tensor([6]).int(), torch.tensor([[4, 1]]).int(), torch.tensor([0, 3]).int()
    shared = rt.ragged_paged_attention(q, (pages, pages), *tables, backend="eager")
    assert torch.equal(shared, rt.ragged_paged_attention(q, (pages, pages.clone()), *tables, backend="eager"))


def test_pages_that_share_bytes_are_refused_after_a_rotation_too() -> None:
    arguments = given("norm_rope_write", 1, torch.tensor)
    pages = arguments["kv_pages"][:, :, :2].clone()
    arguments["kv_pages"] = pages, pages
    with pytest.raises(ra.InvalidInput, match=r"expected kv_pages\[0\] and kv_pages\[1\] without overlapping memory"):
        rt.norm_rope_write(**arguments, backend="eager")
    assert torch.equal(pages, given("norm_rope_write", 1, torch.tensor)["kv_pages"][:, :, :2])


# With one candidate, NumPy's search for shared bytes is given up, and the tensors count as distinct.
@pytest.mark.parametrize("candidates", [_plan._MAX_CANDIDATES, 1])
def test_written_tensors_may_interleave(candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan, "_MAX_CANDIDATES", candidates)
    monkeypatch.setattr(_plan, "_plans", {})
    held = torch.zeros_like(ROWS)
    parts = [part for half in held.split(WIDTH + 4, dim=-1) for part in half.split([WIDTH, 4], dim=-1)]
    apart = [part.clone() for part in parts]
    rows = torch.randn(3, 2, WIDTH)
    for k, k_scales, v, v_scales in (parts, apart):
        scales = {"k_scale_pages": as_scales(k_scales), "v_scale_pages": as_scales(v_scales)}
        for _ in range(2):
            rt.write_kv_pages(rows, -rows, (k, v), torch.arange(3), **scales, backend="eager")
    assert held.any()
    assert all(map(torch.equal, parts, apart))


def test_the_addresses_that_a_plan_keeps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan, "_MAX_DISTINCT", 3)
    monkeypatch.setattr(_plan, "_plans", {})
    pages, rows = torch.zeros(2, 12, 4, 2, WIDTH), torch.ones(3, 2, WIDTH)
    for first in range(1, 9):
        rt.write_kv_pages(rows, rows, (pages[0, :1], pages[1, first : first + 1]), torch.arange(3), backend="eager")
    (plan,) = _plan._plans.values()
    assert 0 < len(plan.distinct) <= 3


def test_shared_bytes_are_found_exactly() -> None:
    random, memory, shared = np.random.default_rng(0), torch.zeros(2000, dtype=torch.uint8), 0
    numbers = torch.arange(2000)
    for _ in range(300):
        tensors, bytes_of = [], []
        for _ in range(2):
            dtype = [torch.uint8, torch.int16, torch.float32][random.integers(3)]
            shape, strides = random.integers(1, 5, 3).tolist(), random.integers(1, 40, 3).tolist()
            first, size = int(random.integers(0, 60)) // dtype.itemsize, dtype.itemsize
            tensors.append(memory.view(dtype).as_strided(shape, strides, first))
            elements = numbers.as_strided(shape, strides, first).flatten().tolist()
            bytes_of.append({size * element + byte for element in elements for byte in range(size)})
        expected = bool(bytes_of[0] & bytes_of[1])
        assert _plan.share_bytes(*tensors) == expected
        shared += expected
    assert 50 < shared < 250


@pytest.mark.parametrize("backend", ["xla", "numba", "reference"])
def test_a_donated_cache_may_be_its_own_source(backend: str) -> None:
    def move(cache: Any) -> Any:
        return rj.write_mla_cache(cache.reshape(-1, 16), cache, jnp.asarray(MOVED.numpy(), jnp.int32), backend=backend)

    cache = jnp.repeat(jnp.arange(8.0), 16).reshape(2, 4, 1, 16)
    moved = jax.jit(move, donate_argnums=0)(cache)
    assert moved[..., 0].ravel().tolist() == [0, 0, 1, 2, 3, 4, 5, 6]


# ---- small divisors


@pytest.mark.parametrize("small", [0.0, -0.0, 1e-50, 1e-40, -1e-40])
@pytest.mark.parametrize("front", [rt, rj])
def test_numbers_that_float32_cannot_divide_by_are_refused(front: Any, small: float) -> None:
    array = torch.tensor if front is rt else jnp.asarray
    for operation, index, name in (
        ("write_kv_pages", 0, "k_scale"), ("write_kv_pages", 1, "v_scale"), ("write_mla_cache", 1, "kv_scale"),
        ("ragged_paged_attention", 0, "v_scale"), ("ragged_mla_attention", 0, "kv_scale"),
        ("ragged_mla_attention", 0, "rope_scale"), ("write_mla_cache", 1, "rope_scale"),
    ):  # fmt: skip
        arguments = given(operation, index, array) | {name: small}
        with pytest.raises(
            ra.InvalidInput, match=rf"expected {name} of a magnitude of at least 1.17\d*e-38, the smallest"
        ):
            getattr(front, operation)(**arguments)
    reads = given("ragged_paged_attention", 0, array) | {"k_scale": small, "new_kv": None}
    front.ragged_paged_attention(**reads, backend="reference")  # a small scale is allowed if the call multiplies by it


SMALL_SCALES = [0.0, -0.0, 1e-40, -1e-40, 1e-45, float("nan"), float("inf"), 1.1754944e-38]
DIVIDED = [0.0, -0.0, 1.0, -2.0, float("inf"), -float("inf"), 1e-3, -1e-30] * 2


def of_small_scales(dtype: str) -> list[list[float]]:
    """The stored values of each of DIVIDED divided by each of SMALL_SCALES in a format."""
    eight_bit = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float8_e4m3fnuz": 240.0, "int8": 127.0}
    largest = eight_bit.get(dtype, np.inf)
    scales = np.array(SMALL_SCALES, np.float32)
    flushed = np.where(np.abs(scales) < np.finfo(np.float32).tiny, np.copysign(0, scales), scales)
    with np.errstate(all="ignore"):
        found = (np.array(DIVIDED, np.float32) / flushed[:, None]).astype(np.float32)
    if dtype == "int8":
        return np.clip(np.rint(np.nan_to_num(found, nan=0.0, posinf=np.inf, neginf=-np.inf)), -128, 127).tolist()
    return np.clip(found, -largest, largest).tolist()


@pytest.mark.parametrize("backend", ["reference", "eager", "numba", "triton", "xla"])
@pytest.mark.parametrize("dtype", [*QUANTIZED, "float32"])
def test_small_numbers_among_scales_count_as_zero(dtype: str, backend: str) -> None:
    heads = len(SMALL_SCALES)
    rows, scales = np.broadcast_to(np.array(DIVIDED, np.float32), (1, heads, 16)), np.array(SMALL_SCALES, np.float32)
    if backend == "xla":
        pages = jnp.zeros((1, 1, 2 * heads, 16), dtype)
        pages = rj.write_kv_pages(rows, rows, pages, ints(0), k_scale=scales, v_scale=scales, backend=backend)
        found = np.asarray(pages.astype(jnp.float32))
        row = rj.write_mla_cache(rows[:, :1], pages[:, :, :1], ints(0), kv_scale=scales[2:3], backend=backend)
        row = np.asarray(row.astype(jnp.float32))
    else:
        pages, new = torch.zeros(1, 1, 2 * heads, 16).to(getattr(torch, dtype)), torch.tensor(rows)
        divisors = torch.tensor(scales)
        rt.write_kv_pages(new, new, pages, tensors.ints(0), k_scale=divisors, v_scale=divisors, backend=backend)
        found, row = pages.float().numpy(), pages[:, :, :1].clone()
        rt.write_mla_cache(new[:, :1], row, tensors.ints(0), kv_scale=divisors[2:3], backend=backend)
        row = row.float().numpy()
    want = np.array(of_small_scales(dtype), np.float32)
    for part in (found[0, 0, 0::2], found[0, 0, 1::2]):
        assert np.array_equal(part, want, equal_nan=True)
        is_zero = (want == 0) & (dtype not in ("int8", "float8_e4m3fnuz"))  # these formats have no -0
        assert np.array_equal(np.signbit(part[is_zero]), np.signbit(want[is_zero]))
    assert np.array_equal(row[0, 0, 0], want[2], equal_nan=True)


@pytest.mark.parametrize("backend", ["reference", "eager", "numba", "triton", "xla"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotary_columns_that_are_nan_keep_their_bits(backend: str, dtype: str) -> None:
    """A NaN in a rotary column keeps its sign and the upper bits of its payload."""
    bits = np.array([0x7FC00000, 0xFFC00000, 0x7FE00000, 0xFFE10000, 0x7F800000], np.uint32)
    rows = np.ones((1, 1, 1, 576), np.float32)
    rows[..., 512:517] = bits.view(np.float32)
    if dtype == "bfloat16":
        rows = (rows.view(np.uint32) >> 16).astype(np.uint16)
    if backend == "xla":
        found = rj.quantize_mla_cache(jnp.asarray(rows).view(dtype), "fp8_v32", backend=backend)
    else:
        found = rt.quantize_mla_cache(torch.tensor(rows).view(getattr(torch, dtype)), "fp8_v32", backend=backend)
    want = [0x7FC0, 0xFFC0, 0x7FE0, 0xFFE1, 0x7F80]
    assert np.asarray(found)[0, 0, 0, 528:538].view(np.uint16).tolist() == want
