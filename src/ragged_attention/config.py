"""Which backend runs a call: where wishes come from, and which of them wins.

The first of these that names a backend for the operation decides:

1. the call's own `backend=`
2. the innermost `with use_backend(...)` block
3. `use_backend(...)` called plainly (process-wide)
4. the config file: a TOML file named by RAGGED_ATTENTION_CONFIG, or `[tool.ragged_attention]` in the working
   directory's pyproject.toml
5. the environment variable RAGGED_ATTENTION_BACKEND
6. the platform's own order, `ragged_attention.dispatch.ORDER`

`options` follow the same way from 1 to 4, operation by operation.
"""

import contextvars
import dataclasses
import functools
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ragged_attention.calls import CALLS
from ragged_attention.errors import InvalidInput

BACKEND_VARIABLE = "RAGGED_ATTENTION_BACKEND"
CONFIG_VARIABLE = "RAGGED_ATTENTION_CONFIG"
VALIDATE_VARIABLE = "RAGGED_ATTENTION_VALIDATE"
VALIDATION = ("static", "full")
FLASH_MLA_CONVENTIONS = ("base2", "natural")

Names = tuple[str, ...]
BackendWish = str | Sequence[str] | Mapping[str, str | Sequence[str]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Config:
    """One source's wishes by operation; `backend` may have "*" for those it does not name."""

    backend: Mapping[str, Names] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    validate: str | None = None
    flash_mla_convention: str | None = None  # of `compat.flash_mla`'s logarithms

    def __post_init__(self) -> None:
        for name, known in (("backend", (*CALLS, "*")), ("options", tuple(CALLS))):
            for operation in getattr(self, name):
                if operation not in known:
                    raise InvalidInput(f"expected keys of {name} among {', '.join(known)}, got {operation!r}")
        for operation, options in self.options.items():
            if not isinstance(options, Mapping):
                raise TypeError(f"expected options of {operation} to be a mapping, got {type(options).__name__}")
        if self.validate is not None and self.validate not in VALIDATION:
            raise InvalidInput(f"expected validate to be one of {', '.join(VALIDATION)}, got {self.validate!r}")
        if self.flash_mla_convention is not None:
            expect_flash_mla_convention("flash_mla_convention", self.flash_mla_convention)

    def names(self, operation: str) -> Names | None:
        """The ordered wish for `operation`, or None where this source has none."""
        return self.backend.get(operation, self.backend.get("*"))


def expect_flash_mla_convention(name: str, value: Any) -> None:
    if value not in FLASH_MLA_CONVENTIONS:
        raise InvalidInput(f"expected {name} to be one of {', '.join(FLASH_MLA_CONVENTIONS)}, got {value!r}")


def parse_names(wish: str | Sequence[str]) -> Names:
    """`"triton"`, `"triton,eager"` or a list of names, as an ordered wish."""
    if isinstance(wish, str):
        wish = [name.strip() for name in wish.split(",")]
    if not isinstance(wish, Sequence) or not all(isinstance(name, str) for name in wish):
        raise TypeError(f"expected backend to be a name or a list of names, got {wish!r}")
    if not wish or not all(wish):
        raise InvalidInput(f"expected backend to name at least one backend, got {wish!r}")
    return tuple(wish)


def _parse_wish(wish: BackendWish | None) -> dict[str, Names]:
    if wish is None:
        return {}
    if isinstance(wish, Mapping):
        return {operation: parse_names(names) for operation, names in wish.items()}
    return {"*": parse_names(wish)}


def expect_mapping(options: Any) -> Mapping[str, Any]:
    if not isinstance(options, Mapping):
        raise TypeError(f"expected options to be a mapping, got {type(options).__name__}")
    return options


_process: list[Config] = []
_blocks: contextvars.ContextVar[tuple[Config, ...]] = contextvars.ContextVar("ragged_attention_blocks", default=())


class use_backend:  # reads as a verb, like torch.no_grad
    """Choose backends for all later calls, or for a block.

    `use_backend("triton")`, an ordered wish `use_backend(["cuda", "triton"])`, or by operation
    `use_backend({"write_kv_pages": "eager", "*": "triton"})`. Called plainly it holds process-wide until the next
    plain call; in a `with` statement it holds inside the block, for the current thread or task. `options` maps an
    operation to its tunables, `validate="full"` checks index values too (which reads the device back), and
    `flash_mla_convention` is the default of `compat.flash_mla.flash_mla_sparse_fwd`, "base2" or "natural".
    `"auto"` gives the choice back to the platform's order; `use_backend()` ends an earlier plain call.
    """

    def __init__(
        self,
        backend: BackendWish | None = None,
        *,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        validate: str | None = None,
        flash_mla_convention: str | None = None,
    ) -> None:
        self.config = Config(
            backend=_parse_wish(backend),
            options=expect_mapping(options or {}),
            validate=validate,
            flash_mla_convention=flash_mla_convention,
        )
        self._before = list(_process)
        _process[:] = [self.config]

    def __enter__(self) -> Config:
        if _process and _process[0] is self.config:
            _process[:] = self._before
        self._token = _blocks.set((*_blocks.get(), self.config))
        return self.config

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _blocks.reset(self._token)


@functools.lru_cache(maxsize=16)
def _read_file(named: str | None, directory: str) -> Config:
    """The config file's wishes; an unknown key is refused with the key and the file."""
    path = Path(directory, named) if named else Path(directory, "pyproject.toml")
    if named and not path.is_file():
        raise InvalidInput(f"expected {CONFIG_VARIABLE} to name a file, got {named!r}")
    if not path.is_file():
        return Config()
    try:
        table = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        if not named:
            return Config()  # somebody else's broken pyproject is not ours to report
        raise InvalidInput(f"expected {path} to be TOML, got: {error}") from None
    if not named:
        table = table.get("tool", {}).get("ragged_attention", {})
    known = {field.name for field in dataclasses.fields(Config)}
    for key in table:
        if key not in known:
            raise InvalidInput(f"expected keys {', '.join(sorted(known))} in {path}, got {key!r}")
    try:
        return Config(
            backend=_parse_wish(table.get("backend")),
            options=expect_mapping(table.get("options", {})),
            validate=table.get("validate"),
            flash_mla_convention=table.get("flash_mla_convention"),
        )
    except (InvalidInput, TypeError) as error:
        raise type(error)(f"{path}: {error}") from None


def _environment() -> Config:
    names = os.environ.get(BACKEND_VARIABLE)
    validate = os.environ.get(VALIDATE_VARIABLE) or None
    if validate is not None and validate not in VALIDATION:
        raise InvalidInput(f"expected {VALIDATE_VARIABLE} to be one of {', '.join(VALIDATION)}, got {validate!r}")
    return Config(backend={"*": parse_names(names)} if names else {}, validate=validate)


def _sources() -> list[Config]:
    """Every source but the call itself, strongest first."""
    return [
        *reversed(_blocks.get()),
        *_process,
        _read_file(os.environ.get(CONFIG_VARIABLE) or None, os.getcwd()),
        _environment(),
    ]


def state() -> tuple[object, ...]:
    """A hashable stand-in for everything the sources say: while it is the same, so are the wishes."""
    variables = (BACKEND_VARIABLE, CONFIG_VARIABLE, VALIDATE_VARIABLE)
    return (_blocks.get(), *_process, os.getcwd(), *(os.environ.get(name) for name in variables))


def requested(operation: str, backend: str | Sequence[str] | None = None) -> Names | None:
    """The ordered wish in force for a call of `operation`, or None where the platform's order decides."""
    if backend is not None:
        names = parse_names(backend)
    else:
        names = next((names for source in _sources() if (names := source.names(operation))), ("auto",))
    return None if names == ("auto",) else names


def requested_options(operation: str, options: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """The tunables in force for a call of `operation`: the strongest source that gives any."""
    if options is not None:
        return expect_mapping(options)
    return next((source.options[operation] for source in _sources() if operation in source.options), {})


def validates_values() -> bool:
    """Whether index values are checked too: `validate="full"` in the strongest source that says."""
    return next((source.validate for source in _sources() if source.validate), "static") == "full"


def flash_mla_convention() -> str:
    """The logarithms of `compat.flash_mla`'s prefill where a call does not say: by the strongest source that does."""
    return next((source.flash_mla_convention for source in _sources() if source.flash_mla_convention), "base2")


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
        flash_mla_convention=flash_mla_convention(),
    )
