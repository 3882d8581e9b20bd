"""Run every model family in transformers, as a tiny random model, with our attention and with transformers' own.

    python -m benchmarks.transformers_models [FAMILY ...] [--kind seq2seq] [--shard 3/10] [--dtype bfloat16] [--save]

Each family runs in a separate process. Its record is appended to build/transformers_models.jsonl, one line per
family. The exit status is 1 if a result differs from that of transformers' eager attention, or if ours fails where
eager works. With --save the rows of docs/transformers_models.md are rewritten for the families that ran. With --check
the exit status is also 1 if one of these rows would change.
"""

import argparse
import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.shards import in_shard
from benchmarks.transformers_models import page
from benchmarks.transformers_models.building import KINDS, build
from benchmarks.transformers_models.checks import compare_all
from benchmarks.transformers_models.images import NoForm, image_inputs
from benchmarks.transformers_models.outcomes import brief
from benchmarks.transformers_models.processes import run_each
from benchmarks.transformers_models.running import Inputs, generate, padded_training
from benchmarks.transformers_models.verdicts import is_wrong, verdict
from benchmarks.transformers_models.watching import watching
from ragged_attention.integrations import transformers as ragged
from ragged_attention.integrations.transformers import _calls

RAW = page.ROOT / "build" / "transformers_models.jsonl"
Entry = tuple[str, str]  # a kind and a family


def judge(entry: Entry, dtype: torch.dtype = torch.float32) -> Iterator[dict[str, Any]]:
    """Yield the findings about a family in parts, which are merged into its record."""
    kind, family = entry
    try:
        exact, another = build(family, kind), build(family, kind).to(dtype)
        model = exact if dtype == torch.float32 else build(family, kind).to(dtype)
    except Exception as error:
        yield {"unbuilt": brief(error)}
        return
    images = None
    if kind == "images":
        try:
            images = image_inputs(exact)
        except NoForm as error:
            yield {"text_only": str(error)}
    yield watched(model, images)
    _calls.calls.clear()
    checks: dict[str, list[tuple[str, str]]] = {}
    for column, outcome in compare_all(model, exact, another, kind, images):
        checks.setdefault(column, []).append((outcome.word, outcome.why))
        yield {"checks": checks, "calls": [list(call) for call in _calls.calls]}


def watched(model: Any, images: Inputs | None) -> dict[str, Any]:
    """The kinds of attention that a model has, and its classes that compute attention themselves."""
    with watching(model) as attentions:
        for inputs in (None, images) if images else (None,):
            with contextlib.suppress(Exception):  # failures are left to the comparisons, which report them
                generate(model, ragged.NAME, inputs)
    return {"kinds": sorted(attentions.kinds), "own": sorted(attentions.own)}


def entries(options: argparse.Namespace) -> list[Entry]:
    """The requested families, with their kinds, in transformers' order."""
    known = [(kind, family) for kind, (_, names) in KINDS.items() for family in names]
    unknown = set(options.families) - {family for _, family in known}
    if unknown:
        raise SystemExit(f"expected families of transformers, got {', '.join(sorted(unknown))}")
    return [
        (kind, family)
        for kind, family in known
        if options.kind in (None, kind)
        and (not options.families or family in options.families)
        and (not options.shard or in_shard(f"{kind}/{family}", options.shard))
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="transformers_models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="model types; default: all")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument(
        "--shard", metavar="WHICH/COUNT", help="only one shard of the families; WHICH is a number or any text"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="processes at a time (default: the number of CPUs)"
    )
    parser.add_argument("--limit", type=float, default=240, help="time limit for a family, in seconds")
    parser.add_argument("--save", action="store_true", help="write the page's rows")
    parser.add_argument("--check", action="store_true", help="compare with the page's rows")
    options = parser.parse_args(argv)
    if options.dtype != "float32" and (options.save or options.check):
        parser.error("expected --dtype float32 with --save and --check, which use the page's float32 rows")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # a forked process has no copies of torch's threads
    ragged.register()
    warm_up()
    dtype = getattr(torch, options.dtype)
    RAW.parent.mkdir(exist_ok=True)
    records = []
    for (kind, family), record in run_each(lambda e: judge(e, dtype), entries(options), options.jobs, options.limit):
        record = {"kind": kind, "family": family} | record
        records.append(record)
        print(f"{kind}/{family} ({record['seconds']} s): {verdict(record)}", flush=True)
        with RAW.open("a") as file:
            file.write(json.dumps(record) + "\n")
    wrong = [record for record in records if is_wrong(record)]
    print(page.counted(map(verdict, records)))
    if options.save:
        page.write(records)
    changed = page.changed(records) if options.check else []
    for line in changed:
        print(line, file=sys.stderr)
    return int(bool(wrong or changed))


def warm_up() -> None:
    """Compile once, in this process, the kernels that all forked processes need."""
    model = build("llama", "causal")
    for run in (generate, padded_training):
        run(model, ragged.NAME)


if __name__ == "__main__":
    raise SystemExit(main())
