"""Calls of every operation with nothing to do: no sequences, no live sequences, no tokens, no pages, no list columns.

Each call is a normal one with some arrays emptied. A kernel must not read even the first element of an empty array.
`check_garbage` also runs these calls in guarded memory.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ragged_attention.testing.blocks.oracle import check_scores, check_selected, check_top_k
from ragged_attention.testing.blocks.specs import BlocksSpec, TopKSpec
from ragged_attention.testing.drawing import Case, Check, on_cases
from ragged_attention.testing.heads_first.specs import ChunkSpec, PagedSpec
from ragged_attention.testing.heads_first.suite import check_chunk, check_paged
from ragged_attention.testing.indexer.key_specs import QuantizeKeysSpec, SelectSpec, WriteKeysSpec
from ragged_attention.testing.indexer.oracle import (
    check_logits,
    check_quantize_keys,
    check_select,
    check_topk,
    check_write_keys,
)
from ragged_attention.testing.indexer.specs import IndexerSpec
from ragged_attention.testing.mla.cache_specs import (
    DequantizeSpec,
    LatentWriteSpec,
    QuantizeSpec,
    ScheduleSpec,
    SlotsSpec,
)
from ragged_attention.testing.mla.oracle import (
    check_decode,
    check_decode_by_schedule,
    check_dequantize,
    check_latent_write,
    check_prefill,
    check_quantize,
    check_schedule,
    check_slots,
)
from ragged_attention.testing.mla.ragged import RaggedLatentSpec
from ragged_attention.testing.mla.ragged import check_update as check_latent_update
from ragged_attention.testing.mla.specs import DecodeSpec, PrefillSpec
from ragged_attention.testing.paged.oracle import check_attention, check_merge, check_write
from ragged_attention.testing.paged.specs import Spec
from ragged_attention.testing.paged.strategies import merge_batch, write_batch
from ragged_attention.testing.paged.updates import check_update
from ragged_attention.testing.runner import Runner
from ragged_attention.testing.selected import Selection
from ragged_attention.testing.varlen.gradients import GradientSpec
from ragged_attention.testing.varlen.oracle import check_gradients, check_varlen
from ragged_attention.testing.varlen.specs import VarlenSpec

Empty = tuple[Callable[[Runner, Any], None], Callable[[], Any]]  # a check, and the builder of its batch
Cases = Mapping[str, Empty]

OF_TOKENS = ("q", "k", "v", "kv", "weights", "draft_mask", "key_ranges", "selected", "candidate_blocks", "slot_mapping")
OF_SEQUENCES = ("kv_lens", "page_indices")
# Arguments with a row for each sequence, in operations whose sequences all have the same number of queries.
OF_LISTS = (
    "q", "page_indices", "kv_lens", "indices", "topk_lens", "extra_indices", "extra_topk_lens", "lengths",
)  # fmt: skip
PAGES = ("kv_pages", "kv_cache", "cache", "keys", "key_scale", "extra_kv_cache")


def _cut(batch: Any, names: tuple[str, ...], axis: int = 0) -> Any:
    """The batch with the named arguments cut to length 0 along an axis. In a pair, both arrays are cut."""

    def cut(value: Any) -> Any:
        return tuple(map(cut, value)) if isinstance(value, tuple) else np.take(value, [], axis)

    arrays = {name: getattr(batch, name, None) for name in names}
    return batch.change(**{name: cut(value) for name, value in arrays.items() if value is not None})


# ---- ragged batches with page tables


def _no_sequences(batch: Any) -> Any:
    return _cut(batch, OF_SEQUENCES).change(cu_q_lens=batch.cu_q_lens[:1], num_seqs=None)


def _no_tokens(batch: Any) -> Any:
    return _cut(batch, OF_TOKENS).change(cu_q_lens=np.zeros_like(batch.cu_q_lens))


def _decoding(batch: Any) -> Any:
    """The batch with `max_q_len=1`, as a server passes it for a step that only decodes."""
    return batch.change(max_q_len=1) if hasattr(batch, "max_q_len") else batch


RAGGED: Mapping[str, Callable[[Any], Any]] = {
    "no sequences": lambda batch: _decoding(_no_sequences(batch)),
    "neither sequences nor tokens": lambda batch: _decoding(_no_tokens(_no_sequences(batch))),
    "no tokens": lambda batch: _decoding(_no_tokens(batch)),
    "no live sequences": lambda batch: _decoding(batch.change(num_seqs=0)),
    "no live sequences, an array of 0": lambda batch: batch.change(num_seqs=np.zeros(1, np.int32)),
    "tables without columns": lambda batch: _cut(batch, ("page_indices",), 1),
    "no pages": lambda batch: _cut(batch, PAGES),
    "nothing at all": lambda batch: _cut(_cut(_no_tokens(_no_sequences(batch)), ("page_indices",), 1), PAGES),
}


def _ragged(check: Any, build: Callable[[], Any]) -> Cases:
    def made(empty: Callable[[Any], Any]) -> Empty:
        return check, lambda: empty(build())

    return {name: made(empty) for name, empty in RAGGED.items()}


# Kernels divide the columns of wide tables among splits even if sequences are short.
_TABLES: dict[str, Any] = {"lens": ((1, 5), (1, 40)), "spare_columns": 300, "padding": 2, "page_size": 16}
_ALL: dict[str, Any] = _TABLES | {"sinks": "normal", "sliding_window": 7, "soft_cap": 3.0, "sm_scale": 0.3}
_STORED: dict[str, Any] = {"cache_dtype": "float8_e4m3fn", "scales": "heads", "num_kv_heads": 2, "group": 2}
_UPDATES: dict[str, Spec] = {
    "no sequences": Spec(lens=(), padding=3),
    "neither sequences nor tokens": Spec(lens=()),
    "no tokens": Spec(lens=((0, 9), (0, 0))),
    "no live sequences": Spec(lens=(), count="array", spare_seqs=2, padding=3),
}


def attention() -> Cases:
    """Cases of ragged attention, including calls that write new keys."""
    blocks = Spec(**_TABLES, selection=Selection(kind="own", size=8), num_kv_heads=2, group=2)
    every = Spec(**_ALL, **_STORED, draft=3, q_scales="heads", dtype="bfloat16", out_dtype="float32")
    return {
        **_ragged(check_attention, Spec(**_TABLES).build),
        **{f"{name}, every argument": case for name, case in _ragged(check_attention, every.build).items()},
        **{
            f"{name}, slopes": case
            for name, case in _ragged(
                check_attention, Spec(**_TABLES, alibi="usual", bias="shared", group=2).build
            ).items()
        },
        **{f"{name}, lists of blocks": case for name, case in _ragged(check_attention, blocks.build).items()},
        "a draft mask without columns": (check_attention, Spec(**_TABLES, draft=0).build),
        **{f"new keys, {name}": (check_update, lambda spec=spec: spec) for name, spec in _UPDATES.items()},
    }


def writes() -> Cases:
    """Cases of writing keys and values, by page tables and by slots."""
    spec = Spec(lens=((1, 5), (1, 20)), **_STORED, dtype="bfloat16")
    by_slots = {"no tokens": OF_TOKENS, "no pages": PAGES, "neither": OF_TOKENS + PAGES}
    return {
        **_ragged(check_write, lambda: write_batch(spec, by_tables=True)),
        **{
            f"slots, {name}": (check_write, lambda names=names: _cut(write_batch(spec), names))
            for name, names in by_slots.items()
        },
    }


def heads_first() -> Cases:
    """Cases of decodes and chunks over heads-first pages."""
    spec = Spec(lens=((1, 5), (1, 20)), spare_columns=300, page_size=16, soft_cap=3.0, group=2, num_kv_heads=2)
    pages = ("k_pages", "v_pages")
    paged = {
        "no sequences": lambda batch: _cut(batch, OF_LISTS),
        "tables without columns": lambda batch: _cut(batch, ("page_indices",), 1),
        "no pages": lambda batch: _cut(batch, pages, 1),
        "nothing at all": lambda batch: _cut(_cut(_cut(batch, OF_LISTS), ("page_indices",), 1), pages, 1),
    }
    chunk = {
        "no rows": lambda batch: _cut(batch, ("q",)),
        "no length": lambda batch: batch.change(length=np.zeros(1, np.int32)),
        "a table without columns": lambda batch: _cut(batch, ("page_indices",)),
        "no pages": lambda batch: _cut(batch, pages, 1),
        "nothing at all": lambda batch: _cut(_cut(batch, ("q", "page_indices")), pages, 1),
    }

    def built(spec: Any, empty: Callable[[Any], Any]) -> Callable[[], Any]:
        return lambda: empty(spec.build())

    return {
        **{f"decode, {name}": (check_paged, built(PagedSpec(spec=spec), empty)) for name, empty in paged.items()},
        **{
            f"chunk, {name}": (check_chunk, built(ChunkSpec(spec=spec, length=9, chunk=4), empty))
            for name, empty in chunk.items()
        },
    }


# ---- latents

_LATENT: dict[str, Any] = {"sinks": "normal", "dtype": "bfloat16", "heads": 16}
_LISTS: dict[str, Any] = _LATENT | {"topk": 8, "kv_lens": (9, 30), "lens": "inside", "extra_topk": 5}


def decode() -> Cases:
    """Cases of latent decode, dense and sparse, with and without a schedule."""
    dense = DecodeSpec(topk=0, kv_lens=(9, 30), sliding_window=7, causal=True, soft_cap=3.0, **_LATENT)
    lists = {
        "plain": DecodeSpec(**_LISTS, extra_lens="inside"),
        "fp8_v32": DecodeSpec(**_LISTS, format="fp8_v32", d_v=512, page_size=64, extra_format="fp8_v32"),
    }
    without: dict[str, Callable[[Any], Any]] = {
        "no sequences": lambda batch: _cut(batch, OF_LISTS),
        "tables without columns": lambda batch: _cut(batch, ("page_indices",), 1),
        "no pages": lambda batch: _cut(batch, PAGES),
        "nothing at all": lambda batch: _cut(_cut(_cut(batch, OF_LISTS), ("page_indices",), 1), PAGES),
    }
    return {
        f"{name}{how}, {what}": (check, lambda spec=spec, empty=empty: empty(spec.build()))
        for name, spec in {"dense": dense, **lists}.items()
        for what, empty in without.items()
        for how, check in (("", check_decode), (", by a schedule", check_decode_by_schedule))
    }


def prefill() -> Cases:
    """Cases of sparse prefill and its gradient."""
    without: dict[str, Callable[[Any], Any]] = {
        "no tokens": lambda batch: _cut(batch, ("q", "indices", "topk_lens")),
        "no rows": lambda batch: _cut(batch, ("kv",)),
        "nothing at all": lambda batch: _cut(batch, ("q", "indices", "topk_lens", "kv")),
    }
    specs = {
        "packed rows": PrefillSpec(lens="inside", **_LATENT),
        "pages": PrefillSpec(lens="inside", page_size=4, **_LATENT),
        "fp8_v32": PrefillSpec(lens="inside", page_size=4, format="fp8_v32", d_v=512, **_LATENT),
    }
    return {
        f"{name}, {what}": (check_prefill, lambda spec=spec, empty=empty: empty(spec.build()))
        for name, spec in specs.items()
        for what, empty in without.items()
    } | {
        f"gradient, {name}": (check_gradients, GradientSpec(of=spec, d_lse=True).build)
        for name, spec in {
            "no tokens": PrefillSpec(tokens=0, lens="inside", sinks="normal", heads=2),
            "no rows": PrefillSpec(rows=0, lens="inside", sinks="normal", heads=2),
            "neither": PrefillSpec(rows=0, tokens=0, sinks="normal", heads=2, deterministic=True),
        }.items()
    }


def ragged_latents() -> Cases:
    """Cases of ragged attention over latents, including calls that write new rows."""
    every: dict[str, Any] = {
        "cache_dtype": "float8_e4m3fn",
        "scales": "float",
        "q_scales": "heads",
        "out_dtype": "float32",
    }
    specs = {
        "plain": RaggedLatentSpec(tables=Spec(**_TABLES, group=3)),
        "every argument": RaggedLatentSpec(tables=Spec(**_ALL, group=3, dtype="bfloat16", **every)),
        "fp8_v32": RaggedLatentSpec(tables=Spec(**_ALL, group=16, dtype="bfloat16"), format="fp8_v32", d_v=512),
    }
    cases = {
        f"{name}, {what}": case
        for name, spec in specs.items()
        for what, case in _ragged(check_attention, spec.build).items()
    }
    for name, tables in _UPDATES.items():
        cases[f"new rows, {name}"] = check_latent_update, lambda tables=tables: RaggedLatentSpec(tables=tables)
    return cases


def latent_caches() -> Cases:
    """Cases of writing, quantising and dequantising latents, and of their slots."""
    cases: dict[str, Empty] = {}
    for format in ("plain", "fp8_v32", "fp8_v4"):
        write = LatentWriteSpec(format=format)
        cases |= {
            f"write {format}, no tokens": (check_latent_write, LatentWriteSpec(format=format, tokens=0).build),
            f"write {format}, no pages": (check_latent_write, lambda write=write: _cut(write.build(), PAGES)),
            f"write {format}, neither": (
                check_latent_write,
                lambda write=write: _cut(write.build(), PAGES + OF_TOKENS),
            ),
        }
    for format in ("fp8_v32", "fp8_v4", "fp4_v41"):
        cases |= {
            f"quantise {format}": (check_quantize, QuantizeSpec(format=format, num_pages=0).build),
            f"dequantise {format}": (check_dequantize, DequantizeSpec(format=format, num_pages=0).build),
        }
    slots = {
        "no sequences": SlotsSpec(shape=(0, 3)),
        "no positions": SlotsSpec(shape=(3, 0)),
        "no columns": SlotsSpec(columns=0),
        "nothing at all": SlotsSpec(shape=(0, 0), columns=0),
    }
    for name, spec in slots.items():
        cases[f"slots, {name}"] = check_slots, spec.build
    return cases


def schedules() -> Cases:
    """Cases of decode schedules without sequences."""
    specs = {
        "dense": ScheduleSpec(seqs=0),
        "dense, as many parts as there is room for": ScheduleSpec(seqs=0, num_parts=None),
        "sparse": ScheduleSpec(seqs=0, topk=8, lens="inside"),
        "sparse, two caches": ScheduleSpec(seqs=0, topk=8, extra_topk=5, extra_lens="inside", lens_by_query=True),
    }
    return {name: (check_schedule, spec.build) for name, spec in specs.items()}


# ---- packed sequences


def packed() -> Cases:
    """Cases of attention over packed sequences and its gradient."""
    every: dict[str, Any] = {
        "sinks": "normal",
        "sliding_window": 3,
        "soft_cap": 2.0,
        "causal": True,
        "group": 2,
        "alibi": "usual",
        "bias": "shared",
    }
    specs = {
        "no sequences": VarlenSpec(lens=(), q_padding=3, kv_padding=2, limits="exact", **every),
        "no sequences, no queries": VarlenSpec(lens=(), kv_padding=2, **every),
        "no sequences, no keys": VarlenSpec(lens=(), q_padding=3, **every),
        "no queries": VarlenSpec(lens=((0, 3), (0, 0)), limits="exact", **every),
        "no keys": VarlenSpec(lens=((3, 0), (0, 0)), limits="exact", **every),
        "nothing at all": VarlenSpec(lens=(), limits="exact", **every),
    }
    lists = Selection(kind="own", size=4)
    specs |= {f"{name}, lists of blocks": dataclasses.replace(spec, selection=lists) for name, spec in specs.items()}
    return {name: (check_varlen, spec.build) for name, spec in specs.items()} | {
        f"gradient, {name}": (check_gradients, GradientSpec(of=spec, d_lse=True).build) for name, spec in specs.items()
    }


def merges() -> Cases:
    """Cases of merging partial results without tokens or heads."""
    return {
        "no tokens": (check_merge, lambda: merge_batch((3, 0, 4, 16), sinks="normal", out_dtype="bfloat16")),
        "no heads": (check_merge, lambda: merge_batch((2, 3, 0, 16))),
    }


# ---- the indexer


def indexer() -> Cases:
    """Cases of the indexer: its logits, its top-k, and quantising and writing its keys."""
    spec = IndexerSpec(lens=((1, 5), (1, 20)), spare_columns=300, padding=2, scaled=True)
    pages = IndexerSpec(lens=((1, 5), (1, 20)), padding=2, cache_dtype="uint8", dtype="bfloat16")
    chosen = IndexerSpec(lens=((1, 5), (1, 20)), candidate_block_size=4)
    keys = IndexerSpec(lens=((2, 9),), packed=True, scaled=True)
    without: dict[str, Callable[[Any], Any]] = {
        "no tokens": lambda batch: _cut(batch, (*OF_TOKENS, "starts", "stops")),
        "no keys": lambda batch: _cut(batch, PAGES),
        "nothing at all": lambda batch: _cut(batch, (*OF_TOKENS, "starts", "stops", *PAGES)),
    }
    cases: dict[str, Empty] = {}
    for name, keys_spec in {"numbers": spec, "bytes": pages}.items():
        for check, build in ((check_logits, keys_spec.build), (check_topk, keys_spec.build_topk)):
            ragged_cases = _ragged(check, build)
            cases |= {f"{check.__name__[6:]} of {name}, {what}": case for what, case in ragged_cases.items()}
    for what, empty in without.items():
        cases[f"logits of packed keys, {what}"] = check_logits, lambda empty=empty: empty(keys.build())
        cases[f"topk of packed keys, {what}"] = check_topk, lambda empty=empty: empty(keys.build_topk())
    cases["no candidates"] = check_topk, lambda: _cut(chosen.build_topk(), ("candidate_blocks",), 1)
    cases["candidates, no tokens"] = check_topk, lambda: _no_tokens(chosen.build_topk())
    for name, select in {"no rows": SelectSpec(rows=0), "no columns": SelectSpec(columns=0, edges="none")}.items():
        cases[f"selection, {name}"] = check_select, select.build
    cases["quantise no rows"] = check_quantize_keys, QuantizeKeysSpec(rows=0).build
    cases["write no tokens"] = check_write_keys, WriteKeysSpec(keys=QuantizeKeysSpec(rows=0)).build
    cases["write to no pages"] = check_write_keys, WriteKeysSpec(num_pages=0).build
    cases["write nothing"] = check_write_keys, WriteKeysSpec(num_pages=0, keys=QuantizeKeysSpec(rows=0)).build
    return cases


def blocks() -> Cases:
    """Cases of block scores and block selection."""
    forced: dict[str, int] = {"init_blocks": 1, "local_blocks": 1}
    numbers = IndexerSpec(lens=((1, 5), (1, 20)), spare_columns=300, padding=2, scaled=True, heads=4)
    pages = IndexerSpec(lens=((1, 5), (1, 20)), padding=2, cache_dtype="uint8", dtype="bfloat16")
    packed = BlocksSpec(keys=IndexerSpec(lens=((2, 9),), packed=True, scaled=True, heads=4), key_heads=2, **forced)
    without: dict[str, Callable[[Any], Any]] = {
        "no tokens": lambda batch: _cut(batch, (*OF_TOKENS, "starts", "stops")),
        "no keys": lambda batch: _cut(batch, PAGES),
        "nothing at all": lambda batch: _cut(batch, (*OF_TOKENS, "starts", "stops", *PAGES)),
    }
    paged = {"numbers": BlocksSpec(keys=numbers, key_heads=2, **forced), "bytes": BlocksSpec(keys=pages, **forced)}
    cases: dict[str, Empty] = {}
    for check in (check_scores, check_selected):
        for name, spec in paged.items():
            ragged_cases = _ragged(check, spec.build)
            cases |= {f"{check.__name__[6:]} of {name}, {what}": case for what, case in ragged_cases.items()}
        for what, empty in without.items():
            cases[f"{check.__name__[6:]} of packed keys, {what}"] = check, lambda empty=empty: empty(packed.build())
    for name, top_k in {"no tokens": TopKSpec(tokens=0), "no blocks": TopKSpec(blocks=0, local_blocks=1)}.items():
        cases[f"given scores, {name}"] = check_top_k, top_k.build
    return cases


FAMILIES: Mapping[str, Cases] = {
    "ragged attention": attention(),
    "writes": writes(),
    "merges": merges(),
    "heads first": heads_first(),
    "latent decode": decode(),
    "sparse prefill": prefill(),
    "ragged latents": ragged_latents(),
    "latent caches": latent_caches(),
    "decode schedules": schedules(),
    "packed sequences": packed(),
    "the indexer": indexer(),
    "blocks": blocks(),
}


def attempts(runner: Runner) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each case's name, and a function that runs it."""
    for family in FAMILIES:
        for case in cases_of(family):
            yield f"{family}, {case.name}", functools.partial(case.attempt, runner)


def cases_of(family: str) -> Iterator[Case]:
    for name, (check, build) in FAMILIES[family].items():
        yield Case(f"with nothing to do: {name}", check, build)


def corners() -> Iterator[Check]:
    """One check for each family of operations."""
    for family in FAMILIES:
        yield Check("corner", f"nothing to do, {family}", on_cases(functools.partial(cases_of, family)))
