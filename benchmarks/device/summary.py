"""The summary at the end of a call: at most sixty lines, with the worst failures first."""

import collections
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.device.record import CANNOT, DECLINED, FAILED, LATE, PASSED, Line, Record

LINES, WIDTH = 60, 200
OURS = ("cuda", "triton", "eager")
MOST_GROUPS, MOST_CASES = 22, 14
# (part of a message, kind of failure), from the worst kind to the least: a dead process is worse than a wrong number.
SEVERITY = (
    ("the process ended", "crashed"),
    (LATE, "hung"),
    ("out of memory", "no memory"),
    ("RESOURCE_EXHAUSTED", "no memory"),
    ("illegal", "poisoned"),
    ("CUDA", "poisoned"),
    ("AssertionError", "wrong"),
    ("wrong", "wrong"),
    ("", "error"),
)


def severity(message: str) -> tuple[int, str]:
    return next((rank, word) for rank, (part, word) in enumerate(SEVERITY) if part in message)


def kind_of(message: str) -> str:
    """The most informative line of a message, without its numbers. Failures of one kind have equal lines."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    first = lines[0]
    if severity(message)[1] == "hung":  # messages differ in the time limit
        first = "no end"
    if first.startswith("exit status") or first.endswith("Traceback (most recent call last):"):
        first += f": {lines[-1]}"
    elif severity(message)[1] in ("crashed", "hung"):  # the innermost frame in our code says more than the signal
        frames = [line for line in lines if "File " in line and "ragged_attention" in line]
        first += f" {frames[0]}" if frames else f" {lines[-1]}" if len(lines) > 1 else ""
    return re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "#", first)[:150]


def lines(record: Record, call: str) -> list[str]:
    """The summary of a record, after a call."""
    items = record.items()
    found = [verdict(record), *_failures(items), *_cannot(items), *_counts(record, items), *_cases(items)]
    ending = [f"{call} is over. Everything is in {record.path.name}; docs/device.md says what to do with it."]
    return [line[:WIDTH] for line in [*found[: LINES - 1], *ending]]


def verdict(record: Record) -> str:
    """One line about the smoke tests, which end after about a minute: which backends work from which front end."""
    requested = [(line["phase"], item) for line in record.of_kind("phase") for item in line["todo"]]
    items, phrases = record.items(), {}
    for phase, item in [*requested, *items]:
        if phase.endswith("smoke"):
            name = f"{phase.partition(' ')[0]}-{item}" if item else phase
            result = items[phase, item]["result"] if (phase, item) in items else "gave no answer"
            phrases[name] = f"{name} {'runs' if result == PASSED else result}"
    return "VERDICT: " + ("; ".join(phrases.values()) or "no smoke test was run")


def _failures(items: dict[tuple[str, str], Line]) -> Iterator[str]:
    groups: dict[tuple[int, str, str, str], list[str]] = collections.defaultdict(list)
    for (phase, item), line in items.items():
        if line["result"] == FAILED:
            message = line.get("message", "")
            groups[*severity(message), phase, kind_of(message)].append(item)
    ordered = sorted(groups.items(), key=lambda group: (group[0][0], -len(group[1])))
    total = sum(map(len, groups.values()))
    yield f"FAILED: {total} items, {len(groups)} kinds" + (", the worst first" if total else "")
    for (_, word, phase, kind), names in ordered[:MOST_GROUPS]:
        yield f"  {len(names)} {word} in {phase}: {names[0]!r}: {kind}"
    if len(ordered) > MOST_GROUPS:
        yield f"  and {len(ordered) - MOST_GROUPS} kinds more"


def _cannot(items: dict[tuple[str, str], Line]) -> Iterator[str]:
    reasons: dict[str, list[str]] = collections.defaultdict(list)
    for (phase, item), line in items.items():
        if line["result"] == CANNOT:
            reasons[" ".join(line.get("message", "").split())[:120]].append(f"{phase} {item}".strip())
    for reason, names in list(reasons.items())[:6]:
        yield f"CANNOT RUN: {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}: {reason}"


def of_phase(record: Record, phase: str) -> str:
    """The summary line of a phase."""
    found = [line for line in _counts(record, record.items()) if line.startswith(f"{phase}: ")]
    cannot = [line for line in _cannot(record.items()) if line.startswith(f"CANNOT RUN: {phase}")]
    return (found or cannot or [f"{phase}: nothing to run"])[0][:WIDTH]


def _counts(record: Record, items: dict[tuple[str, str], Line]) -> Iterator[str]:
    known: dict[str, dict[str, Any]] = {}
    for kind in ("phase", "end"):
        for line in record.of_kind(kind):
            one = known.setdefault(line["phase"], {"seconds": 0.0, "items": 0, "not_reached": 0})
            one["seconds"] += line.get("seconds", 0.0)
            one["items"] = line.get("items", one["items"])
            one["not_reached"] = line.get("not_reached", one["not_reached"])
    for phase, one in known.items():
        results = collections.Counter(line["result"] for (name, _), line in items.items() if name == phase)
        shown = [f"{results[word]} {word}" for word in (PASSED, FAILED, DECLINED, CANNOT) if results[word]]
        left = f", {one['not_reached']} not reached" if one["not_reached"] else ""
        compiled = sum(line.get("compiled", 0) for (name, _), line in items.items() if name == phase)
        shown += [f"{compiled} kernels compiled"] if compiled else []
        yield f"{phase}: {', '.join(shown) or 'nothing'}{left}, of {one['items']} in {one['seconds']:.0f} s"


def rows(items: dict[tuple[str, str], Line]) -> Iterator[dict[str, Any]]:
    """All timed rows."""
    for line in items.values():
        yield from line.get("rows", ())


def _cases(items: dict[tuple[str, str], Line]) -> Iterator[str]:
    """Yield a line for each timed case. Cases in which our kernels lose most to a peer come first."""
    cases: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for row in rows(items):
        cases[row["case"]].append(row)

    def worst(rows: Iterable[dict[str, Any]]) -> float:
        return min((row["ratio"] for row in rows if row.get("ratio") and row["who"] not in OURS), default=math.inf)

    for name, found in sorted(cases.items(), key=lambda case: worst(case[1]))[:MOST_CASES]:
        yield f"{name}: " + "; ".join(_timed(row) for row in found if row.get("seconds") or row.get("why"))


def _timed(row: dict[str, Any]) -> str:
    if not row.get("seconds"):
        return f"{row['who']} {row['why'][:50]}"
    share = f", {row['share_of_floor']:.0%} of floor" if row.get("share_of_floor") else ""
    ratio = f", {row['ratio']:.2f}x ours" if row.get("ratio") else ""
    return f"{row['who']} {1e6 * row['seconds']:.0f} us{share}{ratio}"
