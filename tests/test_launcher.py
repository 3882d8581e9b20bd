"""Cheaper repeated calls: recordings of a backend's launches, and compiled kernels enqueued without Triton's launcher.

A replay must enqueue exactly what Triton itself would launch for the same call. The `check_...` functions test this by
recording and comparing the launches of both ways. They run in a separate process, for which this file is the script:
there Triton compiles instead of interpreting, and a stand-in replaces its driver.
"""

import contextlib
import functools
import gc
import importlib
import itertools
import math
import sys
import traceback
import types
import weakref
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import triton.language as tl  # noqa: E402

from benchmarks import overhead  # noqa: E402
from ragged_attention.calls import CALLS, NOWHERE, Call, Device  # noqa: E402
from ragged_attention.calls.base import Result, record  # noqa: E402
from ragged_attention.calls.fields import ArrayKind, Kind, field  # noqa: E402
from ragged_attention.errors import TooLarge  # noqa: E402
from ragged_attention.torch import _launcher, _operators, _plan, _replay  # noqa: E402
from tests.processes import printed  # noqa: E402

rt: Any = importlib.import_module("ragged_attention.torch")
ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = 300


class OutOfResources(Exception):
    """A stand-in for Triton's exception of this name."""


class Needy:
    """A kernel that needs more shared memory than any device has."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        del grid

        def launch(*arguments: Any, **options: Any) -> None:
            raise OutOfResources("out of resource: shared memory, Required: 106496, Hardware limit: 101376")

        return launch


def test_options_that_the_device_has_no_room_for_are_invalid() -> None:
    with pytest.raises(TooLarge, match=r"expected options that fit this device: .* Required: 106496"):
        _launcher.LAUNCHER(Needy(), (1,), [torch.ones(3)], [((3,), "float32")])


# ---- an operation whose arguments all affect its kernel


@triton.jit
def toy_kernel(a_ptr, b_ptr, c_ptr, d_ptr, n, step, factor, FLAG: tl.constexpr, WIDTH: tl.constexpr = 4):  # type: ignore[assignment]
    tl.store(c_ptr, (tl.load(a_ptr) + tl.load(b_ptr) + n * step + factor + WIDTH).to(c_ptr.dtype.element_ty))


class Anything(Kind):
    """A kind that accepts every value."""

    def check(self, name: str, value: Any, call: Any, sizes: Any) -> None:
        """Accept the value."""


@record
class Toy(Call):
    OPERATION: ClassVar[str] = "toy"
    TAKES_OUT: ClassVar[bool] = True

    x: Any = field(ArrayKind())
    y: Any = field(ArrayKind())
    n: int = field(Anything(), default=32)
    factor: float = field(Anything(), default=2.0)
    flag: Any = field(Anything(), default=False)
    warps: int = field(Anything(), default=4)

    def results(self) -> Any:
        return (Result(self.x.shape, self.x.dtype),)

    def check_values(self) -> None:
        raise NotImplementedError


def run_toy(call: Any, tile: Any, launch: Any) -> Any:
    """Launch two kernels: the second reads intermediate memory that the first wrote, and writes the result."""
    x, y = launch.packed(call.x), launch.packed(call.y)
    numbers = {"n": call.n, "step": launch.strides(x)[0], "factor": call.factor, "num_warps": call.warps}
    outputs = [((3, call.n % 7), "float32"), (call.x.shape, call.x.dtype)]
    part, out = launch(toy_kernel, (2, 3), (x, y), outputs, FLAG=call.flag, **numbers)
    (out,) = launch(toy_kernel, (call.y.shape[0],), (part, y, out), [], inplace=(2,), FLAG="again", **numbers)
    return out, (call.x, out)


@contextlib.contextmanager
def offering_toy() -> Iterator[types.ModuleType]:
    """A context in which the Triton backend offers the operation `toy`."""
    module = types.ModuleType("ragged_attention.kernels_triton.toy")
    module.__spec__ = ModuleSpec(module.__name__, None)
    vars(module).update(FEATURES=frozenset(Toy.DEFAULTS), run=run_toy)
    with mock.patch.dict(CALLS, toy=Toy), mock.patch.dict(sys.modules, {module.__name__: module}):
        yield module


def rows(dtype: Any = None, *, count: int = 4, step: int = 16, offset: int = 0, last: int = 1, storage: int = 0) -> Any:
    """Rows of 3 elements, `step` elements apart. The first begins `offset` elements after an aligned address."""
    return torch.empty(storage or 1024, dtype=dtype).as_strided((count, 3), (step, last), offset)


def toy(**changes: Any) -> dict[str, Any]:
    given = {"x": rows(), "y": rows(torch.bfloat16, step=8)} | changes
    return dict(Toy.DEFAULTS) | given


# ---- both ways of launching


class Noting(overhead.StandInDriver):
    """A driver that records launches. Like Triton's own driver, it calls hooks before and after each launch."""

    def __init__(self, arch: str = overhead.ARCH) -> None:
        super().__init__(arch, self._launch)
        self.launches: list[tuple[Any, ...]] = []

    def _launch(self, x: int, y: int, z: int, stream: int, function: Any, options: Any, facts: Any, enter: Any,
                leave: Any, *values: Any) -> None:  # fmt: skip
        for hook in (enter, leave):
            if hook is not None:
                hook(facts)
        self.launches.append(((x, y, z), self.device, stream, function, options, values))

    def take(self) -> list[tuple[Any, ...]]:
        found, self.launches = self.launches, []
        return found


def compile_nothing(self: Any, key: Any, signature: Any, device: int, constants: Any, options: Any, *rest: Any) -> Any:
    """A stand-in for compilation. It makes a stand-in kernel for each key for which Triton would compile a kernel."""
    kernel = object.__new__(triton.compiler.CompiledKernel)
    name = f"{self.__name__} {next(NUMBERS)}"
    vars(kernel).update(module=name, function=name, name=name, src=None, _module_pid=None, hash=name)
    vars(kernel).update(metadata_group={}, packed_metadata=(options.num_warps, options.num_stages))
    kernel._run = triton.runtime.driver.active.note
    self.device_caches[device][0][key] = kernel
    return kernel


NUMBERS = itertools.count()


def forget_kernels() -> None:
    """Forget the kernels that were made for another driver, both compiled kernels and stand-ins."""
    modules = [module for name, module in list(sys.modules.items()) if ".kernels_triton" in name]
    for value in (toy_kernel, *(value for module in modules for value in vars(module).values())):
        if isinstance(value, triton.JITFunction):
            value.device_caches.clear()


@contextlib.contextmanager
def noting(arch: str = overhead.ARCH) -> Iterator[Noting]:
    """A recording driver, for which Triton makes stand-ins for compiled kernels."""
    forget_kernels()
    compiling = mock.patch.object(triton.JITFunction, "_do_compile", compile_nothing)
    hip = mock.patch.object(torch.version, "hip", None if arch.startswith("sm_") else "7.0")
    with offering_toy(), compiling, hip, overhead.standing_in(Noting(arch)) as driver:
        yield driver  # type: ignore[misc]


def address(value: Any) -> int:
    return value if isinstance(value, int) else value.data_ptr()


def comparable_launch(launch: tuple[Any, ...], operands: int, given: set[int]) -> tuple[Any, ...]:
    """A launch in comparable form. Of tensors that the launcher allocates, only the alignment counts."""
    *rest, values = launch
    addresses = [address(value) for value in values[:operands]]
    return *rest, [one if one in given else one % 16 for one in addresses], list(map(repr, values[operands:]))


def by_replay(arguments: dict[str, Any], record: Any = Toy) -> Any:
    return _plan.execute(record, arguments, "triton", None)


def by_triton(arguments: dict[str, Any], record: Any = Toy) -> Any:
    plan, _ = _plan._plan(record, arguments, "triton", None)
    return plan.choice.run(_plan._call(record, arguments, plan), _launcher.LAUNCHER)


def compare(driver: Noting, arguments: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The launches of a toy through Triton, after an assertion that two replays launch the same."""
    given = {arguments["x"].data_ptr(), arguments["y"].data_ptr()}
    out, _ = by_triton(arguments)
    wanted = [comparable_launch(launch, 4, given) for launch in driver.take()]
    for _ in range(2):
        result, (x, again) = by_replay(arguments)
        found = driver.take()
        assert [comparable_launch(launch, 4, given) for launch in found] == wanted
        assert result is again
        assert x is arguments["x"]
        assert (result.shape, result.dtype, result.stride()) == (out.shape, out.dtype, out.stride())
        for launch in found:
            assert address(launch[-1][3]) == result.data_ptr()
    return wanted


def compiled_for(launches: list[tuple[Any, ...]]) -> list[Any]:
    return [launch[3] for launch in launches]


@contextlib.contextmanager
def launches_through_triton() -> Iterator[list[Any]]:
    """A context that yields the list of kernels that are launched through Triton inside it."""
    found: list[Any] = []
    run = triton.JITFunction.run

    def spy(self: Any, *arguments: Any, **options: Any) -> Any:
        found.append(self)
        return run(self, *arguments, **options)

    with mock.patch.object(triton.JITFunction, "run", spy):
        yield found


# ---- checks for the process in which Triton compiles

OTHERS = {
    "an unaligned pointer": lambda: {"x": rows(offset=1)},
    "another unaligned pointer": lambda: {"y": rows(torch.bfloat16, step=8, offset=4)},
    "an int of 1": lambda: {"n": 1},
    "an int that is no multiple of 16": lambda: {"n": 25},
    "an int of 33 bits": lambda: {"n": 2**32},
    "an int of 64 bits": lambda: {"n": 2**63 + 16},
    "a stride of 1": lambda: {"x": rows(step=1)},
    "a stride that is no multiple of 16": lambda: {"x": rows(step=17)},
    "another dtype": lambda: {"x": rows(torch.float16)},
    "a dtype of 8 bits": lambda: {"y": rows(torch.float8_e4m3fn, step=8)},
    "another constant": lambda: {"flag": "said"},
    "other warps": lambda: {"warps": 8},
}
SAME = {
    "other tensors": dict,
    "another float": lambda: {"factor": 3.0},
    "a float of 0": lambda: {"factor": 0.0},
    "a float of -0": lambda: {"factor": -0.0},
    "an int alike": lambda: {"n": 48},
    "more rows": lambda: {"x": rows(count=5)},
    "no rows": lambda: {"y": rows(torch.bfloat16, step=8, count=0)},
    "one row, whose stride says nothing": lambda: {"x": rows(count=1, step=32)},
}


def check_every_change_is_met_by_the_kernel_that_triton_picks() -> None:
    with noting() as driver:
        base = compiled_for(compare(driver, toy()))
        for what, change in (OTHERS | SAME).items():
            found = compiled_for(compare(driver, toy(**change())))
            assert (base[: len(found)] != found) == (what in OTHERS), what
            assert compiled_for(compare(driver, toy())) == base


def check_an_address_decides_on_its_own() -> None:
    """The alignment of tensors selects the kernel, even among calls that share a plan."""
    with noting() as driver:
        found = set()
        for x, y in itertools.product(range(4), repeat=2):
            found.add(compiled_for(compare(driver, toy(x=rows(offset=x), y=rows(step=8, offset=y))))[0])
        assert len(_plan._plans) == 1
        assert len(found) == 4


def check_memory_beyond_32_bits_on_amd() -> None:
    with noting("gfx942") as driver:
        found = set()
        for size in (2**31 - 1, 2**31, 64):
            found.add(compiled_for(compare(driver, toy(x=rows(torch.uint8, storage=size))))[0])
        assert len(_plan._plans) == 1
        assert len(found) == 2


def check_unaligned_results_are_left_to_triton() -> None:
    def empty(shape: Any, *, dtype: Any, device: Any) -> Any:
        return torch.empty(1024, dtype=torch.uint8, device=device)[8:800].view(dtype)[: math.prod(shape)].view(shape)

    class Elsewhere:
        def __getattr__(self, name: str) -> Any:
            return empty if name == "empty" else getattr(torch, name)

    with noting() as driver:
        aligned = compare(driver, toy())
        by_replay(toy())
        driver.take()
        with mock.patch.object(_replay, "torch", Elsewhere()), launches_through_triton() as kernels:
            by_replay(toy())
            assert len(kernels) == 2
            found = driver.take()
        assert all(address(launch[-1][3]) % 16 == 8 for launch in found)
        assert not set(compiled_for(found)) & set(compiled_for(aligned))
        assert compiled_for(compare(driver, toy())) == compiled_for(aligned)


def check_memory_of_the_caller_is_launched_with() -> None:
    with noting() as driver:
        compare(driver, toy())
        for out in (torch.empty(4, 3), torch.empty(4, 3)):
            result, (_, again) = _plan.execute(Toy, toy(), "triton", None, out)
            assert result is again is out
            assert [address(launch[-1][3]) for launch in driver.take()] == [out.data_ptr()] * 2


def check_devices_and_streams() -> None:
    with noting() as driver:
        found = []
        for device, stream in ((0, 5), (1, 5), (0, 6), (1, 7)):
            driver.device, driver.stream = device, stream
            launches = compare(driver, toy())
            assert all(launch[1:3] == (device, stream) for launch in launches)
            found.append(compiled_for(launches))
        assert found[0] == found[2] != found[1] == found[3]


def check_triton_is_asked_once() -> None:
    with noting() as driver, launches_through_triton() as kernels:
        by_replay(toy())
        assert len(kernels) == 2
        by_replay(toy())
        by_replay(toy())
        assert len(kernels) == 2
        assert len(driver.take()) == 6


def check_what_watches_launches_sees_them() -> None:
    knobs = triton.knobs.runtime
    with noting() as driver, launches_through_triton() as kernels:
        by_replay(toy())
        seen: list[Any] = []
        enter, leave = (lambda facts: seen.append(facts.get())), (lambda facts: seen.append(facts.get()))
        knobs.launch_enter_hook.add(enter)
        by_replay(toy())
        names = [launch[3] for launch in driver.take()[2:]]
        assert [facts["name"] for facts in seen] == names
        knobs.launch_enter_hook.remove(enter)
        knobs.launch_exit_hook.add(leave)
        by_replay(toy())
        assert [facts["name"] for facts in seen] == 2 * names
        knobs.launch_exit_hook.remove(leave)
        by_replay(toy())
        assert len(seen) == 4
        with mock.patch.object(knobs, "launch_enter_hook", enter), mock.patch.object(knobs, "launch_exit_hook", None):
            by_replay(toy())
        assert len(seen) == 6
        assert len(kernels) == 2


def check_what_changes_compilation_goes_through_triton() -> None:
    knobs = triton.knobs
    with noting(), launches_through_triton() as kernels:
        by_replay(toy())
        by_replay(toy())
        assert len(kernels) == 2
        with mock.patch.object(knobs.runtime, "debug", True):
            by_replay(toy())
        assert len(kernels) == 4
        with mock.patch.object(knobs.compilation, "instrumentation_mode", "consan"):
            by_replay(toy())
        assert len(kernels) == 6
        with mock.patch.object(knobs.runtime, "add_stages_inspection_hook", mock.Mock(return_value=("", ""))):
            by_replay(toy())
        assert len(kernels) == 8
        hooked: list[Any] = []
        with mock.patch.object(toy_kernel, "pre_run_hooks", [lambda *given, **options: hooked.append(given)]):
            by_replay(toy())
        assert len(kernels) == 10
        assert len(hooked) == 2
        with mock.patch.object(toy_kernel, "launch_metadata", mock.Mock(return_value={})):
            by_replay(toy(flag="new"))
            by_replay(toy(flag="new"))
        assert len(kernels) == 14
        by_replay(toy())
        assert len(kernels) == 14


def check_kernels_that_tune_themselves_are_left_to_triton() -> None:
    tuned = triton.heuristics({"WIDTH": lambda values: 8})(toy_kernel)
    with noting() as driver, launches_through_triton() as kernels, mock.patch.dict(globals(), toy_kernel=tuned):
        for _ in range(2):
            by_replay(toy())
            assert [launch[-1][-1] for launch in driver.take()] == [8, 8]
        assert len(kernels) == 4


def check_copies_are_left_to_the_room() -> None:
    with noting() as driver:
        arguments = toy(x=rows(last=2))
        for _ in range(2):
            by_replay(arguments)
            first, _ = driver.take()
            assert not {address(value) for value in first[-1][:1]} & {arguments["x"].data_ptr()}
        (plan,) = _plan._plans.values()
        assert list(plan.recordings.values()) == [None]


def check_what_only_kernels_see_shares_memory_without_overlap() -> None:
    shapes = [((3, 5), "float32"), ((7,), "uint8"), ((0, 4), "float32"), ((65,), "int32"), ((2, 2), torch.bfloat16)]

    def work(call: Any, launch: Any) -> Any:
        new = launch(toy_kernel, (1,), (call.x,), shapes, n=1)
        return (new[1], call.x), new[4]

    with noting():
        noted = _replay.record(Toy.unchecked(**toy(), device=NOWHERE), work)
    assert isinstance(noted, _replay.LaunchRecording)
    assert noted.results == ((2, 0), 3)
    made = [torch.empty(shape, dtype=dtype) for shape, dtype in noted.allocations]
    assert [tensor.dtype for tensor in made] == [torch.uint8, torch.bfloat16, torch.uint8]
    tensors = [new.within(made) for new in noted.new]
    assert tensors[1] is made[0]
    assert tensors[4] is made[1]
    for tensor, new, (shape, dtype) in zip(tensors, noted.new, shapes, strict=True):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, _launcher.DTYPES.get(dtype, dtype))
        assert not tensor.numel() or tensor.data_ptr() == made[new.allocation].data_ptr() + new.offset
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors))


def check_a_kernel_that_triton_compiles() -> None:
    """A replay of a real operation launches the kernel that Triton really compiled."""
    forget_kernels()
    driver = Noting()
    outs, lses = torch.zeros(2, 5, 3, 64, dtype=torch.bfloat16), torch.zeros(2, 5, 3)
    with overhead.standing_in(driver), launches_through_triton() as kernels:
        for _ in range(3):
            rt.merge_attention_states(outs, lses, backend="triton")
        first, *others = [comparable_launch(launch, 5, {outs.data_ptr(), lses.data_ptr()}) for launch in driver.take()]
        assert others == [first, first]
        assert len(kernels) == 1


def operands_of(launch: tuple[Any, ...]) -> int:
    return sum(hasattr(value, "data_ptr") for value in launch[-1])


def check_operations() -> None:
    """Operations of every kind launch the same kernels by replay as through Triton."""
    with noting() as driver:
        for name in CASES:
            case = overhead.CASES[name]
            inputs = overhead.inputs_of(case.scaled_down(), "cpu")
            call = functools.partial(getattr(rt, case.operation), **inputs, backend="triton")
            with mock.patch.object(_plan, "execute", wraps=_plan.execute) as inside:
                call()
            record, arguments, *_ = inside.call_args.args
            given = {tensor.data_ptr() for tensor in _plan._plan(*inside.call_args.args)[1]}
            driver.take()
            by_triton(arguments, record)
            launches = driver.take()
            with launches_through_triton() as kernels:
                call()
            pairs = list(zip(driver.take(), launches, strict=True))
            assert pairs, name
            assert not kernels, name
            for found, wanted in pairs:
                assert comparable_launch(found, operands_of(wanted), given) == comparable_launch(
                    wanted, operands_of(wanted), given
                ), name


CASES = (
    "decode_64x4k", "mixed_2q2k_32q1s1k", "gpt_oss_window_64x4k", "fp8_64x4k", "mla_dense_h16_128x4k",
    "mla_sparse_h16_b8", "mla_sparse_v4_h64_128q2", "mla_prefill_fp8_h128_32k", "mha_gqa_8x2k", "mha_gqa_8x2k_backward",
)  # fmt: skip


@st.composite
def toys(draw: Any) -> dict[str, Any]:
    """Arguments with few possible values, so that an example may repeat arguments of earlier examples."""

    def tensor() -> Any:
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e5m2]))
        step = draw(st.sampled_from([16, 17, 1, 0, 32]))
        last = draw(st.sampled_from([1, 1, 1, 2]))
        return rows(dtype, count=draw(st.integers(0, 4)), step=step, offset=draw(st.sampled_from([0, 1, 4])), last=last)

    number = st.sampled_from([0, 1, 2, 8, 16, 17, 2**31 - 16, 2**31, 2**32, 2**63, -1, -16, -(2**31), -(2**31) - 16])
    return toy(
        x=tensor(),
        y=tensor(),
        n=draw(number),
        factor=draw(st.sampled_from([0.0, -0.0, 1.0, 0.5, 1e300])),
        flag=draw(st.sampled_from([True, False, "said", None])),
        warps=draw(st.sampled_from([4, 8])),
    )


def check_any_arguments() -> None:
    with noting() as driver:

        @settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True)
        @given(toys(), st.integers(0, 1))
        def drawn(arguments: dict[str, Any], device: int) -> None:
            driver.device = device
            tensors = arguments["x"], arguments["y"]
            if all(_launcher.LAUNCHER.packed(tensor) is tensor for tensor in tensors):
                compare(driver, arguments)
            else:
                by_replay(arguments)
                driver.take()

        drawn()


def check_the_benchmark_adds_up() -> None:
    with noting(), mock.patch.object(overhead, "ROUNDS", 1):
        found = overhead.measure(overhead.CASES["mla_sparse_h16_b8"], "cpu")
    assert found.launches == 2
    assert abs(found.call - found.dispatch - found.plan - found.launch) < 1e-6
    assert overhead.table_of([found], "here").row_count == 1


def check_there_is_an_end_to_recordings() -> None:
    with noting() as driver, mock.patch.object(_plan, "_MAX_RECORDINGS", 3):
        for x, y in itertools.product(range(4), repeat=2):
            compare(driver, toy(x=rows(offset=x), y=rows(step=8, offset=y)))
            (plan,) = _plan._plans.values()
            assert len(plan.recordings) <= 3


def main() -> int:
    failed = 0
    for name, check in list(globals().items()):
        if name.startswith("check_") and (len(sys.argv) == 1 or name in sys.argv[1:]):
            try:
                check()
            except Exception:
                failed += 1
                sys.stderr.write(f"---- {name}\n{traceback.format_exc()}\n")
    return failed


# ---- tests


def test_all_checks_in_a_process_that_compiles(tmp_path: Path) -> None:
    printed(__file__, TRITON_CACHE_DIR=str(tmp_path))


def states(offset: int = 0, seed: int = 0) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(2 * 5 * 3 * 16 + offset, generator=generator)
    return flat[offset:].view(2, 5, 3, 16), torch.randn(2, 5, 3, generator=generator)


def test_a_recording_of_interpreted_kernels_is_replayed_on_new_tensors() -> None:
    _plan._plans.clear()
    for seed in range(3):
        found = rt.merge_attention_states(*states(seed=seed), backend="triton")
        wanted = rt.merge_attention_states(*states(seed=seed), backend="reference")
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True))
    plans = [plan for plan in _plan._plans.values() if plan.choice.backend == "triton"]
    (played,) = plans[0].recordings.values()
    assert len(plans) == 1
    assert isinstance(played, _replay.LaunchRecording)
    assert not played.jitted
    assert not any(step.compiled for step in played.steps)


def test_nothing_of_a_call_is_kept() -> None:
    outs, lses = states()
    kept = [weakref.ref(tensor) for tensor in (outs, lses, *rt.merge_attention_states(outs, lses, backend="triton"))]
    del outs, lses
    gc.collect()
    assert [reference() for reference in kept] == [None] * 4


def test_other_backends_have_no_recordings() -> None:
    _plan._plans.clear()
    rt.merge_attention_states(*states(), backend="eager")
    assert [plan.recordings for plan in _plan._plans.values()] == [{}]


def test_a_room_that_does_more_than_to_launch_is_not_recorded() -> None:
    device = Device(framework="torch", platform="cpu")
    call = Toy(x=torch.zeros(3, 3), y=torch.zeros(3, 3).t(), device=device)
    works = (
        lambda call, launch: launch.sorted(call.x),
        lambda call, launch: launch.on_host(None, call, "x"),
        lambda call, launch: launch.aligned(call.x, bytes=4),
        lambda call, launch: launch.packed(call.y),
        lambda call, launch: (call.x, 1),
    )
    assert [_replay.record(call, work) for work in works] == [None] * 5
    assert _replay.record(call, lambda call, launch: launch.packed(call.x)) is not None


def test_an_absent_result_is_absent_from_a_replay_too() -> None:
    x, y = torch.zeros(3, 3), torch.zeros(3)
    call = Toy(x=x, y=y, device=Device(framework="torch", platform="cpu"))
    recording = _replay.record(call, lambda call, launch: (None, launch.packed(call.x)))
    assert recording is not None
    absent, given = recording.replay([x, y], [x.data_ptr(), y.data_ptr()])
    assert absent is None
    assert given is x


def test_another_device_is_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: f"on {device}")
    assert _launcher.on(torch.device("cuda", 0)) == "on cuda:0"
    assert isinstance(_launcher.on(torch.device("cuda", 1)), contextlib.nullcontext)


def test_autograd_is_left_out_only_where_it_has_nothing_to_do() -> None:
    x = torch.zeros(2)
    y = torch.zeros(2, requires_grad=True)
    assert not _operators._may_differentiate((x, None, 1.0, [x]))
    assert _operators._may_differentiate((x, y))
    assert _operators._may_differentiate((x, [y]))
    with torch.no_grad():
        assert not _operators._may_differentiate((x, y))
    seen = []
    torch.func.vmap(lambda row: seen.append(_operators._may_differentiate((x,))) or row)(x)
    assert seen == [True]


def test_dispatch_modes_see_the_operator() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    with Seeing():
        rt.merge_attention_states(*states(), backend="triton")
    assert seen.count("ragged_attention.merge_attention_states.default") == 1


if __name__ == "__main__":
    sys.exit(main())


def test_a_replay_that_fails_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    outs, lses = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 4)
    monkeypatch.setattr(_plan, "RECORDED", {"triton"})
    monkeypatch.setattr(_plan, "_plans", {})
    monkeypatch.setattr(_replay.LaunchRecording, "replay", mock.Mock(side_effect=AttributeError("packed_metadata")))
    want = rt.merge_attention_states(outs, lses, backend="eager")
    with pytest.warns(RuntimeWarning, match="launched through Triton from now on, .* AttributeError: packed_metadata"):
        got = rt.merge_attention_states(outs, lses, backend="triton")
    again = rt.merge_attention_states(outs, lses, backend="triton")  # does not warn again
    for result in (got, again):
        torch.testing.assert_close(result, want)
    assert _replay.LaunchRecording.replay.call_count == 1  # type: ignore[attr-defined]
