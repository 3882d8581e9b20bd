"""Compare results with the reference, within tolerances.

The expected values are the reference's, computed in float64 from inputs that are already rounded to their dtypes.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragged_attention.reference._kv_layout import widened

SIXTEEN_BITS = (8e-4, 2.01 / 128)
# |got - want| <= first + second * |want|, by the dtype of the output. Calls with 8-bit caches use bfloat16's bounds.
BOUNDS = {
    "float32": (2e-5, 2e-5),
    "float16": SIXTEEN_BITS,
    "bfloat16": SIXTEEN_BITS,
    "lse float32": (2e-5, 2e-5),
    "lse float16": (1e-5, 2e-4),
    "lse bfloat16": (1e-5, 2e-4),
}
COSINE = 5e-6
# FlashMLA's bounds: |got - want| < first, or |got - want| / (|want| + 1e-6) < second. The third number
# bounds the cosine difference.
EITHER = {
    "decode out": (8e-4, 2.01 / 128, 5e-6),
    "decode lse": (1e-6, 8.01 / 65536, 1e-7),
    "prefill out": (8e-4, 2.01 / 128, 7e-6),
    "prefill max_logits": (1e-6, 2.01 / 65536, 1e-7),
    "prefill lse": (1e-6, 2.01 / 65536, 1e-7),
    "varlen out": (1e-3, 8.01 / 128, 7e-6),
    "varlen lse": (1e-6, 2.01 / 65536, 1e-7),
    "gradient": (1e-3, 8.01 / 128, 7e-6),
}
# A cosine difference averages over rows. With fewer than MANY non-zero rows, the rounding errors of 2^-9 in the
# weights, in the numbers that they multiply and in the result may all have one sign. Then an error of 2^-7 of a
# vector's length is normal.
MANY = 64
OF_FEW = {"varlen out": 2.0**-15, "gradient": 2.0**-15}


def agrees(
    got: ArrayLike,
    want: ArrayLike,
    kind: str,
    what: str = "out",
    *,
    constant: bool = False,
    allowance: NDArray[np.float64] | float = 0.0,
) -> bool:
    """Return True if `got` equals `want` within the bounds of `kind`; else raise AssertionError with the worst element.

    Each element may also be wrong by its `allowance` (`rounded_weights`), which broadcasts against `want`. The places
    of NaN and infinity are compared first, then each element, then the cosine difference. 32-bit kinds have no bound
    on the cosine difference. It is skipped if all values are equal (`constant`), because then their rounding errors are
    equal too. It is also skipped for a gradient whose elements cancel to less than a tenth of the bound: only rounding
    errors are left, and these have no direction.
    """
    got, want = _finite_alike(got, want, what)
    finite = np.isfinite(want)
    error = np.abs(np.where(finite, got, 0.0) - np.where(finite, want, 0.0))
    error = np.maximum(error - allowance, 0.0) if np.any(allowance) else error
    excess, bound = _excess(error, np.abs(np.where(finite, want, 0.0)), kind)
    if excess.size and excess.max() > 1:
        index = _worst(excess)
        raise AssertionError(
            f"{what}{index}: expected {want[tuple(index)]:.8g} within {bound}, "
            f"got {got[tuple(index)]:.8g}, {excess.max():.3g} times the bound; "
            f"{int((excess > 1).sum())} of {excess.size} elements are beyond it"
        )
    cosine = EITHER[kind][2] if kind in EITHER else COSINE * (kind in ("float16", "bfloat16"))
    if kind in OF_FEW and np.count_nonzero(want if want.ndim < 2 else want.any(axis=-1)) < MANY:
        cosine = OF_FEW[kind]
    cancelled = kind == "gradient" and bool((np.abs(want[finite]) < EITHER[kind][0] / 10).all())
    if cosine and not constant and not cancelled:
        if np.any(allowance):
            cosine = _wider(cosine, np.broadcast_to(allowance, want.shape)[finite], want[finite])
        _same_direction(got[finite], want[finite], what, cosine)
    return True


def _wider(cosine: float, allowance: NDArray[np.float64], want: NDArray[np.float64]) -> float:
    """The bound on the cosine difference, widened for an additional error whose norm is that of `allowance`.

    A cosine difference is half the square of the relative error.
    """
    length = float(np.sqrt((want**2).sum()))
    added = float(np.sqrt((allowance**2).sum())) / length if length else 0.0
    return (np.sqrt(2 * cosine) + added) ** 2 / 2


def _excess(error: NDArray[np.float64], size: NDArray[np.float64], kind: str) -> tuple[NDArray[np.float64], str]:
    """Each error divided by its bound, and the bound as text."""
    if kind in EITHER:
        absolute, relative, _ = EITHER[kind]
        either = np.minimum(error / absolute, error / (size + 1e-6) / relative)
        return either, f"{absolute:g} or {relative:.3g} * |value|"
    absolute, relative = BOUNDS[kind]
    return error / (absolute + relative * size), f"{absolute:g} + {relative:.3g} * |value|"


def identical(got: ArrayLike, want: ArrayLike, what: str = "out") -> bool:
    """Return True if two arrays have equal values, with NaN equal to NaN; else raise AssertionError."""
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape:
        raise AssertionError(f"{what}: expected shape {want.shape}, got {got.shape}")
    differs = (got != want) & ~((got != got) & (want != want))
    if differs.any():
        index = _worst(differs)
        raise AssertionError(
            f"{what}{index}: expected exactly {want[tuple(index)]}, got {got[tuple(index)]}; "
            f"{int(differs.sum())} of {differs.size} elements differ"
        )
    return True


def _worst(excess: NDArray[Any]) -> list[int]:
    return [int(index) for index in np.unravel_index(int(np.argmax(excess)), excess.shape)]


def _finite_alike(got: ArrayLike, want: ArrayLike, what: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Both arrays as float64; raises AssertionError unless shapes and the positions of NaN and infinities are equal."""
    got, want = widened(got), widened(want)
    if got.shape != want.shape:
        raise AssertionError(f"{what}: expected shape {want.shape}, got {got.shape}")
    for name, where in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        _same_places(name, where(got), where(want), got, want, what)
    return got, want


def _same_places(name: str, got: Any, want: Any, got_values: Any, want_values: Any, what: str) -> None:
    if (differs := got != want).any():
        index = _worst(differs)
        raise AssertionError(
            f"{what}{index}: expected {want_values[tuple(index)]:.8g}, got {got_values[tuple(index)]:.8g}; "
            f"{int(differs.sum())} of {differs.size} elements are {name} in one and not in the other"
        )


def _same_direction(got: NDArray[np.float64], want: NDArray[np.float64], what: str, bound: float) -> None:
    total = float((got * got + want * want).sum())
    difference = 1 - 2 * float((got * want).sum()) / total if total > 0 else 0.0
    if difference > bound:
        raise AssertionError(f"{what}: expected a cosine difference <= {bound:g}, got {difference:.3g}")


# The bounds of the indexer's logits: the cosine difference of all logits, and each logit's error relative to the sum of
# its products' magnitudes.
LOGITS = (5e-6, 5e-4)


def logits_agree(got: ArrayLike, want: ArrayLike, magnitudes: ArrayLike, what: str = "logits") -> bool:
    """Return True if the indexer's logits are as expected; else raise AssertionError.

    `magnitudes` are the sums of the products' absolute values. A matrix unit for 8-bit floats keeps about 13 bits of
    its sums, so errors are relative to these sums and not to the logits, in which products cancel.
    """
    got, want = _finite_alike(got, want, what)
    finite = np.isfinite(want)
    bound = LOGITS[1] * np.asarray(magnitudes)[finite] + np.finfo(np.float32).tiny
    excess = np.abs(got[finite] - want[finite]) / bound
    if excess.size and excess.max() > 1:
        index = np.argwhere(finite)[int(np.argmax(excess))].tolist()
        raise AssertionError(
            f"{what}{index}: expected {want[tuple(index)]:.8g} within {bound[np.argmax(excess)]:.3g}, "
            f"got {got[tuple(index)]:.8g}; {int((excess > 1).sum())} of {excess.size} elements are beyond it"
        )
    _same_direction(got[finite], want[finite], what, LOGITS[0])
    return True


def chosen_agree(got: ArrayLike, logits: ArrayLike, magnitudes: ArrayLike, top_k: int) -> bool:
    """Return True if each row has the columns of its `top_k` largest logits; else raise AssertionError.

    Columns whose logits are equal within rounding errors may replace each other.
    """
    got, logits = np.asarray(got), widened(logits)
    if got.shape != (len(logits), top_k):
        raise AssertionError(f"expected shape {(len(logits), top_k)}, got {got.shape}")
    for row, (columns, values, sizes) in enumerate(zip(got, logits, np.asarray(magnitudes), strict=True)):
        values = np.where(np.isnan(values), -np.inf, values)
        possible = values > -np.inf
        count = min(top_k, int(possible.sum()))
        chosen = columns[:count]
        if (columns[count:] != -1).any() or (np.diff(chosen) <= 0).any():
            raise AssertionError(f"row {row}: expected {count} columns in ascending order, then -1, got {columns}")
        if not ((chosen >= 0) & (chosen < len(values))).all() or not possible[chosen].all():
            raise AssertionError(f"row {row}: expected columns that are seen, got {columns}")
        left = possible.copy()
        left[chosen] = False
        if count and left.any():
            slack = LOGITS[1] * np.where(possible & np.isfinite(sizes), sizes, 0.0)
            least, most = (values + slack)[chosen].min(), (values - slack)[left].max()
            if least < most:
                raise AssertionError(f"row {row}: expected no logit above {least:.8g} to be left out, got {most:.8g}")
    return True
