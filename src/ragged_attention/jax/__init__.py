"""The jax front end: every operation on jax arrays, under `jit`, `vmap`, `lax.scan` and `jax.export`.

The backend is chosen for each platform when a function is lowered, so one traced function runs on a CPU, a GPU
(through jax-triton) and a TPU. Wishes (`use_backend`, environment) are read when the function is traced.
One export can serve several platforms, except that jax-triton refuses one for CUDA together with others.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragged_attention import dispatch
from ragged_attention.calls import CALLS, documented, expect_num_seqs, is_array, is_number
from ragged_attention.jax import execute
from ragged_attention.jax.launcher import device_facts


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
    backend: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    arguments = _attention_form(
        q=q, kv_pages=kv_pages, kv_lens=kv_lens, page_indices=page_indices, cu_q_lens=cu_q_lens, num_seqs=num_seqs,
        sm_scale=sm_scale, causal=causal, sliding_window=sliding_window, soft_cap=soft_cap, sinks=sinks,
        k_scale=k_scale, v_scale=v_scale, return_lse=return_lse,
    )  # fmt: skip
    result = execute.run("ragged_paged_attention", arguments, backend, options)
    return (result[0], result[1]) if return_lse else result


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


def explain(operation: str, *arguments: Any, backend: str | Sequence[str] | None = None, **keywords: Any) -> str:
    """`ragged_attention.explain` for calls on jax or NumPy arrays."""
    keywords.pop("options", None)
    named = dict(zip(CALLS[operation].argument_names(), arguments, strict=False)) | keywords
    device = device_facts(execute.default_platform())
    return dispatch.explanation(CALLS[operation](**_FORMS[operation](**named), device=device), backend=backend)  # type: ignore[call-arg]


def _attention_form(**arguments: Any) -> dict[str, Any]:
    return _live({name: _brought(value) for name, value in arguments.items()})


def _write_form(**arguments: Any) -> dict[str, Any]:
    if isinstance(tables := arguments.get("slot_mapping"), tuple | list):
        names = ("page_indices", "kv_lens", "cu_q_lens")
        arguments = arguments | {"slot_mapping": None} | dict(zip(names, tables, strict=True))
    return _live({name: _brought(value) for name, value in arguments.items()})


def _merge_form(**arguments: Any) -> dict[str, Any]:
    return {
        name: jnp.stack(list(parts)) if isinstance(parts, tuple | list) else _brought(parts)
        for name, parts in arguments.items()
    }


_FORMS = {
    "ragged_paged_attention": _attention_form,
    "write_kv_pages": _write_form,
    "merge_attention_states": _merge_form,
}


def _brought(value: Any) -> Any:
    """NumPy arrays as jax arrays, NumPy numbers as Python's; anything else as it is, for the record to judge."""
    if isinstance(value, tuple | list):
        return type(value)(_brought(item) for item in value)
    if isinstance(value, np.ndarray):
        return jnp.asarray(value)
    if is_number(value) and isinstance(value, np.generic):
        return value.item()
    return value


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
