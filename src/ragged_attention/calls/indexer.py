"""The records of the lightning indexer: its logits, their top-k, and its quantised keys."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from ragged_attention.calls.base import Call, Result, gradients_of, record
from ragged_attention.calls.fields import (
    FLOATS,
    INT32,
    ArrayKind,
    Arrays,
    Count,
    Flag,
    Integer,
    Sizes,
    dtype_name,
    expect_array,
    expect_nonempty,
    field,
)
from ragged_attention.calls.paged import (
    TABLES,
    PagesCall,
    TableWrite,
    check_ragged_values,
    expect_packed_rows,
    live_sequences,
    tables_for_slots,
)
from ragged_attention.calls.varlen import like_q
from ragged_attention.errors import InvalidInput

E4M3 = "float8_e4m3fn"
SCALE_BYTES = 4  # for each key in a page of bytes
WHY_NO_GRADIENT = "it serves to choose keys, and a choice has none"
MAX_TOP_K = 4096


def expect_index_dim(name: str, size: int) -> None:
    if size % 16 or not 16 <= size <= 256:
        raise InvalidInput(f"expected {name} to be a multiple of 16 from 16 to 256, got {size}")


def expect_top_k(top_k: int) -> None:
    if top_k > MAX_TOP_K:
        raise InvalidInput(f"expected top_k <= {MAX_TOP_K}, got {top_k}")


@record
class IndexerQueries(Call):
    """The first arguments of `indexer_logits` and `indexer_topk`."""

    WHY_NO_GRADIENT: ClassVar[str] = WHY_NO_GRADIENT

    q: Any = field(ArrayKind("T H D", (*FLOATS, E4M3)))
    keys: Any = field(ArrayKind(unit_stride=True))
    weights: Any = field(ArrayKind("T H", ("float32",)))


@record
class IndexerSelection(IndexerQueries):
    """The first arguments of `indexer_topk`."""

    top_k: int = field(Integer(least=1))


class KeysCall(PagesCall):
    """The base of records with index queries, and with keys that are packed or in pages.

    A call has one of three forms. Each query sees a range of packed keys (`starts`, `stops`), the packed keys in its
    list (`indices`), or the causal part of its sequence's pages.
    """

    CACHE: ClassVar[str] = "keys"
    FORMS: ClassVar[tuple[tuple[str, ...], ...]] = (("starts", "stops"), TABLES)  # the arguments that select each form
    # The further arguments that only one form has, by one of the arguments that select this form.
    OF_FORMS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "starts": ("relative", "max_keys"),
        "page_indices": ("num_seqs", "ratio"),
    }

    q: Any
    keys: Any
    key_scale: Any
    starts: Any
    stops: Any
    indices: Any = None  # a list of packed keys for each query
    relative: bool  # whether columns count from each query's first packed key
    max_keys: int | None
    ratio: int  # the number of tokens per key in a page

    def _expect_one_form(self) -> None:
        """Raise unless the call has the arguments of exactly one form."""
        names = [name for form in self.FORMS for name in form if getattr(self, name) is not None]
        form = next((form for form in self.FORMS if [*form] == names), None)
        if form is None:
            got = ", ".join(names) or "neither"
            raise InvalidInput(f"expected {', or '.join(map(_listed, self.FORMS))}, got {got}")
        changed = self.changed()
        for owner, others in self.OF_FORMS.items():
            for name in others:
                if name in changed and owner not in form:
                    wanted, other = (_short(each) for each in (self._form_of(owner), form))
                    raise InvalidInput(f"expected {name} only with {wanted}, got it with {other}")

    def _check_queries(self) -> None:
        expect_index_dim("q.shape[2]", self.head_dim)
        expect_nonempty("q", "num_heads", self.num_heads)
        self._expect_one_form()

    def _expect_max_keys(self) -> None:
        if self.max_keys is not None and not self.relative:
            raise InvalidInput(f"expected max_keys only with relative=True, got {self.max_keys}")

    def _form_of(self, name: str) -> tuple[str, ...]:
        return next(form for form in self.FORMS if name in form)

    @property
    def listed(self) -> bool:
        """Whether each query has a list of packed keys."""
        return self.indices is not None

    @property
    def key_dtypes(self) -> tuple[str, ...]:
        """The valid dtypes of keys that are not pages of bytes."""
        return tuple(dict.fromkeys((dtype_name(self.q), E4M3)))

    def _expect_bytes(self) -> None:
        """Check the shape of keys that are pages of bytes."""
        sizes = {"1": 1, "D+4": self.head_dim + SCALE_BYTES}
        expect_array("keys", self.keys, "P G 1 D+4", ("uint8",), sizes)

    def _expect_key_scale(self, letters: str) -> None:
        """Check the scales of keys, whose axes `letters` are those of `keys` except the last."""
        if self.paged:
            expect_nonempty("keys", "page_size", self.page_size)
        if self.key_scale is None:
            return
        if self.bytes:
            raise InvalidInput("expected key_scale=None with pages of bytes, which hold the scales, got an array")
        known: dict[str, int] = dict(zip(letters.split(), self.keys.shape, strict=False))
        expect_array("key_scale", self.key_scale, letters, ("float32",), known)

    @classmethod
    def prepare(cls, arguments: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        prepared = super().prepare(arguments, arrays)
        return live_sequences(prepared) if "num_seqs" in prepared else prepared

    def check_strides(self, strides: Callable[[Any], tuple[int, ...]]) -> None:
        """Refuse gaps between the rows of a page of bytes, which holds all values and then all scales."""
        if self.bytes:
            expect_packed_rows("keys", self.keys, strides)

    @property
    def paged(self) -> bool:
        return self.page_indices is not None

    @property
    def bytes(self) -> bool:
        """Whether keys are pages of bytes: e4m3 values followed by their scales."""
        return self.paged and dtype_name(self.keys) == "uint8"

    @property
    def key_dtype(self) -> str:
        """The dtype of the keys without their scales."""
        return E4M3 if self.bytes else dtype_name(self.keys)

    @property
    def num_tokens(self) -> int:
        return self.q.shape[0]

    @property
    def num_heads(self) -> int:
        return self.q.shape[1]

    @property
    def head_dim(self) -> int:
        return self.q.shape[2]

    @property
    def page_size(self) -> int:
        """The number of positions per page; packed keys count as one page."""
        return self.keys.shape[1] if self.paged else self.keys.shape[0]

    @property
    def columns(self) -> int:
        """The number of positions that a query may see."""
        if self.listed:
            return self.indices.shape[1]
        if self.paged:
            return self.pages_per_seq * self.page_size
        return self.keys.shape[0] if self.max_keys is None else self.max_keys

    @property
    def token_capacity(self) -> int:
        """The maximum number of tokens per sequence; longer lengths are clamped to it. See `PagesCall.capacity`.

        The last `ratio - 1` of these tokens have no key yet.
        """
        return min((self.columns + 1) * self.ratio - 1, 2**31 - 2**16)

    def check_values(self) -> None:
        if self.paged:
            check_ragged_values(self, ratio=self.ratio)
        else:
            check_ranges(self.starts, self.stops, self.keys.shape[0])


def _listed(form: tuple[str, ...]) -> str:
    return " and ".join(form) if len(form) < 3 else ", ".join(form)


def _short(form: tuple[str, ...]) -> str:
    """The name of a form in an error message: its arguments, or only the first if there are more than two."""
    return _listed(form) if len(form) < 3 else form[0]


@record
class IndexerCall(IndexerQueries, KeysCall):
    """The base of the records with queries, weights, and the keys that each query sees."""

    key_scale: Any = field(ArrayKind(), default=None)
    starts: Any = field(ArrayKind("T", INT32), default=None)
    stops: Any = field(ArrayKind("T", INT32), default=None)
    relative: bool = field(Flag(), default=False)
    max_keys: int | None = field(Integer(least=1), default=None)
    page_indices: Any = field(ArrayKind("S M", INT32), default=None)
    kv_lens: Any = field(ArrayKind("S", INT32), default=None)
    cu_q_lens: Any = field(ArrayKind("S+1", INT32), default=None)
    num_seqs: Any = field(Count(), default=None)
    ratio: int = field(Integer(least=1), default=1)

    def _check(self, sizes: Sizes) -> None:
        self._check_queries()
        self._expect_keys()
        self._expect_max_keys()

    def _expect_keys(self) -> None:
        if self.paged and len(self.keys.shape) == 4:
            self._expect_bytes()
        else:
            letters = "P G D" if self.paged else "N D"
            expect_array("keys", self.keys, letters, self.key_dtypes, {"D": self.head_dim})
        self._expect_key_scale("P G" if self.paged else "N")


def check_ranges(starts: Any, stops: Any, limit: int) -> None:
    """Raise `InvalidInput` for the first edge of a range that is outside [0, limit]. Expects NumPy arrays or None."""
    for name, edges in (("starts", starts), ("stops", stops)):
        if edges is None:
            continue
        bad = np.flatnonzero((edges < 0) | (edges > limit))
        if bad.size:
            raise InvalidInput(f"expected {name}[{bad[0]}] between 0 and {limit}, got {edges[bad[0]]}")


KEY_LISTS = ArrayKind("T L", INT32)
FORMS_WITH_LISTS = (("starts", "stops"), ("indices",), TABLES)


@record
class IndexerLogits(IndexerCall):
    """The arguments of `indexer_logits`, whose docstring explains them."""

    DIFFERENTIABLE: ClassVar[tuple[str, ...]] = ("q", "keys", "weights")
    RESULT_GRADIENTS: ClassVar[Mapping[str, int]] = {"d_logits": 0}
    SAVED_RESULTS: ClassVar[Mapping[str, int]] = {}
    FORMS: ClassVar[tuple[tuple[str, ...], ...]] = FORMS_WITH_LISTS

    indices: Any = field(KEY_LISTS, default=None)

    def results(self) -> tuple[Result, ...]:
        return (Result((self.num_tokens, self.columns), "float32"),)

    @classmethod
    def expect_gradient(cls, arguments: Mapping[str, Any]) -> None:
        where = "if a gradient is required"
        if arguments["page_indices"] is not None:
            raise InvalidInput(f"expected packed keys, with starts and stops or indices, {where}, got page_indices")
        own, got = (dtype_name(arguments[name]) for name in ("q", "keys"))
        if own not in FLOATS:
            raise InvalidInput(f"expected q.dtype to be {' or '.join(FLOATS)} {where}, got {own}")
        if got != own:
            raise InvalidInput(f"expected keys.dtype to be that of q, {own}, {where}, got {got}")


@record
class IndexerLogitsBackward(KeysCall):
    """The arguments of `indexer_logits_backward`, whose docstring explains them."""

    NUM_RESULTS: ClassVar[int | None] = 3
    FORMS: ClassVar[tuple[tuple[str, ...], ...]] = FORMS_WITH_LISTS[:2]
    OF_FORMS: ClassVar[Mapping[str, tuple[str, ...]]] = {"starts": ("relative", "max_keys")}

    d_logits: Any = field(ArrayKind("T C", ("float32",), checked_last=True))
    q: Any = field(ArrayKind("T H D", FLOATS))
    keys: Any = field(ArrayKind("N D", like_q, unit_stride=True))
    weights: Any = field(ArrayKind("T H", ("float32",)))
    key_scale: Any = field(ArrayKind("N", ("float32",)), default=None)
    starts: Any = field(ArrayKind("T", INT32), default=None)
    stops: Any = field(ArrayKind("T", INT32), default=None)
    relative: bool = field(Flag(), default=False)
    max_keys: int | None = field(Integer(least=1), default=None)
    indices: Any = field(KEY_LISTS, default=None)

    # Keys in pages have no gradient.
    page_indices = kv_lens = cu_q_lens = num_seqs = None
    ratio = 1

    def _check(self, sizes: Sizes) -> None:
        self._check_queries()
        self._expect_max_keys()
        sizes["C"] = self.columns

    def results(self) -> tuple[Result, ...]:
        return gradients_of(self, IndexerLogits)


@record
class IndexerTopk(IndexerCall, IndexerSelection):
    """The arguments of `indexer_topk`, whose docstring explains them."""

    candidate_blocks: Any = field(ArrayKind("T B", INT32), default=None)
    candidate_block_size: int | None = field(Integer(least=1), default=None)

    def _check(self, sizes: Sizes) -> None:
        super()._check(sizes)
        expect_top_k(self.top_k)
        if (self.candidate_blocks is None) != (self.candidate_block_size is None):
            given, missing = "candidate_blocks", "candidate_block_size"
            if self.candidate_blocks is None:
                given, missing = missing, given
            raise InvalidInput(f"expected {missing} with {given}, got None")

    def results(self) -> tuple[Result, ...]:
        return (Result((self.num_tokens, self.top_k), "int32"),)


@record
class TopKIndices(Call):
    """The arguments of `top_k_indices`, whose docstring explains them."""

    WHY_NO_GRADIENT: ClassVar[str] = WHY_NO_GRADIENT

    logits: Any = field(ArrayKind("T N", ("float32",)))
    top_k: int = field(Integer(least=1))
    starts: Any = field(ArrayKind("T", INT32), default=None)
    stops: Any = field(ArrayKind("T", INT32), default=None)

    def _check(self, sizes: Sizes) -> None:
        expect_top_k(self.top_k)

    def results(self) -> tuple[Result, ...]:
        return (Result((self.num_tokens, self.top_k), "int32"),)

    @property
    def num_tokens(self) -> int:
        return self.logits.shape[0]

    @property
    def columns(self) -> int:
        return self.logits.shape[1]

    def check_values(self) -> None:
        check_ranges(self.starts, self.stops, self.columns)


@record
class QuantizeIndexerKeys(Call):
    """The arguments of `quantize_indexer_keys`, whose docstring explains them."""

    NUM_RESULTS: ClassVar[int | None] = 2

    k: Any = field(ArrayKind("N D", FLOATS))
    power_of_two: bool = field(Flag(), default=False)

    def _check(self, sizes: Sizes) -> None:
        expect_index_dim("k.shape[1]", self.k.shape[1])

    def results(self) -> tuple[Result, ...]:
        return Result(self.k.shape, E4M3), Result(self.k.shape[:1], "float32")


@record
class WriteIndexerCache(TableWrite):
    """The arguments of `write_indexer_cache`, whose docstring explains them."""

    CACHE: ClassVar[str] = "cache"

    k: Any = field(ArrayKind("T D", FLOATS))
    cache: Any = field(ArrayKind("P G 1 D+4", ("uint8",), unit_stride=True, written=True))
    slot_mapping: Any = field(ArrayKind("T", ("int32", "int64")), default=None)
    power_of_two: bool = field(Flag(), default=False)
    page_indices: Any = field(ArrayKind("S M", INT32), default=None)
    kv_lens: Any = field(ArrayKind("S", INT32), default=None)
    cu_q_lens: Any = field(ArrayKind("S+1", INT32), default=None)
    num_seqs: Any = field(Count(), default=None)

    def _check(self, sizes: Sizes) -> None:
        self._expect_slots_or_tables()
        expect_index_dim("k.shape[1]", self.head_dim)
        expect_array("cache", self.cache, "P G 1 D+4", ("uint8",), {"1": 1, "D+4": self.head_dim + SCALE_BYTES})
        expect_nonempty("cache", "page_size", self.page_size)

    def results(self) -> tuple[Result, ...]:
        return (Result(self.cache.shape, "uint8"),)

    @classmethod
    def prepare(cls, arguments: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        return live_sequences(super().prepare(tables_for_slots(arguments), arrays))

    @property
    def head_dim(self) -> int:
        return self.k.shape[1]

    @property
    def num_tokens(self) -> int:
        return self.k.shape[0]

    def check_strides(self, strides: Callable[[Any], tuple[int, ...]]) -> None:
        expect_packed_rows("cache", self.cache, strides)
