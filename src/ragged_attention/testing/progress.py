"""Lines of progress on standard error, for runs without a progress bar."""

import sys
import time

SAID_EVERY = 10.0  # seconds between two lines


class Progress:
    """Writes a line at most every `SAID_EVERY` seconds."""

    def __init__(self, total: int) -> None:
        self.total, self.said = total, time.monotonic()

    def say(self, done: int, what: str) -> None:
        if time.monotonic() - self.said > SAID_EVERY:
            sys.stderr.write(f"[{done}/{self.total}] {what}\n")
            sys.stderr.flush()
            self.said = time.monotonic()
