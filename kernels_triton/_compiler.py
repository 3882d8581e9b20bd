"""What works around Triton's compiler: in which versions, what it does to the code, and where Triton mended it."""

# Triton's language only looks like Python: its constexprs and early-bound branches defeat a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false

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
