"""Draw the pictures of the documentation from the code and the tables that they show.

    python docs/pictures/draw.py

This rewrites every SVG in this folder. A test checks that the stored files equal what the script would write.
"""

import dataclasses
import functools
import importlib
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ragged_attention import dispatch
from ragged_attention import key_ranges as ranges
from ragged_attention.calls import CACHE_FORMATS, CacheFormat
from ragged_attention.calls.cache_formats import SCALED_FORMATS, UNSCALED_FORMATS, KvFormat
from ragged_attention.tools import drawing, schedule, view
from ragged_attention.tools.samples import Sample

FOLDER = Path(__file__).resolve().parent
DOCS = FOLDER.parent
LEFT, WIDTH = drawing.LEFT, drawing.WIDTH


def batch_of(q_lens: tuple[int, ...], kv_lens: tuple[int, ...], **features: Any) -> view.Batch:
    """A batch of an 8B model in bfloat16 on an H200, with sequences of these lengths."""
    shapes = {"num_tokens": sum(q_lens), "max_num_seqs": len(q_lens), "max_len": max(kv_lens), "max_q_len": max(q_lens)}
    sample = Sample(**shapes, **features)
    return view.Batch(q_lens=q_lens, kv_lens=kv_lens, sample=sample, device=view.device_named("h200"))


def pages() -> drawing.Drawing:
    """A ragged batch: one decode, a speculative decode, a chunk of a prompt, and a new prompt."""
    batch = batch_of((1, 4, 24, 13), (90, 37, 64, 13), page_size=16)
    size = batch.sample.page_size
    drawn = drawing.Drawing(
        "A ragged batch and its pages",
        f"{len(batch.q_lens)} sequences of different lengths in one call. The cache of each sequence is in pages of "
        f"{size} slots; the last page may not be full.",
    )
    y = drawing.draw_pages(drawn, 20, batch.lengths, size) + 16
    slots, used = sum(batch.pages) * size, sum(batch.kv_lens)
    padded = len(batch.kv_lens) * max(batch.pages) * size
    text = f"{used} keys in {slots} slots; rows as long as the longest sequence would need {padded} slots"
    drawn.text(LEFT, y, text, "small quiet")
    return drawn


def visited_keys() -> drawing.Drawing:
    """The blocks of keys that the programs of one sequence visit, according to the kernels' plan."""
    cases = {
        "causal: 512 new tokens after 1536 cached tokens": batch_of((512,), (2048,)),
        "the same call with a sliding window of 1100 keys": batch_of((512,), (2048,), sliding_window=1100),
        "a draft tree of 64 tokens with a mask, after 1400 cached tokens": batch_of((64,), (1464,), draft=64),
    }
    drawn = drawing.Drawing(
        "Which keys a program visits",
        "Three calls of ragged_paged_attention on an H200. A row is a program, which computes a block of query tokens. "
        "Blocks of keys that all of these tokens see need no mask, blocks at the edges do, the others are not visited.",
    )
    y = 20.0
    for name, batch in cases.items():
        launches = batch.launches()
        programs = [program for launch in launches for program in launch.programs]
        drawn.text(10, y, name, "head")
        y = drawing.draw_keys(drawn, y + 20, programs, batch.kv_lens[0]) + 22
    return drawn


def masks() -> drawing.Drawing:
    """The keys that queries see under masks from the helpers of `key_ranges`, one square for each mask."""
    size = 20
    prompt = np.array([0, size], np.int32), np.array([size], np.int32), size  # a prompt without cached tokens
    branches = [-1, *range(7), 5, 8, 9, 5, 11, 12, 10, 14, 15, 10, 17, 18]
    cases = {
        "causal": ranges.causal_ranges(*prompt),
        "sliding window of 6": ranges.causal_ranges(*prompt, sliding_window=6),
        "chunks of 8": ranges.chunked_ranges(*prompt, chunk=8),
        "blocks of 4": ranges.block_causal_ranges(*prompt, block=4),
        "images at 3-8 and 11-17": ranges.span_ranges(*prompt, spans=np.array([[[3, 8], [11, 17]]], np.int32)),
        "prefix of 4, window of 5": ranges.prefix_window_ranges(*prompt, prefix=4, sliding_window=5),
        "window on both sides": ranges.window_ranges(*prompt, left=3, right=3),
        "a prefix tree": ranges.tree_ranges(np.array(branches, np.int32)),
    }
    cell, columns = 8, 4
    drawn = drawing.Drawing(
        "Masks as ranges of keys",
        f"Eight masks of {size} queries (rows) over {size} keys (columns). The colours show the keys that a query sees "
        "through its first, second, third and fourth range.",
    )
    step = (LEFT + WIDTH) / columns
    for index, (name, mask) in enumerate(cases.items()):
        row, column = divmod(index, columns)
        x, y = 10 + column * step, 20.0 + row * (size * cell + 42)
        drawn.text(x, y, name, "head")
        drawn.boxes("faint", [(x, y + 8, size * cell, size * cell)])
        for kind, edges in zip(("one", "two", "three", "four"), np.moveaxis(mask, 1, 0), strict=False):
            boxes = [(begin, query, end - begin) for query, (begin, end) in enumerate(edges) if begin < end]
            drawn.boxes(kind, [(x + a * cell, y + 8 + q * cell, n * cell, cell - 1) for a, q, n in boxes])
    return drawn


def selections() -> drawing.Drawing:
    """The keys that sparse attention reads, selected by the reference from random scores: a square per kind of list."""
    tokens, cell, block = 32, 6, 4
    rng = np.random.default_rng(5)
    query, key = np.arange(tokens)[:, None], np.arange(tokens)
    near = 1.5 * np.exp((key - query) / 6)  # recent keys have larger scores, as in models
    scores = np.where(key <= query, rng.standard_normal((tokens, tokens)) + near, -np.inf)
    top_k, top_k_blocks = (
        getattr(importlib.import_module(f"ragged_attention.reference.{name}"), name)
        for name in ("top_k_indices", "top_k_blocks")
    )

    def cells(lists: np.ndarray, width: int) -> list[tuple[int, int, int]]:
        """The first key, the query and the number of visible keys for each entry of the lists."""
        boxes = [(entry * width, row, width) for row, entries in enumerate(lists) for entry in entries if entry >= 0]
        return [(first, row, min(first + count, row + 1) - first) for first, row, count in boxes]

    block_scores = scores.reshape(tokens, 1, -1, block).max(axis=3)
    forced = top_k_blocks(np.where(np.isinf(block_scores), -np.inf, 0), 2, init_blocks=1, local_blocks=1)
    blocks = top_k_blocks(block_scores, 4, init_blocks=1, local_blocks=1)
    is_complete = (key[: tokens // block] + 1) * block <= query + 1  # the query is not before the group's last key
    rows = np.where(is_complete, block_scores[:, 0], -np.inf)
    window = [(max(row - 5, 0), row, min(row + 1, 6)) for row in range(tokens)]
    squares: dict[str, list[tuple[str, list[tuple[int, int, int]]]]] = {
        "indexer_topk: 6 keys": [("one", cells(top_k(scores, 6), 1))],
        "select_blocks: 4 blocks": [("one", cells(blocks[:, 0], block)), ("two", cells(forced[:, 0], block))],
        "DeepSeek-V4: a window, 3 rows": [("three", cells(top_k(rows, 3), block)), ("two", window)],
    }
    drawn = drawing.Drawing(
        "Keys that sparse attention reads",
        f"Three kinds of lists for {tokens} queries (rows) over {tokens} keys (columns): the best keys, the best "
        "blocks of keys with the first block and the query's own, and a window with compressed rows of 4 keys.",
    )
    meanings = [
        ("one", "selected by score"),
        ("two", "always selected"),
        ("three", f"a row that stands for {block} keys"),
    ]
    drawn.legend(10, 20, [*meanings, ("faint", "not read")])
    step = (LEFT + WIDTH + 30) / len(squares)
    for column, (name, kinds) in enumerate(squares.items()):
        x, y = 10 + column * step, 56
        drawn.text(x, y - 8, name, "head")
        drawn.boxes("faint", [(x, y, tokens * cell, tokens * cell)])
        for kind, boxes in kinds:
            drawn.boxes(kind, [(x + a * cell, y + q * cell, n * cell - 0.5, cell - 0.5) for a, q, n in boxes])
    return drawn


def with_one_count(launch: schedule.Launch, count: int, block: int) -> schedule.Launch:
    """The launch with `count` KV splits for each sequence, whatever its length."""
    programs: list[schedule.Program] = []
    for seq, group in itertools.groupby(launch.programs, key=lambda program: program.seq):
        stop = max(program.span[1] for program in group)
        length = math.ceil(stop / block / count) * block
        for start in range(0, stop, length):
            visits = (schedule.Visit(start, min(start + length, stop), block, False),)
            programs.append(schedule.Program(len(programs), seq, (0, 0), visits))
    return dataclasses.replace(launch, programs=tuple(programs))


def splits() -> drawing.Drawing:
    """Decode of one sequence of 128k keys and 63 of 1k keys: KV splits of equal length, and an equal number of them."""
    batch = batch_of((1,) * 64, (1024,) * 63 + (131072,))
    lanes = batch.device.num_multiprocessors
    tile = dispatch.load(batch.operation, "triton").heuristic(batch.call())
    ours = next(launch for launch in batch.launches() if launch.programs)
    count = math.ceil(tile.num_splits / len(batch.kv_lens))
    fixed = with_one_count(ours, count, tile.split_block_kv)
    ends = [max(turn.stop for turn in schedule.timeline(launch, lanes)) for launch in (fixed, ours)]
    drawn = drawing.Drawing(
        "How a skewed batch fills a GPU",
        f"Decode of 63 sequences of 1k keys and one sequence of 128k keys on {lanes} multiprocessors. Time is counted "
        f"in keys. With {count} KV splits for every sequence, decode ends after {ends[0]} keys; with KV splits of "
        f"equal length, it ends after {ends[1]} keys.",
    )
    y = 20.0
    for name, launch in ((f"{count} KV splits for every sequence", fixed), ("KV splits of equal length", ours)):
        share = schedule.filled(schedule.timeline(launch, lanes), lanes)
        drawn.text(10, y, f"{name}: {launch.working} programs, {lanes} multiprocessors, {share:.0%} busy", "head")
        drawn.legend(LEFT, y + 18, [("one", "63 sequences of 1k keys"), ("two", "one sequence of 128k keys")])
        y = drawing.draw_timeline(drawn, y + 28, launch, lanes, seq=63, end=max(ends)) + 24
    return drawn


def roles(layout: CacheFormat, tokens: int) -> list[tuple[int, str, int]]:
    """The token and the kind of each byte of a page, and the number of columns of a row that depend on the byte.

    They are found by an experiment: one byte after another is changed, and `dequantize_mla_cache` shows which columns
    change.
    """
    quantize, dequantize = (
        getattr(importlib.import_module(f"ragged_attention.reference.{name}"), name)
        for name in ("quantize_mla_cache", "dequantize_mla_cache")
    )
    signs = np.random.default_rng(0).choice((-1.0, 1.0), (1, tokens, 1, layout.width))
    rows = signs * np.linspace(1, 1.5, layout.width)  # no zeros, because a change of the scale would not change them
    page = quantize(rows, layout.name, cache_layout=layout.layout)
    before = dequantize(page, layout.name, cache_layout=layout.layout)
    byte_roles: list[tuple[int, str, int]] = []
    for index in range(page.size):
        changed = page.copy()
        changed.reshape(-1)[index] ^= 1
        after = dequantize(changed, layout.name, cache_layout=layout.layout)
        _, token, _, columns = np.nonzero(after != before)
        kind = "values" if len(columns) == 1 else "scales"
        if not len(columns):
            byte_roles.append((byte_roles[-1][0], "padding", 0))
        else:
            byte_roles.append((int(token[0]), "rotary" if columns[0] >= layout.values else kind, len(columns)))
    return byte_roles


def runs_of(byte_roles: list[tuple[int, str, int]]) -> Iterator[tuple[int, int, int, str, int]]:
    """Yield runs of like bytes: start, stop, token, kind, and the number of columns that depend on each byte."""
    start = 0
    for (token, kind, columns), group in itertools.groupby(byte_roles):
        stop = start + len(list(group))
        yield start, stop, token, kind, columns
        start = stop


def explained(length: int, kind: str, columns: int, layout: CacheFormat) -> str:
    codes, scales = (name.removeprefix("float8_").removeprefix("float4_") for name in (layout.codes, layout.scales))
    codes, scales = (name.removesuffix("fnu").removesuffix("fn") for name in (codes, scales))
    if kind == "scales":
        return f"{length * layout.num_groups // layout.scale_bytes} scales of {columns} columns, {scales}"
    if kind == "padding":
        return "padding"
    if kind == "rotary":
        return f"{length // 2} rotary columns, bfloat16"
    each = layout.values // layout.value_bytes
    return f"{length * each} {codes} values" + (", two to a byte" if each == 2 else "")


KINDS = {"values": "one", "scales": "two", "rotary": "three", "padding": "grey"}


def mla_rows() -> drawing.Drawing:
    """The formats of a latent cache, byte by byte."""
    drawn = drawing.Drawing(
        "Formats of a latent cache, byte by byte",
        "A row of a plain cache in bfloat16, and a page of two tokens in each quantised format and layout: values, "
        "scales, rotary columns and padding, with their offsets.",
    )
    v32 = CACHE_FORMATS["fp8_v32"]
    scale = WIDTH / (2 * v32.token_bytes)
    drawn.legend(LEFT, 20, [(kind, name) for name, kind in KINDS.items()])
    drawn.text(LEFT - 8, 45, f"plain, bfloat16: {2 * v32.width} bytes", "small", "end")
    drawn.boxes("one", [(LEFT, 34, 2 * v32.values * scale, 14)])
    drawn.boxes("three", [(LEFT + 2 * v32.values * scale, 34, 2 * v32.rotary * scale, 14)])
    drawn.text(LEFT, 61, f"0 - {2 * v32.values - 1}: {v32.values} values", "small quiet")
    drawn.text(LEFT, 73, f"{2 * v32.values} - {2 * v32.width - 1}: {v32.rotary} rotary columns", "small quiet")
    y = 92.0
    laid_out = [dataclasses.replace(of, layout=name) for of in CACHE_FORMATS.values() for name in of.layouts]
    for layout in laid_out:
        runs = list(runs_of(roles(layout, tokens=2)))
        name = layout.name if len(layout.layouts) == 1 else f"{layout.name}, {layout.layout}"
        drawn.text(LEFT - 8, y + 11, f"{name}: 2 x {layout.token_bytes} bytes", "small", "end")
        for kind, colour in KINDS.items():
            boxes = [
                (LEFT + start * scale, y, (stop - start) * scale - 0.4, 14)
                for start, stop, _, run_kind, _ in runs
                if run_kind == kind
            ]
            drawn.boxes(colour, boxes)
        y += 27
        for start, stop, token, kind, columns in runs:
            text = f"{start} - {stop - 1}" if stop - start > 1 else f"{start}"
            what = explained(stop - start, kind, columns, layout)
            drawn.text(LEFT, y, f"{text}: token {token}, {what}", "small quiet")
            y += 12
        y += 8
    return drawn


def kv_parts(form: KvFormat, width: int) -> list[tuple[str, int]]:
    """The parts of a row of keys or values, codes first: the kind and the number of bytes of each part."""
    parts = [("codes", width // form.columns_per_element * ITEM_BYTES.get(form.codes, 1))]
    if not form.scaled:
        return parts
    scale_bytes = ITEM_BYTES.get(form.scales, 1)
    if form.zero == "stored":
        return [*parts, ("scales", scale_bytes), ("zero", scale_bytes)]
    return [*parts, ("scales", form.scales_of_row(width) * scale_bytes)]


def kv_page(parts: Sequence[tuple[str, int]], tokens: int, *, by_row: bool) -> list[tuple[str, int, int, str]]:
    """The byte runs in vLLM's page of one head: the kind, start, stop and text of each run.

    With `by_row`, each token has its K, the scale of K, its V and the scale of V one after another. Otherwise the page
    begins with the K codes of all tokens, followed by their scales, the V codes of all tokens and their scales.
    """
    pieces = (
        [(kind, size, f"{side} of token {token}") for token in range(tokens) for side in "KV" for kind, size in parts]
        if by_row
        else [(kind, tokens * size, f"{side} of all tokens") for side in "KV" for kind, size in parts]
    )
    ends = list(itertools.accumulate(size for _, size, _ in pieces))
    return [(kind, end - size, end, text) for (kind, size, text), end in zip(pieces, ends, strict=True)]


KV_KINDS = {"codes": "one", "scales": "two", "zero": "three"}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def kv_rows() -> drawing.Drawing:
    """The formats of KV caches byte by byte: a row of each format, and three of vLLM's pages."""
    width, tokens = 64, 2
    drawn = drawing.Drawing(
        "Formats of KV caches, byte by byte",
        f"The {width} columns of a row of K or V of one head: codes in the pages, and scales and zero points in the "
        f"scale pages. Below: vLLM's pages of {tokens} tokens, which also hold the scales.",
    )
    row_scale, page_scale = WIDTH / (2.6 * width), WIDTH / (2 * tokens * (width + ITEM_BYTES["float32"]))
    drawn.legend(LEFT, 20, [("one", "codes, in pages"), ("two", "scales, in scale pages"), ("three", "zero point")])
    y = 34.0

    def row(name: str, pieces: Iterable[tuple[str, float, float]], scale: float, text: str = "") -> None:
        nonlocal y
        end = 0.0
        drawn.text(LEFT - 8, y + 11, name, "small", "end")
        for kind, start, stop in pieces:
            drawn.boxes(KV_KINDS[kind], [(LEFT + start * scale, y, (stop - start) * scale - 0.3, 14)])
            end = max(end, stop)
        if text:
            drawn.text(LEFT + end * scale + 8, y + 11, text, "small quiet")
        y += 20

    plain = UNSCALED_FORMATS["bfloat16"], UNSCALED_FORMATS["int8"]
    names = ("bfloat16", "int8, e4m3, e5m2, e4m3fnuz")
    for name, form in (*zip(names, plain, strict=True), *((form.name, form) for form in SCALED_FORMATS)):
        pieces, at = [], 0.0
        for kind, size in kv_parts(form, width):
            at += 4 if kind == "scales" else 0  # a gap, because codes and scales are in separate pages
            zero = 0.5 if kind == "scales" and form.zero == "mantissa" else 0.0  # 4 bits in the scale's first byte
            if zero:
                pieces.append(("zero", at, at + zero))
            pieces.append((kind, at + zero, at + size))
            at += size
        sizes = " + ".join(str(size) for _, size in kv_parts(form, width))
        row(name, pieces, row_scale, f"{sizes} bytes: {_said_of(form, width)}")
    y += 14
    drawn.text(10, y, f"vLLM's pages, which also hold the scales: {tokens} tokens of one head", "head")
    y += 12
    named = {form.name: form for form in reversed(SCALED_FORMATS)}
    for name, by_row in (("int8_token_head", True), ("int4_token_head", True), ("nvfp4", False)):
        page = kv_page(kv_parts(named[name], width), tokens, by_row=by_row)
        row(name, [(kind, start, stop) for kind, start, stop, _ in page], page_scale)
        for kind, start, stop, text in page:
            drawn.text(LEFT, y + 6, f"{start} - {stop - 1}: {text}, {kind}", "small quiet")
            y += 12
        y += 12
    return drawn


def _said_of(form: KvFormat, width: int) -> str:
    if not form.scaled:
        return "no scale" if not form.quantized else "scales are arguments of the call"
    scales = form.scales.removeprefix("float8_").removesuffix("fnu").removesuffix("fn")
    if form.group:
        return f"{form.scales_of_row(width)} scales of {form.group} columns, {scales}"
    zeros = {"": "", "mantissa": ", whose lowest 4 bits are the zero point", "stored": " and a zero point"}
    return f"a scale{zeros[form.zero]}, {scales}"


def index_page() -> drawing.Drawing:
    """A page of the indexer's keys byte by byte. The bytes' kinds are found by the same experiment as in `roles`."""
    write, read = (
        importlib.import_module(f"ragged_attention.reference.{name}") for name in ("write_indexer_cache", "_indexer")
    )
    keys, head_dim = 4, 128
    rows = np.random.default_rng(0).choice((-1.0, 1.0), (keys, head_dim)) * np.linspace(1, 1.5, head_dim)
    page = write.write_indexer_cache(rows, np.zeros((1, keys, 1, head_dim + 4), np.uint8), np.arange(keys))

    def dequantized(page: np.ndarray) -> np.ndarray:
        values, scales = read.Keys(page, None, None, head_dim).at(np.zeros(keys, int), np.arange(keys))
        return values * scales[:, None]

    byte_roles: list[tuple[int, str, int]] = []
    for index in range(page.size):
        changed = page.copy()
        changed.reshape(-1)[index] ^= 1
        key, columns = np.nonzero(dequantized(changed) != dequantized(page))
        byte_roles.append((int(key[0]), "values" if len(columns) == 1 else "scales", len(columns)))
    drawn = drawing.Drawing(
        "A page of the indexer's keys, byte by byte",
        f"A page of {keys} keys of {head_dim} columns: the e4m3 values of all keys, then a float32 scale for each key.",
    )
    drawn.legend(LEFT, 20, [("one", "values"), ("two", "scales")])
    drawn.text(LEFT - 8, 45, f"{keys} keys, {head_dim} columns: {page.size} bytes", "small", "end")
    scale, y = WIDTH / page.size, 61.0
    for start, stop, key, kind, _ in runs_of(byte_roles):
        drawn.boxes(KINDS[kind], [(LEFT + start * scale, 34, (stop - start) * scale - 0.4, 14)])
        what = f"{stop - start} e4m3 values" if kind == "values" else "scale, float32"
        drawn.text(LEFT, y, f"{start} - {stop - 1}: key {key}, {what}", "small quiet")
        y += 12
    return drawn


def formats() -> drawing.Drawing:
    """The bits of each number format: sign, exponent and fraction."""
    ml_dtypes = importlib.import_module("ml_dtypes")
    names = {
        "float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "e4m3": "float8_e4m3fn",
        "e5m2": "float8_e5m2", "e8m0 (scale)": "float8_e8m0fnu", "e2m1": "float4_e2m1fn",
    }  # fmt: skip
    drawn = drawing.Drawing(
        "Number formats, bit by bit",
        "Sign, exponent and fraction of float32, bfloat16, float16, e4m3, e5m2, the scale e8m0, e2m1, and int8.",
    )
    drawn.legend(LEFT, 20, [("four", "sign"), ("two", "exponent"), ("one", "fraction"), ("three", "integer")])
    cell = WIDTH / 48
    y = 32.0
    for name, dtype in names.items():
        facts = ml_dtypes.finfo(dtype)
        sign = facts.bits - facts.nexp - facts.nmant
        largest = float(facts.max)
        largest = f"{largest:.3g}" if largest > 1e6 else f"{largest:.0f}"
        text = f"up to {largest}, relative steps of 2^-{facts.nmant}" if facts.nmant else "powers of two"
        _draw_bits(drawn, y, name, {"four": sign, "two": facts.nexp, "one": facts.nmant}, cell, text)
        y += 22
    text = f"{np.iinfo(np.int8).min} to {np.iinfo(np.int8).max}, times a scale"
    _draw_bits(drawn, y, "int8", {"three": np.iinfo(np.int8).bits}, cell, text)
    return drawn


def _draw_bits(drawn: drawing.Drawing, y: float, name: str, counts: Mapping[str, int], cell: float, text: str) -> None:
    x = float(LEFT)
    drawn.text(LEFT - 8, y + 11, name, "small", "end")
    for kind, count in counts.items():
        drawn.boxes(kind, [(x + index * cell, y, cell - 1, 14) for index in range(count)])
        x += count * cell
    drawn.text(x + 8, y + 11, text, "small quiet")


def loops() -> list[dict[str, str]]:
    """The rows of the table of workloads in docs/predictions.md, as dicts by column."""
    page = (DOCS / "predictions.md").read_text()
    table = page[page.index("<!-- loops -->") : page.index("<!-- end of loops -->")]
    heads, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    return [dict(zip(["workload", *heads], row, strict=True)) for row in rows]


def roofline() -> drawing.Drawing:
    """The predicted times of all cases, divided by their floors, on a logarithmic scale."""
    rows = loops()
    drawn = drawing.Drawing(
        "Predicted times on an H200, divided by the floor",
        "For every case of the workloads: the bound from its plan and code, and an estimate that includes waiting, "
        "both divided by the floor, which loads each needed byte once and wastes no operation. Nothing is measured.",
    )
    drawn.text(10, 20, "Predicted, not measured: time on an H200 divided by the floor", "head")
    drawn.legend(LEFT + 60, 38, [("one", "bound from plan and code"), ("two", "estimate with waiting")])
    left, most = LEFT + 60, 40.0
    unit = (WIDTH - 100) / math.log2(most)
    top, step = 52, 13
    y, bottom = float(top), top + step * len(rows)
    for power in range(math.floor(math.log2(most)) + 1):
        drawn.line(left + power * unit, top - 2, left + power * unit, bottom, "dotted")
        drawn.text(left + power * unit, bottom + 12, 2**power, "small quiet", "middle")
    bars: dict[str, list[drawing.Box]] = {"one": [], "two": []}
    for row in rows:
        floor = float(row["floor, us"])
        bound = float(row["of the floor"])
        waiting = max(map(float, row["waiting, us"].split(" - "))) / float(row["bound, us"]) * bound
        drawn.text(left - 8, y + 8, f"{row['workload']} {row['case']}, {floor:g} us", "small", "end")
        ends = [math.log2(max(min(times, most), 1)) * unit for times in (bound, waiting)]
        bars["one"].append((left, y, max(ends[0], 1), 9))
        if ends[1] > ends[0]:
            bars["two"].append((left + ends[0], y + 3, ends[1] - ends[0], 3))
        drawn.text(drawn.width - 10, y + 8, f"{bound:.2f}, {waiting:.2f}", "small quiet", "end")
        y += step
    for kind, boxes in bars.items():
        drawn.boxes(kind, boxes)
    return drawn


RATE = 2048  # multiplications per cycle by the tensor cores of one multiprocessor
PRODUCT = {"QK": 64 * 64 * 576, "PV": 64 * 64 * 256}  # logits of a block; weights times one half of the values


def steps() -> list[dict[str, str]]:
    """The rows of the table in docs/cuda_kernels.md with the steps of the seesaw schedule, as dicts by column."""
    page = (DOCS / "cuda_kernels.md").read_text()
    rows = re.search(r"\| time \| W0: left.*?\n((?:\|.*\n)+)", page)
    assert rows, "no table of the seesaw in docs/cuda_kernels.md"
    names = ("time", "left", "right", "products", "released")
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in rows[1].splitlines()[1:]]
    return [dict(zip(names, row, strict=True)) for row in cells]


def seesaw() -> drawing.Drawing:
    """The seesaw schedule of the Hopper kernels: one pair of blocks, on an axis of tensor core cycles."""
    rows = steps()
    lengths = [[PRODUCT[word.split()[0]] // RATE for word in row["products"].split(", ")] for row in rows]
    total = sum(map(sum, lengths))
    scale, y = (WIDTH + 120) / total, 60.0
    left = LEFT - 120
    drawn = drawing.Drawing(
        "The seesaw of two warpgroups",
        "A pair of blocks of 64 keys: the products that the tensor cores compute for each warpgroup, and the other "
        f"work of both warpgroups. The axis is in tensor core cycles, {total} for a pair; other work is not to scale.",
    )
    drawn.text(10, 20, f"A pair of blocks of 64 keys: {total} tensor core cycles", "head")
    drawn.legend(left, 40, [("one", "W0: left half of the output"), ("two", "W1: right half"), ("faint", "other work")])
    for line, name in enumerate(("tensor cores", "W0", "W1")):
        drawn.text(left - 8, y + 14 + 34 * line, name, "small", "end")
    x = float(left)
    for number, (row, durations) in enumerate(zip(rows, lengths, strict=True), start=1):
        for word, cycles in zip(row["products"].split(", "), durations, strict=True):
            first = word.startswith("QK 0") or word.endswith("left")
            kind = "one" if first else "two"
            drawn.boxes(kind, [(x, y, cycles * scale - 1, 20), (x, y + (34 if first else 68), cycles * scale - 1, 20)])
            drawn.text(x + 4, y + 14, word, "on")
            x += cycles * scale
        start = x - sum(durations) * scale
        for line, cell in ((34, row["left"]), (68, row["right"])):
            if not ("logits" in cell or "+=" in cell or cell.startswith("(")):
                drawn.boxes("faint", [(start, y + line, x - start - 1, 20)])
        drawn.line(x, y - 4, x, y + 92, "dotted")
        drawn.text(x - sum(durations) * scale / 2, y + 104, number, "small quiet", "middle")
    y += 122
    for row in rows:
        released = f"; released: {row['released']}" if row["released"] else ""
        drawn.text(left, y, f"{row['time']}.  W0: {row['left']}.  W1: {row['right']}{released}", "small")
        y += 14
    return drawn


PEERS = {"one": "vllm", "two": "openvino", "four": "sdpa", "grey": "eager"}
TITLES = {"vllm": "vLLM", "openvino": "OpenVINO", "sdpa": "SDPA", "eager": "eager"}
NARROW = 440  # the width of a picture that can be read on a phone, with labels above its rows instead of beside them
ROW = 28  # the height of a row with its label


def measured_on_a_cpu() -> dict[str, Any]:
    """The newest saved result of `make bench-cpu`."""
    return json.loads(max((DOCS.parent / "benchmarks" / "results").glob("cpu_*.json")).read_text())


def cpu() -> drawing.Drawing:
    """Each peer's time divided by ours in every case of the CPU benchmark, on a logarithmic scale."""
    record = measured_on_a_cpu()
    runs = record["runs"]
    drawn = drawing.Drawing(
        "Time of other libraries divided by ours, on a CPU",
        f"Above 1, ours is faster. Measured on {record['cpu']}, torch {record['torch']}, {record['date']}.",
        NARROW,
    )
    drawn.text(10, 20, "Time of others divided by ours (above 1, ours is faster)", "head")
    drawn.legend(10, 40, [(kind, TITLES[peer]) for kind, peer in PEERS.items()])
    panel, top = (NARROW - 20) / len(runs), 76.0
    for number, run in enumerate(runs):
        left = 10 + number * panel
        threads = "one thread" if run["threads"] == 1 else f"{run['threads']} threads"
        drawn.text(left, 62, threads, "small quiet")
        _draw_ratios(drawn, left, top, panel - 16, run["cases"], PEERS)
    for row, case in enumerate(runs[0]["cases"]):
        drawn.text(10, top + ROW * row + 10, f"{case['name']}: {case['what']}", "small")
    return drawn


def _draw_ratios(
    drawn: drawing.Drawing, left: float, top: float, width: float, cases: list[dict[str, Any]], peers: dict[str, str]
) -> None:
    """Draw the cases from top to bottom, below the space for their labels, each with a mark for every peer."""
    ratios = [math.log2(case["ratios"][peer]) for case in cases for peer in peers.values() if peer in case["ratios"]]
    least, most = math.floor(min(0.0, *ratios)), math.ceil(2 * max(ratios)) / 2
    unit, bottom = width / (most - least), top + ROW * len(cases)
    drawn.boxes("faint", [(left, top + ROW * row + 19.5, width, 1) for row in range(len(cases))])
    for kind, peer in peers.items():
        rows = [(row, case["ratios"][peer]) for row, case in enumerate(cases) if peer in case["ratios"]]
        marks = [(left + (math.log2(ratio) - least) * unit, top + ROW * row) for row, ratio in rows]
        drawn.boxes(kind, [(x - 1.5, y + 14, 3, 11) for x, y in marks])
    for power in range(least, math.floor(most) + 1):
        x = left + (power - least) * unit
        dashes = f"3 3 3 3 3 {ROW - 15}" if power else f"15 {ROW - 15}"  # none through the labels
        drawn.line(x, top + 12, x, bottom - 1, "line", dashes)
        drawn.text(x, bottom + 12, f"{2.0**power:g}x", "small quiet", "middle")


IN_README = ("C2", "C4b", "C5", "C5b", "C7b", "C8", "C8b")  # the cases of the README's picture


def speed() -> drawing.Drawing:
    """The README's picture: the time of other libraries divided by ours, on a CPU in typical cases."""
    record = measured_on_a_cpu()
    run = record["runs"][-1]
    cases = [case for case in run["cases"] if case["name"] in IN_README]
    peers = {"one": "vllm", "three": "sglang", "two": "openvino", "grey": "ggml", "four": "sdpa"}  # colours as in PEERS
    titles = {"vllm": "vLLM", "sglang": "SGLang", "openvino": "OpenVINO", "ggml": "llama.cpp", "sdpa": "torch SDPA"}
    drawn = drawing.Drawing(
        "Attention on a CPU: time of other libraries divided by ours",
        f"Above 1, ours is faster. {run['threads']} threads of {record['cpu']}, torch {record['torch']}, "
        f"{record['date']}.",
        NARROW,
    )
    top = 56.0
    drawn.text(10, 20, "Attention on a CPU: time of others divided by ours", "head")
    drawn.legend(10, 42, [(kind, titles[peer]) for kind, peer in peers.items()])
    _draw_ratios(drawn, 20, top, NARROW - 40, cases, peers)
    for row, case in enumerate(cases):
        drawn.text(10, top + ROW * row + 10, case["what"].removeprefix("skew: "), "small")
    measured = f"{run['threads']} threads of {record['cpu']}, {record['date']}"
    drawn.text(10, top + ROW * len(cases) + 32, measured, "small quiet")
    return drawn


def growth() -> drawing.Drawing:
    """The measured time per key in batches of several sizes, and the planned use of up to 64 threads."""
    record = json.loads((DOCS.parent / "benchmarks" / "results" / "growth_cpu.json").read_text())
    drawn = drawing.Drawing(
        "How decode grows on a CPU",
        "Measured nanoseconds per key and KV head, by keys per sequence; and the planned share of the time of 1 to 64 "
        f"threads that programs use. Measured on {record['cpu']}, torch {record['torch']}.",
    )
    panel, top = (LEFT + WIDTH + 20) / (len(record["runs"]) + 1), 70.0
    counts = sorted({row["num_seqs"] for run in record["runs"] for row in run["growth"]})
    kinds = dict(zip(counts, ("one", "two", "three", "four"), strict=True))
    drawn.text(10, 20, "Decode: nanoseconds per key and KV head, and the share of threads in use", "head")
    drawn.legend(40, 38, [(kind, f"{count} sequences" if count > 1 else "1 sequence") for count, kind in kinds.items()])
    for number, run in enumerate(record["runs"]):
        threads = "one thread" if run["threads"] == 1 else f"{run['threads']} threads"
        columns = sorted({row["keys"] for row in run["growth"]})
        points = [(kinds[row["num_seqs"]], columns.index(row["keys"]), row["nanoseconds"]) for row in run["growth"]]
        names = [f"{keys // 1024}k" if keys >= 1024 else str(keys) for keys in columns]
        _draw_powers(
            drawn, (40 + number * panel, top, panel - 60), (4, 8), points, f"{threads}, by keys per sequence", names
        )
    shares = {("grey", column, 100 * share) for row in record["plan"].values() for column, share in enumerate(row)}
    least = min(record["plan"], key=lambda name: min(record["plan"][name]))
    box = (40 + len(record["runs"]) * panel, top, panel - 60)
    drawn.text(box[0], 44, f"{len(record['plan'])} batches; lowest: {least} keys", "small quiet")
    _draw_powers(drawn, box, (4, 7), sorted(shares), "planned use of the threads' time, %", record["planned_threads"])
    return drawn


def _draw_powers(
    drawn: drawing.Drawing, box: tuple[float, float, float], powers: tuple[int, int],
    points: Iterable[tuple[str, int, float]], title: str, columns: Sequence[object],
) -> None:  # fmt: skip
    """Draw marks of several colours over named columns, on a logarithmic scale between two powers of two."""
    (left, top, width), (least, most), height = box, powers, 140.0
    spacing, unit = width / (len(columns) - 1), height / (most - least)
    drawn.text(left, top - 12, title, "small quiet")
    for power in range(least, most + 1):
        y = top + (most - power) * unit
        drawn.line(left, y, left + width, y, "line" if power == least else "dotted")
        drawn.text(left - 4, y + 4, 2**power, "small quiet", "end")
    marks: dict[str, list[drawing.Box]] = {}
    for kind, column, value in points:
        y = top + (most - math.log2(value)) * unit
        marks.setdefault(kind, []).append((left + column * spacing - 3, y - 3, 6, 6))
    for kind, boxes in marks.items():
        drawn.boxes(kind, boxes)
    for column, name in enumerate(columns):
        drawn.text(left + column * spacing, top + height + 14, name, "small quiet", "middle")


def scaling() -> drawing.Drawing:
    """The tokens per second that `benchmarks/scaling.py` plans for three models, by number of devices and network."""
    plan = importlib.import_module("benchmarks.scaling")
    drawn = drawing.Drawing(
        "Tokens per second by number of devices",
        f"Decode of {plan.BATCH} sequences of {plan.CONTEXT} positions by three models over 8 to 1024 devices on three "
        "networks. KV heads are divided first, then positions. This is a plan; nothing of it is measured.",
    )
    drawn.text(10, 20, f"Planned, not measured: tokens per second, {plan.BATCH} sequences of 128k positions", "head")
    kinds = dict(zip((network.name for network in plan.NETWORKS), ("one", "two", "three"), strict=True))
    drawn.legend(LEFT, 38, [(kind, name) for name, kind in kinds.items()])
    devices = [2**power for power in range(3, 11)]
    panel, height, top = (LEFT + WIDTH - 20) / len(plan.MODELS), 150.0, 70.0
    for number, model in enumerate(plan.MODELS):
        left, width = 50 + number * panel, panel - 60
        steps = {n.name: [plan.decode_step(model, d, n, plan.Machine()) for d in devices] for n in plan.NETWORKS}
        most = max(step.tokens_a_second for plans in steps.values() for step in plans)
        unit, spacing = height / most, width / (len(devices) - 1)
        drawn.text(left, top - 12, model.name, "head")
        for share in (0.0, 0.5, 1.0):
            y = top + height * (1 - share)
            drawn.line(left, y, left + width, y, "line" if share == 0 else "dotted")
            drawn.text(left - 4, y + 4, f"{most * share:.0f}", "small quiet", "end")
        for name, plans in steps.items():
            points = [
                (left + index * spacing, top + height - step.tokens_a_second * unit) for index, step in enumerate(plans)
            ]
            for before, after in itertools.pairwise(points):
                drawn.line(*before, *after, "dotted")
            drawn.boxes(kinds[name], [(x - 3, y - 3, 6, 6) for x, y in points])
        for index, count in enumerate(devices):
            drawn.text(left + index * spacing, top + height + 14, count, "small quiet", "middle")
    drawn.text(LEFT, top + height + 30, "devices", "small quiet")
    return drawn


PICTURES: dict[str, Callable[[], drawing.Drawing]] = {
    "pages": pages,
    "visited_keys": visited_keys,
    "masks": masks,
    "selections": selections,
    "splits": splits,
    "kv_rows": kv_rows,
    "mla_rows": mla_rows,
    "index_page": index_page,
    "formats": formats,
    "roofline": roofline,
    "seesaw": seesaw,
    "cpu": cpu,
    "speed": speed,
    "growth": growth,
    "scaling": scaling,
}
# These pictures also have one version in light and one in dark colours, for `<picture>`. A page with its own colour
# switch needs these versions.
IN_PAIRS = ("pages", "cpu", "speed", "growth", "scaling")


def files() -> dict[str, Callable[[], str]]:
    """A function for each file of this folder, by its name without the suffix, that returns the file's text."""
    drawn = {name: functools.cache(draw) for name, draw in PICTURES.items()}
    writers: dict[str, Callable[[], str]] = {name: lambda draw=draw: draw().svg() for name, draw in drawn.items()}
    for name, scheme in itertools.product(IN_PAIRS, ("light", "dark")):
        writers[f"{name}-{scheme}"] = lambda draw=drawn[name], scheme=scheme: draw().svg(scheme)
    return writers


def main() -> None:
    sys.path.insert(0, str(DOCS.parent))  # so that benchmarks/ can be imported
    for name, written in files().items():
        (FOLDER / f"{name}.svg").write_text(written())


if __name__ == "__main__":
    main()
