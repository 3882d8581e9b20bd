"""Compile the bfloat16 kernels of the backend `stranger` for an H100, run them in the PTX emulator, and print verdicts.

Run it as a script, without TRITON_INTERPRET, in a process in which the backend `stranger` is registered.
"""

from ragged_attention.testing import ptx_runner, verdicts
from ragged_attention.testing.drawing import Check, on_corner
from tests.test_strangers import FAMILIES

if __name__ == "__main__":
    present, absent = ptx_runner.runners("stranger", "torch", "ptx:sm_90")
    for family, (check, structure, fields) in FAMILIES.items():
        batch = structure(**fields | {"dtype": "bfloat16"})
        print(family, verdicts.verdict_of(present[0], Check("corner", family, on_corner(check, batch.build)), 1))
