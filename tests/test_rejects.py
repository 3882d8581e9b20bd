"""Every unlawful call is refused by the same error with the same text, whichever front end it comes through."""

import ast
import dataclasses
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ragged_attention as ra
from ragged_attention import calls
from ragged_attention.errors import BackendMissing, InvalidInput, Unsupported
from ragged_attention.testing.runners import FRAMEWORKS, runner_for


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


# One lawful call of each operation; a case below changes some of its arguments.
LAWFUL: dict[str, dict[str, Any]] = {
    "ragged_paged_attention": {
        "q": ones(4, 4, 16),
        "kv_pages": ones(6, 4, 4, 16),
        "kv_lens": ints(3, 8),
        "page_indices": ints([0, 1], [2, 3]),
        "cu_q_lens": ints(0, 2, 4),
    },
    "write_kv_pages": {
        "k": ones(4, 2, 16),
        "v": ones(4, 2, 16),
        "kv_pages": ones(6, 4, 4, 16),
        "slot_mapping": ints(0, 1, 2, -1),
    },
    "merge_attention_states": {"outs": ones(2, 3, 4, 16), "lses": ones(2, 3, 4)},
}
TABLES = {"slot_mapping": None, "kv_lens": ints(3, 8), "page_indices": ints([0, 1], [2, 3]), "cu_q_lens": ints(0, 2, 4)}
FLOATS, CACHES = (
    "float32 or float16 or bfloat16",
    "float32 or float16 or bfloat16 or float8_e4m3fn or float8_e5m2 or int8",
)


@dataclasses.dataclass(frozen=True)
class Case:
    operation: str
    changes: dict[str, Any]
    error: type[Exception]
    text: str


def attention(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("ragged_paged_attention", changes, error, text)


def write(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("write_kv_pages", changes, error, text)


def merge(error: type[Exception], text: str, **changes: Any) -> Case:
    return Case("merge_attention_states", changes, error, text)


def values(text: str, **changes: Any) -> Case:
    """Refused only where index values are checked."""
    return Case("ragged_paged_attention", changes, InvalidInput, text)


def pair(k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return k, v


STATIC = [
    # Kinds.
    attention(TypeError, "expected q to be an array, got list", q=[[[1.0] * 16]]),
    attention(TypeError, "expected kv_pages to be an array, got str", kv_pages="pages"),
    attention(TypeError, "expected kv_pages to be an array or a pair (k_pages, v_pages), got 3 values",
              kv_pages=(ones(6, 4, 2, 16),) * 3),
    attention(TypeError, "expected kv_lens to be an array, got int", kv_lens=3),
    attention(TypeError, "expected page_indices to be an array, got NoneType", page_indices=None),
    attention(TypeError, "expected cu_q_lens to be an array, got tuple", cu_q_lens=(0, 2, 4)),
    attention(TypeError, "expected num_seqs to be an int or an array, got float", num_seqs=1.5),
    attention(TypeError, "expected num_seqs to be an int or an array, got bool", num_seqs=True),
    attention(TypeError, "expected sm_scale to be a number, got str", sm_scale="1"),
    attention(TypeError, "expected causal to be a bool, got int", causal=1),
    attention(TypeError, "expected sliding_window to be an int, got float", sliding_window=2.0),
    attention(TypeError, "expected sliding_window to be an int, got bool", sliding_window=True),
    attention(TypeError, "expected soft_cap to be a number, got list", soft_cap=[1.0]),
    attention(TypeError, "expected sinks to be an array, got float", sinks=1.0),
    attention(TypeError, "expected k_scale to be a number or an array, got str", k_scale="1"),
    attention(TypeError, "expected v_scale to be a number or an array, got list", v_scale=[1.0, 1.0]),
    attention(TypeError, "expected return_lse to be a bool, got NoneType", return_lse=None),
    attention(TypeError, "expected options to be a mapping, got list", options=[1]),
    attention(TypeError, "expected backend to be a name or a list of names, got 3", backend=3),
    # Dtypes.
    attention(InvalidInput, f"expected q.dtype to be {FLOATS}, got int32", q=ones(4, 4, 16, dtype=np.int32)),
    attention(InvalidInput, f"expected kv_pages.dtype to be {CACHES}, got int32",
              kv_pages=ones(6, 4, 4, 16, dtype=np.int32)),
    attention(InvalidInput, "expected kv_pages.dtype to be that of q, float32, or float8_e4m3fn or float8_e5m2 or "
              "int8, got float16", kv_pages=ones(6, 4, 4, 16, dtype=np.float16)),
    attention(InvalidInput, "expected v_pages.dtype to be float32, got float16",
              kv_pages=pair(ones(6, 4, 2, 16), ones(6, 4, 2, 16, dtype=np.float16))),
    attention(InvalidInput, "expected kv_lens.dtype to be int32, got int16", kv_lens=ones(2, dtype=np.int16)),
    attention(InvalidInput, "expected page_indices.dtype to be int32, got float32", page_indices=ones(2, 2)),
    attention(InvalidInput, "expected cu_q_lens.dtype to be int32, got uint8", cu_q_lens=ones(3, dtype=np.uint8)),
    attention(InvalidInput, "expected num_seqs to be int32 of shape [1], got int32[2]", num_seqs=ints(1, 1)),
    attention(InvalidInput, "expected num_seqs to be int32 of shape [1], got float32[1]", num_seqs=ones(1)),
    attention(InvalidInput, "expected sinks.dtype to be float32, got float16", sinks=ones(4, dtype=np.float16)),
    attention(InvalidInput, "expected k_scale to be a float array of shape [] or [num_kv_heads=2], got float32[3]",
              k_scale=ones(3)),
    attention(InvalidInput, "expected v_scale to be a float array of shape [] or [num_kv_heads=2], got int32[2]",
              v_scale=ints(1, 1)),
    # Shapes.
    attention(InvalidInput, "expected q.shape to be [T, H, D] = [T, H, D], got [4, 64]", q=ones(4, 64)),
    attention(InvalidInput, "expected q.shape[2] to be a multiple of 8 from 16 to 512, got 20",
              q=ones(4, 4, 20), kv_pages=ones(6, 4, 4, 20)),
    attention(InvalidInput, "expected q.shape[2] to be a multiple of 8 from 16 to 512, got 8",
              q=ones(4, 4, 8), kv_pages=ones(6, 4, 4, 8)),
    attention(InvalidInput, "expected q.shape[2] to be a multiple of 8 from 16 to 512, got 520",
              q=ones(4, 4, 520), kv_pages=ones(6, 4, 4, 520)),
    attention(InvalidInput, "expected kv_pages.shape[3] = head_dim=16, got 24", kv_pages=ones(6, 4, 4, 24)),
    attention(InvalidInput, "expected k_pages.shape[3] = head_dim=16, got 24",
              kv_pages=pair(ones(6, 4, 2, 24), ones(6, 4, 2, 16))),
    attention(InvalidInput, "expected v_pages.shape[3] to be a multiple of 8 from 16 to 512, got 12",
              kv_pages=pair(ones(6, 4, 2, 16), ones(6, 4, 2, 12))),
    attention(InvalidInput, "expected v_pages.shape to be [P, G, K, D_v] = [6, 4, 2, D_v], got [6, 4, 1, 16]",
              kv_pages=pair(ones(6, 4, 2, 16), ones(6, 4, 1, 16))),
    attention(InvalidInput, "expected k_pages to have num_kv_heads >= 1, got 0",
              kv_pages=pair(ones(6, 4, 0, 16), ones(6, 4, 0, 16))),
    attention(InvalidInput, "expected kv_pages.shape[2] to be 2 * num_kv_heads, an even number, got 3",
              kv_pages=ones(6, 4, 3, 16)),
    attention(InvalidInput, "expected kv_pages.shape[2] to be 2 * num_kv_heads, an even number, got 0",
              kv_pages=ones(6, 4, 0, 16)),
    attention(InvalidInput, "expected kv_pages.shape to be [P, G, 2K, D] = [P, G, 2K, D], got [6, 4, 16]",
              kv_pages=ones(6, 4, 16)),
    attention(InvalidInput, "expected page_size >= 1, got 0", kv_pages=ones(6, 0, 4, 16)),
    attention(InvalidInput, "expected num_q_heads to be a multiple of num_kv_heads=2, got 3", q=ones(4, 3, 16)),
    attention(InvalidInput, "expected kv_lens.shape to be [S] = [S], got [2, 1]", kv_lens=ints([1], [2])),
    attention(InvalidInput, "expected page_indices.shape to be [S, M] = [2, M], got [3, 2]",
              page_indices=ints([0, 1], [2, 3], [4, 5])),
    attention(InvalidInput, "expected cu_q_lens.shape to be [S+1] = [3], got [2]", cu_q_lens=ints(0, 4)),
    attention(InvalidInput, "expected sinks.shape to be [H] = [4], got [2]", sinks=ones(2)),
    # Ranges.
    attention(InvalidInput, "expected num_seqs between 0 and max_num_seqs=2, got 3", num_seqs=3),
    attention(InvalidInput, "expected num_seqs between 0 and max_num_seqs=2, got -1", num_seqs=-1),
    attention(InvalidInput, "expected sm_scale to be finite, got nan", sm_scale=float("nan")),
    attention(InvalidInput, "expected sm_scale to be finite, got inf", sm_scale=float("inf")),
    attention(InvalidInput, "expected sliding_window >= 1, got 0", sliding_window=0),
    attention(InvalidInput, "expected sliding_window >= 1, got -3", sliding_window=-3),
    attention(InvalidInput, "expected soft_cap > 0, got 0.0", soft_cap=0.0),
    attention(InvalidInput, "expected soft_cap > 0, got -2.0", soft_cap=-2.0),
    attention(InvalidInput, "expected soft_cap to be finite, got inf", soft_cap=float("inf")),
    attention(InvalidInput, "expected k_scale to be finite, got nan", k_scale=float("nan")),
    attention(InvalidInput, "expected options among none for this backend, got 'block_q'",
              backend="reference", options={"block_q": 16}),
    attention(InvalidInput, "expected backend to be one of auto, triton, pallas, cuda, eager, xla, reference, "
              "got 'tritom'", backend="tritom"),
    attention(InvalidInput, "expected backend to name at least one backend, got []", backend=[]),
    # Writes.
    write(TypeError, "expected k to be an array, got NoneType", k=None),
    write(TypeError, "expected slot_mapping to be an array, got str", slot_mapping="slots"),
    write(TypeError, "expected k_scale to be a number or an array, got str", k_scale="1"),
    write(TypeError, "expected kv_pages to be an array or a pair (k_pages, v_pages), got 1 values",
          kv_pages=(ones(6, 4, 2, 16),)),
    write(InvalidInput, f"expected k.dtype to be {FLOATS}, got int32", k=ones(4, 2, 16, dtype=np.int32)),
    write(InvalidInput, "expected k.shape to be [T, K, D] = [T, 2, 16], got [4, 3, 16]", k=ones(4, 3, 16)),
    write(InvalidInput, "expected v.shape to be [T, K, D_v] = [4, 2, 16], got [5, 2, 16]", v=ones(5, 2, 16)),
    write(InvalidInput, "expected v.dtype to be float32, got float16", v=ones(4, 2, 16, dtype=np.float16)),
    write(InvalidInput, "expected page_size >= 1, got 0", kv_pages=ones(6, 0, 4, 16)),
    write(InvalidInput, "expected kv_pages.dtype to be that of k, float32, or float8_e4m3fn or float8_e5m2 or int8, "
          "got float16", kv_pages=ones(6, 4, 4, 16, dtype=np.float16)),
    write(InvalidInput, "expected slot_mapping.dtype to be int32 or int64, got float32", slot_mapping=ones(4)),
    write(InvalidInput, "expected slot_mapping.shape to be [T] = [4], got [3]", slot_mapping=ints(0, 1, 2)),
    write(InvalidInput, "expected slot_mapping, or page_indices with kv_lens and cu_q_lens, got neither",
          slot_mapping=None),
    write(InvalidInput, "expected slot_mapping, or page_indices with kv_lens and cu_q_lens, got kv_lens, slot_mapping",
          kv_lens=ints(3, 8)),
    write(InvalidInput, "expected slot_mapping, or page_indices with kv_lens and cu_q_lens, got page_indices",
          slot_mapping=None, page_indices=ints([0, 1])),
    write(InvalidInput, "expected num_seqs only with page_indices, got it with slot_mapping", num_seqs=ints(1)),
    write(InvalidInput, "expected kv_lens.dtype to be int32, got float32", **TABLES | {"kv_lens": ones(2)}),
    write(InvalidInput, "expected cu_q_lens.shape to be [S+1] = [3], got [2]", **TABLES | {"cu_q_lens": ints(0, 4)}),
    write(InvalidInput, "expected num_seqs between 0 and max_num_seqs=2, got 5", **TABLES, num_seqs=5),
    write(InvalidInput, "expected v_scale to be a float array of shape [] or [num_kv_heads=2], got float32[4]",
          v_scale=ones(4)),
    # Merges.
    merge(TypeError, "expected outs to be an array, got NoneType", outs=None),
    merge(TypeError, "expected lses to be an array, got float", lses=1.0),
    merge(InvalidInput, f"expected outs.dtype to be {FLOATS}, got int32", outs=ones(2, 3, 4, 16, dtype=np.int32)),
    merge(InvalidInput, "expected lses.dtype to be float32, got float16", lses=ones(2, 3, 4, dtype=np.float16)),
    merge(InvalidInput, "expected outs.shape to be [N, T, H, D_v] = [N, T, H, D_v], got [3, 4, 16]",
          outs=ones(3, 4, 16)),
    merge(InvalidInput, "expected lses.shape to be [N, T, H] = [2, 3, 4], got [2, 4, 3]", lses=ones(2, 4, 3)),
    merge(InvalidInput, "expected outs to hold at least one part, got 0", outs=ones(0, 3, 4, 16), lses=ones(0, 3, 4)),
]  # fmt: skip

VALUES = [
    values("expected num_seqs between 0 and max_num_seqs=2, got 7", num_seqs=ints(7)),
    values("expected cu_q_lens[0] = 0, got 1", cu_q_lens=ints(1, 2, 4)),
    values("expected cu_q_lens to ascend, got 3, 2 at sequence 1", cu_q_lens=ints(0, 3, 2)),
    values("expected cu_q_lens[2] <= num_tokens=4, got 9", cu_q_lens=ints(0, 2, 9), kv_lens=ints(3, 8)),
    values("expected kv_lens[0] between 0 and pages_per_seq * page_size = 8, got 9", kv_lens=ints(9, 8)),
    values("expected kv_lens[1] between 0 and pages_per_seq * page_size = 8, got -1", kv_lens=ints(3, -1)),
    values("expected q_len <= kv_lens[0] = 1, got q_len 2 of sequence 0", kv_lens=ints(1, 8)),
    values("expected page_indices[1, 1] between 0 and 5, got 6", page_indices=ints([0, 1], [2, 6])),
    values("expected page_indices[0, 0] between 0 and 5, got -1", page_indices=ints([-1, 1], [2, 3])),
    write(InvalidInput, "expected slot_mapping[2] to be -1 or between 0 and 23, got 24",
          slot_mapping=ints(0, 1, 24, 2)),
    write(InvalidInput, "expected slot_mapping[0] to be -1 or between 0 and 23, got -2",
          slot_mapping=ints(-2, 1, 2, 3)),
    write(InvalidInput, "expected page_indices[0, 0] between 0 and 5, got 8",
          **TABLES | {"page_indices": ints([8, 1], [2, 3])}),
]  # fmt: skip


def refusal(case: Case, framework: str, **more: Any) -> Exception:
    """What the front end raises for a case."""
    front = runner_for("auto", framework).front

    def bring(value: Any) -> Any:
        if isinstance(value, tuple) and any(isinstance(item, np.ndarray) for item in value):
            return tuple(map(bring, value))
        if not isinstance(value, np.ndarray):
            return value
        return front.bring("", value, str(value.dtype), strided=False, place=lambda array: array, device=None)

    arguments = {name: bring(value) for name, value in (LAWFUL[case.operation] | case.changes | more).items()}
    try:
        getattr(front.operations, case.operation)(**arguments)
    except Exception as error:
        return error
    pytest.fail(f"{case.operation} took {case.changes} through {framework}")


def name_of(case: Case) -> str:
    return f"{case.operation}: {case.text}"


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    return request.param


@pytest.mark.parametrize("case", STATIC, ids=name_of)
def test_an_unlawful_call_is_refused(case: Case, framework: str) -> None:
    error = refusal(case, framework)
    assert (type(error), str(error)) == (case.error, case.text)


@pytest.mark.parametrize("case", VALUES, ids=name_of)
def test_unlawful_values_are_refused_on_request(case: Case, framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ra.use_backend(validate="full"):
        error = refusal(case, framework)
    assert (type(error), str(error)) == (case.error, case.text)
    monkeypatch.setenv("RAGGED_ATTENTION_VALIDATE", "full")
    error = refusal(case, framework)
    assert (type(error), str(error)) == (case.error, case.text)


@pytest.mark.parametrize("case", VALUES, ids=name_of)
def test_unlawful_values_are_else_no_error(case: Case, framework: str) -> None:
    with pytest.raises(pytest.fail.Exception, match="took"):
        refusal(case, framework)


@pytest.mark.parametrize("operation", LAWFUL)
def test_the_lawful_calls_are_taken(operation: str, framework: str) -> None:
    with ra.use_backend(validate="full"), pytest.raises(pytest.fail.Exception, match="took"):
        refusal(Case(operation, {}, Exception, ""), framework)


@pytest.mark.parametrize("operation", LAWFUL)
def test_a_named_backend_is_never_replaced(operation: str, framework: str) -> None:
    other = {"torch": "xla", "jax": "eager"}[framework]
    error = refusal(Case(operation, {"backend": other}, Exception, ""), framework)
    assert isinstance(error, Unsupported)
    first, reason, *_ = str(error).splitlines()
    assert first == f"no backend asked for takes this {operation} call from {framework} on cpu:"
    assert reason.startswith(f"  {other}: ")


def test_an_operation_that_a_room_does_not_offer_is_missing(framework: str) -> None:
    error = refusal(attention(BackendMissing, "", backend=["cuda", "pallas"]), framework)
    assert isinstance(error, BackendMissing)
    assert "cuda: does not offer ragged_paged_attention" in str(error)


def test_every_raise_of_the_records_is_reached(framework: str) -> None:
    """No error text without a case: each `raise` in calls.py is met by the tables above."""
    path = Path(calls.__file__)
    raises = {node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)}
    met = set()
    with ra.use_backend(validate="full"):
        for case in STATIC + VALUES:
            for frame, line in traceback.walk_tb(refusal(case, framework).__traceback__):
                if Path(frame.f_code.co_filename) == path:
                    met |= {number for number in raises if 0 <= line - number <= 4}
    missed = {number: path.read_text().splitlines()[number - 1].strip() for number in raises - met}
    assert not missed
