"""Host code that attention over ragged batches shares: kernel arguments, and the launches for short sequences."""

import dataclasses
from typing import Any

from ragged_attention.kernels_triton._combine import combine
from ragged_attention.kernels_triton._mask import RANGE_NUMBERS, MaskKind
from ragged_attention.kernels_triton._max_logits import absent
from ragged_attention.kernels_triton._splits import Division, most_tokens
from ragged_attention.kernels_triton._tiles import dependent, next_power_of_2, overlaps, stride_arguments

MAX_LOGITS = "max_logits"


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
    """The arguments that the launches of a ragged call share."""

    arrays: dict[str, Any]  # in the kernels' order
    numbers: dict[str, Any]
    constants: dict[str, Any]  # fields of the kernels' `Config`

    def max_logits(self, call: Any) -> tuple[int, ...]:
        """The index of the array of largest logits in `arrays`, as a tuple; empty if these are not requested."""
        return (list(self.arrays).index(MAX_LOGITS),) if call.return_max_logits else ()


def sequence_arguments(call: Any, launch: Any, q: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arrays, numbers) about the sequences and queries of a ragged call; q is also a stand-in for absent sinks."""
    page_indices, cu_q_lens, kv_lens = map(launch.packed, (call.page_indices, call.cu_q_lens, call.kv_lens))
    arrays = {
        "kv_lens": kv_lens,
        "page_indices": page_indices,
        "cu_q_lens": cu_q_lens,
        "num_seqs": kv_lens if call.num_seqs is None else call.num_seqs,
        "sinks": q if call.sinks is None else launch.packed(call.sinks),
    }
    numbers = {name: getattr(call, name) for name in ("num_tokens", "max_num_seqs", "capacity")}
    strides = stride_arguments(launch, ("token", "head"), q=q)
    return arrays, {**numbers, **strides, "table_stride": launch.strides(page_indices)[0]}


def results(call: Any) -> list[Any]:
    """The shapes and dtypes of out and lse, for the launcher to allocate."""
    return [(call.out_shape, call.result_dtype), (call.q.shape[:2], "float32")]


def run_splits(
    launch: Any, call: Any, shared: Shared, target: Any, parts: tuple[int, ...], *, kernel: Any, grid: tuple[int, ...],
    division: Division, mask: MaskKind, scale: tuple[str, int], **arguments: Any,
) -> Any:  # fmt: skip
    """Enqueue a kernel for short sequences and, if it splits their keys, the combine kernel; returns the results.

    `target` has results of an earlier kernel, whose missing rows these kernels write. It is None if they write all
    rows. `parts` is the shape of the splits' lses. `scale` has the name of the values' scale and the stride of its
    array.
    """
    divided, numbers = division.plain, shared.numbers
    scale_name, scale_stride = scale
    arrays = shared.arrays
    out, lse, *others = target or (arrays["q"],) * 2  # q is a stand-in for absent arrays
    if others:  # the largest logits so far
        arrays = {**arrays, MAX_LOGITS: others[0]}
    part_values, part_lses, out, lse, *others = launch(
        kernel,
        grid,
        (*arrays.values(), out, lse),
        [
            ((*parts, call.v_head_dim) if divided.SPLIT_KV else (1,), "float32"),
            (parts if divided.SPLIT_KV else (1,), "float32"),
            *([] if target else results(call)),
        ],
        inplace=((len(arrays), len(arrays) + 1) if target else ()) + shared.max_logits(call),
        **absent(call),
        **dependent(overlaps(call) and target is not None),
        **numbers,
        **arguments,
    )
    if not divided.SPLIT_KV:
        return out, lse, *others
    cu_q_lens, kv_lens, num_splits = shared.arrays["cu_q_lens"], shared.arrays["kv_lens"], arguments["num_splits"]
    most_merged = (512 if divided.BATCH_INVARIANT else 2048) // next_power_of_2(call.v_head_dim)  # limited by registers
    merged = combine(
        launch,
        call,
        (part_values, part_lses, part_lses, cu_q_lens),
        (out, lse),
        (cu_q_lens, shared.arrays["num_seqs"], shared.arrays["sinks"], shared.arrays[scale_name], kv_lens, kv_lens),
        {
            **{name: numbers[name] for name in ("num_tokens", "max_num_seqs", *RANGE_NUMBERS)},
            "v_scale_factor": numbers[f"{scale_name}_factor"],
            "num_parts": parts[0],
            "num_splits": num_splits,
            "longest": call.capacity,
            "extra_longest": 0,
        },
        GROUP=divided.GROUP,
        ROWS=divided.SHORT_ROWS,
        Q_TOKENS=0,
        ITEMS=1,
        DIVISION=division,
        MASK=mask,
        LISTS=None,
        IN_ORDER=divided.SEGMENT > 0,
        LSE_BY_HEAD=False,
        HAS_NUM_SEQS=call.num_seqs is not None,
        V_SCALE_STRIDE=scale_stride,
        MERGED=min(next_power_of_2(num_splits), max(1, most_merged)),
        most_rows=min(divided.SHORT_ROWS, most_tokens(call) * divided.GROUP),
    )
    return *merged, *others
