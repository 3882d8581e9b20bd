"""The dependent chain in a consumer's loop, from a block's logits to the product of its weights with its values.

QK is the product that computes logits, and PV the product of weights and values. While one warpgroup is between the end
of QK and the issue of PV, the tensor cores have only the work that the other warpgroup issued. The issue cycles of this
chain, read from the control bits, are a lower bound for an iteration that a throughput model misses.
"""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.compiled.sass import Instruction
from benchmarks.compiled.scoreboard import control_of

LOGITS = "64x64x16"  # the shape of QK's products; PV's are wider


class Chain(NamedTuple):
    """The chain in one iteration of a consumer's loop."""

    cycles: int  # issue cycles from the wait for the last QK product to the first PV product
    waits: int  # waits for all products in flight, up to and including the wait for the last QK product
    at_times: int = 0  # further issue cycles of code that a branch can skip, such as a rescaling that is rarely needed


def chain_of(loop: Sequence[Instruction]) -> Chain | None:
    """The chain of a loop that computes logits and multiplies weights with values. None for any other loop.

    The compiler chooses where an iteration begins, so the loop is read cyclically.
    """
    body = [line for line in loop if line.name != "NOP"]
    products = [(index, _shape(line)) for index, line in enumerate(body) if line.name.startswith("HGMMA")]
    first = next(
        (index for (_, before), (index, shape) in zip([products[-1], *products], products, strict=False)
         if shape == LOGITS != before),
        None,
    ) if products else None  # fmt: skip
    if first is None:
        return None
    body = body[first:] + body[:first]
    shapes = [_shape(line) for line in body]
    values = next(index for index, shape in enumerate(shapes) if shape not in (None, LOGITS))
    last = max(index for index in range(values) if shapes[index] == LOGITS)
    waits = [index for index in range(values) if _waits_for_all(body[index])]
    settled = next((index for index in waits if index > last), last)
    chain = body[settled:values]
    jumped = _jumped_over(chain)
    stalls = [control_of(line.control or 0).stall for line in chain]
    at_times = sum(stall for index, stall in enumerate(stalls) if index in jumped)
    return Chain(sum(stalls) - at_times, sum(index <= settled for index in waits), at_times)


def _jumped_over(code: Sequence[Instruction]) -> set[int]:
    """The indices of the instructions that conditional branches within `code` can skip."""
    places = {line.address: index for index, line in enumerate(code)}
    return {
        between
        for index, line in enumerate(code)
        if line.predicated and line.target is not None and (end := places.get(line.target, 0)) > index
        for between in range(index + 1, end)
    }


def _shape(line: Instruction) -> str | None:
    return line.name.split(".")[1] if line.name.startswith("HGMMA") else None


def _waits_for_all(line: Instruction) -> bool:
    return line.name.startswith("WARPGROUP.DEPBAR") and line.operands.endswith("0x0")
