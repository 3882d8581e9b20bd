"""Named shapes of multi-head latent attention, W9 to W12: what `paged.py` is for paged attention.

Every sequence of a case has the same lengths. A floor counts, as everywhere, each needed byte once and the operations
that no mask hides: 2 * heads * (d_qk + d_v) for each pair of a query token and a key that it sees.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from benchmarks.cases import paged as paged_cases
from benchmarks.cases.paged import BLOCK, ITEMSIZE, K, rounded
from ragged_attention.calls import (
    CACHE_FORMATS,
    CALLS,
    Call,
    Device,
    MakeDecodeSchedule,
    MlaDecode,
    QuantizeMlaCache,
    SparseMlaPrefill,
    SparseMlaPrefillBackward,
    WriteMlaCache,
)
from ragged_attention.reference.quantize_mla_cache import quantize_mla_cache
from ragged_attention.samples import FakeArray

ROWS = 2039  # latent rows that are drawn; a larger cache repeats the pages that they fill


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentCase:
    """One batch: lengths, heads and cache; a prefill is one sequence of many query tokens."""

    name: str
    workload: str
    num_seqs: int
    num_q_tokens: int  # of each sequence
    kv_len: int  # cached positions of each sequence
    num_q_heads: int
    prefill: bool = False
    topk: int = 0  # 0: dense
    format: str = "plain"
    dtype: str = "bfloat16"
    d_qk: int = 576
    d_v: int = 512
    page_size: int = 64
    num_kv_heads: int = 1
    causal: bool = False
    sinks: bool = False
    extra_topk: int = 0  # into a second cache of as many positions
    extra_page_size: int = 64
    backward: ClassVar[bool] = False

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.num_q_tokens

    @property
    def operation(self) -> str:
        return "sparse_mla_prefill" if self.prefill else "mla_decode"

    @property
    def key_format(self) -> str:
        """What decides how a kernel loads keys."""
        return self.format

    @property
    def row_bytes(self) -> int:
        if self.format != "plain":
            return CACHE_FORMATS[self.format].token_bytes
        return self.num_kv_heads * self.d_qk * ITEMSIZE[self.dtype]

    @property
    def q_shape(self) -> tuple[int, ...]:
        tokens = (self.num_tokens,) if self.prefill else (self.num_seqs, self.num_q_tokens)
        return (*tokens, self.num_q_heads, self.d_qk)

    def pages(self, page_size: int) -> int:
        """Pages of one sequence."""
        return -(-self.kv_len // page_size)

    def cache_shape(self, page_size: int) -> tuple[int, ...]:
        """Of a cache of such pages, one of which nobody uses; a plain prefill has packed rows instead."""
        if self.format != "plain":
            return (self.num_seqs * self.pages(page_size) + 1, page_size, 1, self.row_bytes)
        heads = (self.num_kv_heads, self.d_qk)
        return (self.kv_len, *heads) if self.prefill else (self.num_seqs * self.pages(page_size) + 1, page_size, *heads)

    @property
    def cache_dtype(self) -> str:
        return self.dtype if self.format == "plain" else "uint8"

    def list_shape(self, topk: int) -> tuple[int, ...]:
        if self.prefill:
            return (self.num_tokens, self.num_kv_heads, topk)
        return (self.num_seqs, self.num_q_tokens, topk)

    def needed_rows(self) -> int:
        """Rows that some query sees; the lists of a sequence's queries overlap as little as they can."""
        if not self.topk:
            return self.num_seqs * self.kv_len
        lists = [min(self.kv_len, self.num_q_tokens * topk) for topk in (self.topk, self.extra_topk)]
        return self.num_seqs * sum(lists)

    def needed_bytes(self) -> int:
        """Queries, latent rows, lists or tables, and the output, each byte once."""
        queries = math.prod(self.q_shape[:-1]) * (self.d_qk + self.d_v) * ITEMSIZE[self.dtype]
        lists = self.num_tokens * (self.topk + self.extra_topk) * self.num_kv_heads
        tables = lists if self.topk else self.num_seqs * (self.pages(self.page_size) + 1)
        return queries + self.needed_rows() * self.row_bytes + 4 * tables

    def visible_pairs(self) -> int:
        if self.topk:
            return self.num_tokens * (self.topk + self.extra_topk)
        hidden = self.num_q_tokens * (self.num_q_tokens - 1) // 2 if self.causal else 0
        return self.num_seqs * (self.num_q_tokens * self.kv_len - hidden)

    def flops(self) -> int:
        """Multiplications and additions of the two products over visible pairs of query and key."""
        return 2 * self.visible_pairs() * self.num_q_heads * (self.d_qk + self.d_v)

    def floor_seconds(self, bytes_per_second: float, flops_per_second: float) -> tuple[float, str]:
        """The time under which no implementation can be, and whether memory or arithmetic sets it."""
        memory, arithmetic = self.needed_bytes() / bytes_per_second, self.flops() / flops_per_second
        return (memory, "memory") if memory >= arithmetic else (arithmetic, "arithmetic")

    def options(self) -> dict[str, Any]:
        """The keyword arguments that are no arrays."""
        return {"d_v": self.d_v} | ({} if self.prefill else {"causal": self.causal})


def scaled_down(case: LatentCase, *, length: int = 77, sequences: int = 3) -> LatentCase:
    """The same kind of batch, small enough for any machine; widths, cache format and page sizes stay."""
    factor = max(1.0, case.kv_len / length)
    tokens = min(case.num_q_tokens, 9 if case.prefill else 2)
    return dataclasses.replace(
        case,
        name=f"{case.name}_small",
        num_seqs=min(case.num_seqs, sequences),
        num_q_tokens=tokens,
        kv_len=int(case.kv_len / factor),
        num_q_heads=min(case.num_q_heads, 16) * case.num_kv_heads,
        topk=case.topk and max(9, int(case.topk / factor)),
        extra_topk=case.extra_topk and max(5, int(case.extra_topk / factor)),
    )


def attention_call(case: LatentCase, device: Device) -> MlaDecode | SparseMlaPrefill:
    """The operation's record over fake arrays, as if it came from `device`."""
    arrays: dict[str, Any] = {
        name: FakeArray(shape, dtype) for name, (shape, dtype) in {**_floats(case), **_integers(case)}.items()
    }
    record: Any = CALLS[case.operation]
    return record(**arrays, **case.options(), device=device)


def _floats(case: LatentCase) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every array that does not index."""
    cache = (case.cache_shape(case.page_size), case.cache_dtype)
    found = {"q": (case.q_shape, case.dtype), "kv" if case.prefill else "kv_cache": cache}
    if case.extra_topk:
        found["extra_kv_cache"] = (case.cache_shape(case.extra_page_size), case.cache_dtype)
    if case.sinks:
        found["sinks"] = ((case.num_q_heads,), "float32")
    return found


def _integers(case: LatentCase) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every array that indexes."""
    if not case.topk:
        tables = {"page_indices": (case.num_seqs, case.pages(case.page_size)), "kv_lens": (case.num_seqs,)}
        return {name: (shape, "int32") for name, shape in tables.items()}
    found = {"indices": (case.list_shape(case.topk), "int32")}
    if case.extra_topk:
        found["extra_indices"] = (case.list_shape(case.extra_topk), "int32")
    return found


def write_call(case: LatentCase, device: Device) -> WriteMlaCache:
    """Writing the case's new rows into its cache."""
    rows = (case.num_tokens, case.num_kv_heads, case.d_qk)
    shape = case.cache_shape(case.page_size)
    cache = FakeArray(shape if len(shape) == 4 else (shape[0], 1, *shape[1:]), case.cache_dtype)
    slots = FakeArray(rows[:1], "int64")
    return WriteMlaCache(kv=FakeArray(rows, case.dtype), cache=cache, slot_mapping=slots, device=device)


def gradient_calls(case: LatentCase, device: Device) -> Iterator[SparseMlaPrefillBackward]:
    """The gradient of a prefill over plain rows, as it comes and in one order."""
    arrays: dict[str, Any] = {
        name: FakeArray(shape, dtype) for name, (shape, dtype) in {**_floats(case), **_integers(case)}.items()
    }
    out = FakeArray((*case.q_shape[:-1], case.d_v), case.dtype)
    arrays |= {"d_out": out, "out": out, "lse": FakeArray(case.q_shape[:-1], "float32")}
    for deterministic in (False, True):
        yield SparseMlaPrefillBackward(**arrays, d_v=case.d_v, deterministic=deterministic, device=device)


def quantize_call(case: LatentCase, device: Device) -> QuantizeMlaCache:
    """Quantising a whole cache of the case's shape."""
    shape = case.cache_shape(case.page_size)
    kv = FakeArray((*shape[:3], case.d_qk), case.dtype)
    return QuantizeMlaCache(kv=kv, format=case.format, device=device)


def schedule_call(case: LatentCase, device: Device) -> MakeDecodeSchedule:
    """Dividing the case's decode step among programs."""
    lens = FakeArray((case.num_seqs,), "int32")
    return MakeDecodeSchedule(
        lens=lens, extra_lens=lens if case.extra_topk else None, sparse=case.topk > 0,
        num_parts=device.num_multiprocessors, device=device,
    )  # fmt: skip


def calls_of(case: LatentCase, device: Device) -> Iterator[Call]:
    """Every operation that a serving step with this case runs, and the gradient of a prefill."""
    yield attention_call(case, device)
    yield write_call(case, device)
    if case.format != "plain":
        yield quantize_call(case, device)
    if not case.prefill:
        yield schedule_call(case, device)
    elif case.format == "plain":
        yield from gradient_calls(case, device)


# ---- inputs


def _slots(case: LatentCase, page_size: int, generator: np.random.Generator) -> np.ndarray:
    """The pages of every sequence [S, M], in random order; or, of packed rows, their only page."""
    count = case.num_seqs * case.pages(page_size)
    return generator.permutation(count + 1)[:count].reshape(case.num_seqs, -1).astype(np.int32)


def _lists(case: LatentCase, topk: int, page_size: int, generator: np.random.Generator) -> np.ndarray:
    """For every query token distinct random positions of its sequence, as slots; -1 where there are not enough.

    Each list is a stretch of one random order of the positions; where stretches begin is spread evenly over it, so
    that a sequence's lists overlap as little as they can, and drawn at random for each query.
    """
    paged = len(case.cache_shape(page_size)) == 4
    pages = _slots(case, page_size, generator) if paged else None
    lists = np.empty((case.num_seqs, case.num_q_tokens, topk), np.int32)
    for seq in range(case.num_seqs):
        order = generator.permutation(case.kv_len).astype(np.int32)
        starts = generator.permutation(case.num_q_tokens) * case.kv_len // case.num_q_tokens
        positions = starts[:, None] + np.arange(topk)
        chosen = order[positions % case.kv_len]
        if pages is not None:
            chosen = pages[seq, chosen // page_size] * page_size + chosen % page_size
        lists[seq] = np.where(np.arange(topk) < case.kv_len, chosen, -1)
    if not case.prefill:
        return lists
    return np.repeat(lists.reshape(case.num_tokens, 1, topk), case.num_kv_heads, 1)


def tables(case: LatentCase, seed: int = 0) -> dict[str, np.ndarray]:
    """The arrays that index: pages in random order, and either lengths or lists of slots."""
    generator = np.random.default_rng(seed)
    if not case.topk:
        lens = np.full(case.num_seqs, case.kv_len, np.int32)
        return {"page_indices": _slots(case, case.page_size, generator), "kv_lens": lens}
    found = {"indices": _lists(case, case.topk, case.page_size, generator)}
    if case.extra_topk:
        found["extra_indices"] = _lists(case, case.extra_topk, case.extra_page_size, generator)
    return found


def changed(case: LatentCase, seed: int = 2) -> list[tuple[LatentCase, dict[str, np.ndarray]]]:
    """The case with other lists or lengths, then as it is with those of `seed`; and the arrays that index each."""
    if case.topk:
        return [(case, tables(case, seed + 1)), (case, tables(case, seed))]
    other = dataclasses.replace(case, kv_len=case.kv_len // 2 + 1)
    lens = {"kv_lens": np.full(case.num_seqs, other.kv_len, np.int32)}
    return [(other, lens), (case, tables(case, seed))]


def _random_values(case: LatentCase, seed: int) -> dict[str, tuple[np.ndarray, tuple[int, ...], str]]:
    """For each float argument: values to be repeated, shape, dtype."""
    generator = np.random.default_rng([seed, 1])
    values = {}
    for name, (shape, dtype) in _floats(case).items():
        if dtype == "uint8":
            num_pages, page_size = min(shape[0], -(-ROWS // shape[1])), shape[1]
            rows = generator.standard_normal((num_pages, page_size, 1, case.d_qk), np.float32) / 10
            block = quantize_mla_cache(rows, case.format).ravel()
        else:
            block = generator.standard_normal(min(BLOCK, math.prod(shape)), np.float32)
            block = block.clip(-1, 1) if name == "q" else block if name == "sinks" else block / 10
        values[name] = (block, shape, dtype)
    return values


def numpy_inputs(case: LatentCase, seed: int = 0) -> dict[str, Any]:
    """Arguments for the definition in `reference/`."""
    arrays: dict[str, Any] = {
        name: np.resize(block if dtype == "uint8" else rounded(block, dtype), shape)
        for name, (block, shape, dtype) in _random_values(case, seed).items()
    }
    return arrays | tables(case, seed) | case.options()


def torch_inputs(case: LatentCase, seed: int = 0, device: Any = "cpu") -> dict[str, Any]:
    """Arguments for the torch front end, on `device`."""
    import torch

    arrays = {name: paged_cases.torch_array(*value, device) for name, value in _random_values(case, seed).items()}
    arrays |= {name: torch.from_numpy(table).to(device) for name, table in tables(case, seed).items()}
    return arrays | case.options()


def jax_inputs(case: LatentCase, seed: int = 0) -> dict[str, Any]:
    """Arguments for the jax front end, on its default device."""
    import jax.numpy as jnp

    arrays = {name: paged_cases.jax_array(*value) for name, value in _random_values(case, seed).items()}
    return arrays | {name: jnp.asarray(table) for name, table in tables(case, seed).items()} | case.options()


# ---- the cases


def _dense(name: str, num_seqs: int, kv_len: int, heads: int, **options: Any) -> LatentCase:
    shape: dict[str, Any] = {"num_q_tokens": 1, "kv_len": kv_len}
    return LatentCase(name=name, workload="W9", num_seqs=num_seqs, num_q_heads=heads, **(shape | options))


def _sparse(name: str, workload: str, num_seqs: int, heads: int, **options: Any) -> LatentCase:
    shape: dict[str, Any] = {"num_q_tokens": 1, "kv_len": 32 * K, "topk": 2 * K, "format": "fp8_v32"}
    return LatentCase(name=name, workload=workload, num_seqs=num_seqs, num_q_heads=heads, **(shape | options))


def _prefill(name: str, kv_len: int, **options: Any) -> LatentCase:
    shape: dict[str, Any] = {
        "workload": "W12", "num_seqs": 1, "num_q_tokens": 4 * K, "num_q_heads": 128, "topk": 2 * K,
    }  # fmt: skip
    return LatentCase(name=name, kv_len=kv_len, prefill=True, **(shape | options))


V4: dict[str, Any] = {"format": "fp8_v4", "d_qk": 512}
V4_DECODE: dict[str, Any] = V4 | {
    "num_q_tokens": 2, "kv_len": 16 * K, "topk": 128, "page_size": 256, "extra_topk": 512, "sinks": True,
}  # fmt: skip

_ALL = (
    _dense("mla_dense_h128_128x4k", 128, 4 * K, 128),
    _dense("mla_dense_h128_128q2s4k", 128, 4 * K, 128, num_q_tokens=2, causal=True),
    _dense("mla_dense_h64_128x4k", 128, 4 * K, 64),
    _dense("mla_dense_h16_128x4k", 128, 4 * K, 16),
    _dense("mla_dense_h16_1x32k", 1, 32 * K, 16),
    _dense("mla_dense_fp8_h128_128x4k", 128, 4 * K, 128, format="fp8_v32"),
    _sparse("mla_sparse_h128_128q2", "W10", 128, 128, num_q_tokens=2),
    _sparse("mla_sparse_bf16_h128_32q2", "W10", 32, 128, num_q_tokens=2, format="plain"),
    _sparse("mla_sparse_v4_h64_128q2", "W10", 128, 64, **V4_DECODE),
    *(
        _sparse(f"mla_sparse_h{heads}_b{num_seqs}", "W11", num_seqs, heads)
        for heads in (8, 16, 32)
        for num_seqs in (1, 8, 64)
    ),
    _prefill("mla_prefill_h128_8k", 8 * K),
    _prefill("mla_prefill_h128_32k", 32 * K),
    _prefill("mla_prefill_h128_128k", 128 * K),
    _prefill("mla_prefill_h16_32k", 32 * K, num_q_heads=16),
    _prefill("mla_prefill_fp8_h128_32k", 32 * K, format="fp8_v32"),
    _prefill("mla_prefill_v4_h64_32k", 32 * K, num_q_heads=64, topk=512, **V4, sinks=True),
)
CASES = {case.name: case for case in _ALL}

# Shapes that no table reports but that compile to code of their own.
_MORE = (
    _sparse("mla_sparse_v4_h16", "-", 8, 16, **V4, page_size=61),
    _sparse("mla_sparse_v4_h32", "-", 8, 32, **V4),
    _sparse("mla_float16_h32", "-", 8, 32, format="plain", dtype="float16", sinks=True),
    _sparse("mla_float16_fp8_h16", "-", 8, 16, dtype="float16"),
    _sparse("mla_float32_h16", "-", 8, 16, format="plain", dtype="float32", topk=200),
    _sparse("mla_float32_fp8_h16", "-", 8, 16, dtype="float32", topk=200),
    _sparse("mla_float32_v4_h16", "-", 8, 16, **V4, dtype="float32", topk=200),
    _dense("mla_narrow_24_heads", 8, 1 * K, 24, num_kv_heads=2, d_qk=144, d_v=80, page_size=24, dtype="float16"),
    _prefill("mla_prefill_h16_2k", 2 * K, workload="-", num_q_tokens=512, topk=200, num_q_heads=16, sinks=True),
    _prefill(
        "mla_prefill_float32_h16",
        2 * K,
        workload="-",
        num_q_tokens=512,
        num_q_heads=16,
        d_qk=192,
        d_v=128,
        dtype="float32",
    ),
    _sparse("mla_one_of_everything", "-", 1, 1, format="plain", kv_len=1, topk=1, page_size=1),
)
COMPILED_ONLY = {case.name: case for case in _MORE}
