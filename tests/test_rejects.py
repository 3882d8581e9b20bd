"""Every invalid call is refused with the same error and the same text by every front end."""

import ast
import dataclasses
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ragged_attention as ra
from ragged_attention import calls
from ragged_attention.errors import BackendMissing, InvalidInput, Unsupported
from ragged_attention.testing import formats
from ragged_attention.testing.runner import FRAMEWORKS, runner_for
from tests.arrays import ints


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def spans(*shape: int, dtype: Any = np.int32) -> np.ndarray:
    return np.zeros(shape, dtype)


class Codes(np.ndarray):
    """The bytes of float8_e4m3fn numbers. The tests pass them to a front end as an array of that dtype."""


def codes(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.uint8).view(Codes)


def raw(*shape: int) -> np.ndarray:
    """A uint8 cache."""
    return np.zeros(shape, np.uint8)


SCHEDULE = calls.DecodeSchedule(
    parts=np.zeros((3, 8), np.int32), num_splits=ints(0, 1, 2), lens=ints(3, 8), made_for=(2, 1, 4, 1, 0, 0)
)

# One valid call of each operation; a case below changes some of its arguments.
VALID: dict[str, dict[str, Any]] = {
    "ragged_paged_attention": {
        "q": ones(4, 4, 16),
        "kv_pages": ones(6, 4, 4, 16),
        "kv_lens": ints(3, 8),
        "page_indices": ints([0, 1], [2, 3]),
        "cu_q_lens": ints(0, 2, 4),
    },
    "write_kv_pages": {
        "k": ones(4, 2, 16),
        "v": ones(4, 2, 16),
        "kv_pages": ones(6, 4, 4, 16),
        "slot_mapping": ints(0, 1, 2, -1),
    },
    "norm_rope_write": {
        "q": ones(4, 4, 16),
        "k": ones(4, 2, 16),
        "v": ones(4, 2, 16),
        "kv_pages": ones(6, 4, 4, 16),
        "slot_mapping": ints(0, 1, 2, -1),
        "positions": ints(0, 1, 2, 9),
        "cos_sin": ones(4, 8),
    },
    "merge_attention_states": {"outs": ones(2, 3, 4, 16), "lses": ones(2, 3, 4)},
    "paged_attention": {
        "q": ones(2, 4, 16),
        "k_pages": ones(2, 6, 4, 16),
        "v_pages": ones(2, 6, 4, 16),
        "lengths": ints(3, 8),
        "page_indices": ints([0, 1], [2, 3]),
    },
    "prefill_attention": {
        "q": ones(4, 4, 16),
        "k_pages": ones(2, 6, 4, 16),
        "v_pages": ones(2, 6, 4, 16),
        "length": ints(7),
        "page_indices": ints(5, 0),
    },
    "sparse_mla_prefill": {
        "q": ones(3, 4, 32),
        "kv": ones(10, 1, 32),
        "indices": ints([[0, 9]], [[3, -1]], [[77, 1]]),
        "d_v": 16,
    },
    "sparse_mla_prefill_backward": {
        "d_out": ones(3, 4, 16),
        "q": ones(3, 4, 32),
        "kv": ones(10, 1, 32),
        "indices": ints([[0, 9]], [[3, -1]], [[77, 1]]),
        "out": ones(3, 4, 16),
        "lse": ones(3, 4),
        "d_v": 16,
    },
    "varlen_attention": {
        "q": ones(6, 4, 16),
        "k": ones(7, 2, 16),
        "v": ones(7, 2, 8),
        "cu_q_lens": ints(0, 2, 6),
        "cu_kv_lens": ints(0, 3, 7),
    },
    "varlen_attention_backward": {
        "d_out": ones(6, 4, 8),
        "q": ones(6, 4, 16),
        "k": ones(7, 2, 16),
        "v": ones(7, 2, 8),
        "out": ones(6, 4, 8),
        "lse": ones(6, 4),
        "cu_q_lens": ints(0, 2, 6),
        "cu_kv_lens": ints(0, 3, 7),
    },
    "mla_decode": {
        "q": ones(2, 1, 4, 32),
        "kv_cache": ones(6, 4, 1, 32),
        "page_indices": ints([0, 1], [2, 3]),
        "kv_lens": ints(3, 8),
        "d_v": 16,
        "schedule": SCHEDULE,
    },
    "ragged_mla_attention": {
        "q": ones(4, 4, 32),
        "kv_cache": ones(6, 4, 1, 32),
        "kv_lens": ints(3, 8),
        "page_indices": ints([0, 1], [2, 3]),
        "cu_q_lens": ints(0, 2, 4),
        "d_v": 16,
    },
    "make_decode_schedule": {"kv_lens": ints(3, 8), "batch_size": 2, "num_q_tokens": 1, "num_q_heads": 4},
    "quantize_mla_cache": {"kv": ones(2, 3, 1, 576), "format": "fp8_v32"},
    "dequantize_mla_cache": {"cache": raw(2, 3, 1, 656)},
    "write_mla_cache": {"kv": ones(3, 1, 32), "cache": ones(2, 3, 1, 32), "slot_mapping": ints(0, -1, 5)},
    "latent_norm_rope_write": {
        "q": ones(3, 4, 8),
        "kv": ones(3, 1, 32),
        "cache": ones(2, 3, 1, 32),
        "slot_mapping": ints(0, -1, 5),
        "positions": ints(0, 9, 2),
        "cos_sin": ones(4, 8),
    },
    "page_indices_to_slots": {"positions": ints([0, 5], [1, -1]), "page_indices": ints([0, 1], [2, 3]), "page_size": 4},
    "indexer_logits": {
        "q": ones(4, 3, 16), "keys": ones(6, 16), "weights": ones(4, 3), "starts": ints(0, 0, 2, 3),
        "stops": ints(1, 2, 3, 6),
    },
    "attention_target": {
        "q": ones(4, 3, 32), "keys": ones(6, 32), "lse": ones(4, 3), "indices": ints([0, 1], [2, 3], [-1, 0], [5, 5]),
    },
    "indexer_logits_backward": {
        "d_logits": ones(4, 6), "q": ones(4, 3, 16), "keys": ones(6, 16), "weights": ones(4, 3),
        "starts": ints(0, 0, 2, 3), "stops": ints(1, 2, 3, 6),
    },
    "indexer_topk": {
        "q": ones(4, 3, 16), "keys": raw(6, 4, 1, 20), "weights": ones(4, 3), "top_k": 2, "kv_lens": ints(3, 8),
        "page_indices": ints([0, 1], [2, 3]), "cu_q_lens": ints(0, 2, 4),
    },
    "top_k_indices": {"logits": ones(3, 9), "top_k": 2},
    "block_scores": {
        "q": ones(4, 6, 16), "keys": ones(6, 2, 16), "block_size": 4, "starts": ints(0, 0, 2, 3),
        "stops": ints(1, 2, 3, 6),
    },
    "select_blocks": {
        "q": ones(4, 6, 16), "keys": raw(6, 4, 1, 20), "top_k": 2, "block_size": 4, "kv_lens": ints(3, 8),
        "page_indices": ints([0, 1], [2, 3]), "cu_q_lens": ints(0, 2, 4),
    },
    "top_k_blocks": {"scores": ones(3, 2, 9), "top_k": 2},
    "quantize_kv": {"x": ones(3, 2, 32), "format": "nvfp4"},
    "dequantize_kv": {"codes": raw(3, 2, 16), "scales": ones(3, 2)},
    "quantize_indexer_keys": {"k": ones(3, 16)},
    "write_indexer_cache": {"k": ones(3, 16), "cache": raw(2, 3, 1, 20), "slot_mapping": ints(0, -1, 5)},
}  # fmt: skip
TABLES = {"slot_mapping": None, "kv_lens": ints(3, 8), "page_indices": ints([0, 1], [2, 3]), "cu_q_lens": ints(0, 2, 4)}
FLOATS = "float32 or float16 or bfloat16"
CONVERT = ": convert it once, by .float() in torch or .astype('float32') in jax"
PLAIN_8_BIT = ": a plain 8-bit cache is for dense attention, by ragged_mla_attention"
EIGHT_BIT = "float8_e4m3fn or float8_e5m2 or float8_e4m3fnuz or int8"
NO_SCALES = "their elements hold 4-bit codes, which have scales of their own"
BYTES_OF_SCALES = (
    "view the bytes as float8_e4m3fn (nvfp4) or float8_e8m0fnu (mxfp8, mxfp4), as by .view(torch.float8_e4m3fn)"
)
CACHES = f"{FLOATS} or {EIGHT_BIT}"
BYTES = "uint8 or float8_e4m3fn or int8"
KV_FORMATS = " or ".join(dict.fromkeys(repr(form.name) for form in formats.SCALED.values()))
# Changes that turn the dense decode into a sparse one, over one cache or two.
LISTS = {"page_indices": None, "kv_lens": None, "schedule": None, "indices": ints([[0, 5, -1]], [[1, 23, 24]])}
TWO = LISTS | {"extra_kv_cache": ones(3, 2, 1, 32), "extra_indices": ints([[0, 5]], [[-1, 7]])}
# Heads-first pages of 8 bits, with their scales.
INT8_PAGES, INT8_ROWS, INT8_NEW = (ones(*shape, dtype=np.int8) for shape in ((6, 4, 4, 16), (6, 4, 2, 16), (4, 2, 16)))
GIVE_K, GIVE_V = (f"got none: pass {name}=1.0 if the codes are the values" for name in ("k_scale", "v_scale"))
CODES, SCALES = ones(2, 6, 4, 16, dtype=np.int8), ones(2, 6, 4, 1)
# The changes for a sparse decode over uint8 caches.
BYTE_LISTS = LISTS | {"q": ones(2, 1, 4, 576), "kv_cache": raw(6, 4, 1, 656)}
V41_LISTS = LISTS | {"q": ones(2, 1, 4, 512), "kv_cache": raw(6, 4, 1, 528)}


@dataclasses.dataclass(frozen=True)
class Case:
    operation: str
    changes: dict[str, Any]
    error: type[Exception]
    text: str


def attention(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("ragged_paged_attention", changes, error, text)


def write(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("write_kv_pages", changes, error, text)


def rotated(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("norm_rope_write", changes, error, text)


def rotated_latents(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("latent_norm_rope_write", changes, error, text)


def merge(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("merge_attention_states", changes, error, text)


def paged(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("paged_attention", changes, error, text)


def chunk(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("prefill_attention", changes, error, text)


def prefill(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("sparse_mla_prefill", changes, error, text)


def prefill_backward(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("sparse_mla_prefill_backward", changes, error, text)


def varlen(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("varlen_attention", changes, error, text)


def varlen_backward(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("varlen_attention_backward", changes, error, text)


def decode(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("mla_decode", changes, error, text)


def ragged_latents(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("ragged_mla_attention", changes, error, text)


def schedule(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("make_decode_schedule", changes, error, text)


def quantize(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("quantize_mla_cache", changes, error, text)


def dequantize(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("dequantize_mla_cache", changes, error, text)


def write_latents(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("write_mla_cache", changes, error, text)


def slots(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("page_indices_to_slots", changes, error, text)


def logits(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("indexer_logits", changes, error, text)


def logits_backward(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("indexer_logits_backward", changes, error, text)


def target(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("attention_target", changes, error, text)


def topk(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("indexer_topk", changes, error, text)


def select(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("top_k_indices", changes, error, text)


def block_scores(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("block_scores", changes, error, text)


def blocks(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("select_blocks", changes, error, text)


def given_blocks(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("top_k_blocks", changes, error, text)


def quantize_rows(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("quantize_kv", changes, error, text)


def dequantize_rows(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("dequantize_kv", changes, error, text)


def quantize_keys(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("quantize_indexer_keys", changes, error, text)


def write_keys(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("write_indexer_cache", changes, error, text)


def scheduled(**changes: Any) -> dict[str, Any]:
    """A change of the dense decode's arguments: its schedule with changed fields."""
    return {"schedule": dataclasses.replace(SCHEDULE, **changes)}


def values(text: str, **changes: Any) -> Case:
    """A case that is refused only if index values are checked."""
    return Case("ragged_paged_attention", changes, InvalidInput, text)


def pair(k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return k, v


OTHER_DTYPE = ones(7, 2, 16, dtype=np.float16)
PACKED = [
    varlen(TypeError, "expected q to be an array, got list", q=[[[1.0] * 16]]),
    varlen(InvalidInput, f"expected q.dtype to be {FLOATS} or float64, got int32", q=ones(6, 4, 16, dtype=np.int32)),
    varlen(InvalidInput, "expected q.shape to be [T_q, H, D], got [6, 64]", q=ones(6, 64)),
    varlen(InvalidInput, "expected k.dtype to be float32, got float16", k=OTHER_DTYPE),
    varlen(InvalidInput, "expected k.shape to be [T_k, K, D] = [T_k, K, 16], got [7, 2, 8]", k=ones(7, 2, 8)),
    varlen(InvalidInput, "expected k to have num_kv_heads >= 1, got 0", k=ones(7, 0, 16), v=ones(7, 0, 8)),
    varlen(InvalidInput, "expected v.shape to be [T_k, K, D_v] = [7, 2, D_v], got [8, 2, 8]", v=ones(8, 2, 8)),
    varlen(InvalidInput, "expected v.dtype to be float32, got float16", v=OTHER_DTYPE),
    varlen(InvalidInput, "expected q.shape[2] from 1 to 512, got 513", q=ones(6, 4, 513), k=ones(7, 2, 513)),
    varlen(InvalidInput, "expected v.shape[2] from 1 to 512, got 0", v=ones(7, 2, 0)),
    varlen(InvalidInput, "expected num_q_heads to be a multiple of num_kv_heads=3, got 4", k=ones(7, 3, 16),
           v=ones(7, 3, 8)),
    varlen(InvalidInput, "expected cu_q_lens.dtype to be int32, got float32", cu_q_lens=ones(3)),
    varlen(InvalidInput, "expected cu_q_lens to have at least one entry, got 0", cu_q_lens=ints(),
           cu_kv_lens=ints()),
    varlen(InvalidInput, "expected cu_kv_lens.shape to be [S+1] = [3], got [2]", cu_kv_lens=ints(0, 7)),
    varlen(TypeError, "expected max_q_len to be an int, got float", max_q_len=2.0),
    varlen(TypeError, "expected max_kv_len to be an int, got bool", max_kv_len=True),
    varlen(InvalidInput, "expected max_kv_len >= 0, got -1", max_kv_len=-1),
    varlen(InvalidInput, "expected sm_scale to be finite, got inf", sm_scale=float("inf")),
    varlen(TypeError, "expected causal to be a bool, got int", causal=1),
    varlen(InvalidInput, "expected sliding_window >= 1, got 0", sliding_window=0),
    varlen(InvalidInput, "expected soft_cap > 0, got 0.0", soft_cap=0.0),
    varlen(InvalidInput, f"expected sinks.dtype to be float32, got float16{CONVERT}", sinks=ones(4, dtype=np.float16)),
    varlen(InvalidInput, "expected sinks.shape to be [H] = [4], got [2]", sinks=ones(2)),
    varlen(InvalidInput, f"expected alibi_slopes.dtype to be float32, got float16{CONVERT}",
           alibi_slopes=ones(4, dtype=np.float16)),
    varlen(InvalidInput, "expected alibi_slopes.shape to be [H] = [4], got [2]", alibi_slopes=ones(2)),
    varlen(TypeError, "expected relative_bias to be an array, got float", relative_bias=0.5),
    varlen(InvalidInput, "expected relative_bias.shape to be [H, B] = [4, B], got [2, 7]", relative_bias=ones(2, 7)),
    varlen(InvalidInput, "expected relative_bias.shape to be [T_q, H, B] = [6, 4, B], got [5, 4, 7]",
           relative_bias=ones(5, 4, 7)),
    varlen(InvalidInput, "expected relative_bias to have B >= 1, got 0", relative_bias=ones(4, 0)),
    varlen(InvalidInput, "expected key_ranges.shape to be [T_q, R, 2] = [6, R, 2], got [6, 2]",
           key_ranges=spans(6, 2)),
    varlen(InvalidInput, "expected key_ranges to have from 1 to 8 ranges of each query, got 0",
           key_ranges=spans(6, 0, 2)),
    varlen(InvalidInput, "expected causal at its default, False, with key_ranges, got True",
           key_ranges=spans(6, 1, 2), causal=True),
    varlen_backward(InvalidInput, "expected sliding_window at its default, None, with key_ranges, got 3",
                    key_ranges=spans(6, 1, 2), sliding_window=3),
    varlen(InvalidInput, "expected selected.shape to be [T_q, K, N] = [6, K, N], got [5, 1, 2]",
           selected=spans(5, 1, 2), block_size=4),
    varlen(InvalidInput, "expected selected and block_size, or neither, got selected alone", selected=spans(6, 1, 2)),
    varlen_backward(InvalidInput, "expected selected and block_size, or neither, got block_size alone", block_size=4),
    varlen(TypeError, "expected return_lse to be a bool, got int", return_lse=1),
    varlen(TypeError, "expected return_max_logits to be a bool, got int", return_max_logits=1),
    varlen(TypeError, "expected deterministic to be a bool, got int", deterministic=1),
    varlen_backward(InvalidInput, "expected d_out.shape to be [T_q, H, D_v] = [6, 4, 8], got [6, 4, 16]",
                    d_out=ones(6, 4, 16)),
    varlen_backward(TypeError, "expected return_d_relative_bias to be a bool, got int", return_d_relative_bias=1),
    varlen_backward(InvalidInput, "expected d_out.dtype to be float32, got float16",
                    d_out=ones(6, 4, 8, dtype=np.float16)),
    varlen_backward(InvalidInput, "expected out.shape to be [T_q, H, D_v] = [6, 4, 8], got [6, 2, 8]",
                    out=ones(6, 2, 8)),
    varlen_backward(InvalidInput, "expected lse.shape to be [T_q, H] = [6, 4], got [4, 6]", lse=ones(4, 6)),
    varlen_backward(InvalidInput, "expected d_lse.dtype to be float32, got float16",
                    d_lse=ones(6, 4, dtype=np.float16)),
    varlen_backward(TypeError, "expected lse to be an array, got NoneType", lse=None),
    prefill(TypeError, "expected deterministic to be a bool, got NoneType", deterministic=None),
    prefill(InvalidInput, "expected out_dtype to be 'float32' or 'float16' or 'bfloat16', got 'float8_e4m3fn'",
            out_dtype="float8_e4m3fn"),
    prefill_backward(InvalidInput, "expected kv.dtype to be float32, got uint8",
                     q=ones(3, 4, 576), kv=raw(2, 5, 1, 656)),
    prefill_backward(InvalidInput, "expected kv.dtype to be float32, got float16",
                     kv=ones(10, 1, 32, dtype=np.float16)),
    prefill_backward(InvalidInput, "expected kv to have num_kv_heads >= 1, got 0", kv=ones(10, 0, 32)),
    prefill_backward(InvalidInput, "expected kv to have page_size >= 1, got 0", kv=ones(2, 0, 1, 32)),
    prefill_backward(TypeError, "expected kv to be an array, got NoneType", kv=None),
    prefill_backward(InvalidInput, "expected d_out.shape to be [T, H, d_v] = [3, 4, 16], got [3, 4, 32]",
                     d_out=ones(3, 4, 32)),
    prefill_backward(InvalidInput, "expected lse.shape to be [T, H] = [3, 4], got [3, 1]", lse=ones(3, 1)),
    prefill_backward(InvalidInput, "expected d_lse.shape to be [T, H] = [3, 4], got [3]", d_lse=ones(3)),
    prefill_backward(TypeError, "expected deterministic to be a bool, got int", deterministic=0),
]  # fmt: skip

INDEX_TABLES = {"page_indices": ints([0, 1], [2, 3]), "kv_lens": ints(3, 8), "cu_q_lens": ints(0, 2, 4)}
ONE_FORM = "expected starts and stops, or indices, or page_indices, kv_lens, cu_q_lens, got"
LISTS_OF_KEYS = {"starts": None, "stops": None, "indices": ints([0, 1], [2, 3], [-1, 0], [5, 5])}
INDEXER = [
    logits(TypeError, "expected q to be an array, got list", q=[[[1.0] * 16]]),
    logits(InvalidInput, f"expected q.dtype to be {FLOATS} or float8_e4m3fn, got int8",
           q=ones(4, 3, 16, dtype=np.int8)),
    logits(InvalidInput, "expected q.shape[2] to be a multiple of 16 from 16 to 256, got 24", q=ones(4, 3, 24),
           keys=ones(6, 24)),
    logits(InvalidInput, "expected q.shape[2] to be a multiple of 16 from 16 to 256, got 272", q=ones(4, 3, 272)),
    logits(InvalidInput, "expected q to have num_heads >= 1, got 0", q=ones(4, 0, 16), weights=ones(4, 0)),
    logits(InvalidInput, "expected weights.shape to be [T, H] = [4, 3], got [4, 2]", weights=ones(4, 2)),
    logits(InvalidInput, "expected weights.dtype to be float32, got float16", weights=ones(4, 3, dtype=np.float16)),
    logits(InvalidInput, "expected keys.dtype to be float32 or float8_e4m3fn, got float16",
           keys=ones(6, 16, dtype=np.float16)),
    logits(InvalidInput, "expected keys.dtype to be float32 or float8_e4m3fn, got uint8", keys=raw(6, 20)),
    logits(InvalidInput, "expected keys.shape to be [N, D] = [N, 16], got [6, 32]", keys=ones(6, 32)),
    logits(InvalidInput, "expected key_scale.shape to be [N] = [6], got [5]", key_scale=ones(5)),
    logits(InvalidInput, "expected starts.dtype to be int32, got float32", starts=ones(4)),
    logits(InvalidInput, "expected stops.shape to be [T] = [4], got [3]", stops=ints(1, 2, 3)),
    logits(InvalidInput, f"{ONE_FORM} stops", starts=None),
    logits(InvalidInput, f"{ONE_FORM} neither", starts=None, stops=None),
    logits(InvalidInput, f"{ONE_FORM} starts, stops, page_indices, kv_lens, cu_q_lens", **INDEX_TABLES),
    logits(InvalidInput, f"{ONE_FORM} page_indices, kv_lens", starts=None, stops=None,
           page_indices=ints([0, 1], [2, 3]), kv_lens=ints(3, 8)),
    logits(InvalidInput, "expected num_seqs only with page_indices, got it with starts and stops", num_seqs=2),
    logits(InvalidInput, "expected ratio only with page_indices, got it with starts and stops", ratio=4),
    logits(InvalidInput, "expected max_keys only with relative=True, got 3", max_keys=3),
    logits(InvalidInput, "expected max_keys >= 1, got 0", max_keys=0, relative=True),
    logits(TypeError, "expected relative to be a bool, got int", relative=1),
    logits(InvalidInput, f"{ONE_FORM} starts, stops, indices", indices=LISTS_OF_KEYS["indices"]),
    logits(InvalidInput, "expected indices.shape to be [T, L] = [4, L], got [1, 2]",
           **{**LISTS_OF_KEYS, "indices": ints([0, 1])}),
    logits(InvalidInput, "expected indices.dtype to be int32, got float32", **{**LISTS_OF_KEYS, "indices": ones(4, 2)}),
    logits(InvalidInput, "expected relative only with starts and stops, got it with indices", **LISTS_OF_KEYS,
           relative=True),
    logits(InvalidInput, "expected ratio only with page_indices, got it with indices", **LISTS_OF_KEYS, ratio=2),
    logits_backward(InvalidInput, "expected d_logits.shape to be [T, C] = [4, 6], got [4, 5]", d_logits=ones(4, 5)),
    logits_backward(InvalidInput, "expected d_logits.shape to be [T, C] = [4, 2], got [4, 6]", **LISTS_OF_KEYS),
    logits_backward(InvalidInput, "expected d_logits.dtype to be float32, got float16",
                    d_logits=ones(4, 6, dtype=np.float16)),
    logits_backward(InvalidInput, f"expected q.dtype to be {FLOATS}, got int8", q=ones(4, 3, 16, dtype=np.int8)),
    logits_backward(InvalidInput, "expected keys.dtype to be float32, got float16", keys=ones(6, 16, dtype=np.float16)),
    logits_backward(InvalidInput, "expected keys.shape to be [N, D] = [N, 16], got [6, 4, 16]", keys=ones(6, 4, 16)),
    logits_backward(InvalidInput, "expected starts and stops, or indices, got stops", starts=None),
    logits_backward(InvalidInput, "expected relative only with starts and stops, got it with indices",
                    **LISTS_OF_KEYS, d_logits=ones(4, 2), relative=True),
    logits_backward(InvalidInput, "expected max_keys only with relative=True, got 3", max_keys=3),
    logits_backward(InvalidInput, "expected q.shape[2] to be a multiple of 16 from 16 to 256, got 24",
                    q=ones(4, 3, 24), keys=ones(6, 24)),
    target(TypeError, "expected lse to be an array, got NoneType", lse=None),
    target(InvalidInput, "expected q.shape[2] to be a multiple of 16 from 16 to 1024, got 40", q=ones(4, 3, 40),
           keys=ones(6, 40)),
    target(InvalidInput, "expected q to have num_heads >= 1, got 0", q=ones(4, 0, 32), lse=ones(4, 0)),
    target(InvalidInput, "expected keys.shape to be [s_kv, D] = [s_kv, 32], got [6, 2, 32]", keys=ones(6, 2, 32)),
    target(InvalidInput, "expected keys.dtype to be float32, got float16", keys=ones(6, 32, dtype=np.float16)),
    target(InvalidInput, "expected lse.shape to be [T, H] = [4, 3], got [3, 4]", lse=ones(3, 4)),
    target(InvalidInput, "expected indices.shape to be [T, N] = [4, N], got [2, 4]", indices=ints([0] * 4, [1] * 4)),
    target(InvalidInput, "expected indices, or starts and stops, got neither", indices=None),
    target(InvalidInput, "expected indices, or starts and stops, got indices, starts", starts=ints(0, 0, 0, 0)),
    target(InvalidInput, "expected relative only with starts and stops, got it with indices", relative=True),
    target(InvalidInput, "expected topk_lens only with indices, got it with starts and stops", indices=None,
           topk_lens=ints(1, 1, 1, 1), starts=ints(0, 0, 0, 0), stops=ints(1, 2, 3, 4)),
    target(InvalidInput, "expected topk_lens.shape to be [T] = [4], got [2]", topk_lens=ints(1, 1)),
    target(InvalidInput, "expected sm_scale to be finite, got nan", sm_scale=float("nan")),
    topk(InvalidInput, "expected relative only with starts and stops, got it with page_indices", relative=True),
    topk(InvalidInput, "expected max_keys only with starts and stops, got it with page_indices", max_keys=9),
    topk(InvalidInput, "expected keys.shape to be [P, G, 1, D+4] = [P, G, 1, 20], got [6, 4, 1, 16]",
         keys=raw(6, 4, 1, 16)),
    topk(InvalidInput, "expected keys.dtype to be uint8, got float32", keys=ones(6, 4, 1, 20)),
    topk(InvalidInput, "expected keys.shape to be [P, G, D] = [P, G, 16], got [6, 4, 32]", keys=ones(6, 4, 32)),
    topk(InvalidInput, "expected keys to have page_size >= 1, got 0", keys=raw(6, 0, 1, 20)),
    topk(InvalidInput, "expected key_scale=None with pages of bytes, which hold the scales, got an array",
         key_scale=ones(6, 4)),
    topk(InvalidInput, "expected key_scale.shape to be [P, G] = [6, 4], got [24]", keys=ones(6, 4, 16),
         key_scale=ones(24)),
    topk(InvalidInput, "expected ratio >= 1, got 0", ratio=0),
    topk(InvalidInput, "expected num_seqs between 0 and max_num_seqs=2, got 3", num_seqs=3),
    topk(InvalidInput, "expected top_k >= 1, got 0", top_k=0),
    topk(InvalidInput, "expected top_k <= 4096, got 4097", top_k=4097),
    topk(TypeError, "expected top_k to be an int, got float", top_k=2.0),
    topk(InvalidInput, "expected candidate_block_size with candidate_blocks, got None",
         candidate_blocks=ints(*[[0]] * 4)),
    topk(InvalidInput, "expected candidate_blocks with candidate_block_size, got None", candidate_block_size=4),
    topk(InvalidInput, "expected candidate_blocks.shape to be [T, B] = [4, B], got [2, 1]",
         candidate_blocks=ints([0], [1]), candidate_block_size=4),
    select(InvalidInput, "expected logits.dtype to be float32, got float16", logits=ones(3, 9, dtype=np.float16)),
    select(InvalidInput, "expected logits.shape to be [T, N], got [9]", logits=ones(9)),
    select(InvalidInput, "expected top_k <= 4096, got 5000", top_k=5000),
    select(InvalidInput, "expected starts.shape to be [T] = [3], got [2]", starts=ints(0, 1)),
    block_scores(InvalidInput, f"expected q.dtype to be {FLOATS} or float8_e4m3fn, got int8",
                 q=ones(4, 6, 16, dtype=np.int8)),
    block_scores(InvalidInput, "expected q.shape[2] to be a multiple of 16 from 16 to 256, got 24", q=ones(4, 6, 24),
                 keys=ones(6, 2, 24)),
    block_scores(InvalidInput, "expected block_size to be a power of two from 1 to 256, got 3", block_size=3),
    block_scores(InvalidInput, "expected block_size to be a power of two from 1 to 256, got 512", block_size=512),
    block_scores(InvalidInput, "expected block_size to be a power of two from 1 to 256, got 0", block_size=0),
    block_scores(InvalidInput, "expected keys.shape to be [N, K, D] = [N, K, 16], got [6, 16]", keys=ones(6, 16)),
    block_scores(InvalidInput, "expected keys.shape to be [N, K, D] = [N, K, 16], got [6, 2, 32]", keys=ones(6, 2, 32)),
    block_scores(InvalidInput, "expected keys.dtype to be float32 or float8_e4m3fn, got uint8", keys=raw(6, 2, 20)),
    block_scores(InvalidInput, "expected keys to have num_kv_heads >= 1, got 0", keys=ones(6, 0, 16)),
    block_scores(InvalidInput, "expected num_q_heads to be a multiple of num_kv_heads=4, got 6", keys=ones(6, 4, 16)),
    block_scores(InvalidInput, "expected num_q_heads to be a multiple of num_kv_heads=2, got 0", q=ones(4, 0, 16)),
    block_scores(InvalidInput, "expected key_scale.shape to be [N, K] = [6, 2], got [6]", key_scale=ones(6)),
    block_scores(InvalidInput, "expected starts and stops, or page_indices, kv_lens, cu_q_lens, got stops",
                 starts=None),
    block_scores(InvalidInput, "expected num_seqs only with page_indices, got it with starts and stops", num_seqs=2),
    block_scores(InvalidInput, "expected max_keys >= 1, got 0", max_keys=0),
    blocks(InvalidInput, "expected max_keys only with starts and stops, got it with page_indices", max_keys=9),
    blocks(InvalidInput, "expected keys.shape to be [P, G, 1, D+4] = [P, G, 1, 20], got [6, 4, 1, 16]",
           keys=raw(6, 4, 1, 16)),
    blocks(InvalidInput, "expected keys.shape to be [P, G, K, D] = [P, G, K, 16], got [6, 4, 16]", keys=ones(6, 4, 16)),
    blocks(InvalidInput, "expected keys to have page_size >= 1, got 0", keys=ones(6, 0, 1, 16)),
    blocks(InvalidInput, "expected key_scale=None with pages of bytes, which hold the scales, got an array",
           key_scale=ones(6, 4, 1)),
    blocks(InvalidInput, "expected key_scale.shape to be [P, G, K] = [6, 4, 2], got [6, 4]", keys=ones(6, 4, 2, 16),
           key_scale=ones(6, 4)),
    blocks(InvalidInput, "expected top_k <= 4096, got 4097", top_k=4097),
    blocks(InvalidInput, "expected init_blocks + local_blocks <= top_k=2, got 3", init_blocks=1, local_blocks=2),
    blocks(InvalidInput, "expected local_blocks >= 0, got -1", local_blocks=-1),
    blocks(TypeError, "expected init_blocks to be an int, got float", init_blocks=1.0),
    given_blocks(InvalidInput, "expected scores.dtype to be float32, got float16",
                 scores=ones(3, 2, 9, dtype=np.float16)),
    given_blocks(InvalidInput, "expected scores.shape to be [T, H, B], got [3, 9]", scores=ones(3, 9)),
    given_blocks(InvalidInput, "expected top_k <= 4096, got 5000", top_k=5000),
    given_blocks(InvalidInput, "expected init_blocks + local_blocks <= top_k=2, got 5", local_blocks=5),
    quantize_keys(InvalidInput, "expected k.shape to be [N, D], got [16]", k=ones(16)),
    quantize_keys(InvalidInput, "expected k.shape[1] to be a multiple of 16 from 16 to 256, got 20", k=ones(3, 20)),
    quantize_keys(TypeError, "expected power_of_two to be a bool, got int", power_of_two=1),
    write_keys(InvalidInput, "expected k.shape[1] to be a multiple of 16 from 16 to 256, got 8", k=ones(3, 8)),
    write_keys(InvalidInput, "expected cache.dtype to be uint8, got float32", cache=ones(2, 3, 1, 20)),
    write_keys(InvalidInput, "expected cache.shape to be [P, G, 1, D+4] = [P, G, 1, 20], got [2, 3, 1, 16]",
               cache=raw(2, 3, 1, 16)),
    write_keys(InvalidInput, "expected cache to have page_size >= 1, got 0", cache=raw(2, 0, 1, 20)),
    write_keys(InvalidInput, "expected slot_mapping.shape to be [T] = [3], got [2]", slot_mapping=ints(0, 1)),
    write_keys(InvalidInput, "expected slot_mapping, or page_indices with kv_lens and cu_q_lens, got neither",
               slot_mapping=None),
    write_keys(InvalidInput, "expected slot_mapping, or page_indices with kv_lens and cu_q_lens, got kv_lens",
               slot_mapping=None, kv_lens=ints(3, 8)),
    write_keys(InvalidInput, "expected slot_mapping to be an array or (page_indices, kv_lens, cu_q_lens), got 2 values",
               slot_mapping=(ints(0), ints(1))),
    write_keys(InvalidInput, "expected num_seqs only with page_indices, got it with slot_mapping", num_seqs=ints(1)),
    write_keys(InvalidInput, "expected cu_q_lens.shape to be [S+1] = [3], got [2]", **TABLES | {
        "cu_q_lens": ints(0, 3)}),
]  # fmt: skip
STATIC = [
    *PACKED,
    quantize_rows(TypeError, "expected x to be an array, got float", x=0.5),
    quantize_rows(InvalidInput, f"expected x.dtype to be {FLOATS}, got int32", x=ones(3, 2, 32, dtype=np.int32)),
    quantize_rows(InvalidInput, "expected x to have at least one axis, got none", x=ones()),
    quantize_rows(InvalidInput, "expected x.shape[-1] to be a multiple of 8 from 16 to 512, got 12: append zeros up to "
                  "16", x=ones(3, 2, 12)),
    quantize_rows(InvalidInput, "expected x.shape[-1] in mxfp4 to be a multiple of 32, got 48: append zeros up to 64",
                  x=ones(3, 2, 48), format="mxfp4"),
    quantize_rows(TypeError, "expected format to be a str, got int", format=4),
    quantize_rows(InvalidInput, f"expected format to be {KV_FORMATS}, got 'int8'", format="int8"),
    quantize_rows(InvalidInput, "expected zero=None with 'nvfp4', which has no zero points, got 'stored'",
                  zero="stored"),
    quantize_rows(InvalidInput, "expected zero to be 'mantissa' or 'stored', got 'bits'", zero="bits",
                  format="int4_token_head"),
    quantize_rows(InvalidInput, "expected scales_dtype of 'int4_token_head' to be float32 or float16, got float64",
                  format="int4_token_head", zero="stored", scales_dtype="float64"),
    quantize_rows(InvalidInput, "expected scales_dtype of 'int4_token_head' to be float32, got float16",
                  format="int4_token_head", scales_dtype="float16"),
    quantize_rows(InvalidInput, "expected scale to be a float array of shape [] or [num_kv_heads=2], got "
                  "float32[3]", scale=ones(3)),
    dequantize_rows(InvalidInput, f"expected codes.dtype to be {CACHES} or uint8, got int32",
                    codes=ones(3, 2, 16, dtype=np.int32)),
    dequantize_rows(InvalidInput, "expected codes to have at least one axis, got none", codes=ones()),
    dequantize_rows(InvalidInput, "expected scales with codes of uint8, got none", scales=None),
    dequantize_rows(InvalidInput, "expected scales or scale with codes of int8, got none: pass scale=1.0 if the codes "
                    "are the values", codes=ones(3, 2, 16, dtype=np.int8), scales=None),
    dequantize_rows(InvalidInput, "expected codes.shape[-1] * 2 to be a multiple of 8 from 16 to 512, got 8: append "
                    "zeros up to 16", codes=raw(3, 2, 4)),
    dequantize_rows(InvalidInput, "expected the number of columns in nvfp4 to be a multiple of 16, got 24: append "
                    "zeros up to 32", codes=raw(3, 2, 12), scales=codes(3, 2, 1)),
    dequantize_rows(InvalidInput, "expected scales.shape to be [3, 2, 2] for nvfp4, got [3, 2, 1]",
                    scales=codes(3, 2, 1)),
    dequantize_rows(InvalidInput, "expected scales.shape to be [3, 2, 1] or [3, 2] for int4_token_head, got [2]",
                    scales=ones(2)),
    dequantize_rows(InvalidInput, "expected scales for pages of uint8 to have 1 or 2 (scale, zero point) float32 for "
                    "each row, got 3", scales=ones(3, 2, 3)),
    dequantize_rows(InvalidInput, "expected scales.dtype for pages of uint8 to be float32 or float16 or float8_e4m3fn "
                    f"or float8_e8m0fnu, got uint8: {BYTES_OF_SCALES}", scales=raw(3, 2, 1)),
    dequantize_rows(InvalidInput, "expected dtype to be 'float32' or 'float16' or 'bfloat16', got 'float64'",
                    dtype="float64"),
    *INDEXER,
    # Kinds.
    attention(TypeError, "expected q to be an array, got list", q=[[[1.0] * 16]]),
    attention(TypeError, "expected kv_pages to be an array, got str", kv_pages="pages"),
    attention(TypeError, "expected kv_pages to be an array or a pair (k_pages, v_pages), got 3 values",
              kv_pages=(ones(6, 4, 2, 16),) * 3),
    attention(TypeError, "expected kv_lens to be an array, got int", kv_lens=3),
    attention(TypeError, "expected page_indices to be an array, got NoneType", page_indices=None),
    attention(TypeError, "expected max_q_len to be an int, got float", max_q_len=2.0),
    attention(InvalidInput, "expected max_q_len >= 0, got -1", max_q_len=-1),
    attention(TypeError, "expected cu_q_lens to be an array, got tuple", cu_q_lens=(0, 2, 4)),
    attention(TypeError, "expected num_seqs to be an int or an array, got float", num_seqs=1.5),
    attention(TypeError, "expected num_seqs to be an int or an array, got bool", num_seqs=True),
    attention(TypeError, "expected sm_scale to be a number, got str", sm_scale="1"),
    attention(TypeError, "expected causal to be a bool, got int", causal=1),
    attention(TypeError, "expected sliding_window to be an int, got float", sliding_window=2.0),
    attention(TypeError, "expected sliding_window to be an int, got bool", sliding_window=True),
    attention(TypeError, "expected soft_cap to be a number, got list", soft_cap=[1.0]),
    attention(TypeError, "expected sinks to be an array, got float", sinks=1.0),
    attention(TypeError, "expected alibi_slopes to be an array, got list", alibi_slopes=[0.5] * 4),
    attention(TypeError, "expected k_scale to be a number or an array, got str", k_scale="1"),
    attention(TypeError, "expected v_scale to be a number or an array, got list", v_scale=[1.0, 1.0]),
    attention(TypeError, "expected return_lse to be a bool, got NoneType", return_lse=None),
    attention(TypeError, "expected return_max_logits to be a bool, got float", return_max_logits=1.0),
    attention(TypeError, "expected options to be a mapping, got list", options=[1]),
    attention(TypeError, "expected backend to be a name or a list of names, got 3", backend=3),
    # Dtypes.
    attention(InvalidInput, f"expected q.dtype to be {FLOATS}, got int32", q=ones(4, 4, 16, dtype=np.int32)),
    attention(InvalidInput, f"expected kv_pages.dtype to be {CACHES} or uint8, got int32",
              kv_pages=ones(6, 4, 4, 16, dtype=np.int32)),
    attention(InvalidInput, f"expected kv_pages.dtype to be that of q, float32, or {EIGHT_BIT}, got float16",
              kv_pages=ones(6, 4, 4, 16, dtype=np.float16)),
    attention(InvalidInput, f"expected v_pages.dtype to be that of q, float32, or {EIGHT_BIT}, got float16",
              kv_pages=pair(ones(6, 4, 2, 16), ones(6, 4, 2, 16, dtype=np.float16))),
    # Scale pages.
    attention(InvalidInput, f"expected k_scale_pages with kv_pages of uint8, got none: {NO_SCALES}",
              kv_pages=raw(6, 4, 4, 8)),
    attention(InvalidInput, f"expected v_scale_pages with v_pages of uint8, got none: {NO_SCALES}",
              kv_pages=pair(ones(6, 4, 2, 16), raw(6, 4, 2, 8))),
    # Codes of int8 without a scale.
    attention(InvalidInput, "expected k_scale and v_scale, or k_scale_pages and v_scale_pages, with kv_pages of int8, "
              "got none: pass k_scale=1.0 and v_scale=1.0 if the codes are the values",
              kv_pages=INT8_PAGES),
    attention(InvalidInput, "expected k_scale and v_scale, or k_scale_pages and v_scale_pages, with kv_pages of int8, "
              "got none: pass k_scale=1.0 and v_scale=1.0 if the codes are the values",
              kv_pages=pair(INT8_ROWS, INT8_ROWS), new_kv=pair(INT8_NEW, INT8_NEW)),
    attention(InvalidInput, f"expected v_scale or v_scale_pages with kv_pages of int8, {GIVE_V}",
              kv_pages=INT8_PAGES, k_scale=0.5),
    attention(InvalidInput, f"expected v_scale or v_scale_pages with kv_pages of int8, {GIVE_V}",
              kv_pages=INT8_PAGES, k_scale_pages=ones(6, 4, 2)),
    attention(InvalidInput, f"expected k_scale or k_scale_pages with kv_pages of int8, {GIVE_K}",
              kv_pages=INT8_PAGES, v_scale=ones(2)),
    attention(InvalidInput, f"expected k_scale or k_scale_pages with k_pages of int8, {GIVE_K}",
              kv_pages=pair(INT8_ROWS, ones(6, 4, 2, 16)), v_scale=0.5),
    attention(InvalidInput, f"expected v_scale or v_scale_pages with v_pages of int8, {GIVE_V}",
              kv_pages=pair(ones(6, 4, 2, 16), INT8_ROWS)),
    write(InvalidInput, f"expected k_scale or k_scale_pages with kv_pages of int8, {GIVE_K}",
          kv_pages=INT8_PAGES, v_scale_pages=ones(6, 4, 2)),
    rotated(InvalidInput, "expected k_scale and v_scale with kv_pages of int8, got none: pass k_scale=1.0 and "
            "v_scale=1.0 if the codes are the values", kv_pages=INT8_PAGES),
    rotated(InvalidInput, f"expected v_scale with v_pages of int8, {GIVE_V}",
            kv_pages=pair(INT8_ROWS, INT8_ROWS), k_scale=0.5),
    paged(InvalidInput, "expected k_pages of int8 to be a pair (weight, scales), got an array: give scales of 1 if the "
          "codes are the values", k_pages=CODES, v_pages=CODES),
    chunk(InvalidInput, "expected k_pages of int8 to be a pair (weight, scales), got an array: give scales of 1 if the "
          "codes are the values", k_pages=CODES, v_pages=CODES),
    attention(InvalidInput, "expected k_scale of at most one axis beside k_scale_pages, got [6, 4, 2]",
              kv_pages=ones(6, 4, 4, 16, dtype=np.int8), k_scale=ones(6, 4, 2), k_scale_pages=ones(6, 4, 2)),
    attention(InvalidInput, "expected k_scale_pages.dtype to be float32 or float16 or float8_e4m3fn or float8_e8m0fnu, "
              "got int32", k_scale_pages=ones(6, 4, 2, dtype=np.int32)),
    attention(InvalidInput, "expected k_scale_pages.dtype to be float32 or float16 or float8_e4m3fn or float8_e8m0fnu, "
              f"got uint8: {BYTES_OF_SCALES}", kv_pages=raw(6, 4, 4, 8), k_scale_pages=raw(6, 4, 2, 1)),
    attention(TypeError, "expected v_scale_pages to be an array, got float", v_scale_pages=0.5),
    attention(InvalidInput, "expected k_scale_pages to have 3 or 4 axes, got [2]", k_scale_pages=ones(2)),
    attention(InvalidInput, "expected k_scale_pages only with pages of int8 or float8_e4m3fn or float8_e4m3fnuz or "
              "float8_e5m2 or uint8, got pages of float32", k_scale_pages=ones(6, 4, 2)),
    attention(InvalidInput, "expected v_scale_pages.dtype for pages of int8 to be float32, got float16",
              kv_pages=ones(6, 4, 4, 16, dtype=np.int8), v_scale_pages=ones(6, 4, 2, dtype=np.float16)),
    attention(InvalidInput, "expected k_scale_pages for pages of int8 to have 1 float32 for each row, got 3",
              kv_pages=ones(6, 4, 4, 16, dtype=np.int8), k_scale_pages=ones(6, 4, 2, 3)),
    attention(InvalidInput, "expected k_scale_pages for pages of uint8 to have 1 or 2 (scale, zero point) float32 "
              "for each row, got 4", kv_pages=raw(6, 4, 4, 8), k_scale_pages=ones(6, 4, 2, 4)),
    attention(InvalidInput, "expected the head size of k_pages in nvfp4 to be a multiple of 16, got 24: append "
              "zeros up to 32, with sm_scale=24**-0.5 in attention",
              q=ones(4, 4, 24), kv_pages=raw(6, 4, 4, 12), k_scale_pages=codes(6, 4, 2, 1)),
    attention(InvalidInput, "expected v_scale_pages.shape[:3] to be [P, G, K] = [6, 4, 2], got [5, 4, 2]",
              kv_pages=ones(6, 4, 4, 16, dtype=np.int8), v_scale_pages=ones(5, 4, 2)),
    attention(InvalidInput, "expected v_scale_pages.shape[:3] to be [P, G, K] = [6, 4, 2], got [6, 4, 4]: give those "
              "of K and of V, such as scales[:, :, 0::2] and scales[:, :, 1::2]",
              kv_pages=ones(6, 4, 4, 16, dtype=np.int8), v_scale_pages=ones(6, 4, 4)),
    attention(InvalidInput, "expected k_scale_pages in nvfp4 to have 16 / 16 = 1 float8_e4m3fn for each row, got 2",
              kv_pages=raw(6, 4, 4, 8), k_scale_pages=codes(6, 4, 2, 2)),
    attention(InvalidInput, "expected k_pages.shape[3] = new_kv[0].shape[2]=16 / 2, got 16: an element of uint8 holds "
              "two columns", kv_pages=pair(raw(6, 4, 2, 16), ones(6, 4, 2, 16)), k_scale_pages=ones(6, 4, 2),
              new_kv=pair(ones(4, 2, 16), ones(4, 2, 16))),
    attention(InvalidInput, "expected kv_pages.shape[3] = head_dim=16 / 2, got 4", kv_pages=raw(6, 4, 4, 4),
              k_scale_pages=ones(6, 4, 2), v_scale_pages=ones(6, 4, 2)),
    attention(InvalidInput, "expected kv_lens.dtype to be int32, got int16", kv_lens=ones(2, dtype=np.int16)),
    attention(InvalidInput, "expected page_indices.dtype to be int32, got float32", page_indices=ones(2, 2)),
    attention(InvalidInput, "expected cu_q_lens.dtype to be int32, got uint8", cu_q_lens=ones(3, dtype=np.uint8)),
    attention(InvalidInput, "expected num_seqs to be int32 of shape [1], got int32[2]", num_seqs=ints(1, 1)),
    attention(InvalidInput, "expected num_seqs to be int32 of shape [1], got float32[1]", num_seqs=ones(1)),
    attention(InvalidInput, f"expected sinks.dtype to be float32, got float16{CONVERT}",
              sinks=ones(4, dtype=np.float16)),
    attention(InvalidInput, f"expected alibi_slopes.dtype to be float32, got float16{CONVERT}",
              alibi_slopes=ones(4, dtype=np.float16)),
    attention(InvalidInput, "expected k_scale to be a float array of shape [] or [num_kv_heads=2], got float32[3]",
              k_scale=ones(3)),
    attention(InvalidInput, "expected v_scale to be a float array of shape [] or [num_kv_heads=2], got int32[2]",
              v_scale=ints(1, 1)),
    # Shapes.
    attention(InvalidInput, "expected q.shape to be [T, H, D], got [4, 64]", q=ones(4, 64)),
    attention(InvalidInput, "expected q.shape[2] to be a multiple of 8 from 16 to 512, got 20: append "
              "zeros up to 24, with sm_scale=20**-0.5", q=ones(4, 4, 20), kv_pages=ones(6, 4, 4, 20)),
    attention(InvalidInput, "expected q.shape[2] to be a multiple of 8 from 16 to 512, got 8: append "
              "zeros up to 16, with sm_scale=8**-0.5", q=ones(4, 4, 8), kv_pages=ones(6, 4, 4, 8)),
    attention(InvalidInput, "expected q.shape[2] to be a multiple of 8 from 16 to 512, got 520",
              q=ones(4, 4, 520), kv_pages=ones(6, 4, 4, 520)),
    attention(InvalidInput, "expected kv_pages.shape[3] = head_dim=16, got 24", kv_pages=ones(6, 4, 4, 24)),
    attention(InvalidInput, "expected k_pages.shape[3] = head_dim=16, got 24",
              kv_pages=pair(ones(6, 4, 2, 24), ones(6, 4, 2, 16))),
    attention(InvalidInput, "expected v_pages.shape[3] to be a multiple of 8 from 16 to 512, got 12: append "
              "zeros up to 16",
              kv_pages=pair(ones(6, 4, 2, 16), ones(6, 4, 2, 12))),
    attention(InvalidInput, "expected v_pages.shape to be [P, G, K, D_v] = [6, 4, 2, D_v], got [6, 4, 1, 16]",
              kv_pages=pair(ones(6, 4, 2, 16), ones(6, 4, 1, 16))),
    attention(InvalidInput, "expected k_pages to have num_kv_heads >= 1, got 0",
              kv_pages=pair(ones(6, 4, 0, 16), ones(6, 4, 0, 16))),
    attention(InvalidInput, "expected kv_pages.shape[2] to be 2 * num_kv_heads, an even number, got 3",
              kv_pages=ones(6, 4, 3, 16)),
    attention(InvalidInput, "expected kv_pages.shape[2] to be 2 * num_kv_heads, an even number, got 0",
              kv_pages=ones(6, 4, 0, 16)),
    attention(InvalidInput, "expected kv_pages.shape to be [P, G, 2K, D], got [6, 4, 16]",
              kv_pages=ones(6, 4, 16)),
    attention(InvalidInput, "expected page_size >= 1, got 0", kv_pages=ones(6, 0, 4, 16)),
    attention(InvalidInput, "expected q.shape[1] to be a multiple of num_kv_heads = kv_pages.shape[2] / 2 = 2, got 3",
              q=ones(4, 3, 16)),
    attention(InvalidInput, "expected q.shape[1] to be a multiple of num_kv_heads = k_pages.shape[2] = 16, got 7: are "
              "the pages laid out heads first, [P, K, G, D]? expected [P, G, K, D]",
              q=ones(4, 7, 16), kv_pages=(ones(6, 7, 16, 16), ones(6, 7, 16, 16))),
    attention(InvalidInput, "expected q.shape[1] to be a multiple of num_kv_heads = kv_pages.shape[2] / 2 = 8, got 7: "
              "are the pages laid out heads first, [P, 2K, G, D]? expected [P, G, 2K, D]",
              q=ones(4, 7, 16), kv_pages=ones(6, 14, 16, 16)),
    attention(InvalidInput, "expected q.shape[1] to be a multiple of num_kv_heads = k_pages.shape[2] = 16, got 0",
              q=ones(4, 0, 16), kv_pages=(ones(6, 7, 16, 16), ones(6, 7, 16, 16))),
    attention(InvalidInput, "expected kv_lens.shape to be [S], got [2, 1]", kv_lens=ints([1], [2])),
    attention(InvalidInput, "expected page_indices.shape to be [S, M] = [2, M], got [3, 2]",
              page_indices=ints([0, 1], [2, 3], [4, 5])),
    attention(InvalidInput, "expected cu_q_lens.shape to be [S+1] = [3], got [2]", cu_q_lens=ints(0, 4)),
    attention(InvalidInput, "expected sinks.shape to be [H] = [4], got [2]", sinks=ones(2)),
    attention(InvalidInput, "expected relative_bias.dtype to be float32, got float16",
              relative_bias=ones(4, 3, dtype=np.float16)),
    attention(InvalidInput, "expected relative_bias.shape to be [T, H, B] = [4, 4, B], got [4]", relative_bias=ones(4)),
    attention(InvalidInput, "expected alibi_slopes.shape to be [H] = [4], got [1, 4]", alibi_slopes=ones(1, 4)),
    attention(TypeError, "expected key_ranges to be an array, got list", key_ranges=[[0, 1]]),
    attention(InvalidInput, "expected key_ranges.dtype to be int32, got uint32",
              key_ranges=spans(4, 1, 2, dtype=np.uint32)),
    attention(InvalidInput, "expected key_ranges.shape to be [T, R, 2] = [4, R, 2], got [5, 1, 2]",
              key_ranges=spans(5, 1, 2)),
    attention(InvalidInput, "expected key_ranges.shape to be [T, R, 2] = [4, R, 2], got [4, 1, 3]",
              key_ranges=spans(4, 1, 3)),
    attention(InvalidInput, "expected key_ranges to have from 1 to 8 ranges of each query, got 9",
              key_ranges=spans(4, 9, 2)),
    attention(InvalidInput, "expected causal at its default, True, with key_ranges, got False",
              key_ranges=spans(4, 1, 2), causal=False),
    attention(InvalidInput, "expected sliding_window at its default, None, with key_ranges, got 7",
              key_ranges=spans(4, 1, 2), sliding_window=7),
    attention(InvalidInput, "expected draft_mask at its default, None, with key_ranges, got an array",
              key_ranges=spans(4, 1, 2), draft_mask=ones(4, 2) > 0),
    attention(TypeError, "expected selected to be an array, got list", selected=[[[0]]], block_size=8),
    attention(InvalidInput, "expected selected.dtype to be int32, got uint32",
              selected=spans(4, 1, 2, dtype=np.uint32), block_size=8),
    attention(InvalidInput, "expected selected.shape to be [T, K, N] = [4, K, N], got [4, 2]",
              selected=spans(4, 2), block_size=8),
    attention(InvalidInput,
              "expected selected to have one list for all KV heads or one for each of num_kv_heads=2, got 4",
              selected=spans(4, 4, 2), block_size=8),
    attention(InvalidInput, "expected selected and block_size, or neither, got selected alone",
              selected=spans(4, 2, 2)),
    attention(InvalidInput, "expected selected and block_size, or neither, got block_size alone", block_size=8),
    *(
        attention(InvalidInput, f"expected block_size to be a power of two from 1 to 256, got {size}",
                  selected=spans(4, 2, 2), block_size=size)
        for size in (0, -1, 3, 12, 512)
    ),
    attention(TypeError, "expected block_size to be an int, got float", selected=spans(4, 2, 2), block_size=8.0),
    attention(TypeError, "expected block_size to be an int, got bool", selected=spans(4, 2, 2), block_size=True),
    # Ranges.
    attention(InvalidInput, "expected num_seqs between 0 and max_num_seqs=2, got 3", num_seqs=3),
    attention(InvalidInput, "expected num_seqs between 0 and max_num_seqs=2, got -1", num_seqs=-1),
    attention(InvalidInput, "expected sm_scale to be finite, got nan", sm_scale=float("nan")),
    attention(InvalidInput, "expected sm_scale within the range of float32, got a larger one", sm_scale=10**400),
    attention(TypeError, "expected sm_scale to be a number, got bool", sm_scale=True),
    attention(InvalidInput, "expected sliding_window <= 2147483647, got 1180591620717411303424", sliding_window=2**70),
    attention(InvalidInput, "expected soft_cap >= 1.1754943508222875e-38, the smallest normal float32, got 1e-45",
              soft_cap=1e-45),
    attention(InvalidInput, "expected sm_scale to be finite, got inf", sm_scale=float("inf")),
    attention(InvalidInput, "expected sliding_window >= 1, got 0", sliding_window=0),
    attention(InvalidInput, "expected sliding_window >= 1, got -3", sliding_window=-3),
    attention(InvalidInput, "expected soft_cap > 0, got 0.0", soft_cap=0.0),
    attention(InvalidInput, "expected out_dtype to be 'float32' or 'float16' or 'bfloat16', got 'float64'",
              out_dtype="float64"),
    attention(InvalidInput, "expected soft_cap > 0, got -2.0", soft_cap=-2.0),
    attention(InvalidInput, "expected soft_cap to be finite, got inf", soft_cap=float("inf")),
    attention(InvalidInput, "expected k_scale to be finite, got nan", k_scale=float("nan")),
    attention(InvalidInput, "expected q_scale only with q of float8_e4m3fn, got q.dtype float32", q_scale=0.5),
    attention(InvalidInput, "expected q_scale only with q of float8_e4m3fn, got q.dtype float32", q_scale=ones(4)),
    attention(InvalidInput, "expected q_scale to be a float array of shape [] or [num_q_heads=4], got float32[2]",
              q=codes(4, 4, 16), q_scale=ones(2)),
    attention(InvalidInput, "expected sm_scale within the range of float32, got a larger one",
              q=codes(4, 4, 16), q_scale=1e30, sm_scale=1e30),
    attention(InvalidInput, "expected q.shape to be [T, H, D], got [4, 16]", q=codes(4, 16), q_scale=0.5),
    attention(InvalidInput, "expected q_scale to be finite, got inf", q_scale=float("inf")),
    attention(TypeError, "expected q_scale to be a number or an array, got str", q_scale="1"),
    attention(InvalidInput, "expected options among none for this backend, got 'block_q'",
              backend="reference", options={"block_q": 16}),
    attention(InvalidInput, "expected backend to be one of auto, triton, pallas, cuda, numba, eager, xla, reference, "
              "portable, got 'tritom'", backend="tritom"),
    attention(InvalidInput, "expected backend to name at least one backend, got []", backend=[]),
    # New keys and values.
    attention(TypeError, "expected new_kv to be a pair (k, v), got float", new_kv=1.0),
    attention(TypeError, "expected new_kv to be a pair (k, v), got 1 values", new_kv=(ones(4, 2, 16),)),
    attention(InvalidInput, "expected new_kv[0].shape to be [T, K, D] = [4, 2, 16], got [3, 2, 16]",
              new_kv=pair(ones(3, 2, 16), ones(4, 2, 16))),
    attention(InvalidInput, "expected new_kv[1].shape to be [T, K, D_v] = [4, 2, 24], got [4, 2, 16]",
              kv_pages=pair(ones(6, 4, 2, 16), ones(6, 4, 2, 24)), new_kv=pair(ones(4, 2, 16), ones(4, 2, 16))),
    attention(InvalidInput, "expected new_kv[1].dtype to be float32, got float16",
              new_kv=pair(ones(4, 2, 16), ones(4, 2, 16, dtype=np.float16))),
    attention(InvalidInput, "expected new_kv to have one dtype, got int8 and float32",
              kv_pages=ones(6, 4, 4, 16, dtype=np.int8),
              new_kv=pair(ones(4, 2, 16, dtype=np.int8), ones(4, 2, 16))),
    attention(InvalidInput, "expected new_kv[0].dtype to be float32, got int8",
              new_kv=pair(ones(4, 2, 16, dtype=np.int8), ones(4, 2, 16, dtype=np.int8))),
    attention(InvalidInput, "expected options among none for this backend, got 'fused_update'",
              new_kv=pair(ones(4, 2, 16), ones(4, 2, 16)), backend="reference", options={"fused_update": True}),
    attention(InvalidInput, "expected draft_mask.shape to be [T, W] = [4, W], got [3, 2]", draft_mask=ones(3, 2) > 0),
    # Heads-first pages.
    paged(TypeError, "expected q to be an array, got NoneType", q=None),
    paged(TypeError, "expected k_pages to be an array, got str", k_pages="pages"),
    paged(TypeError, "expected k_pages to be an array or a pair (weight, scales), got 1 values", k_pages=(CODES,)),
    paged(TypeError, "expected v_pages to be an array or a pair (weight, scales), got 3 values",
          k_pages=(CODES, SCALES), v_pages=(CODES, SCALES, SCALES)),
    paged(TypeError, "expected v_pages to be an array as k_pages is, got a pair", v_pages=(CODES, SCALES)),
    paged(TypeError, "expected v_pages to be a pair as k_pages is, got an array", k_pages=(CODES, SCALES)),
    paged(TypeError, "expected lengths to be an array, got list", lengths=[3, 8]),
    paged(TypeError, "expected page_indices to be an array, got NoneType", page_indices=None),
    paged(TypeError, "expected sm_scale to be a number, got str", sm_scale="1"),
    paged(InvalidInput, f"expected q.dtype to be {FLOATS}, got int32", q=ones(2, 4, 16, dtype=np.int32)),
    paged(InvalidInput, f"expected k_pages.dtype to be float32 or {EIGHT_BIT}, got float16",
          k_pages=ones(2, 6, 4, 16, dtype=np.float16)),
    paged(InvalidInput, "expected v_pages.dtype to be float32, got int8", v_pages=CODES),
    paged(InvalidInput, f"expected k_pages[0].dtype to be {EIGHT_BIT}, got float32",
          k_pages=pair(ones(2, 6, 4, 16), SCALES), v_pages=pair(CODES, SCALES)),
    paged(InvalidInput, "expected k_pages[1].dtype to be float32, got float16",
          k_pages=pair(CODES, ones(2, 6, 4, 1, dtype=np.float16)), v_pages=pair(CODES, SCALES)),
    paged(InvalidInput, "expected v_pages[1].shape to be [K, P, G, 1] = [2, 6, 4, 1], got [2, 6, 4, 16]",
          k_pages=pair(CODES, SCALES), v_pages=pair(CODES, ones(2, 6, 4, 16))),
    paged(InvalidInput, "expected q.shape to be [S, H, D], got [4, 16]", q=ones(4, 16)),
    paged(InvalidInput, "expected q.shape[2] to be a multiple of 8 from 16 to 512, got 20: append "
          "zeros up to 24, with sm_scale=20**-0.5", q=ones(2, 4, 20), k_pages=ones(2, 6, 4, 20),
          v_pages=ones(2, 6, 4, 20)),
    paged(InvalidInput, "expected k_pages.shape to be [K, P, G, D] = [K, P, G, 16], got [2, 6, 4, 24]",
          k_pages=ones(2, 6, 4, 24)),
    paged(InvalidInput, "expected v_pages.shape to be [K, P, G, D] = [2, 6, 4, 16], got [2, 7, 4, 16]",
          v_pages=ones(2, 7, 4, 16)),
    paged(InvalidInput, "expected page_size >= 1, got 0", k_pages=ones(2, 6, 0, 16), v_pages=ones(2, 6, 0, 16)),
    paged(InvalidInput, "expected k_pages to have num_kv_heads >= 1, got 0",
          k_pages=ones(0, 6, 4, 16), v_pages=ones(0, 6, 4, 16)),
    paged(InvalidInput, "expected num_q_heads to be a multiple of num_kv_heads=2, got 3", q=ones(2, 3, 16)),
    paged(InvalidInput, "expected lengths.shape to be [S] = [2], got [3]", lengths=ints(1, 2, 3)),
    paged(InvalidInput, "expected lengths.dtype to be int32, got float32", lengths=ones(2)),
    paged(InvalidInput, "expected page_indices.shape to be [S, M] = [2, M], got [1, 2]", page_indices=ints([0, 1])),
    paged(InvalidInput, "expected soft_cap > 0, got 0.0", soft_cap=0.0),
    paged(InvalidInput, "expected options among none for this backend, got 'align'",
          backend="reference", options={"align": "end"}),
    chunk(TypeError, "expected length to be an int or an array, got float", length=7.0),
    chunk(TypeError, "expected length to be an int or an array, got bool", length=True),
    chunk(TypeError, "expected sliding_window to be an int, got float", sliding_window=2.0),
    chunk(TypeError, "expected options to be a mapping, got str", options="end"),
    chunk(InvalidInput, "expected length between 0 and 2147483647, got -1", length=-1),
    chunk(InvalidInput, "expected length between 0 and 2147483647, got 2147483648", length=2**31),
    chunk(InvalidInput, "expected length to be int32 of shape [1], got int32[2]", length=ints(1, 2)),
    chunk(InvalidInput, "expected length to be int32 of shape [1], got float32[1]", length=ones(1)),
    chunk(InvalidInput, "expected q.shape to be [T, H, D], got [4, 16]", q=ones(4, 16)),
    chunk(InvalidInput, "expected page_indices.shape to be [M], got [1, 2]", page_indices=ints([0, 1])),
    chunk(InvalidInput, "expected sliding_window >= 1, got 0", sliding_window=0),
    chunk(InvalidInput, "expected align to be 'chunk' or 'end', got 'start'", align="start"),
    chunk(TypeError, "expected align to be a str, got int", align=1),
    chunk(InvalidInput, "expected options among none for this backend, got 'block_q'",
          backend="reference", align="end", options={"block_q": 16}),
    # Writes.
    write(InvalidInput, "expected slot_mapping to be an array or (page_indices, kv_lens, cu_q_lens), got 0 values",
          slot_mapping=()),
    merge(InvalidInput, "expected outs to hold at least one part, got 0", outs=[], lses=[]),
    write(TypeError, "expected k to be an array, got NoneType", k=None),
    write(TypeError, "expected slot_mapping to be an array, got str", slot_mapping="slots"),
    write(TypeError, "expected k_scale to be a number or an array, got str", k_scale="1"),
    write(InvalidInput, "expected k_scale of a magnitude of at least 1.1754943508222875e-38, the smallest "
          "normal float32, got 0.0", k_scale=0.0),
    write(TypeError, "expected kv_pages to be an array or a pair (k_pages, v_pages), got 1 values",
          kv_pages=(ones(6, 4, 2, 16),)),
    write(InvalidInput, f"expected k.dtype to be {FLOATS}, got int32", k=ones(4, 2, 16, dtype=np.int32)),
    write(InvalidInput, f"expected k.dtype to be {FLOATS}, got int8", k=ones(4, 2, 16, dtype=np.int8)),
    write(InvalidInput, "expected v.dtype to be int8, got float32", k=ones(4, 2, 16, dtype=np.int8),
          kv_pages=ones(6, 4, 4, 16, dtype=np.int8)),
    write(InvalidInput, "expected k.shape to be [T, K, D] = [T, 2, 16], got [4, 3, 16]", k=ones(4, 3, 16)),
    write(InvalidInput, "expected v.shape to be [T, K, D_v] = [4, 2, 16], got [5, 2, 16]", v=ones(5, 2, 16)),
    write(InvalidInput, "expected v.dtype to be float32, got float16", v=ones(4, 2, 16, dtype=np.float16)),
    write(InvalidInput, f"expected k_scale_pages with kv_pages of uint8, got none: {NO_SCALES}",
          kv_pages=raw(6, 4, 4, 8)),
    write(InvalidInput, f"expected k.dtype to be {FLOATS} beside k_scale_pages, which the write computes, got int8",
          k=ones(4, 2, 16, dtype=np.int8), kv_pages=ones(6, 4, 4, 16, dtype=np.int8), k_scale_pages=ones(6, 4, 2)),
    write(InvalidInput, "expected v_pages.shape[3] = v.shape[2]=16 / 2, got 16: an element of uint8 holds two columns",
          kv_pages=pair(ones(6, 4, 2, 16), raw(6, 4, 2, 16)), v_scale_pages=ones(6, 4, 2)),
    write(InvalidInput, "expected page_size >= 1, got 0", kv_pages=ones(6, 0, 4, 16)),
    write(InvalidInput, f"expected kv_pages.dtype to be that of k, float32, or {EIGHT_BIT}, "
          "got float16", kv_pages=ones(6, 4, 4, 16, dtype=np.float16)),
    write(InvalidInput, "expected slot_mapping.dtype to be int32 or int64, got float32", slot_mapping=ones(4)),
    write(InvalidInput, "expected slot_mapping.shape to be [T] = [4], got [3]", slot_mapping=ints(0, 1, 2)),
    write(InvalidInput, "expected slot_mapping, or page_indices with kv_lens and cu_q_lens, got neither",
          slot_mapping=None),
    write(InvalidInput, "expected slot_mapping, or page_indices with kv_lens and cu_q_lens, got kv_lens, slot_mapping",
          kv_lens=ints(3, 8)),
    write(InvalidInput, "expected slot_mapping, or page_indices with kv_lens and cu_q_lens, got page_indices",
          slot_mapping=None, page_indices=ints([0, 1])),
    write(InvalidInput, "expected num_seqs only with page_indices, got it with slot_mapping", num_seqs=ints(1)),
    write(InvalidInput, "expected kv_lens.dtype to be int32, got float32", **TABLES | {"kv_lens": ones(2)}),
    write(InvalidInput, "expected cu_q_lens.shape to be [S+1] = [3], got [2]", **TABLES | {"cu_q_lens": ints(0, 4)}),
    write(InvalidInput, "expected num_seqs between 0 and max_num_seqs=2, got 5", **TABLES, num_seqs=5),
    rotated(InvalidInput, f"expected q.dtype to be {FLOATS}, got int32", q=ones(4, 4, 16, dtype=np.int32)),
    rotated(InvalidInput, "expected k.dtype to be float32, got float16", k=ones(4, 2, 16, dtype=np.float16)),
    rotated(InvalidInput, "expected k.shape to be [T, K, D] = [4, 2, 16], got [4, 3, 16]", k=ones(4, 3, 16)),
    rotated(InvalidInput, "expected v.shape to be [T, K, D_v] = [4, 2, 16], got [5, 2, 16]", v=ones(5, 2, 16)),
    rotated(InvalidInput, "expected kv_pages.shape[3] = head_dim=16, got 24", kv_pages=ones(6, 4, 4, 24)),
    rotated(InvalidInput, f"expected kv_pages.dtype to be that of q, float32, or {EIGHT_BIT}, "
            "got float16", kv_pages=ones(6, 4, 4, 16, dtype=np.float16)),
    rotated(InvalidInput, "expected slot_mapping, or page_indices with kv_lens and cu_q_lens, got neither",
            slot_mapping=None),
    rotated(InvalidInput, "expected positions.dtype to be int32 or int64, got float32", positions=ones(4)),
    rotated(InvalidInput, "expected positions.shape to be [T] = [4], got [3]", positions=ints(0, 1, 2)),
    rotated(InvalidInput, "expected cos_sin.shape[1] to be the rotary columns R, an even number, got 7",
            cos_sin=ones(4, 7)),
    rotated(InvalidInput, "expected cos_sin with at most head_dim=16 rotary columns, got 18", cos_sin=ones(4, 18)),
    rotated(InvalidInput, "expected cos_sin to have positions >= 1, got 0", cos_sin=ones(0, 8)),
    rotated(InvalidInput, "expected cos_sin[0] to have rotary columns >= 1, got 0", cos_sin=(ones(4, 0), ones(4, 0))),
    rotated(InvalidInput, "expected cos_sin[1].shape to be [N, R/2] = [4, 4], got [4, 3]",
            cos_sin=(ones(4, 4), ones(4, 3))),
    rotated(TypeError, "expected cos_sin to be an array or a pair (cos, sin), got 1 values", cos_sin=(ones(4, 4),)),
    rotated(InvalidInput, "expected q_weight.shape to be [D] = [16], got [8]", q_weight=ones(8)),
    rotated(InvalidInput, "expected eps > 0, got 0", eps=0),
    rotated(TypeError, "expected interleaved to be a bool, got int", interleaved=1),
    rotated_latents(InvalidInput, "expected q.shape to be [T, H, R] = [3, H, 8], got [3, 4, 16]", q=ones(3, 4, 16)),
    rotated_latents(InvalidInput, "expected q.dtype to be float32, got float16", q=ones(3, 4, 8, dtype=np.float16)),
    rotated_latents(InvalidInput, "expected cos_sin with at most d_qk=32 rotary columns, got 34", cos_sin=ones(4, 34)),
    rotated_latents(InvalidInput, "expected kv_weight.shape[0] between 1 and d_qk=32, got 40", kv_weight=ones(40)),
    rotated_latents(InvalidInput, "expected kv_weight.shape[0] between 1 and d_qk=32, got 0", kv_weight=ones(0)),
    rotated_latents(InvalidInput, "expected positions.shape to be [T] = [3], got [2]", positions=ints(0, 1)),
    rotated_latents(InvalidInput, "expected slot_mapping, or page_indices with kv_lens and cu_q_lens, got neither",
                    slot_mapping=None),
    write(InvalidInput, "expected v_scale to be a float array of shape [] or [num_kv_heads=2], got float32[4]",
          v_scale=ones(4)),
    # Merges.
    merge(TypeError, "expected outs to be an array, got NoneType", outs=None),
    merge(TypeError, "expected lses to be an array, got float", lses=1.0),
    merge(InvalidInput, f"expected outs.dtype to be {FLOATS}, got int32", outs=ones(2, 3, 4, 16, dtype=np.int32)),
    merge(InvalidInput, "expected lses.dtype to be float32, got float16", lses=ones(2, 3, 4, dtype=np.float16)),
    merge(InvalidInput, "expected outs.shape to be [N, T, H, D_v], got [3, 4, 16]",
          outs=ones(3, 4, 16)),
    merge(InvalidInput, "expected lses.shape to be [N, T, H] = [2, 3, 4], got [2, 4, 3]", lses=ones(2, 4, 3)),
    merge(InvalidInput, "expected outs to hold at least one part, got 0", outs=ones(0, 3, 4, 16), lses=ones(0, 3, 4)),
    merge(InvalidInput, "expected sinks.shape to be [H] = [4], got [3]", sinks=ones(3)),
    merge(InvalidInput, "expected out_dtype to be 'float32' or 'float16' or 'bfloat16', got 'int8'", out_dtype="int8"),
    merge(TypeError, "expected out_dtype to be a str, got int", out_dtype=3),
    # Sparse prefill.
    prefill(TypeError, "expected q to be an array, got NoneType", q=None),
    prefill(TypeError, "expected kv to be an array, got str", kv="rows"),
    prefill(TypeError, "expected indices to be an array, got list", indices=[[[0]]]),
    prefill(TypeError, "expected d_v to be an int, got float", d_v=16.0),
    prefill(TypeError, "expected sm_scale to be a number, got str", sm_scale="1"),
    prefill(TypeError, "expected sinks to be an array, got float", sinks=1.0),
    prefill(TypeError, "expected topk_lens to be an array, got int", topk_lens=2),
    prefill(InvalidInput, f"expected q.dtype to be {FLOATS} or float64, got int32", q=ones(3, 4, 32, dtype=np.int32)),
    prefill(InvalidInput, f"expected kv.dtype to be {FLOATS} or float64, got int8", kv=ones(10, 1, 32, dtype=np.int8)),
    prefill(InvalidInput, f"expected kv.dtype to be {FLOATS} or float64 or {BYTES}, got int32",
            kv=ones(2, 5, 1, 32, dtype=np.int32)),
    prefill(InvalidInput, "expected kv.dtype to be that of q, float32, or bytes, got float16",
            kv=ones(10, 1, 32, dtype=np.float16)),
    prefill(InvalidInput, f"expected kv.dtype to be {BYTES} with cache_format='fp8_v32', got float32",
            cache_format="fp8_v32"),
    prefill(InvalidInput, f"expected kv.dtype to be {FLOATS} with cache_format='plain', got uint8",
            kv=raw(2, 5, 1, 656), cache_format="plain"),
    prefill(InvalidInput, "expected indices.dtype to be int32, got float32", indices=ones(3, 1, 2)),
    prefill(InvalidInput, f"expected sinks.dtype to be float32, got float16{CONVERT}", sinks=ones(4, dtype=np.float16)),
    prefill(InvalidInput, "expected topk_lens.dtype to be int32, got float32", topk_lens=ones(3)),
    prefill(InvalidInput, "expected q.shape to be [T, H, D], got [3, 32]", q=ones(3, 32)),
    prefill(InvalidInput, "expected q.shape[2] to be a multiple of 16 from 16 to 1024, got 40", q=ones(3, 4, 40)),
    prefill(InvalidInput, "expected q.shape[2] to be a multiple of 16 from 16 to 1024, got 1040", q=ones(3, 4, 1040)),
    prefill(InvalidInput, "expected q.shape[2] to be a multiple of 16 from 16 to 1024, got 0", q=ones(3, 4, 0)),
    prefill(InvalidInput, "expected d_v to be a multiple of 16 from 16 to d_qk=32, got 48", d_v=48),
    prefill(InvalidInput, "expected d_v to be a multiple of 16 from 16 to d_qk=32, got 24", d_v=24),
    prefill(InvalidInput, "expected d_v to be a multiple of 16 from 16 to d_qk=32, got 0", d_v=0),
    prefill(InvalidInput, "expected kv.shape to be [P, G, K, C], got [10, 32]", kv=ones(10, 32)),
    prefill(InvalidInput, "expected kv.shape[2] = d_qk=32, got 48", kv=ones(10, 1, 48)),
    prefill(InvalidInput, "expected kv.shape[3] = d_qk=32, got 48", kv=ones(2, 5, 1, 48)),
    prefill(InvalidInput, "expected kv.shape[3] to be 656 (fp8_v32) or 584 (fp8_v4) or 528 (fp8_v41) or 288 (fp4_v41) "
            "for a cache of bytes, got 32",
            kv=raw(2, 5, 1, 32)),
    prefill(InvalidInput, "expected kv.shape[3] to be 656 (fp8_v32) or 584 (fp8_v4) or 528 (fp8_v41) or 288 (fp4_v41) "
            f"for a cache of bytes, got 32{PLAIN_8_BIT}",
            kv=ones(2, 5, 1, 32, dtype=np.int8)),
    prefill(InvalidInput, f"expected kv.dtype to be {FLOATS} with cache_format='plain', got int8{PLAIN_8_BIT}",
            kv=ones(2, 5, 1, 32, dtype=np.int8), cache_format="plain"),
    prefill(InvalidInput, "expected kv.shape[3] to be 584 (fp8_v4) for a cache of bytes, got 656",
            kv=raw(2, 5, 1, 656), cache_format="fp8_v4"),
    prefill(InvalidInput, "expected q's last dimension to be 576 with cache_format='fp8_v32', got 32",
            kv=raw(2, 5, 1, 656)),
    prefill(InvalidInput, "expected kv to have num_kv_heads >= 1, got 0", kv=ones(10, 0, 32)),
    prefill(InvalidInput, "expected kv to have num_kv_heads >= 1, got 0", kv=ones(2, 5, 0, 32)),
    prefill(InvalidInput, "expected kv to have num_kv_heads = 1 with cache_format='fp8_v4', got 2",
            kv=raw(2, 5, 2, 584)),
    prefill(InvalidInput, "expected kv to have page_size >= 1, got 0", kv=ones(2, 0, 1, 32)),
    prefill(InvalidInput, "expected num_q_heads to be a multiple of num_kv_heads=3, got 4", kv=ones(10, 3, 32)),
    prefill(InvalidInput, "expected num_q_heads to be a multiple of num_kv_heads=1, got 0", q=ones(3, 0, 32)),
    prefill(InvalidInput, "expected indices.shape to be [T, K, N] = [3, 1, N], got [2, 1, 1]",
            indices=ints([[0]], [[1]])),
    prefill(InvalidInput, "expected indices.shape to be [T, K, N] = [3, 1, N], got [3, 2]",
            indices=ints([0, 1], [2, 3], [4, 5])),
    prefill(InvalidInput, "expected indices to list at least one key per query, got 0", indices=ints([[]], [[]], [[]])),
    prefill(InvalidInput, "expected sinks.shape to be [H] = [4], got [3]", sinks=ones(3)),
    prefill(InvalidInput, "expected topk_lens.shape to be [T] = [3], got [2]", topk_lens=ints(1, 2)),
    prefill(InvalidInput, "expected sm_scale to be finite, got inf", sm_scale=float("inf")),
    prefill(InvalidInput, "expected cache_format to be one of plain, fp8_v32, fp8_v4, fp8_v41, fp4_v41, got 'fp8'",
            cache_format="fp8"),
    prefill(InvalidInput, "expected kv.shape[3] to be 288 (fp4_v41) for a cache of bytes, got 528",
            kv=raw(2, 5, 1, 528), cache_format="fp4_v41"),
    prefill(InvalidInput, "expected q's last dimension to be 512 with cache_format='fp8_v41', got 32",
            kv=raw(2, 5, 1, 528)),
    prefill(InvalidInput, "expected kv to have num_kv_heads = 1 with cache_format='fp4_v41', got 2",
            kv=raw(2, 5, 2, 288)),
    prefill(InvalidInput, "expected cache_layout to be one of token, page, got 'pages'", cache_layout="pages"),
    prefill(InvalidInput, "expected cache_layout='token' with cache_format='plain', got 'page'", cache_layout="page"),
    prefill(InvalidInput, "expected cache_layout='token' with cache_format='fp8_v32', got 'page'",
            kv=raw(2, 5, 1, 656), cache_layout="page"),
    # Decode.
    decode(TypeError, "expected q to be an array, got NoneType", q=None, schedule=None),
    decode(TypeError, "expected kv_cache to be an array, got list", kv_cache=[1.0], schedule=None),
    decode(TypeError, "expected causal to be a bool, got int", causal=1),
    decode(TypeError, "expected topk_lens to be an array, got int", **LISTS, topk_lens=3),
    decode(TypeError, "expected schedule to be a DecodeSchedule, got tuple", schedule=(1, 2)),
    decode(InvalidInput, "expected q.shape to be [S, Q, H, D], got [2, 4, 32]", q=ones(2, 4, 32),
           schedule=None),
    decode(InvalidInput, "expected q.shape[3] to be a multiple of 16 from 16 to 1024, got 8", q=ones(2, 1, 4, 8)),
    decode(InvalidInput, "expected q to have at least one query token per sequence, got 0", q=ones(2, 0, 4, 32),
           schedule=None),
    decode(InvalidInput, f"expected kv_cache.dtype to be {FLOATS} or {BYTES}, got int32",
           kv_cache=ones(6, 4, 1, 32, dtype=np.int32)),
    decode(InvalidInput, "expected kv_cache.shape to be [P, G, K, C], got [24, 1, 32]",
           kv_cache=ones(24, 1, 32), schedule=None),
    decode(InvalidInput, "expected kv_cache.shape[3] = d_qk=32, got 16", kv_cache=ones(6, 4, 1, 16)),
    decode(InvalidInput, "expected page_indices with a dense call (one without indices), got None", page_indices=None),
    decode(InvalidInput, "expected kv_lens with a dense call (one without indices), got None", kv_lens=None),
    decode(InvalidInput, "expected page_indices.shape to be [S, M] = [2, M], got [3, 1]",
           page_indices=ints([0], [1], [2])),
    decode(InvalidInput, "expected kv_lens.dtype to be int32, got float32", kv_lens=ones(2)),
    decode(InvalidInput, "expected topk_lens only together with indices, got it without", topk_lens=ints(1, 2)),
    decode(InvalidInput, "expected extra_kv_cache only together with indices, got it without",
           extra_kv_cache=ones(3, 2, 1, 32)),
    decode(InvalidInput, "expected extra_indices only together with indices, got it without",
           extra_indices=TWO["extra_indices"], schedule=None),
    decode(InvalidInput, "expected extra_topk_lens only together with indices, got it without",
           extra_topk_lens=ints(1, 2)),
    decode(InvalidInput, "expected kv_cache to have num_kv_heads = 1 with indices, got 2",
           **LISTS | {"kv_cache": ones(6, 4, 2, 32)}),
    decode(InvalidInput, "expected causal=False with indices, which select the keys themselves, got True",
           **LISTS, causal=True),
    decode(InvalidInput, "expected indices.shape to be [S, Q, N] = [2, 1, N], got [2, 2]",
           **LISTS | {"indices": ints([0, 1], [2, 3])}),
    decode(InvalidInput, "expected indices to list at least one key per query, got 0",
           **LISTS | {"indices": ints([[]], [[]])}),
    decode(InvalidInput, "expected topk_lens.shape to be [S] = [2], got [3]", **LISTS, topk_lens=ints(1, 2, 3)),
    decode(InvalidInput, "expected topk_lens.shape to be [S, Q] = [2, 1], got [1, 2]", **LISTS, topk_lens=ints([1, 2])),
    decode(InvalidInput, "expected page_indices.shape to be [S, M] = [2, M], got [3, 1]",
           **LISTS | {"page_indices": ints([0], [1], [2])}),
    decode(InvalidInput, "expected kv_lens.dtype to be int32, got float32", **LISTS | {"kv_lens": ones(2)}),
    decode(InvalidInput, "expected extra_kv_cache and extra_indices together, got extra_indices=None",
           **TWO | {"extra_indices": None}),
    decode(InvalidInput, "expected extra_kv_cache and extra_indices together, got extra_kv_cache=None",
           **TWO | {"extra_kv_cache": None}),
    decode(InvalidInput, "expected extra_topk_lens only together with extra_indices, got it without",
           **LISTS, extra_topk_lens=ints(1, 2)),
    decode(InvalidInput, "expected extra_kv_cache in the format of kv_cache, plain, got fp8_v32",
           **TWO | {"extra_kv_cache": raw(3, 2, 1, 656)}),
    decode(InvalidInput, "expected extra_kv_cache in the format of kv_cache, fp8_v32, got fp8_v4",
           **TWO | BYTE_LISTS | {"extra_kv_cache": raw(3, 2, 1, 584)}),
    decode(InvalidInput, "expected extra_kv_cache in the format of kv_cache, fp8_v41 or fp4_v41, got fp8_v4",
           **TWO | V41_LISTS | {"extra_kv_cache": raw(3, 2, 1, 584)}),
    decode(InvalidInput, "expected cache_layout='page' with cache_format='fp8_v4', got 'token'",
           **TWO | BYTE_LISTS | {"extra_kv_cache": raw(3, 2, 1, 584), "cache_layout": "token"}),
    decode(InvalidInput, "expected cache_layout to be one of token, page, got 'rows'", cache_layout="rows"),
    decode(InvalidInput, "expected extra_kv_cache.shape[3] to be 656 (fp8_v32) or 584 (fp8_v4) or 528 (fp8_v41) or "
           "288 (fp4_v41) for a cache of bytes, got 300",
           **TWO | V41_LISTS | {"extra_kv_cache": raw(3, 2, 1, 300)}),
    decode(InvalidInput, "expected extra_kv_cache.shape[3] = d_qk=32, got 48",
           **TWO | {"extra_kv_cache": ones(3, 2, 1, 48)}),
    decode(InvalidInput, "expected extra_kv_cache to have num_kv_heads = 1, got 2",
           **TWO | {"extra_kv_cache": ones(3, 2, 2, 32)}),
    decode(InvalidInput, "expected extra_indices.dtype to be int32, got float32",
           **TWO | {"extra_indices": ones(2, 1, 2)}),
    decode(InvalidInput, "expected extra_indices to list at least one key per query, got 0",
           **TWO | {"extra_indices": ints([[]], [[]])}),
    decode(InvalidInput, "expected extra_topk_lens.shape to be [S] = [2], got [1]", **TWO, extra_topk_lens=ints(1)),
    decode(InvalidInput, "expected a schedule made for batch_size=2, got one made for batch_size=3",
           **scheduled(made_for=(3, 1, 4, 1, 0, 0))),
    decode(InvalidInput, "expected a schedule made for num_q_tokens=1, got one made for num_q_tokens=2",
           **scheduled(made_for=(2, 2, 4, 1, 0, 0))),
    decode(InvalidInput, "expected a schedule made for num_q_heads=4, got one made for num_q_heads=8",
           **scheduled(made_for=(2, 1, 8, 1, 0, 0))),
    decode(InvalidInput, "expected a schedule made for num_kv_heads=1, got one made for num_kv_heads=2",
           **scheduled(made_for=(2, 1, 4, 2, 0, 0))),
    decode(InvalidInput, "expected a schedule made for topk=3, got one made for topk=0",
           **LISTS | {"schedule": SCHEDULE}),
    decode(InvalidInput, "expected a schedule made for extra_topk=2, got one made for extra_topk=4",
           **TWO | scheduled(made_for=(2, 1, 4, 1, 3, 4))),
    decode(InvalidInput, "expected schedule.num_splits.shape to be [S+1] = [3], got [2]",
           **scheduled(num_splits=ints(0, 1))),
    decode(InvalidInput, "expected schedule.num_splits.dtype to be int32, got float32",
           **scheduled(num_splits=ones(3))),
    decode(InvalidInput, "expected schedule.parts.shape to be [R, 8], got [3, 7]",
           **scheduled(parts=np.zeros((3, 7), np.int32))),
    decode(InvalidInput, "expected sliding_window >= 1, got 0", sliding_window=0),
    decode(InvalidInput, "expected sliding_window=None with indices, which select the keys themselves, got 3",
           **LISTS, sliding_window=3),
    decode(InvalidInput, "expected soft_cap > 0, got -1.0", soft_cap=-1.0),
    decode(InvalidInput, "expected out_dtype to be 'float32' or 'float16' or 'bfloat16', got 'float64'",
           out_dtype="float64"),
    decode(TypeError, "expected out_dtype to be a str, got int", out_dtype=32),
    # Ragged attention over latents.
    ragged_latents(TypeError, "expected q to be an array, got NoneType", q=None),
    ragged_latents(TypeError, "expected return_lse to be a bool, got int", return_lse=1),
    ragged_latents(TypeError, "expected return_max_logits to be a bool, got str", return_max_logits="yes"),
    ragged_latents(TypeError, "expected max_q_len to be an int, got float", max_q_len=2.0),
    ragged_latents(TypeError, "expected kv_scale to be a number or an array, got str", kv_scale="2"),
    ragged_latents(InvalidInput, f"expected q.dtype to be {FLOATS}, got int32", q=ones(4, 4, 32, dtype=np.int32)),
    ragged_latents(InvalidInput, "expected q.shape to be [T, H, D], got [4, 1, 4, 32]",
                   q=ones(4, 1, 4, 32)),
    ragged_latents(InvalidInput, "expected q.shape[2] to be a multiple of 16 from 16 to 1024, got 8", q=ones(4, 4, 8),
                   kv_cache=ones(6, 4, 1, 8)),
    ragged_latents(InvalidInput, "expected d_v to be a multiple of 16 from 16 to d_qk=32, got 48", d_v=48),
    ragged_latents(InvalidInput, f"expected kv_cache.dtype to be {FLOATS} or {BYTES} or float8_e5m2 or "
                   "float8_e4m3fnuz, got int32",
                   kv_cache=ones(6, 4, 1, 32, dtype=np.int32)),
    ragged_latents(InvalidInput, "expected kv_cache.dtype to be that of q, float32, or bytes, got float16",
                   kv_cache=ones(6, 4, 1, 32, dtype=np.float16)),
    ragged_latents(InvalidInput, "expected kv_cache.shape[3] = d_qk=32, got 48", kv_cache=ones(6, 4, 1, 48)),
    ragged_latents(InvalidInput, "expected kv_cache.shape[3] to be 656 (fp8_v32) or 584 (fp8_v4) or 528 (fp8_v41) or "
                   "288 (fp4_v41) for a cache of bytes, got 32", kv_cache=raw(6, 4, 1, 32)),
    ragged_latents(InvalidInput, "expected q's last dimension to be 576 with cache_format='fp8_v32', got 32",
                   kv_cache=raw(6, 4, 1, 656)),
    ragged_latents(InvalidInput, "expected kv_cache to have num_kv_heads = 1, a row that serves all heads, got 2",
                   kv_cache=ones(6, 4, 2, 32)),
    ragged_latents(InvalidInput, "expected kv_cache to have page_size >= 1, got 0", kv_cache=ones(6, 0, 1, 32)),
    ragged_latents(InvalidInput, "expected num_q_heads to be a multiple of num_kv_heads=1, got 0", q=ones(4, 0, 32)),
    ragged_latents(InvalidInput, "expected kv_scale=None with 'fp8_v32', which stores scales of its own, got one",
                   q=ones(4, 4, 576), kv_cache=raw(6, 4, 1, 656), kv_scale=2.0),
    ragged_latents(InvalidInput, "expected rope_scale=None with 'fp8_v32', which stores scales of its own, got one",
                   q=ones(4, 4, 576), kv_cache=raw(6, 4, 1, 656), rope_scale=2.0),
    ragged_latents(TypeError, "expected rope_scale to be a number or an array, got str", rope_scale="2"),
    ragged_latents(InvalidInput, "expected kv_scale to be a float array of shape [] or [num_kv_heads=1], got "
                   "float32[2]", kv_scale=ones(2)),
    ragged_latents(InvalidInput, "expected page_indices.shape to be [S, M] = [2, M], got [1, 2]",
                   page_indices=ints([0, 1])),
    ragged_latents(InvalidInput, "expected cu_q_lens.shape to be [S+1] = [3], got [2]", cu_q_lens=ints(0, 4)),
    ragged_latents(InvalidInput, "expected num_seqs between 0 and max_num_seqs=2, got 3", num_seqs=3),
    ragged_latents(InvalidInput, "expected sliding_window >= 1, got 0", sliding_window=0),
    ragged_latents(InvalidInput, "expected soft_cap > 0, got 0.0", soft_cap=0.0),
    ragged_latents(InvalidInput, "expected sinks.shape to be [H] = [4], got [3]", sinks=ones(3)),
    ragged_latents(InvalidInput, "expected new_kv.dtype to be float32, got float16",
                   new_kv=ones(4, 32, dtype=np.float16)),
    ragged_latents(InvalidInput, "expected new_kv.shape to be [T, K, D] = [4, 1, 32], got [3, 1, 32]",
                   new_kv=ones(3, 32)),
    ragged_latents(InvalidInput, "expected new_kv.shape to be [T, K, D] = [4, 1, 32], got [4, 2, 32]",
                   new_kv=ones(4, 2, 32)),
    ragged_latents(InvalidInput, "expected cache_format to be one of plain, fp8_v32, fp8_v4, fp8_v41, fp4_v41, got "
                   "'fp8'", cache_format="fp8"),
    ragged_latents(InvalidInput, "expected cache_layout='token' with cache_format='plain', got 'page'",
                   cache_layout="page"),
    ragged_latents(InvalidInput, "expected q_scale only with q of float8_e4m3fn, got q.dtype float32", q_scale=2.0),
    ragged_latents(InvalidInput, "expected out_dtype to be 'float32' or 'float16' or 'bfloat16', got 'int8'",
                   out_dtype="int8"),
    # Schedules.
    schedule(InvalidInput, "expected kv_lens.dtype to be int32, got float32", kv_lens=ones(2)),
    schedule(InvalidInput, "expected kv_lens.shape to be [S] = [2], got [3]", kv_lens=ints(1, 2, 3)),
    schedule(TypeError, "expected kv_lens to be an array, got int", kv_lens=64),
    schedule(InvalidInput, "expected kv_lens for a dense call or topk for a sparse one, got neither", kv_lens=None),
    schedule(InvalidInput, "expected kv_lens for a dense call or topk for a sparse one, got both", topk=64),
    schedule(InvalidInput, "expected topk_lens.dtype to be int32, got float32", kv_lens=None, topk=64,
             topk_lens=ones(2)),
    schedule(InvalidInput, "expected topk >= 1, got 0", kv_lens=None, topk=0),
    schedule(InvalidInput, "expected topk_lens only together with topk, got it with kv_lens", topk_lens=ints(1, 2)),
    schedule(InvalidInput, "expected extra_topk only together with topk, got it with kv_lens", extra_topk=3),
    schedule(InvalidInput, "expected num_kv_heads = 1 with topk, got 2", kv_lens=None, topk=64, num_kv_heads=2),
    schedule(InvalidInput, "expected extra_topk_lens only together with extra_topk, got it without",
             kv_lens=None, topk=64, extra_topk_lens=ints(1, 2)),
    schedule(TypeError, "expected extra_topk to be an int, got float", kv_lens=None, topk=64, extra_topk=1.5),
    schedule(InvalidInput, "expected extra_topk >= 1, got 0", kv_lens=None, topk=64, extra_topk=0),
    schedule(TypeError, "expected batch_size to be an int, got str", batch_size="2"),
    schedule(InvalidInput, "expected batch_size >= 0, got -1", kv_lens=None, topk=64, batch_size=-1),
    schedule(InvalidInput, "expected num_q_tokens >= 1, got 0", num_q_tokens=0),
    schedule(InvalidInput, "expected num_q_heads >= 1, got 0", num_q_heads=0),
    schedule(InvalidInput, "expected num_kv_heads >= 1, got 0", num_kv_heads=0),
    schedule(InvalidInput, "expected num_q_heads to be a multiple of num_kv_heads=3, got 4", num_kv_heads=3),
    schedule(TypeError, "expected num_parts to be an int, got float", num_parts=2.5),
    schedule(TypeError, "expected overhead to be an int, got str", overhead="5"),
    schedule(InvalidInput, "expected num_parts >= 1, got 0", num_parts=0),
    schedule(InvalidInput, "expected overhead >= 0, got -1", overhead=-1),
    # Quantised caches.
    quantize(TypeError, "expected kv to be an array, got NoneType", kv=None),
    quantize(TypeError, "expected power_of_two_scales to be a bool, got int", power_of_two_scales=1),
    quantize(InvalidInput, "expected format to be one of fp8_v32, fp8_v4, fp8_v41, fp4_v41, got 'plain'",
             format="plain"),
    quantize(InvalidInput, "expected cache_layout='token' with cache_format='fp8_v32', got 'page'",
             cache_layout="page"),
    quantize(InvalidInput, "expected cache_layout='page' with cache_format='fp8_v4', got 'token'",
             kv=ones(2, 3, 1, 512), format="fp8_v4", cache_layout="token"),
    quantize(InvalidInput, "expected cache_layout to be one of token, page, got 'row'",
             kv=ones(2, 3, 1, 512), format="fp4_v41", cache_layout="row"),
    quantize(InvalidInput, "expected power_of_two_scales=True with format='fp8_v41', got False",
             kv=ones(2, 3, 1, 512), format="fp8_v41", power_of_two_scales=False),
    quantize(InvalidInput, f"expected kv.dtype to be {FLOATS}, got uint8", kv=raw(2, 3, 1, 576)),
    quantize(InvalidInput, "expected kv.shape to be [P, G, 1, D] = [P, G, 1, 576], got [2, 3, 1, 512]",
             kv=ones(2, 3, 1, 512)),
    quantize(InvalidInput, "expected kv.shape to be [P, G, 1, D] = [P, G, 1, 512], got [2, 3, 2, 512]",
             kv=ones(2, 3, 2, 512), format="fp8_v4"),
    quantize(InvalidInput, "expected kv to have page_size >= 1, got 0", kv=ones(2, 0, 1, 576)),
    quantize(InvalidInput, "expected power_of_two_scales=True with format='fp8_v4', got False",
             kv=ones(2, 3, 1, 512), format="fp8_v4", power_of_two_scales=False),
    dequantize(TypeError, "expected cache to be an array, got bytes", cache=b"cache"),
    dequantize(InvalidInput, f"expected cache.dtype to be {BYTES}, got float32", cache=ones(2, 3, 1, 656)),
    dequantize(InvalidInput, "expected cache.shape to be [P, G, 1, C], got [2, 3, 656]",
               cache=raw(2, 3, 656)),
    dequantize(InvalidInput, "expected cache.shape[3] to be 656 (fp8_v32) or 584 (fp8_v4) or 528 (fp8_v41) or 288 "
               "(fp4_v41) for a cache of bytes, got 600", cache=raw(2, 3, 1, 600)),
    dequantize(InvalidInput, "expected cache.shape[3] to be 584 (fp8_v4) for a cache of bytes, got 656",
               format="fp8_v4"),
    dequantize(InvalidInput, "expected format to be one of fp8_v32, fp8_v4, fp8_v41, fp4_v41, got 'plain'",
               format="plain"),
    dequantize(InvalidInput, "expected cache_layout='token' with cache_format='fp8_v32', got 'page'",
               cache_layout="page"),
    dequantize(InvalidInput, "expected cache to have page_size >= 1, got 0", cache=raw(2, 0, 1, 656)),
    dequantize(InvalidInput, "expected dtype to be 'float32' or 'float16' or 'bfloat16', got 'int8'", dtype="int8"),
    # Writes of latents.
    write_latents(TypeError, "expected kv to be an array, got NoneType", kv=None),
    write_latents(TypeError, "expected cache to be an array, got NoneType", cache=None),
    write_latents(TypeError, "expected slot_mapping to be an array, got int", slot_mapping=3),
    write_latents(TypeError, "expected power_of_two_scales to be a bool, got NoneType", power_of_two_scales=None),
    write_latents(InvalidInput, "expected kv.dtype to be float32, got float16", kv=ones(3, 1, 32, dtype=np.float16)),
    write_latents(InvalidInput, f"expected kv.dtype to be {FLOATS}, got int32",
                  kv=ones(3, 1, 576, dtype=np.int32), cache=raw(2, 3, 1, 656)),
    write_latents(InvalidInput, "expected kv.shape to be [T, K, D] = [T, 1, 32], got [3, 1, 48]", kv=ones(3, 1, 48)),
    write_latents(InvalidInput, "expected kv.shape to be [T, K, D] = [T, 1, 512], got [3, 1, 576]",
                  kv=ones(3, 1, 576), cache=raw(2, 3, 1, 584)),
    write_latents(InvalidInput, "expected slot_mapping.dtype to be int32 or int64, got float32", slot_mapping=ones(3)),
    write_latents(InvalidInput, "expected slot_mapping.shape to be [T] = [3], got [2]", slot_mapping=ints(0, 1)),
    write_latents(InvalidInput, "expected cache_format to be one of plain, fp8_v32, fp8_v4, fp8_v41, fp4_v41, got 'v4'",
                  cache_format="v4"),
    write_latents(InvalidInput, "expected cache_layout='token' with cache_format='plain', got 'page'",
                  cache_layout="page"),
    write_latents(InvalidInput, "expected power_of_two_scales=True with cache_format='fp8_v41', got False",
                  kv=ones(3, 1, 512), cache=raw(2, 3, 1, 528), power_of_two_scales=False),
    write_latents(InvalidInput, "expected power_of_two_scales=True with cache_format='fp8_v4', got False",
                  kv=ones(3, 1, 512), cache=raw(2, 3, 1, 584), power_of_two_scales=False),
    write_latents(InvalidInput, "expected slot_mapping, or page_indices with kv_lens and cu_q_lens, got neither",
                  slot_mapping=None),
    write_latents(InvalidInput, "expected slot_mapping, or page_indices with kv_lens and cu_q_lens, got kv_lens",
                  slot_mapping=None, kv_lens=ints(3, 8)),
    write_latents(InvalidInput, "expected slot_mapping to be an array or (page_indices, kv_lens, cu_q_lens), got 2 "
                  "values", slot_mapping=(ints(0), ints(1))),
    write_latents(InvalidInput, "expected num_seqs only with page_indices, got it with slot_mapping",
                  num_seqs=ints(1)),
    write_latents(InvalidInput, "expected cu_q_lens.shape to be [S+1] = [3], got [2]",
                  **TABLES | {"cu_q_lens": ints(0, 3)}),
    write_latents(InvalidInput, "expected kv_scale=None with 'fp8_v32', which stores scales of its own, got one",
                  kv=ones(3, 1, 576), cache=raw(2, 3, 1, 656), kv_scale=0.5),
    write_latents(InvalidInput, "expected kv_scale to be finite, got inf", kv_scale=float("inf")),
    write_latents(InvalidInput, "expected rope_scale=None with 'fp8_v32', which stores scales of its own, got one",
                  kv=ones(3, 1, 576), cache=raw(2, 3, 1, 656), rope_scale=0.5, d_v=512),
    write_latents(InvalidInput, "expected rope_scale to be finite, got inf", rope_scale=float("inf"), d_v=16),
    write_latents(InvalidInput, "expected rope_scale and d_v together, got rope_scale without d_v, where its columns "
                  "begin", rope_scale=0.5),
    write_latents(InvalidInput, "expected rope_scale and d_v together, got d_v without rope_scale", d_v=16),
    write_latents(InvalidInput, "expected d_v between 0 and d_qk=32, got 33", rope_scale=0.5, d_v=33),
    write_latents(InvalidInput, "expected d_v >= 0, got -1", rope_scale=0.5, d_v=-1),
    write_latents(InvalidInput, f"expected kv.dtype to be {FLOATS}, got int32",
                  kv=ones(3, 1, 32, dtype=np.int32), cache=ones(2, 3, 1, 32, dtype=np.int8), kv_scale=0.5),
    write_latents(InvalidInput, "expected kv_scale with cache of int8, got none: pass kv_scale=1.0 if the codes are "
                  "the values", cache=ones(2, 3, 1, 32, dtype=np.int8), rope_scale=0.5, d_v=16),
    rotated_latents(InvalidInput, "expected kv_scale with cache of int8, got none: pass kv_scale=1.0 if the codes are "
                    "the values", cache=ones(2, 3, 1, 32, dtype=np.int8)),
    ragged_latents(InvalidInput, "expected kv_scale with kv_cache of int8, got none: pass kv_scale=1.0 if the codes "
                   "are the values", kv_cache=ones(4, 4, 1, 32, dtype=np.int8)),
    # Conversion of positions to slots.
    slots(TypeError, "expected positions to be an array, got int", positions=3),
    slots(TypeError, "expected page_indices to be an array, got NoneType", page_indices=None),
    slots(TypeError, "expected page_size to be an int, got float", page_size=4.0),
    slots(InvalidInput, "expected positions.dtype to be int32, got float32", positions=ones(2, 2)),
    slots(InvalidInput, "expected positions.shape to be [S], got []", positions=np.array(3, np.int32)),
    slots(InvalidInput, "expected page_indices to have a row for each of 2 rows of positions, got 3: pass cu_q_lens if "
          "positions has the rows of a ragged batch", page_indices=ints([0], [1], [2])),
    slots(InvalidInput, "expected num_seqs only with cu_q_lens, got it alone", page_indices=ints([0]), num_seqs=1),
    slots(InvalidInput, "expected page_indices.shape to be [S, M], got [2]", page_indices=ints(0, 1)),
    slots(InvalidInput, "expected page_size >= 1, got 0", page_size=0),
    slots(InvalidInput, "expected num_seqs only with cu_q_lens, got it alone", num_seqs=1),
    slots(InvalidInput, "expected num_seqs between 0 and max_num_seqs=2, got 3", num_seqs=3, cu_q_lens=ints(0, 1, 2)),
    slots(InvalidInput, "expected num_seqs to be int32 of shape [1], got int32[2]", num_seqs=ints(1, 2),
          cu_q_lens=ints(0, 1, 2)),
    slots(InvalidInput, "expected cu_q_lens.shape to be [S+1] = [3], got [2]", cu_q_lens=ints(0, 2)),
    slots(InvalidInput, "expected cu_q_lens.dtype to be int32, got float32", cu_q_lens=ones(3)),
]  # fmt: skip

VALUES = [
    varlen(InvalidInput, "expected cu_q_lens[0] = 0, got 1", cu_q_lens=ints(1, 2, 6)),
    varlen(InvalidInput, "expected cu_kv_lens to ascend, got 9, 7 at sequence 1", cu_kv_lens=ints(0, 9, 7),
           k=ones(9, 2, 16), v=ones(9, 2, 8)),
    varlen(InvalidInput, "expected cu_q_lens[2] <= num_tokens=6, got 7", cu_q_lens=ints(0, 2, 7)),
    varlen(InvalidInput, "expected no sequence longer than max_kv_len=3, got 4 at 1", max_kv_len=3),
    values("expected num_seqs between 0 and max_num_seqs=2, got 7", num_seqs=ints(7)),
    values("expected cu_q_lens[0] = 0, got 1", cu_q_lens=ints(1, 2, 4)),
    values("expected no sequence of more than max_q_len=1 queries, got 2 at 0", max_q_len=1),
    values("expected cu_q_lens to ascend, got 3, 2 at sequence 1", cu_q_lens=ints(0, 3, 2)),
    values("expected cu_q_lens[2] <= num_tokens=4, got 9", cu_q_lens=ints(0, 2, 9), kv_lens=ints(3, 8)),
    values("expected kv_lens[0] between 0 and pages_per_seq * page_size = 8, got 9", kv_lens=ints(9, 8)),
    values("expected kv_lens[1] between 0 and pages_per_seq * page_size = 8, got -1", kv_lens=ints(3, -1)),
    values("expected q_len <= kv_lens[0] = 1, got q_len 2 of sequence 0", kv_lens=ints(1, 8)),
    values("expected page_indices[1, 1] between 0 and 5, got 6", page_indices=ints([0, 1], [2, 6])),
    values("expected page_indices[0, 0] between 0 and 5, got -1", page_indices=ints([-1, 1], [2, 3])),
    rotated(InvalidInput, "expected positions[1] between 0 and 3, got 4", positions=ints(0, 4, 2, 9)),
    rotated(InvalidInput, "expected positions[3] between 0 and 3, got -1", **TABLES, positions=ints(0, 1, 2, -1)),
    rotated_latents(InvalidInput, "expected positions[2] between 0 and 3, got 4", positions=ints(0, 9, 4)),
    rotated(InvalidInput, "expected slot_mapping[2] to be -1 or between 0 and 23, got 24",
            slot_mapping=ints(0, 1, 24, -1)),
    write(InvalidInput, "expected slot_mapping[2] to be -1 or between 0 and 23, got 24",
          slot_mapping=ints(0, 1, 24, 2)),
    slots(InvalidInput, "expected cu_q_lens to ascend, got 2, 1 at sequence 1", cu_q_lens=ints(0, 2, 1)),
    slots(InvalidInput, "expected cu_q_lens[2] <= num_tokens=2, got 3", cu_q_lens=ints(0, 2, 3)),
    slots(InvalidInput, "expected num_seqs between 0 and max_num_seqs=2, got 5", cu_q_lens=ints(0, 1, 2),
          num_seqs=ints(5)),
    write(InvalidInput, "expected slot_mapping[0] to be -1 or between 0 and 23, got -2",
          slot_mapping=ints(-2, 1, 2, 3)),
    write(InvalidInput, "expected page_indices[0, 0] between 0 and 5, got 8",
          **TABLES | {"page_indices": ints([8, 1], [2, 3])}),
    attention(InvalidInput, "expected page_indices[1, 1] between 0 and 5, got 6",
              page_indices=ints([0, 1], [2, 6]), new_kv=pair(ones(4, 2, 16), ones(4, 2, 16))),
    paged(InvalidInput, "expected lengths[1] between 0 and pages_per_seq * page_size = 8, got 9", lengths=ints(3, 9)),
    paged(InvalidInput, "expected page_indices[1, 1] between 0 and 5, got 6", page_indices=ints([0, 7], [2, 6])),
    chunk(InvalidInput, "expected length between 0 and pages_per_seq * page_size = 8, got 9", length=9),
    chunk(InvalidInput, "expected page_indices[1] between 0 and 5, got -1", page_indices=ints(0, -1)),
    decode(InvalidInput, "expected kv_lens[0] between 0 and pages_per_seq * page_size = 8, got 9",
           kv_lens=ints(9, 8), schedule=None),
    decode(InvalidInput, "expected page_indices[1, 1] between 0 and 5, got 6", page_indices=ints([0, 1], [2, 6])),
    decode(InvalidInput, "expected schedule.num_splits to ascend from 0 to at most 5, got [0 3 2]",
           **scheduled(num_splits=ints(0, 3, 2))),
    decode(InvalidInput, "expected schedule.num_splits to ascend from 0 to at most 5, got [1 2 3]",
           **scheduled(num_splits=ints(1, 2, 3))),
    decode(InvalidInput, "expected schedule.num_splits to ascend from 0 to at most 5, got [0 1 6]",
           **scheduled(num_splits=ints(0, 1, 6))),
    decode(InvalidInput, "expected a schedule made for these kv_lens, got one made for 4 where kv_lens[1] = 8",
           **scheduled(lens=ints(3, 4))),
    decode(InvalidInput, "expected a schedule made for these topk_lens, got one made for 2 where topk_lens[0] = 3",
           **LISTS | scheduled(lens=ints(2, 1), made_for=(2, 1, 4, 1, 3, 0)), topk_lens=ints([9], [1])),
    decode(InvalidInput, "expected a schedule made for these extra_topk_lens, got one made for 1 where "
           "extra_topk_lens[1] = 2",
           **TWO | scheduled(lens=ints(3, 3), extra_lens=ints(2, 1), made_for=(2, 1, 4, 1, 3, 2))),
    ragged_latents(InvalidInput, "expected page_indices[1, 1] between 0 and 5, got 6",
                   page_indices=ints([0, 1], [2, 6])),
    ragged_latents(InvalidInput, "expected q_len <= kv_lens[0] = 1, got q_len 2 of sequence 0", kv_lens=ints(1, 8)),
    ragged_latents(InvalidInput, "expected no sequence of more than max_q_len=1 queries, got 2 at 0", max_q_len=1),
    ragged_latents(InvalidInput, "expected page_indices[1, 1] between 0 and 5, got 6",
                   page_indices=ints([0, 1], [2, 6]), new_kv=ones(4, 32)),
    write_latents(InvalidInput, "expected page_indices[0, 0] between 0 and 1, got 2",
                  **TABLES | {"page_indices": ints([2, 1, 1], [0, 1, 1]), "cu_q_lens": ints(0, 2, 3)}),
    write_latents(InvalidInput, "expected slot_mapping[1] to be -1 or between 0 and 5, got 6",
                  slot_mapping=ints(0, 6, -1)),
    logits(InvalidInput, "expected starts[1] between 0 and 6, got -1", starts=ints(0, -1, 2, 3)),
    logits(InvalidInput, "expected stops[3] between 0 and 6, got 7", stops=ints(1, 2, 3, 7)),
    topk(InvalidInput, "expected kv_lens[0] between 0 and pages_per_seq * page_size = 8, got 9", kv_lens=ints(9, 8)),
    topk(InvalidInput, "expected kv_lens[0] between 0 and (pages_per_seq * page_size + 1) * ratio - 1 = 17, got 18",
         ratio=2, kv_lens=ints(18, 8)),
    topk(InvalidInput, "expected page_indices[1, 1] between 0 and 5, got 6", page_indices=ints([0, 1], [2, 6])),
    select(InvalidInput, "expected stops[2] between 0 and 9, got 10", stops=ints(1, 2, 10)),
    block_scores(InvalidInput, "expected stops[3] between 0 and 6, got 7", stops=ints(1, 2, 3, 7)),
    blocks(InvalidInput, "expected kv_lens[0] between 0 and pages_per_seq * page_size = 8, got 9", kv_lens=ints(9, 8)),
    write_keys(InvalidInput, "expected slot_mapping[1] to be -1 or between 0 and 5, got 6",
               slot_mapping=ints(0, 6, -1)),
    write_keys(InvalidInput, "expected cu_q_lens[2] <= num_tokens=3, got 4", **TABLES),
]  # fmt: skip


def refusal(case: Case, framework: str, **more: Any) -> Exception:
    """The exception that the front end raises for a case."""
    front = runner_for("auto", framework).front

    def bring(value: Any) -> Any:
        if isinstance(value, tuple) and any(isinstance(item, np.ndarray) for item in value):
            return tuple(map(bring, value))
        if isinstance(value, calls.DecodeSchedule):
            arrays = {name: bring(getattr(value, name)) for name in ("parts", "num_splits", "lens", "extra_lens")}
            return dataclasses.replace(value, **arrays)
        if not isinstance(value, np.ndarray):
            return value
        dtype = "float8_e4m3fn" if isinstance(value, Codes) else str(value.dtype)
        return front.bring(value, dtype, layout="", place=lambda array: array, device=None)

    arguments = {name: bring(value) for name, value in (VALID[case.operation] | case.changes | more).items()}
    try:
        getattr(front.operations, case.operation)(**arguments)
    except Exception as error:
        return error
    pytest.fail(f"{case.operation} took {case.changes} through {framework}")


def name_of(case: Case) -> str:
    return f"{case.operation}: {case.text}"


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    return request.param


@pytest.mark.parametrize("case", STATIC, ids=name_of)
def test_an_invalid_call_is_refused(case: Case, framework: str) -> None:
    error = refusal(case, framework)
    assert (type(error), str(error)) == (case.error, case.text)


@pytest.mark.parametrize("case", VALUES, ids=name_of)
def test_invalid_values_are_refused_on_request(case: Case, framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ra.use_backend(validate="full"):
        error = refusal(case, framework)
    assert (type(error), str(error)) == (case.error, case.text)
    monkeypatch.setenv("RAGGED_ATTENTION_VALIDATE", "full")
    ra.reload_config()
    error = refusal(case, framework)
    assert (type(error), str(error)) == (case.error, case.text)


@pytest.mark.parametrize("case", VALUES, ids=name_of)
def test_invalid_values_are_else_no_error(case: Case, framework: str) -> None:
    with pytest.raises(pytest.fail.Exception, match="took"):
        refusal(case, framework)


@pytest.mark.parametrize("operation", VALID)
def test_the_valid_calls_are_taken(operation: str, framework: str) -> None:
    with ra.use_backend(validate="full"), pytest.raises(pytest.fail.Exception, match="took"):
        refusal(Case(operation, {}, Exception, ""), framework)


@pytest.mark.parametrize("operation", VALID)
def test_a_named_backend_is_never_replaced(operation: str, framework: str) -> None:
    other = {"torch": "xla", "jax": "eager"}[framework]
    error = refusal(Case(operation, {"backend": other}, Exception, ""), framework)
    assert isinstance(error, Unsupported)
    first, reason, *_ = str(error).splitlines()
    assert first == f"no backend asked for takes this {operation} call from {framework} on cpu:"
    assert reason.startswith(f"  {other}: ")


def test_an_operation_that_a_room_does_not_offer_is_missing(framework: str) -> None:
    error = refusal(attention(BackendMissing, "", backend=["cuda"]), framework)
    assert isinstance(error, BackendMissing)
    assert "cuda: does not offer ragged_paged_attention" in str(error)


@pytest.mark.parametrize("operation", ["mla_decode", "sparse_mla_prefill", "make_decode_schedule"])
def test_hopper_kernels_are_refused_on_a_cpu(operation: str, framework: str) -> None:
    wide = {"q": ones(2, 1, 4, 576), "kv_cache": ones(6, 4, 1, 576), "d_v": 512, "schedule": None}
    if operation == "sparse_mla_prefill":
        wide = {"q": ones(3, 4, 576), "kv": ones(10, 1, 576), "d_v": 512}
    changes = {} if operation == "make_decode_schedule" else wide
    error = refusal(Case(operation, {**changes, "backend": "cuda"}, Unsupported, ""), framework)
    assert isinstance(error, Unsupported)
    reason = "runs on sm_90 GPUs, on a CPU inside ragged_attention.kernels_cuda.emulating() only"
    if changes:
        form = "a dense call" if operation == "mla_decode" else "a sparse call"
        dtypes = "bfloat16 or float16" if operation == "mla_decode" else "bfloat16"
        reason = f"takes q.dtype {dtypes} in {form}, got float32"
    nearest = {"torch": "eager", "jax": "xla"}[framework] if operation == "make_decode_schedule" else "numba"
    assert str(error).splitlines() == [
        f"no backend asked for takes this {operation} call from {framework} on cpu:",
        f"  cuda: {reason}",
        f'nearest that does: backend="{nearest}"',
    ]


def test_every_raise_of_the_records_is_reached(framework: str) -> None:
    """Each `raise` statement in the records' modules is reached by a case in the tables above."""
    paths = Path(calls.__file__).parent.glob("*.py")
    # `sharding` has no record. test_distributed_torch and test_distributed_jax test its errors.
    sources = {path: path.read_text() for path in paths if path.name != "sharding.py"}
    raises = {
        (path, node.lineno, node.end_lineno or node.lineno)
        for path, source in sources.items()
        for function in ast.walk(ast.parse(source))
        # jax arrays have no strides, so test_torch_front_end tests the errors of strides. test_gradients_torch and
        # test_gradients_jax test the errors of gradients.
        if isinstance(function, ast.FunctionDef) and function.name not in ("expect_packed_rows", "expect_gradient")
        for node in ast.walk(function)
        if isinstance(node, ast.Raise)
    }
    met = set()
    with ra.use_backend(validate="full"):
        for case in STATIC + VALUES:
            for frame, line in traceback.walk_tb(refusal(case, framework).__traceback__):
                met.add((Path(frame.f_code.co_filename), line))
    missed = [
        f"{path.name}:{first}: {sources[path].splitlines()[first - 1].strip()}"
        for path, first, last in sorted(raises)
        if not any((path, line) in met for line in range(first, last + 1))
    ]
    assert not missed
