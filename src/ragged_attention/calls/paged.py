"""The records of the operations over a paged KV cache of K and V heads."""

import dataclasses
import numbers
from typing import Any, ClassVar

import numpy as np

from ragged_attention.calls.base import (
    FLOATS,
    NOWHERE,
    QUANTIZED,
    Array,
    Call,
    Device,
    GroupedCall,
    dtype_name,
    expect_array,
    expect_bool,
    expect_groups,
    expect_number,
    is_array,
    is_number,
)
from ragged_attention.errors import InvalidInput


def expect_window(value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"expected sliding_window to be an int, got {type(value).__name__}")
    if int(value) < 1:
        raise InvalidInput(f"expected sliding_window >= 1, got {value}")


def expect_num_seqs(value: Any, max_num_seqs: int) -> None:
    if value is None:
        return
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        if not 0 <= int(value) <= max_num_seqs:
            raise InvalidInput(f"expected num_seqs between 0 and {max_num_seqs=}, got {value}")
        return
    if not is_array(value):
        raise TypeError(f"expected num_seqs to be an int or an array, got {type(value).__name__}")
    if dtype_name(value) != "int32" or tuple(value.shape) not in ((), (1,)):
        raise InvalidInput(f"expected num_seqs to be int32 of shape [1], got {dtype_name(value)}{list(value.shape)}")


def _expect_scale(name: str, value: Any, num_kv_heads: int) -> None:
    if value is None or is_number(value):
        if value is not None:
            expect_number(name, value)
        return
    if not is_array(value):
        raise TypeError(f"expected {name} to be a number or an array, got {type(value).__name__}")
    if dtype_name(value) not in FLOATS or tuple(value.shape) not in ((), (1,), (num_kv_heads,)):
        raise InvalidInput(
            f"expected {name} to be a float array of shape [] or [{num_kv_heads=}], "
            f"got {dtype_name(value)}{list(value.shape)}"
        )


def expect_pages(kv_pages: Any) -> None:
    """Check `kv_pages` by itself: combined `[P, G, 2K, D]`, or a `(k_pages, v_pages)` pair of `[P, G, K, D]`."""
    dtypes = (*FLOATS, *QUANTIZED)
    if not isinstance(kv_pages, tuple | list):
        expect_array("kv_pages", kv_pages, "P G 2K D", dtypes, {})
        if (combined := kv_pages.shape[2]) % 2 or combined == 0:
            raise InvalidInput(f"expected kv_pages.shape[2] to be 2 * num_kv_heads, an even number, got {combined}")
        return
    if len(kv_pages) != 2:
        raise TypeError(f"expected kv_pages to be an array or a pair (k_pages, v_pages), got {len(kv_pages)} values")
    expect_array("k_pages", kv_pages[0], "P G K D", dtypes, {})
    sizes = dict(zip("PGK", kv_pages[0].shape, strict=False))
    expect_array("v_pages", kv_pages[1], "P G K D_v", (dtype_name(kv_pages[0]),), sizes)
    if sizes["K"] == 0:
        raise InvalidInput("expected k_pages to have num_kv_heads >= 1, got 0")


def expect_head_dim(name: str, head_dim: int) -> None:
    if head_dim % 8 or not 16 <= head_dim <= 512:
        raise InvalidInput(f"expected {name} to be a multiple of 8 from 16 to 512, got {head_dim}")


class PagedCall(Call):
    """What the records with `kv_pages` share: sizes, whichever of the two cache layouts is given."""

    kv_pages: Any
    page_indices: Any

    @property
    def combined(self) -> bool:
        """Whether K and V lie interleaved in one array."""
        return not isinstance(self.kv_pages, tuple | list)

    @property
    def k_pages_like(self) -> Array:
        return self.kv_pages if self.combined else self.kv_pages[0]

    @property
    def cache_dtype(self) -> str:
        return dtype_name(self.k_pages_like)

    @property
    def num_pages(self) -> int:
        return self.k_pages_like.shape[0]

    @property
    def page_size(self) -> int:
        return self.k_pages_like.shape[1]

    @property
    def capacity(self) -> int:
        """The most positions one sequence's row of `page_indices` can hold; longer lengths count as this."""
        return min(self.page_indices.shape[1] * self.page_size, 2**31 - 2**16)

    @property
    def num_kv_heads(self) -> int:
        return self.k_pages_like.shape[2] // (2 if self.combined else 1)

    @property
    def v_head_dim(self) -> int:
        return (self.kv_pages if self.combined else self.kv_pages[1]).shape[3]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RaggedPagedAttention(PagedCall, GroupedCall):
    """Attention of ragged queries over a paged KV cache: prefill, chunked prefill, decode and any mix of them.

    Shapes in letters: T query tokens, H query heads, D head size, P pages of G positions, K KV heads (K divides H),
    S sequences, M pages a sequence can list.

    Args:
        q: [T, H, D] float32, float16 or bfloat16; the queries of all sequences, one after another. Rows from
            `cu_q_lens[num_seqs]` on are padding. D is a multiple of 8 from 16 to 512.
        kv_pages: the cache, [P, G, 2K, D] with K of head h at 2h and V at 2h + 1, or a pair `(k_pages, v_pages)` of
            [P, G, K, D] and [P, G, K, D_v]. Its dtype is that of `q`, or float8_e4m3fn, float8_e5m2 or int8. From
            torch any strides will do, the last one being 1. Sequences may share pages.
        kv_lens: i32 [S], positions of each sequence in the cache, those of this step included.
        page_indices: i32 [S, M], page p of the row holds positions p * G and on; entries past the last used page are
            never read as pages.
        cu_q_lens: i32 [S + 1], prefix sums of the query lengths; entries past `num_seqs` are never read.
        num_seqs: how many sequences are live, an int or an i32 array of one (which stays on the device); None is S.
        sm_scale: factor on q . k; default `D ** -0.5`.
        causal: query i of a sequence stands at position `kv_len - q_len + i` and sees positions up to its own;
            otherwise it sees all of `kv_len`.
        sliding_window: it sees only positions > its own - sliding_window (1 is itself alone). With `causal=False`
            this bounds the left side only.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`, after scaling and before masking.
        sinks: f32 [H], a logit a head that joins the softmax's denominator and brings no value.
        k_scale, v_scale: a cached value times its scale is the true one: a float, or an array of [] or [K].
        return_lse: also return the log-sum-exp.
        new_kv: this step's keys and values, a pair of [T, K, D] and [T, K, D_v] of q's dtype, one for each query. They
            are written into the pages before anything is attended, as `write_kv_pages` does by `page_indices`,
            `kv_lens` and `cu_q_lens`. With the option `fused_update` a backend that has it does both at once.
        backend: this call's backend, a name or an ordered list of them; see `ragged_attention.config`.
        options: this call's tunables, fields of the chosen backend's `Tile`.

    Returns:
        out [T, H, D_v] of q's dtype; with `return_lse` also lse [T, H] float32, the natural log-sum-exp of the
        visible logits, sinks not counted. A query that sees no key, and a padding row, gets out 0 and lse -inf.
        With `new_kv` last of all the pages: in torch those given, written in place, in jax new ones, as from
        `write_kv_pages`.
        No index value makes a kernel read outside the arrays: lengths are held within what the arrays can hold,
        and a page index outside [0, P) makes its positions invisible. Softmax and sums are in float32.

    Raises:
        InvalidInput: (a ValueError) shapes, dtypes or options that contradict the above; values of the index arrays
            only under `validate="full"`.
        TypeError: a value of a wrong kind.
        Unsupported: no backend asked for takes the call; the message has each one's reason.

    The operation is JAX's `ragged_paged_attention` joined with ejKernel's version of it (sinks); online softmax after
    Milakov and Gimelshein (2018) and FlashAttention, splits of the keys after Flash-Decoding.
    """

    OPERATION: ClassVar[str] = "ragged_paged_attention"

    q: Any  # [T, H, D]
    kv_pages: Any  # [P, G, 2K, D], or a pair [P, G, K, D], [P, G, K, D_v]
    kv_lens: Any  # i32 [S]
    page_indices: Any  # i32 [S, M]
    cu_q_lens: Any  # i32 [S + 1]
    num_seqs: Any = None  # int, i32 [1] or None
    sm_scale: float | None = None
    causal: bool = True
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: Any = None  # f32 [H]
    k_scale: Any = None  # float, [] or [K]
    v_scale: Any = None
    return_lse: bool = False
    new_kv: Any = None  # a pair [T, K, D], [T, K, D_v], for a room to write
    device: Device = NOWHERE

    def __post_init__(self) -> None:
        expect_array("q", self.q, "T H D", FLOATS, {})
        expect_pages(self.kv_pages)
        _, num_q_heads, head_dim = self.q.shape
        expect_head_dim("q.shape[2]", head_dim)
        if (got := self.k_pages_like.shape[3]) != head_dim:
            raise InvalidInput(
                f"expected {'kv_pages' if self.combined else 'k_pages'}.shape[3] = {head_dim=}, got {got}"
            )
        expect_head_dim("v_pages.shape[3]", self.v_head_dim)
        if self.page_size < 1:
            raise InvalidInput(f"expected page_size >= 1, got {self.page_size}")
        expect_groups(num_q_heads, self.num_kv_heads)
        if self.cache_dtype not in (dtype_name(self.q), *QUANTIZED):
            raise InvalidInput(
                f"expected kv_pages.dtype to be that of q, {dtype_name(self.q)}, or {' or '.join(QUANTIZED)}, "
                f"got {self.cache_dtype}"
            )
        self._check_indices()
        self._check_options()
        self._check_new()

    def _check_indices(self) -> None:
        expect_array("kv_lens", self.kv_lens, "S", ("int32",), {})
        sizes = {"S": self.kv_lens.shape[0], "S+1": self.kv_lens.shape[0] + 1, "H": self.q.shape[1]}
        expect_array("page_indices", self.page_indices, "S M", ("int32",), sizes)
        expect_array("cu_q_lens", self.cu_q_lens, "S+1", ("int32",), sizes)
        expect_num_seqs(self.num_seqs, sizes["S"])
        if self.sinks is not None:
            expect_array("sinks", self.sinks, "H", ("float32",), sizes)

    def _check_options(self) -> None:
        if self.sm_scale is not None:
            expect_number("sm_scale", self.sm_scale)
        expect_bool("causal", self.causal)
        expect_window(self.sliding_window)
        if self.soft_cap is not None:
            expect_number("soft_cap", self.soft_cap, positive=True)
        _expect_scale("k_scale", self.k_scale, self.num_kv_heads)
        _expect_scale("v_scale", self.v_scale, self.num_kv_heads)
        expect_bool("return_lse", self.return_lse)

    def _check_new(self) -> None:
        if self.new_kv is None:
            return
        if not isinstance(self.new_kv, tuple | list):
            raise TypeError(f"expected new_kv to be a pair (k, v), got {type(self.new_kv).__name__}")
        if len(self.new_kv) != 2:
            raise TypeError(f"expected new_kv to be a pair (k, v), got {len(self.new_kv)} values")
        sizes = {"T": self.num_tokens, "K": self.num_kv_heads, "D": self.head_dim, "D_v": self.v_head_dim}
        for place, shape in enumerate(("T K D", "T K D_v")):
            expect_array(f"new_kv[{place}]", self.new_kv[place], shape, (dtype_name(self.q),), sizes)

    @property
    def num_tokens(self) -> int:
        return self.q.shape[0]

    @property
    def max_num_seqs(self) -> int:
        return self.kv_lens.shape[0]

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return (self.num_tokens, self.num_q_heads, self.v_head_dim)

    def check_values(self) -> None:
        """Raise `InvalidInput` naming the first sequence whose index values break the law. Expects NumPy arrays."""
        _check_ragged_values(
            self.kv_lens,
            self.page_indices,
            self.cu_q_lens,
            self.num_seqs,
            self.num_tokens,
            self.num_pages,
            self.page_size,
        )


def _check_ragged_values(
    kv_lens: Any, page_indices: Any, cu_q_lens: Any, num_seqs: Any, num_tokens: int, num_pages: int, page_size: int
) -> None:
    max_num_seqs, pages_per_seq = page_indices.shape
    count = max_num_seqs if num_seqs is None else int(np.asarray(num_seqs).reshape(()))
    if not 0 <= count <= max_num_seqs:
        raise InvalidInput(f"expected num_seqs between 0 and {max_num_seqs=}, got {count}")
    starts = cu_q_lens[: count + 1].astype(np.int64)
    if count and starts[0] != 0:
        raise InvalidInput(f"expected cu_q_lens[0] = 0, got {starts[0]}")
    for seq in range(count):
        q_len, kv_len = int(starts[seq + 1] - starts[seq]), int(kv_lens[seq])
        if q_len < 0:
            raise InvalidInput(f"expected cu_q_lens to ascend, got {starts[seq]}, {starts[seq + 1]} at sequence {seq}")
        if starts[seq + 1] > num_tokens:
            raise InvalidInput(f"expected cu_q_lens[{seq + 1}] <= {num_tokens=}, got {starts[seq + 1]}")
        if not 0 <= kv_len <= pages_per_seq * page_size:
            limit = f"pages_per_seq * page_size = {pages_per_seq * page_size}"
            raise InvalidInput(f"expected kv_lens[{seq}] between 0 and {limit}, got {kv_len}")
        if q_len > kv_len:
            raise InvalidInput(f"expected q_len <= kv_lens[{seq}] = {kv_len}, got q_len {q_len} of sequence {seq}")
        pages = page_indices[seq, : -(-kv_len // page_size)] if q_len else page_indices[seq, :0]
        bad = np.flatnonzero((pages < 0) | (pages >= num_pages))
        if bad.size:
            where = f"page_indices[{seq}, {bad[0]}]"
            raise InvalidInput(f"expected {where} between 0 and {num_pages - 1}, got {pages[bad[0]]}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WriteKvPages(PagedCall):
    """Write this step's K and V into the pages of the cache, quantising where the pages are 8-bit.

    Letters as in `ragged_paged_attention`.

    Args:
        k, v: [T, K, D] and [T, K, D_v], float32, float16 or bfloat16.
        kv_pages: combined pages or a pair, as `ragged_paged_attention` takes them.
        slot_mapping: i32 or i64 [T], the slot `page * G + offset` of each token; -1, and anything else outside
            [0, P * G), is skipped. A tuple `(page_indices, kv_lens, cu_q_lens)` is taken as those three.
        page_indices, kv_lens, cu_q_lens, num_seqs: the tables of the attention call instead of slots: token i of a
            sequence goes to position `kv_len - q_len + i`. A page index outside [0, P) is skipped.
        k_scale, v_scale: what is stored is `k / k_scale`, in float32, rounded to nearest even and saturating at the
            format's largest finite value; a float, or an array of [] or [K].
        backend, options: as in `ragged_paged_attention`.

    Returns:
        The pages. In torch they are written in place and are the tensors given; in jax they are new arrays, whose
        memory is that of the given ones if those are donated. Nothing but the tokens' slots is touched. Of two
        tokens for one slot either may stay.

    Raises:
        InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.
    """

    OPERATION: ClassVar[str] = "write_kv_pages"

    k: Any  # [T, K, D]
    v: Any  # [T, K, D_v]
    kv_pages: Any  # [P, G, 2K, D], or a pair [P, G, K, D], [P, G, K, D_v]
    slot_mapping: Any = None  # i32 or i64 [T]
    page_indices: Any = None  # i32 [S, M]
    kv_lens: Any = None  # i32 [S]
    cu_q_lens: Any = None  # i32 [S + 1]
    num_seqs: Any = None  # int, i32 [1] or None
    k_scale: Any = None  # float, [] or [K]
    v_scale: Any = None
    device: Device = NOWHERE

    def __post_init__(self) -> None:
        expect_pages(self.kv_pages)
        sizes = {"K": self.num_kv_heads, "D": self.k_pages_like.shape[3], "D_v": self.v_head_dim}
        expect_array("k", self.k, "T K D", FLOATS, sizes)
        expect_array("v", self.v, "T K D_v", (dtype_name(self.k),), sizes | {"T": self.k.shape[0]})
        if self.page_size < 1:
            raise InvalidInput(f"expected page_size >= 1, got {self.page_size}")
        if self.cache_dtype not in (dtype_name(self.k), *QUANTIZED):
            raise InvalidInput(
                f"expected kv_pages.dtype to be that of k, {dtype_name(self.k)}, or {' or '.join(QUANTIZED)}, "
                f"got {self.cache_dtype}"
            )
        self._check_destination()
        _expect_scale("k_scale", self.k_scale, self.num_kv_heads)
        _expect_scale("v_scale", self.v_scale, self.num_kv_heads)

    def _check_destination(self) -> None:
        tables = {name: getattr(self, name) for name in ("page_indices", "kv_lens", "cu_q_lens")}
        given = [name for name, value in tables.items() if value is not None]
        if (self.slot_mapping is not None) == bool(given) or len(given) not in (0, 3):
            got = ", ".join(given + ["slot_mapping"] * (self.slot_mapping is not None)) or "neither"
            raise InvalidInput(f"expected slot_mapping, or page_indices with kv_lens and cu_q_lens, got {got}")
        if self.slot_mapping is not None:
            expect_array("slot_mapping", self.slot_mapping, "T", ("int32", "int64"), {"T": self.k.shape[0]})
            if self.num_seqs is not None:
                raise InvalidInput("expected num_seqs only with page_indices, got it with slot_mapping")
            return
        expect_array("kv_lens", self.kv_lens, "S", ("int32",), {})
        sizes = {"S": self.kv_lens.shape[0], "S+1": self.kv_lens.shape[0] + 1}
        expect_array("page_indices", self.page_indices, "S M", ("int32",), sizes)
        expect_array("cu_q_lens", self.cu_q_lens, "S+1", ("int32",), sizes)
        expect_num_seqs(self.num_seqs, sizes["S"])

    @property
    def num_tokens(self) -> int:
        return self.k.shape[0]

    @property
    def head_dim(self) -> int:
        return self.k.shape[2]

    def check_values(self) -> None:
        """Raise `InvalidInput` naming the first value that points outside the pages. Expects NumPy arrays."""
        if self.slot_mapping is None:
            _check_ragged_values(
                self.kv_lens, self.page_indices, self.cu_q_lens, self.num_seqs,
                self.num_tokens, self.num_pages, self.page_size,
            )  # fmt: skip
            return
        slots = self.num_pages * self.page_size
        bad = np.flatnonzero((self.slot_mapping < -1) | (self.slot_mapping >= slots))
        if bad.size:
            got = self.slot_mapping[bad[0]]
            raise InvalidInput(f"expected slot_mapping[{bad[0]}] to be -1 or between 0 and {slots - 1}, got {got}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MergeAttentionStates(Call):
    """Merge partial attention results over disjoint ranges of keys: split KV, shared prefixes, context parallel.

    Args:
        outs: [N, T, H, D_v] float32, float16 or bfloat16, or a list of N arrays [T, H, D_v].
        lses: f32 [N, T, H], natural log-sum-exps as `ragged_paged_attention` returns them, or a list.
        backend, options: as in `ragged_paged_attention`.

    Returns:
        out [T, H, D_v] of the dtype of `outs`, and lse [T, H] float32. A part whose lse is -inf weighs nothing,
        whatever its out holds; where all are, out is 0 and lse -inf. Sinks are for the merged result:
        multiply out by `sigmoid(lse - sink)`.

    Raises:
        InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.
    """

    OPERATION: ClassVar[str] = "merge_attention_states"

    outs: Any  # [N, T, H, D_v]
    lses: Any  # f32 [N, T, H]
    device: Device = NOWHERE

    def __post_init__(self) -> None:
        expect_array("outs", self.outs, "N T H D_v", FLOATS, {})
        expect_array("lses", self.lses, "N T H", ("float32",), dict(zip("NTH", self.outs.shape, strict=False)))
        if self.outs.shape[0] < 1:
            raise InvalidInput("expected outs to hold at least one part, got 0")

    def check_values(self) -> None:
        """No value is unlawful: a part whose lse is -inf weighs nothing."""
