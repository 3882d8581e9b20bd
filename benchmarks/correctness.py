"""Right before fast: whether a backend's result on a case is what the definition says.

At full size the definition would take hours, so some rows of some sequences are checked: their keys are gathered from
the very inputs of the run and given to the definition in float64.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.cases.catalogue import AnyCase
from benchmarks.cases.mla import LatentCase
from benchmarks.cases.paged import Case
from benchmarks.cases.varlen import VarlenCase
from ragged_attention.reference.mla_decode import mla_decode
from ragged_attention.reference.ragged_paged_attention import ragged_paged_attention as definition
from ragged_attention.reference.ragged_paged_attention import visible
from ragged_attention.reference.varlen_attention import varlen_attention
from ragged_attention.reference.varlen_attention_backward import attend_backward, row_terms
from ragged_attention.testing.compare import agrees

ROWS = 4  # checked per span


@dataclasses.dataclass(frozen=True)
class Span:
    """Rows [start, stop) of the batch, of sequence `seq`, the last of which sees `kv_len` keys."""

    seq: int
    start: int
    stop: int
    kv_len: int


def spans(case: Case | VarlenCase, sequences: int = 3) -> Iterator[Span]:
    """The first, the last and some middle sequences; of each the first and the last rows."""
    starts = np.concatenate([[0], np.cumsum(case.q_lens)])
    count = len(case.q_lens)
    for seq in sorted({*np.linspace(0, count - 1, min(sequences, count)).astype(int), int(np.argmax(case.q_lens))}):
        q_len, kv_len = case.q_lens[seq], case.kv_lens[seq]
        first = min(ROWS, q_len)
        for begin in sorted({0, q_len - first}):
            end = begin + first
            yield Span(int(seq), int(starts[seq]) + begin, int(starts[seq]) + end, kv_len - q_len + end)


def check(case: AnyCase, inputs: dict[str, Any], out: Any, to_numpy: Any) -> None:
    """Raise AssertionError where `out`, of a gradient's case the gradients, is not what the definition gives.

    `to_numpy` copies arrays to the host: floats as float64, 8-bit floats as their bits.
    """
    if isinstance(case, VarlenCase):
        check_some = _check_gradients if case.backward else _check_varlen
        check_some(case, inputs, out, to_numpy)
    elif isinstance(case, LatentCase):
        _check_latents(case, inputs, out, to_numpy)
    else:
        _check_pages(case, inputs, out, to_numpy)


def _check_pages(case: Case, inputs: dict[str, Any], out: Any, to_numpy: Any) -> None:
    page_indices = to_numpy(inputs["page_indices"])
    for span in spans(case):
        pages = page_indices[span.seq, : -(-span.kv_len // case.page_size)].astype(np.int64)
        want = definition(
            to_numpy(inputs["q"][span.start : span.stop]),
            _gathered(inputs["kv_pages"], pages, to_numpy),
            [span.kv_len],
            np.arange(len(pages), dtype=np.int32)[None],
            [0, span.stop - span.start],
            sinks=to_numpy(inputs["sinks"]) if case.sinks else None,
            sliding_window=case.sliding_window,
            soft_cap=case.soft_cap,
            k_scale=case.scale,
            v_scale=case.scale,
            cache_dtype=case.stored,
        )
        got = to_numpy(out[span.start : span.stop])
        agrees(got, want, case.dtype, f"{case.name}, sequence {span.seq}, rows {span.start} to {span.stop - 1}")


def _sequence(case: VarlenCase, seq: int) -> tuple[slice, slice]:
    """The query tokens and the keys of a sequence."""
    rows, keys = (slice(sum(lens[:seq]), sum(lens[: seq + 1])) for lens in (case.q_lens, case.kv_lens))
    return rows, keys


def _check_varlen(case: VarlenCase, inputs: dict[str, Any], out: Any, to_numpy: Any) -> None:
    for span in spans(case):
        rows, (_, keys) = slice(span.start, span.stop), _sequence(case, span.seq)
        if case.causal:
            keys = slice(keys.start, keys.start + max(span.kv_len, 0))
        elif case.sliding_window:  # which counts from a query's position, so that all must be there
            rows, _ = _sequence(case, span.seq)
        arrays = {name: to_numpy(inputs[name][keys]) for name in ("k", "v")}
        want, _ = varlen_attention(
            to_numpy(inputs["q"][rows]),
            **arrays,
            cu_q_lens=[0, rows.stop - rows.start],
            cu_kv_lens=[0, keys.stop - keys.start],
            sinks=to_numpy(inputs["sinks"]) if case.sinks else None,
            **case.options(),
        )
        kind = case.dtype if case.dtype == "float32" else "varlen out"
        what = f"{case.name}, sequence {span.seq}, rows {rows.start} to {rows.stop - 1}"
        agrees(to_numpy(out[rows]), want, kind, what)


def _check_gradients(case: VarlenCase, inputs: dict[str, Any], out: Any, to_numpy: Any) -> None:
    """dq of some rows of a sequence's first and last head, and dk and dv of some keys that these see."""
    kind = case.dtype if case.dtype == "float32" else "gradient"
    for seq in sorted({0, len(case.q_lens) - 1, int(np.argmax(case.q_lens))}):
        for kv_head in sorted({0, case.num_kv_heads - 1}):
            for name, got, want in _some_gradients(case, inputs, out, seq, kv_head, to_numpy):
                agrees(got, want, kind, f"{case.name}, {name} of sequence {seq}, KV head {kv_head}")


def _some_gradients(
    case: VarlenCase, inputs: dict[str, Any], out: Any, seq: int, kv_head: int, to_numpy: Any
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(name, what is there, what the definition gives) of the ends of a sequence, for one KV head's group."""
    rows, keys = _sequence(case, seq)
    q_len, kv_len = case.q_lens[seq], case.kv_lens[seq]
    group = case.num_q_heads // case.num_kv_heads
    seen = visible(q_len, kv_len, np.ones(kv_len, bool), case.causal, case.sliding_window)
    k, v = (to_numpy(inputs[name][keys, kv_head]) for name in ("k", "v"))
    some_rows, some_keys = (sorted({*range(min(ROWS, n)), *range(max(0, n - ROWS), n)}) for n in (q_len, kv_len))
    dk, dv = np.zeros((len(some_keys), case.head_dim)), np.zeros((len(some_keys), case.d_v))
    for head in range(kv_head * group, (kv_head + 1) * group):
        one = slice(head, head + 1)
        arrays = {name: to_numpy(inputs[name][rows, one]) for name in ("d_out", "q", "out", "lse")}
        d_lse = to_numpy(inputs["d_lse"][rows, one]) if case.d_lse else None
        sinks = to_numpy(inputs["sinks"][one]) if case.sinks else None
        terms = row_terms(arrays["d_out"], arrays["out"], arrays["lse"], d_lse, sinks)[:3]
        share, delta, d_lse = (term[:, 0] for term in terms)
        d_out, q, lse = (arrays[name][:, 0] for name in ("d_out", "q", "lse"))
        options = (case.head_dim**-0.5, case.soft_cap)
        want = attend_backward(
            d_out[some_rows], q[some_rows], k, v, seen[some_rows], lse[some_rows], share[some_rows],
            delta[some_rows], d_lse[some_rows], *options,
        )[0]  # fmt: skip
        yield f"dq of head {head}", to_numpy(out[0][rows, head])[some_rows], want
        _, more_dk, more_dv = attend_backward(
            d_out, q, k[some_keys], v[some_keys], seen[:, some_keys], lse, share, delta, d_lse, *options
        )
        dk, dv = dk + more_dk, dv + more_dv
    for name, got, want in (("dk", out[1], dk), ("dv", out[2], dv)):
        yield name, to_numpy(got[keys, kv_head])[some_keys], want


def latent_queries(case: LatentCase) -> Iterator[tuple[int, int]]:
    """(sequence, query token): the first, a middle and the last of both."""
    for seq in sorted({0, case.num_seqs // 2, case.num_seqs - 1}):
        for token in sorted({0, case.num_q_tokens // 2, case.num_q_tokens - 1}):
            yield seq, token


def _check_latents(case: LatentCase, inputs: dict[str, Any], out: Any, to_numpy: Any) -> None:
    kind = f"{'prefill' if case.prefill else 'decode'} out" if case.dtype != "float32" else case.dtype
    for seq, token in latent_queries(case):
        index = token if case.prefill else (seq, token)
        caches = []
        for prefix in ("", "extra_") if case.extra_topk else ("",):
            cache = inputs["kv" if case.prefill else f"{prefix}kv_cache"]
            slots = _seen_slots(case, inputs, prefix, seq, token, to_numpy)
            caches.append(_gathered_rows(cache, slots, to_numpy))
        (cache, slots), *extra = caches
        second = {"extra_kv_cache": extra[0][0], "extra_indices": extra[0][1]} if extra else {}
        want, _ = mla_decode(
            to_numpy(inputs["q"][index])[None, None],
            cache,
            indices=slots,
            d_v=case.d_v,
            sinks=to_numpy(inputs["sinks"]) if case.sinks else None,
            **second,
        )
        agrees(to_numpy(out[index]), want[0, 0], kind, f"{case.name}, sequence {seq}, query {token}")


def _seen_slots(case: LatentCase, inputs: Any, prefix: str, seq: int, token: int, to_numpy: Any) -> np.ndarray:
    """The slots of the keys that one query sees."""
    if case.topk:
        lists = inputs[f"{prefix}indices"]
        slots = to_numpy(lists[token, 0] if case.prefill else lists[seq, token]).astype(np.int64)
        return slots[slots >= 0]
    positions = np.arange(case.kv_len - (case.num_q_tokens - 1 - token if case.causal else 0))
    pages = to_numpy(inputs["page_indices"][seq]).astype(np.int64)
    return pages[positions // case.page_size] * case.page_size + positions % case.page_size


def _gathered_rows(cache: Any, slots: np.ndarray, to_numpy: Any) -> tuple[np.ndarray, np.ndarray]:
    """The pages that slots lie in, as a cache of their own, and a list of the slots in it."""
    page_size = cache.shape[1] if len(cache.shape) == 4 else 1
    pages, order = np.unique(slots // page_size, return_inverse=True)
    gathered = to_numpy(_index(cache, pages))
    if len(cache.shape) == 3:
        gathered = gathered[:, None]
    return gathered, (order * page_size + slots % page_size)[None, None].astype(np.int32)


def _gathered(kv_pages: Any, pages: np.ndarray, to_numpy: Any) -> Any:
    def take(array: Any) -> np.ndarray:
        return to_numpy(_index(array, pages))

    return tuple(map(take, kv_pages)) if isinstance(kv_pages, tuple | list) else take(kv_pages)


def _index(array: Any, pages: np.ndarray) -> Any:
    """`array[pages]` in either framework; 8-bit floats as their bits, for not every device can index them."""
    if type(array).__module__.partition(".")[0] != "torch":
        return array[pages]
    import torch

    index = torch.from_numpy(pages).to(array.device)
    if array.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return array.view(torch.uint8)[index].view(array.dtype)
    return array[index]
