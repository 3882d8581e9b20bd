"""Requests for the backends that run calls: their sources, and the precedence of these sources.

The first of these that names a backend for the operation decides:

1. the call's own `backend=`
2. the innermost `with use_backend(...)` block
3. `set_backend(...)`, process-wide
4. the config file: a TOML file named by RAGGED_ATTENTION_CONFIG, or `[tool.ragged_attention]` in the working
   directory's pyproject.toml
5. the environment variable RAGGED_ATTENTION_BACKEND
6. the platform's own order, `ragged_attention.dispatch.ORDER`

Sources 1 to 4 can also give `options` for an operation. Sources 2 to 5 can set `validate` and `batch_invariant`; each
of these two settings has its own environment variable. The file and the environment are read when a call first needs
them, and again after `reload_config()`.
"""

import contextvars
import dataclasses
import dis
import math
import os
import sys
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from ragged_attention.calls import CALLS
from ragged_attention.errors import InvalidInput

BACKEND_VARIABLE = "RAGGED_ATTENTION_BACKEND"
CONFIG_VARIABLE = "RAGGED_ATTENTION_CONFIG"
VALIDATE_VARIABLE = "RAGGED_ATTENTION_VALIDATE"
BATCH_INVARIANT_VARIABLE = "RAGGED_ATTENTION_BATCH_INVARIANT"
VARIABLES = (BACKEND_VARIABLE, CONFIG_VARIABLE, VALIDATE_VARIABLE, BATCH_INVARIANT_VARIABLE)
VALIDATION = ("static", "full")

Names = tuple[str, ...]
Option = int | float | str | bool | None
BackendRequest = str | Sequence[str] | Mapping[str, str | Sequence[str]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Config:
    """The requests of one source. In `backend`, the key "*" covers the operations that have no key of their own.

    Configs with equal content are equal.
    """

    backend: Mapping[str, Names] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Mapping[str, Option]] = dataclasses.field(default_factory=dict)
    validate: str | None = None
    batch_invariant: bool | None = None
    _key: Any = dataclasses.field(init=False, repr=False)
    _hash: int = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, known in (("backend", (*CALLS, "*")), ("options", tuple(CALLS))):
            for operation in getattr(self, name):
                if operation not in known:
                    raise InvalidInput(f"expected keys of {name} among {', '.join(known)}, got {operation!r}")
        options = {operation: expect_options(given, operation) for operation, given in self.options.items()}
        if self.validate is not None and self.validate not in VALIDATION:
            raise InvalidInput(f"expected validate to be one of {', '.join(VALIDATION)}, got {self.validate!r}")
        if self.batch_invariant is not None and not isinstance(self.batch_invariant, bool):
            raise TypeError(f"expected batch_invariant to be True or False, got {self.batch_invariant!r}")
        # 1, 1.0 and True are equal but mean different things, so values are compared by their representation.
        written = {operation: repr(sorted(given.items())) for operation, given in options.items()}
        backend = frozenset(self.backend.items())
        key = (backend, frozenset(written.items()), self.validate, self.batch_invariant)
        for name, value in {"options": options, "_key": key, "_hash": hash(key)}.items():
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Config) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def names(self, operation: str) -> Names | None:
        """The names requested for `operation`, in order, or None if this source has no request."""
        return self.backend.get(operation, self.backend.get("*"))


def parse_names(request: str | Sequence[str]) -> Names:
    """The tuple of backend names in a request: `"triton"`, `"triton,eager"` or a list of names."""
    if isinstance(request, str):
        request = [name.strip() for name in request.split(",")]
    if not isinstance(request, Sequence) or not all(isinstance(name, str) for name in request):
        raise TypeError(f"expected backend to be a name or a list of names, got {request!r}")
    if not request or not all(request):
        raise InvalidInput(f"expected backend to name at least one backend, got {request!r}")
    return tuple(request)


def _parse(backend: BackendRequest | None, options: Any, validate: Any, batch_invariant: Any) -> Config:
    if backend is None:
        backend = {}
    elif not isinstance(backend, Mapping):
        backend = {"*": backend}
    return Config(
        backend={operation: parse_names(names) for operation, names in backend.items()},
        options={} if options is None else expect_mapping(options),
        validate=validate,
        batch_invariant=batch_invariant,
    )


def expect_mapping(options: Any, of: str | None = None) -> Mapping[str, Any]:
    if not isinstance(options, Mapping):
        where = f"options of {of}" if of else "options"
        raise TypeError(f"expected {where} to be a mapping, got {type(options).__name__}")
    return options


def expect_options(options: Any, of: str | None = None) -> dict[str, Option]:
    """The options, checked, with NumPy's numbers as Python numbers. Errors name the operation `of`, if given."""
    plain: dict[str, Option] = {}
    for name, value in expect_mapping(options, of).items():
        if not isinstance(name, str):
            raise TypeError(f"expected options to have strings for names, got {name!r}")
        if isinstance(value, np.generic):
            value = value.item()
        if value is not None and not isinstance(value, (int, float, str)):
            raise TypeError(
                f"expected option {name} to be a number, a string, a bool or None, got {type(value).__name__}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidInput(f"expected option {name} to be finite, got {value}")
        plain[name] = value
    return plain


T = TypeVar("T")

# The bytecode instructions that can follow a call whose result is not used: POP_TOP drops the result, and the other two
# show it at the interactive prompt, in Python 3.11 and in later versions.
_UNUSED = {("POP_TOP", 0), ("PRINT_EXPR", 0), ("CALL_INTRINSIC_1", 1)}


class Scope(Generic[T]):
    """A setting with one value for the process, and one for each open `with` block of the current thread or task."""

    def __init__(self, name: str) -> None:
        self.blocks: contextvars.ContextVar[tuple[T, ...]] = contextvars.ContextVar(name, default=())  # innermost first
        self.process_wide: tuple[T, ...] = ()  # the value, once `set` has been called

    def set(self, value: T) -> None:
        self.process_wide = (value,)

    def enter(self, value: T) -> None:
        self.blocks.set((value, *self.blocks.get()))

    def exit(self, value: T) -> None:
        """End the innermost block that was entered with `value`, even if blocks inside it are still open."""
        blocks = self.blocks.get()
        index = next((index for index, other in enumerate(blocks) if other is value), len(blocks))
        self.blocks.set(blocks[:index] + blocks[index + 1 :])

    def set_by_statement(self, value: T, use: str, instead: str) -> None:
        """Deprecated: `use(...)` as a statement of its own sets the process-wide value, as it did in 0.2.

        The constructor of a context manager calls this method. The next instruction of the constructor's caller shows
        whether the caller drops the new object at once. If the caller keeps the object, this method does nothing.
        """
        caller = sys._getframe(2)
        code, after = caller.f_code.co_code, caller.f_lasti + 2
        while dis.opname[code[after]] == "CACHE":
            after += 2
        if (dis.opname[code[after]], code[after + 1]) in _UNUSED:
            text = "outside of a with statement will have no effect in the next version"
            warnings.warn(f"{use}(...) {text}: call {instead}(...)", DeprecationWarning, stacklevel=3)
            self.set(value)


_scope: Scope[Config] = Scope("ragged_attention_blocks")
_outside: tuple[Config, Config] | None = None  # the requests of the file and the environment, once they are read


def set_backend(
    backend: BackendRequest | None = None,
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    validate: str | None = None,
    batch_invariant: bool | None = None,
) -> None:
    """Select backends for the whole process, until the next `set_backend`.

    Each `set_backend` replaces all settings of the earlier one, so `set_backend()` removes them. The arguments of an
    operation's call and `use_backend` blocks take precedence.

    Args:
        backend: a name such as "triton"; an ordered list, `["cuda", "triton"]` or "cuda,triton", in which the first
            backend that takes the call runs it; or a mapping of operations to names or lists, in which "*" covers
            operations without a key: `{"write_kv_pages": "eager", "*": "triton"}`. "auto" is the platform's order. With
            None, the config file, the environment and the platform decide.
        options: for each operation, the tunables of its backend: `{"ragged_paged_attention": {"block_kv": 64}}`.
        validate: "full" also checks the values of index arrays, which reads them back from the device; "static" does
            not.
        batch_invariant: with True, the bits of a query's attention over keys and values depend only on that query and
            the keys that it sees: they are the same for packed and paged keys, and in any chunk or batch. The bits of
            latent attention and of indexers depend only on the sequence's keys and on its queries in the call.
            Backends that cannot promise this refuse the call. Writes and conversions are always batch-invariant. For
            gradients, use `deterministic`.

    Raises:
        InvalidInput: an empty name, an unknown operation, an unknown `validate`, or an option that is not finite. For
            an unknown backend, the first call that requests it raises.
        TypeError: an argument of a wrong type.
    """
    _scope.set(_parse(backend, options, validate, batch_invariant))


class use_backend:  # reads as a verb, like torch.no_grad
    """A context manager that selects backends inside its `with` block, for the current thread or task.

    Constructing it changes nothing. It can be entered several times, also inside itself, and blocks can be nested: the
    innermost block that names a backend for the operation decides.

    Until the next version, `use_backend(...)` as a statement of its own still does what `set_backend(...)` does, with a
    DeprecationWarning.

    Args:
        backend, options, validate, batch_invariant: as for `set_backend`. For an argument that is None, the outer
            blocks and the sources with lower precedence decide.

    Raises:
        InvalidInput, TypeError: as `set_backend`.
    """

    def __init__(
        self,
        backend: BackendRequest | None = None,
        *,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        validate: str | None = None,
        batch_invariant: bool | None = None,
    ) -> None:
        self.config = _parse(backend, options, validate, batch_invariant)
        _scope.set_by_statement(self.config, "use_backend", "set_backend")

    def __enter__(self) -> Config:
        _scope.enter(self.config)
        return self.config

    def __exit__(self, *exception: object) -> None:
        _scope.exit(self.config)


def reload_config() -> None:
    """Make the next call read the config file and the environment variables again."""
    global _outside
    _outside = None


def _read_file(named: str | None) -> Config:
    """The requests of the config file. Error messages name the file.

    Errors in the working directory's pyproject.toml are reported only if they are in this project's table.
    """
    path = Path(named or "pyproject.toml")
    try:
        path = path.absolute()
        table: Any = tomllib.loads(path.read_bytes().decode())
    except (OSError, ValueError) as error:
        if not named:
            return Config()
        if isinstance(error, ValueError):
            raise InvalidInput(f"expected {path} to be TOML, got: {error}") from None
        if isinstance(error, (FileNotFoundError, IsADirectoryError)):
            raise InvalidInput(f"expected {CONFIG_VARIABLE} to name a file, got {named!r}") from None
        raise InvalidInput(f"expected {path} to be readable, got: {error}") from None
    if not named:
        tools = table.get("tool")
        table = tools.get("ragged_attention", {}) if isinstance(tools, dict) else {}
        if not isinstance(table, dict):
            raise InvalidInput(f"expected tool.ragged_attention in {path} to be a table, got {table!r}")
    known = ("backend", "options", "validate", "batch_invariant")
    for key in table:
        if key not in known:
            raise InvalidInput(f"expected keys {', '.join(known)} in {path}, got {key!r}")
    try:
        return _parse(*(table.get(key) for key in known))
    except (InvalidInput, TypeError) as error:
        raise type(error)(f"{path}: {error}") from None


def _environment() -> Config:
    names = os.environ.get(BACKEND_VARIABLE)
    validate = os.environ.get(VALIDATE_VARIABLE) or None
    if validate is not None and validate not in VALIDATION:
        raise InvalidInput(f"expected {VALIDATE_VARIABLE} to be one of {', '.join(VALIDATION)}, got {validate!r}")
    invariant = os.environ.get(BATCH_INVARIANT_VARIABLE) or None
    if invariant not in (None, "0", "1"):
        raise InvalidInput(f"expected {BATCH_INVARIANT_VARIABLE} to be 0 or 1, got {invariant!r}")
    return Config(
        backend={"*": parse_names(names)} if names else {},
        validate=validate,
        batch_invariant=None if invariant is None else invariant == "1",
    )


def state() -> tuple[tuple[Config, ...], ...]:
    """The configs of the open blocks, and the configs of all other sources. If states are equal, so are selections."""
    global _outside
    outside = _outside
    if outside is None:
        outside = _outside = (_read_file(os.environ.get(CONFIG_VARIABLE) or None), _environment())
    return _scope.blocks.get(), _scope.process_wide + outside


def _sources() -> tuple[Config, ...]:
    """The configs of all sources except the call itself, in order of precedence."""
    blocks, others = state()
    return blocks + others


def requested(operation: str, backend: str | Sequence[str] | None = None) -> Names | None:
    """The names requested for a call of `operation`, in order, or None if the platform's order decides."""
    if backend is not None:
        names = parse_names(backend)
    else:
        names = next((names for source in _sources() if (names := source.names(operation))), ("auto",))
    return None if names == ("auto",) else names


def requested_options(operation: str, options: Mapping[str, Any] | None = None) -> Mapping[str, Option]:
    """The tunables for a call of `operation`, from the first source that gives options for it."""
    if options is not None:
        return expect_options(options)
    return next((source.options[operation] for source in _sources() if operation in source.options), {})


def validates_values() -> bool:
    """Whether to check the values of index arrays, according to the first source that sets `validate`."""
    return next((source.validate for source in _sources() if source.validate), "static") == "full"


def is_batch_invariant() -> bool:
    """Whether results must be batch-invariant, according to the first source that sets `batch_invariant`."""
    return next((source.batch_invariant for source in _sources() if source.batch_invariant is not None), False)


def get_config() -> Config:
    """The config that a call without `backend=` and `options=` follows: all sources, merged."""
    backend: dict[str, Names] = {}
    options: dict[str, Mapping[str, Any]] = {}
    for source in reversed(_sources()):
        if "*" in source.backend:
            backend = {}
        backend |= dict(source.backend)
        options |= dict(source.options)
    validate = "full" if validates_values() else "static"
    return Config(backend=backend, options=options, validate=validate, batch_invariant=is_batch_invariant())
