"""The records of the operations over heads-first pages: paged decode, and the chunked prefill of one sequence."""

from typing import Any, ClassVar

import numpy as np

from ragged_attention.calls.base import GroupedCall, Result, expect_groups, record
from ragged_attention.calls.cache_formats import KvFormat
from ragged_attention.calls.fields import (
    FLOATS,
    INT8,
    INT32,
    QUANTIZED,
    ArrayKind,
    Arrays,
    Integer,
    Length,
    Number,
    Pair,
    Sizes,
    Text,
    dtype_name,
    expect_array,
    expect_nonempty,
    field,
    is_array,
)
from ragged_attention.calls.paged import PagesCall, RaggedPagedAttention, expect_head_dim
from ragged_attention.errors import InvalidInput

ALIGNMENTS = ("chunk", "end")
JAX_LARGEST = 127.5  # divides the scales of jax's QuantizedTensor; see `is_jax_quantized`


def is_jax_quantized(pages: Any) -> bool:
    """Whether pages are jax's `QuantizedTensor(weight, scales)`. It stands for weight * scales / 127.5."""
    return hasattr(pages, "weight") and hasattr(pages, "scales")


def expect_heads_first(name: str, pages: Any, call: Any, sizes: Sizes) -> None:
    """Check heads-first pages: an array [K, P, G, D], or a pair of 8-bit pages and their scales, f32 [K, P, G, 1]."""
    is_pair = isinstance(pages, (tuple, list))
    if is_pair and len(pages) != 2:
        raise TypeError(f"expected {name} to be an array or a pair (weight, scales), got {len(pages)} values")
    dtypes = (dtype_name(call.q), *QUANTIZED) if name == "k_pages" else (call.cache_dtype,)
    if name == "v_pages" and is_pair != call.quantized:
        expected, got = ("a pair", "an array") if call.quantized else ("an array", "a pair")
        raise TypeError(f"expected v_pages to be {expected} as k_pages is, got {got}")
    if not is_pair:
        expect_array(name, pages, "K P G D", dtypes, sizes)
        if dtype_name(pages) == INT8:
            advice = "give scales of 1 if the codes are the values"
            raise InvalidInput(f"expected {name} of {INT8} to be a pair (weight, scales), got an array: {advice}")
        sizes.bind("K P G D", pages)
        return
    weight, scales = pages
    expect_array(f"{name}[0]", weight, "K P G D", tuple(dtype for dtype in dtypes if dtype in QUANTIZED), sizes)
    sizes.bind("K P G D", weight)
    expect_array(f"{name}[1]", scales, "K P G 1", ("float32",), {**sizes, "1": 1})


class HeadsFirstPages(Pair):
    """Heads-first pages. A `QuantizedTensor` of jax becomes a pair."""

    def prepare(self, name: str, value: Any, arrays: Arrays) -> Any:
        if is_jax_quantized(value):
            weight, scales = (arrays.array(name, array) for array in (value.weight, value.scales))
            if is_array(scales) and dtype_name(scales) in FLOATS:
                scales = arrays.cast(scales, "float32") / JAX_LARGEST
            return weight, scales
        return super().prepare(name, value, arrays)


class HeadsFirstSizes(PagesCall):
    """The sizes of a call whose pages are [K, P, G, D]."""

    @property
    def num_kv_heads(self) -> int:
        return self.k_pages_like.shape[0]

    @property
    def num_pages(self) -> int:
        return self.k_pages_like.shape[1]

    @property
    def page_size(self) -> int:
        return self.k_pages_like.shape[2]


class HeadsFirstCall(HeadsFirstSizes, GroupedCall):
    """The base of records with heads-first pages."""

    ATTENDS: ClassVar[bool] = True
    TAKES_OUT: ClassVar[bool] = True
    CACHE: ClassVar[str] = "k_pages"

    k_pages: Any
    v_pages: Any
    soft_cap: float | None

    @property
    def quantized(self) -> bool:
        """Whether the pages are pairs of 8-bit values and their scales."""
        return isinstance(self.k_pages, (tuple, list))

    @property
    def arrays(self) -> tuple[Any, Any]:
        """The stored K and V, without their scales."""
        return (self.k_pages[0], self.v_pages[0]) if self.quantized else (self.k_pages, self.v_pages)

    @property
    def scales(self) -> tuple[Any, Any]:
        """The scales of K and V, f32 [K, P, G, 1] each; (None, None) if the pages are not pairs."""
        return (self.k_pages[1], self.v_pages[1]) if self.quantized else (None, None)

    @property
    def row_format(self) -> KvFormat:
        """The format of pages that are pairs: one scale for each row."""
        return KvFormat(name="row_scales", codes=self.cache_dtype, scales="float32")

    @property
    def num_tokens(self) -> int:
        return self.q.shape[0]

    def _check(self, sizes: Sizes) -> None:
        expect_head_dim("q.shape[2]", self.head_dim)
        if self.page_size < 1:
            raise InvalidInput(f"expected page_size >= 1, got {self.page_size}")
        expect_nonempty("k_pages", "num_kv_heads", self.num_kv_heads)
        expect_groups(self.num_q_heads, self.num_kv_heads)

    def results(self) -> tuple[Result, ...]:
        return (Result(self.out_shape, self.q.dtype),)

    def as_ragged(self, **changes: Any) -> "RaggedHeadsFirst":
        """This call as a call of ragged paged attention, with the index arrays in `changes`.

        Its pages are the stored arrays. If they have scales, the caller must apply these.
        """
        values: dict[str, Any] = dict.fromkeys(RaggedPagedAttention.argument_names())
        values |= {"q": self.q, "kv_pages": self.arrays, "page_indices": self.page_indices, "causal": True}
        values |= {"sm_scale": self.sm_scale, "soft_cap": self.soft_cap, "return_lse": False}
        return RaggedHeadsFirst.unchecked(**values | changes, device=self.device)


class RaggedHeadsFirst(HeadsFirstSizes, RaggedPagedAttention):
    """A call of ragged paged attention with a pair of heads-first pages, for backends that can read them.

    `page_indices` may be i32 [M], the block table of a single sequence.
    """

    @property
    def v_head_dim(self) -> int:
        return self.kv_pages[1].shape[3]

    @property
    def max_num_seqs(self) -> int:
        return self.page_indices.shape[0] if len(self.page_indices.shape) > 1 else 1


def _pages(name: str) -> HeadsFirstPages:
    return HeadsFirstPages((name, f"{name}_scales"), expect_heads_first, unit_stride=True)


@record
class PagedAttention(HeadsFirstCall):
    """The arguments of `paged_attention`, whose docstring explains them."""

    q: Any = field(ArrayKind("S H D", FLOATS))
    k_pages: Any = field(_pages("k_pages"))
    v_pages: Any = field(_pages("v_pages"))
    lengths: Any = field(ArrayKind("S", INT32))
    page_indices: Any = field(ArrayKind("S M", INT32))
    sm_scale: float | None = field(Number(), default=None)
    soft_cap: float | None = field(Number(positive=True), default=None)

    @property
    def max_num_seqs(self) -> int:
        return self.num_tokens

    def as_ragged(self, **changes: Any) -> RaggedHeadsFirst:
        return super().as_ragged(**{"max_q_len": 1} | changes)

    def check_values(self) -> None:
        self._check_table("lengths", self.lengths)


@record
class PrefillAttention(HeadsFirstCall):
    """The arguments of `prefill_attention`, whose docstring explains them."""

    q: Any = field(ArrayKind("T H D", FLOATS))
    k_pages: Any = field(_pages("k_pages"))
    v_pages: Any = field(_pages("v_pages"))
    length: Any = field(Length())
    page_indices: Any = field(ArrayKind("M", INT32))
    sm_scale: float | None = field(Number(), default=None)
    soft_cap: float | None = field(Number(positive=True), default=None)
    sliding_window: int | None = field(Integer(least=1, symbolic=True), default=None)
    align: str = field(Text(choices=ALIGNMENTS), default="chunk")

    @property
    def max_num_seqs(self) -> int:
        return 1

    def as_ragged(self, **changes: Any) -> RaggedHeadsFirst:
        """As in the base class. The sequence's rows come first, so `cu_q_lens` should be [0, number of these rows]."""
        return HeadsFirstCall.as_ragged(self, **{"sliding_window": self.sliding_window} | changes)

    def check_values(self) -> None:
        length = np.asarray(self.length).reshape(())
        self._check_row("length", length, "page_indices[*]", self.page_indices)
