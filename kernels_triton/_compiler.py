"""What works around Triton's compiler: in which versions, what it does to the code, and where Triton mended it."""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import re
from typing import Any

import triton
import triton.language as tl

from ragged_attention.kernels_triton._constants import INTERPRETED

VERSION = tuple(map(int, re.findall(r"\d+", triton.__version__)[:3]))


# Where the compiler puts no proxy fence between copies to shared memory and the products that read it. Triton mended
# it in triton-lang/triton#9610, which 3.7.1 has too. The interpreter has neither copies nor assembly.
FENCELESS: tl.constexpr = tl.constexpr(VERSION < (3, 7, 1) and not INTERPRETED)


@tl.core.builtin
def compiled_for(arch, _semantic: Any = None):
    """Whether a kernel is being compiled for an architecture, by the compiler's own name for it."""
    return tl.constexpr(_semantic.builder.options.arch) == arch


@triton.jit
def fence_copies(a):
    """Belongs in front of a product of `a`, whose operands may be read from shared memory that `cp.async` wrote.

    On Hopper such a product is a `wgmma`, which reads shared memory another way than threads write it. The PTX ISA
    wants a proxy fence after the wait for the copies and before the product. The compiler leaves this one in its place:
    behind the wait and the barrier, where later versions put theirs, and in the same turn of a pipelined loop. It is
    two to six instructions of the machine's, as theirs is. Under Triton 3.6.0, 78 of 89 kernels need it; one takes a
    register more for it, and none spills more. On Blackwell it would do nothing: the compiler moves `tcgen05` products
    to other turns of a loop than what stands in front of them.
    """
    if FENCELESS and a.shape[0] >= 64 and a.dtype != tl.float32 and compiled_for("sm90"):
        tl.inline_asm_elementwise("fence.proxy.async.shared::cta;\nmov.b32 $0, 0;", "=r", [], tl.int32, False, 1)


@triton.jit
def always(block, begin):
    """Whether a loop that began at `begin` has reached `block`: always, but the compiler does not know that.

    Placed around a product of queries and keys, the branch ends the compiler's search for products that depend on it.
    Triton 3.6 to 3.9 otherwise see the product with the values follow, and with eight warps give each warp rows of its
    own for that product's sake, so that half of the warps compute what the others have computed already.
    """
    return block >= begin


@triton.jit
def decoded_at_once(values, readable):
    """Decoded values [keys, columns], multiplied by 1.

    Without the product, Triton 3.6 to 3.9 decode the codes after they are laid out as an operand: byte by byte, and
    once more for each product and each warp. In the latent kernel that takes 70 more registers, and spills.
    """
    return values * tl.where(readable, 1.0, 0.0).to(values.dtype)[:, None]


@triton.jit
def twice(items):
    """Each item of [keys] two times in a row, for `beside`."""
    return tl.reshape(tl.join(items, items), [2 * items.shape[0]])


@triton.jit
def beside(first, second):
    """[rows, 2 * keys]: the columns of two matrices [rows, keys] in turn, so that one product replaces two.

    Triton 3.6 to 3.9 copy an accumulator of 64 rows and 512 columns between two products that add to it, and spill
    7 KiB a thread (3.9 on sm_90). The other operand then has each of its rows two times; see `twice`.
    """
    return tl.reshape(tl.join(first, second), [first.shape[0], 2 * first.shape[1]])


@triton.jit
def zero_after(l_i):
    """0, which no compiler knows before the sums `l_i` are complete (they are never negative).

    Indices to which it is added are computed after the loop. Triton 3.6 to 3.9 otherwise compute them before the loop
    and keep them in registers throughout.
    """
    return (tl.min(l_i, 0) < 0).to(tl.int32)


@triton.jit
def first_of_block(count, BLOCK: tl.constexpr):
    """Which rows of a block are among its first `count`.

    A comparison of row numbers would say as much. But if a kernel needs those numbers after its loop too, Triton 3.6 to
    3.9 keep them in registers throughout the loop: the kernels of packed sequences then spill 16 to 80 bytes on sm_90.
    """
    return tl.arange(0, BLOCK) < count


@triton.jit
def aligned_down(number, STEP: tl.constexpr):
    """(the largest multiple of STEP that is at most `number`, the rest), for a pointer and the offsets from it.

    If blocks are smaller than STEP, offsets differ from turn to turn of a loop, so each turn computes them anew.
    Offsets that stay the same are kept by Triton 3.6 to 3.9 in registers throughout the loop, two for each row of a
    thread: in the gradient of heads of 192 columns that spills 16 bytes on sm_90 (3.9). Other loops are 2 to 17 %
    shorter with STEP = 1.
    """
    rest = number % STEP
    return number - rest, rest
