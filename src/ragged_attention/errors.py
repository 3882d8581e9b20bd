"""The three ways a call is refused before a kernel runs.

A value of the wrong kind (a list instead of an array, a string instead of a number) raises Python's own `TypeError`.
"""


class InvalidInput(ValueError):
    """The arguments contradict the operation's definition, whatever the backend."""


class TooLarge(InvalidInput):
    """The options ask for more of the device than it has: smaller blocks or fewer stages would fit."""


class Unsupported(RuntimeError):
    """The arguments are valid, but no allowed backend takes them; the message lists each with its reason."""


class BackendMissing(Unsupported):
    """The backend requested by name is not installed here, or does not offer the operation."""
