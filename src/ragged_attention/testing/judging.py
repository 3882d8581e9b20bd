"""`judge`: run the suite on a plain function or a command, which need not be a backend package.

    def decode(q, kv_pages, kv_lens, page_indices): ...

    judge(decode, "ragged_paged_attention", decode_only=True).check()

docs/guides/judge_a_kernel.md has an example for each framework.
"""

import collections
import contextlib
import dataclasses
import difflib
import functools
import itertools
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragged_attention.calls import CACHE_FORMATS, CALLS, QUANTIZED
from ragged_attention.errors import InvalidInput
from ragged_attention.reference._indexer import planes
from ragged_attention.testing.drawing import PATHS, Check, examples_of
from ragged_attention.testing.formats import values_of
from ragged_attention.testing.functions import Command, FunctionRunner, positional_only, q_lens_of
from ragged_attention.testing.guarding import guarded
from ragged_attention.testing.mla import latents
from ragged_attention.testing.paged.specs import Arrays
from ragged_attention.testing.progress import Progress
from ragged_attention.testing.reporting import grouped, merged, untested
from ragged_attention.testing.runner import FRAMEWORKS, Absent, Declined, Runner
from ragged_attention.testing.suite import checks
from ragged_attention.testing.verdicts import Verdict, verdict_of

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "paged": (
        "ragged_paged_attention",
        "write_kv_pages",
        "norm_rope_write",
        "merge_attention_states",
        "quantize_kv",
        "dequantize_kv",
    ),
    "heads_first": ("paged_attention", "prefill_attention"),
    "mla": (
        "mla_decode",
        "sparse_mla_prefill",
        "ragged_mla_attention",
        "write_mla_cache",
        "latent_norm_rope_write",
        "quantize_mla_cache",
        "dequantize_mla_cache",
        "page_indices_to_slots",
    ),
    "indexer": ("indexer_logits", "indexer_topk", "top_k_indices", "write_indexer_cache", "quantize_indexer_keys"),
    "blocks": ("block_scores", "select_blocks", "top_k_blocks"),
    "varlen": ("varlen_attention",),
}
FLOATS = ("float32", "float16", "bfloat16", *QUANTIZED, "uint8")  # uint8: packed caches
IDLE = "nothing was judged"  # message of a check without a suitable batch, such as a check of tunables
WIDE = (
    "sinks",
    "alibi_slopes",
    "relative_bias",
    "k_scale",
    "v_scale",
    "q_scale",
    "kv_scale",
    "rope_scale",
    "lses",
    "key_scale",
)  # arguments that are float32 whatever the other dtypes are
FIRST: dict[str, str] = {}  # the first operation that each check calls, by the check's name
Predicate = Callable[[str, Any], bool]  # takes an operation's name and a record of its arguments in NumPy


def _floats(record: Any) -> Iterator[tuple[str, Any]]:
    """The names and arrays of a call's queries, keys, values and caches, without their scales."""
    for name, value in record.arguments().items():
        for array in value[:1] if isinstance(value, tuple) and name != "kv_pages" else _each(value):
            if isinstance(array, np.ndarray) and array.dtype.name in FLOATS and name not in WIDE:
                yield name, array


def _packed(record: Any) -> Iterator[NDArray[Any]]:
    """The dequantised rows of packed latent caches, and the values and scales of packed indexer caches."""
    widths = {layout.token_bytes for layout in CACHE_FORMATS.values()}
    for name in ("kv_cache", "extra_kv_cache", "kv", "cache", "keys"):
        cache = getattr(record, name, None)
        if not isinstance(cache, np.ndarray) or cache.ndim != 4 or cache.dtype.itemsize != 1:
            continue
        cache = cache.view(np.uint8)
        if name == "keys" and cache.shape[3] != record.q.shape[-1]:
            values, scales = planes(cache)
            yield from (values_of(values, "float8_e4m3fn"), scales.copy().view("<f4"))
        elif cache.shape[3] in widths:
            yield latents.rows_of(cache, latents.format_of(cache, None, getattr(record, "cache_layout", None)))


def _has_non_finite_values(operation: str, record: Any) -> bool:
    arrays = itertools.chain((array.astype(np.float32) for _, array in _floats(record)), _packed(record))
    return any(not np.isfinite(array).all() for array in arrays)


def _each(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _has_invalid_indices(operation: str, record: Any) -> bool:
    try:
        record.check_values()
    except InvalidInput:
        return True
    pairs = [(name, getattr(record, name, None)) for name in ("indices", "extra_indices")]
    return any(
        indices is not None and bool(((indices < -1) | (indices >= _num_rows(record, name))).any())
        for name, indices in pairs
    )


def _num_rows(record: Any, name: str) -> int:
    """The number of latent rows that the index lists of a sparse call may refer to."""
    cache = record.kv if hasattr(record, "kv") else getattr(record, name.replace("indices", "kv_cache"))
    return int(np.prod(cache.shape[:-1]))  # sparse calls have one KV head


def _lens(record: Any) -> tuple[Any, Any]:
    """The number of queries and the number of keys of each live sequence; None for lengths that the call lacks."""
    queries = q_lens_of(record) if getattr(record, "cu_q_lens", None) is not None else None
    lens = getattr(record, "kv_lens", getattr(record, "lengths", getattr(record, "length", None)))
    if (edges := getattr(record, "cu_kv_lens", None)) is not None:
        lens = np.diff(edges)
    keys = None if lens is None else np.atleast_1d(lens)
    return queries, keys if keys is None or queries is None else keys[: len(queries)]


def _has_empty_sequences(operation: str, record: Any) -> bool:
    return any(each is not None and bool((each < 1).any()) for each in _lens(record))


def _has_more_queries_than_keys(operation: str, record: Any) -> bool:
    queries, keys = _lens(record)
    return queries is not None and keys is not None and bool((queries > keys).any())


def _has_padding(operation: str, record: Any) -> bool:
    edges = {"cu_q_lens": "q", "cu_kv_lens": "k"}
    return any(
        (edge := getattr(record, name, None)) is not None
        and hasattr(record, rows)
        and int(edge[: len(_lens(record)[0]) + 1][-1]) < len(getattr(record, rows))
        for name, rows in edges.items()
    )


def _has_other_value_size(operation: str, record: Any) -> bool:
    """Whether values and keys have different head dims. MLA latents hold keys and values, and do not count."""
    pages = getattr(record, "kv_pages", None)
    pairs = [(getattr(record, k, None), getattr(record, v, None)) for k, v in (("k", "v"), ("k_pages", "v_pages"))]
    pairs += [pages] if isinstance(pages, tuple) else []
    return any(k is not None and v is not None and k.shape[-1] != v.shape[-1] for k, v in pairs)


def _is_empty(operation: str, record: Any) -> bool:
    arrays = [array for value in record.arguments().values() for array in _each(value)]
    return any(isinstance(array, np.ndarray) and not array.size for array in arrays)


# Inputs that other people's kernels often do not support, by the names that `declines` accepts.
UNPROMISED: Mapping[str, Predicate] = {
    "invalid indices": _has_invalid_indices,
    "padding": _has_padding,
    "empty batches": _is_empty,
    "empty sequences": _has_empty_sequences,
    "more queries than keys": _has_more_queries_than_keys,
    "non-finite values": _has_non_finite_values,
    "combined pages": lambda _, record: isinstance(getattr(record, "kv_pages", None), np.ndarray),
    "pages in a pair": lambda _, record: isinstance(getattr(record, "kv_pages", None), tuple),
    "other value sizes": _has_other_value_size,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the calls that a function supports, beyond those that its parameters show. None means no limit."""

    features: Collection[str] | None = None
    dtypes: Collection[str] | None = None
    page_sizes: Collection[int] | None = None
    head_dims: Collection[int] | None = None
    decode_only: bool = False
    declines: Sequence[str | Predicate] = ()

    def why_not(self, operation: str, record: Any) -> str | None:
        """The reason why a call exceeds the features, dtypes, sizes or `decode_only`, or None."""
        changed = [name for name in record.changed() if not record.KINDS[name].hint and name != "return_lse"]
        if self.features is not None and (other := [name for name in changed if name not in self.features]):
            return f"{other[0]} is not among the features"
        if self.dtypes is not None and (
            other := sorted({array.dtype.name for _, array in _floats(record)} - {*self.dtypes})
        ):
            return f"expected dtypes of {', '.join(self.dtypes)}, got {other[0]}"
        for name, size, allowed in (
            ("page_size", getattr(record, "page_size", None), self.page_sizes),
            ("head_dim", getattr(record, "head_dim", None), self.head_dims),
        ):
            if size is not None and allowed is not None and size not in allowed:
                return f"expected {name} to be one of {', '.join(map(str, allowed))}, got {size}"
        if self.decode_only and getattr(record, "cu_q_lens", None) is not None and (q_lens_of(record) != 1).any():
            return "expected one query for each sequence (decode_only)"
        return None

    def declined(self, operation: str, record: Any) -> str | None:
        """The reason why `declines` excludes a call, or None."""
        # Functions come first, because most look at shapes. Most named predicates look at values, which the search in
        # `steering` cannot choose.
        for each in sorted(self.declines, key=lambda each: isinstance(each, str)):
            predicate = UNPROMISED[each] if isinstance(each, str) else each
            if predicate(operation, record):
                return f"declines {each if isinstance(each, str) else each.__name__}"
        return None


@dataclasses.dataclass(frozen=True)
class Report:
    """The suite's verdicts on a function. Its `str` is a table with the failures."""

    name: str
    verdicts: tuple[Verdict, ...]  # one for each check of the given operations
    left_out: Mapping[str, str]  # kinds of checks that were not run, each with the reason
    framework: str = "numpy"  # the framework of the arrays that the function got

    @property
    def failures(self) -> tuple[Verdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict.result == "FAILED")

    @property
    def passed(self) -> bool:
        """Whether at least one check passed and none failed."""
        return not self.failures and any(verdict.result == "passed" for verdict in self.verdicts)

    def check(self) -> None:
        """Raise AssertionError, with the report as its text, unless the function passed."""
        if not self.passed:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        counts = collections.Counter(verdict.result for verdict in self.verdicts)
        lines = [f"{self.name}: " + ", ".join(f"{counts[each]} {each}" for each in ("passed", "declined", "FAILED"))]
        for kind, same in self._by_kind().items():
            taken, seconds = sum(each.taken for each in same), sum(each.seconds for each in same)
            results = collections.Counter(each.result for each in same)
            row = ", ".join(f"{count} {result}" for result, count in results.items())
            lines.append(f"  {kind:10} {row}; {taken} batches in {seconds:.1f} s")
        lines += untested(self.verdicts)
        reasons = collections.Counter(each.message for each in self.verdicts if each.result == "declined")
        lines += [f"  declined, {count} checks: {reason}" for reason, count in reasons.most_common()]
        lines += [f"  left out, {what}: {reason}" for what, reason in self.left_out.items()]
        for cause, group in grouped(self.verdicts).items():
            lines += ["", f"{len(group)} failed: {cause}"]
            for failure in group:
                lines += [f"FAILED  {failure.check}", *(f"  {line}" for line in failure.message.splitlines())]
                lines += [f"  smallest batch: {failure.batch}"] if failure.batch else []
                lines += [f"  likely causes: {'; '.join(merged(failure.causes))}"] if failure.causes[1:] else []
        if any(failure.batch for failure in self.failures):
            gets = f"arguments_of(Spec(...), {self.framework!r})"
            lines += ["", f"The arguments that it got for a batch: ragged_attention.testing.{gets}"]
        return "\n".join(lines)

    def _by_kind(self) -> dict[str, list[Verdict]]:
        kinds: dict[str, list[Verdict]] = {}
        for verdict in self.verdicts:
            kinds.setdefault(verdict.check.partition(":")[0], []).append(verdict)
        return kinds


def judge(
    kernel: Callable[..., Any] | Mapping[str, Callable[..., Any]] | Sequence[str],
    family: str = "ragged_paged_attention",
    *,
    framework: str = "numpy",
    features: Collection[str] | None = None,
    dtypes: Collection[str] | None = None,
    page_sizes: Collection[int] | None = None,
    head_dims: Collection[int] | None = None,
    decode_only: bool = False,
    declines: Sequence[str | Predicate] = (),
    contiguous: bool = False,
    gradients: bool = False,
    batch_invariant: bool = False,
    rounded_weights: bool = False,
    memory: bool = False,
    device: str | None = None,
    examples: int | None = None,
    only: str = "",
    timeout: float = 60.0,
    progress: bool | None = None,
) -> Report:
    """Test a function, a mapping of operations to functions, or a command with the suite, and return a report.

    A function gets the operation's arguments by their public names: those without a default, and those whose value is
    not the default. It returns `out`, or all results of the operation in order; the reference fills in missing ones. It
    declines a batch by raising `Unsupported` or `NotImplementedError`, or by lacking a parameter that the batch needs.
    A function that writes an argument may return it, or return None after writing in place.

    Args:
        kernel: a function; a mapping of operations to functions; or the words of a command, in which `{input}`,
            `{output}` and `{operation}` are filled in.
        family: the operation that the function or the command computes; or, for a command that computes all operations
            of a family, `paged`, `heads_first`, `mla`, `indexer`, `blocks` or `varlen`. Ignored for a mapping.
        framework: the kind of arrays that a function gets: "numpy", "torch" or "jax". In NumPy, bfloat16 and 8-bit
            floats have the dtypes of `ml_dtypes`. A command's .npz file holds their bits as uint16 or uint8, and the
            dtype's name as `<name>.dtype`.
        features: the optional arguments that the kernel supports, such as `sliding_window` (default: a function's
            parameters; for a command, all). A command gets `return_lse` and `new_kv` only if `features` has them.
        dtypes: the float and cache dtypes that the kernel supports, such as `bfloat16` (default: any).
        page_sizes, head_dims: the sizes that the kernel supports (default: any).
        decode_only: whether the kernel supports only one query per sequence; then it may lack `cu_q_lens`.
        declines: further batches that the kernel does not support: names in `UNPROMISED`, or functions that take the
            operation's name and a record of its arguments, and return a bool.
        contiguous: whether all torch tensors are contiguous; otherwise some are views with gaps or have strides of 0.
        gradients: whether torch or jax can differentiate the function; its gradients are then tested too.
        batch_invariant: whether the kernel promises that a sequence's results have the same bits in every batch.
        rounded_weights: whether softmax weights may be rounded to the dtype of 16-bit queries before the product with
            values, as kernels on matrix units do. If values cancel, the error may exceed the usual tolerances.
        memory: whether to try any int32 in every index array, in guarded memory. If a function accesses memory outside
            its arrays, this process dies; if a command does, only the command dies.
        device: a torch device.
        examples: the number of batches drawn for each check (default: by HYPOTHESIS_PROFILE, or 25 if it is unset).
        only: run only checks whose name contains this text, such as `law: `.
        timeout: the time limit of a command for one batch, in seconds.
        progress: whether to write a line to standard error every 10 seconds (default: yes, except under pytest).

    Raises InvalidInput for an unknown name, and for a command that cannot be run.
    """
    functions = _functions(kernel, family, timeout)
    if framework not in ("numpy", *FRAMEWORKS):
        raise InvalidInput(f"expected framework to be numpy, torch or jax, got {framework!r}")
    _expect_known(functions, features, dtypes, page_sizes, head_dims, declines)
    if gradients and framework == "numpy":
        raise InvalidInput("expected framework to be torch or jax with gradients=True, got 'numpy'")
    limits = Limits(
        features=features, dtypes=dtypes, page_sizes=page_sizes, head_dims=head_dims, decode_only=decode_only,
        declines=declines,
    )  # fmt: skip
    name = _name(kernel, family)
    runner = FunctionRunner(
        framework=framework, backend=name, device=device, functions=functions, why_not=limits.why_not,
        declines=limits.declined, contiguous=contiguous, differentiable=gradients, invariant=batch_invariant,
        rounded_weights=rounded_weights, features=features,
    )  # fmt: skip
    if reason := runner.absent():
        raise InvalidInput(reason)
    selected_checks = [check for check in checks() if only in str(check)] if isinstance(only, str) else []
    if not selected_checks:
        raise InvalidInput(f"expected only to be a part of a check's name, such as 'corner: ' or 'law: ', got {only!r}")
    absent: set[str] = set()
    under_pytest = "PYTEST_CURRENT_TEST" in os.environ
    shown = Progress(len(selected_checks)) if (not under_pytest if progress is None else progress) else None
    verdicts = list(_verdicts(runner, selected_checks, examples or examples_of(), memory, absent, shown))
    judged = [each for each in verdicts if each.check not in absent and each.message != IDLE]
    left_out = {
        "every path": "a function has no options",
        "batch invariance": "" if batch_invariant else "batch_invariant=True tests it",
        "gradients": "" if gradients else "gradients=True tests them",
        "memory": "" if memory else "memory=True tests it",
        **dict.fromkeys(sorted(runner.not_returned), "the function does not return it"),
    }
    reasons = {what: reason for what, reason in left_out.items() if reason}
    return Report(name, tuple(judged), reasons, framework)


def _verdicts(
    runner: FunctionRunner, selected: Sequence[Check], examples: int, memory: bool, absent: set[str],
    progress: Progress | None,
) -> Iterator[Verdict]:  # fmt: skip
    """Yield the verdicts of the checks that concern the runner. Add to `absent` the checks that lack an operation."""
    for done, check in enumerate(selected):
        if progress:
            progress.say(done, f"{runner.backend}  {check}")
        if (memory or check.kind != "memory") and _concerns(runner, check):
            for where in _guarded(runner) if check.kind == "memory" else (runner,):
                yield verdict_of(where, _noting(check, absent), examples)


def _expect_known(
    functions: Mapping[str, Any], features: Any, dtypes: Any, page_sizes: Any, head_dims: Any, declines: Any
) -> None:
    """Raise InvalidInput for a misspelt limit, or one of the wrong type, because it would decline every batch."""
    arguments = sorted({name for operation in functions for name in (*CALLS[operation].KINDS, "return_lse")})
    known = {"features": (features, arguments), "dtypes": (dtypes, FLOATS), "declines": (declines, UNPROMISED)}
    for name, (limit, names) in known.items():
        if isinstance(limit, str):
            raise InvalidInput(f"expected {name} to be a list, such as [{limit!r}], got {limit!r}")
        for each in limit or ():
            if each not in names and not (name == "declines" and callable(each)):
                raise InvalidInput(f"expected {name} to be of {', '.join(names)}, got {each!r}")
    for name, sizes in (("page_sizes", page_sizes), ("head_dims", head_dims)):
        if sizes is not None and not (isinstance(sizes, Collection) and all(isinstance(each, int) for each in sizes)):
            raise InvalidInput(f"expected {name} to be a list of ints, got {sizes!r}")


def _functions(kernel: Any, family: str, timeout: float) -> dict[str, Callable[..., Any]]:
    if isinstance(kernel, Mapping):
        names, functions = tuple(kernel), dict(kernel)
    else:
        names = FAMILIES.get(family, (family,))
        if not callable(kernel):
            _expect_command(kernel)
            functions = {name: Command(tuple(kernel), name, timeout) for name in names}
        elif len(names) > 1:
            raise InvalidInput(f"expected a mapping of operations to functions for the family {family}, got a function")
        else:
            functions = dict.fromkeys(names, kernel)
    if unknown := [name for name in names if name not in CALLS]:
        close = difflib.get_close_matches(unknown[0], [*CALLS, *FAMILIES], 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InvalidInput(f"expected an operation or one of {', '.join(FAMILIES)}, got {unknown[0]!r}{hint}")
    for name, function in functions.items():
        if names := positional_only(function):
            raise InvalidInput(f"{name}: expected parameters that can be given by keyword, but {names[0]} cannot")
    return functions


def _expect_command(kernel: Any) -> None:
    if isinstance(kernel, str) or not isinstance(kernel, Sequence) or not kernel:
        raise InvalidInput(f"expected a function, a mapping or a list of a command's words, got {kernel!r}")
    if shutil.which(kernel[0]) is None:
        raise InvalidInput(f"expected the command to begin with a program that can be run, got {kernel[0]!r}")


def _name(kernel: Any, family: str) -> str:
    if isinstance(kernel, Mapping):
        return ", ".join(kernel)
    return getattr(kernel, "__name__", family) if callable(kernel) else str(kernel[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OperationRecorder(Runner):
    """A runner without a backend, which records the operations that a check calls first."""

    asked: list[str] = dataclasses.field(default_factory=list)

    def _call(self, operation: str, batch: Arrays, options: Any, **extra: Any) -> Any:
        self._expect_offered(operation)

    def _bring(self, batch: Any, name: str, value: Any) -> Any:
        return value

    def _expect_offered(self, operation: str) -> None:
        self.asked.append(operation)
        raise Absent("only asked")

    def expect_promise(self, operation: str) -> None:
        self._expect_offered(operation)

    def tunables(self, operation: str) -> tuple[str, ...]:
        return tuple({name for options in PATHS.get(operation, ()) for name in options})


def _concerns(runner: FunctionRunner, check: Check) -> bool:
    """Whether the first operation that a check calls is one of the runner's, or is unknown."""
    return check.kind == "memory" or _first_operation(check).removesuffix("_backward") in {*runner.functions, ""}


def _first_operation(check: Check) -> str:
    """The operation that a check calls first, cached for the process; "" if it is unknown."""
    name = str(check)
    if name not in FIRST:
        recorder = _OperationRecorder(framework="numpy", backend="")
        with contextlib.suppress(Declined):
            check.run(recorder, 1)
        FIRST[name] = recorder.asked[0] if recorder.asked else ""
    return FIRST[name]


def _noting(check: Check, absent: set[str]) -> Check:
    """The check, modified to add its name to `absent` if it needs an operation that was not given."""

    def run(runner: Runner, examples: int) -> int:
        try:
            return check.run(runner, examples)
        except Absent:
            absent.add(str(check))
            raise

    return dataclasses.replace(check, run=run)


def _guarded(runner: FunctionRunner) -> Iterator[FunctionRunner]:
    for side in ("end", "start"):
        yield dataclasses.replace(runner, place=functools.partial(guarded, side=side))
