"""The rules that divide attention among devices: the head axes of its arrays, and the positions of each rank.

The rules are independent of the framework. `ragged_attention.torch.distributed` and `ragged_attention.jax.distributed`
apply them and add the communication.
"""

import dataclasses
from typing import Any

from ragged_attention.calls import CALLS, FLOATS, Call, dtype_name, expect_count
from ragged_attention.calls.fields import (
    ArrayKind,
    HeadKeys,
    HeadKeyScales,
    Kind,
    Pair,
    QueryScale,
    RelativeBias,
    Scale,
    Selected,
)
from ragged_attention.calls.heads_first import HeadsFirstPages
from ragged_attention.calls.paged import ScalePages
from ragged_attention.errors import InvalidInput

# ---- heads

LATENTS = ("k", "kv", "kv_cache", "cache", "extra_kv_cache")  # arguments [..., K, D] whose kinds have no shape
SUMS_OVER_HEADS = ("indexer_logits",)  # a rank's result is a partial sum
NEEDS_ALL_HEADS = ("indexer_topk", "attention_target")  # results depend on the sum over all heads
# Operations without heads to divide: one latent row serves all heads, and rows of K or V may have no head axis.
WITHOUT_HEADS = ("quantize_mla_cache", "dequantize_mla_cache", "quantize_kv", "dequantize_kv")


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """The axis of an array's query heads (H) or KV heads (K), counted from the end."""

    axis: int
    letter: str

    @property
    def name(self) -> str:
        return "num_q_heads" if self.letter == "H" else "num_kv_heads"

    def count(self, shape: tuple[int, ...], combined: bool = False) -> int:
        """The number of heads of an array; in combined pages each KV head takes two entries."""
        size = shape[self.axis] if len(shape) >= -self.axis else 1
        return size // 2 if combined else size

    def are_divided(self, argument: str, shape: tuple[int, ...], size: int, combined: bool = False) -> bool:
        """Whether `size` ranks divide the heads. A single KV head or scale is not divided: it serves all queries.

        Raises:
            InvalidInput: the number of heads is not a multiple of `size`.
        """
        count = self.count(shape, combined)
        serves_all = count == 1 and (self.letter == "K" or argument == "q_scale")
        if len(shape) < -self.axis or (serves_all and size > 1):
            return False
        expect_divisible(f"{self.name} of {argument}", count, size, "the mesh's size")
        return True


SERVES_ALL = Heads(-3, "K")  # for keys [N, D] without a head axis: one KV head serves all queries


def heads_of_fields(record: type[Call]) -> dict[str, Heads]:
    """The heads of an operation's arguments by name. Arguments without heads are left out."""
    return {name: heads for name, kind in record.KINDS.items() if (heads := _heads_of(name, kind)) is not None}


def heads_of_arguments(record: type[Call]) -> dict[str, Heads]:
    """The heads of an operation's arguments by flat name, as torch's operators name them."""
    return {
        flat.split()[-1]: heads
        for name, heads in heads_of_fields(record).items()
        for flat in record.KINDS[name].schema(name)
        if flat.startswith("Tensor")
    }


HEADS_OF_KINDS = {
    HeadsFirstPages: Heads(-4, "K"), Pair: Heads(-2, "K"), Scale: Heads(-1, "K"), QueryScale: Heads(-1, "H"),
    RelativeBias: Heads(-2, "H"), HeadKeys: Heads(-2, "K"), HeadKeyScales: Heads(-1, "K"),
    Selected: Heads(-2, "K"), ScalePages: Heads(-2, "K"),
}  # fmt: skip


def _heads_of(name: str, kind: Kind) -> Heads | None:
    if type(kind) in HEADS_OF_KINDS:
        return HEADS_OF_KINDS[type(kind)]
    if not isinstance(kind, ArrayKind):
        return None
    letters = [] if kind.shape is None else kind.shape.split()
    for letter in "HK":
        if letter in letters:
            return Heads(letters.index(letter) - len(letters), letter)
    return Heads(-2, "K") if name in LATENTS and not letters else None


def expect_each_its_own_heads(record: type[Call], advice: str) -> None:
    """Raise `InvalidInput` for an operation that a rank cannot compute from its own heads alone.

    The message ends with `advice`, which says how to compute the operation in the caller's framework.
    """
    if record.OPERATION in NEEDS_ALL_HEADS:
        what = f"{record.OPERATION} with all heads on each device"
        raise InvalidInput(f"expected {what}, got q sharded over heads: {advice}")


def heads_of_results(record: type[Call], ranks: list[int]) -> list[tuple[str, Heads] | None]:
    """The heads of each result, and the name of an argument with the same number of heads; None if there are no heads.

    `ranks` has the number of axes of each result.
    """
    arguments = heads_of_arguments(record)
    if record.OPERATION.endswith("_backward"):
        forward = CALLS[record.OPERATION.removesuffix("_backward")]
        return [(name, arguments.get(name, SERVES_ALL)) for name in forward.DIFFERENTIABLE]
    query = next((name for name, heads in arguments.items() if heads.letter == "H"), None)
    if query is None:
        return [None] * len(ranks)
    if record.OPERATION == "mla_decode":  # its lse is [S, H, Q]
        return [(query, Heads(-2, "H"))] * len(ranks)
    return [(query, Heads(-2 if rank == 3 else -1, "H")) for rank in ranks]


def is_sum_over_heads(record: type[Call], heads: Heads, shape: tuple[int, ...]) -> bool:
    """Whether a result is the sum of a part from each rank, such as the gradient of a single KV head.

    `heads` and `shape` are those of the argument that `heads_of_results` names for the result.
    """
    return record.OPERATION in SUMS_OVER_HEADS or (heads.letter == "K" and heads.count(shape) == 1)


# ---- positions


@dataclasses.dataclass(frozen=True, slots=True)
class KvShard:
    """The positions of a sequence that a rank holds: blocks of `interleave` positions go to the ranks in rotation.

    Position p belongs to rank `p // interleave % size`, and each rank numbers its positions from 0 without gaps. If
    `interleave` is the page size, page i belongs to rank `i % size`. If it is `pages * page_size`, the first rank has
    the first `pages` pages of a sequence and the second rank the next `pages`. After `size * pages` pages, the first
    rank is next again. In vLLM, `interleave` is called `cp_kv_cache_interleave_size`.

    Args:
        size: the number of ranks.
        interleave: the number of positions in a block.
        rank: the rank, an int or (in jax) a traced i32; None if only the device knows it.

    Raises:
        InvalidInput, TypeError: a value is not a number, or is out of range.
    """

    size: int
    interleave: int
    rank: Any = None

    def __post_init__(self) -> None:
        expect_count("size", self.size, 1)
        expect_count("interleave", self.interleave, 1)
        if isinstance(self.rank, int) and not 0 <= self.rank < self.size:
            raise InvalidInput(f"expected rank between 0 and {self.size - 1}, got {self.rank}")

    def at(self, rank: Any) -> "KvShard":
        """This rule for the rank `rank`."""
        return dataclasses.replace(self, rank=rank)

    def lengths(self, kv_lens: Any) -> Any:
        """How many of the first `kv_lens` positions the rank holds; integers of any shape and framework."""
        rounds, remainder = kv_lens // (self.size * self.interleave), kv_lens % (self.size * self.interleave)
        return rounds * self.interleave + (remainder - self._rank() * self.interleave).clip(0, self.interleave)

    def local(self, positions: Any) -> Any:
        """Positions in the rank's own numbering; -1 for positions of other ranks and for negative positions."""
        block, within = positions // self.interleave, positions % self.interleave
        # `owned` is 1 or 0, because jax's strict promotion refuses to multiply integers by bools.
        owned = (1 - abs(block % self.size - self._rank()).clip(0, 1)) * (1 + positions.clip(-1, 0))
        return owned * (block // self.size * self.interleave + within + 1) - 1

    def columns(self, pages_per_seq: int, page_size: int) -> list[int]:
        """The columns, in order, of the whole block table [S, pages_per_seq] whose pages belong to the rank.

        Raises:
            InvalidInput: the rule divides the positions of a page among ranks.
        """
        if self.interleave % page_size:
            raise InvalidInput(f"expected interleave to be a multiple of {page_size=}, got {self.interleave}")
        pages = self.interleave // page_size
        return [page for page in range(pages_per_seq) if page // pages % self.size == self._rank()]

    def expect(self, size: int, rank: int | None) -> None:
        """Raise `InvalidInput` unless this is a rule for `size` ranks and, if it has a rank, for `rank`."""
        if self.size != size:
            raise InvalidInput(f"expected a shard of a group of size {size}, got one of a group of size {self.size}")
        if self.rank is not None and rank is not None and self.rank != rank:
            raise InvalidInput(f"expected the shard of rank {rank}, got that of rank {self.rank}")

    def _rank(self) -> Any:
        if self.rank is None:
            raise InvalidInput("expected a shard with a rank, as `shard.at(rank)` gives, got rank=None")
        return self.rank


def expect_divisible(name: str, count: int, size: int, what: str) -> int:
    """`count / size`; raises `InvalidInput` if `size` does not divide `count`. `what` describes `size`."""
    if count < 1 or count % size:
        raise InvalidInput(f"expected {name} to be a multiple of {what} = {size}, got {count}")
    return count // size


def dtype_of_parts(q: Any) -> str | None:
    """The `out_dtype` for float32 partial results. None if q is float32, as some backends take no `out_dtype`."""
    return None if dtype_name(q) == "float32" else "float32"


# ---- rows of packed sequences


def expect_ring(q: Any, k: Any, v: Any) -> None:
    """Raise `InvalidInput` unless a rank's rows of q, k and v are two pieces of the same sequences."""
    expect_divisible("q.shape[0]", q.shape[0], 2, "the pieces of a rank")
    for name, array in (("k", k), ("v", v)):
        if array.shape[0] != q.shape[0]:
            raise InvalidInput(f"expected {name}.shape[0] = q.shape[0] = {q.shape[0]}, got {array.shape[0]}")
    if dtype_name(q) not in FLOATS:
        raise InvalidInput(f"expected q.dtype to be {' or '.join(FLOATS)}, got {dtype_name(q)}")


def zigzag_order(num_tokens: int, size: int) -> list[range]:
    """The rows of packed tokens in zigzag order: `2 * size` pieces of equal length, two for each rank.

    Rank r has pieces r and `2 * size - 1 - r` of the tokens. This divides the work of causal attention evenly. Raises
    `InvalidInput` if the number of tokens is not a multiple of `2 * size`.
    """
    piece = expect_divisible("the number of tokens", num_tokens, 2 * size, "2 * the group's size")
    pieces = [index for rank in range(size) for index in (rank, 2 * size - 1 - rank)]
    return [range(index * piece, (index + 1) * piece) for index in pieces]


def zigzag_pairs(rank: int, source: int, causal: bool) -> list[tuple[int, int, bool]]:
    """The pairs of a query piece of `rank` and a key piece of `source` that attend, and whether each mask is causal.

    Between two different ranks, causal attention always needs two of the four pairs. The work is thus equal, and no
    rank of a ring waits for another.
    """
    if not causal:
        return [(0, 0, False), (0, 1, False), (1, 0, False), (1, 1, False)]
    if source == rank:
        return [(0, 0, True), (1, 0, False), (1, 1, True)]
    return [(0, 0, False), (1, 0, False)] if source < rank else [(1, 0, False), (1, 1, False)]


def zigzag_edges(cu_lens: Any, rank: Any, size: int, rows: int) -> list[Any]:
    """The prefix sums of the sequences within each of a rank's two pieces of `rows` tokens."""
    return [(cu_lens - piece * rows).clip(0, rows) for piece in (rank, 2 * size - 1 - rank)]
