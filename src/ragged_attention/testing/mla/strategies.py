"""Hypothesis strategies that draw specs, most of them small, for the operations on latent caches."""

from typing import Any

from hypothesis import strategies as st

from ragged_attention.testing.formats import QUANTIZED
from ragged_attention.testing.mla import latents
from ragged_attention.testing.mla.cache_specs import (
    DequantizeSpec,
    LatentWriteSpec,
    QuantizeSpec,
    ScheduleSpec,
    SlotsSpec,
)
from ragged_attention.testing.mla.specs import BYTES, DecodeSpec, PrefillSpec

DTYPES = ("float32", "bfloat16", "float16")
QUANTISED = tuple(latents.LAID_OUT)
FORMATS = (*("plain",) * 3, *QUANTISED)
BESIDE = {  # the other format that a second cache may have, by the first cache's format
    f"{one}{layout}": f"{other}{layout}"
    for one, other in (("fp8_v41", "fp4_v41"), ("fp4_v41", "fp8_v41"))
    for layout in ("", ", page")
}
HEADS = (1, 2, 3, 7, 16, 17)
WIDTHS = ((48, 32), (64, 64), (80, 64), (16, 16), (96, 48), (48, 32), (64, 64), (576, 512), (512, 512))
PAGE_SIZES = (1, 2, 3, 5, 16, 61)
TOP_KS = (1, 2, 5, 7, 13, 16, 33)
LENS = (None, None, "wild", "inside", "wild", "zero")
SEEDS = st.integers(0, 2**32 - 1)
kv_len = st.one_of(st.integers(1, 40), st.sampled_from([0, 1, 16, 64, 65, 130]))


def only_powers(format: str) -> bool:
    """Whether the format's scales can only be powers of two."""
    return format != "plain" and latents.LAID_OUT[format].scales == "float8_e8m0fnu"


@st.composite
def latent(draw: st.DrawFn, clean: bool, formats: tuple[str, ...]) -> dict[str, Any]:
    """The fields of `LatentSpec`; `clean` excludes poison, which laws add themselves."""
    format = draw(st.sampled_from(formats))
    width = latents.LAID_OUT[format].width if format != "plain" else None
    d_qk, d_v = draw(st.sampled_from(WIDTHS)) if width is None else (width, draw(st.sampled_from([512, 512, 64, 480])))
    return {
        "format": format,
        "d_qk": d_qk,
        "d_v": d_v,
        "heads": draw(st.sampled_from(HEADS)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "cache_dtype": draw(st.sampled_from(BYTES)),
        "scales": draw(st.sampled_from(latents.SCALES)),
        "entries": draw(st.sampled_from(["any", "distinct", "any", "distinct", "repeated", "none"])),
        "sm_scale": draw(st.sampled_from([None, None, 0.5])),
        "sinks": draw(st.sampled_from([None, None, "normal", "mixed"])),
        "poison": None if clean else draw(st.sampled_from(["nan", "nan", "inf", None])),
        "strided": draw(st.booleans()),
        "magnitude": draw(st.sampled_from([1.0, 3.0])),
        "seed": draw(SEEDS),
    }


@st.composite
def prefill_specs(draw: st.DrawFn, *, clean: bool = False, formats: tuple[str, ...] = FORMATS) -> PrefillSpec:
    """Any valid `sparse_mla_prefill` call."""
    common = draw(latent(clean, formats))
    paged = common["format"] != "plain" or draw(st.booleans())
    kv_heads = draw(st.sampled_from([1, 1, 2])) if common["format"] == "plain" else 1
    return PrefillSpec(
        **common | {"heads": common["heads"] * kv_heads},
        kv_heads=kv_heads,
        tokens=draw(st.integers(0, 4)),
        rows=draw(st.sampled_from([20, 7, 70, 0, 1])),
        page_size=draw(st.sampled_from(PAGE_SIZES)) if paged else None,
        topk=draw(st.sampled_from(TOP_KS)),
        lens=draw(st.sampled_from(LENS)),
    )


@st.composite
def decode_specs(
    draw: st.DrawFn,
    *,
    clean: bool = False,
    sparse: bool | None = None,
    extra: bool | None = None,
    formats: tuple[str, ...] = FORMATS,
) -> DecodeSpec:
    """Any valid `mla_decode` call; `sparse` and `extra` (a second cache) can require a kind of call."""
    common = draw(latent(clean, formats))
    sparse = draw(st.booleans()) if sparse is None and not extra else bool(sparse or extra)
    kv_heads = 1 if sparse or common["format"] != "plain" else draw(st.sampled_from([1, 1, 2]))
    extra_topk = draw(st.sampled_from([1, 9, 17] if extra else [0, 0, 1, 9, 17])) if sparse else 0
    return DecodeSpec(
        **common | {"heads": common["heads"] * kv_heads},
        kv_heads=kv_heads,
        kv_lens=tuple(draw(st.lists(kv_len, min_size=1, max_size=3))),
        q_tokens=draw(st.sampled_from([1, 1, 2, 3])),
        page_size=draw(st.sampled_from(PAGE_SIZES)),
        causal=False if sparse else draw(st.booleans()),
        sliding_window=None if sparse else draw(st.sampled_from([None, None, None, 1, 5, 40])),
        soft_cap=draw(st.sampled_from([None, None, None, 2.0])),
        out_dtype=draw(st.sampled_from([None, None, None, "float32", "bfloat16", "float16"])),
        spare_columns=draw(st.sampled_from([0, 1, 3])),
        spare_pages=draw(st.sampled_from([0, 2])),
        invalid_pages=not clean and not sparse and draw(st.sampled_from([False, False, True])),
        garbage=not clean and draw(st.booleans()),
        topk=draw(st.sampled_from(TOP_KS)) if sparse else 0,
        lens=draw(st.sampled_from(LENS)) if sparse else None,
        lens_by_query=sparse and draw(st.booleans()),
        extra_topk=extra_topk,
        extra_format=draw(st.sampled_from([None, BESIDE.get(common["format"])])) if extra_topk else None,
        extra_slots=draw(st.sampled_from([20, 20, 20, 0, 1])) if extra_topk else 10,
        extra_page_size=draw(st.sampled_from(PAGE_SIZES)) if extra_topk else 3,
        extra_lens=draw(st.sampled_from(LENS)) if extra_topk else None,
        extra_lens_by_query=bool(extra_topk) and draw(st.booleans()),
    )


@st.composite
def quantize_specs(draw: st.DrawFn, *, special: bool = True) -> QuantizeSpec:
    """Any valid `quantize_mla_cache` call; if `special`, some rows hold NaN and infinities."""
    format = draw(st.sampled_from(QUANTISED))
    return QuantizeSpec(
        format=format,
        num_pages=draw(st.integers(0, 3)),
        page_size=draw(st.sampled_from([1, 2, 3, 7])),
        power_of_two_scales=only_powers(format) or draw(st.booleans()),
        reach=draw(st.sampled_from([0, 2, 6])),
        special=special and draw(st.booleans()),
        dtype=draw(st.sampled_from(DTYPES)),
        strided=draw(st.booleans()),
        seed=draw(SEEDS),
    )


dequantize_specs = st.builds(
    DequantizeSpec,
    format=st.sampled_from(QUANTISED),
    num_pages=st.integers(0, 3),
    page_size=st.sampled_from([1, 2, 3, 7]),
    scales=st.sampled_from([*latents.SCALES, None]),
    dtype=st.sampled_from(DTYPES),
    cache_dtype=st.sampled_from(BYTES),
    strided=st.booleans(),
    seed=SEEDS,
)


@st.composite
def latent_write_specs(draw: st.DrawFn, *, formats: tuple[str, ...] = FORMATS) -> LatentWriteSpec:
    """Any valid `write_mla_cache` call."""
    format = draw(st.sampled_from(formats))
    return LatentWriteSpec(
        format=format,
        tokens=draw(st.integers(0, 6)),
        num_pages=draw(st.sampled_from([0, 1, 3])),
        page_size=draw(st.sampled_from([1, 2, 3, 7])),
        kv_heads=draw(st.sampled_from([1, 3])) if format == "plain" else 1,
        d_qk=draw(st.sampled_from([16, 48, 80, 576])),
        power_of_two_scales=only_powers(format) or draw(st.booleans()),
        slots=draw(st.sampled_from(["int32", "int64"])),
        dtype=draw(st.sampled_from(DTYPES)),
        cache_dtype=draw(st.sampled_from(BYTES)),
        stored=draw(st.sampled_from([None, *QUANTIZED])) if format == "plain" else None,
        scale=draw(st.sampled_from([None, "power", "float", "array", "heads"])),
        rope=draw(st.sampled_from([None, None, "power", "float", "heads"])) if format == "plain" else None,
        d_v=draw(st.sampled_from([None, 0, 7, 16])),
        reach=draw(st.sampled_from([1.0, 1.0, 1000.0])),
        strided=draw(st.booleans()),
        seed=draw(SEEDS),
    )


slots_specs = st.builds(
    SlotsSpec,
    shape=st.sampled_from([(0,), (1,), (3,), (3, 7), (2, 3, 5), (1, 2, 3, 4), (2, 0)]),
    q_lens=st.none() | st.lists(st.integers(0, 20), max_size=5).map(tuple),
    spare_rows=st.integers(0, 3),
    spare_seqs=st.integers(0, 2),
    count=st.sampled_from(["none", "int", "array"]),
    columns=st.integers(0, 5),
    page_size=st.sampled_from([1, 2, 3, 64, 2**20, 2**31 - 1]),
    wild=st.booleans(),
    strided=st.booleans(),
    seed=SEEDS,
)


@st.composite
def schedule_specs(draw: st.DrawFn) -> ScheduleSpec:
    """Any valid `make_decode_schedule` call, dense or sparse."""
    topk = draw(st.sampled_from([0, 0, 1, 64, 100, 2048]))
    extra_topk = draw(st.sampled_from([None, 1, 128])) if topk else None
    return ScheduleSpec(
        seqs=draw(st.sampled_from([1, 2, 3, 17])),
        longest=draw(st.sampled_from([0, 1, 64, 65, 5000])),
        topk=topk,
        lens=draw(st.sampled_from(LENS)) if topk else None,
        lens_by_query=draw(st.booleans()),
        extra_topk=extra_topk,
        extra_lens=draw(st.sampled_from(LENS)) if extra_topk else None,
        q_tokens=draw(st.integers(1, 3)),
        heads=draw(st.sampled_from([1, 3, 64, 128])),
        num_parts=draw(st.sampled_from([None, 1, 2, 7, 33, 132])),
        overhead=draw(st.sampled_from([0, 3, 5])),
        seed=draw(SEEDS),
    )
