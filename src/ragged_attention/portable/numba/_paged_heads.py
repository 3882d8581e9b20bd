"""Several KV heads in one program, so that memory is read in the order in which it lies: a part of `_paged`'s kernel.

In most layouts the rows that all KV heads have of a position lie side by side. A program of one head would skip those
of the others, and come back for them when they have left the caches; a core reads scattered pieces at half the rate of
whole pages. A program of few rows therefore goes from tile to tile of keys and computes several heads for each. While
it multiplies those of one head, it prefetches a part of the next tile, all heads of one position after another.

Each head is computed as by a program of its own, so the number of heads changes no bit.
"""

from ragged_attention.portable.numba._formats import size_of
from ragged_attention.portable.numba._vectors import compiled, inlined, int_at, set_int

PROGRAMS_PER_THREAD = 4  # so that threads have equal shares of the work, as nearly as may be


@compiled
def heads_together(call, num_programs):
    """How many KV heads a program computes: all if threads have enough to do then, and only if they lie side by side.

    What lists of blocks name differs by head, and the state of segments is kept for one head.
    """
    heads = call.num_kv_heads
    side_by_side = heads * call.k_pages_head_stride <= call.k_pages_slot_stride
    if call.num_lists or call.segment_kv or not side_by_side:
        return 1
    while heads > 1 and num_programs < PROGRAMS_PER_THREAD * call.num_threads * heads:
        heads = heads // 2 if heads % 2 == 0 else 1
    return heads


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
