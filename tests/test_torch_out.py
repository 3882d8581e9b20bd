"""`out=` of the torch operations is written, whatever its strides, and nothing else changes."""

from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import ragged_attention as ra  # noqa: E402
import ragged_attention.torch as rt  # noqa: E402
from ragged_attention import dispatch  # noqa: E402
from ragged_attention.calls import CALLS  # noqa: E402
from tests.operators import operator_arguments  # noqa: E402
from tests.tensors import ints, normal  # noqa: E402

Tensor = Any

DIRECT = ("numba", "triton")  # backends that write a packed `out` directly
BACKENDS = ("reference", "eager", *DIRECT)
HEADS_FIRST = {"k_pages": normal(2, 5, 4, 16), "v_pages": normal(2, 5, 4, 16)}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "ragged_paged_attention": {
        "q": normal(6, 4, 16),
        "kv_pages": normal(8, 16, 4, 16),
        "kv_lens": ints(20, 9),
        "page_indices": ints([0, 1], [2, 9]),
        "cu_q_lens": ints(0, 3, 5),
        "return_lse": True,
    },
    "merge_attention_states": {"outs": normal(3, 4, 2, 8), "lses": normal(3, 4, 2)},
    "paged_attention": {
        "q": normal(3, 4, 16),
        **HEADS_FIRST,
        "lengths": ints(7, 0, 4),
        "page_indices": ints([0, 1], [0, 0], [4, 2]),
    },
    "prefill_attention": {"q": normal(6, 4, 16), **HEADS_FIRST, "length": 8, "page_indices": ints(3, 1)},
    "varlen_attention": {
        "q": normal(7, 4, 16),
        "k": normal(9, 2, 16),
        "v": normal(9, 2, 8),
        "cu_q_lens": ints(0, 4, 6),
        "cu_kv_lens": ints(0, 3, 9),
        "return_lse": True,
    },
    "mla_decode": {
        "q": normal(2, 2, 3, 48),
        "kv_cache": normal(4, 4, 1, 48),
        "page_indices": ints([0, 1], [3, 2]),
        "kv_lens": ints(7, 3),
        "d_v": 32,
    },
    "ragged_mla_attention": {
        "q": normal(6, 3, 48),
        "kv_cache": normal(4, 4, 1, 48),
        "kv_lens": ints(7, 3),
        "page_indices": ints([0, 1], [3, 2]),
        "cu_q_lens": ints(0, 3, 5),
        "d_v": 32,
        "return_lse": True,
    },
    "sparse_mla_prefill": {
        "q": normal(4, 3, 48),
        "kv": normal(9, 1, 48),
        "indices": ints([[0, 8, -1]], [[1, 1, 2]], [[-1, 9, 99]], [[3, 4, 5]]),
        "d_v": 32,
    },
}
OPERATIONS = pytest.mark.parametrize("operation", ARGUMENTS)
OFFERED = [(name, backend) for name in ARGUMENTS for backend in BACKENDS if dispatch.backends_offering(name, backend)]


def results(operation: str, **more: Any) -> tuple[Tensor, ...]:
    found = getattr(rt, operation)(**ARGUMENTS[operation] | more)
    return found if isinstance(found, tuple) else (found,)


def packed(like: Tensor) -> Tensor:
    return torch.full(like.shape, torch.nan)


def strided(like: Tensor) -> Tensor:
    return torch.full((*like.shape[:-1], 3 * like.shape[-1]), torch.nan)[..., 1::3]


def unaligned(like: Tensor) -> Tensor:
    return torch.full((like.numel() + 1,), torch.nan)[1:].view(like.shape)


def test_every_operation_that_takes_it_is_here() -> None:
    assert set(ARGUMENTS) == {name for name, record in CALLS.items() if record.TAKES_OUT}


@pytest.mark.parametrize("memory", [packed, strided, unaligned])
@pytest.mark.parametrize(("operation", "backend"), OFFERED)
def test_what_is_given_is_written(operation: str, backend: str, memory: Callable[..., Tensor]) -> None:
    want, *others = results(operation, backend=backend)
    out = memory(want)
    version = out._version
    got, *rest = results(operation, backend=backend, out=out)
    assert got is out
    assert out._version > version
    torch.testing.assert_close([out, *rest], [want, *others], rtol=0, atol=0)


@pytest.mark.parametrize(("operation", "backend"), [each for each in OFFERED if each[1] in DIRECT])
def test_kernels_write_packed_memory_themselves(monkeypatch: pytest.MonkeyPatch, operation: str, backend: str) -> None:
    out = packed(results(operation, backend=backend)[0])
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_: pytest.fail("a copy"), raising=False)
    assert not results(operation, backend=backend, out=out)[0].isnan().any()


@pytest.mark.parametrize(("operation", "backend"), OFFERED)
def test_it_may_be_memory_that_is_read(operation: str, backend: str) -> None:
    want = results(operation, backend=backend)[0]
    name = "outs" if operation == "merge_attention_states" else "q"
    read = ARGUMENTS[operation][name].clone()
    out = read.flatten()[: want.numel()].view(want.shape)
    torch.testing.assert_close(results(operation, backend=backend, out=out, **{name: read})[0], want, rtol=0, atol=0)


@OPERATIONS
def test_a_compiled_function_writes_it_too(operation: str) -> None:
    want, *others = results(operation, backend="eager")

    def call(given: Tensor) -> tuple[Any, ...]:
        inner = torch.zeros_like(given)
        found = results(operation, backend="eager", out=inner)
        results(operation, backend="eager", out=given)
        return inner + 1, given * 2, *found

    out = packed(want)
    torch.compiler.reset()
    got = torch.compile(call, backend="aot_eager", fullgraph=True)(out)
    torch.testing.assert_close([out, *got], [want, want + 1, want * 2, want, *others], rtol=0, atol=0)


@OPERATIONS
def test_its_operators_pass_opcheck(operation: str) -> None:
    out = packed(results(operation, backend="eager")[0])
    operator = getattr(torch.ops.ragged_attention, operation).out
    torch.library.opcheck(operator, operator_arguments(operation, **ARGUMENTS[operation]), {"out": out})


@OPERATIONS
def test_what_cannot_be_written_is_refused(operation: str) -> None:
    like = results(operation)[0]
    for out, error, said in (
        (like[..., 1:], ra.InvalidInput, r"expected out.shape to be \["),
        (like.double(), ra.InvalidInput, "expected out.dtype to be torch.float32, got torch.float64"),
        (like.to("meta"), ra.InvalidInput, "expected out on the device of the others, cpu, got meta"),
        (like[..., :1].expand(like.shape), ra.InvalidInput, "expected out without overlapping memory"),
        (like.numpy(), TypeError, "expected out to be a torch.Tensor, got ndarray"),
    ):
        with pytest.raises(error, match=said):
            results(operation, out=out)
    held = ARGUMENTS[operation]
    name = "outs" if operation == "merge_attention_states" else "q"
    with pytest.raises(RuntimeError, match=f"{operation} with out= has no gradient"):
        results(operation, out=like.clone(), **{name: held[name].clone().requires_grad_()})
    with pytest.raises(RuntimeError, match=f"{operation} writes out in place, and that has no gradient"):
        results(operation, out=like.clone().requires_grad_())
    with torch.no_grad():
        results(operation, out=like.clone().requires_grad_(), **{name: held[name].clone().requires_grad_()})


def test_nothing_is_written_for_a_call_that_is_refused() -> None:
    pages = ARGUMENTS["ragged_paged_attention"]["kv_pages"].clone()
    before = pages.clone()
    new = (torch.ones(6, 2, 16), torch.ones(6, 2, 16))
    with pytest.raises(ra.InvalidInput, match=r"expected out\.shape"):
        results("ragged_paged_attention", kv_pages=pages, new_kv=new, out=torch.empty(6, 4, 8))
    torch.testing.assert_close(pages, before, rtol=0, atol=0)
    want = results("ragged_paged_attention", kv_pages=before, new_kv=new)[0]
    out = packed(want)
    found = results("ragged_paged_attention", kv_pages=pages, new_kv=new, out=out, return_lse=False)
    assert len(found) == 2
    assert found[0] is out
    assert found[1] is pages
    torch.testing.assert_close(out, want, rtol=0, atol=0)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("operation", ["ragged_paged_attention", "ragged_mla_attention", "varlen_attention"])
def test_the_largest_logits_come_after_the_results_before_them(operation: str, return_lse: bool) -> None:
    requests = {"backend": "eager", "return_lse": return_lse, "return_max_logits": True}
    want = results(operation, **requests)
    assert len(want) == 2 + return_lse
    got = results(operation, **requests, out=packed(want[0]))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("return_lse", [False, True])
def test_the_written_pages_come_after_the_largest_logits(return_lse: bool) -> None:
    pages = ARGUMENTS["ragged_paged_attention"]["kv_pages"].clone()
    given = {"new_kv": (torch.ones(6, 2, 16), torch.ones(6, 2, 16)), "kv_pages": pages, "backend": "eager"}
    for out in (None, torch.empty(6, 4, 16)):
        *_, max_logits, written = found = results(
            "ragged_paged_attention", **given, return_lse=return_lse, return_max_logits=True, out=out
        )
        assert len(found) == 3 + return_lse
        assert written is pages
        assert max_logits.shape == (4,)


def test_pages_that_are_written_share_no_byte_with_it() -> None:
    held = ARGUMENTS["ragged_paged_attention"]["kv_pages"]
    memory = torch.empty(held.numel() + 6 * 4 * 16)
    pages = memory[: held.numel()].view(held.shape)
    pages.copy_(held)
    new, before = (torch.ones(6, 2, 16), torch.ones(6, 2, 16)), memory.clone()
    for first in (0, held.numel() - 1):
        out = memory[first : first + 6 * 4 * 16].view(6, 4, 16)
        with pytest.raises(ra.InvalidInput, match="expected kv_pages and out without overlapping memory"):
            results("ragged_paged_attention", kv_pages=pages, new_kv=new, out=out)
        torch.testing.assert_close(memory, before, rtol=0, atol=0, equal_nan=True)
    out = memory[held.numel() :].view(6, 4, 16)
    want = results("ragged_paged_attention", kv_pages=held.clone(), new_kv=new)[0]
    results("ragged_paged_attention", kv_pages=pages, new_kv=new, out=out)
    torch.testing.assert_close(out, want, rtol=0, atol=0)


def test_memory_of_inference_is_written_in_inference_only() -> None:
    with torch.inference_mode():
        out = packed(results("ragged_paged_attention")[0])
        results("ragged_paged_attention", out=out)
    with pytest.raises(RuntimeError, match="writes out, an inference tensor, in place outside"):
        results("ragged_paged_attention", out=out)
