"""Several KV heads in one program, so that memory is read in the order in which it lies: a part of `_paged`'s kernel.

In most layouts the rows that all KV heads have of a position lie side by side. A program of one head would skip those
of the others, and come back for them when they have left the caches; a core reads scattered pieces at half the rate of
whole pages. A program of few rows therefore goes from tile to tile of keys and computes several heads for each. While
it multiplies those of one head, it prefetches a part of the next tile, all heads of one position after another.

There are as many heads in a program as leave each thread some programs. Each head is computed as by a program of its
own, so their number changes no bit.
"""

from ragged_attention.portable.numba._formats import size_of
from ragged_attention.portable.numba._vectors import compiled, inlined, int_at, set_int

PROGRAMS_PER_THREAD = 8  # so that threads have nearly equal shares of the work


@compiled
def heads_per_program(num_kv_heads, num_programs, num_threads):
    """How many of the KV heads a program computes, where `num_programs` of one head each would keep threads at work."""
    heads = num_kv_heads
    while heads > 1 and num_programs < PROGRAMS_PER_THREAD * num_threads * heads:
        heads = heads // 2 if heads % 2 == 0 else 1
    return heads


@compiled
def heads_together(call, num_programs):
    """How many KV heads a program of few rows computes: several only if their rows lie side by side.

    What lists of blocks name differs by head, and the state of segments is kept for one head.
    """
    side_by_side = call.num_kv_heads * call.k_pages_head_stride <= call.k_pages_slot_stride
    if call.num_lists or call.segment_kv or not side_by_side:
        return 1
    return heads_per_program(call.num_kv_heads, num_programs, call.num_threads)


@compiled
def list_parts(slots, parts, count, part, heads, step):
    """List part `part` of the rows that `heads` heads have of `count` keys, in as many parts as heads.

    `slots` lists the addresses of the first head's rows, 0 for a missing one; those of a head are `step` bytes after
    those of the head before it.
    """
    key, head = count * part // heads, count * part % heads
    for index in range(count):
        slot = int_at(slots, key)
        set_int(parts, index, slot + head * step if slot else 0)
        head += 1
        if head == heads:
            key, head = key + 1, 0


@inlined
def expect_parts(call, tile, part, heads):
    """Make part `part` of what `slots` and `v_slots` list for `heads` heads what is prefetched meanwhile."""
    k_step, v_step = size_of(call.k_codes) * call.k_pages_head_stride, size_of(call.v_codes) * call.v_pages_head_stride
    list_parts(tile.slots, tile.parts, tile.ahead, part, heads, k_step)
    list_parts(tile.v_slots, tile.v_parts, tile.ahead, part, heads, v_step)
    tile.coming, tile.coming_values = tile.parts, tile.v_parts
