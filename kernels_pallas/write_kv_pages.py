"""Writing this step's K and V into the pages, for TPU: rows that lie in vector memory are copied to their slots.

The grid walks over blocks of tokens. While the pipeline brings the next block of rows into VMEM, the kernel starts an
asynchronous copy for each token of the present one, from its row there to its slot in HBM, all on one semaphore, and
then waits for as many rows as it sent. Tokens in a row that go to slots in a row (a prompt) are sent as one copy.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ragged_attention.calls import WriteKvPages
from ragged_attention.kernels_pallas._blocks import (
    LANES,
    cannot_run,
    expect_sizes,
    in_pieces,
    item_size,
    next_power_of_2,
    round_up,
)
from ragged_attention.kernels_pallas._new_rows import new_rows, sent_once, slots, too_many_slots

RUN = 8  # tokens that may share a copy
NOWHERE, FIRST_RUN = -1, -2  # codes: a token to skip; those from FIRST_RUN down are runs, see `codes_of`
FEATURES = frozenset({"slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "k_scale", "v_scale"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What may be tuned.

    Attributes:
        num_tokens_per_block: tokens whose rows are loaded into vector memory together.
        vmem_limit_bytes: vector memory that the compiler may use, 0 for its default.
    """

    num_tokens_per_block: int = 256
    vmem_limit_bytes: int = 0

    def __post_init__(self) -> None:
        expect_sizes(self, num_tokens_per_block=(1, 8192), vmem_limit_bytes=(0, 2**31 - 1))


def why_not(call: WriteKvPages) -> str | None:
    if (reason := cannot_run(call)) is not None:
        return reason
    if call.cache_dtype == "float16":
        return "TPUs have no float16, got kv_pages of it"
    return too_many_slots(call)


def row_bytes(call: Any) -> int:
    """The bytes that a token takes in VMEM, where tiles of 32 bytes by 128 lanes are filled up."""
    size = item_size(call.k_pages_like)
    heads = [2 * call.num_kv_heads] if call.combined else [call.num_kv_heads] * 2
    dims = [call.head_dim] if call.combined else [call.head_dim, call.v_head_dim]
    return sum(round_up(count * size, 32) * round_up(dim, LANES) for count, dim in zip(heads, dims, strict=True))


def heuristic(call: Any) -> Tile:
    """All tokens, up to 1024, as long as each of the two blocks takes at most a sixteenth of VMEM and 4 MiB."""
    most = max(min(call.device.shared_memory // 16, 4 << 20) // row_bytes(call), 1)
    wanted = min(max(next_power_of_2(call.num_tokens), RUN), 1024)
    return Tile(num_tokens_per_block=min(wanted, 1 << most.bit_length() - 1))


def codes_of(slots: jax.Array, block: int, run: int) -> jax.Array:
    """What to do at each token, i32 [blocks, 1, block]: `slot` to send it there, NOWHERE, or FIRST_RUN - slot.

    The last sends it and its `run - 1` successors in one copy. Blocks follow each other, so a slot may come again in
    another one.
    """
    slots = sent_once(slots, block)
    starts = block - run + 1
    whole = slots[:, :starts] >= 0
    for i in range(1, run):
        whole &= slots[:, i : i + starts] == slots[:, :starts] + i
    whole = jnp.pad(whole, ((0, 0), (0, run - 1)))
    return jnp.where(whole, FIRST_RUN - slots, slots)[:, None, :]


def kernel(codes: Any, *refs: Any, run: int) -> None:
    """One block of tokens: `rows` in VMEM, `pages` [P * G, ...] in HBM, a semaphore for each pair of them."""
    count = len(refs) // 3
    rows, pages, semaphores = refs[:count], refs[2 * count : 3 * count], refs[3 * count]
    block = codes.shape[-1]

    def send(token: Any, slot: Any, size: int) -> None:
        for i in range(count):
            source, target = rows[i].at[pl.ds(token, size)], pages[i].at[pl.ds(slot, size)]
            pltpu.make_async_copy(source, target, semaphores.at[i]).start()

    def step(state: Any) -> Any:
        token, sent = state
        code = codes[0, 0, token]
        whole = code <= FIRST_RUN

        @pl.when(whole)
        def _() -> None:
            send(token, FIRST_RUN - code, run)

        @pl.when(code >= 0)
        def _() -> None:
            send(token, code, 1)

        size = jnp.where(whole, run, 1)
        return token + size, sent + jnp.where(code == NOWHERE, 0, size)

    def wait(_: Any, size: int) -> None:
        for i in range(count):
            piece = rows[i].at[pl.ds(0, size)]  # a semaphore counts bytes, whichever rows they are
            pltpu.make_async_copy(piece, piece, semaphores.at[i]).wait()

    _, sent = lax.while_loop(lambda state: state[0] < block, step, (jnp.int32(0), jnp.int32(0)))
    in_pieces(sent, block, wait)


def run(call: Any, tile: Tile, launch: Any) -> list[jax.Array]:
    """The new pages, in the old ones' memory where those are donated."""
    del launch
    arrays = [call.kv_pages] if call.combined else list(call.kv_pages)
    if 0 in (call.num_tokens, call.num_pages):
        return arrays
    spare = -call.num_tokens % tile.num_tokens_per_block
    k, v = (jnp.pad(new, ((0, spare), (0, 0), (0, 0))) for new in (call.k, call.v))
    return write_rows(arrays, new_rows(call, k, v), slots(call), tile)


def write_rows(arrays: list[jax.Array], rows: list[jax.Array], slots: jax.Array, tile: Tile) -> list[jax.Array]:
    """`arrays` [P, G, ...], each with its `rows` at `slots` [T], -1 being skipped; the rows fill whole blocks."""
    block = tile.num_tokens_per_block
    flat = [pages.reshape(-1, *pages.shape[2:]) for pages in arrays]
    together = min(RUN, block, len(flat[0]))
    codes = codes_of(slots, block, together)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    written = pl.pallas_call(
        functools.partial(kernel, run=together),
        grid=(len(codes),),
        in_specs=[
            pl.BlockSpec((1, 1, block), lambda i: (i, 0, 0), memory_space=pltpu.SMEM),
            *(pl.BlockSpec((block, *new.shape[1:]), lambda i: (i, 0, 0)) for new in rows),
            *(anywhere for _ in flat),
        ],
        out_specs=[anywhere for _ in flat],
        out_shape=[jax.ShapeDtypeStruct(pages.shape, pages.dtype) for pages in flat],
        scratch_shapes=[pltpu.SemaphoreType.DMA((len(flat),))],
        input_output_aliases={1 + len(rows) + i: i for i in range(len(flat))},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=tile.vmem_limit_bytes or None,
            disable_bounds_checks=True,  # slots are checked before, and the compiler's checks triple the loop
        ),
        name="write_kv_pages",
    )(codes, *rows, *flat)
    return [pages.reshape(given.shape) for pages, given in zip(written, arrays, strict=True)]
