"""Normalises and rotates this step's queries and keys, and writes keys and values to the pages."""

from typing import Any

from numpy.typing import ArrayLike

from ragged_attention.calls import dtype_name
from ragged_attention.calls.cache_formats import KvFormat
from ragged_attention.reference._rotary import normalized, rotated, rounded
from ragged_attention.reference.write_kv_pages import write_kv_pages

FEATURES = frozenset({
    "slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "k_scale", "v_scale", "q_weight", "k_weight",
    "eps", "interleaved",
})  # fmt: skip


def norm_rope_write(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    kv_pages: Any,
    slot_mapping: ArrayLike | None = None,
    *,
    positions: ArrayLike,
    cos_sin: Any,
    q_weight: ArrayLike | None = None,
    k_weight: ArrayLike | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    page_indices: Any = None,
    kv_lens: Any = None,
    cu_q_lens: Any = None,
    num_seqs: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    dtype: str = "float32",
    k_format: KvFormat | None = None,
    v_format: KvFormat | None = None,
) -> tuple[Any, ...]:
    """The new queries, and the new pages as one array or two.

    Queries and keys are normalised if they have weights, rotated, and rounded once, to `dtype`. The pages then hold
    what `write_kv_pages` stores for the rounded keys and for the values.
    """
    new_q, new_k = (
        rounded(rotated(normalized(x, weight, eps), positions, cos_sin, interleaved), dtype)
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    pages = write_kv_pages(
        new_k, v, kv_pages, slot_mapping, page_indices=page_indices, kv_lens=kv_lens, cu_q_lens=cu_q_lens,
        num_seqs=num_seqs, k_scale=k_scale, v_scale=v_scale, k_format=k_format, v_format=v_format,
    )  # fmt: skip
    return new_q, *(pages if isinstance(pages, tuple) else (pages,))


def run(call: Any, tile: Any, launch: Any) -> Any:
    outputs = ((call.q.shape, call.q.dtype), "kv_pages")
    formats = {"k_format": call.k_format, "v_format": call.v_format}
    return launch.on_host(norm_rope_write, call, outputs, dtype=dtype_name(call.q), **formats)
