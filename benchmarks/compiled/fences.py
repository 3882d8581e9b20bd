"""Products that read shared memory, in PTX, with no proxy fence since copies to it were waited for.

Threads copy by `cp.async` and wait; `wgmma` and `tcgen05` read another way to the same memory, the asynchronous proxy,
and between the two the PTX ISA wants `fence.proxy.async`. Before or after the barrier that tells other threads of the
copies: each thread fences its own and passes that on, or fences all that it was told of.

Which memory a product reads, PTX does not say plainly. Triton's own code says whether any product of a kernel reads
what was copied; if one does, all of them must have a fence.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

WAIT = re.compile(r"cp\.async\.wait_(?:group|all)\b")
FENCE = re.compile(r"fence\.proxy\.async(?:\.shared::(?:cta|cluster))?;")
PRODUCT = re.compile(r"(?:wgmma\.mma_async|tcgen05\.mma)\.")
LABEL = re.compile(r"^(\$L__BB\w+):")
BRANCH = re.compile(r"^(@!?%\w+\s+)?bra(?:\.uni)?\s+(\$L__BB\w+);")
END = re.compile(r"^(?:ret|exit|trap);")

# In Triton's code for GPUs.
VIEW = re.compile(r"(%[\w.]+) = ttg\.memdesc_\w+ (%[\w.]+)")
FILLED = re.compile(r"(%[\w.]+) = (?:ttg\.local_alloc %|ttng\.tmem_alloc )")  # by threads, or no shared memory at all
COPIED = re.compile(r"ttg\.async_copy_global_to_local %[\w.#]+, (%[\w.]+)")
OPERANDS = re.compile(r"ttng\.(?:warp_group_dot|tc_gen5_mma) (%[\w.#]+), (%[\w.#]+), .*? : (tensor|!ttg\.memdesc)<")


def only_reads_what_threads_wrote(ttgir: str) -> bool:
    """Whether there are such products, and all read registers and memory that threads filled and never copied to."""
    views = {match[1]: match[2] for match in VIEW.finditer(ttgir)}

    def whole(name: str) -> str:
        while name in views:
            name = views[name]
        return name

    copied = {whole(match[1]) for match in COPIED.finditer(ttgir)}
    filled = {match[1] for match in FILLED.finditer(ttgir)} - copied
    products = list(OPERANDS.finditer(ttgir))
    read = {whole(match[2]) for match in products} | {whole(match[1]) for match in products if match[3] != "tensor"}
    return bool(read) and read <= filled


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
