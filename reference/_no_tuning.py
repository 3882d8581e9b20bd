"""What makes a definition a backend: it takes every valid call, and there is nothing to tune."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """Nothing to tune."""


def heuristic(call: Any) -> Tile:
    del call
    return Tile()


def why_not(call: Any) -> str | None:
    del call
