"""Find likely causes for a backend's failure on a batch, as texts.

There are three kinds of evidence. The results may equal the reference's results for another call, such as one with a
wider window, or be related to the correct results in a simple way. They may change with keys that no query sees, or be
correct only for some orders of keys. And the check may pass if one field of the batch has its default, or if sequences
are shorter.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ragged_attention.testing import steering
from ragged_attention.testing.diagnosis.fields import WHATEVER, lengths_of, of_fields, with_lengths
from ragged_attention.testing.diagnosis.numbers import OVERFLOW, READ, is_right, of_results
from ragged_attention.testing.diagnosis.results import enlarged
from ragged_attention.testing.paged.specs import Contradiction
from ragged_attention.testing.runner import Declined, Runner

VAGUE = ("it fails only ", "the plainest batch ", "the results of the batch itself ")  # prefixes of vague causes
CHANGED = "the results of the batch itself are right; those of the calls that the check derives from it are wrong"
OF_LISTS = ("topk", "extra_topk", "tokens", "rows")  # size fields in the specs of sparse calls


def spec_of(value: Any) -> Any:
    """The spec in a drawn value, which may be a tuple of a spec and options."""
    return next((part for part in value if dataclasses.is_dataclass(part)), None) if isinstance(value, tuple) else value


def causes(runner: Runner, value: Any, check: Callable[[Any], object]) -> tuple[str, ...]:
    """The likely causes of a check's failure on a drawn value, the most specific first."""
    spec, options = spec_of(value), {}
    if isinstance(value, tuple):
        options = next((part for part in value if isinstance(part, Mapping)), {})
    if not hasattr(spec, "build"):  # a batch without a spec
        return tuple(dict.fromkeys(of_results(runner, spec, options)))
    batch = spec.build()
    numbers = list(dict.fromkeys(of_results(runner, batch, options)))
    try:
        large = larger(spec).build()
        more = list(dict.fromkeys(of_results(runner, large, options)))
        is_telling = not is_small(spec) or (not more and is_right(runner, large, options))
    except (Declined, Contradiction):
        more, is_telling = [], True
    both = [cause for cause in numbers if cause in more] if is_telling else more
    numbers = both if any(cause not in READ for cause in both) or not is_telling else [*more, *numbers]
    numbers.sort(key=lambda cause: cause in READ)
    fields = list(of_fields(value, lambda other: outcome(check, other)))
    if WHATEVER in fields and not numbers and is_right(runner, batch, options):
        fields[fields.index(WHATEVER)] = CHANGED
        large = enlarged(batch)
        numbers = [cause for cause in of_results(runner, large[0], options) if cause == OVERFLOW] if large else []
    return tuple(dict.fromkeys([*numbers, *fields]))


def is_small(spec: Any) -> bool:
    """Whether no sequence has more than one page of keys, or one key if there are no pages.

    The results of such a small batch fit many causes. So they are ignored if a larger batch fails too.
    """
    lens = [kv_len for each in lengths_of(spec).values() for _, kv_len in each]
    return bool(lens) and max(lens) <= (steering.page_size_of(spec) or 1)


def larger(spec: Any) -> Any:
    """The spec with additional sequences of several pages, because a small batch may fit several causes.

    Tables have a spare column, and no garbage in unused entries, so that a kernel that reads one entry too
    far reads a known page.
    """
    tidy = {"spare_columns": lambda leaf: max(leaf, 1), "garbage": lambda leaf: False}
    changes = {path: tidy[path[-1]](leaf) for path, leaf in steering.leaves(spec).items() if path and path[-1] in tidy}
    spec = steering.replaced(spec, changes) if changes else spec
    size = steering.page_size_of(spec) or 1
    kv_lens = ((3 * size + 66) | 1, size + 1, 2 * size)  # several blocks of keys, some with a partial last page
    for path, lens in lengths_of(spec).items():
        several = [(4, size + 4)] if any(q_len > 1 for q_len, _ in lens) else []
        spec = with_lengths(spec, path, (*lens, *((1, kv_len) for kv_len in kv_lens), *several))
    lists = {path: leaf for path, leaf in steering.leaves(spec).items() if path[-1:] and path[-1] in OF_LISTS and leaf}
    return steering.replaced(spec, {path: leaf + 9 for path, leaf in lists.items()}) if lists else spec


def outcome(check: Callable[[Any], object], value: Any) -> bool | None:
    """Whether a check passes; None if the backend declines the batch, or the spec is invalid."""
    try:
        check(value)
    except (Declined, Contradiction):
        return None
    except Exception:  # any error of a kernel is a failure
        return False
    return True
