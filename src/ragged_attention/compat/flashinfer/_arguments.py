"""The arguments that FlashInfer's functions share: layouts, dtypes, scales, log-sum-exps, and refusals by name."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from ragged_attention.calls import is_array, is_number
from ragged_attention.errors import InvalidInput, Unsupported

LN2 = math.log(2)
Scales = tuple[Any, ...]  # factors: numbers, tensors, or None
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LAYOUTS = ("NHD", "HND")
# Our arguments' names and FlashInfer's, for error messages.
PAGED_NAMES = {
    "kv_pages": "paged_kv_cache", "k_pages": "paged_kv_cache[0]", "v_pages": "paged_kv_cache[1]",
    "soft_cap": "logits_soft_cap", "sliding_window": "window_left", "cu_q_lens": "qo_indptr", "kv_lens": "seq_lens",
    "page_indices": "block_tables", "k_scale_pages": "kv_cache_sf[0]", "v_scale_pages": "kv_cache_sf[1]",
}  # fmt: skip
PACKED_NAMES = {
    "cu_q_lens": "qo_indptr", "cu_kv_lens": "kv_indptr", "soft_cap": "logits_soft_cap", "sliding_window": "window_left",
}  # fmt: skip
SLOT_NAMES = PACKED_NAMES | {
    "kv_pages": "k, v", "k_pages": "k", "v_pages": "v", "page_indices": "kv_indptr",
    "k_scale_pages": "kv_cache_sf[0]", "v_scale_pages": "kv_cache_sf[1]",
}  # fmt: skip
NVFP4 = torch.uint8  # the dtype of pages whose elements are two 4-bit codes
NOT_APPROXIMATE = "no kernel leaves out keys of small weight"
NOT_JIT = "kernels with the caller's own code are not supported"
NOT_ITEMS = "masks of several items per prompt are not supported"


def expect_default(reason: str, default: Any = None, **given: Any) -> None:
    """Raise `Unsupported` for an argument that is not at its default."""
    for name, value in given.items():
        if is_array(value) or value != default:
            got = f"a tensor of shape {list(value.shape)}" if is_array(value) else repr(value)
            raise Unsupported(f"expected {name}={default!r}, got {got}: {reason}")


def columns(pages: torch.Tensor) -> int:
    """The head size of keys or values; an element of nvfp4 pages holds two columns."""
    return pages.shape[-1] * (2 if pages.dtype == NVFP4 else 1)


def expect_linear_scales(backend: str, kv_cache_sf: Any) -> None:
    """Refuse the scales of FlashInfer's TensorRT-LLM kernels, which are stored in another order."""
    if kv_cache_sf is not None and backend == "trtllm-gen":
        raise Unsupported(
            "expected another backend with kv_cache_sf, got 'trtllm-gen', for which the scales of values of four "
            "positions are interleaved"
        )


def alibi_slopes(pos_encoding_mode: str, num_heads: int, device: torch.device) -> torch.Tensor | None:
    """The slopes [H] of a position encoding, None without ALiBi.

    They are those of Press et al., "Train Short, Test Long". With n as the largest power of two up to `num_heads`, the
    first n heads have the powers of 2 ** (-8 / n), and the other heads have the odd powers of 2 ** (-4 / n).
    """
    if pos_encoding_mode not in ("NONE", "ROPE_LLAMA", "ALIBI"):
        raise InvalidInput(f"expected pos_encoding_mode to be NONE, ROPE_LLAMA or ALIBI, got {pos_encoding_mode!r}")
    if pos_encoding_mode == "ROPE_LLAMA":
        raise Unsupported(
            "expected pos_encoding_mode='NONE' or 'ALIBI', got 'ROPE_LLAMA': keys have to be rotated before they are "
            "cached"
        )
    if pos_encoding_mode == "NONE":
        return None
    whole = 1 << (num_heads.bit_length() - 1) if num_heads else 1
    head = torch.arange(num_heads, dtype=torch.float32, device=device)
    exponent = torch.where(head < whole, 2 * (head + 1), 2 * (head - whole) + 1)
    return torch.exp2(-4 / whole * exponent)


def expect_layout(kv_layout: str) -> None:
    if kv_layout not in LAYOUTS:
        raise InvalidInput(f"expected kv_layout to be NHD or HND, got {kv_layout!r}")


def torch_dtype(name: str, dtype: Any) -> torch.dtype:
    """The dtype of an argument, which may also be the dtype's name."""
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype):
        raise TypeError(f"expected {name} to be a torch.dtype or its name, got {dtype!r}")
    return resolved


def result_dtype(o_data_type: Any, q_data_type: torch.dtype) -> torch.dtype:
    """The dtype of results: the given one, or that of the queries, or bfloat16 for 8-bit queries."""
    if o_data_type is None:
        return torch.bfloat16 if q_data_type in FP8 else q_data_type
    dtype = torch_dtype("o_data_type", o_data_type)
    if dtype in FP8:
        raise Unsupported(
            f"expected o_data_type to be float32, float16 or bfloat16, got {dtype}: results are not 8-bit"
        )
    return dtype


def expect_planned(**facts: tuple[Any, Any]) -> None:
    """Raise `InvalidInput` for a fact of a call that is not as planned; facts are pairs (given, planned)."""
    for name, (given, planned) in facts.items():
        if given != planned:
            raise InvalidInput(f"expected {name} to be {planned} as in plan(), got {given}")


def soft_cap_of(logits_soft_cap: float | None) -> float | None:
    """`soft_cap` of our operations; FlashInfer also uses 0 for no cap."""
    return logits_soft_cap if logits_soft_cap is not None and logits_soft_cap > 0 else None


def window_of(window_left: int) -> int | None:
    """`sliding_window` of our operations, which counts a query's own position; FlashInfer uses -1 for no window."""
    return window_left + 1 if window_left >= 0 else None


def product(name: str, *scales: Any) -> Any:
    """The product of scales: a number, an array of one element or one per head, or None if all scales are None."""
    number, array = 1.0, None
    for scale in scales:
        if scale is None:
            continue
        if is_number(scale):
            number *= float(scale)
        elif isinstance(scale, torch.Tensor):
            factor = scale.float().reshape(()) if scale.numel() == 1 else scale.float()
            array = factor if array is None else array * factor
        else:
            raise TypeError(f"expected {name} to be a number or a tensor, got {type(scale).__name__}")
    if array is not None:
        return array * number
    return None if all(scale is None for scale in scales) else number


def scaled(q: torch.Tensor, sm_scale: float | None, q_scales: Scales, k_scales: Scales) -> dict[str, Any]:
    """The arguments `q`, `sm_scale`, `q_scale` and `k_scale` of our operations.

    Numbers are multiplied into `sm_scale`, as FlashInfer does. A query scale per head needs 8-bit queries.
    """
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    of_queries: Any = product("q_scale", *q_scales)
    is_per_head = is_array(of_queries) and of_queries.dim() > 0
    factor = product("k_scale", *k_scales) if is_per_head else product("k_scale", of_queries, *k_scales)
    if not is_per_head:
        of_queries = 1.0 if q.dtype == torch.float8_e4m3fn else None
    if q.dtype == torch.float8_e5m2:  # our operations take no e5m2 queries; they widen e4m3 queries like this
        q = (q.float() * of_queries[:, None]).bfloat16() if is_per_head else q.bfloat16()
        of_queries = None
    if is_number(factor):
        scale, factor = scale * factor, None
    return {"q": q, "sm_scale": scale, "q_scale": of_queries, "k_scale": factor}


def scales_from(args: Sequence[Any], q: torch.Tensor) -> tuple[Any, Any, Any]:
    """The scales of queries, keys and values that `run` takes as positional arguments with 8-bit queries."""
    if not args:
        return None, None, None
    if q.dtype not in FP8 or len(args) != 3:
        raise Unsupported(
            "expected no positional arguments after the cache, except scale_q, scale_k and scale_v with 8-bit queries, "
            f"got {len(args)} and q.dtype={q.dtype}: {NOT_JIT}"
        )
    return args[0], args[1], args[2]


def with_lse(
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None = None,
    buffer: torch.Tensor | None = None,
    return_lse: bool = True,
    lse_base: str = "log2",
    lse_layout: str = "NH",
) -> Any:
    """The results of an attention call: out, and with `return_lse` also FlashInfer's log-sum-exp, computed from ours.

    FlashInfer's log-sum-exp includes sinks, and has base 2 unless `lse_base` is "ln". If the caller gave a `buffer`, it
    is written even without `return_lse`.
    """
    if lse_base not in ("log2", "ln"):
        raise InvalidInput(f"expected lse_base to be log2 or ln, got {lse_base!r}")
    if lse_layout not in ("NH", "HN"):
        raise InvalidInput(f"expected lse_layout to be NH or HN, got {lse_layout!r}")
    if not return_lse and buffer is None:
        return out
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks)
    if lse_base == "log2":
        lse = lse / LN2
    if lse_layout == "HN":
        lse = lse.t().contiguous()
    lse = stored("lse", buffer, lse)
    return (out, lse) if return_lse else out


def stored(name: str, buffer: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    """The values, in the caller's buffer if there is one."""
    if buffer is None:
        return values
    if buffer.shape != values.shape or buffer.dtype != values.dtype:
        got = f"{buffer.dtype} {list(buffer.shape)}"
        raise InvalidInput(f"expected {name} to be {values.dtype} {list(values.shape)}, got {got}")
    return buffer.copy_(values)
