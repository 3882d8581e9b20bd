"""How the commands read their arguments: parsers, the types of arguments that several commands take, and errors.

For a mistake in the arguments, a command prints one line on standard error and exits with status 2.
"""

import argparse
import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

# The dtypes that commands take, each with other names for it.
DTYPES = {
    "bfloat16": ("bf16",),
    "float16": ("f16", "fp16", "half"),
    "float32": ("f32", "fp32", "float"),
    "float64": ("f64", "fp64", "double"),
    "float8_e4m3fn": ("fp8", "e4m3", "e4m3fn", "fp8_e4m3"),
    "float8_e5m2": ("e5m2", "fp8_e5m2"),
    "float8_e4m3fnuz": ("e4m3fnuz", "fp8_e4m3fnuz"),
    "int8": ("i8",),
    "uint8": ("u8",),
}


class Paragraphs(argparse.HelpFormatter):
    """A formatter that wraps each paragraph separately. A paragraph with indented lines keeps its lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = super()._fill_text
        return "\n\n".join(
            part if "\n  " in part else filled(part, width, indent) for part in text.strip().split("\n\n")
        )


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage, and whose help has a short usage and paragraphs."""

    def __init__(self, *, prog: str, positional: str = "", **keywords: Any) -> None:
        keywords.setdefault("usage", f"{prog} {positional}[options]".replace("  ", " "))
        super().__init__(prog=prog, formatter_class=Paragraphs, **keywords)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` explains the arguments\n")


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message: a question that suggests the known word most similar to `name`, or nothing."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def at_least(least: int) -> Callable[[str], int]:
    """A type of argument: a whole number that is not below `least`."""

    def number(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d{1,18}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number >= {least}, got {text!r}")
        return int(text)

    return number


def heads(text: str) -> tuple[int, int]:
    """A type of argument: the numbers of query heads and of KV heads, or a single number if they are equal."""
    if not (match := re.fullmatch(r"(\d{1,9})(?:/(\d{1,9}))?", text)) or not all(
        map(int, filter(None, match.groups()))
    ):
        raise argparse.ArgumentTypeError(f"expected heads such as 32/8, got {text!r}")
    return int(match[1]), int(match[2] or match[1])


def dtype(text: str) -> str:
    """A type of argument: the full name of a dtype, for which users may write a short name."""
    for name, others in DTYPES.items():
        if text.lower() in (name, *others):
            return name
    known = ", ".join(f"{name} ({', '.join(others)})" for name, others in DTYPES.items())
    raise argparse.ArgumentTypeError(f"expected a dtype, one of {known}, got {text!r}")
