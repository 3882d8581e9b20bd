"""Compares vLLM's Triton kernels for sparse attention in MiniMax M3 and Qwen4 with ours on the same caches.

    python -m benchmarks.vllm_blocks [--only WORDS]

Run it in the environment of `benchmarks.vllm_check`. A case is a step: vLLM's `CommonAttentionMetadata` is passed to
vLLM's metadata builders and to ours, caches are NaN wherever nothing is stored, and Triton's interpreter runs vLLM's
kernels. For each token, the entries that our kernel selects are compared with the entries that vLLM's kernel selects,
by their scores in float64. Each side's attention reads the selection of its own side, and is compared with float64
attention to that selection.

The lengths and shapes are those of vLLM's tests of these kernels, and some more for steps with prompts and decodes.
vLLM selects the top-k of groups with an operator for GPUs, which torch's top-k replaces here.
"""

import argparse
import dataclasses
import importlib
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import vllm_m3, vllm_masks

# SELECTED bounds the relative gap between the scores that the two sides select, since both sides sum scores in float32.
# ATTENDED bounds the cosine difference of results, since both sides round results to bfloat16.
SELECTED, ATTENDED = 1e-5, 5e-6
BLOCK = PAGE = 128  # keys per block and per page of MiniMax M3
RATIO, GROUPS, TOKEN_PAGE = 4, 512, 64  # tokens per group, groups per list and tokens per page of Qwen4
SCALES = (0.5, 2.0)  # the scales of 8-bit keys and values


@dataclasses.dataclass(frozen=True)
class Case:
    """A step. `lens` are the numbers of queries and keys of each request."""

    group: str
    lens: Sequence[tuple[int, int]]
    heads: tuple[int, int]
    size: int
    index_heads: int
    index_size: int
    top_k: int
    local: int = 1
    drafts: int = 0  # the most draft tokens of a decode
    is_8_bit: bool = False
    index_is_8_bit: bool = False
    layout: str = "LBHNC"


def cases() -> Iterator[Case]:
    m3 = "MiniMax M3"
    for drafts, padded in itertools.product((0, 3), (0, 2)):
        lens = [(1 + drafts, length) for length in (7, 129, 1025)] + [(1 + drafts, 0)] * padded
        yield Case(f"{m3}, decodes", lens, (4, 2), 128, 2, 16, 6, drafts=drafts)
    for heads in (1, 4):
        lens = [(1, length) for length in (129, 1025, 4097)]
        yield Case(f"{m3}, e4m3 index keys", lens, (4 * heads, heads), 128, heads, 128, 8, index_is_8_bit=True)
    for prefix in (1024, 3600):
        yield Case(f"{m3}, chunks", [(4, 4), (3, prefix + 3)], (4, 2), 128, 2, 16, 6)
    for lens, layout in itertools.product(
        ([(129, 129), (257, 257)], [(65, 129), (129, 257), (257, 385)]), ("LBNHC", "LBHNC")
    ):
        yield Case(f"{m3}, prompts", lens, (8, 2), 128, 2, 128, 16, layout=layout)
    mixed = [(1, 2305), (1, 2561), (16, 2624), (24, 2720)]
    for is_8_bit in (False, True):
        yield Case(f"{m3}, prompts and decodes", mixed, (8, 2), 128, 2, 128, 16, is_8_bit=is_8_bit)
    qsa = "Qwen4"
    for query_len, is_8_bit in itertools.product((1, 2, 4), (False, True)):
        lens = [(query_len, 320), (query_len, 316)]
        yield Case(
            f"{qsa}, decodes", lens, (24, 2), 256, 4, 128, GROUPS, drafts=query_len - 1, is_8_bit=is_8_bit,
            index_is_8_bit=is_8_bit,
        )  # fmt: skip
    yield Case(f"{qsa}, lists shorter than what is seen", [(1, 5120), (3, 4224)], (24, 2), 256, 4, 128, GROUPS)
    yield Case(f"{qsa}, prompts", [(3, 5120), (33, 4224)], (6, 1), 256, 4, 128, GROUPS)
    for query_len in (1, 3):
        lens = [(query_len, 2560), (query_len, 2560), (33, 2560)]
        yield Case(f"{qsa}, prompts and decodes", lens, (12, 1), 256, 4, 128, GROUPS, drafts=query_len - 1)
    yield Case(f"{qsa}, no whole group", [(2, 3), (1, 1)], (24, 2), 256, 4, 128, GROUPS)


class Step:
    """The queries and caches of a case in vLLM's layout. A method computes attention to given positions in float64."""

    def __init__(self, case: Case, page: int) -> None:
        import torch

        torch.manual_seed(0)
        self.case, self.page = case, page
        self.tokens = sum(q for q, _ in case.lens)
        pages = [-(-length // page) for _, length in case.lens]
        order = torch.randperm(sum(pages)).int().split(pages)
        self.table = torch.zeros(len(pages), max(pages) + 1, dtype=torch.int32)
        for row, row_pages in zip(self.table, order, strict=True):
            row[: len(row_pages)] = row_pages
        kv_heads, blocks = case.heads[1], sum(pages) + 1
        self.dtype = torch.float8_e4m3fn if case.is_8_bit else torch.bfloat16
        shape = (blocks, kv_heads, page, 2 * case.size)
        if case.layout == "LBNHC":
            whole = torch.full((blocks, page, kv_heads, 2 * case.size), torch.nan).to(self.dtype).transpose(1, 2)
        else:
            whole = torch.full(shape, torch.nan).to(self.dtype)
        for row, (_, length) in enumerate(case.lens):
            at = torch.arange(length)
            new = torch.randn(length, kv_heads, 2 * case.size).bfloat16()
            whole[self.table[row, at // page].long(), :, at % page] = new.to(self.dtype)
        self.cache, self.scales = whole, SCALES if case.is_8_bit else (1.0, 1.0)
        self.q = torch.randn(self.tokens, case.heads[0], case.size).bfloat16()
        index = torch.float8_e4m3fn if case.index_is_8_bit else torch.bfloat16
        self.index_q = torch.randn(self.tokens, case.index_heads, case.index_size).to(index)
        self.edges = torch.tensor([0, *(q for q, _ in case.lens)]).cumsum(0, dtype=torch.int32)
        self.lens = torch.tensor([length for _, length in case.lens], dtype=torch.int32)
        self.config: Any = importlib.import_module("vllm.config").VllmConfig()
        self.config.model_config = SimpleNamespace(
            is_mm_prefix_lm=False, rswa_window=None,
            hf_config=SimpleNamespace(sparse_attention_config={"sparse_num_index_heads": case.index_heads}),
        )  # fmt: skip

    def index_keys(self, counts: Sequence[int], page: int) -> Any:
        """A cache [blocks, page, D] of index keys. Request i has `counts[i]` keys, in the pages of its block table."""
        import torch

        keys = torch.full((self.cache.shape[0], page, self.case.index_size), torch.nan).to(self.index_q.dtype)
        for row, count in enumerate(counts):
            at = torch.arange(count)
            new = torch.randn(count, self.case.index_size).to(keys.dtype)
            keys[self.table[row, at // page].long(), at % page] = new
        return keys

    def positions(self) -> Iterator[tuple[int, int, int]]:
        """Yield (token, request, position) for each token."""
        token = itertools.count()
        for row, (q_len, length) in enumerate(self.case.lens):
            yield from ((next(token), row, length - q_len + i) for i in range(q_len))

    def common(self) -> Any:
        import torch

        backend: Any = importlib.import_module("vllm.v1.attention.backend")
        return backend.CommonAttentionMetadata(
            query_start_loc=self.edges, query_start_loc_cpu=self.edges, seq_lens=self.lens,
            seq_lens_cpu_upper_bound=self.lens, num_reqs=len(self.lens), num_actual_tokens=self.tokens,
            max_query_len=int(self.edges.diff().max()), max_seq_len=int(self.lens.max()),
            block_table_tensor=self.table, slot_mapping=torch.zeros(self.tokens, dtype=torch.int64),
        )  # fmt: skip

    def built(self, builder: type, spec: Any, name: str) -> Any:
        """The metadata from one of vLLM's or our builders."""
        import torch

        made = builder(spec, [name], self.config, torch.device("cpu"))
        if made.reorder_batch_threshold is not None:
            made.reorder_batch_threshold = made.max_decode_query_len = 1 + self.case.drafts
        return made.build(0, self.common())

    def attention(self, row: int, token: int, head: int, at: Any) -> Any:
        """The results [heads, D] of one token and KV head in float64, over the positions `at` of its request `row`."""
        import torch

        group = self.case.heads[0] // self.case.heads[1]
        if not len(at):
            return torch.zeros(group, self.case.size, dtype=torch.float64)
        held = self.cache[self.table[row, at // self.page].long(), head, at % self.page].double()
        k, v = (half * scale for half, scale in zip(held.chunk(2, -1), self.scales, strict=True))
        q = self.q[token, head * group : (head + 1) * group].double()
        return (q @ k.T * self.case.size**-0.5).softmax(-1) @ v


def gap(ours: Any, theirs: Any, scores: Any) -> float:
    """The largest relative gap between the scores of two selections.

    It is infinite if the selections differ in size, or if ours repeats an entry.
    """
    ours, theirs = (x[x >= 0].long() for x in (ours, theirs))
    if len(ours) != len(theirs) or len(ours.unique()) != len(ours):
        return float("inf")
    if not len(ours):
        return 0.0
    mine, other = (scores[x].sort().values for x in (ours, theirs))
    return float((mine - other).abs().max() / scores.abs().max())


# MiniMax M3


def of_m3(case: Case) -> tuple[float, float, float, float]:
    import torch

    step, home = Step(case, PAGE), "vllm.models.minimax_m3.common"
    keys = step.index_keys([length for _, length in case.lens], PAGE)
    attention: Any = importlib.import_module(f"{home}.sparse_attention")
    indexer: Any = importlib.import_module(f"{home}.indexer")
    ours: Any = importlib.import_module("ragged_attention.integrations._vllm_m3")
    specs: Any = importlib.import_module("vllm.v1.kv_cache_interface")
    config: Any = importlib.import_module("vllm.config")
    context: Any = importlib.import_module("vllm.forward_context")
    spec = specs.MLAAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=case.index_size, dtype=torch.bfloat16)
    builders = {
        "ours": (ours.RaggedM3Indexer, ours.RaggedM3Impl, ours.BlocksMetadataBuilder, ours.BlocksMetadataBuilder),
        "theirs": (
            indexer.MiniMaxM3IndexerTritonImpl, attention.MiniMaxM3SparseTritonImpl,
            attention.MiniMaxM3SparseMetadataBuilder, indexer.MiniMaxM3IndexerTritonMetadataBuilder,
        ),
    }  # fmt: skip
    handed = step.cache.view(torch.uint8) if case.is_8_bit else step.cache
    selected, results = {}, {}
    for side, (select, attend, builder, index_builder) in builders.items():
        buffer = torch.full((step.tokens, case.index_heads, case.top_k), -1, dtype=torch.int32)
        with config.set_current_vllm_config(step.config):
            selecting = select(
                num_kv_heads=case.index_heads, scale=1.0, topk_blocks=case.top_k, sparse_block_size=BLOCK,
                num_index_heads=case.index_heads, index_head_dim=case.index_size, prefix=side,
                local_blocks=case.local, topk_indices_buffer=buffer,
            )  # fmt: skip
        selecting.index_cache.kv_cache = keys
        impl = attend(
            *case.heads[:1], case.size, case.size**-0.5, case.heads[1], "fp8" if case.is_8_bit else "auto",
            topk_blocks=case.top_k, sparse_block_size=BLOCK,
        )  # fmt: skip
        layer = SimpleNamespace(
            layer_name=side, topk_indices_buffer=buffer, _k_scale=torch.tensor(step.scales[0]),
            _v_scale=torch.tensor(step.scales[1]),
        )  # fmt: skip
        metadata = {
            side: step.built(builder, spec, side),
            selecting.index_cache.prefix: step.built(index_builder, spec, side),
        }
        out = torch.full_like(step.q, torch.nan).flatten(1)
        with context.set_forward_context(metadata, step.config):
            selecting(step.index_q.flatten(1))
            impl.forward(layer, step.q.flatten(1), handed, out)
        selected[side], results[side] = buffer, out.view(step.q.shape)
    lists, rules, live = 0.0, {side: torch.zeros(step.q.shape, dtype=torch.float64) for side in builders}, []
    group = case.heads[0] // case.heads[1]
    for token, row, position in step.positions():
        if position < 0:
            continue  # padding of a graph; vLLM's kernels leave its results undefined
        live.append(token)
        at = torch.arange(position + 1)
        row_keys = keys[step.table[row, at // PAGE].long(), at % PAGE].double()
        for head in range(case.index_heads):
            products = row_keys @ step.index_q[token, head].double()
            scores = torch.stack([part.max() for part in products.split(BLOCK)])
            scores[-case.local :] = scores.max() + 1
            lists = max(lists, gap(selected["ours"][token, head], selected["theirs"][token, head], scores))
            for side, rule in rules.items():
                named = at[torch.isin(at // BLOCK, selected[side][token, head])]
                rule[token, head * group : (head + 1) * group] = step.attention(row, token, head, named)
    return (lists, *differences(results, rules, live))


# Qwen4


def of_qsa(case: Case) -> tuple[float, float, float, float]:
    import torch

    step, home = Step(case, TOKEN_PAGE), "vllm.models.qwen4_exp"
    keys = step.index_keys([length // RATIO for _, length in case.lens], TOKEN_PAGE // RATIO)
    kernels: Any = importlib.import_module(f"{home}.nvidia.ops.qsa")
    selects: Any = importlib.import_module(f"{home}.nvidia.ops.qsa_indexer")
    builder: Any = importlib.import_module(f"{home}.common.qsa_cache").QSAMetadataBuilder
    ours: Any = importlib.import_module("ragged_attention.integrations._vllm_qsa")
    specs: Any = importlib.import_module("vllm.v1.kv_cache_interface")
    selects._topk = top_k_of_torch
    spec = specs.MLAAttentionSpec(
        block_size=TOKEN_PAGE, num_kv_heads=1, head_size=case.index_size, dtype=step.index_q.dtype,
        tokens_per_state=RATIO,
    )  # fmt: skip
    metadata = step.built(builder, spec, "groups")
    decodes, prompts = metadata.num_decodes, metadata.num_decode_tokens
    visible, keys_of_groups = metadata.visible_blocks, keys.unsqueeze(2)
    halves = step.cache.transpose(1, 2).split(case.size, -1)
    gate = torch.randn_like(step.q)
    selected, results, lists = {}, {}, 0.0
    for side, home in (("ours", ours), ("theirs", selects)):
        groups = torch.full((step.tokens, case.top_k), -1, dtype=torch.int32)
        if prompts:
            home.qsa_select_paged_decode(
                step.index_q[:prompts], keys_of_groups, metadata.block_table[:decodes], visible[:prompts],
                case.top_k * RATIO, RATIO, metadata.decode_query_len, groups[:prompts],
            )  # fmt: skip
        if prompts < step.tokens:
            home.qsa_select_paged_prefill(
                step.index_q[prompts:], keys_of_groups, metadata.block_table[decodes:],
                metadata.query_start_loc[decodes:], visible[prompts:], case.top_k * RATIO, RATIO,
                metadata.max_query_len, groups[prompts:], metadata.max_seq_len,
            )  # fmt: skip
        named = torch.empty(step.tokens, (case.top_k + 1) * RATIO, dtype=torch.int32)
        selects.expand_qsa_block_indices(
            groups, metadata.logical_positions, visible, RATIO, case.top_k * RATIO, named
        )  # fmt: skip
        attend = (ours if side == "ours" else kernels).qsa_sparse_paged_attention
        results[side] = attend(
            step.q, *halves, named, metadata.block_table, metadata.token_to_req,
            metadata.max_query_len > 1 + case.drafts, k_scale=step.scales[0], v_scale=step.scales[1], output_gate=gate,
        )  # fmt: skip
        selected[side] = groups, named
    rules = {side: torch.zeros(step.q.shape, dtype=torch.float64) for side in results}
    group = case.heads[0] // case.heads[1]
    for token, row, position in step.positions():
        at = torch.arange((position + 1) // RATIO)
        row_keys = keys[step.table[row, at // (TOKEN_PAGE // RATIO)].long(), at % (TOKEN_PAGE // RATIO)].double()
        scores = (step.index_q[token].double() @ row_keys.T).relu().sum(0)
        lists = max(lists, gap(selected["ours"][0][token], selected["theirs"][0][token], scores))
        for side, rule in rules.items():
            line = selected[side][1][token, :-1].long()
            for head in range(case.heads[1]):
                part = slice(head * group, (head + 1) * group)
                rule[token, part] = step.attention(row, token, head, line[line >= 0])
    for rule in rules.values():
        rule *= gate.double().sigmoid()
    return (lists, *differences(results, rules, [*range(step.tokens)]))


def top_k_of_torch(
    logits: Any, visible_blocks: Any, token_topk: int, compress_ratio: int, block_indices: Any, workspace: Any
) -> None:
    """Write the top-k of the visible scores of each row, found by torch. It replaces vLLM's operator for GPUs."""
    import torch

    column = torch.arange(logits.shape[1])
    seen = logits.masked_fill(column >= visible_blocks[:, None], -torch.inf)
    best = seen.topk(min(token_topk // compress_ratio, logits.shape[1]))
    block_indices.fill_(-1)
    block_indices[:, : best.indices.shape[1]] = torch.where(best.values.isneginf(), -1, best.indices).int()


def differences(results: dict[str, Any], rules: dict[str, Any], rows: list[int]) -> tuple[float, float, float]:
    """The cosine differences (our results to the rule, vLLM's results to the rule, our results to vLLM's).

    For each side, the rule is float64 attention to the selection of that side.
    """
    ours, theirs = results["ours"][rows], results["theirs"][rows]
    difference = vllm_masks.cosine_difference
    return difference(ours, rules["ours"][rows]), difference(theirs, rules["theirs"][rows]), difference(ours, theirs)


def prepare() -> None:
    """Set up vLLM: Triton's interpreter, no images, one rank, and one of the tiles that vLLM's top-k tries on GPUs."""
    vllm_masks.use_interpreter()
    sys.modules[vllm_m3.PROCESSORS] = vllm_m3.without_images()
    kernels: Any = importlib.import_module("vllm.models.minimax_m3.common.ops.index_topk")
    for name, tile in (("_topk_index_kernel", 64), ("_topk_index_partial_kernel", 64)):
        tuned: Any = vars(kernels)[name]
        while not hasattr(tuned, "configs"):
            tuned = tuned.fn
        tuned.configs = [config for config in tuned.configs if config.kwargs["BLOCK_SIZE_K"] == tile]
    indexer: Any = importlib.import_module("vllm.models.minimax_m3.common.indexer")
    indexer.get_tensor_model_parallel_world_size = lambda: 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="only groups of cases whose name contains this")
    options = parser.parse_args(arguments)
    prepare()
    found: dict[str, list[Any]] = {}
    begin = time.perf_counter()
    for case in cases():
        if options.only in case.group:
            run = of_m3 if case.group.startswith("MiniMax") else of_qsa
            found.setdefault(case.group, []).append(run(case))
    table = Table("steps", "cases", "gap of lists", "ours to the rule", "vLLM's to the rule", "ours to vLLM's", "")
    failures = 0
    for group, measured in found.items():
        worst = np.max(measured, 0)  # NaN stays NaN
        right = bool((worst <= [SELECTED, ATTENDED, ATTENDED, ATTENDED]).all())
        failures += not right
        table.add_row(group, str(len(measured)), *(f"{each:.1e}" for each in worst), "agrees" if right else "DIFFERS")
    table.title = f"lists and largest cosine differences, {time.perf_counter() - begin:.0f} s"
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
