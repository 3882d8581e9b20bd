"""The prompts of the demo, which are beginnings of this project's texts, and the step at which each arrives."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    arrives: int
    text: str


# Both models have memorised the continuations, so the best logit is far ahead and rounding does not change a token.
# Several prompts share a beginning, as prompts with common instructions do. The beginning's pages are computed once.
_COMMON = "This page explains the words that the rest of the project uses, from the beginning.\n"

PROMPTS = (
    Prompt(0, _COMMON + "A language model writes one"),
    Prompt(0, "If each sequence had one long array of its own, the server"),
    Prompt(2, "Half the bytes are half the time where memory"),
    Prompt(6, _COMMON + "Three things follow"),
    Prompt(8, "A server works on many sequences"),
    Prompt(11, "If each sequence had one long array of its own, the server would have to reserve"),
    Prompt(15, _COMMON + "So the number of queries"),
    Prompt(19, "A compiled function, a CUDA graph"),
    Prompt(26, "The softmax of a row"),
    Prompt(30, _COMMON + "The tables come from a scheduler"),
    Prompt(38, "Tolerances follow from the formats and stand in one place. A tolerance is never"),
    Prompt(46, _COMMON + "A **slot** is one"),
)
