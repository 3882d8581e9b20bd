"""Checks of decode whose work two cores divide, in every mode.

As a script, the module runs these checks with the command line of testing.tpu_interpreter.
"""

import itertools
import sys

from ragged_attention.testing import Spec, tpu_interpreter
from ragged_attention.testing.drawing import Check
from ragged_attention.testing.heads_first.specs import PagedSpec, check_paged
from ragged_attention.testing.runner import Runner

MODES = tuple(itertools.product((None, "batch", "kv_head"), (True, False)))


def check_of(megacore_mode: str | None, inline_seq_dim: bool) -> Check:
    """A check of a decode in which the cores end at different times.

    The sequences have different lengths: one is empty, and one is a whole page.
    """

    def run(runner: Runner, examples: int) -> int:
        del examples
        spec = Spec(lens=((1, 19), (1, 0), (1, 8), (1, 32)), num_kv_heads=2, group=3, head_dim=16, page_size=8)
        options = {"megacore_mode": megacore_mode, "inline_seq_dim": inline_seq_dim, "pages_per_compute_block": 2}
        check_paged(runner, PagedSpec(spec=spec).build(), options)
        return 1

    return Check("cores", f"megacore_mode={megacore_mode}, inline_seq_dim={inline_seq_dim}", run)


CHECKS = [check_of(*way) for way in MODES]

if __name__ == "__main__":
    tpu_interpreter.checks = lambda: CHECKS
    sys.exit(tpu_interpreter.main())
