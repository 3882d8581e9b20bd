"""The tables of docs/cpu_measured.md, from the record of a run. docs/pictures/draw.py draws the pictures."""

import json
import os
import platform
import re
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "cpu_measured.md"
BEGIN, END = "<!-- written by `make bench-cpu` -->\n", "<!-- end of what is written -->\n"
OTHERS = ("vllm", "sglang", "openvino", "ggml", "zentorch", "sdpa", "eager")
PEERS = (*OTHERS, "named", "dense", "jax")
TITLES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "openvino": "OpenVINO",
    "ggml": "llama.cpp",
    "zentorch": "zentorch",
    "sdpa": "SDPA",
    "eager": "eager",
    "named": "ours by name",
    "dense": "ours to all keys",
    "jax": "ours from jax",
}


def save(record: Mapping[str, Any]) -> None:
    """Save a record in place of any older record of the same CPU, and write the page's tables."""
    for file, other in records().items():
        if other["cpu"] == record["cpu"]:
            file.unlink()
    kind = re.sub(r"[^a-z0-9]+", "_", record["cpu"].lower()).strip("_")
    (RESULTS / f"cpu_{record['date']}_{kind}.json").write_text(json.dumps(record, indent=1) + "\n")
    write(record)


def records() -> dict[Path, Any]:
    """The saved records by file, in order of date. Each kind of CPU has one record."""
    return {file: json.loads(file.read_text()) for file in sorted(RESULTS.glob("cpu_*.json"))}


def write(record: Mapping[str, Any]) -> None:
    """Write the page's tables: the summary of all saved records, and the details of `record`."""
    about = f"{record['cpu']}, torch {record['torch']}, {record['date']}, commit {record['commit']}."
    parts = [
        "All cases and all other implementations together, on each CPU that was measured:\n\n",
        summary(records().values()),
        f"\nThe rest of this section was measured on {about}\n",
    ]
    for run in record["runs"]:
        rates = (
            f"a copy moves {run['bytes_per_second'] / 1e9:.1f} GB/s, torch multiplies {run['flops'] / 1e9:.0f} GFLOP/s"
        )
        parts += [f"\n### {_threads(run)}\n\nOn this machine {rates}.\n\n", table(run)]
    replace(PAGE, "".join(parts), BEGIN, END)


def summary(every: Iterable[Mapping[str, Any]]) -> str:
    """A table of all records: the median ratio of peers' times to ours, and the lowest with its case and peer."""
    lines = ["| CPU | date | threads | median | lowest |", "|---|---|---|---|---|"]
    for record in every:
        for run in record["runs"]:
            ratios = [(ratio, row["name"], name) for row in run["cases"] for name, ratio in row["ratios"].items()]
            ratios = [item for item in ratios if item[2] in OTHERS]
            least, case, name = min(ratios)
            median = statistics.median(ratio for ratio, *_ in ratios)
            cells = record["cpu"], record["date"], run["threads"], f"{median:.2f}"
            lines.append(f"| {' | '.join(map(str, cells))} | {least:.2f}: {case} beside {TITLES[name]} |")
    return "\n".join(lines) + "\n"


def _threads(run: Mapping[str, Any]) -> str:
    return "One thread" if run["threads"] == 1 else f"{run['threads']} threads"


def replace(file: Path, text: str, begin: str, end: str) -> None:
    """Replace the text between two marks of a page."""
    before, _, rest = file.read_text().partition(begin)
    file.write_text(f"{before}{begin}{text}{end}{rest.partition(end)[2]}")


def machine(info: Path = Path("/proc/cpuinfo")) -> str:
    """A description of this machine's CPU. It includes the family, since several generations can share a name."""
    lines = info.read_text().splitlines() if info.exists() else []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = facts.get("model name", platform.processor())
    if "cpu family" in facts:
        name += f" (family {facts['cpu family']}, model {facts['model']})"
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} CPUs"


def table(run: Mapping[str, Any]) -> str:
    """A Markdown table of a run: times, ratios, and shares of the machine's rates."""
    rows = run["cases"]
    peers = [name for name in PEERS if any(name in row["ratios"] for row in rows)]
    heads = ["case", "ours, ms", *(f"{TITLES[name]} / ours" for name in peers), "of copy", "of product"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [f"{row['name']}: {row['what']}", f"{row['milliseconds']['ours']:.1f}"]
        cells += [f"{row['ratios'][peer]:.2f}" if peer in row["ratios"] else "" for peer in peers]
        cells += [f"{100 * row[share]:.0f} %" if row[share] else "" for share in ("share_of_copy", "share_of_product")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
