"""Operands whose element offsets exceed 32 bits, for every operation that reads strides.

Their memory is mapped, but almost none of it is touched. Each operand is preceded by 2**31 elements of zeros. An offset
that wraps around to a negative number therefore reads zeros and does not crash the process.
"""

import functools
import mmap
from collections.abc import Callable, Mapping
from typing import Any

import torch

import ragged_attention.torch as rt
from tests.tensors import ints

FAR = 2**31  # in elements: the first offset that int32 cannot hold


def unread(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros that takes no memory until it is written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)  # new in Python 3.13
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags=flags), dtype=dtype)


def far(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """A copy whose first and last entries along `axis` are 2**31 elements apart; its stride is below 2**31."""
    step = -(-FAR // (tensor.shape[axis] - 1) // 64) * 64
    assert tensor.numel() < step < FAR
    memory = unread(2 * FAR + 64 * tensor.shape[axis] + tensor.numel(), tensor.dtype)
    strides = [step if index == axis else stride for index, stride in enumerate(tensor.contiguous().stride())]
    return memory.as_strided(tensor.shape, strides, FAR).copy_(tensor)


def can_be_far(tensor: torch.Tensor, axis: int) -> bool:
    return tensor.shape[axis] > 2 and axis < max(tensor.dim() - 1, 1)


def along(value: Any, axis: int) -> Any:
    """A copy of an argument whose tensors, if they have the axis, have far-apart entries along it."""
    if isinstance(value, tuple):
        return tuple(along(item, axis) for item in value)
    if isinstance(value, torch.Tensor) and axis < value.dim() and can_be_far(value, axis):
        return far(value, axis)
    return value.clone() if isinstance(value, torch.Tensor) else value


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) * 7 + shape[0])).bfloat16()


def entries(*shape: int, below: int) -> torch.Tensor:
    return torch.randint(0, below, shape, dtype=torch.int32, generator=torch.Generator().manual_seed(5))


TABLES = {
    "page_indices": ints([4, 1], [0, 3], [2, 5]),
    "kv_lens": ints(7, 5, 6),
    "cu_q_lens": ints(0, 2, 3, 5),
}
PAGES = normal(6, 4, 6, 16)
SPLIT_PAGES = (normal(6, 4, 3, 16), normal(6, 4, 3, 16))
HEADS_FIRST = {name: normal(3, 6, 4, 16) for name in ("k_pages", "v_pages")}
CODES = (torch.arange(3 * 6 * 4 * 16).reshape(3, 6, 4, 16) % 17).to(torch.int8)
SCALES = torch.rand(3, 6, 4, 1, generator=torch.Generator().manual_seed(2))
SCALED = dict.fromkeys(("k_pages", "v_pages"), (CODES, SCALES))
PACKED = {"q": normal(5, 6, 16), "k": normal(7, 3, 16), "v": normal(7, 3, 16)}
PACKED |= {"cu_q_lens": ints(0, 2, 5), "cu_kv_lens": ints(0, 3, 7)}
SPARSE = {"q": normal(3, 6, 96), "kv": normal(24, 3, 96), "indices": entries(3, 3, 9, below=24), "d_v": 64}
SPARSE |= {"topk_lens": ints(9, 7, 4)}
INDEXED = {"q": normal(14, 6, 32), "weights": normal(14, 6).float(), **TABLES, "cu_q_lens": ints(0, 7, 8, 14)}
FEW_INDEXED = {"q": normal(5, 6, 32), "weights": normal(5, 6).float(), **TABLES}
PACKED_KEYS = {"keys": normal(24, 32), "key_scale": normal(24).float()}
PAGED_KEYS = {"keys": normal(6, 4, 32), "key_scale": normal(6, 4).float()}
BLOCKS = {"q": normal(14, 6, 32), **TABLES, "cu_q_lens": ints(0, 7, 8, 14), "block_size": 2}
RANGES = {"starts": ints(0, 7, 3), "stops": ints(20, 24, 9)}


def quantised(name: str) -> torch.Tensor:
    return rt.quantize_mla_cache(normal(6, 4, 1, {"fp8_v32": 576, "fp8_v4": 512}[name]), name, backend="reference")


def pages_of_bytes() -> torch.Tensor:
    cache = torch.zeros(6, 4, 1, 36, dtype=torch.uint8)
    return rt.write_indexer_cache(normal(24, 32), cache, torch.arange(24, dtype=torch.int32), backend="reference")


def gradient(forward: Callable[..., Any], arguments: dict[str, Any], d_out: torch.Tensor) -> dict[str, Any]:
    """The arguments of the backward operation of `forward`."""
    out, *_, lse = forward(**arguments, backend="reference")
    return arguments | {"d_out": d_out, "out": out, "lse": lse, "d_lse": torch.full_like(lse, 0.5)}


def packed_gradient() -> dict[str, Any]:
    return gradient(functools.partial(rt.varlen_attention, return_lse=True), PACKED, normal(5, 6, 16))


def sparse_gradient() -> dict[str, Any]:
    return gradient(rt.sparse_mla_prefill, SPARSE, normal(3, 6, 64))


# For each case: the operation, the axes along which its operands are spread, and its arguments or their factory.
CALLS: dict[str, tuple[str, tuple[int, ...], dict[str, Any] | Callable[[], dict[str, Any]]]] = {
    "tiles": ("ragged_paged_attention", (0, 1, 2), {
        "q": normal(14, 6, 16), "kv_pages": PAGES, **TABLES, "cu_q_lens": ints(0, 7, 8, 14), "sliding_window": 3
    }),
    "splits": ("ragged_paged_attention", (0, 1, 2), {
        "q": normal(3, 6, 16), "kv_pages": SPLIT_PAGES, **TABLES, "cu_q_lens": ints(0, 1, 2, 3),
    }),
    "pages by slot": ("write_kv_pages", (0, 1, 2), {
        "k": normal(5, 3, 16), "v": normal(5, 3, 16), "kv_pages": SPLIT_PAGES, "slot_mapping": ints(3, 22, 9, 0, 14),
    }),
    "pages by table": ("write_kv_pages", (0, 1, 2), {
        "k": normal(5, 3, 16), "v": normal(5, 3, 16), "kv_pages": PAGES, **TABLES,
    }),
    "heads first": ("paged_attention", (0, 1, 2), {
        "q": normal(3, 6, 16), **HEADS_FIRST, "lengths": TABLES["kv_lens"], "page_indices": TABLES["page_indices"],
    }),
    "heads first, scaled": ("paged_attention", (0, 1, 2), {
        "q": normal(3, 6, 16), **SCALED, "lengths": TABLES["kv_lens"], "page_indices": TABLES["page_indices"],
    }),
    "chunk, scaled": ("prefill_attention", (0, 1), {
        "q": normal(3, 6, 16), **SCALED, "length": 7, "page_indices": ints(4, 1, 0),
    }),
    "merge": ("merge_attention_states", (0, 1), {"outs": normal(3, 4, 3, 16), "lses": normal(3, 4, 3).float()}),
    "packed": ("varlen_attention", (0, 1), PACKED | {"return_lse": True, "causal": True}),
    "packed, gradient": ("varlen_attention_backward", (0, 1), packed_gradient),
    "dense": ("mla_decode", (0, 1, 2), {
        "q": normal(3, 3, 6, 96), "d_v": 64, "kv_cache": normal(6, 4, 1, 96), "page_indices": TABLES["page_indices"],
        "kv_lens": TABLES["kv_lens"],
    }),
    "ragged latents": ("ragged_mla_attention", (0, 1, 2), {
        "q": normal(14, 6, 96), "d_v": 64, "kv_cache": normal(6, 4, 1, 96), **TABLES, "cu_q_lens": ints(0, 7, 8, 14),
        "sliding_window": 3, "return_lse": True,
    }),
    "ragged latents, 8-bit": ("ragged_mla_attention", (0, 1), lambda: {
        "q": normal(5, 6, 96), "d_v": 64, "kv_cache": normal(6, 4, 1, 96).to(torch.float8_e4m3fn), **TABLES,
        "kv_scale": 0.5,
    }),
    "two lists, fp8_v4": ("mla_decode", (0, 1), lambda: {
        "q": normal(1, 3, 3, 512), "kv_cache": quantised("fp8_v4"), "indices": entries(1, 3, 5, below=24),
        "extra_kv_cache": quantised("fp8_v4"), "extra_indices": entries(1, 3, 5, below=24),
    }),
    "lists, fp8_v32": ("mla_decode", (0, 1), lambda: {
        "q": normal(3, 1, 3, 576), "kv_cache": quantised("fp8_v32"), "indices": entries(3, 1, 9, below=24),
        "topk_lens": ints(9, 2, 5),
    }),
    "sparse": ("sparse_mla_prefill", (0, 1), SPARSE),
    "sparse, gradient": ("sparse_mla_prefill_backward", (0, 1), sparse_gradient),
    "sparse, ordered gradient": (
        "sparse_mla_prefill_backward", (0, 1), lambda: sparse_gradient() | {"deterministic": True},
    ),
    "quantise": ("quantize_mla_cache", (0, 1), {"kv": normal(6, 4, 1, 576), "format": "fp8_v32"}),
    "rows by slot": ("write_mla_cache", (0, 1, 2), {
        "kv": normal(3, 3, 96), "cache": normal(6, 4, 3, 96), "slot_mapping": ints(3, 22, 9),
    }),
    "rows by table": ("write_mla_cache", (0, 1, 2), {"kv": normal(5, 3, 96), "cache": normal(6, 4, 3, 96), **TABLES}),
    "rows by slot, fp8_v4": ("write_mla_cache", (0,), lambda: {
        "kv": normal(3, 1, 512), "cache": quantised("fp8_v4"), "slot_mapping": ints(3, 22, 9),
    }),
    "indexer": ("indexer_logits", (0, 1), INDEXED | PAGED_KEYS),
    "indexer, bytes": ("indexer_logits", (0,), lambda: INDEXED | {"keys": pages_of_bytes()}),
    "indexer, packed": ("indexer_logits", (0,), {
        "q": normal(7, 6, 32), "weights": normal(7, 6).float(), **PACKED_KEYS,
        "starts": ints(0, 3, 3, 5, 0, 20, 1), "stops": ints(9, 24, 3, 12, 24, 21, 8),
    }),
    "indexer, few tokens": ("indexer_logits", (0, 1), FEW_INDEXED | PAGED_KEYS),
    "indexer, few tokens, bytes": ("indexer_logits", (0,), lambda: FEW_INDEXED | {"keys": pages_of_bytes()}),
    "indexer, relative": ("indexer_logits", (0,), {
        "q": normal(3, 6, 32), "weights": normal(3, 6).float(), **PACKED_KEYS, **RANGES, "relative": True,
    }),
    "top-k": ("indexer_topk", (0, 1), INDEXED | PAGED_KEYS | {"top_k": 3}),
    "top-k of candidates": ("indexer_topk", (0,), lambda: FEW_INDEXED | {
        "keys": pages_of_bytes(), "top_k": 2, "candidate_blocks": entries(5, 2, below=4), "candidate_block_size": 2,
    }),
    "choice": ("top_k_indices", (0,), {"logits": normal(3, 24).float(), "top_k": 5, **RANGES}),
    "blocks": ("block_scores", (0, 1, 2), BLOCKS | {"keys": normal(6, 4, 3, 32), "key_scale": normal(6, 4, 3).float()}),
    "blocks, packed": ("block_scores", (0, 1), {
        "q": normal(3, 6, 32), "keys": normal(24, 3, 32), "key_scale": normal(24, 3).float(), **RANGES, "block_size": 2,
    }),
    "choice of blocks, bytes": ("select_blocks", (0,), lambda: BLOCKS | {
        "keys": pages_of_bytes(), "top_k": 3, "local_blocks": 1,
    }),
    "choice of given blocks": ("top_k_blocks", (0, 1), {
        "scores": normal(3, 2, 24).float(), "top_k": 5, "init_blocks": 1,
    }),
    "quantise keys": ("quantize_indexer_keys", (0,), {"k": normal(5, 32)}),
    "keys by slot": ("write_indexer_cache", (0,), lambda: {
        "k": normal(3, 32), "cache": pages_of_bytes(), "slot_mapping": ints(3, 22, 9),
    }),
    "keys by table": ("write_indexer_cache", (0,), lambda: {"k": normal(5, 32), "cache": pages_of_bytes(), **TABLES}),
}  # fmt: skip


def flat(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results]
    return [tensor for result in results or () for tensor in flat(result)]


NOWHERE = 9  # an axis that no tensor has
CASES = [(name, axis) for name, (_, axes, _) in CALLS.items() for axis in axes]


def called(name: str, axis: int, backend: str, options: Mapping[str, Any] | None = None) -> list[torch.Tensor]:
    """The results of a case whose operands are all far apart along an axis."""
    operation, _, given = CALLS[name]
    arguments = given() if callable(given) else given
    arguments = {key: along(value, axis) for key, value in arguments.items()}
    return flat(getattr(rt, operation)(**arguments, backend=backend, options=options))


@functools.cache
def near(name: str, backend: str) -> list[torch.Tensor]:
    """The results of a case whose operands are all packed."""
    return called(name, NOWHERE, backend)
