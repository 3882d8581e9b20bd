"""The launches of other projects' Triton kernels for a case, recorded without running them, so no GPU is needed.

The projects' own functions are called with tensors that have shapes but no values, and each kernel is replaced by an
object that records its launch. The kernels' rules for which program gets which blocks of keys are repeated here.
`sources.py` lists where the sources come from.
"""

import collections
import contextlib
import enum
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.cases.mla import LatentCase
from benchmarks.cases.paged import PagedCase
from benchmarks.cases.varlen import VarlenCase
from benchmarks.compiled.compiling import Launch
from benchmarks.peers import registry, sources
from benchmarks.roofline.model import Programs, cdiv
from ragged_attention.tools.samples import device_of

ARCH = "sm_90"
SPLITS = 8  # the most KV splits per sequence, which is SGLang's default
LEAST_KEYS = 512  # the least keys per KV split over latents in vLLM


class Recorded(NamedTuple):
    """A launch, and its programs: (iterations of each loop) -> the number of programs with these iterations.

    If a kernel has several loops but the tuple of iterations has one entry, it counts those of the largest loop.
    """

    launch: Launch
    programs: Programs


class RecordingKernel:
    """Replaces a Triton kernel and records the launches `kernel[grid](...)`."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launches = kernel, []

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return functools.partial(self._launched, grid)

    def _launched(self, grid: Any, *operands: Any, **named: Any) -> None:
        kernel, arguments = self.kernel, {name: _plain(value) for name, value in named.items()}
        while hasattr(kernel, "fn") and not hasattr(kernel, "params"):
            kernel = kernel.fn
        arguments |= dict(zip((param.name for param in kernel.params), map(_plain, operands), strict=False))
        arguments |= {name: rule(arguments) for name, rule in getattr(self.kernel, "values", {}).items()}
        num_warps, num_stages = arguments.pop("num_warps", 4), arguments.pop("num_stages", 3)
        sizes: Any = grid(arguments) if callable(grid) else grid
        self.launches.append(Launch(kernel, (), arguments, num_warps, num_stages, tuple(sizes)))


def _plain(value: Any) -> Any:
    """The value that a compiler gets: a number for an enumeration's member, False for a stand-in."""
    if isinstance(value, registry.Nothing):
        return False
    return int(value) if isinstance(value, enum.IntEnum) else value


@contextlib.contextmanager
def recording(module: Any, *names: str) -> Iterator[list[RecordingKernel]]:
    """A context in which the named kernels of a module are replaced by kernels that record their launches."""
    kernels = [RecordingKernel(getattr(module, name)) for name in names]
    held = [kernel.kernel for kernel in kernels]
    for name, kernel in zip(names, kernels, strict=True):
        setattr(module, name, kernel)
    try:
        yield kernels
    finally:
        for name, kernel in zip(names, held, strict=True):
            setattr(module, name, kernel)


def imported(name: str) -> Any:
    """A module of another project's package, of which only some files are in `peers/`."""
    package = name.partition(".")[0]
    if not any(isinstance(finder, registry.StandIns) and finder.package == package for finder in sys.meta_path):
        sys.meta_path.append(registry.StandIns(package))
    return importlib.import_module(name)


def meta(shape: Sequence[int], dtype: str) -> Any:
    torch = importlib.import_module("torch")
    return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta")


def inputs_of(case: Any) -> dict[str, Any]:
    """The arguments of a case's own operation, as tensors without values."""

    def tensor(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(tensor, value))
        return meta(value.shape, value.dtype) if hasattr(value, "shape") else value

    arguments = case.attention_call(device_of("torch", ARCH)).arguments()
    return {name: tensor(value) for name, value in arguments.items() if value is not None}


# ---- vLLM over pages


def vllm_paged(case: PagedCase) -> list[Recorded]:
    """`unified_attention`. A program has 16 rows, and all keys or a segment of the keys that they see."""
    module = imported("vllm.v1.attention.ops.triton_unified_attention")
    with recording(module, "kernel_unified_attention", "reduce_segments") as (kernel, reduce):
        registry._vllm_triton(case, inputs_of(case))()
    (launch,) = kernel.launches
    found = [Recorded(launch, _unified_programs(case, launch.arguments))]
    return found + [Recorded(one, {(): one.programs}) for one in reduce.launches]


def vllm_paged_declines(case: PagedCase) -> str | None:
    return "has no draft mask" if case.draft else registry._vllm_declines(case)


def _unified_programs(case: PagedCase, arguments: Any) -> Programs:
    tile, block_q, group = (arguments[name] for name in ("TILE_SIZE", "BLOCK_Q", "num_queries_per_kv"))
    segments, window = arguments["NUM_SEGMENTS_PER_SEQ"], case.sliding_window or 0
    programs: collections.Counter[tuple[float, ...]] = collections.Counter()
    for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True):
        for block in range(cdiv(q_len, block_q)):
            low = kv_len - q_len + block * block_q
            first = max(low - window + 1, 0) // tile if window else 0
            last = cdiv(min(low + (arguments["BLOCK_M"] - 1) // group + 1, kv_len), tile)
            per_program = cdiv(kv_len, segments * tile) if arguments["IS_3D"] else last
            for begin in range(0, last, per_program):
                iterations = min(begin + per_program, last) - max(begin, first)
                if iterations > 0:
                    programs[(float(iterations),)] += case.num_kv_heads
    return programs


# ---- latent keys


def vllm_latent(case: LatentCase) -> list[Recorded]:
    """The grouped decode kernel. A program has 16 heads and one KV split."""
    module = imported("vllm.v1.attention.ops.triton_decode_attention")
    seqs, heads = case.max_num_seqs, case.num_q_heads
    splits = 1 << max(case.max_len // LEAST_KEYS - 1, 0).bit_length()
    cache = inputs_of(case)["kv_cache"]
    one = meta((1,), "float32")
    with recording(module, "_fwd_grouped_kernel_stage1", "_fwd_kernel_stage2") as (kernel, reduce):
        module.decode_attention_fwd(
            meta((seqs, heads, case.d_qk), case.dtype), cache, cache[..., : case.d_v],
            meta((seqs, heads, case.d_v), case.dtype), meta((seqs, heads), "float32"),
            meta((seqs, case.pages_per_seq(case.page_size)), "int32"), meta((seqs,), "int32"),
            meta((seqs, heads, splits, case.d_v + 1), "float32"), splits, case.d_qk**-0.5, case.page_size,
            k_scale=one, v_scale=one, is_mla=True,
        )  # fmt: skip
    return _split_evenly(kernel.launches[0], reduce.launches, [case.max_len] * seqs, splits)


def latent_declines(case: LatentCase) -> str | None:
    if case.topk or case.cache_format != "plain" or case.num_q_tokens > 1:
        return "takes dense decodes of one token over a plain cache"
    return None


def _split_evenly(launch: Launch, reduce: Sequence[Launch], lens: Sequence[int], splits: int) -> list[Recorded]:
    """The recorded launches of a kernel that cuts each sequence into `splits` KV splits of equal length."""
    programs: collections.Counter[tuple[float, ...]] = collections.Counter()
    block, least = launch.arguments["BLOCK_N"], launch.arguments.get("MIN_BLOCK_KV", 1)
    for length in lens:
        per_split = cdiv(cdiv(length, splits), least) * least
        for begin in range(0, length, per_split):
            programs[(float(cdiv(min(per_split, length - begin), block)),)] += launch.grid[1]
    return [Recorded(launch, programs), *(Recorded(one, {(): one.programs}) for one in reduce)]


# ---- SGLang


def sglang_decode(case: PagedCase | LatentCase) -> list[Recorded]:
    """SGLang's decode kernel over a list of slots. With a window, the list only has the window's keys."""
    module = imported("sglang.kernels.ops.attention.decode_attention")
    inputs = inputs_of(case)
    if isinstance(case, PagedCase):
        k, v = (pages.flatten(0, 1) for pages in registry.split_pages(case, inputs["kv_pages"]))
        lens = [min(length, case.sliding_window or length) for length in case.kv_lens]
        width, cap = case.head_dim, case.soft_cap or 0.0
    else:
        k = inputs["kv_cache"].flatten(0, 1)
        v, lens, width, cap = k[..., : case.d_v], [case.max_len] * case.max_num_seqs, case.d_v, 0.0
    q, seqs = inputs["q"].flatten(0, -3), len(lens)
    parts = meta((seqs, q.shape[1], SPLITS, width), "float32")
    names = ("_fwd_kernel_stage1", "_fwd_grouped_kernel_stage1", "_fwd_kernel_stage2")
    with recording(module, *names) as (single, grouped, reduce):
        module.decode_attention_fwd(
            q, k, v, meta((*q.shape[:-1], width), case.dtype), meta((seqs + 1,), "int32"),
            meta((sum(lens),), "int64"), parts, parts[..., 0], meta((seqs,), "int32"), SPLITS, q.shape[-1] ** -0.5,
            1.0, 1.0, logit_cap=cap, sinks=inputs.get("sinks"), has_mla=isinstance(case, LatentCase),
        )  # fmt: skip
    (launch,) = [*single.launches, *grouped.launches]
    return _split_evenly(launch, reduce.launches, lens, SPLITS)


def sglang_declines(case: PagedCase | LatentCase) -> str | None:
    if isinstance(case, LatentCase):
        return latent_declines(case)
    return "decodes one token a sequence here" if max(case.q_lens) > 1 else None


# ---- FLA


def fla_varlen(case: VarlenCase) -> list[Recorded]:
    """`parallel_attn` over packed sequences, with 128 rows of one head per program."""
    folder = str(registry.FOLDER / sources.FLA)
    sys.path[:0] = [folder] if folder not in sys.path else []
    module: Any = importlib.import_module("fla.ops.attn.parallel")
    module.check_shared_mem = lambda arch="", *rest: arch == "hopper"
    inputs = inputs_of(case)
    q, k, v = (inputs[name][None] for name in ("q", "k", "v"))
    blocks = sum(cdiv(length, 128) for length in case.q_lens)
    shared = {
        "g_cumsum": None, "sink_bias": inputs.get("sinks"), "scale": case.head_dim**-0.5,
        "window_size": case.sliding_window, "cu_seqlens": meta((len(case.q_lens) + 1,), "int64"),
        "chunk_indices": meta((blocks, 2), "int64"),
    }  # fmt: skip
    names = ("parallel_attn_fwd_kernel", "parallel_attn_bwd_kernel_preprocess", "parallel_attn_bwd_kernel_dq",
             "parallel_attn_bwd_kernel_dkv")  # fmt: skip
    with recording(module, *names) as kernels:
        if case.backward:
            out, d_out, lse = (inputs[name][None] for name in ("out", "d_out", "lse"))
            module.parallel_attn_bwd(q=q, k=k, v=v, o=out, lse=lse, do=d_out, **shared)
        else:
            module.parallel_attn_fwd(q=q, k=k, v=v, **shared)
    launches = [launch for kernel in kernels for launch in kernel.launches]
    return [Recorded(launch, _parallel_programs(case, launch)) for launch in launches]


def fla_declines(case: VarlenCase) -> str | None:
    if not case.causal or case.soft_cap or case.q_lens != case.kv_lens or case.d_lse:
        return "is causal, of queries and keys alike, without a soft cap"
    return None


def _parallel_programs(case: VarlenCase, launch: Launch) -> Programs:
    """The programs of a kernel. For dk and dv a program has keys and loops over rows. The other kernels loop over keys.

    The blocks at the causal diagonal have a separate loop.
    """
    if "BS" not in launch.arguments:
        return {(): launch.programs}
    rows, step = launch.arguments["BT"], launch.arguments["BS"]
    programs: collections.Counter[tuple[float, ...]] = collections.Counter()
    for length in case.q_lens:
        for block in range(cdiv(length, rows)):
            diagonal = cdiv(min(rows, length - block * rows), step)
            if "dkv" in launch.name:
                below = cdiv(max(length - (block + 1) * rows, 0), step)
                programs[(float(diagonal), float(below))] += case.num_q_heads
            else:
                programs[(float(block * rows // step), float(diagonal))] += case.num_q_heads
    return programs


class Peer(NamedTuple):
    """The kernels of a project for a family of cases."""

    name: str
    package: str
    kinds: tuple[type, ...]
    declines: Callable[[Any], str | None]
    record: Callable[[Any], list[Recorded]]


PEERS = (
    Peer("vLLM", "vllm", (PagedCase,), vllm_paged_declines, vllm_paged),
    Peer("vLLM", "vllm", (LatentCase,), latent_declines, vllm_latent),
    Peer("SGLang", "sglang", (PagedCase, LatentCase), sglang_declines, sglang_decode),
    Peer("FLA", "fla", (VarlenCase,), fla_declines, fla_varlen),
)
