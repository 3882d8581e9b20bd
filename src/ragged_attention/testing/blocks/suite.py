"""The checks of block selection that `suite` includes."""

from collections.abc import Iterator

from ragged_attention.testing.blocks import corners as named
from ragged_attention.testing.blocks.laws import LAWS
from ragged_attention.testing.blocks.oracle import check_exactly_selected, check_scores, check_selected, check_top_k
from ragged_attention.testing.blocks.strategies import blocks_specs, top_k_specs
from ragged_attention.testing.drawing import Check, on_corner, on_drawn, on_drawn_paths, on_every_path

CHECKS = (
    ("block scores", "block_scores", check_scores, named.SCORES_CORNERS, named.ON_EVERY_PATH),
    ("block selection", "select_blocks", check_selected, named.SELECT_CORNERS, ()),
    ("block selection, exact", "select_blocks", check_exactly_selected, named.EXACT_CORNERS,
     named.EXACT_ON_EVERY_PATH),
    ("selection of given blocks", "top_k_blocks", check_top_k, named.TOP_K_CORNERS, named.TOP_K_ON_EVERY_PATH),
)  # fmt: skip


def corners() -> Iterator[Check]:
    """Checks that run every named call with the backend's own options, and some with each set of options."""
    for what, operation, check, builders, on_paths in CHECKS:
        for name, build in builders.items():
            yield Check("corner", f"{what}, {name}", on_corner(check, build))
        for name in on_paths:
            yield Check("corner", f"{what} on every path, {name}", on_every_path(operation, check, builders[name]))


def agreement() -> Iterator[Check]:
    """Checks that compare drawn calls with the reference."""
    for what, operation, check, strategy in (
        ("block scores on drawn batches", "block_scores", check_scores, blocks_specs()),
        ("block selection on drawn batches", "select_blocks", check_selected, blocks_specs()),
        ("block selection, exact", "select_blocks", check_exactly_selected, blocks_specs(exact=True)),
        ("selection of given blocks", "top_k_blocks", check_top_k, top_k_specs()),
    ):
        yield Check("agreement", what, on_drawn_paths(operation, check, strategy))


def laws() -> Iterator[Check]:
    for name, law in LAWS.items():
        yield Check("law", f"blocks, {name}", on_drawn(law, blocks_specs(clean=True, exact=True), 0.3))
