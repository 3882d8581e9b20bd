"""Triton's interpreter made faster: it prepares its language once per launch, not once per call of a device function.

At every call of a `@triton.jit` function from another one, the interpreter walks through all of `triton.language` to
replace what it has replaced already when the kernel was launched: a third of the time that a small launch takes.
"""

import importlib
import importlib.util
import inspect
import os
from typing import Any

PRIVATE = ("_patch_lang", "_LangPatchScope")  # of Triton's; where a version lacks one, the interpreter stays as it is


def quicken() -> bool:
    """Let this process's interpreter skip what is already replaced; returns whether it does."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return False
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    language: Any = importlib.import_module("triton.language")
    if not all(hasattr(interpreter, name) for name in PRIVATE):
        return False
    prepare = interpreter._patch_lang
    if hasattr(prepare, "quickened"):
        return True

    def prepare_once(function: Any) -> Any:
        seen = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        named = [module for module in seen if module in (language, language.core)]
        unprepared = (language.tensor.__add__, *(module.load for module in named))
        if named and not any(language.core.is_builtin(member) for member in unprepared):
            return interpreter._LangPatchScope()
        return prepare(function)

    prepare_once.quickened = True  # type: ignore[attr-defined]
    interpreter._patch_lang = prepare_once
    return True
