"""Compares our writers of quantised caches with vLLM's and FlashInfer's, and attention over these caches.

    python -m benchmarks.vllm_formats [--only WORDS] [--flashinfer FOLDER] [--backend NAME] [--record FILE]

Run it in the environment of `benchmarks.vllm_check`. For the formats with a scale per token and head, a layer of vLLM's
Triton backend and our layer write the same rows into caches with the same garbage. The whole caches are then compared.
Triton's interpreter runs vLLM's kernels. Both layers attend over the cache that vLLM's layer has written, and are
compared with attention in float64. For our layer, every place without a row is NaN. vLLM rotates int4 rows before it
stores them. The sums of its rotation have another order than ours, so a few float32 rows are rounded to another code.
Without rotation the bytes are equal.

For the other formats, only writers are compared: our `write_kv_pages` with vLLM's or FlashInfer's. For mxfp8 and mxfp4,
vLLM's writers are its functions for weights and activations. For nvfp4, FlashInfer's writer is its function for a
block, compiled for the CPU from the header `page.cuh` in FOLDER (by default that of the installed package). It is
compiled with IEEE divisions. FlashInfer itself allows its compiler to use approximate divisions.

`--record` writes small rows and their bytes to FILE, for tests without vLLM.
"""

import argparse
import ctypes
import dataclasses
import importlib
import importlib.util
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import vllm_masks

BOUND = 5e-6  # the bound for the cosine difference of results in bfloat16
PAGE, BLOCKS = 16, 24
LENS = [(1, 37), (5, 18), (40, 66), (1, 1)]  # (queries, keys) of the requests
TOKEN_HEAD = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head")
RECORDED_COLUMNS = 32


@dataclasses.dataclass(frozen=True)
class Case:
    """A step over a cache in a format with a scale per token and head."""

    cache: str
    dtype: str
    heads: tuple[int, int] = (8, 2)
    size: int = 64
    layout: str = "LBHNC"
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False


def cases() -> Iterator[Case]:
    for cache, dtype in itertools.product(TOKEN_HEAD, ("bfloat16", "float16", "float32")):
        yield Case(cache, dtype)
    for cache, (heads, size) in itertools.product(TOKEN_HEAD, (((4, 4), 128), ((6, 1), 96), ((5, 1), 256))):
        yield Case(cache, "bfloat16", heads, size)
    for cache in TOKEN_HEAD:
        yield Case(cache, "bfloat16", layout="LBNHC", window=16, soft_cap=30.0)
        yield Case(cache, "bfloat16", has_sinks=True)


class Step:
    """The rows of a case, and the page table of its requests."""

    def __init__(self, case: Case) -> None:
        import torch

        torch.manual_seed(0)
        self.case, self.dtype = case, getattr(torch, case.dtype)
        (heads, kv_heads), size = case.heads, case.size
        pages = [-(-length // PAGE) for _, length in LENS]
        order = (torch.randperm(BLOCKS - 1)[: sum(pages)] + 1).int().split(pages)
        self.table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
        for row, row_pages in zip(self.table, order, strict=True):
            row[: len(row_pages)] = row_pages
        self.slots = torch.cat([
            self.table[row, torch.arange(length) // PAGE].long() * PAGE + torch.arange(length) % PAGE
            for row, (_, length) in enumerate(LENS)
        ])  # fmt: skip
        self.k, self.v = (rows(len(self.slots), kv_heads, size).to(self.dtype) for _ in range(2))
        self.tokens = sum(q for q, _ in LENS)
        self.q = torch.randn(self.tokens, heads, size).to(self.dtype)
        self.edges = torch.tensor([0, *(q for q, _ in LENS)]).cumsum(0, dtype=torch.int32)
        self.lens = torch.tensor([length for _, length in LENS], dtype=torch.int32)
        self.sinks = torch.randn(heads) if case.has_sinks else None
        self.layer: Any = SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0))

    def cache_of(self, content: int, dtype: Any) -> Any:
        """A cache [blocks, K, page, content] of random bytes, in the case's memory order."""
        import torch

        heads = self.case.heads[1]
        shape = (BLOCKS, heads, PAGE, content) if self.case.layout == "LBHNC" else (BLOCKS, PAGE, heads, content)
        cache = torch.randint(0, 100, shape, dtype=torch.uint8).view(dtype)
        return cache if self.case.layout == "LBHNC" else cache.transpose(1, 2)

    def options(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The constructor arguments, which vLLM's and our implementation share."""
        case = self.case
        positional = (case.heads[0], case.size, case.size**-0.5, case.heads[1], None, case.window, case.cache)
        return positional, {"logits_soft_cap": case.soft_cap, "sinks": self.sinks}

    def metadata(self, is_split: bool) -> Any:
        """The step's metadata for vLLM's implementation.

        With `is_split`, the implementation divides the keys of decodes among 16 programs.
        """
        import torch

        shape = (self.tokens, self.case.heads[0], 16)
        scratch = [torch.empty(*shape, 1 << (self.case.size - 1).bit_length()), torch.empty(shape), torch.empty(shape)]
        return SimpleNamespace(
            num_actual_tokens=self.tokens, query_start_loc=self.edges, seq_lens=self.lens, block_table=self.table,
            max_query_len=int(self.edges.diff().max()), max_seq_len=int(self.lens.max()), causal=True,
            seq_threshold_3D=len(LENS) if is_split else 0, num_par_softmax_segments=16,
            softmax_segm_output=scratch[0], softmax_segm_max=scratch[1], softmax_segm_expsum=scratch[2],
            mm_prefix_range_tensor=None, rswa_prefix_lens=None, rswa_window=None,
        )  # fmt: skip

    def common(self) -> Any:
        backend: Any = importlib.import_module("vllm.v1.attention.backend")
        return backend.CommonAttentionMetadata(
            query_start_loc=self.edges, query_start_loc_cpu=self.edges, seq_lens=self.lens,
            seq_lens_cpu_upper_bound=self.lens, num_reqs=len(LENS), num_actual_tokens=self.tokens,
            max_query_len=int(self.edges.diff().max()), max_seq_len=int(self.lens.max()),
            block_table_tensor=self.table, slot_mapping=self.slots[: self.tokens],
        )  # fmt: skip

    def rule(self, keys: Any, values: Any) -> Any:
        """Attention in float64 over keys and values [tokens of all requests, K, D]."""
        import torch

        case, outs, begin = self.case, [], 0
        queries = self.q.double()
        if case.cache.startswith("int4"):  # vLLM rounds queries after their rotation
            queries = turned_back(int4_module().single_rht(self.q.float()).to(self.dtype).double())
        group = case.heads[0] // case.heads[1]
        for row, (q_len, kv_len) in enumerate(LENS):
            k, v = (array[begin : begin + kv_len].repeat_interleave(group, 1) for array in (keys, values))
            logits = torch.einsum("qhd,khd->hqk", queries[self.edges[row] : self.edges[row + 1]], k) * case.size**-0.5
            if case.soft_cap is not None:
                logits = case.soft_cap * torch.tanh(logits / case.soft_cap)
            query_at, key_at = torch.arange(kv_len - q_len, kv_len)[:, None], torch.arange(kv_len)
            logits = logits.masked_fill(
                (key_at > query_at) | (query_at - key_at >= (case.window or kv_len)), -torch.inf
            )
            sinks = torch.full((case.heads[0],), -torch.inf) if self.sinks is None else self.sinks
            column = sinks.double()[:, None, None].expand(-1, q_len, 1)
            weights = torch.cat((logits, column), -1).softmax(-1)[..., :-1]
            outs.append(torch.einsum("hqk,khd->qhd", weights, v))
            begin += kv_len
        return torch.cat(outs)


def rows(*shape: int) -> Any:
    """Rows that look like keys.

    Some columns are much larger than others, and some rows are zeros or have few distinct numbers.
    """
    import torch

    x = torch.randn(shape) * torch.where(torch.rand(shape[-1]) < 0.05, 8.0, 1.0)
    x = x * torch.exp2(torch.randint(-6, 4, (*shape[:-1], 1)).float())
    x[::7] = torch.randint(-8, 9, x[::7].shape) * 0.25
    x[3] = 0
    x[5, ..., 1:] = -0.0
    return x


# The formats with a scale per token and head


def of_layers(case: Case, backend: str | None) -> tuple[float, float, float, float]:
    """The share of bytes that differ, then three cosine differences.

    They are the largest differences between our result and the rule (attention in float64), between vLLM's result and
    the rule, and between our result and vLLM's.
    """
    import torch

    import ragged_attention as ra
    from ragged_attention.integrations.vllm import RaggedAttentionBackend

    step = Step(case)
    triton: Any = importlib.import_module("vllm.v1.attention.backends.triton_attn")
    specs: Any = importlib.import_module("vllm.v1.kv_cache_interface")
    config: Any = importlib.import_module("vllm.config").VllmConfig()
    spec = specs.FullAttentionSpec(
        block_size=PAGE, num_kv_heads=case.heads[1], head_size=case.size,
        dtype=torch.int8 if case.cache.startswith("int8") else torch.uint8,
        kv_quant_mode=specs.get_kv_quant_mode(case.cache),
    )  # fmt: skip
    customized = triton.TritonAttentionBackend.customize_spec(spec)
    assert RaggedAttentionBackend.customize_spec(spec) == customized
    content = specs.compute_layer_kv_cache_shape_bytes(customized, BLOCKS)[-1]
    theirs, ours = step.cache_of(content, spec.dtype), None
    positional, named = step.options()
    their_impl = triton.TritonAttentionImpl(*positional, **named)
    keys, values = their_impl._pth_key_value_caches(theirs)  # this call also sets `_k_scale_cache` and `_v_scale_cache`
    ours = theirs.clone()
    their_impl.do_kv_cache_update(step.layer, step.k, step.v, theirs, step.slots)
    our_impl: Any = RaggedAttentionBackend.get_impl_cls()(*positional, **named)
    with ra.use_backend(backend):
        our_impl.do_kv_cache_update(step.layer, step.k, step.v, ours, step.slots)
    changed = (theirs.view(torch.uint8) != ours.view(torch.uint8)).float().mean()

    stored = [
        decoded(codes, scales, step, case) for codes, scales in (
            (keys, their_impl._k_scale_cache), (values, their_impl._v_scale_cache)
        )
    ]  # fmt: skip
    rule = step.rule(*stored)
    results = []
    for is_split in (False, True):
        out = torch.full_like(step.q, torch.nan)
        their_impl.forward(step.layer, step.q, None, None, theirs, step.metadata(is_split), out)
        results.append(out)
    held = torch.zeros(BLOCKS * PAGE, dtype=torch.bool)
    held[step.slots] = True
    poisoned = theirs.clone()
    poisoned.transpose(1, 2).view(torch.uint8)[~held.view(BLOCKS, PAGE)] = 255  # as a scale, these bytes are NaN
    step.layer.impl = our_impl
    config.compilation_config.static_forward_context["layer"] = step.layer
    config.model_config = SimpleNamespace(is_mm_prefix_lm=False, rswa_window=None)
    builder = RaggedAttentionBackend.get_builder_cls()(None, ["layer"], config, torch.device("cpu"))
    out = torch.full_like(step.q, torch.nan)
    with ra.use_backend(backend):
        our_impl.forward(step.layer, step.q, None, None, poisoned, builder.build(0, step.common()), out)
    difference = vllm_masks.cosine_difference
    return (
        float(changed), difference(out, rule), max(difference(each, rule) for each in results),
        max(difference(out, each) for each in results),
    )  # fmt: skip


def decoded(codes: Any, scales: Any, step: Step, case: Case) -> Any:
    """The rows of all requests in float64, from vLLM's own views of codes and scales. int4 rows are rotated back."""
    import torch

    packed = case.cache.startswith("int4")
    width = case.size // 2 if packed else case.size
    codes, scales = (view[step.slots // PAGE, step.slots % PAGE] for view in (codes[..., :width], scales))
    if not packed:
        return codes.double() * scales.double()[..., None]
    bits = scales.contiguous().view(torch.int32)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).double()
    exact = (bits & -16).view(torch.float32).double()[..., None]
    return turned_back((nibbles - (bits & 15).double()[..., None]) * exact)


def int4_module() -> Any:
    return importlib.import_module("vllm.v1.attention.ops.int4_per_token_head")


def turned_back(x: Any) -> Any:
    """The rows before their rotation, computed by vLLM's own function."""
    return int4_module().single_rht(x, inverse=True) / int4_module().largest_power_of_2_divisor(x.shape[-1])


# The writers alone


def written(k: Any, kinds: Any, backend: str | None, k_scale: float | None) -> tuple[Any, Any]:
    """The bytes of codes and of scales that `write_kv_pages` stores for rows [N, K, D].

    `kinds` are the (dtype, width) of codes, and of scales.
    """
    import torch

    from ragged_attention.torch import write_kv_pages

    shape = (len(k), 1, k.shape[1])
    pages, places = (
        [torch.zeros(*shape, width * dtype.itemsize, dtype=torch.uint8).view(dtype) for _ in range(2)]
        for dtype, width in kinds
    )
    write_kv_pages(
        k, k, (pages[0], pages[1]), torch.arange(len(k)), k_scale=k_scale, v_scale=k_scale, k_scale_pages=places[0],
        v_scale_pages=places[1], backend=backend,
    )  # fmt: skip
    codes, scales = pages[0].view(torch.uint8), places[0].view(torch.uint8)
    assert torch.equal(codes, pages[1].view(torch.uint8))
    assert torch.equal(scales, places[1].view(torch.uint8))
    return codes.squeeze(1), scales.squeeze(1)


def token_head(name: str) -> Callable[[Any], tuple[Any, Any]]:
    """vLLM's writer of rows [N, K, D] in a format with a scale per token and head. It does not rotate the rows."""
    import torch

    writers: Any = importlib.import_module("vllm.v1.attention.ops.triton_reshape_and_cache_flash")
    int4 = int4_module()
    dtype, mode, columns = {
        "int8_per_token_head": (torch.int8, "INT8_PER_TOKEN_HEAD", 1),
        "fp8_per_token_head": (torch.float8_e4m3fn, "FP8_PER_TOKEN_HEAD", 1),
        "int4_per_token_head": (torch.uint8, "INT4_PER_TOKEN_HEAD", 2),
    }[name]

    def write(k: Any) -> tuple[Any, Any]:
        count, heads, size = k.shape
        pages = [torch.zeros(count, 1, heads, size // columns, dtype=torch.uint8).view(dtype) for _ in range(2)]
        scales = [torch.zeros(count, 1, heads) for _ in range(2)]
        if columns == 2:
            int4._run_reshape_kernel(
                int4._reshape_cache_int4_kernel, key=k, value=k, key_cache=pages[0], value_cache=pages[1],
                k_scale_cache=scales[0], v_scale_cache=scales[1], slot_mapping=torch.arange(count), packing_factor=2,
            )  # fmt: skip
        else:
            modes: Any = importlib.import_module("vllm.v1.kv_cache_interface").KVQuantMode
            writers.triton_reshape_and_cache_flash_per_token_head_quant(
                k, k, *pages, *scales, torch.arange(count), modes[mode]
            )
        return pages[0].view(torch.uint8).squeeze(1), scales[0].unsqueeze(-1).view(torch.uint8).squeeze(1)

    return write


def mxfp8(k: Any) -> tuple[Any, Any]:
    module: Any = importlib.import_module("vllm.model_executor.layers.quantization.utils.mxfp8_utils")
    codes, scales = module._mxfp8_e4m3_quantize_torch(k)
    return codes.view(scales.dtype), scales.view(*k.shape[:-1], -1)


def mxfp4(k: Any) -> tuple[Any, Any]:
    module: Any = importlib.import_module("vllm.model_executor.layers.quantization.utils.mxfp4_utils")
    codes, scales, _ = module.downcast_to_mxfp(k, axis=-1)
    return codes.view(*k.shape[:-1], -1), scales.view(*k.shape[:-1], -1)


SHIM = """
#include <math.h>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#define __device__
#define __forceinline__ inline
#define __frcp_rn(x) (1.0f / (x))
#define signbit std::signbit
#define isfinite std::isfinite
struct nv_half { float x; };
struct nv_bfloat16 { float x; };
static inline float __half2float(nv_half h) { return h.x; }
static inline float __bfloat162float(nv_bfloat16 b) { return b.x; }
static float value_of(int code) {
  const int e = (code >> 3) & 15, m = code & 7;
  return e ? std::ldexp(8.0f + m, e - 10) : std::ldexp(float(m), -9);
}
struct __nv_fp8_e4m3 {  // rounds to nearest even and saturates, as CUDA's does
  uint8_t __x;
  explicit __nv_fp8_e4m3(float x) {
    int best = 0;
    for (int code = 1; code <= 126; ++code) {
      const double a = std::fabs(double(x) - value_of(code)), b = std::fabs(double(x) - value_of(best));
      if (a < b || (a == b && !(code & 1))) best = code;
    }
    __x = best;
  }
  explicit operator float() const { return value_of(__x); }
};
"""
ENTRY = """
extern "C" void quantise(const float* rows, float scale, long blocks, uint8_t* codes, uint8_t* scales) {
  for (long b = 0; b < blocks; ++b)
    nvfp4_append_quantize_block<float>(rows, scale, 0, 16 * b, codes + 8 * b, scales + b);
}
"""


def nvfp4(header: Path, scale: float) -> Callable[[Any], tuple[Any, Any]]:
    """FlashInfer's quantisation of rows in blocks of 16 columns, compiled for the CPU."""
    import torch

    text = header.read_text()
    begin, end = text.index("nvfp4_append_to_float(DType"), text.index("nvfp4_append_is_positive_finite_scale(")
    begin, end = text.rindex("template", 0, begin), text.rindex("}", 0, end) + 1
    folder = Path(tempfile.mkdtemp())
    (folder / "block.cc").write_text(SHIM + text[begin:end] + ENTRY)
    flags = ["-O2", "-ffp-contract=off", "-shared", "-fPIC", "-w"]
    subprocess.run(["g++", *flags, "-o", folder / "block.so", folder / "block.cc"], check=True)
    function = ctypes.CDLL(str(folder / "block.so")).quantise

    def write(k: Any) -> tuple[Any, Any]:
        flat = k.float().contiguous()
        codes = torch.zeros(*k.shape[:-1], k.shape[-1] // 2, dtype=torch.uint8)
        scales = torch.zeros(*k.shape[:-1], k.shape[-1] // 16, dtype=torch.uint8)
        pointers = [ctypes.c_void_p(each.data_ptr()) for each in (flat, codes, scales)]
        function(pointers[0], ctypes.c_float(scale), ctypes.c_long(flat.numel() // 16), pointers[1], pointers[2])
        return codes, scales

    return write


def writers(header: Path | None) -> Iterator[tuple[str, Callable[[Any], tuple[Any, Any]], Any, float | None]]:
    """Yield each writer as (name, function, kinds, scale).

    `kinds` returns the (dtype, width) of codes and of scales for a row of D columns. `scale` is that of the whole
    tensor, or None.
    """
    import torch

    bytes_, e4m3, e8m0 = torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu
    yield (
        "int8_per_token_head",
        token_head("int8_per_token_head"),
        lambda d: ((torch.int8, d), (torch.float32, 1)),
        None,
    )
    yield "fp8_per_token_head", token_head("fp8_per_token_head"), lambda d: ((e4m3, d), (torch.float32, 1)), None
    yield (
        "int4_per_token_head",
        token_head("int4_per_token_head"),
        lambda d: ((bytes_, d // 2), (torch.float32, 1)),
        None,
    )
    yield "mxfp8", mxfp8, lambda d: ((e4m3, d), (e8m0, d // 32)), None
    yield "mxfp4", mxfp4, lambda d: ((bytes_, d // 2), (e8m0, d // 32)), None
    if header is None:
        return
    for scale in (1.0, 0.3, 0.0078125):
        yield f"nvfp4, scale {scale}", nvfp4(header, scale), lambda d: ((bytes_, d // 2), (e4m3, d // 16)), scale


def of_writers(header: Path | None, backend: str | None, only: str) -> Iterator[tuple[str, int, int]]:
    """Yield (name of a writer, number of bytes that it stored, number of our bytes that differ)."""
    import torch

    for name, write, kinds, scale in writers(header):
        if only not in name:
            continue
        stored = differ = 0
        for dtype, size in itertools.product((torch.bfloat16, torch.float16, torch.float32), (64, 96, 256)):
            if name == "mxfp4" and dtype == torch.float32:  # vLLM's writer requires 16-bit floats
                continue
            torch.manual_seed(size)
            k = torch.cat((rows(40, 2, size), special_rows(2, size))).to(dtype)
            for mine, other in zip(written(k, kinds(size), backend, scale), write(k), strict=True):
                stored += other.numel()
                differ += int((mine != other).sum())
        yield name, stored, differ


def special_rows(heads: int, size: int) -> Any:
    """Rows with one sign, with constants, with tiny or huge numbers, and with ties."""
    import torch

    x = torch.randn(8, heads, size)
    x[0], x[1], x[2], x[3] = x[0].abs(), -x[1].abs(), 1.0, -2.5
    x[4], x[5] = 1e-7 * x[4], 1e4 * x[5]
    x[6] = torch.arange(-size // 2, size - size // 2) * 0.5
    x[7, :, :-1] *= 2.0**-14
    return x


def record(header: Path | None, path: Path) -> None:
    """Write bfloat16 rows, and the bytes that the writers store for them, to `path` as hexadecimal text."""
    import torch

    torch.manual_seed(1)
    special = special_rows(1, RECORDED_COLUMNS)
    k = torch.cat((rows(8, 1, RECORDED_COLUMNS), special)).bfloat16()
    found: dict[str, Any] = {"rows": [each.view(torch.uint8).numpy().tobytes().hex() for each in k]}
    for name, write, _, scale in writers(header):
        codes, scales = (each.numpy() for each in write(k))
        found[name] = {"scale": scale, "codes": codes.tobytes().hex(), "scales": scales.tobytes().hex()}
    found["signs"] = int4_module()._get_rht_signs(RECORDED_COLUMNS, 0, torch.device("cpu")).int().tolist()
    found["rotated"] = int4_module().single_rht(k.float()).numpy().tobytes().hex()
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="only formats whose name contains this")
    parser.add_argument("--flashinfer", type=Path, help="a folder with FlashInfer's header page.cuh")
    parser.add_argument("--backend", help="our backend; default: the default backend")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write rows and their bytes instead")
    options = parser.parse_args(arguments)
    vllm_masks.use_interpreter()
    header = options.flashinfer and options.flashinfer / "page.cuh"
    spec = importlib.util.find_spec("flashinfer") if header is None else None
    if spec is not None and spec.origin is not None:
        header = Path(spec.origin).parent / "data/include/flashinfer/page.cuh"
    if options.record is not None:
        record(header, options.record)
        return 0
    console, begin, failures = Console(width=None if sys.stdout.isatty() else 140), time.perf_counter(), 0
    bytes_table = Table("writer", "bytes", "ours that differ", "")
    for name, stored, differ in of_writers(header, options.backend, options.only):
        failures += differ > 0
        bytes_table.add_row(name, str(stored), str(differ), "agrees" if not differ else "DIFFERS")
    if header is None:
        bytes_table.add_row("nvfp4", "", "", "not compared: no FlashInfer")
    console.print(bytes_table)
    table = Table("cache", "cases", "bytes that differ", "ours to the rule", "vLLM's to the rule", "ours to vLLM's", "")
    found: dict[str, list[Any]] = {}
    for case in cases():
        if options.only in case.cache:
            found.setdefault(f"{case.cache}, {case.dtype}", []).append(of_layers(case, options.backend))
    for name, measured in found.items():
        worst = np.max(measured, 0)  # NaN stays NaN
        allowed = 1e-3 if name.startswith("int4") else 0.0
        right = bool((worst <= [allowed, BOUND, BOUND, BOUND]).all())
        failures += not right
        table.add_row(
            name, str(len(measured)), *(f"{each:.1e}" for each in worst), "agrees" if right else "DIFFERS"
        )  # fmt: skip
    table.title = f"largest differences, {time.perf_counter() - begin:.0f} s"
    console.print(table)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
