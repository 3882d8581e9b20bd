"""A record of a test run: for each operation and backend, the number of tests that ran it, by outcome.

`pytest --record=FILE` writes the record as JSON. From it, docs/status_table.py writes the CPU rows of docs/status.md.
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
    group.addoption(
        "--record", metavar="FILE", help="write the operations and the backends that ran them to FILE, as JSON"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Add to each test's report the pairs of operation and backend that its runners ran."""
    ANSWERED.clear()
    try:
        return (yield)
    finally:
        item.user_properties.append((PROPERTY, sorted(ANSWERED)))


class Record:
    """Counts the reports of tests, in the main process, which receives the reports of all workers."""

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
