"""`compat.tpu_inference` has the arguments, refusals and cache bytes of tpu-inference's latent attention."""

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

from ragged_attention.compat import tpu_inference as module
from ragged_attention.errors import InvalidInput, Unsupported
from ragged_attention.reference.ragged_mla_attention import ragged_mla_attention as definition
from ragged_attention.testing.compare import agrees

tpu_inference: Any = module

BACKENDS = ("xla", "reference")
MIXED = ((1, 9), (6, 6), (0, 5), (4, 14), (1, 1))
NO_PAGE = -1  # follows the last used page, as in tpu-inference's tests
LATENT, ROTARY, WIDTH = 40, 24, 256  # a row holds both parts, each padded to a multiple of 128


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@dataclasses.dataclass(frozen=True)
class Batch:
    """The nine array arguments of a call, in their order."""

    ql_nope: Any
    q_pe: Any
    new_kv_c: Any
    new_k_pe: Any
    cache_kv: Any
    kv_lens: Any
    page_indices: Any
    cu_q_lens: Any
    distribution: Any

    @property
    def arrays(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def written(self) -> np.ndarray:
        """The cache's rows [P, G, WIDTH] after the write of the new rows, in the cache's dtype."""
        pages, groups, packing, width = self.cache_kv.shape
        rows = np.array(self.cache_kv).reshape(pages, groups * packing, width)
        table = np.asarray(self.page_indices).reshape(len(self.kv_lens), -1)
        for seq in range(int(self.distribution[2])):
            first, last = (int(edge) for edge in self.cu_q_lens[seq : seq + 2])
            for token in range(first, last):
                page, offset = divmod(int(self.kv_lens[seq]) - last + token, rows.shape[1])
                row = rows[table[seq, page], offset]
                row[:] = 0
                row[:LATENT], row[128 : 128 + ROTARY] = self.new_kv_c[token], self.new_k_pe[token]
        return rows

    def defined(self, **options: Any) -> Any:
        """The result of the reference implementation on rows without padding, heads first."""
        rows = self.written().astype(np.float32)
        kept = np.r_[0:LATENT, 128 : 128 + ROTARY]
        q = np.concatenate([np.asarray(part, np.float64) for part in (self.ql_nope.swapaxes(0, 1), self.q_pe)], -1)
        tables = self.kv_lens, np.asarray(self.page_indices).reshape(len(self.kv_lens), -1), self.cu_q_lens
        settings = {"sm_scale": 1.0, "cache_format": "plain", "num_seqs": self.distribution[2:]} | options
        out = definition(q, rows[:, :, None, kept], *map(np.asarray, tables), d_v=LATENT, **settings)
        return out.swapaxes(0, 1)


def batch_of(
    lens: Sequence[tuple[int, int]] = MIXED,
    *,
    dtype: Any = "float32",
    kv_dtype: Any = None,
    page_size: int = 8,
    packing: int | None = None,
    heads: int = 3,
    padding: int = 3,
    seed: int = 0,
) -> Batch:
    """A batch of sequences (q_len, kv_len), followed by padding rows and two unused sequences.

    Unwritten slots are NaN, or -100 in int8.
    """
    rng = np.random.default_rng(seed)
    kv_dtype = jnp.dtype(kv_dtype or dtype)
    pages = [-(-kv_len // page_size) for _, kv_len in lens]
    shape = tpu_inference.get_kv_cache_shape(sum(pages) + 2, page_size, LATENT + 128, kv_dtype, packing)
    nothing = -100 if kv_dtype == jnp.int8 else np.nan
    cache = np.full((shape[0], page_size, shape[3]), nothing, np.float32)
    table = np.full((len(lens) + 2, max(pages) + 1), NO_PAGE, np.int32)
    free = iter(rng.permutation(shape[0]))

    def drawn(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32) * (20 if kv_dtype == jnp.int8 else 1)

    for seq, (_, kv_len) in enumerate(lens):
        for column in range(pages[seq]):
            page = table[seq, column] = next(free)
            live = min(page_size, kv_len - column * page_size)
            cache[page, :live] = 0
            cache[page, :live, :LATENT], cache[page, :live, 128 : 128 + ROTARY] = (
                drawn(live, LATENT), drawn(live, ROTARY),
            )  # fmt: skip
    tokens = sum(q_len for q_len, _ in lens) + padding
    cu_q_lens = np.zeros(len(lens) + 3, np.int32)
    cu_q_lens[1 : len(lens) + 1] = np.cumsum([q_len for q_len, _ in lens])
    q_dtype = jnp.dtype(dtype)
    return Batch(
        ql_nope=jnp.asarray(rng.standard_normal((heads, tokens, LATENT)), jnp.float32).astype(q_dtype),
        q_pe=jnp.asarray(rng.standard_normal((tokens, heads, ROTARY)), jnp.float32).astype(q_dtype),
        new_kv_c=jnp.asarray(drawn(tokens, LATENT)).astype(kv_dtype),
        new_k_pe=jnp.asarray(drawn(tokens, ROTARY)).astype(kv_dtype),
        cache_kv=jnp.asarray(cache).astype(kv_dtype).reshape(shape),
        kv_lens=jnp.array([kv_len for _, kv_len in lens] + [2**31 - 1, -5], jnp.int32),
        page_indices=jnp.asarray(table.reshape(-1)),
        cu_q_lens=jnp.asarray(cu_q_lens),
        distribution=jnp.array([1, 1, len(lens)], jnp.int32),
    )


def expect_cache(cache: Any, batch: Batch) -> None:
    """Assert that every byte of the cache is as expected, including unwritten ones."""
    assert (cache.shape, cache.dtype) == (batch.cache_kv.shape, batch.cache_kv.dtype)
    want = batch.written().reshape(cache.shape)
    assert np.array_equal(np.asarray(cache).view(np.uint8), want.view(np.uint8))


# Results


SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"sm_scale": 0.2, "sliding_window": 3}, {"sm_scale": 0.2, "sliding_window": 3}),
    ({"sm_scale": 0.2, "soft_cap": -2.0, "mask_value": -1e9}, {"sm_scale": 0.2, "soft_cap": 2.0}),
    ({"sm_scale": 0.2, "q_scale": 0.5, "k_scale": 0.7}, {"sm_scale": 0.07}),
]


@pytest.mark.parametrize(("theirs", "ours"), SETTINGS, ids=lambda settings: "-".join(settings))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mixed_batch(dtype, theirs, ours, backend):
    batch = batch_of(dtype=dtype)
    out, cache = tpu_inference.mla_ragged_paged_attention(*batch.arrays, **theirs, backend=backend)
    assert (out.shape, out.dtype) == (batch.ql_nope.shape, batch.ql_nope.dtype)
    assert agrees(out, batch.defined(**ours), dtype)
    assert not np.any(np.asarray(out[:, 12:], np.float32))
    expect_cache(cache, batch)


@pytest.mark.parametrize("q_dtype", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_a_cache_of_eight_bits_and_its_scales(kv_dtype, q_dtype):
    """An 8-bit cache works with its three scales: two multiply the logits, one the result.

    New rows are stored without scaling.
    """
    batch = batch_of(dtype=q_dtype, kv_dtype=kv_dtype)
    scales = {"q_scale": 0.5, "k_scale": 0.02 if kv_dtype == "int8" else 0.4, "v_scale": 0.7}
    out, cache = tpu_inference.mla_ragged_paged_attention(*batch.arrays, sm_scale=0.5, **scales, backend="xla")
    assert out.dtype == batch.ql_nope.dtype
    want = 0.7 * batch.defined(sm_scale=0.25 * scales["k_scale"])
    if q_dtype.startswith("float8"):
        want = np.asarray(jnp.asarray(want, jnp.float32).astype(q_dtype), np.float32)
        # Both neighbours are right if the exact result lies midway between two float8 numbers.
        apart = np.asarray(out, np.float32) != want
        assert apart.mean() < 0.02
        np.testing.assert_allclose(np.asarray(out, np.float32), want, rtol=0.3, atol=0.02)
    else:
        assert agrees(out, want, q_dtype)
    expect_cache(cache, batch)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_queries_and_caches_of_two_float_dtypes(dtype, kv_dtype, backend):
    batch = batch_of(dtype=dtype, kv_dtype=kv_dtype)
    out, cache = tpu_inference.mla_ragged_paged_attention(*batch.arrays, sm_scale=0.2, backend=backend)
    assert agrees(out, batch.defined(sm_scale=0.2), dtype)
    expect_cache(cache, batch)


@pytest.mark.parametrize(("page_size", "packing"), [(16, 8), (12, 4), (4, None)])
def test_pages_packed_in_other_ways(page_size, packing, backend):
    batch = batch_of(kv_dtype="float8_e4m3fn", page_size=page_size, packing=packing)
    out, cache = tpu_inference.mla_ragged_paged_attention(*batch.arrays, sm_scale=0.2, backend=backend)
    assert batch.cache_kv.shape[2] == (packing or 4)
    assert agrees(out, batch.defined(sm_scale=0.2), "float32")
    expect_cache(cache, batch)


def test_decodes_need_not_come_first(backend):
    """Only the last number of `distribution` counts, the number of sequences. The numbers of decodes are ignored."""
    batch = batch_of()
    for distribution in ([0, 0, 5], [1, 1, 5], [2, 3, 5]):
        same = dataclasses.replace(batch, distribution=jnp.array(distribution, jnp.int32))
        out, _ = tpu_inference.mla_ragged_paged_attention(*same.arrays, sm_scale=0.2, backend=backend)
        assert agrees(out, batch.defined(sm_scale=0.2), "float32")
    nobody = dataclasses.replace(batch, distribution=jnp.zeros(3, jnp.int32))
    out, cache = tpu_inference.mla_ragged_paged_attention(*nobody.arrays, backend=backend)
    assert not np.any(out)
    assert np.array_equal(cache, batch.cache_kv, equal_nan=True)


def test_more_queries_than_keys(backend):
    """If there are more queries than keys, the first queries see nothing and their latents are not stored."""
    batch = batch_of([(5, 2), (2, 0), (3, 4)])
    arrays = dataclasses.replace(batch, new_kv_c=batch.new_kv_c.at[:3].set(jnp.nan)).arrays
    out, _ = tpu_inference.mla_ragged_paged_attention(*arrays, backend=backend)
    assert not np.any(out[:, :3])
    assert not np.any(out[:, 5:7])
    assert np.isfinite(out).all()


def test_under_jit_the_cache_is_donated_and_other_values_are_no_other_program():
    traces = []

    def step(*arrays: Any) -> Any:
        traces.append(1)
        return tpu_inference.mla_ragged_paged_attention(*arrays, sm_scale=0.2, backend="xla")

    step = jax.jit(step, donate_argnums=4)
    for lens in (MIXED, MIXED[::-1]):
        batch = batch_of(lens, kv_dtype="bfloat16")
        kept = dataclasses.replace(batch, cache_kv=np.array(batch.cache_kv))
        out, cache = step(*batch.arrays)
        assert batch.cache_kv.is_deleted()
        assert agrees(out, kept.defined(sm_scale=0.2), "float32")
        expect_cache(cache, kept)
    assert len(traces) == 1


def test_tunables_change_nothing():
    batch = batch_of()
    plain, _ = tpu_inference.mla_ragged_paged_attention(*batch.arrays, sm_scale=0.2, backend="xla")
    out, _ = tpu_inference.mla_ragged_paged_attention(
        *batch.arrays, sm_scale=0.2, backend="xla", chunk_prefill_size=64, num_kv_pages_per_block=(1, 2, 3),
        num_queries_per_block=8, vmem_limit_bytes=1 << 20, decode_batch_size=4, mixed_q_split=2, s_dtype=jnp.float32,
        two_step_flash_attention=False, p_same_dtype_as_v=False, debug_mode=True,
    )  # fmt: skip
    assert np.array_equal(out, plain)


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        ((10, 16, 128, jnp.bfloat16), (10, 8, 2, 128)),
        ((7, 128, 576, jnp.float8_e4m3fn), (7, 32, 4, 640)),
        ((7, 10, 200, jnp.float32), (7, 10, 1, 256)),
        ((7, 10, 200, jnp.int8), (7, 3, 4, 256)),
        ((7, 16, 576, jnp.bfloat16, 16), (7, 1, 16, 640)),
    ],
)
def test_shapes_of_caches(arguments, shape):
    assert tpu_inference.get_kv_cache_shape(*arguments) == shape


# Names and refusals


NAMES = {
    "get_kv_cache_shape": "total_num_pages page_size kv_dim kv_dtype kv_packing=None transpose_kv_cache=False",
    "mla_ragged_paged_attention": "ql_nope q_pe new_kv_c new_k_pe cache_kv kv_lens page_indices cu_q_lens distribution"
    " * sm_scale=1.0 sliding_window=None soft_cap=None mask_value=None q_scale=None k_scale=None v_scale=None"
    " chunk_prefill_size=None num_kv_pages_per_block=None num_queries_per_block=None vmem_limit_bytes=None"
    " decode_batch_size=1 mixed_q_split=1 s_dtype=bfloat16 transpose_kv_cache=False two_step_flash_attention=True"
    " p_same_dtype_as_v=True debug_mode=False backend=None",
    "static_validate_inputs": "ql_nope q_pe new_kv_c new_k_pe cache_kv kv_lens page_indices cu_q_lens distribution"
    " * sm_scale=1.0 sliding_window=None soft_cap=None mask_value=None q_scale=None k_scale=None v_scale=None"
    " chunk_prefill_size=None num_kv_pages_per_blocks=None num_queries_per_blocks=None vmem_limit_bytes=None"
    " decode_batch_size=1 mixed_q_split=1 transpose_kv_cache=False debug_mode=False",
}


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_tpu_inferences(name):
    """The signatures are those of tpu-inference 0.32, with one more keyword, `backend`."""
    signature, starred = [], False
    for parameter in inspect.signature(getattr(tpu_inference, name)).parameters.values():
        if parameter.kind == inspect.Parameter.KEYWORD_ONLY and not starred:
            signature, starred = [*signature, "*"], True
        default = getattr(parameter.default, "__name__", parameter.default)
        signature.append(
            parameter.name if parameter.default is inspect.Parameter.empty else f"{parameter.name}={default}"
        )
    assert signature == NAMES[name].split()
    assert set(NAMES) == set(tpu_inference.__all__)


VALID = batch_of(((2, 3), (2, 8)), padding=0)
LONG = {"ql_nope": jnp.ones((3, 4, 200)), "new_kv_c": jnp.ones((4, 200))}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"ql_nope": jnp.ones((3, 40))}, InvalidInput, "expected ql_nope.shape to be [N, T, L]"),
        ({"ql_nope": [1.0]}, TypeError, "expected ql_nope to be an array, got list"),
        ({"ql_nope": jnp.ones((3, 4, 40), "int8")}, InvalidInput, "expected ql_nope.dtype to be float32 or"),
        ({"q_pe": jnp.ones((3, 4, 24))}, InvalidInput, "expected q_pe.shape to be [T, N, R] = [4, 3, R]"),
        ({"q_pe": jnp.ones((4, 3, 24), "bfloat16")}, InvalidInput, "expected q_pe.dtype to be float32, got bfloat16"),
        ({"new_kv_c": jnp.ones((4, 24))}, InvalidInput, "expected new_kv_c.shape to be [T, L] = [4, 40], got [4, 24]"),
        ({"new_k_pe": jnp.ones((5, 24))}, InvalidInput, "expected new_k_pe.shape to be [T, R] = [4, 24], got [5, 24]"),
        ({"new_k_pe": jnp.ones((4, 24), "int16")}, InvalidInput, "expected new_k_pe.dtype to be float32 or"),
        ({"new_kv_c": jnp.ones((4, 40), "float16")}, InvalidInput,
         "expected new_kv_c.dtype to be that of cache_kv, float32, got float16"),
        ({"new_k_pe": jnp.ones((4, 24), "bfloat16")}, InvalidInput,
         "expected new_k_pe.dtype to be that of cache_kv, float32, got bfloat16"),
        (LONG, InvalidInput, "to be [P, G/packing, packing, L'+R'] = [P, G/packing, packing, 384], got [4, 8, 1, 256]"),
        ({"cache_kv": jnp.ones((4, 8, 256))}, InvalidInput, "expected cache_kv.shape to be [P, G/packing, packing, L'"),
        ({"cache_kv": jnp.ones((4, 8, 1, 256), "float8_e4m3fn")}, InvalidInput,
         "expected cache_kv.shape[2] to be a multiple of 4, the number of elements in 32 bits, got 1"),
        ({"cache_kv": jnp.ones((4, 8, 4, 256), "uint8")}, InvalidInput, "expected cache_kv.dtype to be float32 or"),
        ({"kv_lens": jnp.ones(4)}, InvalidInput, "expected kv_lens.dtype to be int32, got float32"),
        ({"page_indices": jnp.ones((4, 2), "int32")}, InvalidInput, "page_indices.shape to be [S*pages_per_seq]"),
        ({"page_indices": jnp.ones(9, "int32")}, InvalidInput, "to be a multiple of max_num_seqs=4, got 9"),
        ({"kv_lens": jnp.ones(0, "int32")}, InvalidInput, "to be a multiple of max_num_seqs=0, got 8"),
        ({"cu_q_lens": jnp.ones(4, "int32")}, InvalidInput, "expected cu_q_lens.shape to be [S+1] = [5], got [4]"),
        ({"distribution": jnp.ones(2, "int32")}, InvalidInput, "expected distribution.shape to be [3], got [2]"),
        ({"sliding_window": 0}, InvalidInput, "sliding_window must be positive: expected sliding_window >= 1, got 0"),
        ({"sliding_window": -1}, InvalidInput, "sliding_window must be positive"),
        ({"sliding_window": 1.5}, TypeError, "expected sliding_window to be an int, got float"),
        ({"soft_cap": 0.0}, InvalidInput, "soft_cap must not be 0.0: expected None or another number, got 0.0"),
        ({"chunk_prefill_size": 0}, InvalidInput, "chunk_prefill_size must be positive"),
        ({"vmem_limit_bytes": -1}, InvalidInput, "vmem_limit_bytes must be positive"),
        ({"mixed_q_split": 0}, InvalidInput, "mixed_q_split must be positive"),
        ({"transpose_kv_cache": True}, Unsupported, "expected transpose_kv_cache=False, a cache whose positions are"),
    ],
)  # fmt: skip
def test_refusals(changes, error, message):
    arrays = {field.name: changes.get(field.name, getattr(VALID, field.name)) for field in dataclasses.fields(Batch)}
    settings = {name: value for name, value in changes.items() if name not in arrays}
    for function in (tpu_inference.static_validate_inputs, tpu_inference.mla_ragged_paged_attention):
        with pytest.raises(error) as refusal:
            function(*arrays.values(), **settings)
        assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_kv_pages_per_block": (1, 0, 1)}, InvalidInput, "num_kv_pages_per_block[1] must be positive"),
        ({"num_queries_per_block": 0}, InvalidInput, "num_queries_per_block[0] must be positive"),
        ({"num_queries_per_block": (1, 2)}, InvalidInput,
         "expected num_queries_per_block to be an int, or three ints for decode, prefill and mixed, got 2"),
        ({"num_queries_per_block": (1, 2, 3), "mixed_q_split": 2}, InvalidInput,
         "expected num_queries_per_block[2] to be a multiple of mixed_q_split=2, got 3"),
        ({"k_scale": "1"}, TypeError, "expected k_scale to be a number or None, got str"),
        ({"sm_scale": None}, TypeError, "expected sm_scale to be a number, got NoneType"),
        ({"debug_mode": 1}, TypeError, "expected debug_mode to be a bool, got int"),
        ({"p_same_dtype_as_v": 1}, TypeError, "expected p_same_dtype_as_v to be a bool, got int"),
    ],
)  # fmt: skip
def test_refusals_of_the_call_alone(changes, error, message):
    with pytest.raises(error) as refusal:
        tpu_inference.mla_ragged_paged_attention(*VALID.arrays, **changes)
    assert message in str(refusal.value)


def test_a_transposed_cache_has_no_shape_here():
    with pytest.raises(Unsupported, match="expected transpose_kv_cache=False"):
        tpu_inference.get_kv_cache_shape(4, 128, 576, jnp.bfloat16, transpose_kv_cache=True)


def test_static_validation_looks_at_shapes_alone():
    tpu_inference.static_validate_inputs(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in VALID.arrays))
