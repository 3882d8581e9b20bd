"""The backend for tpu-inference: its registration, its refusals, and its agreement with dense attention."""

import dataclasses
import importlib.metadata
import inspect
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes import loaded

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from ragged_attention import use_backend  # noqa: E402
from ragged_attention.errors import InvalidInput, Unsupported  # noqa: E402
from ragged_attention.integrations import tpu_inference  # noqa: E402
from ragged_attention.testing import agrees  # noqa: E402
from tests import tpu_inference_fakes as fakes  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
HOST = "tpu_inference.layers.common.attention_backend"
REGISTRY = "vllm.v1.attention.backends.registry"
MIXED = ((1, 9), (5, 11), (1, 1), (4, 4))  # decode, a chunk, a first token, a whole prompt
SCALE = fakes.HEAD_DIM**-0.5


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The backend module of a fake tpu-inference 0.32."""
    monkeypatch.syspath_prepend(fakes.installed(tmp_path, "0.32.0"))
    made = fakes.modules()
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made[HOST]


def vllm_path() -> str:
    """The path under which vLLM looks for the backend."""
    return sys.modules[REGISTRY].AttentionBackendEnum.__members__["RAGGED"].get_path()


@pytest.fixture
def backend(host: Any) -> Any:
    tpu_inference.register()
    return host.create_attention_backend("ragged")


def test_the_name_is_registered(host):
    tpu_inference.register()
    tpu_inference.plugin()  # vLLM may run plugins more than once
    assert list(host._REGISTERED_BACKENDS) == ["ragged"]
    path = vllm_path()
    module, _, name = path.rpartition(".")
    found = getattr(sys.modules[module], name)
    assert issubclass(found, fakes.PallasAttentionBackend)
    assert found.get_name() == "RAGGED"
    assert issubclass(found.get_impl_cls(), fakes.PallasAttentionBackendImpl)
    assert found.get_impl_cls().attention_backend == tpu_inference.NAME == "ragged"


def test_the_classes_are_found_where_they_say_they_are(backend):
    assert isinstance(backend, fakes.AttentionBackend)
    for name in ("RaggedAttentionBackend", "RaggedPallasBackend", "RaggedPallasImpl"):
        found = getattr(tpu_inference, name)
        assert found.__doc__
        assert pickle.loads(pickle.dumps(found)) is found
    assert type(backend) is tpu_inference.RaggedAttentionBackend
    with pytest.raises(AttributeError, match="no attribute 'RaggedMLABackend'"):
        _ = tpu_inference.RaggedMLABackend


@pytest.mark.parametrize("method", ["get_kv_cache_shape", "attention"])
def test_the_signatures_are_the_hosts(backend, method):
    ours, theirs = (inspect.signature(getattr(cls, method)) for cls in (type(backend), fakes.AttentionBackend))
    assert [(p.name, p.kind) for p in ours.parameters.values()] == [
        (p.name, p.kind) for p in theirs.parameters.values()
    ]


def test_a_name_that_is_taken_stays(host, caplog):
    sys.modules[REGISTRY].register_backend("RAGGED", "elsewhere.Backend")
    with pytest.raises(ValueError, match=r"already has an attention backend named RAGGED, at elsewhere\.Backend"):
        tpu_inference.register()
    tpu_inference.plugin()
    assert "vLLM already has an attention backend named RAGGED" in caplog.text
    assert vllm_path() == "elsewhere.Backend"
    assert not host._REGISTERED_BACKENDS


def test_the_name_as_it_is_on_gpus_is_taken_over(host):
    sys.modules[REGISTRY].register_backend("RAGGED", tpu_inference.OTHER_PATH)
    tpu_inference.register()
    assert vllm_path() == "ragged_attention.integrations.tpu_inference.RaggedPallasBackend"
    assert list(host._REGISTERED_BACKENDS) == ["ragged"]


def test_without_tpu_inference(monkeypatch):
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ImportError, match=r"expected tpu-inference >= 0\.32, < 0\.33, to be installed, got no such"):
        tpu_inference.register()
    tpu_inference.plugin()


@pytest.mark.parametrize("version", ["0.31.1", "0.33.0", "1.32.0", "1"])
def test_other_versions(host, monkeypatch, tmp_path, caplog, version):
    (folder := tmp_path / "other").mkdir()
    monkeypatch.syspath_prepend(fakes.installed(folder, version))
    with pytest.raises(ImportError, match=rf"expected tpu-inference >= 0\.32, < 0\.33, the version .*, got {version}$"):
        tpu_inference.register()
    tpu_inference.plugin()  # does not raise, so vLLM still starts
    assert not host._REGISTERED_BACKENDS
    assert caplog.messages[0].startswith("--attention-backend ragged is not available: expected tpu-inference >= 0.32")


def test_what_the_host_needs_is_missing(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(fakes.installed(tmp_path, "0.32.1"))
    monkeypatch.setitem(sys.modules, "tpu_inference", None)
    with pytest.raises(
        ImportError, match=f"expected {HOST} to be importable, got ModuleNotFoundError: .*tpu_inference"
    ):
        tpu_inference.register()


def test_plugins_that_find_no_host_import_no_framework():
    assert loaded("ragged_attention.integrations.tpu_inference:plugin", "jax", "torch", "tpu_inference") == []


@pytest.mark.parametrize(("head_dim", "columns"), [(128, 128), (64, 128), (80, 128), (192, 256)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e5m2, np.int8])
def test_the_shape_of_the_cache(backend, head_dim, columns, dtype):
    assert backend.get_kv_cache_shape(7, 16, 3, head_dim, dtype) == (7, 16, 6, columns)


def test_a_cache_of_four_bits_is_refused(backend):
    with pytest.raises(Unsupported, match=r"expected kv_dtype to be float32, .* or int8, got float4_e2m1fn"):
        backend.get_kv_cache_shape(7, 16, 3, 128, jnp.float4_e2m1fn)


SETTINGS = {
    "plain": ({}, {}),
    "window": ({"attention_chunk_size": 3}, {"window": 3}),
    "soft cap": ({"attn_logits_soft_cap": 0.5}, {"soft_cap": 0.5}),
    "sinks": ({"sinks": np.linspace(-1, 2, fakes.HEADS)}, {"sinks": np.linspace(-1, 2, fakes.HEADS)}),
    "bidirectional": ({"use_causal_mask": False}, {"causal": False}),
    "scale": ({"sm_scale": 0.1, "decode_query_size": 4}, {"sm_scale": 0.1}),
    "all": (
        {"attention_chunk_size": 4, "attn_logits_soft_cap": 2.0, "sinks": np.ones(fakes.HEADS)}
        | {"use_causal_mask": False},
        {"window": 4, "soft_cap": 2.0, "sinks": np.ones(fakes.HEADS), "causal": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_a_mixed_batch(backend, name):
    theirs, ours = SETTINGS[name]
    batch = fakes.batch_of(MIXED)
    theirs = {key: jnp.asarray(value) if isinstance(value, np.ndarray) else value for key, value in theirs.items()}
    with use_backend("xla"):
        cache, out = fakes.call(backend, batch, fakes.allotted(backend, batch, jnp.float32), fakes.mesh_of(), **theirs)
    want = fakes.written(batch)
    np.testing.assert_array_equal(cache[..., : fakes.HEAD_DIM], want)
    assert not np.any(cache[..., fakes.HEAD_DIM :])
    agrees(out, fakes.dense(batch, want, **{"sm_scale": SCALE} | ours), "float32")


def test_decode_in_bfloat16_under_jit(backend):
    batch = fakes.batch_of(((1, 9), (1, 4), (1, 1)))
    rounded = {
        name: np.asarray(jnp.asarray(getattr(batch, name), jnp.bfloat16), np.float32)
        for name in ("q", "k", "v", "cache")
    }
    batch = dataclasses.replace(batch, **rounded)

    def step(cache: Any, md: Any) -> Any:
        return fakes.call(backend, batch, cache, fakes.mesh_of(), md=md, q_dtype=jnp.bfloat16)

    given = fakes.allotted(backend, batch, jnp.bfloat16)
    with use_backend("xla"):
        cache, out = jax.jit(step, donate_argnums=0)(given, batch.metadata())
    assert given.is_deleted()
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(cache, np.float32)[..., : fakes.HEAD_DIM], fakes.written(batch))
    agrees(np.asarray(out, np.float32), fakes.dense(batch, fakes.written(batch), sm_scale=SCALE), "bfloat16")


@pytest.mark.parametrize(
    ("dtype", "q_scale"), [("float8_e4m3fn", None), ("float8_e4m3fn", 0.01), ("float8_e5m2", None), ("int8", None)]
)
@pytest.mark.parametrize("q_dtype", ["float32", "bfloat16"])
def test_a_cache_of_eight_bits_and_its_scales(backend, dtype, q_dtype, q_scale):
    batch, grow = fakes.batch_of(MIXED), 30.0 if dtype == "int8" else 1.0
    stored = {
        name: np.asarray(jnp.asarray(getattr(batch, name) * grow).astype(dtype).astype(jnp.float32))
        for name in ("k", "v", "cache")
    }
    q = np.asarray(jnp.asarray(batch.q, q_dtype), np.float32)
    batch = dataclasses.replace(batch, q=q, **stored)
    k_scale, v_scale = 0.7 / grow, 1.3 / grow
    with use_backend("xla"):
        cache, out = fakes.call(
            backend, batch, fakes.allotted(backend, batch, dtype), fakes.mesh_of(), q_dtype=q_dtype,
            k_scale=k_scale, v_scale=v_scale, q_scale=q_scale,
        )  # fmt: skip
    if q_scale is not None:
        q = q_scale * np.asarray(jnp.asarray(np.clip(q / q_scale, -448, 448)).astype(dtype), np.float32)
        batch = dataclasses.replace(batch, q=q)
    want = fakes.written(batch)
    np.testing.assert_array_equal(cache[..., : fakes.HEAD_DIM].astype(jnp.float32), want)
    true = want.astype(np.float64)
    true[:, :, 0::2] *= k_scale
    true[:, :, 1::2] *= v_scale
    assert out.dtype == q_dtype
    agrees(np.asarray(out, np.float32), fakes.dense(batch, true, sm_scale=SCALE), "bfloat16")


def test_a_layer_that_shares_its_cache_writes_nothing(backend):
    batch = fakes.batch_of(MIXED)
    filled = dataclasses.replace(batch, cache=fakes.written(batch))
    given = fakes.allotted(backend, filled, jnp.float32)
    with use_backend("xla"):
        cache, out = fakes.call(
            backend, filled, given, fakes.mesh_of(), update_kv_cache=False, k=np.zeros_like(batch.k),
            v=np.zeros_like(batch.v),
        )  # fmt: skip
    np.testing.assert_array_equal(cache, given)
    agrees(out, fakes.dense(filled, filled.cache, sm_scale=SCALE), "float32")


def test_over_some_of_eight_devices():
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.tpu_inference_fakes"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("devices") == 2
    assert set(found) == {"heads", "heads kept twice", "batches"}
    assert max(found.values()) < 1e-6


INTERFACE = "tpu_inference.layers.common.attention_interface"


@pytest.mark.parametrize("asked", [None, "0", "1"])
def test_latent_attention_is_taken_over_for_those_who_ask(host, monkeypatch, asked):
    layers = sys.modules[INTERFACE]
    if asked is None:
        monkeypatch.delenv(tpu_inference.MLA_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(tpu_inference.MLA_VARIABLE, asked)
    tpu_inference.register(mla=False)
    assert layers.mla_ragged_paged_attention is None
    tpu_inference.plugin()
    assert (layers.mla_ragged_paged_attention is not None) == (asked == "1")
    tpu_inference.register(mla=True)
    assert layers.mla_ragged_paged_attention is not None


def test_a_host_without_the_kernel_of_latent_attention(host, monkeypatch):
    monkeypatch.delattr(sys.modules[INTERFACE], "mla_ragged_paged_attention")
    with pytest.raises(ImportError, match=f"expected {INTERFACE} to call mla_ragged_paged_attention, got no such name"):
        tpu_inference.register(mla=True)
    monkeypatch.setitem(sys.modules, INTERFACE, None)
    with pytest.raises(ImportError, match=f"expected {INTERFACE} to be importable, got ModuleNotFoundError"):
        tpu_inference.register(mla=True)


@pytest.mark.parametrize(("q_dtype", "kv_dtype"), [
    ("float32", "float32"), ("bfloat16", "float8_e4m3fn"), ("float8_e4m3fn", "float8_e4m3fn"),
])  # fmt: skip
def test_a_mixed_batch_of_latent_attention(host, q_dtype, kv_dtype):
    """A mixed batch of latent attention works as the host's layers call it.

    They pass block sizes that are tuned for the host's kernel, and some pass quantised queries.
    """
    tpu_inference.register(mla=True)
    batch, latent, rotary = fakes.batch_of(MIXED), 48, 16
    scales = {} if kv_dtype == "float32" else {"q_scale": 0.5, "k_scale": 0.4, "v_scale": 0.7}
    generator = np.random.default_rng(1)

    def drawn(dtype: str, *shape: int) -> Any:
        return jnp.asarray(generator.standard_normal(shape), jnp.float32).astype(dtype)

    tokens, pages = len(batch.q), len(batch.cache)
    packing = 1 if kv_dtype == "float32" else 4
    rows = drawn(kv_dtype, pages, fakes.PAGE_SIZE, 256)
    arrays = [
        drawn(q_dtype, fakes.HEADS, tokens, latent), drawn(q_dtype, tokens, fakes.HEADS, rotary),
        drawn(kv_dtype, tokens, latent), drawn(kv_dtype, tokens, rotary),
        rows.reshape(pages, fakes.PAGE_SIZE // packing, packing, 256),
    ]  # fmt: skip
    q = np.zeros((tokens, fakes.HEADS, 256), np.float32)
    q[:, :, :latent], q[:, :, 128 : 128 + rotary] = arrays[0].swapaxes(0, 1), arrays[1]
    new = np.zeros((tokens, 1, 256), np.float32)
    new[:, 0, :latent], new[:, 0, 128 : 128 + rotary] = arrays[2], arrays[3]
    # `written` takes the rows both as keys and as values.
    both = np.repeat(np.asarray(rows, np.float32)[:, :, None], 2, axis=2)
    want = fakes.written(dataclasses.replace(batch, k=new, v=new, cache=both))
    with use_backend("xla"):
        out, cache = fakes.mla_layer(sys.modules[INTERFACE], batch, arrays, fakes.mesh_of(), **scales)
    np.testing.assert_array_equal(np.asarray(cache, np.float32).reshape(rows.shape), want[:, :, 0])
    dense = fakes.dense(dataclasses.replace(batch, q=q), want, sm_scale=0.1 * (0.2 if scales else 1.0))
    dense = dense[:, :, :latent].swapaxes(0, 1) * (0.7 if scales else 1.0)
    assert out.dtype == q_dtype
    assert arrays[4].is_deleted()
    if q_dtype == "float8_e4m3fn":
        np.testing.assert_allclose(np.asarray(out, np.float32), dense, rtol=0.08, atol=0.02)
    else:
        agrees(np.asarray(out, np.float32), dense, q_dtype)


class Axes:
    """A fake mesh with the attribute that the refusals read."""

    def __init__(self, **shape: int) -> None:
        self.shape = shape


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"q_scale": 0.5}, Unsupported, "expected q_scale only with a cache of float8_e4m3fn, got float32"),
    ({"q_scale": np.ones(2)}, TypeError, "expected q_scale to be a number or None, got ndarray"),
    ({"mesh": Axes(dcp=2)}, Unsupported, "expected mesh axis 'dcp' of size 1, since context is not shared out, got 2"),
    ({"mesh": Axes(pcp=4)}, Unsupported, "expected mesh axis 'pcp' of size 1, since context is not shared out, got 4"),
    ({"mesh": Axes(model=3)}, Unsupported, "expected the number of KV heads to divide 3 devices, got 2"),
    ({"md": fakes.AttentionMetadata(None)}, Unsupported, r"expected md\.block_tables to be an array, .* got None"),
    ({"k_scale": np.ones(2)}, TypeError, "expected k_scale to be a number or None, got ndarray"),
    ({"v_scale": np.ones(2)}, TypeError, "expected v_scale to be a number or None, got ndarray"),
    ({"attention_chunk_size": 0}, InvalidInput, "expected sliding_window"),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")  # fmt: skip
def test_what_is_refused(backend, changes, error, message):
    batch = fakes.batch_of(MIXED)
    mesh = changes.get("mesh") or fakes.mesh_of()
    changes = {name: value for name, value in changes.items() if name != "mesh"}
    with pytest.raises(error, match=message):
        fakes.call(backend, batch, fakes.allotted(backend, batch, jnp.float32), mesh, **changes)


def test_arrays_that_do_not_go_together_are_refused(backend):
    batch = fakes.batch_of(MIXED)
    cache, md = fakes.allotted(backend, batch, "float8_e4m3fn"), batch.metadata()
    settings = dict.fromkeys(("attention_chunk_size", "q_scale", "k_scale", "v_scale", "sinks", "attn_logits_soft_cap"))
    settings |= {"head_dim_original": 16, "sm_scale": 1.0, "update_kv_cache": True, "use_causal_mask": True}
    q, k, v = (jnp.asarray(getattr(batch, name)) for name in "qkv")

    def attend(cache: Any, *rows: Any) -> None:
        backend.attention(cache, *rows, md, md, fakes.mesh_of(), decode_query_size=1, **settings)

    with pytest.raises(InvalidInput, match=r"expected k\.dtype to be that of kv_cache, float8_e4m3fn, got float32"):
        attend(cache, q, k, v)
    with pytest.raises(InvalidInput, match=r"expected v\.dtype to be that of kv_cache, float8_e4m3fn, got float32"):
        attend(cache, q, k.astype(cache.dtype), v)
    with pytest.raises(InvalidInput, match=r"expected kv_cache of shape \[P, G, 2K, D\], got \[9, 4, 1, 4, 128\]"):
        attend(jnp.zeros((9, 4, 1, 4, 128)), q, k, v)
