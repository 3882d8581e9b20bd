"""Other projects' kernels are recorded as launched, divided into programs by their own rules, and read like ours."""

import dataclasses
import enum
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import catalogue
from benchmarks.cases.paged import PagedCase
from benchmarks.cases.varlen import VarlenCase
from benchmarks.compiled.compiling import Launch
from benchmarks.peers import recorded, registry, sources
from benchmarks.roofline import varlen
from tests.processes import printed

ROOT = Path(__file__).parent.parent


class Mode(enum.IntEnum):
    FAST = 3


def kernel(*names: str, **more: Any) -> Any:
    """A stand-in with those attributes of a Triton kernel that a recorder reads."""
    params = [types.SimpleNamespace(name=name) for name in names]
    return types.SimpleNamespace(__name__="some_kernel", params=params, **more)


class Named(Launch):
    """A launch of a kernel named `name`."""

    def __init__(self, name: str, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
        super().__init__(types.SimpleNamespace(__name__=name), (), arguments, 4, 3, grid)


# ---- recording


def test_a_launch_is_remembered_by_name() -> None:
    module = types.SimpleNamespace(one=kernel("x", "n", "MODE", "EVEN"))
    held = module.one
    with recorded.recording(module, "one") as (one,):
        module.one[(2, 3)]("array", 5, MODE=Mode.FAST, EVEN=registry.Nothing(), num_warps=8)
        module.one[lambda given: (given["n"],)](x="array", n=7)
    assert module.one is held
    first, second = one.launches
    assert first.arguments == {"x": "array", "n": 5, "MODE": 3, "EVEN": False}
    assert (type(first.arguments["MODE"]), first.grid, first.programs) == (int, (2, 3), 6)
    assert (first.num_warps, first.num_stages) == (8, 3)
    assert (second.grid, second.num_warps, second.name) == ((7,), 4, "some_kernel")


def test_what_heuristics_add_is_added() -> None:
    wrapped = types.SimpleNamespace(fn=kernel("n", "EVEN"), values={"EVEN": lambda given: given["n"] % 2 == 0})
    module = types.SimpleNamespace(one=wrapped)
    with recorded.recording(module, "one") as (one,):
        module.one[(1,)](n=4)
    assert one.launches[0].arguments == {"n": 4, "EVEN": True}
    assert one.launches[0].kernel is wrapped.fn


def test_inputs_have_shapes_and_no_values() -> None:
    pytest.importorskip("torch")
    case = catalogue.find("fp8_64x4k_head_scales")
    found = recorded.inputs_of(case)
    assert found["q"].is_meta
    assert tuple(found["q"].shape) == case.q_shape
    assert tuple(found["k_scale"].shape) == (8,)


# ---- the work of each program


def tiny(**fields: Any) -> PagedCase:
    plain = {"name": "tiny", "workload": "-", "q_lens": (1, 6), "kv_lens": (100, 70), "num_q_heads": 8}
    return PagedCase(**(plain | {"num_kv_heads": 2, "head_dim": 16} | fields))  # type: ignore[arg-type]


UNIFIED: dict[str, Any] = {"TILE_SIZE": 16, "BLOCK_Q": 4, "BLOCK_M": 16, "num_queries_per_kv": 4}


def test_programs_of_vllms_kernel() -> None:
    """Blocks have four tokens, so a sequence of six tokens has two blocks. The second block sees all 70 keys."""
    found = recorded._unified_programs(tiny(), UNIFIED | {"IS_3D": False, "NUM_SEGMENTS_PER_SEQ": 1})
    assert found == {(7.0,): 2, (5.0,): 4}
    windowed = recorded._unified_programs(
        tiny(sliding_window=20), UNIFIED | {"IS_3D": False, "NUM_SEGMENTS_PER_SEQ": 1}
    )
    assert windowed == {(2.0,): 4, (3.0,): 2}  # visible keys [80, 100), [45, 68) and [49, 70)


def test_segments_of_vllms_kernel() -> None:
    """100 keys make four segments of at most 32 keys, and 70 keys make three."""
    found = recorded._unified_programs(tiny(), UNIFIED | {"IS_3D": True, "NUM_SEGMENTS_PER_SEQ": 4})
    assert found == {(2.0,): 2 * 3 + 4 * 2, (1.0,): 2 + 4}


def test_splits_of_sglangs_kernel() -> None:
    """Splits are equal and have a multiple of 32 keys."""
    one = Named("stage1", (2, 3, 8), {"BLOCK_N": 32, "MIN_BLOCK_KV": 32})
    (attended,) = recorded._split_evenly(one, [], [1000, 40], 8)
    assert attended.programs == {(4.0,): 8 * 3, (1.0,): 2 * 3}


@dataclasses.dataclass(frozen=True)
class Rows:
    """A stand-in for a case without a cache: its query lengths and number of heads."""

    q_lens: tuple[int, ...] = (300,)
    num_q_heads: int = 4


@pytest.mark.parametrize(
    ("name", "want"),
    [("parallel_attn_fwd_kernel", {(0.0, 2.0): 4, (2.0, 2.0): 4, (4.0, 1.0): 4}),
     ("parallel_attn_bwd_kernel_dkv", {(2.0, 3.0): 4, (2.0, 1.0): 4, (1.0, 0.0): 4})],
)  # fmt: skip
def test_programs_of_flas_kernels(name: str, want: dict[tuple[float, ...], int]) -> None:
    case: Any = Rows()
    assert recorded._parallel_programs(case, Named(name, (3, 4), {"BT": 128, "BS": 64})) == want
    assert recorded._parallel_programs(case, Named("preprocess", (3, 4), {})) == {(): 12}


def causal(**fields: Any) -> VarlenCase:
    plain = {"name": "-", "workload": "-", "q_lens": (300,), "kv_lens": (300,), "num_q_heads": 4, "num_kv_heads": 2}
    return VarlenCase(**(plain | {"head_dim": 64, "d_v": 64} | fields))  # type: ignore[arg-type]


OURS: dict[str, Any] = {"BLOCK_Q": 128, "BLOCK_KV": 64, "GROUP": 2}


def test_programs_of_our_kernels_without_a_cache() -> None:
    """A block of 64 tokens of two heads visits unmasked blocks of 64 keys before its own block, which is masked."""
    rows = varlen.programs(causal(), Named("forward_kernel", (9, 2), OURS))
    assert rows == {(float(block), 1.0): 2 for block in range(5)}
    keys = varlen.programs(causal(), Named("dkv_kernel", (9, 2), OURS))
    # The number of programs by (masked blocks, whole blocks).
    assert keys == {(2.0, 3.0): 2, (2.0, 2.0): 2, (2.0, 1.0): 2, (2.0, 0.0): 2, (1.0, 0.0): 2}
    whole = varlen.programs(causal(causal=False), Named("forward_kernel", (9, 2), OURS))
    assert whole == {(4.0, 1.0): 10}
    windowed = varlen.programs(causal(sliding_window=64), Named("forward_kernel", (9, 2), OURS))
    assert windowed == {(0.0, 1.0): 2, (0.0, 2.0): 8}


# ---- sources


def test_of_a_wheel_little_is_kept(tmp_path: Path) -> None:
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("fla/ops/attn.py", "fla/data.bin", "other/setup.py"):
            archive.writestr(name, "x = 1\n")
    sources.unpack(wheel, sources.Source("some", "flat", ("fla/ops/*.py",)), tmp_path)
    sources.unpack(wheel, sources.Source("some", "deep", ("fla/*.py",), flat=False), tmp_path)
    kept = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.py")}
    assert kept == {"flat/attn.py", "deep/fla/ops/attn.py"}


def test_absent_sources_are_named(tmp_path: Path) -> None:
    for peer in recorded.PEERS:
        said = sources.missing(tmp_path, peer.package) or ""
        assert said.endswith("python -m benchmarks.peers.sources fetches it")
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "triton_unified_attention.py").write_text("")
    assert sources.missing(tmp_path, "vllm") is None


def test_every_peer_takes_some_cases_and_says_why_not_others() -> None:
    said = []
    for peer in recorded.PEERS:
        reasons = {peer.declines(case) for case in catalogue.CASES.values() if isinstance(case, peer.kinds)}
        assert None in reasons, peer.name
        said.append((peer.name, reasons - {None}))
    latents = "takes dense decodes of one token over a plain cache"
    assert said == [
        ("vLLM", {"page_size must be a multiple of 16", "has no draft mask"}),
        ("vLLM", {latents}),
        ("SGLang", {latents, "decodes one token a sequence here"}),
        ("FLA", {"is causal, of queries and keys alike, without a soft cap"}),
    ]


# ---- the whole analysis, for a stand-in for another project's kernel

PEER = """
import triton
import triton.language as tl
from vllm.v1.kv_cache_interface import KVQuantMode

@triton.jit
def kernel_unified_attention(output_ptr, query_ptr, key_cache_ptr, block_tables_ptr, seq_lens_ptr, stride: tl.int64,
                             num_queries_per_kv: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
                             TILE_SIZE: tl.constexpr, NUM_SEGMENTS_PER_SEQ: tl.constexpr, IS_3D: tl.constexpr,
                             KV_QUANT_MODE: tl.constexpr):
    d = tl.arange(0, 128)
    row = tl.arange(0, BLOCK_M)
    q = tl.load(query_ptr + row[:, None] * 128 + d[None, :])
    acc = tl.zeros([BLOCK_M, 128], tl.float32)
    for start in range(0, tl.load(seq_lens_ptr + tl.program_id(0)), TILE_SIZE):
        key = start + tl.arange(0, TILE_SIZE)
        page = tl.load(block_tables_ptr + tl.program_id(0) * stride + key // 16).to(tl.int64)
        k = tl.load(key_cache_ptr + (page * 16 + key % 16)[:, None] * 128 + d[None, :])
        acc = tl.dot(tl.dot(q, tl.trans(k)).to(k.dtype), k, acc)
    tl.store(output_ptr + row[:, None] * 128 + d[None, :], acc.to(tl.bfloat16))

reduce_segments = kernel_unified_attention

def unified_attention(q, k, v, out, seqused_k, block_table, kv_quant_mode):
    kernel_unified_attention[(len(seqused_k), k.shape[2])](
        output_ptr=out, query_ptr=q, key_cache_ptr=k, block_tables_ptr=block_table, seq_lens_ptr=seqused_k,
        stride=block_table.stride(0), num_queries_per_kv=4, BLOCK_Q=4, BLOCK_M=16, TILE_SIZE=32,
        NUM_SEGMENTS_PER_SEQ=1, IS_3D=False, KV_QUANT_MODE=kv_quant_mode)
"""


def test_a_peer_stands_beside_ours(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    for folder, text in (("vllm", PEER), ("sglang", "raise ImportError"), ("fla-core", "")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "triton_unified_attention.py").write_text(text)
    (tmp_path / "sglang" / "decode_attention.py").write_text("raise ImportError('not asked for')\n")
    command = ("benchmarks.compiled.peers", "--cases", "speculative_64q4s4k", "--folder", str(tmp_path), "--jobs", "1")
    lines = printed("-m", *command).splitlines()
    mine, theirs = [line.split(" | ") for line in lines if line.startswith("| speculative")]
    assert (mine[1], theirs[1]) == ("ours", "vLLM")
    assert (theirs[2], theirs[6], theirs[7]) == ("4, 3", "0", "1.0")  # one buffer, which follows the page numbers
    assert (mine[-2], mine[-1].strip("| ")) == ("1.00", "1.00")
    assert float(theirs[-2]) >= 1 > float(theirs[-1].strip("| "))
