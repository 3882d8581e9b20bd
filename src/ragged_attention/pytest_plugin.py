"""The pytest options of `ragged_attention.testing`, which an installed package can add in no other way.

They are `--backend`, `--framework` and `--device`. Nothing else is loaded until the suite is collected.
"""

from typing import Any


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("ragged_attention", "ragged attention: which backends its suite runs on")
    try:
        group.addoption("--backend", help="this backend alone; an error if it cannot run here")
        group.addoption("--framework", choices=["torch", "jax"], help="through this front end alone")
        group.addoption("--device", default="cpu", help="cpu (the default), or a torch device such as cuda")
    except ValueError:  # another plugin has an option of that name; its users are not ours to disturb
        return
