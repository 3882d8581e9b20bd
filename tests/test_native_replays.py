"""Replayed calls of the CPU kernels give the same bits and errors as calls through the launcher."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numba")

from benchmarks import overhead  # noqa: E402
from ragged_attention import dispatch  # noqa: E402
from ragged_attention.calls import CALLS  # noqa: E402
from ragged_attention.errors import BackendMissing  # noqa: E402
from ragged_attention.portable.numba import _kernels, merge_attention_states  # noqa: E402
from ragged_attention.testing.runner import Declined, runner_for  # noqa: E402
from ragged_attention.testing.safety import GuardedModule  # noqa: E402
from ragged_attention.testing.suite import corners  # noqa: E402
from ragged_attention.torch import _plan, _replay, norm_rope_write, ragged_paged_attention  # noqa: E402
from ragged_attention.torch import merge_attention_states as merge  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="the kernels do not run here")


def offered(operation: str) -> bool:
    try:
        dispatch.load(operation, "numba")
    except BackendMissing:
        return False
    return True


# ---- every operation, launched and replayed


def copied(value: Any) -> Any:
    """An argument with copies of its tensors, in separate storages with the same strides and offsets."""
    if isinstance(value, tuple):
        return tuple(map(copied, value))
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.untyped_storage().clone()
    return value.new_empty(0).set_(storage, value.storage_offset(), value.shape, value.stride())


def tensors_in(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def bits(tensor: Any) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor


def expect_equal(found: Any, wanted: Any, operation: str) -> None:
    found, wanted = tensors_in(found), tensors_in(wanted)
    assert len(found) == len(wanted), operation
    for one, other in zip(found, wanted, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride()), operation
        assert torch.equal(bits(one), bits(other)), operation


class BothWays:
    """A stand-in for `_plan.execute`. It runs a call once unrecorded and twice by replay, and compares the results."""

    def __init__(self) -> None:
        self.execute, self.replayed = _plan.execute, set[str]()

    def __call__(self, record: Any, arguments: Any, backend: Any, options: Any, out: Any = None) -> Any:
        if backend != "numba":
            return self.execute(record, arguments, backend, options, out)
        anew, again = ({name: copied(value) for name, value in arguments.items()} for _ in range(2))
        with mock.patch.object(_plan, "RECORDED", set()):
            wanted = self.execute(record, anew, backend, options)
        for given, memory in ((again, None), (arguments, out)):
            with mock.patch.object(_replay.NativeRecording, "replay", self._noting(record.OPERATION)):
                found = self.execute(record, given, backend, options, memory)
            expect_equal(found, wanted, record.OPERATION)
            expect_equal(list(given.values()), list(anew.values()), record.OPERATION)
        return found

    def _noting(self, operation: str) -> Any:
        replay = _replay.NativeRecording.replay

        def noting(recording: Any, *given: Any) -> Any:
            self.replayed.add(operation)
            return replay(recording, *given)

        return noting


def test_every_operation_gives_the_same_by_a_replay() -> None:
    runner, both, kinds = runner_for("numba", "torch"), BothWays(), set()
    with mock.patch.object(_plan, "execute", both):
        for check in corners():
            kind = check.name.partition(",")[0]
            if kind not in kinds:
                with contextlib.suppress(Declined):
                    check.run(runner, 1)
                    kinds.add(kind)
    assert both.replayed == {operation for operation in CALLS if offered(operation)}


# ---- one operation


def states(offset: int = 0) -> tuple[Any, Any]:
    flat = torch.randn(2 * 5 * 3 * 16 + offset)
    return flat[offset:].view(2, 5, 3, 16), torch.randn(2, 5, 3)


def anew(call: Any) -> Any:
    with mock.patch.object(_plan, "RECORDED", set()):
        return call()


@contextlib.contextmanager
def runs_of_the_backend() -> Iterator[list[Any]]:
    """A context that yields the list of calls that run the backend's Python code inside it."""
    with mock.patch.object(merge_attention_states, "run", wraps=merge_attention_states.run) as run:
        found: list[Any] = []
        run.side_effect = lambda *given: found.append(given) or mock.DEFAULT
        _plan._plans.clear()
        yield found


def test_a_call_like_an_earlier_one_does_not_run_the_backend_again() -> None:
    given = [states(offset) for offset in (0, 0, 4, 64)]
    wanted = [anew(lambda outs=outs, lses=lses: merge(outs, lses, backend="numba")) for outs, lses in given]
    with runs_of_the_backend() as runs:
        found = [merge(outs, lses, backend="numba") for outs, lses in given]
    assert len(runs) == 1
    expect_equal(found, wanted, "merge_attention_states")


def test_a_copied_operand_is_copied_by_every_call() -> None:
    outs, lses = states()
    wanted = merge(outs, lses, backend="numba")
    lses = lses.transpose(0, 1).contiguous().transpose(0, 1)
    with runs_of_the_backend() as runs:
        for _ in range(3):
            expect_equal(merge(outs, lses, backend="numba"), wanted, "merge_attention_states")
    assert len(runs) == 4  # three runs, plus a failed attempt to record one
    (plan,) = _plan._plans.values()
    assert list(plan.recordings.values()) == [None]


def attention() -> tuple[Any, ...]:
    lens = [17, 5, 300]
    pages = torch.randn(60, 16, 4, 32)
    table = torch.randperm(60).view(3, 20).int()
    return torch.randn(3, 4, 32), pages, torch.tensor(lens).int(), table, torch.arange(4).int()


@contextlib.contextmanager
def threads_of_calls() -> Iterator[list[int]]:
    """A context that yields the thread counts of the kernel calls made inside it."""
    found, run = [], _kernels.Kernel._run

    def noting(kernel: Any, reference: Any, stream: Any) -> int:
        found.append(reference._obj.num_threads)
        return run(kernel, reference, stream)

    with mock.patch.object(_kernels.Kernel, "_run", noting):
        yield found


def test_a_replay_takes_as_many_threads_as_torch_has() -> None:
    given, before = attention(), torch.get_num_threads()
    try:
        with threads_of_calls() as found:
            results = []
            for count in (1, 3, 1, 2):
                torch.set_num_threads(count)
                results.append(ragged_paged_attention(*given, backend="numba"))
    finally:
        torch.set_num_threads(before)
    assert found == [1, 3, 1, 2]
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_replay_writes_to_out() -> None:
    given = attention()
    wanted = ragged_paged_attention(*given, backend="numba")
    out = torch.full_like(wanted, torch.nan)
    apart = torch.full((3, 4, 64), torch.nan)[..., ::2]  # kernels cannot write strided results
    for memory in (out, apart):
        found, lse = ragged_paged_attention(*given, out=memory, return_lse=True, backend="numba")
        assert found is memory
        assert torch.equal(found, wanted)
        assert lse.shape == (3, 4)
    with pytest.raises(ValueError, match=r"expected out.shape to be \[3, 4, 32\]"):
        ragged_paged_attention(*given, out=out[:2], backend="numba")


def test_results_of_replays_lie_in_guarded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays allocate results through `torch.empty`, so the memory safety check can guard them."""
    given = attention()
    wanted = ragged_paged_attention(*given, backend="numba")
    monkeypatch.setattr(_replay, "torch", GuardedModule(torch, "end"))
    assert torch.equal(ragged_paged_attention(*given, backend="numba"), wanted)


def test_scales_may_be_numbers_or_tensors() -> None:
    q, pages, *others = attention()
    pages = (8 * pages).to(torch.int8)
    for _ in range(2):
        for scale in (0.25, 0.5):
            found = [ragged_paged_attention(q, pages, *others, k_scale=given, v_scale=0.5, backend="numba")
                     for given in (scale, torch.tensor(scale), torch.full((2,), scale))]  # fmt: skip
            wanted = ragged_paged_attention(q, pages, *others, k_scale=scale, v_scale=0.5, backend="eager")
            assert all((each - wanted).abs().max() < 1e-4 for each in found)


def test_a_replay_writes_in_place() -> None:
    k, v = torch.randn(4, 2, 32), torch.randn(4, 2, 32)
    slots = torch.tensor([3, -1, 17, 8]).int()
    rotary = {"positions": torch.arange(4).int(), "cos_sin": torch.randn(64, 32)}
    for _ in range(2):
        q, pages = torch.randn(4, 4, 32), torch.zeros(2, 16, 4, 32)
        copy = pages.clone()
        wanted = anew(lambda q=q, copy=copy: norm_rope_write(q, k, v, copy, slots, **rotary, backend="numba"))
        found = norm_rope_write(q, k, v, pages, slots, **rotary, backend="numba")
        expect_equal(found, wanted, "norm_rope_write")
        assert found[1] is pages


def test_a_replay_without_memory_raises_what_a_call_raises() -> None:
    given = attention()
    ragged_paged_attention(*given, backend="numba")
    with mock.patch.object(_kernels.Kernel, "_run", return_value=-1):
        with pytest.raises(MemoryError) as by_replay:
            ragged_paged_attention(*given, backend="numba")
        with pytest.raises(MemoryError) as by_launcher:
            anew(lambda: ragged_paged_attention(*given, backend="numba"))
    assert str(by_replay.value) == str(by_launcher.value)
    assert "found no memory to work in: q [3, 4, 32], " in str(by_replay.value)
    ragged_paged_attention(*given, backend="numba")
    assert _plan.NATIVE in _plan.RECORDED


def test_a_replay_that_cannot_be_trusted_does_not_stop_these() -> None:
    with mock.patch.object(_plan, "RECORDED", {"triton", "numba"}) as recorded, pytest.warns(RuntimeWarning):
        _plan._stop_replaying(AttributeError("packed_metadata"))
    assert recorded == {"numba"}


def test_the_benchmark_of_overhead_times_these_replays() -> None:
    with mock.patch.object(overhead, "ROUNDS", 1):
        (found,) = overhead.measured(["decode_64x4k"], "cpu", "numba")
    assert found.launches == 1
    assert abs(found.call - found.dispatch - found.plan - found.launch) < 1e-6
