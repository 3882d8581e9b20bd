"""Make Triton's interpreter faster, and give it a GPU's arithmetic on narrow floats.

`quicken` removes three kinds of useless work. At every call of a `@triton.jit` function from another one, the
interpreter goes through all of `triton.language` to replace functions that it already replaced at launch. It computes
in 64 bits whether a sum, difference or product of integers overflows, and ignores the result unless debugging is on.
Each time it needs the NumPy dtype for one of Triton's dtypes, it builds a dictionary of all of them.

`triton_floats` replaces the interpreter's conversions of floats and its arithmetic in bfloat16 and 8-bit floats.
"""

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import os
from typing import Any

PRIVATE = (  # private names of `triton.runtime.interpreter` that are used here
    "_patch_lang", "_LangPatchScope", "_get_np_dtype", "interpreter_builder",
    "InterpreterBuilder", "TensorHandle", "ReduceOps", "ScanOps", "_interpreter", "_ir",
)  # fmt: skip


def quicken() -> bool:
    """Change this process's interpreter as described above; returns whether it is changed.

    The interpreter stays as it is if this version of Triton lacks one of the names in `PRIVATE`.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return False
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    if not all(hasattr(interpreter, name) for name in PRIVATE):
        return False
    if not hasattr(interpreter._patch_lang, "quickened"):
        _prepare_once(interpreter)
        _drop_overflow(interpreter.interpreter_builder)
        _look_up_once(interpreter)
        importlib.import_module("ragged_attention.testing.triton_floats").install()
    return True


def _prepare_once(interpreter: Any) -> None:
    language: Any = importlib.import_module("triton.language")
    prepare = interpreter._patch_lang

    @functools.cache
    def named_by(function: Any) -> list[Any]:
        seen = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return [module for module in seen if module in (language, language.core)]

    def prepare_once(function: Any) -> Any:
        named = named_by(function)
        unprepared = (language.tensor.__add__, *(module.load for module in named))
        if named and not any(language.core.is_builtin(member) for member in unprepared):
            return interpreter._LangPatchScope()
        return prepare(function)

    prepare_once.quickened = True  # type: ignore[attr-defined]
    interpreter._patch_lang = prepare_once


def _drop_overflow(builder: Any) -> None:
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _look_up_once(interpreter: Any) -> None:
    look_up, dtypes = interpreter._get_np_dtype, {}

    def look_up_once(dtype: Any) -> Any:
        name = dtype.scalar.name  # the key is the name, because dtypes of blocks have no hash
        if name not in dtypes:
            dtypes[name] = look_up(dtype)
        return dtypes[name]

    interpreter._get_np_dtype = look_up_once
