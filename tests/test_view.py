"""`ragged-attention view` shows what the kernels do: its programs, blocks and masks are those of the interpreter."""

import collections
import dataclasses
import importlib
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from ragged_attention import dispatch
from ragged_attention.explain import VIEWED
from ragged_attention.tools import cli, drawing, schedule, view
from ragged_attention.tools.gpus import GPUS
from ragged_attention.tools.samples import FakeArray, LatentSample, Sample

torch = pytest.importorskip("torch")
interpreter = pytest.importorskip("triton.runtime.interpreter")


def device(name: str = "cpu") -> Any:
    return view.device_named(name)


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def run_cli(capsys):
    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(("view", *arguments))
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


class Reads:
    """Records the cache slots that each program of the first KV head reads, and the launched grids."""

    def __init__(self) -> None:
        self.kernel = ""
        self.cache: tuple[int, int, int] = (0, 0, 1)  # the cache's first and end address, and the bytes of a slot
        self.slots: dict[Any, set[int]] = collections.defaultdict(set)
        self.grids: list[tuple[str, tuple[int, ...]]] = []

    def launched(self, kernel: str, grid: tuple[int, ...]) -> None:
        self.kernel = kernel
        self.grids.append((kernel, grid))

    def touched(self, program: Any, pointers: Any, mask: Any) -> None:
        addresses = pointers.data[mask.data]
        first, last, size = self.cache
        inside = addresses[(addresses >= first) & (addresses < last)]
        if inside.size and program[1] == 0:
            self.slots[self.kernel, program[0]].update(((inside - first) // size).tolist())


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    reads = Reads()
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, run = builder.create_masked_load, executor.__call__

    def seen_load(self: Any, pointers: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        reads.touched(self.grid_idx, pointers, mask)
        return load(self, pointers, mask, *rest, **more)

    def seen_run(self: Any, *arguments: Any, **more: Any) -> Any:
        reads.launched(self.fn.__name__, tuple(self.grid))
        return run(self, *arguments, **more)

    monkeypatch.setattr(builder, "create_masked_load", seen_load)
    monkeypatch.setattr(executor, "__call__", seen_run)
    return reads


def tensor(value: Any) -> Any:
    """An array as a tensor, other values unchanged. A `FakeArray`, which only has a shape, gets arbitrary values."""
    if not isinstance(value, FakeArray):
        return torch.from_numpy(value) if hasattr(value, "dtype") else value
    kind = getattr(torch, value.dtype)
    if kind == torch.bool:
        return torch.rand(value.shape) < 0.5
    return torch.randn(value.shape).to(kind) if kind.is_floating_point else torch.zeros(value.shape, dtype=kind)


def call_kernels(batch: view.Batch, tile: Any, reads: Reads) -> None:
    """Run a batch's operation in Triton's interpreter, and record in `reads` the cache slots that it reads."""
    front = importlib.import_module("ragged_attention.torch")
    arguments = {
        name: tensor(value) for name, value in (batch.sample.arguments(batch.operation) | batch.arrays()).items()
    }
    if isinstance(batch.sample, LatentSample) and batch.sample.topk:
        lists = torch.arange(arguments["indices"].shape[-1]).int()
        arguments["indices"] = lists.expand(arguments["indices"].shape).contiguous()
    if batch.scheduled:
        sample: Any = batch.sample
        arguments["schedule"] = front.make_decode_schedule(
            batch_size=len(batch.kv_lens),
            num_q_tokens=sample.num_q_tokens,
            num_q_heads=sample.num_q_heads,
            num_kv_heads=sample.num_kv_heads,
            kv_lens=arguments["kv_lens"],
            num_parts=NUM_PARTS,
        )
    cache = arguments["kv_pages" if "kv_pages" in arguments else "kv_cache"]
    slot = cache[0, 0].nbytes
    reads.cache = (cache.data_ptr(), cache.data_ptr() + cache.nbytes, slot)
    getattr(front, batch.operation)(**arguments, backend="triton", options=dataclasses.asdict(tile))


NUM_PARTS = 3
SMALL: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": 16}
MIXED = ((1, 40, 1, 7), (300, 200, 60, 100))


def paged(q_lens: Any, kv_lens: Any, mask: str | None = None, **more: Any) -> view.Batch:
    shapes: dict[str, Any] = {
        "num_tokens": sum(q_lens),
        "max_num_seqs": len(q_lens),
        "max_len": max(kv_lens),
        "max_q_len": max(q_lens),
    }
    sample = Sample(**(SMALL | shapes | more))
    return view.Batch(q_lens=q_lens, kv_lens=kv_lens, sample=sample, device=device(), mask=mask)


def latent(num_q: int, kv_lens: Any, scheduled: bool = False, **more: Any) -> view.Batch:
    shapes: dict[str, Any] = {"num_tokens": num_q * len(kv_lens), "max_num_seqs": len(kv_lens), "max_len": max(kv_lens)}
    small: dict[str, Any] = {
        "num_q_heads": 24,
        "cache_format": "plain",
        "d_qk": 48,
        "d_v": 32,
        "page_size": 16,
        "topk": 0,
    }
    sample = LatentSample(**(small | shapes | more))
    return view.Batch(
        q_lens=(num_q,) * len(kv_lens), kv_lens=kv_lens, sample=sample, device=device(), scheduled=scheduled
    )


BATCHES: dict[str, tuple[view.Batch, dict[str, Any]]] = {
    "splits": (paged((1, 1, 1), (1100, 40, 300)), {"num_splits": 6}),
    "one split each": (paged((1, 1), (300, 33)), {"num_splits": 1}),
    "segments as splits": (paged((1, 3), (2500, 33)), {"segment_kv": 1024}),
    "segments of a window": (paged((1, 40), (2500, 300), sliding_window=70), {"segment_kv": 64, "edge_kv": 64}),
    "segments of ranges": (paged(*MIXED, "prefix=70,40", key_ranges=2), {"segment_kv": 64, "split_block_q": 16}),
    "decode of few tokens": (paged((3, 1), (300, 33)), {"num_splits": 4, "split_block_q": 16}),
    "mixed": (paged(*MIXED), {"block_q": 16, "block_kv": 64, "edge_kv": 16, "split_weights_below": 50}),
    "mixed with care": (paged(*MIXED), {"block_q": 32, "block_kv": 32, "edge_kv": 32}),
    "window": (paged(*MIXED, sliding_window=70), {"block_q": 16, "edge_kv": 16, "split_weights_below": 0}),
    "draft": (paged((5, 40), (100, 200), draft=8), {"block_q": 16, "edge_kv": 16, "split_weights_below": 50}),
    "chunks": (paged(*MIXED, "chunk=64", key_ranges=1), {"block_q": 16, "edge_kv": 16, "split_weights_below": 0}),
    "a prefix beside a window": (
        paged(*MIXED, "prefix=70,40", key_ranges=2),
        {"block_q": 16, "edge_kv": 16, "split_weights_below": 0},
    ),
    "a span in splits": (paged((1, 4), (1100, 300), "span=90,900", key_ranges=1), {"num_splits": 6}),
    "a prefix in splits": (paged((1, 1), (1100, 300), "prefix=90,70", key_ranges=2), {"num_splits": 6}),
    "pages of 24": (paged((1, 20), (300, 50), page_size=24, head_dim=24), {"num_splits": 2, "block_q": 16}),
    "latent": (latent(1, (300, 40)), {"num_splits": 3}),
    "latent, causal": (latent(2, (300, 40), causal=True), {"num_splits": 2, "block_h": 16}),
    "latent, lists": (latent(2, (300, 40), topk=64), {"num_splits": 1, "block_h": 16}),
    "latent, scheduled": (latent(1, (300, 40), scheduled=True), {}),
}


@pytest.mark.parametrize("name", BATCHES)
def test_programs_read_the_keys_that_the_view_says(reads: Reads, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, changed = BATCHES[name]
    monkeypatch.setattr(view.MakeDecodeSchedule, "num_ranges", NUM_PARTS)
    call = batch.call()
    tile = dataclasses.replace(dispatch.load(batch.operation, "triton").heuristic(call), **changed)
    call_kernels(batch, tile, reads)
    launches = schedule.launches_of(call, tile)
    grids = [(launch.kernel, launch.grid) for launch in launches]
    padded = [(kernel, (*grid, 1, 1)[:3]) for kernel, grid in grids]
    assert [(kernel, (*grid, 1, 1)[:3]) for kernel, grid in reads.grids if kernel != "schedule_kernel"] == padded
    table = batch.table()
    size = batch.sample.page_size
    sparse = isinstance(batch.sample, LatentSample) and batch.sample.topk > 0
    found = {}
    for launch in launches:
        for program in launch.programs:
            found[launch.kernel, program.index] = program
    assert {key for key, slots in reads.slots.items() if slots} == {key for key, one in found.items() if one.visits}
    for key, program in found.items():
        pages = table[program.seq]
        own = {
            position if sparse else int(pages[position // size]) * size + position % size: position
            for position in range(batch.kv_lens[program.seq])
        }
        positions = {own[slot] for slot in reads.slots[key]}
        for visit in program.visits:
            for start in range(visit.start, visit.stop, visit.block):
                block = set(range(start, start + visit.block))
                assert positions & block, "the kernel reads no key of a shown block"
                assert visit.masked or block <= positions
                positions -= block
        assert not positions


def test_the_kernels_of_a_case_have_work_for_as_many_programs_as_the_roofline_says() -> None:
    """The numbers of working programs equal the roofline's, which test_roofline compares with the interpreter."""
    roofline = importlib.import_module("benchmarks.roofline")
    catalogue = importlib.import_module("benchmarks.cases.catalogue")
    hopper = device("h200")
    for name in ("decode_63x1k_1x128k", "mixed_2q2k_32q1s1k", "gpt_oss_window_64x4k", "prefill_2k"):
        case = catalogue.find(name)
        batch = view.Batch(q_lens=case.q_lens, kv_lens=case.kv_lens, sample=case, device=hopper)
        found = {launch.kernel: launch for launch in batch.launches()}
        plan = roofline.plan_of(case, "triton", hopper)
        working = {name: launch.working for name, launch in found.items() if name != "combine_kernel"}
        assert working == {one.name: one.working for one in plan.launches if one.name != "combine_kernel"}
        for step in roofline.steps(case, "triton", hopper):
            if step.name == "split_kernel":
                assert found[step.name].longest == step.longest * 64


def test_a_timeline_gives_each_program_to_the_multiprocessor_that_is_free_first() -> None:
    visits = [(schedule.Visit(0, keys, 1, False),) for keys in (5, 3, 1, 4)]
    programs = tuple(schedule.Program(index, 0, (0, 0), visit) for index, visit in enumerate(visits))
    turns = schedule.timeline(schedule.Launch("kernel", (4, 1), programs), lanes=2)
    assert [(turn.lane, turn.start, turn.stop) for turn in turns] == [(0, 0, 5), (1, 0, 3), (1, 3, 4), (1, 4, 8)]
    assert schedule.filled(turns, 2) == pytest.approx(13 / 16)


def test_one_long_sequence_is_shown_in_parts(run_cli, tmp_path) -> None:
    """63 sequences of 16 blocks and one of 2048 blocks share 132 programs per KV head.

    A block has 64 keys, and a program has at most 24 blocks.
    """
    picture = tmp_path / "batch.svg"
    code, out, err = run_cli(
        "--q-lens", "64x1", "--kv-lens", "63x1024,131072", "--device", "h200", "--svg", str(picture)
    )
    assert (code, err) == (0, "")
    assert "sequences: 64, tokens: 64, 32/8 heads, on NVIDIA H200" in out
    assert re.search(r"│ 0 - 62 +│ +1 │ +1024 │ +64 │ +0 │ split 1 +│", out)
    assert re.search(r"│ 63 +│ +1 │ +131072 │ +8192 │ +0 │ split 86 +│", out)
    assert re.search(r"│ split +│ .* │ 1192 of \d+ │ 1536 keys │ █+.* 12288 keys, 96% filled", out)
    root = ElementTree.parse(picture).getroot()
    assert [root[0].tag.rpartition("}")[2], root[1].tag.rpartition("}")[2]] == ["title", "desc"]
    assert picture.stat().st_size < 30_000


def test_masks_and_pages_in_the_terminal(run_cli) -> None:
    code, out, _ = run_cli("--q-lens", "1,512", "--kv-lens", "37,2048", "--device", "h200", "--window", "1500")
    assert code == 0
    assert (
        "pages of 16: 131; 2085 of 2096 slots are used (99%); padded to the longest sequence they would be 4096" in out
    )
    first, *_, last = [line for line in out.splitlines() if "│ tile" in line and "tokens" in line]
    assert re.search(r"tokens 0 - 31 .*│ ·▒+█+▒+·+ │", first)
    assert re.search(r"tokens 480 - 511 .*│ ·+▒+█+▒+ │", last)


def test_masks_as_ranges_in_the_terminal(run_cli) -> None:
    code, out, _ = run_cli("--q-lens", "512", "--kv-lens", "2048", "--device", "h200", "--mask", "prefix=256,300")
    assert code == 0
    first, *_, last = [line for line in out.splitlines() if "│ tile" in line and "tokens" in line]
    assert re.search(r"tokens 0 - 31 .*│ ▒+·+▒+·+ │", first)
    assert re.search(r"tokens 480 - 511 .*│ ▒+·+▒+ │", last)


@pytest.mark.parametrize(
    "more", [[], ["--schedule"], ["--topk", "2048", "--cache-format", "fp8_v4", "--heads", "64/1"]]
)
def test_splits_of_latents(run_cli, more) -> None:
    lengths = ["--q-lens", "4x1", "--kv-lens", "1000,3x5000"]
    code, out, err = run_cli("--operation", "mla_decode", "--device", "h200", *lengths, *more)
    assert (code, err) == (0, "")
    assert re.search(r"│ latent +│ \d+ x 1 +│ \d+ of \d+", out)
    assert "Keys of sequence 1" in out


def test_rows_with_scales(run_cli) -> None:
    code, out, err = run_cli("--q-lens", "1,1", "--kv-lens", "700,30", "--device", "h200", "--kv-format", "nvfp4")
    assert (code, err) == (0, "")
    assert re.search(r"│ split +│ \d+ x 8", out)


@pytest.mark.parametrize("name", [*GPUS, "sm_89"])
def test_every_device(run_cli, name) -> None:
    code, out, err = run_cli("--q-lens", "1,30", "--kv-lens", "700,30", "--device", name)
    assert (code, err) == (0, "")
    assert f"on {GPUS[name][1] if name in GPUS else name}" in out


@pytest.mark.parametrize("operation", VIEWED)
def test_a_sample_batch_without_lengths(run_cli, operation) -> None:
    code, out, err = run_cli("--operation", operation)
    assert (code, err) == (0, "")
    first, _, rest = out.partition("\n")
    assert re.fullmatch(r"This is a sample batch\. Show another one by --q-lens \S+ --kv-lens \S+", first)
    code, again, _ = run_cli("--operation", operation, *first.partition(" by ")[2].split())
    assert (code, again) == (0, rest)


def test_short_names_of_dtypes(run_cli) -> None:
    lengths = ("--q-lens", "1,30", "--kv-lens", "700,30", "--device", "h200")
    short, full = (("f16", "fp8"), ("float16", "float8_e4m3fn"))
    said = [run_cli(*lengths, "--dtype", dtype, "--cache-dtype", cache) for dtype, cache in (short, full)]
    assert said[0] == said[1]
    assert said[0][0] == 0


MISTAKES = {
    "--q-lens 1,x --kv-lens 1,2": "expected lengths such as 1,1,512 or 63x1,512, got '1,x'",
    "--q-lens 1 --kv-lens 1,2": "expected as many --kv-lens as --q-lens, 1, got 2",
    "--q-lens 3 --kv-lens 2": "expected 1 <= q_len <= kv_len=2 of sequence 0, got 3",
    "--q-lens 0 --kv-lens 2": "expected 1 <= q_len <= kv_len=2 of sequence 0, got 0",
    "--q-lens 1 --kv-lens 2 --page-size 0": "argument --page-size: expected a whole number >= 1, got '0'",
    "--q-lens 1 --kv-lens 2 --heads a": "expected heads such as 32/8, got 'a'",
    "--q-lens 1 --kv-lens 2 --sequence 1": "expected --sequence from 0 to 0, got 1",
    "--q-lens 1 --kv-lens 2 --topk 3": "expected no --topk of ragged_paged_attention, got one",
    "--q-lens 1 --kv-lens 2 --operation mla_decode --window 3": "expected no --sliding-window of mla_decode, got one",
    "--q-lens 1 --kv-lens 2 --operation mla_decode --kv-format mxfp4": "expected no --kv-format of mla_decode, got one",
    "--q-lens 1 --kv-lens 2 --mask chunk": "expected a mask of the form chunk=SIZE or block=SIZE or sides=LEFT,RIGHT",
    "--q-lens 1 --kv-lens 2 --mask sides=3": "span=BEGIN,END, got 'sides=3'",
    "--q-lens 1 --kv-lens 2 --mask tree=3": "got 'tree=3'",
    "--q-lens 1 --kv-lens 2 --mask chunk=0": "expected chunk >= 1, got 0",
    "--q-lens 1 --kv-lens 2 --mask chunk=3 --window 2": "expected sliding_window at its default, None, with key_ranges",
    "--q-lens 1 --kv-lens 2 --operation mla_decode --mask chunk=3": "expected no --mask of mla_decode, got one",
    "--q-lens 1,2 --kv-lens 2,2 --operation mla_decode": "expected --q-lens of mla_decode to be all the same",
    "--q-lens 1 --kv-lens 2 --device tpu": "expected device to be a GPU of NVIDIA or AMD, or cpu, got 'tpu'",
    "--q-lens 1 --kv-lens 2 --device sm_75": "triton: expected sm_80 or newer, got sm_75",
    "--q-lens 1 --kv-lens 2 --device here": "expected device to be",
    "--q-lens 1 --kv-lens 2 --heads 7/2": "to be a multiple of num_kv_heads = kv_pages.shape[2] / 2 = 2, got 7",
    "--q-lens 0x1 --kv-lens 1": "expected lengths such as 1,1,512 or 63x1,512, got '0x1'",
    "--q-lens 9x1 --kv-lens 9x900000000": "expected page tables of at most 67108864 entries, got 506250000",
    "--q-lens 1 --kv-lens 2 --dtype float99": "argument --dtype: expected a dtype, one of bfloat16 (bf16), float16",
    "--q-lens 1 --kv-lens 2 --heads 8/0": "expected heads such as 32/8, got '8/0'",
    "--q-lens 1": "expected --kv-lens with --q-lens, one number for each sequence, got none",
    "--kv-lens 1": "expected --q-lens with --kv-lens, one number for each sequence, got none",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistakes_are_named(run_cli, arguments) -> None:
    code, out, err = run_cli(*arguments.split())
    assert (code, out) == (2, "")
    assert MISTAKES[arguments] in err
    assert "Traceback" not in err


def test_a_picture_that_cannot_be_written_is_a_mistake(run_cli, tmp_path) -> None:
    code, _, err = run_cli("--q-lens", "1", "--kv-lens", "2", "--svg", str(tmp_path / "missing" / "a.svg"))
    assert code == 2
    assert "expected --svg to name a file to write, got " in err


def test_explain_points_here() -> None:
    explain = importlib.import_module("ragged_attention.explain")
    sample = {operation: (Sample() if operation == VIEWED[0] else LatentSample()) for operation in VIEWED}
    for operation, one in sample.items():
        assert "`ragged-attention view`" in explain.explanation(one.call(operation, device()))
    assert "view" not in explain.explanation(Sample().call("write_kv_pages", device()))


def test_rows_that_are_alike_are_shown_once() -> None:
    assert drawing.runs([(1, 5), (1, 5), (2, 5), (1, 5)]) == [(0, 1), (2, 2), (3, 3)]
    assert drawing.evenly(range(10), 4) == [0, 3, 6, 9]
