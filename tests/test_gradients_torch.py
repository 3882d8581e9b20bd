"""Gradients in torch: operators, finite differences, compilation, checkpoints, and arguments without gradients."""

import contextlib
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import ragged_attention as ra
import ragged_attention.torch as rt
from ragged_attention import calls, dispatch
from ragged_attention.errors import InvalidInput, Unsupported
from ragged_attention.torch._launcher import LAUNCHER, device_facts
from tests.operators import operator_arguments
from tests.tensors import ints

Tensor = torch.Tensor
PORTABLE = ("reference", "eager")
# Key ranges for the queries of `packed`: gaps, overlaps, empty ranges, ranges beyond the keys, and ranges of padding.
RANGES = torch.tensor(
    [[[0, 1], [3, 4]], [[0, 3], [1, 2]], [[3, 9], [0, 0]], [[1, 2], [0, 1]], [[0, 0], [2, 1]], [[1, 2], [-9, 1]],
     [[0, 1], [1, 2]], [[-1, 9], [5, 7]], [[1, 2], [4, 4]], [[0, 1], [0, 1]], [[0, 9], [0, 9]]], dtype=torch.int32,
)  # fmt: skip
BLOCKS: dict[str, Any] = {
    "selected": torch.tensor(
        [[[0, -1], [1, 1]], [[1, 0], [9, -1]], [[2, 0], [0, 0]], [[0, -3], [1, 0]], [[0, 0], [2, 1]], [[0, 9], [-9, 1]],
         [[1, 1], [0, 2]], [[-1, 0], [1, 0]], [[1, 2], [4, 4]], [[0, 1], [0, 1]], [[0, 9], [0, 9]]], dtype=torch.int32,
    ),
    "block_size": 2,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal in a window": {"causal": True, "sliding_window": 2},
    "everything at once": {
        "causal": True,
        "sliding_window": 3,
        "soft_cap": 1.5,
        "sm_scale": -0.8,
        "alibi_slopes": torch.tensor([0.5, -0.25, 0.0, 0.125], dtype=torch.float64),
    },
    "ranges of keys": {"key_ranges": RANGES},
    "lists of blocks": BLOCKS,
    "lists of blocks, causal": {"causal": True, **BLOCKS},
}
Function = Callable[..., Any]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, grad: bool = True) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=dtype).requires_grad_(grad)


# Sequences without queries, without keys, and with more queries than keys. Padding follows the last queries and keys.
EDGES = (ints(0, 3, 3, 5, 9, 10), ints(0, 4, 6, 6, 8, 9))


def packed(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {
        "q": normal(11, 4, 3, dtype=dtype),
        "k": normal(10, 2, 3, seed=1, dtype=dtype),
        "v": normal(10, 2, 5, seed=2, dtype=dtype),
        "sinks": normal(4, seed=3, dtype=torch.promote_types(dtype, torch.float32)),
    }


def sparse(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Arguments for `LISTS`, which begins with one row listed twice and has invalid entries."""
    return {
        "q": normal(4, 4, 32, dtype=dtype),
        "kv": normal(6, 2, 32, seed=1, dtype=dtype),
        "sinks": normal(4, seed=3, dtype=torch.promote_types(dtype, torch.float32)),
    }


LISTS = torch.randint(-2, 8, (4, 2, 6), generator=torch.Generator().manual_seed(4), dtype=torch.int32)
LISTS[1, 0, :2] = 5
LENS = ints(6, 4, 0, 9)


def biased(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """`packed` with a relative bias that has fewer columns than there are distances."""
    wide = torch.promote_types(dtype, torch.float32)
    return packed(dtype) | {"relative_bias": normal(4, 3, seed=4, dtype=wide)}


def own_bias(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """`packed` with a relative bias for each query, wide enough for all distances."""
    wide = torch.promote_types(dtype, torch.float32)
    return packed(dtype) | {"relative_bias": normal(11, 4, 12, seed=4, dtype=wide)}


def attend(tensors: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
    return rt.varlen_attention(cu_q_lens=EDGES[0], cu_kv_lens=EDGES[1], **tensors, return_lse=True, **options)


def select(tensors: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    q, kv, sinks = (tensors[name] for name in ("q", "kv", "sinks"))
    out, _, lse = rt.sparse_mla_prefill(q, kv, LISTS, d_v=16, sinks=sinks, topk_lens=LENS, **options)
    return out, lse


def finite(results: Sequence[Tensor]) -> list[Tensor]:
    """Results in which 0 replaces the -inf of rows that see nothing, because -inf has no finite differences."""
    return [torch.where(torch.isfinite(result), result, 0.0) for result in results]


def weighted(results: Sequence[Tensor]) -> Tensor:
    weights = [normal(*result.shape, seed=7, grad=False).to(result.dtype) for result in results]
    products = [(result * weight).sum() for result, weight in zip(finite(results), weights, strict=True)]
    return torch.stack([product.to(products[0].dtype) for product in products]).sum()


def gradients(results: Sequence[Tensor], tensors: dict[str, Tensor]) -> list[Tensor]:
    """The gradients of a sum that weights every element of the results differently."""
    return list(torch.autograd.grad(weighted(results), list(tensors.values())))


def assert_close(got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float = 1e-10) -> None:
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


DENSES = {"": packed, ", a relative bias": biased, ", each query's relative bias": own_bias}


@pytest.mark.parametrize("backend", PORTABLE)
@pytest.mark.parametrize("arguments", DENSES.values(), ids=DENSES)
@pytest.mark.parametrize("form", FORMS)
def test_packed_attention_passes_gradcheck(form: str, arguments: Function, backend: str) -> None:
    tensors = arguments()

    def function(*values: Tensor) -> list[Tensor]:
        return finite(attend(dict(zip(tensors, values, strict=True)), backend=backend, **FORMS[form]))

    assert torch.autograd.gradcheck(function, tuple(tensors.values()), fast_mode=True)


@pytest.mark.parametrize("backend", PORTABLE)
@pytest.mark.parametrize("deterministic", [False, True])
def test_sparse_prefill_passes_gradcheck(backend: str, deterministic: bool) -> None:
    tensors = sparse()

    def function(*values: Tensor) -> list[Tensor]:
        return finite(select(dict(zip(tensors, values, strict=True)), backend=backend, deterministic=deterministic))

    assert torch.autograd.gradcheck(function, tuple(tensors.values()), fast_mode=True)


@pytest.mark.parametrize("arguments", DENSES.values(), ids=DENSES)
@pytest.mark.parametrize("form", FORMS)
def test_the_fallback_of_packed_attention_differentiates_itself_to_the_same(form: str, arguments: Function) -> None:
    """Autograd through the plain torch operations of the fallback gives the same gradient as our operator."""
    tensors = arguments()
    given = tensors | {"cu_q_lens": EDGES[0], "cu_kv_lens": EDGES[1], "device": device_facts(torch.device("cpu"))}
    assert_close(*_twice("varlen_attention", given | FORMS[form], attend(tensors, **FORMS[form]), tensors))


def test_the_fallback_of_sparse_prefill_differentiates_itself_to_the_same() -> None:
    tensors = sparse()
    arguments = {"indices": LISTS, "topk_lens": LENS, "d_v": 16, "device": device_facts(torch.device("cpu"))}
    assert_close(*_twice("sparse_mla_prefill", tensors | arguments, select(tensors), tensors))


def _twice(
    operation: str, arguments: dict[str, Any], ours: Sequence[Tensor], tensors: dict[str, Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of our operator, and those of autograd through the fallback's torch operations."""
    module = dispatch.load(operation, "eager")
    call = calls.CALLS[operation](**arguments)
    results = module.run(call, module.heuristic(call), LAUNCHER)
    return gradients(ours, tensors), gradients((results[0], results[-1]), tensors)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck itself reads .grad
def test_operators_pass_opcheck() -> None:
    tensors, latents = biased(torch.float32), sparse(torch.float32)
    out, lse = (result.detach() for result in attend(tensors))
    selected = [result.detach() for result in select(latents)]
    backward = {"d_out": out, **_packed_arguments(tensors, detach=True), "out": out, "lse": lse}
    lists: dict[str, Any] = {"indices": LISTS, "d_v": 16, "topk_lens": LENS}
    held = {name: tensor.detach() for name, tensor in latents.items()}
    for operation, arguments in (
        ("varlen_attention", {**_packed_arguments(tensors), "soft_cap": 2}),
        ("varlen_attention_backward", backward),
        ("varlen_attention", {**_packed_arguments(tensors), "key_ranges": RANGES}),
        ("varlen_attention_backward", backward | {"return_d_relative_bias": True}),
        ("varlen_attention_backward", backward | {"return_d_relative_bias": True, "key_ranges": RANGES}),
        ("varlen_attention", _packed_arguments(tensors) | BLOCKS),
        ("varlen_attention_backward", backward | {"return_d_relative_bias": True, **BLOCKS}),
        ("varlen_attention_backward", backward | {"return_d_relative_bias": True, "sinks": None}),
        ("sparse_mla_prefill", latents | lists),
        (
            "sparse_mla_prefill_backward",
            {"d_out": selected[0], **held, **lists, "out": selected[0], "lse": selected[1]},
        ),
    ):
        operator = getattr(torch.ops.ragged_attention, operation).default
        torch.library.opcheck(operator, operator_arguments(operation, **arguments))


def _packed_arguments(tensors: dict[str, Tensor], *, detach: bool = False) -> dict[str, Tensor]:
    held = {name: tensor.detach() if detach else tensor for name, tensor in tensors.items()}
    return held | {"cu_q_lens": EDGES[0], "cu_kv_lens": EDGES[1]}


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_step_with_its_gradient_compiles_into_one_graph(compiler: str) -> None:
    tensors, latents = biased(torch.float32), sparse(torch.float32)

    def step(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bias: Tensor, latent_q: Tensor, kv: Tensor) -> Tensor:
        out, lse = rt.varlen_attention(
            q * 2, k, v, *EDGES, max_q_len=len(k), causal=True, sinks=sinks, relative_bias=2 * bias, return_lse=True
        )
        selected, _, _ = rt.sparse_mla_prefill(latent_q, kv, LISTS, d_v=16)
        some = rt.varlen_attention(q, k, v, *EDGES, relative_bias=bias, key_ranges=RANGES)
        return out.square().sum() + lse[:2].sum() + selected.square().sum() + some.square().sum()

    inputs = [*tensors.values(), latents["q"], latents["kv"]]
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own internals
        compiled = torch.compile(step, fullgraph=True, backend=compiler)
        got, want = (torch.autograd.grad(function(*inputs), inputs) for function in (compiled, step))
    assert_close(got, want, 1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_give_the_same(reentrant: bool) -> None:
    tensors, latents = biased(), sparse()
    for function, given in ((attend, tensors), (select, latents)):

        def segment(*values: Tensor, function: Function = function, given: dict[str, Tensor] = given) -> Any:
            return tuple(finite(function(dict(zip(given, values, strict=True)))))

        again = checkpoint(segment, *given.values(), use_reentrant=reentrant)
        if reentrant:  # torch.autograd.grad does not support reentrant checkpoints
            weighted(again).backward()
            got: list[Any] = [tensor.grad for tensor in given.values()]
        else:
            got = gradients(again, given)
        assert_close(got, gradients(function(given), given))


@pytest.mark.parametrize("backend", PORTABLE)
def test_each_result_and_each_argument_by_itself(backend: str) -> None:
    """Gradients are right if only one argument needs a gradient and only one result is used."""
    for function, given in ((attend, own_bias()), (select, sparse())):
        whole = function(given, backend=backend)
        for name, tensor in given.items():
            alone = {other: value.detach() for other, value in given.items()} | {name: tensor}
            for index in (0, 1):
                results = function(alone, backend=backend)
                if name in ("v", "sinks") and index == 1:
                    total = finite(results)[index].sum()
                    (got,) = torch.autograd.grad(total, tensor, allow_unused=True, materialize_grads=True)
                    assert not got.any()  # the lse depends neither on v nor on sinks
                    continue
                (got,) = torch.autograd.grad(finite(results)[index].sum(), tensor)
                (want,) = torch.autograd.grad(finite(whole)[index].sum(), tensor, retain_graph=True)
                assert_close([got], [want])


def test_the_largest_logit_is_a_constant() -> None:
    q, kv, _ = sparse().values()
    out, max_logits, lse = rt.sparse_mla_prefill(q, kv, LISTS, d_v=16)
    assert [result.requires_grad for result in (out, max_logits, lse)] == [True, False, True]


@pytest.mark.parametrize("compiled", [False, True])
def test_max_logits_leave_the_gradients_as_they_are(compiled: bool) -> None:
    """Requesting the largest logits, which have no gradient, leaves the gradients of out and lse unchanged."""
    given, varlen_attention = packed(), cast(Any, rt.varlen_attention)

    def attend_with(**requests: bool) -> Any:
        return varlen_attention(*[given[name] for name in "qkv"], *EDGES, return_lse=True, **requests)

    function = torch.compile(attend_with, backend="aot_eager", fullgraph=True) if compiled else attend_with
    out, lse, max_logits = function(return_max_logits=True)
    assert (out.requires_grad, lse.requires_grad, max_logits.requires_grad) == (True, True, False)
    assert max_logits.shape == (4,)
    for index, result in enumerate((out, lse)):
        total = torch.where(result.isfinite(), result, 0.0).sum()
        plain = finite(attend_with())[index].sum()
        inputs = [given[name] for name in "qkv"[: 3 - index]]
        assert_close(torch.autograd.grad(total, inputs, retain_graph=True), torch.autograd.grad(plain, inputs))


def test_a_gradient_has_no_gradient() -> None:
    for function, given, name in ((attend, packed(), "varlen_attention"), (select, sparse(), "sparse_mla_prefill")):
        q = given["q"]
        (first,) = torch.autograd.grad(function(given)[0].sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match=f"{name}_backward has no gradient: it is a gradient itself"):
            torch.autograd.grad(first.sum(), q)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_constant_bias_gets_no_gradient(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a relative bias costs time, so it is computed only if the bias needs it."""
    asked = []
    module = dispatch.load("varlen_attention_backward", "eager")
    run = module.run

    def watched(call: Any, *others: Any) -> Any:
        asked.append(call.return_d_relative_bias)
        return run(call, *others)

    def step(tensors: dict[str, Tensor]) -> Tensor:
        return attend(tensors, backend="eager")[0].sum()

    monkeypatch.setattr(module, "run", watched)
    torch._dynamo.reset()
    function = torch.compile(step, backend="aot_eager") if compiled else step
    for constant in (True, False):
        given = biased()
        bias = given["relative_bias"].requires_grad_(not constant)
        function(given).backward()
        assert (bias.grad is None) == constant
        assert given["q"].grad is not None
    assert asked == [False, True]


@pytest.mark.parametrize("of_queries", [True, False])
def test_slopes_have_no_gradient(of_queries: bool) -> None:
    """Slopes that require a gradient are refused; otherwise torch would silently give them the gradient None."""
    tensors = {name: tensor.detach().requires_grad_(of_queries) for name, tensor in packed().items()}
    slopes = normal(4, seed=5)
    message = "varlen_attention has no gradient with respect to alibi_slopes: expected alibi_slopes without one"
    with pytest.raises(RuntimeError, match=message):
        attend(tensors, alibi_slopes=slopes)
    with torch.no_grad():
        attend(tensors, alibi_slopes=slopes)
    assert attend(tensors, alibi_slopes=slopes.detach())[0].requires_grad == of_queries


def test_a_quantised_cache_has_no_gradient() -> None:
    kv = rt.quantize_mla_cache(normal(2, 3, 1, 576, dtype=torch.float32, grad=False), "fp8_v32")
    q = normal(4, 3, 576, dtype=torch.float32)
    out, _, _ = rt.sparse_mla_prefill(q, kv, LISTS[:, :1])  # allowed, because inference may run without no_grad
    with pytest.raises(InvalidInput, match=r"expected kv\.dtype to be float32, got uint8"):
        out.sum().backward()


def test_a_result_of_another_dtype_has_no_gradient() -> None:
    q, kv = normal(4, 4, 32, dtype=torch.bfloat16), normal(6, 2, 32, dtype=torch.bfloat16)
    own, _, _ = rt.sparse_mla_prefill(q, kv, LISTS, d_v=16, out_dtype=torch.bfloat16)
    own.sum().backward()
    wide, _, _ = rt.sparse_mla_prefill(q, kv, LISTS, d_v=16, out_dtype="float32")
    with pytest.raises(InvalidInput, match=r"expected out_dtype to be that of q, bfloat16, .* got float32"):
        wide.sum().backward()


def test_the_gradient_runs_where_the_call_runs_if_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    choose = dispatch.choose

    def spy(call: Any, **keywords: Any) -> Any:
        choice = choose(call, **keywords)
        chosen.append(f"{call.OPERATION}: {choice.backend}")
        return choice

    monkeypatch.setattr(dispatch, "choose", spy)
    tensors = packed(torch.float32)

    def ran(backend: Any) -> str:
        chosen.clear()
        gradients(attend(tensors, backend=backend, soft_cap=1 + len(str(backend))), tensors)
        return chosen[-1]

    assert ran("reference") == "varlen_attention_backward: reference"
    assert ran(["cuda", "triton"]) == "varlen_attention_backward: triton"  # `cuda` lacks this operation
    with ra.use_backend({"varlen_attention_backward": "reference"}):
        assert ran(None) == "varlen_attention_backward: reference"
        assert chosen[0] == "varlen_attention: numba"
    assert dispatch.backends_offering("varlen_attention_backward", "cuda,pallas") is None
    assert dispatch.backends_offering("varlen_attention_backward", "auto") == "auto"


@pytest.mark.parametrize("function", [attend, select])
def test_a_result_that_nobody_uses_costs_nothing(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    choose = dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda call, **keywords: seen.append(call) or choose(call, **keywords))
    given = {attend: packed, select: sparse}[function](torch.float32)
    out, lse = function(given, sm_scale=0.123)
    torch.autograd.grad(out.sum(), list(given.values()), retain_graph=True)
    assert seen[-1].d_lse is None
    torch.autograd.grad(finite([lse])[0].sum(), list(given.values()), allow_unused=True)
    assert seen[-1].d_lse is not None


def test_a_configured_backend_without_the_gradient_is_named() -> None:
    tensors = packed(torch.float32)
    with ra.use_backend({"varlen_attention_backward": "cuda"}):
        out, _ = attend(tensors)
    with pytest.raises(Unsupported, match="cuda: does not offer varlen_attention_backward"):
        out.sum().backward()


def test_the_gradient_runs_where_it_was_to_run_at_the_time_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient uses the backend that was requested at the time of the forward call.

    This also holds in autograd's threads, which are in no `use_backend` block, and whatever block is active later.
    """
    chosen: list[str] = []
    choose = dispatch.choose
    monkeypatch.setattr(
        dispatch, "choose", lambda call, **keywords: chosen.append(str(keywords["backend"])) or choose(call, **keywords)
    )
    tensors = packed(torch.float32)
    with ra.use_backend("reference"):
        out, _ = attend(tensors, soft_cap=1.25)
    with ra.use_backend("eager"):
        thread = threading.Thread(target=out.sum().backward)
        thread.start()
        thread.join()
    assert chosen[-1] == "['reference']"
    assert tensors["q"].grad is not None


@pytest.mark.parametrize("backend", PORTABLE)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch itself uses it
@pytest.mark.parametrize("transform", ["jvp", "jacfwd", "linearize", "dual"])
def test_there_is_no_forward_mode(transform: str, backend: str) -> None:
    """Forward-mode differentiation raises an error; otherwise torch would return tangents of zero."""
    tensors = {name: tensor.detach() for name, tensor in packed(torch.float32).items()}

    def function(q: Tensor) -> Tensor:
        return attend(tensors | {"q": q}, backend=backend)[0]

    q, tangent = tensors["q"], torch.ones_like(tensors["q"])
    transforms = {
        "jvp": lambda: torch.func.jvp(function, (q,), (tangent,)),
        "jacfwd": lambda: torch.func.jacfwd(function)(q),
        "linearize": lambda: torch.func.linearize(function, q),
        "dual": lambda: function(forward_ad.make_dual(q, tangent)),
    }
    level = forward_ad.dual_level() if transform == "dual" else contextlib.nullcontext()
    with level, pytest.raises(RuntimeError, match="varlen_attention has no forward-mode derivative"):
        transforms[transform]()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_stays_outside(dtype: torch.dtype) -> None:
    for function, given in ((attend, packed(torch.float32)), (select, sparse(torch.float32))):
        want = function(given)
        with torch.autocast("cpu", dtype):
            out, lse = function(given)
            got = gradients((out, lse), given)
        assert torch.equal(out, want[0])
        assert torch.equal(lse, want[1])
        assert_close(got, gradients(want, given), 1e-6)


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_the_gradient_of_a_sum_may_be_one_number_seen_everywhere(backend: str) -> None:
    """A gradient with strides of 0, which `out.sum().backward()` passes on, works."""
    for function, given in ((attend, packed(torch.float32)), (select, sparse(torch.float32))):
        out, _ = function(given, backend=backend)
        d_out = torch.ones_like(out)
        got = torch.autograd.grad(out.sum(), list(given.values()), retain_graph=True)
        assert_close(got, torch.autograd.grad(out, list(given.values()), d_out), 1e-6)


@pytest.mark.parametrize("operation", ["varlen_attention", "sparse_mla_prefill"])
@pytest.mark.parametrize("backend", ["triton", "pallas", "cuda"])
def test_double_precision_is_for_the_portable_backends(operation: str, backend: str) -> None:
    function, given = {"varlen_attention": (attend, packed()), "sparse_mla_prefill": (select, sparse())}[operation]
    with pytest.raises(Unsupported):
        function(given, backend=backend)
