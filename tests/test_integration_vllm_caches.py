"""vLLM's caches with a scale for each row, through our classes; the tests decode vLLM's byte layout themselves."""

import dataclasses
import enum
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import ragged_attention as ra
from ragged_attention.errors import Unsupported
from ragged_attention.integrations import _vllm_rotation
from ragged_attention.integrations import vllm as module
from ragged_attention.testing.compare import agrees
from tests import vllm_fakes as fakes
from tests.test_integration_vllm import MIXED, Step, attend, implementation, in_memory_as
from tests.test_integration_vllm_ranks import on_ranks

ours: Any = module

BACKENDS = ("eager", "numba")
TOKEN_HEAD = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head")
TAKEN = (*TOKEN_HEAD, "nvfp4")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SIZE = 32
# The other cache dtypes of vLLM 0.33, which we refuse; `octave_*` are new in 0.33.
REFUSED = (
    "fp8_inc", "fp8_ds_mla", "nvfp4_ds_mla", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc",
    "turboquant_3bit_nc", "octave_k3v4", "octave_k3v3", "octave_k3v3_compact", "ultraquant_4bit", "nvfp4_4over6",
)  # fmt: skip


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with ra.use_backend(request.param):
        yield request.param


class QuantisedStep(Step):
    """A step over a quantised cache. Unstored bytes are 255, so that their scales are NaN."""

    def __init__(
        self, name: str, lens: Any = MIXED, *, layout: str = "LBHNC", scales: Any = (1.0, 1.0), **options: Any
    ):
        super().__init__(lens, scales=scales, **options)
        self.name = name
        blocks, heads, page, _ = self.cache.shape
        content = {
            "int8_per_token_head": 2 * self.size + 8,
            "fp8_per_token_head": 2 * self.size + 8,
            "int4_per_token_head": self.size + 8,
            "nvfp4": self.size // 2 + self.size // 16,
        }[name]
        slots = 2 * heads if name == "nvfp4" else heads
        empty = in_memory_as(layout, (blocks, slots, page, content), torch.float8_e4m3fn).view(torch.uint8).fill_(255)
        self.heads, self.cache = heads, empty.view(torch.int8) if name.startswith("int8") else empty
        self.earlier = torch.tensor([
            int(self.table[row, position // page]) * page + position % page
            for row, (q_len, kv_len) in enumerate(self.lens) for position in range(kv_len - q_len)
        ])  # fmt: skip

    def implementation(self, **options: Any) -> Any:
        """The implementation of a layer, after it has stored the earlier rows."""
        impl = implementation(kv_cache_dtype=self.name, head_size=self.size, **options)
        k, v = (torch.randn(len(self.earlier), self.heads, self.size).to(self.q.dtype) for _ in range(2))
        impl.do_kv_cache_update(self.layer, k, v, self.cache, self.earlier)
        return impl

    def dense(self, **features: Any) -> torch.Tensor:
        """The output of dense attention in float64, from the decoded bytes."""
        held = self.cache
        self.cache = torch.from_numpy(np.concatenate([decoded(self, side) for side in range(2)], axis=-1))
        try:
            return super().dense(**features)
        finally:
            self.cache = held


def e4m3() -> torch.dtype:
    """The dtype of vLLM's 8-bit floats on the current platform."""
    return importlib.import_module("vllm.platforms").current_platform.fp8_dtype()


def decoded(step: QuantisedStep, side: int) -> Any:
    """Keys (side 0) or values of a whole cache, float64 [blocks, K, page, D], without the layer's own scales."""
    size, name = step.size, step.name
    raw = step.cache.view(torch.uint8)
    if name == "nvfp4":
        return _decoded_nvfp4(step, side)
    width = size // 2 if name.startswith("int4") else size
    rows = raw.numpy()[..., side * (width + 4) :][..., : width + 4]
    bits = np.ascontiguousarray(rows[..., width:]).view(np.uint32)
    if name.startswith("int8"):
        return rows[..., :width].astype(np.int8) * bits.view(np.float32).astype(np.float64)
    if name.startswith("fp8"):
        codes = torch.from_numpy(np.ascontiguousarray(rows[..., :width])).view(e4m3()).double()
        return codes.numpy() * bits.view(np.float32).astype(np.float64)
    codes = np.stack((rows[..., :width] & 15, rows[..., :width] >> 4), -1).reshape(*rows.shape[:-1], size)
    turned = (codes - (bits & 15).astype(np.float64)) * (bits & ~np.uint32(15)).view(np.float32)
    at = np.arange(size)
    matrix = np.array([[(-1.0) ** (int(i) & int(j)).bit_count() for j in at] for i in at])
    signs = json.loads(Path(__file__).with_name("quantised_rows.json").read_text())["signs"]
    assert len(signs) == size
    return turned @ matrix * np.array(signs) / size


def _decoded_nvfp4(step: QuantisedStep, side: int) -> Any:
    """The decoded keys or values of nvfp4 blocks.

    A block has the keys' codes and scales, followed by the values' codes and scales. Its rows are ordered by heads or
    by positions.
    """
    _, slots, page, content = step.cache.shape
    heads, size = slots // 2, step.size
    by_heads = step.cache.stride(1) > step.cache.stride(2)
    order = (heads, page) if by_heads else (page, heads)
    found = []
    for block in step.cache:
        memory = (block if by_heads else block.transpose(0, 1)).reshape(-1).numpy()
        own = memory[side * heads * page * content :]
        codes = own[: heads * page * size // 2].reshape(*order, size // 2)
        scales = own[heads * page * size // 2 :][: heads * page * size // 16].reshape(*order, size // 16)
        values = E2M1[np.stack((codes & 15, codes >> 4), -1).reshape(*order, size)]
        groups = torch.from_numpy(scales.copy()).view(torch.float8_e4m3fn).double().numpy()
        found.append(values * groups.repeat(16, -1))
    return np.stack(found if by_heads else [each.swapaxes(0, 1) for each in found])


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC"])
@pytest.mark.parametrize("name", TAKEN)
def test_attention_over_rows_with_scales(name, layout, vllm, backend):
    if (name, layout) == ("nvfp4", "BHLNC"):  # vLLM and we refuse this layout, as tested below
        layout = "LBHNC"
    step = QuantisedStep(name, layout=layout, scales=(0.5, 0.25) if name == "nvfp4" else (1.0, 1.0))
    out = step.run(step.implementation())
    assert out.isfinite().all()
    assert agrees(out, step.dense(), "float32")


def test_8_bit_rows_of_an_mi300(monkeypatch, backend):
    with fakes.installed(monkeypatch, device="gfx942"):
        assert e4m3() == torch.float8_e4m3fnuz
        step = QuantisedStep("fp8_per_token_head")
        assert agrees(step.run(step.implementation()), step.dense(), "float32")


@pytest.mark.parametrize("name", TAKEN)
def test_rows_are_stored_as_precisely_as_their_format_allows(name, vllm, backend):
    step = QuantisedStep(name, scales=(0.02, 0.02) if name == "nvfp4" else (1.0, 1.0))
    step.run(step.implementation())
    at = step.slots[: step.tokens]
    for side, rows in enumerate((step.k, step.v)):
        stored = decoded(step, side).swapaxes(1, 2).reshape(-1, step.heads, step.size)[at]
        stored = stored * 0.02 if name == "nvfp4" else stored
        error = np.linalg.norm(stored - rows[: step.tokens].double().numpy()) / np.linalg.norm(stored)
        assert error < {"int8": 0.01, "fp8_": 0.04, "int4": 0.12, "nvfp": 0.12}[name[:4]]


@pytest.mark.parametrize(
    ("options", "features"),
    [
        ({"sliding_window": 9, "logits_soft_cap": 1.5}, {"window": 9, "cap": 1.5}),
        ({"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
        ({"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]}, {"slopes": [0.5, 0.25, 0.125, 0.0625]}),
    ],
    ids=["window", "sinks", "alibi"],
)
@pytest.mark.parametrize("name", ["int8_per_token_head", "int4_per_token_head"])
def test_features_over_rows_with_scales(name, options, features, vllm, backend):
    step = QuantisedStep(name)
    assert agrees(step.run(step.implementation(**options)), step.dense(**features), "float32")


@pytest.mark.parametrize("name", TAKEN)
def test_queries_in_bfloat16(name, vllm, backend):
    step = QuantisedStep(name, dtype=torch.bfloat16)
    out = step.run(step.implementation())
    if name.startswith("int4"):  # rotated queries are rounded again, as in vLLM
        step.q = _vllm_rotation.rotated_back(_vllm_rotation.rotated(step.q))
    assert agrees(out.float(), step.dense(), "bfloat16")


def test_a_profiling_run_makes_the_matrix_of_a_rotation(vllm):
    _vllm_rotation._matrix.cache_clear()
    impl, q = implementation(kv_cache_dtype="int4_per_token_head"), torch.randn(3, 4, 32)
    assert not impl.forward(None, q, None, None, torch.empty(0), None, torch.ones_like(q)).any()
    assert _vllm_rotation._matrix.cache_info().currsize == 1


@pytest.mark.parametrize("name", TAKEN)
def test_nothing_but_the_rows_of_slots_is_written(name, vllm, backend):
    step = QuantisedStep(name)
    step.slots[2] = -1
    before = [decoded_bytes(step, side) for side in range(2)]
    implementation(kv_cache_dtype=name).do_kv_cache_update(step.layer, step.k, step.v, step.cache, step.slots)
    touched = torch.zeros(len(before[0]), dtype=torch.bool)
    touched[step.slots[step.slots >= 0]] = True
    for side, old in enumerate(before):
        new = decoded_bytes(step, side)
        assert torch.equal(new[~touched], old[~touched])
        assert (new[touched] != old[touched]).any(-1).all()
    assert (step.cache.view(torch.uint8) != 255).any()


def decoded_bytes(step: QuantisedStep, side: int) -> torch.Tensor:
    """The decoded rows [slots, K * D] as the bits of float64."""
    rows = decoded(step, side).swapaxes(1, 2)
    return torch.from_numpy(rows.reshape(rows.shape[0] * rows.shape[1], -1).copy()).view(torch.int64)


@pytest.mark.parametrize("name", TOKEN_HEAD)
def test_earlier_rows_on_several_ranks(name, vllm, backend):
    """Earlier rows are read from the caches of several ranks, which together hold the rows of one cache.

    The step's own rows are used without quantisation and rotation.
    """
    whole = QuantisedStep(name, [(1, 34), (7, 30)], heads=(4, 1))
    whole.implementation(num_kv_heads=1)
    keys, values = (torch.from_numpy(decoded(whole, side)).float() for side in range(2))
    out = on_ranks(whole, 2, 4, [{"kv_cache_dtype": name}] * 2)
    begin = 0
    for row, (q_len, kv_len) in enumerate(whole.lens):
        at = torch.arange(kv_len - q_len)
        there = whole.table[row, at // whole.page].long(), slice(None), at % whole.page
        new = slice(begin, begin + q_len)
        k, v = torch.cat((keys[there], whole.k[new])), torch.cat((values[there], whole.v[new]))
        seen = torch.arange(kv_len) <= torch.arange(kv_len - q_len, kv_len)[:, None]
        want, _ = attend(whole.q[new], k.expand(-1, 4, -1), v.expand(-1, 4, -1), 0.3, seen)
        assert agrees(out[new], want, "float32")
        begin += q_len


# The specifications that vLLM gets


class KVQuantMode(enum.IntEnum):
    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4
    NVFP4 = 5
    TURBOQUANT_K8V4 = 6


@dataclasses.dataclass(frozen=True)
class Spec:
    """A fake of vLLM's `AttentionSpec` with the fields that we read or set."""

    kv_quant_mode: KVQuantMode
    head_size: int = 128
    head_size_v: int = 128
    num_kv_heads: int = 8
    num_head_slots: int | None = None
    state_content_bytes: int | None = None


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (Spec(KVQuantMode.NONE), {}),
        (Spec(KVQuantMode.FP8_PER_TENSOR), {}),
        (Spec(KVQuantMode.INT8_PER_TOKEN_HEAD), {"state_content_bytes": 264}),
        (Spec(KVQuantMode.FP8_PER_TOKEN_HEAD, head_size_v=64), {"state_content_bytes": 200}),
        (Spec(KVQuantMode.INT4_PER_TOKEN_HEAD, 96, 96), {"state_content_bytes": 104}),
        (Spec(KVQuantMode.NVFP4), {"state_content_bytes": 72, "num_head_slots": 16}),
        (Spec(KVQuantMode.INT8_PER_TOKEN_HEAD, state_content_bytes=300), {}),  # the layer has set the size itself
        (Spec(KVQuantMode.TURBOQUANT_K8V4), {}),
    ],
)
def test_a_spec_has_room_for_scales(spec, changes, vllm):
    assert ours.RaggedAttentionBackend.customize_spec(spec) == dataclasses.replace(spec, **changes)


@pytest.mark.parametrize("name", TAKEN)
def test_vllm_is_told_that_the_format_is_taken(name, vllm):
    backend = ours.RaggedAttentionBackend
    assert backend.supports_kv_cache_dtype(name)
    rest: tuple[Any, ...] = (64, False, False, False, False, None)
    assert backend.supports_combination(128, torch.bfloat16, name, *rest) is None
    assert backend.supports_combination(128, torch.bfloat16, None, *rest) is None
    assert not implementation(kv_cache_dtype=name).fused_rope_kvcache_supported()
    assert not implementation(kv_cache_dtype=name).fused_qk_norm_rope_kvcache_supported()


def test_a_head_size_without_whole_groups_is_refused(vllm):
    message = "expected a head size of a multiple of 16 with kv_cache_dtype='nvfp4', got 24"
    rest: tuple[Any, ...] = (64, False, False, False, False, None)
    assert ours.RaggedAttentionBackend.supports_combination(24, torch.bfloat16, "nvfp4", *rest) == message
    with pytest.raises(Unsupported, match=message):
        implementation(kv_cache_dtype="nvfp4", head_size=24)


def test_blocks_of_nvfp4_that_are_not_dense_are_refused(vllm, backend):
    cache = in_memory_as("BHLNC", (3, 4, 16, 18), torch.float8_e4m3fn).view(torch.uint8)
    layer = SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0))
    with pytest.raises(Unsupported, match=r"expected a cache of nvfp4 whose blocks are dense, got strides \[3456, "):
        implementation(kv_cache_dtype="nvfp4").do_kv_cache_update(
            layer, torch.zeros(1, 2, 32), torch.zeros(1, 2, 32), cache, torch.zeros(1, dtype=torch.int64)
        )


@pytest.mark.parametrize("name", REFUSED)
def test_other_formats_are_refused_by_name(name, vllm):
    assert not ours.RaggedAttentionBackend.supports_kv_cache_dtype(name)
    with pytest.raises(Unsupported, match=f"expected kv_cache_dtype to be one of auto, .*, nvfp4, got '{name}'"):
        implementation(kv_cache_dtype=name)
