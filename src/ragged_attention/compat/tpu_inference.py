"""The kernel of tpu-inference for latent attention (MLA), with its names, order and defaults, on every device.

Code written for a TPU runs on GPUs and CPUs as well if it imports `mla_ragged_paged_attention` from this module instead
of from `tpu_inference.kernels.mla.v2.kernel`. `get_kv_cache_shape` and `static_validate_inputs` are that module's other
public names. Calls that the kernel refuses with a `ValueError` or an assertion raise `InvalidInput`, a `ValueError`.
The differences are:

- The result is always defined: padding rows and queries without keys are 0, empty sequences may be anywhere, and
  numbers that no query sees, even NaN, do not affect the result.
- Only the number of sequences is read from `distribution`. The sequences may come in any order.
- Logits, weights and sums are in float32, for any `s_dtype` and `p_same_dtype_as_v`.
- A transposed cache (`transpose_kv_cache=True`), whose positions are columns of a page, is refused.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention.calls import FLOATS, QUANTIZED, dtype_name, expect_bool, is_array, is_number
from ragged_attention.calls.fields import INT32, expect_array, is_integer
from ragged_attention.compat.jax_arguments import even, expect_number_or_none, held_as_int32, run, scales_of, widened
from ragged_attention.compat.names import named_as
from ragged_attention.errors import InvalidInput, Unsupported
from ragged_attention.jax._lower import to_jax

__all__ = ["get_kv_cache_shape", "mla_ragged_paged_attention", "static_validate_inputs"]

LANES = 128  # the latent and the rotary part of a row are each padded to a multiple of 128
NARROW_FLOATS = ("float8_e4m3fn", "float8_e5m2")  # 8-bit dtypes of queries
NAMES = {"kv_cache": "cache_kv", "q": "ql_nope"}


def get_kv_cache_shape(
    total_num_pages: int,
    page_size: int,
    kv_dim: int,
    kv_dtype: Any,
    kv_packing: int | None = None,
    transpose_kv_cache: bool = False,
) -> tuple[int, ...]:
    """The shape of a cache for rows of `kv_dim` numbers: [total_num_pages, page_size / kv_packing, kv_packing, kv_dim].

    page_size is rounded up to a multiple of kv_packing, by default the number of elements in 32 bits; kv_dim is rounded
    up to a multiple of 128.
    """
    _refuse_transposed(transpose_kv_cache)
    packing = 32 // _bits(kv_dtype) if kv_packing is None else kv_packing
    return total_num_pages, -(-page_size // packing), packing, _padded(kv_dim)


def static_validate_inputs(
    ql_nope: jax.Array,
    q_pe: jax.Array,
    new_kv_c: jax.Array,
    new_k_pe: jax.Array,
    cache_kv: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    chunk_prefill_size: int | None = None,
    num_kv_pages_per_blocks: Sequence[int] | None = None,
    num_queries_per_blocks: Sequence[int] | None = None,
    vmem_limit_bytes: int | None = None,
    decode_batch_size: int = 1,
    mixed_q_split: int = 1,
    transpose_kv_cache: bool = False,
    debug_mode: bool = False,
) -> None:
    """Raise `InvalidInput` if `mla_ragged_paged_attention` refuses the shapes, dtypes or options.

    It reads no values, so it also takes traced arrays and `jax.ShapeDtypeStruct`.
    """
    del sm_scale, mask_value, q_scale, k_scale, v_scale, debug_mode  # no constraints
    _refuse_transposed(transpose_kv_cache)
    _expect_rows(ql_nope, q_pe, new_kv_c, new_k_pe)
    _expect_cache(cache_kv, ql_nope.shape[2], q_pe.shape[2], {"new_kv_c": new_kv_c, "new_k_pe": new_k_pe})
    _expect_tables(kv_lens, page_indices, cu_q_lens, distribution)
    if is_number(soft_cap) and soft_cap == 0:
        raise InvalidInput(f"soft_cap must not be 0.0: expected None or another number, got {soft_cap}")
    counts = {
        "sliding_window": sliding_window, "chunk_prefill_size": chunk_prefill_size,
        "vmem_limit_bytes": vmem_limit_bytes, "decode_batch_size": decode_batch_size, "mixed_q_split": mixed_q_split,
    }  # fmt: skip
    for name, sizes in (("kv_pages", num_kv_pages_per_blocks), ("queries", num_queries_per_blocks)):
        counts |= {f"num_{name}_per_block[{case}]": size for case, size in enumerate(sizes or ())}
    for name, count in counts.items():
        if count is not None and not is_integer(count):
            raise TypeError(f"expected {name} to be an int, got {type(count).__name__}")
        if count is not None and count <= 0:
            raise InvalidInput(f"{name} must be positive: expected {name} >= 1, got {count}")
    if num_queries_per_blocks and (got := num_queries_per_blocks[-1]) % mixed_q_split:
        raise InvalidInput(f"expected num_queries_per_block[2] to be a multiple of {mixed_q_split=}, got {got}")


def mla_ragged_paged_attention(
    ql_nope: jax.Array,
    q_pe: jax.Array,
    new_kv_c: jax.Array,
    new_k_pe: jax.Array,
    cache_kv: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    chunk_prefill_size: int | None = None,
    num_kv_pages_per_block: Sequence[int] | int | None = None,
    num_queries_per_block: Sequence[int] | int | None = None,
    vmem_limit_bytes: int | None = None,
    decode_batch_size: int = 1,
    mixed_q_split: int = 1,
    s_dtype: Any = jnp.bfloat16,
    transpose_kv_cache: bool = False,
    two_step_flash_attention: bool = True,
    p_same_dtype_as_v: bool = True,
    debug_mode: bool = False,
    backend: str | Sequence[str] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Write a step's latents into the cache and attend over it: prompts, chunks and decodes in one call.

    Shapes in letters: T query tokens, N heads, L columns of a latent, R columns of its rotary part, P pages, S
    sequences.

    Args:
        ql_nope: [N, T, L], absorbed queries, heads first; float32, float16, bfloat16, float8_e4m3fn or float8_e5m2.
        q_pe: [T, N, R] of ql_nope's dtype, tokens first.
        new_kv_c, new_k_pe: [T, L] and [T, R] of the cache's dtype, this step's latents, stored unchanged.
        cache_kv: [P, page_size / packing, packing, L' + R'], L' and R' being L and R rounded up to multiples of 128;
            float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 or int8.
        kv_lens: i32 [S], including the new tokens.
        page_indices: i32 [S * pages_per_seq].
        cu_q_lens: i32 [S + 1]; entries past the last sequence are ignored.
        distribution: i32 [3]; its last number counts the sequences.
        sm_scale: factor on q . k, 1.0 by default.
        sliding_window: maximum number of keys that a query sees, including its own position's.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
        mask_value: without effect, because keys that a query does not see have no effect on its result.
        q_scale, k_scale, v_scale: logits are multiplied by q_scale and k_scale, results by v_scale.
        chunk_prefill_size, num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes, decode_batch_size,
            mixed_q_split: tunables of the TPU kernel; checked. The backend gets those that it has; of three values for
            decode, prefill and mixed sequences, it gets the last.
        s_dtype, two_step_flash_attention, p_same_dtype_as_v, debug_mode: without effect.
        transpose_kv_cache: refused unless False.
        backend: a name or an ordered list of them, as everywhere in `ragged_attention`.

    Returns:
        out [N, T, L] of ql_nope's dtype, heads first, with padding rows of 0; and the new cache, which reuses the
        memory of the given cache if the caller's `jax.jit` donates it.

    Raises:
        InvalidInput: (a ValueError) from `static_validate_inputs`.
        Unsupported: the cache is transposed.
    """
    jnp.dtype(s_dtype)
    if not is_number(sm_scale):
        raise TypeError(f"expected sm_scale to be a number, got {type(sm_scale).__name__}")
    for name, value in (("mask_value", mask_value), ("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        expect_number_or_none(name, value)
    expect_bool("two_step_flash_attention", two_step_flash_attention)
    expect_bool("debug_mode", debug_mode)
    expect_bool("p_same_dtype_as_v", p_same_dtype_as_v)
    rows = to_jax((ql_nope, q_pe, new_kv_c, new_k_pe, cache_kv))
    tables = held_as_int32(kv_lens=kv_lens, page_indices=page_indices, cu_q_lens=cu_q_lens, distribution=distribution)
    pages = _of_cases("num_kv_pages_per_block", num_kv_pages_per_block)
    queries = _of_cases("num_queries_per_block", num_queries_per_block)
    static_validate_inputs(
        *rows, *tables, sliding_window=sliding_window, soft_cap=soft_cap, chunk_prefill_size=chunk_prefill_size,
        num_kv_pages_per_blocks=pages, num_queries_per_blocks=queries, vmem_limit_bytes=vmem_limit_bytes,
        decode_batch_size=decode_batch_size, mixed_q_split=mixed_q_split, transpose_kv_cache=transpose_kv_cache,
    )  # fmt: skip
    factors = [factor for factor in (sm_scale, q_scale, k_scale) if factor is not None]
    settings = {"sm_scale": math.prod(factors), "sliding_window": sliding_window, "soft_cap": even(soft_cap)}
    tunables = {
        "num_kv_pages_per_block": pages and pages[-1], "num_queries_per_block": queries and queries[-1],
        "vmem_limit_bytes": vmem_limit_bytes,
    }  # fmt: skip
    with named_as(NAMES):
        return _attend(rows, tables, settings, v_scale, tunables, backend)


def _attend(
    rows: tuple[jax.Array, ...], tables: list[jax.Array], settings: dict[str, Any], v_scale: float | None,
    tunables: dict[str, int | None], backend: str | Sequence[str] | None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The attention's result and the new cache, for checked arguments."""
    ql_nope, q_pe, new_kv_c, new_k_pe, cache_kv = rows
    kv_lens, page_indices, cu_q_lens, distribution = tables
    pages, groups, packing, width = cache_kv.shape
    q, new = _joined(ql_nope.swapaxes(0, 1), q_pe), _joined(new_kv_c, new_k_pe)
    # bfloat16 represents all 8-bit queries and new rows exactly; the write converts rows back to their bytes.
    q, cache = widened(
        q if dtype_name(q) in FLOATS else q.astype(jnp.bfloat16), cache_kv.reshape(pages, groups * packing, 1, width)
    )
    rounded_by_kernel = v_scale is None and dtype_name(q) == dtype_name(ql_nope)
    arguments = settings | scales_of(cache, kv_scale=None) | {
        "q": q, "kv_cache": cache, "new_kv": new[:, None].astype(q.dtype), "kv_lens": kv_lens,
        "page_indices": page_indices.reshape(len(kv_lens), -1), "cu_q_lens": cu_q_lens, "num_seqs": distribution[2:],
        "d_v": _padded(ql_nope.shape[2]), "cache_format": "plain",
        "out_dtype": None if rounded_by_kernel else "float32",
    }  # fmt: skip
    out, cache = run("ragged_mla_attention", arguments, backend, tunables)
    out = out[..., : ql_nope.shape[2]].swapaxes(0, 1)
    out = out if v_scale is None else out * v_scale
    return out.astype(ql_nope.dtype), cache.astype(cache_kv.dtype).reshape(cache_kv.shape)


def _expect_rows(ql_nope: Any, q_pe: Any, new_kv_c: Any, new_k_pe: Any) -> None:
    """Check queries and new latents against each other."""
    sizes: dict[str, int] = {}
    expected = (
        ("ql_nope", ql_nope, "N T L", (*FLOATS, *NARROW_FLOATS)),
        ("q_pe", q_pe, "T N R", (dtype_name(ql_nope) if is_array(ql_nope) else "float32",)),
        ("new_kv_c", new_kv_c, "T L", (*FLOATS, *QUANTIZED)),
        ("new_k_pe", new_k_pe, "T R", (*FLOATS, *QUANTIZED)),
    )
    for name, rows, letters, dtypes in expected:
        expect_array(name, rows, letters, dtypes, sizes)
        sizes |= dict(zip(letters.split(), rows.shape, strict=True))


def _expect_cache(cache_kv: Any, latent: int, rotary: int, new: dict[str, Any]) -> None:
    """Check the cache, and the dtype of the new rows."""
    width = _padded(latent) + _padded(rotary)
    expect_array("cache_kv", cache_kv, "P G/packing packing L'+R'", (*FLOATS, *QUANTIZED), {"L'+R'": width})
    if (got := cache_kv.shape[2]) % (least := 32 // _bits(cache_kv.dtype)):
        raise InvalidInput(
            f"expected cache_kv.shape[2] to be a multiple of {least}, the number of elements in 32 bits, got {got}"
        )
    for name, rows in new.items():
        if rows.dtype != cache_kv.dtype:
            got, wanted = dtype_name(rows), dtype_name(cache_kv)
            raise InvalidInput(f"expected {name}.dtype to be that of cache_kv, {wanted}, got {got}")


def _expect_tables(kv_lens: Any, page_indices: Any, cu_q_lens: Any, distribution: Any) -> None:
    expect_array("kv_lens", kv_lens, "S", INT32, {})
    expect_array("page_indices", page_indices, "S*pages_per_seq", INT32, {})
    max_num_seqs, listed = kv_lens.shape[0], page_indices.shape[0]
    if not max_num_seqs or listed % max_num_seqs:
        raise InvalidInput(f"expected page_indices.shape[0] to be a multiple of {max_num_seqs=}, got {listed}")
    expect_array("cu_q_lens", cu_q_lens, "S+1", INT32, {"S+1": max_num_seqs + 1})
    expect_array("distribution", distribution, "3", INT32, {"3": 3})


def _refuse_transposed(transpose_kv_cache: bool) -> None:
    if transpose_kv_cache:
        raise Unsupported("expected transpose_kv_cache=False, a cache whose positions are rows, got True")


def _of_cases(name: str, sizes: Any) -> tuple[int, ...] | None:
    """The values of a tunable for decode, prefill and mixed sequences; `sizes` may be one number for all three."""
    if sizes is None:
        return None
    if is_integer(sizes):
        return (sizes,) * 3
    if len(sizes) != 3:
        raise InvalidInput(
            f"expected {name} to be an int, or three ints for decode, prefill and mixed, got {len(sizes)}"
        )
    return tuple(sizes)


def _joined(latent: jax.Array, rotary: jax.Array) -> jax.Array:
    """[T, ..., L] and [T, ..., R] joined to rows like the cache's, each padded with zeros to a multiple of 128."""
    parts = (jnp.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, -part.shape[-1] % LANES)]) for part in (latent, rotary))
    return jnp.concatenate([*parts], -1)


def _padded(width: int) -> int:
    return -(-width // LANES) * LANES


def _bits(dtype: Any) -> int:
    return jax.dtypes.itemsize_bits(jnp.dtype(dtype))
