"""The phases of the two calls, their order, and their time limits.

`prove` checks whether the kernels are right. It checks all kernels in five minutes, with the most informative items
first. `measure` repeats the items that failed in `prove`, some of them also compiled or launched in other ways, and
then times the kernels. The limits are for a machine with 16 cores. If a phase ends early, the next phases get its time,
and the last phases use all time that remains.
"""

import dataclasses
import shutil
from collections.abc import Callable, Iterator

from benchmarks.device import summary
from benchmarks.device.record import FAILED, Record, way_of

QUICK = (
    "decode_64x4k", "prefill_4k", "mixed_2q2k_32q1s1k", "gpt_oss_full_64x4k", "fp8_64x4k",
    "mla_dense_h16_128x4k", "mla_sparse_h128_128q2", "mla_sparse_h16_b8", "mla_prefill_h128_32k",
    "mha_128_4k", "mha_128_4k_backward", "mha_192_4k", "mha_192_4k_backward",
)  # fmt: skip
BENCH, BENCH_ALONE = "bench", "bench without peers"  # the phases that time cases
WITHOUT_PDL, WITHOUT_PEERS = "without-pdl", "without-peers"
FURTHEST = 3  # number of cases that are profiled
SPACE = 8  # time limits in a rehearsal on a CPU are this many times as long
NEVER_REACHED, RUN_ALREADY = 1, 3  # values of `Record.turns`
REPEATED, MOST_REPEATS = 75.0, 9  # the seconds for all repeated phases together, and the greatest number of such phases
ENOUGH = 10.0  # seconds after which an item without an answer counts as hanging, even if its own limit is longer
TELLING = 6  # the most failed items that are run in other ways, one for each kind of failure
# Many processes share the cores. Without this setting, each product of the reference would use all cores.
ONE_THREAD = tuple((f"{name}_NUM_THREADS", "1") for name in ("OMP", "OPENBLAS", "MKL", "NUMBA"))
Choice = Callable[[Record, list[str]], list[str]]


@dataclasses.dataclass(frozen=True)
class Start:
    """How a process is started: the module with its items, their arguments, and additions to the environment."""

    module: str
    arguments: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """Items of one kind, with time limits for each item and for the phase."""

    name: str
    start: Start
    what: str = ""
    workers: int
    item_seconds: float
    seconds: float
    every: int = 1  # run every n-th item only
    alone: bool = False  # nothing else may run meanwhile, because this phase measures time
    always: bool = False  # also run items that have passed, since this may be another machine
    choose: Choice | None = None  # selects the items if they depend on the record

    def select(self, record: Record, names: list[str], most: int = 0) -> list[str]:
        """The items to run. Items that failed before come first. `most` limits their number, unless it is 0."""
        wanted = self.choose(record, names) if self.choose else names[:: self.every]
        if most and len(wanted) > most:
            wanted = wanted[:: -(-len(wanted) // most)]
        turns = {} if self.always else record.turns(self.name)
        due = {name: turns.get(name, NEVER_REACHED) for name in wanted}
        return sorted((name for name in wanted if due[name] < RUN_ALREADY), key=due.__getitem__)


def _suite(name: str, what: str, workers: int, seconds: float, *, every: int = 1, each: float = 12.0) -> Phase:
    start = Start("benchmarks.device.suite", (name.partition(" ")[0],), ONE_THREAD)
    return Phase(
        name=name, start=start, what=what, workers=workers, item_seconds=each, seconds=seconds, every=every,
        always=what == "smoke",
    )  # fmt: skip


def _checks(name: str, what: str, workers: int, seconds: float, *, alone: bool = False) -> Phase:
    return Phase(
        name=name, start=Start("benchmarks.device.checks", (), ONE_THREAD), what=what, workers=workers,
        item_seconds=seconds / 2, seconds=seconds, alone=alone,
    )  # fmt: skip


PROVE = (
    _suite("torch smoke", "smoke", 3, 45, each=20),
    _suite("jax smoke", "smoke", 3, 60, each=30),
    _suite("torch cuda", "cuda corner", 8, 30),
    _suite("torch triton", "triton corner", 12, 60),
    _checks("checks", "right", 6, 45),
    _suite("torch eager", "eager corner", 8, 30),
    _suite("jax cuda", "cuda corner", 6, 35, every=3),
    _suite("jax triton", "triton corner", 12, 80, every=8, each=40),
    _suite("jax xla", "xla corner", 8, 30, every=8, each=15),
    _suite("torch cuda drawn", "cuda drawn", 8, 40, each=20),
    _suite("torch triton drawn", "triton drawn", 12, 60, each=20),
    _suite("jax triton", "triton corner", 12, 600, each=40),
    _suite("jax cuda", "cuda corner", 8, 600),
)  # fmt: skip


def bench(name: str, cases: str, seconds: float, *options: str, choose: Choice | None = None) -> Phase:
    return Phase(
        name=name, start=Start("benchmarks.device.bench", options), what=cases, workers=1,
        item_seconds=min(40, seconds / 2), seconds=seconds, alone=True, choose=choose,
    )  # fmt: skip


def failed_cases(record: Record, names: list[str]) -> list[str]:
    """The cases that failed. The cause may be a peer, whose illegal access prevents our measurements too."""
    last = record.items()
    return [name for name in names if last.get((BENCH, name), {}).get("result") == FAILED]


def tools(name: str, what: str, seconds: float, each: float, workers: int = 1, choose: Choice | None = None) -> Phase:
    return Phase(
        name=name, start=Start("benchmarks.device.tools"), what=what, workers=workers, item_seconds=each,
        seconds=seconds, choose=choose,
    )  # fmt: skip


def furthest(record: Record, names: list[str]) -> list[str]:
    """The timed cases that are furthest above their floor."""
    shares = {}
    for line in record.items().values():
        for row in line.get("rows", ()):
            if row["who"] in ("triton", "cuda") and row.get("share_of_floor"):
                shares[f"{row['who']} {row['case']}"] = row["share_of_floor"]
    return [name for name in sorted(shares, key=lambda name: shares[name]) if name in names][:FURTHEST]


MEASURE = (
    bench(BENCH, "quick", 110),
    bench(BENCH, "latent", 90),
    bench(BENCH_ALONE, "all", 45, WITHOUT_PEERS, choose=failed_cases),
    _checks("timed checks", "timed", 1, 30, alone=True),
    tools("memcheck", "memcheck", 90, 45, workers=2),
    tools("profile", "profile", 60, 30, choose=furthest),
    bench(BENCH, "all", 150),
    tools("sanitizers", "sanitizers", 120, 60, workers=2),
    tools("host", "host", 90, 45),
    tools("flash_mla", "flash_mla", 600, 300),
    bench(BENCH, "all", 600),
    bench(BENCH_ALONE, "all", 600, WITHOUT_PEERS, choose=failed_cases),
)


def program(name: str) -> str | None:
    """The path of one of CUDA's programs, or None if it is not installed."""
    return shutil.which(name) or shutil.which(f"/usr/local/cuda/bin/{name}")


def newer_ptxas() -> str | None:
    """The path of the CUDA toolkit's ptxas, which is newer than the one in Triton's wheel, or None."""
    return program("ptxas")


def ways() -> dict[str, Callable[[Phase], Phase]]:
    """Ways to repeat a phase: unchanged, and with changes that show whether a failure is a compiler error."""
    changes: dict[str, Callable[[Phase], Phase]] = {"": lambda phase: phase}
    if path := newer_ptxas():
        more = ("TRITON_PTXAS_PATH", path)
        changes[", with CUDA's ptxas"] = lambda phase: _started(phase, environ=(*phase.start.environ, more))
    changes[", without PDL"] = lambda phase: _started(phase, arguments=(*phase.start.arguments, WITHOUT_PDL))
    return changes


def _started(phase: Phase, **changes: tuple) -> Phase:
    return dataclasses.replace(phase, start=dataclasses.replace(phase.start, **changes))


def repeats(record: Record) -> Iterator[Phase]:
    """Phases that repeat the failed items of `prove`.

    For each kind of Triton failure, one item also runs in the other ways. The phases together take at most `REPEATED`
    seconds, so that time for measurements remains.
    """
    repeated = sorted(_repeats(record), key=lambda phase: way_of(phase.name) != "")[:MOST_REPEATS]
    for phase in repeated:
        seconds = REPEATED / max(len(repeated), 3)
        yield dataclasses.replace(phase, seconds=seconds, item_seconds=min(phase.item_seconds, seconds / 2))


def _repeats(record: Record) -> Iterator[Phase]:
    last = record.items()
    for phase in {phase.name: phase for phase in PROVE}.values():
        failed = {item: line for (name, item), line in last.items() if name == phase.name and line["result"] == FAILED}
        if not failed or phase.always:
            continue
        kinds: dict[str, str] = {}
        for item, line in failed.items():
            kinds.setdefault(summary.kind_of(line.get("message", "")), item)
        for way, changed in ways().items():
            if way and "triton" not in phase.what:
                continue
            items = list(kinds.values())[:TELLING] if way else list(failed)
            yield dataclasses.replace(
                changed(phase), name=f"{phase.name}{way}", workers=min(phase.workers, len(items)), every=1,
                choose=lambda record, names, items=items: [name for name in names if name in items],
            )  # fmt: skip


def phases(call: str, record: Record) -> Iterator[Phase]:
    """The phases of a call. Later phases may depend on the results of earlier phases in the record."""
    if call == "prove":
        yield from PROVE
        return
    yield from repeats(record)
    yield from MEASURE
