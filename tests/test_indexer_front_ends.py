"""The lightning indexer under the machinery of torch and jax: operators, compilation, strides and writes in place.

Data are small whole numbers, so that logits are exact and all backends must give equal results.
"""

import functools
import warnings
from typing import Any

import numpy as np
import pytest

import ragged_attention as ra
from ragged_attention.testing.compare import identical

pytest.importorskip("torch")
pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ragged_attention.jax as rj
import ragged_attention.torch as rt
from tests.far_strides import far
from tests.operators import operator_arguments
from tests.processes import triton_kernels
from tests.tensors import ints, strided

T, H, D = 7, 3, 16  # the last token is padding
P, G, M, S = 6, 4, 3, 3
TABLES = {"page_indices": [[4, 0, 99], [1, 2, 5], [-1, 3, 2]], "kv_lens": [7, 12, 9], "cu_q_lens": [0, 2, 3, 6]}
SLOTS = [1, 2, 23, 14, 15, 8, -1]  # the slots that TABLES gives to the tokens
RANGES = {"starts": [0, 3, 5, 0, 9, 2, 4], "stops": [9, 9, 5, 1, 3, 40, 8]}
KINDS = ("plain", "scaled", "bytes", "packed")
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
INDEXERS = pytest.mark.parametrize("operation", ["indexer_logits", "indexer_topk"])


def whole(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-3, 4, shape, generator=generator).float()


def pages_of_bytes(num_pages: int = P) -> torch.Tensor:
    """Pages of bytes whose keys are small whole numbers, each key with a scale that is a power of two."""
    values = whole(num_pages, G * D).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = (2.0 ** whole(num_pages, G)).view(torch.uint8)
    return torch.cat((values, scales), 1).view(num_pages, G, 1, D + 4)


def inputs(kind: str, operation: str = "indexer_logits") -> dict[str, Any]:
    """The arguments of a call, as torch tensors."""
    given: dict[str, Any] = {"q": whole(T, H, D), "weights": whole(T, H)}
    if kind == "packed":
        given |= {"keys": whole(11, D), "key_scale": 2.0 ** whole(11)}
    elif kind == "bytes":
        given |= {"q": given["q"].to(torch.float8_e4m3fn), "keys": pages_of_bytes()}
    else:
        given |= {"keys": whole(P, G, D)} | ({"key_scale": 2.0 ** whole(P, G)} if kind == "scaled" else {})
    given |= {name: ints(*value) for name, value in (RANGES if kind == "packed" else TABLES).items()}
    return given | ({"top_k": 5} if operation == "indexer_topk" else {})


def call(operation: str, given: dict[str, Any], backend: str = "eager", **more: Any) -> Any:
    return getattr(rt, operation)(**given, **more, backend=backend)


# ---- torch's own machinery


def check_operator(operation: str, *arguments: Any, **named: Any) -> None:
    operator = getattr(torch.ops.ragged_attention, operation).default
    torch.library.opcheck(operator, operator_arguments(operation, *arguments, **named))


@EACH_KIND
@INDEXERS
def test_indexers_pass_opcheck(operation: str, kind: str) -> None:
    # q is not e4m3, because torch's comparison does not support it.
    check_operator(operation, **inputs(kind, operation) | {"q": whole(T, H, D)})


def test_the_others_pass_opcheck() -> None:
    check_operator("top_k_indices", whole(3, 9), 4, ints(0, 2, 5))
    check_operator("quantize_indexer_keys", whole(5, D), power_of_two=True)
    check_operator("write_indexer_cache", whole(3, D), pages_of_bytes(), torch.tensor([1, -1, 5]))
    tables = {name: ints(*value) for name, value in TABLES.items()}
    check_operator("write_indexer_cache", whole(T, D), pages_of_bytes(), **tables, num_seqs=ints(2))


def engine_step(q: Any, new: Any, weights: Any, cache: Any, slots: Any, tables: Any) -> Any:
    """A step of an engine: write the new keys, select keys and convert them to slots for attention."""
    rt.write_indexer_cache(new, cache, slots, backend="eager")
    values, scales = rt.quantize_indexer_keys(q.flatten(0, 1), backend="eager")
    shared: dict[str, Any] = {
        "page_indices": tables[0],
        "kv_lens": tables[1],
        "cu_q_lens": tables[2],
        "backend": "eager",
    }
    queries = values.view(q.shape), cache, weights * scales.view(weights.shape)
    chosen = rt.indexer_topk(*queries, 5, **shared)
    logits = rt.indexer_logits(*queries, **shared)
    seqs = torch.searchsorted(tables[2][1:], torch.arange(len(q)), right=True).clamp(max=len(tables[1]) - 1)
    return chosen, rt.page_indices_to_slots(chosen, tables[0][seqs], G), logits, rt.top_k_indices(logits, 2)


def step_inputs(tokens: int) -> list[Any]:
    tables = [ints(*value) for value in TABLES.values()]
    slots = torch.arange(tokens) * 3
    return [whole(tokens, H, D), whole(tokens, D), whole(tokens, H), pages_of_bytes(), slots, tables]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_whole_step_compiles_into_one_graph(compiler: str, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own internals
        compiled: Any = torch.compile(engine_step, fullgraph=True, backend=compiler, dynamic=dynamic)
        for tokens in (7,) if dynamic is None else (7, 8):
            plain, traced = step_inputs(tokens), step_inputs(tokens)
            for want, got in zip(engine_step(*plain), compiled(*traced), strict=True):
                assert torch.equal(got, want)
            assert torch.equal(traced[3], plain[3])  # the cache is written in place


@EACH_KIND
def test_fake_tensors_get_shapes_dtypes_and_static_checks(kind: str) -> None:
    with FakeTensorMode() as mode:
        given: Any = {
            name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in inputs(kind).items()
        }
        logits, chosen = rt.indexer_logits(**given), rt.indexer_topk(**given, top_k=5)
        assert (logits.shape, logits.dtype) == ((T, 11 if kind == "packed" else M * G), torch.float32)
        assert (chosen.shape, chosen.dtype) == ((T, 5), torch.int32)
        with pytest.raises(ra.InvalidInput, match=r"expected weights\.shape to be \[T, H\] = \[7, 3\], got \[7, 2\]"):
            rt.indexer_topk(**given | {"weights": given["weights"][:, :2]}, top_k=5)


def test_fake_tensors_of_the_others() -> None:
    with FakeTensorMode():
        chosen = rt.top_k_indices(torch.zeros(3, 9), 12)
        assert (chosen.shape, chosen.dtype) == ((3, 12), torch.int32)
        values, scales = rt.quantize_indexer_keys(torch.zeros(5, D, dtype=torch.bfloat16))
        assert (values.shape, values.dtype) == ((5, D), torch.float8_e4m3fn)
        assert (scales.shape, scales.dtype) == ((5,), torch.float32)
        cache = torch.zeros(P, G, 1, D + 4, dtype=torch.uint8)
        assert rt.write_indexer_cache(torch.zeros(5, D), cache, torch.arange(5)) is cache


@pytest.mark.parametrize("name", ["q", "keys", "weights"])
def test_a_choice_has_no_gradient(name: str) -> None:
    given = inputs("packed")
    given[name].requires_grad_()
    assert not call("indexer_topk", given, top_k=3).requires_grad  # indices are integers and have no gradient


def test_scales_have_no_gradient() -> None:
    _, scales = rt.quantize_indexer_keys(whole(5, D).requires_grad_(), backend="eager")
    with pytest.raises(RuntimeError, match="quantize_indexer_keys has no gradient"):
        scales.sum().backward()


@EACH_KIND
@INDEXERS
def test_inference_mode(operation: str, kind: str) -> None:
    want = call(operation, inputs(kind, operation), "reference")
    with torch.inference_mode():
        assert torch.equal(call(operation, inputs(kind, operation)), want)


def test_inference_mode_writes_in_place() -> None:
    k, want = whole(3, D), pages_of_bytes()
    slots = torch.tensor([1, -1, 5])
    rt.write_indexer_cache(k, want, slots, backend="reference")
    with torch.inference_mode():
        cache = pages_of_bytes()
        assert rt.write_indexer_cache(k, cache, slots, backend="eager") is cache
        assert torch.equal(cache, want)


@INDEXERS
@pytest.mark.parametrize("count", [0, 2, 3])
def test_how_many_sequences_live_may_be_a_number_or_an_array(operation: str, count: int) -> None:
    """`num_seqs` may be a number or an array, and the table entries after these sequences are never read."""
    given = inputs("bytes", operation)
    for name, table in TABLES.items():
        given[name][count + (name == "cu_q_lens") :] = 2**31 - 1 if name == "page_indices" else -5
        assert len(table) == S + (name == "cu_q_lens")
    want = call(operation, inputs("bytes", operation), "reference", num_seqs=count)
    for backend in ("reference", "eager", "numba"):
        for form in (count, ints(count)):
            assert torch.equal(call(operation, given, backend, num_seqs=form), want)


@pytest.mark.parametrize("count", [0, 2, 3])
def test_keys_are_written_by_the_tables_of_the_live_sequences(count: int) -> None:
    """`num_seqs` may be a number or an array, tables may be a tuple, and tables give the slots of `SLOTS`."""
    k, want = whole(T, D), pages_of_bytes()
    tables: dict[str, Any] = {name: ints(*value) for name, value in TABLES.items()}
    live = torch.arange(T) < TABLES["cu_q_lens"][count]
    rt.write_indexer_cache(k, want, torch.where(live, ints(*SLOTS), -1), backend="reference")
    for backend in ("reference", "eager", "numba"):
        for form in (count, ints(count)):
            cache = pages_of_bytes()
            assert rt.write_indexer_cache(k, cache, **tables, num_seqs=form, backend=backend) is cache
            assert torch.equal(cache, want)
    cache = pages_of_bytes()
    in_order = tables["page_indices"], tables["kv_lens"], tables["cu_q_lens"]
    rt.write_indexer_cache(k, cache, in_order, num_seqs=count)
    assert torch.equal(cache, want)


@pytest.mark.parametrize("ratio", [1, 4])
def test_tables_of_a_compressed_cache_count_its_keys(ratio: int) -> None:
    """Steps of any length fill a compressed cache like a single write, if the tables count its keys and not tokens."""
    steps = torch.tensor([[5, 2], [1, 9], [0, 4], [7, 1]])  # for each step, the numbers of new tokens of two sequences
    page_indices, kv_lens = ints([4, 0, 5, 1], [2, 3, 7, 6]), torch.zeros(2, dtype=torch.int32)
    keys = whole(2, 16, D)
    cache, want = pages_of_bytes(8), pages_of_bytes(8)
    for q_lens in steps.int():
        before, kv_lens = kv_lens // ratio, kv_lens + q_lens
        after = kv_lens // ratio
        new = torch.cat([keys[seq, before[seq] : after[seq]] for seq in range(2)])
        edges = torch.tensor([0, *(after - before)]).cumsum(0).int()
        rt.write_indexer_cache(new, cache, page_indices=page_indices, kv_lens=after, cu_q_lens=edges)
    rows = torch.cat([keys[seq, : kv_lens[seq] // ratio] for seq in range(2)])
    edges = torch.tensor([0, *(kv_lens // ratio)]).cumsum(0).int()
    rt.write_indexer_cache(rows, want, (page_indices, kv_lens // ratio, edges), backend="reference")
    assert torch.equal(cache, want)
    assert len(rows) == sum(steps.sum(0) // ratio)


# ---- layouts of operands


def rows_apart(pages: torch.Tensor) -> torch.Tensor:
    """A copy of pages of bytes with a gap between the rows of a page."""
    memory = torch.zeros(*pages.shape[:3], pages.shape[3] + 8, dtype=torch.uint8)
    return memory[..., : pages.shape[3]].copy_(pages)


@INDEXERS
def test_a_page_of_bytes_with_rows_apart_is_refused(operation: str) -> None:
    given = inputs("bytes", operation)
    given["keys"] = rows_apart(given["keys"])
    wanted = r"expected keys with rows packed in each page \(stride 20\), got 28"
    with pytest.raises(ra.InvalidInput, match=wanted):
        call(operation, given)


def test_a_page_of_bytes_with_rows_apart_is_not_written() -> None:
    wanted = r"expected cache with rows packed in each page \(stride 20\), got 28"
    with pytest.raises(ra.InvalidInput, match=wanted):
        rt.write_indexer_cache(whole(2, D), rows_apart(pages_of_bytes()), torch.arange(2), backend="eager")


@INDEXERS
def test_pages_of_one_key_are_packed_however_they_lie(operation: str) -> None:
    """Pages of one key may have any row stride."""
    whole_pages = pages_of_bytes().flatten(1)
    packed = torch.cat((whole_pages[:, :D], whole_pages[:, G * D : G * D + 4]), 1).view(P, 1, 1, D + 4)
    apart = rows_apart(packed)
    assert apart.stride(1) == D + 12
    want, got = (call(operation, inputs("bytes", operation) | {"keys": keys}) for keys in (packed, apart))
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["keys", "cache"])
def test_a_strided_last_dimension_is_refused(name: str) -> None:
    pages = torch.zeros(P, G, 1, 2 * (D + 4), dtype=torch.uint8)[..., ::2]
    operation = {"keys": "indexer_logits", "cache": "write_indexer_cache"}[name]
    given = inputs("bytes") if name == "keys" else {"k": whole(2, D), "slot_mapping": torch.arange(2)}
    with pytest.raises(ra.InvalidInput, match=f"expected {name} with a last stride of 1, got 2"):
        call(operation, given | {name: pages})


@pytest.mark.parametrize("backend", ["eager", "numba"])
@EACH_KIND
@INDEXERS
def test_everything_but_keys_may_be_strided(operation: str, kind: str, backend: str) -> None:
    given = inputs(kind, operation)
    laid = {name: strided(value) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    got = call(operation, laid | {"keys": given["keys"]}, backend)
    assert torch.equal(got, call(operation, given, "reference"))


FAR = [("plain", "keys", 0), ("plain", "keys", 1), ("scaled", "key_scale", 0), ("bytes", "keys", 0),
       ("packed", "keys", 0), ("packed", "key_scale", 0), ("plain", "q", 0), ("plain", "q", 1),
       ("bytes", "weights", 0)]  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "numba"])
@pytest.mark.parametrize(("kind", "name", "axis"), FAR)
@INDEXERS
def test_strides_may_exceed_32_bits(operation: str, kind: str, name: str, axis: int, backend: str) -> None:
    given = inputs(kind, operation)
    want = call(operation, given, "reference")
    assert torch.equal(call(operation, given | {name: far(given[name], axis)}, backend), want)


@pytest.mark.parametrize("backend", ["eager", "numba"])
def test_rows_of_logits_and_keys_may_be_far_apart(backend: str) -> None:
    logits, k = whole(4, 9), whole(4, D)
    want = rt.top_k_indices(logits, 3, backend="reference")
    assert torch.equal(rt.top_k_indices(far(logits, 0), 3, backend=backend), want)
    values, scales = rt.quantize_indexer_keys(far(k, 0), backend=backend)
    for got, right in zip((values, scales), rt.quantize_indexer_keys(k, backend="reference"), strict=True):
        assert torch.equal(got.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("backend", ["eager", "numba"])
@pytest.mark.parametrize("name", ["k", "cache"])
def test_pages_that_are_written_may_be_far_apart(name: str, backend: str) -> None:
    given: dict[str, Any] = {"k": whole(4, D), "cache": pages_of_bytes(), "slot_mapping": ints(3, 23, -1, 8)}
    want = given["cache"].clone()
    rt.write_indexer_cache(**given | {"cache": want}, backend="reference")
    given[name] = far(given[name], 0)
    assert torch.equal(rt.write_indexer_cache(**given, backend=backend), want)
    assert not torch.equal(want, pages_of_bytes())


# ---- jax's own machinery


def as_jax(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype == torch.float8_e4m3fn:
        return jax.lax.bitcast_convert_type(jnp.asarray(value.view(torch.uint8).numpy()), jnp.float8_e4m3fn)
    return jnp.asarray(value.numpy())


def jax_call(operation: str, kind: str, backend: str = "xla", **changes: Any) -> Any:
    given = {name: as_jax(value) for name, value in inputs(kind, operation).items()}
    return getattr(rj, operation)(**given | changes, backend=backend)


@EACH_KIND
@INDEXERS
def test_jit(operation: str, kind: str) -> None:
    """With all arrays traced, jax's results equal torch's."""
    given = {name: as_jax(value) for name, value in inputs(kind, operation).items()}
    arrays = {name: value for name, value in given.items() if isinstance(value, jax.Array)}
    static = {name: value for name, value in given.items() if name not in arrays}
    found = jax.jit(lambda arrays: getattr(rj, operation)(**arrays, **static, backend="xla"))(arrays)
    assert identical(found, call(operation, inputs(kind, operation), "reference").numpy())


@EACH_KIND
def test_vmap_over_queries_and_weights(kind: str) -> None:
    q, weights = as_jax(inputs(kind)["q"]), as_jax(inputs(kind)["weights"])
    several = jnp.stack([q, -q]), jnp.stack([weights, weights[::-1]])
    found = jax.vmap(lambda q, weights: jax_call("indexer_topk", kind, q=q, weights=weights))(*several)
    for index in range(2):
        one = {"q": several[0][index], "weights": several[1][index]}
        assert identical(found[index], jax_call("indexer_topk", kind, "reference", **one))


def test_vmap_over_what_is_written_and_chosen() -> None:
    k, slots = as_jax(whole(2, 3, D)), jnp.asarray([[0, 5, -1], [22, 23, 7]], jnp.int32)
    cache = as_jax(pages_of_bytes())

    def step(k: Any, slots: Any, backend: str = "xla") -> Any:
        written = rj.write_indexer_cache(k, cache, slots, backend=backend)
        return written, jax_call("indexer_topk", "bytes", backend, keys=written)

    found = jax.vmap(step)(k, slots)
    for index in range(2):
        for got, want in zip(found, step(k[index], slots[index], "reference"), strict=True):
            assert identical(got[index], want)


def test_a_scan_over_layers() -> None:
    """A scan over layers works, in which each layer writes to its own cache and selects from it."""
    caches = jnp.stack([as_jax(pages_of_bytes()), as_jax(pages_of_bytes().roll(1, 0))])
    k, slots = as_jax(whole(3, D)), jnp.asarray([1, 17, 20], jnp.int32)

    @jax.jit
    def model(caches: Any) -> Any:
        def layer(total: Any, cache: Any) -> Any:
            cache = rj.write_indexer_cache(k, cache, slots, backend="xla")
            chosen = jax_call("indexer_topk", "bytes", keys=cache)
            return total + chosen, (chosen, cache)

        return jax.lax.scan(layer, jnp.zeros((T, 5), jnp.int32), caches)

    total, (chosen, written) = model(caches)
    assert identical(total, chosen[0] + chosen[1])
    for cache, one, new in zip(caches, chosen, written, strict=True):
        assert identical(new, rj.write_indexer_cache(k, cache, slots, backend="reference"))
        assert identical(one, jax_call("indexer_topk", "bytes", "reference", keys=new))


def test_a_donated_cache_is_written_in_place() -> None:
    """A compiled write to a donated cache allocates no second cache."""
    cache = jnp.zeros((512, 8, 1, D + 4), jnp.uint8)
    k, slots = as_jax(whole(4, D)), jnp.asarray([5, -1, 4095, 4096], jnp.int32)
    write = functools.partial(rj.write_indexer_cache, backend="xla")
    compiled = jax.jit(write, donate_argnums=1).lower(k, cache, slots).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache.nbytes
    assert memory.temp_size_in_bytes < 0.6 * cache.nbytes
    want = rj.write_indexer_cache(k, cache, slots, backend="reference")
    written = compiled(k, cache, slots)
    assert cache.is_deleted()
    assert identical(written, want)


@INDEXERS
@pytest.mark.parametrize("count", [0, 2, 3])
def test_how_many_sequences_live_may_be_traced(operation: str, count: int) -> None:
    want = call(operation, inputs("bytes", operation), "reference", num_seqs=count).numpy()
    traced = jax.jit(lambda count: jax_call(operation, "bytes", num_seqs=count))
    assert identical(traced(jnp.asarray([count], jnp.int32)), want)
    assert identical(jax_call(operation, "bytes", num_seqs=count), want)


@pytest.mark.parametrize("backend", ["reference", "xla", "numba"])
@pytest.mark.parametrize("count", [0, 2, 3])
def test_keys_are_written_by_traced_tables(count: int, backend: str) -> None:
    k, cache = as_jax(whole(T, D)), as_jax(pages_of_bytes())
    tables: dict[str, Any] = {name: jnp.asarray(value, jnp.int32) for name, value in TABLES.items()}
    slots = jnp.where(jnp.arange(T) < TABLES["cu_q_lens"][count], jnp.asarray(SLOTS, jnp.int32), -1)
    want = rj.write_indexer_cache(k, cache, slots, backend="reference")
    write = functools.partial(rj.write_indexer_cache, k, cache, backend=backend)
    assert identical(write(**tables, num_seqs=count), want)
    traced = jax.jit(lambda tables, count: write(**tables, num_seqs=count))
    assert identical(traced(tables, jnp.asarray([count], jnp.int32)), want)


def test_what_is_not_seen_is_minus_infinity_for_both() -> None:
    """Logits are -inf for a token without a sequence, and for keys in a page of index -1."""
    logits = np.asarray(jax_call("indexer_logits", "plain"))
    assert np.isneginf(logits[6]).all()
    assert np.isneginf(logits[3:6, :4]).all()
    assert np.isfinite(logits[5, 4:9]).all()


def test_the_indexer_lowers_to_triton_for_cuda_where_every_number_is_a_constant() -> None:
    """The indexer lowers to Triton for CUDA with all numbers as constants, as jax-triton passes them.

    There are kernels for tiles of logits, for the logits of few rows, and for the selection.
    """
    on_gpu, on_cpu = triton_kernels("indexer")
    assert on_gpu >= 6
    assert on_cpu == 0
