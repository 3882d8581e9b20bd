"""All named shapes: paged, latent and uncached attention, the indexer and block selection."""

from typing import Any

from benchmarks.cases import blocks, indexer, mla, paged, ragged_mla, varlen
from benchmarks.cases.base import Case

FAMILIES = (paged, mla, ragged_mla, varlen, indexer, blocks)
CASES: dict[str, Case] = {name: case for family in FAMILIES for name, case in family.CASES.items()}
COMPILED_ONLY: dict[str, Case] = {name: case for family in FAMILIES for name, case in family.COMPILED_ONLY.items()}


def find(name: str) -> Any:
    """The case with this name. `<name>_small` is its scaled-down version."""
    known = CASES | COMPILED_ONLY
    if name in known:
        return known[name]
    if name.removesuffix("_small") in known:
        return known[name.removesuffix("_small")].scaled_down()
    raise KeyError(f"expected a case among {', '.join(known)}, got {name!r}")
