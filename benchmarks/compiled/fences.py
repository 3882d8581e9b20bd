"""Products that read shared memory, in PTX, with no proxy fence since copies to it were waited for.

Threads copy by `cp.async` and wait; `wgmma` and `tcgen05` read another way to the same memory, the asynchronous proxy,
and between the two the PTX ISA wants `fence.proxy.async`. Before or after the barrier that tells other threads of the
copies: each thread fences its own and passes that on, or fences all that it was told of.

Which memory a product reads is not followed, so one that reads none that was copied must have a fence too.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

WAIT = re.compile(r"cp\.async\.wait_(?:group|all)\b")
FENCE = re.compile(r"fence\.proxy\.async(?:\.shared::(?:cta|cluster))?;")
PRODUCT = re.compile(r"(?:wgmma\.mma_async|tcgen05\.mma)\.")
LABEL = re.compile(r"^(\$L__BB\w+):")
BRANCH = re.compile(r"^(@!?%\w+\s+)?bra(?:\.uni)?\s+(\$L__BB\w+);")
END = re.compile(r"^(?:ret|exit|trap);")


def unfenced(ptx: str) -> list[int]:
    """The lines, from 1, of such products that some path through the code leads to."""
    lines = [line.strip() for line in ptx.splitlines()]
    targets = {match[1]: number for number, line in enumerate(lines) if (match := LABEL.match(line))}
    found: set[int] = set()
    seen: set[int] = set()
    begun = [number for number, line in enumerate(lines) if WAIT.search(line)]
    while begun:
        for number in _until_fence(lines, begun.pop(), targets, begun):
            if number in seen:
                break
            seen.add(number)
            if PRODUCT.search(lines[number]):
                found.add(number + 1)
    return sorted(found)


def _until_fence(lines: Sequence[str], begin: int, targets: Mapping[str, int], begun: list[int]) -> Iterator[int]:
    """The lines from `begin` to the next fence or end; where branches lead goes to `begun`."""
    for number in range(begin, len(lines)):
        line = lines[number]
        if FENCE.search(line) or END.match(line):
            return
        yield number
        if branch := BRANCH.match(line):
            begun.append(targets[branch[2]])
            if branch[1] is None:
                return
