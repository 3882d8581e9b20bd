"""Run the tests that the arguments name while Numba compiles for a CPU without float16 conversions."""

import sys

import pytest

status = pytest.main(["-q", "-n0", "-p", "no:cacheprovider", *sys.argv[1:]])

# The package must not be imported before pytest starts.
from ragged_attention.portable.numba import _formats  # noqa: E402

assert not _formats.CONVERTS_HALVES
sys.exit(status)
