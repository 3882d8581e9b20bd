"""Representative calls without arrays, on devices that need not be here: for asking backends what they take."""

import dataclasses
import importlib
import importlib.util
from typing import Any

from ragged_attention.calls import CACHE_FORMATS, CALLS, QUANTIZED, Call, Device
from ragged_attention.calls.fields import wide_dtype
from ragged_attention.devices import SHARED_MEMORY, shared_memory_of
from ragged_attention.errors import InvalidInput

FRAMEWORKS = ("torch", "jax")
# Multiprocessors of the part that stands for each: A100, RTX 3090, H200, B200, RTX PRO 6000, MI300X, MI355X.
MULTIPROCESSORS = {"sm_80": 108, "sm_86": 82, "sm_90": 132, "sm_100": 148, "sm_120": 188, "gfx942": 304, "gfx950": 256}


@dataclasses.dataclass(frozen=True, slots=True)
class FakeArray:
    """A shape and a dtype's name: all that a record looks at."""

    shape: tuple[int, ...]
    dtype: str


class _Sample:
    """What a representative call is made of."""

    def call(self, operation: str, device: Device) -> Call:
        """The record of `operation` over arrays of these shapes, as if it came from `device`."""
        if operation not in CALLS:
            raise InvalidInput(f"expected operation to be one of {', '.join(CALLS)}, got {operation!r}")
        return CALLS[operation](**getattr(self, f"_{operation}")(), device=device)  # type: ignore[call-arg]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample(_Sample):
    """Of paged attention; the defaults are an 8B model's decode of 32 sequences of up to 4096."""

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
    return_lse: bool = False

    def _pages(self) -> Any:
        heads = self.num_kv_heads * (1 if self.split_pages else 2)
        count = self.max_num_seqs * -(-self.max_len // self.page_size)
        pages = FakeArray((count, self.page_size, heads, self.head_dim), self.cache_dtype or self.dtype)
        return (pages, pages) if self.split_pages else pages

    def _tables(self) -> dict[str, Any]:
        seqs = self.max_num_seqs
        return {
            "kv_lens": FakeArray((seqs,), "int32"),
            "page_indices": FakeArray((seqs, -(-self.max_len // self.page_size)), "int32"),
            "cu_q_lens": FakeArray((seqs + 1,), "int32"),
        }

    def _ragged_paged_attention(self) -> dict[str, Any]:
        return self._tables() | {
            "q": FakeArray((self.num_tokens, self.num_q_heads, self.head_dim), self.dtype),
            "kv_pages": self._pages(),
            "sliding_window": self.sliding_window,
            "soft_cap": self.soft_cap,
            "sinks": FakeArray((self.num_q_heads,), "float32") if self.sinks else None,
            "return_lse": self.return_lse,
        }

    def _write_kv_pages(self) -> dict[str, Any]:
        new = FakeArray((self.num_tokens, self.num_kv_heads, self.head_dim), self.dtype)
        return self._tables() | {"k": new, "v": new, "kv_pages": self._pages()}

    def _heads_first(self) -> dict[str, Any]:
        """What the operations over such pages share; an 8-bit cache has scales."""
        per_seq = -(-self.max_len // self.page_size)
        shape = (self.num_kv_heads, self.max_num_seqs * per_seq, self.page_size)
        pages: Any = FakeArray((*shape, self.head_dim), self.cache_dtype or self.dtype)
        if self.cache_dtype in QUANTIZED:
            pages = (pages, FakeArray((*shape, 1), "float32"))
        return {"k_pages": pages, "v_pages": pages, "soft_cap": self.soft_cap}

    def _paged_attention(self) -> dict[str, Any]:
        tables = self._tables()
        return self._heads_first() | {
            "q": FakeArray((self.max_num_seqs, self.num_q_heads, self.head_dim), self.dtype),
            "lengths": tables["kv_lens"],
            "page_indices": tables["page_indices"],
        }

    def _prefill_attention(self) -> dict[str, Any]:
        return self._heads_first() | {
            "q": FakeArray((self.num_tokens, self.num_q_heads, self.head_dim), self.dtype),
            "length": FakeArray((1,), "int32"),
            "page_indices": FakeArray((-(-self.max_len // self.page_size),), "int32"),
            "sliding_window": self.sliding_window,
        }

    def _merge_attention_states(self) -> dict[str, Any]:
        outs = (2, self.num_tokens, self.num_q_heads, self.head_dim)
        return {"outs": FakeArray(outs, self.dtype), "lses": FakeArray(outs[:-1], "float32")}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentSample(_Sample):
    """Of latent attention; the defaults are DeepSeek-V3.2's sparse decode of 32 sequences of up to 4096."""

    dtype: str = "bfloat16"
    cache_format: str = "fp8_v32"
    num_q_heads: int = 128
    num_kv_heads: int = 1
    d_qk: int | None = None  # None: as the format has it, 576 where it is plain
    d_v: int = 512
    page_size: int = 64
    num_tokens: int = 32
    max_num_seqs: int = 32
    max_len: int = 4096
    topk: int = 2048  # 0: dense
    sinks: bool = False

    @property
    def _width(self) -> int:
        layout = CACHE_FORMATS.get(self.cache_format)
        return self.d_qk or (layout.width if layout else 576)

    def _cache(self) -> FakeArray:
        layout = CACHE_FORMATS.get(self.cache_format)
        pages = self.max_num_seqs * -(-self.max_len // self.page_size)
        row = layout.token_bytes if layout else self._width
        return FakeArray((pages, self.page_size, self.num_kv_heads, row), "uint8" if layout else self.dtype)

    def _attention(self, tokens: tuple[int, ...]) -> dict[str, Any]:
        return {
            "q": FakeArray((*tokens, self.num_q_heads, self._width), self.dtype),
            "d_v": self.d_v,
            "sinks": FakeArray((self.num_q_heads,), "float32") if self.sinks else None,
            "cache_format": self.cache_format,
        }

    def _sparse_mla_prefill(self) -> dict[str, Any]:
        lists = FakeArray((self.num_tokens, self.num_kv_heads, self.topk), "int32")
        return self._attention((self.num_tokens,)) | {"kv": self._cache(), "indices": lists}

    def _sparse_mla_prefill_backward(self) -> dict[str, Any]:
        """Of plain rows, whatever the format: bytes have no gradient."""
        given = self._sparse_mla_prefill()
        del given["cache_format"]
        outs = FakeArray((self.num_tokens, self.num_q_heads, self.d_v), self.dtype)
        rows = (*self._cache().shape[:3], self._width)
        lse = FakeArray((self.num_tokens, self.num_q_heads), "float32")
        return given | {"kv": FakeArray(rows, self.dtype), "d_out": outs, "out": outs, "lse": lse}

    def _mla_decode(self) -> dict[str, Any]:
        seqs = self.max_num_seqs
        tokens = (seqs, max(1, self.num_tokens // seqs))
        keys = {
            "page_indices": FakeArray((seqs, -(-self.max_len // self.page_size)), "int32"),
            "kv_lens": FakeArray((seqs,), "int32"),
        }
        if self.topk:
            keys = {"indices": FakeArray((*tokens, self.topk), "int32")}
        return self._attention(tokens) | keys | {"kv_cache": self._cache()}

    def _make_decode_schedule(self) -> dict[str, Any]:
        return {"lens": FakeArray((self.max_num_seqs,), "int32"), "sparse": self.topk > 0, "num_parts": 132}

    def _quantize_mla_cache(self) -> dict[str, Any]:
        kv = FakeArray((*self._cache().shape[:3], self._width), self.dtype)
        return {"kv": kv, "format": self.cache_format}

    def _dequantize_mla_cache(self) -> dict[str, Any]:
        return {"cache": self._cache(), "format": self.cache_format, "dtype": self.dtype}

    def _write_mla_cache(self) -> dict[str, Any]:
        new = FakeArray((self.num_tokens, self.num_kv_heads, self._width), self.dtype)
        slots = FakeArray((self.num_tokens,), "int64")
        return {"kv": new, "cache": self._cache(), "slot_mapping": slots, "cache_format": self.cache_format}

    def _page_indices_to_slots(self) -> dict[str, Any]:
        seqs = self.max_num_seqs
        table = FakeArray((seqs, -(-self.max_len // self.page_size)), "int32")
        positions = FakeArray((seqs, max(1, self.num_tokens // seqs), self.topk), "int32")
        return {"positions": positions, "page_indices": table, "page_size": self.page_size}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VarlenSample(_Sample):
    """Of attention without a cache; the defaults are a training step of an 8B model on 4 sequences of 4096."""

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

    def _varlen_attention(self) -> dict[str, Any]:
        d_v = self.head_dim if self.d_v is None else self.d_v
        edges = FakeArray((self.max_num_seqs + 1,), "int32")
        return {
            "q": FakeArray((self.num_tokens, self.num_q_heads, self.head_dim), self.dtype),
            "k": FakeArray((self.num_tokens, self.num_kv_heads, self.head_dim), self.dtype),
            "v": FakeArray((self.num_tokens, self.num_kv_heads, d_v), self.dtype),
            "cu_q_lens": edges,
            "cu_kv_lens": edges,
            "causal": self.causal,
            "sliding_window": self.sliding_window,
            "soft_cap": self.soft_cap,
            "sinks": FakeArray((self.num_q_heads,), wide_dtype(self)) if self.sinks else None,
        }

    def _varlen_attention_backward(self) -> dict[str, Any]:
        given = self._varlen_attention()
        outs = FakeArray((self.num_tokens, self.num_q_heads, given["v"].shape[2]), self.dtype)
        lse = FakeArray(outs.shape[:2], wide_dtype(self))
        return given | {"d_out": outs, "out": outs, "lse": lse}


KINDS = (Sample, LatentSample, VarlenSample)


def sample_of(operation: str, **options: Any) -> Sample | LatentSample | VarlenSample:
    """A representative sample for an operation, changed by `options`, which are fields of it."""
    kind = next((kind for kind in KINDS if hasattr(kind, f"_{operation}")), LatentSample)
    known = [field.name for field in dataclasses.fields(kind)]
    for name in options:
        if name not in known:
            raise InvalidInput(f"expected options of {operation} to be among {', '.join(known)}, got {name}")
    return kind(**options)


def device_of(framework: str, name: str | None = None) -> Device:
    """The facts of a device: the default one of this machine, one by its name, or a GPU architecture not here.

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
    """What jax knows of the TPU that stands for all, where jax is; from torch no kernel that asks for it is called."""
    if framework != "jax" or importlib.util.find_spec("jax") is None:
        return {}
    return importlib.import_module("ragged_attention.jax._launcher").tpu_facts()


def _default_torch_device(torch: Any) -> str:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found else "cpu"
