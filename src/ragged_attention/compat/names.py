"""Error messages with the argument names of the project whose interface was called."""

import re
from collections.abc import Mapping

from ragged_attention.errors import InvalidInput


class named_as:  # lower case like contextlib.suppress; a class, because Dynamo traces its `__exit__`
    """A context in which error messages have another project's argument names; `names` maps our names to them."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (InvalidInput, TypeError)):
            words = r"\b(" + "|".join(self.names) + r")\b"
            raise type(error)(re.sub(words, lambda match: self.names[match[0]], str(error))) from None
