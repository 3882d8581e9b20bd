"""Plain blockwise attention kernels in NumPy, as an outside author would write them, each with an optional fault.

A fault is named by a string; the empty string means no fault. Faults that all families share are planted in `online`,
the others in the functions of a family.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ragged_attention.testing.functions import FunctionRunner

BLOCK = 16


def online(q: Any, k: Any, v: Any, seen: Any, given: Any, fault: str) -> Any:
    """Out [g, D_v], the largest logit [g] and lse [g] of q [g, D] over keys [n, D], computed block by block."""
    scale = q.shape[-1] ** -0.5 if given.get("sm_scale") is None else given["sm_scale"]
    if fault == "unscaled" and given.get("sm_scale") is None:
        scale = 1.0
    if fault == "exp2":
        scale = scale * np.log(2)
    m, l = np.full(len(q), -np.inf), np.zeros(len(q))  # noqa: E741
    acc = np.zeros((len(q), v.shape[1]))
    stop = len(k) // BLOCK * BLOCK if fault == "dropped tail of a block" else len(k)
    for start in range(0, stop, BLOCK):
        block = slice(start, start + BLOCK)
        keys, values, mask = k[block], v[block], seen[block]
        if fault == "zeros in a tail":
            padding = BLOCK - len(keys)
            keys, values = (np.pad(array, ((0, padding), (0, 0))) for array in (keys, values))
            mask = np.pad(mask, (0, padding), constant_values=True)
        s = q @ keys.T * scale
        if given.get("soft_cap") is not None and fault != "soft cap":
            first = scale if fault == "cap before scale" else 1
            s = given["soft_cap"] * np.tanh(s / first / given["soft_cap"]) * first
        s[:, : len(k[block])] += given.get("bias", np.zeros(len(k)))[block]
        s = np.where(mask, s, -np.inf)
        if fault != "NaN":
            values = np.where(mask[:, None], values, 0)
        new = np.maximum(m, s.max(axis=1))
        base = np.where(new == -np.inf, 0, new)
        p, alpha = np.exp(s - base[:, None]), np.exp(m - base)
        l = l * (1 if fault in ("sum not rescaled", "nothing rescaled") else alpha) + p.sum(axis=1)  # noqa: E741
        acc = acc * (1 if fault in ("accumulator not rescaled", "nothing rescaled") else alpha[:, None]) + p @ values
        m = new
    lse = np.where(l == 0, np.inf if fault == "+inf" else -np.inf, np.where(m == -np.inf, 0, m) + np.log(l))
    return (
        acc / np.where((l == 0) & (fault != "0 / 0"), 1, l)[:, None],
        m,
        lse / np.log(2) if fault == "base 2" else lse,
    )


def finished(out: Any, lse: Any, given: Any, fault: str) -> Any:
    """Out [..., H, D_v] scaled for the sinks, given lse [..., H] over the keys alone."""
    sinks = given.get("sinks")
    if sinks is None or fault == "sinks":
        return out
    return np.where(lse == -np.inf, 0, 1 / (1 + np.exp(sinks - lse)))[..., None] * out


def kv_head_of(head: int, heads: int, kv_heads: int, fault: str) -> int:
    if fault == "h % num_kv_heads":
        return head % kv_heads
    if fault == "h // num_kv_heads":
        return min(head // kv_heads, kv_heads - 1)
    return head // (heads // kv_heads)


def mask_of(q_len: int, kv_len: int, row: int, given: Any, fault: str, causal: bool) -> Any:
    """The mask [kv_len] of the keys that one query of a sequence sees."""
    key, place = np.arange(kv_len), kv_len - q_len + row
    seen = np.ones(kv_len, bool)
    if causal and fault != "not causal":
        seen &= key <= {"top left": row, "later key": place + 1, "own key hidden": place - 1}.get(fault, place)
    if (window := given.get("sliding_window")) is not None:
        width = window + {"window too wide": 1, "window too narrow": -1}.get(fault, 0)
        seen &= key > place - width
    return seen


def bias_of(kv_len: int, place: int, head: int, given: Any, fault: str) -> dict[str, Any]:
    """The argument `bias`, which holds the ALiBi biases of the query at position `place`, if the call has slopes."""
    if given.get("alibi_slopes") is None or fault == "slopes":
        return {}
    slope = given["alibi_slopes"][head] * (-1 if fault == "slope sign" else 1)
    return {"bias": slope * (np.arange(kv_len) - place)}


def sequence(q: Any, k: Any, v: Any, given: Any, fault: str, causal: bool, valid: Any = True) -> Any:
    """Out [n, H, D_v] and lse [n, H] of one sequence with queries [n, H, D] and keys [m, K, D]."""
    out, lse = np.zeros((*q.shape[:2], v.shape[2])), np.full(q.shape[:2], -np.inf)
    for row in range(len(q)):
        seen = mask_of(len(q), len(k), row, given, fault, causal) & valid
        for head in range(q.shape[1]):
            kv_head = kv_head_of(head, q.shape[1], k.shape[1], fault)
            biased = given | bias_of(len(k), len(k) - len(q) + row, head, given, fault)
            results = online(q[row, head][None], k[:, kv_head], v[:, kv_head], seen, biased, fault)
            out[row, head], lse[row, head] = results[0][0], results[2][0]
    return finished(out, lse, given, fault), lse


def positions(table: Any, kv_len: int, pages: Any, fault: str) -> Any:
    """The slots of a sequence's positions, and the mask of valid positions."""
    size, kv_len = pages.shape[1], min(max(int(kv_len), 0), len(table) * pages.shape[1])
    if fault == "dropped tail of a page":
        kv_len = kv_len // size * size
    if fault == "one past" and kv_len and kv_len < len(table) * size:
        kv_len += 1
    listed = np.array(table[: -(-kv_len // size)], np.int64)
    if fault == "stale page" and len(listed) > 1:
        listed[-1] = listed[-2]
    if fault == "table one late":
        listed = np.append(table[1:], -1)[: len(listed)].astype(np.int64)
    if fault == "table one early":
        listed = np.insert(table, 0, table[0])[: len(listed)].astype(np.int64) if len(listed) else listed
    valid = np.repeat((listed >= 0) & (listed < len(pages)), size)[:kv_len]
    if fault == "page once":
        first = np.array([page not in listed[:index] for index, page in enumerate(listed)], bool)
        valid = valid & np.repeat(first, size)[:kv_len]
    listed = np.where((listed >= 0) & (listed < len(pages)), listed, 0)
    return np.repeat(listed, size)[:kv_len] * size + np.arange(kv_len) % size, valid


def over_pages(q: Any, k: Any, v: Any, given: Any, fault: str) -> Any:
    """Ragged attention of q [T, H, D] over pages [P, G, K, D]."""
    out, lse = np.zeros((*q.shape[:2], v.shape[3])), np.full(q.shape[:2], -np.inf)
    for seq, (table, kv_len) in enumerate(zip(given["page_indices"], given["kv_lens"], strict=True)):
        rows = slice(given["cu_q_lens"][seq], given["cu_q_lens"][seq + 1])
        slots, valid = positions(table, kv_len, k, fault)
        keys, values = (pages.reshape(-1, *pages.shape[2:])[slots] for pages in (k, v))
        out[rows], lse[rows] = sequence(q[rows], keys, values, given, fault, given.get("causal", True), valid)
    return out, lse


def ragged_paged_attention(given: Any, fault: str) -> Any:
    pages = given["kv_pages"]
    pages = pages if isinstance(pages, tuple) else (pages[:, :, 0::2], pages[:, :, 1::2])
    k, v = pages
    return over_pages(given["q"], k, v, given, fault)


def paged_attention(given: Any, fault: str) -> Any:
    k, v = (np.moveaxis(given[name], 0, 2) for name in ("k_pages", "v_pages"))
    tables = {"kv_lens": given["lengths"], "cu_q_lens": np.arange(len(given["q"]) + 1)}
    return over_pages(given["q"], k, v, given | tables, fault)[0]


def prefill_attention(given: Any, fault: str) -> Any:
    q, out = given["q"], np.zeros(given["q"].shape)
    k, v = (np.moveaxis(given[name], 0, 2) for name in ("k_pages", "v_pages"))
    length = min(int(np.asarray(given["length"]).reshape(())), len(given["page_indices"]) * k.shape[1])
    live = len(q) if given.get("align", "chunk") == "end" and fault != "align" else (length - 1) % len(q) + 1
    tables = {"kv_lens": [length], "page_indices": given["page_indices"][None], "cu_q_lens": [0, live]}
    out[:live] = over_pages(q[:live], k, v, given | tables, fault)[0]
    return out


def latent(given: Any, name: str, fault: str) -> Any:
    """The keys and values that a latent cache holds."""
    rows, d_v = given[name], given.get("d_v", 512)
    values = rows[..., rows.shape[-1] - d_v :] if fault == "last columns" else rows[..., :d_v]
    keys = rows * (np.arange(rows.shape[-1]) < d_v) if fault == "no rope" else rows
    return keys, values


def ragged_mla_attention(given: Any, fault: str) -> Any:
    k, v = latent(given, "kv_cache", fault)
    return over_pages(given["q"], k, v, given, fault)


def listed(q: Any, caches: Any, given: Any, fault: str) -> Any:
    """Attention of one query [H, D] over listed rows; each of `caches` is (keys, values, list, its length)."""
    keys, values, seen = [], [], []
    for k, v, indices, length in caches:
        chosen = indices[: max(min(int(length), len(indices)), 0)].astype(np.int64)
        inside = (chosen >= 0) & (chosen < len(k))
        if fault == "-1 read":
            chosen, inside = np.where(inside, chosen, 0), np.ones_like(inside)
        if fault == "list ends":
            inside &= ~np.logical_or.accumulate(~inside)
        if fault == "index once":
            inside &= np.isin(np.arange(len(chosen)), np.unique(chosen, return_index=True)[1])
        rows = np.where(inside, chosen, len(k))
        padded = [np.pad(array, ((0, 1), (0, 0)))[rows] for array in (k, v)]
        if fault == "-1 is a key of zeros":
            inside = np.ones_like(inside)
        keys.append(padded[0])
        values.append(padded[1])
        seen.append(inside)
    return online(q, np.concatenate(keys), np.concatenate(values), np.concatenate(seen), given, fault)


def lens_of(given: Any, name: str, lists: Any, fault: str) -> Any:
    lens = given.get(name)
    if lens is None or fault == f"{name} ignored":
        return np.full(lists.shape[:-1], lists.shape[-1])
    return np.broadcast_to(lens.reshape(*lens.shape, *(1,) * (lists.ndim - 1 - lens.ndim)), lists.shape[:-1])


def mla_decode(given: Any, fault: str) -> Any:
    q, d_v = given["q"], given.get("d_v", 512)
    seqs, queries, heads = q.shape[:3]
    if "indices" not in given:
        tables = {"cu_q_lens": np.arange(seqs + 1) * queries, "causal": given.get("causal", False)}
        keys, values = latent(given, "kv_cache", fault)
        out, lse = over_pages(q.reshape(-1, *q.shape[2:]), keys, values, given | tables, fault)
        return out.reshape(*q.shape[:3], d_v), np.swapaxes(lse.reshape(seqs, queries, heads), 1, 2)
    caches = [("kv_cache", "indices", "topk_lens")]
    if "extra_kv_cache" in given and fault != "extra ignored":
        caches.append(("extra_kv_cache", "extra_indices", "extra_topk_lens"))
    out, lse = np.zeros((*q.shape[:3], d_v)), np.zeros(q.shape[:3])
    for seq in range(seqs):
        for query in range(queries):
            lists = [
                (*(array.reshape(-1, array.shape[-1]) for array in latent(given, cache, fault)),
                 given[indices][seq, query], lens_of(given, lens, given[indices], fault)[seq, query])
                for cache, indices, lens in caches
            ]  # fmt: skip
            out[seq, query], _, lse[seq, query] = listed(q[seq, query], lists, given, fault)
    return finished(out, lse, given, fault), np.swapaxes(lse, 1, 2)


def sparse_mla_prefill(given: Any, fault: str) -> Any:
    q, lists = given["q"], given["indices"]
    keys, values = (array.reshape(-1, *array.shape[-2:]) for array in latent(given, "kv", fault))
    out, top, lse = np.zeros((*q.shape[:2], values.shape[2])), np.zeros(q.shape[:2]), np.zeros(q.shape[:2])
    lens, group = lens_of(given, "topk_lens", lists, fault), q.shape[1] // lists.shape[1]
    for token, kv_head in np.ndindex(*lists.shape[:2]):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        caches = [(keys[:, kv_head], values[:, kv_head], lists[token, kv_head], lens[token, kv_head])]
        out[token, heads], top[token, heads], lse[token, heads] = listed(q[token, heads], caches, given, fault)
    return finished(out, lse, given, fault), top, lse


def varlen_attention(given: Any, fault: str) -> Any:
    q, k, v = given["q"], given["k"], given["v"]
    out, lse = np.zeros((*q.shape[:2], v.shape[2])), np.full(q.shape[:2], -np.inf)
    for seq in range(len(given["cu_q_lens"]) - 1):
        rows = slice(*given["cu_q_lens"][seq : seq + 2])
        start, stop = given["cu_q_lens" if fault == "edges of q" else "cu_kv_lens"][seq : seq + 2]
        stop = min(stop + (fault == "one past"), len(k))
        start = max(start - (fault == "one early"), 0)
        stop = stop - (fault == "one early")
        out[rows], lse[rows] = sequence(q[rows], k[start:stop], v[start:stop], given, fault, given.get("causal", False))
    return out, lse


ATTENTIONS: dict[str, Callable[[Any, str], Any]] = {
    each.__name__: each
    for each in (
        ragged_paged_attention, paged_attention, prefill_attention, ragged_mla_attention, mla_decode,
        sparse_mla_prefill, varlen_attention,
    )
}  # fmt: skip
INTEGERS = "iub"
UNKNOWN = ("num_seqs", "draft_mask", "q_scale", "k_scale", "v_scale", "kv_scale")


def why_not(operation: str, record: Any) -> str | None:
    """Why the kernels do not support a call, or None: they lack quantised caches and the options in UNKNOWN."""
    del operation
    given = record.arguments()
    if unknown := [name for name in UNKNOWN if given.get(name) is not None]:
        return f"does not know {unknown[0]}"
    caches = [given.get(name) for name in ("kv_pages", "k_pages", "v_pages", "kv_cache", "kv", "extra_kv_cache")]
    arrays = [array for cache in caches for array in (cache if isinstance(cache, tuple) else (cache,))]
    if any(array is not None and array.itemsize == 1 for array in arrays):
        return "does not know quantised caches"
    return None


def runner_of(operation: str, fault: str = "") -> FunctionRunner:
    """A runner for an operation's kernel, with the named fault, or without a fault if `fault` is the empty string."""

    def kernel(**given: Any) -> Any:
        wide = {
            name: tuple(map(widened, value)) if isinstance(value, tuple) else widened(value)
            for name, value in given.items()
        }
        with np.errstate(all="ignore"):
            return ATTENTIONS[operation](wide, fault)

    return runner_around(operation, kernel)


def runner_around(operation: str, kernel: Callable[..., Any]) -> FunctionRunner:
    """A runner that calls any function as the kernel of an operation."""
    return FunctionRunner(framework="numpy", backend=operation, functions={operation: kernel}, why_not=why_not)


def widened(value: Any) -> Any:
    return value.astype(np.float64) if isinstance(value, np.ndarray) and value.dtype.kind not in INTEGERS else value
