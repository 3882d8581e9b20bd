"""The code and constants that a kernel compiles from, as text without comments, layout or module names.

Triton's own `cache_key` covers the same functions and constants, but also line numbers and comments, so it changes with
every line that is added to a file.
"""

import ast
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any


@functools.cache
def text_of(kernel: Any) -> str:
    """The source of a Triton kernel and of all Triton functions that it calls, with the constants that they read."""
    functions = functions_of(kernel)
    constants = {
        f"{function.__name__}: {name} = {text}"
        for function in functions
        for name, value in _read(function)
        if (text := _constant(value)) is not None
    }
    return "\n".join([*map(_source, functions), *sorted(constants)])


def functions_of(kernel: Any) -> list[Any]:
    """The kernel and all functions that it calls, also indirectly, in order of first use. Triton's own are left out."""
    found = [kernel]
    for function in found:  # the list grows during the loop
        called = [value for _, value in _read(function) if hasattr(value, "cache_key")]
        found += [value for value in dict.fromkeys(called) if value not in found and not _of_triton(value)]
    return found


def _read(function: Any) -> Iterator[tuple[str, Any]]:
    """The global names that a function mentions, including `module.name`, with their values."""
    scope = function.__globals__ | inspect.getclosurevars(function.fn).nonlocals
    for node in ast.walk(function.parse()):
        if isinstance(node, ast.Name | ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            value = scope.get(first)
            for name in rest:
                value = getattr(value, name, None) if isinstance(value, types.ModuleType) else None
            if value is not None and not isinstance(value, types.ModuleType):
                yield ".".join((first, *rest)), value


def _source(function: Any) -> str:
    tree = function.parse()
    (definition,) = tree.body
    if ast.get_docstring(definition, clean=False) is not None:
        definition.body = definition.body[1:] or [ast.Pass()]
    return f"{ast.unparse(tree)}\n# noinline {getattr(function, 'noinline', False)}"


def _constant(value: Any) -> str | None:
    if isinstance(value, type):
        return None if _of_triton(value) else str(getattr(value, "__annotations__", ""))
    value = getattr(value, "value", value)  # the value of a constexpr
    return repr(value) if isinstance(value, int | float | str | tuple) else None


def _of_triton(value: Any) -> bool:
    return getattr(value, "__module__", "").partition(".")[0] == "triton"
