"""Run the tests that the arguments name, with Numba compiling for a CPU that does not convert halves."""

import sys

import pytest

status = pytest.main(["-q", "-n0", "-p", "no:cacheprovider", *sys.argv[1:]])

# pytest must not find the package imported.
from ragged_attention.portable.numba import _formats  # noqa: E402

assert not _formats.CONVERTS_HALVES
sys.exit(status)
