"""Fork at different times in a process that has no threads of any library."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

from ragged_attention.host import forking
from ragged_attention.host.interpreting import interpreting

Section = Callable[[], contextlib.AbstractContextManager[None]]


def fork() -> None:
    child = os.fork()
    if not child:
        signal.alarm(20)
        with interpreting(), forking.postponed():
            pass
        os._exit(0 if forking.forked() and not forking._inside else 3)
    assert os.waitpid(child, 0)[1] == 0
    assert not forking.forked()


def hold(section: Section, begun: threading.Event, ended: list[Section]) -> None:
    with section():
        begun.set()
        time.sleep(0.2)
        ended.append(section)


def fork_during(section: Section) -> None:
    begun, ended = threading.Event(), []
    thread = threading.Thread(target=hold, args=(section, begun, ended))
    thread.start()
    begun.wait()
    fork()
    assert ended  # the fork waited for the section to end
    thread.join()
    with section():
        child = os.fork()  # a fork inside a section of its own thread does not deadlock
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


fork()
fork_during(interpreting)
fork_during(forking.postponed)
print("well")
