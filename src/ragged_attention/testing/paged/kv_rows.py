"""Checks of `quantize_kv` and `dequantize_kv`, and of their agreement with writes."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ragged_attention.calls.cache_formats import KvFormat
from ragged_attention.reference.dequantize_kv import dequantize_kv
from ragged_attention.reference.quantize_kv import quantize_kv
from ragged_attention.testing import formats
from ragged_attention.testing.compare import agrees, identical
from ragged_attention.testing.drawing import Check, built, on_corner, on_drawn
from ragged_attention.testing.paged.oracle import bits_of
from ragged_attention.testing.paged.scaled import special_write
from ragged_attention.testing.paged.specs import Arrays, WriteBatch, split
from ragged_attention.testing.paged.strategies import scaled_write_specs
from ragged_attention.testing.runner import Runner

Scale = float | NDArray[np.float32] | None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class QuantizeRows(Arrays):
    """The arguments of one `quantize_kv` call in NumPy."""

    x: NDArray[np.float32]
    format: str
    scale: Scale = None
    zero: str | None = None
    scales_dtype: str | None = None

    def dtype_of(self, name: str, array: NDArray[Any]) -> str:
        return self.dtype if name == "x" else super().dtype_of(name, array)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DequantizeRows(Arrays):
    """The arguments of one `dequantize_kv` call in NumPy; `dtype` is the result's dtype."""

    codes: NDArray[Any]
    scales: NDArray[Any] | None = None
    scale: Scale = None

    @property
    def form(self) -> KvFormat:
        return self.formats["k_format"]

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | {"dtype": self.dtype}

    def dtype_of(self, name: str, array: NDArray[Any]) -> str:
        if name == "codes":
            return formats.element_of(self.form)
        return self.form.scales if name == "scales" else super().dtype_of(name, array)


def described(form: KvFormat) -> dict[str, Any]:
    """The arguments that describe a format to `quantize_kv`."""
    return {"format": form.name, "zero": form.zero or None, "scales_dtype": form.scales if form.zero else None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsSpec:
    """The parameters of a `quantize_kv` call, and of a `dequantize_kv` call for its results."""

    name: str = "int8_token_head"  # one of `formats.KV_FORMATS`
    rows: tuple[int, ...] = (2, 3, 2)
    width: int = 64
    dtype: str = "float32"
    scale: str | None = None  # kind of `scale`: None, "float" or "heads"
    reach: int = 0  # rows are scaled by up to this power of ten, up or down
    wild: bool = False  # whether `dequantize_kv` gets scales of any sign and size
    strided: bool = False
    seed: int = 0

    def build(self) -> QuantizeRows:
        rng = np.random.default_rng(self.seed)
        sizes = 10.0 ** rng.uniform(-self.reach, self.reach, (*self.rows, 1))
        x = formats.rounded(rng.standard_normal((*self.rows, self.width)) * sizes, self.dtype)
        form = formats.KV_FORMATS[self.name]
        return QuantizeRows(x=x, scale=self._scale(), dtype=self.dtype, strided=self.strided, **described(form))

    def stored(self) -> DequantizeRows:
        """A `dequantize_kv` call on rows in the format, which may have no scales."""
        rng, form = np.random.default_rng(self.seed), formats.KV_FORMATS[self.name]
        scales = None
        if form.scaled:
            codes, scales = quantize_kv(**self.build().change(scale=None).arguments())
            scales = formats.any_scales(rng, scales.shape, form) if self.wild and form.group else scales
        else:
            x = rng.standard_normal((*self.rows, self.width))
            codes = formats.stored(x * (40 if form.codes == "int8" else 1), form.codes)
        if scales is not None and scales.dtype != np.uint8:
            scales = scales.astype(np.float32)
        return DequantizeRows(
            codes=codes, scales=scales, scale=self._scale(), dtype=self.dtype, strided=self.strided,
            stored=(self.name, self.name),
        )  # fmt: skip

    def _scale(self) -> Scale:
        heads = np.array([0.5, 2.0], np.float32)[: self.rows[-1] if self.rows else 1]
        return {None: None, "float": 0.25, "heads": heads}[self.scale]


def check_quantize(runner: Runner, batch: QuantizeRows) -> None:
    """Codes and scales have the reference's bits."""
    codes, scales = runner.run("quantize_kv", batch)
    want_codes, want_scales = quantize_kv(**batch.arguments())
    identical(codes, want_codes, "codes")
    identical(bits_of(scales), bits_of(want_scales.astype(scales.dtype)), "scales")


def check_dequantize(runner: Runner, batch: DequantizeRows) -> None:
    want = dequantize_kv(**batch.arguments(), kv_format=batch.form)
    got = runner.run("dequantize_kv", batch)
    agrees(got, formats.rounded(want, batch.dtype), batch.dtype, "values", constant=True)


def check_stored(runner: Runner, spec: RowsSpec) -> None:
    check_dequantize(runner, spec.stored())


def a_write_quantises(runner: Runner, batch: WriteBatch) -> None:
    """A write stores the same codes and scales that `quantize_kv` returns for its rows."""
    slots = batch.slot_mapping
    assert slots is not None
    cache, *scale_pages = runner.run("write_kv_pages", batch)
    forms, rows = batch.formats.values(), (batch.k, batch.v)
    for pages, scales, x, form in zip(split(cache), scale_pages, rows, forms, strict=True):
        if scales is None:
            continue
        quantized_rows = runner.run("quantize_kv", QuantizeRows(x=x, dtype=batch.dtype, **described(form)))
        valid = (slots >= 0) & (slots < pages.shape[0] * pages.shape[1])
        for array, want in zip((pages, scales), quantized_rows, strict=True):
            stored = np.ascontiguousarray(array.reshape(-1, *array.shape[2:])[slots[valid]])
            identical(bits_of(stored), bits_of(want.reshape(len(x), *array.shape[2:])[valid]), "what is stored")


ROWS: dict[str, dict[str, Any]] = {
    "bfloat16 rows as in pages, strided": {"dtype": "bfloat16", "strided": True},
    "float16 rows, a scale per head": {"rows": (5, 2), "dtype": "float16", "scale": "heads", "width": 96},
    "one row": {"rows": (), "scale": "float"},
    "no rows": {"rows": (0, 2), "scale": "heads"},
    "rows of every size": {"rows": (40, 1), "reach": 6, "wild": True},
}


def corners() -> Iterator[Check]:
    for name in formats.SCALED:
        for what, fields in ROWS.items():
            spec = RowsSpec(name=name, **fields)
            yield Check("corner", f"rows quantised, {name}, {what}", on_corner(built(check_quantize), lambda s=spec: s))
            yield Check("corner", f"rows dequantised, {name}, {what}", on_corner(check_stored, lambda s=spec: s))
        build: Callable[[], Any] = lambda name=name: special_rows(name)  # noqa: E731
        yield Check("corner", f"rows quantised, {name}, special values", on_corner(check_quantize, build))
    for name in (*formats.QUANTIZED, "bfloat16"):
        build = lambda name=name: RowsSpec(name=name, scale="heads")  # noqa: E731
        yield Check("corner", f"rows dequantised, {name} without scales", on_corner(check_stored, build))


def special_rows(name: str) -> QuantizeRows:
    return QuantizeRows(x=special_write(name).k, **described(formats.KV_FORMATS[name]))


specs = st.builds(
    RowsSpec,
    name=st.sampled_from([*formats.SCALED]),
    rows=st.sampled_from([(), (2,), (3, 1), (2, 3, 2), (0, 2)]),
    width=st.sampled_from([32, 64, 96]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    scale=st.sampled_from([None, "float", "heads"]),
    reach=st.sampled_from([0, 3]),
    wild=st.booleans(),
    strided=st.booleans(),
    seed=st.integers(0, 2**16),
)


def agreement() -> Iterator[Check]:
    yield Check("agreement", "rows quantised on drawn batches", on_drawn(built(check_quantize), specs, 0.3))
    yield Check("agreement", "rows dequantised on drawn batches", on_drawn(check_stored, specs, 0.3))


def laws() -> Iterator[Check]:
    by_slots = scaled_write_specs.map(lambda spec: dataclasses.replace(spec, by_tables=False))
    yield Check("law", "over rows: a write quantises", on_drawn(built(a_write_quantises), by_slots, 0.3))
