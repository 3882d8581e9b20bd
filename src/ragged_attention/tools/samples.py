"""Representative calls without arrays, on devices that need not be present, to ask backends which calls they take.

A sample's sizes are free. A case in `benchmarks/` is a sample whose sizes follow from the lengths of its sequences.
"""

import dataclasses
import importlib
import importlib.util
import itertools
import math
import re
import types
from typing import Any, TypeGuard

from ragged_attention.calls import CACHE_FORMATS, CALLS, QUANTIZED, Call, Device
from ragged_attention.calls.base import shared_memory_of
from ragged_attention.calls.cache_formats import SCALED_FORMATS, KvFormat, element_of
from ragged_attention.calls.fields import INT8, ArrayKind
from ragged_attention.calls.indexer import SCALE_BYTES
from ragged_attention.errors import InvalidInput
from ragged_attention.tools.gpus import ARCHITECTURES, GPUS, multiprocessors_of, unknown_device, why_too_old

FRAMEWORKS = ("torch", "jax")
# The formats of rows with scales by name. If several formats share a name, the first one represents them.
KV_FORMATS = {name: next(forms) for name, forms in itertools.groupby(SCALED_FORMATS, key=lambda form: form.name)}
TABLES = {"kv_lens": True, "page_indices": True, "cu_q_lens": True}  # the arguments that define each sequence's keys


@dataclasses.dataclass(frozen=True, slots=True)
class FakeArray:
    """A shape and the name of a dtype, the only properties that a record reads."""

    shape: tuple[int, ...]
    dtype: str


BIAS_WIDTH = 256


def ranges_of(sample: Any) -> "FakeArray | None":
    """The ranges of keys of a sample, or None if it has none."""
    return FakeArray((sample.num_tokens, sample.key_ranges, 2), "int32") if sample.key_ranges else None


def lists_of(sample: Any) -> "FakeArray | None":
    """The lists of key blocks of a sample, one list for each KV head, or None if it has no lists."""
    shape = (sample.num_tokens, sample.num_kv_heads, sample.selected)
    return FakeArray(shape, "int32") if sample.selected else None


def bias_of(sample: Any) -> "FakeArray | None":
    """The relative bias of a sample, or None if it has none."""
    return FakeArray((sample.num_q_heads, BIAS_WIDTH), "float32") if sample.relative_bias else None


class AnySample:
    """The sizes and options of a representative call.

    An operation's record lists its arguments, with the axes and dtypes of most arrays. A sample adds the lengths of
    the axes (`_axes`), and values of arguments by name: the items of `_arguments` and the sample's fields. The value
    True stands for an optional array as the record describes it.
    """

    dtype: str
    num_q_heads: int
    num_tokens: int
    max_num_seqs: int
    sinks: bool

    def arguments(self, operation: str) -> dict[str, Any]:
        """The arguments of `operation` by name."""
        if operation not in CALLS:
            raise InvalidInput(f"expected operation to be one of {', '.join(CALLS)}, got {operation!r}")
        given, axes, arguments = self._arguments(operation), self._axes(), {}
        for name, kind in CALLS[operation].KINDS.items():
            value = given.get(name, getattr(self, name, None))
            if isinstance(kind, ArrayKind) and not isinstance(value, FakeArray):
                value = self._array(kind, axes) if value or not kind.optional else None
            if value is not None:
                arguments[name] = value
        return arguments

    def call(self, operation: str, device: Device, **changed: Any) -> Call:
        """The record of `operation` on `device`; `changed` replaces some of the arguments."""
        arguments: dict[str, Any] = self.arguments(operation) | changed
        return CALLS[operation](**arguments, device=device)

    def _array(self, kind: ArrayKind, axes: dict[str, int]) -> FakeArray:
        """An array of the sample's dtype if the record allows floats, else of the last dtype that it allows."""
        like = FakeArray((), self.dtype)
        dtypes = kind.dtypes(types.SimpleNamespace(q=like, k=like, kv=like)) if callable(kind.dtypes) else kind.dtypes
        shape = tuple(axes[letter] for letter in str(kind.shape).split())
        return FakeArray(shape, self.dtype if "float16" in dtypes else dtypes[-1])

    def _axes(self) -> dict[str, int]:
        """The length of each axis by its letter in the records."""
        seqs = self.max_num_seqs
        return {"T": self.num_tokens, "H": self.num_q_heads, "S": seqs, "S+1": seqs + 1}

    def _arguments(self, operation: str) -> dict[str, Any]:
        """Values of arguments by name. The operation need not take all of these arguments."""
        del operation
        return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample(AnySample):
    """A call of paged attention; the defaults are an 8B model's decode of 32 sequences of up to 4096 tokens."""

    dtype: str = "bfloat16"
    cache_dtype: str | None = None  # None: equal to dtype
    kv_format: str | None = None  # the name of a format with scale pages, for both K and V, instead of cache_dtype
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
    alibi_slopes: bool = False
    relative_bias: bool = False
    scale: float | None = None  # the scale of a quantised cache, for both K and V
    return_lse: bool = False
    return_max_logits: bool = False
    draft: int | None = None  # number of columns of the draft mask
    key_ranges: int | None = None  # number of key ranges per query
    selected: int | None = None  # number of key blocks in the list of each query and KV head
    block_size: int | None = None
    max_q_len: int | None = None

    @property
    def stored(self) -> str:
        """The dtype of the cache."""
        return self.cache_dtype or self.dtype if self.form is None else element_of(self.form)

    @property
    def form(self) -> KvFormat | None:
        """The format of keys and values if they have scale pages."""
        if self.kv_format is None:
            return None
        if self.cache_dtype is not None:
            raise InvalidInput(f"expected cache_dtype or kv_format, got {self.cache_dtype!r} and {self.kv_format!r}")
        if self.kv_format not in KV_FORMATS:
            raise InvalidInput(f"expected kv_format to be one of {', '.join(KV_FORMATS)}, got {self.kv_format!r}")
        return KV_FORMATS[self.kv_format]

    @property
    def pages_per_seq(self) -> int:
        return -(-self.max_len // self.page_size)

    @property
    def num_pages(self) -> int:
        return self.max_num_seqs * self.pages_per_seq

    @property
    def q_shape(self) -> tuple[int, int, int]:
        return (self.num_tokens, self.num_q_heads, self.head_dim)

    def _axes(self) -> dict[str, int]:
        heads = {"K": self.num_kv_heads, "D": self.head_dim, "D_v": self.head_dim}
        return super()._axes() | heads | {"M": self.pages_per_seq, "N": 2, "W": self.draft or 0}

    def _arguments(self, operation: str) -> dict[str, Any]:
        heads = self.num_kv_heads * (1 if self.split_pages else 2)
        width = self.head_dim // (1 if self.form is None else self.form.columns_per_element)
        pages = FakeArray((self.num_pages, self.page_size, heads, width), self.stored)
        scales = None
        if self.form is not None:
            if "k_scale_pages" not in CALLS[operation].KINDS:
                raise InvalidInput(f"expected no kv_format of {operation}, which has no scale pages")
            shape = (self.num_pages, self.page_size, self.num_kv_heads, self.form.scales_of_row(self.head_dim))
            scales = FakeArray(shape, self.form.scales)
        shape = (self.num_kv_heads, self.num_pages, self.page_size)
        scale = 1.0 if self.scale is None and scales is None and self.stored == INT8 else self.scale
        heads_first: Any = FakeArray((*shape, self.head_dim), self.stored)
        if self.stored in QUANTIZED:  # then they have scales
            heads_first = (heads_first, FakeArray((*shape, 1), "float32"))
        return {
            "k": FakeArray((self.num_tokens, self.num_kv_heads, self.head_dim), self.dtype),
            "x": FakeArray((self.num_tokens, self.num_kv_heads, self.head_dim), self.dtype),
            "format": "int8_token_head",
            "codes": FakeArray((self.num_tokens, self.num_kv_heads, self.head_dim), "int8"),
            "scales": FakeArray((self.num_tokens, self.num_kv_heads), "float32"),
            "kv_pages": (pages, pages) if self.split_pages else pages,
            "positions": FakeArray((self.num_tokens,), "int32"),
            "cos_sin": FakeArray((self.max_len, self.head_dim), "float32"),
            "q_weight": operation == "norm_rope_write",
            "k_weight": operation == "norm_rope_write",
            "k_pages": heads_first,
            "v_pages": heads_first,
            "length": FakeArray((1,), "int32"),
            "k_scale": scale,
            "v_scale": scale,
            "k_scale_pages": scales,
            "v_scale_pages": scales,
            "draft_mask": self.draft is not None,
            "key_ranges": ranges_of(self),
            "selected": lists_of(self),
            "relative_bias": bias_of(self),
            "sinks": self.sinks and operation != "merge_attention_states",  # the states to merge may include them
        } | TABLES


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentSample(AnySample):
    """A call of latent attention; by default, DeepSeek-V3.2's sparse decode of 32 sequences of up to 4096 tokens."""

    dtype: str = "bfloat16"
    cache_format: str = "fp8_v32"
    num_q_heads: int = 128
    num_kv_heads: int = 1
    d_qk: int | None = None  # None: the format's width, or 576 for plain
    d_v: int = 512
    page_size: int = 64
    num_tokens: int = 32
    max_num_seqs: int = 32
    max_len: int = 4096
    causal: bool = False
    topk: int = 2048  # 0: dense
    extra_topk: int = 0  # number of keys selected from a second cache with the same lengths
    extra_page_size: int = 64
    extra_format: str | None = None  # None: equal to cache_format
    cache_layout: str | None = None
    stored: str | None = None  # the dtype of a plain 8-bit cache
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    rotary: int = 64  # columns of the rotary table
    rope_scale: float | None = None  # the scale of the rotary columns of a plain cache
    key_ranges: int | None = None  # number of key ranges per query
    return_max_logits: bool = False

    @property
    def width(self) -> int:
        """The number of columns of queries and of latent rows."""
        layout = CACHE_FORMATS.get(self.cache_format)
        return self.d_qk or (layout.width if layout else 576)

    @property
    def num_q_tokens(self) -> int:
        """The number of queries of each sequence in a decode."""
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

    def _kv(self, operation: str) -> FakeArray:
        """The argument `kv`: the rows that a prefill reads, or plain rows of the sample's dtype."""
        if operation == "sparse_mla_prefill":
            return self._rows()
        written = operation in ("write_mla_cache", "latent_norm_rope_write")
        rows = (self.num_tokens, self.num_kv_heads) if written else self._rows().shape[:-1]
        return FakeArray((*rows, self.width), self.dtype)

    def _axes(self) -> dict[str, int]:
        return super()._axes() | {
            "K": self.num_kv_heads, "D": self.width, "d_v": self.d_v, "M": self.pages_per_seq(self.page_size),
            "Q": self.num_q_tokens, "N": self.topk, "N'": self.extra_topk, "R": self.rotary,
            "W": self.width - self.rotary,
        }  # fmt: skip

    def _arguments(self, operation: str) -> dict[str, Any]:
        cache, seqs = self._cache(self.page_size), self.max_num_seqs
        arguments: dict[str, Any] = {
            "kv_cache": cache, "cache": cache, "kv": self._kv(operation), "format": self.cache_format,
            "positions": FakeArray((seqs, self.num_q_tokens, self.topk), "int32"), "sparse": self.topk > 0,
            "num_parts": 132, "slot_mapping": True, "indices": self.topk > 0, "extra_indices": self.extra_topk > 0,
            "extra_lens": self.extra_topk > 0, "key_ranges": ranges_of(self),
            "kv_scale": 1.0 if self.stored == INT8 else None,
        }  # fmt: skip
        if operation == "attention_target":
            count = math.prod(self._rows().shape[:2])  # pages * positions, or rows * one KV head
            arguments |= {"keys": FakeArray((count, self.width), self.dtype)}
            if not self.topk:
                arguments |= {"starts": True, "stops": True}
        if operation == "write_mla_cache":
            arguments["d_v"] = None if self.rope_scale is None else self.d_v
        if operation == "latent_norm_rope_write":
            table = FakeArray((self.max_len, self.rotary), "float32")
            arguments |= {"positions": FakeArray((self.num_tokens,), "int32"), "cos_sin": table, "kv_weight": True}
        if operation == "page_indices_to_slots" or (operation == "mla_decode" and not self.topk):
            arguments["page_indices"] = FakeArray((seqs, self.pages_per_seq(self.page_size)), "int32")
            arguments["kv_lens"] = FakeArray((seqs,), "int32")
        if self.extra_topk:
            arguments["extra_kv_cache"] = self._cache(self.extra_page_size, self.extra_format)
        return arguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class VarlenSample(AnySample):
    """A call of attention without a cache; by default, an 8B model's training step on 4 sequences of 4096 tokens."""

    dtype: str = "bfloat16"
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    d_v: int | None = None  # None: equal to head_dim
    num_tokens: int = 4 * 4096
    max_num_seqs: int = 4
    causal: bool = True
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    alibi_slopes: bool = False
    relative_bias: bool = False  # if True, a call of the gradient requests `d_relative_bias`
    own_tables: bool = False  # whether each query has its own table of the relative bias
    key_ranges: int | None = None  # number of key ranges per query; `causal` must be False
    selected: int | None = None  # number of key blocks in the list of each query and KV head
    block_size: int | None = None
    d_lse: bool = False  # whether the gradient of lse is given
    return_max_logits: bool = False

    @property
    def num_kv_tokens(self) -> int:
        return self.num_tokens

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return (self.num_tokens, self.num_q_heads, self.head_dim if self.d_v is None else self.d_v)

    def _axes(self) -> dict[str, int]:
        heads = {"K": self.num_kv_heads, "D": self.head_dim, "D_v": self.out_shape[2]}
        return super()._axes() | heads | {"T_q": self.num_tokens, "T_k": self.num_kv_tokens}

    def _arguments(self, operation: str) -> dict[str, Any]:
        bias = bias_of(self)
        if bias is not None and self.own_tables:
            bias = FakeArray((self.num_tokens, *bias.shape), bias.dtype)
        return {
            "relative_bias": bias, "key_ranges": ranges_of(self), "selected": lists_of(self),
            "return_d_relative_bias": bias is not None,
        }  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerSample(AnySample):
    """A call of the lightning indexer; the defaults are DeepSeek-V3.2's decode of 32 sequences of up to 4096 tokens."""

    dtype: str = "float8_e4m3fn"
    cache_dtype: str = "uint8"  # uint8: pages of bytes; else the dtype of plain pages
    num_q_heads: int = 64
    head_dim: int = 128
    page_size: int = 64
    num_tokens: int = 32
    max_num_seqs: int = 32
    max_len: int = 4096  # tokens
    packed: bool = False  # whether all keys are in one array, with a range for each query
    listed: bool = False  # whether all keys are in one array, with a list of `top_k` keys for each query
    ratio: int = 1
    top_k: int = 2048
    candidate_blocks: int = 0  # number of blocks in each query's list; 0: no lists
    candidate_block_size: int = 64
    sinks: bool = False

    @property
    def pages_per_seq(self) -> int:
        return -(-self.max_len // (self.page_size * self.ratio))

    @property
    def num_pages(self) -> int:
        return self.max_num_seqs * self.pages_per_seq

    def _cache(self, dtype: str) -> FakeArray:
        pages = (self.num_pages, self.page_size)
        return FakeArray(
            (*pages, 1, self.head_dim + SCALE_BYTES) if dtype == "uint8" else (*pages, self.head_dim), dtype
        )

    def _axes(self) -> dict[str, int]:
        axes = {"D": self.head_dim, "N": self.max_len, "M": self.pages_per_seq, "B": self.candidate_blocks}
        return super()._axes() | axes | {"L": self.top_k, "C": self.top_k if self.listed else self.num_keys}

    @property
    def num_keys(self) -> int:
        """The number of packed keys."""
        return self.max_num_seqs * self.max_len

    def _arguments(self, operation: str) -> dict[str, Any]:
        is_8_bit = self.dtype == "float8_e4m3fn"
        arguments: dict[str, Any] = {
            "k": FakeArray((self.num_tokens, self.head_dim), "bfloat16" if is_8_bit else self.dtype),
            "cache": self._cache("uint8"),
            "candidate_block_size": self.candidate_block_size if self.candidate_blocks else None,
        }
        gradient = operation == "indexer_logits_backward"
        over_lists = self.listed and (gradient or operation == "indexer_logits")
        if over_lists:
            arguments |= {"indices": True}
        elif self.packed or gradient or operation == "top_k_indices":
            arguments |= {"starts": True, "stops": True}
        else:
            arguments |= TABLES
        if gradient:  # 8-bit queries and keys have no gradient
            dtype = "bfloat16" if is_8_bit else self.dtype
            shape = (self.num_tokens, self.num_q_heads, self.head_dim)
            return arguments | {"q": FakeArray(shape, dtype), "keys": FakeArray((self.num_keys, self.head_dim), dtype)}
        if not (self.packed or over_lists):
            return arguments | {"keys": self._cache(self.cache_dtype)}
        scale = FakeArray((self.num_keys,), "float32") if is_8_bit else None
        return arguments | {"keys": FakeArray((self.num_keys, self.head_dim), self.dtype), "key_scale": scale}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlocksSample(IndexerSample):
    """A call of block selection; the defaults are MiniMax M3's decode of 32 sequences of up to 4096 tokens."""

    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    num_q_heads: int = 4
    num_kv_heads: int = 1
    page_size: int = 128
    block_size: int = 128
    top_k: int = 16
    init_blocks: int = 0
    local_blocks: int = 1

    def _axes(self) -> dict[str, int]:
        return super()._axes() | {"B": -(-self.pages_per_seq * self.page_size // self.block_size)}

    def _arguments(self, operation: str) -> dict[str, Any]:
        arguments = super()._arguments(operation)
        keys = arguments["keys"]
        if keys.dtype == "uint8":
            return arguments
        arguments["keys"] = FakeArray((*keys.shape[:-1], self.num_kv_heads, self.head_dim), keys.dtype)
        if (scale := arguments.get("key_scale")) is not None:
            arguments["key_scale"] = FakeArray((*scale.shape, self.num_kv_heads), scale.dtype)
        return arguments


KINDS = (Sample, LatentSample, VarlenSample, IndexerSample, BlocksSample)
# The kind of sample for each module of records. All other modules of records need a LatentSample.
MODULES = {
    "paged": Sample,
    "kv_rows": Sample,
    "norm_rope": Sample,
    "heads_first": Sample,
    "varlen": VarlenSample,
    "indexer": IndexerSample,
    "blocks": BlocksSample,
}


def sample_of(operation: str, **options: Any) -> Sample | LatentSample | VarlenSample | IndexerSample:
    """A representative sample for an operation. The `options` are values of its fields that replace the defaults."""
    module = CALLS.get(operation, Call).__module__.rpartition(".")[2]
    kind = MODULES.get(module, LatentSample)
    known = [field.name for field in dataclasses.fields(kind)]
    for name in options:
        if name not in known:
            raise InvalidInput(f"expected options of {operation} to be among {', '.join(known)}, got {name}")
    return kind(**options)


def device_of(framework: str, name: str | None = None) -> Device:
    """The facts of a device.

    `name` is a framework's name for a device of this machine ("cpu", "cuda:0", "mps"), or a name for which
    `is_elsewhere` is true. None stands for this machine's default device.
    """
    if framework not in FRAMEWORKS:
        raise InvalidInput(f"expected framework to be one of {', '.join(FRAMEWORKS)}, got {framework!r}")
    if is_elsewhere(name) and name.lower() != "tpu":
        arch, full_name, count = GPUS.get(name.lower(), (name.lower(), "", 0))
        return Device(
            framework=framework, platform="cuda" if arch.startswith("sm_") else "rocm", name=full_name, arch=arch,
            num_multiprocessors=count or multiprocessors_of(arch), shared_memory=shared_memory_of(arch),
        )  # fmt: skip
    if is_elsewhere(name):
        facts: dict[str, Any] = {}  # no kernel that is called from torch needs them
        if framework == "jax" and importlib.util.find_spec("jax") is not None:
            facts = importlib.import_module("ragged_attention.jax._launcher").tpu_facts()
        return Device(framework=framework, platform="tpu", **facts)
    return _device_here(framework, name)


def is_elsewhere(name: str | None) -> TypeGuard[str]:
    """Whether a name stands for a device that this machine need not have: "tpu", or a GPU's name or architecture."""
    return name is not None and name.lower() in (*GPUS, *ARCHITECTURES, "tpu")


def _device_here(framework: str, name: str | None) -> Device:
    """The facts of a device of this machine."""
    if (reason := why_too_old(name)) is not None:
        raise InvalidInput(reason)
    launcher = importlib.import_module(f"ragged_attention.{framework}._launcher")
    if framework == "jax":
        here = importlib.import_module("ragged_attention.jax._lower").default_platform()
        if name not in (None, here):
            raise InvalidInput(unknown_device(f"{here}, jax's device of this machine, or", repr(name)))
        return launcher.device_facts(here)
    torch = importlib.import_module("torch")
    try:
        where = name or torch.accelerator.current_accelerator(check_available=True) or "cpu"
        return launcher.device_facts(torch.device(where))
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        why = "" if re.search("device string", reason) else f" ({reason})"  # the name is not a device string
        raise InvalidInput(unknown_device("a torch device of this machine or", f"{name!r}{why}")) from None
