"""Multi-head latent attention, its schedule and its caches, on jax arrays."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragged_attention.calls import DecodeSchedule, documented, expect_count, is_array, schedule_arrays
from ragged_attention.calls.base import expect_array
from ragged_attention.errors import InvalidInput
from ragged_attention.jax import execute
from ragged_attention.jax.execute import brought
from ragged_attention.jax.launcher import device_facts

jax.tree_util.register_dataclass(
    DecodeSchedule, data_fields=["parts", "num_splits", "lens", "extra_lens"], meta_fields=["made_for"]
)


@documented
def sparse_mla_prefill(
    q: jax.Array,
    kv: jax.Array,
    indices: jax.Array,
    *,
    sm_scale: float | None = None,
    d_v: int = 512,
    sinks: jax.Array | None = None,
    topk_lens: jax.Array | None = None,
    cache_format: str | None = None,
    deterministic: bool = False,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    arguments = _form(
        q=q, kv=kv, indices=indices, sm_scale=sm_scale, d_v=d_v, sinks=sinks, topk_lens=topk_lens,
        cache_format=cache_format, deterministic=deterministic,
    )  # fmt: skip
    out, max_logits, lse = execute.run_differentiable(
        "sparse_mla_prefill", arguments, backend, options, of=("q", "kv", "sinks")
    )
    return out, max_logits, lse


@documented
def sparse_mla_prefill_backward(
    d_out: jax.Array,
    q: jax.Array,
    kv: jax.Array,
    indices: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    *,
    d_lse: jax.Array | None = None,
    sm_scale: float | None = None,
    d_v: int = 512,
    sinks: jax.Array | None = None,
    topk_lens: jax.Array | None = None,
    deterministic: bool = False,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    arguments = _form(
        d_out=d_out, q=q, kv=kv, indices=indices, out=out, lse=lse, d_lse=d_lse, sm_scale=sm_scale, d_v=d_v,
        sinks=sinks, topk_lens=topk_lens, deterministic=deterministic,
    )  # fmt: skip
    dq, dkv, *d_sinks = execute.run_gradient("sparse_mla_prefill_backward", arguments, backend, options)
    return dq, dkv, d_sinks[0] if d_sinks else None


@documented
def mla_decode(
    q: jax.Array,
    kv_cache: jax.Array,
    page_indices: jax.Array | None = None,
    kv_lens: jax.Array | None = None,
    *,
    indices: jax.Array | None = None,
    d_v: int = 512,
    sm_scale: float | None = None,
    causal: bool = False,
    sinks: jax.Array | None = None,
    topk_lens: jax.Array | None = None,
    extra_kv_cache: jax.Array | None = None,
    extra_indices: jax.Array | None = None,
    extra_topk_lens: jax.Array | None = None,
    schedule: DecodeSchedule | None = None,
    cache_format: str | None = None,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[jax.Array, jax.Array]:
    arguments = _decode_form(
        q=q, kv_cache=kv_cache, page_indices=page_indices, kv_lens=kv_lens, indices=indices, d_v=d_v,
        sm_scale=sm_scale, causal=causal, sinks=sinks, topk_lens=topk_lens, extra_kv_cache=extra_kv_cache,
        extra_indices=extra_indices, extra_topk_lens=extra_topk_lens, schedule=schedule, cache_format=cache_format,
    )  # fmt: skip
    out, lse = execute.run("mla_decode", arguments, backend, options)
    return out, lse


@documented
def make_decode_schedule(
    kv_lens: jax.Array | int,
    batch_size: int,
    num_q_tokens: int,
    num_q_heads: int,
    num_kv_heads: int = 1,
    *,
    topk_lens: jax.Array | None = None,
    extra_topk: int | None = None,
    extra_topk_lens: jax.Array | None = None,
    num_parts: int | None = None,
    overhead: int = 5,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> DecodeSchedule:
    arguments = _schedule_form(
        kv_lens, batch_size, num_q_tokens, num_q_heads, num_kv_heads, topk_lens=topk_lens, extra_topk=extra_topk,
        extra_topk_lens=extra_topk_lens, num_parts=num_parts, overhead=overhead,
    )  # fmt: skip
    parts, num_splits = execute.run("make_decode_schedule", arguments, backend, options)
    topk = kv_lens if arguments["sparse"] else 0
    made_for = tuple(map(brought, (batch_size, num_q_tokens, num_q_heads, num_kv_heads, topk, extra_topk or 0)))
    lens, extra_lens = arguments["lens"], arguments["extra_lens"]
    return DecodeSchedule(parts=parts, num_splits=num_splits, lens=lens, extra_lens=extra_lens, made_for=made_for)


@documented
def quantize_mla_cache(
    kv: jax.Array,
    format: str,
    power_of_two_scales: bool = True,
    *,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> jax.Array:
    arguments = _form(kv=kv, format=format, power_of_two_scales=power_of_two_scales)
    return execute.run("quantize_mla_cache", arguments, backend, options)[0]


@documented
def dequantize_mla_cache(
    cache: jax.Array,
    format: str | None = None,
    dtype: Any = "bfloat16",
    *,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> jax.Array:
    arguments = _dequantize_form(cache=cache, format=format, dtype=dtype)
    return execute.run("dequantize_mla_cache", arguments, backend, options)[0]


@documented
def write_mla_cache(
    kv: jax.Array,
    cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    power_of_two_scales: bool = True,
    cache_format: str | None = None,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> jax.Array:
    arguments = _write_form(
        kv=kv, cache=cache, slot_mapping=slot_mapping, power_of_two_scales=power_of_two_scales,
        cache_format=cache_format,
    )  # fmt: skip
    return execute.run("write_mla_cache", arguments, backend, options)[0]


@documented
def page_indices_to_slots(
    positions: jax.Array,
    page_indices: jax.Array,
    page_size: int,
    *,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> jax.Array:
    arguments = _form(positions=positions, page_indices=page_indices, page_size=page_size)
    return execute.run("page_indices_to_slots", arguments, backend, options)[0]


def _form(**arguments: Any) -> dict[str, Any]:
    return {name: brought(value) for name, value in arguments.items()}


def _decode_form(
    *, q: Any, kv_cache: Any, indices: Any = None, extra_indices: Any = None, schedule: Any = None, **others: Any
) -> dict[str, Any]:
    schedule = schedule_arrays(schedule, q, kv_cache, indices, extra_indices)
    return _form(
        q=q, kv_cache=kv_cache, indices=indices, extra_indices=extra_indices, schedule=schedule, **others
    )  # fmt: skip


def _dequantize_form(*, cache: Any, format: Any = None, dtype: Any = "bfloat16") -> dict[str, Any]:
    return _form(cache=cache, format=format, dtype=dtype if isinstance(dtype, str) else jnp.dtype(dtype).name)


def _write_form(*, kv: Any, **others: Any) -> dict[str, Any]:
    kv = brought(kv)
    if is_array(kv) and len(kv.shape) == 2:
        kv = kv[:, None]
    return _form(kv=kv, **others)


def _schedule_form(
    kv_lens: Any, batch_size: Any, num_q_tokens: Any, num_q_heads: Any, num_kv_heads: Any = 1, *,
    topk_lens: Any = None, extra_topk: Any = None, extra_topk_lens: Any = None, num_parts: Any = None,
    overhead: Any = 5,
) -> dict[str, Any]:  # fmt: skip
    """The lengths as the record takes them, from those of a dense call or from a sparse one's top-k."""
    heads = _form(num_q_tokens=num_q_tokens, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads)
    for name, value in {"batch_size": brought(batch_size), **heads}.items():
        expect_count(name, value, 0 if name == "batch_size" else 1)
    if num_q_heads % num_kv_heads:
        raise InvalidInput(f"expected num_q_heads to be a multiple of {num_kv_heads=}, got {num_q_heads}")
    lists = _form(topk_lens=topk_lens, extra_topk=extra_topk, extra_topk_lens=extra_topk_lens)
    shape = batch_size, num_q_tokens
    if sparse := not is_array(kv_lens) or isinstance(kv_lens, np.generic):
        lens, extra_lens = _sparse_lens(brought(kv_lens), num_kv_heads, shape, **lists)
        programs = num_q_tokens * -(-num_q_heads // 64)
    else:
        lens, extra_lens = brought(kv_lens), None
        programs = num_kv_heads * -(-num_q_tokens * (num_q_heads // num_kv_heads) // 64)
        for name, value in lists.items():
            if value is not None:
                raise InvalidInput(f"expected {name} only with a top-k in place of kv_lens, got it with kv_lens")
        if lens.shape != (batch_size,):
            raise InvalidInput(f"expected kv_lens.shape to be [S] = [{batch_size}], got {list(lens.shape)}")
    if num_parts is None:
        num_parts = max(device_facts(execute.default_platform()).num_multiprocessors // programs, 1)
    return _form(lens=lens, extra_lens=extra_lens, sparse=sparse, num_parts=num_parts, overhead=overhead)


def _sparse_lens(
    topk: Any, num_kv_heads: int, shape: tuple[int, int], topk_lens: Any, extra_topk: Any, extra_topk_lens: Any
) -> tuple[jax.Array, jax.Array | None]:
    if not isinstance(topk, int) or isinstance(topk, bool):
        raise TypeError(f"expected kv_lens to be an array or an int, a top-k, got {type(topk).__name__}")
    if num_kv_heads != 1:
        raise InvalidInput(f"expected num_kv_heads = 1 with a top-k in place of kv_lens, got {num_kv_heads}")
    if extra_topk is None and extra_topk_lens is not None:
        raise InvalidInput("expected extra_topk_lens only together with extra_topk, got it without")
    lens = _list_lens("kv_lens", topk, "topk_lens", topk_lens, shape)
    if extra_topk is None:
        return lens, None
    return lens, _list_lens("extra_topk", extra_topk, "extra_topk_lens", extra_topk_lens, shape)


def _list_lens(name: str, most: Any, lens_name: str, lens: Any, shape: tuple[int, int]) -> jax.Array:
    """For each sequence the length of its longest list, held within what a list can hold."""
    expect_count(name, most, 1)
    if lens is None:
        return jnp.full(shape[:1], most, jnp.int32)
    rank = len(lens.shape) if is_array(lens) else 1
    expect_array(lens_name, lens, "S Q" if rank == 2 else "S", ("int32",), dict(zip("SQ", shape, strict=True)))
    held = jnp.clip(lens, 0, most)
    return held.max(axis=1) if rank == 2 else held


FORMS = {
    "sparse_mla_prefill": _form,
    "sparse_mla_prefill_backward": _form,
    "mla_decode": _decode_form,
    "make_decode_schedule": _schedule_form,
    "quantize_mla_cache": _form,
    "dequantize_mla_cache": _dequantize_form,
    "write_mla_cache": _write_form,
    "page_indices_to_slots": _form,
}
