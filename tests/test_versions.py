"""The extras allow the versions that tools/versions.py tries, and the page of versions has the outcomes."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from tests import scripts

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OUTCOMES = json.loads((ROOT / "benchmarks" / "results" / "versions.json").read_text())


versions = scripts.load(ROOT / "tools" / "versions.py")
OLDEST, NEWEST = versions.ENVIRONMENTS["oldest"], versions.ENVIRONMENTS["newest"]


def allowed(oldest: str, newest: str) -> str:
    """The version specifier that allows `oldest`, later versions, and the whole release series of `newest`."""
    release, minor = newest.split(".")[:2]
    return f">={oldest.removesuffix('.0')},<{release}.{int(minor) + 1}"


def asked_for(name: str) -> set[str]:
    extras = [each for extra in PYPROJECT["optional-dependencies"].values() for each in extra]
    return {
        each.removeprefix(name) for each in (*PYPROJECT["dependencies"], *extras) if re.match(rf"{name}[><=~]", each)
    }


# jax's CUDA plugin is left out, because no extra names it.
@pytest.mark.parametrize("name", sorted({**OLDEST.packages, **OLDEST.separate}.keys() - {"jax-cuda13-plugin"}))
def test_what_was_tried_is_what_is_allowed(name: str) -> None:
    oldest, newest = ((each.packages | each.separate)[name] for each in (OLDEST, NEWEST))
    assert asked_for(name) == {allowed(oldest, newest)}


def test_so_it_is_with_python() -> None:
    assert PYPROJECT["requires-python"] == allowed(OLDEST.python, NEWEST.python)


@pytest.mark.parametrize("name", versions.ENVIRONMENTS)
def test_each_environment_was_run_as_it_is_and_nothing_failed(name: str) -> None:
    outcome, environment = OUTCOMES[name], versions.ENVIRONMENTS[name]
    assert outcome["versions"] == {"python": environment.python, **environment.packages, **environment.separate}
    assert outcome["tests"]["passed"] > 1000
    assert not outcome["tests"].get("failed")


def test_the_page_has_the_outcomes() -> None:
    page = versions.PAGE.read_text()
    assert versions.written(page, OUTCOMES) == page
    assert versions.table(OUTCOMES) in page


def test_the_tests_exist() -> None:
    assert all((ROOT / "tests" / test).exists() for test in versions.TESTS)
