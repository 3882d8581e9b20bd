"""A partial backend: a NumPy decode of bfloat16 over pages of 16 slots, with an optional planted fault."""

import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

import numpy as np
import pytest

from ragged_attention import dispatch
from ragged_attention.testing.runner import Runner, runner_for

PAGE_SIZE = 16
FEATURES = frozenset({"sm_scale", "sliding_window", "soft_cap", "return_lse"})
FAULTS = (
    "window one too wide", "window one too narrow", "stale page", "unscaled softmax", "dropped tail",
    "first key dropped", "wrong head of a group", "NaN of unused slots", "key counted twice",
    "page listed twice counted once", "lse in base 2", "wrong page of a long sequence", "soft cap forgotten",
    "length of another sequence", "output scaled", "slots past the length", "unlisted page",
)  # fmt: skip


def why_not(call: Any) -> str | None:
    """Why the backend does not support a call, or None.

    It supports one dtype, one page size, two head sizes, one layout and one query per sequence.
    """
    if isinstance(call.kv_pages, tuple):
        return "takes K and V in one array"
    for array in (call.q, call.kv_pages):
        if (dtype := str(array.dtype).rpartition(".")[2]) != "bfloat16":
            return f"takes bfloat16, got {dtype}"
    if call.kv_pages.shape[1] != PAGE_SIZE:
        return f"takes pages of {PAGE_SIZE} slots, got {call.kv_pages.shape[1]}"
    if call.q.shape[2] not in (64, 128):
        return f"takes head_dim 64 or 128, got {call.q.shape[2]}"
    if call.q.shape[0] != call.kv_lens.shape[0]:
        return "takes one query per sequence"
    return None


def decode(fault: str) -> Callable[..., Any]:
    """The kernel with a fault, or the correct kernel if `fault` is the empty string."""

    def attend(**arguments: Any) -> Any:
        q, pages, table = arguments["q"], arguments["kv_pages"], arguments["page_indices"]
        out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
        for seq in range(len(q)):
            if arguments["cu_q_lens"][seq + 1] > arguments["cu_q_lens"][seq]:
                length = arguments["kv_lens"][0 if fault == "length of another sequence" else seq]
                row = arguments["cu_q_lens"][seq]
                out[row], lse[row] = one(q[row], pages, table[seq], int(length), arguments)
        if fault == "output scaled":
            out = out * 1.25
        if fault == "lse in base 2":
            lse = lse / np.log(2)
        return (out, lse) if arguments.get("return_lse") else out

    def one(q: Any, pages: Any, table: Any, length: int, arguments: Any) -> Any:
        length = min(max(length, 0), len(table) * PAGE_SIZE)
        count = -(-length // PAGE_SIZE)
        listed = np.array(table[:count])
        if fault == "stale page" and count > 1:
            listed[-1] = listed[-2]
        if fault == "unlisted page" and count > 1:
            listed[1] = next((page for page in range(len(pages)) if page not in arguments["page_indices"]), listed[1])
        if fault == "wrong page of a long sequence" and count > 2:
            listed[2:] = listed[0]
        valid = np.repeat((listed >= 0) & (listed < len(pages)), PAGE_SIZE)
        slots = pages[np.where((listed >= 0) & (listed < len(pages)), listed, 0)].reshape(-1, *pages.shape[2:])
        position = np.arange(len(slots))
        seen = valid & (position < length + (fault == "slots past the length"))
        if fault == "dropped tail" and length > 8:
            seen &= position < length // 8 * 8
        if fault == "first key dropped" and length > 1:
            seen &= position > 0
        if (window := arguments.get("sliding_window")) is not None:
            width = window + (fault == "window one too wide") - (fault == "window one too narrow")
            seen &= position >= length - width
        weight = np.ones(len(slots))
        if fault == "key counted twice" and count > 1:
            weight[PAGE_SIZE] = 2
        if fault == "page listed twice counted once":
            first = {page: index for index, page in reversed([*enumerate(listed.tolist())])}
            is_first = np.array([first[page] == index for index, page in enumerate(listed.tolist())], bool)
            seen &= np.repeat(is_first, PAGE_SIZE)
        scale = arguments.get("sm_scale")
        scale = (1.0 if fault == "unscaled softmax" else q.shape[-1] ** -0.5) if scale is None else scale
        return heads(
            q, slots, seen, weight, scale, None if fault == "soft cap forgotten" else arguments.get("soft_cap")
        )

    def heads(q: Any, slots: Any, seen: Any, weight: Any, scale: float, cap: float | None) -> Any:
        num_kv_heads = slots.shape[1] // 2
        out, lse = np.zeros(q.shape), np.full(len(q), -np.inf)
        if not seen.any():
            return out, lse
        used = np.arange(len(slots)) if fault == "NaN of unused slots" else np.flatnonzero(seen)
        for head in range(len(q)):
            kv_head = head % num_kv_heads if fault == "wrong head of a group" else head * num_kv_heads // len(q)
            keys, values = slots[used, 2 * kv_head], slots[used, 2 * kv_head + 1]
            logits = keys @ q[head] * scale
            logits = logits if cap is None else cap * np.tanh(logits / cap)
            logits = np.where(seen[used], logits, -np.inf)
            highest = logits.max()
            p = weight[used] * np.exp(logits - highest)
            out[head], lse[head] = p @ values / p.sum(), highest + np.log(p.sum())
        return out, lse

    return attend


def plant(monkeypatch: pytest.MonkeyPatch, fault: str = "") -> Runner:
    """A runner of the backend, with the named fault, or without a fault if `fault` is the empty string."""

    def run(call: Any, tile: Any, launch: Any) -> Any:
        del tile
        return launch.on_host(decode(fault), call, call.results())

    return announce(monkeypatch, "ragged_paged_attention", FEATURES=FEATURES, why_not=why_not, run=run)


def announce(monkeypatch: pytest.MonkeyPatch, operation: str, **names: Any) -> Runner:
    """A runner of a backend with one operation, registered like the backend of another distribution."""
    package, module = types.ModuleType("partial_room"), types.ModuleType(f"partial_room.{operation}")
    package.__path__ = []  # type: ignore[attr-defined]
    package.__spec__ = ModuleSpec(package.__name__, None, is_package=True)
    module.__spec__ = ModuleSpec(module.__name__, None)
    vars(module).update(names)
    for each in (package, module):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.setattr(dispatch, "third_party_packages", lambda: {"partial": package.__name__})
    dispatch.load.cache_clear()
    return runner_for("partial", "torch")
