"""The CPU backends read and write operands at the right addresses, however large the strides."""

import pytest

torch = pytest.importorskip("torch")

from tests import far_strides  # noqa: E402


@pytest.mark.parametrize("backend", ["eager", "numba"])
@pytest.mark.parametrize(("name", "axis"), far_strides.CASES)
def test_strides_may_exceed_32_bits(name: str, axis: int, backend: str) -> None:
    found, expected = far_strides.called(name, axis, backend), far_strides.near(name, backend)
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want), f"largest difference: {float((got.double() - want.double()).abs().max())}"
