"""Collect the arrays that an operation writes, from its arguments and its results."""

from collections.abc import Mapping
from typing import Any

SCALE_PAGES = ("k_scale_pages", "v_scale_pages")


def written_arrays(arguments: Mapping[str, Any], name: str) -> list[Any]:
    """The arrays of the argument `name`, then the scale pages that are written with it."""
    return leaves((arguments[name], *(arguments.get(scales) for scales in SCALE_PAGES)))


def leaves(value: Any) -> list[Any]:
    """The arrays in nested tuples and lists, without None."""
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    return [] if value is None else [value]
