"""`compat.jax_pallas` has JAX's signatures, refusals and references, and is right where JAX's kernels fail."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.processes import printed

pytest.importorskip("jax")

import jax
import jax.export
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import paged_attention as upstream_decode
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as upstream
from jax.experimental.pallas.ops.tpu.paged_attention import quantization_utils, util
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import ragged_attention as ra
from ragged_attention.compat import jax_arguments
from ragged_attention.compat import jax_pallas as module
from ragged_attention.errors import InvalidInput, Unsupported
from ragged_attention.reference.paged_attention import paged_attention as decode_definition
from ragged_attention.testing.compare import agrees
from tests.paged_batches import NO_PAGE, heads_first, ragged

jax_pallas: Any = module

BACKENDS = ("xla", "reference")
MIXED = ((1, 9), (6, 6), (0, 5), (4, 14), (1, 1))


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


# Signatures


def upstream_functions() -> dict[str, Callable[..., Any]]:
    names = [name for name in jax_pallas.__all__ if name not in ("DEFAULT_MASK_VALUE", "paged_attention")]
    return {name: getattr(upstream, name) for name in names} | {"paged_attention": upstream_decode.paged_attention}


@pytest.mark.parametrize("name", upstream_functions())
def test_signatures_are_jaxs(name):
    """The names, order, kinds and defaults of arguments are JAX's, except one more keyword, `backend`."""
    ours = dict(inspect.signature(getattr(jax_pallas, name)).parameters)
    theirs = inspect.signature(upstream_functions()[name]).parameters
    if name in ("ragged_paged_attention", "paged_attention"):
        more = ours.pop("backend")
        assert (more.kind, more.default) == (inspect.Parameter.KEYWORD_ONLY, None)
    assert list(ours) == list(theirs)
    for parameter in theirs:
        assert ours[parameter].kind == theirs[parameter].kind, parameter
        assert ours[parameter].default == theirs[parameter].default, parameter


def test_the_mask_value_is_jaxs():
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

    assert jax_pallas.DEFAULT_MASK_VALUE == kernel.DEFAULT_MASK_VALUE


# Ragged attention agrees with JAX's reference and with ours


CAPPED = {"sm_scale": 0.2, "soft_cap": -2.0, "sliding_window": 3, "mask_value": None}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"sm_scale": 0.2},
    {"sm_scale": 0.2, "sliding_window": 5},
    {"sm_scale": 0.2, "soft_cap": 2.0},
    CAPPED,
    {"sm_scale": 0.2, "mask_value": -1e9},
]


def without(names: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names.split()}


@pytest.mark.parametrize(
    ("dtype", "settings"), [*(("float32", settings) for settings in SETTINGS), ("bfloat16", {}), ("bfloat16", CAPPED)]
)
def test_ragged_attention_agrees_with_jaxs_reference_and_the_definition(dtype, settings, backend):
    batch = ragged(MIXED, dtype=dtype)
    out = jax_pallas.ragged_paged_attention(*batch.arrays, **settings, backend=backend)
    assert out.dtype == batch.q.dtype
    mathematical = {"sm_scale": 1.0} | without("mask_value", settings)
    if "soft_cap" in mathematical:
        mathematical["soft_cap"] = abs(mathematical["soft_cap"])
    want = batch.defined(**mathematical)
    assert agrees(out, want, dtype)
    theirs = upstream.ref_ragged_paged_attention(*batch.arrays, **{"mask_value": -1e30} | settings)
    live = out[: batch.num_tokens]
    tolerance = 1e-5 if dtype == "float32" else 2e-2  # JAX's reference rounds probabilities to bfloat16
    np.testing.assert_allclose(np.float32(live), np.float32(theirs), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("scales", [(None, None), (0.5, 0.25)])
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_quantised_caches(kv_dtype, scales, backend):
    batch = ragged(MIXED, kv_dtype="float32")
    kv = batch.kv_pages
    kv = jnp.where(jnp.isnan(kv), 100.0, 20 * kv).astype(kv_dtype) if kv_dtype == "int8" else kv.astype(kv_dtype)
    settings: dict[str, Any] = {"sm_scale": 0.05, "k_scale": scales[0], "v_scale": scales[1]}
    out = jax_pallas.ragged_paged_attention(batch.q, kv, *batch.arrays[2:], **settings, backend=backend)
    exact = batch.with_(kv_pages=np.asarray(kv.astype(jnp.float32), np.float64))
    interleaved = np.tile([1.0 if scale is None else scale for scale in scales], 2)[:, None]
    exact = exact.with_(kv_pages=exact.kv_pages * interleaved)
    assert agrees(out, exact.defined(sm_scale=0.05), "float32")
    if scales != (None, None):  # without scales, JAX's reference rounds probabilities to the cache's dtype
        theirs = upstream.ref_ragged_paged_attention(batch.q, kv, *batch.arrays[2:], **settings)
        np.testing.assert_allclose(out[: batch.num_tokens], theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_our_reference_gives_what_jaxs_does(settings):
    """Our reference agrees with JAX's and also returns only the live rows, even if queries begin after row 0."""
    batch = ragged(MIXED)
    for arrays in (batch.arrays, batch.with_(cu_q_lens=batch.cu_q_lens + 2).arrays):
        ours = jax_pallas.ref_ragged_paged_attention(*arrays, **settings)
        theirs = upstream.ref_ragged_paged_attention(*arrays, **{"mask_value": -1e30} | settings)
        assert ours.shape == theirs.shape == (batch.num_tokens, 4, 32)
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("heads", "head_dim", "kv_dtype"),
    [((6, 6), 64, "bfloat16"), ((12, 2), 80, "bfloat16"), ((5, 1), 256, "bfloat16"), ((8, 1), 128, "float8_e4m3fn")],
)
def test_heads_that_jaxs_kernel_does_not_compile(heads, head_dim, kv_dtype):
    batch = ragged(MIXED, heads=heads, head_dim=head_dim, dtype="bfloat16", kv_dtype=kv_dtype)
    out = jax_pallas.ragged_paged_attention(*batch.arrays, sm_scale=0.1)
    exact = batch.with_(kv_pages=batch.kv_pages.astype(jnp.float32))
    assert agrees(out, exact.defined(sm_scale=0.1), "bfloat16")


# Cases in which JAX's kernel fails


def test_a_sequence_without_queries_and_keys_leaves_its_neighbours_alone(backend):
    """A sequence without queries and keys works; in JAX's kernel the next sequence then waits for the wrong copy."""
    for index in range(4):
        lens = [(3, 8), (2, 13), (1, 6)]
        lens.insert(index, (0, 0))
        batch = ragged(lens)
        jax_pallas.dynamic_validate_inputs(*batch.arrays)
        out = jax_pallas.ragged_paged_attention(*batch.arrays, sm_scale=0.2, backend=backend)
        assert agrees(out, batch.defined(sm_scale=0.2), "float32")


def test_padding_rows_are_zero(backend):
    batch = ragged(MIXED, padding=9)
    out = jax_pallas.ragged_paged_attention(*batch.arrays, backend=backend)
    assert float(jnp.abs(out[batch.num_tokens :]).max()) == 0
    assert float(jnp.abs(out[: batch.num_tokens]).min()) > 0


def test_no_sequences_at_all(backend):
    batch = ragged(MIXED).with_(num_seqs=jnp.zeros(1, jnp.int32))
    jax_pallas.dynamic_validate_inputs(*batch.arrays)
    out = jax_pallas.ragged_paged_attention(*batch.arrays, backend=backend)
    assert float(jnp.abs(out).max()) == 0
    assert jax_pallas.ref_ragged_paged_attention(*batch.arrays).shape == (0, 4, 32)


def test_more_queries_than_keys_give_zero_rows(backend):
    batch = ragged([(5, 2), (2, 0), (3, 4)])
    out = jax_pallas.ragged_paged_attention(*batch.arrays, backend=backend)
    assert agrees(out, batch.defined(sm_scale=1.0), "float32")
    assert float(jnp.abs(out[:3]).max()) == float(jnp.abs(out[5:7]).max()) == 0


@pytest.mark.parametrize("window", [1, 3, 64])
def test_a_window_that_hides_whole_blocks(window, backend):
    batch = ragged([(3, 700), (1, 650)], page_size=4, pages_per_seq=200)
    out = jax_pallas.ragged_paged_attention(*batch.arrays, sm_scale=0.2, sliding_window=window, backend=backend)
    assert agrees(out, batch.defined(sm_scale=0.2, sliding_window=window), "float32")


def test_garbage_behind_the_live_sequences(backend):
    """The lengths, offsets and pages of sequences that are not live are never read."""
    batch = ragged(MIXED)
    count = int(batch.num_seqs[0])
    worse = batch.with_(
        kv_lens=batch.kv_lens.at[count:].set(2**31 - 1),
        cu_q_lens=batch.cu_q_lens.at[count + 1 :].set(-7),
        page_indices=batch.page_indices.at[count:].set(2**31 - 1),
    )
    out = jax_pallas.ragged_paged_attention(*worse.arrays, sm_scale=0.2, backend=backend)
    assert agrees(out, batch.defined(sm_scale=0.2), "float32")


# Accepted arguments


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int16", "uint8", "int8"])
def test_the_number_of_sequences_is_of_any_integer_dtype(dtype):
    batch = ragged(MIXED)
    out = jax_pallas.ragged_paged_attention(*batch.arrays[:5], batch.num_seqs.astype(dtype), sm_scale=0.2)
    assert agrees(out, batch.defined(sm_scale=0.2), "float32")


def test_64_bit_numbers_of_sequences():
    batch = ragged(MIXED)
    with jax.enable_x64(True):
        counts = [jnp.asarray(count) for count in np.array([[5], [2**32 + 5], [-1]], np.int64)]
        out, most, none = (
            jax_pallas.ragged_paged_attention(*batch.arrays[:5], count, backend="xla") for count in counts
        )
    assert counts[0].dtype == jnp.int64
    assert agrees(out, batch.defined(sm_scale=1.0), "float32")
    assert agrees(most, batch.with_(num_seqs=jnp.array([7])).defined(sm_scale=1.0), "float32")
    assert float(jnp.abs(none).max()) == 0


def test_numpy_arrays():
    batch = ragged(MIXED)
    out = jax_pallas.ragged_paged_attention(*map(np.asarray, batch.arrays), sm_scale=np.float32(0.25))
    assert isinstance(out, jax.Array)
    assert agrees(out, batch.defined(sm_scale=0.25), "float32")


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_queries_and_caches_of_two_float_dtypes(dtype, kv_dtype):
    batch = ragged(MIXED, dtype=dtype, kv_dtype=kv_dtype)
    out = jax_pallas.ragged_paged_attention(*batch.arrays, sm_scale=0.2)
    assert out.dtype == jnp.dtype(dtype)
    assert agrees(out, batch.defined(sm_scale=0.2), dtype)


def test_whatever_rules_of_promotion_are_set():
    """Calls work if implicit promotion of ranks and dtypes is forbidden, as in JAX's tests and by some users."""
    batch = ragged(MIXED, dtype="bfloat16", kv_dtype="float32")
    k_pages, v_pages = heads_first(batch.kv_pages)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        for backend in BACKENDS:
            out = jax_pallas.ragged_paged_attention(*batch.arrays, sm_scale=0.2, soft_cap=3.0, backend=backend)
            assert agrees(out, batch.defined(sm_scale=0.2, soft_cap=3.0), "bfloat16")
            jax_pallas.paged_attention(
                batch.q[:7], k_pages, v_pages, *batch.arrays[2:4], pages_per_compute_block=1, backend=backend
            )


# jit


def test_other_values_are_no_other_program(backend):
    traces = []

    @jax.jit
    def attend(*arrays: Any) -> Any:
        traces.append(1)
        return jax_pallas.ragged_paged_attention(*arrays, sm_scale=0.2, backend=backend)

    batch = ragged(MIXED)
    for count in (5, 3, 0):
        batch = batch.with_(num_seqs=jnp.array([count], jnp.int32))
        assert agrees(attend(*batch.arrays), batch.defined(sm_scale=0.2), "float32")
    other = ragged(((2, 9), (3, 6), (0, 5), (4, 14), (3, 3)), seed=1)
    assert agrees(attend(*other.arrays), other.defined(sm_scale=0.2), "float32")
    assert len(traces) == 1


def test_plain_calls_with_other_values_trace_once(monkeypatch):
    from ragged_attention.portable.numba import ragged_paged_attention as implementation

    count = []
    run = implementation.run
    monkeypatch.setattr(implementation, "run", lambda *arguments: count.append(1) or run(*arguments))
    batch = ragged(MIXED)
    for live in (5, 4, 2):
        jax_pallas.ragged_paged_attention(*batch.with_(num_seqs=jnp.array([live])).arrays, sm_scale=0.4321)
    assert len(count) == 1


# Tunables

TUNABLES = {"num_kv_pages_per_block": 2, "num_queries_per_block": 8, "vmem_limit_bytes": 2**20}


def test_tunables_that_a_backend_has_not_are_ignored(backend):
    batch = ragged(MIXED)
    out = jax_pallas.ragged_paged_attention(*batch.arrays, **TUNABLES, backend=backend)
    assert jnp.array_equal(out, jax_pallas.ragged_paged_attention(*batch.arrays, backend=backend))


def test_tunables_that_a_backend_has_reach_it(monkeypatch):
    """A call's tunables reach the backend. If the call has none, the configured tunables do."""
    from ragged_attention.portable.xla import ragged_paged_attention as implementation

    tiles = []
    run = implementation.run
    monkeypatch.setattr(implementation, "run", lambda call, tile, launch: tiles.append(tile) or run(call, tile, launch))
    monkeypatch.setattr(jax_arguments, "known_options", renamed(num_queries_per_block="block_q"))
    batch = ragged(MIXED)
    jax_pallas.ragged_paged_attention(*batch.arrays, **TUNABLES, backend="xla")
    assert tiles[-1].block_q == 8
    with ra.use_backend(options={"ragged_paged_attention": {"block_q": 16}}):
        jax_pallas.ragged_paged_attention(*batch.arrays, backend="xla")
    assert tiles[-1].block_q == 16


def renamed(**names: str) -> Callable[..., Any]:
    """`known_options` with JAX's tunables renamed to those of a backend in the tests."""
    right = jax_arguments.known_options

    def known(operation: str, arguments: Any, backend: Any, tunables: dict[str, Any]) -> Any:
        return right(operation, arguments, backend, {names.get(name, name): tunables[name] for name in tunables})

    return known


def test_the_block_sizes_of_our_tpu_kernel():
    """The tuned block sizes of our TPU kernel are valid arguments. Without a TPU, a representative TPU is assumed."""
    wide = jax_pallas.get_tuned_block_sizes("bfloat16", jnp.bfloat16, 32, 8, 128, 16, 2048, 256)
    assert all(size >= 1 for size in wide)
    batch = ragged(MIXED)
    pages_per_seq = batch.page_indices.shape[1]
    pages, queries = jax_pallas.get_tuned_block_sizes(
        jnp.float32, jnp.float32, 4, 2, 32, 4, len(batch.q), pages_per_seq
    )
    assert pages <= pages_per_seq
    assert queries <= len(batch.q)
    jax_pallas.static_validate_inputs(*batch.arrays, num_kv_pages_per_block=pages, num_queries_per_block=queries)
    assert jax_pallas.get_tuned_block_sizes(jnp.float32, jnp.int8, 4, 2, 32, 4, 1, 1) == (1, 1)


def test_tunables_go_along_to_another_machine(monkeypatch):
    """Tunables are kept if a call is lowered for a TPU on a machine that cannot run the named backend."""
    from ragged_attention.kernels_pallas import ragged_paged_attention as implementation

    tiles = []
    run = implementation.run
    monkeypatch.setattr(implementation, "run", lambda call, tile, launch: tiles.append(tile) or run(call, tile, launch))
    attend = jax.jit(lambda *arrays: jax_pallas.ragged_paged_attention(*arrays, **TUNABLES, backend="pallas"))
    device = AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        lowered = jax.export.export(attend, platforms=["tpu"])(*ragged(MIXED, head_dim=128).arrays)
    assert lowered.mlir_module().count("@tpu_custom_call") > 0
    assert {name: getattr(tiles[-1], name) for name in TUNABLES} == TUNABLES


def test_every_drop_in_on_the_tpu_kernels():
    """All drop-ins work on the TPU kernels in the interpreter with race detection.

    They run in a separate process with a time limit, because a missing copy hangs.
    """
    assert printed("-m", "tests.programs.drop_ins_on_tpu_kernels", JAX_PLATFORMS="cpu") == "right\n"


def test_a_backend_that_cannot_run_here_is_named():
    batch = ragged(MIXED)
    with pytest.raises(Unsupported, match="cuda: does not offer ragged_paged_attention"):
        jax_pallas.ragged_paged_attention(*batch.arrays, **TUNABLES, backend="cuda")


# Refusals of ragged attention

VALID = ragged(((2, 3), (2, 8)), head_dim=16, padding=0, more_seqs=0)
I32 = jnp.int32


def ints(*values: Any) -> Any:
    return jnp.array(values, I32)


# Changes of the call, our error and its message, and whether JAX also raises a ValueError or an assertion.
STATIC: list[tuple[dict[str, Any], type[Exception], str, bool]] = [
    ({"kv_pages": jnp.ones((4, 4, 3, 16))}, InvalidInput, "kv_pages.shape[2] to be 2 * num_kv_heads, an even", True),
    ({"k_scale": 1}, InvalidInput, "expected k_scale to be a float or None, got int", True),
    ({"v_scale": np.float32(1)}, InvalidInput, "expected v_scale to be a float or None, got float32", True),
    ({"num_seqs": ints(2, 2)}, InvalidInput, "num_seqs to be an integer array of shape [1], got int32[2]", True),
    ({"num_seqs": I32(2)}, InvalidInput, "num_seqs to be an integer array of shape [1], got int32[]", True),
    ({"num_seqs": jnp.ones(1)}, InvalidInput, "num_seqs to be an integer array of shape [1], got float32[1]", False),
    ({"num_seqs": 2}, TypeError, "expected num_seqs to be an array, got int", False),
    ({"kv_pages": jnp.ones((4, 4, 4, 32))}, InvalidInput, "kv_pages.shape[3] = head_dim=16, got 32", True),
    ({"kv_lens": ints(3)}, InvalidInput, "expected page_indices.shape to be [S, M] = [1, M], got [2, 2]", True),
    ({"cu_q_lens": ints(0, 2)}, InvalidInput, "expected cu_q_lens.shape to be [S+1] = [3], got [2]", True),
    ({"kv_lens": jnp.ones(2)}, InvalidInput, "expected kv_lens.dtype to be int32, got float32", True),
    ({"page_indices": jnp.ones((2, 2), "int16")}, InvalidInput, "page_indices.dtype to be int32, got int16", True),
    ({"cu_q_lens": jnp.ones(3, "uint32")}, InvalidInput, "cu_q_lens.dtype to be int32, got uint32", True),
    ({"q": jnp.ones((4, 3, 16))}, InvalidInput, "num_kv_heads = kv_pages.shape[2] / 2 = 2, got 3", True),
    ({"sliding_window": 0}, InvalidInput, "sliding_window must be positive: expected sliding_window >= 1, got 0", True),
    ({"sliding_window": -1}, InvalidInput, "sliding_window must be positive", True),
    ({"soft_cap": 0.0}, InvalidInput, "soft_cap must not be 0.0: expected None or another number, got 0.0", True),
    ({"num_kv_pages_per_block": 0}, InvalidInput, "num_kv_pages_per_block between 1 and pages_per_seq=2, got 0", True),
    ({"num_kv_pages_per_block": 3}, InvalidInput, "num_kv_pages_per_block between 1 and pages_per_seq=2, got 3", True),
    ({"num_queries_per_block": 0}, InvalidInput, "num_queries_per_block must be positive: expected num_q", True),
    ({"vmem_limit_bytes": -1}, InvalidInput, "vmem_limit_bytes must be positive: expected vmem_limit_bytes >= 1", True),
    ({"q": jnp.ones((4, 16))}, InvalidInput, "expected q.shape to be [T, H, D]", True),
    ({"page_indices": ints(1, 2)}, InvalidInput, "expected page_indices.shape to be [S, M]", True),
    ({"q": jnp.ones((4, 4, 20)), "kv_pages": jnp.ones((4, 4, 4, 20))}, InvalidInput, "a multiple of 8 from 16", False),
    ({"kv_pages": jnp.ones((4, 4, 4, 16), "int16")}, InvalidInput, "kv_pages.dtype to be", False),
    ({"q": [[1.0]]}, TypeError, "expected q to be an array, got list", False),
    ({"soft_cap": "1"}, TypeError, "expected soft_cap to be a number, got str", False),
    ({"sliding_window": 2.5}, TypeError, "expected sliding_window to be an int, got float", False),
]


def changed(changes: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The valid call with some arguments changed."""
    arrays = dict(zip(inspect.signature(jax_pallas.ragged_paged_attention).parameters, VALID.arrays, strict=False))
    settings = {name: value for name, value in changes.items() if name not in arrays}
    return list((arrays | {name: changes[name] for name in changes if name in arrays}).values()), settings


@pytest.mark.parametrize(("changes", "error", "message", "theirs"), STATIC)
def test_static_refusals(changes, error, message, theirs):
    arrays, settings = changed(changes)
    for function in (jax_pallas.static_validate_inputs, jax_pallas.dynamic_validate_inputs):
        with pytest.raises(error) as refusal:
            function(*arrays, **settings)
        assert message in str(refusal.value)
    with pytest.raises(error) as refusal:
        jax_pallas.ragged_paged_attention(*arrays, **settings)
    assert message in str(refusal.value)
    if theirs:
        with pytest.raises((ValueError, AssertionError)):
            upstream.static_validate_inputs(*arrays, **settings)


def test_the_valid_call_is_taken_by_both():
    for functions in (jax_pallas, upstream):
        functions.static_validate_inputs(*VALID.arrays)
        functions.dynamic_validate_inputs(*VALID.arrays)


def test_static_validation_looks_at_shapes_alone():
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in VALID.arrays]
    jax_pallas.static_validate_inputs(*shapes, sm_scale=1.0, mask_value=-1.0, soft_cap=-3.0)
    with pytest.raises(InvalidInput, match=r"expected kv_lens\.dtype to be int32"):
        jax.eval_shape(
            lambda lens, *rest: jax_pallas.static_validate_inputs(*rest[:2], lens, *rest[2:]),
            jax.ShapeDtypeStruct((2,), jnp.uint8), *shapes[:2], *shapes[3:],
        )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sm_scale": None}, "expected sm_scale to be a number, got NoneType"),
        ({"sm_scale": "1"}, "expected sm_scale to be a number, got str"),
        ({"mask_value": "1"}, "expected mask_value to be a number or None, got str"),
    ],
)
def test_refusals_of_the_call_alone(changes, message):
    with pytest.raises(TypeError, match=message):
        jax_pallas.ragged_paged_attention(*VALID.arrays, **changes)


DYNAMIC: list[tuple[dict[str, Any], str, bool]] = [
    ({"num_seqs": ints(3)}, "expected num_seqs between 0 and max_num_seqs=2, got 3", True),
    ({"num_seqs": ints(-1)}, "expected num_seqs between 0 and max_num_seqs=2, got -1", False),
    ({"kv_lens": ints(3, 9)}, "expected kv_lens[1] between 0 and pages_per_seq * page_size = 8, got 9", True),
    ({"kv_lens": ints(3, 9), "num_seqs": ints(1)}, "expected kv_lens[1] <= pages_per_seq * page_size = 8, got 9", True),
    ({"cu_q_lens": ints(0, 2, 5)}, "expected cu_q_lens[2] <= num_tokens=4, got 5", True),
    ({"kv_lens": ints(1, 8)}, "expected q_len <= kv_lens[0] = 1, got q_len 2 of sequence 0", True),
    ({"cu_q_lens": ints(0, 3, 2)}, "expected cu_q_lens to ascend, got 3, 2 at sequence 1", False),
    ({"page_indices": ints([0, 1], [2, 99])}, "expected page_indices[1, 1] between 0 and 4, got 99", False),
    ({"kv_lens": ints(3, -1), "cu_q_lens": ints(0, 2, 2)}, "expected kv_lens[1] between 0", False),
]


@pytest.mark.parametrize(("changes", "message", "theirs"), DYNAMIC)
def test_dynamic_refusals(changes, message, theirs):
    arrays, _ = changed(changes)
    jax_pallas.static_validate_inputs(*arrays)
    with pytest.raises(InvalidInput) as refusal:
        jax_pallas.dynamic_validate_inputs(*arrays)
    assert message in str(refusal.value)
    if theirs:
        with pytest.raises(ValueError, match=r"must be (less|greater) or equal"):
            upstream.dynamic_validate_inputs(*arrays)


def test_invalid_values_are_safe_in_a_call(backend):
    """Invalid values are refused only if `validate` requests it. Otherwise no memory outside the arrays is read."""
    for changes, _, _ in DYNAMIC:
        arrays, _ = changed({"kv_pages": jnp.nan_to_num(VALID.kv_pages)} | changes)
        out = jax_pallas.ragged_paged_attention(*arrays, backend=backend)
        assert bool(jnp.isfinite(out).all())


# Decode

LENGTHS = (0, 3, 16, 17, 1, 0, 40, 12)


def decode_batch(lengths: Any = LENGTHS, heads: Any = (8, 2), dtype: Any = "float32", **shape: Any) -> tuple[Any, ...]:
    """The arguments q, k_pages, v_pages, lengths and page_indices of a decode."""
    pages_per_seq = shape.pop("pages_per_seq", 12)
    batch = ragged(
        [(1, length) for length in lengths], heads=heads, dtype=dtype, padding=0, more_seqs=0,
        pages_per_seq=pages_per_seq, **shape,
    )  # fmt: skip
    return batch.q, *heads_first(batch.kv_pages), batch.kv_lens, batch.page_indices


def decode_defined(arrays: tuple[Any, ...], **options: Any) -> Any:
    q, k_pages, v_pages, lengths, page_indices = arrays
    q, k_pages, v_pages = (np.asarray(array, np.float64) for array in (q, k_pages, v_pages))
    options = {"sm_scale": 1.0} | options
    return decode_definition(q, k_pages, v_pages, np.asarray(lengths), np.asarray(page_indices), **options)


@pytest.mark.parametrize(
    ("dtype", "heads", "soft_cap"),
    [
        ("float32", (8, 8), None), ("float32", (8, 2), 1.0), ("float32", (6, 2), -3.0),
        ("bfloat16", (8, 8), 1.0), ("bfloat16", (16, 2), -3.0), ("bfloat16", (6, 2), None),
    ],
)  # fmt: skip
def test_decode_agrees_with_jaxs_reference_and_the_definition(dtype, heads, soft_cap):
    arrays = decode_batch(heads=heads, dtype=dtype)
    q, k_pages, v_pages, lengths, page_indices = arrays
    out = jax_pallas.paged_attention(*arrays, attn_logits_soft_cap=soft_cap, pages_per_compute_block=4, backend="xla")
    assert out.dtype == q.dtype
    want = decode_defined(arrays, soft_cap=soft_cap and abs(soft_cap))
    assert agrees(out, want, dtype)
    rows = jnp.where(page_indices == NO_PAGE, 0, page_indices)
    k, v = (jnp.nan_to_num(pages[:, rows].swapaxes(0, 1).astype(jnp.float32)) for pages in (k_pages, v_pages))
    k, v = (pages.reshape(*pages.shape[:2], -1, pages.shape[-1]) for pages in (k, v))
    theirs = util.grouped_query_attention_reference(q.astype(jnp.float32), k, v, lengths, soft_cap)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    live = np.asarray(lengths) > 0
    np.testing.assert_allclose(
        np.asarray(out, np.float32)[live], np.asarray(theirs, np.float32)[live], atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("inline_seq_dim", [True, False])
@pytest.mark.parametrize("megacore_mode", [None, "batch", "kv_head"])
def test_decode_in_every_mode(megacore_mode, inline_seq_dim):
    """Decode works in every mode, and rows of length 0 are 0.

    JAX's kernel does not write these rows if the sequence dimension is part of the grid.
    """
    arrays = decode_batch()
    out = jax_pallas.paged_attention(
        *arrays, pages_per_compute_block=3, megacore_mode=megacore_mode, inline_seq_dim=inline_seq_dim, backend="xla"
    )
    assert agrees(out, decode_defined(arrays), "float32")
    assert float(jnp.abs(out[jnp.array(LENGTHS) == 0]).max()) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jaxs_quantised_pages(dtype):
    """A quantised element is exactly code * scale / 127.5; JAX's kernel rounds this to bfloat16."""
    q, k_pages, v_pages, lengths, page_indices = decode_batch(dtype=dtype)
    k, v = (quantization_utils.quantize_to_int8(jnp.nan_to_num(pages)) for pages in (k_pages, v_pages))
    assert k.scales.dtype == k_pages.dtype
    out = jax_pallas.paged_attention(q, k, v, lengths, page_indices, pages_per_compute_block=4, backend="xla")
    exact = [np.asarray(p.weight, np.float64) * np.asarray(p.scales, np.float64) / 127.5 for p in (k, v)]
    assert agrees(out, decode_defined((q, *exact, lengths, page_indices)), "bfloat16")


@pytest.mark.parametrize("dtype", ["int64", "int16", "uint8"])
def test_decode_takes_numpy_lengths_and_tables_of_any_integer_dtype(dtype):
    q, k_pages, v_pages, lengths, page_indices = arrays = decode_batch()
    table = np.where(np.asarray(page_indices) == NO_PAGE, 255, page_indices).astype(dtype)
    out = jax_pallas.paged_attention(
        q,
        k_pages,
        v_pages,
        np.asarray(lengths, np.int64),
        table,
        pages_per_compute_block=np.int64(4),
        backend="xla",
    )
    assert agrees(out, decode_defined(arrays), "float32")


def test_decode_with_other_values_is_no_other_program():
    traces = []

    @jax.jit
    def attend(*arrays: Any) -> Any:
        traces.append(1)
        return jax_pallas.paged_attention(*arrays, pages_per_compute_block=4, backend="xla")

    for seed in range(3):
        arrays = decode_batch(np.roll(LENGTHS, seed).tolist(), seed=seed)
        assert agrees(attend(*arrays), decode_defined(arrays), "float32")
    assert len(traces) == 1


ODD = decode_batch((3, 5, 9), heads=(3, 3), pages_per_seq=4)
DECODE_NAMES = ("q", "k_pages", "v_pages", "lengths", "page_indices")


@pytest.mark.parametrize(
    ("changes", "error", "message", "theirs"),
    [
        ({"v_pages": ODD[2][:, :3]}, InvalidInput, "expected v_pages.shape to be [K, P, G, D] = ", True),
        ({"v_pages": ODD[2][..., :16]}, InvalidInput, "expected v_pages.shape to be [K, P, G, D] = ", True),
        ({"q": jnp.ones((3, 4, 32))}, InvalidInput, "num_q_heads to be a multiple of num_kv_heads=3, got 4", True),
        ({"q": jnp.ones((3, 3, 16))}, InvalidInput, "expected k_pages.shape to be [K, P, G, D]", True),
        ({"pages_per_compute_block": 3}, InvalidInput,
         "expected pages_per_compute_block to divide pages_per_seq=4 of page_indices, got 3", True),
        ({"pages_per_compute_block": 0}, InvalidInput, "expected pages_per_compute_block >= 1, got 0", False),
        ({"pages_per_compute_block": 2.0}, TypeError, "pages_per_compute_block to be an int, got float", False),
        ({"lengths": ints(1, 2)}, InvalidInput, "expected lengths.shape to be [S] = [3], got [2]", True),
        ({"lengths": jnp.ones(3, "int16")}, InvalidInput, "expected lengths.dtype to be int32, got int16", True),
        ({"page_indices": jnp.ones((2, 4), I32)}, InvalidInput, "page_indices.shape to be [S, M] = [3, M]", True),
        ({"page_indices": jnp.ones((3, 4))}, InvalidInput, "page_indices.dtype to be an integer one, got f", False),
        ({"page_indices": [[1]]}, TypeError, "expected page_indices to be an array, got list", False),
        ({"megacore_mode": "kv_head"}, InvalidInput,
         "expected the number of KV heads to be even with megacore_mode='kv_head', got 3", True),
        ({"megacore_mode": "batch"}, InvalidInput, "the batch size to be even with megacore_mode='batch', got 3", True),
        ({"megacore_mode": "cores"}, InvalidInput,
         "expected megacore_mode to be 'kv_head', 'batch' or None, got 'cores'", True),
        ({"inline_seq_dim": 1}, TypeError, "expected inline_seq_dim to be a bool, got int", False),
        ({"mask_value": "1"}, TypeError, "expected mask_value to be a number or None, got str", False),
        ({"attn_logits_soft_cap": 0.0}, InvalidInput, "expected attn_logits_soft_cap > 0, got 0.0", False),
        ({"q": [1.0]}, TypeError, "expected q to be an array, got list", False),
    ],
)  # fmt: skip
def test_decode_refuses(changes, error, message, theirs):
    arguments: Any = dict(zip(DECODE_NAMES, ODD, strict=True)) | {"pages_per_compute_block": 2} | changes
    with pytest.raises(error) as refusal:
        jax_pallas.paged_attention(**arguments)
    assert message in str(refusal.value)
    if theirs:
        with pytest.raises(ValueError, match=r"must|same|Number"):
            upstream_decode.paged_attention(**arguments)
