"""Evidence from a spec's fields: those that make a check fail, and the sequence lengths above which it fails."""

from collections.abc import Callable, Iterator
from typing import Any

from ragged_attention.testing import steering

WHATEVER = "the plainest batch fails too, without any features: look at the scale, the softmax and the masks of tails"
UNTOLD = ("seed", "page_size", "lens", "kv_lens")
DENSE = ("topk", 0)  # not a feature: it selects dense calls rather than sparse ones
# Fields of which a backend may take only one value.
SIZES = ("dtype", "head_dim", "cache_dtype", "combined", "v_head_dim")


def of_fields(value: Any, passes: Callable[[Any], bool | None]) -> Iterator[str]:
    """Causes that name the fields without which the check passes, or the lengths above which it fails."""
    plain, now = steering.leaves(steering.plain(value)), steering.leaves(value)
    changed = [
        path
        for path in now
        if path in plain and plain[path] != now[path] and path[-1] not in UNTOLD and (path[-1], now[path]) != DENSE
    ]
    needed = [path for path in changed if passes(steering.replaced(value, {path: plain[path]}))]
    if needed:
        yield f"it fails only with {' and '.join(f'{path[-1]}={now[path]!r}' for path in needed)}"
    lengths = [*of_lengths(value, passes)]
    yield from lengths
    features = [{path: plain[path] for path in changed if path[-1] not in unchanged} for unchanged in ((), SIZES)]
    answers = [passes(steering.replaced(value, changes)) for changes in features]
    if not needed and not lengths and next((answer for answer in answers if answer is not None), None) is False:
        yield WHATEVER


def of_lengths(value: Any, passes: Callable[[Any], bool | None]) -> Iterator[str]:
    """Causes in the lengths of a failing batch: partial last pages, or the number of keys above which it fails."""
    size = steering.page_size_of(value)
    for path, lens in lengths_of(value).items():
        whole = tuple((q_len, -(-kv_len // size) * size) for q_len, kv_len in lens) if size else lens
        if whole != lens and passes(with_lengths(value, path, whole)):
            yield "it fails only if a sequence's length is not a multiple of the page size"

        def cut(most: int, path: steering.Path = path, lens: steering.Lens = lens) -> Any:
            shorter = tuple((min(q_len, most), min(kv_len, most)) for q_len, kv_len in lens)
            return with_lengths(value, path, shorter)

        passing, failing = 0, max(kv_len for _, kv_len in lens)
        while failing - passing > 1:
            middle = (passing + failing) // 2
            passing, failing = (middle, failing) if passes(cut(middle)) else (passing, middle)
        if passing:
            pages = f", as many as {passing // size} pages of {size} hold" if size and passing % size == 0 else ""
            yield f"it fails only for sequences of more than {passing} keys{pages}"


def lengths_of(value: Any) -> dict[steering.Path, steering.Lens]:
    """The tuples of (q_len, kv_len) in a spec, by the path of their field; q_len is 1 if the spec has only kv_lens."""
    of_keys = {path: leaf for path, leaf in steering.leaves(value).items() if path[-1:] == ("kv_lens",) and leaf}
    return steering.lens_of(value) | {path: tuple((1, kv_len) for kv_len in leaf) for path, leaf in of_keys.items()}


def with_lengths(value: Any, path: steering.Path, lens: steering.Lens) -> Any:
    """The spec with other lengths in the field at `path`, which is a key of `lengths_of(value)`."""
    only_keys = path[-1:] == ("kv_lens",)
    return steering.replaced(value, {path: tuple(kv_len for _, kv_len in lens) if only_keys else lens})
