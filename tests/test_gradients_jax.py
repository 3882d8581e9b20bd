"""Gradients in jax: under jit, grad, vmap and export, against finite differences, and arguments without gradients."""

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from tests.processes import triton_kernels

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax import export  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

import ragged_attention.jax as rj  # noqa: E402
from ragged_attention import dispatch  # noqa: E402
from ragged_attention.errors import InvalidInput, Unsupported  # noqa: E402

PORTABLE = ("reference", "xla")
EDGES = (jnp.array([0, 3, 3, 5, 9, 10], jnp.int32), jnp.array([0, 4, 6, 6, 8, 9], jnp.int32))
LISTS = jnp.asarray(np.random.default_rng(4).integers(-2, 8, (4, 2, 6)), jnp.int32)
LENS = jnp.array([6, 4, 0, 9], jnp.int32)


def normal(*shape: int, seed: int, dtype: Any = jnp.float32) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def packed(dtype: Any = jnp.float32) -> tuple[Any, ...]:
    """Random q, k, v and sinks of packed sequences."""
    shapes = (11, 4, 3), (10, 2, 3), (10, 2, 5), (4,)
    return tuple(normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))


def latents(dtype: Any = jnp.float32) -> tuple[Any, ...]:
    """Random q, kv and sinks of latent attention."""
    return tuple(normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(((4, 4, 32), (6, 2, 32), (4,))))


def weighted(*results: Any) -> Any:
    """A sum that weights every element differently and skips the infinite lse of rows without keys."""
    total = jnp.zeros((), results[0].dtype)
    for result in results:
        weights = normal(*result.shape, seed=7, dtype=result.dtype)
        total += jnp.where(jnp.isfinite(result), result * weights, 0).sum()
    return total


def biased(dtype: Any = jnp.float32) -> tuple[Any, ...]:
    """`packed` with a relative bias that has fewer columns than there are distances."""
    return *packed(dtype), normal(4, 3, seed=4, dtype=dtype)


def own_bias(dtype: Any = jnp.float32) -> tuple[Any, ...]:
    """`packed` with a relative bias for each query, wide enough for all distances."""
    return *packed(dtype), normal(11, 4, 12, seed=4, dtype=dtype)


def attend(q: Any, k: Any, v: Any, sinks: Any, relative_bias: Any = None, **options: Any) -> Any:
    options |= {"sinks": sinks, "relative_bias": relative_bias, "return_lse": True}
    return weighted(*rj.varlen_attention(q, k, v, *EDGES, **options))


def select(q: Any, kv: Any, sinks: Any, **options: Any) -> Any:
    out, _, lse = rj.sparse_mla_prefill(q, kv, LISTS, d_v=16, sinks=sinks, topk_lens=LENS, **options)
    return weighted(out, lse)


BOTH = {
    "packed attention": (attend, packed),
    "a relative bias": (attend, biased),
    "each query's relative bias": (attend, own_bias),
    "sparse prefill": (select, latents),
}
both = pytest.mark.parametrize(("function", "arguments"), BOTH.values(), ids=BOTH)


def gradients(function: Any, arguments: tuple[Any, ...], **options: Any) -> Any:
    return jax.grad(lambda *given: function(*given, **options), tuple(range(len(arguments))))(*arguments)


def assert_close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.fixture
def double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@both
@pytest.mark.parametrize("backend", PORTABLE)
@pytest.mark.usefixtures("double_precision")
def test_finite_differences_agree(function: Any, arguments: Any, backend: str) -> None:
    options = {"causal": True, "soft_cap": 1.5, "sliding_window": 3} if function is attend else {}
    check_grads(
        lambda *given: function(*given, backend=backend, **options), arguments(jnp.float64), order=1, modes=["rev"]
    )


@both
@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_jit_and_grad_in_either_order(function: Any, arguments: Any, backend: str) -> None:
    given = arguments()
    want = gradients(function, given, backend="reference")
    assert_close(jax.jit(lambda *given: gradients(function, given, backend=backend))(*given), want)
    if backend == "triton":  # Triton is slow in the interpreter, and the checks below do not depend on the backend
        return
    assert_close(gradients(function, given, backend=backend), want)
    whole = jax.jit(lambda *given: function(*given, backend=backend))
    assert_close(jax.grad(whole, tuple(range(len(given))))(*given), want)


@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_a_deterministic_gradient_is_the_same(backend: str) -> None:
    want = gradients(select, latents(), backend="reference")
    assert_close(gradients(select, latents(), backend=backend, deterministic=True), want)


@pytest.mark.parametrize(
    ("function", "arguments", "backend"), [(attend, packed, "reference"), (select, latents, "xla")]
)
def test_a_batch_of_calls(function: Any, arguments: Any, backend: str) -> None:
    one, other = arguments(), tuple(2 * array for array in arguments())
    stacked = tuple(map(jnp.stack, zip(one, other, strict=True)))
    each = jax.vmap(lambda *given: gradients(function, given, backend=backend))(*stacked)
    for index, given in enumerate((one, other)):
        assert_close([array[index] for array in each], gradients(function, given, backend=backend))


def ranges() -> Any:
    """Key ranges for each query of `packed`; those of the last query, which is padding, are garbage."""
    return jnp.asarray(np.random.default_rng(5).integers(-1, 6, (11, 2, 2)), jnp.int32)


@pytest.mark.parametrize("arguments", [packed, biased, own_bias])
@pytest.mark.usefixtures("double_precision")
def test_finite_differences_agree_by_ranges_of_keys(arguments: Any) -> None:
    check_grads(
        lambda *given: attend(*given, key_ranges=ranges(), backend="xla"), arguments(jnp.float64), order=1,
        modes=["rev"],
    )  # fmt: skip


def test_ranges_of_keys_may_be_traced() -> None:
    given = biased()
    of_ranges = jax.jit(lambda ranges, *given: gradients(attend, given, key_ranges=ranges, backend="xla"))
    for some in (ranges(), ranges()[::-1], 0 * ranges()):
        assert_close(of_ranges(some, *given), gradients(attend, given, key_ranges=some, backend="reference"))


@pytest.mark.parametrize("mapped", [True, False])
def test_a_batch_of_ranges_of_keys(mapped: bool) -> None:
    one, other = biased(), tuple(2 * array for array in biased())
    masks = jnp.stack([ranges(), ranges()[::-1]]) if mapped else ranges()
    stacked = tuple(map(jnp.stack, zip(one, other, strict=True)))
    each = jax.vmap(
        lambda masks, *given: gradients(attend, given, key_ranges=masks, backend="xla"),
        in_axes=(0 if mapped else None, *[0] * len(stacked)),
    )(masks, *stacked)
    for index, given in enumerate((one, other)):
        own = masks[index] if mapped else masks
        assert_close([array[index] for array in each], gradients(attend, given, key_ranges=own, backend="reference"))


def test_ranges_of_keys_alone_may_be_mapped() -> None:
    masks = jnp.stack([ranges(), ranges()[::-1]])
    each = jax.vmap(lambda masks: gradients(attend, packed(), key_ranges=masks, backend="xla"))(masks)
    for index in range(2):
        want = gradients(attend, packed(), key_ranges=masks[index], backend="reference")
        assert_close([array[index] for array in each], want)


def blocks(heads: int = 2, length: int = 3) -> Any:
    """Block lists for each query of `packed`; those of the last query, which is padding, are garbage."""
    return jnp.asarray(np.random.default_rng(5).integers(-1, 4, (11, heads, length)), jnp.int32)


@pytest.mark.usefixtures("double_precision")
def test_finite_differences_agree_by_lists_of_blocks() -> None:
    check_grads(
        lambda *given: attend(*given, selected=blocks(), block_size=2, backend="xla"), biased(jnp.float64), order=1,
        modes=["rev"],
    )  # fmt: skip


@pytest.mark.parametrize(("heads", "length"), [(2, 3), (1, 40), (2, 0)])
def test_lists_of_blocks_may_be_traced_and_mapped(heads: int, length: int) -> None:
    given = biased()
    masks = jnp.stack([blocks(heads, length), blocks(heads, length)[::-1]])

    def of_lists(lists: Any) -> Any:
        return gradients(attend, given, selected=lists, block_size=2, backend="xla")

    mapped = jax.vmap(of_lists)(masks)
    for index, lists in enumerate(masks):
        want = gradients(attend, given, selected=lists, block_size=2, backend="reference")
        assert_close(jax.jit(of_lists)(lists), want)
        assert_close([array[index] for array in mapped], want)


def test_a_constant_bias_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a relative bias costs time, so it is computed only if the bias needs it."""
    module = dispatch.load("varlen_attention_backward", "xla")
    run, asked = module.run, []

    def watched(call: Any, *others: Any) -> Any:
        asked.append(call.return_d_relative_bias)
        return run(call, *others)

    monkeypatch.setattr(module, "run", watched)
    options = {"backend": "xla", "sm_scale": 0.37}  # an option that no other test uses, so that the call is traced anew
    for numbers in ((0, 1, 2), (0, 4)):
        jax.jit(jax.grad(lambda *given: attend(*given, **options), numbers))(*biased())
    assert asked == [False, True]


@both
def test_only_what_is_asked_for(function: Any, arguments: Any) -> None:
    given = arguments()
    for index, want in enumerate(gradients(function, given)):
        (got,) = (jax.grad(lambda *given: function(*given), index)(*given),)
        assert_close([got], [want])


def test_checkpoints_give_the_same() -> None:
    again = jax.checkpoint(lambda *given: attend(*given, backend="reference"))
    assert_close(gradients(again, packed()), gradients(attend, packed(), backend="reference"))


@both
def test_a_gradient_has_no_gradient(function: Any, arguments: Any) -> None:
    given = arguments()

    def first(q: Any) -> Any:
        return jax.grad(function)(q, *given[1:]).sum()

    with pytest.raises(RuntimeError, match="_backward has no gradient: it is a gradient itself"):
        jax.grad(first)(given[0])


def test_slopes_have_no_gradient() -> None:
    given, slopes = packed(), jnp.array([0.5, -0.25, 0.0, 0.125])

    def of_slopes(slopes: Any) -> Any:
        return attend(*given, alibi_slopes=slopes)

    assert gradients(attend, given, alibi_slopes=slopes)[0].any()
    with pytest.raises(RuntimeError, match="varlen_attention has no gradient with respect to alibi_slopes: expected"):
        jax.grad(of_slopes)(slopes)


def test_a_quantised_cache_has_no_gradient() -> None:
    kv = rj.quantize_mla_cache(normal(2, 3, 1, 576, seed=0), "fp8_v32")
    q = normal(4, 3, 576, seed=1)

    def total(q: Any) -> Any:
        return rj.sparse_mla_prefill(q, kv, LISTS[:, :1])[0].sum()

    total(q)
    with pytest.raises(InvalidInput, match=r"expected kv\.dtype to be float32, got uint8"):
        jax.grad(total)(q)


def test_a_result_of_another_dtype_has_no_gradient() -> None:
    q, kv, _ = latents(jnp.bfloat16)

    def total(q: Any, out_dtype: Any) -> Any:
        return rj.sparse_mla_prefill(q, kv, LISTS, d_v=16, out_dtype=out_dtype)[0].sum()

    jax.grad(total)(q, jnp.bfloat16)
    with pytest.raises(InvalidInput, match=r"expected out_dtype to be that of q, bfloat16, .* got float32"):
        jax.grad(total)(q, "float32")


def test_a_gradient_can_be_exported() -> None:
    given = packed()
    step = jax.jit(lambda *given: gradients(partial(attend, backend=["pallas", "xla"]), given))
    exported = export.export(step, platforms=["cpu", "tpu"])(*given)
    assert_close(exported.call(*given), step(*given), 0)


@both
@pytest.mark.usefixtures("double_precision")
def test_double_precision_is_for_the_portable_backends(function: Any, arguments: Any) -> None:
    given = arguments(jnp.float64)
    for backend in ("triton", "pallas", "cuda"):
        with pytest.raises(Unsupported):
            function(*given, backend=backend)
    with pltpu.force_tpu_interpret_mode(), pytest.raises(Unsupported):
        function(*given, backend="pallas")


def test_gradients_lower_to_triton_for_cuda_and_to_xla_for_a_cpu() -> None:
    on_gpu, on_cpu = triton_kernels("gradients")
    assert on_gpu >= 10  # 3 forward kernels, at least 3 kernels for one of the gradients, and 2 for each of the others
    assert on_cpu == 0


def test_max_logits_have_no_gradient() -> None:
    """The largest logits have a gradient of 0, and requesting them leaves the gradients of out and lse unchanged."""
    (q, k, v, _), varlen_attention = packed(), cast(Any, rj.varlen_attention)

    def gradients_of(index: int, **requests: bool) -> Any:
        def total(*arrays: Any) -> Any:
            results = varlen_attention(*arrays, *EDGES, return_lse=True, backend="xla", **requests)
            return weighted(results[index])

        return jax.grad(total, (0, 1, 2))(q, k, v)

    for index in (0, 1):
        assert_close(gradients_of(index, return_max_logits=True), gradients_of(index))
    assert not any(gradient.any() for gradient in gradients_of(2, return_max_logits=True))
