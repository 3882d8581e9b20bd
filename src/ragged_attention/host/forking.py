"""Makes forks safe. A fork copies all memory, but only one thread: the thread that forks.

`import ragged_attention` loads this module, so it notices even forks before the first call.
"""

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator

FORKED_WITHOUT_EXEC = 0x40  # PF_FORKNOEXEC, a bit of a process's flags in Linux


def _was_forked() -> bool:
    """Whether this process is itself a forked copy, according to Linux; False on other systems."""
    try:
        with open("/proc/self/stat", "rb") as file:
            flags = int(file.read().rpartition(b")")[2].split()[6])
    except (OSError, ValueError, IndexError):
        return False
    return bool(flags & FORKED_WITHOUT_EXEC)


_forked = _was_forked()
_changed = threading.Condition()
_inside: Counter[int] = Counter()  # the number of `postponed` contexts that each thread is inside


def forked() -> bool:
    """Whether this process is a copy of a process that may have had more threads, such as an OpenMP library's."""
    return _forked


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Make forks by other threads wait, because the copy would have this thread's half-done work and held locks."""
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
    _changed.acquire()  # held until the fork is done, so that no thread enters `postponed` meanwhile
    _changed.wait_for(lambda: not _inside.keys() - {threading.get_ident()})


def _in_child() -> None:
    global _forked
    _forked = True
    for gone in _inside.keys() - {threading.get_ident()}:  # threads are left if Ctrl-C interrupted the wait
        del _inside[gone]
    _changed.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_changed.release, after_in_child=_in_child)
