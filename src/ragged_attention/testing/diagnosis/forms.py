"""A common form for all attention calls: groups of queries, each with the slots of its keys.

Paged, sparse and packed calls can all be converted to this form. So each known fault of a kernel is described only
once, as a form with other slots, other masks or other numbers.
"""

import dataclasses
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ragged_attention.reference._kv_layout import Float64, per_head, sequence_bounds, true_queries, widened
from ragged_attention.reference._softmax import logits_of, share_of_keys, sink_of_each, slope_of_each, softmax
from ragged_attention.reference.paged_attention import values_of
from ragged_attention.reference.ragged_paged_attention import column_at_own, named, rows_of, split_values, visible
from ragged_attention.testing.heads_first.specs import ChunkBatch, PagedBatch
from ragged_attention.testing.mla.ragged import RaggedLatentBatch
from ragged_attention.testing.mla.specs import DecodeBatch, PrefillBatch
from ragged_attention.testing.paged.specs import Arrays, Batch, RaggedTables
from ragged_attention.testing.varlen.specs import VarlenBatch

Results = dict[str, NDArray[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Queries that share their keys: the queries of a sequence, or a single query with its own list of keys."""

    rows: slice
    slots: NDArray[np.int64]  # the slot of each position, -1 if it has none; includes positions past `kv_len`
    kv_len: int
    heads: slice | None = None  # query heads; None: all
    drafted: NDArray[np.bool_] | None = None
    ranges: NDArray[np.int32] | None = None
    lists: tuple[NDArray[np.int32], int] | None = None  # lists of blocks [q_len, 1, N], and the block size
    shift: int = 0  # added to the queries' positions; with 0, the last query has the position of the last key
    times: NDArray[np.float64] | None = None  # how often each key counts

    @property
    def q_len(self) -> int:
        return self.rows.stop - self.rows.start

    def change(self, **fields: Any) -> Self:
        return dataclasses.replace(self, **fields)

    def as_long_as(self, kv_len: int) -> Self:
        """The part with another `kv_len`, limited to the number of slots."""
        return self.change(kv_len=max(min(kv_len, len(self.slots)), 0))

    def without(self, hidden: NDArray[np.bool_]) -> Self:
        """The part without the keys at positions where `hidden` is true."""
        return self.change(slots=np.where(hidden, -1, self.slots))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Form:
    """The arguments of an attention call of any kind, in float64."""

    kind: str  # paged | lists | packed
    q: Float64  # [T, H, D]
    k: Float64  # [N + 1, K, D]: the key of each slot, then a row of zeros
    v: Float64  # [N + 1, K, D_v]
    parts: tuple[Part, ...]
    kv_heads: NDArray[np.int64]  # the KV head of each query head
    scale: float
    sinks: Float64  # [H]
    slopes: Float64  # [H]: ALiBi slopes; 0 without ALiBi
    table: Float64 | None  # [H, B] or [T, H, B]: the relative bias
    at_own: int  # the column of `table` for a query's own position
    causal: bool = False
    window: int | None = None
    soft_cap: float | None = None
    page_size: int = 1
    sizes: tuple[int, ...] = ()  # the number of slots in each cache; a second cache's slots follow those of the first
    latent: bool = False  # whether the first columns of a key are its value

    def change(self, **fields: Any) -> Self:
        return dataclasses.replace(self, **fields)

    def of_parts(self, change: Any) -> Self:
        """The form with `change` applied to each part."""
        return self.change(parts=tuple(map(change, self.parts)))

    @property
    def zeros(self) -> int:
        """The slot that holds zeros."""
        return len(self.k) - 1

    def heads(self, part: Part) -> NDArray[np.int64]:
        """The indices of a part's query heads."""
        return np.arange(self.q.shape[1])[part.heads or slice(None)]

    def seen(self, part: Part) -> NDArray[np.bool_]:
        """Whether each query of a part sees each of its keys, bool [q_len, kv_len]."""
        inside = (part.slots >= 0) & (part.slots <= self.zeros)
        seen = np.zeros((part.q_len, part.kv_len), bool)
        stop = max(part.kv_len + part.shift, 0)
        valid = np.pad(inside, (0, max(stop - len(inside), 0)))[:stop]
        seen_to_stop = visible(part.q_len, stop, valid, self.causal, self.window, part.drafted, part.ranges)
        seen_to_stop = seen_to_stop[:, : part.kv_len]
        seen[:, : seen_to_stop.shape[1]] = seen_to_stop
        # Without other masks, keys from `stop` on are visible: a window hides only earlier keys.
        if not self.causal and part.drafted is None and part.ranges is None:
            seen[:, stop:] = inside[stop : part.kv_len]
        return seen if part.lists is None else seen & named(*part.lists, part.kv_len)[0]

    def finite(self) -> bool:
        """Whether all keys and values are finite, including those that no query sees."""
        return bool(np.isfinite(self.k).all() and np.isfinite(self.v).all())

    def read(self) -> NDArray[np.bool_]:
        """Whether any query sees each slot, bool [N]."""
        read = np.zeros(self.zeros, bool)
        for part in self.parts:
            read[part.slots[: part.kv_len][self.seen(part).any(axis=0)]] = True
        return read


def attended(form: Form) -> Results:
    """The out [T, H, D_v], max_logits [T, H] and lse [T, H] of a form."""
    tokens, heads, _ = form.q.shape
    out = np.zeros((tokens, heads, form.v.shape[2]))
    top, lse = np.full((tokens, heads), -np.inf), np.full((tokens, heads), -np.inf)
    for part in form.parts:
        seen = form.seen(part)
        used = np.flatnonzero(seen.any(axis=0))
        for place, logits, kv_head in logits_of_parts(form, part, used) if used.size else ():
            if part.times is not None:
                with np.errstate(divide="ignore"):
                    logits = logits + np.log(part.times[used])
            logits = np.where(seen[:, None, used], logits, -np.inf)
            results = softmax(logits.reshape(-1, len(used)), form.v[part.slots[used], kv_head])
            for array, each in zip((out, top, lse), results, strict=True):
                array[place] = each.reshape(array[place].shape)
    return {"out": out * share_of_keys(lse, form.sinks)[..., None], "max_logits": top, "lse": lse}


def logits_of_parts(form: Form, part: Part, keys: NDArray[np.int64]) -> Any:
    """Yield for each KV head an index of its queries, their logits [q_len, group, n] for the n `keys`, and the head."""
    heads = form.heads(part)
    for kv_head in np.unique(form.kv_heads[heads]):
        place = np.ix_(np.arange(part.rows.start, part.rows.stop), heads[form.kv_heads[heads] == kv_head])
        q = form.q[place]
        logits = logits_of(q.reshape(-1, q.shape[2]), form.k[part.slots[keys], kv_head], form.scale, form.soft_cap)
        position = part.kv_len + part.shift - part.q_len + np.arange(part.q_len)
        distance = keys[None, :] - position[:, None]
        bias = form.slopes[place[1][0]][:, None] * distance[:, None]
        if form.table is not None:
            table = form.table[place] if form.table.ndim == 3 else form.table[place[1][0]][None]
            columns = np.clip(form.at_own - distance, 0, table.shape[-1] - 1)
            bias = bias + np.take_along_axis(
                np.broadcast_to(table, (*q.shape[:2], table.shape[-1])), columns[:, None], 2
            )
        yield place, logits.reshape(*q.shape[:2], len(keys)) + bias, kv_head


# ---- conversion of each family


def form_of(batch: Arrays) -> Form | None:
    """The form of an attention batch; None for any other batch."""
    if isinstance(batch, (PagedBatch, ChunkBatch)):
        return _of_pages(_ragged(batch))
    if isinstance(batch, DecodeBatch) and not batch.sparse:
        return _of_pages(_ragged_decode(batch)).change(latent=True)
    if isinstance(batch, RaggedTables):
        return _of_pages(batch).change(latent=isinstance(batch, RaggedLatentBatch))
    if isinstance(batch, (DecodeBatch, PrefillBatch)):
        return _of_lists(batch)
    return _of_packed(batch) if isinstance(batch, VarlenBatch) else None


def _ragged(batch: PagedBatch | ChunkBatch) -> Batch:
    """The equivalent batch of ragged attention, with pages in float64."""
    stored = batch.cache_dtype if batch.quantized else None
    pages: Any = tuple(values_of(pages, stored) for pages in (batch.k_pages, batch.v_pages))
    names = ("q", "sm_scale", "soft_cap", "dtype")
    common: dict[str, Any] = {"kv_pages": pages, **{name: getattr(batch, name) for name in names}}
    if isinstance(batch, PagedBatch):
        edges = np.arange(len(batch.q) + 1, dtype=np.int32)
        return Batch(**common, kv_lens=batch.lengths, page_indices=batch.page_indices, cu_q_lens=edges)
    length = min(int(np.asarray(batch.length).reshape(())), len(batch.page_indices) * batch.page_size)
    live = len(batch.q) if batch.align == "end" else batch.change(length=length).live
    return Batch(
        **common,
        kv_lens=np.array([length], np.int32),
        page_indices=batch.page_indices[None],
        cu_q_lens=np.array([0, live], np.int32),
        sliding_window=batch.sliding_window,
    )


def _ragged_decode(batch: DecodeBatch) -> Batch:
    """The equivalent batch of ragged attention: keys are the latent rows, and values their first columns."""
    assert batch.page_indices is not None
    assert batch.kv_lens is not None
    (selection,) = batch.selections()
    names = ("kv_lens", "page_indices", "sm_scale", "causal", "sliding_window", "soft_cap", "sinks")
    seqs, queries = batch.q.shape[:2]
    return Batch(
        q=batch.q.reshape(-1, *batch.q.shape[2:]),
        kv_pages=(selection.widened, selection.widened[..., : batch.d_v]),
        cu_q_lens=np.arange(seqs + 1, dtype=np.int32) * queries,
        **{name: getattr(batch, name) for name in names},
    )


def _form(
    q: Float64, k: Float64, v: Float64, scale: float, sinks: Any, *, slopes: Any = None,
    table: Any = None, **fields: Any
) -> Form:  # fmt: skip
    zeros = [(0, 1), (0, 0), (0, 0)]
    heads = q.shape[1]
    return Form(
        q=q, k=np.pad(k, zeros), v=np.pad(v, zeros), kv_heads=np.arange(heads) // (heads // k.shape[1]), scale=scale,
        sinks=sink_of_each(sinks, heads), slopes=slope_of_each(slopes, heads),
        table=None if table is None else widened(table), at_own=column_at_own(table, fields.get("causal", False)),
        **{"sizes": (len(k),), **fields},
    )  # fmt: skip


def by_lists(
    parts: list[Part], selected: NDArray[np.int32] | None, block_size: int | None, num_heads: int
) -> tuple[Part, ...]:
    """The parts of a call, each split into the query heads that share a list of blocks; unchanged without lists."""
    if selected is None or block_size is None:
        return tuple(parts)
    group = num_heads // selected.shape[1]
    return tuple(
        part.change(
            heads=slice(index * group, (index + 1) * group),
            lists=(selected[part.rows, index : index + 1], block_size),
        )
        for part in parts
        for index in range(selected.shape[1])
    )


def _of_pages(batch: RaggedTables) -> Form:
    if isinstance(batch, RaggedLatentBatch):
        k_pages = batch.rows().astype(np.float64)
        v_pages = k_pages[..., : batch.d_v]
    else:
        assert isinstance(batch, Batch)
        formats = (batch.formats.get("k_format"), batch.formats.get("v_format"))
        k_pages, v_pages = split_values(batch.kv_pages, formats=formats)
        with np.errstate(invalid="ignore"):
            k_pages = k_pages * per_head(batch.k_scale, batch.num_kv_heads)[:, None]
            v_pages = v_pages * per_head(batch.v_scale, batch.num_kv_heads)[:, None]
    scale = batch.q.shape[2] ** -0.5 if batch.sm_scale is None else batch.sm_scale
    with np.errstate(invalid="ignore"):
        q, scale = true_queries(batch.q, batch.q_scale, scale, batch.dtype)
    position = np.arange(batch.page_indices.shape[1] * batch.page_size)
    pages = batch.page_indices.astype(np.int64)[:, position // batch.page_size]
    inside = (pages >= 0) & (pages < batch.num_pages)
    slots = np.where(inside, pages * batch.page_size + position % batch.page_size, -1)
    whole = [
        Part(
            rows=slice(start, stop), slots=slots[seq], kv_len=batch.kv_len(seq), drafted=batch.drafted(start, stop),
            ranges=rows_of(batch.key_ranges, slice(start, stop)),
        )
        for seq, (start, stop) in enumerate(batch.bounds())
    ]  # fmt: skip
    parts = by_lists(whole, getattr(batch, "selected", None), getattr(batch, "block_size", None), batch.q.shape[1])
    keys, values = (array.reshape(-1, *array.shape[2:]) for array in (k_pages, v_pages))
    return _form(
        q, keys, values, scale, batch.sinks, kind="paged", parts=parts,
        causal=batch.causal and batch.key_ranges is None, window=batch.sliding_window, soft_cap=batch.soft_cap,
        page_size=batch.page_size,
        slopes=getattr(batch, "alibi_slopes", None), table=getattr(batch, "relative_bias", None),
    )  # fmt: skip


def _of_lists(batch: DecodeBatch | PrefillBatch) -> Form:
    """The form of a sparse batch, with one part per query, or per query and KV head.

    Indices into a second cache follow those into the first.
    """
    selections = list(batch.selections() if isinstance(batch, DecodeBatch) else (batch.selection,))
    rows = np.concatenate([each.widened.reshape(-1, *each.widened.shape[2:]) for each in selections])
    rows = rows.astype(np.float64)
    starts = np.cumsum([0, *(each.num_slots for each in selections)])
    lists = [
        np.where((each.indices >= 0) & (each.indices < each.num_slots), each.indices + start, -1).astype(np.int64)
        for each, start in zip(selections, starts, strict=False)
    ]
    kv_heads = rows.shape[1]
    lists = [each.reshape(-1, each.shape[-1]) for each in lists]
    counts = [np.clip(each.lens, 0, each.indices.shape[-1]).reshape(-1) for each in selections]
    group = batch.q.shape[-2] // kv_heads
    parts = []
    for number in range(len(lists[0])):
        row, head = divmod(number, kv_heads)
        first = [each[number, : count[number]] for each, count in zip(lists[:-1], counts, strict=False)]
        parts.append(
            Part(
                rows=slice(row, row + 1), slots=np.concatenate([*first, lists[-1][number]]),
                kv_len=sum(map(len, first)) + int(counts[-1][number]),
                heads=slice(head * group, (head + 1) * group) if kv_heads > 1 else None,
            )
        )  # fmt: skip
    return _form(
        batch.q.reshape(-1, *batch.q.shape[-2:]).astype(np.float64), rows, rows[..., : batch.d_v],
        batch.q.shape[-1] ** -0.5 if batch.sm_scale is None else batch.sm_scale, batch.sinks, kind="lists",
        parts=tuple(parts), soft_cap=getattr(batch, "soft_cap", None), latent=True,
        sizes=tuple(each.num_slots for each in selections),
    )  # fmt: skip


def _of_packed(batch: VarlenBatch) -> Form:
    queries = sequence_bounds(batch.cu_q_lens, None, len(batch.q))
    keys = sequence_bounds(batch.cu_kv_lens, None, len(batch.k))
    whole = [
        Part(
            rows=slice(*rows),
            slots=np.arange(start, len(batch.k)),
            kv_len=stop - start,
            ranges=rows_of(batch.key_ranges, slice(*rows)),
        )
        for rows, (start, stop) in zip(queries, keys, strict=True)
    ]
    parts = by_lists(whole, batch.selected, batch.block_size, batch.q.shape[1])
    q, k, v = (array.astype(np.float64) for array in (batch.q, batch.k, batch.v))
    return _form(
        q, k, v, batch.scale, batch.sinks, kind="packed", parts=parts, causal=batch.causal,
        window=batch.sliding_window, soft_cap=batch.soft_cap, slopes=batch.alibi_slopes, table=batch.relative_bias,
    )  # fmt: skip
