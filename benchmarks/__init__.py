"""Measurements: named shapes of real models, the compile matrix, and timings on this machine or one with a GPU.

A checkout needs no installation: if the package is not installed, its sources in `src/` are imported.
"""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("ragged_attention") is None:
    sys.path.append(str(Path(__file__).parent.parent / "src"))
