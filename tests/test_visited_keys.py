"""The Triton kernels load exactly the blocks of keys that key ranges or block lists require.

Loads are recorded in Triton's interpreter. A load without a mask belongs to an unmasked loop. A program's query rows
are those that it loads, so these tests depend neither on the numbering of programs nor on functions of the kernels.
Tile sizes are fixed and products are in float32, so each visited block costs the same number of products.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ragged_attention import key_ranges as made
from ragged_attention.testing.compare import agrees

torch = pytest.importorskip("torch")
interpreter = pytest.importorskip("triton.runtime.interpreter")

import ragged_attention.torch as front  # noqa: E402

Sees = NDArray[np.bool_]
LENS = ((70, 230), (1, 200), (3, 150))  # a prompt and two short sequences
Q_EDGES, KEY_EDGES = (np.cumsum([0, *lens]).astype(np.int32) for lens in zip(*LENS, strict=True))
KV_LENS = np.diff(KEY_EDGES)
TABLES = Q_EDGES, KV_LENS, int(Q_EDGES[-1])
BLOCK, EDGE = 32, 16  # keys per unmasked block and per masked block
GROUP, WIDTH, PAGE_SIZE = 2, 16, 16
SPANS = np.array([[[40, 130], [180, 210]]] * len(LENS), np.int32)


def two_apart() -> NDArray[np.int32]:
    """Two ranges per query, with more than a block between them. Their edges differ from query to query."""
    shift = np.arange(TABLES[2]) % 7
    return np.stack([3 + shift, 70 - shift, 130 + shift, 200 - shift], 1).reshape(-1, 2, 2).astype(np.int32)


def alternating() -> NDArray[np.int32]:
    """The ranges of `two_apart`, in an order that alternates from query to query."""
    ranges = two_apart()
    ranges[1::2] = ranges[1::2, ::-1]
    return ranges


MASKS: dict[str, Callable[[], NDArray[np.int32]]] = {
    "causal": lambda: made.causal_ranges(*TABLES),
    "chunks": lambda: made.chunked_ranges(*TABLES, chunk=90),
    "prefix and window": lambda: made.prefix_window_ranges(*TABLES, prefix=40, sliding_window=70),
    "spans": lambda: made.span_ranges(*TABLES, spans=SPANS),
    "two ranges apart": two_apart,
    "two ranges in turn": alternating,
}
GAPS = ("two ranges in turn",)  # masks for which a tile also visits the keys between two ranges, without loading them
HALVES = ("chunks",)  # masks whose tiles may have half blocks, because rows at a chunk's edge may share no key


# ---- recorded loads


def no_rows() -> dict[str, collections.Counter[int]]:
    return {"q": collections.Counter(), "k": collections.Counter()}


@dataclasses.dataclass
class Program:
    """A program's loads: how often it loads each row of an array, without and with a mask."""

    unmasked: dict[str, collections.Counter[int]] = dataclasses.field(default_factory=no_rows)
    masked: dict[str, collections.Counter[int]] = dataclasses.field(default_factory=no_rows)
    products: int = 0

    def rows(self, name: str) -> NDArray[np.int64]:
        """The loaded rows of an array, sorted."""
        return np.array(sorted(self.unmasked[name] + self.masked[name]), np.int64)


def by_default() -> dict[Any, Program]:
    return collections.defaultdict(Program)


class Recorder:
    """Records the loads of each kernel's programs from arrays with contiguous rows."""

    def __init__(self) -> None:
        self.kernel, self.has_mask = "", True
        self.arrays: dict[str, Any] = {}
        self.programs: dict[str, dict[Any, Program]] = collections.defaultdict(by_default)

    def watch(self, **arrays: Any) -> None:
        """Record the loads from these arrays; the last axis of each is a row."""
        self.arrays = arrays

    def loaded(self, program: Any, pointers: Any, mask: Any) -> None:
        addresses = np.asarray(pointers.data)[np.asarray(mask.data)]
        for name, array in self.arrays.items():
            row = array.shape[-1] * array.element_size()
            places = addresses.astype(np.int64) - array.data_ptr()
            first_columns = places[(places >= 0) & (places < array.nbytes) & (places % row == 0)]
            found = self.programs[self.kernel][program]
            (found.masked if self.has_mask else found.unmasked)[name].update((first_columns // row).tolist())


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    plain_load, load, dot, run = (
        builder.create_load, builder.create_masked_load, builder.create_dot, executor.__call__,
    )  # fmt: skip

    def load_without_mask(self: Any, *arguments: Any) -> Any:
        recorder.has_mask = False
        try:
            return plain_load(self, *arguments)  # which itself calls the masked load
        finally:
            recorder.has_mask = True

    def recorded_load(self: Any, pointers: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        recorder.loaded(tuple(self.grid_idx), pointers, mask)
        return load(self, pointers, mask, *rest, **more)

    def counted_dot(self: Any, *arguments: Any) -> Any:
        recorder.programs[recorder.kernel][tuple(self.grid_idx)].products += 1
        return dot(self, *arguments)

    def recorded_run(self: Any, *arguments: Any, **more: Any) -> Any:
        recorder.kernel = self.fn.__name__
        return run(self, *arguments, **more)

    monkeypatch.setattr(builder, "create_load", load_without_mask)
    monkeypatch.setattr(builder, "create_masked_load", recorded_load)
    monkeypatch.setattr(builder, "create_dot", counted_dot)
    monkeypatch.setattr(executor, "__call__", recorded_run)
    return recorder


# ---- visibility by ranges


def seen_by_ranges(ranges: NDArray[np.int32]) -> NDArray[np.bool_]:
    """The mask [R, queries, keys]: whether a query sees a packed key in range R."""
    count = ranges.shape[1]
    seen = np.zeros((count, TABLES[2], int(KEY_EDGES[-1])), bool)
    for (start, stop), (first, last) in zip(itertools.pairwise(Q_EDGES), itertools.pairwise(KEY_EDGES), strict=True):
        key = np.arange(last - first)
        for index in range(count):
            begin, end = ranges[start:stop, index].T[..., None]
            seen[index, start:stop, first:last] = (begin <= key) & (key < end)
    return seen


def blocks_of(rows: NDArray[np.int64], size: int) -> set[int]:
    return set((rows // size).tolist())


def expect_visits(
    program: Program, streamed: str, origin: int, seen: NDArray[np.bool_], sizes: tuple[int, int], unmasked: bool
) -> int:
    """Check a program's loads of the array `streamed`, and return the number of blocks that it visits.

    `seen` [R, own rows, streamed rows] is the mask of the program's own rows over a sequence's streamed rows, the first
    of which is `origin`. `sizes` are the rows per unmasked block and per masked block.
    """
    whole_size, size = sizes
    whole, masked = (each[streamed] for each in (program.unmasked, program.masked))
    assert all(count == 1 for count in (whole + masked).values()), "rows that are loaded twice"
    some, length = seen.any((0, 1)), seen.shape[2]
    whole_rows = np.array(sorted(whole), np.int64) - origin
    assert np.all((whole_rows >= 0) & (whole_rows < length)), "loads without a mask of rows beyond the sequence"
    assert np.any(seen, axis=0)[:, whole_rows].all(), "loads without a mask of rows that some do not see"
    by_all = np.zeros(-(-length // whole_size) * whole_size, bool)
    by_all[:length] = seen.all(1).any(0)  # keys that all rows see in the same range
    wanted = {int(block) for block in np.flatnonzero(by_all.reshape(-1, whole_size).all(1))} if unmasked else set()
    assert blocks_of(whole_rows, whole_size) == wanted, "expected no mask for exactly the blocks that all rows see"
    assert len(whole) == len(wanted) * whole_size, "expected all rows of blocks without a mask"
    rest = np.flatnonzero(some & ~np.isin(np.arange(length) // whole_size, sorted(wanted)))
    masked_rows = np.array(sorted(masked), np.int64) - origin
    assert blocks_of(masked_rows, size) == blocks_of(rest, size), "expected exactly the blocks that some rows see"
    assert set(rest.tolist()) <= set(masked_rows.tolist())
    return len(wanted) + len(blocks_of(rest, size))


def expect_equal_cost(programs: dict[Any, Program], visits: dict[Any, int], name: str) -> None:
    """Check that all visited blocks cost equally many products, and that programs without visits compute none."""
    if name in GAPS:
        return
    costs = {programs[index].products / count for index, count in visits.items() if count}
    allowed = {min(costs), 2 * min(costs)} if name in HALVES else {min(costs)}
    assert costs <= allowed, f"products per visited block: {sorted(costs)}"
    assert not any(programs[index].products for index, count in visits.items() if not count)


def sequence_of(row: int, edges: NDArray[np.int32]) -> int:
    return int(np.searchsorted(edges, row, "right")) - 1


def expect_keys(
    recorder: Recorder, kernel: str, ranges: NDArray[np.int32], sizes: tuple[int, int] = (BLOCK, BLOCK),
    *, heads: int = GROUP, unmasked: bool = True, of_slot: Callable[[int], int] = int,
) -> dict[Any, int]:  # fmt: skip
    """The number of blocks that each program of a kernel visits, after a check of its loads. Programs own query rows.

    `of_slot` gives the packed key of a row of `keys`.
    """
    seen, programs, visits = seen_by_ranges(ranges), recorder.programs[kernel], {}
    for index, program in programs.items():
        for loads in (program.unmasked, program.masked):
            loads["k"] = collections.Counter({of_slot(row): count for row, count in loads["k"].items()})
        queries = np.unique(program.rows("q") // heads)
        if len(queries) == 0:
            assert len(program.rows("k")) == 0
            continue
        seq = sequence_of(queries[0], Q_EDGES)
        first, last = KEY_EDGES[seq : seq + 2]
        visits[index] = expect_visits(program, "k", first, seen[:, queries, first:last], sizes, unmasked)
    assert any(visits.values())
    return visits


def expect_rows(recorder: Recorder, ranges: NDArray[np.int32]) -> dict[Any, int]:
    """The result of `expect_keys` for the gradient of keys, whose programs own keys and visit blocks of query rows."""
    seen, programs, visits = seen_by_ranges(ranges), recorder.programs["dkv_kernel"], {}
    for index, program in programs.items():
        keys = program.rows("k")
        if len(keys) == 0:
            assert len(program.rows("q")) == 0
            continue
        seq = sequence_of(keys[0], KEY_EDGES)
        first, last = Q_EDGES[seq : seq + 2]
        rows = np.repeat(seen[:, first:last, keys].swapaxes(1, 2), GROUP, axis=2)
        visits[index] = expect_visits(program, "q", first * GROUP, rows, (EDGE, EDGE), True)
    assert any(visits.values())
    return visits


# ---- calls


def drawn(*shape: int) -> Any:
    return torch.from_numpy(np.random.default_rng(len(shape)).standard_normal(shape, np.float32))


def paged(width: int, heads: int) -> tuple[dict[str, Any], Callable[[int], int], tuple[int, ...]]:
    """Arguments with shuffled pages, a function from a page row to its packed key (or -1), and the pages' shape."""
    counts = -(-KV_LENS // PAGE_SIZE)
    order = np.random.default_rng(0).permutation(int(counts.sum())).astype(np.int32)
    table = np.full((len(LENS), int(counts.max())), -1, np.int32)
    for seq, start in enumerate(np.cumsum(counts) - counts):
        table[seq, : counts[seq]] = order[start : start + counts[seq]]
    places = {
        int(table[seq, position // PAGE_SIZE]) * PAGE_SIZE + position % PAGE_SIZE: first + position
        for seq, first in enumerate(KEY_EDGES[:-1].tolist())
        for position in range(KV_LENS[seq])
    }
    arguments = {
        "q": drawn(TABLES[2], heads, width), "kv_lens": torch.from_numpy(KV_LENS),
        "page_indices": torch.from_numpy(table), "cu_q_lens": torch.from_numpy(Q_EDGES),
    }  # fmt: skip
    return arguments, lambda row: places.get(row, -1), (len(order), PAGE_SIZE, 1, width)


def packed() -> dict[str, Any]:
    keys = int(KEY_EDGES[-1])
    return {
        "q": drawn(TABLES[2], GROUP, WIDTH), "k": drawn(keys, 1, WIDTH), "v": drawn(keys, 1, WIDTH),
        "cu_q_lens": torch.from_numpy(Q_EDGES), "cu_kv_lens": torch.from_numpy(KEY_EDGES),
    }  # fmt: skip


def run_paged(recorder: Recorder, mask: dict[str, Any]) -> Callable[[int], int]:
    """Check paged attention over separate K and V pages; returns a function from a row of K to its packed key."""
    arguments, of_slot, shape = paged(WIDTH, GROUP)
    k_pages, v_pages = drawn(*shape), drawn(*shape)
    recorder.watch(q=arguments["q"], k=k_pages)
    options = {
        "block_q": 32, "block_kv": BLOCK, "edge_kv": EDGE, "split_block_q": 16, "split_block_kv": EDGE,
        "num_splits": 1, "split_weights_below": 0,
    }  # fmt: skip
    given: dict[str, Any] = arguments | {"kv_pages": (k_pages, v_pages)} | mask
    out = front.ragged_paged_attention(**given, backend="triton", options=options)
    recorder.watch()
    agrees(out, front.ragged_paged_attention(**given, backend="reference"), "float32")
    return of_slot


def run_latent(recorder: Recorder, mask: dict[str, Any], heads: int) -> Callable[[int], int]:
    arguments, of_slot, shape = paged(48, heads)
    cache = drawn(*shape)
    recorder.watch(q=arguments["q"], k=cache)
    options = {
        "block_h": 16, "block_kv": BLOCK, "split_block_h": 16, "split_block_kv": BLOCK, "num_splits": 1,
    }  # fmt: skip
    given: dict[str, Any] = arguments | {"kv_cache": cache, "d_v": 32} | mask
    out = front.ragged_mla_attention(**given, backend="triton", options=options)
    recorder.watch()
    agrees(out, front.ragged_mla_attention(**given, backend="reference"), "float32")
    return of_slot


def run_packed(recorder: Recorder, mask: dict[str, Any]) -> None:
    given: dict[str, Any] = packed() | mask
    recorder.watch(q=given["q"], k=given["k"])
    out = front.varlen_attention(**given, backend="triton", options={"block_q": 32, "block_kv": BLOCK})
    recorder.watch()
    agrees(out, front.varlen_attention(**given, backend="reference"), "float32")


def run_gradient(recorder: Recorder, mask: dict[str, Any]) -> None:
    given: dict[str, Any] = packed() | mask
    out, lse = front.varlen_attention(**given, backend="reference", return_lse=True)
    given |= {"out": out, "lse": lse, "d_out": drawn(*out.shape)}
    recorder.watch(q=given["q"], k=given["k"])
    options = {"block_q": EDGE, "block_kv": BLOCK, "dq_block_q": 32, "dq_block_kv": BLOCK}
    found = front.varlen_attention_backward(**given, backend="triton", options=options)
    recorder.watch()
    wanted = front.varlen_attention_backward(**given, backend="reference")
    for ours, theirs in zip(found[:3], wanted[:3], strict=True):
        agrees(ours, theirs, "gradient")


def as_argument(ranges: NDArray[np.int32]) -> dict[str, Any]:
    return {"key_ranges": torch.from_numpy(ranges)}


every_mask = pytest.mark.parametrize("name", MASKS)


@every_mask
def test_blocks_of_paged_attention(recorder: Recorder, name: str) -> None:
    """The kernels visit the right blocks. The split kernel's small blocks have one size, with and without a mask."""
    ranges = MASKS[name]()
    of_slot = run_paged(recorder, as_argument(ranges))
    for kernel, sizes in (("tile_kernel", (BLOCK, EDGE)), ("split_kernel", (EDGE, EDGE))):
        visits = expect_keys(recorder, kernel, ranges, sizes, of_slot=of_slot)
        expect_equal_cost(recorder.programs[kernel], visits, name)


@every_mask
def test_blocks_of_packed_attention(recorder: Recorder, name: str) -> None:
    ranges = MASKS[name]()
    run_packed(recorder, as_argument(ranges))
    visits = expect_keys(recorder, "forward_kernel", ranges)
    expect_equal_cost(recorder.programs["forward_kernel"], visits, name)


@every_mask
def test_blocks_of_the_gradient_of_packed_attention(recorder: Recorder, name: str) -> None:
    ranges = MASKS[name]()
    run_gradient(recorder, as_argument(ranges))
    expect_equal_cost(recorder.programs["dq_kernel"], expect_keys(recorder, "dq_kernel", ranges), name)
    expect_equal_cost(recorder.programs["dkv_kernel"], expect_rows(recorder, ranges), name)


@every_mask
@pytest.mark.parametrize("heads", [3, 16], ids=["tokens share a tile", "a tile for each token"])
def test_blocks_of_latent_attention(recorder: Recorder, name: str, heads: int) -> None:
    """The kernel visits the right blocks, all of them with masked loads."""
    ranges = MASKS[name]()
    of_slot = run_latent(recorder, as_argument(ranges), heads)
    kernel = "ragged_latent_kernel"
    visits = expect_keys(recorder, kernel, ranges, heads=heads, unmasked=False, of_slot=of_slot)
    expect_equal_cost(recorder.programs[kernel], visits, name if heads == 3 else "")


RUNS: dict[str, Callable[[Recorder, dict[str, Any]], Any]] = {
    "paged": run_paged, "packed": run_packed, "gradient": run_gradient,
    "latent": lambda recorder, mask: run_latent(recorder, mask, 3),
}  # fmt: skip


@pytest.mark.parametrize("operation", RUNS)
def test_causal_ranges_load_and_multiply_what_a_causal_mask_does(recorder: Recorder, operation: str) -> None:
    RUNS[operation](recorder, as_argument(MASKS["causal"]()))
    by_ranges, recorder.programs = recorder.programs, collections.defaultdict(by_default)
    RUNS[operation](recorder, {"causal": True})
    assert by_ranges == recorder.programs


def test_visits_of_another_mask_are_noticed(recorder: Recorder) -> None:
    """The checks notice a visited block that no row sees, a visible block that is not visited, and unequal costs."""
    run_packed(recorder, as_argument(made.window_ranges(*TABLES)))
    with pytest.raises(AssertionError, match="loads without a mask of rows that some do not see"):
        expect_keys(recorder, "forward_kernel", MASKS["causal"]())
    recorder.programs.clear()
    run_packed(recorder, as_argument(two_apart()))
    with pytest.raises(AssertionError, match=r"blocks that (some|all) rows see"):
        expect_keys(recorder, "forward_kernel", two_apart() + np.array([0, 40], np.int32))
    recorder.programs.clear()
    run_packed(recorder, as_argument(alternating()))
    visits = expect_keys(recorder, "forward_kernel", alternating())
    with pytest.raises(AssertionError, match="products per visited block"):
        expect_equal_cost(recorder.programs["forward_kernel"], visits, "")


# ---- lists of blocks

LISTED = 8  # keys per listed block


def lists() -> NDArray[np.int32]:
    """Lists [T, 1, 4]: neighbouring queries share most blocks. Some blocks are listed twice, and some do not exist."""
    query = np.arange(TABLES[2])
    return np.stack([query // 9 % 5, 7 + query // 4 % 3, 7 + query // 4 % 3, 40 - query % 70], 1)[:, None].astype(
        np.int32
    )


def shown_by_lists(causal: bool) -> NDArray[np.bool_]:
    """The mask [queries, keys]: whether a query sees a packed key."""
    seen = np.zeros((TABLES[2], int(KEY_EDGES[-1])), bool)
    for (start, stop), (first, last) in zip(itertools.pairwise(Q_EDGES), itertools.pairwise(KEY_EDGES), strict=True):
        key = np.arange(last - first)
        seen[start:stop, first:last] = (lists()[start:stop, 0, :, None] == key // LISTED).any(1)
        if causal:
            seen[start:stop, first:last] &= key <= (last - first - stop + start + np.arange(stop - start))[:, None]
    return seen


def as_lists(causal: bool) -> dict[str, Any]:
    return {"selected": torch.from_numpy(lists()), "block_size": LISTED, "causal": causal}


def expect_listed(
    programs: dict[Any, Program], streamed: str, seen_from: Callable[[NDArray[np.int64]], NDArray[np.bool_]]
) -> None:
    """Check that each program loads exactly the rows of `streamed` that its own rows see, each once.

    `seen_from` gives the mask [own rows, streamed rows] of the program's own rows.
    """
    own, loads = "q" if streamed == "k" else "k", 0
    for program in programs.values():
        rows = program.rows(own)
        assert not program.unmasked[streamed]
        found = program.masked[streamed]
        wanted = np.flatnonzero(seen_from(rows).any(0)) if len(rows) else np.zeros(0, int)
        assert sorted(found) == wanted.tolist(), "expected exactly the rows that some row sees"
        assert all(count == 1 for count in found.values()), "rows that are loaded twice"
        loads += len(found)
    assert loads


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("joined", [1, 8], ids=["a query each", "joined lists"])
def test_listed_keys_of_packed_attention(recorder: Recorder, causal: bool, joined: int) -> None:
    given: dict[str, Any] = packed() | as_lists(causal)
    recorder.watch(q=given["q"], k=given["k"])
    options = {"block_q": 32, "block_kv": BLOCK, "joined_tokens": joined}
    out = front.varlen_attention(**given, backend="triton", options=options)
    recorder.watch()
    agrees(out, front.varlen_attention(**given, backend="reference"), "float32")
    seen = shown_by_lists(causal)
    expect_listed(recorder.programs["forward_kernel"], "k", lambda rows: seen[rows // GROUP])


@pytest.mark.parametrize("causal", [True, False])
def test_listed_keys_of_the_gradient_of_packed_attention(recorder: Recorder, causal: bool) -> None:
    """The gradient of keys loads the query rows that list and see a key of the program, and no other rows."""
    run_gradient(recorder, as_lists(causal))
    seen = shown_by_lists(causal)
    expect_listed(recorder.programs["dq_kernel"], "k", lambda rows: seen[rows // GROUP])
    for program in recorder.programs["selected_dkv_kernel"].values():
        keys = program.rows("k")
        queries = np.flatnonzero(seen[:, keys].any(1))
        assert set(program.masked["q"]) == {int(query) * GROUP + head for query in queries for head in range(GROUP)}


@pytest.mark.parametrize("options", [{"joined_tokens": 8}, {"num_splits": 3}], ids=["joined lists", "splits"])
def test_listed_keys_of_paged_attention(recorder: Recorder, options: dict[str, int]) -> None:
    """Each split of a query is a program, and together they load the query's listed keys once."""
    arguments, of_slot, shape = paged(WIDTH, GROUP)
    k_pages, v_pages = drawn(*shape), drawn(*shape)
    given: dict[str, Any] = arguments | {"kv_pages": (k_pages, v_pages)} | as_lists(True)
    recorder.watch(q=given["q"], k=k_pages)
    sizes = {"block_q": 32, "block_kv": BLOCK}
    out = front.ragged_paged_attention(**given, backend="triton", options=sizes | options)
    recorder.watch()
    agrees(out, front.ragged_paged_attention(**given, backend="reference"), "float32")
    seen, programs = shown_by_lists(True), collections.defaultdict(Program)
    for program in recorder.programs["selected_kernel"].values():
        queries = program.rows("q")
        if len(queries):
            merged = programs[tuple(queries.tolist())]
            merged.masked["q"] |= program.masked["q"]
            merged.masked["k"] += collections.Counter({of_slot(row): n for row, n in program.masked["k"].items()})
    expect_listed(programs, "k", lambda rows: seen[rows // GROUP])


@pytest.mark.parametrize("splits", [2, 8, 30])
def test_splits_of_latents_begin_in_a_later_range(splits: int) -> None:
    """A split that begins between two ranges of keys starts with a block of the later range."""
    arguments, _, shape = paged(48, 3)
    ranges = np.zeros((TABLES[2], 2, 2), np.int32)
    ranges[:, 0] = 0, 20
    for seq, (start, stop) in enumerate(itertools.pairwise(Q_EDGES)):
        ranges[start:stop, 1] = KV_LENS[seq] - 23, KV_LENS[seq] - 3
    cache = drawn(*shape)
    given: dict[str, Any] = arguments | {"kv_cache": cache, "d_v": 32, "key_ranges": torch.from_numpy(ranges)}
    options = {"split_rows": 16, "split_block_h": 16, "split_block_kv": 16, "num_splits": splits}
    out = front.ragged_mla_attention(**given, backend="triton", options=options)
    agrees(out, front.ragged_mla_attention(**given, backend="reference"), "float32")
