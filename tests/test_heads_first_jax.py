"""Attention over heads-first pages, and attention that writes new keys and values, under jax's transformations."""

from typing import Any

import numpy as np
import pytest

import ragged_attention as ra
from ragged_attention.reference import paged_attention as decode
from ragged_attention.reference import prefill_attention as prefill
from ragged_attention.testing.compare import agrees, identical

pytest.importorskip("jax")

import jax
import jax.export
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.paged_attention import quantization_utils

import ragged_attention.jax as front

paged_attention: Any = front.paged_attention
prefill_attention: Any = front.prefill_attention
ragged_paged_attention: Any = front.ragged_paged_attention
write_kv_pages: Any = front.write_kv_pages
decode_defined: Any = decode.paged_attention
chunk_defined: Any = prefill.prefill_attention
K, P, G, D, H = 2, 8, 4, 16, 4
RANDOM = np.random.default_rng(3)
PAGES = RANDOM.standard_normal((2, K, P, G, D), np.float32)
DECODE = {
    "q": RANDOM.standard_normal((3, H, D), np.float32),
    "k_pages": PAGES[0],
    "v_pages": PAGES[1],
    "lengths": np.array([0, 5, 8], np.int32),
    "page_indices": np.array([[-1, 99], [3, 1], [0, 7]], np.int32),
}
CHUNK = DECODE | {"page_indices": DECODE["page_indices"][1]}
del CHUNK["lengths"]


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_decode_under_jit_compiles_once_for_all_lengths(backend: str) -> None:
    traces = []

    @jax.jit
    def attend(lengths: Any) -> Any:
        traces.append(1)
        return paged_attention(**DECODE | {"lengths": lengths}, soft_cap=2.0, backend=backend)

    for lengths in ([0, 5, 8], [1, 0, 0], [8, 8, 8]):
        given = np.array(lengths, np.int32)
        assert agrees(attend(given), decode_defined(**DECODE | {"lengths": given}, soft_cap=2.0), "float32")
    assert len(traces) == 1


@pytest.mark.parametrize("align", ["chunk", "end"])
def test_prefill_compiles_once_for_all_lengths(align: str) -> None:
    traces = []

    @jax.jit
    def attend(length: Any) -> Any:
        traces.append(1)
        return prefill_attention(**CHUNK, length=length, align=align, backend="xla")

    for length in (0, 1, 5, 8):
        want = chunk_defined(**CHUNK, length=length, align=align)
        assert agrees(attend(np.array([length], np.int32)), want, "float32")
        assert agrees(prefill_attention(**CHUNK, length=length, align=align), want, "float32")
    assert len(traces) == 1


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_pages_that_jax_quantised_are_what_jax_makes_of_them(backend: str) -> None:
    quantized = [quantization_utils.quantize_to_int8(jnp.asarray(pages)) for pages in PAGES]
    values = [quantization_utils.unquantize_from_int8(pages, jnp.float32) for pages in quantized]
    given, wide = (dict(zip(("k_pages", "v_pages"), pages, strict=True)) for pages in (quantized, values))
    want = paged_attention(**DECODE | wide, backend=backend)
    assert agrees(paged_attention(**DECODE | given, backend=backend), want, "bfloat16")
    assert agrees(
        jax.jit(paged_attention, static_argnames="backend")(**DECODE | given, backend=backend), want, "bfloat16"
    )
    want = prefill_attention(**CHUNK | wide, length=6, backend=backend)
    assert agrees(prefill_attention(**CHUNK | given, length=6, backend=backend), want, "bfloat16")


@pytest.mark.parametrize("quantized", [False, True])
def test_the_cache_is_not_copied(quantized: bool) -> None:
    """The compiled decode only gathers single rows of the pages, and no temporary has the size of the cache."""
    many = 4096
    pages: Any = jax.ShapeDtypeStruct((K, many, G, D), jnp.int8 if quantized else jnp.bfloat16)
    if quantized:
        pages = (pages, jax.ShapeDtypeStruct((K, many, G, 1), jnp.float32))
    arguments = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in DECODE.items()}
    arguments |= {"k_pages": pages, "v_pages": pages, "q": jax.ShapeDtypeStruct((3, H, D), jnp.bfloat16)}
    compiled = jax.jit(lambda **given: paged_attention(**given, backend="xla")).lower(**arguments).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < K * many * G * D // 2


def test_vmap_over_queries() -> None:
    q = jnp.stack([DECODE["q"], -DECODE["q"]])
    for got, queries in zip(jax.vmap(lambda q: paged_attention(**DECODE | {"q": q}))(q), q, strict=True):
        assert agrees(got, decode_defined(**DECODE | {"q": np.asarray(queries)}), "float32")


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_export(platform: str) -> None:
    def both(q: Any, length: Any) -> Any:
        decoded = paged_attention(**DECODE | {"q": q[:3]}, backend="xla")
        return decoded, prefill_attention(**CHUNK | {"q": q}, length=length, backend="xla")

    shapes = jax.ShapeDtypeStruct((5, H, D), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.int32)
    assert jax.export.export(jax.jit(both), platforms=[platform])(*shapes).platforms == (platform,)


def test_both_are_explained() -> None:
    assert "* numba" in ra.explain("paged_attention", **DECODE)
    assert "* numba" in ra.explain("prefill_attention", **CHUNK, length=5, align="end")


# ---- new keys and values

STEP = {
    "q": RANDOM.standard_normal((5, H, D), np.float32),
    "kv_lens": np.array([3, 8], np.int32),
    "page_indices": np.array([[0, 1], [2, 3]], np.int32),
    "cu_q_lens": np.array([0, 2, 5], np.int32),
}
CACHE = RANDOM.standard_normal((6, 4, 2 * K, D), np.float32)
NEW = tuple(RANDOM.standard_normal((2, 5, K, D), np.float32))


def pages_of(pair: bool) -> Any:
    return (jnp.asarray(CACHE[:, :, 0::2]), jnp.asarray(CACHE[:, :, 1::2])) if pair else jnp.asarray(CACHE)


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("jitted", [False, True])
def test_new_keys_are_written_and_then_seen(pair: bool, jitted: bool) -> None:
    def step(pages: Any, new: Any) -> Any:
        return ragged_paged_attention(**STEP, kv_pages=pages, new_kv=new, v_scale=0.5, return_lse=True)

    out, lse, pages = (jax.jit(step) if jitted else step)(pages_of(pair), NEW)
    tables = {name: STEP[name] for name in ("kv_lens", "page_indices", "cu_q_lens")}
    written = write_kv_pages(*map(jnp.asarray, NEW), pages_of(pair), **tables, v_scale=0.5)
    assert isinstance(pages, tuple) == pair
    for got, want in zip(jax.tree.leaves(pages), jax.tree.leaves(written), strict=True):
        assert identical(got, want, "pages")
    want, want_lse = ragged_paged_attention(**STEP, kv_pages=written, v_scale=0.5, return_lse=True)
    assert agrees(out, want, "float32")
    assert agrees(lse, want_lse, "float32", "lse")


def test_donated_pages_are_written_in_place() -> None:
    def step(pages: Any) -> Any:
        return ragged_paged_attention(**STEP, kv_pages=pages, new_kv=NEW, backend="xla")

    donating = jax.jit(step, donate_argnums=0)
    compiled: Any = donating.lower(pages_of(pair=False)).compile()
    assert "input_output_alias" in compiled.as_text()
    assert identical(donating(pages_of(pair=False))[1], step(pages_of(pair=False))[1])


def test_the_option_is_for_those_who_have_it() -> None:
    with pytest.raises(ra.InvalidInput, match="expected options among block_q, block_kv for this backend, got"):
        ragged_paged_attention(**STEP, kv_pages=CACHE, new_kv=NEW, backend="xla", options={"fused_update": True})
    with pytest.raises(ra.InvalidInput, match="expected options among block_q, block_kv for this backend, got"):
        ragged_paged_attention(**STEP, kv_pages=CACHE, new_kv=NEW, backend="xla", options={"fused_update": False})


def test_a_writing_call_is_explained() -> None:
    assert "* numba" in ra.explain("ragged_paged_attention", **STEP, kv_pages=CACHE, new_kv=NEW)
