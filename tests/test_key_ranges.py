"""The helpers that make `key_ranges` in NumPy, torch and jax agree with masks evaluated one key at a time."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ragged_attention import key_ranges as made
from ragged_attention.errors import InvalidInput
from ragged_attention.reference.ragged_paged_attention import ragged_paged_attention, visible

Mask = NDArray[np.bool_]
Sees = Callable[[int, int, int, int], bool]  # (sequence, query position, key position, kv_len) -> visible
LARGEST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences as (q_len, kv_len), then padding rows. Table entries after the live sequences are garbage."""

    lens: tuple[tuple[int, int], ...]
    padding: int = 0
    spare: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(q_len for q_len, _ in self.lens) + self.padding

    @property
    def tables(self) -> dict[str, Any]:
        garbage = [-7, LARGEST, 2, -(2**31)] * self.spare
        q_lens, kv_lens = zip(*self.lens, strict=True) if self.lens else ((), ())
        edges = np.cumsum([0, *q_lens])
        return {
            "cu_q_lens": np.array([*edges, *garbage[: self.spare]], np.int32),
            "kv_lens": np.array([*kv_lens, *garbage[: self.spare]], np.int32),
            "num_tokens": self.num_tokens,
        }

    def masks(self, sees: Sees) -> list[Mask]:
        """The mask of each sequence, [q_len, kv_len]: whether a query sees a key."""
        masks = []
        for seq, (q_len, kv_len) in enumerate(self.lens):
            first = kv_len - q_len
            rows = [[sees(seq, first + row, key, kv_len) for key in range(kv_len)] for row in range(q_len)]
            masks.append(np.array(rows, bool).reshape(q_len, kv_len))
        return masks

    def expect(self, ranges: Any, sees: Sees) -> None:
        ranges, row = np.asarray(ranges), 0
        assert ranges.dtype == np.int32
        assert ranges.shape == (self.num_tokens, ranges.shape[1], 2)
        for (q_len, kv_len), mask in zip(self.lens, self.masks(sees), strict=True):
            own = ranges[row : row + q_len]
            found = visible(q_len, kv_len, np.ones(kv_len, bool), False, None, ranges=own)
            np.testing.assert_array_equal(found, mask)
            row += q_len
        assert not ranges[row:].any()


BATCHES = {
    "decode, chunks, more queries than keys, none of either": Batch(((1, 9), (6, 6), (0, 5), (4, 14), (5, 2), (3, 0))),
    "garbage behind": Batch(((3, 7), (0, 0), (2, 2)), padding=4, spare=2),
    "padding": Batch(((2, 5),), padding=3),
    "no sequence": Batch((), padding=3),
    "no token": Batch(((0, 4), (0, 0))),
    "nothing": Batch(()),
    "one of many": Batch(((30, 47), (47, 30))),
}


def drawn(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    lens = [(int(rng.integers(0, 7)), int(rng.integers(0, 25))) for _ in range(rng.integers(1, 9))]
    return Batch(tuple(lens), *(int(count) for count in rng.integers(0, 4, 2)))


BATCHES |= {f"drawn {seed}": drawn(seed) for seed in range(4)}
every_batch = pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)


def causal(seq: int, position: int, key: int, kv_len: int) -> bool:
    return key <= position


def spans_of(batch: Batch) -> NDArray[np.int32]:
    """Spans [sequences, 3, 2], some of which overlap, are nested, empty or negative, or lie beyond the keys."""
    count = len(batch.lens) + batch.spare
    spans = np.random.default_rng(count).integers(-2, 16, (count, 3, 2), np.int32)
    spans[::2] = np.sort(spans[::2], axis=-1)
    return spans


def prefixes_of(batch: Batch) -> NDArray[np.int32]:
    return np.random.default_rng(3).integers(0, 12, len(batch.lens) + batch.spare, np.int32)


def flags_of(batch: Batch) -> NDArray[np.bool_]:
    return np.arange(len(batch.lens) + batch.spare) % 3 > 0


def in_window(position: int, key: int, window: int | None) -> bool:
    return key <= position and (window is None or key > position - window)


def cases(batch: Batch) -> dict[str, tuple[Callable[..., Any], dict[str, Any], Sees]]:
    """Helpers by name, with their arguments and the predicate of visible keys."""
    spans, prefixes, flags = spans_of(batch), prefixes_of(batch), flags_of(batch)

    def in_span(seq: int, position: int, key: int) -> bool:
        return any(start <= position < stop and start <= key < stop for start, stop in spans[seq].tolist())

    found: dict[str, tuple[Callable[..., Any], dict[str, Any], Sees]] = {"causal": (made.causal_ranges, {}, causal)}
    for window in (1, 3, LARGEST):
        found[f"window {window}"] = (
            made.causal_ranges, {"sliding_window": window}, lambda seq, p, key, n, w=window: in_window(p, key, w),
        )  # fmt: skip
    for left, right in ((None, None), (2, 0), (0, 3), (None, 1), (LARGEST, LARGEST), (1, LARGEST)):
        found[f"{left} left, {right} right"] = (
            made.window_ranges,
            {"left": left, "right": right},
            lambda seq, p, key, n, left=left, right=right: (
                (left is None or key >= p - left) and (right is None or key <= p + right)
            ),
        )
    found["some causal"] = (
        made.per_sequence_causal, {"causal": flags}, lambda seq, p, key, n: key <= p or not flags[seq],
    )  # fmt: skip
    for chunk, lookback in ((1, 0), (4, 0), (3, 2), (LARGEST, 0), (5, LARGEST)):
        found[f"chunks of {chunk}, {lookback} back"] = (
            made.chunked_ranges,
            {"chunk": chunk, "lookback": lookback},
            lambda seq, p, key, n, c=chunk, back=lookback: key <= p and key // c >= p // c - back,
        )
    for block in (1, 4, 7, LARGEST):
        found[f"blocks of {block}"] = (
            made.block_causal_ranges, {"block": block}, lambda seq, p, key, n, b=block: key // b <= p // b,
        )  # fmt: skip
    for prefix in (0, 4, LARGEST, prefixes):
        of = prefix if isinstance(prefix, np.ndarray) else [prefix] * len(batch.lens)
        found[f"prefix {prefix}"] = (
            made.prefix_window_ranges,
            {"prefix": prefix, "sliding_window": 3},
            lambda seq, p, key, n, of=of: key < of[seq] or in_window(p, key, 3),
        )
    for window in (None, 2):
        found[f"spans, window {window}"] = (
            made.span_ranges,
            {"spans": spans, "sliding_window": window},
            lambda seq, p, key, n, w=window: in_window(p, key, w) or in_span(seq, p, key),
        )
    found["spans in a window"] = (
        made.span_ranges,
        {"spans": spans, "sliding_window": 4, "clamp_to_window": True},
        lambda seq, p, key, n: in_window(p, key, 4) or (in_span(seq, p, key) and key > p - 4),
    )
    return found


NAMES = list(cases(BATCHES["padding"]))


@every_batch
@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_ranges_are_the_mask(batch: Batch, number: int) -> None:
    helper, arguments, sees = list(cases(batch).values())[number]
    live = len(batch.lens)
    for num_seqs in ([] if batch.spare else [None]) + [live, np.int32(live), np.array([live], np.int32)]:
        batch.expect(helper(**batch.tables, **arguments, num_seqs=num_seqs), sees)


def test_a_number_of_sequences_ends_the_batch() -> None:
    batch = BATCHES["decode, chunks, more queries than keys, none of either"]
    some = Batch(batch.lens[:2], padding=batch.num_tokens - 7)
    for num_seqs in (2, np.array([2], np.int32)):
        some.expect(made.causal_ranges(**batch.tables, num_seqs=num_seqs), causal)
    batch.expect(made.causal_ranges(**batch.tables, num_seqs=np.array([99], np.int32)), causal)
    Batch((), padding=batch.num_tokens).expect(made.causal_ranges(**batch.tables, num_seqs=0), causal)


def test_positions_near_the_largest_integer() -> None:
    """No sum overflows int32, neither at the largest possible position nor for queries before the first key."""
    tables: Any = {
        "cu_q_lens": np.array([0, 2, 5], np.int32), "kv_lens": np.array([LARGEST, 1], np.int32), "num_tokens": 5,
    }  # fmt: skip
    last = LARGEST - 1  # the position of the last key
    ends = [[last], [last + 1]]
    for helper, arguments, begins in (
        (made.causal_ranges, {}, [0, 0]),
        (made.causal_ranges, {"sliding_window": 4}, [last - 4, last - 3]),
        (made.causal_ranges, {"sliding_window": LARGEST}, [0, 0]),
        (made.window_ranges, {"left": 1, "right": 0}, [last - 2, last - 1]),
        (made.chunked_ranges, {"chunk": 1000}, [last // 1000 * 1000] * 2),
        (made.chunked_ranges, {"chunk": 7, "lookback": LARGEST}, [0, 0]),
    ):
        found = helper(**tables, **arguments)
        np.testing.assert_array_equal(found[:2, 0], np.concatenate([np.array(begins)[:, None], ends], axis=1))
        np.testing.assert_array_equal(found[:4, 0, 1] - found[:4, 0, 0] > 0, [True, True, False, False])
        np.testing.assert_array_equal(found[4, 0], [0, 1])
    everything = [[0, LARGEST]] * 2 + [[0, 0]] * 2 + [[0, 1]]
    np.testing.assert_array_equal(made.block_causal_ranges(**tables, block=LARGEST)[:, 0], everything)
    everything = [[0, LARGEST]] * 2 + [[0, 1]] * 3
    np.testing.assert_array_equal(made.window_ranges(**tables, right=LARGEST)[:, 0], everything)
    np.testing.assert_array_equal(made.per_sequence_causal(**tables, causal=np.zeros(2, bool))[:, 0], everything)
    spans = np.array([[[last - 5, last + 1]], [[0, 1]]], np.int32)
    found = made.span_ranges(**tables, spans=spans, sliding_window=2)
    np.testing.assert_array_equal(found[:2, 0], [[last - 5, last + 1]] * 2)


# ---- frameworks


def as_torch(value: Any, device: str = "cpu") -> Any:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(value).to(device) if isinstance(value, np.ndarray) else value


def as_jax(value: Any) -> Any:
    return pytest.importorskip("jax").numpy.asarray(value) if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
@pytest.mark.parametrize("name", ["garbage behind", "no sequence", "no token"])
def test_torch_gives_what_numpy_gives(name: str, number: int) -> None:
    torch, batch = pytest.importorskip("torch"), BATCHES[name]
    helper, arguments, _ = list(cases(batch).values())[number]
    given = batch.tables | arguments | {"num_seqs": np.array([len(batch.lens)], np.int32)}
    found = helper(**{key: as_torch(value) for key, value in given.items()})
    assert found.dtype == torch.int32
    np.testing.assert_array_equal(found.numpy(), helper(**given))
    elsewhere = helper(**{key: as_torch(value, "meta") for key, value in given.items()})
    assert (elsewhere.device.type, elsewhere.shape) == ("meta", found.shape)  # without reading values


@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
@pytest.mark.parametrize("name", ["garbage behind", "no sequence", "no token"])
@pytest.mark.parametrize("traced", [True, False])
def test_jax_gives_what_numpy_gives(name: str, number: int, traced: bool) -> None:
    jax, batch = pytest.importorskip("jax"), BATCHES[name]
    helper, arguments, _ = list(cases(batch).values())[number]
    given = batch.tables | arguments | {"num_seqs": np.array([len(batch.lens)], np.int32)}
    arrays = {key: as_jax(value) for key, value in given.items() if isinstance(value, np.ndarray)}
    call = functools.partial(helper, **{key: value for key, value in given.items() if key not in arrays})
    with jax.numpy_dtype_promotion("strict"):
        found = (jax.jit(call) if traced else call)(**arrays)
    assert isinstance(found, jax.Array)
    assert found.dtype == np.int32
    assert found.devices() == arrays["kv_lens"].devices()
    np.testing.assert_array_equal(found, helper(**given))


# ---- trees


def random_tree(rng: np.random.Generator, count: int, branching: float) -> NDArray[np.int32]:
    parents = np.arange(-1, count - 1)
    jumps = rng.random(count) < branching
    parents[jumps] = [rng.integers(-1, token) if token else -1 for token in np.flatnonzero(jumps)]
    return parents.astype(np.int32)


def ancestors_of(parents: NDArray[np.int32]) -> Mask:
    """The mask [tokens, tokens] of a tree: a token sees itself, its parent, and so on up to a root."""
    seen = np.zeros((len(parents), len(parents)), bool)
    for token in range(len(parents)):
        at = token
        while at >= 0:
            seen[token, at], at = True, int(parents[at])
    return seen


def runs_of(row: Mask) -> int:
    return int(np.diff(row.astype(int), prepend=0).clip(min=0).sum())


def masked_by(ranges: Any) -> Mask:
    """The mask [tokens, tokens] that the ranges of one sequence give."""
    count = len(ranges)
    return visible(count, count, np.ones(count, bool), False, None, ranges=np.asarray(ranges))


@pytest.mark.parametrize("seed", range(20))
def test_trees_see_their_ancestors(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parents = random_tree(rng, int(rng.integers(1, 60)), rng.choice([0.0, 0.1, 0.3, 0.9]))
    seen = ancestors_of(parents)
    needed = max(map(runs_of, seen))
    if needed > 8:
        with pytest.raises(InvalidInput, match=rf"in at most 8 runs of neighbours, got {needed}$"):
            made.tree_ranges(parents)
        return
    ranges = made.tree_ranges(parents)
    assert (ranges.dtype, ranges.shape) == (np.int32, (len(parents), needed, 2))
    np.testing.assert_array_equal(masked_by(ranges), seen)


def test_rollouts_packed_depth_first_need_few_ranges() -> None:
    """Few ranges suffice for two prompts, if the first has three answers and the last two of these share a prefix."""
    parents = [-1, 0, 1, 2, 3, 4, 3, 6, 7, 7, 9, -1, 11]
    ranges = made.tree_ranges(np.array(parents, np.int32))
    assert ranges.shape == (13, 3, 2)
    assert ranges[5].tolist() == [[0, 6], [0, 0], [0, 0]]
    assert ranges[8].tolist() == [[0, 4], [6, 9], [0, 0]]
    assert ranges[10].tolist() == [[0, 4], [6, 8], [9, 11]]
    assert ranges[12].tolist() == [[11, 13], [0, 0], [0, 0]]


def test_a_tree_of_nothing_and_long_ones() -> None:
    assert made.tree_ranges(np.zeros(0, np.int32)).shape == (0, 1, 2)
    line = made.tree_ranges(np.arange(-1, 100_000 - 1, dtype=np.int32))
    np.testing.assert_array_equal(line[:, 0], np.stack([0 * np.arange(100_000), np.arange(1, 100_001)], axis=1))
    two_in_turns = np.arange(-2, 100_000 - 2, dtype=np.int32).clip(min=-1)
    with pytest.raises(InvalidInput, match=r"expected ancestors in at most 8 runs of neighbours, got 50000$"):
        made.tree_ranges(two_in_turns)


def test_trees_of_other_frameworks() -> None:
    parents = np.array([-1, 0, 0, 2], np.int32)
    torch = pytest.importorskip("torch")
    found = made.tree_ranges(torch.from_numpy(parents))
    assert found.dtype == torch.int32
    np.testing.assert_array_equal(found.numpy(), made.tree_ranges(parents))
    jax = pytest.importorskip("jax")
    found = made.tree_ranges(jax.numpy.asarray(parents))
    assert isinstance(found, jax.Array)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, made.tree_ranges(parents))


def test_a_tree_is_made_outside_jit() -> None:
    jax = pytest.importorskip("jax")
    parents = jax.numpy.array([-1, 0, 0])
    with pytest.raises(InvalidInput, match=r"got a tracer of jax: call tree_ranges outside jax\.jit"):
        jax.jit(made.tree_ranges)(parents)
    ranges = made.tree_ranges(parents)
    assert jax.jit(lambda ranges: ranges + 5)(ranges)[2].tolist() == [[5, 6], [7, 8]]


@pytest.mark.parametrize(("parents", "said"), [
    ([0], r"expected parents\[0\] from -1 to -1, before the token, got 0$"),
    ([-1, 0, 2], r"expected parents\[2\] from -1 to 1, before the token, got 2$"),
    ([-1, -2], r"expected parents\[1\] from -1 to 0, before the token, got -2$"),
])  # fmt: skip
def test_parents_come_before(parents: list[int], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        made.tree_ranges(np.array(parents, np.int32))


# ---- other projects' conventions


@pytest.mark.parametrize("convert", [np.asarray, as_torch, as_jax])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_spans_of_vllm_are_inclusive(convert: Any, dtype: Any) -> None:
    given = np.array([[[2, 5], [7, 7], [0, 0]], [[3, 1], [0, 1], [9, LARGEST]]], dtype)
    if dtype == np.int64 and convert is as_jax:
        return  # jax has no int64 by default
    expected = [[[2, 6], [0, 0], [0, 0]], [[0, 0], [0, 2], [9, LARGEST]]]
    found = np.asarray(made.spans_from_vllm(convert(given)))
    assert found.dtype == np.int32
    assert found.tolist() == expected


@pytest.mark.parametrize("convert", [np.asarray, as_torch, as_jax])
def test_ranges_of_flashinfer_are_inclusive(convert: Any) -> None:
    given = np.array([[[2, 5], [7, 7]], [[-1, -1], [0, LARGEST]], [[4, 3], [0, 0]]], np.int32)
    expected = [[[2, 6], [7, 8]], [[0, 0], [0, LARGEST]], [[0, 0], [0, 1]]]
    found = np.asarray(made.ranges_from_flashinfer(convert(given)))
    assert found.dtype == np.int32
    assert found.tolist() == expected


def test_images_as_vllm_has_them() -> None:
    """vLLM's rule for images holds: a key is visible if causal and in the window, or if both lie in one span."""
    batch = Batch(((12, 12), (3, 9)))
    theirs = np.array([[[2, 5], [8, 8]], [[5, 7], [0, 0]]], np.int32)

    def sees(seq: int, position: int, key: int, kv_len: int) -> bool:
        together = any(
            first < last and first <= position <= last and first <= key <= last for first, last in theirs[seq]
        )
        return (key <= position and key > position - 3) or together

    spans = made.spans_from_vllm(theirs)
    batch.expect(made.span_ranges(**batch.tables, spans=spans, sliding_window=3), sees)


# ---- invalid arguments

TABLES = BATCHES["padding"].tables
SPANS = np.zeros((1, 2, 2), np.int32)


@pytest.mark.parametrize(("helper", "arguments", "error", "said"), [
    (made.causal_ranges, {"cu_q_lens": [0, 2]}, TypeError, "expected cu_q_lens to be an array, got list"),
    (made.causal_ranges, {"cu_q_lens": np.array([0, 2])}, InvalidInput,
     "expected cu_q_lens.dtype to be int32, got int64: convert it once a step, not in every layer"),
    (made.causal_ranges, {"cu_q_lens": np.zeros((1, 2), np.int32)}, InvalidInput,
     "expected cu_q_lens.shape to be [S+1], got [1, 2]"),
    (made.causal_ranges, {"cu_q_lens": np.zeros(0, np.int32), "kv_lens": np.zeros(0, np.int32)}, InvalidInput,
     "expected cu_q_lens to have S+1 >= 1, got 0"),
    (made.causal_ranges, {"kv_lens": np.zeros(2, np.int32)}, InvalidInput,
     "expected kv_lens.shape to be [S] = [1], got [2]"),
    (made.causal_ranges, {"num_tokens": -1}, InvalidInput, "expected num_tokens >= 0, got -1"),
    (made.causal_ranges, {"num_seqs": 2}, InvalidInput, "expected num_seqs between 0 and max_num_seqs=1, got 2"),
    (made.causal_ranges, {"num_seqs": 1.0}, TypeError, "expected num_seqs to be an int or an array, got float"),
    (made.causal_ranges, {"num_seqs": np.zeros(2, np.int32)}, InvalidInput,
     "expected num_seqs to be int32 of shape [1], got int32[2]"),
    (made.causal_ranges, {"sliding_window": 0}, InvalidInput, "expected sliding_window >= 1, got 0"),
    (made.causal_ranges, {"sliding_window": 2.0}, TypeError, "expected sliding_window to be an int, got float"),
    (made.window_ranges, {"left": -1}, InvalidInput, "expected left >= 0, got -1"),
    (made.window_ranges, {"right": 2**31}, InvalidInput, "expected right <= 2147483647, got 2147483648"),
    (made.per_sequence_causal, {"causal": True}, TypeError, "expected causal to be an array, got bool"),
    (made.per_sequence_causal, {"causal": np.ones(2, bool)}, InvalidInput,
     "expected causal.shape to be [S] = [1], got [2]"),
    (made.chunked_ranges, {"chunk": 0}, InvalidInput, "expected chunk >= 1, got 0"),
    (made.chunked_ranges, {"chunk": 4, "lookback": -1}, InvalidInput, "expected lookback >= 0, got -1"),
    (made.block_causal_ranges, {"block": 0}, InvalidInput, "expected block >= 1, got 0"),
    (made.prefix_window_ranges, {"prefix": -1, "sliding_window": 3}, InvalidInput, "expected prefix >= 0, got -1"),
    (made.prefix_window_ranges, {"prefix": np.zeros(2, np.int32), "sliding_window": 3}, InvalidInput,
     "expected prefix.shape to be [S] = [1], got [2]"),
    (made.prefix_window_ranges, {"prefix": 2, "sliding_window": 0}, InvalidInput,
     "expected sliding_window >= 1, got 0"),
    (made.span_ranges, {"spans": SPANS[0]}, InvalidInput,
     "expected spans.shape to be [S, N, 2] = [1, N, 2], got [2, 2]"),
    (made.span_ranges, {"spans": SPANS.astype(np.int64)}, InvalidInput, "expected spans.dtype to be int32, got int64"),
    (made.span_ranges, {"spans": SPANS, "clamp_to_window": 1}, TypeError,
     "expected clamp_to_window to be a bool, got int"),
])  # fmt: skip
def test_what_batches_refuse(helper: Any, arguments: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as raised:
        helper(**TABLES | arguments)
    assert str(raised.value).startswith(said)


def test_arrays_of_torch_do_not_mix_with_others() -> None:
    mixed = TABLES | {"cu_q_lens": as_torch(TABLES["cu_q_lens"])}
    with pytest.raises(TypeError, match="expected kv_lens to be an array like cu_q_lens, got ndarray"):
        made.causal_ranges(**mixed)


@pytest.mark.parametrize(("helper", "array", "said"), [
    (made.tree_ranges, [-1], "expected parents to be an array, got list"),
    (made.tree_ranges, SPANS, "expected parents.shape to be [T], got [1, 2, 2]"),
    (made.spans_from_vllm, [[0, 1]], "expected ranges to be an array, got list"),
    (made.spans_from_vllm, SPANS[0], "expected ranges.shape to be [S, N, 2], got [2, 2]"),
    (made.ranges_from_flashinfer, SPANS[..., :1], "expected ranges.shape to be [T, R, 2], got [1, 2, 1]"),
    (made.ranges_from_flashinfer, SPANS.astype(np.float32), "expected ranges.dtype to be int32 or int64, got float32"),
])  # fmt: skip
def test_what_conversions_refuse(helper: Any, array: Any, said: str) -> None:
    with pytest.raises((InvalidInput, TypeError)) as raised:
        helper(array)
    assert str(raised.value) == said


# ---- attention with the ranges


def paged(batch: Batch) -> dict[str, Any]:
    """Arguments of `ragged_paged_attention` with the batch's lengths."""
    rng, tables = np.random.default_rng(1), batch.tables
    page_size, columns = 4, -(-max((kv_len for _, kv_len in batch.lens), default=0) // 4)
    count = len(batch.lens) + batch.spare
    return {
        "q": rng.standard_normal((tables["num_tokens"], 4, 16)).astype(np.float32),
        "kv_pages": rng.standard_normal((count * columns + 1, page_size, 4, 16)).astype(np.float32),
        "kv_lens": tables["kv_lens"],
        "page_indices": rng.permutation(count * columns).reshape(count, columns).astype(np.int32),
        "cu_q_lens": tables["cu_q_lens"],
        "num_seqs": len(batch.lens),
        "return_lse": True,
    }


def dense(given: dict[str, Any], batch: Batch, sees: Sees) -> tuple[Any, Any]:
    """Out and lse by the masks alone, computed one row and head at a time."""
    q, pages = given["q"].astype(np.float64), given["kv_pages"].astype(np.float64)
    out, lse, row = np.zeros(q.shape), np.full(q.shape[:2], -np.inf), 0
    for seq, mask in enumerate(batch.masks(sees)):
        keys = pages[given["page_indices"][seq]].reshape(-1, *pages.shape[2:])
        for own in mask:
            for head in range(q.shape[1]):
                k, v = keys[: len(own), head // 2 * 2][own], keys[: len(own), head // 2 * 2 + 1][own]
                if own.any():
                    logits = k @ q[row, head] * q.shape[2] ** -0.5
                    lse[row, head] = np.log(np.exp(logits).sum())
                    out[row, head] = np.exp(logits - lse[row, head]) @ v
            row += 1
    return out, lse


@pytest.mark.parametrize("name", ["decode, chunks, more queries than keys, none of either", "garbage behind"])
@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_attention_by_ranges_is_attention_by_the_mask(name: str, number: int) -> None:
    batch = BATCHES[name]
    helper, arguments, sees = list(cases(batch).values())[number]
    given, num_seqs = paged(batch), np.array([len(batch.lens)], np.int32)
    found = front("ragged_paged_attention", given, helper(**batch.tables, **arguments, num_seqs=num_seqs))
    for part, expected in zip(found, dense(given, batch, sees), strict=True):
        np.testing.assert_allclose(part, expected, rtol=2e-6, atol=2e-6)


def front(operation: str, given: dict[str, Any], ranges: Any) -> Any:
    """The results of the public function on `reference`."""
    rt = pytest.importorskip("ragged_attention.torch")
    arguments = {name: as_torch(value) for name, value in (given | {"key_ranges": ranges}).items()}
    return [result.numpy() for result in getattr(rt, operation)(**arguments, backend="reference")]


@every_batch
@pytest.mark.parametrize("window", [None, 1, 4])
def test_ranges_of_a_mask_are_that_mask_in_the_definition(batch: Batch, window: int | None) -> None:
    given = {name: value for name, value in paged(batch).items() if batch.lens or name != "num_seqs"}
    num_seqs = len(batch.lens)
    ranges = made.causal_ranges(**batch.tables, sliding_window=window, num_seqs=num_seqs)
    found = ragged_paged_attention(**given, key_ranges=ranges)
    for part, expected in zip(found, ragged_paged_attention(**given, sliding_window=window), strict=True):
        np.testing.assert_array_equal(part, expected)
