"""Run the phase "faults" of tests/test_device.py in a folder, with a limit of ten minutes for each item."""

import sys
from pathlib import Path

from tests.test_device import Planted

Planted(Path(sys.argv[1])).phase("faults", each=600.0)
