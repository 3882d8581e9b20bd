"""The tunables of a call: explicit options override the backend's heuristic."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ragged_attention.calls import Call
from ragged_attention.errors import InvalidInput


def options_of(tile_type: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(tile_type))


def tile_for(module: Any, call: Call, options: Mapping[str, Any], *, invariant: bool = False) -> Any:
    """The `Tile` with which `module` runs `call`. Each of the `options` overrides one field.

    If `invariant`, the results must be batch-invariant, so the module's `invariant_tile` replaces its heuristic.
    """
    tile = module.invariant_tile(call) if invariant else module.heuristic(call)
    known = options_of(module.Tile)
    for name in options:
        if name not in known:
            raise InvalidInput(f"expected options among {', '.join(known) or 'none'} for this backend, got {name!r}")
    return dataclasses.replace(tile, **options) if options else tile
