"""The kernels do what their plans say: loads, stores and products are counted while Triton interprets the kernels."""

import collections
import dataclasses
import importlib
from typing import Any

import pytest

from benchmarks import roofline
from benchmarks.cases import catalogue
from benchmarks.cases.base import K
from benchmarks.cases.paged import PagedCase
from benchmarks.roofline import __main__ as roofline_table
from benchmarks.roofline.model import H200, Machine, Work
from ragged_attention import dispatch
from ragged_attention.tools.samples import device_of

torch = pytest.importorskip("torch")
interpreter = pytest.importorskip("triton.runtime.interpreter")

HOPPER = device_of("torch", "sm_90")
KEYS = ("k_ptr", "v_ptr", "cache_ptr", "extra_cache_ptr")
ROWS = ("q_ptr", "out_ptr", "parts_ptr")


class Counter:
    """Counts the bytes and operations of each kernel. Repeated products are counted in `flops`, so `again` is 0."""

    def __init__(self) -> None:
        self.kernel = ""
        self.arrays: list[tuple[int, int, str]] = []
        self.work: dict[str, Work] = collections.defaultdict(Work)
        self.products: dict[str, collections.Counter[Any]] = collections.defaultdict(collections.Counter)

    def launched(self, kernel: str, arguments: dict[str, Any]) -> None:
        self.kernel = kernel
        tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        self.arrays = [(array.data_ptr(), array.nbytes, name) for name, array in tensors.items()]

    def touched(self, pointers: Any, mask: Any) -> None:
        addresses = pointers.data[mask.data]
        if addresses.size == 0:
            return
        address, size = int(addresses.flat[0]), pointers.get_element_ty().primitive_bitwidth // 8
        names = {name for start, nbytes, name in self.arrays if start <= address < start + nbytes}
        if names & set(KEYS):
            self.work[self.kernel] += Work(keys=addresses.size * size)
        elif names & set(ROWS):
            self.work[self.kernel] += Work(rows=addresses.size * size)

    def multiplied(self, program: Any, a: Any, b: Any) -> None:
        (rows, inner), columns = a.data.shape, b.data.shape[1]
        self.work[self.kernel] += Work(flops=2 * rows * inner * columns)
        self.products[self.kernel][program] += 1


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter()
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, dot, run = (
        builder.create_masked_load, builder.create_masked_store, builder.create_dot, executor.__call__,
    )  # fmt: skip

    def counted_load(self: Any, pointers: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        counter.touched(pointers, mask)
        return load(self, pointers, mask, *rest, **more)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        counter.touched(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def counted_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        counter.multiplied(self.grid_idx, a, b)
        return dot(self, a, b, *rest)

    def counted_run(self: Any, *arguments: Any, **more: Any) -> Any:
        counter.launched(self.fn.__name__, dict(zip(self.arg_names, arguments, strict=False)) | more)
        return run(self, *arguments, **more)

    monkeypatch.setattr(builder, "create_masked_load", counted_load)
    monkeypatch.setattr(builder, "create_masked_store", counted_store)
    monkeypatch.setattr(builder, "create_dot", counted_dot)
    monkeypatch.setattr(executor, "__call__", counted_run)
    return counter


def of_model(case: Any, tile: Any) -> dict[str, Work]:
    return {step.name: step.work for step in roofline.steps(case, "triton", HOPPER, H200, tile)}


# For each case the length to which it is scaled down, and changes to the tile of the full case on a Hopper GPU.
SMALL: list[tuple[str, int, dict[str, int]]] = [
    ("decode_64x4k", 600, {"num_splits": 4}),
    ("gpt_oss_window_64x4k", 600, {}),
    ("gpt_oss_prefill_4k", 300, {"split_weights_below": 5}),
    ("mixed_2q2k_32q1s1k", 200, {"split_weights_below": 100}),
    ("gemma2_prefill_4k", 150, {"split_weights_below": 70}),
    ("fp8_prefill_4k", 100, {}),
    ("phi_head_80_mixed", 100, {}),
    ("mla_dense_h128_128q2s4k", 150, {}),
    ("mla_dense_h16_1x32k", 600, {}),
    ("mla_dense_fp8_h128_128x4k", 100, {}),
    ("mla_sparse_h16_b8", 700, {}),
    ("mla_sparse_v4_h64_128q2", 200, {}),
    ("mla_prefill_h16_32k", 200, {}),
    ("mla_ragged_h16_64x4k", 300, {"num_splits": 4}),
    ("mla_ragged_mixed", 150, {"num_splits": 8}),
    ("mla_prefill_fp8_h128_32k", 200, {}),
    ("mla_prefill_v4_h64_32k", 200, {}),
]


@pytest.mark.parametrize(("name", "length", "changed"), SMALL, ids=[name for name, _, _ in SMALL])
def test_the_model_counts_what_the_kernels_do(
    counter: Counter, name: str, length: int, changed: dict[str, int]
) -> None:
    whole = catalogue.find(name)
    call = whole.attention_call(HOPPER)
    tile = dataclasses.replace(dispatch.load(call.OPERATION, "triton").heuristic(call), **changed)
    case = whole.scaled_down(length=length, sequences=2)
    run = getattr(importlib.import_module("ragged_attention.torch"), case.operation)
    run(**case.torch_inputs(), backend="triton", options=dataclasses.asdict(tile))
    found = {step.name: step.work for step in roofline.steps(case, "triton", HOPPER, tile=tile)}
    want = {name: dataclasses.replace(work, flops=work.flops + work.again, again=0) for name, work in found.items()}
    assert {name: counter.work[name] for name in want} == want
    assert [name for name, work in counter.work.items() if work != Work() and name not in want] == []
    # The plan has the right number of programs with keys, and the right share of the products for each.
    for step in roofline.steps(case, "triton", HOPPER, tile=tile):
        if step.turns and len(step.programs) > 1 and step.name != "tile_kernel":  # it has loops of two costs
            shares = sorted(counter.products[step.name].values())
            turns = sorted(sum(each) for each, number in step.programs.items() for _ in range(number))
            assert [share / shares[-1] for share in shares] == pytest.approx([turn / turns[-1] for turn in turns])
        elif step.turns:
            assert len(counter.products[step.name]) == step.working


# Cases whose floor even the fastest plan exceeds by a tenth or more, and the reasons.
PARTS = "its parts, which let every multiprocessor read keys, are as many bytes as the keys; all is done in 6 us"
IN_EXCESS = {
    "gemma4_global_prefill_4k": "32 rows per program: an output of 512 columns for more rows fills the registers",
    **dict.fromkeys((f"mla_sparse_h{heads}_b{batch}" for heads in (8, 16, 32) for batch in (1, 8)), PARTS),
    "indexer_decode_64q2s32k": "both tokens of a sequence read its keys",
    "indexer_prefill_4k": "logits are written, and read four times to choose among them",
}
TOO_WIDE = "gemma4_global_prefill_4k"
SHORT = 5e-6  # in seconds; below this floor, launches and waits take more time than reading


@pytest.fixture(scope="module")
def best() -> dict[str, roofline.Plan]:
    """The fastest plan of each case."""
    found: dict[str, roofline.Plan] = {}
    for plan in roofline.plans(catalogue.CASES.values(), HOPPER):
        name = plan.case.name
        if name not in found or plan.least < found[name].least:
            found[name] = plan
    return found


@pytest.mark.parametrize("workload", [f"W{number}" for number in range(1, 13)])
def test_workloads_exceed_their_floor_by_less_than_a_tenth(best: dict[str, roofline.Plan], workload: str) -> None:
    """A workload's cases together exceed their floor by less than a tenth.

    Short cases are left out, and so is TOO_WIDE, because no tile with enough rows can hold its heads.
    """
    own = [plan for plan in best.values() if plan.case.workload == workload]
    plans = [plan for plan in own if plan.floor > SHORT and plan.case.name != TOO_WIDE]
    assert sum(plan.least for plan in plans) < 1.1 * sum(plan.floor for plan in plans)


def test_it_is_known_which_cases_exceed_it_by_more_and_why(best: dict[str, roofline.Plan]) -> None:
    assert {name for name, plan in best.items() if plan.excess >= 0.1} == set(IN_EXCESS)


def test_a_plan_by_hand() -> None:
    """A plan for two decodes over 300 keys in blocks of 64 equals a count by hand.

    Tiles have 16 rows, of which 4 are used, and weights have two terms. Four programs share ten blocks, and a split has
    at least four blocks. So each sequence has two splits.
    """
    case = PagedCase(
        name="-", workload="-", q_lens=(1, 1), kv_lens=(300, 300), num_q_heads=8, num_kv_heads=2, head_dim=64
    )
    tile = dispatch.load(case.operation, "triton").Tile(num_splits=4)
    split, combined = roofline.steps(case, "triton", HOPPER, tile=tile)
    assert split.work.flops == 2 * 2 * 2 * 16 * 320 * (64 + 64)
    assert split.work.again == split.work.flops // 2
    assert split.work.keys == 2 * 2 * 300 * 2 * 64 * 2
    assert split.work.rows == 2 * 2 * 4 * (2 * 64 * 2 + 2 * 64 * 4)
    assert combined.work == Work(rows=2 * 2 * 4 * (2 * 64 * 4 + 64 * 2))
    times = split.times(Machine(memory=1.0, cache=2.0, cache_size=0, multiplying=4.0), exact=True)
    assert times["memory"] == case.needed_bytes()
    assert times["cache"] == (split.work.keys + split.work.rows) / 2
    assert times["arithmetic"] == split.work.flops * 1.5 / 4


def test_masked_blocks_are_counted_in_the_loop_that_visits_them() -> None:
    """Masked blocks are counted for the loop that visits them, for an 8-bit cache and for a tree of drafts.

    With the 8-bit cache, programs have 32 queries, blocks of 64 keys, and masked blocks of 32 keys at the diagonal.
    """
    (prefill,) = roofline.steps(catalogue.find("fp8_prefill_4k"), "triton", HOPPER)
    diagonal = [-(-(32 * block + 32 - (32 * block + 1) // 64 * 64) // 32) for block in range(4 * K // 32)]
    assert prefill.turns[1] == 8 * sum(diagonal)
    split, _ = roofline.steps(catalogue.find("speculative_tree_64q4s4k"), "triton", HOPPER)
    assert split.turns[1] == 64 * 8  # the last block of each sequence, in each KV head


def test_the_launches_of_a_plan() -> None:
    """The numbers of working programs of a decode and of a prefill equal counts by hand."""
    plan = roofline.plan_of(catalogue.find("decode_64x4k"), "triton", HOPPER)
    found = {launch.name: (launch.working, launch.programs) for launch in plan.launches}
    assert found["split_kernel"] == (64 * 2 * 8, (64 + 132 + 64 * 4 // 16) * 8)
    assert found["combine_kernel"][0] == 64 * 32
    assert all(working <= programs for working, programs in found.values())
    prefill = roofline.plan_of(catalogue.find("prefill_4k"), "triton", HOPPER)
    assert {launch.name: launch.working for launch in prefill.launches}["tile_kernel"] == 4 * K * 4 // 128 * 8
    assert roofline.plan_of(catalogue.find("mla_sparse_h16_b8"), "cuda", HOPPER).launches == ()


# Kernels that are launched but never have work in such batches. Remove a kernel here if it is no longer launched.
LAUNCHED_IN_VAIN = {"decode": set(), "prefill": {"split_kernel", "combine_kernel"}}
MOST_LAUNCHES = {"decode": 2, "prefill": 3}


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_it_is_known_which_kernels_are_launched_in_vain(kind: str) -> None:
    every = [
        case for case in catalogue.paged.CASES.values() if all((n <= 8) == (kind == "decode") for n in case.q_lens)
    ]
    plans = [roofline.plan_of(case, "triton", HOPPER) for case in every]
    idle = {launch.name for plan in plans for launch in plan.launches if not launch.working}
    assert idle == LAUNCHED_IN_VAIN[kind]
    assert max(len(plan.launches) for plan in plans) == MOST_LAUNCHES[kind]


# The largest allowed ratio of one program's keys to the average. The rest of the GPU waits for that program.
MOST_SKEW = 2.5


def test_no_batch_is_skewed(best: dict[str, roofline.Plan]) -> None:
    assert {name for name, plan in best.items() if plan.skew > MOST_SKEW} == set()


def test_one_long_sequence_among_short_ones_is_cut_in_parts() -> None:
    """63 sequences of 16 blocks and one of 2048 blocks share 132 programs per KV head.

    A block has 64 keys, and a program has at most 24 blocks.
    """
    case = catalogue.find("decode_63x1k_1x128k")
    step = next(roofline.steps(case, "triton", HOPPER))
    assert dict(step.programs) == {(16.0, 0.0): 63 * 8, (24.0, 0.0): 85 * 8, (8.0, 0.0): 8}
    assert (step.working, step.longest) == ((63 + 86) * 8, 24.0)
    assert step.skew == pytest.approx(24 * (63 + 86) / (63 * 16 + 2048))
    whole = dispatch.load(case.operation, "triton").Tile(num_splits=1)
    step = next(roofline.steps(case, "triton", HOPPER, tile=whole))
    assert dict(step.programs) == {(16.0, 0.0): 63 * 8, (2048.0, 0.0): 8}
    even = next(roofline.steps(catalogue.find("decode_64x4k"), "triton", HOPPER))
    assert even.skew == 1


def test_rows_that_the_cache_has_lost_come_again() -> None:
    case = catalogue.find("mla_prefill_h128_128k")
    (step,) = roofline.steps(case, "cuda", HOPPER)
    rows = 128 * K * 1152
    read = 4 * K * 2 * K * 1152  # bytes read by one of each token's two programs
    assert step.work.keys == 2 * read
    assert step.fetched == pytest.approx(case.needed_bytes() + (read - rows) * (1 - H200.cache_size / rows))
    (step,) = roofline.steps(catalogue.find("mla_prefill_h128_8k"), "cuda", HOPPER)
    assert step.fetched == catalogue.find("mla_prefill_h128_8k").needed_bytes()


def test_the_table_has_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert roofline_table.main([]) == 0
    lines = [line.split(" | ") for line in capsys.readouterr().out.strip().splitlines()[2:]]
    listed = {(line[1], line[2]) for line in lines}
    paged, latent = catalogue.paged.CASES, catalogue.mla.CASES
    assert listed >= {(name, "triton") for name in paged | latent}
    assert ("mla_sparse_h128_128q2", "cuda") in listed
    assert ("mla_sparse_v4_h64_128q2", "cuda") in listed  # two caches
    assert all(float(least) >= float(floor) for _, _, _, floor, least, *_ in lines)
