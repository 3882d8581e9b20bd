"""The three ways a call is refused before a kernel runs.

A value of a wrong kind (a list where an array belongs, a string where a number does) is Python's own `TypeError`.
"""


class InvalidInput(ValueError):
    """The arguments contradict the operation's definition, whatever the backend."""


class Unsupported(RuntimeError):
    """The arguments are lawful, but no allowed backend takes them; the message lists each with its reason."""


class BackendMissing(Unsupported):
    """The backend asked for by name is not installed here, or does not offer the operation."""
