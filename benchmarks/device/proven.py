"""What a run on a device has proven of the CUDA kernels, as the files by which they become the default there.

    python -m benchmarks.device.proven REPORT [--folder FOLDER]

REPORT is a JSON file of `python -m benchmarks.device`. A kind of call (operation, heads, widths, format, sizes: the key
that the operation's module gives it) is proven on the report's device if the shipped suite passed there on the CUDA
kernels, and if each of the report's cases of that kind took them less time than Triton's. Writes
kernels_cuda/proven/<operation>.json, {device: {key: times}}, which `why_not_by_default` reads.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases.catalogue import CASES
from ragged_attention import kernels_cuda
from ragged_attention.samples import device_of

FOLDER = Path(kernels_cuda.__file__).parent / "proven"
OURS, THEIRS, ARCH = "cuda", "triton", "sm_90"


def proven(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By operation and key: the times of the slowest case beside Triton's, the case, the commit and the date."""
    suite = {key: row for key, row in report.get("conformance", {}).items() if key.endswith(f"-{OURS}")}
    if not suite or any(row["result"] != "passed" for row in suite.values()):
        return {}
    found: dict[str, dict[str, Any]] = {}
    lost: set[tuple[str, str]] = set()
    for name, rows in report.get("bench", {}).items():
        seconds = {row["who"]: row.get("seconds") for row in rows}
        ours, theirs = seconds.get(OURS), seconds.get(THEIRS)
        if name not in CASES or ours is None or theirs is None:
            continue
        call = CASES[name].attention_call(device_of("torch", ARCH))
        module = importlib.import_module(f"{kernels_cuda.__name__}.{call.OPERATION}")
        key = module.tuning_key(call)
        if ours >= theirs:
            lost.add((call.OPERATION, key))
        entry = {"us": 1e6 * ours, "triton_us": 1e6 * theirs, "case": name}
        entry |= {"commit": report["commit"], "date": report["date"]}
        before = found.setdefault(call.OPERATION, {}).get(key)
        if before is None or entry["us"] / entry["triton_us"] > before["us"] / before["triton_us"]:
            found[call.OPERATION][key] = entry
    for operation, key in lost:
        del found[operation][key]
    return {operation: entries for operation, entries in found.items() if entries}


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if anything is proven, 1 if nothing is."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device.proven", description=__doc__)
    parser.add_argument("report", type=Path, help="a JSON file of python -m benchmarks.device")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the files are kept")
    options = parser.parse_args(arguments)
    report = json.loads(options.report.read_text())
    found = proven(report)
    for operation, entries in found.items():
        path = options.folder / f"{operation}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        devices = json.loads(path.read_text()) if path.is_file() else {}
        devices[report["device"]] = entries
        path.write_text(json.dumps(devices, indent=1, sort_keys=True) + "\n")
        print(f"{path}: {len(entries)} kinds of calls")
    if not found:
        print("nothing is proven: expected the suite passed on cuda, and cases in which it is faster than triton")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
