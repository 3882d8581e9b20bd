"""The cases that are timed on a CPU, C1 to C13: shapes of an 8B model and of DeepSeek's latents, with about 1k keys.

C12 is DeepSeek-V4's sparse decode: a window of 128 rows and a top-k of compressed rows, both in fp8, with sinks. C13 is
the logits of its indexer alone.

A case has contenders, which are functions that compute the same result from the same inputs. It also counts what no
implementation can avoid: the bytes to read from the cache, and the floating-point operations of the products.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from benchmarks.cpu import llama_cpp, peers
from ragged_attention.calls import CACHE_FORMATS
from ragged_attention.key_ranges import causal_ranges
from ragged_attention.torch import (
    indexer_logits,
    indexer_topk,
    mla_decode,
    quantize_mla_cache,
    ragged_mla_attention,
    ragged_paged_attention,
    varlen_attention,
    write_indexer_cache,
    write_kv_pages,
)

Contenders = Mapping[str, Callable[[], Any]]
# In cases with listed blocks, DENSE is our attention to all keys, so its result differs.
DENSE = "dense"
# In cases in which OURS gets its mask as ranges of keys, NAMED is our attention with the arguments for that mask.
OURS, EAGER, NAMED = "ours", "eager", "named"
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 32
CAUSAL: Mapping[str, Any] = {"causal": True}
D_QK, D_V, LATENT_SCALE = 576, 512, 192**-0.5
V4_WINDOW, V4_PAGE_SIZE, V4_SCALE = 128, 64, 512**-0.5
INDEX_HEADS, INDEX_DIM, INDEX_PAGE_SIZE, INDEX_TOPK = 64, 128, 64, 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(abc.ABC):
    """A case that is timed."""

    name: str
    what: str
    dtype: torch.dtype
    frameworks: tuple[str, ...] = ("torch",)

    @abc.abstractmethod
    def contenders(self) -> Contenders:
        """The functions by name, ours first. Peers that are not installed are left out."""

    @property
    def bytes(self) -> int:
        """The bytes of the keys and values to read, or 0 if reading them does not limit the case."""
        return 0

    @property
    def flops(self) -> int:
        """The operations of the products, or 0 if the products do not limit the case."""
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paged(Case):
    """Attention over pages of K and V. `lens` are the numbers of query tokens and keys of each sequence."""

    lens: tuple[tuple[int, int], ...]
    page_size: int = PAGE_SIZE
    cache_dtype: torch.dtype | None = None

    @property
    def stored(self) -> torch.dtype:
        return self.cache_dtype or self.dtype

    @property
    def bytes(self) -> int:
        return 2 * sum(keys for _, keys in self.lens) * NUM_KV_HEADS * HEAD_DIM * self.stored.itemsize

    @property
    def flops(self) -> int:
        pairs = sum(tokens * (2 * keys - tokens + 1) // 2 for tokens, keys in self.lens)
        return 4 * pairs * NUM_Q_HEADS * HEAD_DIM

    def inputs(self) -> dict[str, torch.Tensor]:
        """The arguments. Pages are in random order. K and V are given twice: in one array, and as separate arrays."""
        torch.manual_seed(0)
        used = [-(-keys // self.page_size) for _, keys in self.lens]
        order, table = torch.randperm(sum(used)).int(), torch.zeros(len(used), max(used), dtype=torch.int32)
        for seq, pages in enumerate(order.split(used)):
            table[seq, : len(pages)] = pages
        edges = torch.tensor([0, *(tokens for tokens, _ in self.lens)]).cumsum(0).int()
        k, v = (torch.randn(len(order), self.page_size, NUM_KV_HEADS, HEAD_DIM) for _ in range(2))
        if self.cache_dtype == torch.int8:
            k, v = ((32 * pages).clamp(-127, 127) for pages in (k, v))
        k, v = k.to(self.stored), v.to(self.stored)
        return {
            "q": torch.randn(int(edges[-1]), NUM_Q_HEADS, HEAD_DIM).to(self.dtype),
            "kv_pages": torch.stack([k, v], 3).flatten(2, 3).contiguous(),
            "kv_lens": torch.tensor([keys for _, keys in self.lens]).int(),
            "page_indices": table,
            "cu_q_lens": edges,
            "k": k,
            "v": v,
        }

    def contenders(self) -> Contenders:
        inputs = self.inputs()
        scale: dict[str, Any] = {"k_scale": 1 / 32, "v_scale": 1 / 32} if self.cache_dtype == torch.int8 else {}
        arguments: dict[str, Any] = {
            name: inputs[name] for name in ("q", "kv_pages", "kv_lens", "page_indices", "cu_q_lens")
        } | scale

        def ours(backend: str) -> Callable[[], Any]:
            out = torch.empty_like(inputs["q"])  # allocated in advance, as in an engine, and as for the peers
            return lambda: ragged_paged_attention(**arguments, backend=backend, out=out)

        contenders = {OURS: ours("numba"), EAGER: ours("eager")}
        if self.cache_dtype is None:
            contenders |= peers.vllm_attention(inputs, self.page_size) | peers.sglang_attention(inputs, self.lens)
            contenders |= peers.openvino_attention(inputs, self.lens) | llama_cpp.attention(inputs, self.lens)
            contenders |= peers.over_gathered_in_torch(inputs, self.lens)
        if "jax" in self.frameworks and torch.get_num_threads() > 1:
            contenders |= peers.ours_from_jax(arguments)
        return contenders


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaled(Paged):
    """Attention over pages whose rows, or blocks of columns, have their own scales."""

    pages: torch.dtype  # uint8 holds two columns per byte
    scales: torch.dtype
    num_scales: int  # scales per row, including a stored zero point

    @property
    def bytes(self) -> int:
        width = HEAD_DIM // 2 if self.pages == torch.uint8 else HEAD_DIM * self.pages.itemsize
        row = width + self.num_scales * self.scales.itemsize
        return 2 * sum(keys for _, keys in self.lens) * NUM_KV_HEADS * row

    def contenders(self) -> Contenders:
        inputs = self.inputs()
        k, v = inputs.pop("k"), inputs.pop("v")
        width = HEAD_DIM // 2 if self.pages == torch.uint8 else HEAD_DIM
        cache: dict[str, Any] = {
            "kv_pages": tuple(torch.zeros(*k.shape[:3], width, dtype=self.pages) for _ in range(2)),
            "k_scale_pages": torch.zeros(*k.shape[:3], self.num_scales, dtype=self.scales),
            "v_scale_pages": torch.zeros(*k.shape[:3], self.num_scales, dtype=self.scales),
        }
        write_kv_pages(k.flatten(0, 1), v.flatten(0, 1), slot_mapping=torch.arange(k.shape[0] * k.shape[1]), **cache)
        arguments: dict[str, Any] = {**inputs, **cache}

        def ours(backend: str) -> Callable[[], Any]:
            return lambda: ragged_paged_attention(**arguments, backend=backend)

        return {OURS: ours("numba"), EAGER: ours("eager")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranged(Paged):
    """A causal mask, possibly with a window, as ranges of keys. NAMED gets the same mask by its own arguments."""

    sliding_window: int | None = None

    @property
    def bytes(self) -> int:
        window = self.sliding_window or max(keys for _, keys in self.lens)
        seen = sum(min(keys, window + tokens - 1) for tokens, keys in self.lens)
        return 2 * seen * NUM_KV_HEADS * HEAD_DIM * self.stored.itemsize

    @property
    def flops(self) -> int:
        window = self.sliding_window or max(keys for _, keys in self.lens)
        pairs = sum(
            min(seen, window) for tokens, keys in self.lens for seen in range(keys - tokens + 1, keys + 1)
        )  # fmt: skip
        return 4 * pairs * NUM_Q_HEADS * HEAD_DIM

    def contenders(self) -> Contenders:
        arguments: dict[str, Any] = {name: x for name, x in self.inputs().items() if name not in ("k", "v")}
        window: dict[str, Any] = {"sliding_window": self.sliding_window}
        ranges = causal_ranges(arguments["cu_q_lens"], arguments["kv_lens"], len(arguments["q"]), **window)
        return {
            OURS: lambda: ragged_paged_attention(**arguments, key_ranges=ranges, backend="numba"),
            NAMED: lambda: ragged_paged_attention(**arguments, **window, backend="numba"),
            EAGER: lambda: ragged_paged_attention(**arguments, **window, backend="eager"),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listed(Paged):
    """Sparse attention. Each query and KV head has its own list of blocks.

    The blocks of a list contain 2048 keys. Only keys up to the query's own position are visible.
    """

    block_size: int
    named: int = 2048

    @property
    def _pairs(self) -> int:
        """The number of visible pairs of a query and a key, for one KV head."""
        positions = (keys - tokens + index for tokens, keys in self.lens for index in range(1, tokens + 1))
        return sum(min(self.named, seen) for seen in positions)

    @property
    def bytes(self) -> int:
        keys = sum(min(keys, tokens * self.named) for tokens, keys in self.lens)
        return 2 * keys * NUM_KV_HEADS * HEAD_DIM * self.stored.itemsize

    @property
    def flops(self) -> int:
        return 4 * self._pairs * NUM_Q_HEADS * HEAD_DIM

    def lists(self) -> torch.Tensor:
        """Lists of blocks in random order, which include the query's own block."""
        torch.manual_seed(1)
        length, rows = self.named // self.block_size, []
        for tokens, keys in self.lens:
            for own_block in ((keys - tokens + index) // self.block_size for index in range(tokens)):
                others = torch.rand(NUM_KV_HEADS, max(own_block, 1)).argsort(1)[:, : length - 1] if own_block else None
                blocks = torch.full((NUM_KV_HEADS, length), -1)
                blocks[:, 0] = own_block
                if others is not None:
                    blocks[:, 1 : 1 + others.shape[1]] = others
                rows.append(blocks)
        return torch.stack(rows).int()

    def contenders(self) -> Contenders:
        arguments: dict[str, Any] = {name: x for name, x in self.inputs().items() if name not in ("k", "v")}
        lists: dict[str, Any] = {"selected": self.lists(), "block_size": self.block_size}
        return {
            OURS: lambda: ragged_paged_attention(**arguments, **lists, backend="numba"),
            DENSE: lambda: ragged_paged_attention(**arguments, backend="numba"),
            EAGER: lambda: ragged_paged_attention(**arguments, **lists, backend="eager"),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent(Case):
    """MLA decode of one token for each of 8 sequences with 1024 keys. It is dense if `topk` is 0."""

    heads: int
    cache_format: str = "plain"
    topk: int = 0

    def contenders(self) -> Contenders:
        torch.manual_seed(0)
        seqs, keys, page_size = 8, 1024, 16
        pages = keys // page_size
        table = torch.randperm(seqs * pages).view(seqs, pages).int()
        cache = (torch.randn(seqs * pages, page_size, 1, D_QK) / 4).to(self.dtype)
        q, lens = torch.randn(seqs, 1, self.heads, D_QK).to(self.dtype), torch.full((seqs,), keys).int()
        stored = cache if self.cache_format == "plain" else quantize_mla_cache(cache, self.cache_format)
        positions = torch.stack([torch.randperm(keys)[: self.topk] for _ in range(seqs)])
        slots = (table.gather(1, positions // page_size) * page_size + positions % page_size).int()[:, None]
        which: dict[str, Any] = {"indices": slots} if self.topk else {"page_indices": table, "kv_lens": lens}

        def ours(backend: str) -> Callable[[], Any]:
            return lambda: mla_decode(q, stored, **which, sm_scale=LATENT_SCALE, backend=backend)[0][:, 0]

        contenders = {OURS: ours("numba"), EAGER: ours("eager")}
        if not self.topk and self.cache_format == "plain":
            arguments = (q[:, 0], cache[:, :, 0], table, lens, LATENT_SCALE)
            contenders |= peers.vllm_latent_decode(*arguments) | peers.sglang_latent_decode(*arguments)
            contenders |= llama_cpp.latent_decode(*arguments)
        return contenders


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selected(Case):
    """DeepSeek-V4's decode over fp8 rows, with sinks. A token sees its window and a top-k of 4096 compressed rows."""

    tokens: int
    heads: int
    topk: int

    @property
    def _pairs(self) -> int:
        return self.tokens * (V4_WINDOW + self.topk)

    @property
    def bytes(self) -> int:
        return self._pairs * CACHE_FORMATS["fp8_v4"].token_bytes

    @property
    def flops(self) -> int:
        return 4 * self._pairs * self.heads * D_V

    def rows(self, length: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A cache with `length` rows per token, in shuffled pages, and a list of `count` of its slots per token."""
        pages = length // V4_PAGE_SIZE
        table = torch.randperm(self.tokens * pages).view(self.tokens, pages)
        cache = (torch.randn(self.tokens * pages, V4_PAGE_SIZE, 1, D_V) / 4).to(self.dtype)
        positions = torch.rand(self.tokens, length).argsort(1)[:, :count]
        slots = table.gather(1, positions // V4_PAGE_SIZE) * V4_PAGE_SIZE + positions % V4_PAGE_SIZE
        return quantize_mla_cache(cache, "fp8_v4"), slots.int()

    def contenders(self) -> Contenders:
        torch.manual_seed(0)
        window, compressed = self.rows(V4_WINDOW, V4_WINDOW), self.rows(4096, self.topk)
        q, sinks = torch.randn(self.tokens, self.heads, D_V).to(self.dtype), torch.randn(self.heads)
        arguments: dict[str, Any] = {
            "q": q[:, None], "kv_cache": window[0], "indices": window[1][:, None], "extra_kv_cache": compressed[0],
            "extra_indices": compressed[1][:, None], "sinks": sinks, "sm_scale": V4_SCALE, "cache_format": "fp8_v4",
        }  # fmt: skip

        def ours(backend: str) -> Callable[[], Any]:
            return lambda: mla_decode(**arguments, backend=backend)[0][:, 0]

        contenders = {OURS: ours("numba"), EAGER: ours("eager")}
        return contenders | peers.vllm_selected_latents(q, window, compressed, sinks, V4_SCALE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedLatent(Case):
    """Attention over latents, with prompts and decodes in one call.

    `lens` are each sequence's query tokens and keys.
    """

    lens: tuple[tuple[int, int], ...]
    heads: int
    cache_format: str = "plain"
    ranged: bool = False  # whether the causal mask is given as ranges of keys

    @property
    def flops(self) -> int:
        pairs = sum(tokens * (2 * keys - tokens + 1) // 2 for tokens, keys in self.lens)
        return 2 * pairs * self.heads * (D_QK + D_V)

    def contenders(self) -> Contenders:
        torch.manual_seed(0)
        pages = -(-max(keys for _, keys in self.lens) // PAGE_SIZE)
        table = torch.randperm(len(self.lens) * pages).view(len(self.lens), pages).int()
        cache = (torch.randn(table.numel(), PAGE_SIZE, 1, D_QK) / 4).to(self.dtype)
        stored = cache if self.cache_format == "plain" else quantize_mla_cache(cache, self.cache_format)
        edges = torch.tensor([0, *(tokens for tokens, _ in self.lens)]).cumsum(0).int()
        q = torch.randn(int(edges[-1]), self.heads, D_QK).to(self.dtype)
        lens = torch.tensor([keys for _, keys in self.lens]).int()

        def ours(backend: str) -> Callable[[], Any]:
            return lambda: ragged_mla_attention(q, stored, lens, table, edges, sm_scale=LATENT_SCALE, backend=backend)

        def by_ranges() -> Any:
            mask = {"key_ranges": ranges}
            return ragged_mla_attention(q, stored, lens, table, edges, sm_scale=LATENT_SCALE, backend="numba", **mask)

        ranges = causal_ranges(edges, lens, len(q))
        contenders = {OURS: by_ranges, NAMED: ours("numba")} if self.ranged else {OURS: ours("numba")}
        return contenders | {EAGER: ours("eager")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Varlen(Case):
    """Causal attention over 4 packed sequences of 1024 tokens, or its gradient."""

    backward: bool = False
    ranged: bool = False  # whether OURS gets the mask as ranges of keys

    @property
    def flops(self) -> int:
        return (10 if self.backward else 4) * 4 * (1024 * 1025 // 2) * NUM_Q_HEADS * HEAD_DIM

    def contenders(self) -> Contenders:
        torch.manual_seed(0)
        edges = torch.arange(0, 4097, 1024).int()
        arrays = [torch.randn(4096, heads, HEAD_DIM).to(self.dtype) for heads in (NUM_Q_HEADS, *(NUM_KV_HEADS,) * 2)]
        towards = torch.randn(4096, NUM_Q_HEADS, HEAD_DIM).to(self.dtype)

        def ours(backend: str, **mask: Any) -> Callable[..., torch.Tensor]:
            return lambda q, k, v: varlen_attention(q, k, v, edges, edges, **(mask or CAUSAL), backend=backend)

        def packed(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                parts = zip(*(x.split(1024) for x in (q, k, v)), strict=True)
                heads_first = ([x.transpose(0, 1)[None] for x in part] for part in parts)
                return torch.cat([attend(*part, is_causal=True)[0].transpose(0, 1) for part in heads_first])

            return run

        def gradient(function: Callable[..., torch.Tensor]) -> Callable[[], Any]:
            leaves = [x.clone().requires_grad_() for x in arrays]
            out = function(*leaves)
            return lambda: torch.cat(torch.autograd.grad(out, leaves, towards, retain_graph=True), 1)

        sdpa = functools.partial(functional.scaled_dot_product_attention, enable_gqa=True)
        functions = {OURS: ours("numba"), EAGER: ours("eager"), "sdpa": packed(sdpa)}
        if peers.zentorch() is not None and not self.backward:
            functions["zentorch"] = packed(lambda *part, **causal: peers.zentorch()(*part, **causal)[0])
        if self.ranged:
            ranges = causal_ranges(edges, edges.diff(), int(edges[-1]))
            functions = {OURS: ours("numba", key_ranges=ranges), NAMED: ours("numba"), EAGER: ours("eager")}
        if self.backward:
            return {name: gradient(function) for name, function in functions.items()}
        return {name: lambda function=function: function(*arrays) for name, function in functions.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Index(Case):
    """The top-k of the lightning indexer over pages of bytes. `lens` are each sequence's query tokens and keys."""

    lens: tuple[tuple[int, int], ...]

    @property
    def bytes(self) -> int:
        return sum(keys for _, keys in self.lens) * (INDEX_DIM + 4)

    @property
    def flops(self) -> int:
        pairs = sum(tokens * (2 * keys - tokens + 1) // 2 for tokens, keys in self.lens)
        return 2 * pairs * INDEX_HEADS * INDEX_DIM

    def inputs(self) -> dict[str, torch.Tensor]:
        """The arguments.

        Numbers are small integers and scales powers of two, so logits are exact and there is one right answer.
        """
        torch.manual_seed(0)
        pages = -(-max(keys for _, keys in self.lens) // INDEX_PAGE_SIZE)
        table = torch.randperm(len(self.lens) * pages).view(len(self.lens), pages).int()
        cache = torch.zeros(table.numel(), INDEX_PAGE_SIZE, 1, INDEX_DIM + 4, dtype=torch.uint8)
        slots = torch.arange(table.numel() * INDEX_PAGE_SIZE)
        keys = torch.randint(-4, 5, (len(slots), INDEX_DIM)).to(self.dtype)
        write_indexer_cache(keys, cache, slots, power_of_two=True)
        edges = torch.tensor([0, *(tokens for tokens, _ in self.lens)]).cumsum(0).int()
        q = torch.randint(-4, 5, (int(edges[-1]), INDEX_HEADS, INDEX_DIM)).to(self.dtype)
        weights = torch.randint(-4, 5, q.shape[:2]).float()
        lens = torch.tensor([keys for _, keys in self.lens]).int()
        return {"q": q, "keys": cache, "weights": weights, "page_indices": table, "kv_lens": lens, "cu_q_lens": edges}

    def contenders(self) -> Contenders:
        arguments: dict[str, Any] = self.inputs()

        def ours(backend: str) -> Callable[[], Any]:
            return lambda: indexer_topk(**arguments, top_k=INDEX_TOPK, backend=backend)

        return {OURS: ours("numba"), EAGER: ours("eager")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores(Index):
    """The logits of the lightning indexer alone, with 8-bit queries."""

    def contenders(self) -> Contenders:
        arguments: dict[str, Any] = self.inputs()
        arguments["q"] = arguments["q"].to(E4M3)

        def ours(backend: str) -> Callable[[], Any]:
            return lambda: indexer_logits(**arguments, backend=backend)

        contenders = {OURS: ours("numba"), EAGER: ours("eager")}
        return contenders | peers.vllm_indexer_logits(arguments, self.lens)


F32, BF16, E4M3 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
DECODES, CHUNKS = ((1, 1024),) * 8, ((512, 1024),) * 2
MIXED = ((256, 512), *DECODES)
FROM_JAX = ("torch", "jax")
CASES: tuple[Case, ...] = (
    Paged(name="C1", what="8 decodes at 1k, f32", dtype=F32, lens=DECODES, frameworks=FROM_JAX),
    Paged(name="C2", what="8 decodes at 1k, bf16", dtype=BF16, lens=DECODES, frameworks=FROM_JAX),
    Paged(name="C3", what="C2, pages of 16", dtype=BF16, lens=DECODES, page_size=16),
    Paged(name="C3b", what="C2, pages of 1", dtype=BF16, lens=DECODES, page_size=1),
    Paged(name="C4", what="2 chunks of 512 at 1k, f32", dtype=F32, lens=CHUNKS, frameworks=FROM_JAX),
    Paged(name="C4b", what="2 chunks of 512 at 1k, bf16", dtype=BF16, lens=CHUNKS, frameworks=FROM_JAX),
    Paged(name="C5", what="prefill of 512 beside 16 decodes at 512, bf16", dtype=BF16,
          lens=((512, 512), *((1, 512),) * 16), frameworks=FROM_JAX),
    Paged(name="C5b", what="skew: 31 decodes at 256, one at 16k, bf16", dtype=BF16,
          lens=(*((1, 256),) * 31, (1, 16384)), frameworks=FROM_JAX),
    Paged(name="C5c", what="the same keys, even: 32 decodes at 760, bf16", dtype=BF16, lens=((1, 760),) * 32),
    Paged(name="C6", what="8 decodes at 1k, bf16 over e4m3", dtype=BF16, lens=DECODES,
          cache_dtype=E4M3),
    Paged(name="C6b", what="8 decodes at 1k, bf16 over int8", dtype=BF16, lens=DECODES, cache_dtype=torch.int8),
    *(
        Scaled(name=f"C6{letter}", what=f"8 decodes at 1k, bf16 over {what}", dtype=BF16, lens=DECODES, pages=pages,
               scales=scales, num_scales=count)
        for letter, what, pages, scales, count in (
            ("c", "int8, a scale a row", torch.int8, F32, 1),
            ("d", "e4m3, a scale a row", E4M3, F32, 1),
            ("e", "e4m3fnuz, a scale a row", torch.float8_e4m3fnuz, F32, 1),
            ("f", "e5m2, a scale a row", torch.float8_e5m2, F32, 1),
            ("g", "int4, zero points in the scales", torch.uint8, F32, 1),
            ("h", "int4, zero points beside the scales", torch.uint8, F32, 2),
            ("i", "nvfp4", torch.uint8, E4M3, HEAD_DIM // 16),
            ("j", "mxfp8", E4M3, torch.float8_e8m0fnu, HEAD_DIM // 32),
            ("k", "mxfp4", torch.uint8, torch.float8_e8m0fnu, HEAD_DIM // 32),
        )
    ),
    Latent(name="C7", what="MLA decode, 16 heads, 8 x 1k, f32", dtype=F32, heads=16),
    Latent(name="C7b", what="MLA decode, 16 heads, 8 x 1k, bf16", dtype=BF16, heads=16),
    Latent(name="C7c", what="MLA decode, 128 heads, 8 x 1k, bf16", dtype=BF16, heads=128),
    Latent(name="C7d", what="MLA decode, 16 heads, 8 x 1k, fp8_v32", dtype=BF16, heads=16, cache_format="fp8_v32"),
    Latent(name="C7e", what="sparse MLA decode, 16 heads, 8 x top-k 512, bf16", dtype=BF16, heads=16, topk=512),
    RaggedLatent(name="C7f", what="latents: chunk of 256 at 512 beside 8 decodes at 1k, 16 heads, bf16", dtype=BF16,
                 lens=MIXED, heads=16),
    RaggedLatent(name="C7g", what="C7f, fp8_v32", dtype=BF16, lens=MIXED, heads=16, cache_format="fp8_v32"),
    Varlen(name="C8", what="packed attention, 4 x 1k causal, f32", dtype=F32),
    Varlen(name="C8b", what="its gradient, f32", dtype=F32, backward=True),
    Varlen(name="C8c", what="packed attention, 4 x 1k causal, bf16", dtype=BF16),
    Varlen(name="C8d", what="its gradient, bf16", dtype=BF16, backward=True),
    Index(name="C9", what="indexer top-k 2048, 8 decodes at 4k, fp8 pages", dtype=BF16, lens=((1, 4096),) * 8),
    Index(name="C9b", what="indexer top-k 2048, prefill of 256 at 4k, fp8 pages", dtype=BF16, lens=((256, 4096),)),
    Ranged(name="C10", what="causal as ranges: prefill of 2k, bf16", dtype=BF16, lens=((2048, 2048),)),
    Ranged(name="C10b", what="causal as ranges: 16 decodes at 4k, bf16", dtype=BF16, lens=((1, 4096),) * 16),
    Ranged(name="C10c", what="window of 256 as ranges: 16 decodes at 4k, bf16", dtype=BF16, lens=((1, 4096),) * 16,
           sliding_window=256),
    Varlen(name="C10d", what="causal as ranges: C8c", dtype=BF16, ranged=True),
    Varlen(name="C10e", what="causal as ranges: C8d", dtype=BF16, backward=True, ranged=True),
    RaggedLatent(name="C10f", what="causal as ranges: C7f", dtype=BF16, lens=MIXED, heads=16, ranged=True),
    Listed(name="C11", what="16 of 128 blocks of 128: 4 decodes at 16k, bf16", dtype=BF16, lens=((1, 16384),) * 4,
           block_size=128),
    Listed(name="C11b", what="128 blocks of 16: 4 decodes at 16k, bf16", dtype=BF16, lens=((1, 16384),) * 4,
           block_size=16),
    Listed(name="C11c", what="16 of 128 blocks of 128: prefill of 64 at 16k, bf16", dtype=BF16, lens=((64, 16384),),
           block_size=128),
    Listed(name="C11d", what="128 blocks of 16: prefill of 64 at 16k, bf16", dtype=BF16, lens=((64, 16384),),
           block_size=16),
    *(
        Selected(name=name, what=f"sparse V4 decode, {heads} heads, {tokens} x (128 + top-k {topk}), fp8_v4",
                 dtype=BF16, tokens=tokens, heads=heads, topk=topk)
        for name, tokens, heads, topk in (
            ("C12", 1, 128, 2048), ("C12b", 8, 64, 512), ("C12c", 8, 16, 512), ("C12d", 64, 64, 512)
        )
    ),
    Scores(name="C13", what="indexer logits, 8 decodes at 4k, fp8 pages", dtype=BF16, lens=((1, 4096),) * 8),
    Scores(name="C13b", what="indexer logits, prefill of 256 at 4k, fp8 pages", dtype=BF16, lens=((256, 4096),)),
)  # fmt: skip
