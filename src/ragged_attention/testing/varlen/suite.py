"""The checks of attention over packed sequences and of gradients that `suite` includes."""

from collections.abc import Iterator

from ragged_attention.testing import max_logits
from ragged_attention.testing.drawing import Check, built, on_corner, on_drawn, on_drawn_paths, on_every_path
from ragged_attention.testing.varlen import corners as varlen_corners
from ragged_attention.testing.varlen.laws import SPARSE_GRADIENT_LAWS, VARLEN_LAWS
from ragged_attention.testing.varlen.oracle import (
    check_gradients,
    check_same_bits,
    check_varlen,
    check_varlen_without_lse,
)
from ragged_attention.testing.varlen.strategies import sparse_gradient_specs, varlen_gradient_specs, varlen_specs


def corners() -> Iterator[Check]:
    """Checks that run every named batch with the backend's own options, and some with each set of options."""
    for name, spec in varlen_corners.VARLENS.items():
        yield Check("corner", f"packed, {name}", on_corner(check_varlen, spec.build))
    gradients = (
        ("varlen_attention_backward", "packed gradient", varlen_corners.DENSE_GRADIENTS, varlen_corners.ON_EVERY_PATH),
        (
            "sparse_mla_prefill_backward", "sparse gradient", varlen_corners.SPARSE_GRADIENTS,
            varlen_corners.SPARSES_ON_EVERY_PATH,
        ),
    )  # fmt: skip
    for operation, what, builders, chosen in gradients:
        for name, build in builders.items():
            yield Check("corner", f"{what}, {name}", on_corner(check_gradients, build))
        for name in chosen:
            yield Check(
                "corner", f"{what} on every path, {name}", on_every_path(operation, check_gradients, builders[name])
            )
    for name in varlen_corners.ON_EVERY_PATH:
        run = on_every_path("varlen_attention", check_varlen, varlen_corners.VARLENS[name].build)
        yield Check("corner", f"packed on every path, {name}", run)
    for name, spec in varlen_corners.SAME_BITS.items():
        yield Check("corner", f"{name} gradients, the same bits in every run", on_corner(check_same_bits, spec.build))
    yield from max_logits.corners("varlen_attention")


def agreement() -> Iterator[Check]:
    """Checks that compare drawn batches with the reference, and checks that gradients repeat with the same bits."""
    for name, operation, check, strategy in (
        ("packed", "varlen_attention", check_varlen, varlen_specs()),
        ("packed gradient", "varlen_attention_backward", check_gradients, varlen_gradient_specs()),
        ("sparse gradient", "sparse_mla_prefill_backward", check_gradients, sparse_gradient_specs()),
    ):
        yield Check("agreement", f"{name} on drawn batches", on_drawn_paths(operation, check, strategy))
    for name, check, strategy in (
        ("packed without lse", check_varlen_without_lse, varlen_specs()),
        ("packed gradients, the same bits again", check_same_bits, varlen_gradient_specs()),
        ("sparse gradients, the same bits again", check_same_bits, sparse_gradient_specs()),
    ):
        yield Check("agreement", name, on_drawn(built(check), strategy, 0.1))
    yield from max_logits.agreement("varlen_attention")


def laws() -> Iterator[Check]:
    """Checks of properties that need no reference result."""
    for name, law in (VARLEN_LAWS | SPARSE_GRADIENT_LAWS).items():
        yield Check("law", name, on_drawn(law.holds, law.specs, 0.5))
    yield from max_logits.laws("varlen_attention")
