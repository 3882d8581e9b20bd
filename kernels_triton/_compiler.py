"""Workarounds for Triton's compiler. Each names the affected versions and the effect on the compiled code."""

import re
from typing import Any

import triton
import triton.language as tl

from ragged_attention.kernels_triton._constants import INTERPRETED

VERSION = tuple(map(int, re.findall(r"\d+", triton.__version__)[:3]))

# Whether the compiler omits the proxy fence between copies to shared memory and the products that read it, which may
# then read stale data. Triton 3.7.1 has the fix, triton-lang/triton#9610. The interpreter has neither such copies nor
# inline assembly.
FENCELESS: tl.constexpr = tl.constexpr(VERSION < (3, 7, 1) and not INTERPRETED)

# Whether the compiler pairs the wrong elements in a product that sums over only 16 keys or columns. This happens if an
# operand is computed from one-byte scales and from 4-bit codes unpacked by `tl.join`: the compiler then selects a
# layout for 32 keys or columns, eight neighbouring ones per thread, so weights meet the wrong keys, or columns of
# queries the wrong columns of keys. As a workaround, the scales are loaded in a branch, which hides from the compiler
# that they are single bytes.
MISPAIRS_FEW: tl.constexpr = tl.constexpr(VERSION < (3, 7) and not INTERPRETED)


@tl.core.builtin
def compiled_for(arch, _semantic: Any = None):
    """Whether the kernel is being compiled for `arch`, the compiler's name of an architecture, such as sm90."""
    return tl.constexpr(_semantic.builder.options.arch) == arch


@triton.jit
def fence_copies(a):
    """Emit the proxy fence that a product of `a` needs if `cp.async` wrote its operands to shared memory.

    On Hopper such a product is a `wgmma`, which reads shared memory through the async proxy, while `cp.async` writes
    through the generic proxy. The PTX ISA requires a proxy fence after the wait for the copies and before the product.
    The compiler leaves this fence in its place: after the wait and the barrier, where later versions put theirs, and in
    the same iteration of a pipelined loop. This fence and that of later versions both cost two to six machine
    instructions. With Triton 3.6.0, 78 of 89 kernels need it. One of them takes one more register, and none spills
    more.

    On Blackwell the fence would have no effect, because the compiler moves `tcgen05` products, but not the fence, to
    other iterations.
    """
    if FENCELESS and a.shape[0] >= 64 and a.dtype != tl.float32 and compiled_for("sm90"):
        tl.inline_asm_elementwise("fence.proxy.async.shared::cta;\nmov.b32 $0, 0;", "=r", [], tl.int32, False, 1)


@triton.jit
def always(block, begin):
    """True, since a loop that begins at `begin` visits no earlier `block`; but the compiler cannot know this.

    The value is the condition of a branch around the product of queries and keys. The branch hides from Triton 3.6 to
    3.9 that the product with the values depends on this product. Otherwise these versions assign whole rows to each
    warp. With 64 rows and eight warps, half of the warps then repeat the work of the other half.
    """
    return block >= begin


@triton.jit
def decoded_at_once(values, readable):
    """The decoded values [keys, columns], multiplied by 1, or by 0 for keys that are not readable.

    Without this multiplication, Triton 3.6 to 3.9 first convert the codes to an operand's layout, and then decode them
    byte by byte, again for each product and each warp. In the latent kernel that takes 70 more registers, and spills.
    """
    return values * tl.where(readable, 1.0, 0.0).to(values.dtype)[:, None]


@triton.jit
def twice(items):
    """`items` [keys] with each element repeated, [2 * keys], for use with `beside`."""
    return tl.reshape(tl.join(items, items), [2 * items.shape[0]])


@triton.jit
def beside(first, second):
    """Two matrices [rows, keys] with their columns interleaved, [rows, 2 * keys], so that one product replaces two.

    The other operand has each of its rows repeated; see `twice`. With two products into one accumulator of 64 rows and
    512 columns, Triton 3.6 to 3.9 copy the accumulator between them and spill 7 KiB per thread (3.9 on sm_90).
    """
    return tl.reshape(tl.join(first, second), [first.shape[0], 2 * first.shape[1]])


@triton.jit
def zero_after(l_i):
    """0, computed from the sums `l_i`, which are never negative; but the compiler cannot know this.

    Indices to which this 0 is added can only be computed after the loop that computes `l_i`. Otherwise Triton 3.6 to
    3.9 compute them before the loop and keep them in registers throughout.
    """
    return (tl.min(l_i, 0) < 0).to(tl.int32)


@triton.jit
def first_of_block(count, BLOCK: tl.constexpr):
    """A mask [BLOCK] of the first `count` rows of a block.

    Comparing the kernel's row indices would give the same mask. But a kernel that also uses these indices after its
    loop would keep them in registers throughout the loop (Triton 3.6 to 3.9). The kernels for packed sequences then
    spill 16 to 80 bytes on sm_90.
    """
    return tl.arange(0, BLOCK) < count


@triton.jit
def aligned_down(number, STEP: tl.constexpr):
    """(`number` rounded down to a multiple of STEP, the remainder), for a pointer and the offsets from it.

    If blocks are smaller than STEP, the offsets change from one iteration of a loop to the next, so each iteration
    computes them. With STEP = 1 they do not change, and Triton 3.6 to 3.9 keep them in registers throughout the loop,
    two registers for each row of a thread. In the gradient of heads with 192 columns, this spills 16 bytes on sm_90
    (3.9). In other loops, STEP = 1 makes the code 2 to 17 % shorter.
    """
    rest = number % STEP
    return number - rest, rest
