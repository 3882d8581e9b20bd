"""Batches and checks of `latent_norm_rope_write`, which normalises, rotates and writes latent rows in one operation."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ragged_attention.reference._rotary import normalized, rotated, rounded
from ragged_attention.testing import formats
from ragged_attention.testing.compare import agrees, identical
from ragged_attention.testing.drawing import Check, drawn
from ragged_attention.testing.mla import latents
from ragged_attention.testing.mla.cache_specs import LatentWriteBatch, LatentWriteSpec
from ragged_attention.testing.mla.oracle import canonical
from ragged_attention.testing.runner import Runner

NUM_POSITIONS = 19


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LatentNormRopeBatch(LatentWriteBatch):
    """The arguments of one `latent_norm_rope_write` call in NumPy."""

    OPERATION: ClassVar[str] = "latent_norm_rope_write"

    q: NDArray[np.float32]
    positions: NDArray[np.integer[Any]]
    cos_sin: Any
    kv_weight: NDArray[np.float32] | None = None
    eps: float = 1e-6
    interleaved: bool = False

    def arguments(self) -> dict[str, Any]:
        """The arguments without `d_v`, because the width of `cos_sin` gives the number of rotary columns."""
        return {name: value for name, value in super().arguments().items() if name != "d_v"}

    def layout_of(self, name: str) -> str:
        return "pages" if name == "cos_sin" else super().layout_of(name)

    def rows(self) -> NDArray[np.float64]:
        """The normalised and rotated rows, in float64."""
        rows = self.kv.astype(np.float64)
        if self.kv_weight is not None:
            count = len(self.kv_weight)
            rows[..., :count] = normalized(rows[..., :count], self.kv_weight, self.eps)
        start = rows.shape[-1] - self.q.shape[-1]
        rows[..., start:] = rotated(rows[..., start:], self.positions, self.cos_sin, self.interleaved)
        return rows

    def write(self, kv: NDArray[Any]) -> LatentWriteBatch:
        """The `write_mla_cache` call that writes rows to this call's cache."""
        names = [each.name for each in dataclasses.fields(LatentWriteBatch) if each.init and each.name != "kv"]
        return LatentWriteBatch(kv=kv, **{name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentNormRopeSpec:
    """The parameters of a `latent_norm_rope_write` call."""

    write: LatentWriteSpec
    half: int = 4  # number of rotated pairs of columns
    heads: int = 3
    weights: str = "latent"  # the normalised columns: latent, all, some or none
    interleaved: bool = True
    paired: bool = False
    outside: bool = False  # whether some positions are outside the table
    positions: str = "int32"
    eps: float = 1e-6

    def build(self) -> LatentNormRopeBatch:
        write = self.write.build()
        rng = np.random.default_rng(self.write.seed + 1)
        num_tokens, _, width = write.kv.shape
        half = min(self.half, width // 2)
        counts = {"latent": width - 2 * half, "all": width, "some": width // 3, "none": 0}
        count = counts[self.weights]
        positions = rng.integers(0, NUM_POSITIONS, num_tokens).astype(self.positions)
        if self.outside:
            limits = np.iinfo(positions.dtype)
            wild = rng.choice([-1, NUM_POSITIONS, limits.min, limits.max], num_tokens)
            positions = np.where(rng.random(num_tokens) < 0.5, wild, positions).astype(positions.dtype)
        angles = rng.random((NUM_POSITIONS, half)) * 6
        cos, sin = (values.astype(np.float32) for values in (np.cos(angles), np.sin(angles)))
        names = [each.name for each in dataclasses.fields(LatentWriteBatch) if each.init]
        values = {name: getattr(write, name) for name in names}
        values["d_v"] = None if write.rope_scale is None else width - 2 * half
        return LatentNormRopeBatch(
            **values,
            q=formats.rounded(rng.standard_normal((num_tokens, self.heads, 2 * half)), write.dtype),
            positions=positions,
            cos_sin=(cos, sin) if self.paired else np.concatenate([cos, sin], axis=1),
            kv_weight=formats.rounded(rng.random(count) + 0.5, "float32") if count else None,
            eps=self.eps,
            interleaved=self.interleaved,
        )


CORNERS: dict[str, LatentNormRopeSpec] = {
    "plain": LatentNormRopeSpec(write=LatentWriteSpec(dtype="bfloat16")),
    "plain, float32": LatentNormRopeSpec(write=LatentWriteSpec(tokens=17, num_pages=5), half=8, positions="int64"),
    "two scales": LatentNormRopeSpec(
        write=LatentWriteSpec(stored="float8_e4m3fn", dtype="bfloat16", scale="power", rope="float"), half=8
    ),
    "halves": LatentNormRopeSpec(write=LatentWriteSpec(dtype="float16"), interleaved=False, paired=True),
    "norm of whole rows": LatentNormRopeSpec(write=LatentWriteSpec(d_qk=80), weights="all", half=20, interleaved=False),
    "norm of some columns": LatentNormRopeSpec(write=LatentWriteSpec(d_qk=50), weights="some", half=7),
    "no norm": LatentNormRopeSpec(write=LatentWriteSpec(dtype="bfloat16"), weights="none"),
    "KV heads": LatentNormRopeSpec(write=LatentWriteSpec(kv_heads=2, dtype="bfloat16", scale="power")),
    "positions outside the table": LatentNormRopeSpec(write=LatentWriteSpec(), outside=True, positions="int64"),
    "int64 slots": LatentNormRopeSpec(write=LatentWriteSpec(slots="int64"), outside=True),
    "strided": LatentNormRopeSpec(write=LatentWriteSpec(strided=True, dtype="bfloat16"), paired=True),
    "no tokens": LatentNormRopeSpec(write=LatentWriteSpec(tokens=0)),
    "no query heads": LatentNormRopeSpec(write=LatentWriteSpec(), heads=0),
}


def check_rows(runner: Runner, spec: LatentNormRopeSpec) -> None:
    """Queries, and rows written to a plain cache, agree with the reference.

    The call's own cache equals a separate write of these rows.
    """
    batch = spec.build()
    q, cache = runner.run("latent_norm_rope_write", batch)
    want = rotated(batch.q, batch.positions, batch.cos_sin, batch.interleaved)
    agrees(q, rounded(want, batch.dtype), batch.dtype)
    plain = _into_a_plain_cache(batch)
    _, rows = runner.run("latent_norm_rope_write", plain)
    written, valid = _rows_at(rows, batch)
    agrees(written, rounded(batch.rows(), batch.dtype)[valid], batch.dtype, "rows")
    kv = batch.kv.copy()
    kv[valid] = formats.values_of(written, batch.dtype)
    separate = runner.run("write_mla_cache", batch.write(kv))
    name = batch.format
    got, want = (cache, separate) if name == "plain" else (canonical(cache, name), canonical(separate, name))
    identical(got, want, "cache")


def _into_a_plain_cache(batch: LatentNormRopeBatch) -> LatentNormRopeBatch:
    """The same call with a cache that stores rows unchanged."""
    num_pages, page_size = batch.cache.shape[:2]
    cache = formats.stored(np.zeros((num_pages, page_size, *batch.kv.shape[1:])), batch.dtype)
    return batch.change(
        cache=cache, cache_dtype=batch.dtype, cache_layout=None, kv_scale=None, rope_scale=None, d_v=None,
        power_of_two_scales=True,
    )  # fmt: skip


def _rows_at(cache: NDArray[Any], batch: LatentNormRopeBatch) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """The cache rows of the tokens that are written, and whether each token is written."""
    assert batch.slot_mapping is not None
    slots = batch.slot_mapping.astype(np.int64)
    valid = (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    return cache.reshape(-1, *cache.shape[2:])[slots[valid]], valid


@st.composite
def latent_norm_rope_specs(draw: Any) -> LatentNormRopeSpec:
    """Any valid call, in every cache format."""
    form = draw(st.sampled_from(["plain", "plain", *latents.LAID_OUT]))
    plain = form == "plain"
    stored = draw(st.sampled_from([None, *formats.QUANTIZED])) if plain else None
    return LatentNormRopeSpec(
        write=LatentWriteSpec(
            format=form,
            tokens=draw(st.integers(0, 9)),
            page_size=draw(st.sampled_from([1, 3, 4])),
            kv_heads=draw(st.integers(1, 2)) if plain else 1,
            d_qk=draw(st.sampled_from([16, 48, 72])),
            slots=draw(st.sampled_from(["int32", "int64"])),
            dtype=draw(st.sampled_from(["float32", "float16", "bfloat16"])),
            stored=stored,
            scale=draw(st.sampled_from([None, "power", "float", "heads"])) if plain else None,
            rope=draw(st.sampled_from([None, None, "power", "heads"])) if plain else None,
            strided=draw(st.booleans()),
            seed=draw(st.integers(0, 2**31)),
        ),
        half=draw(st.sampled_from([1, 4, 8, 32])),
        heads=draw(st.integers(1, 3)),
        weights=draw(st.sampled_from(["latent", "latent", "all", "some", "none"])),
        interleaved=draw(st.booleans()),
        paired=draw(st.booleans()),
        outside=draw(st.booleans()),
        positions=draw(st.sampled_from(["int32", "int64"])),
        eps=draw(st.sampled_from([1e-6, 1e-3])),
    )


def _on(spec: LatentNormRopeSpec) -> Callable[[Runner, int], int]:
    def run(runner: Runner, examples: int) -> int:
        del examples
        check_rows(runner, spec)
        return 1

    return run


def corners() -> Iterator[Check]:
    """Checks of the named calls, and of one for each cache format."""
    named = dict(CORNERS)
    for stored in formats.QUANTIZED:
        named[f"plain {stored}"] = LatentNormRopeSpec(
            write=LatentWriteSpec(stored=stored, dtype="bfloat16", scale="float")
        )
    for form in latents.LAID_OUT:
        named[form] = LatentNormRopeSpec(write=LatentWriteSpec(format=form, dtype="bfloat16"), half=32)
    for name, spec in named.items():
        yield Check("corner", f"latent norm, rope and write, {name}", _on(spec))


def agreement() -> Iterator[Check]:
    """A check of drawn calls."""

    def run(runner: Runner, examples: int) -> int:
        return drawn(runner, latent_norm_rope_specs(), lambda spec: check_rows(runner, spec), max(1, examples // 2))

    yield Check("agreement", "latent norm, rope and write on drawn batches", run)
