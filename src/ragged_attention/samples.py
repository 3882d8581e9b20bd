"""Representative calls without arrays, on devices that need not be here: for asking backends what they take."""

import dataclasses
import importlib
from typing import Any

from ragged_attention.calls import CALLS, Call, Device
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a representative call is made of; the defaults are an 8B model's decode of 32 sequences of up to 4096."""

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

    def call(self, operation: str, device: Device) -> Call:
        """The record of `operation` over arrays of these shapes, as if it came from `device`."""
        if operation not in CALLS:
            raise InvalidInput(f"expected operation to be one of {', '.join(CALLS)}, got {operation!r}")
        return CALLS[operation](**getattr(self, f"_{operation}")(), device=device)  # type: ignore[call-arg]

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

    def _merge_attention_states(self) -> dict[str, Any]:
        outs = (2, self.num_tokens, self.num_q_heads, self.head_dim)
        return {"outs": FakeArray(outs, self.dtype), "lses": FakeArray(outs[:-1], "float32")}


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
        return Device(framework=framework, platform="tpu")
    launcher = importlib.import_module(f"ragged_attention.{framework}.launcher")
    if framework == "jax":
        here = importlib.import_module("ragged_attention.jax.execute").default_platform()
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


def _default_torch_device(torch: Any) -> str:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found else "cpu"
