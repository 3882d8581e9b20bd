"""Hypothesis strategies that draw specs for block selection."""

from typing import Any

from hypothesis import strategies as st

from ragged_attention.testing.blocks.specs import BlocksSpec, TopKSpec
from ragged_attention.testing.indexer.specs import BYTES
from ragged_attention.testing.indexer.strategies import indexer_specs
from ragged_attention.testing.paged.strategies import SEEDS

HEADS = ((1, 1), (4, 1), (4, 4), (6, 2), (17, 1))  # numbers of index heads and of key heads


@st.composite
def blocks_specs(draw: st.DrawFn, *, clean: bool = False, **fixed: Any) -> BlocksSpec:
    """Any valid call of `select_blocks`; `clean` excludes poison, garbage and missing pages, which laws add."""
    heads, key_heads = draw(st.sampled_from(HEADS))
    keys = draw(indexer_specs(clean=clean, heads=heads, ratio=1, candidate_block_size=None, relative=False, **fixed))
    top_k = draw(st.sampled_from([1, 2, 5, 16]))
    init_blocks = draw(st.integers(0, min(top_k, 2)))
    return BlocksSpec(
        keys=keys,
        key_heads=1 if keys.stored == BYTES else key_heads,
        block_size=draw(st.sampled_from([4, 1, 2, 8, 16, 128])),
        top_k=top_k,
        init_blocks=init_blocks,
        local_blocks=draw(st.integers(0, min(top_k - init_blocks, 3))),
    )


@st.composite
def top_k_specs(draw: st.DrawFn) -> TopKSpec:
    """Any valid call of `top_k_blocks`."""
    top_k = draw(st.sampled_from([5, 1, 2, 64, 512]))
    init_blocks = draw(st.integers(0, min(top_k, 3)))
    return TopKSpec(
        tokens=draw(st.integers(0, 4)),
        heads=draw(st.integers(1, 3)),
        blocks=draw(st.sampled_from([100, 1000, 31, 64, 2, 1, 0])),
        top_k=top_k,
        init_blocks=init_blocks,
        local_blocks=draw(st.integers(0, min(top_k - init_blocks, 3))),
        values=draw(st.sampled_from(["close", "zeros", "few", "special", "normal", "one"])),
        seen=draw(st.sampled_from(["some", "all", "none"])),
        strided=draw(st.booleans()),
        seed=draw(SEEDS),
    )
