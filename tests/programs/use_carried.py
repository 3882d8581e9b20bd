"""Use the files in a folder as if they had been carried to a device machine.

The output has the names of the folders that are then in use, and whether Triton has been imported.
"""

import importlib
import sys
from pathlib import Path

from benchmarks.device import carried

carried.unpacked = lambda: Path(sys.argv[1])
carried.use("cpu")
importlib.import_module("package")  # one of the carried files

from benchmarks.peers import registry  # noqa: E402
from ragged_attention.kernels_cuda._build import compile  # noqa: E402

print(registry.FOLDER.name, compile.PREBUILT.name, "triton" in sys.modules)
