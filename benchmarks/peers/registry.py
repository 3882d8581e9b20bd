"""Other implementations (peers) of our operations. A peer that cannot be imported gives the reason.

A peer gets the inputs of a case and returns a function without arguments, which computes out [T, H, D] or the
gradients. Preparation that a peer needs (plans, masks, copies into its own cache layout) is done in advance, outside
the timed region.

Compiled peers and sources that are not installed are in the repository's folder `peers/`, which git ignores:
`_vllm_fa3_C.abi3.so` (or compressed, `.xz`), and `triton_unified_attention.py` with the modules that it imports.
"""

import dataclasses
import enum
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import lzma
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cases.mla import LatentCase
from benchmarks.cases.paged import PagedCase
from benchmarks.cases.varlen import VarlenCase
from benchmarks.peers import mla as mla_peers
from benchmarks.peers import varlen as varlen_peers

FOLDER = Path(__file__).parents[2] / "peers"
Run = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another implementation."""

    name: str
    framework: str
    about: str
    absent: Callable[[], str | None]
    declines: Callable[[Any], str | None]
    prepare: Callable[[Any, dict[str, Any]], Run]
    kind: type = PagedCase  # the kind of cases that it supports


def _needs(*modules: str, cuda: bool = False) -> Callable[[], str | None]:
    def absent() -> str | None:
        for module in modules:
            if importlib.util.find_spec(module) is None:
                return f"{module} is not installed"
        return _no_cuda() if cuda else None

    return absent


def _no_cuda() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA device"


def _refuses(*, window: bool = False, soft_cap: bool = False, sinks: bool = False, quantised: bool = True) -> Any:
    """A function that returns the reason why a peer without these features declines a case, or None.

    A flag is True if the peer lacks the feature.
    """

    def declines(case: PagedCase) -> str | None:
        for missing, name, used in (
            (window, "sliding_window", case.sliding_window),
            (soft_cap, "soft_cap", case.soft_cap),
            (sinks, "sinks", case.sinks),
            (quantised, "a quantised cache", case.cache_dtype),
        ):
            if missing and used:
                return f"does not take {name}"
        return None

    return declines


def split_pages(case: PagedCase, kv_pages: Any) -> tuple[Any, Any]:
    """The K and V pages as two contiguous arrays, the layout that most peers use."""
    if case.split_pages:
        return kv_pages
    return kv_pages[:, :, 0::2].contiguous(), kv_pages[:, :, 1::2].contiguous()


# ---- torch itself


def _torch_sdpa(case: PagedCase, inputs: dict[str, Any]) -> Run:
    """A loop over sequences, which gathers the pages and calls `scaled_dot_product_attention`."""
    import torch

    k_pages, v_pages = split_pages(case, inputs["kv_pages"])
    q, table = inputs["q"], inputs["page_indices"]
    starts = [0]
    for q_len in case.q_lens:
        starts.append(starts[-1] + q_len)
    masks = [
        _mask(q_len, kv_len, case.sliding_window, q.device)
        for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True)
    ]

    def run() -> Any:
        parts = []
        for seq, kv_len in enumerate(case.kv_lens):
            pages = table[seq, : case.pages_needed[seq]]
            k, v = (array[pages].flatten(0, 1)[:kv_len].transpose(0, 1)[None] for array in (k_pages, v_pages))
            rows = q[starts[seq] : starts[seq + 1]].transpose(0, 1)[None]
            causal, mask = masks[seq]
            out = torch.nn.functional.scaled_dot_product_attention(
                rows, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True
            )
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)

    return run


def _mask(q_len: int, kv_len: int, window: int | None, device: Any) -> tuple[bool, Any]:
    """(is_causal, mask) for SDPA. `is_causal` replaces the mask if it gives the same result."""
    import torch

    if not window or window >= kv_len:
        if q_len == 1 or q_len == kv_len:
            return q_len > 1, None
        window = kv_len
    position = torch.arange(kv_len - q_len, kv_len, device=device)[:, None]
    key = torch.arange(kv_len, device=device)[None]
    return False, (key <= position) & (key > position - window)


def _flex_attention(case: PagedCase, inputs: dict[str, Any]) -> Run:
    """Compiled FlexAttention over all packed sequences. Rows and the block mask are prepared in advance."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q = inputs["q"]
    k_pages, v_pages = split_pages(case, inputs["kv_pages"])
    rows = [inputs["page_indices"][seq, :count] for seq, count in enumerate(case.pages_needed)]
    k, v = (
        torch.cat([array[row].flatten(0, 1)[:n] for row, n in zip(rows, case.kv_lens, strict=True)])
        for array in (k_pages, v_pages)
    )
    ids = torch.arange(len(case.q_lens), device=q.device)
    q_lens, kv_lens = (torch.tensor(lens, device=q.device) for lens in (case.q_lens, case.kv_lens))
    q_seq, kv_seq = ids.repeat_interleave(q_lens), ids.repeat_interleave(kv_lens)
    q_place = torch.arange(len(q_seq), device=q.device) - (q_lens.cumsum(0) - kv_lens)[q_seq]
    kv_place = torch.arange(len(kv_seq), device=q.device) - (kv_lens.cumsum(0) - kv_lens)[kv_seq]
    window = case.sliding_window or max(case.kv_lens) + 1

    def seen(batch: Any, head: Any, row: Any, key: Any) -> Any:
        del batch, head
        distance = q_place[row] - kv_place[key]
        return (q_seq[row] == kv_seq[key]) & (distance >= 0) & (distance < window)

    cap = case.soft_cap or 0.0

    def capped(score: Any, *where: Any) -> Any:
        del where
        return cap * torch.tanh(score / cap)

    blocks = create_block_mask(seen, None, None, len(q_seq), len(kv_seq), device=q.device, _compile=q.is_cuda)
    compiled = torch.compile(flex_attention, dynamic=False)
    q, k, v = (array.transpose(0, 1)[None] for array in (q, k, v))
    score_mod = capped if cap else None

    def run() -> Any:
        out: Any = compiled(q, k, v, score_mod=score_mod, block_mask=blocks, enable_gqa=True)
        return out[0].transpose(0, 1)

    return run


# ---- FlashInfer


def _flashinfer(case: PagedCase, inputs: dict[str, Any]) -> Run:
    """The paged prefill wrapper, which also serves decodes on tensor cores. Its plan is made in advance."""
    import torch

    flashinfer = importlib.import_module("flashinfer")
    device = inputs["q"].device
    counts = torch.tensor(case.pages_needed, dtype=torch.int32)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)])
    indices = torch.cat([inputs["page_indices"][seq, :count] for seq, count in enumerate(case.pages_needed)])
    last = torch.tensor(
        [kv_len - (count - 1) * case.page_size for kv_len, count in zip(case.kv_lens, case.pages_needed, strict=True)],
        dtype=torch.int32,
    )
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(256 * 2**20, dtype=torch.uint8, device=device), "NHD"
    )
    wrapper.plan(
        inputs["cu_q_lens"], indptr.to(device), indices, last.to(device), case.num_q_heads, case.num_kv_heads,
        case.head_dim, case.page_size, causal=True, window_left=(case.sliding_window or 0) - 1,
        logits_soft_cap=case.soft_cap or 0.0, q_data_type=inputs["q"].dtype,
    )  # fmt: skip
    pages = split_pages(case, inputs["kv_pages"])
    return lambda: wrapper.run(inputs["q"], pages)


# ---- FlashAttention-3, as vLLM ships it


def _fa3_absent() -> str | None:
    if missing := _needs("torch", cuda=True)():
        return missing
    import torch

    if torch.cuda.get_device_capability() != (9, 0):
        return "its carried build is for sm_90"
    return None if _fa3_files() else f"expected _vllm_fa3_C.abi3.so or .so.xz in {FOLDER.name}/"


def _fa3_files() -> list[Path]:
    return sorted(FOLDER.glob("**/_vllm_fa3_C.abi3.so*"))


def _load_fa3() -> Any:
    import torch

    if not hasattr(torch.ops._vllm_fa3_C, "fwd"):
        file = _fa3_files()[0]
        if file.suffix == ".xz":
            file.with_suffix("").write_bytes(lzma.decompress(file.read_bytes()))
            file = file.with_suffix("")
        torch.ops.load_library(str(file))
    return torch.ops._vllm_fa3_C.fwd


def _fa3(case: PagedCase, inputs: dict[str, Any]) -> Run:
    """FA3's forward operator. It takes arguments by position, and later versions take more arguments at the end."""
    forward = _load_fa3()
    k_pages, v_pages = split_pages(case, inputs["kv_pages"])
    window = case.sliding_window
    arguments = [
        inputs["q"], k_pages, v_pages,
        None, None, None, None,  # new k and v, q_v, out
        inputs["cu_q_lens"], None, None, None, inputs["kv_lens"], max(case.q_lens), max(case.kv_lens),
        _clean_table(case, inputs), None, None,  # batch index, left padding
        None, None, None, None, None, None,  # rotary, scales
        case.head_dim**-0.5, True, (window or 0) - 1, 0 if window else -1, case.soft_cap or 0.0,
        # interleaved rotary, no schedule, automatic splits, automatic head packing, no SM margin
        True, None, 0, None, 0,
        inputs["sinks"].to(inputs["q"].dtype) if case.sinks else None, 1, 0, None,
    ]  # fmt: skip
    arguments = arguments[: len(forward.default._schema.arguments)]
    return lambda: forward(*arguments)[0]


def _clean_table(case: PagedCase, inputs: dict[str, Any]) -> Any:
    """The page table with valid indices after the used pages, since some peers read those entries."""
    return inputs["page_indices"].clamp(0, case.num_pages - 1)


# ---- vLLM's Triton kernel

# In tokens. From vLLM 0.33 on, keys are also split for queries up to this length, so each token needs scratch memory.
LONGEST_SPLIT_QUERY = 8


class Nothing:
    """An object that returns itself for every attribute and every call. It is false in conditions."""

    def __getattr__(self, name: str) -> "Nothing":
        return self

    def __call__(self, *arguments: Any, **options: Any) -> "Nothing":
        return self

    def __bool__(self) -> bool:
        return False


def _anything(name: str) -> Nothing:
    """The attribute of a stand-in module. Names that Python itself looks for, such as `__file__`, do not exist."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing()


class _Modes(enum.EnumMeta):
    """A metaclass of an enumeration in which every upper-case name exists. An undefined name equals no member."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_") or not name.isupper():
            raise AttributeError(name)
        return Nothing()


class _Quantisation(enum.IntEnum, metaclass=_Modes):
    """Replaces the peer's `KVQuantMode`, which gets more modes with each version."""

    NONE = 0
    FP8_PER_TENSOR = 1

    def __getattr__(self, name: str) -> bool:
        if not name.startswith("is_"):
            raise AttributeError(name)
        return False


class _Platform(Nothing):
    def fp8_dtype(self) -> Any:
        import torch

        return torch.float8_e4m3fn


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Importer for a package of which `peers/` has only some modules.

    It looks for a module in the package's folder in `peers/`, or directly in `peers/`. Otherwise it makes a stand-in.
    """

    def __init__(self, package: str = "vllm") -> None:
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        del path, target
        if name.partition(".")[0] != self.package:
            return None
        folder = FOLDER / self.package if (FOLDER / self.package).is_dir() else FOLDER
        if files := sorted(folder.glob(f"**/{name.rpartition('.')[2]}.py")):
            return importlib.util.spec_from_file_location(name, files[0])
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        module = types.ModuleType(spec.name)
        module.__getattr__ = _anything  # type: ignore[method-assign]
        return module

    def exec_module(self, module: Any) -> None:
        module.__path__ = []
        triton = importlib.import_module("triton")
        language = importlib.import_module("triton.language")
        module.__dict__.update(
            triton=triton, tl=language, HAS_TRITON=True, current_platform=_Platform(), KVQuantMode=_Quantisation
        )


def _vllm_triton_absent() -> str | None:
    if missing := _needs("torch", "triton", cuda=True)():
        return missing
    found = any(FOLDER.glob("**/triton_unified_attention.py")) or importlib.util.find_spec("vllm")
    return None if found else f"expected triton_unified_attention.py in {FOLDER.name}/"


def _vllm_triton(case: PagedCase, inputs: dict[str, Any]) -> Run:
    """`unified_attention` with the scratch memory for KV splits, as vLLM's own backend passes it."""
    import torch

    if importlib.util.find_spec("vllm") is None:
        sys.meta_path.append(StandIns())
    function = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention").unified_attention
    k_pages, v_pages = split_pages(case, inputs["kv_pages"])
    q = inputs["q"]
    out = torch.empty_like(q)
    segments, threshold = 16, max(1, 128 // case.num_kv_heads)
    width = 1 << (case.head_dim - 1).bit_length()
    rows = max(threshold, case.num_tokens if max(case.q_lens) <= LONGEST_SPLIT_QUERY else 0)
    scratch = torch.empty(rows, case.num_q_heads, segments, width + 2, device=q.device)
    scale = None if case.scale is None else torch.tensor([case.scale], device=q.device)
    newest = {
        "q": q, "k": k_pages, "v": v_pages, "out": out, "cu_seqlens_q": inputs["cu_q_lens"],
        "max_seqlen_q": max(case.q_lens), "seqused_k": inputs["kv_lens"], "max_seqlen_k": max(case.kv_lens),
        "softmax_scale": case.head_dim**-0.5, "causal": True,
        "window_size": ((case.sliding_window or 0) - 1, 0 if case.sliding_window else -1),
        "block_table": _clean_table(case, inputs), "softcap": case.soft_cap or 0.0, "q_descale": None,
        "k_descale": scale, "v_descale": scale, "seq_threshold_3D": threshold, "num_par_softmax_segments": segments,
        "softmax_segm_output": scratch[..., :width].contiguous(), "softmax_segm_max": scratch[..., 0].contiguous(),
        "softmax_segm_expsum": scratch[..., 1].contiguous(), "sinks": inputs.get("sinks"),
        "kv_quant_mode": _Quantisation.FP8_PER_TENSOR if case.cache_dtype else _Quantisation.NONE,
        "num_prefills": sum(q_len > 1 for q_len in case.q_lens), "split_launch": False,
        "num_decodes": sum(q_len == 1 for q_len in case.q_lens),
    }  # fmt: skip
    known = inspect.signature(function).parameters
    arguments = {name: value for name, value in newest.items() if name in known}

    def run() -> Any:
        function(**arguments)
        return out

    return run


def _vllm_declines(case: PagedCase) -> str | None:
    if case.page_size % 16:
        return "page_size must be a multiple of 16"
    return None


# ---- jax


def _jax_reference(case: PagedCase, inputs: dict[str, Any]) -> Run:
    """JAX's own reference implementation, under jit."""
    import jax
    import numpy as np
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

    # The reference loops over lengths in Python, so they must be constants of the traced function: NumPy arrays.
    lens = [np.asarray(inputs[name]) for name in ("kv_lens", "page_indices", "cu_q_lens")]
    count = np.array([len(case.q_lens)], np.int32)

    @jax.jit
    def call(q: Any, kv_pages: Any) -> Any:
        return ref_ragged_paged_attention(
            q, kv_pages, *lens, count, sm_scale=case.head_dim**-0.5, sliding_window=case.sliding_window,  # type: ignore[call-arg]
            soft_cap=case.soft_cap, k_scale=case.scale, v_scale=case.scale,
        )  # fmt: skip

    return lambda: jax.block_until_ready(call(inputs["q"], inputs["kv_pages"]))


def _jax_declines(case: PagedCase) -> str | None:
    return "has only the combined layout" if case.split_pages else _refuses(sinks=True, quantised=False)(case)


def _jax_cudnn(case: PagedCase, inputs: dict[str, Any]) -> Run:
    """cuDNN's paged attention, called through JAX, for sequences with equal query lengths."""
    import jax

    cudnn = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    q_len, seqs = case.q_lens[0], len(case.q_lens)
    k_pages, v_pages = inputs["kv_pages"][:, :, 0::2], inputs["kv_pages"][:, :, 1::2]
    table = inputs["page_indices"].clip(0, case.num_pages - 1)[:, None, :, None]
    q = inputs["q"].reshape(seqs, q_len, case.num_q_heads, case.head_dim)
    lens = jax.numpy.full((seqs,), q_len, jax.numpy.int32)
    mask = cudnn.MaskType.PADDING if q_len == 1 else cudnn.MaskType.PADDING_CAUSAL
    call = jax.jit(
        lambda *arrays: cudnn.paged_attention(*arrays, scale=case.head_dim**-0.5, mask_type=mask, qkv_layout="BTNH")
    )

    def run() -> Any:
        out = call(q, k_pages, v_pages, lens, inputs["kv_lens"], table, table)
        return jax.block_until_ready(out).reshape(case.q_shape)

    return run


def _cudnn_absent() -> str | None:
    if missing := _needs("jax")():
        return missing
    import jax

    return None if jax.default_backend() == "gpu" else "needs a CUDA device"


def _cudnn_declines(case: PagedCase) -> str | None:
    if len(set(case.q_lens)) > 1:
        return "sequences must have one query length"
    if 1 < case.q_lens[0] < max(case.kv_lens):
        return "its causal mask is aligned to the first key"
    return "reads combined pages here" if case.split_pages else _refuses(window=True, soft_cap=True, sinks=True)(case)


# ---- latent attention


def _flash_mla_absent() -> str | None:
    return _needs("torch")() or mla_peers.flash_mla_absent(FOLDER)


def _flash_mla(case: LatentCase, inputs: dict[str, Any]) -> Run:
    return mla_peers.flash_mla(case, inputs, FOLDER)


def _fa3_latents(case: LatentCase, inputs: dict[str, Any]) -> Run:
    return mla_peers.fa3(case, inputs, _load_fa3())


# ---- attention without a cache


def _fa3_varlen(case: VarlenCase, inputs: dict[str, Any]) -> Run:
    return varlen_peers.fa3(case, inputs, _load_fa3())


def _by(function: Callable[..., Run], *rest: Any) -> Callable[[Any, dict[str, Any]], Run]:
    return lambda case, inputs: function(case, inputs, *rest)


PEERS = (
    Peer(
        "sdpa", "torch", "torch's SDPA, a loop over gathered sequences", _needs("torch"),
        _refuses(soft_cap=True, sinks=True), _torch_sdpa,
    ),
    Peer(
        "flex", "torch", "torch's compiled FlexAttention; gathering and masks not timed", _needs("torch"),
        _refuses(sinks=True), _flex_attention,
    ),
    Peer(
        "flashinfer", "torch", "FlashInfer's paged prefill wrapper; its plan not timed",
        _needs("torch", "flashinfer", cuda=True), _refuses(sinks=True), _flashinfer,
    ),
    Peer("fa3", "torch", "FlashAttention-3 as vLLM ships it", _fa3_absent, _refuses(), _fa3),
    Peer(
        "vllm-triton", "torch", "vLLM's Triton unified attention", _vllm_triton_absent, _vllm_declines, _vllm_triton
    ),
    Peer(
        "sdpa-mla", "torch", "torch's SDPA over gathered latents, heads as rows", _needs("torch"),
        mla_peers.sdpa_declines, mla_peers.sdpa, LatentCase,
    ),
    Peer(
        "flashmla", "torch", "FlashMLA, heads padded to 64 or 128 if it requires that", _flash_mla_absent,
        mla_peers.flash_mla_declines, _flash_mla, LatentCase,
    ),
    Peer(
        "fa3-mla", "torch", "FlashAttention-3 as vLLM ships it; a quantised cache as a bfloat16 copy", _fa3_absent,
        mla_peers.fa3_declines, _fa3_latents, LatentCase,
    ),
    Peer(
        "sdpa-flash", "torch", "torch's SDPA by its FlashAttention", _needs("torch", cuda=True),
        varlen_peers.sdpa_declines, _by(varlen_peers.sdpa, "FLASH_ATTENTION"), VarlenCase,
    ),
    Peer(
        "sdpa-cudnn", "torch", "torch's SDPA by cuDNN", _needs("torch", cuda=True),
        varlen_peers.sdpa_declines, _by(varlen_peers.sdpa, "CUDNN_ATTENTION"), VarlenCase,
    ),
    Peer(
        "fa2", "torch", "FlashAttention-2, its own package", _needs("torch", "flash_attn", cuda=True),
        varlen_peers.refuses(), _by(varlen_peers.flash_attention, "flash_attn"), VarlenCase,
    ),
    Peer(
        "fa3-train", "torch", "FlashAttention-3, its own package", _needs("torch", "flash_attn_interface", cuda=True),
        varlen_peers.refuses(), _by(varlen_peers.flash_attention, "flash_attn_interface"), VarlenCase,
    ),
    Peer(
        "fa3-varlen", "torch", "FlashAttention-3 as vLLM ships it", _fa3_absent,
        varlen_peers.fa3_declines, _fa3_varlen, VarlenCase,
    ),
    Peer("jax-reference", "jax", "JAX's reference under jit", _needs("jax"), _jax_declines, _jax_reference),
    Peer("jax-cudnn", "jax", "cuDNN's paged attention through JAX", _cudnn_absent, _cudnn_declines, _jax_cudnn),
)  # fmt: skip


def presence(framework: str | None = None) -> dict[str, str | None]:
    """Name of a peer -> None if it can be used, otherwise the reason why it cannot."""
    return {peer.name: peer.absent() for peer in PEERS if framework in (None, peer.framework)}
