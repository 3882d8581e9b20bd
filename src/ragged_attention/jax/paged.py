"""Attention over a paged cache of keys and values, writing it, and merging partial results, on jax arrays."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ragged_attention import config
from ragged_attention.calls import CALLS, documented, expect_num_seqs, is_array
from ragged_attention.jax import execute
from ragged_attention.jax.execute import brought


@documented
def ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array | tuple[jax.Array, jax.Array],
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: int | jax.Array | None = None,
    *,
    sm_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    return_lse: bool = False,
    new_kv: tuple[jax.Array, jax.Array] | None = None,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    arguments = _attention_form(
        q=q, kv_pages=kv_pages, kv_lens=kv_lens, page_indices=page_indices, cu_q_lens=cu_q_lens, num_seqs=num_seqs,
        sm_scale=sm_scale, causal=causal, sliding_window=sliding_window, soft_cap=soft_cap, sinks=sinks,
        k_scale=k_scale, v_scale=v_scale, return_lse=return_lse, new_kv=new_kv,
    )  # fmt: skip
    if new_kv is not None and not _is_fused(options):
        return _write_and_attend(arguments, backend, options)
    results = execute.run("ragged_paged_attention", arguments, backend, options)
    parts = 1 + bool(return_lse)
    if new_kv is not None:
        pages = tuple(results[parts:]) if isinstance(kv_pages, tuple | list) else results[parts]
        return *results[:parts], pages
    return (results[0], results[1]) if return_lse else results[0]


@documented
def write_kv_pages(
    k: jax.Array,
    v: jax.Array,
    kv_pages: jax.Array | tuple[jax.Array, jax.Array],
    slot_mapping: jax.Array | tuple[jax.Array, jax.Array, jax.Array] | None = None,
    *,
    page_indices: jax.Array | None = None,
    kv_lens: jax.Array | None = None,
    cu_q_lens: jax.Array | None = None,
    num_seqs: int | jax.Array | None = None,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    arguments = _write_form(
        k=k, v=v, kv_pages=kv_pages, slot_mapping=slot_mapping, page_indices=page_indices, kv_lens=kv_lens,
        cu_q_lens=cu_q_lens, num_seqs=num_seqs, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    pages = execute.run("write_kv_pages", arguments, backend, options)
    return (pages[0], pages[1]) if isinstance(kv_pages, tuple | list) else pages[0]


@documented
def merge_attention_states(
    outs: jax.Array | Sequence[jax.Array],
    lses: jax.Array | Sequence[jax.Array],
    *,
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[jax.Array, jax.Array]:
    out, lse = execute.run("merge_attention_states", _merge_form(outs=outs, lses=lses), backend, options)
    return out, lse


def _is_fused(options: Any) -> bool:
    """Whether the room is to write the new keys and values itself."""
    return bool(config.requested_options("ragged_paged_attention", options).get("fused_update"))


def _write_and_attend(arguments: dict[str, Any], backend: Any, options: Any) -> Any:
    """Two operations in the place of one, for the backends that have not the one."""
    CALLS["ragged_paged_attention"](**arguments)  # type: ignore[call-arg]  # so that errors name `new_kv`
    names = ("page_indices", "kv_lens", "cu_q_lens", "num_seqs", "k_scale", "v_scale")
    shared = {name: arguments[name] for name in names}
    k, v = arguments["new_kv"]
    given = arguments["kv_pages"]
    pages: Any = execute.run("write_kv_pages", {"k": k, "v": v, "kv_pages": given, **shared}, backend, None)
    pages = tuple(pages) if isinstance(given, tuple | list) else pages[0]
    arguments = arguments | {"kv_pages": pages, "new_kv": None}
    return *execute.run("ragged_paged_attention", arguments, backend, options), pages


def _attention_form(**arguments: Any) -> dict[str, Any]:
    return _live({name: brought(value) for name, value in arguments.items()})


def _write_form(**arguments: Any) -> dict[str, Any]:
    if isinstance(tables := arguments.get("slot_mapping"), tuple | list):
        names = ("page_indices", "kv_lens", "cu_q_lens")
        arguments = arguments | {"slot_mapping": None} | dict(zip(names, tables, strict=True))
    return _live({name: brought(value) for name, value in arguments.items()})


def _merge_form(**arguments: Any) -> dict[str, Any]:
    return {
        name: jnp.stack(list(parts)) if isinstance(parts, tuple | list) else brought(parts)
        for name, parts in arguments.items()
    }


FORMS = {
    "ragged_paged_attention": _attention_form,
    "write_kv_pages": _write_form,
    "merge_attention_states": _merge_form,
}


def _live(arguments: dict[str, Any]) -> dict[str, Any]:
    """A Python count narrows the tables to the live sequences; a count in an array stays there."""
    count = arguments.get("num_seqs")
    if not isinstance(count, int) or isinstance(count, bool) or not is_array(arguments.get("kv_lens")):
        return arguments
    expect_num_seqs(count, arguments["kv_lens"].shape[0])
    return arguments | {
        "kv_lens": arguments["kv_lens"][:count],
        "page_indices": arguments["page_indices"][:count],
        "cu_q_lens": arguments["cu_q_lens"][: count + 1],
        "num_seqs": None,
    }
