"""Turn the records of calls on devices into tables and files.

    python -m benchmarks.device.publish [RECORD ...] [--check]

Each RECORD is stored as benchmarks/results/<date>_<device>.jsonl, one file per device. From all stored records the
command regenerates the rows for devices in docs/status.md, the tables of times in README.md and docs/gpu_measured.md,
and kernels_cuda/proven/<operation>.json, which makes CUDA kernels the default on a device. With --check nothing is
written, and the exit status is 1 if any of these files would change.

Only the last result of each item counts. The operation's module assigns each call a kind, which depends on the
operation, heads, widths, format and sizes. A kind is proven for a device and a front end if two conditions hold. First,
with the same sources, every corner of the shipped suite passed on the CUDA kernels or was declined. Second, the CUDA
kernel was faster than Triton's in each timed case of this kind.
"""

import argparse
import collections
import dataclasses
import datetime
import importlib
import importlib.util
import json
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases.catalogue import CASES
from benchmarks.device.plan import BENCH, BENCH_ALONE, QUICK
from benchmarks.device.record import DONE, FAILED, LATE, PASSED, Record, read
from ragged_attention import dispatch
from ragged_attention.calls import CALLS
from ragged_attention.tools.gpus import NEVER
from ragged_attention.tools.samples import device_of

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- devices: written by `python -m benchmarks.device.publish` -->\n", "<!-- end of devices -->\n"
NOTHING = "**Nothing has been run on GPU or TPU hardware yet.**"
# Backend -> kind of device on which it runs -> how the names of these devices begin.
KINDS = {
    "triton": {"NVIDIA": "NVIDIA", "AMD": "AMD"},
    "cuda": {"NVIDIA Hopper": "NVIDIA"},
    "pallas": {"TPU (any)": "TPU"},
    "eager": {"NVIDIA": "NVIDIA", "AMD, MPS, XPU": "AMD"},
    "xla": {"NVIDIA": "NVIDIA", "AMD, TPU": "AMD"},
}
PEERS = {"flashmla": "FlashMLA", "fa3": "FA3", "fa3-mla": "FA3", "fa3-varlen": "FA3", "vllm-triton": "vLLM's Triton",
         "sdpa-cudnn": "cuDNN", "sdpa": "SDPA", "sdpa-mla": "SDPA"}  # fmt: skip
COLUMNS = ("FlashMLA", "FA3", "vLLM's Triton", "cuDNN", "SDPA")
TITLES = {
    "decode_64x4k": "decode, 64 sequences of 4k keys",
    "prefill_4k": "prefill of 4k tokens",
    "mixed_2q2k_32q1s1k": "2 prefills of 2k tokens and 32 decodes at 1k keys",
    "gpt_oss_full_64x4k": "decode with sinks (GPT-OSS), 64 sequences of 4k keys",
    "fp8_64x4k": "decode over fp8, 64 sequences of 4k keys",
    "mla_dense_h16_128x4k": "MLA decode, 16 heads, 128 sequences of 4k keys",
    "mla_sparse_h128_128q2": "sparse MLA decode, 128 heads, 128 sequences with 2 queries each",
    "mla_sparse_h16_b8": "sparse MLA decode, 16 heads, 8 sequences",
    "mla_prefill_h128_32k": "sparse MLA prefill, 128 heads, 32k tokens",
    "mha_128_4k": "packed attention, heads of 128, 4k tokens",
    "mha_128_4k_backward": "its gradient",
    "mha_192_4k": "packed attention, heads of 192 and 128, 4k tokens",
    "mha_192_4k_backward": "its gradient",
}


@dataclasses.dataclass(frozen=True)
class Ran:
    """The results of all checks that ran one operation on one backend, front end and device."""

    device: str
    framework: str
    date: str
    commit: str
    results: collections.Counter[str]

    @property
    def outcome(self) -> str:
        counts = {PASSED: "checks passed", FAILED: FAILED, LATE: "not ended in time"}
        phrases = {key: f"{self.results[key]} {words}" for key, words in counts.items()}
        return ", ".join(text for key, text in phrases.items() if self.results[key] or key == PASSED)


# ---- reading records


def records(folder: Path) -> list[Record]:
    """The stored records, the oldest first."""
    return [Record(path, list(read(path))) for path in sorted(folder.glob("*.jsonl"))]


def by_device(path: Path) -> dict[str, Record]:
    """The lines of a record, grouped by device, since calls may have run on different devices."""
    lines: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for line in read(path):
        lines[line.get("device", "")].append(line)
    return {name: Record(path, found) for name, found in lines.items()}


def device(record: Record) -> str:
    return next((line["device"] for line in reversed(record.lines) if line.get("device")), "")


def date(line: dict[str, Any]) -> str:
    return datetime.datetime.fromtimestamp(line["at"], datetime.UTC).date().isoformat()


def suites(record: Record) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Yield the framework, backend, check and line of each item of the suite."""
    for (phase, item), line in record.items().items():
        framework, _, rest = phase.partition(" ")
        backend, _, more = rest.partition(" ")
        if item and framework in ("torch", "jax") and backend in KINDS and more in ("", "drawn"):
            yield framework, backend, item, line


def subject(check: str) -> str:
    """The first part of a check's name, which says what it checks."""
    return check.partition(",")[0]


def ran(record: Record) -> dict[tuple[str, str], list[Ran]]:
    """The results in a record, by operation and backend.

    A failed check may not say which operations it ran. Then it counts for the operations that it ran on other backends.
    If these are unknown too, it counts for the operations of checks with the same subject, or for all operations.
    """
    about: dict[str, set[str]] = collections.defaultdict(set)
    for _, _, check, line in suites(record):
        for name in (check, subject(check)):
            about[name] |= {*line.get("answered", ())}
    outcomes: dict[tuple[str, str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    last: dict[tuple[str, str, str], dict[str, Any]] = {}
    for framework, backend, check, line in suites(record):
        operations = {*line.get("answered", ())}
        if line["result"] == FAILED:
            operations = operations or about[check] or about[subject(check)] or set(CALLS)
        late = line["result"] == FAILED and line.get("message", "").startswith(LATE)
        for operation in operations:
            key = operation, backend, framework
            outcomes[key][LATE if late else line["result"]] += 1
            last[key] = line
    rows: dict[tuple[str, str], list[Ran]] = collections.defaultdict(list)
    for (operation, backend, framework), results in outcomes.items():
        line = last[operation, backend, framework]
        rows[operation, backend].append(Ran(device(record), framework, date(line), line["commit"], results))
    return rows


# ---- docs/status.md


def offered(operation: str) -> Iterator[str]:
    """The backends that implement an operation and run on devices."""
    for backend in KINDS:
        package = dispatch.PACKAGES[backend]
        if importlib.util.find_spec(f"{package}.{operation}"):
            yield backend


def status(device_records: Sequence[Record]) -> str:
    """The rows of docs/status.md."""
    newest: dict[tuple[str, str, str, str], Ran] = {}
    for record in device_records:
        for (operation, backend), rows in ran(record).items():
            newest |= {(operation, backend, row.device, row.framework): row for row in rows}
    lines = [*_summary({(operation, device) for operation, _, device, _ in newest}), ""] if newest else [NOTHING, ""]
    lines += ["| operation | backend | device | from | last run | commit | outcome |", "|---" * 7 + "|"]
    for operation in CALLS:
        for backend in offered(operation):
            rows = [row for key, row in newest.items() if key[:2] == (operation, backend)]
            for row in sorted(rows, key=lambda row: (row.device, row.framework)):
                lines.append(
                    f"| `{operation}` | `{backend}` | {row.device} | {row.framework} | {row.date} | {row.commit} | "
                    f"{row.outcome} |"
                )
            for kind, begins in KINDS[backend].items():
                if not any(row.device.startswith(begins) for row in rows):
                    lines.append(f"| `{operation}` | `{backend}` | {kind} | | never | | {NEVER} |")
    return "\n".join(lines) + "\n"


def _summary(pairs: Collection[tuple[str, str]]) -> Iterator[str]:
    """Yield a list item for each kind of device: which operations have run there. `pairs` are (operation, device)."""
    for kind in ("NVIDIA", "AMD", "TPU"):
        devices = {device: {name for name, other in pairs if other == device} for _, device in sorted(pairs)}
        devices = {device: names for device, names in devices.items() if device.startswith(kind)}
        ran_there = {name for names in devices.values() for name in names}
        never = [f"`{name}`" for name in CALLS if name not in ran_there]
        text = f"- **{kind}** ({', '.join(devices)}): {len(ran_there)} of {len(CALLS)} operations have run."
        if not devices:
            text = f"- **{kind}**: nothing has run there yet."
        elif never:
            text += f" These have never run: {', '.join(never)}."
        yield textwrap.fill(text, 120, subsequent_indent="  ", break_on_hyphens=False)


# ---- times


def _bench_lines(device_records: Sequence[Record]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the device, case and line of each item that times a case."""
    for record in device_records:
        for (phase, case), line in record.items().items():
            if phase in (BENCH, BENCH_ALONE) and case:
                yield device(record), case, line


def _timed(device_records: Sequence[Record]) -> dict[str, dict[str, dict[str, Any]]]:
    """Device -> case -> the newest line that has times."""
    lines: dict[str, dict[str, dict[str, Any]]] = collections.defaultdict(dict)
    for name, case, line in _bench_lines(device_records):
        if line.get("rows"):
            lines[name][case] = line
    return lines


def _libraries(lines: Iterable[dict[str, Any]]) -> list[str]:
    """The titles of the libraries that were timed in any of the lines."""
    timed = {PEERS.get(row["who"]) for line in lines for row in line["rows"] if row.get("seconds")}
    return [title for title in COLUMNS if title in timed]


def times(device_records: Sequence[Record]) -> str:
    """The table of README.md: the newest times of the quick cases on each device."""
    lines = [] if any(ran(record) for record in device_records) else [NOTHING]
    for name, cases in _timed(device_records).items():
        quick = {case: cases[case] for case in QUICK if case in cases}
        if not quick:
            continue
        line, columns = next(line for case, line in cases.items() if case in quick), _libraries(quick.values())
        lines += [f"These times were measured on one {name} with Triton {line['triton']} on {date(line)},",
                  f"at commit {line['commit']}; the backend is in brackets. Each number under a library is its time",
                  "divided by ours: above 1, ours is faster. The limit is the least time that the device's",
                  "bandwidth and arithmetic allow. For fp8 caches, FA3 and SDPA read a bfloat16 copy that was made",
                  "beforehand. [Another page](docs/gpu_measured.md) has all cases, and lists those that could not be",
                  "timed.", "",
                  f"| case | ours, µs | limit / ours | {' | '.join(columns)} |",
                  "|---" * (3 + len(columns)) + "|"]  # fmt: skip
        lines += [*(_row(case, line["rows"], columns) for case, line in quick.items()), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def all_times(device_records: Sequence[Record]) -> str:
    """The tables of docs/gpu_measured.md: every timed case on each device, and the reasons for missing times."""
    failures: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for name, case, line in _bench_lines(device_records):
        if line["result"] not in DONE:
            failures[name][case] = line.get("message", line["result"]).splitlines()[0]
    timed = _timed(device_records)
    lines = [] if timed else [NOTHING]
    for name, cases in timed.items():
        columns = _libraries(cases.values())
        lines += [f"## {name}", "", f"| case | Triton, µs | CUDA, µs | {', µs | '.join(columns)}, µs |",
                  "|---" * (3 + len(columns)) + "|"]  # fmt: skip
        for case, line in sorted(cases.items()):
            times = {_title(row): f"{1e6 * row['seconds']:.0f}" for row in line["rows"] if row.get("seconds")}
            cells = (times.get(column, "") for column in ("triton", "cuda", *columns))
            lines.append(f"| `{case}` | {' | '.join(cells)} |")
        lines += ["", "Not timed:", "", *_not_timed(cases, failures[name]), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _not_timed(cases: Mapping[str, dict[str, Any]], failures: Mapping[str, str]) -> Iterator[str]:
    """Yield a list item for each library and reason, for each failed case, and for all quick cases never reached."""
    reasons = collections.Counter(
        (_title(row), row["why"].partition(". ")[0])
        for line in cases.values()
        for row in line["rows"]
        if row.get("why")
    )
    for (title, reason), count in sorted(reasons.items()):
        yield f"- {title}, {count} {'case' if count == 1 else 'cases'}: {reason}"
    for case, reason in sorted(failures.items()):
        if case not in cases:
            yield f"- `{case}`: {reason}"
    if unreached := [f"`{case}`" for case in QUICK if case not in cases and case not in failures]:
        yield f"- {', '.join(unreached)}: the run ended before them"


def _title(row: Mapping[str, Any]) -> str:
    who: str = row["who"]
    return PEERS.get(who, who)


def _row(case: str, rows: Iterable[dict[str, Any]], columns: Sequence[str]) -> str:
    """A table row of a case. "Ours" is the faster of the CUDA and the Triton kernel."""
    timed = {row["who"]: row for row in rows if row.get("seconds")}
    ours = min((timed[who] for who in ("cuda", "triton") if who in timed), key=lambda row: row["seconds"], default=None)
    if ours is None:
        return f"| {TITLES[case]} | not timed | {'| ' * (1 + len(columns))}|"
    cells: dict[str, str] = dict.fromkeys(columns, "")
    for who, row in timed.items():
        if who in PEERS:
            cells[PEERS[who]] = f"{row['seconds'] / ours['seconds']:.2f}"
    share = ours.get("share_of_floor")
    floor = "" if share is None else f"{share:.0%}"
    return f"| {TITLES[case]} | {1e6 * ours['seconds']:.0f} ({ours['who']}) | {floor} | {' | '.join(cells.values())} |"


# ---- proven kernels


def proven(device_records: Sequence[Record]) -> dict[str, dict[str, dict[str, Any]]]:
    """Operation -> device -> kind of call -> the front ends, and the times of the case with the least gain over Triton.

    Kinds that are not proven are left out.
    """
    entries: dict[str, dict[str, dict[str, Any]]] = collections.defaultdict(lambda: collections.defaultdict(dict))
    for record in device_records:
        frameworks = [framework for framework in ("torch", "jax") if _whole(record, f"{framework} cuda")]
        if frameworks:
            for operation, key, entry in _faster(record):
                entries[operation][device(record)][key] = entry | {"frameworks": frameworks}
    return {operation: dict(devices) for operation, devices in entries.items()}


def _whole(record: Record, phase: str) -> bool:
    """Whether all items of a phase ran with the same sources and none failed."""
    counts = [line["items"] for line in record.of_kind("phase") if line["phase"] == phase]
    lines = [line for (name, item), line in record.items().items() if name == phase and item]
    results = {line["result"] for line in lines}
    run = bool(counts) and len(lines) == counts[-1] and len({line["sources"] for line in lines}) == 1
    return run and PASSED in results and results <= {*DONE}


def _faster(record: Record) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (operation, kind of call, times) for each kind in which the CUDA kernels were faster in all cases.

    The times are those of the case with the least gain.
    """
    cases: dict[tuple[str, str], list[dict[str, Any]]] = collections.defaultdict(list)
    for (phase, name), line in record.items().items():
        seconds = {row["who"]: row["seconds"] for row in line.get("rows", ()) if row.get("seconds")}
        if phase not in (BENCH, BENCH_ALONE) or name not in CASES or not seconds.keys() >= {"cuda", "triton"}:
            continue
        call = CASES[name].attention_call(device_of("torch", "sm_90"))
        key = importlib.import_module(f"ragged_attention.kernels_cuda.{call.OPERATION}").kind_of(call)
        entry = {"us": 1e6 * seconds["cuda"], "triton_us": 1e6 * seconds["triton"], "case": name}
        cases[call.OPERATION, key].append(entry | {"commit": line["commit"], "date": date(line)})
    for (operation, key), entries in cases.items():
        slowest = max(entries, key=lambda entry: entry["us"] / entry["triton_us"])
        if slowest["us"] < slowest["triton_us"]:
            yield operation, key, slowest


# ---- the command


def device_slug(name: str) -> str:
    """A device's name as part of a file name: `"NVIDIA H200"` -> `"nvidia_h200"`."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def keep(path: Path, folder: Path) -> list[Path]:
    """Store the lines of a record in a file per GPU, named by day and GPU. Returns the files."""
    gpus = {name: record for name, record in by_device(path).items() if name not in ("", "CPU")}
    if not gpus:
        raise SystemExit(f"expected a record of a GPU in {path}, got {', '.join(by_device(path)) or 'nothing'}")
    files = []
    for name, record in gpus.items():
        target = folder / f"{date(record.lines[-1])}_{device_slug(name)}.jsonl"
        before = list(read(target))  # earlier calls on that day
        lines = before + [line for line in record.lines if line not in before]
        target.write_text("".join(json.dumps(line) + "\n" for line in lines))
        files.append(target)
    return files


def written(root: Path) -> dict[Path, str]:
    """File -> the content that it should have, for all files that are generated from the records."""
    device_records = records(root / "benchmarks" / "results")
    pages = {root / "docs" / "status.md": status(device_records), root / "README.md": times(device_records)}
    pages[root / "docs" / "gpu_measured.md"] = all_times(device_records)
    files = {path: _between(path.read_text(), text) for path, text in pages.items()}
    folder = root / "kernels_cuda" / "proven"
    for operation, devices in proven(device_records).items():
        files[folder / f"{operation}.json"] = json.dumps(devices, indent=1, sort_keys=True) + "\n"
    return files


def _between(page: str, text: str) -> str:
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"expected the lines {BEGIN.strip()} and {END.strip()} in the page")
    return f"{before}{begin}{text}{end}{after}"


def stale(root: Path) -> list[Path]:
    """The files whose content differs from `written`, and files that should not exist."""
    wanted = written(root)
    left_over = [path for path in (root / "kernels_cuda" / "proven").glob("*.json") if path not in wanted]
    return left_over + [path for path, text in wanted.items() if not path.is_file() or path.read_text() != text]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device.publish", description=__doc__)
    parser.add_argument("record", nargs="*", type=Path, help="a record.jsonl that a call on a device wrote")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file would change")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout")
    options = parser.parse_args(argv)
    for path in () if options.check else options.record:
        for target in keep(path, options.root / "benchmarks" / "results"):
            print(f"stored as {target.relative_to(options.root)}")
    changed = stale(options.root)
    for path in changed:
        print(f"{path.relative_to(options.root)}: {'does not match the records' if options.check else 'written'}")
    if options.check:
        return int(bool(changed))
    wanted = written(options.root)
    for path in changed:
        if path in wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path])
        else:
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
