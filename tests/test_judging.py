"""`judge` passes correct functions and commands, and reports a batch that exposes a wrong function's fault."""

import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ragged_attention.errors import InvalidInput, Unsupported
from ragged_attention.reference.mla_decode import mla_decode
from ragged_attention.testing import Spec, arguments_of, judge, progress
from ragged_attention.testing.diagnosis.numbers import RESCALE
from ragged_attention.testing.functions import Command
from ragged_attention.testing.indexer.specs import IndexerSpec
from ragged_attention.testing.judging import UNPROMISED as UNPROMISED_BY_NAME
from ragged_attention.testing.mla.specs import DecodeSpec
from ragged_attention.testing.reporting import merged

UNPROMISED = ("invalid indices", "padding", "empty sequences", "empty batches", "more queries than keys")
FLOATS = ("float32", "float16", "bfloat16")


def decode(q, kv_pages, kv_lens, page_indices, sm_scale=None):
    k_pages, v_pages = kv_pages if isinstance(kv_pages, tuple) else (kv_pages[:, :, 0::2], kv_pages[:, :, 1::2])
    page_size, num_kv_heads = k_pages.shape[1:3]
    out = np.zeros((*q.shape[:2], v_pages.shape[3]), np.float32)
    for seq, kv_len in enumerate(kv_lens):
        pages = page_indices[seq, : -(-kv_len // page_size)]
        k, v = (a[pages].reshape(-1, *a.shape[2:])[:kv_len].astype(np.float32) for a in (k_pages, v_pages))
        rows = q[seq].astype(np.float32).reshape(num_kv_heads, -1, q.shape[2])
        logits = np.einsum("kgd,skd->kgs", rows, k) * (q.shape[2] ** -0.5 if sm_scale is None else sm_scale)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[seq] = np.einsum("kgs,skd->kgd", weights, v).reshape(out.shape[1:])
    return out


def decode_faulty(fault: str) -> Callable[..., Any]:
    def faulty(q, kv_pages, kv_lens, page_indices, sm_scale=None):
        if fault == "last key dropped":
            kv_lens = np.maximum(kv_lens - 1, 1)
        if fault == "unscaled":
            sm_scale = 1.0
        if fault == "stale page":
            page_indices = page_indices.copy()
            page_indices[:, 1:] = page_indices[:, :1]
        return decode(q, kv_pages, kv_lens, page_indices, sm_scale)

    return faulty


def judge_decode(function: Callable[..., Any], **limits: Any) -> Any:
    return judge(function, decode_only=True, declines=UNPROMISED, dtypes=FLOATS, examples=5, **limits)


def test_a_right_numpy_function_passes() -> None:
    report = judge_decode(decode, only="attention")
    report.check()
    answered = {operation for verdict in report.verdicts for operation in verdict.answered}
    assert report.passed
    assert answered == {"ragged_paged_attention"}
    assert "lse of ragged_paged_attention" in report.left_out
    assert "declined" in str(report)
    assert "expected one query for each sequence" in str(report)


@pytest.mark.parametrize("fault", ["last key dropped", "unscaled", "stale page"])
def test_a_fault_fails_with_the_batch_that_shows_it(fault: str) -> None:
    report = judge_decode(decode_faulty(fault), only="corner: attention")
    assert not report.passed
    assert report.failures
    with pytest.raises(AssertionError, match=r"FAILED  corner: attention, .*\n  AssertionError: out\["):
        report.check()


def blockwise(block: int, rescaled: bool) -> Callable[..., Any]:
    """A decode kernel over blocks of keys. It takes a pair of pages, and rescales its sums only if `rescaled`."""

    def decode_by_blocks(q, kv_pages, kv_lens, page_indices, sm_scale=None):
        k_pages, v_pages = kv_pages
        out = np.zeros((*q.shape[:2], v_pages.shape[3]), np.float32)
        group = q.shape[1] // k_pages.shape[2]
        for seq, kv_len in enumerate(kv_lens):
            pages = page_indices[seq, : -(-kv_len // k_pages.shape[1])]
            k, v = (a[pages].reshape(-1, *a.shape[2:])[:kv_len].astype(np.float32) for a in kv_pages)
            k, v = (np.repeat(array, group, axis=1) for array in (k, v))
            logits = np.einsum("hd,nhd->hn", q[seq].astype(np.float32), k)
            logits = logits * (q.shape[2] ** -0.5 if sm_scale is None else sm_scale)
            most, total = np.full(q.shape[1], -np.inf, np.float32), np.zeros(q.shape[1], np.float32)
            for start in range(0, kv_len, block):
                part = logits[:, start : start + block]
                new = np.maximum(most, part.max(axis=1))
                factor = np.exp(most - new) if rescaled else np.where(most == -np.inf, 0, 1)
                weights = np.exp(part - new[:, None])
                total = total * factor + weights.sum(axis=1)
                out[seq] = out[seq] * factor[:, None] + np.einsum("hn,nhd->hd", weights, v[start : start + block])
                most = new
            out[seq] /= total[:, None]
        return out

    return decode_by_blocks


@pytest.mark.parametrize(("dtype", "block"), [("float32", 32), ("bfloat16", 128), ("float16", 512)])
def test_a_named_batch_shows_sums_that_are_not_rescaled(dtype: str, block: int) -> None:
    """A long sequence with growing logits tests even a kernel that supports only decodes, one dtype and one layout."""
    limits: dict[str, Any] = {"decode_only": True, "dtypes": [dtype], "only": "corner: attention, decodes of long"}
    limits["declines"] = [*UNPROMISED, "combined pages"]
    right = judge(blockwise(block, rescaled=True), **limits)
    right.check()
    assert [verdict.result for verdict in right.verdicts].count("passed") == 1
    (failure,) = judge(blockwise(block, rescaled=False), **limits).failures
    assert failure.causes[0] == RESCALE


def test_a_report_warns_if_no_named_batch_was_tested() -> None:
    """The report warns, without failing, if all named batches were declined. It has the most common reason."""
    report = judge_decode(decode, page_sizes=[48], only="attention, ")
    named = "WARNING: no named batch was tested: all [0-9]+ checks were declined, most often with this reason: expected"
    assert re.search(named, str(report))
    assert not report.failures
    tested = str(judge_decode(decode, only="corner: attention, decode"))
    assert "WARNING" not in tested


def test_a_table_that_is_read_one_entry_late_is_named() -> None:
    """The cause is found with a larger batch, because the smallest failing batch has one key and fits many causes."""

    def decode_late(q, kv_pages, kv_lens, page_indices, sm_scale=None):
        num_pages = len(kv_pages[0] if isinstance(kv_pages, tuple) else kv_pages)
        late = np.pad(page_indices[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        clean = np.where((late >= 0) & (late < num_pages), late, 0)
        return decode(q, kv_pages, kv_lens, clean, sm_scale)

    report = judge_decode(decode_late, only="attention without lse")
    (failure,) = report.failures
    assert "Spec(lens=((1, 1),)" in failure.batch
    assert failure.causes[0].startswith("the next page is read in place of a page")
    assert "multiple of" not in str(report)


def test_a_last_axis_that_must_be_contiguous_is_named() -> None:
    """The cause names the argument whose strides a kernel ignores, and `arguments_of` rebuilds the failing arrays."""
    torch = pytest.importorskip("torch")

    def decode_by_pointers(q, kv_pages, kv_lens, page_indices):
        dense = torch.empty(q.shape, device="meta").stride()
        arrays = [q.as_strided(q.shape, dense), *kv_pages, kv_lens, page_indices]
        q, k_pages, v_pages, *tables = (array.float().numpy() for array in arrays)
        out = decode(q, (k_pages, v_pages), *(table.astype(np.int32) for table in tables))
        return torch.from_numpy(out)

    limits: dict[str, Any] = {"decode_only": True, "declines": [*UNPROMISED, "combined pages", "other value sizes"]}
    report = judge(
        decode_by_pointers, framework="torch", dtypes=["bfloat16"], examples=40, only="attention without lse", **limits
    )
    (failure,) = report.failures
    assert failure.causes[0] == "it fails only if q's last axis is not contiguous"
    assert "strided=True" in failure.batch
    assert "ragged_attention.testing.arguments_of(Spec(...), 'torch')" in str(report)
    spec = eval(failure.batch, {"Spec": Spec})
    got = arguments_of(spec, "torch")
    assert {*got} >= {"q", "kv_pages", "kv_lens", "page_indices", "cu_q_lens"}
    assert "sliding_window" not in got
    assert got["q"].dtype == torch.bfloat16
    assert got["q"].stride()[-1] == 2
    contiguous = arguments_of(spec)["q"].astype(np.float32)
    assert np.array_equal(got["q"].float().numpy(), contiguous)


def test_causes_that_differ_in_a_block_size_are_one_line() -> None:
    dropped = [f"the last keys are dropped, after a multiple of {size}" for size in (4, 8, 16)]
    zeros = "keys past the length are counted as zeros, up to a multiple of 8: mask their logits by -inf"
    assert merged([dropped[0], zeros, *dropped[1:], "x"]) == [
        "the last keys are dropped, after a multiple of 4, 8 or 16", zeros, "x",
    ]  # fmt: skip


def test_progress_is_shown_except_under_pytest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SAID_EVERY", -1.0)
    limits: dict[str, Any] = {"only": "corner: merge, one part", "examples": 1}
    given = {"merge_attention_states": lambda outs, lses: (outs[0], lses[0])}
    judge(given, **limits)
    assert not capsys.readouterr().err
    judge(given, progress=True, **limits)
    assert capsys.readouterr().err.startswith("[0/2] merge_attention_states  corner: merge, one part\n")
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    judge(given, **limits)
    assert capsys.readouterr().err
    judge(given, progress=False, **limits)
    assert not capsys.readouterr().err


def test_a_drawn_failure_prints_its_structure() -> None:
    report = judge(lambda outs, lses: (outs[0], lses[0]), "merge_attention_states", only="merge on drawn", examples=20)
    assert "MergeSpec(parts=2" in str(report)


def test_a_surplus_lse_is_left_alone() -> None:
    def decode_with_lse(q, kv_pages, kv_lens, page_indices, sm_scale=None):
        return decode(q, kv_pages, kv_lens, page_indices, sm_scale), np.zeros(q.shape[:2], np.float32)

    judge_decode(decode_with_lse, only="attention without lse").check()


def test_a_command_without_features_is_not_given_new_keys(tmp_path: Path) -> None:
    program, given = tmp_path / "attend.py", "set(numpy.load(sys.argv[1])) & {'new_kv.0', 'return_lse'}"
    program.write_text(f"import sys, numpy; sys.exit(9 if {given} else 77)")
    report = judge([sys.executable, str(program), "{input}"], features=["sm_scale"], examples=1, only="agreement: ")
    assert not report.failures


def test_warnings_of_the_interpreter_are_not_shown() -> None:
    """`judge` hides NumPy's warnings, which Triton's interpreter causes for rows of NaN and a GPU does not."""
    pytest.importorskip("torch")

    def merge(outs, lses):
        np.nanmax(np.full((1, 3), np.nan), axis=1)
        np.log(np.zeros(1))
        raise NotImplementedError

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        judge(merge, "merge_attention_states", framework="torch", only="corner: merge, one part")
    assert not shown


def test_the_smallest_batch_is_that_of_the_arrays() -> None:
    """A kernel that only takes the widths of real models is judged on batches of those widths."""

    def wrong(q, kv_cache, page_indices, kv_lens, d_v, sm_scale=None):
        assert q.shape[3] in (512, 576)
        return np.ones((*q.shape[:3], d_v), np.float32)

    report = judge(wrong, "mla_decode", dtypes=["bfloat16"], head_dims=[512, 576], examples=2, only="decode on drawn")
    (failure,) = report.failures
    spec = eval(failure.batch, {"DecodeSpec": DecodeSpec})
    assert spec.dtype == "bfloat16"
    assert spec.d_qk in (512, 576)


def test_a_device_that_is_not_there_is_refused() -> None:
    pytest.importorskip("torch")
    with pytest.raises(InvalidInput, match="torch has no device 'xla:7' here"):
        judge(decode, framework="torch", device="xla:7")


def test_a_crash_shows_the_line_the_batch_and_the_check() -> None:
    program = """
import ctypes
from ragged_attention.testing import judge

def write(k, v, kv_pages, kv_lens=None, page_indices=None, cu_q_lens=None):
    ctypes.string_at(8)

judge(write, "write_kv_pages", only="write on drawn")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode < 0
    for told in ("line 6 in write", "in WriteSpec(", "in agreement: write on drawn batches"):
        assert told in ended.stderr


def test_torch_and_its_gradients() -> None:
    torch = pytest.importorskip("torch")

    def packed(q, k, v, cu_q_lens, cu_kv_lens, sm_scale=None, causal=False):
        parts = []
        for row, stop, first, end in zip(cu_q_lens, cu_q_lens[1:], cu_kv_lens, cu_kv_lens[1:], strict=False):
            seen = torch.ones(stop - row, end - first, dtype=torch.bool)
            seen = seen.tril(int(len(seen[0]) - len(seen))) if causal else seen
            heads = [array.transpose(0, 1)[None] for array in (q[row:stop], k[first:end], v[first:end])]
            out = torch.nn.functional.scaled_dot_product_attention(
                *heads, attn_mask=seen, scale=sm_scale, enable_gqa=True
            )
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)

    limits: dict[str, Any] = {"framework": "torch", "declines": UNPROMISED, "only": "corner: packed"}
    report = judge(packed, "varlen_attention", gradients=True, **limits)
    report.check()
    answered = {operation for verdict in report.verdicts for operation in verdict.answered}
    assert answered == {"varlen_attention", "varlen_attention_backward"}

    def transposed(q, k, v, cu_q_lens, cu_kv_lens):
        return packed(q, k, v.flip(0), cu_q_lens, cu_kv_lens)

    failed = [verdict.check for verdict in judge(transposed, "varlen_attention", **limits).failures]
    assert "corner: packed, not causal" in failed


def test_jax() -> None:
    jnp = pytest.importorskip("jax.numpy")

    def decode_heads_first(q, k_pages, v_pages, lengths, page_indices, sm_scale=None):
        if isinstance(k_pages, tuple):
            raise NotImplementedError("no scales")
        k, v = (
            array[:, page_indices].reshape(len(array), len(q), -1, array.shape[3]).astype("float32")
            for array in (k_pages, v_pages)
        )
        rows = q.astype("float32").reshape(len(q), len(k), -1, q.shape[2])
        logits = jnp.einsum("skgd,ksnd->skgn", rows, k) * (q.shape[2] ** -0.5 if sm_scale is None else sm_scale)
        seen = (jnp.arange(k.shape[2]) < lengths[:, None])[:, None, None]
        weights = jnp.where(seen, jnp.exp(logits - jnp.where(seen, logits, -1e30).max(-1, keepdims=True)), 0)
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
        v = jnp.where(seen[None, :, 0, 0, :, None], v, 0)  # values that no query sees may be NaN
        return jnp.einsum("skgn,ksnd->skgd", weights, v).reshape(q.shape).astype(q.dtype)

    limits: dict[str, Any] = {"declines": ("invalid indices",), "only": "corner: paged decode, i"}
    report = judge(decode_heads_first, "paged_attention", framework="jax", **limits)
    report.check()
    assert any(verdict.message == "no scales" for verdict in report.verdicts)


MERGE = """
import sys

import numpy as np

given = np.load(sys.argv[1])
if "outs.dtype" in given or "sinks" in given or "out_dtype" in given:
    print("only plain float32 and float16 parts", file=sys.stderr)
    sys.exit(77)
outs, lses = given["outs"].astype(np.float64), given["lses"].astype(np.float64)
highest = np.maximum(lses.max(0, initial=-np.inf), -1e30)
weights = np.exp(lses - highest)
total = weights.sum(0)
out = np.where(weights[..., None] > 0, weights[..., None] * outs, 0).sum(0) / np.where(total, total, 1)[..., None]
np.savez(sys.argv[2], out=out, lse=(np.log(total) if FAULT else highest + np.log(total)))
"""


@pytest.mark.parametrize("fault", [False, True])
def test_a_command_reads_and_writes_npz(fault: bool, tmp_path: Path) -> None:
    program = tmp_path / "merge.py"
    program.write_text(f"FAULT = {fault}\n{MERGE}")
    words = [sys.executable, str(program), "{input}", "{output}"]
    report = judge(words, "merge_attention_states", only="corner: merge", examples=1)
    assert report.passed is not fault, report
    assert any("only plain float32" in verdict.message for verdict in report.verdicts)
    if fault:
        assert "FAILED  corner: merge, " in str(report)
        assert "lse[" in str(report)


def run_command(program: str, **arguments: Any) -> Any:
    return Command((sys.executable, "-c", program, "{input}", "{output}"), "ragged_paged_attention", 20)(**arguments)


def test_a_command_gets_bits_and_names_of_dtypes_that_npz_does_not_have() -> None:
    program = """
import sys
import numpy as np
given = dict(np.load(sys.argv[1]))
assert given["operation"].item() == b"ragged_paged_attention"
assert given["sm_scale"].shape == () and given["sm_scale"] == 0.5
assert given["kv_pages.0"].dtype == np.uint8 and given["kv_pages.1.dtype"].item() == b"float8_e4m3fn"
np.savez(sys.argv[2], **{"out": given["q"], "out.dtype": given["q.dtype"], "lse": np.zeros(3, np.float32)})
"""
    q = np.arange(6).reshape(3, 2).astype(ml_dtypes.bfloat16)
    pages = np.ones((2, 2), ml_dtypes.float8_e4m3fn)
    out, lse = run_command(program, q=q, kv_pages=(pages, pages), sm_scale=0.5)
    assert out.dtype == q.dtype
    assert np.array_equal(out, q)
    assert lse.shape == (3,)


@pytest.mark.parametrize(("program", "error", "match"), [
    ("import sys; sys.exit('out of luck')", AssertionError, "exit status 0, got 1: out of luck"),
    ("import sys; sys.exit(77)", Unsupported, "exit status 77"),
    ("pass", AssertionError, "got no file"),
    ("import sys, numpy; numpy.savez(sys.argv[2], x=1)", AssertionError, "expected out in the output, got x"),
    ("import time; time.sleep(60)", AssertionError, "end within 0.5 s"),
])  # fmt: skip
def test_a_command_that_fails_says_how(program: str, error: type[Exception], match: str) -> None:
    timeout = 0.5 if "sleep" in program else 20
    with pytest.raises(error, match=match):
        Command((sys.executable, "-c", program, "{input}", "{output}"), "ragged_paged_attention", timeout)()


def test_writes_may_happen_in_place_or_return() -> None:
    def write(k, v, kv_pages, slot_mapping):
        if isinstance(kv_pages, tuple) or slot_mapping is None:
            raise NotImplementedError("only combined pages, by slots")
        rows = kv_pages.reshape(-1, *kv_pages.shape[2:])
        inside = (slot_mapping >= 0) & (slot_mapping < len(rows))
        rows[slot_mapping[inside], 0::2], rows[slot_mapping[inside], 1::2] = k[inside], v[inside]

    def returned(k, v, kv_pages, slot_mapping):
        pages = np.array(kv_pages) if isinstance(kv_pages, np.ndarray) else kv_pages
        write(k, v, pages, slot_mapping)
        return pages

    def faulty(k, v, kv_pages, slot_mapping):
        write(v, k, kv_pages, slot_mapping)

    limits: dict[str, Any] = {"dtypes": FLOATS, "examples": 3, "only": "corner: write"}
    for function in (write, returned):
        judge({"write_kv_pages": function}, **limits).check()
    assert judge({"write_kv_pages": faulty}, **limits).failures


@pytest.mark.parametrize(("keywords", "match"), [
    ({"family": "flash"},
     "expected an operation or one of paged, heads_first, mla, indexer, blocks, varlen, got 'flash'"),
    ({"family": "paged"}, "expected a mapping of operations to functions for the family paged"),
    ({"framework": "cupy"}, "expected framework to be numpy, torch or jax, got 'cupy'"),
    ({"declines": ("prompts",)}, "expected declines to be of invalid indices, .*, got 'prompts'"),
    ({"declines": "padding"}, "expected declines to be a list, such as .'padding'., got 'padding'"),
    ({"family": "ragged_paged_atention"}, "did you mean 'ragged_paged_attention'"),
    ({"dtypes": ["bf16"]}, "expected dtypes to be of float32, .*, got 'bf16'"),
    ({"dtypes": "bfloat16"}, "expected dtypes to be a list, such as .'bfloat16'., got 'bfloat16'"),
    ({"features": ["sliding_windw"]}, "expected features to be of .*sliding_window.*, got 'sliding_windw'"),
    ({"page_sizes": 16}, "expected page_sizes to be a list of ints, got 16"),
    ({"head_dims": ["64"]}, "expected head_dims to be a list of ints, got ..64"),
    ({"only": "cornr"}, "expected only to be a part of a check's name, .*, got 'cornr'"),
    ({"only": None}, "expected only to be a part of a check's name, .*, got None"),
    ({"gradients": True}, "expected framework to be torch or jax with gradients=True"),
])  # fmt: skip
def test_what_is_not_known_is_refused(keywords: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidInput, match=match):
        judge(decode, **keywords)


@pytest.mark.parametrize(("kernel", "match"), [
    ("./kernel {input} {output}", "expected a function, a mapping or a list of a command's words, got './kernel"),
    (None, "expected a function, a mapping or a list of a command's words, got None"),
    (["./no_such_kernel", "{input}"], "expected the command to begin with a program that can be run, got './no_such_k"),
    (lambda outs, lses, /: outs, "expected parameters that can be given by keyword, but outs cannot"),
])  # fmt: skip
def test_what_cannot_be_called_is_refused(kernel: Any, match: str) -> None:
    with pytest.raises(InvalidInput, match=match):
        judge(kernel, "merge_attention_states")


@pytest.mark.parametrize(("result", "said"), [(None, "None"), (1.0, "float"), ((1, 2, 3), "3 results")])
def test_results_that_are_none_or_too_few_say_what_to_return(result: Any, said: str) -> None:
    report = judge(lambda outs, lses: result, "merge_attention_states", only="corner: merge, one part")
    assert report.failures
    assert f"expected the function to return out and lse, got {said}" in str(report)


def test_laws_judge_a_kernel_that_declines_empty_sequences() -> None:
    limits: dict[str, Any] = {"page_sizes": [16], "dtypes": ["bfloat16", "float16"], "decode_only": True}
    report = judge(decode, declines=UNPROMISED, examples=10, only="law: pages may move", **limits)
    report.check()
    assert [verdict.taken for verdict in report.verdicts] == [5]


def test_drawn_batches_reach_many_pages_of_one_size() -> None:
    longest = []

    def noted(q, kv_pages, kv_lens, page_indices, sm_scale=None):
        longest.append(int(kv_lens.max()))
        return decode(q, kv_pages, kv_lens, page_indices, sm_scale)

    only = "agreement: attention on drawn"
    judge(noted, decode_only=True, page_sizes=[16], declines=UNPROMISED, dtypes=FLOATS, only=only).check()
    assert max(longest) > 8 * 16


def test_a_causal_kernel_that_takes_nothing_empty_is_judged_by_as_many_batches_as_another() -> None:
    """A kernel that declines empty sequences is judged on as many batches as others.

    Most of the first drawn batches have empty sequences, so more batches are drawn to learn what the kernel supports.
    """

    def causal_only(operation: str, call: Any) -> bool:
        return not call.causal

    def causal(q, k, v, cu_q_lens, cu_kv_lens, causal=True, sm_scale=None):
        out = np.zeros((len(q), q.shape[1], v.shape[2]), np.float32)
        scale = q.shape[2] ** -0.5 if sm_scale is None else sm_scale
        for first, stop, start, end in zip(cu_q_lens, cu_q_lens[1:], cu_kv_lens, cu_kv_lens[1:], strict=False):
            queries = q[first:stop].astype(np.float32).reshape(stop - first, k.shape[1], -1, q.shape[2])
            logits = np.einsum("tkgd,skd->kgts", queries, k[start:end].astype(np.float32)) * scale
            seen = np.tri(stop - first, end - start, end - start - (stop - first), dtype=bool)
            logits = np.where(seen, logits, -np.inf)
            weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            part = np.einsum("kgts,skd->tkgd", weights, v[start:end].astype(np.float32))
            out[first:stop] = part.reshape(stop - first, q.shape[1], -1)
        return out

    limits: dict[str, Any] = {"dtypes": FLOATS, "declines": [*UNPROMISED, "non-finite values", causal_only]}
    report = judge(causal, "varlen_attention", examples=5, only="agreement: packed", **limits)
    report.check()
    taken = {verdict.check.removeprefix("agreement: "): verdict.taken for verdict in report.verdicts}
    unsupported = "packed, max_logits on drawn batches"  # the function returns no max_logits
    assert taken == {"packed on drawn batches": 5, "packed without lse": 1, unsupported: 0}


def test_values_of_another_size_than_keys_may_be_declined() -> None:
    def narrow(q, kv_pages, kv_lens, page_indices, sm_scale=None):
        k_pages, v_pages = kv_pages if isinstance(kv_pages, tuple) else (kv_pages, kv_pages)
        assert k_pages.shape[3] == v_pages.shape[3]
        return decode(q, kv_pages, kv_lens, page_indices, sm_scale)

    limits: dict[str, Any] = {"decode_only": True, "dtypes": FLOATS, "only": "agreement: attention on drawn"}
    judge(narrow, declines=[*UNPROMISED, "other value sizes"], **limits).check()
    assert judge(narrow, declines=UNPROMISED, examples=25, **limits).failures


def test_lists_beyond_the_rows_and_packed_caches_may_be_declined() -> None:
    asked = []

    def noted(q, kv, indices, **others):
        asked.append((kv.dtype.name, bool((indices < np.prod(kv.shape[:-1])).all()), bool((indices >= -1).all())))
        raise NotImplementedError

    limits: dict[str, Any] = {"only": "corner: sparse prefill", "declines": ["invalid indices", "empty batches"]}
    judge(noted, "sparse_mla_prefill", dtypes=FLOATS, **limits)
    assert asked
    assert all(dtype in FLOATS and below and above for dtype, below, above in asked)


def test_a_decode_of_dense_latents_is_judged_by_drawn_batches() -> None:
    """A function without lists is judged on drawn batches, even if it declines some of them because of their values."""

    def dense(q, kv_cache, page_indices, kv_lens, d_v=512, sm_scale=None, causal=False):
        given = {"page_indices": page_indices, "kv_lens": kv_lens, "d_v": d_v, "sm_scale": sm_scale, "causal": causal}
        return mla_decode(q.astype(np.float32), kv_cache.astype(np.float32), **given)

    def another_format(operation: str, call: Any) -> bool:
        return call.kv_cache.dtype != call.q.dtype

    def several_q_tokens(operation: str, call: Any) -> bool:
        return call.q.shape[1] != 1

    def several_kv_heads(operation: str, call: Any) -> bool:
        return call.kv_cache.shape[2] != 1

    def one_of_heads(operation: str, call: Any) -> bool:
        return call.q.shape[2] == 1

    declines = [*UNPROMISED, another_format, several_q_tokens, several_kv_heads, one_of_heads]
    limits: dict[str, Any] = {"dtypes": FLOATS, "only": "latent decode on drawn", "examples": 8}
    (verdict,) = judge(dense, "mla_decode", declines=declines, **limits).verdicts
    assert (verdict.result, verdict.taken) == ("passed", 8)


def test_nan_in_packed_caches_may_be_declined() -> None:
    declines = UNPROMISED_BY_NAME["non-finite values"]
    for poison, expected in ((None, False), ("nan", True)):
        latents = DecodeSpec(format="fp8_v32", topk=2, kv_lens=(5,), page_size=16, poison=poison).build()
        assert declines("mla_decode", latents) is expected
        keys = IndexerSpec(cache_dtype="uint8", spare_columns=1, poison=poison is not None).build()
        assert declines("indexer_logits", keys.logits_call()) is expected


def test_the_line_that_ends_the_process_is_shown(tmp_path: Path) -> None:
    program = tmp_path / "judged.py"
    program.write_text(
        "import ctypes\n"
        "from ragged_attention.testing import judge\n"
        "def merge(outs, lses):\n"
        "    ctypes.string_at(0)\n"
        "judge(merge, 'merge_attention_states', only='corner: merge, one part')\n"
    )
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert ended.returncode < 0
    assert 'judged.py", line 4 in merge' in ended.stderr


def test_nothing_judged_is_not_passed() -> None:
    report = judge(lambda q: q, only="corner: attention, one")
    assert not report.passed
    assert not report.failures
    with pytest.raises(AssertionError, match="does not take"):
        report.check()


def test_memory_and_batch_invariance_are_judged_when_asked_for() -> None:
    def merge(outs, lses):
        weights = np.exp(lses - np.maximum(lses.max(0), -1e30))
        total = weights.sum(0)
        parts = np.where(weights[..., None] > 0, weights[..., None] * outs.astype(np.float32), 0)
        return parts.sum(0) / np.where(total, total, 1)[..., None], np.maximum(lses.max(0), -1e30) + np.log(total)

    report = judge({"merge_attention_states": merge}, memory=True, only="memory", examples=2)
    assert report.passed
    assert len(report.verdicts) == 2
    assert "memory" not in report.left_out
    assert "memory" in judge(decode, only="memory").left_out

    report = judge_decode(decode, only="batch invariant, heads", batch_invariant=True)
    assert not report.verdicts  # the operation was not passed to `judge`


def test_a_recipe_for_a_kernel_of_others_runs() -> None:
    pytest.importorskip("torch")
    from benchmarks.judged.of_torch import RECIPES

    recipe = RECIPES["sdpa"]
    assert recipe.is_installed
    report = judge(recipe.kernel, recipe.operation, **{**recipe.limits, "only": "corner: packed, causal"})
    report.check()
