"""The page of the examples lists every script, with a command that exists."""

import re

from tests.scripts import EXAMPLES

SHARED = {"deepseek_parts"}  # modules that examples import, not examples themselves


def test_every_example_has_a_row_with_its_command() -> None:
    command = r"(?:python|torchrun --nproc-per-node \d) examples/(\w+)\.py[^`]*"
    row = rf"^\| \[`{command}`\]\((\w+)\.py\) \| .+ \| (?:torch|jax) \|"
    rows = re.findall(row, (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert all(command == link for command, link in rows)
    assert sorted(command for command, _ in rows) == sorted({path.stem for path in EXAMPLES.glob("*.py")} - SHARED)
