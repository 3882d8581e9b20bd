"""The gradient of the indexer's logits: the reference agrees with autograd, and both frameworks differentiate it."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ragged_attention.errors import InvalidInput
from ragged_attention.reference.indexer_logits import indexer_logits
from ragged_attention.reference.indexer_logits_backward import indexer_logits_backward
from tests.operators import operator_arguments

torch = pytest.importorskip("torch")

import ragged_attention.torch as rt  # noqa: E402

T, H, D, N = 5, 3, 16, 9
NAMES = ("q", "keys", "weights")
RANGES = {"starts": [0, 2, 5, -3, 4], "stops": [9, 3, 5, 40, 2]}
FORMS: dict[str, dict[str, Any]] = {
    "ranges": RANGES,
    "relative": RANGES | {"relative": True, "max_keys": 4},
    "lists": {"indices": [[0, 8, -1], [3, 3, 99], [-1, -1, -1], [2, -7, 5], [8, 7, 6]]},
}
EACH_FORM = pytest.mark.parametrize("form", FORMS)


def form_of(name: str) -> dict[str, Any]:
    return {key: np.array(value, np.int32) if isinstance(value, list) else value for key, value in FORMS[name].items()}


def numbers(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"q": (T, H, D), "keys": (N, D), "weights": (T, H)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def scales() -> np.ndarray:
    return np.linspace(0.5, 2, N)


def tensors(dtype: Any = torch.float32) -> dict[str, Any]:
    return {name: torch.from_numpy(array).to(dtype).requires_grad_() for name, array in numbers().items()}


def in_torch(form: str) -> dict[str, Any]:
    given = {
        name: torch.from_numpy(value) if hasattr(value, "shape") else value for name, value in form_of(form).items()
    }
    return given | {"key_scale": torch.from_numpy(scales()).float()}


def by_formula(q: Any, keys: Any, weights: Any, form: str) -> Any:
    """All logits [T, columns] by the formula in plain torch, and the mask of those whose keys the tokens see."""
    logits = torch.einsum("th,thn->tn", weights, torch.relu(torch.einsum("thd,nd->thn", q, keys)))
    logits = logits * torch.from_numpy(scales()).to(logits.dtype)
    given = form_of(form)
    if "indices" in given:
        index = torch.from_numpy(given["indices"]).long()
        visible = (index >= 0) & (index < N)
        return logits.gather(1, index.where(visible, 0)), visible
    start, stop = (torch.from_numpy(given[name]).clamp(0, N)[:, None] for name in ("starts", "stops"))
    column = torch.arange(N)
    if not given.get("relative"):
        return logits, (column >= start) & (column < stop)
    index = start + torch.arange(given["max_keys"])
    return logits.gather(1, index.clamp(max=N - 1).long()), index < stop


def towards(form: str) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(indexer_logits(**numbers(), **form_of(form)).shape)


@EACH_FORM
def test_the_definition_is_what_torch_differentiates(form: str) -> None:
    given = tensors(torch.float64)
    logits, visible = by_formula(**given, form=form)
    d_logits = torch.from_numpy(towards(form))
    want = torch.autograd.grad(logits[visible], [*given.values()], d_logits[visible])
    poisoned = np.where(visible.numpy(), towards(form), np.nan)
    got = indexer_logits_backward(poisoned, **numbers(), key_scale=scales(), **form_of(form))
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-12)


@EACH_FORM
def test_the_definition_is_a_slope(form: str) -> None:
    given, d_logits, others = numbers(), towards(form), {"key_scale": scales(), **form_of(form)}

    def loss(**changed: np.ndarray) -> float:
        logits = indexer_logits(**given | changed, **others)
        return float((d_logits * np.where(logits == -np.inf, 0.0, logits)).sum())

    for name, gradient in zip(NAMES, indexer_logits_backward(d_logits, **given, **others), strict=True):
        direction = np.random.default_rng(2).standard_normal(gradient.shape)
        above, below = (loss(**{name: given[name] + step * direction}) for step in (1e-6, -1e-6))
        np.testing.assert_allclose((above - below) / 2e-6, (gradient * direction).sum(), rtol=1e-6)


def test_the_derivative_at_zero_is_zero() -> None:
    given = {"q": np.zeros((1, 1, D)), "keys": np.ones((1, D)), "weights": np.ones((1, 1))}
    for gradient in indexer_logits_backward([[1.0]], **given, starts=[0], stops=[1]):
        assert not gradient.any()


@EACH_FORM
@pytest.mark.parametrize("backend", ["reference", "eager", None])
def test_torch_differentiates_it(form: str, backend: str | None) -> None:
    def gradients(function: Callable[..., Any], given: dict[str, Any]) -> Any:
        logits, visible = function(**given)
        return torch.autograd.grad(logits[visible].square().sum(), [*given.values()])

    given = tensors()

    def ours(**given: Any) -> Any:
        logits = rt.indexer_logits(**given, **in_torch(form), backend=backend)
        return logits, logits > -torch.inf

    got, want = gradients(ours, given), gradients(lambda **given: by_formula(**given, form=form), given)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_loss_over_every_logit_works() -> None:
    """A loss over all logits works: gradients at logits of -inf are ignored, even if they are NaN in empty rows."""
    given = tensors()
    logits = rt.indexer_logits(**given, **in_torch("lists"))
    gradients = torch.autograd.grad(logits.softmax(-1).nan_to_num().square().sum(), [*given.values()])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][2].any()  # token 2 has an empty list


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_step_with_its_gradient_compiles_into_one_graph(compiler: str) -> None:
    given, others = tensors(), [in_torch(form) for form in FORMS]

    def step(q: Any, keys: Any, weights: Any) -> Any:
        logits = [rt.indexer_logits(2 * q, keys, weights, **other) for other in others]
        return sum(each.exp().sum() for each in logits)

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own internals
        compiled = torch.compile(step, fullgraph=True, backend=compiler)
        got, want = (torch.autograd.grad(run(*given.values()), [*given.values()]) for run in (compiled, step))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@EACH_FORM
def test_operators_pass_opcheck(form: str) -> None:
    given, d_logits = tensors(), torch.from_numpy(towards(form)).float()
    held = {name: tensor.detach() for name, tensor in given.items()}
    for operation, arguments in (
        ("indexer_logits", given | in_torch(form)),
        ("indexer_logits_backward", {"d_logits": d_logits, **held, **in_torch(form)}),
    ):
        operator = getattr(torch.ops.ragged_attention, operation).default
        torch.library.opcheck(operator, operator_arguments(operation, **arguments))


def test_what_has_no_gradient_says_so() -> None:
    given, form = tensors(), in_torch("ranges")
    scale = form["key_scale"].requires_grad_()
    with pytest.raises(RuntimeError, match="indexer_logits has no gradient with respect to key_scale: expected"):
        rt.indexer_logits(**given, **form | {"key_scale": scale}, backend="eager")
    e4m3 = {"keys": given["keys"].detach().to(torch.float8_e4m3fn)}
    with pytest.raises(InvalidInput, match=r"expected keys.dtype to be that of q, float32, if a gradient is req"):
        rt.indexer_logits(**given | e4m3, **in_torch("ranges"), backend="eager").sum().backward()
    q = given["q"].detach().to(torch.float8_e4m3fn)
    with pytest.raises(InvalidInput, match=r"expected q.dtype to be float32 or float16 or bfloat16 if a gradient is"):
        rt.indexer_logits(q, e4m3["keys"], given["weights"], **in_torch("ranges"), backend="eager").sum().backward()
    tables = {"page_indices": [[0]], "kv_lens": [N], "cu_q_lens": [0, T]}
    pages = {name: torch.tensor(value, dtype=torch.int32) for name, value in tables.items()}
    paged = rt.indexer_logits(given["q"], given["keys"][None], given["weights"], **pages, backend="eager")
    with pytest.raises(InvalidInput, match=r"expected packed keys, with starts and stops or indices, .*got page_ind"):
        paged.sum().backward()


def test_a_gradient_has_no_gradient() -> None:
    given = tensors()
    logits = rt.indexer_logits(**given, **in_torch("lists"), backend="eager")
    (gradient,) = torch.autograd.grad(logits.exp().sum(), given["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="indexer_logits_backward has no gradient: it is a gradient itself"):
        gradient.sum().backward()


@EACH_FORM
@pytest.mark.parametrize("backend", ["reference", "xla", None])
def test_jax_differentiates_it(form: str, backend: str | None) -> None:
    jax = pytest.importorskip("jax")
    rj = pytest.importorskip("ragged_attention.jax")
    others: dict[str, Any] = form_of(form) | {"key_scale": scales().astype(np.float32)}

    def loss(given: dict[str, Any]) -> Any:
        logits = rj.indexer_logits(**given, **others, backend=backend)
        return jax.numpy.where(logits > -jax.numpy.inf, logits, 0.0).__pow__(2).sum()

    given = {name: jax.numpy.asarray(array, "float32") for name, array in numbers().items()}
    logits = indexer_logits(**numbers(), **others)
    d_logits = 2 * np.where(logits == -np.inf, 0.0, logits)
    want = indexer_logits_backward(d_logits, **numbers(), **others)
    for gradients in (jax.grad(loss)(given), jax.jit(jax.grad(loss))(given)):
        for name, expected in zip(NAMES, want, strict=True):
            np.testing.assert_allclose(gradients[name], expected, rtol=1e-4, atol=1e-4)


def test_jax_says_what_has_no_gradient() -> None:
    jax = pytest.importorskip("jax")
    rj = pytest.importorskip("ragged_attention.jax")
    given = {name: array.astype(np.float32) for name, array in numbers().items()}
    with pytest.raises(Exception, match="indexer_logits has no gradient with respect to key_scale: expected"):
        jax.grad(lambda scale: rj.indexer_logits(**given, **form_of("lists"), key_scale=scale).sum())(
            scales().astype(np.float32)
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_results_have_the_dtypes_of_their_inputs(dtype: str) -> None:
    given = {name: tensor.detach().to(getattr(torch, dtype)) for name, tensor in tensors().items()}
    given["weights"] = given["weights"].float()
    d_logits = torch.from_numpy(towards("lists")).float()
    for backend in ("reference", "eager"):
        found = rt.indexer_logits_backward(d_logits, **given, **in_torch("lists"), backend=backend)
        assert [each.dtype for each in found] == [given["q"].dtype, given["q"].dtype, torch.float32]
        assert [each.shape for each in found] == [given[name].shape for name in NAMES]
        assert not found[1][4].any()  # no list names key 4
