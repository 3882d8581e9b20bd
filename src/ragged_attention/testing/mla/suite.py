"""The checks of the operations on latent caches that `suite` includes."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ragged_attention.testing import max_logits
from ragged_attention.testing.compare import identical
from ragged_attention.testing.drawing import Check, built, on_corner, on_drawn, on_drawn_paths, on_every_path
from ragged_attention.testing.mla import corners as mla_corners
from ragged_attention.testing.mla import norm_rope, ragged
from ragged_attention.testing.mla.laws import MLA_LAWS
from ragged_attention.testing.mla.oracle import (
    check_decode,
    check_decode_by_schedule,
    check_dequantize,
    check_latent_write,
    check_prefill,
    check_quantize,
    check_schedule,
    check_slots,
)
from ragged_attention.testing.mla.specs import DecodeBatch, DecodeSpec, PrefillBatch, PrefillSpec
from ragged_attention.testing.mla.strategies import (
    decode_specs,
    dequantize_specs,
    latent_write_specs,
    prefill_specs,
    quantize_specs,
    schedule_specs,
    slots_specs,
)
from ragged_attention.testing.runner import Absent, Runner

Corners = Mapping[str, Callable[[], Any]]
CORNERS: tuple[tuple[str, Callable[[Runner, Any], None], Corners], ...] = (
    ("sparse prefill", check_prefill, mla_corners.PREFILL_CORNERS),
    ("latent decode", check_decode, mla_corners.DECODE_CORNERS),
    ("decode schedule", check_schedule, {name: spec.build for name, spec in mla_corners.SCHEDULES.items()}),
    ("quantize latents", check_quantize, mla_corners.QUANTIZE_CORNERS),
    ("dequantize latents", check_dequantize, mla_corners.DEQUANTIZE_CORNERS),
    ("write latents", check_latent_write, mla_corners.LATENT_WRITE_CORNERS),
    ("slots", check_slots, mla_corners.SLOTS_CORNERS),
)
INVARIANT = DecodeSpec(topk=0, kv_lens=(300, 3, 70), page_size=16, heads=3, dtype="bfloat16")


def check_invariance(runner: Runner, spec: DecodeSpec) -> None:
    """With one split, a sequence's results have the same bits alone and in a batch."""
    if "num_splits" not in runner.tunables("mla_decode"):
        raise Absent(f"{runner.backend} has no num_splits for mla_decode")
    batch, options = spec.build(), {"num_splits": 1}
    out, lse = runner.run("mla_decode", batch, options=options)
    for seq in range(batch.num_seqs):
        own_out, own_lse = runner.run("mla_decode", batch.alone(seq), options=options)
        identical(own_out[0], out[seq], f"out of sequence {seq}")
        identical(own_lse[0], lse[seq], f"lse of sequence {seq}")


def check_decoded(runner: Runner, batch: PrefillBatch) -> None:
    """Run `check_prefill` on a path that dequantises the whole cache first, even if that is slower."""
    if "decoded" not in runner.tunables("sparse_mla_prefill"):
        raise Absent(f"{runner.backend} has no decoded for sparse_mla_prefill")
    check_prefill(runner, batch, {"decoded": True})


def check_decode_determinism(runner: Runner, spec: DecodeSpec) -> None:
    batch = spec.build()
    for name, one, other in zip(
        ("out", "lse"), runner.run("mla_decode", batch), runner.run("mla_decode", batch), strict=True
    ):
        identical(one, other, name)


def check_prefill_determinism(runner: Runner, spec: PrefillSpec) -> None:
    batch = spec.build()
    names = ("out", "max_logits", "lse")
    for name, one, other in zip(
        names, runner.run("sparse_mla_prefill", batch), runner.run("sparse_mla_prefill", batch), strict=True
    ):
        identical(one, other, name)


def _decode_on_every_path(build: Callable[[], DecodeBatch]) -> Callable[[Runner, int], int]:
    """The `run` of a check with each set of options and with a schedule, which is an argument and not an option."""
    run = on_every_path("mla_decode", check_decode, build)

    def with_schedule(runner: Runner, examples: int) -> int:
        taken = run(runner, examples)
        check_decode_by_schedule(runner, build())
        return taken

    return with_schedule


def corners() -> Iterator[Check]:
    """Checks that run every named batch with the backend's own options, and some with each set of options."""
    for what, check, builders in CORNERS:
        for name, build in builders.items():
            yield Check("corner", f"{what}, {name}", on_corner(check, build))
    for name in mla_corners.PREFILLS_ON_EVERY_PATH:
        run = on_every_path("sparse_mla_prefill", check_prefill, mla_corners.PREFILL_CORNERS[name])
        yield Check("corner", f"sparse prefill on every path, {name}", run)
    for name, spec in mla_corners.PREFILLS_DECODED.items():
        yield Check("corner", f"sparse prefill, decoded first, {name}", on_corner(check_decoded, spec.build))
    for name in mla_corners.ON_EVERY_PATH:
        run = _decode_on_every_path(mla_corners.DECODE_CORNERS[name])
        yield Check("corner", f"latent decode on every path, {name}", run)
    yield Check("corner", "latent decode, bits whatever the batch", on_corner(check_invariance, lambda: INVARIANT))
    yield from ragged.corners()
    yield from max_logits.corners("ragged_mla_attention")
    yield from norm_rope.corners()


def agreement() -> Iterator[Check]:
    """Checks that compare drawn batches with the reference, and checks that results repeat with the same bits."""
    yield Check(
        "agreement",
        "sparse prefill on drawn batches",
        on_drawn_paths("sparse_mla_prefill", check_prefill, prefill_specs()),
    )
    yield Check(
        "agreement", "latent decode on drawn batches", on_drawn_paths("mla_decode", check_decode, decode_specs())
    )
    for name, check, strategy, share in (
        ("latent decode by a schedule", built(check_decode_by_schedule), decode_specs(), 0.2),
        ("sparse prefill, the same bits again", check_prefill_determinism, prefill_specs(), 0.1),
        ("latent decode, the same bits again", check_decode_determinism, decode_specs(), 0.1),
        ("latent decode, bits whatever the batch", check_invariance, decode_specs(), 0.2),
        ("decode schedule on drawn batches", built(check_schedule), schedule_specs(), 1.0),
        ("quantize latents on drawn batches", built(check_quantize), quantize_specs(), 0.5),
        ("dequantize latents on drawn batches", built(check_dequantize), dequantize_specs, 0.5),
        ("write latents on drawn batches", built(check_latent_write), latent_write_specs(), 0.5),
        ("slots on drawn batches", built(check_slots), slots_specs, 0.5),
    ):
        yield Check("agreement", name, on_drawn(check, strategy, share))
    yield from ragged.agreement()
    yield from max_logits.agreement("ragged_mla_attention")
    yield from norm_rope.agreement()


def laws() -> Iterator[Check]:
    """Checks of properties that need no reference result."""
    for name, law in MLA_LAWS.items():
        yield Check("law", name, on_drawn(law.holds, law.specs, 0.5))
    yield from ragged.laws()
    yield from max_logits.laws("ragged_mla_attention")
