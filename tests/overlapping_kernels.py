"""The positions in PTX at which the kernels of a call wait for each other; run as a script, without TRITON_INTERPRET.

The script prints the kernels of each case and architecture as JSON.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from benchmarks.cases.paged import PagedCase
from benchmarks.compiled import compiling
from ragged_attention.tools.samples import device_of

HEADS: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}
CASES = {
    "mixed": PagedCase(name="mixed", workload="-", q_lens=(40, 1), kv_lens=(1000, 3000), **HEADS),
    "decode": PagedCase(name="decode", workload="-", q_lens=(1, 1), kv_lens=(1000, 3000), **HEADS),
}
MARKS = {
    "begin": r"griddepcontrol\.launch_dependents",
    "wait": r"griddepcontrol\.wait",
    "memory": r"(?:ld|st)\.global|cp\.async\.c",
    "ret": r"\bret;",
}


def marks(ptx: str) -> list[str]:
    """The names of the MARKS that occur in the text, in order and without immediate repetitions."""
    names = [name for line in ptx.splitlines() for name, pattern in MARKS.items() if re.search(pattern, line)]
    return [name for previous, name in zip([None, *names], names, strict=False) if name != previous]


def kernels(case: PagedCase, arch: str) -> Iterator[tuple[str, bool, list[str]]]:
    """For each launch of a case: its kernel, whether it may begin before the previous kernel ends, and its marks."""
    for launch in compiling.record(case.attention_call(device_of("torch", arch))):
        yield launch.name, launch.launch_pdl, marks(compiling.compiled_by_triton(launch, arch).asm["ptx"])


if __name__ == "__main__":
    launches = {
        f"{name}, {arch}": [*kernels(case, arch)] for name, case in CASES.items() for arch in ("sm_90", "sm_80")
    }
    print(json.dumps(launches))  # noqa: T201
