"""The versions that pip is asked for are those that tools/versions.py tries, and the page says how that ended."""

import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OUTCOMES = json.loads((ROOT / "benchmarks" / "results" / "versions.json").read_text())


def load() -> Any:
    spec = importlib.util.spec_from_file_location("versions", ROOT / "tools" / "versions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["versions"] = module  # where its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


versions = load()
OLDEST, NEWEST = versions.ENVIRONMENTS["oldest"], versions.ENVIRONMENTS["newest"]


def allowed(oldest: str, newest: str) -> str:
    """From the oldest version to the release that the newest one is of."""
    release, minor = newest.split(".")[:2]
    return f">={oldest.removesuffix('.0')},<{release}.{int(minor) + 1}"


def asked_for(name: str) -> set[str]:
    extras = [each for extra in PYPROJECT["optional-dependencies"].values() for each in extra]
    return {
        each.removeprefix(name) for each in (*PYPROJECT["dependencies"], *extras) if re.match(rf"{name}[><=~]", each)
    }


@pytest.mark.parametrize("name", sorted({**OLDEST.packages, **OLDEST.apart}.keys() - {"jax-cuda13-plugin"}))  # jax's
def test_what_was_tried_is_what_is_allowed(name: str) -> None:
    oldest, newest = ((each.packages | each.apart)[name] for each in (OLDEST, NEWEST))
    assert asked_for(name) == {allowed(oldest, newest)}


def test_so_it_is_with_python() -> None:
    assert PYPROJECT["requires-python"] == allowed(OLDEST.python, NEWEST.python)


@pytest.mark.parametrize("name", versions.ENVIRONMENTS)
def test_each_environment_was_run_as_it_is_and_nothing_failed(name: str) -> None:
    outcome, environment = OUTCOMES[name], versions.ENVIRONMENTS[name]
    assert outcome["versions"] == {"python": environment.python, **environment.packages, **environment.apart}
    assert outcome["tests"]["passed"] > 1000
    assert not outcome["tests"].get("failed")


def test_the_page_has_the_outcomes() -> None:
    page = versions.PAGE.read_text()
    assert versions.written(page, OUTCOMES) == page
    assert versions.table(OUTCOMES) in page


def test_the_tests_exist() -> None:
    assert all((ROOT / "tests" / test).exists() for test in versions.TESTS)
