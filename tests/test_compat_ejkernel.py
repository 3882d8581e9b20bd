"""`compat.ejkernel` has ejKernel's signature, and is right in cases in which ejKernel's portable version is wrong."""

import inspect
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

import ragged_attention as ra
from ragged_attention.compat import ejkernel
from ragged_attention.errors import InvalidInput
from ragged_attention.testing.compare import agrees
from tests.paged_batches import Batch, ragged

ragged_page_attention_v2: Any = ejkernel.ragged_page_attention_v2

BACKENDS = ("xla", "reference")
MIXED = ((1, 9), (6, 6), (0, 5), (4, 14), (1, 1))


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def test_the_signature_is_ejkernels():
    """The signature is that of ejKernel's 2026 release on all its platforms, with one more keyword, `backend`."""
    parameters = dict(inspect.signature(ragged_page_attention_v2).parameters)
    assert parameters.pop("backend").default is None
    positional = "queries kv_pages context_lens block_tables query_start_loc num_seqs"
    assert [
        name for name, parameter in parameters.items() if parameter.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD
    ] == positional.split()
    assert {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.kind == inspect.Parameter.KEYWORD_ONLY
    } == {
        "softmax_scale": None,
        "logits_soft_cap": None,
        "compute_dtype": jnp.bfloat16,
        "optimized": False,
        "sliding_window": None,
        "softmax_aux": None,
        "mask_value": None,
        "num_kv_pages_per_block": None,
        "num_queries_per_block": None,
        "vmem_limit_bytes": None,
        "num_warps": None,
        "num_stages": None,
    }
    assert ejkernel.__all__ == ["ragged_page_attention_v2"]


SINKS = np.array([0.5, -1.0, 3.0, -np.inf], np.float32)


@pytest.mark.parametrize(
    ("settings", "mathematical"),
    [
        ({}, {}),
        ({"softmax_scale": 0.3}, {"sm_scale": 0.3}),
        ({"sliding_window": 1}, {"sliding_window": 1}),
        ({"sliding_window": 5, "mask_value": -1e9}, {"sliding_window": 5}),
        ({"logits_soft_cap": 2.0}, {"soft_cap": 2.0}),
        ({"softmax_aux": SINKS}, {"sinks": SINKS}),
        ({"softmax_aux": jnp.asarray(SINKS, "bfloat16"), "sliding_window": 3}, {"sinks": SINKS, "sliding_window": 3}),
        ({"compute_dtype": jnp.float32, "optimized": True}, {}),
    ],
    ids=str,
)
def test_agreement_with_the_definition(settings, mathematical, backend):
    for dtype in ("float32", "bfloat16"):
        batch = ragged(MIXED, dtype=dtype)
        out = ragged_page_attention_v2(*batch.arrays, **settings, backend=backend)
        assert out.dtype == batch.q.dtype
        assert agrees(out, batch.defined(**mathematical), dtype)


# Cases in which ejKernel's portable version is wrong


@pytest.mark.parametrize("lens", [((5, 9), (3, 3)), ((1, 4),) * 8, ((8, 8),), ((3, 3), (5, 5))], ids=str)
def test_exactly_packed_tokens(lens, backend):
    """Exactly packed tokens work; ejKernel's version of 2025 overwrites other sequences' rows."""
    batch = ragged(lens, padding=0, more_seqs=0)
    assert agrees(ragged_page_attention_v2(*batch.arrays, backend=backend), batch.defined(), "float32")


def test_rows_after_the_last_token_are_zero(backend):
    batch = ragged(MIXED, padding=7)
    out = ragged_page_attention_v2(*batch.arrays, backend=backend)
    assert float(jnp.abs(out[batch.num_tokens :]).max()) == 0


@pytest.mark.parametrize("pages_per_seq", [65, 100])
def test_tables_wider_than_64_pages(pages_per_seq, backend):
    """Wide tables work; ejKernel reads wrong pages if the width is not a multiple of 64."""
    batch = ragged([(2, 4 * pages_per_seq), (1, 4 * pages_per_seq - 3)], pages_per_seq=pages_per_seq)
    assert agrees(ragged_page_attention_v2(*batch.arrays, backend=backend), batch.defined(), "float32")


def test_a_window_that_hides_a_whole_block_of_keys(backend):
    """A narrow window works; ejKernel gives NaN if the first 64 pages are all hidden."""
    batch = ragged([(2, 512), (1, 300)])
    out = ragged_page_attention_v2(*batch.arrays, sliding_window=8, backend=backend)
    assert agrees(out, batch.defined(sliding_window=8), "float32")


def test_more_queries_than_keys_are_finite(backend):
    """More queries than keys give finite results; ejKernel's own tests have 128 queries over 48 keys."""
    batch = ragged([(12, 5), (2, 6)])
    out = ragged_page_attention_v2(*batch.arrays, backend=backend)
    assert agrees(out, batch.defined(), "float32")
    assert float(jnp.abs(out[:7]).max()) == 0


# Accepted arguments


@pytest.mark.parametrize("count", [5, np.int64(5), jnp.array(5), jnp.array([5], "uint8"), np.array([5])], ids=repr)
def test_forms_of_the_number_of_sequences(count):
    batch = ragged(MIXED)
    assert agrees(ragged_page_attention_v2(*batch.arrays[:5], count), batch.defined(), "float32")


def test_tables_of_other_integer_dtypes():
    batch = ragged(MIXED)
    with jax.enable_x64(True):
        tables = [jnp.asarray(np.asarray(table, np.int64)) for table in batch.arrays[2:5]]
        tables[1] = jnp.where(tables[1] < 0, 2**40, tables[1])  # an invalid page that exceeds int32
        out = ragged_page_attention_v2(*batch.arrays[:2], *tables, 5, backend="xla")
    assert tables[0].dtype == jnp.int64
    assert agrees(out, batch.defined(), "float32")


def test_another_number_of_sequences_is_no_other_program(monkeypatch):
    from ragged_attention.portable.numba import ragged_paged_attention as implementation

    count = []
    run = implementation.run
    monkeypatch.setattr(implementation, "run", lambda *arguments: count.append(1) or run(*arguments))
    batch = ragged(MIXED)
    for live in (5, 3, 0):
        out = ragged_page_attention_v2(*batch.arrays[:5], live, softmax_scale=0.1234)
        assert agrees(out, batch.with_(num_seqs=jnp.array([live])).defined(sm_scale=0.1234), "float32")
    assert len(count) == 1


def test_under_jit_with_everything_traced():
    traces = []

    @jax.jit
    def attend(*arrays: Any) -> Any:
        traces.append(1)
        return ragged_page_attention_v2(*arrays[:6], softmax_aux=arrays[6])

    for seed, sinks in enumerate((SINKS, SINKS - 1)):
        batch = ragged(MIXED, seed=seed)
        assert agrees(attend(*batch.arrays, jnp.asarray(sinks)), batch.defined(sinks=sinks), "float32")
    assert len(traces) == 1


# Tunables


def test_tunables_reach_the_backend_that_has_them(monkeypatch):
    pytest.importorskip("triton")
    from ragged_attention.kernels_triton import ragged_paged_attention as implementation

    tiles = []
    run = implementation.run
    monkeypatch.setattr(implementation, "run", lambda call, tile, launch: tiles.append(tile) or run(call, tile, launch))
    batch = ragged([(1, 3), (2, 2)], head_dim=16, heads=(2, 1))
    arguments: dict[str, Any] = {"num_warps": 2, "num_stages": 3, "num_kv_pages_per_block": 1}
    out = ragged_page_attention_v2(*batch.arrays, **arguments, backend="triton")
    assert agrees(out, batch.defined(), "float32")
    assert (tiles[-1].num_warps, tiles[-1].num_stages) == (2, 3)
    with ra.use_backend("xla"):
        assert agrees(ragged_page_attention_v2(*batch.arrays, **arguments), batch.defined(), "float32")


# Refusals

VALID = ragged(((2, 3), (2, 8)), head_dim=16, padding=0, more_seqs=0)
NAMES = ("queries", "kv_pages", "context_lens", "block_tables", "query_start_loc", "num_seqs")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"queries": jnp.ones((4, 3, 16))},
            InvalidInput,
            "expected queries.shape[1] to be a multiple of num_kv_heads = ",
        ),
        ({"queries": jnp.ones((4, 16))}, InvalidInput, "expected queries.shape to be [T, H, D], got [4"),
        ({"queries": [1.0]}, TypeError, "expected queries to be an array, got list"),
        ({"kv_pages": jnp.ones((4, 4, 3, 16))}, InvalidInput, "expected kv_pages.shape[2] to be 2 * num_kv_heads"),
        ({"kv_pages": jnp.ones((4, 4, 4, 32))}, InvalidInput, "expected kv_pages.shape[3] = head_dim=16, got 32"),
        ({"kv_pages": jnp.ones((4, 4, 4, 16), "int16")}, InvalidInput, "expected kv_pages.dtype to be float32 or"),
        ({"context_lens": jnp.ones(2)}, InvalidInput, "expected context_lens.dtype to be an integer one, got float32"),
        ({"block_tables": jnp.ones(2, int)}, InvalidInput, "expected block_tables.shape to be [S, M] = [2, M], got [2"),
        ({"query_start_loc": jnp.ones(2, int)}, InvalidInput, "query_start_loc.shape to be [S+1] = [3], got [2]"),
        ({"query_start_loc": [0, 1, 2]}, TypeError, "expected query_start_loc to be an array, got list"),
        ({"num_seqs": 3}, InvalidInput, "expected num_seqs between 0 and max_num_seqs=2, got 3"),
        ({"num_seqs": -1}, InvalidInput, "expected num_seqs between 0 and max_num_seqs=2, got -1"),
        ({"num_seqs": jnp.ones(2, int)}, InvalidInput, "expected num_seqs to be int32 of shape [1], got int32[2]"),
        ({"num_seqs": jnp.ones(1)}, InvalidInput, "expected num_seqs.dtype to be an integer one, got float32"),
        ({"num_seqs": 2.0}, TypeError, "expected num_seqs to be an int or an array, got float"),
        ({"num_seqs": None}, TypeError, "expected num_seqs to be an int or an array, got NoneType"),
        ({"softmax_scale": "1"}, TypeError, "expected softmax_scale to be a number, got str"),
        ({"logits_soft_cap": 0.0}, InvalidInput, "expected logits_soft_cap > 0, got 0.0"),
        ({"sliding_window": 0}, InvalidInput, "expected sliding_window >= 1, got 0"),
        ({"sliding_window": (4, 0)}, TypeError, "expected sliding_window to be an int, got tuple"),
        ({"softmax_aux": jnp.ones(3)}, InvalidInput, "expected softmax_aux.shape to be [H] = [4], got [3]"),
        ({"softmax_aux": jnp.ones((4, 1))}, InvalidInput, "expected softmax_aux.shape to be [H] = [4], got [4, 1]"),
        ({"softmax_aux": jnp.ones(4, int)}, InvalidInput, "softmax_aux.dtype to be a float one, got int32"),
        ({"softmax_aux": [1.0] * 4}, TypeError, "expected softmax_aux to be an array, got list"),
        ({"mask_value": "1"}, TypeError, "expected mask_value to be a number or None, got str"),
        ({"compute_dtype": "float"}, None, ""),
        ({"compute_dtype": "nothing"}, TypeError, "data type 'nothing' not understood"),
        ({"num_warps": 0}, InvalidInput, "expected num_warps >= 1, got 0"),
        ({"num_stages": 1.5}, TypeError, "expected num_stages to be an int, got float"),
        ({"num_kv_pages_per_block": 0}, InvalidInput, "expected num_kv_pages_per_block >= 1, got 0"),
        ({"num_queries_per_block": 0}, InvalidInput, "expected num_queries_per_block >= 1, got 0"),
        ({"vmem_limit_bytes": -1}, InvalidInput, "expected vmem_limit_bytes >= 1, got -1"),
    ],
)
def test_refusals(changes, error, message):
    arguments: Any = dict(zip(NAMES, VALID.arrays, strict=True)) | changes
    if error is None:
        ragged_page_attention_v2(**arguments)
        return
    with pytest.raises(error) as refusal:
        ragged_page_attention_v2(**arguments)
    assert message in str(refusal.value)


def test_values_are_refused_on_request():
    batch: Batch = VALID.with_(kv_lens=jnp.array([1, 8]))
    ragged_page_attention_v2(*batch.arrays)
    with (
        ra.use_backend(validate="full"),
        pytest.raises(InvalidInput, match=r"expected q_len <= context_lens\[0\] = 1, got q_len 2 of sequence 0"),
    ):
        ragged_page_attention_v2(*batch.arrays)
