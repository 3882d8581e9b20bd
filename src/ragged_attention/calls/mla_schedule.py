"""The schedule of a decode step over latents, and the record of the operation that makes it."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ragged_attention.calls.base import Call, Result, expect_groups, record
from ragged_attention.calls.fields import (
    INT32,
    ArrayKind,
    Arrays,
    Flag,
    Integer,
    expect_array,
    expect_count,
    field,
    is_array,
)
from ragged_attention.errors import InvalidInput

BLOCK_ROWS = 64  # query rows per program


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DecodeSchedule:
    """A division of the work of `mla_decode` among programs, which `make_decode_schedule` makes once for all layers.

    A schedule suits calls with the shapes and lengths that it was made for. Calls always check the shapes, and check
    the lengths only under `validate="full"`. With other lengths the results are correct, but the work is divided badly.
    """

    # i32 [programs, 8]: first sequence, its first block, last sequence, its end block, first split, 0 0 0
    parts: Any
    num_splits: Any  # i32 [S + 1], prefix sums of the number of splits per sequence
    lens: Any = None  # i32 [S], the lengths that the schedule was made for; None if unknown
    extra_lens: Any = None  # i32 [S], the lengths of the lists into the second cache
    made_for: tuple[int, ...] = ()  # sequences, query tokens per sequence, query heads, KV heads, top-k, extra top-k


SHAPES = ("batch_size", "num_q_tokens", "num_q_heads", "num_kv_heads", "topk", "extra_topk")


def schedule_arrays(schedule: Any, q: Any, kv_cache: Any, indices: Any, extra_indices: Any) -> tuple[Any, ...] | None:
    """The arrays of `schedule`, an argument of `mla_decode`. Raises unless it was made for these shapes."""
    if schedule is None:
        return None
    if not isinstance(schedule, DecodeSchedule):
        raise TypeError(f"expected schedule to be a DecodeSchedule, got {type(schedule).__name__}")
    lists = [value for value in (indices, extra_indices) if value is not None]
    if not all(is_array(value) and len(value.shape) > 2 for value in (q, kv_cache, *lists)):
        return None  # the record's own checks raise a clearer error
    counts = [0 if value is None else value.shape[-1] for value in (indices, extra_indices)]
    needed = (*q.shape[:3], kv_cache.shape[2], *counts)
    for name, need, made in zip(SHAPES, needed, schedule.made_for, strict=False):
        if need != made:
            raise InvalidInput(f"expected a schedule made for {name}={need}, got one made for {name}={made}")
    lengths = [lens for lens in (schedule.lens, schedule.extra_lens) if lens is not None]
    return (schedule.parts, schedule.num_splits, *lengths)


def scheduled_lens(lens: Any, most: int) -> Any:
    """The length of each sequence's longest list, clamped to [0, most], as schedules have it. Expects NumPy arrays."""
    if lens is None:
        return np.int32(most)
    lens = np.clip(lens, 0, most)
    return lens.max(axis=1) if lens.ndim == 2 else lens


@record
class MakeDecodeSchedule(Call):
    """The arguments of `make_decode_schedule`, converted to the number of keys that each sequence reads.

    The public function takes the shapes of a decode call, and `kv_lens` or the sizes of lists. `prepare` converts them.
    """

    NUM_RESULTS: ClassVar[int | None] = 2

    lens: Any = field(ArrayKind("S", INT32))  # the length of each sequence or of its longest list
    extra_lens: Any = field(ArrayKind("S", INT32), default=None)  # the longest list's length, for the second cache
    sparse: bool = field(Flag(), default=False)
    num_parts: int | None = field(Integer(least=1), default=None)
    overhead: int = field(Integer(), default=5)
    programs: int = field(Integer(least=1, hint=True), default=1)  # the number of programs per range of keys

    @classmethod
    def prepare(cls, arguments: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        given = {name: arrays.array(name, value) for name, value in arguments.items()}
        for name, least in SHAPE_ARGUMENTS.items():
            expect_count(name, given[name], least)
        batch_size, num_q_tokens, num_q_heads, num_kv_heads = (given[name] for name in SHAPE_ARGUMENTS)
        expect_groups(num_q_heads, num_kv_heads)
        kv_lens, topk = given["kv_lens"], given["topk"]
        if (kv_lens is None) == (topk is None):
            got = "neither" if topk is None else "both"
            raise InvalidInput(f"expected kv_lens for a dense call or topk for a sparse one, got {got}")
        if topk is None:
            for name in ("topk_lens", "extra_topk", "extra_topk_lens"):
                if given[name] is not None:
                    raise InvalidInput(f"expected {name} only together with topk, got it with kv_lens")
            expect_array("kv_lens", kv_lens, "S", INT32, {"S": batch_size})
            lens, extra_lens = arrays.copy(kv_lens), None
            rows, side_by_side = num_q_tokens * (num_q_heads // num_kv_heads), num_kv_heads
        else:
            if num_kv_heads != 1:
                raise InvalidInput(f"expected num_kv_heads = 1 with topk, got {num_kv_heads}")
            if given["extra_topk"] is None and given["extra_topk_lens"] is not None:
                raise InvalidInput("expected extra_topk_lens only together with extra_topk, got it without")
            lens, extra_lens = (_list_lens(name, given, arrays) for name in ("topk", "extra_topk"))
            rows, side_by_side = num_q_heads, num_q_tokens
        return {
            "lens": lens, "extra_lens": extra_lens, "sparse": topk is not None, "num_parts": given["num_parts"],
            "overhead": given["overhead"], "programs": side_by_side * -(-rows // BLOCK_ROWS),
        }  # fmt: skip

    def results(self) -> tuple[Result, ...]:
        return Result((self.num_ranges, 8), "int32"), Result((self.num_seqs + 1,), "int32")

    @property
    def num_ranges(self) -> int:
        """The number of ranges of keys: the requested number, or enough to fill the device."""
        return self.num_parts or max(self.device.num_multiprocessors // self.programs, 1)

    @property
    def num_seqs(self) -> int:
        return self.lens.shape[0]


SHAPE_ARGUMENTS = {"batch_size": 0, "num_q_tokens": 1, "num_q_heads": 1, "num_kv_heads": 1}  # each with its minimum


def _list_lens(name: str, given: Mapping[str, Any], arrays: Arrays) -> Any:
    """The length of each sequence's longest list, at most the list size `name`; None if the call has no such lists."""
    topk, lens = given[name], given[f"{name}_lens"]
    if topk is None:
        return None
    expect_count(name, topk, 1)
    if lens is None:
        return arrays.int32((given["batch_size"],), topk)
    expect_list_lens(f"{name}_lens", lens, {"S": given["batch_size"], "Q": given["num_q_tokens"]})
    clamped = lens.clip(0, topk)
    return arrays.namespace.amax(clamped, 1) if len(clamped.shape) == 2 else clamped


def expect_list_lens(name: str, lens: Any, sizes: Mapping[str, int]) -> None:
    """Check the lengths of lists, i32 [S] or [S, Q], unless they are None."""
    if lens is not None:
        rank = len(lens.shape) if is_array(lens) else 1
        expect_array(name, lens, "S Q" if rank == 2 else "S", INT32, sizes)


def schedule_for(arguments: Mapping[str, Any], prepared: Mapping[str, Any], results: Any) -> DecodeSchedule:
    """The operation's results as a schedule, with the lengths and shapes that it was made for."""
    parts, num_splits = results
    shapes = tuple(int(arguments[name]) for name in SHAPE_ARGUMENTS)
    topks = tuple(int(arguments[name] or 0) for name in ("topk", "extra_topk"))
    made_for = (*shapes, *topks)
    lens, extra_lens = prepared["lens"], prepared["extra_lens"]
    return DecodeSchedule(parts=parts, num_splits=num_splits, lens=lens, extra_lens=extra_lens, made_for=made_for)
