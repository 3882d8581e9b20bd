"""The records of multi-head latent attention (MLA): one latent row a token serves as K and, its first part, as V."""

import dataclasses
from typing import Any, ClassVar

import numpy as np

from ragged_attention.calls.base import (
    FLOATS,
    NOWHERE,
    WIDE_FLOATS,
    Call,
    Device,
    dtype_name,
    expect_array,
    expect_bool,
    expect_count,
    expect_groups,
    expect_number,
    expect_results,
    is_array,
    wide_dtype,
)
from ragged_attention.errors import InvalidInput

BYTES = ("uint8", "float8_e4m3fn", "int8")
MAX_WIDTH = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class CacheFormat:
    """A quantised latent cache: what the bytes of one token hold.

    `fp8_v32`: token after token, each 512 e4m3 values, 4 float32 scales, 64 bfloat16 rotary values.
    `fp8_v4`: a page of G tokens holds G rows of 448 e4m3 values and 64 bfloat16 rotary values, then G rows of 7 e8m0
    scales and a byte of padding; so token t's values begin at byte 576 t of its page, its scales at 576 G + 8 t.
    """

    name: str
    values: int  # quantised columns, the first ones
    rotary: int  # bfloat16 columns behind them
    group: int  # quantised columns that share a scale
    token_bytes: int

    @property
    def width(self) -> int:
        """Columns of a row, `d_qk`."""
        return self.values + self.rotary


CACHE_FORMATS = {
    "fp8_v32": CacheFormat("fp8_v32", 512, 64, 128, 656),
    "fp8_v4": CacheFormat("fp8_v4", 448, 64, 64, 584),
}


def _expect_format(name: str, value: Any, plain: bool) -> None:
    known = ("plain",) * plain + tuple(CACHE_FORMATS)
    if value not in known:
        raise InvalidInput(f"expected {name} to be one of {', '.join(known)}, got {value!r}")


def _format_of(name: str, cache: Any, given: str | None) -> str:
    """The format of a cache whose dtype and rank are known to be lawful: `plain` or a name in CACHE_FORMATS."""
    if given is not None:
        _expect_format("cache_format", given, plain=True)
    dtype, width = dtype_name(cache), cache.shape[-1]
    if dtype in WIDE_FLOATS:
        if given not in (None, "plain"):
            raise InvalidInput(
                f"expected {name}.dtype to be {' or '.join(BYTES)} with cache_format={given!r}, got {dtype}"
            )
        return "plain"
    if given == "plain":
        raise InvalidInput(f"expected {name}.dtype to be {' or '.join(FLOATS)} with cache_format='plain', got {dtype}")
    for layout in CACHE_FORMATS.values():
        if given in (None, layout.name) and layout.token_bytes == width:
            return layout.name
    wanted = [
        f"{layout.token_bytes} ({layout.name})" for layout in CACHE_FORMATS.values() if given in (None, layout.name)
    ]
    raise InvalidInput(f"expected {name}.shape[3] to be {' or '.join(wanted)} for a cache of bytes, got {width}")


def _expect_cache(name: str, cache: Any, given: str | None, floats: tuple[str, ...] = FLOATS) -> str:
    """Check a paged cache by itself; returns its format."""
    expect_array(name, cache, "P G K C", (*floats, *BYTES), {})
    found = _format_of(name, cache, given)
    _, page_size, num_kv_heads, _ = cache.shape
    if page_size < 1:
        raise InvalidInput(f"expected {name} to have page_size >= 1, got {page_size}")
    if num_kv_heads < 1 or (found != "plain" and num_kv_heads != 1):
        condition = "num_kv_heads >= 1" if found == "plain" else f"num_kv_heads = 1 with cache_format={found!r}"
        raise InvalidInput(f"expected {name} to have {condition}, got {num_kv_heads}")
    return found


def _expect_width(name: str, width: int) -> None:
    if width % 16 or not 16 <= width <= MAX_WIDTH:
        raise InvalidInput(f"expected {name} to be a multiple of 16 from 16 to {MAX_WIDTH}, got {width}")


class LatentCall(Call):
    """What the two attentions over latents share."""

    q: Any
    d_v: Any
    sm_scale: Any
    sinks: Any

    def _check_queries(self, letters: str, dtypes: tuple[str, ...] = FLOATS) -> None:
        expect_array("q", self.q, letters, dtypes, {})
        _expect_width(f"q.shape[{len(letters.split()) - 1}]", self.d_qk)
        if not isinstance(self.d_v, int) or isinstance(self.d_v, bool):
            raise TypeError(f"expected d_v to be an int, got {type(self.d_v).__name__}")
        if self.d_v % 16 or not 16 <= self.d_v <= self.d_qk:
            d_qk = self.d_qk
            raise InvalidInput(f"expected d_v to be a multiple of 16 from 16 to {d_qk=}, got {self.d_v}")
        if self.sm_scale is not None:
            expect_number("sm_scale", self.sm_scale)
        if self.sinks is not None:
            expect_array("sinks", self.sinks, "H", (self.lse_dtype,), {"H": self.num_q_heads})

    def _check_rows(self, name: str, cache: Any, found: str) -> None:
        """The rows of a cache against the queries."""
        width = cache.shape[-1] if found == "plain" else CACHE_FORMATS[found].width
        d_qk = self.d_qk
        if found != "plain" and width != d_qk:
            raise InvalidInput(f"expected q's last dimension to be {width} with cache_format={found!r}, got {d_qk}")
        if width != d_qk:
            raise InvalidInput(f"expected {name}.shape[{len(cache.shape) - 1}] = {d_qk=}, got {width}")
        if found == "plain" and dtype_name(cache) != dtype_name(self.q):
            raise InvalidInput(
                f"expected {name}.dtype to be that of q, {dtype_name(self.q)}, or bytes, got {dtype_name(cache)}"
            )
        expect_groups(self.num_q_heads, cache.shape[-2])

    @property
    def num_q_heads(self) -> int:
        return self.q.shape[-2]

    @property
    def d_qk(self) -> int:
        return self.q.shape[-1]

    @property
    def scale(self) -> float:
        return self.d_qk**-0.5 if self.sm_scale is None else float(self.sm_scale)

    @property
    def lse_dtype(self) -> str:
        return wide_dtype(self.q)


def _expect_topk(name: str, indices: Any) -> None:
    if indices.shape[-1] < 1:
        raise InvalidInput(f"expected {name} to list at least one key a query, got 0")


class SparsePrefillCall(LatentCall):
    """What sparse prefill and its gradient share."""

    kv: Any
    indices: Any
    topk_lens: Any
    deterministic: Any

    def _check_lists(self) -> None:
        sizes = {"T": self.num_tokens, "K": self.num_kv_heads}
        expect_array("indices", self.indices, "T K N", ("int32",), sizes)
        _expect_topk("indices", self.indices)
        if self.topk_lens is not None:
            expect_array("topk_lens", self.topk_lens, "T", ("int32",), sizes)
        expect_bool("deterministic", self.deterministic)

    @property
    def num_tokens(self) -> int:
        return self.q.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.kv.shape[-2]

    @property
    def topk(self) -> int:
        return self.indices.shape[2]

    @property
    def page_size(self) -> int:
        """Rows of a page; of packed rows each is one."""
        return 1 if len(self.kv.shape) == 3 else self.kv.shape[1]

    @property
    def num_slots(self) -> int:
        return self.kv.shape[0] * self.page_size

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return (self.num_tokens, self.num_q_heads, self.d_v)

    def check_values(self) -> None:
        """No value is unlawful: an index out of range selects nothing, lengths are held within the list."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SparseMlaPrefill(SparsePrefillCall):
    """Attention of each query token over its own list of latent rows: DeepSeek sparse attention, prefill.

    Shapes in letters: T query tokens, H query heads, K KV heads (K divides H; 1 in every published model), N selected
    keys, P pages of G positions.

    Args:
        q: [T, H, d_qk] bfloat16, float16 or float32, on the portable backends also float64 (for checking gradients);
            d_qk a multiple of 16 up to 1024.
        kv: the latent rows, [s_kv, K, d_qk] of q's dtype, packed; or a paged cache [P, G, K, d_qk], or a quantised
            one [P, G, 1, bytes], as `mla_decode` takes them. A row is the key; its first `d_v` columns are the value.
        indices: i32 [T, K, N], rows of `kv`, or slots `page * G + offset` of a paged cache. Their order is free. One
            outside [0, s_kv) (or [0, P * G)), such as -1, selects nothing wherever it stands and is never read as a
            row; one that is listed twice counts twice.
        sm_scale: factor on q . k; default `d_qk ** -0.5`.
        d_v: columns of the value, a multiple of 16 up to d_qk.
        sinks: f32 [H] (f64 beside float64 queries), a logit a head that joins the softmax's denominator and brings no
            value.
        topk_lens: i32 [T]; entries of `indices` from there on are ignored. Held within [0, N].
        cache_format: `plain`, `fp8_v32` or `fp8_v4`; default by `kv`'s dtype and last dimension.
        deterministic: the gradient has the same bits in every run: contributions to a row are added in the order of
            the queries that select it, by way of an index, where otherwise GPUs add them as they come.
        backend: this call's backend, a name or an ordered list of them; see `ragged_attention.config`. The gradient
            runs on it too if it offers `sparse_mla_prefill_backward`.
        options: this call's tunables, fields of the chosen backend's `Tile`; those of the gradient are the
            configuration's for `sparse_mla_prefill_backward`.

    Returns:
        out [T, H, d_v] of q's dtype; max_logits [T, H] float32, the largest scaled logit; lse [T, H] float32, the
        natural log-sum-exp of the logits (both float64 of float64 queries). Sinks multiply out by
        `sigmoid(lse - sink)` and change neither of the others. A query that selects nothing gets out 0, max_logits
        -inf and lse -inf. Rows that are not selected may hold NaN. Softmax and sums are in float32; a quantised value
        is its fp8 value times its scale.

        Differentiable with respect to q, a plain kv and sinks, through out and through lse (max_logits counts as a
        constant), by reverse mode, once. Rows that are not selected get a gradient of 0.

    Raises:
        InvalidInput: (a ValueError) shapes, dtypes or options that contradict the above.
        TypeError: a value of a wrong kind.
        Unsupported: no backend asked for takes the call; the message has each one's reason.

    The operation is FlashMLA's `flash_mla_sparse_fwd` (DeepSeek-V3.2), made general; `compat.flash_mla` has its own
    conventions (base-2 logits).
    """

    OPERATION: ClassVar[str] = "sparse_mla_prefill"

    q: Any  # [T, H, d_qk]
    kv: Any  # [s_kv, K, d_qk] or [P, G, K, d_qk] or [P, G, 1, bytes]
    indices: Any  # i32 [T, K, N]
    sm_scale: float | None = None
    d_v: int = 512
    sinks: Any = None  # f32 [H]
    topk_lens: Any = None  # i32 [T]
    cache_format: str | None = None
    deterministic: bool = False
    device: Device = NOWHERE

    def __post_init__(self) -> None:
        self._check_queries("T H D", WIDE_FLOATS)
        if not is_array(self.kv):
            raise TypeError(f"expected kv to be an array, got {type(self.kv).__name__}")
        if len(self.kv.shape) == 3:
            expect_array("kv", self.kv, "s_kv K D", WIDE_FLOATS, {})
            if self.kv.shape[1] < 1:
                raise InvalidInput("expected kv to have num_kv_heads >= 1, got 0")
            found = _format_of("kv", self.kv, self.cache_format)
        else:
            found = _expect_cache("kv", self.kv, self.cache_format, WIDE_FLOATS)
        self._check_rows("kv", self.kv, found)
        self._check_lists()

    @property
    def format(self) -> str:
        return _format_of("kv", self.kv, self.cache_format)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SparseMlaPrefillBackward(SparsePrefillCall):
    """The gradient of `sparse_mla_prefill`: what automatic differentiation of it calls, and kernels are swapped by.

    Letters as in `sparse_mla_prefill`.

    Args:
        d_out: [T, H, d_v] of q's dtype, the gradient of a scalar with respect to `out`.
        kv: [s_kv, K, d_qk] or pages [P, G, K, d_qk], of q's dtype; a quantised cache has no gradient.
        q, indices, sm_scale, d_v, sinks, topk_lens, deterministic: as `sparse_mla_prefill` was given them.
        out, lse: what `sparse_mla_prefill` returned: [T, H, d_v] of q's dtype, [T, H] float32.
        d_lse: [T, H] like `lse`, the gradient with respect to it; None is 0. Where `lse` is -inf it is ignored.
        backend, options: as everywhere; see `sparse_mla_prefill`.

    Returns:
        dq and dkv of the shapes and dtypes of q and kv, and d_sinks like `sinks`, None without sinks. The formulas are
        those of `varlen_attention_backward`; a row's gradient as key and, in its first `d_v` columns, as value are
        added, over all entries of all lists that name it, each as often as it is listed. A row that none names gets
        0, be it NaN. Sums are in float32.

    Raises:
        InvalidInput, TypeError, Unsupported: as `sparse_mla_prefill`.
    """

    OPERATION: ClassVar[str] = "sparse_mla_prefill_backward"

    d_out: Any  # [T, H, d_v]
    q: Any  # [T, H, d_qk]
    kv: Any  # [s_kv, K, d_qk] or [P, G, K, d_qk]
    indices: Any  # i32 [T, K, N]
    out: Any  # [T, H, d_v]
    lse: Any  # f32 [T, H]
    d_lse: Any = None  # f32 [T, H]
    sm_scale: float | None = None
    d_v: int = 512
    sinks: Any = None  # f32 [H]
    topk_lens: Any = None  # i32 [T]
    deterministic: bool = False
    device: Device = NOWHERE

    def __post_init__(self) -> None:
        self._check_queries("T H D", WIDE_FLOATS)
        pages = is_array(self.kv) and len(self.kv.shape) == 4
        expect_array("kv", self.kv, "P G K D" if pages else "s_kv K D", (dtype_name(self.q),), {})
        for name, size in (("num_kv_heads", self.num_kv_heads), ("page_size", self.page_size)):
            if size < 1:
                raise InvalidInput(f"expected kv to have {name} >= 1, got 0")
        self._check_rows("kv", self.kv, "plain")
        self._check_lists()
        sizes = {"T": self.num_tokens, "H": self.num_q_heads, "d_v": self.d_v}
        expect_results(self, "T H d_v", sizes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MlaDecode(LatentCall):
    """Attention of a few query tokens a sequence over a paged latent cache: over all of it, or over a top-k list.

    Shapes in letters: S sequences, Q query tokens of each, H query heads, K KV heads (K divides H), P pages of G
    positions, M pages a sequence can list, N selected keys.

    Args:
        q: [S, Q, H, d_qk] bfloat16, float16 or float32; d_qk a multiple of 16 up to 1024.
        kv_cache: the latents. Plain: [P, G, K, d_qk] of q's dtype. Quantised: bytes (uint8, int8 or float8_e4m3fn)
            [P, G, 1, 656] in the format `fp8_v32` (d_qk 576), or [P, G, 1, 584] in `fp8_v4` (d_qk 512); see
            `quantize_mla_cache`. Any G. From torch pages may lie apart. The first `d_v` columns are the value.
        page_indices: i32 [S, M], page p of a row holds positions p * G and on; entries past the last used page are
            never read as pages, one outside [0, P) makes its positions invisible. Only for dense calls.
        kv_lens: i32 [S], positions of each sequence in the cache. Only for dense calls, which are those without
            `indices`; calls with them ignore both.
        indices: i32 [S, Q, N], makes the call sparse (K must be 1): slots `page * G + offset` of the cache for each
            query token. Order is free; one outside [0, P * G), such as -1, selects nothing wherever it stands; one
            listed twice counts twice.
        d_v: columns of the value, a multiple of 16 up to d_qk.
        sm_scale: factor on q . k; default `d_qk ** -0.5`.
        causal: dense only. Aligned at the end: query j of a sequence sees positions < kv_len - (Q - 1 - j).
        sinks: f32 [H], a logit a head that joins the softmax's denominator and brings no value.
        topk_lens: i32 [S] or [S, Q]; entries of `indices` from there on are ignored. Held within [0, N].
        extra_kv_cache, extra_indices, extra_topk_lens: a second cache, of the same format and its own number and
            size of pages, with its own lists i32 [S, Q, N'] and lengths: each query attends to both selections.
        schedule: from `make_decode_schedule`, how to divide the work. The result is the same without, up to
            rounding: then the keys of a sequence are divided among programs by shapes alone.
        cache_format: `plain`, `fp8_v32` or `fp8_v4`; default by the dtype and last dimension of `kv_cache`.
        backend, options: as in `sparse_mla_prefill`. With the kernels of `triton` and `cuda`
            `options={"num_splits": 1}`, and no schedule, gives bits that depend on nothing but the sequence itself.

    Returns:
        out [S, Q, H, d_v] of q's dtype, and lse [S, H, Q] float32, the natural log-sum-exp of the scaled logits;
        sinks multiply out by `sigmoid(lse - sink)` and leave lse as it is. A query that sees no key gets out 0 and
        lse -inf. No index value makes a kernel read outside the arrays: lengths are held within what the arrays can
        hold. What no query sees may be NaN.

    Raises:
        InvalidInput: (a ValueError) shapes, dtypes or options that contradict the above; values of the index arrays,
            and a schedule made for other lengths, only under `validate="full"`.
        TypeError, Unsupported: as `sparse_mla_prefill`.

    The operation is FlashMLA's `flash_mla_with_kvcache` made general (any heads, pages, formats, top-k);
    `compat.flash_mla` has its own conventions (lse +inf for a query that sees no key).
    """

    OPERATION: ClassVar[str] = "mla_decode"

    q: Any  # [S, Q, H, d_qk]
    kv_cache: Any  # [P, G, K, d_qk] or [P, G, 1, bytes]
    page_indices: Any = None  # i32 [S, M]
    kv_lens: Any = None  # i32 [S]
    indices: Any = None  # i32 [S, Q, N]
    d_v: int = 512
    sm_scale: float | None = None
    causal: bool = False
    sinks: Any = None  # f32 [H]
    topk_lens: Any = None  # i32 [S] or [S, Q]
    extra_kv_cache: Any = None  # [P', G', 1, ...]
    extra_indices: Any = None  # i32 [S, Q, N']
    extra_topk_lens: Any = None  # i32 [S] or [S, Q]
    schedule: Any = None  # (parts i32 [programs, 8], num_splits i32 [S + 1], lens i32 [S], extra lens i32 [S]) or fewer
    cache_format: str | None = None
    device: Device = NOWHERE

    def __post_init__(self) -> None:
        self._check_queries("S Q H D")
        if self.num_q_tokens < 1:
            raise InvalidInput("expected q to have at least one query token a sequence, got 0")
        found = _expect_cache("kv_cache", self.kv_cache, self.cache_format)
        self._check_rows("kv_cache", self.kv_cache, found)
        expect_bool("causal", self.causal)
        sizes = {"S": self.num_seqs, "Q": self.num_q_tokens, "S+1": self.num_seqs + 1}
        if self.indices is None:
            self._check_dense(sizes)
        else:
            self._check_sparse(sizes, found)
        if self.schedule is not None:
            expect_array("schedule.num_splits", self.schedule[1], "S+1", ("int32",), sizes)
            expect_array("schedule.parts", self.schedule[0], "R 8", ("int32",), {"8": 8})

    def _check_dense(self, sizes: dict[str, int]) -> None:
        for name in ("page_indices", "kv_lens"):
            if getattr(self, name) is None:
                raise InvalidInput(f"expected {name} with a dense call (one without indices), got None")
        expect_array("page_indices", self.page_indices, "S M", ("int32",), sizes)
        expect_array("kv_lens", self.kv_lens, "S", ("int32",), sizes)
        for name in ("topk_lens", "extra_kv_cache", "extra_indices", "extra_topk_lens"):
            if getattr(self, name) is not None:
                raise InvalidInput(f"expected {name} only together with indices, got it without")

    def _check_sparse(self, sizes: dict[str, int], found: str) -> None:
        if self.num_kv_heads != 1:
            raise InvalidInput(f"expected kv_cache to have num_kv_heads = 1 with indices, got {self.num_kv_heads}")
        if self.causal:
            raise InvalidInput("expected causal=False with indices, which select the keys themselves, got True")
        expect_array("indices", self.indices, "S Q N", ("int32",), sizes)
        _expect_topk("indices", self.indices)
        _expect_lens("topk_lens", self.topk_lens, sizes)
        if (self.extra_kv_cache is None) != (self.extra_indices is None):
            absent = "extra_kv_cache" if self.extra_kv_cache is None else "extra_indices"
            raise InvalidInput(f"expected extra_kv_cache and extra_indices together, got {absent}=None")
        if self.extra_kv_cache is None:
            if self.extra_topk_lens is not None:
                raise InvalidInput("expected extra_topk_lens only together with extra_indices, got it without")
            return
        extra = _expect_cache("extra_kv_cache", self.extra_kv_cache, None)
        if extra != found:
            raise InvalidInput(f"expected extra_kv_cache in the format of kv_cache, {found}, got {extra}")
        self._check_rows("extra_kv_cache", self.extra_kv_cache, extra)
        if self.extra_kv_cache.shape[2] != 1:
            got = self.extra_kv_cache.shape[2]
            raise InvalidInput(f"expected extra_kv_cache to have num_kv_heads = 1, got {got}")
        expect_array("extra_indices", self.extra_indices, "S Q N", ("int32",), sizes)
        _expect_topk("extra_indices", self.extra_indices)
        _expect_lens("extra_topk_lens", self.extra_topk_lens, sizes)

    @property
    def sparse(self) -> bool:
        return self.indices is not None

    @property
    def num_seqs(self) -> int:
        return self.q.shape[0]

    @property
    def num_q_tokens(self) -> int:
        """Query tokens of each sequence."""
        return self.q.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.kv_cache.shape[2]

    @property
    def page_size(self) -> int:
        return self.kv_cache.shape[1]

    @property
    def num_slots(self) -> int:
        return self.kv_cache.shape[0] * self.page_size

    @property
    def topk(self) -> int:
        """Entries of each list; 0 in a dense call."""
        return self.indices.shape[2] if self.sparse else 0

    @property
    def extra_topk(self) -> int:
        return 0 if self.extra_indices is None else self.extra_indices.shape[2]

    @property
    def capacity(self) -> int:
        """The most keys that one query can see."""
        if self.sparse:
            return self.topk + self.extra_topk
        return min(self.page_indices.shape[1] * self.page_size, 2**31 - 2**16)

    @property
    def format(self) -> str:
        return _format_of("kv_cache", self.kv_cache, self.cache_format)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return (self.num_seqs, self.num_q_tokens, self.num_q_heads, self.d_v)

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return (self.num_seqs, self.num_q_heads, self.num_q_tokens)

    def check_values(self) -> None:
        """Raise `InvalidInput` naming the first value that breaks the law. Expects NumPy arrays."""
        if not self.sparse:
            pages_per_seq, num_pages = self.page_indices.shape[1], self.kv_cache.shape[0]
            for seq, kv_len in enumerate(self.kv_lens.tolist()):
                if not 0 <= kv_len <= pages_per_seq * self.page_size:
                    limit = f"pages_per_seq * page_size = {pages_per_seq * self.page_size}"
                    raise InvalidInput(f"expected kv_lens[{seq}] between 0 and {limit}, got {kv_len}")
                pages = self.page_indices[seq, : -(-kv_len // self.page_size)]
                bad = np.flatnonzero((pages < 0) | (pages >= num_pages))
                if bad.size:
                    where = f"page_indices[{seq}, {bad[0]}]"
                    raise InvalidInput(f"expected {where} between 0 and {num_pages - 1}, got {pages[bad[0]]}")
        if self.schedule is not None:
            self._check_schedule()

    def _check_schedule(self) -> None:
        parts, num_splits, *made_for = self.schedule
        most = self.num_seqs + parts.shape[0]
        if num_splits[0] != 0 or (np.diff(num_splits) < 0).any() or num_splits[-1] > most:
            raise InvalidInput(f"expected schedule.num_splits to ascend from 0 to at most {most}, got {num_splits}")
        names = ("topk_lens", "extra_topk_lens") if self.sparse else ("kv_lens",)
        for name, then in zip(names, made_for, strict=False):
            count = self.topk if name == "topk_lens" else self.extra_topk
            lens = scheduled_lens(getattr(self, name), count) if self.sparse else self.kv_lens
            now = np.broadcast_to(lens, then.shape)
            bad = np.flatnonzero(then != now)
            if bad.size:
                seq = bad[0]
                raise InvalidInput(
                    f"expected a schedule made for these {name}, got one made for {then[seq]} where "
                    f"{name}[{seq}] = {now[seq]}"
                )


def scheduled_lens(lens: Any, most: int) -> Any:
    """What a schedule takes as the lengths of a sequence's lists: the longest, held within [0, most]. NumPy."""
    if lens is None:
        return np.int32(most)
    lens = np.clip(lens, 0, most)
    return lens.max(axis=1) if lens.ndim == 2 else lens


def _expect_lens(name: str, lens: Any, sizes: dict[str, int]) -> None:
    if lens is not None:
        rank = len(lens.shape) if is_array(lens) else 1
        expect_array(name, lens, "S Q" if rank == 2 else "S", ("int32",), sizes)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DecodeSchedule:
    """How `mla_decode` divides its work, for reuse over the layers of a model; made by `make_decode_schedule`.

    Valid for calls of the shapes it was made for, which is checked, as long as lengths are the same, which is checked
    under `validate="full"` only. With other lengths results stay right, but the work is divided badly.
    """

    parts: (
        Any  # i32 [programs, 8]: first sequence, first block in it, last sequence, end block in it, first split, 0 0 0
    )
    num_splits: Any  # i32 [S + 1], prefix sums of the number of splits of each sequence
    lens: Any = None  # i32 [S], the lengths it was made for; None is unknown
    extra_lens: Any = None  # i32 [S], those of the lists into the second cache
    made_for: tuple[int, ...] = ()  # sequences, query tokens of each, query heads, KV heads, top-k, extra top-k


SHAPES = ("batch_size", "num_q_tokens", "num_q_heads", "num_kv_heads", "topk", "extra_topk")


def schedule_arrays(schedule: Any, q: Any, kv_cache: Any, indices: Any, extra_indices: Any) -> tuple[Any, ...] | None:
    """A front end's `schedule` argument as the record's, once it is known to be made for calls of such shapes."""
    if schedule is None:
        return None
    if not isinstance(schedule, DecodeSchedule):
        raise TypeError(f"expected schedule to be a DecodeSchedule, got {type(schedule).__name__}")
    lists = [value for value in (indices, extra_indices) if value is not None]
    if not all(is_array(value) and len(value.shape) > 2 for value in (q, kv_cache, *lists)):
        return None  # which the record will say better
    counts = [0 if value is None else value.shape[-1] for value in (indices, extra_indices)]
    wanted = (*q.shape[:3], kv_cache.shape[2], *counts)
    for name, want, made in zip(SHAPES, wanted, schedule.made_for, strict=False):
        if want != made:
            raise InvalidInput(f"expected a schedule made for {name}={want}, got one made for {name}={made}")
    known = [schedule.parts, schedule.num_splits]
    known += [lens for lens in (schedule.lens, schedule.extra_lens) if lens is not None]
    return tuple(known)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MakeDecodeSchedule(Call):
    """Divide the work of one decode step among programs, once for all layers; the result goes to `mla_decode`.

    The sequences' keys, in blocks of 64, are laid end to end and cut into `num_parts` ranges of about equal cost; a
    sequence that straddles a cut is computed in several splits. Runs on the device, reads nothing back, and has
    shapes that depend on the batch size only, so it can be captured in a CUDA graph.

    Args:
        kv_lens: i32 [S], the lengths of a dense call; or an int, the top-k of a sparse one.
        batch_size: S.
        num_q_tokens: query tokens of each sequence.
        num_q_heads, num_kv_heads: heads.
        topk_lens: i32 [S] or [S, Q], as in `mla_decode`; only with a top-k.
        extra_topk, extra_topk_lens: the same of the second cache.
        num_parts: how many ranges; default what fills the device with blocks of 64 rows.
        device: torch only, and only used with a top-k and no `topk_lens`: where the schedule is made.
        overhead: the cost of beginning a sequence, in blocks.
        backend, options: as in `mla_decode`.

    Returns:
        a `DecodeSchedule`.

    Raises:
        InvalidInput, TypeError, Unsupported: as `mla_decode`.

    The algorithm and the order of the fields of `parts` are those of FlashMLA's `get_mla_metadata` of September 2025.
    """

    OPERATION: ClassVar[str] = "make_decode_schedule"

    lens: Any  # i32 [S]
    extra_lens: Any = None  # i32 [S]
    sparse: bool = False
    num_parts: int = 1
    overhead: int = 5
    device: Device = NOWHERE

    def __post_init__(self) -> None:
        expect_array("topk_lens" if self.sparse else "kv_lens", self.lens, "S", ("int32",), {})
        if self.extra_lens is not None:
            expect_array("extra_topk_lens", self.extra_lens, "S", ("int32",), {"S": self.lens.shape[0]})
        expect_count("num_parts", self.num_parts, 1)
        expect_count("overhead", self.overhead, 0)

    @property
    def num_seqs(self) -> int:
        return self.lens.shape[0]

    def check_values(self) -> None:
        """No value is unlawful: a negative length counts as 0."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizeMlaCache(Call):
    """Quantise a latent cache: e4m3 values with a scale a group of columns, the rotary columns in bfloat16.

    Args:
        kv: [P, G, 1, d_qk] bfloat16, float16 or float32; d_qk is 576 for `fp8_v32` and 512 for `fp8_v4`.
        format: `fp8_v32` (656 bytes a token) or `fp8_v4` (584 bytes); `CacheFormat` describes the bytes.
        power_of_two_scales: round scales up to a power of two; `fp8_v4` can store no others.
        backend, options: as in `mla_decode`.

    Returns:
        uint8 [P, G, 1, bytes]. The scale of a group is its largest magnitude over 448, in float32, at least 1e-4;
        what is stored is the value over the scale, in float32, to the nearest e4m3 with ties to even. Every backend
        makes the same bytes. NaN becomes 0x7F. A group that holds NaN or an infinity has scale NaN or infinity
        (`fp8_v4`: 0xFF, NaN).

    Raises:
        InvalidInput, TypeError, Unsupported: as `mla_decode`.
    """

    OPERATION: ClassVar[str] = "quantize_mla_cache"

    kv: Any  # [P, G, 1, d_qk]
    format: str
    power_of_two_scales: bool = True
    device: Device = NOWHERE

    def __post_init__(self) -> None:
        _expect_format("format", self.format, plain=False)
        width = CACHE_FORMATS[self.format].width
        expect_array("kv", self.kv, "P G 1 D", FLOATS, {"1": 1, "D": width})
        if self.kv.shape[1] < 1:
            raise InvalidInput(f"expected kv to have page_size >= 1, got {self.kv.shape[1]}")
        _expect_powers("format", self.format, self.power_of_two_scales)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.kv.shape[:3], CACHE_FORMATS[self.format].token_bytes)

    def check_values(self) -> None:
        """No value is unlawful."""


def _expect_powers(name: str, value: str, power_of_two_scales: Any) -> None:
    expect_bool("power_of_two_scales", power_of_two_scales)
    if value == "fp8_v4" and not power_of_two_scales:
        raise InvalidInput(f"expected power_of_two_scales=True with {name}='fp8_v4', got False")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DequantizeMlaCache(Call):
    """The rows that a quantised latent cache holds.

    Args:
        cache: bytes (uint8, int8 or float8_e4m3fn) [P, G, 1, 656 or 584].
        format: `fp8_v32` or `fp8_v4`; default by the last dimension.
        dtype: of the result, "bfloat16", "float16" or "float32", or the framework's own dtype of that name.
        backend, options: as in `mla_decode`.

    Returns:
        [P, G, 1, d_qk] of `dtype`: fp8 value times scale in float32, then rounded once.

    Raises:
        InvalidInput, TypeError, Unsupported: as `mla_decode`.
    """

    OPERATION: ClassVar[str] = "dequantize_mla_cache"

    cache: Any  # [P, G, 1, bytes]
    format: str | None = None
    dtype: str = "bfloat16"
    device: Device = NOWHERE

    def __post_init__(self) -> None:
        if self.format is not None:
            _expect_format("format", self.format, plain=False)
        expect_array("cache", self.cache, "P G 1 C", BYTES, {"1": 1})
        _expect_cache("cache", self.cache, self.format)
        if self.dtype not in FLOATS:
            raise InvalidInput(f"expected dtype to be {' or '.join(FLOATS)}, got {self.dtype!r}")

    @property
    def found(self) -> str:
        """The format's name."""
        return _format_of("cache", self.cache, self.format)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.cache.shape[:3], CACHE_FORMATS[self.found].width)

    def check_values(self) -> None:
        """No value is unlawful."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WriteMlaCache(Call):
    """Write this step's latent rows into a paged cache, quantising where it is quantised.

    Args:
        kv: [T, K, d_qk], or [T, d_qk] for one KV head; float32, float16 or bfloat16.
        cache: as `mla_decode` takes it, plain (of kv's dtype) or quantised.
        slot_mapping: i32 or i64 [T], the slot `page * G + offset` of each token; -1, and anything else outside
            [0, P * G), is skipped.
        power_of_two_scales: as in `quantize_mla_cache`.
        cache_format: as in `mla_decode`.
        backend, options: as in `mla_decode`.

    Returns:
        The cache. In torch it is written in place and is the tensor given; in jax it is a new array, in the memory of
        the given one if that is donated. Nothing but the tokens' slots is touched. Of two tokens for one slot either
        may stay.

    Raises:
        InvalidInput, TypeError, Unsupported: as `mla_decode`; slots out of range, but for -1, only under
            `validate="full"`.
    """

    OPERATION: ClassVar[str] = "write_mla_cache"

    kv: Any  # [T, K, d_qk]; the front ends bring [T, d_qk] into that form
    cache: Any  # [P, G, K, d_qk] or [P, G, 1, bytes]
    slot_mapping: Any  # i32 or i64 [T]
    power_of_two_scales: bool = True
    cache_format: str | None = None
    device: Device = NOWHERE

    def __post_init__(self) -> None:
        found = _expect_cache("cache", self.cache, self.cache_format)
        width = self.cache.shape[3] if found == "plain" else CACHE_FORMATS[found].width
        sizes = {"K": self.cache.shape[2], "D": width}
        dtypes = (dtype_name(self.cache),) if found == "plain" else FLOATS
        expect_array("kv", self.kv, "T K D", dtypes, sizes)
        expect_array("slot_mapping", self.slot_mapping, "T", ("int32", "int64"), {"T": self.kv.shape[0]})
        _expect_powers("cache_format", found, self.power_of_two_scales)

    @property
    def format(self) -> str:
        return _format_of("cache", self.cache, self.cache_format)

    @property
    def page_size(self) -> int:
        return self.cache.shape[1]

    @property
    def num_slots(self) -> int:
        return self.cache.shape[0] * self.page_size

    def check_values(self) -> None:
        """Raise `InvalidInput` naming the first slot outside the cache. Expects NumPy arrays."""
        slots = self.num_slots
        bad = np.flatnonzero((self.slot_mapping < -1) | (self.slot_mapping >= slots))
        if bad.size:
            got = self.slot_mapping[bad[0]]
            raise InvalidInput(f"expected slot_mapping[{bad[0]}] to be -1 or between 0 and {slots - 1}, got {got}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageIndicesToSlots(Call):
    """Token positions of sequences as slots of the cache: what an indexer selects as what sparse attention takes.

    Args:
        positions: i32 [S, ...], positions in each sequence, such as the [S, Q, N] of a top-k indexer; -1 is none.
        page_indices: i32 [S, M], the page table.
        page_size: G.
        backend, options: as in `mla_decode`.

    Returns:
        i32 of the shape of `positions`: `page_indices[s, position // G] * G + position % G`; -1 for a position outside
        [0, M * G), for a negative page index, and for a slot beyond int32.

    Raises:
        InvalidInput, TypeError, Unsupported: as `mla_decode`.
    """

    OPERATION: ClassVar[str] = "page_indices_to_slots"

    positions: Any  # i32 [S, ...]
    page_indices: Any  # i32 [S, M]
    page_size: int
    device: Device = NOWHERE

    def __post_init__(self) -> None:
        rank = len(self.positions.shape) if is_array(self.positions) else 1
        letters = " ".join(("S", *(f"N{axis}" for axis in range(1, rank))))
        expect_array("positions", self.positions, letters, ("int32",), {})
        sizes = dict(zip("S", self.positions.shape, strict=False))
        expect_array("page_indices", self.page_indices, "S M", ("int32",), sizes)
        expect_count("page_size", self.page_size, 1)

    def check_values(self) -> None:
        """No value is unlawful: what names no slot becomes -1."""
