"""The check: full attention over each whole text, without a cache, must select the served tokens."""

import dataclasses
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ragged_attention.demo.engine import Sequence


class FullModel(Protocol):
    def full(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """Logits [N, T, V] of whole sequences [N, T] by attention over all tokens at once."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Mismatch:
    """A served token that full attention does not select. `margin` is its best logit's lead over the second best."""

    sequence: int
    index: int  # the token's index among the new tokens
    served: int
    expected: int
    margin: float


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    num_tokens: int
    mismatches: tuple[Mismatch, ...]
    largest_difference: float  # the largest difference of served logits from those of full attention
    closest_choice: float  # the smallest lead of full attention's best logit over its second best

    @property
    def agrees(self) -> bool:
        return self.num_tokens > 0 and not self.mismatches


def check(model: FullModel, sequences: list[Sequence]) -> Verdict:
    """Compare every new token with the one that full attention over the earlier tokens selects."""
    tokens = np.zeros((len(sequences), max(len(sequence.tokens) for sequence in sequences)), np.int32)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence.tokens)] = sequence.tokens  # causal attention never sees the padding after it
    everything = model.full(tokens)
    mismatches: list[Mismatch] = []
    differences, margins = [0.0], [np.inf]
    for logits, sequence in zip(everything, sequences, strict=True):
        first = len(sequence.prompt) - 1
        for index, (served, scores) in enumerate(zip(sequence.new_tokens, sequence.logits, strict=True)):
            wanted = logits[first + index]
            second, best = np.sort(wanted)[-2:]
            differences.append(float(np.abs(wanted - scores).max()))
            margins.append(float(best - second))
            if (expected := int(wanted.argmax())) != served:
                mismatches.append(Mismatch(sequence.number, index, served, expected, margins[-1]))
    return Verdict(len(margins) - 1, tuple(mismatches), max(differences), min(margins))
