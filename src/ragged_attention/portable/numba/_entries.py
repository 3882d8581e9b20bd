"""The packed keys that a token sees, its *entries*: the keys of its list (`indices`), or those of its range.

A call's record needs the operands `indices`, `starts` and `stops`, and the numbers `listed`, `relative`, `columns` and
`num_keys`.
"""

from ragged_attention.portable.numba._sequences import within
from ragged_attention.portable.numba._vectors import inlined, int32_at


@inlined
def entries_of(call, token):
    """The first key of a token's range, 0 if it has a list, and the number of its entries."""
    if call.listed:
        return 0, call.columns
    start, stop = (
        within(int32_at(call.starts, token), call.num_keys),
        within(int32_at(call.stops, token), call.num_keys),
    )
    return start, max(min(stop, start + call.columns) - start if call.relative else stop - start, 0)


@inlined
def key_of(call, token, start, entry):
    """The key of an entry of a token; -1 if the entry names no key. `start` is the first key of the token's range."""
    if not call.listed:
        return start + entry
    key = int32_at(call.indices, token * call.indices_token_stride + entry)
    return key if 0 <= key < call.num_keys else -1
