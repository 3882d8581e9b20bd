"""The records of the operations over heads-first pages: paged decode, and the chunked prefill of one sequence."""

import abc
import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ragged_attention.calls.base import (
    FLOATS,
    NOWHERE,
    QUANTIZED,
    Array,
    Device,
    GroupedCall,
    dtype_name,
    expect_array,
    expect_groups,
    expect_number,
    is_array,
)
from ragged_attention.calls.paged import RaggedPagedAttention, expect_head_dim, expect_window
from ragged_attention.errors import InvalidInput

ALIGNMENTS = ("chunk", "end")
JAX_LARGEST = 127.5  # what jax's QuantizedTensor has its scales times; see `is_jax_quantized`


def is_jax_quantized(pages: Any) -> bool:
    """Whether pages are jax's `QuantizedTensor(weight, scales)`, whose values are weight * scales / 127.5."""
    return hasattr(pages, "weight") and hasattr(pages, "scales")


def expect_heads_first(name: str, pages: Any, dtypes: tuple[str, ...], sizes: Mapping[str, int]) -> None:
    """Check heads-first pages by themselves: an array [K, P, G, D], or 8-bit ones in a pair with f32 [K, P, G, 1]."""
    if not isinstance(pages, tuple | list):
        expect_array(name, pages, "K P G D", dtypes, sizes)
        return
    if len(pages) != 2:
        raise TypeError(f"expected {name} to be an array or a pair (weight, scales), got {len(pages)} values")
    weight, scales = pages
    expect_array(f"{name}[0]", weight, "K P G D", tuple(dtype for dtype in dtypes if dtype in QUANTIZED), sizes)
    sizes = dict(zip("KPG", weight.shape, strict=False)) | {"1": 1}
    expect_array(f"{name}[1]", scales, "K P G 1", ("float32",), sizes)


def taken_align(options: Any) -> tuple[Any, Any]:
    """The option `align` and the options without it: it says what is computed, so it is no backend's to judge."""
    if not isinstance(options, Mapping) or "align" not in options:
        return "chunk", options
    return options["align"], {name: value for name, value in options.items() if name != "align"}


def expect_length(value: Any) -> bool:
    """Whether a length is a plain number, which is then checked to be one that an int32 array can hold."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        return False
    if not 0 <= int(value) <= np.iinfo(np.int32).max:
        raise InvalidInput(f"expected length between 0 and {np.iinfo(np.int32).max}, got {value}")
    return True


class HeadsFirstSizes:
    """The sizes of a call whose pages are [K, P, G, D]."""

    page_indices: Any

    @property
    @abc.abstractmethod
    def k_pages_like(self) -> Array: ...

    @property
    def cache_dtype(self) -> str:
        return dtype_name(self.k_pages_like)

    @property
    def num_kv_heads(self) -> int:
        return self.k_pages_like.shape[0]

    @property
    def num_pages(self) -> int:
        return self.k_pages_like.shape[1]

    @property
    def page_size(self) -> int:
        return self.k_pages_like.shape[2]

    @property
    def pages_per_seq(self) -> int:
        return self.page_indices.shape[-1]

    @property
    def capacity(self) -> int:
        """The most positions one sequence's row of `page_indices` can hold; longer lengths count as this."""
        return min(self.pages_per_seq * self.page_size, 2**31 - 2**16)


class HeadsFirstCall(HeadsFirstSizes, GroupedCall):
    """What the records with heads-first pages share."""

    q: Any
    k_pages: Any
    v_pages: Any
    sm_scale: float | None
    soft_cap: float | None

    @property
    def quantized(self) -> bool:
        """Whether the pages are pairs of 8-bit values and their scales."""
        return isinstance(self.k_pages, tuple | list)

    @property
    def k_pages_like(self) -> Array:
        return self.k_pages[0] if self.quantized else self.k_pages

    @property
    def arrays(self) -> tuple[Any, Any]:
        """K and V as they are stored, without their scales."""
        return (self.k_pages[0], self.v_pages[0]) if self.quantized else (self.k_pages, self.v_pages)

    @property
    def scales(self) -> tuple[Any, Any]:
        """The scales of K and V, f32 [K, P, G, 1] each, or None twice."""
        return (self.k_pages[1], self.v_pages[1]) if self.quantized else (None, None)

    @property
    def num_tokens(self) -> int:
        return self.q.shape[0]

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return tuple(self.q.shape)  # type: ignore[return-value]

    def _check(self, tokens: str) -> None:
        """The law of q, the pages and the logits; `tokens` is the letter of q's first axis."""
        expect_array("q", self.q, f"{tokens} H D", FLOATS, {})
        expect_head_dim("q.shape[2]", self.head_dim)
        dtypes = (dtype_name(self.q), *QUANTIZED)
        expect_heads_first("k_pages", self.k_pages, dtypes, {"D": self.head_dim})
        if isinstance(self.v_pages, tuple | list) != self.quantized:
            wanted, got = ("a pair", "an array") if self.quantized else ("an array", "a pair")
            raise TypeError(f"expected v_pages to be {wanted} as k_pages is, got {got}")
        sizes = dict(zip("KPGD", self.k_pages_like.shape, strict=True))
        expect_heads_first("v_pages", self.v_pages, (self.cache_dtype,), sizes)
        if self.page_size < 1:
            raise InvalidInput(f"expected page_size >= 1, got {self.page_size}")
        if (num_kv_heads := self.num_kv_heads) < 1:
            raise InvalidInput(f"expected k_pages to have num_kv_heads >= 1, got {num_kv_heads}")
        expect_groups(self.num_q_heads, num_kv_heads)
        if self.sm_scale is not None:
            expect_number("sm_scale", self.sm_scale)
        if self.soft_cap is not None:
            expect_number("soft_cap", self.soft_cap, positive=True)

    def _check_row(self, length_name: str, length: Any, row_name: str, row: Any) -> None:
        """The value law of one sequence: its length, and the pages it takes."""
        limit = self.pages_per_seq * self.page_size
        if not 0 <= length <= limit:
            raise InvalidInput(
                f"expected {length_name} between 0 and pages_per_seq * page_size = {limit}, got {length}"
            )
        pages = row[: -(-int(length) // self.page_size)]
        bad = np.flatnonzero((pages < 0) | (pages >= self.num_pages))
        if bad.size:
            place = row_name.replace("*", str(bad[0]))
            raise InvalidInput(f"expected {place} between 0 and {self.num_pages - 1}, got {pages[bad[0]]}")

    def as_ragged(self, **changes: Any) -> "RaggedHeadsFirst":
        """The same call as one of ragged paged attention, whose index arrays are among `changes`.

        It holds the pages as they are stored: their scales, where they have such, are left to whoever asks.
        """
        values: dict[str, Any] = dict.fromkeys(RaggedPagedAttention.argument_names())
        values |= {"q": self.q, "kv_pages": self.arrays, "page_indices": self.page_indices, "causal": True}
        values |= {"sm_scale": self.sm_scale, "soft_cap": self.soft_cap, "return_lse": False}
        return RaggedHeadsFirst.unchecked(**values | changes, device=self.device)


class RaggedHeadsFirst(HeadsFirstSizes, RaggedPagedAttention):
    """A call of ragged paged attention whose pair of pages is heads-first, for rooms that know how to read that.

    Without a second axis `page_indices` is the row of the one sequence there is.
    """

    __slots__ = ()

    @property
    def k_pages_like(self) -> Array:
        return self.kv_pages[0]

    @property
    def v_head_dim(self) -> int:
        return self.kv_pages[1].shape[3]

    @property
    def max_num_seqs(self) -> int:
        return self.page_indices.shape[0] if len(self.page_indices.shape) > 1 else 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedAttention(HeadsFirstCall):
    """Decode over a paged cache with heads first: one query a sequence, which sees all of the sequence's keys.

    Shapes in letters: S sequences, H query heads, D head size, K KV heads (K divides H), P pages of G positions, M
    pages a sequence can list.

    Args:
        q: [S, H, D] float32, float16 or bfloat16. D is a multiple of 8 from 16 to 512.
        k_pages, v_pages: [K, P, G, D] each, of q's dtype, or float8_e4m3fn, float8_e5m2 or int8; or, quantised, a pair
            `(weight, scales)` each, of such an 8-bit array and f32 [K, P, G, 1], whose values are weight * scales.
            jax's `QuantizedTensor`, of which they are weight * scales / 127.5, is taken as well. From torch any
            strides will do, the last one being 1.
        lengths: i32 [S], positions of each sequence in the cache.
        page_indices: i32 [S, M], page p of the row holds positions p * G and on; entries past the last used page are
            never read as pages.
        sm_scale: factor on q . k; default `D ** -0.5`.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`, after scaling.
        backend, options: as in `ragged_paged_attention`.

    Returns:
        out [S, H, D] of q's dtype; 0 for a sequence without keys, its pages missing included.

    Raises:
        InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.
    """

    OPERATION: ClassVar[str] = "paged_attention"

    q: Any  # [S, H, D]
    k_pages: Any  # [K, P, G, D], or a pair with f32 [K, P, G, 1]
    v_pages: Any
    lengths: Any  # i32 [S]
    page_indices: Any  # i32 [S, M]
    sm_scale: float | None = None
    soft_cap: float | None = None
    device: Device = NOWHERE

    def __post_init__(self) -> None:
        self._check("S")
        sizes = {"S": self.num_tokens}
        expect_array("lengths", self.lengths, "S", ("int32",), sizes)
        expect_array("page_indices", self.page_indices, "S M", ("int32",), sizes)

    @property
    def max_num_seqs(self) -> int:
        return self.num_tokens

    def check_values(self) -> None:
        """Raise `InvalidInput` naming the first sequence whose index values break the law. Expects NumPy arrays."""
        for seq, (length, row) in enumerate(zip(self.lengths, self.page_indices, strict=True)):
            self._check_row(f"lengths[{seq}]", length, f"page_indices[{seq}, *]", row)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillAttention(HeadsFirstCall):
    """One chunk of one sequence's queries over its pages, heads first, causally.

    Shapes in letters: T rows of the chunk, H query heads, D head size, K KV heads (K divides H), P pages of G
    positions, M pages that the sequence can list.

    Args:
        q: [T, H, D] float32, float16 or bfloat16. D is a multiple of 8 from 16 to 512.
        k_pages, v_pages: as in `paged_attention`.
        length: positions of the sequence in the cache, those of this chunk included: an int, or an i32 array of one.
        page_indices: i32 [M], page p of it holds positions p * G and on; entries past the last used page are never
            read as pages.
        sm_scale: factor on q . k; default `D ** -0.5`.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`, after scaling and before masking.
        sliding_window: a row sees only positions > its own - sliding_window (1 is itself alone).
        backend: as in `ragged_paged_attention`.
        options: as there, and on every backend `align`: where the chunk's rows stand. With "chunk", the default,
            chunks follow each other from position 0 on, and this is the one that holds position `length - 1`: row r
            stands at `(length - 1) // T * T + r`. With "end" the chunk is the last T positions: row r stands at
            `length - T + r`.

    Returns:
        out [T, H, D] of q's dtype; 0 for a row that stands before position 0 or from `length` on, and for one
        that sees no key, its pages being missing.

    Raises:
        InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.
    """

    OPERATION: ClassVar[str] = "prefill_attention"

    q: Any  # [T, H, D]
    k_pages: Any  # [K, P, G, D], or a pair with f32 [K, P, G, 1]
    v_pages: Any
    length: Any  # i32 [] or [1]
    page_indices: Any  # i32 [M]
    sm_scale: float | None = None
    soft_cap: float | None = None
    sliding_window: int | None = None
    align: str = "chunk"
    device: Device = NOWHERE

    def __post_init__(self) -> None:
        self._check("T")
        if not is_array(self.length):
            raise TypeError(f"expected length to be an int or an array, got {type(self.length).__name__}")
        if dtype_name(self.length) != "int32" or tuple(self.length.shape) not in ((), (1,)):
            got = f"{dtype_name(self.length)}{list(self.length.shape)}"
            raise InvalidInput(f"expected length to be int32 of shape [1], got {got}")
        expect_array("page_indices", self.page_indices, "M", ("int32",), {})
        expect_window(self.sliding_window)
        if self.align not in ALIGNMENTS:
            raise InvalidInput(f"expected align to be {' or '.join(map(repr, ALIGNMENTS))}, got {self.align!r}")

    @property
    def max_num_seqs(self) -> int:
        return 1

    def as_ragged(self, **changes: Any) -> RaggedHeadsFirst:
        """As the base's; the rows that belong to the sequence come first, so `cu_q_lens` is [0, their count]."""
        return HeadsFirstCall.as_ragged(self, **{"sliding_window": self.sliding_window} | changes)

    def check_values(self) -> None:
        """Raise `InvalidInput` naming the index value that breaks the law. Expects NumPy arrays."""
        length = np.asarray(self.length).reshape(())
        self._check_row("length", length, "page_indices[*]", self.page_indices)
