"""Attention on a CPU while the memory of most unseen keys is protected: reading an unseen key crashes the process.

`python -m tests.programs.unseen_keys OPERATION MASK` prints "well" for the masks `ranges` and `lists`. With `causal`
the queries see all keys, so the process crashes.
"""

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ragged_attention.testing import agrees
from ragged_attention.torch import ragged_mla_attention, ragged_paged_attention, varlen_attention

QUERIES, KEYS, PREFIX, WINDOW, PAGE_SIZE, BLOCK = 16, 1024, 64, 48, 16, 8
UNSEEN = (256, 768)  # a range of keys that no query sees, and whose tiles contain only unseen keys
TABLES = {
    "kv_lens": torch.tensor([KEYS]).int(),
    "page_indices": torch.arange(KEYS // PAGE_SIZE).int()[None],
    "cu_q_lens": torch.tensor([0, QUERIES]).int(),
}
ALL = torch.tensor([0, KEYS]).int()
Function = Callable[..., Any]


class Rows:
    """A tensor with a row of random floats for each key, in its own memory mapping."""

    def __init__(self, *shape: int) -> None:
        size = torch.Size((KEYS, *shape)).numel()
        self._memory = mmap.mmap(-1, 4 * size)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.float32, count=size).view(KEYS, *shape)
        self.tensor.copy_(torch.randn(KEYS, *shape, generator=torch.Generator().manual_seed(0)))

    @contextlib.contextmanager
    def unreadable(self) -> Iterator[None]:
        """Protect the memory of the UNSEEN keys from reads within the context."""
        start, row = self.tensor.data_ptr(), 4 * self.tensor[0].numel()
        first, stop = (start + row * key for key in UNSEEN)
        first, stop = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        if protect(first, stop - first, 0):
            raise OSError(ctypes.get_errno(), "mprotect failed")
        try:
            yield
        finally:
            protect(first, stop - first, mmap.PROT_READ | mmap.PROT_WRITE)


def queries(heads: int, width: int) -> torch.Tensor:
    return torch.randn(QUERIES, heads, width, generator=torch.Generator().manual_seed(1))


def paged() -> tuple[Function, list[Rows]]:
    kv, q = Rows(4, 64), queries(4, 64)
    pages = kv.tensor.view(-1, PAGE_SIZE, 4, 64)
    return lambda **given: ragged_paged_attention(q, pages, **TABLES, **given), [kv]


def latent() -> tuple[Function, list[Rows]]:
    kv, q = Rows(1, 576), queries(4, 576)
    return lambda **given: ragged_mla_attention(q, kv.tensor.view(-1, PAGE_SIZE, 1, 576), **TABLES, **given), [kv]


def packed() -> tuple[Function, list[Rows]]:
    k, v, q = Rows(2, 64), Rows(2, 64), queries(4, 64)
    return lambda **given: varlen_attention(q, k.tensor, v.tensor, TABLES["cu_q_lens"], ALL, **given), [k, v]


def gradient() -> tuple[Function, list[Rows]]:
    k, v, q, towards = Rows(2, 64), Rows(2, 64), queries(4, 64), queries(4, 64)
    leaves = q.requires_grad_(), k.tensor.requires_grad_(), v.tensor.requires_grad_()

    def gradients(**given: Any) -> torch.Tensor:
        out = varlen_attention(q, k.tensor, v.tensor, TABLES["cu_q_lens"], ALL, **given)
        found = torch.autograd.grad(out, leaves, towards)
        return torch.cat([each.flatten() for each in found])

    return gradients, [k, v]


OPERATIONS = {"paged": paged, "latent": latent, "packed": packed, "gradient": gradient}


def ranges() -> dict[str, Any]:
    position = torch.arange(KEYS - QUERIES, KEYS)
    prefix = torch.tensor([[0, PREFIX]]).expand(QUERIES, 2)
    window = torch.stack([position - WINDOW + 1, position + 1], -1)
    return {"key_ranges": torch.stack([prefix, window], 1).int()}


def lists() -> dict[str, Any]:
    """For each query a list of one block of the prefix and one block of the window."""
    query = torch.arange(QUERIES)[:, None]
    named = torch.cat([query % (PREFIX // BLOCK), KEYS // BLOCK - 1 - query % (WINDOW // BLOCK)], 1)
    return {"selected": named[:, None].int(), "block_size": BLOCK, "causal": True}


MASKS: dict[str, Callable[[], dict[str, Any]]] = {"ranges": ranges, "lists": lists, "causal": lambda: {"causal": True}}


def main(name: str, kind: str) -> None:
    function, rows = OPERATIONS[name]()
    mask = MASKS[kind]()
    expected = function(**mask, backend="reference")
    with contextlib.ExitStack() as stack:
        for each in rows:
            stack.enter_context(each.unreadable())
        found = function(**mask, backend="numba")
    print("well" if agrees(found, expected, "float32") else "wrong")


if __name__ == "__main__":
    main(*sys.argv[1:])
