"""Latent attention, its schedule and its caches through the jax front end, under jax's own machinery."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ragged_attention as ra
from ragged_attention.calls import CACHE_FORMATS, QUANTIZED
from ragged_attention.errors import InvalidInput
from ragged_attention.testing.compare import agrees, identical
from tests.processes import triton_kernels

pytest.importorskip("jax")

import jax
import jax.export
import jax.numpy as jnp

import ragged_attention.jax as front
from ragged_attention.jax import _lower

sparse_mla_prefill: Any = front.sparse_mla_prefill
mla_decode: Any = front.mla_decode
make_decode_schedule: Any = front.make_decode_schedule
quantize_mla_cache: Any = front.quantize_mla_cache
dequantize_mla_cache: Any = front.dequantize_mla_cache
write_mla_cache: Any = front.write_mla_cache
ragged_mla_attention: Any = front.ragged_mla_attention
page_indices_to_slots: Any = front.page_indices_to_slots

NUM_SEQS, NUM_Q_TOKENS, NUM_Q_HEADS, TOPK = 3, 2, 4, 11
NUM_PAGES, PAGE_SIZE, PAGES_PER_SEQ = 8, 6, 4
FORMATS = ("plain", *CACHE_FORMATS)
WIDTHS = {"plain": (48, 32), "fp8_v32": (576, 512)} | dict.fromkeys(("fp8_v4", "fp8_v41", "fp4_v41"), (512, 512))
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
PREFILL = ("prefill out", "prefill max_logits", "prefill lse")
DECODE = ("decode out", "decode lse")


def randoms(shape: tuple[int, ...], dtype: Any = "bfloat16", scale: float = 1.0) -> jax.Array:
    rng = np.random.default_rng(sum(shape))
    return jnp.asarray(scale * rng.standard_normal(shape, np.float32).clip(-1, 1)).astype(dtype)


def cache_of(cache_format: str, num_pages: int = NUM_PAGES, page_size: int = PAGE_SIZE, heads: int = 1) -> jax.Array:
    rows = randoms((num_pages, page_size, heads, WIDTHS[cache_format][0]), scale=0.1)
    return rows if cache_format == "plain" else quantize_mla_cache(rows, cache_format, backend="reference")


def lists(*shape: int) -> jax.Array:
    """Slots in any order, some of them negative, too large, or at the limits of int32."""
    indices = np.random.default_rng(3).integers(-4, NUM_PAGES * PAGE_SIZE + 4, shape, np.int32)
    indices.reshape(-1)[:3] = INT_MIN, INT_MAX, -1
    return jnp.asarray(indices)


def queries(cache_format: str = "plain", heads: int = NUM_Q_HEADS) -> jax.Array:
    return randoms((NUM_SEQS, NUM_Q_TOKENS, heads, WIDTHS[cache_format][0]))


TABLE = jnp.asarray([[3, 1, 0, 99], [7, -1, 2, 4], [INT_MAX, INT_MIN, 5, 6]], jnp.int32)
LENS = jnp.asarray([17, 24, 0], jnp.int32)


def sparse_arguments(cache_format: str) -> dict[str, Any]:
    return {
        "q": queries(cache_format),
        "kv_cache": cache_of(cache_format),
        "indices": lists(NUM_SEQS, NUM_Q_TOKENS, TOPK),
        "topk_lens": jnp.asarray([[5, 99], [0, -3], [0, TOPK]], jnp.int32),
        "extra_kv_cache": cache_of(cache_format, 3, 5),
        "extra_indices": jnp.asarray([[[0, 14, 15], [1, 1, 2]]] * NUM_SEQS, jnp.int32),
        "extra_topk_lens": jnp.asarray([3, 0, 2], jnp.int32),
        "sinks": jnp.asarray([np.inf, -np.inf, 0.0, 1.5], jnp.float32),
        "d_v": WIDTHS[cache_format][1],
    }


def dense_arguments(cache_format: str, heads: int = 1) -> dict[str, Any]:
    return {
        "q": queries(cache_format),
        "kv_cache": cache_of(cache_format, heads=heads),
        "page_indices": TABLE,
        "kv_lens": LENS,
        "causal": True,
        "sinks": jnp.asarray([np.inf, -np.inf, 0.0, 1.5], jnp.float32),
        "d_v": WIDTHS[cache_format][1],
    }


def ragged_arguments(cache_format: str) -> dict[str, Any]:
    """Arguments for a sequence with one query, one with four, and a third past `num_seqs`."""
    arguments = dense_arguments(cache_format)
    tables = {"cu_q_lens": jnp.asarray([0, 1, 5, INT_MIN], jnp.int32), "num_seqs": jnp.asarray([2], jnp.int32)}
    q = arguments["q"].reshape(-1, *arguments["q"].shape[2:])
    return arguments | tables | {"q": q, "sliding_window": 9, "soft_cap": 3.0, "return_lse": True}


def prefill_arguments(cache_format: str, heads: int = 1) -> dict[str, Any]:
    return {
        "q": queries(cache_format).reshape(-1, NUM_Q_HEADS, WIDTHS[cache_format][0]),
        "kv": cache_of(cache_format, heads=heads),
        "indices": lists(NUM_SEQS * NUM_Q_TOKENS, heads, TOPK),
        "topk_lens": jnp.asarray([5, 99, 0, -3, 1, TOPK], jnp.int32),
        "d_v": WIDTHS[cache_format][1],
    }


def all_agree(got: Any, want: Any, kinds: tuple[str, ...]) -> bool:
    return all(agrees(part, right, kind, kind) for part, right, kind in zip(got, want, kinds, strict=True))


def widened(pair: list[jax.Array]) -> tuple[Any, Any]:
    got, want = pair
    return np.asarray(got, np.float32), np.asarray(want, np.float32)


CALLS_OF = {"sparse": (mla_decode, sparse_arguments, DECODE), "dense": (mla_decode, dense_arguments, DECODE)}
CALLS_OF["ragged"] = (ragged_mla_attention, ragged_arguments, DECODE)
CALLS_OF["prefill"] = (sparse_mla_prefill, prefill_arguments, PREFILL)


@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.parametrize("kind", CALLS_OF)
def test_the_fallback_agrees_with_the_definition(kind, cache_format):
    attend, arguments_of, kinds = CALLS_OF[kind]
    arguments = arguments_of(cache_format)
    want = attend(**arguments, backend="reference")
    assert all_agree(attend(**arguments, backend="xla"), want, kinds)
    tile = {"block_q": 4, "block_kv": 5}
    assert all_agree(attend(**arguments, backend="xla", options=tile), want, kinds)


@pytest.mark.parametrize("kind", ["dense", "prefill"])
def test_several_kv_heads(kind):
    attend, arguments_of, kinds = CALLS_OF[kind]
    arguments = arguments_of("plain", heads=2)
    want = attend(**arguments, backend="reference")
    assert all_agree(attend(**arguments, backend="xla"), want, kinds)


def test_packed_rows():
    arguments = prefill_arguments("plain")
    arguments["kv"] = arguments["kv"].reshape(-1, 1, WIDTHS["plain"][0])[:40]
    want = sparse_mla_prefill(**arguments, backend="reference")
    assert all_agree(sparse_mla_prefill(**arguments, backend="xla"), want, PREFILL)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
def test_the_dtype_of_the_bytes_is_of_no_matter(cache_format, dtype):
    arguments = sparse_arguments(cache_format)
    want = mla_decode(**arguments, backend="xla")
    for name in ("kv_cache", "extra_kv_cache"):
        arguments[name] = jax.lax.bitcast_convert_type(arguments[name], dtype)
    for got, same in zip(mla_decode(**arguments, backend="xla"), want, strict=True):
        assert identical(got, same)


@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.parametrize("kind", CALLS_OF)
def test_what_is_not_selected_may_be_nan(kind, cache_format):
    attend, arguments_of, _ = CALLS_OF[kind]
    arguments = arguments_of(cache_format)
    want = attend(**arguments, backend="xla")
    name = "kv" if kind == "prefill" else "kv_cache"
    cache = np.array(arguments[name])
    if kind in ("dense", "ragged"):
        seen = [(int(TABLE[seq, key // PAGE_SIZE]), key % PAGE_SIZE) for seq in range(2) for key in range(LENS[seq])]
    else:
        chosen = np.asarray(arguments["indices"]).reshape(-1, TOPK)
        lens = np.broadcast_to(np.asarray(arguments["topk_lens"]).reshape(-1), len(chosen))
        slots = np.concatenate([row[: max(int(n), 0)] for row, n in zip(chosen, lens, strict=True)])
        seen = [divmod(int(slot), PAGE_SIZE) for slot in slots if 0 <= slot < NUM_PAGES * PAGE_SIZE]
    for page in range(NUM_PAGES):
        for offset in range(PAGE_SIZE):
            if (page, offset) in seen:
                continue
            if cache_format == "plain":
                cache[page, offset] = np.nan
            elif cache_format != "fp8_v4":
                cache[page, offset] = 0xFF
            else:
                flat = cache[page].reshape(-1)
                flat[576 * offset : 576 * (offset + 1)] = 0xFF
                flat[576 * PAGE_SIZE + 8 * offset :][:8] = 0xFF
    for got, same in zip(attend(**arguments | {name: jnp.asarray(cache)}, backend="xla"), want, strict=True):
        assert not np.isnan(np.asarray(got, np.float32)).any()
        assert identical(got, same)


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_jit_with_traced_lengths_compiles_once(backend):
    traces = []
    arguments = dense_arguments("plain")

    @jax.jit
    def attend(lens: Any) -> Any:
        traces.append(1)
        return mla_decode(**arguments | {"kv_lens": lens}, backend=backend)

    for lens in (LENS, LENS[::-1], jnp.asarray([INT_MAX, INT_MIN, 1], jnp.int32)):
        want = mla_decode(**arguments | {"kv_lens": lens}, backend="reference")
        assert all_agree(attend(lens), want, DECODE)
    assert len(traces) == 1


def test_vmap_over_queries_and_lengths():
    arguments = sparse_arguments("plain")
    q = jnp.stack([arguments["q"], -arguments["q"]])
    lens = jnp.asarray([[3, 0, 11], [1, 5, 9]], jnp.int32)

    def attend(q: Any, lens: Any, backend: str = "xla") -> Any:
        return mla_decode(**arguments | {"q": q, "topk_lens": lens}, backend=backend)

    out, lse = jax.vmap(attend)(q, lens)
    for index in range(2):
        assert all_agree((out[index], lse[index]), attend(q[index], lens[index], "reference"), DECODE)


def test_vmap_over_what_is_written():
    kv = randoms((2, 3, WIDTHS["fp8_v4"][0]))
    slots = jnp.asarray([[0, 5, -1], [47, 48, 7]], jnp.int32)
    cache = cache_of("fp8_v4")
    written = jax.vmap(lambda kv, slots: write_mla_cache(kv, cache, slots, backend="xla"))(kv, slots)
    for index in range(2):
        assert identical(written[index], write_mla_cache(kv[index], cache, slots[index], backend="reference"))


def test_a_scan_over_layers_shares_one_schedule():
    caches = jnp.stack([cache_of("fp8_v4"), cache_of("fp8_v4", heads=1) ^ 1])
    kv = randoms((NUM_SEQS, WIDTHS["fp8_v4"][0]))
    q, table = queries("fp8_v4"), jnp.abs(TABLE) % NUM_PAGES
    slots = page_indices_to_slots(LENS[:, None] - 1, table, PAGE_SIZE, backend="xla")[:, 0]

    @jax.jit
    def model(q: Any, caches: Any, lens: Any) -> Any:
        schedule = make_decode_schedule(lens, *q.shape[:3], num_parts=4)

        def layer(q: Any, cache: Any) -> Any:
            cache = write_mla_cache(kv, cache, slots, backend="xla")
            return mla_decode(q, cache, table, lens, schedule=schedule, backend="xla")[0], cache

        return jax.lax.scan(layer, q, caches)

    got, written = model(q, caches, LENS)
    for cache, new in zip(caches, written, strict=True):
        assert identical(new, write_mla_cache(kv, cache, slots, backend="reference"))
        q = mla_decode(q, new, table, LENS, backend="reference")[0]
    assert agrees(got, q, "decode out")


@pytest.mark.parametrize("platforms", [["cpu"], ["tpu"], ["cpu", "tpu"]])
def test_export(platforms):
    arguments = sparse_arguments("fp8_v32")
    names = [name for name, value in arguments.items() if isinstance(value, jax.Array)]

    def attend(*arrays: Any) -> Any:
        return mla_decode(**arguments | dict(zip(names, arrays, strict=True)), backend="xla")

    arrays = [arguments[name] for name in names]
    exported = jax.export.export(jax.jit(attend), platforms=platforms)(*arrays)
    assert exported.platforms == tuple(platforms)
    if "cpu" in platforms:
        assert all_agree(exported.call(*arrays), mla_decode(**arguments, backend="reference"), DECODE)


def test_export_of_the_caches_operations():
    kv, slots = randoms((4, WIDTHS["fp8_v4"][0])), jnp.asarray([0, 9, -1, 47], jnp.int32)
    cache = jax.lax.bitcast_convert_type(cache_of("fp8_v4"), jnp.float8_e4m3fn)

    def step(kv: Any, cache: Any, slots: Any) -> Any:
        cache = write_mla_cache(kv, cache, slots, backend="xla")
        return dequantize_mla_cache(cache, dtype="float32", backend="xla")

    exported = jax.export.export(jax.jit(step), platforms=["cpu", "tpu"])(kv, cache, slots)
    assert identical(exported.call(kv, cache, slots), step(kv, cache, slots))


def test_one_function_lowers_to_triton_for_cuda_and_to_xla_for_a_cpu():
    on_gpu, on_cpu = triton_kernels("latents")
    assert on_gpu >= 5  # at least one kernel for each call
    assert on_cpu == 0


BYTES = [(name, dtype) for name in CACHE_FORMATS for dtype in ("uint8", "int8", "float8_e4m3fn")]
WRITTEN = [*(("plain", dtype) for dtype in ("float32", "bfloat16", *QUANTIZED)), *BYTES]


@pytest.mark.parametrize(("cache_format", "dtype"), WRITTEN)
def test_a_donated_cache_is_written_in_place(cache_format, dtype):
    """The compiled write keeps no second cache."""
    plain = cache_format == "plain"
    width = WIDTHS[cache_format][0]
    cache = jnp.zeros((512, 8, 1, width if plain else CACHE_FORMATS[cache_format].token_bytes), dtype)
    kv, slots = (
        randoms((4, width), dtype if plain and dtype not in QUANTIZED else "bfloat16") + 3,
        jnp.asarray([5, -1, 4095, 4096], jnp.int32),
    )

    scale = 1.0 if plain and dtype == "int8" else None

    def write(cache: Any, kv: Any, slots: Any) -> Any:
        return write_mla_cache(kv, cache, slots, kv_scale=scale, backend="xla")

    compiled = jax.jit(write, donate_argnums=0).lower(cache, kv, slots).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache.nbytes
    assert memory.temp_size_in_bytes < 0.6 * cache.nbytes
    want = write_mla_cache(kv, cache, slots, kv_scale=scale, backend="reference")
    written = compiled(cache, kv, slots)
    assert cache.is_deleted()
    assert np.asarray(written).tobytes() == np.asarray(want).tobytes()


EIGHT_BITS = [("ragged", dtype) for dtype in QUANTIZED]


@pytest.mark.parametrize(("kind", "cache_format"), [*itertools.product(CALLS_OF, FORMATS), *EIGHT_BITS])
def test_attention_keeps_no_second_cache(kind, cache_format):
    """Apart from its arguments, a call holds one block of keys in memory, not a copy of the cache."""
    attend, arguments_of, _ = CALLS_OF[kind]
    arguments = arguments_of("plain" if cache_format in QUANTIZED else cache_format)
    name = "kv" if kind == "prefill" else "kv_cache"
    dtype = cache_format if cache_format in QUANTIZED else arguments[name].dtype
    cache = jnp.zeros((4096, *arguments[name].shape[1:]), dtype)

    scales = {"kv_scale": 1.0} if cache_format == "int8" else {}

    def call(cache: Any) -> Any:
        return attend(**arguments | {name: cache}, **scales, backend="xla")

    memory: Any = jax.jit(call).lower(cache).compile().memory_analysis()
    assert memory.temp_size_in_bytes < cache.nbytes / 4


ODD = (np.nan, -np.nan, np.inf, -np.inf, -0.0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("cache_format", "powers"),
    [("fp8_v32", True), ("fp8_v32", False), ("fp8_v4", True), ("fp8_v41", True), ("fp4_v41", False)],
)
def test_quantised_bytes_are_those_of_the_definition(cache_format, powers, dtype):
    """XLA must not replace division by a constant with multiplication by its reciprocal. NaN must keep its sign."""
    rows = np.array(randoms((5, 3, 1, WIDTHS[cache_format][0]), "float32"))
    rows *= np.logspace(-7, 4, 15, dtype=np.float32).reshape(5, 3, 1, 1)
    for index, value in enumerate(ODD):
        rows.reshape(15, -1)[index, :3] = value
        rows.reshape(15, -1)[5, -1 - index] = value
    rows[4, 0] = 0.0
    rows = jnp.asarray(rows).astype(dtype)

    def quantize(rows: Any, backend: str) -> Any:
        return quantize_mla_cache(rows, cache_format, powers, backend=backend)

    want = np.asarray(quantize(rows, "reference"))
    for function in (quantize, jax.jit(quantize, static_argnums=1)):
        assert np.asarray(function(rows, "xla")).tobytes() == want.tobytes()
    for kind in ("float32", "bfloat16"):
        values = [dequantize_mla_cache(want, dtype=kind, backend=backend) for backend in ("xla", "reference")]
        assert identical(*widened(values))
    cache = jnp.zeros((4, 4, 1, want.shape[3]), jnp.uint8)
    slots = jnp.asarray([3, 3, -1, 15, 16, INT_MAX, INT_MIN, *range(4, 12)], jnp.int32)
    rows = rows.reshape(15, 1, -1)
    written = [
        write_mla_cache(rows, cache, slots, power_of_two_scales=powers, backend=backend)
        for backend in ("xla", "reference")
    ]
    assert identical(*written)  # if two tokens share a slot, the later token overwrites the whole slot


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
def test_every_code_is_dequantised(cache_format):
    layout = CACHE_FORMATS[cache_format]
    cache = np.array(cache_of(cache_format))
    flat = cache.reshape(NUM_PAGES, -1)
    flat[0, :256] = np.arange(256)
    if cache_format == "fp8_v4":
        flat[1, (layout.token_bytes - 8) * PAGE_SIZE :] = np.linspace(20, 255, 8 * PAGE_SIZE).astype(np.uint8)
    elif cache_format == "fp8_v32":
        flat[1, 512:528].view("<f4")[:] = 0.3, 1e30, np.nan, np.inf
    else:
        first, count = layout.value_bytes, layout.scale_bytes
        flat[1, first : first + count] = np.linspace(20, 255, count).astype(np.uint8)
    for dtype in ("float32", "bfloat16", "float16"):  # some values overflow float16
        values = [dequantize_mla_cache(cache, dtype=dtype, backend=backend) for backend in ("xla", "reference")]
        assert identical(*widened(values))


def test_the_dtype_of_dequantised_rows():
    cache = cache_of("fp8_v32")
    for dtype in (jnp.float16, np.float16, np.dtype("float16"), "float16"):
        assert dequantize_mla_cache(cache, dtype=dtype, backend="xla").dtype == jnp.float16
    assert dequantize_mla_cache(cache, "fp8_v32", backend="xla").dtype == jnp.bfloat16
    with pytest.raises(InvalidInput, match="expected dtype to be 'float32' or 'float16' or 'bfloat16', got 'int32'"):
        dequantize_mla_cache(cache, dtype=jnp.int32)


SCHEDULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "dense": (jnp.asarray([300, 0, 5000, -7, 64, 65], jnp.int32), {"num_parts": 8}),
    "more parts than work": (jnp.asarray([1, 2, 0, 0, 9, 3], jnp.int32), {"num_parts": 40, "overhead": 0}),
    "one part": (jnp.asarray([1, 200, 0, 0, 9, 3], jnp.int32), {}),
    "longest lengths": (jnp.asarray([INT_MAX, INT_MAX, INT_MIN, 5, 6, 7], jnp.int32), {"num_parts": 3}),
    "top-k": (None, {"topk": 2048, "num_parts": 7}),
    "lists": (
        None,
        {
            "topk": 640, "num_parts": 5,
            "topk_lens": jnp.asarray([[0, 9], [5, 999], [-5, 0], [1, 2], [64, 65], [128, 0]]),
            "extra_topk": 70, "extra_topk_lens": jnp.asarray([0, 70, 99, -1, 64, 3]), "overhead": 3,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SCHEDULES)
def test_the_schedule_is_that_of_the_definition(case):
    lens, options = SCHEDULES[case]
    made = [make_decode_schedule(lens, 6, 2, 16, **options, backend=backend) for backend in ("xla", "reference")]
    assert identical(made[0].parts, made[1].parts)
    assert identical(made[0].num_splits, made[1].num_splits)
    assert made[0].made_for == (6, 2, 16, 1, *(options.get(name, 0) for name in ("topk", "extra_topk")))


def test_lengths_of_a_schedule():
    lens, options = SCHEDULES["lists"]
    schedule = make_decode_schedule(lens, 6, 2, 16, **options)
    assert schedule.lens.tolist() == [9, 640, 0, 2, 65, 128]
    assert schedule.extra_lens.tolist() == [0, 70, 70, 0, 64, 3]
    assert make_decode_schedule(None, 2, 1, 16, topk=640).lens.tolist() == [640, 640]


def test_the_schedule_of_no_sequences():
    for backend in ("xla", "reference"):
        schedule = make_decode_schedule(jnp.zeros(0, jnp.int32), 0, 1, 16, num_parts=2, backend=backend)
        assert schedule.parts.tolist() == [[0, 0, -1, 0, 0, 0, 0, 0]] * 2
        assert schedule.num_splits.tolist() == [0]


@pytest.mark.parametrize(
    ("lens", "heads", "num_parts"), [(LENS, (1, 128, 1), 66), (LENS, (2, 12, 3), 44), (2048, (2, 128, 1), 33)]
)
def test_parts_fill_the_device(monkeypatch, lens, heads, num_parts):
    from ragged_attention.calls import Device

    device = Device(framework="jax", platform="cpu", num_multiprocessors=132)
    monkeypatch.setattr(_lower, "device_facts", lambda platform: device)
    topk = lens if isinstance(lens, int) else None
    assert make_decode_schedule(None if topk else lens, NUM_SEQS, *heads, topk=topk).parts.shape == (num_parts, 8)


def test_a_schedule_is_a_pytree():
    schedule = make_decode_schedule(LENS, NUM_SEQS, NUM_Q_TOKENS, NUM_Q_HEADS, num_parts=3)
    leaves, structure = jax.tree.flatten(schedule)
    assert [leaf.shape for leaf in leaves] == [(3, 8), (NUM_SEQS + 1,), (NUM_SEQS,)]
    assert jax.tree.unflatten(structure, leaves).made_for == schedule.made_for
    back = jax.jit(lambda schedule: schedule)(schedule)
    assert back.made_for == schedule.made_for
    assert back.extra_lens is None
    arguments = dense_arguments("plain")
    attend = jax.jit(lambda schedule: mla_decode(**arguments, schedule=schedule, backend="xla"))
    for got, want in zip(attend(schedule), mla_decode(**arguments, backend="xla"), strict=True):
        assert identical(got, want)


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_a_schedule_with_all_its_lengths(backend):
    arguments = sparse_arguments("plain")
    lens = {
        "topk": TOPK,
        "topk_lens": arguments["topk_lens"],
        "extra_topk": 3,
        "extra_topk_lens": arguments["extra_topk_lens"],
    }
    schedule = make_decode_schedule(None, NUM_SEQS, NUM_Q_TOKENS, NUM_Q_HEADS, **lens, num_parts=3, backend=backend)
    assert len(jax.tree.leaves(schedule)) == 4
    with ra.use_backend(validate="full"):
        got = mla_decode(**arguments, schedule=schedule, backend=backend)
    assert all_agree(got, mla_decode(**arguments, backend="reference"), DECODE)


def test_invalid_schedules():
    arguments = dense_arguments("plain")
    with pytest.raises(TypeError, match="expected schedule to be a DecodeSchedule, got tuple"):
        mla_decode(**arguments, schedule=(1, 2))
    schedule = make_decode_schedule(LENS, NUM_SEQS, 1, NUM_Q_HEADS)
    with pytest.raises(InvalidInput, match=r"expected a schedule .* num_q_tokens=2, got one made for num_q_tokens=1"):
        mla_decode(**arguments, schedule=schedule)
    stale = make_decode_schedule(LENS + 1, NUM_SEQS, NUM_Q_TOKENS, NUM_Q_HEADS)
    mla_decode(**arguments, schedule=stale)
    arguments |= {"page_indices": jnp.abs(TABLE) % NUM_PAGES}
    text = r"expected a schedule made for these kv_lens, got one made for 18 where kv_lens\[0\] = 17"
    with ra.use_backend(validate="full"), pytest.raises(InvalidInput, match=text):
        mla_decode(**arguments, schedule=stale)


ONES = jnp.ones(2, jnp.int32)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((LENS, 2.0, 1, 1), {}, TypeError, "expected batch_size to be an int, got float"),
        ((LENS, 3, 0, 1), {}, InvalidInput, "expected num_q_tokens >= 1, got 0"),
        ((LENS, 3, 1, 3, 2), {}, InvalidInput, "expected num_q_heads to be a multiple of num_kv_heads=2, got 3"),
        ((LENS, 3, 1, 1), {"extra_topk": 3}, InvalidInput, "expected extra_topk only together with topk, got it with"),
        ((LENS, 2, 1, 1), {}, InvalidInput, r"expected kv_lens.shape to be \[S\] = \[2\], got \[3\]"),
        (("8", 2, 1, 1), {}, TypeError, "expected kv_lens to be an array, got str"),
        ((None, 2, 1, 2, 2), {"topk": 8}, InvalidInput, "expected num_kv_heads = 1 with topk, got 2"),
        (
            (None, 2, 1, 1),
            {"topk": 8, "extra_topk_lens": ONES},
            InvalidInput,
            "expected extra_topk_lens only together with extra_top",
        ),
        ((None, 2, 1, 1), {"topk": 0}, InvalidInput, "expected topk >= 1, got 0"),
        ((None, 2, 1, 1), {"topk": 8, "extra_topk": 0}, InvalidInput, "expected extra_topk >= 1, got 0"),
        (
            (None, 3, 1, 1),
            {"topk": 8, "topk_lens": ONES},
            InvalidInput,
            r"expected topk_lens.shape to be \[S\] = \[3\], got \[2\]",
        ),
        ((None, 2, 1, 1), {"topk": 8, "num_parts": 0}, InvalidInput, "expected num_parts >= 1, got 0"),
    ],
)
def test_invalid_requests_for_a_schedule(arguments, options, error, text):
    with pytest.raises(error, match=text):
        make_decode_schedule(*arguments, **options)


def test_numpy_numbers_make_a_schedule():
    schedule = make_decode_schedule(
        None, np.int32(2), np.int64(1), np.int64(16), topk=np.int64(640), extra_topk=np.int32(5)
    )
    assert schedule.made_for == (2, 1, 16, 1, 640, 5)
    assert all(type(size) is int for size in schedule.made_for)
    assert make_decode_schedule(np.asarray(LENS), 3, 1, 16).made_for == (3, 1, 16, 1, 0, 0)


def test_positions_become_slots():
    positions = jnp.asarray([-1, 0, 7, 23, 24, INT_MAX, INT_MIN] * 3, jnp.int32).reshape(3, 1, 7)
    for page_size in (1, 3, PAGE_SIZE, 2**20):
        slots = [page_indices_to_slots(positions, TABLE, page_size, backend=name) for name in ("xla", "reference")]
        assert identical(*slots)
    assert (page_indices_to_slots(positions, TABLE[:, :0], PAGE_SIZE, backend="xla") == -1).all()


def explained(operation: str, *arguments: Any, **keywords: Any) -> None:
    rows = ra.explain(operation, *arguments, **keywords, backend="xla").splitlines()
    assert rows[0].startswith(f"{operation} from jax on ")
    assert "* xla        chosen" in rows


def test_explain():
    cache = cache_of("fp8_v4")
    explained("sparse_mla_prefill", **prefill_arguments("fp8_v32"))
    explained("mla_decode", **sparse_arguments("plain"))
    explained("ragged_mla_attention", **ragged_arguments("plain"))
    explained("make_decode_schedule", LENS, 3, 1, 16, num_parts=4)
    explained("quantize_mla_cache", randoms((1, 1, 1, 512)), "fp8_v4")
    explained("dequantize_mla_cache", cache, dtype=jnp.float32)
    explained("write_mla_cache", randoms((2, 512)), cache, ONES)
    explained("page_indices_to_slots", ONES[:, None], ONES[:, None], 4)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("sparse", "q"),
        ("sparse", "caches"),
        ("dense", "kv_cache"),
        ("dense", "page_indices"),
        ("prefill", "kv"),
        ("ragged", "kv_cache"),
        ("ragged", "page_indices"),
    ],
)
def test_empty_arrays(kind, name):
    attend, arguments_of, kinds = CALLS_OF[kind]
    arguments = arguments_of("plain")
    if name == "q":
        arguments |= {key: arguments[key][:0] for key in arguments if key not in ("sinks", "d_v")}
    elif name == "caches":
        arguments |= {key: arguments[key][:0] for key in ("kv_cache", "extra_kv_cache")}
    else:
        arguments[name] = arguments[name][:, :0] if name == "page_indices" else arguments[name][:0]
    assert all_agree(attend(**arguments, backend="xla"), attend(**arguments, backend="reference"), kinds)


def test_one_of_two_caches_is_empty():
    for name in ("kv_cache", "extra_kv_cache"):
        arguments = sparse_arguments("plain")
        arguments[name] = arguments[name][:0]
        got = mla_decode(**arguments, backend="xla")
        assert all_agree(got, mla_decode(**arguments, backend="reference"), DECODE)


def test_writing_nothing_and_nowhere():
    cache, kv = cache_of("fp8_v32"), randoms((2, 576))
    assert identical(write_mla_cache(kv[:0], cache, ONES[:0], backend="xla"), cache)
    assert write_mla_cache(kv, cache[:0], ONES, backend="xla").shape == (0, PAGE_SIZE, 1, 656)
    for cache_format in CACHE_FORMATS:
        rows = jnp.zeros((0, 2, 1, WIDTHS[cache_format][0]))
        stored = quantize_mla_cache(rows, cache_format, backend="xla")
        assert stored.shape == (0, 2, 1, CACHE_FORMATS[cache_format].token_bytes)
        assert dequantize_mla_cache(stored, backend="xla").shape == rows.shape


@pytest.mark.parametrize(("name", "value"), [("jax_enable_x64", True), ("jax_numpy_dtype_promotion", "strict")])
def test_under_other_rules_of_types(setting: Callable[[str, Any], None], name, value):
    setting(name, value)
    for cache_format in FORMATS:
        for attend, arguments_of, kinds in CALLS_OF.values():
            arguments = arguments_of(cache_format)
            got = attend(**arguments, backend="xla")
            assert [part.dtype for part in got] == [jnp.bfloat16, *[jnp.float32] * (len(got) - 1)]
            assert all_agree(got, attend(**arguments, backend="reference"), kinds)
    for cache_format in CACHE_FORMATS:
        cache, kv = cache_of(cache_format), randoms((3, WIDTHS[cache_format][0]), "float32")
        far = 2**40 if value is True else INT_MAX
        slots = jnp.asarray([far, 5, -far], jnp.int64 if value is True else jnp.int32)
        written = [write_mla_cache(kv, cache, slots, backend=backend) for backend in ("xla", "reference")]
        assert identical(*written)
        rows = [dequantize_mla_cache(cache, backend=backend) for backend in ("xla", "reference")]
        assert identical(*widened(rows))
    made = [make_decode_schedule(LENS, 3, 1, 16, num_parts=4, backend=backend) for backend in ("xla", "reference")]
    assert identical(made[0].parts, made[1].parts)
    assert (made[0].parts.dtype, made[0].num_splits.dtype) == (jnp.int32, jnp.int32)
    slots = page_indices_to_slots(LENS[:, None], TABLE, PAGE_SIZE, backend="xla")
    assert identical(slots, page_indices_to_slots(LENS[:, None], TABLE, PAGE_SIZE, backend="reference"))
