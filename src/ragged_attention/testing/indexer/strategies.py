"""Hypothesis strategies that draw specs for calls of the indexer."""

import dataclasses
from typing import Any

from hypothesis import strategies as st

from ragged_attention.testing.indexer.gradients import LogitsGradientSpec
from ragged_attention.testing.indexer.key_specs import QuantizeKeysSpec, SelectSpec, WriteKeysSpec
from ragged_attention.testing.indexer.specs import BYTES, E4M3, IndexerSpec
from ragged_attention.testing.indexer.table_writes import TableWriteSpec
from ragged_attention.testing.indexer.targets import TargetSpec
from ragged_attention.testing.paged.strategies import SEEDS, sequence

DTYPES = ("float32", "bfloat16", "float16")
HEADS = (1, 3, 8, 17, 64)
HEAD_DIMS = (16, 32, 48, 128)


@st.composite
def indexer_specs(draw: st.DrawFn, *, clean: bool = False, **fixed: Any) -> IndexerSpec:
    """Any valid call. `clean` excludes what laws add themselves, such as poison, garbage and missing pages."""
    lens = tuple(draw(st.lists(sequence, min_size=1, max_size=4)))
    packed = draw(st.sampled_from([False, False, True]))
    dtype = draw(st.sampled_from([*DTYPES, E4M3]))
    stored = [None, None, E4M3] if packed else [None, E4M3, BYTES, BYTES]
    count = draw(st.sampled_from(["none", "int", "array"]))
    relative = packed and draw(st.booleans())
    drawn = {
        "lens": lens,
        "packed": packed,
        "heads": draw(st.sampled_from(HEADS)),
        "head_dim": draw(st.sampled_from(HEAD_DIMS)),
        "dtype": dtype,
        "cache_dtype": draw(st.sampled_from(stored)),
        "page_size": draw(st.sampled_from([2, 1, 3, 8, 64])),
        "ratio": 1 if packed else draw(st.sampled_from([1, 1, 1, 2, 4, 128])),
        "scaled": draw(st.booleans()),
        "exact": draw(st.booleans()),
        "special": False if clean else draw(st.sampled_from([False, False, True])),
        "count": count,
        "spare_seqs": draw(st.integers(0, 3)),
        "padding": draw(st.sampled_from([0, 1, 5])),
        "spare_columns": draw(st.sampled_from([0, 1, 3])),
        "invalid_pages": False if clean else draw(st.sampled_from([False, False, True])),
        "repeated_pages": False if clean else draw(st.sampled_from([False, False, True])),
        "ranges": draw(st.sampled_from(["causal", "causal", "any", "wild"])),
        "relative": relative,
        "max_keys": draw(st.sampled_from([None, 1, 7, 50])) if relative else None,
        "top_k": draw(st.sampled_from([1, 2, 5, 16, 100])),
        "candidate_block_size": None if clean else draw(st.sampled_from([None, None, 1, 3, 16])),
        "poison": False if clean else draw(st.booleans()),
        "garbage": False if clean else draw(st.booleans()),
        "strided": draw(st.booleans()),
        "seed": draw(SEEDS),
    }
    return IndexerSpec(**drawn | fixed)


@st.composite
def listed_specs(draw: st.DrawFn, *, clean: bool = False, **fixed: Any) -> IndexerSpec:
    """Any valid `indexer_logits` call over lists of packed keys."""
    spec = draw(indexer_specs(clean=clean, packed=True, relative=False, max_keys=None, ratio=1, cache_dtype=None))
    listed = draw(st.sampled_from([5, 1, 16, 40]))
    return dataclasses.replace(spec, **{"listed": listed} | fixed)


@st.composite
def logits_gradient_specs(draw: st.DrawFn, *, clean: bool = False, **fixed: Any) -> LogitsGradientSpec:
    """Any valid gradient of the logits, over ranges or lists. `fixed` has fields of the forward call."""
    dtype = draw(st.sampled_from(DTYPES))
    fields: dict[str, Any] = {"dtype": dtype, "cache_dtype": None, "special": False, **fixed}
    if draw(st.booleans()):
        return LogitsGradientSpec(of=draw(listed_specs(clean=clean, **fields)))
    return LogitsGradientSpec(of=draw(indexer_specs(clean=clean, packed=True, ratio=1, **fields)))


@st.composite
def target_specs(draw: st.DrawFn, *, clean: bool = False) -> TargetSpec:
    """Any valid `attention_target` call, over ranges or lists."""
    fields: dict[str, Any] = {"cache_dtype": None, "special": False, "scaled": False}
    fields |= {"dtype": draw(st.sampled_from(DTYPES)), "head_dim": draw(st.sampled_from([*HEAD_DIMS, 576]))}
    listed = draw(st.booleans())
    spec = draw(listed_specs(clean=clean, **fields) if listed else indexer_specs(clean=clean, packed=True, **fields))
    return TargetSpec(
        of=spec,
        sm_scale=draw(st.sampled_from([None, 0.25])) if spec.head_dim <= 48 else None,
        blind_heads=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        wider=draw(st.booleans()),
        lens=draw(st.sampled_from([None, "any", "wild"])) if listed else None,
    )


@st.composite
def table_write_specs(draw: st.DrawFn) -> TableWriteSpec:
    """Any valid `write_indexer_cache` call by tables."""
    return TableWriteSpec(of=draw(indexer_specs(packed=False)), power_of_two=draw(st.booleans()))


select_specs = st.builds(
    SelectSpec,
    rows=st.integers(0, 4),
    columns=st.sampled_from([100, 1000, 31, 64, 2, 1, 0]),
    top_k=st.sampled_from([5, 1, 2, 64, 512, 4096]),
    values=st.sampled_from(["close", "zeros", "few", "special", "normal", "one", "wide"]),
    edges=st.sampled_from(["none", "starts", "stops", "both", "wild"]),
    strided=st.booleans(),
    seed=SEEDS,
)

quantize_keys_specs = st.builds(
    QuantizeKeysSpec,
    rows=st.integers(0, 6),
    head_dim=st.sampled_from([16, 48, 128, 256]),
    power_of_two=st.booleans(),
    reach=st.sampled_from([0, 3, 20]),
    special=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    strided=st.booleans(),
    seed=SEEDS,
)

write_keys_specs = st.builds(
    WriteKeysSpec,
    keys=quantize_keys_specs,
    num_pages=st.sampled_from([0, 1, 3]),
    page_size=st.sampled_from([1, 2, 3, 64]),
    slots=st.sampled_from(["int32", "int64"]),
)
