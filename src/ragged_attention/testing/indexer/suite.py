"""The checks of the indexer that `suite` includes."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ragged_attention.testing.drawing import Check, built, on_corner, on_drawn, on_drawn_paths, on_every_path
from ragged_attention.testing.indexer import corners as named
from ragged_attention.testing.indexer import targets
from ragged_attention.testing.indexer.gradients import check_gradient
from ragged_attention.testing.indexer.laws import GRADIENT_LAWS, LAWS
from ragged_attention.testing.indexer.oracle import (
    check_exact_topk,
    check_logits,
    check_quantize_keys,
    check_select,
    check_topk,
    check_write_keys,
)
from ragged_attention.testing.indexer.specs import IndexerBatch, IndexerSpec
from ragged_attention.testing.indexer.strategies import (
    indexer_specs,
    listed_specs,
    logits_gradient_specs,
    quantize_keys_specs,
    select_specs,
    table_write_specs,
    target_specs,
    write_keys_specs,
)

CheckOf = Callable[..., None]
CORNERS: tuple[tuple[str, CheckOf, Mapping[str, Callable[[], Any]]], ...] = (
    ("indexer logits", check_logits, named.LOGITS_CORNERS),
    ("indexer gradient", check_gradient, named.GRADIENT_CORNERS),
    ("indexer target", targets.check_target, named.TARGET_CORNERS),
    ("indexer top-k", check_topk, named.TOPK_CORNERS),
    ("indexer top-k, exact", check_exact_topk, named.EXACT_CORNERS),
    ("indexer selection", check_select, named.SELECT_CORNERS),
    ("indexer keys quantised", check_quantize_keys, named.QUANTIZE_CORNERS),
    ("indexer keys written", check_write_keys, named.WRITE_CORNERS),
)
ON_EVERY_PATH: tuple[tuple[str, str, CheckOf, Mapping[str, Callable[[], Any]], tuple[str, ...]], ...] = (
    (
        "indexer logits", "indexer_logits", check_logits, named.LOGITS_CORNERS,
        (*named.ON_EVERY_PATH, *named.LISTED_ON_EVERY_PATH),
    ),
    (
        "indexer gradient", "indexer_logits_backward", check_gradient, named.GRADIENT_CORNERS,
        named.GRADIENTS_ON_EVERY_PATH,
    ),
    ("indexer target", "attention_target", targets.check_target, named.TARGET_CORNERS, named.TARGETS_ON_EVERY_PATH),
    ("indexer top-k", "indexer_topk", check_exact_topk, named.EXACT_CORNERS, named.EXACT_ON_EVERY_PATH),
    ("indexer selection", "top_k_indices", check_select, named.SELECT_CORNERS, named.SELECT_ON_EVERY_PATH),
)  # fmt: skip


def corners() -> Iterator[Check]:
    """Checks that run every named call with the backend's own options, and some with each set of options."""
    for what, check, builders in CORNERS:
        for name, build in builders.items():
            yield Check("corner", f"{what}, {name}", on_corner(check, build))
    for what, operation, check, builders, names in ON_EVERY_PATH:
        for name in names:
            run = on_every_path(operation, check, builders[name])
            yield Check("corner", f"{what} on every path, {name}", run)


def agreement() -> Iterator[Check]:
    """Checks that compare drawn calls with the reference."""
    yield Check(
        "agreement", "indexer logits on drawn batches", on_drawn_paths("indexer_logits", check_logits, indexer_specs())
    )
    listed = on_drawn_paths("indexer_logits", check_logits, listed_specs())
    yield Check("agreement", "indexer logits of drawn lists", listed)
    gradients = on_drawn_paths("indexer_logits_backward", check_gradient, logits_gradient_specs())
    yield Check("agreement", "indexer gradients on drawn batches", gradients)
    drawn_targets = on_drawn_paths("attention_target", targets.check_target, target_specs())
    yield Check("agreement", "indexer targets on drawn batches", drawn_targets)
    topk = indexer_specs().map(_Topk)
    yield Check("agreement", "indexer top-k on drawn batches", on_drawn_paths("indexer_topk", check_topk, topk))
    exact = indexer_specs(exact=True).map(_Topk)
    yield Check("agreement", "indexer top-k, exact", on_drawn_paths("indexer_topk", check_exact_topk, exact))
    yield Check(
        "agreement", "indexer selection on drawn rows", on_drawn_paths("top_k_indices", check_select, select_specs)
    )
    for name, check, strategy in (
        ("indexer keys quantised on drawn rows", check_quantize_keys, quantize_keys_specs),
        ("indexer keys written on drawn rows", check_write_keys, write_keys_specs),
        ("indexer keys written by drawn tables", check_write_keys, table_write_specs()),
    ):
        yield Check("agreement", name, on_drawn(built(check), strategy, 0.5))


class _Topk:
    """A spec that builds an `indexer_topk` call."""

    def __init__(self, spec: IndexerSpec) -> None:
        self.spec = spec

    def __repr__(self) -> str:
        return f"{self.spec!r}.build_topk()"

    def build(self) -> IndexerBatch:
        return self.spec.build_topk()


def laws() -> Iterator[Check]:
    for name, law in LAWS.items():
        yield Check("law", f"indexer, {name}", on_drawn(law, indexer_specs(clean=True, exact=True), 0.3))
    for name, target_law in targets.LAWS.items():
        yield Check("law", f"indexer, {name}", on_drawn(target_law, target_specs(clean=True), 0.3))
    clean = logits_gradient_specs(clean=True, exact=True, dtype="float32")
    for name, gradient_law in GRADIENT_LAWS.items():
        yield Check("law", f"indexer, {name}", on_drawn(gradient_law, clean, 0.3))
