"""Scale pages with one scale for each token and KV head: their layout for the kernel, and their use.

XLA first puts the scales of K and V of each page in *lines* of `width` lanes, [P, lines, width]. A copy fetches a
page's lines together with the page. In a line, each position of the page has `stride` lanes: the scales of K's heads,
the scales of V's heads, and padding. Codes become matrix operands without their scales, because no 16-bit operand can
hold the product of a code and a float32 scale. Logits are multiplied by the scale of their key, and weights by the
scale of their value.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ragged_attention.calls.cache_formats import KvFormat
from ragged_attention.kernels_pallas._blocks import LANES, cdiv, next_power_of_2, round_up

ROWS = 8  # rows of a register


class Lines(NamedTuple):
    """The layout of a page's scales."""

    stride: int  # lanes of a position
    width: int  # lanes of a line
    lines: int  # lines of a page

    @property
    def positions(self) -> int:
        """The number of positions whose scales are in a line."""
        return self.width // self.stride


def refusal(call: Any) -> str | None:
    """Why the kernels do not take the formats of a call's K and V, or None."""
    k, v = call.k_format, call.v_format
    for form in (k, v):
        if form.scaled and (form.group or form.zero):
            return f"takes scale pages of one scale for each row and no zero points, got {form.name}"
    return None if k == v else f"takes keys and values of one format, got {_described(k)} beside {_described(v)}"


def _described(form: KvFormat) -> str:
    return form.name if form.scaled else form.codes


def lines_of(num_kv_heads: int, page_size: int) -> Lines:
    """The layout of the scales of pages."""
    heads = 2 * num_kv_heads
    stride = next_power_of_2(heads) if heads <= LANES else round_up(heads, LANES)
    width = max(stride, LANES)
    return Lines(stride, width, cdiv(page_size, width // stride))


def in_lines(k_scales: jax.Array, v_scales: jax.Array) -> jax.Array:
    """The scale pages [P, G, K, 1] of K and V as lines, f32 [P, lines, width]."""
    num_pages, page_size, num_kv_heads, _ = k_scales.shape
    lines = lines_of(num_kv_heads, page_size)
    scales = jnp.concatenate([k_scales[..., 0], v_scales[..., 0]], axis=2)
    spare = lines.lines * lines.positions - page_size
    scales = jnp.pad(scales, ((0, 0), (0, spare), (0, lines.stride - 2 * num_kv_heads)))
    return scales.reshape(num_pages, lines.lines, lines.width)


def scales_of_part(plan: Any, buffer: Any, slot: Any, part: Any) -> Any:
    """The scales of the keys of a part of a block, f32 [block_kv, width], in `plan.order`.

    The first K lanes have the scales of keys, and the next K lanes the scales of values. The scales of a position whose
    page was not fetched are arbitrary.
    """
    lines, page_size = plan.scale_lines, plan.page_size
    # The keys of a register's rows are consecutive, or one half of them is in each half of the part: see `Plan.order`.
    runs = [0] if plan.order(1) == 1 else [0, plan.block_kv // 2]
    size = ROWS // len(runs)
    most = _lines_of_a_run(size, page_size, lines.positions)
    row = lax.broadcasted_iota(jnp.int32, (ROWS, lines.width), 0)
    place = lax.broadcasted_iota(jnp.int32, (ROWS, lines.width), 1) // lines.stride
    registers = []
    for first in range(0, plan.block_kv // len(runs), size):
        key = plan.order(row) + (part * plan.block_kv + first)
        scales = jnp.zeros((ROWS, lines.width), jnp.float32)
        for run in runs:
            begin = part * plan.block_kv + first + run
            line = begin // page_size * lines.lines + begin % page_size // lines.positions
            for number in range(most):
                page, index = (line + number) // lines.lines, (line + number) % lines.lines
                begin = page * page_size + index * lines.positions
                own = (key == place + begin) & (key < (page + 1) * page_size)
                values = buffer[slot, jnp.minimum(page, plan.pages - 1), index]
                scales = jnp.where(own, jnp.broadcast_to(values, scales.shape), scales)
        registers.append(scales)
    scales, shift = jnp.concatenate(registers, axis=0), lines.stride
    # In each row, `stride` lanes hold the scales of the row's position, and all other lanes are zero. The sums copy the
    # scales into the other lanes.
    while shift < lines.width:
        scales, shift = scales + pltpu.roll(scales, shift, 1), 2 * shift
    return scales


def _lines_of_a_run(size: int, page_size: int, positions: int) -> int:
    """The largest number of lines that have scales of `size` consecutive positions, the first a multiple of `size`."""
    firsts = range(0, size * page_size, size)
    return max(len({(p // page_size, p % page_size // positions) for p in range(f, f + size)}) for f in firsts)
