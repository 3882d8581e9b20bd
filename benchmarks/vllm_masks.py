"""Compares vLLM's Triton attention with ours under vLLM's masks, for the shapes of vLLM's own tests and some more.

    python -m benchmarks.vllm_masks [--only WORDS] [--without-triton]

Run it in the environment of `benchmarks.vllm_check`. A case is a step: vLLM's `CommonAttentionMetadata` is passed to
the metadata builder of our backend. Our layer then writes a cache, which is NaN wherever nothing is stored, and attends
over it. Triton's interpreter runs vLLM's kernel on the same cache. Both results are compared with vLLM's rule, which
this module computes in float64. vLLM's kernel uses 0 as the values of keys before a window, even if an image or a
prompt keeps these keys in view. In such cases its result is not checked.

The shapes are those of vLLM's tests of this kernel, of image spans, and of steps in which only some requests are
causal. vLLM has no tests of chunks that look back, of prompts that stay in view, and of windows together with requests
that are not causal. For these masks the shapes are ours.
"""

import argparse
import dataclasses
import importlib
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

# The bound for the cosine difference of results, which are rounded to bfloat16; vLLM also rounds weights.
BOUND = 5e-6
PAGE = 16
SCALES = (0.5, 0.25)  # the scales of 8-bit keys and values


@dataclasses.dataclass(frozen=True)
class Case:
    """A step and its mask. `lens` are the numbers of queries and keys of each request."""

    group: str
    lens: Sequence[tuple[int, int]]
    heads: tuple[int, int] = (8, 2)
    size: int = 128
    window: int | None = None
    soft_cap: float | None = None
    is_8_bit: bool = False
    causal: bool | tuple[bool, ...] = True
    # request -> (first token, last token) of each image
    spans: dict[int, list[tuple[int, int]]] = dataclasses.field(default_factory=dict)
    clamp: bool = False
    lookback: int = -1
    prompts: tuple[int, ...] | None = None  # lengths of the prompts that stay in view
    prompt_window: int = 0

    @property
    def is_decode(self) -> bool:
        return all(q_len == 1 for q_len, _ in self.lens)

    @property
    def is_beyond_window(self) -> bool:
        """Whether a query sees a key before its window. For such a key, vLLM 0.32's kernel uses 0 as the value."""
        if self.window is None:
            return False
        for row, (q_len, kv_len) in enumerate(self.lens):
            q, k = np.arange(kv_len - q_len, kv_len)[:, None], np.arange(kv_len)
            if (self.sees(row) & (q - k >= self.window)).any():
                return True
        return False

    def sees(self, row: int) -> Any:
        """The mask [queries, keys] of a request under vLLM's rule."""
        q_len, kv_len = self.lens[row]
        q, k = np.arange(kv_len - q_len, kv_len)[:, None], np.arange(kv_len)
        causal = self.causal if isinstance(self.causal, bool) else self.causal[row]
        seen = k <= q if causal else (k < kv_len) & (q >= 0)
        if self.lookback > -1:
            assert self.window is not None
            chunk = self.window // (self.lookback + 1)
            seen &= q // chunk - k // chunk <= self.lookback
        elif self.prompts is not None:
            seen &= (k < self.prompts[row]) | (q - k < self.prompt_window)
        elif self.window is not None:
            seen &= (q - k < self.window) & (causal | (k - q < self.window))
        for first, last in self.spans.get(row, []):
            if first < last:
                within = (first <= q) & (q <= last) & (first <= k) & (k <= last)
                seen |= within & ((q - k < self.window) if self.clamp and self.window is not None else True)
        return seen


def cases() -> Iterator[Case]:
    yield from of_the_kernel()
    yield from of_images()
    yield from of_requests_that_are_not_causal()
    yield from of_other_masks()


def of_the_kernel() -> Iterator[Case]:
    mixed, decodes = [(1, 1328), (5, 18), (129, 463)], [(1, 523), (1, 37), (1, 2011)]
    for lens, heads, size, window, cap in itertools.product(
        (mixed, decodes), ((4, 4), (8, 2), (5, 1)), (128, 256), (None, 64, 128, 256), (None, 50.0)
    ):
        yield Case("causal, windows, soft caps", lens, heads, size, window, cap)
    for lens, heads, size in itertools.product((mixed, decodes), ((4, 4), (8, 2), (5, 1)), (128, 256)):
        yield Case("8-bit cache", lens, heads, size, is_8_bit=True)
    yield Case("causal, windows, soft caps", [(256, 256), (128, 128)], (4, 4))
    yield Case("causal, windows, soft caps", mixed, (8, 2), 96, 128)
    yield Case("causal, windows, soft caps", [(1, 1)] * 533, (8, 2), 128, 64)


def of_images() -> Iterator[Case]:
    steps = [
        ([(128, 128), (64, 64), (200, 200)], {0: [(8, 71)], 1: [(0, 31), (40, 55)], 2: [(64, 191)]}),
        ([(64, 320)], {0: [(32, 95), (200, 287)]}),
        ([(160, 160), (1, 512), (1, 300), (1, 97)], {0: [(32, 127)], 1: [(4, 259)], 2: [(8, 71)], 3: [(1, 64)]}),
        ([(384, 384)], {0: [(32, 351)]}),
        ([(64, 512)], {0: [(16, 79), (448, 511)]}),
        ([(8, 8), (6, 13)], {0: [(1, 3), (5, 7)], 1: [(2, 4), (9, 12)]}),
        ([(4, 4)], {0: [(4, 9)]}),
        ([(2, 2), (2, 2)], {0: [], 1: []}),
        ([(4, 4)], {0: [(1, 1)]}),
        ([(1, 9)], {0: [(1, 3)]}),
    ]
    for (lens, spans), (window, clamp) in itertools.product(steps, ((None, False), (129, False), (129, True))):
        yield Case("images", lens, (8, 8), 128, window, spans=spans, clamp=clamp)
    paged = [(96, 352), (1, 513), (1, 200), (1, 97)]
    spans = {0: [(224, 287), (300, 351)], 1: [(4, 259)], 2: [(0, 63), (80, 143)], 3: [(1, 64)]}
    for size in (128, 256, 512):
        yield Case("images", paged, (8, 1), size, 256, spans=spans)
    yield Case("images", [(276, 276)], (16, 8), 256, 1024, spans={0: [(5, 260)]})
    # Images together with soft caps, 8 bits, and images in only one request.
    for window, clamp in ((None, False), (64, True)):
        yield Case("images", paged, (8, 2), 128, window, 50.0, True, spans={0: spans[0]}, clamp=clamp)


def of_requests_that_are_not_causal() -> Iterator[Case]:
    group = "requests that are not causal"
    lens = [(1, 128), (5, 64), (1, 256)]
    flags = ((True, False, True), (False, True, False), (True, True, False))
    for causal, heads in itertools.product(flags, ((4, 4), (8, 2))):
        yield Case(group, lens, heads, causal=causal)
    for step in ([(1, 128), (1, 64)], [(8, 32), (4, 64)]):
        for causal, size in itertools.product(((True, False), (False, True)), (128, 256, 512)):
            yield Case(group, step, (8, 2), size, causal=causal)
    for step in ([(32, 126)], [(256, 350)], [(256, 256)]):
        yield Case(group, step, (8, 1), causal=(False,))
    for causal, window in itertools.product((*flags, False), (16, 64)):
        yield Case(group, lens, (8, 2), window=window, causal=causal)
    yield Case(group, lens, (8, 2), window=16, causal=flags[0], spans={1: [(10, 50)]})


def of_other_masks() -> Iterator[Case]:
    lens = [(1, 328), (5, 18), (129, 463), (33, 33)]
    for window, lookback in itertools.product((64, 128), (0, 1, 3)):
        yield Case("chunks that look back", lens, window=window, lookback=lookback)
    for window in (None, 32):
        yield Case(
            "prompts that stay in view", lens, window=window, prompts=(100, 18, 463, 20), prompt_window=16
        )  # fmt: skip


class Step:
    """The arrays of a case: queries, and a cache [blocks, K, page, 2 D] for the keys and values of requests."""

    def __init__(self, case: Case) -> None:
        import torch

        torch.manual_seed(0)
        self.case = case
        (heads, kv_heads), size = case.heads, case.size
        tokens = sum(q for q, _ in case.lens)
        pages = [-(-length // PAGE) for _, length in case.lens]
        order = (torch.randperm(sum(pages)) + 1).split(pages)
        self.table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
        for row, row_pages in zip(self.table, order, strict=True):
            row[: len(row_pages)] = row_pages
        self.q = torch.randn(tokens, heads, size).bfloat16()
        self.dtype = torch.float8_e4m3fn if case.is_8_bit else torch.bfloat16
        cache = torch.full((sum(pages) + 1, kv_heads, PAGE, 2 * size), torch.nan, dtype=self.dtype)
        self.cache = cache.view(torch.uint8) if case.is_8_bit else cache
        self.scales = SCALES if case.is_8_bit else (1.0, 1.0)
        self.layer = SimpleNamespace(
            _k_scale=torch.tensor(self.scales[0]), _v_scale=torch.tensor(self.scales[1]),
            mm_prefix_clamp_sliding_window=case.clamp,
        )  # fmt: skip
        self.edges = torch.tensor([0, *(q for q, _ in case.lens)]).cumsum(0, dtype=torch.int32)
        self.kv_lens = torch.tensor([length for _, length in case.lens], dtype=torch.int32)
        self.causal = case.causal if isinstance(case.causal, bool) else torch.tensor(case.causal)

    def common(self) -> Any:
        import torch

        backend: Any = importlib.import_module("vllm.v1.attention.backend")
        prompts = self.case.prompts
        return backend.CommonAttentionMetadata(
            query_start_loc=self.edges, query_start_loc_cpu=self.edges, seq_lens=self.kv_lens,
            seq_lens_cpu_upper_bound=self.kv_lens, num_reqs=len(self.kv_lens), num_actual_tokens=len(self.q),
            max_query_len=int(self.edges.diff().max()), max_seq_len=int(self.kv_lens.max()),
            block_table_tensor=self.table, slot_mapping=torch.zeros(len(self.q), dtype=torch.int64),
            causal=self.causal, mm_req_doc_ranges=self.case.spans or None,
            rswa_prefix_lens=None if prompts is None else torch.tensor(prompts, dtype=torch.int32),
        )  # fmt: skip

    def ours(self) -> Any:
        """The result of our layer, which writes all keys and then attends."""
        import torch

        from ragged_attention.integrations.vllm import RaggedAttentionBackend

        case, (heads, kv_heads) = self.case, self.case.heads
        impl: Any = RaggedAttentionBackend.get_impl_cls()(
            heads, case.size, case.size**-0.5, kv_heads, sliding_window=case.window,
            kv_cache_dtype="fp8" if case.is_8_bit else "auto", logits_soft_cap=case.soft_cap,
            chunk_lookback=case.lookback,
        )  # fmt: skip
        self.layer.impl = impl
        config = importlib.import_module("vllm.config").VllmConfig()
        config.compilation_config.static_forward_context["layer"] = self.layer
        config.model_config = SimpleNamespace(
            is_mm_prefix_lm=bool(case.spans), rswa_window=case.prompt_window if case.prompts else None
        )
        builder = RaggedAttentionBackend.get_builder_cls()(None, ["layer"], config, torch.device("cpu"))
        metadata = builder.build(0, self.common())
        for row, (_, kv_len) in enumerate(case.lens):
            at = torch.arange(kv_len)
            slots = self.table[row, at // PAGE].long() * PAGE + at % PAGE
            k, v = (torch.randn(kv_len, kv_heads, case.size).bfloat16() for _ in range(2))
            impl.do_kv_cache_update(self.layer, k, v, self.cache, slots)
        out = torch.full_like(self.q, torch.nan)
        return impl.forward(self.layer, self.q, None, None, self.cache, metadata, out)

    def theirs(self, is_split: bool = False) -> Any:
        """The result of vLLM's kernel on the cache that our layer has written. Places without a row are set to 0.

        With `is_split`, which is only for decodes, the kernel divides the keys among 16 programs.
        """
        import torch

        kernels: Any = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention")
        utilities: Any = importlib.import_module("vllm.v1.attention.backends.utils")
        modes: Any = importlib.import_module("vllm.v1.kv_cache_interface").KVQuantMode
        case = self.case
        whole = self.cache.view(self.dtype)
        whole = torch.where(whole.float().isnan(), 0.0, whole.float()).to(self.dtype).transpose(1, 2)
        descales = [torch.full((len(self.kv_lens), case.heads[1]), scale) for scale in self.scales]
        out, ranges = torch.full_like(self.q, torch.nan), None
        if case.spans:
            ranges = utilities.compute_mm_prefix_range_tensor(case.spans, len(case.lens), torch.device("cpu"))
        shape, count = (len(case.lens), case.heads[0], 16), len(case.lens) if is_split else 0
        scratch = [torch.empty(*shape, 1 << (case.size - 1).bit_length()), torch.empty(shape), torch.empty(shape)]
        kernels.unified_attention(
            q=self.q, k=whole[..., : case.size], v=whole[..., case.size :], out=out, cu_seqlens_q=self.edges,
            max_seqlen_q=int(self.edges.diff().max()), seqused_k=self.kv_lens, max_seqlen_k=int(self.kv_lens.max()),
            softmax_scale=case.size**-0.5, causal=self.causal, window_size=((case.window or 0) - 1, 0),
            block_table=self.table, softcap=case.soft_cap or 0, q_descale=None, k_descale=descales[0],
            v_descale=descales[1], seq_threshold_3D=count, num_par_softmax_segments=16,
            softmax_segm_output=scratch[0], softmax_segm_max=scratch[1], softmax_segm_expsum=scratch[2],
            kv_quant_mode=modes.FP8_PER_TENSOR if case.is_8_bit else modes.NONE, mm_prefix_range=ranges,
            rswa_prefix_lens=None if case.prompts is None else torch.tensor(case.prompts, dtype=torch.int32),
            rswa_window=case.prompt_window if case.prompts else None, chunk_lookback=case.lookback,
            mm_prefix_clamp_sliding_window=case.clamp,
        )  # fmt: skip
        return out

    def rule(self) -> Any:
        """The result of vLLM's rule in float64, computed one request at a time."""
        import torch

        case, outs = self.case, []
        group = case.heads[0] // case.heads[1]
        for row, (_, kv_len) in enumerate(case.lens):
            at = torch.arange(kv_len)
            held = self.cache.view(self.dtype)[self.table[row, at // PAGE].long(), :, at % PAGE].double()
            k, v = (
                half.repeat_interleave(group, 1) * scale
                for half, scale in zip(held.split(case.size, -1), self.scales, strict=True)
            )
            q = self.q[self.edges[row] : self.edges[row + 1]].double()
            logits = torch.einsum("qhd,khd->hqk", q, k) * case.size**-0.5
            if case.soft_cap is not None:
                logits = case.soft_cap * torch.tanh(logits / case.soft_cap)
            weights = logits.masked_fill(~torch.from_numpy(case.sees(row)), -torch.inf).softmax(-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(outs)


def cosine_difference(a: Any, b: Any) -> float:
    """DeepGEMM's `calc_diff`: 0 for equal arrays, and NaN if any element is NaN."""
    a, b = a.double(), b.double()
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def use_interpreter() -> None:
    """Make vLLM for CPUs accept Triton's interpreter. Without this it requires a Triton with a CPU backend."""
    os.environ["TRITON_INTERPRET"] = "1"
    backends: Any = importlib.import_module("triton.backends")
    backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    importlib.import_module("ragged_attention.testing.triton_interpreter").quicken()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="only groups of cases whose name contains this")
    parser.add_argument("--without-triton", action="store_true", help="leave vLLM's kernel out")
    options = parser.parse_args(arguments)
    if not options.without_triton:
        use_interpreter()
    found: dict[tuple[str, bool], list[Any]] = {}
    begin = time.perf_counter()
    for case in cases():
        if options.only in case.group:
            step = Step(case)
            ours, rule = step.ours(), step.rule()
            differences = [(cosine_difference(ours, rule), 0.0, 0.0)]
            for is_split in () if options.without_triton else (False, True)[: 1 + case.is_decode]:
                theirs = step.theirs(is_split)
                differences.append((0.0, cosine_difference(theirs, rule), cosine_difference(ours, theirs)))
            found.setdefault((case.group, case.is_beyond_window), []).append(np.max(differences, 0))  # NaN stays NaN
    table = Table("masks", "cases", "ours to the rule", "vLLM's to the rule", "ours to vLLM's", "")
    failures = 0
    for (group, is_beyond_window), differences in found.items():
        worst = np.max(differences, 0)
        right = bool((worst[: 1 if is_beyond_window else 3] <= BOUND).all())
        failures += not right
        name = f"{group}, beyond the window" if is_beyond_window else group
        table.add_row(name, str(len(differences)), *(f"{each:.1e}" for each in worst), "agrees" if right else "DIFFERS")
    table.title = f"largest cosine differences, {time.perf_counter() - begin:.0f} s"
    Console().print(table)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
