"""The stranger's kernels in bfloat16, compiled for an H100 and run by the emulator of PTX; prints the verdicts.

Called as a script, without TRITON_INTERPRET, where the backend `stranger` is announced.
"""

from ragged_attention.testing import ptx_runner, verdicts
from ragged_attention.testing.drawing import Check, on_corner
from tests.test_strangers import FAMILIES

if __name__ == "__main__":
    present, absent = ptx_runner.runners("stranger", "torch", "ptx:sm_90")
    for family, (check, structure, fields) in FAMILIES.items():
        batch = structure(**fields | {"dtype": "bfloat16"})
        print(family, verdicts.verdict_of(present[0], Check("corner", family, on_corner(check, batch.build)), 1))
