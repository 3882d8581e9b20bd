"""Named shapes of attention without a cache, W13: what `paged.py` is for paged attention.

A case is a forward pass or the gradient of one. A floor counts, as everywhere, each needed byte once and the
operations that no mask hides: two products forward, five backward, which has to compute the logits again.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.cases import paged as paged_cases
from benchmarks.cases.paged import BLOCK, ITEMSIZE, K, rounded
from ragged_attention.calls import Call, Device, VarlenAttention, VarlenAttentionBackward
from ragged_attention.reference.varlen_attention import varlen_attention
from ragged_attention.samples import FakeArray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VarlenCase:
    """One batch: lengths of its sequences, heads and options."""

    name: str
    workload: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    d_v: int
    backward: bool = False
    dtype: str = "bfloat16"
    causal: bool = True
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    d_lse: bool = False

    @property
    def operation(self) -> str:
        return "varlen_attention_backward" if self.backward else "varlen_attention"

    @property
    def key_format(self) -> str:
        """What decides how a kernel loads keys."""
        return "plain"

    @property
    def num_tokens(self) -> int:
        return sum(self.q_lens)

    @property
    def num_kv_tokens(self) -> int:
        return sum(self.kv_lens)

    @property
    def q_shape(self) -> tuple[int, int, int]:
        return (self.num_tokens, self.num_q_heads, self.head_dim)

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return (self.num_tokens, self.num_q_heads, self.d_v)

    def kv_shape(self, width: int) -> tuple[int, int, int]:
        return (self.num_kv_tokens, self.num_kv_heads, width)

    def needed_bytes(self) -> int:
        """Every array that goes in or comes out, each byte once."""
        rows = math.prod(self.q_shape) + math.prod(self.out_shape)
        keys = self.num_kv_tokens * self.num_kv_heads * (self.head_dim + self.d_v)
        lse = 4 * self.num_tokens * self.num_q_heads
        if self.backward:  # q, d_out, out and dq; k, v and their gradients
            rows, keys = 2 * rows, 2 * keys
        return (rows + keys) * ITEMSIZE[self.dtype] + lse

    def visible_pairs(self) -> int:
        total = 0
        for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True):
            position = np.arange(kv_len - q_len, kv_len, dtype=np.int64)
            last = np.minimum(position + 1, kv_len) if self.causal else np.full(q_len, kv_len)
            first = np.maximum(position + 1 - (self.sliding_window or kv_len + q_len), 0)
            total += int(np.maximum(last - first, 0).sum())
        return total

    def flops(self) -> int:
        """Multiplications and additions over visible pairs: q . k and weight * v; backward three and two of them."""
        columns = 3 * self.head_dim + 2 * self.d_v if self.backward else self.head_dim + self.d_v
        return 2 * self.visible_pairs() * self.num_q_heads * columns

    def floor_seconds(self, bytes_per_second: float, flops_per_second: float) -> tuple[float, str]:
        """The time under which no implementation can be, and whether memory or arithmetic sets it."""
        memory, arithmetic = self.needed_bytes() / bytes_per_second, self.flops() / flops_per_second
        return (memory, "memory") if memory >= arithmetic else (arithmetic, "arithmetic")

    def options(self) -> dict[str, Any]:
        """The keyword arguments that are no arrays."""
        return {
            "max_q_len": max(self.q_lens),
            "max_kv_len": max(self.kv_lens),
            "causal": self.causal,
            "sliding_window": self.sliding_window,
            "soft_cap": self.soft_cap,
        }


def scaled_down(case: VarlenCase, *, length: int = 77, sequences: int = 3) -> VarlenCase:
    """The same kind of batch, small enough for any machine; widths and the GQA ratio stay."""
    factor = max(1.0, max(case.kv_lens) / length)

    def shorter(lens: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(max(1, int(n / factor) - index) for index, n in enumerate(lens[:sequences]))

    kv_heads = min(2, case.num_kv_heads)
    return dataclasses.replace(
        case,
        name=f"{case.name}_small",
        q_lens=shorter(case.q_lens),
        kv_lens=shorter(case.kv_lens),
        num_q_heads=case.num_q_heads // case.num_kv_heads * kv_heads,
        num_kv_heads=kv_heads,
        sliding_window=case.sliding_window and max(1, int(case.sliding_window / factor)),
    )


def _floats(case: VarlenCase) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every float argument but what the forward pass gives."""
    found: dict[str, tuple[tuple[int, ...], str]] = {
        "q": (case.q_shape, case.dtype),
        "k": (case.kv_shape(case.head_dim), case.dtype),
        "v": (case.kv_shape(case.d_v), case.dtype),
    }
    if case.sinks:
        found["sinks"] = ((case.num_q_heads,), "float32")
    if case.backward:
        found["d_out"] = (case.out_shape, case.dtype)
    if case.backward and case.d_lse:
        found["d_lse"] = (case.q_shape[:2], "float32")
    return found


def attention_call(case: VarlenCase, device: Device) -> VarlenAttention | VarlenAttentionBackward:
    """The operation's record over fake arrays, as if it came from `device`."""
    arrays: dict[str, Any] = {name: FakeArray(shape, dtype) for name, (shape, dtype) in _floats(case).items()}
    edges = FakeArray((len(case.q_lens) + 1,), "int32")
    arrays |= {"cu_q_lens": edges, "cu_kv_lens": edges}
    if not case.backward:
        return VarlenAttention(**arrays, **case.options(), device=device)
    arrays |= {"out": FakeArray(case.out_shape, case.dtype), "lse": FakeArray(case.q_shape[:2], "float32")}
    return VarlenAttentionBackward(**arrays, **case.options(), device=device)


def calls_of(case: VarlenCase, device: Device) -> Iterator[Call]:
    yield attention_call(case, device)


# ---- inputs


def tables(case: VarlenCase, seed: int = 0) -> dict[str, np.ndarray]:
    """`cu_q_lens` and `cu_kv_lens`; there is nothing to draw."""
    del seed
    lens = {"cu_q_lens": case.q_lens, "cu_kv_lens": case.kv_lens}
    return {name: np.concatenate([[0], np.cumsum(value)]).astype(np.int32) for name, value in lens.items()}


def changed(case: VarlenCase) -> list[tuple[VarlenCase, dict[str, np.ndarray]]]:
    """The case with lengths moved by one sequence, then as it is: cases and the arrays that index them."""
    other = dataclasses.replace(case, q_lens=(*case.q_lens[1:], 0), kv_lens=(*case.kv_lens[1:], 0))
    return [(one, tables(one)) for one in (other, case)]


def _random_values(case: VarlenCase, seed: int) -> dict[str, tuple[np.ndarray, tuple[int, ...], str]]:
    """For each float argument: values to be repeated, shape, dtype.

    Larger ones would, for a query that sees few keys, magnify the rounding of its weights beyond the bounds.
    """
    small = {"v": 1 / 4, "d_out": 1 / 16, "d_lse": 1 / 16}
    generator = np.random.default_rng([seed, 1])
    values = {}
    for name, (shape, dtype) in _floats(case).items():
        block = generator.standard_normal(min(BLOCK, math.prod(shape)), np.float32)
        values[name] = (block * small.get(name, 1), shape, dtype)
    return values


def _with_forward(case: VarlenCase, inputs: dict[str, Any], framework: str) -> dict[str, Any]:
    """A gradient's inputs with what the forward pass gave, by the backend that the device runs by itself."""
    if not case.backward:
        return inputs
    function = importlib.import_module(f"ragged_attention.{framework}").varlen_attention
    given = {name: value for name, value in inputs.items() if name not in ("d_out", "d_lse")}
    out, lse = function(**given, return_lse=True)
    return inputs | {"out": out, "lse": lse}


def numpy_inputs(case: VarlenCase, seed: int = 0) -> dict[str, Any]:
    """Arguments for the definition in `reference/`."""
    inputs: dict[str, Any] = {
        name: np.resize(rounded(block, dtype), shape)
        for name, (block, shape, dtype) in _random_values(case, seed).items()
    }
    inputs |= tables(case, seed) | case.options()
    if case.backward:
        given = {name: value for name, value in inputs.items() if name not in ("d_out", "d_lse")}
        out, inputs["lse"] = varlen_attention(**given)
        inputs["out"] = rounded(out, case.dtype)
    return inputs


def torch_inputs(case: VarlenCase, seed: int = 0, device: Any = "cpu") -> dict[str, Any]:
    """Arguments for the torch front end, on `device`."""
    import torch

    arrays = {name: paged_cases.torch_array(*value, device) for name, value in _random_values(case, seed).items()}
    arrays |= {name: torch.from_numpy(table).to(device) for name, table in tables(case, seed).items()}
    return _with_forward(case, arrays | case.options(), "torch")


def jax_inputs(case: VarlenCase, seed: int = 0) -> dict[str, Any]:
    """Arguments for the jax front end, on its default device."""
    import jax.numpy as jnp

    arrays = {name: paged_cases.jax_array(*value) for name, value in _random_values(case, seed).items()}
    arrays |= {name: jnp.asarray(table) for name, table in tables(case, seed).items()}
    return _with_forward(case, arrays | case.options(), "jax")


# ---- the cases


def _both(
    name: str, workload: str, lens: tuple[int, ...], heads: tuple[int, int], widths: tuple[int, int], **options: Any
) -> Iterator[VarlenCase]:
    """A forward pass and its gradient."""
    make = functools.partial(
        VarlenCase, workload=workload, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=widths[0], d_v=widths[1],
        **({"q_lens": lens, "kv_lens": lens} | options),
    )  # fmt: skip
    yield make(name=f"mha_{name}")
    yield make(name=f"mha_{name}_backward", backward=True)


# Tokens of a batch as upstream's benchmark has them: the more a sequence has, the fewer sequences.
_SHAPES = (((128, 128), (16, 16)), ((192, 128), (16, 16)))
_ALL = (
    *(
        case
        for widths, heads in _SHAPES
        for length in (4 * K, 8 * K)
        for causal in (True, False)
        for case in _both(
            f"{widths[0]}_{length // K}k{'' if causal else '_full'}", "W13", (length,) * (16 * K // length), heads,
            widths, causal=causal,
        )
    ),
    *_both("gqa_8x2k", "W13", (2 * K,) * 8, (32, 8), (128, 128)),
    *_both("packed", "W13", tuple(paged_cases._drawn(64, 2 * K, 16)), (32, 8), (128, 128)),
)  # fmt: skip
CASES = {case.name: case for case in _ALL}

# Shapes that no table reports but that compile to code of their own.
_MORE = (
    *_both("float16_64", "-", (1000,) * 4, (32, 8), (64, 64), dtype="float16"),
    *_both("float32_80", "-", (333,) * 4, (8, 4), (80, 80), dtype="float32", sliding_window=100),
    *_both("gemma_256", "-", (1000,) * 4, (16, 8), (256, 256), soft_cap=50.0, sliding_window=512),
    *_both("everything_128", "-", (1000,) * 4, (28, 4), (128, 128), soft_cap=50.0, sliding_window=512, sinks=True,
           d_lse=True),
    *_both("cross_96_72", "-", (500,) * 4, (12, 12), (96, 72), kv_lens=(700,) * 4, causal=False, sinks=True),
    *_both("one_of_everything", "-", (1,), (1, 1), (1, 1)),
)  # fmt: skip
COMPILED_ONLY = {case.name: case for case in _MORE}
