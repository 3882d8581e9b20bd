"""The pytest options of the suite `ragged_attention.testing`: an installed package can add options only by a plugin.

The options are `--backend`, `--framework`, `--device` and `--rounded-weights`. They exist only in a run of that suite,
because other users of pytest may have options of the same names. The plugin loads nothing else.
"""

from collections.abc import Sequence
from typing import Any

import pytest


def add_options(parser: Any) -> None:
    group = parser.getgroup("ragged_attention", "ragged attention: which backends its suite runs on")
    group.addoption("--backend", help="this backend alone; an error if it cannot run here")
    group.addoption("--framework", choices=["torch", "jax"], help="through this front end alone")
    group.addoption("--device", default="cpu", help="cpu (the default), or a torch device such as cuda")
    group.addoption("--rounded-weights", action="store_true", help="softmax weights may be rounded to 16 bits")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(parser: Any, args: Sequence[str]) -> None:
    if any("ragged_attention.testing" in argument for argument in args):
        add_options(parser)
