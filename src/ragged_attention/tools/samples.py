"""Representative calls without arrays, on devices that need not be present, to ask backends which calls they take.

The arguments of each operation are described here once. A sample's sizes are chosen freely; a case in `benchmarks/` is
a sample too, whose sizes follow from the lengths of its sequences.
"""

import dataclasses
import importlib
import importlib.util
from typing import Any

from ragged_attention.calls import CACHE_FORMATS, CALLS, QUANTIZED, Call, Device
from ragged_attention.calls.base import SHARED_MEMORY, shared_memory_of
from ragged_attention.calls.fields import wide_dtype
from ragged_attention.errors import InvalidInput

FRAMEWORKS = ("torch", "jax")
# Multiprocessors of one GPU of each architecture: A100, RTX 3090, H200, B200, RTX PRO 6000, MI300X, MI355X.
MULTIPROCESSORS = {"sm_80": 108, "sm_86": 82, "sm_90": 132, "sm_100": 148, "sm_120": 188, "gfx942": 304, "gfx950": 256}


@dataclasses.dataclass(frozen=True, slots=True)
class FakeArray:
    """A shape and the name of a dtype, which is all that a record reads."""

    shape: tuple[int, ...]
    dtype: str


class AnySample:
    """The sizes and options of a representative call."""

    num_q_heads: int
    max_num_seqs: int
    sinks: bool

    def arguments(self, operation: str) -> dict[str, Any]:
        """The arguments of `operation` by name, among them arrays of these shapes."""
        if operation not in CALLS:
            raise InvalidInput(f"expected operation to be one of {', '.join(CALLS)}, got {operation!r}")
        return getattr(self, f"_{operation}")()

    def call(self, operation: str, device: Device, **changed: Any) -> Call:
        """The record of `operation` on `device`; `changed` replaces some of the arguments."""
        arguments: dict[str, Any] = self.arguments(operation) | changed
        return CALLS[operation](**arguments, device=device)

    def _tables(self, pages_per_seq: int) -> dict[str, Any]:
        """The arrays that say which keys the sequences of a ragged batch have."""
        seqs = self.max_num_seqs
        return {
            "kv_lens": FakeArray((seqs,), "int32"),
            "page_indices": FakeArray((seqs, pages_per_seq), "int32"),
            "cu_q_lens": FakeArray((seqs + 1,), "int32"),
        }

    def _sinks(self, dtype: str = "float32") -> FakeArray | None:
        return FakeArray((self.num_q_heads,), dtype) if self.sinks else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample(AnySample):
    """A call of paged attention; the defaults are an 8B model's decode of 32 sequences of up to 4096."""

    dtype: str = "bfloat16"
    cache_dtype: str | None = None  # None: as dtype
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    num_tokens: int = 32
    max_num_seqs: int = 32
    max_len: int = 4096
    split_pages: bool = False
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    scale: float | None = None  # of a quantised cache, for both K and V
    return_lse: bool = False
    draft: int | None = None  # columns of a draft mask
    max_q_len: int | None = None

    @property
    def stored(self) -> str:
        """The dtype of the cache."""
        return self.cache_dtype or self.dtype

    @property
    def pages_per_seq(self) -> int:
        return -(-self.max_len // self.page_size)

    @property
    def num_pages(self) -> int:
        return self.max_num_seqs * self.pages_per_seq

    @property
    def q_shape(self) -> tuple[int, int, int]:
        return (self.num_tokens, self.num_q_heads, self.head_dim)

    def _pages(self) -> Any:
        heads = self.num_kv_heads * (1 if self.split_pages else 2)
        pages = FakeArray((self.num_pages, self.page_size, heads, self.head_dim), self.stored)
        return (pages, pages) if self.split_pages else pages

    def _cache(self) -> dict[str, Any]:
        return self._tables(self.pages_per_seq) | {
            "kv_pages": self._pages(),
            "k_scale": self.scale,
            "v_scale": self.scale,
        }

    def _ragged_paged_attention(self) -> dict[str, Any]:
        return self._cache() | {
            "q": FakeArray(self.q_shape, self.dtype),
            "sliding_window": self.sliding_window,
            "soft_cap": self.soft_cap,
            "sinks": self._sinks(),
            "return_lse": self.return_lse,
            "draft_mask": None if self.draft is None else FakeArray((self.num_tokens, self.draft), "bool"),
            "max_q_len": self.max_q_len,
        }

    def _write_kv_pages(self) -> dict[str, Any]:
        new = FakeArray((self.num_tokens, self.num_kv_heads, self.head_dim), self.dtype)
        return self._cache() | {"k": new, "v": new}

    def _heads_first(self) -> dict[str, Any]:
        """The arguments that the operations over heads-first pages share; an 8-bit cache has scales."""
        shape = (self.num_kv_heads, self.num_pages, self.page_size)
        pages: Any = FakeArray((*shape, self.head_dim), self.stored)
        if self.stored in QUANTIZED:
            pages = (pages, FakeArray((*shape, 1), "float32"))
        return {"k_pages": pages, "v_pages": pages, "soft_cap": self.soft_cap}

    def _paged_attention(self) -> dict[str, Any]:
        tables = self._tables(self.pages_per_seq)
        return self._heads_first() | {
            "q": FakeArray((self.max_num_seqs, *self.q_shape[1:]), self.dtype),
            "lengths": tables["kv_lens"],
            "page_indices": tables["page_indices"],
        }

    def _prefill_attention(self) -> dict[str, Any]:
        return self._heads_first() | {
            "q": FakeArray(self.q_shape, self.dtype),
            "length": FakeArray((1,), "int32"),
            "page_indices": FakeArray((self.pages_per_seq,), "int32"),
            "sliding_window": self.sliding_window,
        }

    def _merge_attention_states(self) -> dict[str, Any]:
        outs = (2, *self.q_shape)
        return {"outs": FakeArray(outs, self.dtype), "lses": FakeArray(outs[:-1], "float32")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentSample(AnySample):
    """A call of latent attention; the defaults are DeepSeek-V3.2's sparse decode of 32 sequences of up to 4096."""

    dtype: str = "bfloat16"
    cache_format: str = "fp8_v32"
    num_q_heads: int = 128
    num_kv_heads: int = 1
    d_qk: int | None = None  # None: that of the format, 576 for plain
    d_v: int = 512
    page_size: int = 64
    num_tokens: int = 32
    max_num_seqs: int = 32
    max_len: int = 4096
    causal: bool = False
    topk: int = 2048  # 0: dense
    extra_topk: int = 0  # keys selected from a second cache of the same length
    extra_page_size: int = 64
    extra_format: str | None = None  # None: that of the first
    cache_layout: str | None = None
    stored: str | None = None  # the dtype of a plain 8-bit cache
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def width(self) -> int:
        """Columns of queries and of latent rows."""
        layout = CACHE_FORMATS.get(self.cache_format)
        return self.d_qk or (layout.width if layout else 576)

    @property
    def num_q_tokens(self) -> int:
        """Of each sequence of a decode."""
        return max(1, self.num_tokens // self.max_num_seqs)

    def pages_per_seq(self, page_size: int) -> int:
        return -(-self.max_len // page_size)

    def num_pages(self, page_size: int) -> int:
        return self.max_num_seqs * self.pages_per_seq(page_size)

    def _cache(self, page_size: int, cache_format: str | None = None) -> FakeArray:
        layout = CACHE_FORMATS.get(cache_format or self.cache_format)
        row = layout.token_bytes if layout else self.width
        shape = (self.num_pages(page_size), page_size, self.num_kv_heads, row)
        return FakeArray(shape, "uint8" if layout else self.stored or self.dtype)

    def _rows(self) -> FakeArray:
        """The rows that a prefill reads."""
        return self._cache(self.page_size)

    def _attention(self, tokens: tuple[int, ...]) -> dict[str, Any]:
        return {
            "q": FakeArray((*tokens, self.num_q_heads, self.width), self.dtype),
            "d_v": self.d_v,
            "sinks": self._sinks(),
            "cache_format": self.cache_format,
            "cache_layout": self.cache_layout,
        }

    def _sparse_mla_prefill(self) -> dict[str, Any]:
        lists = FakeArray((self.num_tokens, self.num_kv_heads, self.topk), "int32")
        return self._attention((self.num_tokens,)) | {"kv": self._rows(), "indices": lists}

    def _sparse_mla_prefill_backward(self) -> dict[str, Any]:
        """The rows are plain whatever the format is, since quantised rows have no gradient."""
        given = self._sparse_mla_prefill()
        del given["cache_format"], given["cache_layout"]
        outs = FakeArray((self.num_tokens, self.num_q_heads, self.d_v), self.dtype)
        rows = FakeArray((*given["kv"].shape[:-1], self.width), self.dtype)
        return given | {"kv": rows, "d_out": outs, "out": outs, "lse": FakeArray(outs.shape[:-1], "float32")}

    def _mla_decode(self) -> dict[str, Any]:
        tokens = (self.max_num_seqs, self.num_q_tokens)
        keys = self._tables(self.pages_per_seq(self.page_size))
        del keys["cu_q_lens"]
        if self.topk:
            keys = {"indices": FakeArray((*tokens, self.topk), "int32")}
        if self.extra_topk:
            keys["extra_kv_cache"] = self._cache(self.extra_page_size, self.extra_format)
            keys["extra_indices"] = FakeArray((*tokens, self.extra_topk), "int32")
        more = {"causal": self.causal, "sliding_window": self.sliding_window, "soft_cap": self.soft_cap}
        return self._attention(tokens) | keys | {"kv_cache": self._cache(self.page_size)} | more

    def _ragged_mla_attention(self) -> dict[str, Any]:
        return (
            self._attention((self.num_tokens,))
            | self._tables(self.pages_per_seq(self.page_size))
            | {
                "kv_cache": self._cache(self.page_size),
                "causal": self.causal,
                "sliding_window": self.sliding_window,
                "soft_cap": self.soft_cap,
            }
        )

    def _make_decode_schedule(self) -> dict[str, Any]:
        lens = FakeArray((self.max_num_seqs,), "int32")
        extra_lens = lens if self.extra_topk else None
        return {"lens": lens, "extra_lens": extra_lens, "sparse": self.topk > 0, "num_parts": 132}

    def _quantize_mla_cache(self) -> dict[str, Any]:
        kv = FakeArray((*self._cache(self.page_size).shape[:3], self.width), self.dtype)
        return {"kv": kv, "format": self.cache_format, "cache_layout": self.cache_layout}

    def _dequantize_mla_cache(self) -> dict[str, Any]:
        said = {"format": self.cache_format, "dtype": self.dtype, "cache_layout": self.cache_layout}
        return {"cache": self._cache(self.page_size), **said}

    def _write_mla_cache(self) -> dict[str, Any]:
        new = FakeArray((self.num_tokens, self.num_kv_heads, self.width), self.dtype)
        slots = FakeArray((self.num_tokens,), "int64")
        cache = self._cache(self.page_size)
        said = {"cache_format": self.cache_format, "cache_layout": self.cache_layout}
        return {"kv": new, "cache": cache, "slot_mapping": slots, **said}

    def _page_indices_to_slots(self) -> dict[str, Any]:
        table = FakeArray((self.max_num_seqs, self.pages_per_seq(self.page_size)), "int32")
        positions = FakeArray((self.max_num_seqs, self.num_q_tokens, self.topk), "int32")
        return {"positions": positions, "page_indices": table, "page_size": self.page_size}


@dataclasses.dataclass(frozen=True, kw_only=True)
class VarlenSample(AnySample):
    """A call of attention without a cache; the defaults are a training step of an 8B model on 4 sequences of 4096."""

    dtype: str = "bfloat16"
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    d_v: int | None = None  # None: as head_dim
    num_tokens: int = 4 * 4096
    max_num_seqs: int = 4
    causal: bool = True
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    d_lse: bool = False  # whether the gradient of lse is given

    @property
    def num_kv_tokens(self) -> int:
        return self.num_tokens

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return (self.num_tokens, self.num_q_heads, self.head_dim if self.d_v is None else self.d_v)

    def _varlen_attention(self) -> dict[str, Any]:
        edges = FakeArray((self.max_num_seqs + 1,), "int32")
        return {
            "q": FakeArray((self.num_tokens, self.num_q_heads, self.head_dim), self.dtype),
            "k": FakeArray((self.num_kv_tokens, self.num_kv_heads, self.head_dim), self.dtype),
            "v": FakeArray((self.num_kv_tokens, self.num_kv_heads, self.out_shape[2]), self.dtype),
            "cu_q_lens": edges,
            "cu_kv_lens": edges,
            "causal": self.causal,
            "sliding_window": self.sliding_window,
            "soft_cap": self.soft_cap,
            "sinks": self._sinks(wide_dtype(self)),
        }

    def _varlen_attention_backward(self) -> dict[str, Any]:
        outs, lse = FakeArray(self.out_shape, self.dtype), FakeArray(self.out_shape[:2], wide_dtype(self))
        d_lse = lse if self.d_lse else None
        return self._varlen_attention() | {"d_out": outs, "out": outs, "lse": lse, "d_lse": d_lse}


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerSample(AnySample):
    """A call of the lightning indexer; the defaults are DeepSeek-V3.2's decode of 32 sequences of up to 4096."""

    dtype: str = "float8_e4m3fn"
    cache_dtype: str = "uint8"  # pages of bytes; else that of plain pages, or of packed keys
    num_q_heads: int = 64
    head_dim: int = 128
    page_size: int = 64
    num_tokens: int = 32
    max_num_seqs: int = 32
    max_len: int = 4096  # tokens
    packed: bool = False  # all keys in one array, with a range for each query
    ratio: int = 1
    top_k: int = 2048
    candidate_blocks: int = 0  # in each query's list; 0: none
    candidate_block_size: int = 64
    sinks: bool = False

    @property
    def pages_per_seq(self) -> int:
        return -(-self.max_len // (self.page_size * self.ratio))

    @property
    def new_dtype(self) -> str:
        """The dtype of keys before they are quantised."""
        return "bfloat16" if self.dtype == "float8_e4m3fn" else self.dtype

    def _cache(self) -> FakeArray:
        pages = (self.max_num_seqs * self.pages_per_seq, self.page_size)
        if self.cache_dtype == "uint8":
            return FakeArray((*pages, 1, self.head_dim + 4), "uint8")
        return FakeArray((*pages, self.head_dim), self.cache_dtype)

    def _keys(self) -> dict[str, Any]:
        tokens, seqs = self.num_tokens, self.max_num_seqs
        if self.packed:
            edges, count = FakeArray((tokens,), "int32"), seqs * self.max_len
            keys = FakeArray((count, self.head_dim), self.dtype)
            scale = FakeArray((count,), "float32") if self.dtype == "float8_e4m3fn" else None
            return {"keys": keys, "key_scale": scale, "starts": edges, "stops": edges}
        return self._tables(self.pages_per_seq) | {"keys": self._cache(), "ratio": self.ratio}

    def _indexer_logits(self) -> dict[str, Any]:
        heads = (self.num_tokens, self.num_q_heads)
        return self._keys() | {
            "q": FakeArray((*heads, self.head_dim), self.dtype),
            "weights": FakeArray(heads, "float32"),
        }

    def _indexer_topk(self) -> dict[str, Any]:
        lists = {
            "candidate_blocks": FakeArray((self.num_tokens, self.candidate_blocks), "int32"),
            "candidate_block_size": self.candidate_block_size,
        }
        return self._indexer_logits() | {"top_k": self.top_k} | (lists if self.candidate_blocks else {})

    def _top_k_indices(self) -> dict[str, Any]:
        edges = FakeArray((self.num_tokens,), "int32")
        logits = FakeArray((self.num_tokens, self.max_len), "float32")
        return {"logits": logits, "top_k": self.top_k, "starts": edges, "stops": edges}

    def _quantize_indexer_keys(self) -> dict[str, Any]:
        return {"k": FakeArray((self.num_tokens, self.head_dim), self.new_dtype)}

    def _write_indexer_cache(self) -> dict[str, Any]:
        cache = dataclasses.replace(self, cache_dtype="uint8")._cache()
        slots = FakeArray((self.num_tokens,), "int64")
        return self._quantize_indexer_keys() | {"cache": cache, "slot_mapping": slots}


KINDS = (Sample, LatentSample, VarlenSample, IndexerSample)


def sample_of(operation: str, **options: Any) -> Sample | LatentSample | VarlenSample | IndexerSample:
    """A representative sample for an operation, changed by `options`, which are fields of it."""
    kind = next((kind for kind in KINDS if hasattr(kind, f"_{operation}")), LatentSample)
    known = [field.name for field in dataclasses.fields(kind)]
    for name in options:
        if name not in known:
            raise InvalidInput(f"expected options of {operation} to be among {', '.join(known)}, got {name}")
    return kind(**options)


def device_of(framework: str, name: str | None = None) -> Device:
    """The facts of a device: this machine's default one, one by its name, or a GPU architecture that need not be here.

    `name` is None, what the framework calls a device ("cpu", "cuda:0", "mps"), "tpu", or an architecture ("sm_90").
    """
    if framework not in FRAMEWORKS:
        raise InvalidInput(f"expected framework to be one of {', '.join(FRAMEWORKS)}, got {framework!r}")
    known = tuple(dict.fromkeys((*MULTIPROCESSORS, *SHARED_MEMORY)))
    if name in known:
        return Device(
            framework=framework,
            platform="cuda" if name.startswith("sm_") else "rocm",
            arch=name,
            num_multiprocessors=MULTIPROCESSORS.get(name, 1),
            shared_memory=shared_memory_of(name),
        )
    if name == "tpu":
        return Device(framework=framework, platform="tpu", **_tpu_facts(framework))
    launcher = importlib.import_module(f"ragged_attention.{framework}._launcher")
    if framework == "jax":
        here = importlib.import_module("ragged_attention.jax._lower").default_platform()
        if name not in (None, here):
            raise InvalidInput(f"expected device to be {here} or one of tpu, {', '.join(known)}, got {name!r}")
        return launcher.device_facts(here)
    torch = importlib.import_module("torch")
    try:
        return launcher.device_facts(torch.device(name or _default_torch_device(torch)))
    except (RuntimeError, AssertionError) as error:
        choices = f"a torch device of this machine, tpu, or one of {', '.join(known)}"
        reason = str(error).strip().splitlines()[0]
        raise InvalidInput(f"expected device to be {choices}, got {name!r} ({reason})") from None


def _tpu_facts(framework: str) -> dict[str, Any]:
    """The facts of a representative TPU, if jax is here to tell; no kernel called from torch asks for them."""
    if framework != "jax" or importlib.util.find_spec("jax") is None:
        return {}
    return importlib.import_module("ragged_attention.jax._launcher").tpu_facts()


def _default_torch_device(torch: Any) -> str:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found else "cpu"
