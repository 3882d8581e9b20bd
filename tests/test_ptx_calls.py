"""Compiled Triton kernels in the PTX emulator, on a CPU: calls of every kernel of ours, and kernels of others.

In the process of the tests, Triton interprets kernels and cannot be switched. So the calls run in a separate process
for each architecture, in which Triton compiles. There this file is a script, which runs the checks that it is given.
"""

import importlib
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

triton = pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import triton.language as tl  # noqa: E402

from ragged_attention import dispatch  # noqa: E402
from ragged_attention.errors import InvalidInput  # noqa: E402
from ragged_attention.testing import conformance, ptx, ptx_runner, suite, worker  # noqa: E402
from ragged_attention.testing.drawing import Check  # noqa: E402
from ragged_attention.testing.mla.oracle import check_decode, check_prefill  # noqa: E402
from ragged_attention.testing.mla.specs import DecodeSpec, PrefillSpec  # noqa: E402
from ragged_attention.testing.paged.specs import Spec  # noqa: E402
from ragged_attention.testing.paged.updates import check_update  # noqa: E402
from ragged_attention.testing.ptx_runner import CompiledRunner  # noqa: E402
from ragged_attention.testing.runner import ANSWERED, Runner  # noqa: E402
from ragged_attention.testing.selected import Selection  # noqa: E402
from ragged_attention.testing.suite import check_attention  # noqa: E402
from ragged_attention.testing.varlen.gradients import GradientSpec  # noqa: E402
from ragged_attention.testing.varlen.oracle import check_gradients, check_varlen  # noqa: E402
from ragged_attention.testing.varlen.specs import VarlenSpec  # noqa: E402
from ragged_attention.testing.verdicts import verdict_of  # noqa: E402
from tests import partial_backend  # noqa: E402
from tests.processes import printed  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "ragged_attention.kernels_triton"
SEEDS = {"sm_80": None, "sm_90": 1}  # for each architecture, the seed of the order in which warps run
COMPILING = {
    "TRITON_INTERPRET": "0",
    "TRITON_DEFAULT_FP_FUSION": "1",  # Triton's default, set here to silence its warning
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
}

# ---- calls of our kernels, at the tiles of GPUs

SERVED: dict[str, Any] = {"page_size": 16, "num_kv_heads": 2, "group": 4, "head_dim": 64, "dtype": "bfloat16"}
SMALLER: dict[str, Any] = SERVED | {"head_dim": 32, "group": 2}
SPECS: dict[str, tuple[Callable[[Runner, Any], None], Any]] = {
    "decode and prefill": (check_attention, Spec(lens=((1, 40), (1, 300), (20, 150)), **SERVED)),
    "float8 cache": (
        check_attention,
        Spec(lens=((20, 90), (1, 100)), cache_dtype="float8_e4m3fn", scales="heads", **SERVED),
    ),
    "draft mask, window, sinks, soft cap": (
        check_attention,
        Spec(lens=((6, 90), (1, 70)), draft=8, sliding_window=33, sinks="normal", soft_cap=5.0, **SMALLER),
    ),
    "new keys, int8 cache": (
        check_update,
        Spec(lens=((5, 40), (1, 20)), cache_dtype="int8", scales="float", **SMALLER),
    ),
    "packed": (check_varlen, VarlenSpec(lens=((70, 150), (1, 65)), d=64, d_v=64, causal=True, dtype="bfloat16")),
    "ranges of keys, causal and spans": (
        check_attention,
        Spec(lens=((1, 40), (1, 300), (20, 150)), ranges="spans", poison="nan", **SMALLER),
    ),
    "ranges of keys, with gaps": (
        check_attention,
        Spec(lens=((3, 60), (12, 90)), ranges="few", poison="nan", **SMALLER),
    ),
    "packed, ranges of keys": (
        check_varlen,
        VarlenSpec(lens=((70, 150), (1, 65)), d=64, d_v=64, ranges="prefix", poison="nan", dtype="bfloat16"),
    ),
    "lists of blocks, joined": (
        check_attention,
        Spec(lens=((40, 150), (1, 90)), selection=Selection(kind="own", size=8, length=5), poison="nan", **SMALLER),
    ),
    "lists of blocks, splits": (
        check_attention,
        Spec(lens=((1, 900), (1, 300)), selection=Selection(kind="own", size=16, length=40), poison="nan", **SMALLER),
    ),
    "packed gradient, lists of blocks": (
        check_gradients,
        GradientSpec(
            of=VarlenSpec(
                lens=((40, 70), (3, 20)), d=32, d_v=32, selection=Selection(kind="own", size=8, length=3), poison="nan",
                causal=True, dtype="bfloat16",
            )
        ),
    ),
    "packed gradient, ranges of keys": (
        check_gradients,
        GradientSpec(of=VarlenSpec(lens=((40, 70),), d=32, d_v=32, ranges="few", poison="nan", dtype="bfloat16")),
    ),
    "packed gradient": (
        check_gradients,
        GradientSpec(of=VarlenSpec(lens=((40, 70), (3, 9)), d=64, d_v=64, group=2, sinks="normal", dtype="bfloat16")),
    ),
    # "shared" is one table of 12 columns. The next case has a table of 40 columns for each query.
    "packed gradient, a relative bias": (
        check_gradients,
        GradientSpec(
            of=VarlenSpec(lens=((40, 70), (3, 9)), d=32, d_v=32, group=2, bias="shared", dtype="bfloat16", seed=3)
        ),
    ),
    "packed gradient, a relative bias of each query": (
        check_gradients,
        GradientSpec(
            of=VarlenSpec(lens=((40, 70), (9, 3)), d=32, d_v=32, bias="own", causal=True, dtype="bfloat16", seed=1)
        ),
    ),
    "latents, dense": (
        check_decode,
        DecodeSpec(topk=0, kv_lens=(100, 30), page_size=64, heads=16, d_qk=576, d_v=512, dtype="bfloat16"),
    ),
    "latents, sparse fp8_v32": (
        check_decode,
        DecodeSpec(topk=70, kv_lens=(100,), page_size=64, heads=16, format="fp8_v32", d_v=512, dtype="bfloat16"),
    ),
    "latents, sparse fp8_v41 and fp4_v41": (
        check_decode,
        DecodeSpec(
            topk=35, kv_lens=(60,), page_size=64, heads=16, format="fp8_v41", d_v=512, dtype="bfloat16",
            extra_format="fp4_v41", extra_topk=20, extra_slots=32, extra_page_size=16,
        ),
    ),
    "latents, prefill": (
        check_prefill,
        PrefillSpec(topk=70, rows=90, tokens=2, heads=16, d_qk=576, d_v=512, dtype="bfloat16"),
    ),
    "sparse gradient": (
        check_gradients,
        GradientSpec(of=PrefillSpec(topk=20, rows=30, tokens=3, heads=16, d_qk=80, d_v=64, dtype="bfloat16")),
    ),
}  # fmt: skip
# The suite's corners for kernels and paths that `SPECS` does not cover.
CORNERS = (
    "attention, decode of a long sequence",  # its heads are small, and so is its merge kernel
    "attention, window within the last pages",  # its pages end inside a block of keys
    "packed gradient, 33/7",
    "write, by slots: float8_e4m3fn",
    # In the writes of scale pages, no product may be fused with a sum, and no quotient may be approximate.
    "write of scale pages, int8_token_head, special values",
    "write of scale pages, int4_token_head, special values",
    "write of scale pages, int4_token_head, float16 pair, by tables",
    "write of scale pages, nvfp4, 4.0 beside scale pages",
    "write of scale pages, mxfp8, special values",
    "write of scale pages, mxfp4, by tables",
    "attention over scale pages, nvfp4, bfloat16 queries",
    "attention over scale pages, int4_token_head, a prefill of more rows than a tile",
    "attention over scale pages, mxfp8, float16 queries",
    "attention over scale pages, int8_token_head, lists of blocks",
    "merge, lses far apart",
    "paged decode, quantised, soft cap",  # runs the kernels of ragged attention with scale pages
    "paged decode, lengths of every kind",
    "chunked prefill, a partial chunk",
    "latent decode, extra cache with lengths",
    "ragged latents, mixed",
    "ragged latents, decode of a long sequence",
    "ragged latents, float8_e4m3fn, bfloat16 queries",
    "ragged latents, window in a long sequence",
    "ragged latents, update, every edge at once",
    "latent decode, dense, window",
    "decode schedule, sparse, lengths",
    "quantize latents, fp8_v32, bfloat16",
    "write latents, fp8_v4, float32",
    "quantize latents, fp4_v41, special values",
    "write latents, fp8_v41, page, float32",
    "latent decode, fp4_v41, page",
    "sparse gradient, duplicates in a fixed order",
    "sparse prefill, decoded first, fp8_v32",
    "indexer logits, mixed, pages of bytes",
    "indexer logits, lists",
    "indexer gradient, lists",
    "indexer gradient, ranges, bfloat16",
    "indexer target, lists",
    "indexer top-k, exact, candidates",
    "indexer top-k, exact, packed, wild ranges",
    "indexer selection, ties",
    "block selection, exact, first and last",
    "indexer keys quantised, rows",
    "indexer keys written, page size 3",
    "norm, rope and write, float8_e4m3fn",
    "latent norm, rope and write, fp8_v32",
)


# A call that runs each kernel.
RUN_BY = {
    "_bias_gradient.bias_kernel": "packed gradient, a relative bias",
    "_blocks.block_scores_kernel": "block selection, exact, first and last",
    "_blocks.raise_kernel": "block selection, exact, first and last",
    "_combine.combine_kernel": "attention, decode of a long sequence",
    "_heads_first.chunk_edges_kernel": "chunked prefill, a partial chunk",
    "_heads_first.decode_edges_kernel": "paged decode, lengths of every kind",
    "_indexer.fill_kernel": "indexer top-k, exact, candidates",
    "_indexer.list_logits_kernel": "indexer logits, lists",
    "_indexer.tile_logits_kernel": "indexer top-k, exact, packed, wild ranges",
    "_indexer.walk_logits_kernel": "indexer top-k, exact, candidates",
    "_latent.decoding.decode_kernel": "sparse prefill, decoded first, fp8_v32",
    "_latent.kernel.latent_kernel": "latents, dense",
    "_selected.join_kernel": "lists of blocks, joined",
    "_selected_gradient.code_kernel": "packed gradient, lists of blocks",
    "_selected_gradient.selected_dkv_kernel": "packed gradient, lists of blocks",
    "_selected_pages.selected_kernel": "lists of blocks, joined",
    "_softmax.sum_kernel": "packed gradient",
    "attention_target.normalise_kernel": "indexer target, lists",
    "attention_target.sums_kernel": "indexer target, lists",
    "indexer_logits_backward.key_kernel": "indexer gradient, ranges, bfloat16",
    "indexer_logits_backward.query_kernel": "indexer gradient, lists",
    "latent_norm_rope_write.latent_norm_rope_kernel": "latent norm, rope and write, fp8_v32",
    "make_decode_schedule.schedule_kernel": "decode schedule, sparse, lengths",
    "merge_attention_states.merge_kernel": "merge, lses far apart",
    "norm_rope_write.norm_rope_kernel": "norm, rope and write, float8_e4m3fn",
    "ragged_mla_attention.ragged_latent_kernel": "ragged latents, mixed",
    "ragged_paged_attention.split_kernel": "decode and prefill",
    "ragged_paged_attention.tile_kernel": "float8 cache",
    "sparse_mla_prefill_backward.gather_kernel": "sparse gradient, duplicates in a fixed order",
    "sparse_mla_prefill_backward.gradient_kernel": "sparse gradient, duplicates in a fixed order",
    "sparse_mla_prefill_backward.narrow_kernel": "sparse gradient",
    "sparse_mla_prefill_backward.rows_kernel": "sparse gradient, duplicates in a fixed order",
    "sparse_mla_prefill_backward.zero_kernel": "sparse gradient, duplicates in a fixed order",
    "top_k_indices.select_kernel": "indexer top-k, exact, packed, wild ranges",
    "varlen_attention.forward_kernel": "packed",
    "varlen_attention_backward.dkv_kernel": "packed gradient, 33/7",
    "varlen_attention_backward.dq_kernel": "packed gradient, 33/7",
    "varlen_attention_backward.prepare_kernel": "packed gradient, 33/7",
    "write_indexer_cache.quantize_keys_kernel": "indexer keys quantised, rows",
    "write_indexer_cache.write_keys_kernel": "indexer keys written, page size 3",
    "write_kv_pages.write_kernel": "write, by slots: float8_e4m3fn",
    "write_mla_cache.write_rows_kernel": "quantize latents, fp8_v32, bfloat16",
}


def calls() -> Iterator[Check]:
    for name, (check, spec) in SPECS.items():
        yield Check("call", name, lambda runner, _, check=check, spec=spec: make(runner, check, spec))
    for corner in suite.corners():
        if corner.name in CORNERS:
            yield Check("call", corner.name, corner.run)


def make(runner: Runner, check: Callable[[Runner, Any], None], spec: Any) -> int:
    check(runner, spec if check is check_update else spec.build())
    return 1


# ---- kernels of others


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_a, stride_b, stride_c,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, K, BLOCK_K):
        inner = first + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + rows[:, None] * stride_a + inner, mask=(rows[:, None] < M) & (inner < K), other=0.0)
        b = tl.load(b_ptr + inner[:, None] * stride_b + columns, mask=(inner[:, None] < K) & (columns < N), other=0.0)
        acc = tl.dot(a, b, acc)
    place = c_ptr + rows[:, None] * stride_c + columns
    tl.store(place, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (columns < N))


@triton.jit
def softmax_kernel(x_ptr, out_ptr, width, stride, scale, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + column, mask=column < width, other=float("-inf")) * scale
    weights = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row * stride + column, weights / tl.sum(weights, 0), mask=column < width)


@triton.jit
def racing_kernel(out_ptr):
    tl.store(out_ptr, tl.program_id(0))


def multiplies(arch: str) -> None:
    """Slices of larger tensors are multiplied in a loop that Triton pipelines through shared memory."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(150, 160, generator=generator).to(torch.float16) for _ in range(2))
    a, b, c = a[:100, :150], b[:, :136], torch.empty(100, 140)[:, :136]
    sizes = {"M": 100, "N": 136, "K": 150, "stride_a": 160, "stride_b": 160, "stride_c": 140}
    blocks = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}
    arguments = {"a_ptr": a, "b_ptr": b, "c_ptr": c, **sizes, **blocks}
    for seed in (None, 3):
        outcome = ptx.run(matmul_kernel, (2, 3), **arguments, arch=arch, num_stages=3, schedule=seed, unwritten=[c])
        torch.testing.assert_close(c, a.float() @ b.float(), atol=2e-3, rtol=2e-3)
    products = "wgmma" if arch == "sm_90" else "mma"
    assert any(opcode.startswith(f"{products}.") for opcode in outcome.opcodes), sorted(outcome.opcodes)


def softens(arch: str) -> None:
    """A kernel runs on NumPy arrays, with a grid that depends on the constants and with only two warps."""
    x = np.random.default_rng(0).standard_normal((5, 200), np.float32)
    out = np.empty_like(x)
    arguments = {"x_ptr": x, "out_ptr": out, "width": 190, "stride": 200, "scale": 2.0, "BLOCK": 256}
    ptx.run(softmax_kernel, lambda meta: (5 * 256 // meta["BLOCK"],), **arguments, arch=arch, num_warps=2)
    weights = np.exp(2 * (x[:, :190] - x[:, :190].max(1, keepdims=True)))
    np.testing.assert_allclose(out[:, :190], weights / weights.sum(1, keepdims=True), rtol=1e-5)


@triton.jit
def pairs_kernel(arrays, count, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(arrays[1] + place, tl.load(arrays[0] + place, mask=place < count), mask=place < count)


def takes_tuples(arch: str) -> None:
    """A tuple may hold two views of one array, even if the second view is not aligned to 16 bytes."""
    whole = torch.arange(200, dtype=torch.float64)
    ptx.run(pairs_kernel, (1,), (whole[:50], whole[101:151]), 50, BLOCK=64, arch=arch)
    assert whole[101:151].tolist() == list(range(50))
    assert whole[151:].tolist() == list(range(151, 200))


def is_watched(arch: str) -> None:
    """An access out of bounds, a read of unwritten memory, and two programs that write one address are reported."""
    x, out = torch.ones(5, 200), torch.ones(5, 200)
    arguments = {"x_ptr": x, "out_ptr": out[:, :100], "width": 190, "stride": 200, "scale": 2.0, "BLOCK": 256}
    expect("outside", lambda: ptx.run(softmax_kernel, (5,), **arguments, arch=arch))
    arguments["out_ptr"] = out
    expect("wrote", lambda: ptx.run(softmax_kernel, (5,), **arguments, arch=arch, unwritten=[x]))
    place = torch.zeros(1, dtype=torch.int32)
    expect("write", lambda: ptx.run(racing_kernel, (4,), place, arch=arch))
    assert ptx.run(racing_kernel, (4,), place, arch=arch, strict=False).reports
    assert not ptx.run(racing_kernel, (1,), place, arch=arch).reports


def refuses(arch: str) -> None:
    """Too much shared memory, overlapping arrays that are not views of one array, and autotuned kernels are refused."""
    a = torch.ones(256, 256)
    sizes = {"M": 256, "N": 256, "K": 256, "stride_a": 256, "stride_b": 256, "stride_c": 256}
    blocks = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}
    arguments = {"a_ptr": a, "b_ptr": a, "c_ptr": torch.empty(256, 256), **sizes, **blocks}
    expect("shared memory", lambda: ptx.run(matmul_kernel, (2, 2), **arguments, arch=arch, num_warps=16, num_stages=5))
    tuned = triton.autotune([triton.Config({})], key=[])(softmax_kernel)
    whole = np.zeros((4, 256), np.float32)
    sharing = {
        "x_ptr": whole,
        "out_ptr": torch.from_numpy(whole[1:]),
        "width": 9,
        "stride": 256,
        "scale": 1.0,
        "BLOCK": 16,
    }
    expect("share memory to be views of one", lambda: ptx.run(softmax_kernel, (1,), **sharing, arch=arch))
    expect("got Autotuner: give the function that it wraps", lambda: ptx.run(tuned, (1,), arch=arch))


def comes_from_jax(arch: str) -> None:
    """A call from jax runs, and a call whose PTX has an unknown instruction fails."""
    if importlib.util.find_spec("jax") is None:
        return
    runner = CompiledRunner(framework="jax", arch=arch)
    corners = {check.name: check for check in suite.corners()}
    with runner.around():
        corners["merge, lses far apart"].run(runner, 1)
    assert set(runner.emulator.launches) == {f"{PACKAGE}.merge_attention_states.merge_kernel"}
    runner.emulator.change = lambda name, text: text.replace("bar.sync", "bar.unknown")
    with runner.around():
        expect("Unknown: line", lambda: corners["merge, many parts"].run(runner, 1))


def expect(text: str, run: Callable[[], Any]) -> None:
    """Assert that a run raises an exception whose message contains `text`."""
    with pytest.raises(Exception, match=re.escape(text)):
        run()


def others(arch: str) -> Iterator[Check]:
    for function in (multiplies, softens, takes_tuples, is_watched, refuses, comes_from_jax):
        yield Check("other", function.__name__, lambda runner, _, function=function: function(arch) or 1)


# ---- the process that compiles


def main(arch: str) -> None:
    runner = CompiledRunner(arch=arch, seed=SEEDS[arch])
    worker.serve(runner, [watched(check) for check in calls()] + [*others(arch)], 1)


def watched(check: Check) -> Check:
    """The check, which also requires that it has launched the kernels that RUN_BY assigns to it."""

    def run(runner: Any, examples: int) -> int:
        before = runner.emulator.launches.copy()
        taken = check.run(runner, examples)
        missing = {kernel for kernel, name in RUN_BY.items() if name == check.name}
        missing -= {kernel.removeprefix(f"{PACKAGE}.") for kernel in runner.emulator.launches - before}
        assert not missing, f"expected a launch of {', '.join(sorted(missing))}"
        return taken

    return Check(check.kind, check.name, run)


# ---- tests


@pytest.mark.each("name")
@pytest.mark.parametrize("name", [str(check) for check in (*calls(), *others(""))])
@pytest.mark.parametrize("arch", SEEDS)
def test_a_call_is_right_and_nothing_is_reported(arch: str, name: str) -> None:
    command = sys.executable, __file__, arch
    (verdict,) = worker.judged(command, [name], timeout=600, environ=COMPILING)
    ANSWERED.update((operation, "ptx") for operation in verdict.answered)
    assert verdict.result == "passed", verdict.message


def test_every_kernel_of_the_room_has_a_call() -> None:
    assert set(RUN_BY) == kernels_of_the_package()
    assert set(RUN_BY.values()) <= {check.name for check in calls()}


def kernels_of_the_package() -> set[str]:
    package, kernels = importlib.import_module(PACKAGE), set()
    for module in pkgutil.walk_packages(package.__path__, f"{PACKAGE}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if name.endswith("_kernel") and hasattr(value, "arg_names"):
                kernels.add(f"{value.fn.__module__}.{value.fn.__name__}".removeprefix(f"{PACKAGE}."))
    return kernels


@pytest.mark.parametrize(
    ("arch", "reason"),
    [("sm_100", "tcgen05"), ("sm_120", "tcgen05"), ("sm_75", "nothing else"), ("gfx942", "nothing else")],
)
def test_other_architectures_are_refused(arch: str, reason: str) -> None:
    with pytest.raises(InvalidInput, match=rf"sm_80, sm_86, sm_89, sm_90, got '{arch}': .*{reason}"):
        ptx.run(softmax_kernel, (1,), arch=arch)


def test_interpreted_kernels_are_refused() -> None:
    with pytest.raises(TypeError, match="got InterpretedFunction: unset TRITON_INTERPRET before triton is imported"):
        ptx.run(softmax_kernel, (1,), torch.ones(3))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--backend", "triton", "--device", "ptx:sm_100"], "tcgen05"),
        (
            ["--backend", "numba", "--device", "ptx:sm_90"],
            "expected the backend triton or cuda for ptx:sm_90, got numba",
        ),
        (["--backend", "cuda", "--framework", "jax", "--device", "ptx:sm_90"], "cuda is emulated from torch only"),
        (["--backend", "cuda", "--device", "ptx:sm_80"], "the CUDA kernels are for sm_90, got sm_80"),
    ],
)
def test_the_command_says_what_it_cannot_judge(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the command must unset this variable
    assert conformance.main(arguments) == 2
    assert reason in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("error", [
    RuntimeError("0 active drivers ([]). There should only be one."),
    ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)"),
])  # fmt: skip
def test_a_backend_that_starts_its_kernels_itself_is_no_failure(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(call: Any, tile: Any, launch: Any) -> Any:
        raise error

    partial_backend.announce(monkeypatch, "ragged_paged_attention", FEATURES=frozenset({"return_lse"}), run=run)
    runner = CompiledRunner(framework="torch", backend="partial")
    try:
        (check,) = [check for check in suite.checks() if str(check) == "corner: attention, one key"]
        verdict = verdict_of(runner, check, 1)
    finally:
        dispatch.load.cache_clear()
    assert verdict.result == "declined"
    assert verdict.message == f"partial: {ptx_runner.DIRECT}"


def test_planted_faults_are_noticed() -> None:
    """Dropping a needed barrier, wait, group or fence is noticed. benchmarks.ptx_faults tries all kinds of faults."""
    answers = printed("-m", "benchmarks.ptx_faults", "--arch", "sm_90", "--kind", "dropped", "--most", "4")
    for fault in ("bar.sync", "cp.async.wait_group", "cp.async.commit_group", "fence.proxy.async"):
        assert re.search(rf"^{fault} dropped, line \d+: (report|fault|wrong)", answers, re.MULTILINE), answers


def test_the_command_judges_compiled_kernels() -> None:
    arguments = ["--backend", "triton", "--framework", "torch", "--device", "ptx:sm_80", "--only", "corner: merge, one"]
    output = " ".join(printed("-m", "ragged_attention", "conformance", *arguments).split())
    assert "No GPU is used: the kernels are compiled for one" in output
    for runner in ("torch-triton, compiled for sm_80", "torch-triton, compiled for sm_80, schedule 1"):
        assert f"{runner} on ptx:sm_80" in output
    assert output.count("2 passed, 0 declined, 0 FAILED") == 2


def test_where_triton_interprets_nothing_is_compiled() -> None:
    assert "the interpreter compiles nothing" in str(ptx_runner.missing("sm_90"))
    assert ptx_runner.runners("triton", None, "cpu") == ([], {})


if __name__ == "__main__":
    main(sys.argv[1])
