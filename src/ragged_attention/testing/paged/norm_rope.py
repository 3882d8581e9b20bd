"""Batches, checks and laws of `norm_rope_write`, which normalises, rotates and writes in one operation."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ragged_attention.reference._rotary import normalized, rotated, rounded
from ragged_attention.reference.write_kv_pages import write_kv_pages
from ragged_attention.testing import formats
from ragged_attention.testing.compare import agrees, identical
from ragged_attention.testing.drawing import Check, drawn
from ragged_attention.testing.paged.corners import ALL_EDGES, MIXED
from ragged_attention.testing.paged.oracle import between
from ragged_attention.testing.paged.specs import Arrays, Pages, Spec, WriteBatch, like_pages, pages_of, split
from ragged_attention.testing.paged.strategies import specs, write_batch
from ragged_attention.testing.runner import Runner

# The error of a norm and a rotation in float32, relative to a row's largest number.
ERROR = 2.0**-19


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NormRopeBatch(Arrays):
    """The arguments of one `norm_rope_write` call in NumPy."""

    q: NDArray[np.float32]
    k: NDArray[np.float32]
    v: NDArray[np.float32]
    kv_pages: Pages
    slot_mapping: NDArray[np.integer[Any]] | None = None
    positions: NDArray[np.integer[Any]]
    cos_sin: Any
    q_weight: NDArray[np.float32] | None = None
    k_weight: NDArray[np.float32] | None = None
    eps: float = 1e-6
    interleaved: bool = False
    page_indices: NDArray[np.int32] | None = None
    kv_lens: NDArray[np.int32] | None = None
    cu_q_lens: NDArray[np.int32] | None = None
    num_seqs: int | NDArray[np.int32] | None = None
    k_scale: float | NDArray[np.float32] | None = None
    v_scale: float | NDArray[np.float32] | None = None

    def layout_of(self, name: str) -> str:
        return "pages" if name == "cos_sin" else super().layout_of(name)

    def exact(self, x: NDArray[np.float32], weight: NDArray[np.float32] | None) -> NDArray[np.float64]:
        """The normalised and rotated rows, in float64."""
        return rotated(normalized(x, weight, self.eps), self.positions, self.cos_sin, self.interleaved)

    def write(self, k: NDArray[Any]) -> WriteBatch:
        """The `write_kv_pages` call that writes `k` and this call's values."""
        names = ("v", "kv_pages", "slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "k_scale",
                 "v_scale", "dtype", "cache_dtype", "strided")  # fmt: skip
        return WriteBatch(k=k, **{name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormRopeSpec:
    """The parameters of a `norm_rope_write` call."""

    spec: Spec
    by_tables: bool = False
    slots: str = "int32"
    positions: str = "int32"
    half: int = 8  # number of rotated pairs of columns, at most half of head_dim
    weights: str = "qk"  # which of q and k are normalised
    weight_dtype: str = "float32"
    eps: float = 1e-6
    interleaved: bool = False
    paired: bool = False  # whether cosines and sines are two arrays
    outside: bool = False  # whether some positions are outside the table

    def build(self) -> NormRopeBatch:
        write = write_batch(self.spec, by_tables=self.by_tables, slot_dtype=np.dtype(self.slots))
        q = dataclasses.replace(self.spec, sharing=None, poison=None, q_scales=None).build().q
        rng = np.random.default_rng(self.spec.seed + 2)
        num_positions, num_tokens, head_dim = 23, len(q), self.spec.head_dim
        positions = rng.integers(0, num_positions, num_tokens).astype(self.positions)
        if self.outside:
            limits = np.iinfo(positions.dtype)
            wild = rng.choice([-1, num_positions, num_positions + 40, limits.min, limits.max], num_tokens)
            positions = np.where(rng.random(num_tokens) < 0.5, wild, positions).astype(positions.dtype)
        angles = rng.random((num_positions, min(self.half, head_dim // 2))) * 6
        cos, sin = (values.astype(np.float32) for values in (np.cos(angles), np.sin(angles)))
        weights = {
            f"{name}_weight": formats.rounded(rng.random(head_dim) + 0.5, self.weight_dtype)
            for name in self.weights
        }  # fmt: skip
        places = {name: getattr(write, name) for name in ("slot_mapping", "page_indices", "kv_lens", "cu_q_lens")}
        return NormRopeBatch(
            q=q, k=write.k, v=write.v, kv_pages=write.kv_pages, positions=positions,
            cos_sin=(cos, sin) if self.paired else np.concatenate([cos, sin], axis=1), **weights, eps=self.eps,
            interleaved=self.interleaved, num_seqs=write.num_seqs, **places, k_scale=write.k_scale,
            v_scale=write.v_scale, dtype=write.dtype, cache_dtype=write.cache_dtype, strided=write.strided,
        )  # fmt: skip


CORNERS: dict[str, NormRopeSpec] = {
    "decode": NormRopeSpec(spec=Spec(lens=((1, 40), (1, 1), (1, 16)), group=4, num_kv_heads=2, dtype="bfloat16")),
    "by tables": NormRopeSpec(spec=Spec(lens=MIXED, num_kv_heads=2, group=2, dtype="float16"), by_tables=True),
    "every edge at once": NormRopeSpec(
        spec=Spec(lens=ALL_EDGES, count="array", spare_seqs=2, padding=3, garbage=True), by_tables=True, outside=True
    ),
    "interleaved": NormRopeSpec(spec=Spec(lens=MIXED, num_kv_heads=2), interleaved=True, paired=True),
    "a part of the head": NormRopeSpec(spec=Spec(lens=MIXED, head_dim=40, group=2), half=5),
    "a part of the head, interleaved": NormRopeSpec(spec=Spec(lens=MIXED, head_dim=24), half=3, interleaved=True),
    "a wide head": NormRopeSpec(spec=Spec(lens=MIXED, head_dim=80, group=3, dtype="bfloat16"), half=40),
    "one pair of columns": NormRopeSpec(spec=Spec(lens=MIXED), half=1),
    "no norm": NormRopeSpec(spec=Spec(lens=MIXED, group=2, dtype="bfloat16"), weights="", slots="int64"),
    "norm of q alone": NormRopeSpec(spec=Spec(lens=MIXED), weights="q", positions="int64"),
    "norm of k alone": NormRopeSpec(spec=Spec(lens=MIXED), weights="k", weight_dtype="bfloat16", eps=0.5),
    "positions outside the table": NormRopeSpec(spec=Spec(lens=MIXED), outside=True),
    "positions outside the table, int64": NormRopeSpec(spec=Spec(lens=MIXED), outside=True, positions="int64"),
    "into a pair": NormRopeSpec(spec=Spec(lens=MIXED, combined=False, v_head_dim=40, num_kv_heads=2, page_size=3)),
    "float8_e4m3fn": NormRopeSpec(
        spec=Spec(lens=MIXED, cache_dtype="float8_e4m3fn", dtype="bfloat16", scales="heads", num_kv_heads=2)
    ),
    "float8_e5m2": NormRopeSpec(spec=Spec(lens=MIXED, cache_dtype="float8_e5m2", scales="float"), by_tables=True),
    "float8_e4m3fnuz": NormRopeSpec(spec=Spec(lens=MIXED, cache_dtype="float8_e4m3fnuz", scales="heads")),
    "int8": NormRopeSpec(spec=Spec(lens=MIXED, cache_dtype="int8", dtype="float16", scales="array", combined=False)),
    "strided": NormRopeSpec(spec=Spec(lens=MIXED, strided=True, num_kv_heads=2, dtype="bfloat16"), paired=True),
    "no tokens": NormRopeSpec(spec=Spec(lens=((0, 5), (0, 0))), by_tables=True),
}


@st.composite
def norm_rope_specs(draw: Any, *, clean: bool = False) -> NormRopeSpec:
    """Any valid `norm_rope_write` call; `clean` excludes what laws add themselves."""
    spec = draw(specs(clean=True) if clean else specs())
    return NormRopeSpec(
        spec=dataclasses.replace(spec, q_scales=None),
        by_tables=draw(st.booleans()),
        slots=draw(st.sampled_from(["int32", "int64"])),
        positions=draw(st.sampled_from(["int32", "int64"])),
        half=draw(st.sampled_from([1, 4, 8, spec.head_dim // 2])),
        weights=draw(st.sampled_from(["", "q", "k", "qk"])),
        weight_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        eps=draw(st.sampled_from([1e-6, 1e-3])),
        interleaved=draw(st.booleans()),
        paired=draw(st.booleans()),
        outside=False if clean else draw(st.booleans()),
    )


def check_norm_rope(runner: Runner, batch: NormRopeBatch) -> None:
    """Queries agree with the reference, written values lie within float32's error, and nothing else is written."""
    q, pages = runner.run("norm_rope_write", batch)
    agrees(q, rounded(batch.exact(batch.q, batch.q_weight), batch.dtype), batch.dtype)
    lower, upper = (_written(batch, sign) for sign in (-1, 1))
    for name, side, low, high in zip("kv", split(pages), split(lower), split(upper), strict=True):
        between(side, low, high, batch.cache_dtype, f"{name} of the pages")


def _written(batch: NormRopeBatch, sign: int) -> Pages:
    """The reference's pages for keys and values that are larger (`sign` 1) or smaller (-1) by float32's error."""
    k = batch.exact(batch.k, batch.k_weight)
    size = np.maximum(np.abs(k).max(-1, keepdims=True, initial=0), np.float64(1e-30))
    v = batch.v.astype(np.float64)
    write = batch.write(rounded(k + sign * ERROR * size, batch.dtype)).change(v=v + sign * 2.0**-22 * np.abs(v))
    if batch.quantized:
        return write_kv_pages(**write.arguments(), **batch.formats)
    pages = write_kv_pages(**write.arguments())
    return like_pages(pages, [formats.rounded(array, batch.cache_dtype) for array in pages_of(pages)])


# ---- laws


def it_is_three_operations(runner: Runner, spec: NormRopeSpec) -> None:
    """The pages have the same bits as after a separate write of the rotated keys.

    The rotated keys are the q that a call with k as its q returns.
    """
    batch = spec.build()
    _, pages = runner.run("norm_rope_write", batch)
    k, _ = runner.run("norm_rope_write", batch.change(q=batch.k, q_weight=batch.k_weight))
    for got, want in zip(pages_of(pages), pages_of(runner.run("write_kv_pages", batch.write(k))), strict=True):
        identical(got, want, "pages")


def angle_zero_rotates_nothing(runner: Runner, spec: NormRopeSpec) -> None:
    """Without weights and with the angle 0, queries do not change."""
    batch = dataclasses.replace(spec, weights="", paired=True).build()
    cos, sin = batch.cos_sin
    q, _ = runner.run("norm_rope_write", batch.change(cos_sin=(np.ones_like(cos), np.zeros_like(sin))))
    identical(q, batch.q, "q")


def rotation_keeps_norms(runner: Runner, spec: NormRopeSpec) -> None:
    """A rotation keeps the norm of each row, and does not change the columns after the rotary ones."""
    batch = dataclasses.replace(spec, weights="", paired=True).build()
    q, _ = runner.run("norm_rope_write", batch)
    width = 2 * batch.cos_sin[0].shape[1]
    identical(q[..., width:], batch.q[..., width:], "the columns that are not rotated")
    got, want = (np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True)) for x in (q, batch.q))
    agrees(got, want, batch.dtype, "norms")


def padding_does_not_spread(runner: Runner, spec: NormRopeSpec) -> None:
    """NaN in the rows of tokens that are not written changes no other token's results."""
    batch = dataclasses.replace(spec, by_tables=False).build()
    assert batch.slot_mapping is not None
    padding = np.random.default_rng(spec.spec.seed).random(len(batch.q)) < 0.3
    batch = batch.change(slot_mapping=np.where(padding, -1, batch.slot_mapping).astype(batch.slot_mapping.dtype))
    rows = {name: np.where(padding[:, None, None], np.nan, getattr(batch, name)) for name in ("q", "k", "v")}
    q, pages = runner.run("norm_rope_write", batch)
    dirty_q, dirty_pages = runner.run(
        "norm_rope_write", batch.change(**{name: array.astype(np.float32) for name, array in rows.items()})
    )
    identical(dirty_q[~padding], q[~padding], "q")
    for got, want in zip(pages_of(dirty_pages), pages_of(pages), strict=True):
        identical(got, want, "pages")


def tokens_may_move(runner: Runner, spec: NormRopeSpec) -> None:
    """Permuting the tokens permutes the queries and leaves the pages the same."""
    batch = dataclasses.replace(spec, by_tables=False).build()
    order = np.random.default_rng(spec.spec.seed).permutation(len(batch.q))
    names = ("q", "k", "v", "positions", "slot_mapping")
    q, pages = runner.run("norm_rope_write", batch)
    moved_q, moved = runner.run(
        "norm_rope_write", batch.change(**{name: getattr(batch, name)[order] for name in names})
    )
    identical(moved_q, q[order], "q")
    for got, want in zip(pages_of(moved), pages_of(pages), strict=True):
        identical(got, want, "pages")


LAWS: dict[str, Callable[[Runner, NormRopeSpec], None]] = {
    "norm and rope and write are three operations": it_is_three_operations,
    "the angle 0 rotates nothing": angle_zero_rotates_nothing,
    "a rotation keeps norms": rotation_keeps_norms,
    "rows of padding do not spread": padding_does_not_spread,
    "tokens may move": tokens_may_move,
}


# ---- the suite


def _on(spec: NormRopeSpec) -> Callable[[Runner, int], int]:
    def run(runner: Runner, examples: int) -> int:
        del examples
        check_norm_rope(runner, spec.build())
        return 1

    return run


def corners() -> Iterator[Check]:
    for name, spec in CORNERS.items():
        yield Check("corner", f"norm, rope and write, {name}", _on(spec))


def agreement() -> Iterator[Check]:
    def run(runner: Runner, examples: int) -> int:
        return drawn(
            runner, norm_rope_specs(), lambda spec: check_norm_rope(runner, spec.build()), max(1, examples // 2)
        )

    yield Check("agreement", "norm, rope and write on drawn batches", run)


def laws() -> Iterator[Check]:
    def check(law: Callable[[Runner, NormRopeSpec], None]) -> Callable[[Runner, int], int]:
        def run(runner: Runner, examples: int) -> int:
            return drawn(runner, norm_rope_specs(clean=True), lambda spec: law(runner, spec), max(1, examples // 2))

        return run

    for name, law in LAWS.items():
        yield Check("law", name, check(law))
