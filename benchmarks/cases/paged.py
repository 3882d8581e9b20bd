"""Named shapes of real models, as records without a framework; every measurement and some tests run on them.

A case knows its lengths, so it can say what its floor is: the bytes that any implementation must move (each needed
byte once) and the operations it must do (the work that no mask hides). Inputs of any framework are made from a seed
and are the same values in all of them.

The workloads' numbers, W1 to W8, are those that results are reported by.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from ragged_attention.calls import (
    QUANTIZED,
    Call,
    Device,
    MergeAttentionStates,
    PagedAttention,
    PrefillAttention,
    RaggedPagedAttention,
    WriteKvPages,
)
from ragged_attention.reference._kv_layout import FORMATS, encode
from ragged_attention.samples import FakeArray

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}

# Random values are drawn once in a block and repeated; a prime length, so that no two pages or rows are alike.
BLOCK = 4_194_301


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One batch: lengths of its sequences, heads, cache and options."""

    name: str
    workload: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 16
    dtype: str = "bfloat16"
    cache_dtype: str | None = None  # None: as dtype
    combined: bool = True
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    scale: float | None = None  # of a quantised cache, for K and V alike
    return_lse: bool = False
    spare_pages: int = 1  # that nobody uses
    backward: ClassVar[bool] = False

    @property
    def operation(self) -> str:
        return "ragged_paged_attention"

    @property
    def stored(self) -> str:
        return self.cache_dtype or self.dtype

    @property
    def key_format(self) -> str:
        """What decides how a kernel loads keys."""
        return "8 bits" if ITEMSIZE[self.stored] == 1 else "plain"

    @property
    def num_tokens(self) -> int:
        return sum(self.q_lens)

    @property
    def pages_needed(self) -> tuple[int, ...]:
        return tuple(-(-kv_len // self.page_size) for kv_len in self.kv_lens)

    @property
    def num_pages(self) -> int:
        return sum(self.pages_needed) + self.spare_pages

    @property
    def q_shape(self) -> tuple[int, int, int]:
        return (self.num_tokens, self.num_q_heads, self.head_dim)

    def page_shape(self, combined: bool) -> tuple[int, int, int, int]:
        return (self.num_pages, self.page_size, self.num_kv_heads * (2 if combined else 1), self.head_dim)

    def needed_keys(self) -> int:
        """Cache positions that some query sees, over all sequences."""
        window = self.sliding_window or math.inf
        return sum(
            int(min(kv_len, q_len - 1 + window))
            for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True)
            if q_len
        )

    def needed_bytes(self) -> int:
        """Queries, visible keys and values, tables and the output, each byte once."""
        queries = 2 * math.prod(self.q_shape) * ITEMSIZE[self.dtype]
        row = 2 * self.num_kv_heads * self.head_dim * ITEMSIZE[self.stored]
        keys = self.needed_keys()
        return queries + keys * row + 4 * (-(-keys // self.page_size) + 2 * len(self.kv_lens) + 1)

    def flops(self) -> int:
        """Multiplications and additions of the two products over visible pairs of query and key."""
        return 4 * self.visible_pairs() * self.num_q_heads * self.head_dim

    def visible_pairs(self) -> int:
        window = self.sliding_window or max(self.kv_lens, default=1)
        total = 0
        for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True):
            seen = np.arange(kv_len - q_len + 1, kv_len + 1, dtype=np.int64)
            total += int(np.minimum(seen, window).sum())
        return total

    def floor_seconds(self, bytes_per_second: float, flops_per_second: float) -> tuple[float, str]:
        """The time under which no implementation can be, and whether memory or arithmetic sets it."""
        memory, arithmetic = self.needed_bytes() / bytes_per_second, self.flops() / flops_per_second
        return (memory, "memory") if memory >= arithmetic else (arithmetic, "arithmetic")

    def options(self) -> dict[str, Any]:
        """The keyword arguments that are no arrays."""
        return {
            "sliding_window": self.sliding_window,
            "soft_cap": self.soft_cap,
            "k_scale": self.scale,
            "v_scale": self.scale,
            "return_lse": self.return_lse,
        }


def scaled_down(case: Case, *, length: int = 77, sequences: int = 4) -> Case:
    """The same kind of batch, small enough for any machine: what tests and agreement checks run.

    Head size, GQA ratio, page size and options stay. The longest sequence gets about `length` positions, the window
    shrinks in proportion, and of the sequences the first of each kind (decode, chunk, prefill) stay.
    """
    factor = max(1.0, max(case.kv_lens) / length)
    order = sorted(range(len(case.q_lens)), key=lambda seq: case.q_lens[: seq + 1].count(case.q_lens[seq]))[:sequences]
    kept = [(case.q_lens[seq], case.kv_lens[seq]) for seq in order]
    kv_lens = [max(1, int(kv_len / factor) - index) for index, (_, kv_len) in enumerate(kept)]
    q_lens = [
        min(kv_len, q_len if q_len <= 8 else max(9, int(q_len / factor)))
        for (q_len, _), kv_len in zip(kept, kv_lens, strict=True)
    ]
    kv_heads = min(2, case.num_kv_heads)
    return dataclasses.replace(
        case,
        name=f"{case.name}_small",
        q_lens=tuple(q_lens),
        kv_lens=tuple(kv_lens),
        num_q_heads=case.num_q_heads // case.num_kv_heads * kv_heads,
        num_kv_heads=kv_heads,
        sliding_window=case.sliding_window and max(1, int(case.sliding_window / factor)),
    )


def attention_call(case: Case, device: Device) -> RaggedPagedAttention:
    """The operation's record over fake arrays, as if it came from `device`."""
    seqs, pages_per_seq = len(case.kv_lens), max(case.pages_needed, default=0)
    one = FakeArray(case.page_shape(case.combined), case.stored)
    return RaggedPagedAttention(
        q=FakeArray(case.q_shape, case.dtype),
        kv_pages=one if case.combined else (one, one),
        kv_lens=FakeArray((seqs,), "int32"),
        page_indices=FakeArray((seqs, pages_per_seq), "int32"),
        cu_q_lens=FakeArray((seqs + 1,), "int32"),
        sinks=FakeArray((case.num_q_heads,), "float32") if case.sinks else None,
        device=device,
        **case.options(),
    )


def write_call(case: Case, device: Device, *, slots: bool = False) -> WriteKvPages:
    """Writing the case's new tokens into its pages, through the tables or a slot mapping."""
    call = attention_call(case, device)
    new = FakeArray((case.num_tokens, case.num_kv_heads, case.head_dim), case.dtype)
    tables = {name: getattr(call, name) for name in ("page_indices", "kv_lens", "cu_q_lens")}
    where = {"slot_mapping": FakeArray((case.num_tokens,), "int64")} if slots else tables
    return WriteKvPages(
        k=new, v=new, kv_pages=call.kv_pages, k_scale=case.scale, v_scale=case.scale, device=device, **where
    )


def merge_call(case: Case, device: Device, *, parts: int = 2) -> MergeAttentionStates:
    """Merging `parts` partial results of the case."""
    return MergeAttentionStates(
        outs=FakeArray((parts, *case.q_shape), case.dtype),
        lses=FakeArray((parts, *case.q_shape[:2]), "float32"),
        device=device,
    )


def heads_first_calls(case: Case, device: Device) -> Iterator[Call]:
    """A decode of the case's sequences, and a chunk of all its queries, over heads-first pages of its sizes."""
    shape = (case.num_kv_heads, case.num_pages, case.page_size)
    pages: Any = FakeArray((*shape, case.head_dim), case.stored)
    if case.stored in QUANTIZED:
        pages = (pages, FakeArray((*shape, 1), "float32"))
    shared: dict[str, Any] = {"k_pages": pages, "v_pages": pages, "soft_cap": case.soft_cap, "device": device}
    seqs, pages_per_seq = len(case.kv_lens), max(case.pages_needed, default=0)
    yield PagedAttention(
        q=FakeArray((seqs, *case.q_shape[1:]), case.dtype),
        lengths=FakeArray((seqs,), "int32"),
        page_indices=FakeArray((seqs, pages_per_seq), "int32"),
        **shared,
    )
    yield PrefillAttention(
        q=FakeArray(case.q_shape, case.dtype),
        length=FakeArray((1,), "int32"),
        page_indices=FakeArray((pages_per_seq,), "int32"),
        sliding_window=case.sliding_window,
        **shared,
    )


def calls_of(case: Case, device: Device) -> Iterator[Call]:
    """Every operation that a serving step with this case runs, in either layout of the pages."""
    yield attention_call(case, device)
    yield write_call(case, device)
    yield write_call(case, device, slots=True)
    yield merge_call(case, device)
    yield from heads_first_calls(case, device)


def tables(case: Case, seed: int = 0) -> dict[str, np.ndarray]:
    """`kv_lens`, `page_indices` and `cu_q_lens`: pages in random order, garbage behind each row's last used page."""
    generator = np.random.default_rng(seed)
    order = generator.permutation(case.num_pages).astype(np.int32)
    page_indices = generator.integers(-(2**31), 2**31, (len(case.kv_lens), max(case.pages_needed)), np.int32)
    start = 0
    for seq, count in enumerate(case.pages_needed):
        page_indices[seq, :count] = order[start : start + count]
        start += count
    return {
        "kv_lens": np.array(case.kv_lens, np.int32),
        "page_indices": page_indices,
        "cu_q_lens": np.concatenate([[0], np.cumsum(case.q_lens)]).astype(np.int32),
    }


def changed(case: Case) -> list[tuple[Case, dict[str, np.ndarray]]]:
    """The case with shorter lengths, then as it is: cases and the arrays that index them."""
    lengths = zip(case.q_lens, case.kv_lens, strict=True)
    kv_lens = tuple(max(q_len, kv_len * (1 + seq % 3) // 4) for seq, (q_len, kv_len) in enumerate(lengths))
    other = dataclasses.replace(case, kv_lens=kv_lens)
    return [(one, {"kv_lens": np.array(one.kv_lens, np.int32)}) for one in (other, case)]


def _random_values(case: Case, seed: int) -> dict[str, tuple[np.ndarray, tuple[int, ...], str]]:
    """For each float argument: values to be repeated, shape, dtype."""
    generator = np.random.default_rng([seed, 1])
    shapes: dict[str, tuple[tuple[int, ...], str]] = {"q": (case.q_shape, case.dtype)}
    if case.combined:
        shapes["kv_pages"] = (case.page_shape(True), case.stored)
    else:
        shapes |= {name: (case.page_shape(False), case.stored) for name in ("k_pages", "v_pages")}
    if case.sinks:
        shapes["sinks"] = ((case.num_q_heads,), "float32")
    values = {}
    for name, (shape, dtype) in shapes.items():
        block = generator.standard_normal(min(BLOCK, max(1, math.prod(shape))), np.float32)
        if dtype == "int8":
            block = np.rint(block * 32).clip(-128, 127)
        values[name] = (block, shape, dtype)
    return values


def _arguments(case: Case, arrays: dict[str, Any]) -> dict[str, Any]:
    """The operation's arguments by name, the pair of pages joined."""
    if not case.combined:
        arrays["kv_pages"] = (arrays.pop("k_pages"), arrays.pop("v_pages"))
    return arrays | case.options()


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values as `dtype` would hold them: float64, or the bits of an 8-bit float."""
    if dtype in FORMATS:
        return encode(values, dtype)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return bits.view(np.float32).astype(np.float64)
    return values.astype(dtype).astype(np.float64)


def numpy_inputs(case: Case, seed: int = 0) -> dict[str, Any]:
    """Arguments for the definition in `reference/`, which also wants `cache_dtype=case.stored`."""
    arrays: dict[str, Any] = {
        name: np.resize(rounded(block, dtype), shape)
        for name, (block, shape, dtype) in _random_values(case, seed).items()
    }
    return _arguments(case, arrays | tables(case, seed))


def torch_array(block: np.ndarray, shape: tuple[int, ...], dtype: str, device: Any) -> Any:
    """A tensor of `shape` that repeats the values of `block`."""
    import torch

    count = math.prod(shape)
    values = torch.from_numpy(block).to(device).to(getattr(torch, dtype))
    bits = values.view(torch.uint8) if dtype in FORMATS else values  # not every operation knows 8-bit floats
    return bits.repeat(-(-count // len(block)))[:count].view(values.dtype).view(shape)


def jax_array(block: np.ndarray, shape: tuple[int, ...], dtype: str) -> Any:
    """A jax array of `shape` that repeats the values of `block`."""
    import jax.numpy as jnp

    return jnp.resize(jnp.asarray(block).astype(dtype), shape)


def torch_inputs(case: Case, seed: int = 0, device: Any = "cpu") -> dict[str, Any]:
    """Arguments for the torch front end, on `device`."""
    import torch

    arrays = {name: torch_array(*value, device) for name, value in _random_values(case, seed).items()}
    arrays |= {name: torch.from_numpy(table).to(device) for name, table in tables(case, seed).items()}
    return _arguments(case, arrays)


def jax_inputs(case: Case, seed: int = 0) -> dict[str, Any]:
    """Arguments for the jax front end, on its default device."""
    import jax.numpy as jnp

    arrays = {name: jax_array(*value) for name, value in _random_values(case, seed).items()}
    return _arguments(case, arrays | {name: jnp.asarray(table) for name, table in tables(case, seed).items()})


def _decode(name: str, workload: str, count: int, kv_len: int, heads: tuple[int, int, int], **options: Any) -> Case:
    return _batch(name, workload, [(1, kv_len)] * count, heads, **options)


def _batch(
    name: str, workload: str, lengths: list[tuple[int, int]], heads: tuple[int, int, int], **options: Any
) -> Case:
    q_lens, kv_lens = zip(*lengths, strict=True)
    return Case(
        name=name, workload=workload, q_lens=q_lens, kv_lens=kv_lens,
        num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2], **options,
    )  # fmt: skip


def _drawn(low: int, high: int, count: int) -> list[int]:
    """Lengths drawn once and for all."""
    return [int(length) for length in np.random.default_rng(7).integers(low, high, count, endpoint=True)]


K = 1024
LLAMA_8B, LLAMA_70B, LLAMA_70B_TP8 = (32, 8, 128), (64, 8, 128), (8, 1, 128)
GPT_OSS, GEMMA2, GEMMA3, GEMMA4 = (64, 8, 64), (16, 8, 256), (32, 16, 128), (32, 4, 512)
GEMMA2_OPTIONS: dict[str, Any] = {"soft_cap": 50.0, "sliding_window": 4096}
FP8: dict[str, Any] = {"cache_dtype": "float8_e4m3fn", "scale": 0.25}

_ALL = (
    _decode("decode_64x4k", "W1", 64, 4 * K, LLAMA_8B),
    _decode("decode_64x4k_page1", "W1", 64, 4 * K, LLAMA_8B, page_size=1),
    _decode("decode_64x4k_page64", "W1", 64, 4 * K, LLAMA_8B, page_size=64),
    _decode("decode_64x4k_page256", "W1", 64, 4 * K, LLAMA_8B, page_size=256),
    _decode("decode_64x4k_split_pages", "W1", 64, 4 * K, LLAMA_8B, combined=False),
    _decode("decode_32x1k", "W1", 32, 1 * K, LLAMA_8B),
    _decode("decode_1x32k", "W2", 1, 32 * K, LLAMA_8B),
    _decode("decode_1x128k", "W2", 1, 128 * K, LLAMA_8B),
    _decode("decode_8x32k", "W2", 8, 32 * K, LLAMA_8B),
    _decode("decode_70b_64x4k", "W3", 64, 4 * K, LLAMA_70B),
    _decode("decode_70b_tp8_64x4k", "W3", 64, 4 * K, LLAMA_70B_TP8),
    _batch("prefill_2k", "W4", [(2 * K, 2 * K)], LLAMA_8B),
    _batch("prefill_4k", "W4", [(4 * K, 4 * K)], LLAMA_8B),
    _batch("prefill_8k", "W4", [(8 * K, 8 * K)], LLAMA_8B),
    _batch("mixed_2q2k_32q1s1k", "W5", [(2 * K, 2 * K)] * 2 + [(1, 1 * K)] * 32, LLAMA_8B),
    _batch("mixed_prefill_part", "W5", [(2 * K, 2 * K)] * 2, LLAMA_8B),
    _batch(
        "mixed_128_decodes_1_prefill",
        "W5",
        [(1, kv_len) for kv_len in _drawn(2 * K, 8 * K, 128)] + [(n, n) for n in _drawn(512, 6000, 1)],
        LLAMA_8B,
    ),
    _batch("chunk_1k_at_2k", "W5", [(1 * K, 2 * K)], LLAMA_8B),
    _batch("speculative_64q4s4k", "W5", [(4, 4 * K)] * 64, LLAMA_8B),
    _decode("gpt_oss_window_64x4k", "W6", 64, 4 * K, GPT_OSS, sinks=True, sliding_window=128),
    _decode("gpt_oss_full_64x4k", "W6", 64, 4 * K, GPT_OSS, sinks=True),
    _batch("gpt_oss_prefill_4k", "W6", [(4 * K, 4 * K)], GPT_OSS, sinks=True, sliding_window=128),
    _decode("gemma2_32x4k", "W7", 32, 4 * K, GEMMA2, **GEMMA2_OPTIONS),
    _batch("gemma2_prefill_4k", "W7", [(4 * K, 4 * K)], GEMMA2, **GEMMA2_OPTIONS),
    _decode("gemma3_32x4k", "W7", 32, 4 * K, GEMMA3, sliding_window=1024),
    _decode("gemma4_global_32x4k", "W7", 32, 4 * K, GEMMA4),
    _batch("gemma4_global_prefill_4k", "W7", [(4 * K, 4 * K)], GEMMA4),
    _decode("fp8_64x4k", "W8", 64, 4 * K, LLAMA_8B, **FP8),
    _decode("fp8_64x4k_page64", "W8", 64, 4 * K, LLAMA_8B, page_size=64, **FP8),
    _batch("fp8_prefill_4k", "W8", [(4 * K, 4 * K)], LLAMA_8B, **FP8),
)  # fmt: skip
CASES = {case.name: case for case in _ALL}

# Shapes that no table reports but that compile to code of their own.
_MORE = (
    _batch("float32_mixed", "-", [(256, 512)] + [(1, 1 * K)] * 8, (8, 4, 64), dtype="float32", return_lse=True),
    _batch("phi_head_80_mixed", "-", [(512, 512)] + [(1, 1 * K)] * 8, (32, 32, 80), dtype="float16"),
    _batch("int8_mixed", "-", [(512, 512)] + [(1, 1 * K)] * 8, LLAMA_8B, cache_dtype="int8", scale=0.03),
    _batch("ratio_7_page_24", "-", [(512, 512)] + [(1, 1 * K)] * 8, (28, 4, 128), page_size=24, return_lse=True),
    # Sizes of one, which Triton makes constants of.
    _batch("one_of_everything", "-", [(1, 16)], (1, 1, 128), spare_pages=0),
    _batch("one_page_slot", "-", [(1, 1)], (1, 1, 16), page_size=1, spare_pages=0, return_lse=True),
)
COMPILED_ONLY = {case.name: case for case in _MORE}
