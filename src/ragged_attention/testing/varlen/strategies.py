"""Hypothesis strategies that draw small specs of attention over packed sequences and of gradients."""

import dataclasses

from hypothesis import strategies as st

from ragged_attention.testing.mla.specs import PrefillSpec
from ragged_attention.testing.mla.strategies import DTYPES, SEEDS, prefill_specs
from ragged_attention.testing.ranges import KINDS
from ragged_attention.testing.selected import selections
from ragged_attention.testing.varlen.gradients import GradientSpec
from ragged_attention.testing.varlen.specs import VarlenSpec

WIDTHS = (16, 1, 7, 32, 33, 64, 80, 128, 192, 255, 256)
LENGTH = st.one_of(st.integers(0, 20), st.sampled_from([0, 1, 16, 31, 33, 65, 70]))


@st.composite
def lens(draw: st.DrawFn) -> tuple[int, int]:
    """The (q_len, kv_len) of a sequence, either equal or independent."""
    kv_len = draw(LENGTH)
    return draw(st.one_of(st.just(kv_len), LENGTH)), kv_len


@st.composite
def varlen_specs(draw: st.DrawFn, *, clean: bool = False) -> VarlenSpec:
    """Any valid `varlen_attention` call; `clean` excludes poison, which laws add themselves."""
    d = draw(st.sampled_from(WIDTHS))
    return VarlenSpec(
        lens=tuple(draw(st.lists(lens(), max_size=4))),
        kv_heads=draw(st.sampled_from([1, 1, 2])),
        group=draw(st.sampled_from([1, 1, 2, 3])),
        d=d,
        d_v=draw(st.sampled_from([d, d, *WIDTHS])),
        dtype=draw(st.sampled_from(DTYPES)),
        q_padding=draw(st.sampled_from([0, 0, 3])),
        kv_padding=draw(st.sampled_from([0, 0, 5])),
        limits=draw(st.sampled_from([None, "exact", "loose"])),
        causal=draw(st.booleans()),
        sliding_window=draw(st.sampled_from([None, None, None, 1, 5, 40, 2**31 - 1])),
        soft_cap=draw(st.sampled_from([None, None, None, 2.0, 30.0])),
        sm_scale=draw(st.sampled_from([None, None, None, 0.05, -0.05, 0.0])),
        sinks=draw(st.sampled_from([None, None, "normal", "mixed"])),
        deterministic=draw(st.booleans()),
        poison=None if clean else draw(st.sampled_from(["nan", "nan", "inf", None])),
        strided=draw(st.booleans()),
        magnitude=draw(st.sampled_from([1.0, 2.0])),
        seed=draw(SEEDS),
        alibi=draw(st.sampled_from([None, None, None, "usual", "mixed"])),
        bias=draw(st.sampled_from([None, None, "shared", "own"])),
        ranges=draw(st.one_of(st.none(), st.none(), st.sampled_from(KINDS))),
        selection=draw(st.one_of(st.none(), st.none(), st.none(), selections)),
    )


def varlen_gradient_specs(*, clean: bool = False) -> st.SearchStrategy[GradientSpec]:
    """Any valid gradient of `varlen_attention`."""
    return st.builds(GradientSpec, of=varlen_specs(clean=clean), d_lse=st.booleans())


def sparse_gradient_specs(*, clean: bool = False) -> st.SearchStrategy[GradientSpec]:
    """Any valid gradient of `sparse_mla_prefill`, with rows of the same size as the values of `VarlenSpec`."""
    calls = st.builds(_differentiable, prefill_specs(clean=clean, formats=("plain",)), st.booleans())
    return st.builds(GradientSpec, of=calls, d_lse=st.booleans())


def _differentiable(spec: PrefillSpec, deterministic: bool) -> PrefillSpec:
    return dataclasses.replace(spec, shrink=4.0, deterministic=deterministic)
