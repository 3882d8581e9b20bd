"""Finds matrix products in PTX that read copied shared memory without a proxy fence after the wait for the copies.

Threads copy with `cp.async` and wait. `wgmma` and `tcgen05` read the same memory through the asynchronous proxy, and
the PTX ISA requires `fence.proxy.async` between the wait and the product. The fence may come before or after the
barrier that tells other threads about the copies: either each thread fences its own copies before it signals, or the
reader fences everything after the barrier.

PTX does not show directly which memory a product reads. Triton's GPU IR shows whether any product of a kernel reads
copied memory. If one does, all products of the kernel must have a fence.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

WAIT = re.compile(r"cp\.async\.wait_(?:group|all)\b")
FENCE = re.compile(r"fence\.proxy\.async(?:\.shared::(?:cta|cluster))?;")
PRODUCT = re.compile(r"(?:wgmma\.mma_async|tcgen05\.mma)\.")
LABEL = re.compile(r"^(\$L__BB\w+):")
BRANCH = re.compile(r"^(@!?%\w+\s+)?bra(?:\.uni)?\s+(\$L__BB\w+);")
END = re.compile(r"^(?:ret|exit|trap);")

# Patterns for Triton's GPU IR (TTGIR).
VIEW = re.compile(r"(%[\w.]+) = ttg\.memdesc_\w+ (%[\w.]+)")
# operands that threads fill, or that are not in shared memory
FILLED = re.compile(r"(%[\w.]+) = (?:ttg\.local_alloc %|ttng\.tmem_alloc )")
COPIED = re.compile(r"ttg\.async_copy_global_to_local %[\w.#]+, (%[\w.]+)")
OPERANDS = re.compile(r"ttng\.(?:warp_group_dot|tc_gen5_mma) (%[\w.#]+), (%[\w.#]+), .*? : (tensor|!ttg\.memdesc)<")


def only_reads_what_threads_wrote(ttgir: str) -> bool:
    """Whether all products read only registers or memory that threads filled without copies.

    False if the kernel has no products.
    """
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
    """The line numbers, from 1, of products that a path without a fence connects to a wait for copies."""
    lines = [line.strip() for line in ptx.splitlines()]
    targets = {match[1]: number for number, line in enumerate(lines) if (match := LABEL.match(line))}
    numbers: set[int] = set()
    seen: set[int] = set()
    begun = [number for number, line in enumerate(lines) if WAIT.search(line)]
    while begun:
        for number in _until_fence(lines, begun.pop(), targets, begun):
            if number in seen:
                break
            seen.add(number)
            if PRODUCT.search(lines[number]):
                numbers.add(number + 1)
    return sorted(numbers)


def _until_fence(lines: Sequence[str], begin: int, targets: Mapping[str, int], begun: list[int]) -> Iterator[int]:
    """Yield the lines from `begin` up to the next fence or end of the program. Branch targets are added to `begun`."""
    for number in range(begin, len(lines)):
        line = lines[number]
        if FENCE.search(line) or END.match(line):
            return
        yield number
        if branch := BRANCH.match(line):
            begun.append(targets[branch[2]])
            if branch[1] is None:
                return
