"""Scripts of docs/ and tools/ as modules, for they are in no package."""

import importlib.util
import sys
from pathlib import Path
from typing import Any


def load(path: Path) -> Any:
    """The module that a script is when it is imported, under its own name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module
