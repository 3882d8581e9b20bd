"""Which backend runs a call: where requests come from, and which of them wins.

The first of these that names a backend for the operation decides:

1. the call's own `backend=`
2. the innermost `with use_backend(...)` block
3. `use_backend(...)` called plainly (process-wide)
4. the config file: a TOML file named by RAGGED_ATTENTION_CONFIG, or `[tool.ragged_attention]` in the working
   directory's pyproject.toml
5. the environment variable RAGGED_ATTENTION_BACKEND
6. the platform's own order, `ragged_attention.dispatch.ORDER`

`options` follow the same order from 1 to 4, operation by operation; `validate` and `batch_invariant` follow it from 2
to 5, each with a variable of its own. The file and the environment are read once, when a call first needs them, and
again after `reload_config()`.
"""

import contextvars
import dataclasses
import math
import os
import threading
import tomllib
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np

from ragged_attention.calls import CALLS
from ragged_attention.errors import InvalidInput
from ragged_attention.host import forking

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
    """One source's requests by operation; `backend` may have "*" for those it does not name.

    Sources with the same content are equal, whatever made them.
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
        # By their representation, since 1, 1.0 and True are equal but not the same.
        said = frozenset(
            (operation, name, repr(value)) for operation in options for name, value in options[operation].items()
        )
        key = (frozenset(self.backend.items()), frozenset(options), said, self.validate, self.batch_invariant)
        for name, value in {"options": options, "_key": key, "_hash": hash(key)}.items():
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Config) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def names(self, operation: str) -> Names | None:
        """The ordered request for `operation`, or None where this source has none."""
        return self.backend.get(operation, self.backend.get("*"))


def parse_names(request: str | Sequence[str]) -> Names:
    """`"triton"`, `"triton,eager"` or a list of names, as an ordered request."""
    if isinstance(request, str):
        request = [name.strip() for name in request.split(",")]
    if not isinstance(request, Sequence) or not all(isinstance(name, str) for name in request):
        raise TypeError(f"expected backend to be a name or a list of names, got {request!r}")
    if not request or not all(request):
        raise InvalidInput(f"expected backend to name at least one backend, got {request!r}")
    return tuple(request)


def _parse_request(request: BackendRequest | None) -> dict[str, Names]:
    if request is None:
        return {}
    if isinstance(request, Mapping):
        return {operation: parse_names(names) for operation, names in request.items()}
    return {"*": parse_names(request)}


def expect_mapping(options: Any, of: str | None = None) -> Mapping[str, Any]:
    if not isinstance(options, Mapping):
        where = f"options of {of}" if of else "options"
        raise TypeError(f"expected {where} to be a mapping, got {type(options).__name__}")
    return options


def expect_options(options: Any, of: str | None = None) -> dict[str, Option]:
    """Tunables by name as plain Python values, NumPy's numbers converted; `of` names their operation."""
    found: dict[str, Option] = {}
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
        found[name] = value
    return found


T = TypeVar("T")


class Scope(Generic[T]):
    """Holds values that are chosen as by `use_backend`: process-wide, or in a block of one thread or task.

    The object that chooses is its value's `owner`. It does not know whether it is called plainly or made for a `with`
    statement, so making it installs the value process-wide, and entering the block withdraws that and nothing else.
    """

    def __init__(self, name: str) -> None:
        self.blocks: contextvars.ContextVar[tuple[T, ...]] = contextvars.ContextVar(name, default=())  # innermost first
        self.process_wide: tuple[T, ...] = ()  # the last value installed, if any
        self._installed: list[tuple[weakref.ref[Any], T]] = []
        self._lock = threading.Lock()

    def install(self, owner: Any, value: T) -> None:
        with forking.postponed(), self._lock:
            self._set([*self._installed, (weakref.ref(owner), value)])

    def enter(self, owner: Any, value: T) -> None:
        with forking.postponed(), self._lock:
            self._set([entry for entry in self._installed if entry[0]() is not owner])
        self.blocks.set((value, *self.blocks.get()))

    def exit(self, value: T) -> None:
        """End the innermost block of a value, whether or not others of it are open."""
        blocks = self.blocks.get()
        index = next((index for index, other in enumerate(blocks) if other is value), len(blocks))
        self.blocks.set(blocks[:index] + blocks[index + 1 :])

    def _set(self, installed: list[tuple[weakref.ref[Any], T]]) -> None:
        # An owner that is gone can no longer enter a block, so what was installed before it will not count again.
        last = max((index for index, (owner, _) in enumerate(installed) if owner() is None), default=0)
        self._installed = installed[last:]
        self.process_wide = tuple(value for _, value in installed[-1:])


_scope: Scope[Config] = Scope("ragged_attention_blocks")
_outside: tuple[Config, Config] | None = None  # the contents of the file and the environment, once read


class use_backend:  # reads as a verb, like torch.no_grad
    """Choose backends for all later calls, or for a block.

    `use_backend("triton")`, an ordered request `use_backend(["cuda", "triton"])`, or by operation
    `use_backend({"write_kv_pages": "eager", "*": "triton"})`. Called plainly it holds process-wide until the next
    plain call; in a `with` statement it holds inside the block, for the current thread or task, and blocks may be
    entered again, also within themselves. `options` maps an operation to its tunables, and `validate="full"` checks
    index values too (which reads the device back). `"auto"` returns the choice to the platform's order;
    `use_backend()` ends an earlier plain call.

    With `batch_invariant=True` the bits of a sequence's attention depend on nothing but that sequence: not on the
    others, their number, or the sizes of tables. Backends that cannot promise this refuse the call. Writes and
    conversions keep to it anyway; gradients have `deterministic`.
    """

    def __init__(
        self,
        backend: BackendRequest | None = None,
        *,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        validate: str | None = None,
        batch_invariant: bool | None = None,
    ) -> None:
        self.config = Config(
            backend=_parse_request(backend),
            options=expect_mapping(options or {}),
            validate=validate,
            batch_invariant=batch_invariant,
        )
        _scope.install(self, self.config)

    def __enter__(self) -> Config:
        _scope.enter(self, self.config)
        return self.config

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _scope.exit(self.config)


def reload_config() -> None:
    """Forget what the config file and the environment said; the next call reads both again."""
    global _outside
    _outside = None


def _read_file(named: str | None) -> Config:
    """The config file's requests; an unknown key is refused with the key and the file.

    An error in a file that nobody named is not ours to report, unless it is in our own table.
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
        return Config(
            backend=_parse_request(table.get("backend")),
            options=expect_mapping(table.get("options", {})),
            validate=table.get("validate"),
            batch_invariant=table.get("batch_invariant"),
        )
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
    """What is in force here and now, as a key: equal where all calls follow the same requests."""
    global _outside
    outside = _outside
    if outside is None:
        outside = _outside = (_read_file(os.environ.get(CONFIG_VARIABLE) or None), _environment())
    return _scope.blocks.get(), _scope.process_wide + outside


def _sources() -> tuple[Config, ...]:
    """Every source but the call itself, strongest first."""
    blocks, base = state()
    return blocks + base


def requested(operation: str, backend: str | Sequence[str] | None = None) -> Names | None:
    """The ordered request in force for a call of `operation`, or None where the platform's order decides."""
    if backend is not None:
        names = parse_names(backend)
    else:
        names = next((names for source in _sources() if (names := source.names(operation))), ("auto",))
    return None if names == ("auto",) else names


def requested_options(operation: str, options: Mapping[str, Any] | None = None) -> Mapping[str, Option]:
    """The tunables in force for a call of `operation`: the strongest source that gives any."""
    if options is not None:
        return expect_options(options)
    return next((source.options[operation] for source in _sources() if operation in source.options), {})


def validates_values() -> bool:
    """Whether index values are checked too: `validate="full"` in the strongest source that sets it."""
    return next((source.validate for source in _sources() if source.validate), "static") == "full"


def is_batch_invariant() -> bool:
    """Whether bits are to depend on nothing but a sequence: as the strongest source says that says anything."""
    return next((source.batch_invariant for source in _sources() if source.batch_invariant is not None), False)


def get_config() -> Config:
    """All sources merged: what a call without `backend=` and `options=` will follow."""
    backend: dict[str, Names] = {}
    options: dict[str, Mapping[str, Any]] = {}
    for source in reversed(_sources()):
        if "*" in source.backend:
            backend = {}
        backend |= dict(source.backend)
        options |= dict(source.options)
    return Config(
        backend=backend,
        options=options,
        validate="full" if validates_values() else "static",
        batch_invariant=is_batch_invariant(),
    )
