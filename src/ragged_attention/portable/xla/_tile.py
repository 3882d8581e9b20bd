"""The `Tile` of this backend's attention and indexer operations."""

import dataclasses

from ragged_attention.errors import InvalidInput


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """The tunable sizes."""

    block_q: int = 64  # query tokens in a tile; each has a row per query head
    block_kv: int = 512  # keys gathered at a time

    def __post_init__(self) -> None:
        for name, limit in (("block_q", 1024), ("block_kv", 8192)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"expected {name} to be an int, got {type(value).__name__}")
            if not 1 <= value <= limit:
                raise InvalidInput(f"expected {name} between 1 and {limit}, got {value}")
