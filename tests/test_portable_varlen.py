"""The fallbacks of packed attention and of gradients: choice of blocks, orders of summation, declined calls."""

import dataclasses
import importlib
from typing import Any

import numpy as np
import pytest

from ragged_attention.calls import (
    Device,
    SparseMlaPrefill,
    SparseMlaPrefillBackward,
    VarlenAttention,
    VarlenAttentionBackward,
)
from ragged_attention.errors import InvalidInput
from ragged_attention.reference import (
    sparse_mla_prefill,
    sparse_mla_prefill_backward,
    varlen_attention,
    varlen_attention_backward,
)
from ragged_attention.tools.samples import sample_of

# One sequence without queries, one without keys, one with more queries than keys. Padding follows the last sequence.
Q_LENS, KV_LENS = (3, 0, 2, 9, 6), (5, 4, 0, 4, 11)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"sliding_window": 3, "soft_cap": 2.0},
    "causal window": {"causal": True, "sliding_window": 2},
}


def normal(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def edges(lens: tuple[int, ...]) -> np.ndarray:
    return np.cumsum((0, *lens)).astype(np.int32)


def packed() -> dict[str, np.ndarray]:
    return {
        "q": normal(22, 4, 5, seed=0),
        "k": normal(25, 2, 5, seed=1),
        "v": normal(25, 2, 3, seed=2),
        "cu_q_lens": edges(Q_LENS),
        "cu_kv_lens": edges(KV_LENS),
        "sinks": normal(4, seed=3),
    }


def packed_gradient(
    options: dict[str, Any], bias: tuple[int, ...] | None = None
) -> tuple[dict[str, np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """The arrays of a call and its gradient, and the reference results of both."""
    arrays = packed() | ({} if bias is None else {"relative_bias": normal(*bias, seed=8)})
    out, lse = varlen_attention.varlen_attention(**arrays, **options)
    arrays |= {"d_out": normal(*out.shape, seed=4), "out": out, "lse": lse, "d_lse": normal(*lse.shape, seed=5)}
    found = varlen_attention_backward.varlen_attention_backward(**arrays, **options, return_d_relative_bias=True)
    return arrays, [out, lse], [array for array in found if array is not None]


def listed() -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """A sparse gradient's arrays and reference results. Some lists are empty, and one repeats a single row."""
    indices = np.random.default_rng(6).integers(-2, 10, (7, 2, 9)).astype(np.int32)
    indices[1] = -1
    indices[2] = 3
    arrays = {"q": normal(7, 4, 32, seed=0), "kv": normal(8, 2, 32, seed=1), "indices": indices}
    arrays |= {
        "sinks": np.array([0.3, -np.inf, np.inf, -np.inf]),
        "topk_lens": np.array([9, 9, 5, 0, 3, 9, 20], np.int32),
    }
    out, _, lse = sparse_mla_prefill.sparse_mla_prefill(**arrays, d_v=16)
    arrays |= {"d_out": normal(*out.shape, seed=3), "out": out, "lse": lse, "d_lse": normal(*lse.shape, seed=4)}
    found = sparse_mla_prefill_backward.sparse_mla_prefill_backward(**arrays, d_v=16)
    return arrays, [array for array in found if array is not None]


def compare(got: Any, want: list[np.ndarray], tolerance: float) -> None:
    for one, other in zip((array for array in got if array is not None), want, strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float64), other, rtol=tolerance, atol=tolerance)


def expect_agreement(
    make: Any, module_of: Any, tile: dict[str, int], options: dict[str, Any], bias: Any, bound: float
) -> None:
    """Check a backend's attention and its gradient with given tile sizes."""
    arrays, forward, backward = packed_gradient(options, bias)
    given = {name: array for name, array in arrays.items() if name in VarlenAttention.KINDS}
    asked: Any = options | {"return_d_relative_bias": bias is not None}
    for operation, record, some, flags, want in (
        ("varlen_attention", VarlenAttention, given, options, forward),
        ("varlen_attention_backward", VarlenAttentionBackward, arrays, asked, backward),
    ):
        call, module = make(record, some, **flags), module_of(operation)
        compare(module.run(call, module.Tile(**tile), None), want, bound)


# torch


def torch_call(record: type, arrays: dict[str, np.ndarray], platform: str = "cpu", **options: Any) -> Any:
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return record(**tensors, **options, device=Device(framework="torch", platform=platform))


def eager(operation: str) -> Any:
    return importlib.import_module(f"ragged_attention.portable.torch_eager.{operation}")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("block_q", "bias"), [(1, (4, 3)), (2, (22, 4, 9)), (3, (4, 40)), (1000, None)])
def test_eager_blocks_of_any_size_agree(block_q, bias, options):
    expect_agreement(torch_call, eager, {"block_q": block_q}, options, bias, 1e-12)


@pytest.mark.parametrize("block_kv", [1, 4, 1000])
@pytest.mark.parametrize(("platform", "deterministic"), [("cpu", False), ("cuda", True)])
def test_eager_adds_up_rows_in_any_blocks(block_kv, platform, deterministic):
    arrays, want = listed()
    call = torch_call(SparseMlaPrefillBackward, arrays, platform, d_v=16, deterministic=deterministic)
    module = eager("sparse_mla_prefill_backward")
    compare(module.run(call, module.Tile(block_kv=block_kv), None), want, 1e-12)


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("options", [{"causal": True}, {"sliding_window": 100}, {}], ids=str)
def test_eager_holds_few_logits_of_long_sequences(group, options):
    length = 100_000
    arrays = {"q": np.zeros((length, group, 1)), "k": np.zeros((length, 1, 1)), "v": np.zeros((length, 1, 1))}
    whole = np.array([0, length], np.int32)
    call = torch_call(VarlenAttention, arrays | {"cu_q_lens": whole, "cu_kv_lens": whole}, **options)
    module = eager("_varlen")
    (heads,) = module.heads_of(call, module.heuristic(call))
    rows = [block.rows.stop - block.rows.start for block in heads.blocks]
    keys = [block.keys.stop - block.keys.start for block in heads.blocks]
    assert sum(rows) == length
    assert max(row * key for row, key in zip(rows, keys, strict=True)) * group <= max(2**21, 8 * length * group)
    masks = [mask for block in heads.blocks for mask in (block.left, block.right) if mask is not None]
    assert max((mask.numel() for mask in masks), default=0) <= max(rows) ** 2


def test_eager_refuses():
    module = eager("varlen_attention")
    with pytest.raises(InvalidInput, match="expected block_q >= 1, got 0"):
        module.Tile(block_q=0)
    with pytest.raises(TypeError, match="expected block_q to be an int, got float"):
        module.Tile(block_q=1.5)
    call = torch_call(SparseMlaPrefillBackward, listed()[0], "mps", d_v=16, deterministic=True)
    module = eager("sparse_mla_prefill_backward")
    assert module.why_not(call) == "adds up in a fixed order on cpu, cuda, rocm, got deterministic=True on mps"
    assert module.why_not(dataclasses.replace(call, deterministic=False)) is None
    jax_call = dataclasses.replace(call, device=Device(framework="jax", platform="cpu"))
    for operation in ("varlen_attention", "varlen_attention_backward", "sparse_mla_prefill_backward"):
        assert eager(operation).why_not(jax_call) == "expected torch tensors, got a jax call"


# jax


def jax_call(record: type, arrays: dict[str, np.ndarray], platform: str = "cpu", **options: Any) -> Any:
    """A call with jax arrays. They are float32 where the NumPy arrays are float64, because float32 is jax's default."""
    jnp = pytest.importorskip("jax.numpy")
    narrow = {name: array.astype(np.float32) if array.dtype == np.float64 else array for name, array in arrays.items()}
    held = {name: jnp.asarray(array) for name, array in narrow.items()}
    return record(**held, **options, device=Device(framework="jax", platform=platform))


def xla(operation: str) -> Any:
    return importlib.import_module(f"ragged_attention.portable.xla.{operation}")


@pytest.mark.parametrize(
    ("options", "tile", "bias"),
    [("causal", (4, 3), (4, 3)), ("window", (1000, 1000), (4, 1)), ("causal window", (1, 2), (22, 4, 9)),
     ("window", (5, 4), (4, 40)), ("causal", (3, 7), None)],
)  # fmt: skip
def test_xla_tiles_of_any_size_agree(options, tile, bias):
    block_q, block_kv = tile
    expect_agreement(jax_call, xla, {"block_q": block_q, "block_kv": block_kv}, OPTIONS[options], bias, 2e-5)


@pytest.mark.parametrize(("platform", "deterministic", "tile"), [("cpu", False, (4, 3)), ("cuda", True, (5, 1000))])
def test_xla_adds_up_rows_in_any_order(platform, deterministic, tile):
    """Rows are summed correctly in any order, also in the sorted order of deterministic calls on GPUs."""
    arrays, want = listed()
    call = jax_call(SparseMlaPrefillBackward, arrays, platform, d_v=16, deterministic=deterministic)
    module = xla("sparse_mla_prefill_backward")
    compare(module.run(call, module.Tile(*tile), None), want, 2e-5)


def test_known_lengths_bound_xlas_tiles():
    arrays = {name: packed()[name] for name in ("q", "k", "v", "cu_q_lens", "cu_kv_lens")}
    call = jax_call(VarlenAttention, arrays | {"q": normal(2000, 1, 4, seed=0), "k": normal(2000, 1, 4, seed=1),
                                               "v": normal(2000, 1, 4, seed=1)})  # fmt: skip
    module = xla("varlen_attention")
    assert module.heuristic(call) == module.Tile(block_q=64, block_kv=256)
    short = dataclasses.replace(call, max_q_len=9, max_kv_len=12)
    assert module.heuristic(short) == module.Tile(block_q=16, block_kv=12)


def test_xla_refuses():
    record: Any = SparseMlaPrefill
    arrays = {name: listed()[0][name] for name in ("q", "kv", "indices")}
    call = dataclasses.replace(jax_call(record, arrays, d_v=16), device=Device(framework="torch", platform="cuda"))
    for operation in ("varlen_attention", "varlen_attention_backward", "sparse_mla_prefill_backward"):
        assert xla(operation).why_not(call) == "runs on jax arrays, got a call from torch"


def test_more_rows_than_int32_counts_are_refused_by_the_sparse_gradient_on_xla() -> None:
    jax = pytest.importorskip("jax")
    module = importlib.import_module("ragged_attention.portable.xla.sparse_mla_prefill_backward")
    operation, device = "sparse_mla_prefill_backward", Device(framework="jax", platform="cpu")
    call: Any = sample_of(operation).call(operation, device)
    assert module.why_not(call) is None
    large = dataclasses.replace(call, kv=jax.ShapeDtypeStruct((2**25, *call.kv.shape[1:]), call.kv.dtype))
    assert module.why_not(large) == "numbers rows in int32, got 2147483648"
