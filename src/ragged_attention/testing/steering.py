"""Find out which batches a partial backend takes, and draw only those.

A partial backend refuses most drawn structures. A structure is made of nested dataclasses (specs), so the search needs
no list of the backend's restrictions. It starts with the plainest structure and changes one field after another until
the backend takes the batch. Then it asks, for each value of each field, whether the backend also takes that value.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from ragged_attention.testing.paged.specs import Arrays

Path = tuple[str | int, ...]  # names of nested fields and indices into nested tuples
Ask = Callable[[Any], str | None]  # returns the reason why the backend refuses a structure, or None
Lens = tuple[tuple[int, int], ...]

CONTRADICTION = "the fields contradict each other"  # the reason for an invalid structure; it ends a path of the search
MOST_QUESTIONS = 1200  # limit on calls of `Ask` in the search for one structure that is taken
# Values that strategies rarely or never draw, but that kernels are often written for.
USUAL: Mapping[str, tuple[Any, ...]] = {
    "dtype": ("float32", "bfloat16", "float16"),
    "page_size": (16, 32, 64, 128, 256),
    "head_dim": (64, 128, 256),
    "num_kv_heads": (1, 2, 4, 8),
    "group": (1, 2, 4, 8),
    "num_q_heads": (1, 8, 16, 128),
    "heads": (1, 16, 64, 128),
    "d": (64, 128),
    "d_v": (64, 128),
    "limit": ("exact",),
    "max_q_len": (1,),
    "split_pages": (False, True),
}
# Fields that change only array values, on which refusals do not depend.
VALUES_ONLY = {"seed", "garbage", "poison", "invalid_pages", "sharing", "magnitude"}
FORMS: Mapping[str, Callable[[Lens], Lens]] = {
    "as drawn": lambda lens: lens,
    "decode": lambda lens: tuple((1, kv_len) for _, kv_len in lens),
    "prefill": lambda lens: tuple((max(q_len, 2), max(q_len, 2)) for q_len, _ in lens),
    "decode of some keys": lambda lens: tuple((1, max(kv_len, 1)) for _, kv_len in lens),
    "queries and as many keys": lambda lens: tuple((max(q_len, 1), max(q_len, kv_len, 1)) for q_len, kv_len in lens),
    "one sequence": lambda lens: lens[:1],
    "decode of one sequence": lambda lens: tuple((1, max(kv_len, 1)) for _, kv_len in lens[:1]),
}
# Words by which a refusal may refer to a field.
WORDS = {
    "d": ("head_dim",),
    "lens": ("decode", "prefill", "query", "queries", "sequence"),
    "combined": ("pair", "one array"),
}
LONG_PAGE = 32  # with longer pages, drawn lengths fill only one page, so these lengths are multiplied
FACTORS = (1, 8)  # drawn lengths fill at most 5 pages of 16 slots; some are multiplied, to fill up to 35 pages


def is_structure(value: Any) -> bool:
    """Whether a drawn value is a spec, rather than a batch or a batch with its gradients."""
    if not dataclasses.is_dataclass(value) or isinstance(value, (Arrays, type)):
        return False
    return not any(isinstance(getattr(value, field.name), Arrays) for field in dataclasses.fields(value))


def told(value: Any) -> str:
    """The expression that creates a drawn value; empty if the value is not a structure."""
    return brief(value) if _parts(value) else ""


def brief(value: Any) -> str:
    """The expression that creates a structure, without fields at their defaults, except dtypes."""
    if is_structure(value):
        value = value.fitted() if hasattr(value, "fitted") else value
        arguments = {
            field.name: brief(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.name == "dtype" or getattr(value, field.name) != field.default
        }
        return f"{type(value).__name__}({', '.join(f'{name}={text}' for name, text in arguments.items())})"
    if isinstance(value, tuple) and any(map(is_structure, value)):
        return ", ".join(brief(part) for part in value if part != {})
    return repr(value)


def leaves(value: Any, path: Path = ()) -> dict[Path, Any]:
    """The innermost fields of a structure or of a tuple of structures, with their values."""
    fields: dict[Path, Any] = {}
    for name, part in _parts(value):
        fields |= leaves(part, (*path, name))
    return fields or {path: value}


def _parts(value: Any) -> list[tuple[str | int, Any]]:
    if is_structure(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple) and any(map(is_structure, value)):
        return [*enumerate(value)]
    return []


def replaced(value: Any, changes: Mapping[Path, Any]) -> Any:
    """The structure with some innermost fields changed."""
    if () in changes:
        return changes[()]
    inner: dict[str | int, dict[Path, Any]] = {}
    for path, new in changes.items():
        inner.setdefault(path[0], {})[path[1:]] = new
    if not inner:
        return value
    parts = {name: replaced(part, inner.get(name, {})) for name, part in _parts(value)}
    if isinstance(value, tuple):
        return tuple(parts.values())
    return type(value)(**{str(name): part for name, part in parts.items()})


def plain(value: Any) -> Any:
    """The structure with each field set to its default, if the field has one."""
    if is_structure(value):
        parts = {}
        for field in dataclasses.fields(value):
            part = getattr(value, field.name)
            known = field.default is not dataclasses.MISSING and not is_structure(part)
            parts[field.name] = field.default if known else plain(part)
        return type(value)(**parts)
    return tuple(map(plain, value)) if _parts(value) else value


def template(reason: str) -> str:
    """A refusal with numbers and dtypes replaced: refusals with equal templates come from the same condition."""
    return re.sub(r"\d+", "#", re.sub(r"b?float\d+\w*|u?int8|bf16|f16|f32|True|False", "#", reason))


def vocabulary(values: Sequence[Any]) -> dict[Path, list[Any]]:
    """The values to try for each field: the usual ones, then those in the given structures."""
    words: dict[Path, list[Any]] = {}
    for value in values:
        for path, leaf in leaves(value).items():
            if path and path[-1] not in VALUES_ONLY and not isinstance(leaf, Mapping):
                known = words.setdefault(path, [*USUAL.get(str(path[-1]), ())])
                if not any(_equal(leaf, other) for other in known):
                    known.append(leaf)
    return words


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other


def page_size_of(value: Any) -> int | None:
    """The page size of a structure, or of the first structure in a tuple that has one; None if none has one."""
    return next((leaf for path, leaf in leaves(value).items() if path[-1:] == ("page_size",)), None)


def lens_of(value: Any) -> dict[Path, Lens]:
    """The tuples of (q_len, kv_len) in a structure, by the path of their field."""
    return {path: leaf for path, leaf in leaves(value).items() if path[-1:] == ("lens",) and _pairs(leaf)}


def _pairs(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and bool(leaf) and all(isinstance(pair, tuple) for pair in leaf)


def formed(value: Any, form: str) -> Any:
    """The structure with its lengths changed to one of `FORMS`."""
    return replaced(value, {path: FORMS[form](lens) for path, lens in lens_of(value).items()})


def find_taken(value: Any, values: Sequence[Any], ask: Ask) -> Any:
    """A structure like `value` that the backend takes, or None if the search fails.

    A change is kept if the backend then refuses for another reason, because the first restriction is then satisfied.
    """
    words = vocabulary([*values, plain(value), value])
    for path, lens in lens_of(value).items():
        words[path] = [form(lens) for form in FORMS.values()]
    limits = dict.fromkeys([path for path in words if path[-1] == "limit"], "exact")
    for base in [plain(value), *([replaced(plain(value), limits)] if limits else [])]:
        if (reason := ask(base)) is None:
            return base
        if (
            structure := _climb(base, reason, {template(reason), CONTRADICTION}, words, ask, [MOST_QUESTIONS])
        ) is not None:
            return structure
        # Refusals by `dispatch` ("does not ...") concern one field at a time, so changing several at once cannot help.
        if not reason.startswith("does not") and (structure := _together(base, reason, words, ask)) is not None:
            return structure
    return None


def _together(base: Any, reason: str, words: Mapping[Path, Sequence[Any]], ask: Ask) -> Any:
    """`base` with several fields changed at once, such that the backend takes it; None if none is found.

    This is for backends that refuse with the same reason whichever condition is violated.
    """
    first = {"dtype": 3, "page_size": 5, "head_dim": 3, "d": 3, "heads": 4, "lens": 3}
    paths = [path for path in words if path[-1] in first or _named(str(path[-1]), reason)]
    choices = [words[path][: first.get(str(path[-1]), 2)] for path in paths]
    for news in itertools.islice(itertools.product(*choices), MOST_QUESTIONS):
        if ask(other := replaced(base, dict(zip(paths, news, strict=True)))) is None:
            return other
    return None


def _climb(base: Any, reason: str, seen: set[str], words: Mapping[Path, Any], ask: Ask, left: list[int]) -> Any:
    for path, new in _moves(base, reason, words):
        left[0] -= 1
        if left[0] < 0:
            return None
        other = replaced(base, {path: new})
        if (why := ask(other)) is None:
            return other
        if template(why) not in seen:
            seen.add(template(why))
            if (structure := _climb(other, why, seen, words, ask, left)) is not None:
                return structure
    return None


def _moves(base: Any, reason: str, words: Mapping[Path, Sequence[Any]]) -> list[tuple[Path, Any]]:
    """All changes of a single field, as its path and new value. Changes that the refusal hints at come first."""
    fields, words_of_reason = leaves(base), set(re.findall(r"\w+", reason))
    moves = [(path, new) for path in words if path in fields for new in words[path] if not _equal(new, fields[path])]
    return sorted(moves, key=lambda move: -_hints(str(move[0][-1]), move[1], reason, words_of_reason))


def _hints(name: str, value: Any, reason: str, words_of_reason: Collection[str]) -> int:
    """A score for how strongly a refusal hints at a field (2) and at a value (1)."""
    return 2 * _named(name, reason) + (str(value) in words_of_reason)


def _named(name: str, reason: str) -> bool:
    return any(word in reason for word in (name, name.replace("_", " "), *WORDS.get(name, ())))


@dataclasses.dataclass(frozen=True)
class Steering:
    """The values that a backend takes for restricted fields, and the form of lengths that it takes."""

    allowed: Mapping[Path, tuple[Any, ...]]
    form: str = "as drawn"

    def steered(self, draw: Callable[[st.SearchStrategy[Any]], Any], value: Any) -> Any:
        """The structure, in which values that the backend takes replace drawn values that it does not take."""
        now, changes = leaves(value), {}
        for path, values in self.allowed.items():
            if path in now and not any(_equal(now[path], other) for other in values):
                changes[path] = draw(st.sampled_from(values))
        pages = {path for path in now if path[-1:] == ("page_size",)}
        times = draw(st.sampled_from(FACTORS)) if pages & {*self.allowed} else 1
        return stretched(formed(replaced(value, changes), self.form), times)


def stretched(value: Any, times: int = 1) -> Any:
    """The structure with `times` as many keys, and with more if pages are long, so that a sequence fills several.

    It is unchanged if pages have fewer than 16 slots.
    """
    size = page_size_of(value)
    if size is None or 2 * size < LONG_PAGE:
        return value
    factor = times * (2 * size // LONG_PAGE if size > LONG_PAGE else 1)
    if factor == 1:
        return value

    def longer(lens: Lens) -> Lens:
        return tuple((q_len, kv_len if q_len >= kv_len else kv_len * factor) for q_len, kv_len in lens)

    return replaced(value, {path: longer(lens) for path, lens in lens_of(value).items()})


def learn(values: Sequence[Any], ask: Ask) -> dict[type | tuple[Path, ...], Steering]:
    """The `Steering` for each kind of structure among `values`. Structures of a kind have the same fields."""
    kinds: dict[Any, list[Any]] = {}
    for value in values:
        if len(paths := leaves(value)) > 1:
            kinds.setdefault(tuple(paths), []).append(value)
    steerings = {kind: _learn(of_kind, ask) for kind, of_kind in kinds.items()}
    return {kind: steering for kind, steering in steerings.items() if steering is not None}


def _learn(values: Sequence[Any], ask: Ask) -> Steering | None:
    telling = max(values, key=_variety)
    if (centre := find_taken(telling, values, ask)) is None:
        return None
    form = next((name for name in FORMS if lens_of(formed(telling, name)) == lens_of(centre)), "as drawn")
    allowed = {}
    for path, words in vocabulary(values).items():
        now = leaves(centre)[path]
        if _pairs(now):
            continue
        drawn = [leaves(value)[path] for value in values]
        taken = [now, *(new for new in words if not _equal(new, now) and ask(replaced(centre, {path: new})) is None)]
        if not all(_among(leaf, taken) for leaf in drawn):
            allowed[path] = tuple(taken)
    return Steering(allowed, form)


def _variety(value: Any) -> int:
    """The variety of lengths in a structure; the search starts from the plain form of the structure with the most."""
    lens = [pair for each in lens_of(value).values() for pair in each]
    return len(set(lens)) + 10 * (len({min(q_len, 2) for q_len, _ in lens}) > 1)


def _among(leaf: Any, values: Collection[Any]) -> bool:
    return any(_equal(leaf, other) for other in values)


@st.composite
def steered(draw: st.DrawFn, strategy: st.SearchStrategy[Any], by: Mapping[Any, Steering]) -> tuple[Any, bool]:
    """A value drawn from the strategy and changed so that the backend takes it, and whether it was changed."""
    value = draw(strategy)
    steering = by.get(tuple(leaves(value)))
    if steering is None:
        return value, False
    other = steering.steered(draw, value)
    return other, other != value
