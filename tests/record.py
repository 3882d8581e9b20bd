"""What a run of the tests has shown: of each operation and backend, how many tests ran it, and how they ended.

`pytest --record=FILE` writes that as JSON, from which docs/status_table.py writes the rows for CPUs of docs/status.md.
"""

import json
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ragged_attention.testing.runner import ANSWERED
from tests.tiers import tier_of

PROPERTY = "answered"


def add_options(group: Any) -> None:
    group.addoption("--record", metavar="FILE", help="write there, as JSON, which operations ran on which backends")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Give the report of each test what its runners got answers for."""
    ANSWERED.clear()
    try:
        return (yield)
    finally:
        item.user_properties.append((PROPERTY, sorted(ANSWERED)))


class Record:
    """Counts the reports of tests, where they come together: not in the processes that run them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._outcomes: Counter[str] = Counter()
        self._answered: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        self._outcomes[report.outcome] += 1
        for operation, backend in dict(report.user_properties).get(PROPERTY, ()):  # type: ignore[misc]
            self._answered[operation][backend][report.outcome] += 1

    def pytest_sessionfinish(self) -> None:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        record = {
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "commit": commit.stdout.strip(),
            "command": "make test-all" if tier_of(self._config) == "all" else "make test",
            "tests": self._outcomes,
            "operations": self._answered,
        }
        file = Path(str(self._config.getoption("--record")))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def configure(config: pytest.Config) -> None:
    if config.getoption("--record") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record(config))
