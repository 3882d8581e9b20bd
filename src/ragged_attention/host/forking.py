"""Keeps forks safe: a fork copies all memory, but only the thread that forks.

`import ragged_attention` loads this, so that a fork before the first call is known too.
"""

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator

FORKED_WITHOUT_EXEC = 0x40  # Linux: PF_FORKNOEXEC, among the flags of a process


def _was_forked() -> bool:
    """Whether this process is a forked copy itself, as far as Linux tells."""
    try:
        with open("/proc/self/stat", "rb") as file:
            flags = int(file.read().rpartition(b")")[2].split()[6])
    except (OSError, ValueError, IndexError):
        return False
    return bool(flags & FORKED_WITHOUT_EXEC)


_forked = _was_forked()
_changed = threading.Condition()
_inside: Counter[int] = Counter()  # how often each thread is inside `postponed`


def forked() -> bool:
    """Whether this process is the copy of one that may have had threads, such as those of an OpenMP library."""
    return _forked


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Make forks by other threads wait: in the copy, half-done work would stay half done and locks would stay held."""
    thread = threading.get_ident()
    with _changed:
        _inside[thread] += 1
    try:
        yield
    finally:
        with _changed:
            _inside[thread] -= 1
            if not _inside[thread]:
                del _inside[thread]
                _changed.notify_all()


def _before() -> None:
    _changed.acquire()  # held until the copy is made, so that no thread enters `postponed` before
    _changed.wait_for(lambda: not _inside.keys() - {threading.get_ident()})


def _in_child() -> None:
    global _forked
    _forked = True
    for gone in _inside.keys() - {threading.get_ident()}:  # if Ctrl-C interrupted the wait
        del _inside[gone]
    _changed.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_changed.release, after_in_child=_in_child)
