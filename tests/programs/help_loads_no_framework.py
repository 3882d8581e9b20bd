"""Print the help of the command line, and check that no framework is loaded for it."""

import sys

from ragged_attention.tools import cli

assert cli.main(["--help"]) == 0
assert not {"torch", "jax", "triton", "hypothesis", "pytest"} & sys.modules.keys()
