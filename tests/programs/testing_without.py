"""Import the test kit in a process that pretends that the named package is not installed."""

import importlib
import importlib.util
import sys
from typing import Any

find = importlib.util.find_spec


def find_others(name: str, *package: Any) -> Any:
    return None if name == sys.argv[1] else find(name, *package)


importlib.util.find_spec = find_others
importlib.import_module("ragged_attention.testing").agrees  # noqa: B018
