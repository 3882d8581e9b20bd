"""Loaders for the scripts of docs/, tools/ and examples/, which are not in a package."""

import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# What the training examples learn in tests. With the project's own pages, a reworded sentence could fail a test.
PARAGRAPHS = [
    f"Query {query} of sequence {sequence} sees the {count} keys that its page {page} holds.\n"
    for sequence, count in enumerate((3, 17, 64, 90, 128)) for query in range(4) for page in (2, 5, 8)
]  # fmt: skip


def load(path: Path) -> Any:
    """A script imported as a module, under the name of its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that an example defines; it can import its neighbours, as it does when run as a script."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def training_example(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that a training example defines; its `main` learns PARAGRAPHS."""
    script = example(name, monkeypatch)
    monkeypatch.setitem(script["main"].__globals__, "corpus", lambda: PARAGRAPHS)
    return script
