"""Tests of the device runs: the cost of faults, resumed calls, the parts sent with the tree, and the summaries."""

import collections
import copy
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases.mla import CASES
from benchmarks.device import __main__ as device
from benchmarks.device import carried, plan, precompile, prepare, publish, rehearse, summary, worker
from benchmarks.device import cuda as device_cuda
from benchmarks.device.pool import PhaseRun, Pool, environment, last_dump
from benchmarks.device.record import NAME, Record
from ragged_attention import dispatch
from ragged_attention.calls import CALLS
from ragged_attention.kernels_cuda import _latent, _native, make_decode_schedule, mla_decode
from ragged_attention.kernels_cuda._build import toolchain
from ragged_attention.tools import samples
from ragged_attention.tools.samples import device_of
from tests import device_faults
from tests.processes import loaded, printed

ROOT = Path(__file__).parents[1]
ONE_COSTS = {
    "abort": "the process ended: SIGABRT",
    "killed": "the process ended: SIGKILL",
    "hang": "no end after 2 s",
    "poison": "CUDA error: an illegal memory access",
    "full card": "out of memory",
    "wrong": "AssertionError: expected 1.5, got 2.5",
    "asynchronous": "CUDA error: misaligned address",
}


@dataclasses.dataclass
class Planted:
    """A folder with a record and a log, in which phases of items with planted faults are run."""

    folder: Path

    def __post_init__(self) -> None:
        self.record = Record.begun(self.folder / "out")

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def phase(self, what: str, *options: str, seconds: float = 60.0, workers: int = 1, each: float = 2.0) -> None:
        start = plan.Start("tests.device_faults", (str(self.log), *options))
        phase = plan.Phase(
            name="planted", start=start, what=what, workers=workers, item_seconds=each, seconds=seconds
        )  # fmt: skip
        pool, until = Pool("cpu"), time.monotonic() + seconds
        try:
            PhaseRun(phase, pool, self.record, until, workers, lambda names: phase.select(self.record, names)).run()
        finally:
            pool.end()

    def results(self) -> dict[str, dict[str, Any]]:
        return {item: line for (_, item), line in self.record.items().items()}

    def ran(self) -> list[str]:
        """The items that worker processes began, in order."""
        return [line.partition(" ")[2] for line in self.log.read_text().splitlines()] if self.log.is_file() else []


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    return Planted(tmp_path)


# ---- the cost of faults


@pytest.mark.parametrize("workers", [1, 3])
def test_a_fault_costs_one_item(planted: Planted, workers: int) -> None:
    planted.phase("faults", workers=workers)
    results = planted.results()
    names = device_faults.Items("cpu", "").names("faults")
    assert {item for item, line in results.items() if line["result"] == "FAILED"} == set(ONE_COSTS)
    assert {item for item, line in results.items() if line["result"] == "passed"} == set(names) - set(ONE_COSTS)
    for item, message in ONE_COSTS.items():
        assert message in results[item]["message"]
    assert "hang_here" in results["hang"]["message"]  # the function in which the item hung
    assert results["noise"]["extra"] == "noise"  # an item's printed output is not mistaken for a worker's answer
    (end,) = planted.record.of_kind("end")
    assert end["not_reached"] == 0


def test_what_ran_after_a_poisoned_context_ran_in_another_process(planted: Planted) -> None:
    planted.phase("faults")
    lines = [line.partition(" ") for line in planted.log.read_text().splitlines()]
    by_item = {item: number for number, _, item in lines}
    for fault in ("poison", "full card", "asynchronous", "hang"):
        names = device_faults.Items("cpu", "").names("faults")
        following = names[names.index(fault) + 1]
        assert by_item[fault] == by_item[f"before {fault}"]
        assert by_item[following] != by_item[fault]
    assert by_item["before noise"] == by_item["wrong"]  # a process is kept after a wrong result


def test_a_second_call_runs_what_failed_and_what_was_not_reached(planted: Planted) -> None:
    planted.phase("faults")
    planted.log.unlink()
    planted.phase("faults")
    assert sorted(planted.ran()) == sorted(ONE_COSTS)
    again = Record.begun(planted.folder / "other", [planted.record.path])
    assert again.turns("planted") == planted.record.turns("planted")
    assert set(again.turns("planted").values()) == {0, plan.RUN_ALREADY}
    again.since = time.time() + 1
    assert again.turns("planted") == {}


def test_what_failed_is_run_first(planted: Planted) -> None:
    names = ["a", "b", "c", "d", "e", "f"]
    for item, result, sources, name in (
        ("b", "FAILED", "new", "H100"), ("c", "passed", "new", "H100"), ("e", "declined", "old", "H100"),
        ("f", "passed", "new", "H200"),
    ):  # fmt: skip
        planted.record.stamp = {"sources": sources, "device": name}
        planted.record.write("item", phase="x", item=item, result=result)
    planted.record.stamp = {"sources": "new", "device": "H100"}
    phase = plan.Phase(name="x", start=plan.Start("m"), workers=1, item_seconds=1, seconds=1)
    # Failed items come first, then items that never ran on this device, then items that ran with other sources. Items
    # that passed with these sources are left out.
    assert phase.select(planted.record, names) == ["b", "a", "d", "f", "e"]
    assert phase.select(planted.record, names, 2) == ["a", "d"]
    assert dataclasses.replace(phase, always=True).select(planted.record, names) == names


def test_an_item_that_the_end_of_a_phase_cuts_off_has_not_failed(planted: Planted) -> None:
    planted.phase("slow", seconds=5.0, each=30.0)
    results = planted.results()
    assert 0 < len(results) < 20
    assert {line["result"] for line in results.values()} == {"passed"}
    (end,) = planted.record.of_kind("end")
    assert end["not_reached"] == 20 - len(results)


@pytest.mark.parametrize(
    ("what", "options", "reason"),
    [("faults", ["never"], "ImportError: no such library"), ("other", [], "there is nothing of that kind")],
)
def test_what_cannot_run_says_why(planted: Planted, what: str, options: list[str], reason: str) -> None:
    planted.phase(what, *options)
    (line,) = planted.record.of_kind("item")
    assert (line["item"], line["result"]) == ("", "cannot run")
    assert reason in line["message"]
    planted.phase("slow", seconds=6.0)
    assert "" not in planted.results()  # a phase that can begin has no line without an item


def test_a_phase_is_given_up_when_processes_do_not_start_any_more(planted: Planted) -> None:
    planted.phase("faults", "once")
    assert planted.results()["abort"]["result"] == "FAILED"
    assert planted.results()[""]["message"] == "processes do not start any more"
    assert planted.ran() == ["before abort", "abort"]


def test_no_process_outlives_the_call_that_started_it(planted: Planted, tmp_path: Path) -> None:
    """Worker processes end even if the call that started them is killed."""
    command = [sys.executable, "-m", "tests.programs.planted_device_faults", str(tmp_path)]
    running = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while "hang" not in planted.ran() and time.monotonic() < until:
        time.sleep(0.1)
    hanging = int(planted.log.read_text().splitlines()[-1].split()[0])
    running.kill()
    running.wait()
    while Path(f"/proc/{hanging}").is_dir() and time.monotonic() < until:
        time.sleep(0.1)
    assert not Path(f"/proc/{hanging}").is_dir() or "Z" in Path(f"/proc/{hanging}/stat").read_text().split()[2]


def test_a_line_that_was_cut_off_is_no_line(tmp_path: Path) -> None:
    record = Record.begun(tmp_path)
    record.write("item", phase="x", item="a", result="passed")
    with open(record.path, "a") as file:
        file.write('{"kind": "item", "phase": "x", "it')
    again = Record.begun(tmp_path)
    assert set(again.turns("x")) == {"a"}
    again.write("item", phase="x", item="b", result="passed")
    assert set(Record.begun(tmp_path).turns("x")) == {"a", "b"}


def test_lines_of_several_calls_are_in_the_order_of_time(tmp_path: Path) -> None:
    """The latest line of an item counts, whichever record it came from."""
    for folder, at, result in (("here", 2, "passed"), ("carried", 1, "FAILED")):
        (tmp_path / folder).mkdir()
        line = {"kind": "item", "phase": "x", "item": "a", "result": result, "at": at}
        (tmp_path / folder / NAME).write_text(json.dumps(line) + "\n")
    record = Record.begun(tmp_path / "here", [tmp_path / "carried" / NAME])
    assert record.items()["x", "a"]["result"] == "passed"


def test_an_item_that_hangs_until_the_end_of_its_phase_has_failed(planted: Planted) -> None:
    """A hanging item fails if it had enough time, even if the phase ends before the item's own limit."""
    planted.phase("hang alone", seconds=plan.ENOUGH + 4, each=60.0)
    assert "no end after 1" in planted.results()["hang"]["message"]
    assert "hang_here" in planted.results()["hang"]["message"]


def test_limits_of_items_fit_into_those_of_their_phases() -> None:
    for phase in (*plan.PROVE, *plan.MEASURE):
        assert 2 * phase.item_seconds <= phase.seconds, phase.name


def test_who_answers_no_more_is_not_waited_for(tmp_path: Path) -> None:
    """`Pool.end` does not wait for output that a worker's child keeps open. A hanging driver may leave such a child."""
    pool = Pool("cpu")
    one = pool.take(plan.Start("tests.device_faults", (str(tmp_path / "log"),)))
    one.ready(60)
    assert one.ask({"what": "faults", "run": "child"}, 10)["result"] == "passed"
    began = time.monotonic()
    pool.end()
    assert time.monotonic() - began < 5
    os.kill(int((tmp_path / "log.child").read_text()), signal.SIGKILL)


def test_what_is_killed_at_the_end_of_a_call_has_not_failed(planted: Planted) -> None:
    phase = plan.Phase(
        name="planted", start=plan.Start("tests.device_faults", (str(planted.log),)), what="hang alone", workers=1,
        item_seconds=60, seconds=60,
    )  # fmt: skip
    pool = Pool("cpu")
    run = PhaseRun(phase, pool, planted.record, time.monotonic() + 60, 1, lambda names: names)
    running = threading.Thread(target=run.run)
    running.start()
    until = time.monotonic() + 30
    while "hang" not in planted.ran() and time.monotonic() < until:
        time.sleep(0.1)
    pool.end()
    running.join(timeout=30)
    assert not running.is_alive()
    assert planted.record.of_kind("item") == []


def test_the_place_of_a_crash_is_kept() -> None:
    frames = [f'  File "ours.py", line {number} in f{number}' for number in range(3)]
    outer = [f'  File "library.py", line {number} in g' for number in range(200)]
    head = ["noise", "Fatal Python error: Aborted", "", "Current thread 0x1 (most recent call first):"]
    said = "\n".join([*head, *frames, *outer, "", f"Extension modules: {'x, ' * 900}"])
    found = last_dump(said)
    assert found.startswith("Current thread")
    assert "f0" in found
    assert len(found) <= worker.LONGEST
    assert last_dump("a warning\nan error") == "a warning\nan error"


def test_settings_of_the_machines_image_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    # this variable would become part of every kernel's key
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/usr/local/cuda/bin/ptxas")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", "/where/the/driver/lies")
    found = environment({"TRITON_PTXAS_PATH": "/another"})
    assert found["TRITON_PTXAS_PATH"] == "/another"
    assert "TRITON_PTXAS_PATH" not in environment({})
    assert "JAX_PLATFORMS" not in found
    assert found["TRITON_LIBCUDA_PATH"] == "/where/the/driver/lies"


# ---- the calls


def test_who_conducts_a_call_never_touches_the_device() -> None:
    assert loaded("benchmarks.device.__main__", "torch", "jax", "triton") == []


def test_without_a_gpu_there_is_nothing_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device.main(["prove", "--out", str(tmp_path)]) == 2
    assert "neither nvidia-smi nor torch names a GPU: nothing to do" in capsys.readouterr().out


def test_the_device_is_named_by_torch_where_there_is_no_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "ASKING_TORCH", "print('NVIDIA H100 80GB HBM3')")
    monkeypatch.setenv("PATH", "/nowhere")
    assert device.facts("cuda")["device"] == "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_nothing_runs_on_a_cpu_where_a_gpu_is_meant(framework: str) -> None:
    """The suite refuses to run for a GPU if the framework sees none.

    Otherwise everything would run on the CPU and pass.
    """
    pytest.importorskip(framework)
    code = f"from benchmarks.device.suite import Items; Items('cuda', {framework!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        pytest.skip("there is a GPU")
    assert f"RuntimeError: {framework} sees no GPU" in done.stderr


def test_a_call_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["prove", "--prepare"]):
        with pytest.raises(SystemExit):
            device.main(arguments)
        assert "expected one of prove, measure and --prepare" in capsys.readouterr().err


def call(arguments: list[str], out: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "benchmarks.device", *arguments, "--device", "cpu", "--out", str(out)]
    environ = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "JAX_PLATFORMS")}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_both_calls_are_rehearsed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    prove = ["prove", "--phases", "smoke,torch triton,torch eager,checks", "--items", "2"]
    code, printed = call(prove, tmp_path)
    assert code == 0, printed
    assert "VERDICT: " in printed
    for name in ("torch-triton", "torch-eager", "jax-triton", "jax-xla"):
        assert f"{name} runs" in printed
    before = len(Record.begun(tmp_path).of_kind("item"))
    code, printed = call(prove, tmp_path)
    assert code == 0, printed
    more = Record.begun(tmp_path).of_kind("item")[before:]
    assert {line["phase"] for line in more} == {"torch smoke", "jax smoke"}  # no other phase was run again
    code, printed = call(["measure", "--phases", "bench,host,flash_mla", "--items", "1"], tmp_path)
    assert code == 0, printed
    assert "decode_64x4k_small: " in printed
    record = Record.begun(tmp_path)
    assert {line["commit"] for line in record.of_kind("item")} == {carried.commit()}
    assert record.items()["host", "host"]["calls"][0]["launch"] > 0
    assert len(summary.lines(record, "measure")) <= summary.LINES


@pytest.mark.parametrize("what", ["memcheck", "sanitizers"])
def test_small_calls_of_the_cuda_kernels_run_as_the_checkers_would_run_them(what: str) -> None:
    if reason := toolchain.missing_to_emulate():
        pytest.skip(reason)
    from benchmarks.device.tools import Items

    items = Items("cpu")
    name = next(name for name in items.names(what) if name.endswith("cuda"))
    said = items.run(what, name)
    assert said["result"] == "passed", said


def test_every_checker_is_run_on_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mode of compute-sanitizer runs on the kernels, and a mode that finds a fault is reported.

    A stand-in for compute-sanitizer fails in the mode racecheck.
    """
    from benchmarks.device.tools import Items

    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\necho "$@" >> "$0.log"\ntest "$2" != racecheck || exit 9\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    items = Items("cuda")
    results = {name: items.run(what, name) for what in ("memcheck", "sanitizers") for name in items.names(what)}
    assert {name for name, said in results.items() if said["result"] == "FAILED"} == {"racecheck cuda"}
    assert "exit status 9" in results["racecheck cuda"]["message"]
    called = (tmp_path / "compute-sanitizer.log").read_text()
    assert called.count("--error-exitcode 9") == 4
    assert called.count("--report-api-errors no") == 2  # only memcheck has this option
    assert "cuda.exercise(1, 'cuda')" in called


@pytest.mark.parametrize("case", device_cuda.SMALL, ids=lambda case: case.name)
def test_the_kernels_take_what_the_checkers_exercise(case: Any) -> None:
    """The CUDA kernels decline no case of the checkers on a Hopper GPU, except because they cannot run here."""
    found = case.attention_call(samples.device_of("torch", "sm_90"))
    declined = dispatch.load(case.operation, "cuda").why_not(found)
    assert declined is None or declined == _native.why_not()


def test_what_failed_is_measured_in_other_ways_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "newer_ptxas", lambda: "/cuda/ptxas")
    record = Record.begun(tmp_path)
    for phase in ("torch triton", "torch eager"):
        record.write("item", phase=phase, item="corner: a", result="FAILED")
        record.write("item", phase=phase, item="corner: b", result="passed")
    again = {phase.name: phase for phase in plan.repeats(record)}
    assert set(again) == {
        "torch triton", "torch triton, with CUDA's ptxas", "torch triton, without PDL", "torch eager",
    }  # fmt: skip
    assert sum(phase.seconds for phase in again.values()) <= plan.REPEATED
    for phase in again.values():
        assert phase.select(record, ["corner: a", "corner: b", "corner: c"]) == ["corner: a"]
    assert again["torch triton, with CUDA's ptxas"].start.environ[-1] == ("TRITON_PTXAS_PATH", "/cuda/ptxas")
    assert again["torch triton, without PDL"].start.arguments[-1] == plan.WITHOUT_PDL
    assert [phase.name for phase in plan.phases("measure", record)][:4] == list(again)
    assert list(again)[:2] == ["torch triton", "torch eager"]  # unchanged repeats come first
    way = "torch triton, without PDL"
    record.write("item", phase=way, item="corner: a", result="FAILED")
    assert (way, "corner: a") in record.items()
    record.write("item", phase="torch triton", item="corner: a", result="passed")
    assert (way, "corner: a") not in record.items()  # a failure in another way does not matter once the item has passed


def test_much_that_failed_leaves_time_to_measure(tmp_path: Path) -> None:
    record = Record.begun(tmp_path)
    for phase in plan.PROVE:
        record.write("item", phase=phase.name, item="corner: a", result="FAILED")
    again = list(plan.repeats(record))
    assert len(again) == plan.MOST_REPEATS
    assert sum(phase.seconds for phase in again) <= plan.REPEATED
    assert {phase.workers for phase in again} == {1}


def test_of_failures_of_a_kind_one_is_run_in_other_ways(tmp_path: Path) -> None:
    record = Record.begun(tmp_path)
    for number in range(40):
        message = f"AssertionError: error {number}.0 times the bound" if number < 30 else f"ValueError: {'x' * number}"
        record.write("item", phase="torch triton", item=str(number), result="FAILED", message=message)
    again = {phase.name: phase for phase in plan.repeats(record)}
    names = [str(number) for number in range(40)]
    assert len(again["torch triton"].select(record, names)) == 40
    assert again["torch triton, without PDL"].select(record, names) == ["0", *names[30:35]]
    assert again["torch triton, without PDL"].workers == plan.TELLING


def test_the_cases_furthest_from_their_floor_are_profiled(tmp_path: Path) -> None:
    record = Record.begun(tmp_path)
    for number, share in enumerate((0.9, 0.2, 0.5, 0.1)):
        rows = [{"who": "triton", "case": f"c{number}", "share_of_floor": share}]
        record.write("item", phase="bench", item=f"c{number}", result="passed", rows=rows)
    names = [f"triton c{number}" for number in range(4)]
    assert plan.furthest(record, names) == ["triton c3", "triton c1", "triton c2"]


def test_cases_that_failed_beside_peers_are_timed_without_them(tmp_path: Path) -> None:
    record = Record.begun(tmp_path)
    record.write("item", phase=plan.BENCH, item="a", result="FAILED")
    record.write("item", phase=plan.BENCH, item="b", result="passed")
    assert plan.failed_cases(record, ["a", "b", "c"]) == ["a"]
    alone = [phase for phase in plan.MEASURE if phase.choose is plan.failed_cases]
    assert {phase.start.arguments for phase in alone} == {(plan.WITHOUT_PEERS,)}


# ---- the parts that are sent along


@pytest.fixture
def travelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A test's own folders for carried parts and for unpacking them. The fixture returns the first one."""
    for module in (carried, prepare):
        monkeypatch.setattr(module, "FOLDER", tmp_path / "carried")
    monkeypatch.setattr(carried, "unpacked", lambda: tmp_path / "there")
    monkeypatch.setattr(prepare, "CACHE", tmp_path / "cache")
    return tmp_path / "carried"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Small parts that replace the real ones, with the number of times that each was made."""
    contents: dict[str, Any] = {
        "triton": {"ABC/__grp__k.json": '{"child_paths": {"k.cubin": "/elsewhere/ABC/k.cubin"}}', "ABC/k.cubin": "1"},
        "library": {"lib.so": "2"}, "peers": {"peer.so": "3"}, "site": {"package/__init__.py": ""},
        "times": collections.Counter(),
    }  # fmt: skip

    def maker(part: str) -> Callable[[Path], dict[str, Any]]:
        def make(path: Path) -> dict[str, Any]:
            contents["times"][part] += 1
            if contents[part] is None:
                raise OSError("no network")
            source = path.with_suffix(".source")
            source.mkdir(exist_ok=True)
            for number, text in enumerate(contents[part].values()):
                (source / str(number)).write_text(text)
            prepare._pack(path, ((source / str(number), name) for number, name in enumerate(contents[part])))
            return {}

        return make

    monkeypatch.setattr(
        prepare, "parts",
        lambda: {part: (lambda part=part: repr(contents[part]), maker(part)) for part in carried.PARTS},
    )  # fmt: skip
    return contents


def test_only_what_has_changed_is_made_anew(
    travelling: Path, made: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare.prepare() == 0
    assert set(made["times"].values()) == {1}
    assert prepare.prepare() == 0
    assert set(made["times"].values()) == {1}
    made["peers"] = {"peer.so": "changed"}
    assert prepare.prepare() == 0
    assert made["times"] == {"triton": 1, "library": 1, "peers": 2, "site": 1}
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("carried/ 0.0 MiB and the tree ")
    assert " of 64.0 MiB that may be sent, " in last


def test_a_part_that_cannot_be_made_leaves_the_others(
    travelling: Path, made: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    made["peers"] = None
    assert prepare.prepare() == 1
    assert set(carried.manifest()["parts"]) == {"triton", "library", "site"}
    assert "peers: FAILED: OSError: no network" in capsys.readouterr().out


def test_too_much_to_travel_is_said(
    travelling: Path, made: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prepare, "LIMIT", 2**20)
    assert prepare.prepare() == 1
    assert "TOO MUCH" in capsys.readouterr().out


def test_the_tree_leaves_room_for_what_travels() -> None:
    """The working tree leaves 40 MiB of the size limit for compiled kernels and peers."""
    if not (ROOT / ".git").exists():
        pytest.skip("git lists the files of the tree, and this is not a git checkout")
    assert 0 < prepare.tree_size() < prepare.LIMIT - 40 * 2**20


def test_what_travelled_is_unpacked_once(travelling: Path, made: dict[str, Any], tmp_path: Path) -> None:
    prepare.prepare()
    there = tmp_path / "there"
    carried.unpack(measuring=False)
    assert not (there / "peers").exists()  # `prove` does not need the peers, which are large
    group = json.loads((there / "triton" / "ABC" / "__grp__k.json").read_text())
    assert group["child_paths"] == {"k.cubin": str(there / "triton" / "ABC" / "k.cubin")}
    (there / "triton" / "more").mkdir()  # a kernel that was compiled on the device
    carried.unpack(measuring=True)
    assert (there / "peers" / "peer.so").read_text() == "3"
    assert (there / "triton" / "more").is_dir()
    made["library"] = {"lib.so": "changed"}
    prepare.prepare()
    carried.unpack(measuring=True)
    assert (there / "library" / "lib.so").read_text() == "changed"


def test_kernels_that_travelled_are_not_compiled_again(travelling: Path, tmp_path: Path) -> None:
    """Kernels compiled by Triton 3.6 are found in the cache after they were packed and unpacked elsewhere."""
    earlier = ROOT / ".triton36"
    if not earlier.is_dir():
        pytest.skip("no Triton 3.6: make .triton36")
    listed = tmp_path / "list.json"
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ["PYTHONPATH"] = os.pathsep.join(map(str, (earlier, ROOT, ROOT / "src")))

    def compiled(cache: Path) -> str:
        command = [
            sys.executable,
            "-m",
            "tests.programs.precompile_one_case",
            str(cache),
            "--list",
            str(listed),
            "--kinds",
            "checks",
        ]
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
        assert json.loads(listed.read_text())["failed"] == {}
        return done.stdout

    assert "1 of 1 kernels compiled anew" in compiled(tmp_path / "cache")
    travelling.mkdir()
    path = travelling / "triton.tar.xz"
    prepare.pack_kernels(path, tmp_path / "cache", json.loads(listed.read_text())["folders"])
    (travelling / carried.MANIFEST).write_text(json.dumps({"parts": {"triton": {"digest": "x"}}}))
    shutil.rmtree(tmp_path / "cache")
    carried.unpack(measuring=False)
    assert "0 of 1 kernels compiled anew" in compiled(tmp_path / "there" / "triton")


def test_a_part_that_cannot_be_unpacked_leaves_the_others(
    travelling: Path, made: dict[str, Any], tmp_path: Path
) -> None:
    prepare.prepare()
    (travelling / "library.tar.xz").write_bytes(b"cut off")
    said = carried.unpack(measuring=True)
    assert list(said["not_unpacked"]) == ["library"]
    assert (tmp_path / "there" / "peers" / "peer.so").is_file()


def test_packing_the_same_files_gives_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    packed = []
    for number in range(2):
        os.utime(tmp_path / "a", (number, number))
        prepare._pack(tmp_path / "p", [(tmp_path / "a", "x/a")])
        packed.append((tmp_path / "p").read_bytes())
    assert packed[0] == packed[1]
    with tarfile.open(tmp_path / "p") as archive:
        assert archive.getnames() == ["x/a"]


def test_without_git_the_commit_is_the_one_that_was_prepared(
    travelling: Path, made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare.prepare()
    prepared = carried.manifest()["commit"]
    monkeypatch.setenv("PATH", "/nowhere")
    assert carried.commit() == prepared
    monkeypatch.setattr(carried, "source_digest", lambda: "changed")
    assert carried.commit() == prepared.removesuffix(carried.MODIFIED) + carried.MODIFIED
    monkeypatch.setattr(carried, "manifest", dict)
    assert carried.commit() == ""


def test_jax_leaves_the_card_to_others() -> None:
    assert carried.environment()["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


def test_caches_lie_where_one_may_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/home")
    assert carried.environment()["XDG_CACHE_HOME"].startswith(str(carried.unpacked()))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/proc/home")
    assert carried.environment()["NUMBA_CACHE_DIR"].startswith(str(carried.unpacked()))


def test_every_process_finds_what_was_carried(travelling: Path, made: dict[str, Any], tmp_path: Path) -> None:
    prepare.prepare()
    carried.unpack(measuring=True)
    assert printed("-m", "tests.programs.use_carried", str(tmp_path / "there")) == "peers library False\n"


def test_the_tree_that_is_rehearsed_has_no_git_and_every_link(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("git lists the files of the tree, and this is not a git checkout")
    rehearse.copy(tmp_path / "tree")
    assert not (tmp_path / "tree" / ".git").exists()
    assert (tmp_path / "tree" / "src" / "ragged_attention" / "kernels_triton" / "mla_decode.py").is_file()


def test_a_rehearsal_in_which_nothing_passed_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = Record.begun(tmp_path)
    for phase, result in (("a", "passed"), ("b", "cannot run"), ("profile", "cannot run")):
        record.write("item", phase=phase, item="x", result=result)
    assert rehearse.faults(record) == 1
    assert capsys.readouterr().out == "b: no item passed or was declined\n"


# ---- summaries


def test_a_summary_begins_with_the_worst_and_fits_a_screen(tmp_path: Path) -> None:
    record = Record.begun(tmp_path)
    messages = {
        "wrong": "AssertionError: error 3.5 times the bound",
        "hung": "no end after 30 s\nhang",
        "error": "ValueError: x",
        "poisoned": "CUDA error: an illegal memory access",
        "crashed": "the process ended: SIGSEGV\nTraceback",
    }
    for number in range(300):
        word = list(messages)[number % 5]
        message = f"{messages[word]} {'abc'[number % 3] * (number % 40)}"
        record.write("item", phase=f"phase {number % 7}", item=f"item {number}", result="FAILED", message=message)
        rows = [{"case": f"case {number}", "who": "triton", "seconds": 1e-4}, {"case": f"case {number}", "who": "fa3",
                 "seconds": 1e-6 * number, "ratio": number / 100}]  # fmt: skip
        record.write("item", phase="bench", item=f"case {number}", result="passed", rows=rows[: 1 + (number > 0)])
    found = summary.lines(record, "measure")
    assert len(found) <= summary.LINES
    assert all(len(line) <= summary.WIDTH for line in found)
    assert found[0].startswith("VERDICT")
    assert " crashed in " in found[2]
    assert any("case 1: triton 100 us; fa3 1 us, 0.01x ours" in line for line in found)
    assert found[-1].startswith("measure is over")


def test_failures_of_one_kind_are_one_line(tmp_path: Path) -> None:
    record = Record.begun(tmp_path)
    for number in range(5):
        message = f"AssertionError: error {number}.5 times the bound"
        record.write("item", phase="torch triton", item=f"corner: {number}", result="FAILED", message=message)
    lines = [line for line in summary.lines(record, "prove") if "corner: " in line]
    assert lines == ["  5 wrong in torch triton: 'corner: 0': AssertionError: error # times the bound"]


@pytest.mark.parametrize(
    "message", ["RuntimeError: CUDA error: x", "INTERNAL: CUDA_ERROR_LAUNCH_FAILED", "CUDA out of memory"]
)
def test_what_poisons_a_process_is_known(message: str) -> None:
    assert worker.is_poison(message)
    assert not worker.is_poison("AssertionError: expected 1, got 2")


# ---- published tables and files

CASE = "mla_dense_h128_128x4k"
DEVICE = "NVIDIA H200"


def lines_of_a_run() -> list[dict[str, Any]]:
    stamp = {"device": DEVICE, "commit": "abc", "sources": "x", "at": 1796083200, "triton": "3.6.0"}

    def item(phase: str, name: str, result: str = "passed", **fields: Any) -> dict[str, Any]:
        return {"kind": "item", "phase": phase, "item": name, "result": result, **fields, **stamp}

    return [
        {"kind": "phase", "phase": "torch cuda", "items": 2, "todo": ["corner: merge, one"], **stamp},
        item("torch cuda", "corner: latent decode, dense", answered=["mla_decode"]),
        item("torch cuda", "corner: merge, one", "declined"),
        item("jax cuda", "corner: latent decode, dense", "cannot run"),
        item("torch triton", "corner: attention, one key", answered=["ragged_paged_attention"]),
        item("torch triton", "corner: attention, two keys", "FAILED", answered=[]),
        item("bench", CASE, rows=[
            {"who": "cuda", "case": CASE, "seconds": 3e-4, "share_of_floor": 0.5},
            {"who": "triton", "case": CASE, "seconds": 4e-4},
        ]),
        item("bench", "decode_64x4k", rows=[
            {"who": "triton", "case": "decode_64x4k", "seconds": 2e-4, "share_of_floor": 0.8},
            {"who": "vllm-triton", "case": "decode_64x4k", "seconds": 3e-4},
        ]),
        item("bench", "no such case", rows=[
            {"who": "cuda", "case": "x", "seconds": 1.0}, {"who": "triton", "case": "x", "seconds": 2.0},
        ]),
    ]  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkout with only the files that are written from records."""
    for folder in ("benchmarks/results", "docs", "kernels_cuda"):
        (tmp_path / folder).mkdir(parents=True)
    for page in ("README.md", "docs/status.md", "docs/gpu_measured.md"):
        (tmp_path / page).write_text(f"before\n{publish.BEGIN}{publish.END}after\n")
    monkeypatch.setattr(_latent, "PROVEN", tmp_path / "kernels_cuda" / "proven")
    _latent._proven.cache_clear()
    yield tmp_path
    _latent._proven.cache_clear()


def published(lines: list[dict[str, Any]], checkout: Path) -> int:
    path = checkout / NAME
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return publish.main([str(path), "--root", str(checkout)])


def call_on(name: str, framework: str = "torch") -> Any:
    return CASES[CASE].attention_call(dataclasses.replace(device_of(framework, "sm_90"), name=name))


def test_a_record_becomes_rows_a_table_and_proven_kernels(checkout: Path) -> None:
    assert published(lines_of_a_run(), checkout) == 0
    assert (checkout / "benchmarks" / "results" / "2026-12-01_nvidia_h200.jsonl").is_file()
    status = (checkout / "docs" / "status.md").read_text()
    assert f"| `mla_decode` | `cuda` | {DEVICE} | torch | 2026-12-01 | abc | 1 checks passed |" in status
    row = f"| `ragged_paged_attention` | `triton` | {DEVICE} | torch | 2026-12-01 | abc | 1 checks passed, 1 FAILED |"
    assert row in status
    assert "| `ragged_paged_attention` | `triton` | AMD | | never | | not yet verified on hardware |" in status
    assert publish.NOTHING not in status
    summary_of_nvidia = f"- **NVIDIA** ({DEVICE}): 2 of {len(CALLS)} operations have run. These have never run: `write_"
    assert summary_of_nvidia in " ".join(status.split())
    assert "- **AMD**: nothing has run there yet." in status
    readme = (checkout / "README.md").read_text()
    assert "| case | ours, µs | limit / ours | vLLM's Triton |" in readme
    assert "| decode, 64 sequences of 4k keys | 200 (triton) | 80% | 1.50 |" in readme
    measured = (checkout / "docs" / "gpu_measured.md").read_text()
    assert "| `decode_64x4k` | 200 |" in measured
    assert "the run ended before them" in measured
    assert publish.NOTHING not in readme
    assert mla_decode.why_not_by_default(call_on(DEVICE)) is None
    assert mla_decode.why_not_by_default(call_on(DEVICE, "jax")) == _latent.NOT_BY_DEFAULT
    assert mla_decode.why_not_by_default(call_on("NVIDIA H100 80GB HBM3")) == _latent.NOT_BY_DEFAULT
    other = dataclasses.replace(CASES[CASE], name="other", num_q_heads=8).attention_call(call_on(DEVICE).device)
    assert mla_decode.why_not_by_default(other) == _latent.NOT_BY_DEFAULT
    assert make_decode_schedule.why_not_by_default(call_on(DEVICE)) == _latent.NOT_BY_DEFAULT
    assert publish.main(["--check", "--root", str(checkout)]) == 0
    (checkout / "docs" / "status.md").write_text(f"{publish.BEGIN}edited\n{publish.END}")
    assert publish.main(["--check", "--root", str(checkout)]) == 1


def test_a_check_that_had_no_end_is_not_said_to_be_wrong(checkout: Path) -> None:
    """A check that ran out of time counts as not ended, not as wrong.

    It counts for the operations that the check ran on another backend, and not for the operations of similar checks.
    """
    check = {"item": "corner: attention, two keys"}
    late = changed(check["item"], message="no end after 40 s\nwhere it was")
    elsewhere = late[4] | check | {"phase": "torch eager", "answered": ["write_kv_pages"]}
    published([*late, elsewhere], checkout)
    lines = [line for line in (checkout / "docs" / "status.md").read_text().splitlines() if "not ended" in line]
    assert lines == [
        f"| `write_kv_pages` | `triton` | {DEVICE} | torch | 2026-12-01 | abc | 0 checks passed, 1 not ended in time |"
    ]


def test_a_second_record_of_a_day_adds_to_the_first(checkout: Path) -> None:
    lines = lines_of_a_run()
    published(lines[:4], checkout)
    published(lines[4:], checkout)
    (kept,) = (checkout / "benchmarks" / "results").iterdir()
    assert [json.loads(line) for line in kept.read_text().splitlines()] == lines


def changed(item: str, **fields: Any) -> list[dict[str, Any]]:
    lines = copy.deepcopy(lines_of_a_run())
    next(line for line in lines if line.get("item") == item).update(fields)
    return lines


@pytest.mark.parametrize(
    "lines",
    [
        changed("corner: latent decode, dense", result="FAILED"),
        changed("corner: merge, one", result="cannot run"),
        changed("corner: merge, one", phase="another"),
        changed("corner: merge, one", sources="others"),
        changed("corner: merge, one", device="NVIDIA H100"),
        changed(CASE, rows=[{"who": "cuda", "seconds": 4e-4}, {"who": "triton", "seconds": 4e-4}]),
        changed(CASE, rows=[{"who": "cuda", "why": "declined"}, {"who": "triton", "seconds": 4e-4}]),
        changed(CASE, phase="another"),
    ],
    ids=[
        "suite failed",
        "suite could not run",
        "suite not whole",
        "two sources",
        "two devices",
        "not faster",
        "no time",
        "no case",
    ],
)
def test_what_a_record_does_not_prove(lines: list[dict[str, Any]], checkout: Path) -> None:
    published(lines, checkout)
    assert list(checkout.glob("kernels_cuda/proven/*.json")) == []
    assert mla_decode.why_not_by_default(call_on(DEVICE)) == _latent.NOT_BY_DEFAULT


def test_lines_of_two_devices_are_kept_apart(checkout: Path) -> None:
    others = [line | {"device": "NVIDIA H100 80GB HBM3"} for line in lines_of_a_run()]
    published([*lines_of_a_run(), *others], checkout)
    names = sorted(path.name for path in (checkout / "benchmarks" / "results").iterdir())
    assert names == ["2026-12-01_nvidia_h100_80gb_hbm3.jsonl", "2026-12-01_nvidia_h200.jsonl"]
    assert mla_decode.why_not_by_default(call_on("NVIDIA H100 80GB HBM3")) is None


def test_what_is_proven_no_more_is_removed(checkout: Path) -> None:
    published(lines_of_a_run(), checkout)
    assert list(checkout.glob("kernels_cuda/proven/*.json")) != []
    published(changed("corner: latent decode, dense", result="FAILED", at=1796083300), checkout)
    assert list(checkout.glob("kernels_cuda/proven/*.json")) == []


def test_of_cases_of_one_kind_the_slowest_counts(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(publish.CASES, "again", dataclasses.replace(CASES[CASE], name="again"))
    for seconds, proven in ((4e-4, False), (3.5e-4, True)):
        more = copy.deepcopy(lines_of_a_run()[6])
        more["item"], more["rows"][0]["seconds"] = "again", seconds
        found = publish.proven([Record(Path("x"), [*lines_of_a_run(), more])])
        assert bool(found) == proven
        assert not proven or [e["case"] for d in found["mla_decode"].values() for e in d.values()] == ["again"]


def test_a_rehearsal_is_no_record_of_a_device(checkout: Path) -> None:
    lines = [line | {"device": "CPU"} for line in lines_of_a_run()]
    with pytest.raises(SystemExit, match=r"expected a record of a GPU in .*, got CPU"):
        published(lines, checkout)


def test_the_pages_say_what_the_kept_records_say() -> None:
    assert publish.stale(ROOT) == []


def test_ended_by_a_signal_a_call_still_sums_up(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "benchmarks.device", "prove", "--device", "cpu", "--out", str(tmp_path)]
    command += ["--phases", "smoke", "--items", "1"]
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("VERDICT"):
            break
    running.send_signal(signal.SIGTERM)
    printed, _ = running.communicate(timeout=60)
    assert running.returncode == 143
    assert "prove is over" in printed


def test_launchers_made_without_a_driver_name_it(tmp_path: Path) -> None:
    """A launcher built with the stub names the driver's library, even though the linker drops unused libraries."""
    pytest.importorskip("triton")
    precompile.stub_of_the_driver(tmp_path)
    source, launcher = tmp_path / "launcher.c", tmp_path / "launcher.so"
    source.write_text("int cuPointerGetAttribute(void); int launch(void) { return cuPointerGetAttribute(); }")
    driver = f"-l:{precompile.STUB}"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", launcher, source, f"-L{tmp_path}", "-Wl,--as-needed", driver], check=True
    )
    assert precompile.STUB.encode() in launcher.read_bytes()
