"""FlashMLA's six functions, with its argument names, order and conventions, on every device.

`import ragged_attention.compat.flash_mla as flash_mla` runs code written for the `flash_mla` package. The call forms of
these releases are supported, and may be mixed:

- September 2025: `get_mla_metadata` takes six arguments and returns two int32 tensors for `flash_mla_with_kvcache`.
- 2026: `get_mla_metadata` takes no arguments and returns an empty `FlashMLASchedMeta`, which the first call fills, and
  None.
- September 2026: there are also `enable_batch_invariant` and caches of 528 and 288 bytes per token, and
  `is_fp8_kvcache` is optional. That release dropped the older formats and dense decode; here they remain.

The differences from `ragged_attention.torch` are the names, the `lse` of a query that sees no key (+inf in decode), the
base of prefill's logarithms, and packed tensors. FlashMLA's limits on devices, head counts, head sizes, page sizes,
top-k, dtypes and gradients do not hold here.
"""

import contextlib
import math
from typing import Any

import torch

from ragged_attention.calls import DecodeSchedule, MlaDecode, dtype_name, expect_bool, is_array
from ragged_attention.compat.names import named_as
from ragged_attention.config import Scope, use_backend
from ragged_attention.errors import InvalidInput
from ragged_attention.torch import make_decode_schedule, mla_decode, sparse_mla_prefill, varlen_attention
from ragged_attention.torch._launcher import device_facts

__all__ = [
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
    "set_convention",
    "use_convention",
]

CONVENTIONS = ("base2", "natural")  # the first is the default
LOG2_E = math.log2(math.e)
BYTES = ("float8_e4m3fn", "int8", "uint8")

# Our arguments' names and FlashMLA's, for error messages.
PREFILL_NAMES = {"sinks": "attn_sink", "topk_lens": "topk_length"}
DECODE_NAMES = PREFILL_NAMES | {
    "kv_cache": "k_cache", "page_indices": "block_table", "kv_lens": "cache_seqlens", "d_v": "head_dim_v",
    "sm_scale": "softmax_scale", "extra_kv_cache": "extra_k_cache", "extra_indices": "extra_indices_in_kvcache",
    "extra_topk_lens": "extra_topk_length",
}  # fmt: skip
VARLEN_NAMES = {
    "cu_q_lens": "cu_seqlens_qo", "cu_kv_lens": "cu_seqlens_kv", "max_q_len": "max_seqlen_qo",
    "max_kv_len": "max_seqlen_kv", "sm_scale": "softmax_scale",
}  # fmt: skip
# The arguments of `flash_attn_varlen_func`, and their names in the functions that take packed tensors.
KV_PACKED_NAMES = {"k": "kv[..., :head_dim_qk]", "v": "kv[..., head_dim_qk:]"}
QKV_PACKED_NAMES = {
    "q": "qkv[..., :head_dim_qk]", "k": "qkv[..., head_dim_qk:2 * head_dim_qk]", "v": "qkv[..., 2 * head_dim_qk:]",
    "cu_seqlens_qo": "cu_seqlens", "cu_seqlens_kv": "cu_seqlens", "max_seqlen_qo": "max_seqlen",
    "max_seqlen_kv": "max_seqlen",
}  # fmt: skip

_conventions: Scope[str] = Scope("ragged_attention_flash_mla_convention")


def set_convention(convention: str) -> None:
    """Set the default `convention` of `flash_mla_sparse_fwd` for the whole process.

    Args:
        convention: "base2" or "natural", see `flash_mla_sparse_fwd`; others raise `InvalidInput`.
    """
    _expect_convention(convention)
    _conventions.set(convention)


class use_convention:  # reads as a verb, like `ragged_attention.use_backend`
    """A context manager that sets the default `convention` of `flash_mla_sparse_fwd` inside its `with` block.

    Constructing it changes nothing. Until the next version, `use_convention(...)` as a statement of its own still acts
    like `set_convention(...)`, with a DeprecationWarning.

    Args:
        convention: as for `set_convention`.
    """

    def __init__(self, convention: str) -> None:
        _expect_convention(convention)
        self.convention = convention
        _conventions.set_by_statement(convention, "use_convention", "set_convention")

    def __enter__(self) -> None:
        _conventions.enter(self.convention)

    def __exit__(self, *error: object) -> None:
        _conventions.exit(self.convention)


def _expect_convention(convention: Any) -> None:
    if convention not in CONVENTIONS:
        raise InvalidInput(f"expected convention to be one of {', '.join(CONVENTIONS)}, got {convention!r}")


class FlashMLASchedMeta:
    """The schedule of a decode step. It is empty until it is first passed to `flash_mla_with_kvcache`, which fills it.

    Then it serves every later call on the same device with the same shapes and lengths, such as the calls of the other
    layers. A call with other shapes is refused. A call with other lengths is only slower, so it is refused only under
    `validate="full"`.
    """

    def __init__(self) -> None:
        self.have_initialized = False
        self.config: dict[str, Any] = {}
        self.schedule: DecodeSchedule | None = None


def get_mla_metadata(
    cache_seqlens: torch.Tensor | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[Any, Any]:
    """The schedule of a decode step, for all layers of a model.

    Without arguments, returns a `FlashMLASchedMeta` and None. With them, as in September 2025:

    Args:
        cache_seqlens: i32 [b].
        num_q_tokens_per_head_k: query rows of one KV head, `s_q * h_q // h_kv`.
        num_heads_k: h_kv.
        num_heads_q: h_q; needed with `topk`.
        is_fp8_kvcache: without effect, because the schedule does not depend on the format.
        topk: number of keys that each query of a sparse call lists.

    Returns:
        tile_scheduler_metadata i32 [num_sm_parts, 8] and num_splits i32 [b + 1], bit for bit the tables that FlashMLA
        makes on a Hopper GPU with this device's number of multiprocessors.
    """
    del is_fp8_kvcache
    if cache_seqlens is None:
        return FlashMLASchedMeta(), None
    if num_q_tokens_per_head_k is None or num_heads_k is None:
        raise TypeError("expected num_q_tokens_per_head_k and num_heads_k with cache_seqlens, got None")
    if topk is not None and num_heads_q is None:
        raise InvalidInput("expected num_heads_q with topk, got None")
    _expect_tensor("cache_seqlens", cache_seqlens, 1)
    for name, value in (
        ("num_q_tokens_per_head_k", num_q_tokens_per_head_k), ("num_heads_k", num_heads_k),
        ("num_heads_q", 1 if num_heads_q is None else num_heads_q),
    ):  # fmt: skip
        if value < 1:
            raise InvalidInput(f"expected {name} >= 1, got {value}")
    multiprocessors = _multiprocessors(cache_seqlens.device)
    if topk is None or num_heads_q is None:
        num_parts = multiprocessors // num_heads_k // -(-num_q_tokens_per_head_k // 64)
    else:
        s_q = max(num_q_tokens_per_head_k * num_heads_k // num_heads_q, 1)
        num_parts = multiprocessors // 2 // num_heads_k // (-(-num_heads_q // num_heads_k // 128) * s_q)
    with named_as(DECODE_NAMES):
        schedule = make_decode_schedule(
            cache_seqlens if topk is None else None, cache_seqlens.shape[0], num_q_tokens_per_head_k, num_heads_k,
            num_heads_k, topk=topk, num_parts=max(num_parts, 1), device=cache_seqlens.device,
        )  # fmt: skip
    return schedule.parts, schedule.num_splits


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | torch.Tensor,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
    *,
    cache_layout: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a few query tokens per sequence over a paged latent cache, or over a top-k list of its slots.

    Args:
        q: [b, s_q, h_q, d_qk] bfloat16, float16 or float32.
        k_cache: [num_blocks, page_block_size, h_kv, d_qk] of q's dtype; or, with `is_fp8_kvcache`, bytes
            [num_blocks, page_block_size, 1, 656, 584, 528 or 288] of dtype float8_e4m3fn, int8 or uint8. Each format
            serves dense and sparse calls, even that of 288 bytes, which FlashMLA takes only as `extra_k_cache`.
        block_table, cache_seqlens: i32 [b, max_blocks], [b]; a sparse call ignores them.
        head_dim_v: number of a row's columns that are its value.
        tile_scheduler_metadata, num_splits: the results of `get_mla_metadata`.
        softmax_scale: default `d_qk ** -0.5`.
        causal: dense calls only; queries see keys up to their own position, and are aligned at the end of the keys.
        is_fp8_kvcache: whether `k_cache` holds bytes. By default its dtype decides, so callers may rely on the default
            of any release (False until September 2026, True since).
        indices: i32 [b, s_q, topk], `block * page_block_size + offset`; makes the call sparse. An index that is not a
            slot of the cache, such as -1, is masked.
        attn_sink: f32 [h_q].
        extra_k_cache, extra_indices_in_kvcache: a second cache and the lists into it. Both caches have one format, or
            one has 528 and the other 288 bytes.
        topk_length, extra_topk_length: i32 [b], or [b, s_q].
        enable_batch_invariant: the bits of a sequence's result depend only on that sequence, as under
            `ragged_attention.use_backend(batch_invariant=True)`.
        cache_layout: not in FlashMLA; "page" for caches of 528 and 288 bytes that store the scales of a page after all
            its values, as in the release of early September 2026. The default is the layout of the newest release.

    Returns:
        out [b, s_q, h_q, head_dim_v], and lse f32 [b, h_q, s_q], natural, +inf for a query that sees no key.
    """
    _expect_tensor("q", q, 4)
    _expect_tensor("k_cache", k_cache, 4)
    if is_fp8_kvcache is None:
        is_fp8_kvcache = dtype_name(k_cache) in BYTES
    if (dtype_name(k_cache) in BYTES) != is_fp8_kvcache:
        wanted = " or ".join(BYTES) if is_fp8_kvcache else "that of q"
        raise InvalidInput(f"expected k_cache.dtype to be {wanted} with {is_fp8_kvcache=}, got {dtype_name(k_cache)}")
    call: dict[str, Any] = dict(
        q=q, kv_cache=k_cache, page_indices=block_table if indices is None else None,
        kv_lens=cache_seqlens if indices is None else None, indices=indices, d_v=head_dim_v, sm_scale=softmax_scale,
        causal=causal, sinks=attn_sink, topk_lens=topk_length, extra_kv_cache=extra_k_cache,
        extra_indices=extra_indices_in_kvcache, extra_topk_lens=extra_topk_length, cache_layout=cache_layout,
    )  # fmt: skip
    expect_bool("enable_batch_invariant", enable_batch_invariant)
    made_for = _shapes(call, is_fp8_kvcache) | {"enable_batch_invariant": enable_batch_invariant}
    with named_as(DECODE_NAMES):
        schedule = _schedule_of(tile_scheduler_metadata, num_splits, call, made_for)
        with use_backend(batch_invariant=True) if enable_batch_invariant else contextlib.nullcontext():
            out, lse = mla_decode(**call, schedule=schedule)
    if isinstance(metadata := tile_scheduler_metadata, FlashMLASchedMeta):
        metadata.schedule, metadata.config, metadata.have_initialized = schedule, made_for, True
    return out, _fully_masked_at_infinity(lse)


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    *,
    convention: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of each query token over its own list of latent rows.

    Args:
        q: [s_q, h_q, d_qk] bfloat16, float16 or float32.
        kv: [s_kv, h_kv, d_qk] of q's dtype; or a paged cache, plain or quantised, whose slots `indices` name.
        indices: i32 [s_q, h_kv, topk]; an index outside [0, s_kv) is masked.
        sm_scale: factor on q . k.
        d_v: number of a row's columns that are its value.
        attn_sink: f32 [h_q].
        topk_length: i32 [s_q], the number of valid entries in each list of `indices`.
        convention: the convention of max_logits and lse. "base2" is that of FlashMLA in September 2025: base-2
            logarithms, and an lse of -inf for a query that selects no key. "natural" is that of 2026: natural
            logarithms, and an lse of +inf. `use_convention` or `set_convention` sets the default, which otherwise is
            "base2".

    Returns:
        out [s_q, h_q, d_v], max_logits f32 [s_q, h_q], lse f32 [s_q, h_q].
    """
    if convention is None:
        convention = _default_convention()
    _expect_convention(convention)
    with named_as(PREFILL_NAMES):
        out, max_logits, lse = sparse_mla_prefill(
            q, kv, indices, sm_scale=sm_scale, d_v=d_v, sinks=attn_sink, topk_lens=topk_length
        )
    if convention == "natural":
        return out, max_logits, _fully_masked_at_infinity(lse)
    return out, max_logits * LOG2_E, lse * LOG2_E


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_qo: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense multi-head attention over packed sequences, differentiable.

    Args:
        q: [total_q, h, d] bfloat16, float16 or float32, the queries of all sequences, one after another.
        k, v: [total_kv, h_k, d] and [total_kv, h_k, d_v] of q's dtype; h a multiple of h_k, also for gradients; d and
            d_v up to 512.
        cu_seqlens_qo, cu_seqlens_kv: i32 [b + 1], the edges of the sequences.
        max_seqlen_qo, max_seqlen_kv: lengths that no sequence exceeds.
        dropout_p: must be 0.
        softmax_scale: default `d ** -0.5`.
        causal: queries see keys up to their own position, and are aligned at the end of the keys.
        deterministic: whether gradients have equal bits in every run.
        is_varlen: with False all sequences have equal lengths, and the values of `cu_seqlens_*` are not read.

    Returns:
        out [total_q, h, d_v], and lse f32 [total_q, h], natural, -inf for a query that sees no key. Gradients flow
        through both; FlashMLA drops the gradient of lse.
    """
    if dropout_p != 0:
        raise InvalidInput(f"expected dropout_p=0, got {dropout_p}")
    if not is_varlen:
        cu_seqlens_qo, max_seqlen_qo = _equal_lengths("cu_seqlens_qo", cu_seqlens_qo, "q", q)
        cu_seqlens_kv, max_seqlen_kv = _equal_lengths("cu_seqlens_kv", cu_seqlens_kv, "k", k)
    with named_as(VARLEN_NAMES):
        return varlen_attention(
            q, k, v, cu_seqlens_qo, cu_seqlens_kv, max_q_len=max_seqlen_qo, max_kv_len=max_seqlen_kv,
            sm_scale=softmax_scale, causal=causal, return_lse=True, deterministic=deterministic,
        )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flash_attn_varlen_func` of q, k and v packed in one tensor [total, h, 2 * head_dim_qk + d_v], in this order."""
    q, k, v = _unpacked("qkv", qkv, head_dim_qk, 2)
    with named_as(QKV_PACKED_NAMES):
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, deterministic,
            is_varlen,
        )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_qo: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flash_attn_varlen_func` of k and v packed in one tensor [total_kv, h_k, head_dim_qk + d_v], in this order."""
    k, v = _unpacked("kv", kv, head_dim_qk, 1)
    with named_as(KV_PACKED_NAMES):
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv, dropout_p, softmax_scale, causal,
            deterministic, is_varlen,
        )  # fmt: skip


def _unpacked(name: str, packed: Any, head_dim_qk: Any, count: int) -> tuple[torch.Tensor, ...]:
    """Views of `count` tensors of head_dim_qk columns each, and of the remaining columns, which are v."""
    _expect_tensor(name, packed, 3)
    if not isinstance(head_dim_qk, int) or isinstance(head_dim_qk, bool):
        raise TypeError(f"expected head_dim_qk to be an int, got {type(head_dim_qk).__name__}")
    width = packed.shape[2]
    if not 1 <= head_dim_qk < -(-width // count):
        raise InvalidInput(f"expected {name}.shape[2] > {count} * head_dim_qk >= {count}, got {width=}, {head_dim_qk=}")
    return packed.split((*(head_dim_qk,) * count, width - count * head_dim_qk), dim=2)


def _equal_lengths(name: str, cu_lens: Any, rows_name: str, rows: Any) -> tuple[torch.Tensor, int]:
    """The edges of the sequences if all have equal lengths, and that length."""
    _expect_tensor(name, cu_lens, 1)
    _expect_tensor(rows_name, rows, 3)
    b, total = cu_lens.shape[0] - 1, rows.shape[0]
    if b < 1 or total % b:
        raise InvalidInput(f"expected {rows_name}.shape[0] to be a multiple of {b=} with is_varlen=False, got {total}")
    return torch.arange(b + 1, dtype=torch.int32, device=rows.device) * (total // b), total // b


@torch.compiler.assume_constant_result
def _multiprocessors(device: torch.device) -> int:
    return device_facts(device).num_multiprocessors


@torch.compiler.assume_constant_result
def _default_convention() -> str:
    """The convention in force, which tracing reads once and makes part of the compiled function."""
    return next(iter((*_conventions.blocks.get(), *_conventions.process_wide)), CONVENTIONS[0])


def _fully_masked_at_infinity(lse: torch.Tensor) -> torch.Tensor:
    return torch.where(lse == -torch.inf, torch.inf, lse)


def _expect_tensor(name: str, value: Any, rank: int) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"expected {name} to be a torch.Tensor, got {type(value).__name__}")
    if value.dim() != rank:
        raise InvalidInput(f"expected {name} to have {rank} dimensions, got {value.dim()}")


def _size(name: str, tensor: Any, rank: int, axis: int) -> int | None:
    """The length of an optional tensor's axis."""
    if tensor is None:
        return None
    _expect_tensor(DECODE_NAMES.get(name, name), tensor, rank)
    return tensor.shape[axis]


def _shapes(call: dict[str, Any], is_fp8_kvcache: bool) -> dict[str, Any]:
    """The shapes and settings for which a `FlashMLASchedMeta` is made, under FlashMLA's names."""
    optional = ("indices", 3, 2), ("extra_indices", 3, 2), ("extra_kv_cache", 4, 1)
    topk, extra_topk, extra_page_size = (_size(name, call[name], rank, axis) for name, rank, axis in optional)
    (b, s_q, h_q, _), (_, page_size, h_k, _) = call["q"].shape, call["kv_cache"].shape
    return dict(
        b=b, s_q=s_q, h_q=h_q, h_k=h_k, page_block_size=page_size, causal=call["causal"], is_fp8_kvcache=is_fp8_kvcache,
        topk=topk, extra_page_block_size=extra_page_size, extra_topk=extra_topk,
    )  # fmt: skip


def _schedule_of(metadata: Any, num_splits: Any, call: dict[str, Any], made_for: dict[str, Any]) -> DecodeSchedule:
    """The schedule of a step, from the results of `get_mla_metadata` in any form."""
    if isinstance(metadata, torch.Tensor):
        return _schedule_of_tables(metadata, num_splits, made_for)
    if not isinstance(metadata, FlashMLASchedMeta):
        raise TypeError(
            "expected tile_scheduler_metadata to be what get_mla_metadata returned, a tensor or a FlashMLASchedMeta, "
            f"got {type(metadata).__name__}"
        )
    if num_splits is not None:
        raise InvalidInput("expected num_splits=None with a FlashMLASchedMeta, got a value")
    if metadata.schedule is None:
        return _new_schedule(call, made_for)
    for name, made in metadata.config.items():
        if made_for[name] != made:
            raise InvalidInput(
                f"expected tile_scheduler_metadata made for {name}={made_for[name]}, got one made for {name}={made}"
            )
    return metadata.schedule


def _schedule_of_tables(parts: torch.Tensor, num_splits: Any, made_for: dict[str, Any]) -> DecodeSchedule:
    if not is_array(num_splits):
        raise TypeError(
            "expected num_splits to be the tensor that get_mla_metadata returned with tile_scheduler_metadata, "
            f"got {type(num_splits).__name__}"
        )
    b = made_for["b"]
    for name, table, wanted in (
        ("tile_scheduler_metadata", parts, (parts.shape[0] if parts.dim() else 1, 8)),
        ("num_splits", num_splits, (b + 1,)),
    ):
        if dtype_name(table) != "int32" or tuple(table.shape) != wanted:
            got = f"{dtype_name(table)} {list(table.shape)}"
            raise InvalidInput(f"expected {name} to be int32 {list(wanted)} with {b=}, got {got}")
    shapes = tuple(made_for[name] or 0 for name in ("b", "s_q", "h_q", "h_k", "topk", "extra_topk"))
    return DecodeSchedule(parts=parts, num_splits=num_splits, made_for=shapes)


def _new_schedule(call: dict[str, Any], made_for: dict[str, Any]) -> DecodeSchedule:
    topk, sizes = made_for["topk"], (made_for[name] for name in ("b", "s_q", "h_q", "h_k"))
    try:
        return make_decode_schedule(
            call["kv_lens"] if topk is None else None, *sizes, topk=topk, topk_lens=call["topk_lens"],
            extra_topk=made_for["extra_topk"], extra_topk_lens=call["extra_topk_lens"], device=call["q"].device,
        )  # fmt: skip
    except (InvalidInput, TypeError):
        MlaDecode(**call)  # raises an error that names the call's arguments, not the schedule's
        raise
