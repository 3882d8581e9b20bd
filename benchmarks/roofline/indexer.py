"""The launches of the lightning indexer and their work: the logits, then the selection of the largest logits."""

import collections
from collections.abc import Iterator
from typing import Any

from benchmarks.cases.indexer import IndexerCase
from benchmarks.compiled import compiling
from benchmarks.roofline.model import KernelArgs, Machine, Programs, Step, Work, cdiv
from ragged_attention.calls import Device

PASSES = 4  # passes over a row of logits in a selection: range, histogram, candidates, result


def seen(case: IndexerCase, token: int) -> int:
    """The number of keys that a query token sees. `token` is its index among the sequence's query tokens."""
    return max(case.max_len - case.num_q_tokens + token + 1, 0)


def walked(case: IndexerCase, arguments: KernelArgs) -> tuple[Work, Programs]:
    """The work and programs of a kernel in which each program visits one part of a token's keys."""
    block, parts, least = arguments["BLOCK_N"], arguments["num_parts"], 4
    work, programs = Work(), collections.Counter[tuple[float, ...]]()
    for token in range(case.num_q_tokens):
        keys = seen(case, token)
        blocks = cdiv(keys, block)
        each = max(cdiv(blocks, parts), least)
        for part in range(cdiv(blocks, each)):
            programs[(float(min(each, blocks - part * each)),)] += case.max_num_seqs
        work += token_work(case, arguments, blocks * block, keys) + Work(keys=keys * case.key_bytes)
    return work * case.max_num_seqs, programs


def tiled(case: IndexerCase, arguments: KernelArgs) -> tuple[Work, Programs]:
    """The work and programs of a kernel in which each program visits a block of tokens for one block of keys."""
    block, tokens = arguments["BLOCK_N"], arguments["BLOCK_T"]
    work, programs = Work(), collections.Counter[tuple[float, ...]]()
    for first in range(0, case.num_q_tokens, tokens):
        count = min(tokens, case.num_q_tokens - first)
        keys = seen(case, first + count - 1)
        blocks = cdiv(keys, block)
        programs[(float(count),)] += blocks * case.max_num_seqs
        each = token_work(case, arguments, block, block)
        work += each * (count * blocks) + Work(keys=keys * case.key_bytes)
    return work * case.max_num_seqs, programs


def token_work(case: IndexerCase, arguments: KernelArgs, multiplied: int, written: int) -> Work:
    """The work of one token that computes logits for `multiplied` keys and stores `written` of them."""
    heads = cdiv(case.num_q_heads, arguments["BLOCK_H"]) * arguments["BLOCK_H"]
    columns = cdiv(case.head_dim, arguments["BLOCK_D"]) * arguments["BLOCK_D"]
    flops = 2 * multiplied * heads * columns
    # 8-bit operations count half, because the machine's rate is that of 16-bit products, and 8-bit products are twice
    # as fast.
    flops //= 2 if arguments["Q_FORMAT"] == "e4m3_units" else 1
    queries = case.num_q_heads * (case.head_dim * compiling.ITEMSIZE[case.dtype] + 4)
    return Work(flops=flops, rows=queries + 4 * written)


def planned(case: IndexerCase, device: Device) -> tuple[str, ...]:
    del device
    return () if case.packed or case.candidate_blocks else ("triton",)


def steps(case: IndexerCase, backend: str, device: Device, machine: Machine, tile: Any) -> Iterator[Step]:
    launches = {launch.name: launch for launch in compiling.record(case.attention_call(device), tile)}
    floor, _ = case.floor_seconds(machine.memory, machine.multiplying)
    name = next(name for name in launches if name.endswith("logits_kernel"))
    work, programs = (walked if name.startswith("walk") else tiled)(case, launches[name].constants)
    yield Step(name, work, case.needed_bytes(), floor, programs)
    selection = Work(rows=4 * PASSES * case.visible_pairs() + 4 * case.num_tokens * case.top_k)
    yield Step("select_kernel", selection, programs={(): case.num_tokens})
