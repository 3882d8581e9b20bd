"""From (operation, device, wishes) to the one implementation that runs, and why the others would not.

An implementation of operation X on backend Y is the module `<room of Y>.X`. The path is the registry: nothing is
registered by hand, and a room is imported only when a call first asks for it. Each such module offers

    Tile                     frozen record of what may be tuned, constraints checked
    heuristic(call) -> Tile  a sound choice without a table
    why_not(call)            None, or one sentence: argument, value, limit
    run(call, tile, launch)  the kernel; assumes that why_not returned None

and may offer

    why_not_by_default(call)    the same as why_not, asked besides where the call does not name the backend but comes to
                             it in its platform's order: for kernels that no measurement speaks for yet

`launch` is the calling front end's `Launcher`. Rooms of other packages join through the entry-point group
`ragged_attention.backends`: backend name -> a package that holds such modules.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from ragged_attention import config, tuning
from ragged_attention.calls import CALLS, Call, Device
from ragged_attention.errors import BackendMissing, InvalidInput, Unsupported

ENTRY_POINTS = "ragged_attention.backends"

ROOMS = {
    "triton": "ragged_attention.kernels_triton",
    "pallas": "ragged_attention.kernels_pallas",
    "cuda": "ragged_attention.kernels_cuda",
    "eager": "ragged_attention.portable.torch_eager",
    "xla": "ragged_attention.portable.xla",
    "reference": "ragged_attention.reference",
}
NEEDS = {"triton": "triton", "pallas": "jax", "eager": "torch", "xla": "jax"}
PORTABLE = {"torch": "eager", "jax": "xla", "numpy": "reference"}
ORDER: Mapping[str, tuple[str, ...]] = {
    "cuda": ("cuda", "triton", "portable"),
    "rocm": ("triton", "portable"),
    "tpu": ("pallas", "portable"),
    "*": ("portable",),
}


class Implementation(Protocol):
    """What every `<room>.<operation>` module offers."""

    Tile: type

    def heuristic(self, call: Any, /) -> Any: ...
    def why_not(self, call: Any, /) -> str | None: ...
    def run(self, call: Any, tile: Any, launch: Any, /) -> Any: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One implementation, ready to run."""

    backend: str
    module: Any
    tile: Any

    def run(self, call: Call, launch: Any) -> Any:
        return self.module.run(call, self.tile, launch)


@functools.cache
def third_party_rooms() -> dict[str, str]:
    """Backend name -> package, as installed packages announce them."""
    return {point.name: point.value for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def backends() -> tuple[str, ...]:
    """Every backend name that a call may ask for."""
    return (*ROOMS, *third_party_rooms())


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):  # a parent package is absent
            return False
        raise  # it is there, and what it imports is not


def _room(backend: str) -> str | None:
    return ROOMS.get(backend) or third_party_rooms().get(backend)


@functools.cache
def load(operation: str, backend: str) -> Any:
    """Import one implementation. Absence raises `BackendMissing`; once found, an import error is itself."""
    room = _room(backend)
    if room is None:
        raise BackendMissing(f"unknown backend {backend!r}; known are {', '.join(backends())}")
    if (needs := NEEDS.get(backend)) and needs not in sys.modules and not _exists(needs):
        raise BackendMissing(f"{needs} is not installed")
    if backend not in ROOMS and not _exists(room):
        raise BackendMissing(f"its package {room} cannot be found")
    if not _exists(f"{room}.{operation}"):
        raise BackendMissing(f"does not offer {operation}")
    return importlib.import_module(f"{room}.{operation}")


def offering(operation: str, names: str | None) -> str | None:
    """Those of a call's backends, joined by commas, that offer another operation as well, which goes with the call.

    None if there is none: then that operation follows the configuration.
    """
    rooms = {name: _room(name) for name in names.split(",")} if names else {}
    offer = [name for name, room in rooms.items() if room is None or _exists(f"{room}.{operation}")]
    return ",".join(offer) or None


def candidates(operation: str, device: Device, backend: str | Sequence[str] | None = None) -> tuple[str, ...]:
    """The backends to ask, in order: the wish in force, else the platform's order."""
    names: list[str] = []
    for name in config.requested(operation, backend) or ("auto",):
        names += ORDER.get(device.platform, ORDER["*"]) if name == "auto" else (name,)
    names = [PORTABLE[device.framework] if name == "portable" else name for name in names]
    for name in names:
        if name not in ROOMS and name not in third_party_rooms():
            raise InvalidInput(f"expected backend to be one of {', '.join(('auto', *backends()))}, got {name!r}")
    return tuple(dict.fromkeys(names))


def state() -> tuple[Any, ...]:
    """What answers rest on beside the call and the configuration, by the `state` hooks of the packages loaded."""
    packages: list[Any] = [sys.modules.get(room) for room in ROOMS.values()]
    return tuple([package.state() for package in packages if callable(getattr(package, "state", None))])


def unasked(operation: str, device: Device, backend: str | Sequence[str] | None = None) -> frozenset[str]:
    """Those of the candidates that stand there by the platform's order alone."""
    wishes = config.requested(operation, backend) or ("auto",)
    order = ORDER.get(device.platform, ORDER["*"]) if "auto" in wishes else ()
    return frozenset(order) - frozenset(wishes)


def refusal(module: Any, call: Call, *, asked: bool = True) -> str | None:
    """Why an implementation does not run a call; one not asked for by name may have more to say."""
    reason = module.why_not(call)
    if reason is None and not asked and hasattr(module, "why_not_by_default"):
        return module.why_not_by_default(call)
    return reason


def verdicts(call: Call, names: Sequence[str], unasked: Collection[str] = ()) -> dict[str, str | None]:
    """For each backend: None if it takes the call, else why not; `unasked` are those that nobody named."""
    reasons: dict[str, str | None] = {}
    for name in names:
        try:
            reasons[name] = refusal(load(call.OPERATION, name), call, asked=name not in unasked)
        except BackendMissing as missing:
            reasons[name] = str(missing)
    return reasons


def choose(
    call: Call, *, backend: str | Sequence[str] | None = None, options: Mapping[str, Any] | None = None
) -> Choice:
    """The first backend in order that takes the call, with its tile.

    Raises `Unsupported` (`BackendMissing` where not one of them is installed) with every candidate's reason.
    """
    names = candidates(call.OPERATION, call.device, backend)
    by_order = unasked(call.OPERATION, call.device, backend)
    reasons: dict[str, str | None] = {}
    missing = True
    for name in names:
        try:
            module = load(call.OPERATION, name)
        except BackendMissing as error:
            reasons[name] = str(error)
            continue
        missing = False
        reasons[name] = refusal(module, call, asked=name not in by_order)
        if reasons[name] is None:
            return Choice(
                name, module, tuning.tile_for(module, call, config.requested_options(call.OPERATION, options))
            )
    lines = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
    rest = [name for name in (*ORDER["*"], *ORDER.get(call.device.platform, ())) if name != "portable"]
    others = verdicts(call, [*rest, PORTABLE[call.device.framework]], unasked=rest)
    nearest = next((name for name, reason in others.items() if reason is None and name not in names), None)
    fix = f'\nnearest that does: backend="{nearest}"' if nearest else ""
    kind = BackendMissing if missing else Unsupported
    where = f"{call.device.framework} on {call.device.platform}"
    raise kind(f"no backend asked for takes this {call.OPERATION} call from {where}:{lines}{fix}")


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What one backend says to a call."""

    backend: str
    chosen: bool
    takes: bool
    text: str


def answers(call: Call, *, backend: str | Sequence[str] | None = None) -> list[Answer]:
    """What every backend says to a call, those asked for first; an import that fails the call fails here as well."""
    asked = candidates(call.OPERATION, call.device, backend)
    by_order = unasked(call.OPERATION, call.device, backend)
    found: list[Answer] = []
    chosen = False
    for name in dict.fromkeys((*asked, *backends())):
        wanted = name in asked and not chosen
        try:
            reason = verdicts(call, [name], unasked=by_order)[name]
        except Exception as error:
            if wanted:
                raise
            reason = f"its import fails: {type(error).__name__}: {error}"
        takes = reason is None
        text = reason or ("chosen" if wanted else "could run" if name in asked else "could run, not asked for")
        found.append(Answer(name, wanted and takes, takes, text))
        chosen = chosen or found[-1].chosen
    return found


def explanation(call: Call, *, backend: str | Sequence[str] | None = None) -> str:
    """A table: each backend, whether it is the one chosen, and why the others would not run the call."""
    rows = [f"{call.OPERATION} from {call.device.framework} on {call.device.name or call.device.platform}"]
    for answer in answers(call, backend=backend):
        rows.append(f"{'*' if answer.chosen else ' '} {answer.backend:10} {answer.text}")
    return "\n".join(rows)


def explain(operation: str, *arguments: Any, backend: str | Sequence[str] | None = None, **keywords: Any) -> str:
    """Which backend would run `operation(*arguments, **keywords)`, and why the others would not, as a table.

    `operation` is a name such as "ragged_paged_attention" or a front end's function; the rest is what the call
    itself would be given. The framework is told by the first array.
    """
    name = operation if isinstance(operation, str) else getattr(operation, "__name__", repr(operation))
    if name not in CALLS:
        raise InvalidInput(f"expected operation to be one of {', '.join(CALLS)}, got {name!r}")
    return _front_end(arguments, keywords).explain(name, *arguments, backend=backend, **keywords)


def _front_end(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    torch: Any = sys.modules.get("torch")
    for value in (*arguments, *keywords.values()):
        first = value[0] if isinstance(value, tuple | list) and value else value
        if torch is not None and isinstance(first, torch.Tensor):
            return importlib.import_module("ragged_attention.torch")
        if type(first).__module__.partition(".")[0] in ("jax", "jaxlib", "numpy"):
            return importlib.import_module("ragged_attention.jax")
    raise TypeError("expected a torch, jax or NumPy array among the arguments, got none")
