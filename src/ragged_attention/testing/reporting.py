"""The output of `conformance`: failures grouped by likely cause, a table, and JUnit XML."""

import argparse
import collections
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ragged_attention import dispatch
from ragged_attention.errors import BackendMissing
from ragged_attention.testing.diagnosis import VAGUE
from ragged_attention.testing.runner import first_refusal
from ragged_attention.testing.verdicts import Verdict

UNKNOWN = "no likely cause was found"
KINDS = {"corner": "named batch", "agreement": "drawn batch", "law": "law"}  # what each kind of check tests


def print_report(console: Console, runner: Any, lines: Sequence[Verdict], options: argparse.Namespace) -> None:
    """Print the failures of a runner, grouped by likely cause, and a table of all checks."""
    for cause, group in grouped(lines).items():
        checks = "1 check fails" if len(group) == 1 else f"{len(group)} checks fail"
        _say(console, f"{checks}: {cause}", style="bold red")
        for line in group:
            _say(console, f"  {line.check}", style="bold")
            for name, text in details(runner, line, options).items():
                _say(console, f"    {name}: {text}")
    print_table(console, f"{runner} on {options.device}", lines)


def _say(console: Console, text: str, **style: Any) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True, **style)


def grouped(lines: Sequence[Verdict]) -> dict[str, list[Verdict]]:
    """The failures, each grouped under the likely cause that it shares with most others; the largest group is first."""
    failed = [line for line in lines if line.result == "FAILED"]
    counts: dict[str, int] = {}
    for line in failed:
        for cause in line.causes:
            counts[cause] = counts.get(cause, 0) + 1
    groups: dict[str, list[Verdict]] = {}
    for line in failed:
        telling = [cause for cause in line.causes if not cause.startswith(VAGUE)] or line.causes
        cause = max(telling[:2], key=lambda cause: counts[cause], default=UNKNOWN)
        groups.setdefault(cause, []).append(line)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def merged(causes: Sequence[str]) -> list[str]:
    """The causes, with those that differ only in a block size merged into one."""
    sizes: dict[tuple[str, str], list[str]] = {}
    for cause in causes:
        start, multiple, rest = cause.partition("a multiple of ")
        size = (re.match(r"\d*", rest) or [""])[0]
        sizes.setdefault((start + multiple, rest.removeprefix(size)), []).append(size)
    return [f"{start}{alternatives(each)}{rest}" for (start, rest), each in sizes.items()]


def alternatives(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if words[1:] else words[0]


def details(runner: Any, line: Verdict, options: argparse.Namespace) -> dict[str, str]:
    """The lines to print below a failure, as a mapping of labels to texts."""
    texts = {"error": line.message, "smallest batch": line.batch, "likely causes": "; ".join(merged(line.causes))}
    for operation in line.answered:
        texts[f"{options.backend}'s {operation} takes"] = features_of(options.backend, operation)
    return {name: text for name, text in texts.items() if text} | {"repeat": command(runner, line, options)}


def features_of(backend: str, operation: str) -> str:
    """The optional arguments that a backend supports for an operation, as text; empty if it lacks the operation."""
    try:
        return ", ".join(sorted(dispatch.load(operation, backend).FEATURES)) or "no optional argument"
    except BackendMissing:
        return ""


def command(runner: Any, line: Verdict, options: argparse.Namespace) -> str:
    """The command that repeats a check with the same batches."""
    words = ["ragged-attention", "conformance", "--backend", options.backend, "--framework", runner.framework]
    if options.device != "cpu":
        words += ["--device", options.device]
    if options.examples:
        words += ["--examples", str(options.examples)]
    if options.rounded_weights:
        words += ["--rounded-weights"]
    profile = os.environ.get("HYPOTHESIS_PROFILE")
    prefix = f"HYPOTHESIS_PROFILE={shlex.quote(profile)} " if profile and not options.examples else ""
    return prefix + shlex.join([*words, "--only", line.check])


def print_table(console: Console, title: str, lines: Sequence[Verdict]) -> None:
    """Print a table with a line for each verdict of `folded`, then the reasons for declined batches and the counts."""
    table = Table(title=title, title_justify="left")
    columns = (("check", "left"), ("judged", "right"), ("declined", "right"), ("seconds", "right"), ("result", "left"))
    for name, justify in columns:
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    colours = {"passed": "green", "declined": "yellow", "FAILED": "bold red"}
    for line in folded(lines):
        result = f"[{colours[line.result]}]{line.result}[/]"
        table.add_row(escape(line.check), str(line.taken), str(line.declined or ""), f"{line.seconds:.1f}", result)
    console.print(table)
    if reasons := commonest(lines):
        declined = sum(line.declined for line in lines)
        _say(console, f"{declined} batches were declined; the commonest reasons are: {'; '.join(reasons)}")
    for warning in untested(lines):
        _say(console, warning, style="bold yellow")
    counts = {result: sum(line.result == result for line in lines) for result in colours}
    console.print(", ".join(f"{count} {result}" for result, count in counts.items()), highlight=False)


def commonest(lines: Sequence[Verdict], most: int = 5) -> list[str]:
    """The most common reasons for declined batches, each with its count."""
    counts: collections.Counter[str] = collections.Counter()
    for line in lines:
        counts.update(dict(line.refusals))
    return [f"{text} ({count})" for text, count in counts.most_common(most)]


def untested(lines: Sequence[Verdict]) -> list[str]:
    """A warning for each kind of check whose checks were all declined, with the most common reason."""
    warnings = []
    for kind, what in KINDS.items():
        same = [line for line in lines if line.check.startswith(f"{kind}: ")]
        if same and all(line.result == "declined" for line in same):
            ((reason, _),) = collections.Counter(first_refusal(line.message) for line in same).most_common(1)
            checks, often = f"all {len(same)} checks were", ", most often with this reason"
            if len(same) == 1:
                checks, often = "the only check was", ""
            warnings.append(f"WARNING: no {what} was tested: {checks} declined{often}: {reason}")
    return warnings


def folded(lines: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts to print.

    All passed corners become one verdict. The checks that were declined for a reason become one verdict per reason. All
    other verdicts are unchanged.
    """
    reasons: dict[str, list[Verdict]] = {}
    for line in lines:
        if line.result == "declined":
            reasons.setdefault(first_refusal(line.message), []).append(line)
    verdicts = [line for line in lines if line.result != "declined"]
    for reason, same in reasons.items():
        name = f"{len(same)} checks: {reason}" if len(same) > 1 else f"{same[0].check}: {reason}"
        verdicts.append(Verdict(name, "declined", seconds=sum(line.seconds for line in same)))
    passed = [line for line in verdicts if line.check.startswith("corner: ") and line.result == "passed"]
    rest = [line for line in verdicts if line not in passed]
    if not passed:
        return rest
    name = f"corner: {len(passed)} named batches"
    return [Verdict(name, "passed", len(passed), sum(line.seconds for line in passed)), *rest]


def write_junit(path: str, judged: Mapping[str, Sequence[Verdict]]) -> None:
    """Write JUnit XML with one test suite for each runner; a declined check is a skipped test."""
    root = ElementTree.Element("testsuites")
    for name, lines in judged.items():
        counts = {result: sum(line.result == result for line in lines) for result in ("FAILED", "declined")}
        suite = ElementTree.SubElement(
            root, "testsuite", name=name, tests=str(len(lines)), failures=str(counts["FAILED"]), errors="0",
            skipped=str(counts["declined"]), time=f"{sum(line.seconds for line in lines):.3f}",
        )  # fmt: skip
        for line in lines:
            case = ElementTree.SubElement(
                suite, "testcase", classname=name, name=line.check, time=f"{line.seconds:.3f}"
            )
            if line.result == "declined":
                ElementTree.SubElement(case, "skipped", message=first_refusal(line.message))
            elif line.result == "FAILED":
                failure = ElementTree.SubElement(case, "failure", message="; ".join(merged(line.causes)) or UNKNOWN)
                failure.text = _without_control("\n".join(filter(None, (line.message, line.batch))))
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _without_control(text: str) -> str:
    """The text without characters that XML cannot represent."""
    return "".join(letter for letter in text if letter in "\n\t" or letter.isprintable())
