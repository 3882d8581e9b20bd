"""Scripts of docs/, tools/ and examples/ as modules, for they are in no package."""

import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def load(path: Path) -> Any:
    """The module that a script is when it is imported, under its own name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What an example defines. Examples import what stands beside them, as they do when they are run as scripts."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))
