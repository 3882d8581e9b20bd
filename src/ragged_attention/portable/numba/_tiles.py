"""The memory of one program: a tile of queries, a tile of keys and values, and the softmax state of each row.

A tile is a record, followed by the buffers whose addresses it holds. Queries, keys, values and results are float32 in
rows of whole vectors, and the number of rows is a multiple of ROWS. In a `paired` tile queries, keys, values and
weights are bfloat16, two in each *place* of 32 bits. A place of a query or key holds columns d and d + head_dim / 2, or
two adjacent columns if keys are multiplied in the cache or expanded; a place of the weights or values holds two
adjacent keys. If few keys have most of a row's weight, rounding their weights to bfloat16 would show in the result. The
rounding errors of such rows are therefore kept in `lost` and multiplied too; `uneven` marks the groups of ROWS rows
that have such rows. All rows keep their rounding errors if a list `repeats` a key, because the equal errors of that
key would add up. A row sees only positions in [left, right). A group of ROWS rows is multiplied only with the keys that
any of its rows sees by these bounds. `spans` has the range of these keys in the tile. The logits of other keys are
arbitrary until they become weights of 0.

`k_scales` and `v_scales` have the addresses of the scales of K and V rows that are stored with scales. Scales of whole
rows become factors of the keys, `k_factors` and `v_factors`; `mean_factors` has, for each row, the mean magnitude of
`v_factors`, weighted by the row's weights (`multiply_weights`). If a zero point is not an integer from 0 to 15, a
paired tile subtracts the nearest such integer from the codes, and `k_rests` and `v_rests` have the rest. The rest
changes a logit in proportion to the sum of the query's columns, which `q_sums` has for each row.

The lists whose names begin with `next` have the next keys. While the current keys are multiplied, `ahead` rows of
`k_bytes` bytes at the addresses `coming`, and `ahead` rows of `v_bytes` bytes at the addresses `coming_values`, are
prefetched one by one, so that memory is never idle. These are the rows of the next keys, or a part of the next tile's
rows for all of a program's heads (`_paged_heads`). If the scales of latents are stored apart from their rows,
`scale_bytes` bytes of scales are prefetched instead of values.

The rows of logits, transposed keys and values are one vector longer than necessary: if their stride were a power of
two, the rows that are multiplied together would compete for few sets of the L1 cache.
"""

import numpy as np

from ragged_attention.portable.numba import _formats
from ragged_attention.portable.numba._branches import branch
from ragged_attention.portable.numba._products import (
    COLUMNS,
    ROWS,
    mix,
    mix_listed,
    mix_of_pairs,
    product,
    product_of_pairs,
    scores,
    scores_of_pairs,
    span_of,
)
from ragged_attention.portable.numba._records import allocate_arena, list_rows, on_stack, record_at, up_to
from ragged_attention.portable.numba._scaled_rows import SCRATCH
from ragged_attention.portable.numba._sequences import within
from ragged_attention.portable.numba._softmax import NOTHING, capped, multiply_row, multiply_weights, weigh
from ragged_attention.portable.numba._vectors import (
    LANES,
    add_in_all,
    add_multiple,
    bits_of_float,
    compiled,
    copy,
    fill,
    float_at,
    float_of,
    fma,
    inlined,
    int_at,
    load,
    prefetch,
    prefetch_early,
    set_float,
    set_int,
    splat,
    sum_of_pairs,
    total,
    transpose,
    zero,
)

NUMBERS = ("rows", "keys", "width", "v_width", "columns", "s_width", "s_rows", "paired", "named_row",
           "repeats", "ahead", "coming", "coming_values", "k_bytes", "v_bytes",
           "scale_bytes", "segments", "keeps")  # fmt: skip
BUFFERS = ("q", "k", "k_rows", "transposed", "v", "s", "lost", "out", "m_i", "l_i", "left", "right", "spans", "uneven",
         "factors", "sources", "v_sources", "next_sources", "next_v_sources", "positions", "next_positions",
         "v_rows", "table", "named", "seen", "own_positions", "own_keys", "own_values",
         "k_scales", "v_scales", "next_k_scales", "next_v_scales", "k_factors", "v_factors", "k_rests", "v_rests",
         "mean_factors", "q_sums", "scratch", "zeros", "wide_row",
         "packed_q", "packed_out", "packed_m_i", "packed_l_i", "kept_out", "kept_m_i", "kept_l_i",
         "slots", "v_slots", "parts", "v_parts")  # fmt: skip
tile_at = record_at((*NUMBERS, *BUFFERS))
ALL_ROWS = (1 << ROWS) - 1  # the bits of ROWS rows
FEW_ROWS = 4 * ROWS  # with up to this many rows, keys are multiplied without transposing them
STEP = 16  # keys that are multiplied with few rows at a time
PIECE = 2  # values that are read between two prefetches


@compiled
def new_tile(rows, keys, width, columns, latent, paired, table, named, rows_at_once, segments):
    """Allocate a tile; returns its address, 0 if there is no memory.

    `width` is the number of places in a key, `columns` the number of columns in a value. In a `latent` tile a value is
    the beginning of its key's row. `table` is the size in bytes of the hash table of a list's keys (see `_latent`).
    `named` is the size in bytes of the table of the blocks that lists name (see `_selected`). `rows_at_once` rows are
    multiplied at a time. With `segments`, a tile keeps a second state of its rows, and the order in which the product
    of a row and a key is summed does not depend on the number of rows.
    """
    rows, keys = up_to(rows, ROWS), up_to(keys, LANES)
    width = up_to(width, LANES)
    v_width = width if latent else up_to(columns, COLUMNS) + LANES
    columns, s_width = up_to(columns, COLUMNS), up_to(keys, COLUMNS) + LANES
    values = 0 if latent else 4 * keys * v_width
    s_rows, floats, integers, addresses = up_to(rows_at_once, ROWS), 4 * rows, 8 * rows, 8 * keys
    logits, kept, packed = 4 * s_rows * s_width, floats if segments else 0, 4 * s_rows if named else 0
    sizes = (
        4 * rows * width, 4 * keys * width, addresses, 4 * s_width * width, values, logits, logits, 4 * rows * columns,
        floats, floats, integers, integers, integers, integers, 4 * width, addresses, addresses, addresses, addresses,
        addresses, addresses, addresses, table, named, addresses, addresses, addresses, addresses,
        addresses, addresses, addresses, addresses, 4 * keys, 4 * keys, 4 * keys, 4 * keys,
        floats, floats, 2 * SCRATCH, 4 * columns, 4 * columns, packed * width, packed * columns, packed, packed,
        kept * columns, kept, kept, addresses, addresses, addresses, addresses,
    )  # fmt: skip
    address = allocate_arena(len(NUMBERS), on_stack(sizes))
    if address == 0:
        return address
    tile = tile_at(address)
    tile.rows, tile.keys, tile.width, tile.v_width, tile.columns = rows, keys, width, v_width, columns
    tile.s_width, tile.s_rows, tile.paired, tile.repeats, tile.ahead = s_width, s_rows, paired, 0, 0
    tile.scale_bytes, tile.segments, tile.keeps = 0, segments, 0
    zero(tile.zeros, 4 * columns)
    zero(tile.v, values)  # the places that pad a row stay 0
    if latent:
        tile.v = tile.k
    list_rows(tile.k_rows, keys, tile.k, 4 * width)
    return address


@compiled
def reset(tile, rows):
    """Reset the softmax state of `rows` rows and of the rows that pad them to a multiple of ROWS."""
    whole = up_to(rows, ROWS)
    zero(tile.out, 4 * whole * tile.columns)
    zero(tile.l_i, 4 * whole)
    zero(tile.mean_factors, 4 * whole)
    fill(tile.m_i, 0, whole, NOTHING)


@compiled
def begin(tile, rows):
    """`reset` before new queries are read. All logits, and the queries of padding rows, become 0."""
    whole = up_to(rows, ROWS)
    zero(tile.q + 4 * rows * tile.width, 4 * (whole - rows) * tile.width)
    zero(tile.s, 4 * min(whole, tile.s_rows) * tile.s_width)
    reset(tile, rows)


@inlined
def sum_query(tile, row):
    """Sum the columns of a query in a `paired` tile."""
    sums = splat(0.0)
    for place in range(0, tile.width, LANES):
        sums = sums + sum_of_pairs(load(tile.q, row * tile.width + place))
    set_float(tile.q_sums, row, total(sums))


@inlined
def set_bounds(tile, row, left, right):
    """Set the range [left, right) of positions outside which a row sees no key."""
    set_int(tile.left, row, left)
    set_int(tile.right, row, right)


@inlined
def read_query(tile, row, code, source, columns, in_order):
    """Read one query. A `paired` tile pairs columns d and d + `width` or, if `in_order`, neighbouring columns."""
    target = tile.q + 4 * row * tile.width
    if not tile.paired:
        _formats.widen(code, source, target, columns)
    elif in_order:
        copy(target, source, 2 * columns)
    else:
        _formats.pair(code, source, source + columns, target, tile.width)


@compiled
def read_rows(code, sources, target, width, columns, count):
    """Read the rows at the addresses `sources`; a row whose address is 0 becomes zeros."""
    for key in range(count):
        source, row = int_at(sources, key), target + 4 * key * width
        if source:
            _formats.widen(code, source, row, columns)
        else:
            zero(row, 4 * columns)


@compiled
def shift(tile, rows):
    """Make row `rows`, a multiple of ROWS, the tile's first row. Bounds are not shifted."""
    tile.q, tile.out = tile.q + 4 * rows * tile.width, tile.out + 4 * rows * tile.columns
    tile.m_i, tile.l_i = tile.m_i + 4 * rows, tile.l_i + 4 * rows
    tile.mean_factors, tile.q_sums = tile.mean_factors + 4 * rows, tile.q_sums + 4 * rows


@inlined
def exchange(tile):
    """Exchange the rows and their state with the packed rows and their state."""
    tile.q, tile.packed_q = tile.packed_q, tile.q
    tile.out, tile.packed_out = tile.packed_out, tile.out
    tile.m_i, tile.packed_m_i = tile.packed_m_i, tile.m_i
    tile.l_i, tile.packed_l_i = tile.packed_l_i, tile.l_i


@compiled
def pack_rows(tile, first, rows):
    """Make `rows` rows, from row `first` on, the tile's only rows. Zeros pad their queries to a multiple of ROWS."""
    copy(tile.packed_q, tile.q + 4 * first * tile.width, 4 * rows * tile.width)
    copy(tile.packed_out, tile.out + 4 * first * tile.columns, 4 * rows * tile.columns)
    copy(tile.packed_m_i, tile.m_i + 4 * first, 4 * rows)
    copy(tile.packed_l_i, tile.l_i + 4 * first, 4 * rows)
    exchange(tile)
    zero(tile.q + 4 * rows * tile.width, 4 * (up_to(rows, ROWS) - rows) * tile.width)


@compiled
def unpack_rows(tile, first, rows):
    """Undo `pack_rows`: write the state of the packed rows back, and make all rows the tile's rows again."""
    exchange(tile)
    copy(tile.out + 4 * first * tile.columns, tile.packed_out, 4 * rows * tile.columns)
    copy(tile.m_i + 4 * first, tile.packed_m_i, 4 * rows)
    copy(tile.l_i + 4 * first, tile.packed_l_i, 4 * rows)


@inlined
def prefetch_each(sources, first, stop, size):
    """Prefetch the rows [first, stop) of a list of addresses, of `size` bytes each; an address may be 0."""
    for index in range(first, stop):
        prefetch(int_at(sources, index), size)


@compiled
def prefetch_rows(sources, first, stop, size):
    """`prefetch_each`, for many rows at a time."""
    prefetch_each(sources, first, stop, size)


@compiled
def prefetch_rows_early(sources, first, stop, size):
    """`prefetch_rows` for many rows that are used much later; see `prefetch_early`."""
    for index in range(first, stop):
        prefetch_early(int_at(sources, index), size)


@inlined
def prefetch_keys(tile, first, stop):
    """Prefetch the coming keys [first, stop), as far as there are any."""
    prefetch_rows(tile.coming, first, min(stop, tile.ahead), tile.k_bytes)
    if tile.scale_bytes:
        prefetch_rows(tile.next_v_sources, first, min(stop, tile.ahead), tile.scale_bytes)


@inlined
def prefetch_values(tile, first, stop):
    """Prefetch the coming values [first, stop), as far as there are any."""
    prefetch_each(tile.coming_values, first, min(stop, tile.ahead), tile.v_bytes)


@inlined
def expect_next(tile, count):
    """Let the products with the current keys prefetch the `count` next keys and their values."""
    tile.coming, tile.coming_values, tile.ahead = tile.next_sources, tile.next_v_sources, count


@inlined
def keep_next(tile):
    """Keep the lists of the next keys and values in `slots` and `v_slots`."""
    tile.slots, tile.next_sources = tile.next_sources, tile.slots
    tile.v_slots, tile.next_v_sources = tile.next_v_sources, tile.v_slots


@inlined
def advance(tile):
    """Make the next keys the current ones."""
    tile.sources, tile.next_sources = tile.next_sources, tile.sources
    tile.v_sources, tile.next_v_sources = tile.next_v_sources, tile.v_sources


@inlined
def advance_scaled(tile):
    """`advance` for keys and values that may have scales."""
    advance(tile)
    tile.k_scales, tile.next_k_scales = tile.next_k_scales, tile.k_scales
    tile.v_scales, tile.next_v_scales = tile.next_v_scales, tile.v_scales


@inlined
def round_weights(s, lost, count):
    """Round a row's weights to bfloat16 in place, and write the rounding errors to `lost` unless it is 0."""
    for index in range(0, count, LANES):
        weights = load(s, index)
        _formats.write_weights(s, index, weights)
        if lost:
            _formats.write_weights(lost, index, weights - _formats.read_bfloat16(s, index))


@compiled
def sum_of_rests(s, lost, rests, count):
    """The sum of `rests`, weighted by a row's weights in bfloat16; `lost` is as in `round_weights`."""
    sums = splat(0.0)
    for index in range(0, count, LANES):
        weights = _formats.read_bfloat16(s, index)
        if lost:
            weights = weights + _formats.read_bfloat16(lost, index)
        sums = fma(weights, load(rests, index), sums)
    return total(sums)


@inlined
def seen_of(tile, row, first, count):
    """The range of the `count` keys from position `first` on that a row sees; an empty range has any bounds."""
    return within(int_at(tile.left, row) - first, count), within(int_at(tile.right, row) - first, count)


@compiled
def find_spans(tile, rows, first, count):
    """Set `spans` for the `count` keys from position `first` on; a span begins with a whole vector."""
    for row in range(0, rows, ROWS):
        begin, end = count, 0
        for each in range(row, min(row + ROWS, rows)):
            left, right = seen_of(tile, each, first, count)
            if left < right:
                begin, end = min(begin, left), max(end, right)
        begin = begin // LANES * LANES
        set_int(tile.spans, 2 * (row // ROWS), begin)
        set_int(tile.spans, 2 * (row // ROWS) + 1, max(begin, end))


@inlined
def sees_some(tile, row, begin, end):
    """Whether any of ROWS rows, from row `row` on, sees any of the keys [begin, end)."""
    first, stop = span_of(tile.spans, row, 0)
    return first < end and begin < stop


@inlined
def rows_that_see(tile, rows, begin, end):
    """The rows from the first to the last group of ROWS rows that sees any of the keys [begin, end), as a range."""
    first, stop = 0, up_to(rows, ROWS)
    while first < stop and not sees_some(tile, first, begin, end):
        first += ROWS
    while first < stop and not sees_some(tile, stop - ROWS, begin, end):
        stop -= ROWS
    return first, stop


@compiled
def weigh_rows(tile, rows, row, first, count):
    """Replace the logits of ROWS of a tile's `rows` rows, from row `row` on, by weights; returns the bits of `weigh`.

    The `count` keys begin at position `first`. Rows that pad a tile see what the last row sees.
    """
    begin, end = span_of(tile.spans, row, 0)
    whole, end, s = up_to(count, LANES), up_to(end, LANES), tile.s + 4 * row * tile.s_width
    for each in range(ROWS):
        logits = s + 4 * each * tile.s_width
        left, right = seen_of(tile, min(row + each, rows - 1), first, count)
        fill(logits, 0, begin, np.float32(0))
        fill(logits, begin, min(left, right), NOTHING)
        fill(logits, max(right, begin), end, NOTHING)
        fill(logits, end, whole, np.float32(0))
    if begin == end:
        return 0
    out = tile.out + 4 * row * tile.columns
    few = weigh(s + 4 * begin, tile.s_width, end - begin, row, tile.m_i, tile.l_i, out, tile.columns)
    return few & (1 << min(rows - row, ROWS)) - 1


@compiled
def weigh_keys(tile, rows, first, count, holes, factors, rests):
    """Replace the logits of `count` keys, from position `first` on, by weights; if `holes`, some keys are missing.

    If `factors` is not 0, it is the address of a factor for each key's row of V; the weights are multiplied by it. If
    `rests` is not 0, it is the address of a rest for each key, which is subtracted from all columns of its row of V.
    """
    if holes:
        for key in range(count):
            if not int_at(tile.sources, key):
                for row in range(rows):
                    set_float(tile.s, row * tile.s_width + key, NOTHING)
    for row in range(0, rows, ROWS):
        uneven = weigh_rows(tile, rows, row, first, count)
        if factors:
            uneven = scale_weights(tile, row, min(row + ROWS, rows), factors, up_to(count, LANES))
        if tile.paired:
            uneven |= ALL_ROWS if tile.repeats else 0
            set_int(tile.uneven, row // ROWS, uneven)
            round_rows(tile, row, uneven, up_to(count, LANES), rests)


@compiled
def scale_weights(tile, first, stop, factors, count):
    """`multiply_weights` for the rows [first, stop); returns a bit for each that has most of its weight on few keys."""
    uneven = 0
    for row in range(first, stop):
        s = tile.s + 4 * row * tile.s_width
        if multiply_weights(s, factors, count, row, tile.l_i, tile.mean_factors):
            uneven |= 1 << row - first
    return uneven


@compiled
def round_rows(tile, first, uneven, count, rests):
    """Round the weights of ROWS rows, from row `first` on, and subtract the `rests` from their results.

    The bits of `uneven` select the rows whose rounding errors are kept. If only some rows are selected, the errors of
    the other rows count as 0, so that a row's result does not depend on the other rows.
    """
    for row in range(first, first + ROWS):
        offset = 4 * row * tile.s_width
        lost = tile.lost + offset if uneven >> row - first & 1 else 0
        if uneven and not lost:
            zero(tile.lost + offset, 2 * count)
        round_weights(tile.s + offset, lost, count)
        if rests:  # weighted by the rounded weights, so that rounding does not move a mean away from zero
            rest = sum_of_rests(tile.s + offset, lost, rests, count)
            add_in_all(tile.out + 4 * row * tile.columns, tile.columns, -rest)


@inlined
def weight_at(tile, row, key):
    """A row's weight of a key, rounded in a `paired` tile."""
    s = tile.s + 4 * row * tile.s_width
    return _formats.number_at(_formats.BFLOAT16, s, key) if tile.paired else float_at(s, key)


@compiled
def transpose_keys(keys, count, otherwise, places, target, width):
    """Transpose the first `places` 32-bit places of the `count` rows whose addresses `keys` lists.

    Columns of `target` from `count` on are undefined.
    """
    for key in range(0, count, LANES):
        transpose(keys + 8 * key, count - key, otherwise, places, target + 4 * key, width)


@compiled
def multiply_many(tile, keys, rows, count, factor, product):
    """`multiply_few` for many rows, for which keys are transposed; `product` is the product of floats or pairs."""
    width, s_width, whole = tile.width, tile.s_width, up_to(rows, ROWS)
    for key in range(0, count, LANES):
        prefetch_keys(tile, key, key + LANES)
        target = tile.transposed + 4 * key
        transpose_keys(keys + 8 * key, min(LANES, count - key), tile.q, width, target, s_width)
    prefetch_keys(tile, up_to(count, LANES), tile.ahead)
    columns, q, k, s = up_to(count, COLUMNS), tile.q, tile.transposed, tile.s
    product(q, k, s, whole, width, columns, width, 1, s_width, s_width, factor, tile.spans)


@compiled
def multiply_few(tile, keys, rows, count, factor, scores):
    """Set `s` to `factor` times the products of few rows and the `count` keys whose addresses `keys` lists.

    `scores` is the function for floats or for pairs. STEP keys are multiplied at a time, with the rows from the first
    row to the last row that sees any of these keys. If keys are multiplied in the cache, the coming rows are prefetched
    during the products, otherwise before them.
    """
    width, s_width, in_place = tile.width, tile.s_width, keys == tile.sources
    for key in range(0, count, STEP):
        if not in_place:
            prefetch_keys(tile, key, key + STEP)
        ahead, num_ahead = tile.coming + 8 * key, tile.ahead - key if in_place else 0
        some, num_keys = keys + 8 * key, min(STEP, count - key)
        row, stop = rows_that_see(tile, rows, key, key + num_keys)
        q, s = tile.q + 4 * row * width, tile.s + 4 * (row * s_width + key)
        scores(q, some, s, stop - row, num_keys, width, width, s_width, factor, ahead, num_ahead)
    prefetch_keys(tile, up_to(count, STEP), tile.ahead)


@inlined
def multiply(tile, keys, rows, count, factor, product, scores):
    """Call `multiply_many` or `multiply_few` with the products of floats or of pairs; `factor` is a float's bits."""
    if rows > FEW_ROWS and not tile.segments:
        multiply_many(tile, keys, rows, count, float_of(factor), product)
    else:
        multiply_few(tile, keys, rows, count, float_of(factor), scores)


@branch("floats")
def multiply_floats(call, tile, keys, rows, count, factor):
    """`multiply` for a tile of float32."""
    multiply(tile, keys, rows, count, factor, product, scores)


@branch("pairs")
def multiply_pairs(call, tile, keys, rows, count, factor):
    """`multiply` for a `paired` tile."""
    multiply(tile, keys, rows, count, factor, product_of_pairs, scores_of_pairs)


@compiled
def multiply_keys(call, tile, keys, rows, first, count, factor, factors, rests, soft_cap):
    """Set `s` to the base-2 logits of `count` keys, from position `first` on; `keys` lists their addresses.

    A logit is q . k times `factor`, and times the key's own factor if `factors` is an address, then soft-capped. If
    `rests` is an address, each key's rest is subtracted from all columns of the key. A `soft_cap` of 0 means no cap;
    `factor` then includes log2(e).
    """
    s_width, factor = tile.s_width, np.float32(factor)
    find_spans(tile, rows, first, count)
    if tile.paired:
        multiply_pairs(call, tile, keys, rows, count, bits_of_float(factor))
    else:
        multiply_floats(call, tile, keys, rows, count, bits_of_float(factor))
    if rests:
        for row in range(rows):
            s = tile.s + 4 * row * s_width
            add_multiple(s, rests, up_to(count, LANES), -factor * float_at(tile.q_sums, row))
    if factors:
        for row in range(rows):
            multiply_row(tile.s + 4 * row * s_width, factors, up_to(count, LANES))
    if soft_cap > 0:
        for row in range(rows):
            capped(tile.s + 4 * row * s_width, up_to(count, LANES), soft_cap)


@compiled
def mix_values_in_place(tile, rows, count):
    """Add the weighted values of `count` keys: float32 rows in the cache, with whole blocks of columns."""
    for key in range(count):
        if not int_at(tile.v_sources, key):
            set_int(tile.v_sources, key, tile.zeros)
    columns, s_width, rows = tile.columns, tile.s_width, up_to(rows, ROWS)
    mix_listed(tile.s, tile.v_sources, tile.out, rows, count, columns, s_width, columns, tile.coming_values, tile.ahead)
    prefetch_values(tile, count, tile.ahead)


@branch("floats")
def mix_floats(call, tile, rows, count, in_place):
    """`mix_values` for a tile of float32; `in_place` says that the values are multiplied in the cache."""
    if in_place:
        mix_values_in_place(tile, rows, count)
    else:
        s_width, v_width, columns = tile.s_width, tile.v_width, tile.columns
        mix(tile.s, tile.v, tile.out, up_to(rows, ROWS), count, columns, s_width, 1, v_width, columns, tile.spans)


@branch("pairs")
def mix_pairs(call, tile, rows, count):
    """`mix_values` for a `paired` tile.

    The weights' rounding errors are multiplied too, for the groups of ROWS rows that keep them.
    """
    s_width, v_width, columns, v, spans = tile.s_width, tile.v_width, tile.columns, tile.v, tile.spans
    pairs = (count + 1) // 2
    mix_of_pairs(tile.s, v, tile.out, up_to(rows, ROWS), pairs, columns, s_width, 1, v_width, columns, spans)
    for row in range(0, rows, ROWS):
        if int_at(tile.uneven, row // ROWS):
            lost, out = tile.lost + 4 * row * s_width, tile.out + 4 * row * columns
            mix_of_pairs(lost, v, out, ROWS, pairs, columns, s_width, 1, v_width, columns, spans + 16 * (row // ROWS))


@inlined
def mix_values(call, tile, rows, count, in_place):
    """Add the weighted values of `count` keys to the results; float32 may be multiplied `in_place`, in the cache."""
    if tile.paired:
        mix_pairs(call, tile, rows, count)
    else:
        mix_floats(call, tile, rows, count, in_place)


PRODUCTS = (multiply_floats, multiply_pairs, mix_floats, mix_pairs)  # branches of every kernel that uses these tiles
