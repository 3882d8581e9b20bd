"""What is probably wrong with a backend that fails on a batch, in words.

Three kinds of evidence are sought. The results may be those that the definition gives for another call, such as one
with a wider window, or may have a plain relation to the right results. They may change when keys that no query sees are
changed, or be right for some order of keys only. And the check may pass when one field of the batch is plain, or when
sequences are shorter.
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

VAGUE = ("it fails only ", "the plainest batch ", "the results of the batch itself ")  # how causes of fields begin
CHANGED = "the results of the batch itself are right: those of what the check makes of it are not"
OF_LISTS = ("topk", "extra_topk", "tokens", "rows")  # numbers in the structures of calls with lists


def spec_of(value: Any) -> Any:
    """The structure of a drawn value, which may come with options."""
    return next((part for part in value if dataclasses.is_dataclass(part)), None) if isinstance(value, tuple) else value


def causes(runner: Runner, value: Any, check: Callable[[Any], object]) -> tuple[str, ...]:
    """The likely causes of a check's failure on a value, the most telling first."""
    spec, options = spec_of(value), {}
    if isinstance(value, tuple):
        options = next((part for part in value if isinstance(part, Mapping)), {})
    if not hasattr(spec, "build"):  # arrays without a structure
        return tuple(dict.fromkeys(of_results(runner, spec, options)))
    batch = spec.build()
    numbers = list(dict.fromkeys(of_results(runner, batch, options)))
    try:
        more = list(dict.fromkeys(of_results(runner, larger(spec).build(), options)))
    except (Declined, Contradiction):
        more = []
    numbers = [cause for cause in numbers if cause in more] or [*more, *numbers]
    numbers.sort(key=lambda cause: cause in READ)
    fields = list(of_fields(value, lambda other: outcome(check, other)))
    if WHATEVER in fields and not numbers and is_right(runner, batch, options):
        fields[fields.index(WHATEVER)] = CHANGED
        large = enlarged(batch)
        numbers = [cause for cause in of_results(runner, large[0], options) if cause == OVERFLOW] if large else []
    return tuple(dict.fromkeys([*numbers, *fields]))


def larger(spec: Any) -> Any:
    """The structure with more sequences of several pages, because one key may leave several causes possible."""
    size = steering.page_size_of(spec) or 1
    kv_lens = ((3 * size + 66) | 1, size + 1, 2 * size)  # of several blocks, and with and without a tail
    for path, lens in lengths_of(spec).items():
        several = [(4, size + 4)] if any(q_len > 1 for q_len, _ in lens) else []
        spec = with_lengths(spec, path, (*lens, *((1, kv_len) for kv_len in kv_lens), *several))
    lists = {path: leaf for path, leaf in steering.leaves(spec).items() if path[-1:] and path[-1] in OF_LISTS and leaf}
    return steering.replaced(spec, {path: leaf + 9 for path, leaf in lists.items()}) if lists else spec


def outcome(check: Callable[[Any], object], value: Any) -> bool | None:
    """Whether a check passes, or None if the backend declines the batch, or there is no such batch."""
    try:
        check(value)
    except (Declined, Contradiction):
        return None
    except Exception:  # a kernel may raise anything, and each error is a failure
        return False
    return True
