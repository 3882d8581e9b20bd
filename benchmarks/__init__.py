"""Measurements: named shapes of real models, the compile matrix, timings here and on a machine with a GPU.

In a checkout nothing needs to be installed: where the package is not, its sources beside this folder are taken.
"""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("ragged_attention") is None:
    sys.path.append(str(Path(__file__).parent.parent / "src"))
