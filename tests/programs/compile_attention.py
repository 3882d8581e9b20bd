"""Compile the kernels of ragged attention for a GPU; print each kernel's name and, if it fails, why.

Usage: compile_attention.py ARCHITECTURE SAMPLE..., where each SAMPLE holds the arguments of `Sample` as JSON
"""

import json
import sys

from benchmarks.compiled import compiling
from ragged_attention.tools.samples import Sample, device_of

arch, *samples = sys.argv[1:]
for sample in samples:
    call = Sample(**json.loads(sample)).call("ragged_paged_attention", device_of("torch", arch))
    for launch in compiling.record(call):
        print(launch.name, compiling.compile_launch(launch, arch).failure)
