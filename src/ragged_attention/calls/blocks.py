"""The records of block selection: scores of key blocks for each index head, and the top-k blocks."""

from typing import Any, ClassVar

from ragged_attention.calls.base import Call, Result, expect_groups, record
from ragged_attention.calls.fields import (
    FLOATS,
    INT32,
    ArrayKind,
    BlockSize,
    Count,
    HeadKeys,
    HeadKeyScales,
    Integer,
    Sizes,
    expect_array,
    expect_nonempty,
    field,
)
from ragged_attention.calls.indexer import E4M3, WHY_NO_GRADIENT, KeysCall, expect_index_dim, expect_top_k
from ragged_attention.errors import InvalidInput


def expect_forced(call: Any) -> None:
    """Check that at most `top_k` blocks are always selected."""
    if (forced := call.init_blocks + call.local_blocks) > call.top_k:
        raise InvalidInput(f"expected init_blocks + local_blocks <= top_k={call.top_k}, got {forced}")


@record
class BlockQueries(Call):
    """The first arguments of `block_scores` and `select_blocks`."""

    WHY_NO_GRADIENT: ClassVar[str] = WHY_NO_GRADIENT

    q: Any = field(ArrayKind("T H D", (*FLOATS, E4M3)))
    keys: Any = field(HeadKeys(unit_stride=True))


@record
class BlockSelection(BlockQueries):
    """The first arguments of `select_blocks`."""

    top_k: int = field(Integer(least=1))


@record
class BlocksCall(BlockQueries, KeysCall):
    """The base of the records with index queries, the keys that each query sees, and the number of keys per block."""

    relative: ClassVar[bool] = True  # type: ignore[misc]  # blocks are those of the query's own sequence
    ratio: ClassVar[int] = 1  # type: ignore[misc]

    block_size: int = field(BlockSize())
    key_scale: Any = field(HeadKeyScales(), default=None)
    starts: Any = field(ArrayKind("T", INT32), default=None)
    stops: Any = field(ArrayKind("T", INT32), default=None)
    max_keys: int | None = field(Integer(least=1), default=None)
    page_indices: Any = field(ArrayKind("S M", INT32), default=None)
    kv_lens: Any = field(ArrayKind("S", INT32), default=None)
    cu_q_lens: Any = field(ArrayKind("S+1", INT32), default=None)
    num_seqs: Any = field(Count(), default=None)

    def _check(self, sizes: Sizes) -> None:
        expect_index_dim("q.shape[2]", self.head_dim)
        self._expect_one_form()
        if self.bytes:
            self._expect_bytes()
        else:
            letters = "P G K D" if self.paged else "N K D"
            expect_array("keys", self.keys, letters, self.key_dtypes, {"D": self.head_dim})
        expect_nonempty("keys", "num_kv_heads", self.num_kv_heads)
        expect_groups(self.num_heads, self.num_kv_heads)
        self._expect_key_scale("P G K" if self.paged else "N K")

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[-2]

    @property
    def group(self) -> int:
        """The number of index heads per key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_blocks(self) -> int:
        """The maximum number of blocks that a query may see."""
        return -(-self.columns // self.block_size)


@record
class BlockScores(BlocksCall):
    """The arguments of `block_scores`, whose docstring explains them."""

    def results(self) -> tuple[Result, ...]:
        return (Result((self.num_tokens, self.num_heads, self.num_blocks), "float32"),)


@record
class SelectBlocks(BlocksCall, BlockSelection):
    """The arguments of `select_blocks`, whose docstring explains them."""

    init_blocks: int = field(Integer(), default=0)
    local_blocks: int = field(Integer(), default=0)

    def _check(self, sizes: Sizes) -> None:
        super()._check(sizes)
        expect_top_k(self.top_k)
        expect_forced(self)

    def results(self) -> tuple[Result, ...]:
        return (Result((self.num_tokens, self.num_heads, self.top_k), "int32"),)


@record
class TopKBlocks(Call):
    """The arguments of `top_k_blocks`, whose docstring explains them."""

    WHY_NO_GRADIENT: ClassVar[str] = WHY_NO_GRADIENT

    scores: Any = field(ArrayKind("T H B", ("float32",)))
    top_k: int = field(Integer(least=1))
    init_blocks: int = field(Integer(), default=0)
    local_blocks: int = field(Integer(), default=0)

    def _check(self, sizes: Sizes) -> None:
        expect_top_k(self.top_k)
        expect_forced(self)

    def results(self) -> tuple[Result, ...]:
        return (Result((*self.scores.shape[:2], self.top_k), "int32"),)

    @property
    def num_tokens(self) -> int:
        return self.scores.shape[0]

    @property
    def num_heads(self) -> int:
        return self.scores.shape[1]

    @property
    def num_blocks(self) -> int:
        return self.scores.shape[2]
