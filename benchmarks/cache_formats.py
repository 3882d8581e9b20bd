"""The cost of each K/V cache format: bytes, the error of attention, and the time of decode on this CPU.

    python -m benchmarks.cache_formats [--save] [--times] [--check]

The reference backend quantises the rows (`write_kv_pages`) and reads them (`ragged_paged_attention`). Queries and
results are float32, except that bfloat16 pages get bfloat16 queries. The error is the distance to float64 attention
over the original rows. `rms` is the error's root mean square, and `largest` its largest magnitude. Both are divided by
the root mean square of the result. bfloat16 pages show the error of a cache without quantisation. Formats without scale
pages have one scale for K and one for V: the largest magnitude divided by the largest number of the format.

There are three kinds of rows. The first kind is Gaussian. The second kind is Gaussian with outliers: 4 % of the columns
of K are 10 to 20 times as large, as in the keys of language models. The third kind comes from the demo's trained model,
whose heads of 16 columns are too narrow for blocks of 32.

`--save` writes benchmarks/results/cache_formats.json and the tables of docs/cache_formats.md. `--times` also times
decode by `numba` on one thread, relative to bfloat16. Without `--times`, the saved times are kept. `--check` only
compares the tables of the page with the saved results.
"""

import argparse
import dataclasses
import datetime
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.cpu.page import machine
from benchmarks.timing import on_cpu
from ragged_attention.calls.cache_formats import SCALED_FORMATS, KvFormat, element_of
from ragged_attention.demo.model import load_weights
from ragged_attention.demo.prompts import PROMPTS
from ragged_attention.demo.torch_model import GQA
from ragged_attention.torch import ragged_paged_attention, write_kv_pages

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "cache_formats.json", ROOT / "docs" / "cache_formats.md"
WIDTHS = (128, 64)  # columns per head
KEYS, QUERIES, HEADS, PAGE_SIZE = 512, 32, 2, 16
ROUNDS, AGREEMENT = 60, 0.1  # rounds per timing, and the largest difference allowed between two runs
BASE = "bfloat16"
DECODED = (1024, 8192)  # keys per sequence in the timed decodes: 32 MB of bfloat16, and more than a CPU's caches hold
# The largest number of each dtype that pages without scale pages can have.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float8_e4m3fnuz": 240.0}
TITLES = {"gaussian": "Gaussian", "outliers": "outliers in K", "demo": "the demo's model"}

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q [T, H, D], k and v [N, K, D]


@dataclasses.dataclass(frozen=True)
class Format:
    """A format to measure. With `form`, rows have scales. Otherwise pages have the dtype `name`, and no scale pages."""

    name: str
    form: KvFormat | None = None

    @property
    def element(self) -> torch.dtype:
        return getattr(torch, self.name if self.form is None else element_of(self.form))

    def row_bytes(self, width: int) -> float:
        """The bytes of one row of keys, including its scales."""
        if self.form is None:
            return width * self.element.itemsize
        scales = self.form.scales_of_row(width) * getattr(torch, self.form.scales).itemsize
        return width // self.form.columns_per_element * self.element.itemsize + scales

    def fits(self, width: int) -> bool:
        return self.form is None or width % max(self.form.group, 1) == 0

    def empty(self, width: int, pages: int, heads: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Pages [P, G, K, W] and scale pages [P, G, K, n], filled with zeros."""
        columns = 1 if self.form is None else self.form.columns_per_element
        shape = (pages, PAGE_SIZE, heads)
        stored = torch.zeros(*shape, width // columns, dtype=torch.float32).to(self.element)
        if self.form is None:
            return stored, None
        count = self.form.scales_of_row(width)
        return stored, torch.zeros(*shape, count).to(getattr(torch, self.form.scales))

    def scale_of(self, rows: torch.Tensor) -> float | None:
        """The scale that all of `rows` share, or None if the format needs no such scale."""
        most = float(rows.abs().max())
        if self.form is None:
            return most / LARGEST[self.name] if self.name in LARGEST else None
        # For nvfp4, the largest block scale becomes the largest e4m3 number.
        return most / (6 * 448) if self.form.scales == "float8_e4m3fn" else None


def _titled(form: KvFormat) -> str:
    zeros = {"": "", "mantissa": ", zero in the scale", "stored": f", zero stored, {form.scales}"}
    return form.name + zeros[form.zero]


FORMATS = (
    *(Format(name) for name in (BASE, *LARGEST)),
    *(Format(_titled(form), form) for form in SCALED_FORMATS),
)


# ---- rows


def gaussian(width: int) -> Rows:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(QUERIES, 2 * HEADS, width, generator=generator)
    k, v = (torch.randn(KEYS, HEADS, width, generator=generator) for _ in range(2))
    return q, k, v


def with_outliers(width: int) -> Rows:
    """Gaussian rows in which a few columns of K are much larger.

    Smaller queries keep the weights spread over many keys.
    """
    q, k, v = gaussian(width)
    generator = torch.Generator().manual_seed(1)
    factors = torch.ones(HEADS, width)
    for head in factors:
        outliers = torch.randperm(width, generator=generator)[: max(width // 25, 2)]
        head[outliers] = 10 + 10 * torch.rand(len(outliers), generator=generator)
    k = k * factors
    return q / factors.square().mean().sqrt(), k, v


def of_the_demo() -> Iterator[Rows]:
    """The queries, keys and values of each layer of the demo's model while it reads its prompts."""
    weights = {name: torch.from_numpy(value) for name, value in load_weights("gqa").items()}
    text = "\n".join(prompt.text for prompt in PROMPTS).encode()[:KEYS]
    positions = torch.arange(len(text), dtype=torch.int32)
    layers: list[Rows] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        layers.append((q, k, v))
        return _attended(q, k, v).to(q.dtype)

    with torch.no_grad():
        GQA.forward_by_heads(weights, torch.tensor(list(text)), positions, attend)
    yield from layers


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention in float64. The last query is at the position of the last key."""
    q, k, v = (rows.double() for rows in (q, k, v))
    grouped = q.unflatten(1, (k.shape[1], -1))
    logits = torch.einsum("tkgd,nkd->tkgn", grouped, k) * q.shape[2] ** -0.5
    seen = torch.arange(len(k)) <= torch.arange(len(k) - len(q), len(k))[:, None]
    weights = logits.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("tkgn,nkd->tkgd", weights, v).flatten(1, 2)


def datasets() -> dict[str, list[Rows]]:
    made = {"gaussian": gaussian, "outliers": with_outliers}
    found = {f"{name} {width}": [make(width)] for name, make in made.items() for width in WIDTHS}
    return found | {"demo 16": list(of_the_demo())}


# ---- errors


def stored(form: Format, k: torch.Tensor, v: torch.Tensor, backend: str) -> dict[str, Any]:
    """Arguments for attention over the rows, which are stored in pages of the format."""
    count, heads, width = k.shape
    pages = -(-count // PAGE_SIZE)
    sides = [form.empty(width, pages, heads) for _ in range(2)]
    scales: dict[str, Any] = {"k_scale": form.scale_of(k), "v_scale": form.scale_of(v)}
    if form.form is not None:
        scales |= {"k_scale_pages": sides[0][1], "v_scale_pages": sides[1][1]}
    kv_pages = (sides[0][0], sides[1][0])
    write_kv_pages(k, v, kv_pages, torch.arange(count), **scales, backend=backend)
    tables = {"kv_lens": torch.tensor([count]).int(), "page_indices": torch.arange(pages).int()[None]}
    return {"kv_pages": kv_pages, **scales, **tables}


def errors(form: Format, rows: Sequence[Rows]) -> dict[str, float] | None:
    """The error of attention over the format's pages, relative to the root mean square of the exact result."""
    if not form.fits(rows[0][0].shape[2]):
        return None
    distances, results = [], []
    for q, k, v in rows:
        edges = torch.tensor([0, len(q)]).int()
        dtype = torch.bfloat16 if form.name == BASE else torch.float32
        found = ragged_paged_attention(
            q.to(dtype), **stored(form, k.to(dtype), v.to(dtype), "reference"), cu_q_lens=edges,
            out_dtype=torch.float32, backend="reference",
        )  # fmt: skip
        # Measure only the error of the cache: exact attention gets the queries rounded to bfloat16, too.
        want = _attended(q.to(dtype), k, v)
        distances.append((found.double() - want).flatten())
        results.append(want.flatten())
    distance, result = torch.cat(distances), torch.cat(results)
    rms = result.square().mean().sqrt()
    return {"rms": float(distance.square().mean().sqrt() / rms), "largest": float(distance.abs().max() / rms)}


# ---- times


def decode(form: Format, keys: int) -> Callable[[], torch.Tensor]:
    """A decode step of 8 sequences with `keys` keys each: 32 query heads over 8 KV heads of 128 columns."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(8 * keys, 8, 128, generator=generator).bfloat16() for _ in range(2))
    arguments = stored(form, k, v, "numba")
    arguments["page_indices"] = arguments["page_indices"].view(8, -1)
    arguments["kv_lens"] = torch.full((8,), keys, dtype=torch.int32)
    q = torch.randn(8, 32, 128, generator=generator).bfloat16()
    edges = torch.arange(9, dtype=torch.int32)
    return lambda: ragged_paged_attention(q, **arguments, cu_q_lens=edges, max_q_len=1, backend="numba")


def times(forms: Sequence[Format]) -> dict[str, Any]:
    """The least times relative to bfloat16, by number of keys. No times are returned if two runs differ too much."""
    torch.set_num_threads(1)
    by_length = {str(keys): ratios(forms, keys) for keys in DECODED}
    difference = max(difference for _, difference in by_length.values())
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": machine(),
        "torch": torch.__version__,
        "apart": difference,
        "over_bfloat16": {keys: relative for keys, (relative, _) in by_length.items()}
        if difference <= AGREEMENT
        else {},
    }


def ratios(forms: Sequence[Format], keys: int) -> tuple[dict[str, float], float]:
    """The least time of each format relative to bfloat16, and the largest difference between two runs."""
    calls = {form.name: decode(form, keys) for form in forms}

    def run() -> dict[str, float]:
        least = {name: min(timing.samples) for name, timing in on_cpu(calls, rounds=ROUNDS).items()}
        return {name: seconds / least[BASE] for name, seconds in least.items()}

    runs = run(), run()
    best = {name: min(each[name] for each in runs) for name in calls}
    return best, max(abs(runs[0][name] - runs[1][name]) / best[name] for name in calls)


# ---- tables


def measured(console: Console) -> dict[str, Any]:
    data = datasets()
    formats = []
    for form in FORMATS:
        with console.status(form.name):
            found = {name: errors(form, rows) for name, rows in data.items()}
        formats.append({
            "name": form.name,
            "bytes": {str(width): 2 * form.row_bytes(width) for width in WIDTHS},
            "errors": found,
        })  # fmt: skip
    return {"formats": formats}


def saved_times() -> dict[str, Any] | None:
    """The times that the last run with `--times` saved, or None."""
    return json.loads(RESULTS.read_text())["times"] if RESULTS.exists() else None


def tables(record: Mapping[str, Any]) -> dict[str, str]:
    """The generated tables of the page. A key is the name in the marks around its table."""
    return {"bytes and errors": _errors_table(record), "times": _times_table(record)}


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %" if value < 0.995 else f"{100 * value:.0f} %"


def _errors_table(record: Mapping[str, Any]) -> str:
    heads = ["format", *(f"bytes, D = {width}" for width in WIDTHS)]
    names = [f"{name} {width}" for name, width in itertools.product(("gaussian", "outliers"), WIDTHS)] + ["demo 16"]
    heads += [f"{TITLES[name.partition(' ')[0]]}, D = {name.partition(' ')[2]}" for name in names]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in record["formats"]:
        cells = [f"`{row['name']}`" if "," not in row["name"] else "`{}`,{}".format(*row["name"].split(",", 1))]
        cells += [f"{row['bytes'][str(width)]:g}" for width in WIDTHS]
        for name in names:
            found = row["errors"][name]
            cells.append("" if found is None else f"{_percent(found['rms'])} ({_percent(found['largest'])})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _times_table(record: Mapping[str, Any]) -> str:
    times = record["times"]
    if times is None or not times["over_bfloat16"]:
        difference = "" if times is None else f": two runs differed by {100 * times['apart']:.0f} %"
        return (
            f'No times are kept{difference}. On an idle machine `make bench-formats ARGS="--save --times"` writes\n'
            "them here, if two runs, one after the other, agree within 10 %.\n"
        )
    columns = times["over_bfloat16"].values()
    lines = [
        f"Measured on one thread of {times['cpu']}, torch {times['torch']}, {times['date']}.\n",
        "| format | " + " | ".join(f"8 x {int(keys) // 1024}k keys" for keys in times["over_bfloat16"]) + " |",
        "|---" * (1 + len(times["over_bfloat16"])) + "|",
    ]
    for name, *of_keys in zip(next(iter(columns)), *(column.values() for column in columns), strict=True):
        lines.append(f"| {name} | " + " | ".join(f"{ratio:.2f}" for ratio in of_keys) + " |")
    return "\n".join(lines) + "\n"


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: written by `make bench-formats` -->\n", f"<!-- end of {name} -->\n"


def written(page: str, record: Mapping[str, Any]) -> str:
    """The page with new tables, which show the record."""
    for name, table in tables(record).items():
        begin, end = marks(name)
        before, found, rest = page.partition(begin)
        if not found or end not in rest:
            raise ValueError(f"expected the page to have the lines {begin.strip()} and {end.strip()}")
        page = f"{before}{begin}{table}{end}{rest.partition(end)[2]}"
    return page


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write the results and their tables")
    parser.add_argument("--times", action="store_true", help="also time decode on this CPU")
    parser.add_argument("--check", action="store_true", help="only compare the page with the saved results")
    options = parser.parse_args(argv)
    console = Console(width=200)
    if options.check:
        current = PAGE.read_text() == written(PAGE.read_text(), json.loads(RESULTS.read_text()))
        console.print("current" if current else f"{PAGE.name} is not current: make bench-formats ARGS=--save")
        return int(not current)
    record = measured(console) | {"times": times(FORMATS) if options.times else saved_times()}
    console.print("\n".join(tables(record).values()), soft_wrap=True, markup=False)
    if options.save:
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")
        PAGE.write_text(written(PAGE.read_text(), record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
