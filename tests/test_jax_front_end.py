"""The jax front end under jax's own machinery: transformations, export, donation, configuration, traced errors."""

from typing import Any

import numpy as np
import pytest

import ragged_attention as ra
from ragged_attention.calls import QUANTIZED
from ragged_attention.calls.cache_formats import KvFormat, element_of
from ragged_attention.errors import InvalidInput, Unsupported
from ragged_attention.reference.ragged_paged_attention import ragged_paged_attention as definition
from ragged_attention.testing.compare import agrees, identical
from ragged_attention.testing.formats import SCALED
from tests.processes import loaded, triton_kernels

pytest.importorskip("jax")

import jax
import jax.export
import jax.numpy as jnp

import ragged_attention.jax as front

ragged_paged_attention: Any = front.ragged_paged_attention
write_kv_pages: Any = front.write_kv_pages
merge_attention_states: Any = front.merge_attention_states

Q_LENS, KV_LENS = (1, 6, 0, 4), (9, 6, 5, 14)
PAGE_SIZE, NUM_PAGES, PAGES_PER_SEQ, NUM_KV_HEADS, GROUP, HEAD_DIM = 4, 12, 4, 2, 2, 16


@pytest.fixture
def batch() -> tuple[Any, ...]:
    """Arguments of an attention call: a decode, a prefill, an empty query, a chunk, and two rows of padding."""
    rng = np.random.default_rng(7)
    q = rng.standard_normal((sum(Q_LENS) + 2, NUM_KV_HEADS * GROUP, HEAD_DIM), np.float32)
    kv_pages = rng.standard_normal((NUM_PAGES, PAGE_SIZE, 2 * NUM_KV_HEADS, HEAD_DIM), np.float32)
    page_indices = rng.integers(0, NUM_PAGES, (len(Q_LENS), PAGES_PER_SEQ), np.int32)
    cu_q_lens = np.cumsum((0, *Q_LENS), dtype=np.int32)
    return tuple(map(jnp.asarray, (q, kv_pages, np.array(KV_LENS, np.int32), page_indices, cu_q_lens)))


@pytest.fixture
def tokens() -> tuple[Any, ...]:
    """Arguments of a write: k, v, pages and slots. Some of the slots make the write skip a token."""
    rng = np.random.default_rng(8)
    k, v = rng.standard_normal((2, 6, NUM_KV_HEADS, HEAD_DIM), np.float32)
    kv_pages = rng.standard_normal((NUM_PAGES, PAGE_SIZE, 2 * NUM_KV_HEADS, HEAD_DIM), np.float32)
    slots = np.array([5, -1, 47, 48, -(2**31), 0], np.int32)
    return tuple(map(jnp.asarray, (k, v, kv_pages, slots)))


def defined(batch: tuple[Any, ...], **options: Any) -> Any:
    return definition(*map(np.asarray, batch), **options)


@pytest.mark.parametrize("scale", [0.5, np.float32(0.5), np.linspace(0.25, 2, NUM_KV_HEADS * GROUP, dtype=np.float32)])
def test_e4m3_queries_are_widened_and_their_scale_may_be_traced(batch: tuple[Any, ...], scale: Any) -> None:
    q, kv_pages, *tables = batch
    q, kv_pages = q.astype(jnp.float8_e4m3fn), kv_pages.astype(jnp.bfloat16)
    factor = scale.reshape(-1, 1) if isinstance(scale, np.ndarray) else scale
    wide = (q.astype(jnp.float32) * factor).astype(jnp.bfloat16)
    want = ragged_paged_attention(wide, kv_pages, *tables, backend="xla")
    agrees(ragged_paged_attention(q, kv_pages, *tables, q_scale=scale, backend="xla"), want, "bfloat16")
    traced = jax.jit(lambda q, scale: ragged_paged_attention(q, kv_pages, *tables, q_scale=scale, backend="xla"))
    found = traced(q, jnp.asarray(scale))
    assert found.dtype == jnp.bfloat16
    agrees(found, want, "bfloat16")
    with pytest.raises(InvalidInput, match=r"float array of shape \[\] or \[num_q_heads=4\], got float32\[5\]"):
        ragged_paged_attention(q, kv_pages, *tables, q_scale=jnp.ones(5))


@pytest.mark.parametrize("return_lse", [False, True])
def test_the_written_pages_come_after_the_largest_logits(batch: tuple[Any, ...], return_lse: bool) -> None:
    new = jnp.ones((len(batch[0]), NUM_KV_HEADS, HEAD_DIM))
    options = {"return_lse": return_lse, "backend": "xla"}
    want = ragged_paged_attention(*batch, new_kv=(new, new), **options)
    *others, max_logits, pages = ragged_paged_attention(*batch, new_kv=(new, new), return_max_logits=True, **options)
    for got, wanted in zip((*others, pages), want, strict=True):
        agrees(got, wanted, "float32")
    alone = ragged_paged_attention(batch[0], pages, *batch[2:], return_max_logits=True, **options)
    agrees(max_logits, alone[-1], "float32")
    assert max_logits.shape == (NUM_KV_HEADS * GROUP,)


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_jit_with_traced_lengths_compiles_once(batch, backend):
    traces = []

    @jax.jit
    def attend(*arguments: Any) -> Any:
        traces.append(1)
        return ragged_paged_attention(*arguments, return_lse=True, backend=backend)

    for count in (4, 3, 1, 0):
        num_seqs = jnp.array([count], jnp.int32)
        out, lse = attend(*batch, num_seqs)
        want, want_lse = defined(batch, num_seqs=count, return_lse=True)
        assert agrees(out, want, "float32")
        assert agrees(lse, want_lse, "float32", "lse")
    assert len(traces) == 1


def test_a_plain_call_traces_once_for_equal_shapes(batch, monkeypatch):
    from ragged_attention.portable.numba import ragged_paged_attention as implementation

    count = []
    run = implementation.run
    monkeypatch.setattr(implementation, "run", lambda *arguments: count.append(1) or run(*arguments))
    for factor in (1.0, 2.0, 3.0):
        ragged_paged_attention(batch[0] * factor, *batch[1:], sm_scale=0.321)
    assert len(count) == 1


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_vmap_over_queries(batch, backend):
    q = jnp.stack([batch[0], 2 * batch[0], -batch[0]])
    attend = jax.vmap(lambda q: ragged_paged_attention(q, *batch[1:], backend=backend))
    for got, queries in zip(attend(q), q, strict=True):
        assert agrees(got, defined((queries, *batch[1:])), "float32")


def test_vmap_over_the_number_of_sequences(batch):
    counts = jnp.array([[0], [2], [4]], jnp.int32)
    attend = jax.vmap(lambda count: ragged_paged_attention(*batch, count, backend="xla"))
    for got, count in zip(attend(counts), (0, 2, 4), strict=True):
        assert agrees(got, defined(batch, num_seqs=count), "float32")


@pytest.mark.parametrize("axes", [(0, 0), (None, 0), (0, None)])
def test_vmap_over_ranges_of_keys(batch, axes):
    """`jax.vmap` works over `key_ranges`, also with padding rows, whose ranges are never read."""
    masks = jnp.asarray(np.random.default_rng(3).integers(-3, 30, (2, len(batch[0]), 3, 2)), jnp.int32)
    q = jnp.stack([batch[0], -batch[0]])
    given = [array if axis == 0 else array[0] for array, axis in zip((masks, q), axes, strict=True)]
    attend = jax.vmap(lambda masks, q: ragged_paged_attention(q, *batch[1:], key_ranges=masks, backend="xla"), axes)
    for index, got in enumerate(attend(*given)):
        own_masks, own_q = (array[index] if axis == 0 else array for array, axis in zip(given, axes, strict=True))
        assert agrees(got, defined((own_q, *batch[1:]), key_ranges=own_masks), "float32")


@pytest.mark.parametrize("heads", [1, 2])
def test_lists_of_blocks_may_be_traced_and_mapped(batch, heads):
    rng, tokens = np.random.default_rng(4), len(batch[0])
    for size, length in ((1, 40), (4, 3), (2, 0)):
        lists = jnp.asarray(rng.integers(-2, 60 // size, (2, tokens, heads, length)), jnp.int32)

        def attend(lists, size=size):
            return ragged_paged_attention(*batch, selected=lists, block_size=size, backend="xla")

        for own, mapped in zip(lists, jax.vmap(attend)(lists), strict=True):
            want = defined(batch, selected=own, block_size=size)
            assert agrees(mapped, want, "float32")
            assert agrees(jax.jit(attend)(own), want, "float32")


def test_a_scan_over_layers_writes_and_attends(batch, tokens):
    k, v, _, slots = tokens
    layers = jnp.stack([batch[1], batch[1] + 1])

    @jax.jit
    def model(q: Any, layers: Any) -> Any:
        def layer(q: Any, pages: Any) -> Any:
            pages = write_kv_pages(k, v, pages, slots, backend="xla")
            return ragged_paged_attention(q, pages, *batch[2:], backend="xla"), pages

        return jax.lax.scan(layer, q, layers)

    q, written = model(batch[0], layers)
    want, pages = batch[0], layers[0]
    for pages in layers:
        pages = write_kv_pages(k, v, pages, slots, backend="reference")
        want = ragged_paged_attention(want, pages, *batch[2:], backend="reference")
    assert agrees(q, want, "float32")
    assert identical(written[1], pages)


@pytest.mark.parametrize("platforms", [["cpu"], ["tpu"], ["cpu", "tpu"]])
@pytest.mark.parametrize("by_ranges", [False, True])
def test_export(batch, platforms, by_ranges):
    ranges = jnp.tile(jnp.array([[0, 2], [5, 9]], jnp.int32), (len(batch[0]), 1, 1)) if by_ranges else None
    attend = jax.jit(
        lambda ranges, *arguments: ragged_paged_attention(*arguments, key_ranges=ranges, backend="xla"),
    )
    exported = jax.export.export(attend, platforms=platforms)(ranges, *batch)
    if "cpu" not in platforms:
        assert exported.platforms == tuple(platforms)
        return
    assert agrees(exported.call(ranges, *batch), defined(batch, key_ranges=ranges), "float32")


def test_one_function_lowers_to_triton_for_cuda_and_to_xla_for_a_cpu():
    on_gpu, on_cpu = triton_kernels("paged")
    assert on_gpu > 0
    assert on_cpu == 0


def test_importing_the_front_end_loads_neither_torch_nor_triton():
    assert loaded("ragged_attention.jax", "torch", "triton", "jax_triton") == []


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", *QUANTIZED])
def test_a_donated_cache_is_written_in_place(tokens, dtype):
    """The compiled write keeps no second cache, whatever the dtype."""
    k, v, _, slots = tokens
    if dtype in ("float16", "bfloat16"):
        k, v = k.astype(dtype), v.astype(dtype)
    pages = jnp.zeros((4096, PAGE_SIZE, 2 * NUM_KV_HEADS, HEAD_DIM), dtype)

    def write(pages: Any, k: Any, v: Any, slots: Any) -> Any:
        return write_kv_pages(k, v, pages, slots, k_scale=0.5, v_scale=0.5, backend="xla")

    compiled = jax.jit(write, donate_argnums=0).lower(pages, k, v, slots).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pages.nbytes
    assert memory.temp_size_in_bytes < pages.nbytes / 2
    written = compiled(pages, k, v, slots)
    assert pages.is_deleted()
    changed = np.flatnonzero(np.asarray(written, np.float32).reshape(4096 * PAGE_SIZE, -1).any(axis=1))
    assert changed.tolist() == [0, 5, 47, 48]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", *QUANTIZED])
def test_attention_keeps_no_second_cache(dtype):
    """Apart from its arguments, a call holds one block of keys and values in memory, not a copy of the cache."""
    q = jnp.zeros(
        (4, 4, HEAD_DIM), "float32" if dtype == "float32" else "float16" if dtype == "float16" else "bfloat16"
    )
    pages = jnp.zeros((8192, 16, 4, HEAD_DIM), dtype)
    table = jnp.zeros((4, 2048), jnp.int32)
    lens, edges = jnp.full(4, 2048 * 16, jnp.int32), jnp.arange(5, dtype=jnp.int32)
    scales = dict.fromkeys(("k_scale", "v_scale"), 1.0 if dtype == "int8" else None)
    attend = jax.jit(lambda *arguments: ragged_paged_attention(*arguments, **scales, backend="xla"))
    memory: Any = attend.lower(q, pages, lens, table, edges).compile().memory_analysis()
    assert memory.temp_size_in_bytes < pages.nbytes / 4


def cache_of(form: KvFormat, pages: int, page_size: int, width: int) -> tuple[jax.Array, jax.Array]:
    """Zeroed combined pages of two KV heads, and the scale pages that serve for both K and V."""
    shape = (pages, page_size, 4, width // form.columns_per_element)
    scales = jnp.zeros((pages, page_size, 2, form.scales_of_row(width)), form.scales)
    return jnp.zeros(shape, element_of(form)), scales


@pytest.mark.parametrize("form", SCALED.values(), ids=SCALED.keys())
def test_a_cache_with_scale_pages_is_neither_copied_nor_decoded_as_a_whole(form):
    pages, scales = cache_of(form, 8192, 16, 64)

    def attend(q: Any, pages: Any, scales: Any, *tables: Any) -> Any:
        return ragged_paged_attention(q, pages, *tables, k_scale_pages=scales, v_scale_pages=scales, backend="xla")

    def write(pages: Any, k_scales: Any, v_scales: Any, k: Any, slots: Any) -> Any:
        scales = {"k_scale_pages": k_scales, "v_scale_pages": v_scales}
        return write_kv_pages(k, k, pages, slots, **scales, backend="xla")

    q, table = jnp.zeros((4, 4, 64), jnp.bfloat16), jnp.zeros((4, 2048), jnp.int32)
    lens, edges = jnp.full(4, 2048 * 16, jnp.int32), jnp.arange(5, dtype=jnp.int32)
    memory: Any = jax.jit(attend).lower(q, pages, scales, lens, table, edges).compile().memory_analysis()
    assert memory.temp_size_in_bytes < pages.nbytes / 4
    slots, donated = jnp.arange(4, dtype=jnp.int32), jax.jit(write, donate_argnums=(0, 1, 2))
    memory = donated.lower(pages, scales, scales, q[:, :2], slots).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pages.nbytes + 2 * scales.nbytes
    assert memory.temp_size_in_bytes < pages.nbytes / 4


def test_the_result_is_updated_in_place():
    """Each tile of a long prefill writes its own rows only. The whole bfloat16 result is never converted to float32."""
    q, pages = jnp.zeros((4096, 8, 64), jnp.bfloat16), jnp.zeros((16, 16, 4, 64), jnp.bfloat16)
    lens, table, edges = jnp.array([256]), jnp.arange(16, dtype=jnp.int32)[None], jnp.array([0, 4096])
    attend = jax.jit(lambda *arguments: ragged_paged_attention(*arguments, backend="xla"))
    text: Any = attend.lower(q, pages, lens, table, edges).compile().as_text()
    assert "f32[4096,8,64]" not in text


@pytest.mark.parametrize("scale", [0.3, "array"])
@pytest.mark.parametrize("dtype", ["float32", *QUANTIZED])
def test_written_bytes_are_those_of_the_definition(tokens, dtype, scale):
    """XLA must not replace division by a constant with multiplication by its reciprocal. NaN must keep its sign."""
    k, v, _, slots = tokens
    k = k.at[0, 0, :4].set(jnp.array([np.nan, np.inf, -np.inf, -0.0]))
    k = k.at[0, 1].multiply(jnp.logspace(-6, 3, HEAD_DIM))
    pages = jnp.zeros((NUM_PAGES, PAGE_SIZE, 2 * NUM_KV_HEADS, HEAD_DIM), dtype)
    scale = jnp.array([0.3, 7.1]) if scale == "array" else scale

    def write(k: Any, backend: str) -> Any:
        return write_kv_pages(k, v, pages, slots, k_scale=scale, v_scale=1.0, backend=backend)

    want = np.asarray(write(k, "reference")).tobytes()
    for function in (write, jax.jit(write, static_argnums=1)):
        assert np.asarray(function(k, "xla")).tobytes() == want


def test_full_validation_outside_jit(batch):
    lens = batch[2].at[1].set(99)
    with (
        ra.use_backend(validate="full"),
        pytest.raises(InvalidInput, match=r"expected kv_lens\[1\] between 0 and .*16, got 99"),
    ):
        ragged_paged_attention(*batch[:2], lens, *batch[3:])


def test_full_validation_inside_jit(batch):
    with ra.use_backend(validate="full"):
        attend = jax.jit(lambda *arguments: ragged_paged_attention(*arguments))
        jax.block_until_ready(attend(*batch))
        jax.effects_barrier()
        lens = batch[2].at[1].set(99)

        def finish() -> None:
            jax.block_until_ready(attend(*batch[:2], lens, *batch[3:]))
            jax.effects_barrier()

        with pytest.raises(Exception, match=r"expected kv_lens\[1\] between 0 and .*16, got 99"):
            finish()


def test_wishes_are_read_when_a_function_is_traced(batch):
    def attend(q: Any) -> Any:
        return ragged_paged_attention(q, *batch[1:])

    with ra.use_backend("triton"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("ragged_attention.dispatch.load", lambda operation, backend: pytest.fail(backend))
        with pytest.raises(pytest.fail.Exception, match="triton"):
            jax.jit(attend)(batch[0])
    with ra.use_backend("reference"):
        traced = jax.jit(attend).trace(batch[0])
    assert "while" not in str(traced.jaxpr)
    assert "while" in str(jax.jit(lambda q: attend(q)).trace(batch[0]).jaxpr)  # the xla backend loops over tiles


def test_a_named_backend_of_the_other_framework_is_refused(batch):
    with pytest.raises(Unsupported, match=r"eager: .*torch"):
        ragged_paged_attention(*batch, backend="eager")


def test_with_64_bit_types(batch, tokens, setting):
    setting("jax_enable_x64", True)
    out, lse = ragged_paged_attention(
        *batch, return_lse=True, soft_cap=5.0, sliding_window=3, k_scale=0.7, backend="xla"
    )
    assert (out.dtype, lse.dtype) == (jnp.float32, jnp.float32)
    want, want_lse = defined(batch, return_lse=True, soft_cap=5.0, sliding_window=3, k_scale=0.7)
    assert agrees(out, want, "float32")
    assert agrees(lse, want_lse, "float32", "lse")
    k, v, pages, slots = tokens
    for kind in (jnp.int32, jnp.int64):
        written = [write_kv_pages(k, v, pages, slots.astype(kind), backend=name) for name in ("xla", "reference")]
        assert identical(*written)
    far = jnp.array([2**40, -(2**40), 5, 2**62, 7, 6], jnp.int64)
    written = [write_kv_pages(k, v, pages, far, v_scale=0.1, backend=name) for name in ("xla", "reference")]
    assert identical(*written)


def test_with_strict_promotion(batch, tokens, setting):
    setting("jax_numpy_dtype_promotion", "strict")
    scales = {"k_scale": 0.7, "v_scale": jnp.array([0.5, 2.0])}
    options = {"soft_cap": 5.0, "sliding_window": 3, "sinks": jnp.zeros(4), **scales}
    for dtype in (jnp.float32, jnp.bfloat16):
        q, pages = batch[0].astype(dtype), batch[1].astype(dtype)
        out = ragged_paged_attention(q, pages, *batch[2:], jnp.array([3], jnp.int32), backend="xla", **options)
        want = defined((q, pages, *batch[2:]), num_seqs=3, **options)
        assert agrees(out, want, jnp.dtype(dtype).name)
    k, v, pages, slots = tokens
    for dtype in ("float32", "float8_e4m3fn", "int8"):
        write_kv_pages(k, v, pages.astype(dtype), slots, k_scale=0.7, v_scale=0.7, backend="xla")
    tables = {"page_indices": batch[3], "kv_lens": batch[2], "cu_q_lens": batch[4]}
    k = v = jnp.ones((13, NUM_KV_HEADS, HEAD_DIM))
    written = [write_kv_pages(k, v, pages, **tables, backend=name) for name in ("xla", "reference")]
    assert identical(*written)
    merge_attention_states(jnp.ones((2, 3, 4, 16), jnp.bfloat16), jnp.zeros((2, 3, 4)), backend="xla")


def test_numpy_arguments_and_numbers(batch):
    arguments = tuple(map(np.asarray, batch))
    out = ragged_paged_attention(*arguments, np.int32(3), sm_scale=np.float32(0.25), sliding_window=np.int64(5))
    want = defined(batch, num_seqs=3, sm_scale=0.25, sliding_window=5)
    assert agrees(out, want, "float32")


def test_merging_lists_equals_merging_arrays():
    rng = np.random.default_rng(1)
    outs, lses = rng.standard_normal((2, 3, 4, 16), np.float32), rng.standard_normal((2, 3, 4), np.float32)
    lses[:, 1, 2] = -np.inf
    outs[0, 0, 0], lses[0, 0, 0] = np.nan, -np.inf
    whole = merge_attention_states(jnp.asarray(outs), jnp.asarray(lses), backend="xla")
    listed = merge_attention_states([*jnp.asarray(outs)], [*jnp.asarray(lses)], backend="xla")
    want = merge_attention_states(outs, lses, backend="reference")
    for got, same, right in zip(whole, listed, want, strict=True):
        assert identical(got, same)
        assert agrees(got, right, "float32")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"block_q": 0}, InvalidInput, "expected block_q between 1 and 1024, got 0"),
        ({"block_kv": 10000}, InvalidInput, "expected block_kv between 1 and 8192, got 10000"),
        ({"block_q": 1.5}, TypeError, "expected block_q to be an int, got float"),
        ({"blocks": 1}, InvalidInput, "expected options among block_q, block_kv for this backend, got 'blocks'"),
    ],
)
def test_invalid_options(batch, options, error, text):
    with pytest.raises(error, match=text):
        ragged_paged_attention(*batch, backend="xla", options=options)


@pytest.mark.parametrize("options", [{"block_q": 1, "block_kv": 1}, {"block_q": 5, "block_kv": 7}, {"block_q": 1024}])
def test_any_tile_gives_the_same_result(batch, options):
    got = ragged_paged_attention(*batch, sliding_window=4, backend="xla", options=options)
    assert agrees(got, defined(batch, sliding_window=4), "float32")


@pytest.mark.parametrize("axis", ["tokens", "sequences", "pages", "columns"])
def test_empty_arrays(batch, axis):
    q, pages, lens, table, edges = batch
    changed = {
        "tokens": (q[:0], pages, lens, table, edges),
        "sequences": (q, pages, lens[:0], table[:0], edges[:1]),
        "pages": (q, pages[:0], lens, table, edges),
        "columns": (q, pages, lens, table[:, :0], edges),
    }[axis]
    out, lse = ragged_paged_attention(*changed, return_lse=True, backend="xla")
    want, want_lse = defined(changed, return_lse=True)
    assert agrees(out, want, "float32")
    assert agrees(lse, want_lse, "float32", "lse")


@pytest.mark.parametrize("backend", ["xla", "triton", "reference"])
def test_there_is_no_gradient_and_that_is_said(backend: str) -> None:
    q, pages = jnp.ones((3, 2, 16)), jnp.ones((2, 4, 2, 16))
    tables = jnp.array([3], jnp.int32), jnp.array([[0, 1]], jnp.int32), jnp.array([0, 3], jnp.int32)
    calls = {
        "ragged_paged_attention": lambda q: front.ragged_paged_attention(q, pages, *tables, backend=backend),
        "write_kv_pages": lambda q: front.write_kv_pages(q[:, :1], q[:, :1], pages, tables_of(tables), backend=backend),
        "merge_attention_states": lambda q: front.merge_attention_states(q[None], q[None, ..., 0], backend=backend)[0],
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=f"{name} has no gradient: it works on a KV cache, for inference"):
            jax.grad(lambda q, call=call: call(q).sum())(q)


def tables_of(tables: Any) -> Any:
    kv_lens, page_indices, cu_q_lens = tables
    return page_indices, kv_lens, cu_q_lens
