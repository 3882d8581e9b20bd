"""The largest logit of each query head in a call: one float32 per head, which all programs raise atomically.

The largest logit of a row is the running maximum m_i of its online softmax. If a soft cap or biases change logits, the
loop also keeps the largest logit before that change, as the fourth item of its state. Each program raises the numbers
of its rows' heads once, after its loop. A maximum is exact, so the order of programs does not matter. A kernel that
reduces one maximum per program would need an array for these maxima, and programs without work would have to write to
it, too.
"""

from typing import Any

import triton
import triton.language as tl

from ragged_attention.kernels_triton._indexer import fill_kernel
from ragged_attention.kernels_triton._softmax import LN2
from ragged_attention.kernels_triton._tiles import cdiv

CHANGES = ("soft_cap", "alibi_slopes", "relative_bias")  # arguments that make m_i differ from the largest product
BLOCK = 256  # heads that one program of `fill_kernel` sets to -inf


@triton.jit
def unchanged(products, queries, FORM: tl.constexpr):
    """Products q . k as base-2 logits without a soft cap and biases; see `capped_and_biased`."""
    scale = queries.outer
    if FORM.HAS_SOFT_CAP:
        scale = scale * queries.inner
    return products * scale


@triton.jit
def larger(largest, logits):
    return tl.maximum(largest, tl.max(logits, 1))


@triton.jit
def largest_of_state(state):
    """The largest base-2 logit of each row, from a loop's state (m_i, l_i, acc) or (m_i, l_i, acc, largest)."""
    largest = state[0]
    if len(state) == 4:
        largest = state[3]
    return largest


@triton.jit
def raise_largest(max_ptr, largest, l_i, head, exists):
    """Raise the largest logits of heads to `largest`, the largest base-2 logits of finished rows.

    A maximum hides a NaN, but the rows' sums of weights, `l_i`, show it. The atomics compare the bits of float32 as
    integers. Non-negative numbers have the order of signed integers, and a positive NaN is above them, so they use a
    signed maximum. Negative numbers have the opposite order as unsigned integers, so they use an unsigned minimum.
    """
    largest = tl.where((l_i != l_i) & (largest < float("inf")), float("nan"), largest * LN2)
    largest = tl.where(largest != largest, float("nan"), largest)  # a NaN whose sign bit is clear
    counts = exists & (largest != float("-inf"))
    bits = largest.to(tl.int32, bitcast=True)
    signed = max_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + head
    unsigned = max_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + head
    tl.atomic_max(signed, bits, mask=counts & (bits >= 0), sem="relaxed")
    tl.atomic_min(unsigned, bits.to(tl.uint32, bitcast=True), mask=counts & (bits < 0), sem="relaxed")


# ---- host side


def keeps_largest(call: Any) -> bool:
    """Whether the loop has to keep the largest logits of its rows, because m_i is not the largest product."""
    return bool(call.return_max_logits) and any(getattr(call, name, None) is not None for name in CHANGES)


def cleared(call: Any, launch: Any, stand_in: Any) -> Any:
    """The array for a call's largest logits, filled with -inf; or a stand-in if they are not requested."""
    if not call.return_max_logits:
        return stand_in
    (array,) = launch(
        fill_kernel,
        (cdiv(call.num_q_heads, BLOCK),),
        (stand_in,),
        [((call.num_q_heads,), "float32")],
        count=call.num_q_heads,
        BLOCK=BLOCK,
    )
    return array


def absent(call: Any) -> dict[str, None]:
    """The argument `max_ptr=None` for a kernel, unless the largest logits are requested."""
    return {} if call.return_max_logits else {"max_ptr": None}
