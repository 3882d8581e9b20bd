"""Named batches for the edge cases of the operations on latent caches."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from ragged_attention.testing import formats
from ragged_attention.testing.integers import INT32
from ragged_attention.testing.mla import latents
from ragged_attention.testing.mla.cache_specs import (
    DequantizeBatch,
    DequantizeSpec,
    LatentWriteBatch,
    LatentWriteSpec,
    QuantizeBatch,
    QuantizeSpec,
    ScheduleSpec,
    SlotsBatch,
    SlotsSpec,
)
from ragged_attention.testing.mla.specs import DecodeBatch, DecodeSpec, PrefillBatch, PrefillSpec

V32 = {"format": "fp8_v32", "d_v": 512}
V4 = {"format": "fp8_v4", "d_v": 512}
V41 = {"format": "fp8_v41", "d_v": 512}
FP4 = {"format": "fp4_v41", "d_v": 512}
PAGES_OF_64: dict[str, Any] = {"page_size": 64}
EVERY_FORMAT: dict[str, dict[str, Any]] = {
    "576/512": {"d_qk": 576, "d_v": 512, "dtype": "bfloat16"},
    **{of["format"]: of | {"page_size": 64, "dtype": "bfloat16"} for of in (V32, V4, V41, FP4)},
}
V41_PAGE, FP4_PAGE = {"format": "fp8_v41, page", "d_v": 512}, {"format": "fp4_v41, page", "d_v": 512}

_PREFILLS: dict[str, PrefillSpec] = {
    # Lists.
    "one key": PrefillSpec(tokens=1, rows=1, topk=1, entries="distinct"),
    "odd top-k": PrefillSpec(topk=13, heads=3, poison="nan"),
    "top-k longer than the rows": PrefillSpec(topk=40, rows=9, entries="distinct", poison="nan"),
    "many blocks of keys": PrefillSpec(tokens=2, rows=300, topk=261, heads=2, dtype="bfloat16", poison="nan"),
    "duplicates": PrefillSpec(topk=33, rows=5, entries="any", dtype="bfloat16", seed=3),
    "one row over and over": PrefillSpec(topk=21, entries="repeated", poison="nan"),
    "indices of all kinds anywhere": PrefillSpec(tokens=4, topk=24, seed=5, poison="inf"),
    "no index valid": PrefillSpec(entries="none", topk=17, poison="nan"),
    "no index valid, with sinks": PrefillSpec(entries="none", heads=5, sinks="mixed"),
    "no rows": PrefillSpec(rows=0, sinks="normal"),
    "to float32": PrefillSpec(dtype="bfloat16", out_dtype="float32", topk=12, sinks="normal", poison="nan"),
    "to float16": PrefillSpec(dtype="bfloat16", out_dtype="float16", topk=9, heads=5),
    "no tokens": PrefillSpec(tokens=0),
    "lengths": PrefillSpec(tokens=6, topk=12, lens="inside", poison="nan", dtype="bfloat16"),
    "lengths over top-k and negative": PrefillSpec(tokens=8, topk=9, lens="wild", poison="nan", seed=1),
    "lengths 0": PrefillSpec(lens="zero", sinks="normal", poison="nan"),
    **{
        f"lengths 0, {name}, {heads} heads": PrefillSpec(**of_format, heads=heads, lens="zero", sinks="normal")
        for name, of_format in EVERY_FORMAT.items()
        for heads in (16, 64)
    },
    # Heads, widths, dtypes.
    **{f"{heads} heads": PrefillSpec(heads=heads, topk=11, dtype="bfloat16") for heads in (3, 7, 16, 17)},
    "128 heads": PrefillSpec(tokens=1, heads=128, topk=5, rows=8, dtype="bfloat16"),
    "two KV heads": PrefillSpec(heads=6, kv_heads=2, topk=9, lens="inside", poison="nan"),
    "V as wide as K": PrefillSpec(d_qk=64, d_v=64, heads=2),
    "V of 16": PrefillSpec(d_qk=208, d_v=16, heads=2, poison="nan"),
    "V wider than any tile of the rest": PrefillSpec(d_qk=112, d_v=96, dtype="float16"),
    "576/512": PrefillSpec(d_qk=576, d_v=512, heads=16, dtype="bfloat16", topk=9, lens="wild", poison="nan"),
    "512/512": PrefillSpec(d_qk=512, d_v=512, heads=4, dtype="float16", topk=5, sinks="mixed", poison="nan"),
    "float16": PrefillSpec(dtype="float16", heads=2, topk=15, magnitude=3.0),
    # Logits and sinks.
    "sm_scale": PrefillSpec(sm_scale=0.5, heads=3, topk=19),
    "sm_scale 0": PrefillSpec(sm_scale=0.0, topk=7),
    "sm_scale negative": PrefillSpec(sm_scale=-0.7, topk=16, heads=2, magnitude=3.0),
    "large logits": PrefillSpec(sm_scale=10.0, magnitude=5.0, topk=16),
    "sinks": PrefillSpec(sinks="normal", heads=7, topk=10, dtype="bfloat16"),
    "sinks -inf": PrefillSpec(sinks="-inf", heads=2),
    "sinks +inf": PrefillSpec(sinks="+inf", heads=2),
    "sinks of all kinds": PrefillSpec(sinks="mixed", heads=9, tokens=4, lens="wild", seed=2),
    # Rows.
    "pages of 1": PrefillSpec(page_size=1, poison="nan"),
    "pages of 7": PrefillSpec(page_size=7, rows=30, topk=15, dtype="bfloat16", poison="nan"),
    "pages of two KV heads": PrefillSpec(page_size=3, heads=4, kv_heads=2, poison="nan"),
    "fp8_v32": PrefillSpec(**V32, page_size=3, heads=2, topk=9, dtype="bfloat16", poison="nan"),
    "fp8_v4": PrefillSpec(**V4, page_size=5, heads=2, topk=9, dtype="bfloat16", poison="nan"),
    "fp8_v4, garbage around": PrefillSpec(**V4, page_size=2, lens="wild", poison="inf", cache_dtype="int8"),
    "fp8_v32, V of 64": PrefillSpec(format="fp8_v32", d_v=64, page_size=4, poison="nan", dtype="float16"),
    "fp8_v41": PrefillSpec(**V41, page_size=3, heads=2, topk=9, dtype="bfloat16", poison="nan"),
    "fp4_v41": PrefillSpec(**FP4, page_size=5, heads=2, topk=9, dtype="bfloat16", poison="nan"),
    "fp8_v41, page": PrefillSpec(**V41_PAGE, page_size=5, heads=2, lens="wild", poison="inf", cache_dtype="int8"),
    "fp4_v41, page": PrefillSpec(**FP4_PAGE, page_size=2, heads=17, topk=13, dtype="float16", poison="nan"),
    "fp4_v41, V of 64": PrefillSpec(format="fp4_v41", d_v=64, page_size=4, poison="nan", dtype="float32"),
    # Models without rotary columns, with their head counts and top-k.
    "512/512, 12 heads, top-k 640": PrefillSpec(
        d_qk=512, d_v=512, tokens=2, heads=12, rows=900, topk=640, lens="inside", dtype="bfloat16", poison="nan"
    ),
    "fp8_v41, 12 heads, top-k 1152": PrefillSpec(
        **V41, tokens=1, heads=12, rows=1300, page_size=64, topk=1152, dtype="bfloat16", poison="nan"
    ),
    "256/256": PrefillSpec(d_qk=256, d_v=256, heads=12, topk=40, rows=60, dtype="bfloat16", poison="nan"),
    "strided": PrefillSpec(strided=True, heads=3, sinks="normal", lens="inside", dtype="bfloat16"),
    "strided pages": PrefillSpec(strided=True, page_size=3, heads=2),
    "strided fp8_v4": PrefillSpec(**V4, strided=True, page_size=3, dtype="bfloat16"),
    "strided fp8_v41, page": PrefillSpec(**V41_PAGE, strided=True, page_size=3, dtype="bfloat16"),
    "strided fp4_v41": PrefillSpec(**FP4, strided=True, page_size=3, dtype="bfloat16"),
}  # fmt: skip


def _wild_everywhere() -> PrefillBatch:
    """A batch with invalid indices that a kernel could mistake for rows, among valid ones."""
    batch = PrefillSpec(tokens=1, rows=6, topk=16, entries="distinct").build()
    indices = batch.indices.copy()
    indices[0, 0] = [5, -1, 6, 7, INT32.max, INT32.min, -6, 0, 2**30, 2**16, 2**24, -(2**31) + 5, 5, 3, 2147480000, 1]
    return batch.change(indices=indices)


def _explicit_format() -> PrefillBatch:
    batch = PrefillSpec(**V4, page_size=3, topk=5).build()
    return batch.change(cache_format="fp8_v4", cache_dtype="float8_e4m3fn")


PREFILL_CORNERS: dict[str, Callable[[], PrefillBatch]] = {
    **{name: spec.build for name, spec in _PREFILLS.items()},
    "indices next to the rows": _wild_everywhere,
    "cache_format given": _explicit_format,
}

_DECODES: dict[str, DecodeSpec] = {
    # Dense.
    "dense": DecodeSpec(topk=0, kv_lens=(17, 1, 40), heads=3, poison="nan", garbage=True, spare_columns=2),
    "dense, a long sequence": DecodeSpec(topk=0, kv_lens=(700, 3), page_size=16, heads=2, dtype="bfloat16"),
    "dense, no keys": DecodeSpec(topk=0, kv_lens=(0, 9, 0), garbage=True, spare_columns=1, poison="nan"),
    **{
        f"lengths 0, {name}, {heads} heads": DecodeSpec(
            **of_format | PAGES_OF_64, heads=heads, lens="zero", sinks="normal"
        )
        for name, of_format in EVERY_FORMAT.items()
        for heads in (16, 64)
    },
    "dense, no keys, 576/512, 64 heads": DecodeSpec(
        **EVERY_FORMAT["576/512"], topk=0, kv_lens=(0, 0), page_size=64, heads=64, sinks="normal"
    ),
    "dense, no keys with sinks": DecodeSpec(topk=0, kv_lens=(0, 9), heads=5, sinks="mixed"),
    "dense, empty cache": DecodeSpec(topk=0, kv_lens=(0, 0), spare_pages=0, sinks="normal"),
    "dense, more queries than keys": DecodeSpec(topk=0, kv_lens=(1, 2, 5), q_tokens=4, heads=2, causal=True),
    "dense, causal": DecodeSpec(topk=0, kv_lens=(33, 20), q_tokens=3, heads=5, causal=True, dtype="bfloat16"),
    "dense, not causal": DecodeSpec(topk=0, kv_lens=(33, 20), q_tokens=3, heads=5, poison="nan"),
    "dense, many query tokens": DecodeSpec(topk=0, kv_lens=(30,), q_tokens=21, heads=1, causal=True, magnitude=3.0),
    "dense, two KV heads": DecodeSpec(topk=0, heads=6, kv_heads=2, q_tokens=2, causal=True, poison="nan"),
    "dense, pages of 1": DecodeSpec(topk=0, page_size=1, poison="nan", garbage=True, spare_columns=3),
    "dense, pages of 61": DecodeSpec(topk=0, page_size=61, kv_lens=(130, 61), dtype="float16", poison="nan"),
    "dense, pages of 64": DecodeSpec(
        topk=0, page_size=64, kv_lens=(200, 64, 1, 129), heads=3, causal=True, dtype="bfloat16", poison="nan"
    ),
    "dense, pages of 128 with two KV heads": DecodeSpec(
        topk=0, page_size=128, kv_lens=(300, 130), heads=4, kv_heads=2, dtype="bfloat16", invalid_pages=True
    ),
    "dense, invalid page indices": DecodeSpec(topk=0, invalid_pages=True, page_size=2, kv_lens=(30, 11), poison="nan"),
    "dense, 128 heads": DecodeSpec(topk=0, heads=128, kv_lens=(7,), dtype="bfloat16"),
    "dense, 576/512": DecodeSpec(
        topk=0, heads=7, kv_lens=(20, 0), d_qk=576, d_v=512, dtype="bfloat16", q_tokens=2, causal=True, poison="nan"
    ),
    "dense, fp8_v32": DecodeSpec(**V32, topk=0, heads=3, kv_lens=(9, 21), dtype="bfloat16", poison="nan"),
    "dense, fp8_v4": DecodeSpec(**V4, topk=0, heads=3, kv_lens=(9, 21), dtype="float16", poison="nan", causal=True),
    "dense, fp8_v41": DecodeSpec(**V41, topk=0, heads=3, kv_lens=(9, 21), dtype="bfloat16", poison="nan"),
    "dense, fp8_v41, page": DecodeSpec(
        **V41_PAGE, topk=0, heads=3, kv_lens=(9, 21), dtype="float16", poison="nan", causal=True
    ),
    "dense, fp4_v41": DecodeSpec(**FP4, topk=0, heads=3, kv_lens=(9, 21), dtype="bfloat16", poison="nan", causal=True),
    "dense, fp4_v41, page": DecodeSpec(
        **FP4_PAGE, topk=0, heads=12, kv_lens=(70, 0), page_size=64, q_tokens=2, dtype="bfloat16", poison="nan"
    ),
    "dense, strided": DecodeSpec(topk=0, strided=True, heads=2, q_tokens=2, sinks="normal", dtype="bfloat16"),
    "dense, sinks of all kinds": DecodeSpec(topk=0, heads=9, sinks="mixed", q_tokens=2),
    # Sparse.
    "one key": DecodeSpec(kv_lens=(1,), topk=1, entries="distinct"),
    "odd top-k": DecodeSpec(topk=13, heads=3, q_tokens=2, poison="nan"),
    "many blocks of keys": DecodeSpec(topk=261, kv_lens=(300, 40), page_size=16, dtype="bfloat16", poison="nan"),
    "duplicates": DecodeSpec(topk=33, kv_lens=(5, 3), dtype="bfloat16"),
    "one slot over and over": DecodeSpec(topk=21, entries="repeated", poison="nan"),
    "no index valid": DecodeSpec(topk=17, entries="none", sinks="mixed", heads=3, poison="nan"),
    "empty cache": DecodeSpec(topk=5, kv_lens=(0, 0), spare_pages=0, sinks="normal"),
    "lengths": DecodeSpec(topk=12, lens="inside", q_tokens=2, heads=2, poison="nan", dtype="bfloat16"),
    "lengths of queries": DecodeSpec(topk=12, lens="inside", lens_by_query=True, q_tokens=3, heads=2, poison="nan"),
    "lengths over top-k and negative": DecodeSpec(topk=9, lens="wild", kv_lens=(9,) * 6, poison="nan"),
    "lengths of queries over top-k and negative": DecodeSpec(
        topk=9, lens="wild", lens_by_query=True, q_tokens=4, poison="nan"
    ),
    "lengths 0": DecodeSpec(topk=9, lens="zero", sinks="normal", poison="nan"),
    **{f"{heads} heads": DecodeSpec(topk=11, heads=heads, dtype="bfloat16") for heads in (7, 16, 17)},
    "128 heads": DecodeSpec(topk=5, heads=128, kv_lens=(9,), dtype="bfloat16"),
    # Sizes for the widest matrix instructions, with more keys than one instruction takes.
    "576/512, 64 heads": DecodeSpec(
        topk=150, heads=64, d_qk=576, d_v=512, kv_lens=(300,), page_size=16, lens="inside", dtype="bfloat16",
        poison="nan",
    ),
    "fp8_v32, 64 heads": DecodeSpec(
        **V32, topk=100, heads=64, kv_lens=(300,), scales="far apart", lens="inside", dtype="bfloat16", poison="nan"
    ),
    "fp8_v4, 64 heads": DecodeSpec(
        **V4, topk=70, extra_topk=40, heads=64, kv_lens=(300,), page_size=16, sinks="mixed", dtype="bfloat16",
        poison="nan",
    ),
    "576/512": DecodeSpec(topk=9, heads=16, d_qk=576, d_v=512, dtype="bfloat16", q_tokens=2, poison="nan"),
    "sm_scale": DecodeSpec(topk=19, sm_scale=0.5, magnitude=3.0),
    "sm_scale negative": DecodeSpec(topk=19, sm_scale=-0.5, magnitude=3.0),
    "sinks": DecodeSpec(topk=10, heads=7, sinks="normal", dtype="bfloat16"),
    "sinks +inf": DecodeSpec(topk=10, heads=2, sinks="+inf"),
    "sinks -inf": DecodeSpec(topk=10, heads=2, sinks="-inf"),
    "strided": DecodeSpec(topk=9, strided=True, heads=2, q_tokens=2, lens="inside", dtype="float16"),
    "fp8_v32": DecodeSpec(**V32, topk=9, heads=3, q_tokens=2, page_size=3, dtype="bfloat16", poison="nan"),
    "fp8_v32, many blocks of keys": DecodeSpec(
        **V32, topk=261, kv_lens=(300, 40), page_size=16, heads=2, scales="far apart", magnitude=3.0, sm_scale=-1.0,
        dtype="bfloat16", lens="inside", poison="nan",
    ),
    # More sequences than parts of a schedule, so that one part has several.
    "fp8_v32, many short lists": DecodeSpec(
        **V32, topk=70, heads=9, kv_lens=(40, 90, 1, 80, 9, 75, 20), page_size=16, dtype="bfloat16", poison="nan"
    ),
    **{
        f"fp8_v32, {heads} heads": DecodeSpec(
            **V32, topk=390, heads=heads, kv_lens=(400, 9), page_size=16, scales=scales, sinks="mixed",
            dtype="bfloat16", poison="nan",
        )
        for heads, scales in ((13, "far apart"), (27, "any sign"))
    },
    "fp8_v4": DecodeSpec(**V4, topk=9, heads=3, q_tokens=2, page_size=3, dtype="bfloat16", poison="nan"),
    "fp8_v4, pages of 1": DecodeSpec(**V4, topk=9, page_size=1, lens="wild", poison="inf", dtype="float16"),
    "fp8_v4, pages of 61": DecodeSpec(**V4, topk=7, page_size=61, kv_lens=(70,), poison="nan"),
    **{
        f"fp8_v32, scales {scales}": DecodeSpec(**V32, topk=16, kv_lens=(30,), scales=scales, heads=2, dtype=dtype)
        for scales, dtype in (("powers", "float16"), ("far apart", "bfloat16"), ("any sign", "float32"))
    },
    "fp8_v4, scales far apart": DecodeSpec(**V4, topk=16, kv_lens=(30,), scales="far apart", dtype="bfloat16"),
    "fp8_v32 as int8, strided": DecodeSpec(**V32, topk=9, cache_dtype="int8", strided=True, poison="nan"),
    "fp8_v4 as float8, strided": DecodeSpec(**V4, topk=9, cache_dtype="float8_e4m3fn", strided=True, poison="nan"),
    "fp8_v41": DecodeSpec(**V41, topk=9, heads=3, q_tokens=2, page_size=3, dtype="bfloat16", poison="nan"),
    "fp8_v41, page": DecodeSpec(**V41_PAGE, topk=9, page_size=1, lens="wild", poison="inf", dtype="float16"),
    "fp4_v41": DecodeSpec(**FP4, topk=9, heads=3, q_tokens=2, page_size=3, dtype="bfloat16", poison="nan"),
    "fp4_v41, page": DecodeSpec(**FP4_PAGE, topk=7, page_size=61, kv_lens=(70,), poison="nan"),
    "fp8_v41, 12 heads, top-k 640": DecodeSpec(
        **V41, topk=640, heads=12, kv_lens=(700,), page_size=64, dtype="bfloat16", lens="inside", poison="nan"
    ),
    "fp8_v41, 64 heads": DecodeSpec(
        **V41, topk=100, heads=64, kv_lens=(300,), scales="far apart", lens="inside", dtype="bfloat16", poison="nan"
    ),
    "fp4_v41, 64 heads": DecodeSpec(
        **FP4, topk=100, heads=64, kv_lens=(300,), scales="far apart", dtype="bfloat16", poison="nan"
    ),
    "fp4_v41, scales any sign": DecodeSpec(**FP4, topk=16, kv_lens=(30,), scales="any sign", heads=2),
    "fp4_v41 as int8, strided": DecodeSpec(**FP4, topk=9, cache_dtype="int8", strided=True, poison="nan"),
    "fp4_v41, page, strided": DecodeSpec(**FP4_PAGE, topk=9, strided=True, poison="nan", dtype="bfloat16"),
    "fp8_v41 as float8, page, strided": DecodeSpec(
        **V41_PAGE, topk=9, cache_dtype="float8_e4m3fn", strided=True, poison="nan"
    ),
    # A second cache.
    "extra cache": DecodeSpec(topk=9, extra_topk=7, heads=3, q_tokens=2, poison="nan"),
    "extra cache, pages of 1 and 61": DecodeSpec(
        topk=9, page_size=61, kv_lens=(70, 20), extra_topk=17, extra_page_size=1, dtype="bfloat16", poison="nan"
    ),
    "extra cache with lengths": DecodeSpec(
        topk=9, lens="inside", extra_topk=13, extra_lens="wild", extra_lens_by_query=True, q_tokens=3, poison="nan"
    ),
    "extra cache, lengths 0": DecodeSpec(topk=9, extra_topk=4, extra_lens="zero", poison="nan"),
    "extra cache alone": DecodeSpec(topk=9, lens="zero", extra_topk=14, sinks="normal", poison="nan"),
    "extra cache empty": DecodeSpec(topk=9, extra_topk=14, extra_slots=0),
    "extra cache longer by blocks": DecodeSpec(topk=5, extra_topk=200, extra_slots=90, extra_page_size=16),
    "extra cache fp8_v32": DecodeSpec(
        **V32, topk=6, extra_topk=7, page_size=2, extra_page_size=5, heads=2, dtype="bfloat16", poison="nan"
    ),
    "extra cache fp8_v4": DecodeSpec(
        **V4, topk=6, extra_topk=7, page_size=5, extra_page_size=2, heads=2, dtype="bfloat16", poison="nan"
    ),
    "extra cache fp4_v41 beside fp8_v41": DecodeSpec(
        **V41, topk=70, extra_format="fp4_v41", extra_topk=45, extra_slots=90, extra_lens="inside", kv_lens=(100, 7),
        page_size=5, extra_page_size=2, heads=3, q_tokens=2, dtype="bfloat16", poison="nan",
    ),
    "extra cache fp4_v41 beside fp8_v41, page": DecodeSpec(
        **V41_PAGE, topk=6, extra_format="fp4_v41, page", extra_topk=7, page_size=3, extra_page_size=64, heads=12,
        sinks="mixed", dtype="float16", poison="nan",
    ),
    "extra cache fp4_v41 beside fp8_v41, 64 heads": DecodeSpec(
        **V41, topk=70, extra_format="fp4_v41", extra_topk=45, extra_slots=90, kv_lens=(100,), heads=64,
        scales="far apart", dtype="bfloat16", poison="nan",
    ),
    "extra cache fp8_v41 beside fp4_v41": DecodeSpec(
        **FP4, topk=6, lens="wild", extra_format="fp8_v41", extra_topk=40, heads=2, poison="nan"
    ),
    "extra cache fp4_v41, 12 heads, top-k 640 and 512": DecodeSpec(
        **V41, topk=640, extra_format="fp4_v41", extra_topk=512, extra_slots=600, extra_page_size=64, kv_lens=(700,),
        page_size=256, heads=12, sinks="normal", dtype="bfloat16", poison="nan",
    ),
}  # fmt: skip


def _decode(**fields: Any) -> DecodeBatch:
    return DecodeSpec(topk=0, **fields).build()


def _changed(batch: DecodeBatch, name: str, entries: dict[Any, int]) -> DecodeBatch:
    """The batch with single entries of one of its arrays replaced."""
    array = getattr(batch, name).copy()
    for index, value in entries.items():
        array[index] = value
    return batch.change(**{name: array})


# Invalid index values, for which the results are still defined, and other special calls.
_VALUES: dict[str, Callable[[], DecodeBatch]] = {
    "dense, kv_len over what the table holds": lambda: _changed(_decode(), "kv_lens", {0: INT32.max, 1: 1000}),
    "dense, kv_len over the table, causal": lambda: _changed(
        _decode(q_tokens=3, causal=True, spare_columns=1), "kv_lens", {0: 1000, 1: 26}
    ),
    "dense, window": lambda: _decode(q_tokens=3, causal=True, sliding_window=4, poison="nan"),
    "dense, window, not causal": lambda: _decode(q_tokens=2, sliding_window=1, poison="nan"),
    "dense, window in a long sequence": lambda: _decode(
        kv_lens=(700, 3), page_size=16, causal=True, sliding_window=100, poison="nan", heads=16
    ),
    "dense, soft cap": lambda: _decode(soft_cap=2.0, sm_scale=0.5, heads=3),
    "soft cap and sinks": DecodeSpec(topk=8, soft_cap=1.0, sinks="normal", heads=2, extra_topk=5).build,
    "to float32": DecodeSpec(topk=8, dtype="bfloat16", out_dtype="float32").build,
    "dense, to float16": lambda: _decode(dtype="bfloat16", out_dtype="float16", causal=True),
    "dense, kv_len negative": lambda: _changed(_decode(), "kv_lens", {0: -1, 1: INT32.min}),
    "dense, tables without columns": lambda: _decode().change(page_indices=np.zeros((2, 0), np.int32)),
    "dense, shared pages": lambda: _decode().change(page_indices=np.ones((2, 5), np.int32)),
    "indices next to the slots": lambda: _changed(
        DecodeSpec(topk=8, kv_lens=(6,), entries="distinct", spare_pages=0).build(),
        "indices", {(0, 0, 1): 8, (0, 0, 2): 9, (0, 0, 5): -2, (0, 0, 7): INT32.min},
    ),
    "cache_format given": lambda: DecodeSpec(**V32, topk=5).build().change(cache_format="fp8_v32"),
}  # fmt: skip

DECODE_CORNERS: dict[str, Callable[[], DecodeBatch]] = {name: spec.build for name, spec in _DECODES.items()} | _VALUES
# Batches that are run with each set of options and with a schedule.
ON_EVERY_PATH = (
    "dense, a long sequence",
    "dense, pages of 128 with two KV heads",
    "dense, more queries than keys",
    "dense, sinks of all kinds",
    "many blocks of keys",
    "fp8_v32, many blocks of keys",
    "fp8_v32, many short lists",
    "extra cache with lengths",
    "extra cache fp8_v4",
    "extra cache fp4_v41 beside fp8_v41",
)
# Quantised caches, for backends that can dequantise a whole cache before they attend.
PREFILLS_DECODED: dict[str, PrefillSpec] = {
    **{name: _PREFILLS[name] for name in ("fp8_v32", "fp8_v4", "fp8_v4, garbage around", "strided fp8_v4")},
    "fp8_v32, garbage around": PrefillSpec(**V32, page_size=2, lens="wild", poison="inf", dtype="float16"),
    "strided fp8_v32": PrefillSpec(**V32, strided=True, page_size=3, dtype="bfloat16"),
    "fp8_v32, V as wide as K": PrefillSpec(format="fp8_v32", d_v=576, page_size=3, heads=3, poison="nan"),
    "fp8_v32, V of 64": _PREFILLS["fp8_v32, V of 64"],
    "fp8_v32, large logits": PrefillSpec(**V32, page_size=3, sm_scale=10.0, magnitude=5.0, topk=16),
    "fp8_v32, no rows": PrefillSpec(**V32, page_size=3, rows=0, sinks="normal"),
    "fp8_v32, blocks of keys and heads": PrefillSpec(
        **V32, tokens=2, rows=90, topk=70, heads=70, page_size=7, dtype="bfloat16", poison="nan"
    ),
    "fp8_v4, blocks of keys and heads": PrefillSpec(
        **V4, tokens=2, rows=90, topk=70, heads=70, page_size=7, dtype="bfloat16", poison="nan", lens="inside"
    ),
}

PREFILLS_ON_EVERY_PATH = ("many blocks of keys", "lengths over top-k and negative", "two KV heads", "fp8_v32")


def _special() -> dict[str, list[float]]:
    """Values for the groups of a row, by kind."""
    return {
        "nan": [np.nan, 1.0],
        "infinity": [np.inf, -np.inf, 1.0],
        "zeros": [0.0, -0.0],
        "floor": [1e-9, 4.5e-2, -4.4799998e-2, 4.48e-2],
        "ties": [448.0, 17.0, 19.0, 21.0, 2.0**-10, 3 * 2.0**-10, 5 * 2.0**-10, -464.0],
        "largest": [3.4028235e38, 1.0],
        "powers": [448.0, 447.99997, 448.00003, 224.0, 1e-30],
        "beyond every scale": [2688.0, -2700.0, 1e9],
    }


def _special_groups(format: str, **fields: Any) -> QuantizeBatch:
    kinds = list(_special().values())
    layout = latents.LAID_OUT[format]
    kv = np.zeros((1, len(kinds), 1, layout.width), np.float32)
    for token, values in enumerate(kinds):
        # Values are 64 columns apart, so that they are in several groups and in the rotary part. The last column of
        # each group has the first value.
        kv[0, token, 0, layout.group - 1 :: layout.group] = values[0]
        for index, value in enumerate(values):
            kv[0, token, 0, 64 * index + 3] = value
    return QuantizeBatch(kv=kv, format=layout.name, cache_layout=latents.layout_of(format), **fields)


def _halfway() -> QuantizeBatch:
    """Rows with the midpoints between e2m1 values and the floats next to these midpoints.

    The numbers have both signs. The scales are different powers of two.
    """
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    near = np.concatenate([np.nextafter(middles, np.float32(0)), middles, np.nextafter(middles, np.float32(9))])
    near = np.concatenate([near, -near, [0.0, -0.0]]).astype(np.float32)
    rows = np.full((1, 18, 1, 512), 6.0, np.float32)
    for group in range(32):
        values = np.resize(np.roll(near, 15 * group), 15)
        rows[..., 16 * group + 1 : 16 * group + 16] = values
    return QuantizeBatch(kv=rows * np.ldexp(np.float32(1), np.arange(-9, 9))[:, None, None], format="fp4_v41")


QUANTIZE_CORNERS: dict[str, Callable[[], QuantizeBatch]] = {
    **{
        f"{format}, {dtype}": QuantizeSpec(format=format, dtype=dtype).build
        for format in latents.LAID_OUT
        for dtype in ("float32", "bfloat16", "float16")
    },
    "fp8_v32, scales as they come": QuantizeSpec(power_of_two_scales=False, reach=3).build,
    "fp8_v32, bfloat16, scales as they come": QuantizeSpec(power_of_two_scales=False, dtype="bfloat16").build,
    "fp8_v32, special values": lambda: _special_groups("fp8_v32"),
    "fp8_v32, special values, scales as they come": lambda: _special_groups("fp8_v32", power_of_two_scales=False),
    "fp8_v4, special values": lambda: _special_groups("fp8_v4"),
    "fp8_v4, every size": QuantizeSpec(format="fp8_v4", reach=6).build,
    "fp8_v41, special values": lambda: _special_groups("fp8_v41"),
    "fp8_v41, page, every size": QuantizeSpec(format="fp8_v41, page", reach=6).build,
    "fp4_v41, special values": lambda: _special_groups("fp4_v41"),
    "fp4_v41, page, special values": lambda: _special_groups("fp4_v41, page"),
    "fp4_v41, every size": QuantizeSpec(format="fp4_v41", reach=6, dtype="bfloat16").build,
    "fp4_v41, halfway between codes": lambda: _halfway(),
    "fp4_v41, strided": QuantizeSpec(format="fp4_v41", strided=True, page_size=7).build,
    "fp4_v41, powers of two not asked for": QuantizeSpec(format="fp4_v41", power_of_two_scales=False).build,
    "no pages": QuantizeSpec(num_pages=0).build,
    "pages of 1": QuantizeSpec(format="fp8_v4", page_size=1).build,
    "pages of 64": QuantizeSpec(format="fp8_v4", page_size=64, num_pages=1, dtype="bfloat16").build,
    "strided": QuantizeSpec(strided=True, dtype="bfloat16").build,
}


def _every_code(format: str) -> DequantizeBatch:
    """All 256 codes, with scales that are powers of two."""
    batch = DequantizeSpec(format=format, scales="powers").build()
    cache = batch.cache.copy()
    fields = latents.fields_of(cache, format)
    fields.values[...] = np.arange(fields.values.size, dtype=np.int64).reshape(fields.values.shape) % 256
    return batch.change(cache=cache)


def _every_power() -> DequantizeBatch:
    """All scales of `fp8_v4` except the smallest few, for which devices may flush products to zero."""
    batch = DequantizeSpec(format="fp8_v4", num_pages=1, page_size=256, scales="powers").build()
    cache = batch.cache.copy()
    fields = latents.fields_of(cache, "fp8_v4")
    fields.scales[...] = np.arange(256, dtype=np.uint8).clip(12)[None, :, None]
    return batch.change(cache=cache)


def _every_fp4_scale() -> DequantizeBatch:
    """All scales of `fp4_v41` with all pairs of codes."""
    batch = DequantizeSpec(format="fp4_v41", num_pages=1, page_size=256, scales="powers").build()
    cache = batch.cache.copy()
    fields = latents.fields_of(cache, "fp4_v41")
    fields.scales[...] = np.arange(256, dtype=np.uint8)[None, :, None]
    fields.values[...] = np.arange(256, dtype=np.uint8)
    return batch.change(cache=cache)


DEQUANTIZE_CORNERS: dict[str, Callable[[], DequantizeBatch]] = {
    **{
        f"{format} to {dtype}": DequantizeSpec(format=format, dtype=dtype).build
        for format in latents.LAID_OUT
        for dtype in ("float32", "bfloat16", "float16")
    },
    **{f"{format}, every code": lambda format=format: _every_code(format) for format in latents.LAID_OUT},
    "fp8_v4, every scale": _every_power,
    "fp4_v41, every scale": _every_fp4_scale,
    "fp4_v41, any bytes": DequantizeSpec(format="fp4_v41, page", scales=None, strided=True).build,
    "fp8_v32, any bytes": DequantizeSpec(scales=None).build,
    "fp8_v32, scales of any sign": DequantizeSpec(scales="any sign", dtype="bfloat16").build,
    "no pages": DequantizeSpec(num_pages=0).build,
    "as float8": DequantizeSpec(format="fp8_v4", cache_dtype="float8_e4m3fn").build,
    "as int8, strided": DequantizeSpec(cache_dtype="int8", strided=True).build,
    "format given": lambda: DequantizeSpec(format="fp8_v4").build().change(format="fp8_v4"),
}


def _slots(spec: LatentWriteSpec, slots: list[int], dtype: str = "int32") -> LatentWriteBatch:
    batch = dataclasses.replace(spec, tokens=len(slots)).build()
    return batch.change(kv=formats.rounded(np.nan_to_num(batch.kv), spec.dtype), slot_mapping=np.array(slots, dtype))


LATENT_WRITE_CORNERS: dict[str, Callable[[], LatentWriteBatch]] = {
    **{
        f"plain, {dtype}": LatentWriteSpec(dtype=dtype, d_qk=80, kv_heads=2).build
        for dtype in ("float32", "bfloat16", "float16")
    },
    **{
        f"{format}, {dtype}": LatentWriteSpec(format=format, dtype=dtype).build
        for format in latents.LAID_OUT
        for dtype in ("float32", "bfloat16")
    },
    "fp8_v32, scales as they come": LatentWriteSpec(format="fp8_v32", power_of_two_scales=False).build,
    "fp8_v4, pages of 1": LatentWriteSpec(format="fp8_v4", page_size=1, num_pages=9).build,
    "fp8_v4, pages of 61": LatentWriteSpec(format="fp8_v4", page_size=61, tokens=9).build,
    "fp8_v41, page, pages of 61": LatentWriteSpec(format="fp8_v41, page", page_size=61, tokens=9).build,
    "fp4_v41, page, pages of 1": LatentWriteSpec(format="fp4_v41, page", page_size=1, num_pages=9).build,
    "strided fp8_v41": LatentWriteSpec(format="fp8_v41", strided=True, dtype="bfloat16").build,
    "strided fp4_v41, page": LatentWriteSpec(format="fp4_v41, page", strided=True, cache_dtype="float8_e4m3fn").build,
    "no tokens": LatentWriteSpec(format="fp8_v4", tokens=0).build,
    "a cache without pages": LatentWriteSpec(num_pages=0).build,
    "first and last slot": lambda: _slots(LatentWriteSpec(format="fp8_v4"), [11, 0, 12, -1]),
    "slots far outside": lambda: _slots(
        LatentWriteSpec(), [-1, 0, 2**32, 2**32 + 1, -(2**63), 2**63 - 1, 2**31, -(2**32), 5], "int64"
    ),
    "strided": LatentWriteSpec(strided=True, dtype="bfloat16").build,
    "strided fp8_v32": LatentWriteSpec(format="fp8_v32", strided=True, dtype="bfloat16").build,
    "strided fp8_v4": LatentWriteSpec(format="fp8_v4", strided=True, cache_dtype="float8_e4m3fn").build,
    "cache_format given": lambda: LatentWriteSpec(format="fp8_v4").build().change(cache_format="fp8_v4"),
    **{
        f"plain {stored}, scale {scale}": LatentWriteSpec(
            stored=stored, dtype=dtype, scale=scale, kv_heads=2, d_qk=80
        ).build
        for stored, dtype, scale in (
            ("float8_e4m3fn", "bfloat16", "heads"), ("float8_e4m3fn", "float32", None),
            ("float8_e5m2", "float16", "power"), ("int8", "bfloat16", "float"),
        )
    },
    "values beyond float8_e4m3fn": LatentWriteSpec(stored="float8_e4m3fn", reach=1e4).build,
    "values beyond int8": LatentWriteSpec(stored="int8", reach=1e4, scale="array").build,
    "scaled float32": LatentWriteSpec(scale="power").build,
    "two scales": LatentWriteSpec(stored="float8_e4m3fn", dtype="bfloat16", scale="float", rope="power").build,
    "two scales, KV heads": LatentWriteSpec(
        stored="int8", scale="heads", rope="heads", kv_heads=3, d_qk=80, d_v=64
    ).build,
    "two scales, float8_e4m3fnuz": LatentWriteSpec(
        stored="float8_e4m3fnuz", rope="float", d_v=5, reach=100.0, strided=True
    ).build,
    "two scales, float32": LatentWriteSpec(rope="power", d_v=0).build,
    "two scales, bfloat16": LatentWriteSpec(scale="power", rope="heads", dtype="bfloat16", d_v=48).build,
    "strided float8_e5m2": LatentWriteSpec(stored="float8_e5m2", strided=True, dtype="bfloat16").build,
}  # fmt: skip


def _large_slots() -> SlotsBatch:
    """Slots below and above the largest int32."""
    positions = np.array([[0, 1, 2**20 - 1, 2**20, 2**21 - 1, 2**22]], np.int32)
    return SlotsBatch(positions=positions, page_indices=np.array([[2047, 2048, 1]], np.int32), page_size=2**20)


SLOTS_CORNERS: dict[str, Callable[[], SlotsBatch]] = {
    "positions of queries": SlotsSpec(shape=(2, 3, 9), wild=False).build,
    "one position a sequence": SlotsSpec(shape=(5,), wild=False).build,
    "positions of all kinds": SlotsSpec(shape=(3, 20)).build,
    "pages of 1": SlotsSpec(page_size=1).build,
    "tables without columns": SlotsSpec(columns=0).build,
    "no sequences": SlotsSpec(shape=(0, 3)).build,
    "slots beyond int32": _large_slots,
    "pages as large as can be": SlotsSpec(page_size=2**31 - 1, columns=2).build,
    "strided": SlotsSpec(strided=True).build,
    "ragged": SlotsSpec(q_lens=(1, 17, 0, 5)).build,
    "ragged, with padding": SlotsSpec(q_lens=(1, 40), spare_rows=3, spare_seqs=2, count="array", shape=(0, 2, 5)).build,
    "ragged, strided": SlotsSpec(q_lens=(3, 2), spare_seqs=1, count="int", strided=True).build,
    "ragged, no live sequence": SlotsSpec(q_lens=(), spare_rows=3, spare_seqs=2, count="array").build,
    "ragged, no sequence": SlotsSpec(q_lens=(), spare_rows=3).build,
    "ragged, tables without columns": SlotsSpec(q_lens=(2,), columns=0).build,
}

SCHEDULES: dict[str, ScheduleSpec] = {
    "dense": ScheduleSpec(),
    "dense, long and short": ScheduleSpec(seqs=17, longest=5000, num_parts=33),
    "dense, no keys": ScheduleSpec(longest=0),
    "sparse": ScheduleSpec(topk=2048, num_parts=7),
    "sparse, one part": ScheduleSpec(topk=2048, num_parts=1),
    "sparse, more parts than blocks": ScheduleSpec(topk=100, num_parts=132, overhead=0),
    "sparse, lengths": ScheduleSpec(topk=512, lens="wild", seqs=9),
    "sparse, lengths of queries": ScheduleSpec(topk=512, lens="wild", lens_by_query=True),
    "sparse, extra cache": ScheduleSpec(topk=100, extra_topk=128, seqs=5),
    "sparse, extra cache with lengths": ScheduleSpec(topk=100, lens="zero", extra_topk=128, extra_lens="wild"),
    "as many parts as the device has room for": ScheduleSpec(num_parts=None, heads=128),
}
