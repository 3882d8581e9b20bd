"""What a run has measured, as a table and a picture of docs/cpu.md, and in short in the README."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
PAGE, PICTURE, README = ROOT / "docs" / "cpu.md", ROOT / "docs" / "cpu.svg", ROOT / "README.md"
BEGIN, END = "<!-- written by `make bench-cpu` -->\n", "<!-- end of what is written -->\n"
PEERS = ("vllm", "openvino", "sdpa", "eager", "jax")
TITLES = {"vllm": "vLLM", "openvino": "OpenVINO", "sdpa": "SDPA", "eager": "eager", "jax": "ours from jax"}
IN_README = ("C1", "C2", "C4b", "C5", "C5b", "C7b", "C8", "C8b")


def write(record: Mapping[str, Any]) -> None:
    """The page's tables, the README's, the picture."""
    told = f"{record['cpu']}, torch {record['torch']}, {record['date']}, commit {record['commit']}."
    parts = [f"Measured on {told}\n"]
    for run in record["runs"]:
        rates = (
            f"a copy moves {run['bytes_per_second'] / 1e9:.1f} GB/s, torch multiplies {run['flops'] / 1e9:.0f} GFLOP/s"
        )
        parts += [f"\n### {_threads(run)}\n\nOn this machine {rates}.\n\n", table(run, long=True)]
    replace(PAGE, "".join(parts), BEGIN, END)
    last = record["runs"][-1]
    replace(README, f"{_threads(last)} of {told}\n\n" + table(last, long=False), BEGIN, END)
    PICTURE.write_text(picture(record["runs"]))


def _threads(run: Mapping[str, Any]) -> str:
    return "One thread" if run["threads"] == 1 else f"{run['threads']} threads"


def replace(file: Path, text: str, begin: str, end: str) -> None:
    """Write what stands between two marks of a page."""
    before, _, rest = file.read_text().partition(begin)
    file.write_text(f"{before}{begin}{text}{end}{rest.partition(end)[2]}")


def machine() -> str:
    """The CPU that is measured on, in words."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{name or platform.processor()}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} CPUs"


def table(run: Mapping[str, Any], *, long: bool) -> str:
    """In Markdown; the long one has every case and what share of the machine is used."""
    rows = [row for row in run["cases"] if long or row["name"] in IN_README]
    peers = [name for name in PEERS if any(name in row["ratios"] for row in rows) and (long or name != "jax")]
    shares = ("share_of_copy", "share_of_product") if long else ()
    heads = ["case", "ours, ms", *(f"{TITLES[name]} / ours" for name in peers)] + ["of copy", "of product"] * long
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        name = f"{row['name']}: {row['what']}" if long else row["what"]
        cells = [name, f"{row['milliseconds']['ours']:.1f}"]
        cells += [f"{row['ratios'][peer]:.2f}" if peer in row["ratios"] else "" for peer in peers]
        cells += [f"{100 * row[share]:.0f} %" if row[share] else "" for share in shares]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


# ---- the picture

STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24292f }
.quiet { fill: #57606a } .line { stroke: #57606a; stroke-dasharray: 3 3 }
.vllm { fill: #0969da } .openvino { fill: #8250df } .sdpa { fill: #bf8700 } .eager { fill: #8c959f }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .quiet { fill: #9198a1 } .line { stroke: #9198a1 } }
</style>"""
LEFT, SCALE, BAR, MOST = 330, 110, 9, 4.0


def picture(runs: Any) -> str:
    """Bars of how many times as long each peer takes, case by case, for the run with the most threads."""
    run, marks, y = runs[-1], [], 46
    for row in run["cases"]:
        peers = [name for name in PEERS if name in row["ratios"] and name != "jax"]
        marks.append(f'<text x="{LEFT - 10}" y="{y + 9}" text-anchor="end">{row["what"].replace("&", "&amp;")}</text>')
        for name in peers:
            value = row["ratios"][name]
            width = min(value, MOST) * SCALE
            marks.append(f'<rect class="{name}" x="{LEFT}" y="{y}" width="{width:.0f}" height="{BAR - 2}"/>')
            marks.append(f'<text class="quiet" x="{LEFT + width + 4:.0f}" y="{y + BAR - 1}">{value:.2f}</text>')
            y += BAR + 2
        y += 8
    legend = " ".join(
        f'<rect class="{name}" x="{LEFT + 100 * index}" y="14" width="10" height="10"/>'
        f'<text x="{LEFT + 100 * index + 15}" y="23">{TITLES[name]}</text>'
        for index, name in enumerate(PEERS[:-1])
    )
    line = f'<line class="line" x1="{LEFT + SCALE}" y1="34" x2="{LEFT + SCALE}" y2="{y}"/>'
    title = f"time of others over ours, {_threads(run).lower()}; right of the line ours is faster"
    size = f'width="{LEFT + MOST * SCALE + 60:.0f}" height="{y + 26}"'
    foot = f'<text class="quiet" x="{LEFT}" y="{y + 16}">{title}</text>'
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', STYLE, legend, line, *marks, foot, "</svg>\n"]
    )
