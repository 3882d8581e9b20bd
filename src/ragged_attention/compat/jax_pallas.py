"""The attention functions of `jax.experimental.pallas.ops.tpu`, with JAX's names, order and defaults, on every device.

With `ragged_paged_attention` or `paged_attention` imported from here instead of from JAX, code written for TPUs runs on
GPUs and CPUs as well. Calls that JAX's functions refuse with a `ValueError` or an assertion raise `InvalidInput`, a
`ValueError`. The differences are:

- The result is always defined: padding rows and sequences without keys are 0, empty sequences may be anywhere, and
  numbers that no query sees, even NaN, do not affect the result.
- Keys that a query does not see have no effect on its result, for any `mask_value`.
- `num_kv_pages_per_block` and the other tunables are checked as JAX checks them. They are used if the backend for jax's
  default device has them, and otherwise ignored.
- NumPy index arrays of wide integers are clamped to int32, while JAX wraps them around; float64 is refused.
- Keys, values and their scales are multiplied in float32; JAX rounds the products to the queries' dtype or to bfloat16.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragged_attention import dispatch, tuning
from ragged_attention.calls import FLOATS, RaggedPagedAttention, dtype_name, is_array, is_number
from ragged_attention.compat import easydel, jax_arguments
from ragged_attention.errors import InvalidInput
from ragged_attention.jax._launcher import device_facts
from ragged_attention.jax._lower import to_jax

__all__ = [
    "DEFAULT_MASK_VALUE",
    "dynamic_validate_inputs",
    "get_tuned_block_sizes",
    "paged_attention",
    "ragged_paged_attention",
    "ref_ragged_paged_attention",
    "static_validate_inputs",
]

DEFAULT_MASK_VALUE = jax_arguments.DEFAULT_MASK_VALUE


def ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = DEFAULT_MASK_VALUE,
    k_scale: float | None = None,
    v_scale: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
    backend: str | Sequence[str] | None = None,
) -> jax.Array:
    """Causal attention of ragged queries over a paged cache: prefill, decode and any mix of them.

    Args:
        q: [max_tokens, num_q_heads, head_dim], the queries of all sequences, one after another, then padding.
        kv_pages: [num_pages, page_size, 2 * num_kv_heads, head_dim], K of head h at 2h and V at 2h + 1.
        kv_lens: i32 [max_num_seqs], including the new tokens.
        page_indices: i32 [max_num_seqs, pages_per_seq].
        cu_q_lens: i32 [max_num_seqs + 1]; entries past `num_seqs` are ignored, and may be 0.
        num_seqs: [1] of any integer dtype; another value does not recompile.
        sm_scale: factor on q . k, 1.0 by default.
        sliding_window: maximum number of keys that a query sees, including its own position's.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
        mask_value: without effect, because keys that a query does not see have no effect on its result.
        k_scale, v_scale: floats; a cached value times its scale is the true value.
        num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes: tunables of the TPU kernel; checked, but
            without effect on backends that lack them.
        backend: a name or an ordered list of them, as everywhere in `ragged_attention`.

    Returns:
        [max_tokens, num_q_heads, head_dim] of q's dtype; padding rows are 0.

    Raises:
        InvalidInput: (a ValueError) from `static_validate_inputs`.
    """
    jax_arguments.expect_number_or_none("mask_value", mask_value)
    if sm_scale is None:
        raise TypeError("expected sm_scale to be a number, got NoneType")
    tables = jax_arguments.held_as_int32(
        kv_lens=kv_lens, page_indices=page_indices, cu_q_lens=cu_q_lens, num_seqs=num_seqs
    )
    q, kv_pages = to_jax((q, kv_pages))
    tunables: dict[str, Any] = dict(
        num_kv_pages_per_block=num_kv_pages_per_block, num_queries_per_block=num_queries_per_block,
        vmem_limit_bytes=vmem_limit_bytes,
    )  # fmt: skip
    settings: dict[str, Any] = dict(sm_scale=sm_scale, sliding_window=sliding_window, k_scale=k_scale, v_scale=v_scale)
    static_validate_inputs(q, kv_pages, *tables, soft_cap=soft_cap, **settings, **tunables)
    kv_lens, page_indices, cu_q_lens, num_seqs = tables
    wide_q, kv_pages = jax_arguments.widened(q, kv_pages)
    scales = jax_arguments.scales_of(kv_pages, k_scale=k_scale, v_scale=v_scale)
    arguments = settings | scales | dict(
        q=wide_q, kv_pages=kv_pages, kv_lens=kv_lens, page_indices=page_indices, cu_q_lens=cu_q_lens,
        num_seqs=jax_arguments.as_int32("num_seqs", num_seqs), soft_cap=jax_arguments.even(soft_cap),
    )  # fmt: skip
    return jax_arguments.run("ragged_paged_attention", arguments, backend, tunables).astype(q.dtype)


def ref_ragged_paged_attention(
    queries: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = DEFAULT_MASK_VALUE,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> jax.Array:
    """The result of `ragged_paged_attention`, computed in float64 on the host, without the padding rows.

    The arguments are those of `ragged_paged_attention`. Like JAX's function, this one reads the lengths, so it cannot
    run under `jit`.
    """
    out = ragged_paged_attention(
        queries, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, sm_scale=sm_scale,
        sliding_window=sliding_window, soft_cap=soft_cap, mask_value=mask_value, k_scale=k_scale, v_scale=v_scale,
        backend="reference",
    )  # fmt: skip
    return out[int(cu_q_lens[0]) : int(cu_q_lens[int(num_seqs[0])])]


def static_validate_inputs(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> None:
    """Raise `InvalidInput` if `ragged_paged_attention` refuses the shapes, dtypes or options.

    It reads no values, so it also takes traced arrays and `jax.ShapeDtypeStruct`.
    """
    del mask_value  # no constraints
    if not is_array(num_seqs):
        raise TypeError(f"expected num_seqs to be an array, got {type(num_seqs).__name__}")
    if tuple(num_seqs.shape) != (1,) or not jnp.issubdtype(num_seqs.dtype, jnp.integer):
        got = f"{dtype_name(num_seqs)}{list(num_seqs.shape)}"
        raise InvalidInput(f"expected num_seqs to be an integer array of shape [1], got {got}")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if not isinstance(scale, float | None):
            raise InvalidInput(f"expected {name} to be a float or None, got {type(scale).__name__}")
    if is_number(sliding_window) and sliding_window <= 0:  # type: ignore[operator]
        raise InvalidInput(f"sliding_window must be positive: expected sliding_window >= 1, got {sliding_window}")
    if is_number(soft_cap) and soft_cap == 0:
        raise InvalidInput(f"soft_cap must not be 0.0: expected None or another number, got {soft_cap}")
    RaggedPagedAttention(
        **_stand_ins(q, kv_pages), kv_lens=kv_lens, page_indices=page_indices, cu_q_lens=cu_q_lens, sm_scale=sm_scale,
        sliding_window=sliding_window, soft_cap=jax_arguments.even(soft_cap),
        **jax_arguments.scales_of(kv_pages, k_scale=k_scale, v_scale=v_scale),
    )  # fmt: skip
    pages_per_seq = page_indices.shape[1]
    if num_kv_pages_per_block is not None and not 0 < num_kv_pages_per_block <= pages_per_seq:
        raise InvalidInput(
            f"expected num_kv_pages_per_block between 1 and {pages_per_seq=}, got {num_kv_pages_per_block}"
        )
    for name, value in (("num_queries_per_block", num_queries_per_block), ("vmem_limit_bytes", vmem_limit_bytes)):
        if value is not None and value <= 0:
            raise InvalidInput(f"{name} must be positive: expected {name} >= 1, got {value}")


def dynamic_validate_inputs(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> None:
    """`static_validate_inputs`, and a check of the index arrays' values. It reads them, so it cannot run under `jit`.

    Like JAX, it refuses too many sequences or tokens, more keys than the table has pages for, and more queries than
    keys. It also refuses negative lengths, and pages of a live sequence that do not exist, which JAX does not check.
    """
    static_validate_inputs(
        q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, sm_scale=sm_scale, sliding_window=sliding_window,
        soft_cap=soft_cap, mask_value=mask_value, k_scale=k_scale, v_scale=v_scale,
        num_kv_pages_per_block=num_kv_pages_per_block, num_queries_per_block=num_queries_per_block,
        vmem_limit_bytes=vmem_limit_bytes,
    )  # fmt: skip
    lens, table = np.asarray(kv_lens), np.asarray(page_indices)
    RaggedPagedAttention(
        **_stand_ins(q, kv_pages), kv_lens=lens, page_indices=table, cu_q_lens=np.asarray(cu_q_lens),
        num_seqs=np.asarray(num_seqs).astype(np.int32),
        **jax_arguments.scales_of(kv_pages, k_scale=k_scale, v_scale=v_scale),
    ).check_values()  # fmt: skip
    longest = table.shape[1] * kv_pages.shape[1]
    over = np.flatnonzero(lens > longest)  # including padding sequences, as in JAX
    if over.size:
        raise InvalidInput(f"expected kv_lens[{over[0]}] <= pages_per_seq * page_size = {longest}, got {lens[over[0]]}")


def get_tuned_block_sizes(
    q_dtype: Any,
    kv_dtype: Any,
    num_q_heads_per_blk: int,
    num_kv_heads_per_blk: int,
    head_dim: int,
    page_size: int,
    max_num_batched_tokens: int,
    pages_per_seq: int,
) -> tuple[int, int]:
    """The default `num_kv_pages_per_block` and `num_queries_per_block` of our TPU kernel.

    They are the defaults for this machine's TPU. Without a TPU, they are those for a representative TPU, while JAX's
    function raises an error. Our kernel processes all heads at once, so the numbers of heads are those of the whole
    call.
    """

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    call = RaggedPagedAttention(
        q=array(q_dtype, max_num_batched_tokens, num_q_heads_per_blk, head_dim),
        kv_pages=array(kv_dtype, 1, page_size, 2 * num_kv_heads_per_blk, head_dim),
        kv_lens=array(jnp.int32, 1), page_indices=array(jnp.int32, 1, pages_per_seq), cu_q_lens=array(jnp.int32, 2),
        **jax_arguments.scales_of(array(kv_dtype), k_scale=None, v_scale=None),
        device=device_facts("tpu"),
    )  # fmt: skip
    tile = tuning.tile_for(dispatch.load("ragged_paged_attention", "pallas"), call, {})
    return min(pages_per_seq, tile.num_kv_pages_per_block), min(max_num_batched_tokens, tile.num_queries_per_block)


def paged_attention(
    q: jax.Array,
    k_pages: Any,
    v_pages: Any,
    lengths: jax.Array,
    page_indices: jax.Array,
    *,
    mask_value: float = DEFAULT_MASK_VALUE,
    attn_logits_soft_cap: float | None = None,
    pages_per_compute_block: int,
    megacore_mode: str | None = None,
    inline_seq_dim: bool = True,
    backend: str | Sequence[str] | None = None,
) -> jax.Array:
    """Decode over a paged cache with heads first. The caller scales `q`.

    Args:
        q: [batch_size, num_q_heads, head_dim], one query per sequence.
        k_pages, v_pages: [num_kv_heads, num_pages, page_size, head_dim], or JAX's `QuantizedTensor` of that shape.
        lengths: i32 [batch_size]; for a length of 0 the result is 0.
        page_indices: [batch_size, pages_per_sequence] of any integer dtype; entries past the last used page may hold
            anything.
        mask_value: without effect, because keys that a query does not see have no effect on its result.
        attn_logits_soft_cap: logits become `cap * tanh(logits / cap)`.
        pages_per_compute_block, megacore_mode, inline_seq_dim: tunables of the TPU kernel; checked, but without effect
            on backends that lack them.
        backend: a name or an ordered list of them, as everywhere in `ragged_attention`.

    Returns:
        [batch_size, num_q_heads, head_dim] of q's dtype.

    Raises:
        InvalidInput: (a ValueError) shapes, dtypes or tunables contradict each other.
    """
    return easydel.paged_attention(
        q, k_pages, v_pages, lengths, page_indices, sm_scale=1.0, mask_value=mask_value,
        attn_logits_soft_cap=attn_logits_soft_cap, pages_per_compute_block=pages_per_compute_block,
        megacore_mode=megacore_mode, inline_seq_dim=inline_seq_dim, backend=backend,
    )  # fmt: skip


def _stand_ins(q: Any, kv_pages: Any) -> dict[str, Any]:
    """The shapes and dtypes of the queries and pages that the operation will get."""
    if all(is_array(array) and dtype_name(array) in FLOATS for array in (q, kv_pages)):
        q, kv_pages = jax.eval_shape(jax_arguments.widened, q, kv_pages)
    return {"q": q, "kv_pages": kv_pages}
