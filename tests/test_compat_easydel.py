"""`compat.easydel` has EasyDeL's signatures, and is right in cases in which EasyDeL's kernels fail.

EasyDeL's kernels race, cannot be traced or need inputs of a special form.
"""

import inspect
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.paged_attention import quantization_utils

from ragged_attention.compat import easydel as module
from ragged_attention.compat import jax_pallas
from ragged_attention.errors import InvalidInput
from ragged_attention.reference.paged_attention import paged_attention as decode_definition
from ragged_attention.reference.prefill_attention import prefill_attention as prefill_definition
from ragged_attention.testing.compare import agrees
from tests.paged_batches import heads_first, ragged

easydel: Any = module

BACKENDS = ("xla", "reference")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def test_signatures_are_easydels():
    """Decode has JAX's signature and a scale, which is 1 by default; prefill has the signature of early 2025."""
    decode = dict(inspect.signature(easydel.paged_attention).parameters)
    scale = decode.pop("sm_scale")
    assert (scale.kind, scale.default) == (inspect.Parameter.KEYWORD_ONLY, 1)
    theirs = inspect.signature(jax_pallas.paged_attention).parameters
    assert [(p.name, p.kind, p.default) for p in decode.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]
    prefill = dict(inspect.signature(easydel.prefill_attention).parameters)
    assert prefill.pop("backend").default is None
    assert list(prefill) == ["q", "k_pages", "v_pages", "length", "page_indices", "sm_scale"]
    assert prefill["sm_scale"].default is None
    assert all(parameter.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in prefill.values())


# Decode

LENGTHS = (0, 3, 16, 17, 1, 12)


def decode_batch(**shape: Any) -> tuple[Any, ...]:
    lens = [(1, length) for length in LENGTHS]
    batch = ragged(lens, padding=0, more_seqs=0, pages_per_seq=6, **shape)
    return batch.q, *heads_first(batch.kv_pages), batch.kv_lens, batch.page_indices


def decode_defined(arrays: tuple[Any, ...], **options: Any) -> Any:
    exact = [np.asarray(array, np.float64) for array in arrays[:3]]
    return decode_definition(*exact, *map(np.asarray, arrays[3:]), **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("scale", "mathematical"), [({}, 1.0), ({"sm_scale": None}, None), ({"sm_scale": 0.3}, 0.3)])
def test_decode_and_its_scale(scale, mathematical, dtype, backend):
    """Decode ignores NaN after the lengths and invalid page indices, and a length of 0 gives 0."""
    arrays = decode_batch(dtype=dtype)
    out = easydel.paged_attention(*arrays, **scale, pages_per_compute_block=2, backend=backend)
    assert out.dtype == arrays[0].dtype
    assert agrees(out, decode_defined(arrays, sm_scale=mathematical), dtype)
    assert float(jnp.abs(out[0]).max()) == 0


@pytest.mark.parametrize("inline_seq_dim", [True, False])
@pytest.mark.parametrize("megacore_mode", [None, "batch", "kv_head"])
def test_decode_in_every_mode(megacore_mode, inline_seq_dim):
    arrays = decode_batch(heads=(8, 4))
    out = easydel.paged_attention(
        *arrays, sm_scale=0.2, attn_logits_soft_cap=2.0, pages_per_compute_block=3, megacore_mode=megacore_mode,
        inline_seq_dim=inline_seq_dim, backend="xla",
    )  # fmt: skip
    assert agrees(out, decode_defined(arrays, sm_scale=0.2, soft_cap=2.0), "float32")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pages_per_compute_block": 4}, InvalidInput, "pages_per_compute_block to divide pages_per_seq=6 of page_ind"),
        ({"megacore_mode": "x"}, InvalidInput, "expected megacore_mode to be 'kv_head', 'batch' or None, got 'x'"),
        ({"sm_scale": "1"}, TypeError, "expected sm_scale to be a number, got str"),
        ({"attn_logits_soft_cap": 0.0}, InvalidInput, "expected attn_logits_soft_cap > 0, got 0.0"),
        ({"lengths": jnp.ones(6)}, InvalidInput, "expected lengths.dtype to be int32, got float32"),
    ],
)
def test_decode_refuses(changes, error, message):
    names = ("q", "k_pages", "v_pages", "lengths", "page_indices")
    arguments: Any = dict(zip(names, decode_batch(), strict=True)) | {"pages_per_compute_block": 2} | changes
    with pytest.raises(error) as refusal:
        easydel.paged_attention(**arguments)
    assert message in str(refusal.value)


# Prefill


def prefill_batch(chunk: int, length: int, **shape: Any) -> tuple[Any, ...]:
    """The arguments q, k_pages, v_pages, length and page_indices of a prefill."""
    batch = ragged([(0, length)], padding=chunk, more_seqs=0, pages_per_seq=12, **shape)
    return batch.q, *heads_first(batch.kv_pages), batch.kv_lens, batch.page_indices[0]


def prefill_defined(arrays: tuple[Any, ...], **options: Any) -> Any:
    exact = [np.asarray(array, np.float64) for array in arrays[:3]]
    out = prefill_definition(*exact, *map(np.asarray, arrays[3:]), **options)
    return out.reshape(len(out), -1)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 19, 24, 0])
def test_every_length_of_a_chunk(length, backend):
    """A chunk may be whole or partial; NaN after the length is ignored, and the rows from the length on are 0."""
    arrays = prefill_batch(8, length)
    out = easydel.prefill_attention(*arrays, backend=backend)
    assert out.shape == (8, 4 * 32)
    assert agrees(out, prefill_defined(arrays), "float32")
    live = (length - 1) % 8 + 1 if length else 0
    assert float(jnp.abs(out[live:]).max(initial=0)) == 0
    assert not live or float(jnp.abs(out[:live]).min()) > 0


@pytest.mark.parametrize(("heads", "page_size"), [((4, 4), 4), ((6, 3), 8), ((5, 1), 3), ((8, 8), 16)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_heads_and_page_sizes(heads, page_size, dtype):
    """Any numbers of heads work, and page sizes that do not divide the chunk."""
    arrays = prefill_batch(8, 21, heads=heads, page_size=page_size, dtype=dtype)
    out = easydel.prefill_attention(*arrays, backend="xla")
    assert out.dtype == arrays[0].dtype
    assert agrees(out, prefill_defined(arrays), dtype)


def test_the_chunks_of_a_sequence_are_its_attention():
    """Prefilling chunk by chunk, with lengths of several types, equals attention over the whole sequence."""
    batch = ragged([(19, 19)], padding=0, more_seqs=0)
    k_pages, v_pages = heads_first(batch.kv_pages)
    q = jnp.pad(batch.q, ((0, 5), (0, 0), (0, 0)))
    chunks = [
        easydel.prefill_attention(q[start : start + 8], k_pages, v_pages, length, batch.page_indices[0])
        for start, length in ((0, 8), (8, np.int64(16)), (16, jnp.array(19)))
    ]
    assert agrees(jnp.concatenate(chunks)[:19].reshape(19, 4, 32), batch.defined(), "float32")


def test_the_scale_and_jaxs_quantised_pages():
    q, k_pages, v_pages, length, row = prefill_batch(8, 21)
    k, v = (quantization_utils.quantize_to_int8(jnp.nan_to_num(pages)) for pages in (k_pages, v_pages))
    out = easydel.prefill_attention(q, k, v, length, row, 0.3)
    exact = [np.asarray(p.weight, np.float64) * np.asarray(p.scales, np.float64) / 127.5 for p in (k, v)]
    assert agrees(out, prefill_defined((q, *exact, length, row), sm_scale=0.3), "float32")


def test_int8_pages_without_scales_are_their_values():
    q, *pages, length, row = prefill_batch(8, 21)
    pages = [jnp.rint(4 * jnp.nan_to_num(each)) for each in pages]
    codes = [each.astype(jnp.int8) for each in pages]
    out = easydel.prefill_attention(q, *codes, length, row, 0.1)
    assert agrees(out, easydel.prefill_attention(q, *pages, length, row, 0.1), "float32")
    tunables = {"sm_scale": 0.1, "pages_per_compute_block": 1}
    lengths, table = jnp.full(len(q), length, jnp.int32), jnp.tile(row, (len(q), 1))
    found, wanted = (easydel.paged_attention(q, *each, lengths, table, **tunables) for each in (codes, pages))
    assert agrees(found, wanted, "float32")


def test_another_length_is_no_other_program(monkeypatch):
    from ragged_attention.portable.numba import prefill_attention as implementation

    count = []
    run = implementation.run
    monkeypatch.setattr(implementation, "run", lambda *arguments: count.append(1) or run(*arguments))
    arrays = prefill_batch(8, 24)
    for length in (24, 3, 17):
        out = easydel.prefill_attention(*arrays[:3], length, arrays[4], 0.4321)
        assert agrees(out, prefill_defined((*arrays[:3], length, arrays[4]), sm_scale=0.4321), "float32")
    assert len(count) == 1
    traced = jax.jit(easydel.prefill_attention)
    for length in (jnp.array([9]), jnp.array([20])):
        assert agrees(
            traced(*arrays[:3], length, arrays[4]), prefill_defined((*arrays[:3], length, arrays[4])), "float32"
        )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": jnp.ones((8, 3, 32))}, InvalidInput, "num_q_heads to be a multiple of num_kv_heads=2, got 3"),
        ({"q": [1.0]}, TypeError, "expected q to be an array, got list"),
        ({"length": jnp.ones(1)}, InvalidInput, "expected length.dtype to be an integer one, got float32"),
        ({"length": jnp.ones(2, int)}, InvalidInput, "expected length to be int32 of shape [1], got int32[2]"),
        ({"length": -1}, InvalidInput, "expected length between 0 and 2147483647, got -1"),
        ({"length": "1"}, TypeError, "expected length to be an int or an array, got str"),
        ({"page_indices": jnp.ones((1, 12), int)}, InvalidInput, "expected page_indices.shape to be [M]"),
        ({"page_indices": [1, 2]}, TypeError, "expected page_indices to be an array, got list"),
        ({"sm_scale": "1"}, TypeError, "expected sm_scale to be a number, got str"),
        ({"v_pages": jnp.ones((2, 3, 4, 32))}, InvalidInput, "expected v_pages.shape to be [K, P, G, D]"),
    ],
)
def test_prefill_refuses(changes, error, message):
    names = ("q", "k_pages", "v_pages", "length", "page_indices")
    arguments: Any = dict(zip(names, prefill_batch(8, 21), strict=True)) | changes
    with pytest.raises(error) as refusal:
        easydel.prefill_attention(**arguments)
    assert message in str(refusal.value)
