"""How long what hangs together in a consumer's loop takes: from a block's logits to the product with its values.

While a warpgroup goes from the end of QK to the issue of PV, the tensor cores have only what the other has given them.
The issue cycles in between, as the control bits say them, are a bound from below that a model of throughput cannot see.
"""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.compiled.sass import Instruction
from benchmarks.compiled.scoreboard import control_of

LOGITS = "64x64x16"  # the shape of QK's products; PV's are wider


class Chain(NamedTuple):
    """One turn of a consumer's loop."""

    cycles: int  # stalls from the wait for the last product of QK to the first product of PV
    waits: int  # for all products under way, from the first product of QK to that wait
    at_times: int = 0  # further stalls of what a branch jumps over, such as a rescaling that hardly ever comes


def chain_of(loop: Sequence[Instruction]) -> Chain | None:
    """The chain of a loop that computes logits and multiplies them with values; None of any other.

    The loop is read round: where a turn begins is the compiler's choice.
    """
    turn = [line for line in loop if line.name != "NOP"]
    products = [(index, _shape(line)) for index, line in enumerate(turn) if line.name.startswith("HGMMA")]
    first = next(
        (index for (_, before), (index, shape) in zip([products[-1], *products], products, strict=False)
         if shape == LOGITS != before),
        None,
    ) if products else None  # fmt: skip
    if first is None:
        return None
    turn = turn[first:] + turn[:first]
    shapes = [_shape(line) for line in turn]
    values = next(index for index, shape in enumerate(shapes) if shape not in (None, LOGITS))
    last = max(index for index in range(values) if shapes[index] == LOGITS)
    waits = [index for index in range(values) if _waits_for_all(turn[index])]
    settled = next((index for index in waits if index > last), last)
    chain = turn[settled:values]
    jumped = _jumped_over(chain)
    stalls = [control_of(line.control or 0).stall for line in chain]
    at_times = sum(stall for index, stall in enumerate(stalls) if index in jumped)
    return Chain(sum(stalls) - at_times, sum(index <= settled for index in waits), at_times)


def _jumped_over(code: Sequence[Instruction]) -> set[int]:
    """The instructions that conditional branches within a stretch of code lead past."""
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
