"""The badges of README.md, the citation file and the forms for issues."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ragged_attention import __version__
from tests import scripts

ROOT = Path(__file__).resolve().parent.parent
drawn: Any = scripts.load(ROOT / "docs" / "badges.py")


def titles(tests: dict[str, int]) -> dict[str, str]:
    svgs = drawn.badges({"tests": tests})
    return {name: ElementTree.fromstring(svg)[0].text or "" for name, svg in svgs.items()}


def test_badges_give_the_outcome_and_the_projects_facts() -> None:
    assert titles({"passed": 12345}) == {
        "tests.svg": "tests: 12,345 passed",
        "python.svg": "python: 3.11 to 3.13",
        "license.svg": "license: Apache-2.0",
    }
    assert titles({"passed": 5, "failed": 1, "error": 2})["tests.svg"] == "tests: 3 failed"
    assert drawn.BAD in drawn.badges({"tests": {"passed": 5, "failed": 1}})["tests.svg"]


def test_the_readmes_badges_are_those_of_the_status_page() -> None:
    """The badges have the numbers of docs/status.md, because `make status` writes both."""
    passed, failed = map(int, re.findall(r"(\d+) tests passed, (\d+) failed", (ROOT / "docs/status.md").read_text())[0])
    for name, svg in drawn.badges({"tests": {"passed": passed, "failed": failed}}).items():
        assert (drawn.FOLDER / name).read_text() == svg, name
        assert f"(docs/pictures/badges/{name})" in (ROOT / "README.md").read_text()


def test_badges_are_written_to_a_folder(tmp_path: Path) -> None:
    drawn.write({"tests": {"passed": 1}}, tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["license.svg", "python.svg", "tests.svg"]


def test_the_citation_is_of_this_version() -> None:
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == __version__
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_forms_for_issues_are_valid(path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert {"name", "description", "body"} <= form.keys()
    fields = [field["id"] for field in form["body"]]
    assert len(set(fields)) == len(fields)
    assert all(field["attributes"]["label"] for field in form["body"])
