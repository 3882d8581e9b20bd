"""Error messages in the words of the project whose interface was called."""

import re
from collections.abc import Mapping
from typing import NoReturn


def say_in(names: Mapping[str, str], error: Exception) -> NoReturn:
    """Raise an error again, its arguments called by another project's names; `names` is from ours to theirs."""
    words = r"\b(" + "|".join(names) + r")\b"
    raise type(error)(re.sub(words, lambda found: names[found[0]], str(error))) from None
