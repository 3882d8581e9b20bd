"""Calls over arrays with a stride of 0, such as a dummy cache or any other expanded array.

All slices of such an array along the axis with stride 0 share one copy in memory, so their values are equal.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ragged_attention.testing.blocks.oracle import check_scores, check_selected, check_top_k
from ragged_attention.testing.blocks.specs import BlocksSpec, TopKSpec
from ragged_attention.testing.drawing import Case, Check, on_cases
from ragged_attention.testing.heads_first.specs import ChunkSpec, PagedSpec, check_chunk, check_paged
from ragged_attention.testing.indexer.key_specs import SelectSpec
from ragged_attention.testing.indexer.oracle import check_logits, check_select, check_topk
from ragged_attention.testing.indexer.specs import BYTES, IndexerSpec
from ragged_attention.testing.mla.cache_specs import DequantizeSpec, QuantizeSpec, SlotsSpec
from ragged_attention.testing.mla.oracle import (
    check_decode,
    check_dequantize,
    check_prefill,
    check_quantize,
    check_slots,
)
from ragged_attention.testing.mla.ragged import RaggedLatentSpec
from ragged_attention.testing.mla.specs import DecodeSpec, PrefillSpec
from ragged_attention.testing.paged.oracle import check_attention, check_merge
from ragged_attention.testing.paged.specs import Spec
from ragged_attention.testing.paged.strategies import merge_batch
from ragged_attention.testing.runner import Runner
from ragged_attention.testing.varlen.oracle import check_varlen
from ragged_attention.testing.varlen.specs import VarlenSpec

# A check, the builder of its batch, and, for each argument with a stride of 0, the axis of this stride.
ExpandedCase = tuple[Callable[[Runner, Any], None], Callable[[], Any], dict[str, int]]


def expand(batch: Any, axes: dict[str, int]) -> Any:
    """The batch in which all slices of an argument in `axes`, along its axis there, equal the first slice.

    If the argument is a pair of arrays, this applies to both arrays.
    """

    def repeated(value: Any, axis: int) -> Any:
        if isinstance(value, tuple):
            return tuple(repeated(each, axis) for each in value)
        return np.repeat(np.take(value, [0], axis), value.shape[axis], axis)

    return batch.change(**{name: repeated(getattr(batch, name), axis) for name, axis in axes.items()}, expanded=axes)


def _attention() -> Iterator[ExpandedCase]:
    lens = ((1, 9), (4, 9))
    size: dict[str, Any] = {"page_size": 4, "num_kv_heads": 2, "group": 2}
    for spec in (
        Spec(lens=lens, **size),
        Spec(lens=lens, **size, combined=False, cache_dtype="int8", dtype="bfloat16"),
    ):
        for axes in ({"kv_pages": 0}, {"kv_pages": 1}, {"q": 0}, {"q": 1}, {"page_indices": 0, "kv_lens": 0}):
            yield check_attention, spec.build, axes
    yield check_attention, Spec(lens=lens, draft=4).build, {"draft_mask": 0}
    for axis in (0, 1, 2):
        yield check_paged, PagedSpec(spec=Spec(lens=lens, **size)).build, {"k_pages": axis, "v_pages": axis}
        yield check_chunk, ChunkSpec(spec=Spec(lens=lens, **size), length=9, chunk=4).build, {"k_pages": axis}


def _latents(format: str) -> Iterator[ExpandedCase]:
    d_v = 32 if format == "plain" else 512
    # These pages store the parts of their rows in separate planes, so axis 1 has no whole rows to repeat.
    for axis in (0,) if format in ("fp8_v4", "fp4_v41, page") else (0, 1):
        of_format: dict[str, Any] = {"format": format, "d_v": d_v, "page_size": 3, "heads": 2}
        tables = Spec(lens=((1, 9), (3, 7)), page_size=3, group=2)
        yield check_decode, DecodeSpec(**of_format, topk=0, kv_lens=(9, 7)).build, {"kv_cache": axis}
        yield check_decode, DecodeSpec(**of_format, topk=5, kv_lens=(9, 7)).build, {"kv_cache": axis}
        yield check_prefill, PrefillSpec(**of_format).build, {"kv": axis}
        yield check_attention, RaggedLatentSpec(tables=tables, format=format, d_v=d_v).build, {"kv_cache": axis}
        if format != "plain":
            yield check_dequantize, DequantizeSpec(format=format).build, {"cache": axis}
            yield check_quantize, QuantizeSpec(format=format.partition(",")[0]).build, {"kv": axis}


def _latent_lists() -> Iterator[ExpandedCase]:
    yield check_prefill, PrefillSpec(heads=2).build, {"kv": 0, "indices": 0}
    yield check_decode, DecodeSpec(topk=5, heads=2, lens="inside").build, {"indices": 0, "topk_lens": 0, "q": 0}
    yield check_slots, SlotsSpec().build, {"positions": 0, "page_indices": 0}


def _indexer() -> Iterator[ExpandedCase]:
    for spec in (
        IndexerSpec(lens=((1, 9), (3, 7)), scaled=True),
        IndexerSpec(lens=((1, 9), (3, 7)), cache_dtype=BYTES),
    ):
        for axes in ({"keys": 0}, {"q": 0, "weights": 0}):
            yield check_logits, spec.build, axes
            yield check_topk, spec.build_topk, axes
    yield check_logits, IndexerSpec(lens=((1, 9),), scaled=True).build, {"keys": 1, "key_scale": 1}
    yield check_logits, IndexerSpec(lens=((3, 9),), packed=True, scaled=True).build, {"keys": 0, "key_scale": 0}
    yield check_select, SelectSpec(columns=20).build, {"logits": 0, "starts": 0}


def _blocks() -> Iterator[ExpandedCase]:
    keys = IndexerSpec(lens=((1, 9), (3, 7)), scaled=True, heads=4)
    for spec in (BlocksSpec(keys=keys, key_heads=2), BlocksSpec(keys=dataclasses.replace(keys, cache_dtype=BYTES))):
        for axes in ({"keys": 0}, {"q": 0}, {"q": 1}):
            yield check_scores, spec.build, axes
            yield check_selected, spec.build, axes
    yield check_scores, BlocksSpec(keys=keys, key_heads=2).build, {"keys": 2, "key_scale": 2}
    yield check_top_k, TopKSpec(seen="all").build, {"scores": 0}


def _packed() -> Iterator[ExpandedCase]:
    for axes in ({"k": 0, "v": 0}, {"q": 0}, {"k": 1, "v": 1}):
        yield check_varlen, VarlenSpec(kv_heads=2, causal=True).build, axes
    yield check_merge, lambda: merge_batch((3, 4, 2, 16)), {"outs": 0, "lses": 0}


FORMATS = ("plain", "fp8_v32", "fp8_v4", "fp8_v41", "fp4_v41, page")
FAMILIES = {
    "attention": _attention,
    **{f"latents in {format}": functools.partial(_latents, format) for format in FORMATS},
    "lists of latents": _latent_lists,
    "the indexer": _indexer,
    "blocks": _blocks,
    "packed sequences": _packed,
}


def _cases(family: Callable[[], Iterator[ExpandedCase]]) -> Iterator[Case]:
    for check, build, axes in family():
        name = f"with strides of 0: {check.__name__}, {axes}"
        yield Case(name, check, lambda build=build, axes=axes: expand(build(), axes))


def corners() -> Iterator[Check]:
    """One check for each family of operations."""
    for name, family in FAMILIES.items():
        yield Check("corner", f"strides of 0, {name}", on_cases(functools.partial(_cases, family)))
