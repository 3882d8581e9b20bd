"""Several KV heads in one program, so that memory is read in order: a part of `_paged`'s kernel.

In most layouts, the rows of all KV heads are contiguous for each position. A program of one head would skip the rows of
the other heads. When the programs of these heads read them, the rows would no longer be in the caches. A core reads
scattered pieces at half the rate of whole pages. A program of few rows therefore computes several heads for each tile
of keys. While it multiplies the keys of one head, it prefetches a part of the next tile, position by position, with the
rows of all heads.

A program computes so few heads that each thread has several programs. Each head is computed exactly as in a program of
one head, so the number of heads does not change the results.
"""

from ragged_attention.portable.numba._formats import size_of
from ragged_attention.portable.numba._vectors import compiled, inlined, int_at, set_int

PROGRAMS_PER_THREAD = 8  # so that threads have nearly equal shares of the work


@compiled
def heads_per_program(num_kv_heads, num_programs, num_threads):
    """The number of KV heads that a program computes; with one head each, there would be `num_programs` programs."""
    heads = num_kv_heads
    while heads > 1 and num_programs < PROGRAMS_PER_THREAD * num_threads * heads:
        heads = heads // 2 if heads % 2 == 0 else 1
    return heads


@compiled
def heads_together(call, num_programs):
    """The number of KV heads that a program of few rows computes: several only if their rows are contiguous.

    It is 1 with lists of blocks, which differ by head, and with segments, which keep the state of one head only.
    """
    contiguous = call.num_kv_heads * call.k_pages_head_stride <= call.k_pages_slot_stride
    if call.num_lists or call.segment_kv or not contiguous:
        return 1
    return heads_per_program(call.num_kv_heads, num_programs, call.num_threads)


@compiled
def list_parts(slots, parts, count, part, heads, step):
    """List part `part` of the rows of `count` keys in `heads` heads; there are as many parts as heads.

    `slots` lists the addresses of the first head's rows, 0 for a missing one. The rows of each further head are `step`
    bytes after those of the head before it.
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
    """Let the next products prefetch part `part` of the rows of `heads` heads.

    `slots` and `v_slots` list the first head's rows.
    """
    k_step, v_step = size_of(call.k_codes) * call.k_pages_head_stride, size_of(call.v_codes) * call.v_pages_head_stride
    list_parts(tile.slots, tile.parts, tile.ahead, part, heads, k_step)
    list_parts(tile.v_slots, tile.v_parts, tile.ahead, part, heads, v_step)
    tile.coming, tile.coming_values = tile.parts, tile.v_parts
