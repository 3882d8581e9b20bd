"""Laws of `batch_invariant`: the bits of a query's results depend only on the query and the keys that it sees.

A sequence has the same results in a batch as alone. A query has the same results with packed keys as with paged keys,
and in every chunk of its sequence. The laws are tested on backends whose operations offer an `invariant_tile`; other
backends refuse such calls.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.config import use_backend
from ragged_attention.testing import chunks
from ragged_attention.testing.compare import identical
from ragged_attention.testing.drawing import Check, on_corner, on_drawn
from ragged_attention.testing.heads_first.specs import PagedBatch, PagedSpec
from ragged_attention.testing.mla.specs import DecodeBatch, DecodeSpec, PrefillBatch, PrefillSpec
from ragged_attention.testing.mla.strategies import decode_specs, prefill_specs
from ragged_attention.testing.paged.specs import Batch, Spec
from ragged_attention.testing.paged.strategies import specs
from ragged_attention.testing.runner import Runner
from ragged_attention.testing.selected import Selection
from ragged_attention.testing.varlen.specs import VarlenBatch, VarlenSpec
from ragged_attention.testing.varlen.strategies import varlen_specs

# Yields, for each sequence of a batch, a batch with only this sequence, and the index of its part in each result.
Alone = Callable[[Any], Iterator[tuple[Any, tuple[Any, ...]]]]


def wider(table: NDArray[np.int32]) -> NDArray[np.int32]:
    """A page table with 2048 more columns of -1."""
    return np.pad(table, [(0, 0)] * (table.ndim - 1) + [(0, 2048)], constant_values=-1)


def ragged_alone(batch: Batch) -> Iterator[tuple[Batch, tuple[Any, ...]]]:
    for seq, (start, stop) in enumerate(batch.bounds()):
        part, rows = batch.alone(seq), slice(start, stop)
        yield part.change(page_indices=wider(part.page_indices)), (rows, rows)


def heads_first_alone(batch: PagedBatch) -> Iterator[tuple[PagedBatch, tuple[Any, ...]]]:
    for seq in range(len(batch.q)):
        row = slice(seq, seq + 1)
        table = wider(batch.page_indices[row])
        yield batch.change(q=batch.q[row], lengths=batch.lengths[row], page_indices=table), (row,)


def latent_alone(batch: DecodeBatch) -> Iterator[tuple[DecodeBatch, tuple[Any, ...]]]:
    for seq in range(batch.num_seqs):
        row = slice(seq, seq + 1)
        yield batch.alone(seq), (row, row)


def tokens_alone(batch: PrefillBatch) -> Iterator[tuple[PrefillBatch, tuple[Any, ...]]]:
    """The parts of a sparse prefill batch: one token each, because each token has its own list of keys."""
    lens = batch.topk_lens
    for token in range(len(batch.q)):
        row = slice(token, token + 1)
        arrays = {"q": batch.q[row], "indices": batch.indices[row], "topk_lens": None if lens is None else lens[row]}
        yield batch.change(**arrays), (row, row, row)


def packed_alone(batch: VarlenBatch) -> Iterator[tuple[VarlenBatch, tuple[Any, ...]]]:
    for seq, (rows, _, _) in enumerate(batch.parts()):
        yield batch.of([seq]).change(max_q_len=None, max_kv_len=None), (rows, rows)


def law(operation: str, alone: Alone, **keywords: Any) -> Callable[[Runner, Any], None]:
    """A check that a part of a batch has the same result bits alone as in the batch; `keywords` request all results."""

    def check(runner: Runner, spec: Any) -> None:
        runner.expect_promise(operation)
        batch = spec.build()
        with use_backend(batch_invariant=True):
            whole = results(runner.run(operation, batch, **keywords))
            for number, (part, places) in enumerate(alone(batch)):
                got = results(runner.run(operation, part, **keywords))
                for index, (result, whole_result, place) in enumerate(zip(got, whole, places, strict=True)):
                    identical(result, whole_result[place], f"result {index} of number {number}")

    return check


def serves_what_is_trained(runner: Runner, spec: VarlenSpec) -> None:
    """A query's results have the same bits with packed and paged keys, in any chunk of its sequence and any batch."""
    for operation in ("varlen_attention", "ragged_paged_attention"):
        runner.expect_promise(operation)
    widths = {name: max(16, -(-getattr(spec, name) // 8) * 8) for name in ("d", "d_v")}  # head sizes that pages support
    batch, rng = dataclasses.replace(spec, **widths, limits=None).build(), np.random.default_rng(spec.seed)
    with use_backend(batch_invariant=True):
        whole = results(runner.run("varlen_attention", batch, return_lse=True))
        pieces = chunks.chunks_of(batch, rng)
        for group in (pieces, [piece for piece in pieces if piece.num_queries == 1]):
            for name, call in (
                ("ragged_paged_attention", chunks.paged(batch, group, rng)),
                ("varlen_attention", chunks.packed(batch, group)),
            ):
                got = results(runner.run(name, call, return_lse=True))
                for index, (result, whole_result) in enumerate(zip(got, whole, strict=True)):
                    want = whole_result[chunks.rows_of(group)]
                    identical(result, want, f"result {index} of {name}")
                    identical(np.signbit(result), np.signbit(want), f"signs of result {index} of {name}")


def asking_changes_no_bit(runner: Runner, spec: VarlenSpec) -> None:
    """Returning the largest logits changes no other result; over chunks, their maximum is that of the whole batch."""
    batch, rng = dataclasses.replace(spec, d=64, d_v=64, limits=None).build(), np.random.default_rng(spec.seed)
    for operation in ("varlen_attention", "ragged_paged_attention"):
        runner.expect_promise(operation)
    with use_backend(batch_invariant=True):
        plain = runner.run("varlen_attention", batch, return_lse=True)
        *whole, largest = runner.run("varlen_attention", batch, return_lse=True, return_max_logits=True)
        for result, want in zip(whole, plain, strict=True):
            identical(result, want, "a result beside the largest logits")
        largest_of_chunks = np.full_like(largest, -np.inf)
        for piece in chunks.chunks_of(batch, rng):
            call = chunks.paged(batch, [piece], rng)
            largest_of_chunks = np.maximum(
                largest_of_chunks, runner.run("ragged_paged_attention", call, return_max_logits=True)[-1]
            )
        identical(largest_of_chunks, largest, "the largest logits of chunks")


def may_come_in_chunks(runner: Runner, spec: Spec) -> None:
    """A prompt's results have the same bits in chunks as in one call, for every format of the pages."""
    runner.expect_promise("ragged_paged_attention")
    batch = dataclasses.replace(spec, draft=None, causal=True).build()
    with use_backend(batch_invariant=True):
        whole = results(runner.run("ragged_paged_attention", batch, return_lse=True))
        for rows, part in chunks.parts_of(batch, np.random.default_rng(spec.seed)):
            got = results(runner.run("ragged_paged_attention", part, return_lse=True))
            for index, (result, whole_result) in enumerate(zip(got, whole, strict=True)):
                identical(result, whole_result[rows], f"result {index} of the queries {rows.start} to {rows.stop}")


def results(returned: Any) -> tuple[Any, ...]:
    return returned if isinstance(returned, tuple) else (returned,)


# Sequences that are long enough to be split, together with prompts. A sequence alone must use the same kernels and
# tiles as in this batch.
LENGTHS = ((1, 2900), (1, 5), (70, 90), (1, 1100), (2, 40), (1, 0), (9, 1300))
RAGGED = Spec(
    lens=LENGTHS, page_size=16, num_kv_heads=2, group=4, dtype="bfloat16", count="array", spare_seqs=2, padding=3
)
LAWS: tuple[tuple[str, Callable[[Runner, Any], None], Any, Any], ...] = (
    ("attention", law("ragged_paged_attention", ragged_alone, return_lse=True), RAGGED, specs(clean=True)),
    (
        "ranges of keys",
        law("ragged_paged_attention", ragged_alone, return_lse=True),
        dataclasses.replace(RAGGED, ranges="prefix"),
        None,
    ),
    (
        "lists of blocks",
        law("ragged_paged_attention", ragged_alone, return_lse=True),
        dataclasses.replace(RAGGED, selection=Selection(kind="own", size=64, length=9)),
        None,
    ),
    (
        "heads-first decode",
        law("paged_attention", heads_first_alone),
        PagedSpec(spec=Spec(lens=((1, 2900), (1, 5), (1, 1100)), page_size=16, num_kv_heads=2, group=4)),
        None,
    ),
    (
        "latent decode",
        law("mla_decode", latent_alone),
        DecodeSpec(topk=0, kv_lens=(1300, 3, 70), page_size=16, heads=3, dtype="bfloat16"),
        decode_specs(clean=True),
    ),
    (
        "sparse prefill",
        law("sparse_mla_prefill", tokens_alone),
        PrefillSpec(tokens=5, heads=3, dtype="bfloat16"),
        prefill_specs(clean=True),
    ),
    (
        "packed",
        law("varlen_attention", packed_alone, return_lse=True),
        VarlenSpec(lens=((5, 9), (300, 300), (3, 1100), (0, 4), (70, 70)), causal=True, group=2, dtype="bfloat16"),
        varlen_specs(clean=True),
    ),
    (
        "packed, ranges of keys",
        law("varlen_attention", packed_alone, return_lse=True),
        VarlenSpec(lens=((5, 9), (300, 300), (3, 1100), (0, 4), (70, 70)), ranges="few", group=2, dtype="bfloat16"),
        None,
    ),
    (
        "packed, lists of blocks",
        law("varlen_attention", packed_alone, return_lse=True),
        VarlenSpec(
            lens=((5, 9), (300, 300), (3, 1100), (0, 4), (70, 70)),
            causal=True,
            kv_heads=2,
            group=2,
            dtype="bfloat16",
            selection=Selection(kind="own", size=16, length=9),
        ),
        None,
    ),
)

# Prompts and answers, some longer than one segment of keys. SERVED_SPECS combines them with dtypes and arguments that
# once gave different bits.
SERVED = VarlenSpec(
    lens=((130, 130), (3, 2600), (1, 5), (0, 4), (70, 1090)), causal=True, group=2, d=64, d_v=64, dtype="float16"
)  # fmt: skip
SERVED_SPECS = {
    "float16 with a soft cap": dataclasses.replace(SERVED, soft_cap=5.0),
    "bfloat16 with sinks": dataclasses.replace(SERVED, dtype="bfloat16", sinks="normal", group=3),
    "float32 with a window": dataclasses.replace(SERVED, dtype="float32", sliding_window=75),
    "biases": dataclasses.replace(SERVED, dtype="bfloat16", alibi="mixed", bias="own"),
    "ranges of keys": dataclasses.replace(SERVED, dtype="bfloat16", causal=False, ranges="few"),
    "lists of blocks": dataclasses.replace(
        SERVED, dtype="bfloat16", kv_heads=2, group=4, selection=Selection(kind="own", size=16, length=9)
    ),
}


def laws() -> Iterator[Check]:
    """The checks of all laws, on named and on drawn batches."""
    for name, check, spec, drawn in LAWS:
        yield Check("law", f"batch invariant, {name}", on_corner(check, lambda spec=spec: spec))
        if drawn is not None:
            yield Check("law", f"batch invariant, {name} on drawn batches", on_drawn(check, drawn, 0.2))
    for name, spec in SERVED_SPECS.items():
        run = on_corner(serves_what_is_trained, lambda spec=spec: spec)
        yield Check("law", f"batch invariant, packed or in pages, {name}", run)
    for cap in (None, 5.0):
        spec = dataclasses.replace(SERVED, lens=((90, 130), (1, 5)), soft_cap=cap, dtype="bfloat16")
        run = on_corner(asking_changes_no_bit, lambda spec=spec: spec)
        yield Check("law", f"batch invariant, with the largest logits, soft_cap={cap}", run)
    chunked = on_drawn(may_come_in_chunks, specs(clean=True), 0.4)
    yield Check("law", "batch invariant, prompts in chunks on drawn batches", chunked)
    drawn = on_drawn(serves_what_is_trained, varlen_specs(clean=True), 0.4)
    yield Check("law", "batch invariant, packed or in pages on drawn batches", drawn)
