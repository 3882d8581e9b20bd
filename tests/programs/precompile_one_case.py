"""Precompile the Triton kernels of one small case; the arguments are those of benchmarks.device.precompile."""

import sys

from benchmarks.device import checks, precompile

checks.SMALL = {"triton": ("mla_sparse_h16_b8",)}
sys.exit(precompile.main(sys.argv[1:]))
