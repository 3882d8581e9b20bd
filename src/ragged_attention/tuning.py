"""Tile sizes: explicit options, then a tuned file, then the backend's own heuristic.

Where bits are to depend on nothing but a sequence, `invariant_tile` takes the place of the latter two.

A backend's package may hold `tuned/<device>/<operation>.json`:

    {key: {"tile": {...}, "case": {...}, "us": ..., "date": ..., "commit": ...}}

where key is what the operation's module returns from `tuning_key(call)`, and case has the fields of the sample (see
`ragged_attention.tools.samples`) that was measured, so that anyone can check that such a call leads to the key. The
folder is `device_slug` of what the framework calls the device. Files are data, read once, on first use.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from ragged_attention.calls import Call
from ragged_attention.errors import InvalidInput


def device_slug(name: str) -> str:
    """`"NVIDIA H200"` -> `"nvidia_h200"`: the folder of a device's tuned sizes."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


@functools.cache
def tuned_table(package: str, device: str, operation: str) -> Mapping[str, Any]:
    """A tuned file's contents, empty if there is no file."""
    path = resources.files(package) / "tuned" / device / f"{operation}.json"
    return json.loads(path.read_text()) if device and path.is_file() else {}


def options_of(tile_type: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(tile_type))


def tile_for(module: Any, call: Call, options: Mapping[str, Any], *, invariant: bool = False) -> Any:
    """The `Tile` that `module` will run `call` with; `options` override single fields of it.

    If `invariant`, bits are to depend on nothing but a sequence.
    """
    tile = module.invariant_tile(call) if invariant else module.heuristic(call)
    if not invariant and hasattr(module, "tuning_key") and call.device.name:
        package, _, operation = module.__name__.rpartition(".")
        entry = tuned_table(package, device_slug(call.device.name), operation).get(module.tuning_key(call))
        tile = module.Tile(**entry["tile"]) if entry else tile
    known = options_of(module.Tile)
    for name in options:
        if name not in known:
            raise InvalidInput(f"expected options among {', '.join(known) or 'none'} for this backend, got {name!r}")
    return dataclasses.replace(tile, **options) if options else tile
