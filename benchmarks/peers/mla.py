"""Other implementations of latent attention. `registry.py` lists all peers and defines what a peer is.

FlashMLA is taken from the package `flash_mla` if that is installed, otherwise from `_flashmla_C.abi3.so` in `peers/`. A
peer that cannot read a quantised cache gets a bfloat16 copy of it. If a peer has no kernel for the number of heads, the
heads are padded. The copy and the padding are made in advance, so they are not timed.
"""

import importlib
import importlib.util
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cases.mla import LatentCase

Run = Callable[[], Any]
AT_ONCE = 64  # the number of queries whose rows are gathered at once


def _plain(case: LatentCase, cache: Any) -> Any:
    """The cache [P, G, K, d_qk] in the queries' dtype. Packed rows become pages of one row."""
    if case.cache_format == "plain":
        return cache if cache.dim() == 4 else cache[:, None]
    from ragged_attention.torch import dequantize_mla_cache

    return dequantize_mla_cache(cache, case.cache_format, case.dtype, backend="eager")


def _caches(case: LatentCase, inputs: dict[str, Any]) -> list[Any]:
    names = ("kv",) if case.prefill else ("kv_cache", "extra_kv_cache")
    return [_plain(case, inputs[name]) for name in names if name in inputs]


# ---- torch itself


def sdpa(case: LatentCase, inputs: dict[str, Any]) -> Run:
    """Gather rows, then call `scaled_dot_product_attention` with the heads as rows.

    Each call takes one sequence, or 64 queries with lists.
    """
    return _sdpa_of_lists(case, inputs) if case.topk else _sdpa_of_tables(case, inputs)


def sdpa_declines(case: LatentCase) -> str | None:
    if case.topk and case.num_kv_heads > 1:
        return "takes lists of one KV head here"
    return "does not take sinks" if case.sinks else None


def _sdpa_of_lists(case: LatentCase, inputs: dict[str, Any]) -> Run:
    import torch

    rows = [cache.flatten(0, 2) for cache in _caches(case, inputs)]
    lists = [inputs[name].view(case.num_tokens, -1) for name in ("indices", "extra_indices") if name in inputs]
    q = inputs["q"].view(case.num_tokens, case.num_q_heads, case.d_qk)

    def run() -> Any:
        parts = []
        for start in range(0, case.num_tokens, AT_ONCE):
            pieces = [slots[start : start + AT_ONCE] for slots in lists]
            keys = torch.cat([row[slots.clamp(min=0)] for row, slots in zip(rows, pieces, strict=True)], 1)[:, None]
            seen = torch.cat(pieces, 1)[:, None, None] >= 0
            part = torch.nn.functional.scaled_dot_product_attention(
                q[start : start + AT_ONCE, None], keys, keys[..., : case.d_v], attn_mask=seen
            )
            parts.append(part[:, 0])
        return torch.cat(parts).view(*case.q_shape[:-1], case.d_v)

    return run


def _sdpa_of_tables(case: LatentCase, inputs: dict[str, Any]) -> Run:
    import torch

    (cache,) = _caches(case, inputs)
    group = case.num_q_heads // case.num_kv_heads
    q = inputs["q"].view(case.max_num_seqs, case.num_q_tokens, case.num_kv_heads, group, case.d_qk)
    q = q.permute(0, 2, 1, 3, 4).flatten(2, 3)
    seen = None
    if case.causal and case.num_q_tokens > 1:
        last = torch.arange(case.max_len - case.num_q_tokens, case.max_len, device=q.device).repeat_interleave(group)
        seen = torch.arange(case.max_len, device=q.device) <= last[:, None]

    def run() -> Any:
        parts = []
        for seq in range(case.max_num_seqs):
            keys = cache[inputs["page_indices"][seq]].flatten(0, 1)[: case.max_len].transpose(0, 1)
            part = torch.nn.functional.scaled_dot_product_attention(
                q[seq][None], keys[None], keys[None, ..., : case.d_v], attn_mask=seen
            )
            parts.append(part.view(case.num_kv_heads, case.num_q_tokens, group, case.d_v).transpose(0, 1))
        return torch.stack(parts).view(*case.q_shape[:-1], case.d_v)

    return run


# ---- FlashMLA


def flash_mla_absent(folder: Path) -> str | None:
    import torch

    if not torch.cuda.is_available():
        return "needs a CUDA device"
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        return "is for sm_90 and sm_100"
    if importlib.util.find_spec("flash_mla") or flash_mla_files(folder):
        return None
    return f"flash_mla is not installed, and there is no _flashmla_C.abi3.so in {folder.name}/"


def flash_mla_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("**/_flashmla_C.abi3.so"))


def _flash_mla_functions(folder: Path) -> Any:
    """An object with FlashMLA's functions `dense_decode_fwd`, `sparse_decode_fwd` and `sparse_prefill_fwd`."""
    if importlib.util.find_spec("flash_mla"):
        return importlib.import_module("flash_mla.cuda")
    import torch

    if not hasattr(torch.ops._flashmla_C, "sparse_decode_fwd"):
        torch.ops.load_library(str(flash_mla_files(folder)[0]))
    names = ("dense_decode_fwd", "sparse_decode_fwd", "sparse_prefill_fwd")
    return types.SimpleNamespace(**{name: allocating(getattr(torch.ops._flashmla_C, name).default) for name in names})


def allocating(function: Any) -> Callable[..., Any]:
    """An operator of torch that passes None for omitted last arguments without a default, such as `out_`."""
    return lambda *arguments: function(*arguments, *[None] * (len(function._schema.arguments) - len(arguments)))


def flash_mla_declines(case: LatentCase) -> str | None:
    """The reason why FlashMLA has no kernel for the case on sm_90, or None."""
    if case.d_v != 512 or (case.dtype != "bfloat16" and case.topk):
        return "takes bfloat16 and values of 512"
    if not case.topk:
        if case.cache_format != "plain" or case.d_qk != 576 or case.page_size != 64:
            return "takes dense calls over a plain cache of 576 columns in pages of 64 only"
        return None
    if case.num_q_heads > 128 or case.num_kv_heads > 1:
        return "takes at most 128 heads over one KV head"
    if case.prefill and (case.cache_format != "plain" or case.topk % 128):
        return "takes prefills over a plain cache and lists of a multiple of 128 only"
    if not case.prefill and (case.cache_format == "plain" or case.topk % 64 or case.extra_topk % 64):
        return "takes sparse decodes over a quantised cache and lists of a multiple of 64 only"
    return None


def flash_mla(case: LatentCase, inputs: dict[str, Any], folder: Path) -> Run:
    """A call of FlashMLA's functions. As in its interface, the first call makes a schedule for later calls."""
    import torch

    functions, scale = _flash_mla_functions(folder), case.d_qk**-0.5
    heads, q, sinks = case.num_q_heads, inputs["q"], inputs.get("sinks")
    if case.topk and (more := (64 if heads <= 64 else 128) - heads):
        q = torch.nn.functional.pad(q, (0, 0, 0, more))
        sinks = None if sinks is None else torch.nn.functional.pad(sinks, (0, more))
    if case.prefill:
        return lambda: functions.sparse_prefill_fwd(
            q, inputs["kv"], inputs["indices"], scale, case.d_v, sinks, None
        )[0][..., :heads, :]  # fmt: skip
    schedule: list[Any] = [None, None]

    def run() -> Any:
        if case.topk:
            out, _, *schedule[:] = functions.sparse_decode_fwd(
                q, inputs["kv_cache"], inputs["indices"], None, sinks, *schedule, inputs.get("extra_kv_cache"),
                inputs.get("extra_indices"), None, case.d_v, scale,
            )  # fmt: skip
        else:
            out, _, *schedule[:] = functions.dense_decode_fwd(
                q, inputs["kv_cache"], case.d_v, inputs["kv_lens"], inputs["page_indices"], scale, case.causal,
                *schedule,
            )  # fmt: skip
        return out[..., :heads, :]

    return run


# ---- FlashAttention-3


def fa3_declines(case: LatentCase) -> str | None:
    if (case.d_qk, case.d_v) != (576, 512):
        return "takes values of 512 and 64 columns beside them"
    if case.extra_topk or (case.topk and case.num_kv_heads > 1):
        return "takes one cache and one KV head"
    return "has no float32" if case.dtype == "float32" else None


def fa3(case: LatentCase, inputs: dict[str, Any], forward: Any) -> Run:
    """FA3's forward operator. K is the rotary columns, and V is the other columns.

    `q_v` makes FA3 add the product of these other columns to the logits. With lists, every query is a sequence, and its
    list is a page table with pages of one row.
    """
    import torch

    (cache,) = _caches(case, inputs)
    q = inputs["q"].view(case.num_tokens, case.num_q_heads, case.d_qk)
    q_lens, kv_len, table = case.num_q_tokens, case.max_len, inputs.get("page_indices")
    if case.topk:
        q_lens, kv_len, cache = 1, case.topk, cache.flatten(0, 1)[:, None]
        table = inputs["indices"].view(case.num_tokens, -1).clamp(min=0)
    seqs = case.num_tokens // q_lens
    starts = torch.arange(seqs + 1, device=q.device, dtype=torch.int32) * q_lens
    lens = torch.full((seqs,), kv_len, device=q.device, dtype=torch.int32)
    rotary, values = cache[..., case.d_v :], cache[..., : case.d_v]
    arguments = [
        q[..., case.d_v :], rotary, values, None, None, q[..., : case.d_v], None,  # new k and v, q_v, out
        starts, None, None, None, lens, q_lens, kv_len, table, None, None,  # batch index, left padding
        None, None, None, None, None, None,  # rotary, scales
        case.d_qk**-0.5, case.causal, -1, -1, 0.0, True, None, 0, None, 0,
        inputs["sinks"].to(q.dtype) if case.sinks else None, 1, 0, None,
    ]  # fmt: skip
    arguments = arguments[: len(forward.default._schema.arguments)]
    return lambda: forward(*arguments)[0].view(*case.q_shape[:-1], case.d_v)
