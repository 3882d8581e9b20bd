"""Candidates: the results that kernels with known faults would compute, each with its cause as text.

A candidate's results are given directly, or as another batch or another form from which they can be computed.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.testing.diagnosis.forms import Form, Part, Results, attended
from ragged_attention.testing.mla.specs import DecodeBatch

Candidate = tuple[str, Any]  # the cause, and a batch, a form or results
BLOCKS = (4, 8, 16, 32, 64, 128)
OPTIONS = (
    "sliding_window", "soft_cap", "sm_scale", "sinks", "alibi_slopes", "relative_bias", "q_scale", "k_scale",
    "v_scale", "kv_scale", "rope_scale", "draft_mask", "key_ranges", "num_seqs", "topk_lens", "extra_topk_lens",
)  # fmt: skip
LOG2_E = float(np.log2(np.e))


def candidates(batch: Any, form: Form) -> Iterator[Candidate]:
    """The candidates of a batch. Candidates that later candidates can resemble come first."""
    yield from other_options(batch, form)
    yield from other_sums(form)
    yield from other_masks(form)
    yield from other_heads(form)
    if form.latent:
        yield from other_columns(form)
    if form.kind == "paged":
        yield from other_pages(form)
    if form.kind == "lists":
        yield from other_lists(batch, form)
    if form.kind == "packed":
        yield from other_edges(batch, form)
    yield from other_lengths(form)


def other_options(batch: Any, form: Form) -> Iterator[Candidate]:
    """Candidates in which an option has another value or is ignored."""
    if batch.sm_scale is None:
        yield "the logits are not scaled: the default of sm_scale is head_dim ** -0.5", form.change(scale=1.0)
        if form.latent:
            cause = "the logits are scaled by d_v ** -0.5: the default of sm_scale is d_qk ** -0.5"
            yield cause, form.change(scale=form.v.shape[2] ** -0.5)
    arguments = batch.arguments()
    for name in OPTIONS:
        if arguments.get(name) is not None:
            yield f"{name} is ignored", batch.change(**{name: None})
    if arguments.get("selected") is not None:
        yield from other_blocks(batch, form)
    if arguments.get("alibi_slopes") is not None:
        yield (
            "alibi_slopes have the wrong sign: keys further back must get smaller logits",
            batch.change(alibi_slopes=-batch.alibi_slopes),
        )
    if "align" in arguments:
        other = {"chunk": "end", "end": "chunk"}[batch.align]
        yield f"align is ignored: rows have the positions of align={other!r}", batch.change(align=other)
    yield "exp2 is taken of logits that are not multiplied by log2(e)", form.change(scale=form.scale / LOG2_E)
    yield "exp is taken of logits that are multiplied by log2(e)", form.change(scale=form.scale * LOG2_E)
    if form.soft_cap is not None:
        yield "the soft cap is applied before the scale, not after it", form.change(soft_cap=form.soft_cap * form.scale)


def other_blocks(batch: Any, form: Form) -> Iterator[Candidate]:
    """Candidates with other lists of blocks."""
    lists, size = batch.selected, batch.block_size
    yield "selected is ignored", batch.change(selected=None, block_size=None)
    if lists.shape[1] > 1:
        yield "all KV heads read the first KV head's list", batch.change(selected=lists[:, :1])
    if size > 1:
        yield "entries of selected are read as positions, not as blocks", batch.change(block_size=1)
    yield "block numbers are too large by one", batch.change(selected=np.where(lists < 0, lists, lists + 1))
    yield "an entry of -1 is read as block 0", batch.change(selected=np.where(lists == -1, 0, lists))
    ends = np.logical_or.accumulate(lists < 0, axis=2)
    yield "a list ends at its first entry below 0", batch.change(selected=np.where(ends, np.int32(-1), lists))
    yield "a block that is named twice is counted twice", form.of_parts(counted)


def counted(part: Part) -> Part:
    """The part with each key counted as often as the list names its block.

    The part is unchanged unless it has one query and a list.
    """
    if part.lists is None or part.q_len != 1:
        return part
    lists, size = part.lists
    times = np.bincount(lists[(lists >= 0) & (lists < part.kv_len)], minlength=part.kv_len + 1).astype(np.float64)
    return part.change(times=np.maximum(times[np.arange(part.kv_len) // size], 1.0))


def other_sums(form: Form) -> Iterator[Candidate]:
    """Candidates with other sums of weights."""
    right = attended(form)
    yield (
        "lse is +inf where no key is seen: it must be -inf",
        {**right, "lse": np.where(empty(right), np.inf, right["lse"])},
    )
    if (form.sinks == -np.inf).all():
        return
    yield (
        "lse includes the sinks: it must cover only the keys",
        {**right, "lse": np.logaddexp(right["lse"], form.sinks)},
    )
    largest = np.maximum(right["max_logits"], form.sinks)
    yield "max_logits includes the sinks: it must cover only the keys", {**right, "max_logits": largest}
    yield "sinks are counted twice, such as once in each of two splits", form.change(sinks=form.sinks + np.log(2))
    if len(form.sinks) > 1:
        yield "every head has the sink of head 0", form.change(sinks=np.full_like(form.sinks, form.sinks[0]))


def empty(results: Results) -> NDArray[np.bool_]:
    """Whether a query head sees no key, bool [T, H]."""
    return results["lse"] == -np.inf


def other_masks(form: Form) -> Iterator[Candidate]:
    """Candidates in which queries see other keys."""
    if form.window is not None:
        yield "the window is one key too wide", form.change(window=form.window + 1)
        yield "the window is one key too narrow", form.change(window=form.window - 1)
    if form.kind != "lists":
        yield (
            f"the causal mask is wrong: results are those of causal={not form.causal}",
            form.change(causal=not form.causal),
        )
    if form.causal:
        yield (
            "the causal mask is aligned to the first keys: the last query of a sequence must see its last key",
            form.of_parts(lambda part: part.change(shift=part.q_len - part.kv_len)),
        )
        for cause, shift in (
            ("the causal mask shows a query the key after its own", 1),
            ("the causal mask hides a query's own key", -1),
        ):
            window = None if form.window is None else form.window + shift  # keeps the far edge of the window in place
            yield cause, form.of_parts(lambda part, shift=shift: part.change(shift=shift)).change(window=window)


def other_heads(form: Form) -> Iterator[Candidate]:
    """Candidates in which query heads read other KV heads."""
    heads, kv_heads = len(form.kv_heads), form.k.shape[1]
    cause = "query heads read the wrong KV head: head h belongs to KV head h // group, not "
    for text, wrong in (
        ("h % num_kv_heads", np.arange(heads) % kv_heads),
        ("h // num_kv_heads", np.minimum(np.arange(heads) // kv_heads, kv_heads - 1)),
        ("h % group", np.minimum(np.arange(heads) % (heads // kv_heads), kv_heads - 1)),
        ("always 0", np.zeros(heads, np.int64)),
    ):
        if not np.array_equal(wrong, form.kv_heads):
            yield cause + text, form.change(kv_heads=wrong)


def other_lengths(form: Form) -> Iterator[Candidate]:
    """Candidates with fewer or more keys: the results of kernels that drop the last keys or read past the end."""
    for block in sorted({*BLOCKS, form.page_size} - {1}):
        cause = f"the last keys are dropped, after a multiple of {block}"
        yield cause, form.of_parts(lambda part, block=block: cut(part, part.kv_len // block * block, least=block))
        yield cause, form.of_parts(lambda part, block=block: cut(part, part.kv_len // block * block))
        yield cause, form.of_parts(lambda part, block=block: part.as_long_as(part.kv_len // block * block))
        if form.kind == "lists":
            yield cause, form.of_parts(lambda part, block=block: cut(part, len(part.slots) // block * block))
            yield cause, form.of_parts(lambda part, block=block: without_tail(part, block))
    yield "the last key is dropped", form.of_parts(lambda part: cut(part, part.kv_len - 1))
    for size in sorted({1, form.page_size}):  # a kernel that reads page by page reads no slot after a full page
        cause = "one slot past the length is read as a key"
        yield cause, form.of_parts(lambda part, size=size: longer(form, part, size))
    for block in BLOCKS:
        cause = f"keys past the length are counted as zeros, up to a multiple of {block}: mask their logits by -inf"
        yield cause, form.of_parts(lambda part, block=block: filled(form, part, block))
    for number in sorted({0, len(form.parts) - 1} if form.kind == "paged" else ()):
        kv_len = form.parts[number].kv_len if form.parts else 0
        cause = f"every sequence has the length of sequence {number}"
        yield cause, form.of_parts(lambda part, kv_len=kv_len: part.as_long_as(kv_len))


def cut(part: Part, stop: int, least: int = 0) -> Part:
    """The part without the keys from `stop` on, if it has more than `least` keys. Queries keep their positions."""
    return part.without(np.arange(len(part.slots)) >= stop) if part.kv_len > least else part


def without_tail(part: Part, block: int) -> Part:
    """The part with its valid slots only, whose number is cut to a multiple of `block` if it exceeds `block`."""
    chosen = part.slots[: part.kv_len][part.slots[: part.kv_len] >= 0]
    stop = len(chosen) // block * block if len(chosen) > block else len(chosen)
    return part.change(slots=chosen, kv_len=stop)


def longer(form: Form, part: Part, size: int) -> Part:
    """The part with one more key, if it has keys. Queries keep their positions if the form is not causal."""
    if part.kv_len == 0 or (size > 1 and part.kv_len % size == 0):
        return part
    more = part.as_long_as(part.kv_len + 1)
    return more if form.causal else more.change(shift=part.kv_len - more.kv_len)


def filled(form: Form, part: Part, block: int) -> Part:
    """The part with keys of zeros added up to a multiple of `block`; unchanged if a causal mask would hide them."""
    stop = -(-part.kv_len // block) * block
    if form.causal and part.q_len > 1:
        return part
    zeros = np.full(stop - part.kv_len, form.zeros)
    more = part.change(slots=np.concatenate([part.slots[: part.kv_len], zeros]), kv_len=stop)
    return more.change(shift=0 if form.causal else part.kv_len - stop)


def other_pages(form: Form) -> Iterator[Candidate]:
    """Candidates with other pages: the results of kernels that read the wrong entry of the page table."""
    size = form.page_size

    def changed(entry: Any, part: Part) -> Part:
        """The part whose table entries are those at `entry(entries, last)`.

        `entries` are the indices of all entries, and `last` is the index of the last one in use.
        """
        entries, last = np.arange(len(part.slots) // size), -(-part.kv_len // size) - 1
        slots = part.slots.reshape(-1, size)
        return part.change(slots=slots[entry(entries, last)].reshape(-1) if len(slots) else part.slots)

    def of_pages(entry: Any) -> Form:
        return form.of_parts(lambda part: changed(entry, part))

    yield (
        "the last page of a sequence is a stale one: the page before it is read again",
        of_pages(lambda entries, last: np.where((entries == last) & (last > 0), last - 1, entries)),
    )
    yield (
        "the keys of the last page of a sequence are counted twice",
        form.of_parts(
            lambda part: part.change(times=1.0 + (np.arange(part.kv_len) // size == (part.kv_len - 1) // size))
        ),
    )
    yield "page 0 is read in place of the last page of a sequence", form.of_parts(lambda part: page_0(part, size))
    table = max((len(part.slots) // size for part in form.parts), default=0)
    for count in range(1, min(table, 9)):
        cause = f"the wrong page is read in sequences of more than {count} pages"
        yield cause, of_pages(lambda entries, last, count=count: entries % count)
        yield cause, of_pages(lambda entries, last, count=count: np.where(entries < count, entries, 0))
    yield from shifted_tables(form)
    yield "pages that the table lists twice are counted once", form.of_parts(once)
    yield "a page index outside the cache is read as page 0", form.of_parts(lambda part: outside(part, size))


def shifted_tables(form: Form) -> Iterator[Candidate]:
    """Candidates in which each entry of the page table is taken for the next or the previous one.

    A shifted row of the table lacks an entry at one end. There are four kinds of candidates: with the entry from the
    row's other end, with a second copy of the entry at this end, with no page, and with the entry of the neighbouring
    row, which a pointer into a contiguous table would reach.
    """
    size = form.page_size
    tables = [part.slots.reshape(-1, size) for part in form.parts]
    none = np.full((1, size), -1)
    for step, cause in (
        (1, "the next page is read in place of a page: the table is read one entry too far"),
        (-1, "the previous page is read in place of a page: the table is read one entry too early"),
    ):
        end = 0 if step > 0 else -1  # the entry of a row that a pointer from the neighbouring row reaches
        for ends in (
            [table[[end]] if len(table) else none for table in tables],
            [table[[-1 - end]] if len(table) else none for table in tables],
            [none for _ in tables],
            [tables[other][[end]] if 0 <= other < len(tables) and len(tables[other]) else none
             for other in range(step, len(tables) + step)],
        ):  # fmt: skip
            parts = [
                part.change(slots=np.concatenate([table[1:], edge] if step > 0 else [edge, table[:-1]]).reshape(-1))
                for part, table, edge in zip(form.parts, tables, ends, strict=True)
                if len(table)
            ]
            if len(parts) == len(tables):
                yield cause, form.change(parts=tuple(parts))


def page_0(part: Part, size: int) -> Part:
    """The part with page 0 of the cache in place of its last page, if it has several pages."""
    position, last = np.arange(len(part.slots)), -(-part.kv_len // size) - 1
    return part.change(slots=np.where((position // size == last) & (last > 0), position % size, part.slots))


def outside(part: Part, size: int) -> Part:
    """The part with page 0 in place of each page that is not in the cache."""
    return part.change(slots=np.where(part.slots < 0, np.arange(len(part.slots)) % size, part.slots))


def once(part: Part) -> Part:
    """The part with only the first occurrence of each slot."""
    first = np.zeros(len(part.slots), bool)
    first[np.unique(part.slots, return_index=True)[1]] = True
    return part.without(~first)


def other_lists(batch: Any, form: Form) -> Iterator[Candidate]:
    """Candidates with other index lists."""
    yield "an index that is listed twice is counted once", form.of_parts(once)
    nothing = "an index that selects nothing, such as -1, is "
    zeros = form.of_parts(lambda part: part.change(slots=np.where(part.slots < 0, form.zeros, part.slots)))
    yield nothing + "counted as a key of zeros: mask its logit by -inf", zeros
    selections = list(batch.selections()) if isinstance(batch, DecodeBatch) else [batch.selection]

    def listed(change: Any) -> Any:
        """The call with `change(indices, num_slots)` in place of each index array."""
        names = ("indices", "extra_indices")
        return batch.change(
            **{name: change(each.indices, each.num_slots) for name, each in zip(names, selections, strict=False)}
        )

    for text, read in (
        ("row 0", lambda index, size: 0 * index),
        ("a row, counted from the last one", lambda index, size: index % max(size, 1)),
        ("the nearest row", lambda index, size: index.clip(0, max(size - 1, 0))),
    ):
        for wrong in (
            lambda index, size: (index < 0) | (index >= size),
            lambda index, size: index < 0,
            lambda index, size: index == -1,
        ):
            yield (
                f"{nothing}read as {text}",
                listed(
                    lambda index, size, wrong=wrong, read=read: np.where(wrong(index, size), read(index, size), index)
                ),
            )
    yield "the last row of a cache is never read", listed(lambda index, size: np.where(index == size - 1, -1, index))
    ends = "a list ends at its first index that selects nothing"
    yield (
        ends,
        listed(
            lambda index, size: np.where(np.logical_or.accumulate((index < 0) | (index >= size), axis=-1), -1, index)
        ),
    )
    yield (
        "all KV heads or queries read the first one's list",
        listed(lambda index, size: np.broadcast_to(index[:, :1], index.shape)),
    )
    firsts = {
        name: np.broadcast_to(lens[:, :1], lens.shape)
        for name in ("topk_lens", "extra_topk_lens")
        if (lens := getattr(batch, name, None)) is not None and lens.ndim == 2
    }
    if firsts:
        yield "all lists have the length of the first query's list", batch.change(**firsts)
    if not isinstance(batch, DecodeBatch) or batch.extra_kv_cache is None:
        return
    none = dict.fromkeys(("extra_kv_cache", "extra_indices", "extra_topk_lens"))
    yield "the extra cache is ignored", batch.change(**none)
    yield "only the extra cache is read", batch.change(topk_lens=np.zeros(batch.num_seqs, np.int32))
    if batch.topk_lens is not None and batch.extra_topk_lens is not None:
        cause = "the lists of one cache have the lengths of the other cache's lists"
        yield cause, batch.change(extra_topk_lens=batch.topk_lens)
        yield cause, batch.change(topk_lens=batch.extra_topk_lens)
    first = form.sizes[0]
    cause = "the slots of the extra cache are read from the first cache"
    yield (
        cause,
        form.of_parts(
            lambda part: part.change(slots=np.where(part.slots >= first, (part.slots - first) % first, part.slots))
        ),
    )


def other_edges(batch: Any, form: Form) -> Iterator[Candidate]:
    """Candidates in which packed sequences have other keys."""
    last = form.sizes[0] - 1
    for text, step in (("early", -1), ("late", 1)):
        yield (
            f"the keys of a sequence are read one row too {text}",
            form.of_parts(
                lambda part, step=step: part.change(slots=np.where(part.slots + step > last, -1, part.slots + step))
            ),
        )
    yield "keys are found by cu_q_lens", batch.change(cu_kv_lens=batch.cu_q_lens)
    everything: dict[str, NDArray[np.int32]] = {
        name: np.array([0, len(rows)], np.int32) for name, rows in (("cu_q_lens", batch.q), ("cu_kv_lens", batch.k))
    }
    yield "sequences are not kept apart: queries see the keys of all sequences", batch.change(**everything)


def other_columns(form: Form) -> Iterator[Candidate]:
    """Candidates in which values or keys are other columns of the latent rows."""
    width, d_v = form.k.shape[2], form.v.shape[2]
    if d_v < width:
        yield "values are the last columns of a row, not the first", form.change(v=form.k[..., width - d_v :])
        cause = "the columns after d_v, such as the rotary ones, are left out of the logits"
        yield cause, form.change(q=np.where(np.arange(width) < d_v, form.q, 0.0))


def single_keys(form: Form) -> Iterator[Candidate]:
    """Candidates in which one key is left out or counted twice."""
    for key in range(max((part.kv_len for part in form.parts), default=0)):
        yield (
            f"key {key} is counted twice",
            form.of_parts(lambda part, key=key: part.change(times=1.0 + (np.arange(part.kv_len) == key))),
        )
        yield (
            f"key {key} is left out",
            form.of_parts(lambda part, key=key: part.without(np.arange(len(part.slots)) == key)),
        )
