"""The errors of calls that are refused before a kernel runs.

A value of the wrong type (a list instead of an array, a string instead of a number) raises Python's own `TypeError`.
"""


class InvalidInput(ValueError):
    """The arguments are invalid for the operation, so no backend could run the call."""


class TooLarge(InvalidInput):
    """The options need more memory than a program can have on the device: smaller blocks or fewer stages would fit."""


class Unsupported(RuntimeError):
    """The arguments are valid, but no requested backend takes the call. The message gives each backend's reason."""


class BackendMissing(Unsupported):
    """The requested backend is not installed, or does not offer the operation."""


def how_to_install(*extras: str) -> str:
    """The end of an error message: how to install this package with `extras`. No package index offers it."""
    return f"run pip install '.[{','.join(extras)}]' in a checkout of ragged-attention"
