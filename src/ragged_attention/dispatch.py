"""Selects the implementation that runs a call, and reports why the other implementations do not.

The module `<package of Y>.X` implements operation X on backend Y and has the interface `protocols.Implementation`.
Modules are found by this name, without registration, and a backend is imported when a call first asks for it. Other
distributions announce their backends in the entry-point group `ragged_attention.backends`, which maps a backend's name
to its package. A backend's package may offer four functions:

- `state()` returns the values, apart from the call, on which the selection of the backend's modules depends
- `report()` returns rows for `doctor`
- `missing()` returns what the backend lacks on this machine, or None
- `why_not(call)` is the `why_not` of all modules that define none
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ragged_attention import config, tuning
from ragged_attention.calls import Call, Device
from ragged_attention.errors import BackendMissing, InvalidInput, Unsupported, how_to_install
from ragged_attention.host import forking
from ragged_attention.protocols import Implementation, Launcher, complete

ENTRY_POINTS = "ragged_attention.backends"

PACKAGES = {
    "triton": "ragged_attention.kernels_triton",
    "pallas": "ragged_attention.kernels_pallas",
    "cuda": "ragged_attention.kernels_cuda",
    "numba": "ragged_attention.portable.numba",
    "eager": "ragged_attention.portable.torch_eager",
    "xla": "ragged_attention.portable.xla",
    "reference": "ragged_attention.reference",
}
TAKEN = (*PACKAGES, "auto", "portable")  # names that are not available to backends of other distributions
NEEDS = {"triton": "triton", "pallas": "jax", "numba": "numba", "eager": "torch", "xla": "jax"}
EXTRAS = {"triton": "triton", "jax": "jax", "numba": "cpu", "torch": "torch"}  # the extras that install these packages
PORTABLE = {"torch": "eager", "jax": "xla", "numpy": "reference"}
ORDER: Mapping[str, tuple[str, ...]] = {
    "cuda": ("cuda", "triton", "portable"),
    "rocm": ("triton", "portable"),
    "tpu": ("pallas", "portable"),
    "cpu": ("numba", "portable"),
    "*": ("portable",),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The implementation that runs one call, and its tile."""

    backend: str
    module: Implementation
    tile: Any

    def leaves(self, call: Call) -> list[str]:
        """The call's arguments that another operation must handle first."""
        return [name for name in call.changed() if name in call.SEPARABLE - self.module.FEATURES]

    def run(self, call: Call, launch: Launcher) -> Any:
        return self.module.run(call, self.tile, launch)


@functools.cache
def _announced() -> dict[str, str]:
    return {point.name: point.value for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


@functools.cache
def third_party_packages() -> dict[str, str]:
    """The packages that installed distributions announce, by backend name. Names in `TAKEN` are left out."""
    return {name: package for name, package in _announced().items() if name not in TAKEN}


def shadowed() -> dict[str, str]:
    """The packages that are announced under a backend name in `TAKEN`, by that name. No call can reach them."""
    return {name: package for name, package in _announced().items() if name in TAKEN}


def backends() -> tuple[str, ...]:
    """The names of all backends."""
    return (*PACKAGES, *third_party_packages())


def why_shadowed(name: str) -> str:
    return f"cannot be reached: {shadowed()[name]} is announced under a name that has another meaning here; rename it"


@contextlib.contextmanager
def importing(module: str) -> Iterator[None]:
    """A context for an import. If the module tries to end the program, `ImportError` is raised instead."""
    try:
        yield
    except SystemExit as stop:
        raise ImportError(f"{module} ended the program when it was imported: SystemExit({stop.code!r})") from stop


def _exists(module: str) -> bool:
    try:
        with importing(module):
            return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):  # a parent package is absent
            return False
        raise  # the module exists, but it imports a package that does not


def package_of(backend: str) -> str | None:
    """The package with a backend's modules, or None for an unknown backend."""
    return PACKAGES.get(backend) or third_party_packages().get(backend)


def missing_package(package: str) -> str:
    """The message that a package is not installed, with advice on how to install it if it belongs to an extra."""
    return f"{package} is not installed" + (f": {how_to_install(EXTRAS[package])}" if package in EXTRAS else "")


def missing_need(backend: str) -> str | None:
    """The package that a backend needs and that is not installed, or None."""
    needs = NEEDS.get(backend)
    return needs if needs and needs not in sys.modules and not _exists(needs) else None


@functools.cache
@forking.postponed()  # a process forked during the import would keep a partly imported module
def load(operation: str, backend: str) -> Implementation:
    """Import an implementation. Raises `BackendMissing` if there is none, or any error that the import raises."""
    package = package_of(backend)
    if package is None:
        raise BackendMissing(f"unknown backend {backend!r}; known are {', '.join(backends())}")
    if (needs := missing_need(backend)) is not None:
        raise BackendMissing(missing_package(needs))
    if backend not in PACKAGES and not _exists(package):
        raise BackendMissing(f"its package {package} cannot be found")
    if not _exists(f"{package}.{operation}"):
        raise BackendMissing(f"does not offer {operation}")
    with importing(f"{package}.{operation}"):
        return complete(importlib.import_module(f"{package}.{operation}"))


def backends_offering(operation: str, backend: str | Sequence[str] | None) -> str | None:
    """Those of a call's backend names that also offer `operation`, such as its gradient, separated by commas.

    The result is None if no name in `backend` offers `operation`; then the configuration decides for `operation`.
    """
    packages = {} if backend is None else {name: package_of(name) for name in config.parse_names(backend)}
    offer = [name for name, package in packages.items() if package is None or _exists(f"{package}.{operation}")]
    return ",".join(offer) or None


def candidates(operation: str, device: Device, backend: str | Sequence[str] | None = None) -> tuple[str, ...]:
    """The backends to try, in order: the requested ones, or the platform's order."""
    names: list[str] = []
    for name in config.requested(operation, backend) or ("auto",):
        names += ORDER.get(device.platform, ORDER["*"]) if name == "auto" else (name,)
    names = [PORTABLE[device.framework] if name == "portable" else name for name in names]
    for name in names:
        if name not in PACKAGES and name not in third_party_packages():
            known = ", ".join(("auto", *backends(), "portable"))
            raise InvalidInput(f"expected backend to be one of {known}, got {name!r}")
    return tuple(dict.fromkeys(names))


def state() -> tuple[Any, ...]:
    """The `state()` of each loaded package. The selection depends on it, on the call and on the configuration."""
    names = (*PACKAGES.values(), *third_party_packages().values())
    loaded: Any = map(sys.modules.get, names)
    return tuple([package.state() for package in loaded if callable(getattr(package, "state", None))])


def by_default(operation: str, device: Device, backend: str | Sequence[str] | None = None) -> frozenset[str]:
    """The candidates that the platform's order adds and the request does not name."""
    request = config.requested(operation, backend) or ("auto",)
    order = ORDER.get(device.platform, ORDER["*"]) if "auto" in request else ()
    return frozenset(order) - frozenset(request)


def refusal(backend: str, call: Call, *, named: bool = True) -> str | None:
    """The reason why a backend does not run a call, or None. If not `named`, `why_not_by_default` is asked too."""
    module = load(call.OPERATION, backend)
    reason = (
        call.device.why_unavailable(backend)
        or _not_honoured(module, call)
        or module.why_not(call)
        or _depends_on_batch(module, call)
    )
    return reason if reason or named else module.why_not_by_default(call)


def _not_honoured(module: Implementation, call: Call) -> str | None:
    """The reason to refuse a call that sets an optional argument outside the module's FEATURES, or None."""
    taken = module.FEATURES | call.SEPARABLE
    names = [name for name in call.changed() if name not in taken and not call.KINDS[name].hint]
    return f"does not honour {names[0]}" if names else None


def _is_invariant(call: Call) -> bool:
    """Whether a call's results must be batch-invariant."""
    return call.ATTENDS and config.is_batch_invariant()


def _depends_on_batch(module: Implementation, call: Call) -> str | None:
    """The reason to refuse a call that must be batch-invariant, if the module's results are not. Otherwise None."""
    if _is_invariant(call) and not hasattr(module, "invariant_tile"):
        return "does not promise the same bits in every batch (batch_invariant)"
    return None


def verdicts(call: Call, names: Sequence[str], by_default: Collection[str] = ()) -> dict[str, str | None]:
    """Each backend's reason to refuse the call, or None. The request does not contain the names in `by_default`."""
    reasons: dict[str, str | None] = {}
    for name in names:
        try:
            reasons[name] = refusal(name, call, named=name not in by_default)
        except BackendMissing as missing:
            reasons[name] = str(missing)
    return reasons


def choose(
    call: Call, *, backend: str | Sequence[str] | None = None, options: Mapping[str, Any] | None = None
) -> Choice:
    """The first candidate that takes the call, with its tile.

    Raises `Unsupported` with every candidate's reason, or `BackendMissing` if no candidate is installed.
    """
    names = candidates(call.OPERATION, call.device, backend)
    unnamed = by_default(call.OPERATION, call.device, backend)
    reasons: dict[str, str | None] = {}
    missing = True
    for name in names:
        try:
            module = load(call.OPERATION, name)
        except BackendMissing as error:
            reasons[name] = str(error)
            continue
        missing = False
        reasons[name] = refusal(name, call, named=name not in unnamed)
        if reasons[name] is None:
            requested = config.requested_options(call.OPERATION, options)
            return Choice(name, module, tuning.tile_for(module, call, requested, invariant=_is_invariant(call)))
    lines = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
    defaults = [name for name in (*ORDER["*"], *ORDER.get(call.device.platform, ())) if name != "portable"]
    others = verdicts(call, [*defaults, PORTABLE[call.device.framework]], by_default=defaults)
    nearest = next((name for name, reason in others.items() if reason is None and name not in names), None)
    fix = f'\nnearest that does: backend="{nearest}"' if nearest else ""
    kind = BackendMissing if missing else Unsupported
    where = f"{call.device.framework} on {call.device.platform}"
    raise kind(f"no backend asked for takes this {call.OPERATION} call from {where}:{lines}{fix}")
