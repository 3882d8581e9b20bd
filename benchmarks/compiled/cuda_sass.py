"""The CUDA kernels as compiled for Hopper: registers, memory, instructions, and the cost of their loops' iterations.

    python -m benchmarks.compiled.cuda_sass [--check] [--peer]

The command needs nvcc, g++ and the CUTLASS headers, but no GPU. It writes docs/cuda_compile.md; with `--check` it
compares the page instead. It fails if a kernel uses local memory, lacks the matrix or copy instructions that it is
built on, does not have the planned registers, needs more shared memory than a thread block can have, or has one of the
hazards that `hazards.py` finds. With `--peer` it also reads FlashMLA's own kernels, from the library that `python -m
benchmarks.peers.sources` fetches. Without `--peer` the page keeps its lines about FlashMLA.
"""

import argparse
import difflib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.compiled import chains, flash_mla, hazards, sass
from ragged_attention.calls.base import shared_memory_of
from ragged_attention.errors import BackendMissing
from ragged_attention.kernels_cuda._build import compile as kernels
from ragged_attention.kernels_cuda._build import toolchain
from ragged_attention.tools import build_cuda

DOCUMENT = Path(__file__).parents[2] / "docs" / "cuda_compile.md"

# The register plan of the attention kernels: 384 threads start with 168 registers each, which are all registers of a
# multiprocessor. The warpgroup that only copies then releases registers, and the other two acquire them.
REGISTERS = 168
CONSUMERS, REGISTER_FILE = 2, 65536 // 128
# the kernels without matrix products: two merge splits, and Deal makes a schedule
HELPERS = ("Combine<", "NarrowCombine<", "Deal")
# A kernel whose name starts like this multiplies in independent warps, on rows fetched by bulk copies.
NARROW = "Narrow<"
# A kernel whose name ends like this finds keys through a page table and fetches them by TMA.
DENSE = ", false>"
# The loads per iteration that may wait for an earlier load. These producers lack registers for all loads at once.
SERIAL = {"Fp8V4": 3, "V41": 5}
RESERVED = 1024  # bytes of a thread block's shared memory that the system reserves

HEADER = """\
# What the CUDA kernels compile to

This page is read from the machine code of the library for sm_90a; no GPU is needed. `make cuda-compile` writes it. It
fails if a kernel uses local memory, lacks the matrix (HGMMA, HMMA) or copy (UTMALDG, LDGSTS, UBLKCP) instructions that
it is built on, waits for its products one by one, has other registers than planned, or needs more shared memory than a
thread block's {limit} KiB. It also fails if an instruction touches the registers of a product in flight, if a product
is issued that no WARPGROUP.ARRIVE orders after the writes to its operands, or if a load waits for another load of the
same iteration. CI checks that the page is current.

A kernel is named after its body. `Seesaw<operands, width of a row, lists>` reads plain caches, `Fp8Decode` reads
`fp8_v32`, `Narrow<groups of 8 heads per team, teams by heads>` reads `fp8_v32` with few heads, `Fp8V4` reads `fp8_v4`,
and `V41` reads `fp8_v41` and `fp4_v41`. `Combine<results>` and `NarrowCombine<results>` merge splits, and `Deal` makes
a schedule. Producers that decode rows do not have the registers for all their loads at once: in an iteration of `Fp8V4`
{serial} loads wait for the previous one, and in `V41` {serial_41}, counted over both formats, of which a block has one.
"""
KERNELS = """\
## Kernels

The columns are: registers per thread at launch, and the numbers that warpgroups change them to; bytes of reserved
stack; loads and stores of local memory; bytes of shared memory, requested at launch; matrix products by shape; TMA
loads, of tiles or whole rows; asynchronous copies of 16 bytes; all instructions.

| kernel | registers | changed to | stack | local | shared | products | TMA | copies | instructions |
|---|---|---|---|---|---|---|---|---|---|
"""
LOOPS = """\
## Inner loops

These are the loops that compute products or fetch keys, one iteration of each. An iteration covers two blocks of 64
keys in `Seesaw`, `Fp8V4` and `V41`, and one block in `Fp8Decode` and `Narrow`; each team of `Narrow` takes half of the
block, by keys or by heads. The loop of `V41`'s producer has the code for both formats. The columns are: matrix products
by shape; waits for their results (settled); TMA loads and asynchronous copies; exponentials; other float arithmetic;
loads and stores of shared memory; those of local memory; waits for memory barriers; barriers between warpgroups.

| kernel | loop | instructions | products | settled | copies | ex2 | float | LDS | STS | local | waits | barriers |
|---|---|---|---|---|---|---|---|---|---|---|---|---|
"""

PEER = """\
## Beside FlashMLA's own binary

The table compares the loops of FlashMLA's Hopper kernels, as its authors compiled them, with ours. The same program
reads both: `python -m benchmarks.peers.sources` fetches the library, and
`python -m benchmarks.compiled.cuda_sass --peer` reads it. FlashMLA's sparse decode with 128 heads runs in pairs of
thread blocks, each of which decodes half of every block's rows, so an iteration of its producer covers half a block.
Its dense kernels have no producer. "Chain" is the number of issue cycles, read from the control bits, from the wait
for the last QK product to the first PV product; the number after a plus is for code that a branch can skip, such as a
rescaling that is rarely needed. "Waits" counts how often QK waits for all products in flight, and "in series" the loads
that wait for another load of their iteration. Shared memory is requested at launch, so the binary does not show it for
FlashMLA. If a loop of its prefill has twice the products of QK, the first QK, which runs once, is among them.

| what | kernel | loop | instructions | products | chain | waits | in series | registers | changed to | shared |
|---|---|---|---|---|---|---|---|---|---|---|
"""
NOT_READ = "| - | FlashMLA: not read yet | | | | | | | | | |\n"
OURS = {  # our kernels with a FlashMLA counterpart -> what both compute
    "Seesaw<bf16, 576, false>": "dense decode", "Seesaw<bf16, 576, true>": "sparse prefill",
    "Fp8Decode": "sparse decode, fp8", "Fp8V4": "sparse decode, fp8", "Narrow<2, false>": "sparse decode, fp8",
}  # fmt: skip

SIZES = """\
#include "schedule.h"
#include "sm90/combine.h"
#include "sm90/fp8_decode.h"
#include "sm90/fp8_v4.h"
#include "sm90/narrow.h"
#include "sm90/seesaw.h"
#include "sm90/v41.h"
template <class T, class Smem = typename T::Smem> constexpr size_t size_of(int) {{ return sizeof(Smem); }}
template <class T> constexpr size_t size_of(long) {{ return 0; }}
{lines}
"""


def shared_memory(found: Sequence[sass.Kernel]) -> dict[str, int]:
    """Kernel body -> the bytes of shared memory that its launch requests (the size of its `Smem`, from g++)."""
    bodies = sorted({kernel.type for kernel in found})
    recipe = kernels.emulation_recipe()
    lines = "\n".join(f"char size_{index}[1 + size_of<{body}>(0)];" for index, body in enumerate(bodies))
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "sizes.cc"), Path(folder, "sizes.o")
        source.write_text(SIZES.format(lines=lines))
        command = (*recipe.compiler, "-O0", f"-I{kernels.SOURCES}", "-c", str(source), "-o", str(made))
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise BackendMissing(f"the sizes of shared memory do not compile:\n{done.stderr[-2000:]}")
        symbols = subprocess.run(["nm", "-S", made], check=True, capture_output=True, text=True).stdout
    sizes = {int(index): int(size, 16) - 1 for size, index in re.findall(r"^\w+ (\w+) \w size_(\d+)$", symbols, re.M)}
    # an empty struct has size 1
    return {body: sizes[index] if sizes[index] > 1 else 0 for index, body in enumerate(bodies)}


def failures(found: Sequence[sass.Kernel], shared: Mapping[str, int]) -> list[str]:
    """The reasons why the kernels must not ship, one line each."""
    wrong = []
    for kernel in found:
        counts, limit = kernel.counts, shared_memory_of("sm_90")

        def complain(text: str, name: str = kernel.name) -> None:
            wrong.append(f"{name}: {text}")

        if counts["LDL"] or counts["STL"] or kernel.local:
            complain(f"{counts['LDL']} loads and {counts['STL']} stores of local memory")
        if (needed := shared.get(kernel.type, 0) + kernel.static_shared - RESERVED) > limit:
            complain(f"needs {needed} bytes of shared memory, a thread block has {limit}")
        if kernel.type.startswith(HELPERS):
            continue
        narrow = kernel.type.startswith(NARROW)
        for kind in ("HMMA", "UBLKCP") if narrow else ("HGMMA", "LDGSTS"):
            if not counts[kind]:
                complain(f"no {kind}")
        if bool(counts["UTMALDG"]) != (kernel.type.endswith(DENSE) and not narrow):
            complain(f"{counts['UTMALDG']} UTMALDG, TMA is for pages of dense calls")
        if kernel.registers != REGISTERS:
            complain(f"{kernel.registers} registers, {REGISTERS} are planned")
        if (held := held_registers(kernel)) is None or held > REGISTER_FILE:
            requested = ", ".join(map(str, kernel.set_registers)) or "nothing"
            complain(f"registers are changed to {requested}, {REGISTER_FILE} are available")
        if sum(map(_multiplies, kernel.loops)) != CONSUMERS:
            complain(f"{len(kernel.loops)} inner loops, one per consumer and the producer's are planned")
        for hazard in hazards.found(kernel.code, SERIAL.get(kernel.type, 0)):
            complain(hazard)
        for loop in kernel.loops:
            # ptxas inserts a wait after each product if it cannot prove that the products are independent
            if 2 * loop["settled"] > loop["HGMMA"]:
                complain(f"{loop['settled']} waits for {loop['HGMMA']} products, which should run one after another")
    if all(kernel.type.startswith(HELPERS) for kernel in found):
        wrong.append("no attention kernel is in the library")
    return wrong


def _multiplies(counts: sass.Counts) -> bool:
    """Whether a loop has matrix products, as only the loops of consumers do."""
    return bool(counts["HGMMA"] or counts["HMMA"])


def held_registers(kernel: sass.Kernel) -> int | None:
    """The sum over the warpgroups of their registers per thread, or None if the requests do not fit the plan.

    The smallest request is the producer's.
    """
    if len(kernel.set_registers) not in (2, 1 + CONSUMERS):
        return None
    producer, *consumers = kernel.set_registers
    return producer + (sum(consumers) if len(consumers) == CONSUMERS else CONSUMERS * consumers[0])


def document(
    found: Sequence[sass.Kernel], shared: Mapping[str, int], compiler: str, theirs: Sequence[str] = (NOT_READ,)
) -> str:
    """The whole page. `theirs` are the table lines about FlashMLA's loops."""
    wrong = failures(found, shared)
    lines = [
        HEADER.format(limit=shared_memory_of("sm_90") // 1024, serial=SERIAL["Fp8V4"], serial_41=SERIAL["V41"]),
        compiler,
        "",
    ]
    lines += [f"{len(found)} kernels, {len(wrong) or 'no'} failure{'s' if len(wrong) != 1 else ''}.", ""]
    lines += [f"- {text}" for text in wrong] + ([""] if wrong else [])
    # Two translation units contain the kernels that merge splits, but the table shows each of them once.
    table = KERNELS + "".join(dict.fromkeys(_kernel_line(kernel, shared) for kernel in found))
    attention = [kernel for kernel in found if _multiplies(kernel.counts)]
    loops = LOOPS + "".join(_loop_line(kernel, loop) for kernel in attention for loop in kernel.loops)
    ours = [
        line
        for kernel in found
        if kernel.name in OURS
        for line in peer_lines(OURS[kernel.name], f"`{kernel.name}`", kernel, shared.get(kernel.type, 0))
    ]
    return "\n".join([*lines, table, loops, PEER + "".join(sorted([*ours, *theirs]))])


def peer_lines(what: str, name: str, kernel: sass.Kernel, shared: object) -> list[str]:
    """The loops of one kernel, ours or FlashMLA's, as lines of the comparison table."""
    lines = []
    for loop in {(loop[0].address, loop[-1].address): loop for loop in sass.working_loops(kernel.code)}.values():
        counts, chain = sass.count(loop), chains.chain_of(loop)
        kind = "consumer" if _multiplies(counts) else "producer"
        cells = (
            what, name, kind, counts.instructions, _products(counts), _chain(chain),
            chain.waits if chain else "-", hazards.serial_loads(loop), kernel.registers,
            ", ".join(map(str, kernel.set_registers)) or "-", shared,
        )  # fmt: skip
        lines.append(_line(cells))
    return lines


def read_peer() -> list[str]:
    """The table lines about FlashMLA's loops, read from its library."""
    path = flash_mla.library()
    if not path.is_file():
        raise BackendMissing(f"expected FlashMLA's library at {path}: python -m benchmarks.peers.sources fetches it")
    return [
        line
        for what, kernel in flash_mla.kernels(path)
        for line in peer_lines(what, f"FlashMLA `{flash_mla.short(kernel)}`", kernel, "?")
    ]


def kept_peer() -> list[str]:
    """The table lines about FlashMLA's loops in the current page."""
    text = DOCUMENT.read_text() if DOCUMENT.is_file() else ""
    return re.findall(r"^\|[^|\n]*\| FlashMLA.*\n", text, re.MULTILINE) or [NOT_READ]


def _kernel_line(kernel: sass.Kernel, shared: Mapping[str, int]) -> str:
    counts = kernel.counts
    local = counts["LDL"] + counts["STL"]
    cells = (
        f"`{kernel.name}`", kernel.registers, ", ".join(map(str, kernel.set_registers)) or "-", kernel.stack,
        f"**{local}**" if local else 0, shared.get(kernel.type, 0), _products(counts),
        counts["UTMALDG"] + counts["UBLKCP"], counts["LDGSTS"], counts.instructions,
    )  # fmt: skip
    return _line(cells)


def _loop_line(kernel: sass.Kernel, loop: sass.Counts) -> str:
    by = "TMA" if loop["UTMALDG"] else "copies" if loop["LDGSTS"] else "rows" if loop["UBLKCP"] else "loads"
    kind = "consumer" if _multiplies(loop) else f"producer by {by}"
    cells = (
        f"`{kernel.name}`", kind, loop.instructions, _products(loop), loop["settled"],
        loop["UTMALDG"] + loop["LDGSTS"] + loop["UBLKCP"], loop["EX2"],
        loop["float"], loop["LDS"], loop["STS"], loop["LDL"] + loop["STL"], loop["mbarrier"], loop["barrier"],
    )  # fmt: skip
    return _line(cells)


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |\n"


def _chain(chain: chains.Chain | None) -> str:
    if chain is None:
        return "-"
    return f"{chain.cycles} (+{chain.at_times})" if chain.at_times else str(chain.cycles)


def _products(counts: sass.Counts) -> str:
    return ", ".join(f"{number} of {shape}" for shape, number in counts.products) or "-"


def compiler() -> str:
    """The versions of nvcc and CUTLASS. They change the page."""
    nvcc, include = toolchain.nvcc(), toolchain.cutlass()
    if nvcc is None or include is None:
        raise BackendMissing(toolchain.missing_to_compile() or "nvcc does not run")
    return f"nvcc {nvcc.release}, CUTLASS {toolchain.cutlass_release(include)}."


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if all is well, 1 if a kernel is not as planned or the page is outdated, 2 if the build fails."""
    parser = argparse.ArgumentParser(prog="cuda_sass", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with docs/cuda_compile.md, write nothing")
    parser.add_argument("--peer", action="store_true", help="read FlashMLA's own library too")
    options = parser.parse_args(arguments)
    console = Console(stderr=True, soft_wrap=True)
    try:
        found = sass.read(build_cuda.shown(lambda progress: kernels.build(kernels.kernels_recipe(), progress), console))
        shared, with_what = shared_memory(found), compiler()
        theirs = read_peer() if options.peer else kept_peer()
    except BackendMissing as error:
        console.print(str(error), style="red", markup=False)
        return 2
    wrong, text = failures(found, shared), document(found, shared, with_what, theirs)
    for line in wrong:
        console.print(line, style="red", markup=False, highlight=False)
    if options.check:
        before = DOCUMENT.read_text() if DOCUMENT.is_file() else ""
        if before and with_what not in before:
            console.print(
                f"not compared: {DOCUMENT.name} was written with another compiler than {with_what}", highlight=False
            )
            return int(bool(wrong))
        changed = list(difflib.unified_diff(before.splitlines(), text.splitlines(), DOCUMENT.name, "now", lineterm=""))
        for line in changed:
            console.print(line, markup=False, highlight=False)
        if not changed:
            console.print(f"{DOCUMENT.name} is current: {len(found)} kernels")
        return int(bool(wrong or changed))
    DOCUMENT.write_text(text)
    console.print(f"wrote {DOCUMENT}: {len(found)} kernels")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
