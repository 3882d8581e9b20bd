"""The `Tile` of an implementation that has nothing to tune."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """Nothing to tune."""


def heuristic(call: Any) -> Tile:
    del call
    return Tile()
