"""The write of a step's K and V into the pages on TPUs: rows are copied from VMEM to their slots.

Each grid step writes a block of tokens. While the pipeline loads the rows of the next block into VMEM, the kernel
starts one asynchronous copy for each token of the current block, from its row in VMEM to its slot in HBM. The copies to
an array of pages share a semaphore, and the kernel then waits for all rows that it copied. Eight consecutive tokens
with consecutive slots, as in a prompt, share one copy. Scales that are stored beside the rows are written by XLA,
because a copy cannot move as little as a row of a few numbers.
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
    LARGEST_INT,
    cannot_run,
    compiler_params,
    expect_sizes,
    in_powers_of_2,
    item_size,
    next_power_of_2,
    round_up,
)
from ragged_attention.kernels_pallas._new_rows import last_writes, new_rows, slots, too_many_slots, write_scales
from ragged_attention.kernels_pallas._scale_pages import refusal

RUN = 8  # tokens that may share a copy
SKIP, FIRST_RUN = -1, -2  # see `codes_of`: SKIP marks a token that is not written, FIRST_RUN or less the start of a run
FEATURES = frozenset({
    "slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "k_scale", "v_scale", "k_scale_pages",
    "v_scale_pages",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tunable parameters.

    Attributes:
        num_tokens_per_block: tokens whose rows are loaded into VMEM together.
        vmem_limit_bytes: bytes of VMEM that the compiler may use; 0 is its default.
    """

    num_tokens_per_block: int = 256
    vmem_limit_bytes: int = 0

    def __post_init__(self) -> None:
        expect_sizes(self, num_tokens_per_block=(1, 8192), vmem_limit_bytes=(0, LARGEST_INT))


def why_not(call: WriteKvPages) -> str | None:
    if (reason := cannot_run(call)) is not None:
        return reason
    if (reason := refusal(call)) is not None:
        return reason
    if call.cache_dtype == "float16":
        return "TPUs have no float16, got kv_pages of it"
    return too_many_slots(call)


def row_bytes(call: Any) -> int:
    """Bytes that a token takes in VMEM, where rows are padded to tiles of 32 bytes by 128 lanes."""
    size = item_size(call.k_pages_like)
    heads = [2 * call.num_kv_heads] if call.combined else [call.num_kv_heads] * 2
    dims = [call.head_dim] if call.combined else [call.head_dim, call.v_head_dim]
    return sum(round_up(count * size, 32) * round_up(dim, LANES) for count, dim in zip(heads, dims, strict=True))


def heuristic(call: Any) -> Tile:
    """A block for all tokens, but of at most 1024 tokens, 4 MiB and a sixteenth of VMEM."""
    most = max(min(call.device.shared_memory // 16, 4 << 20) // row_bytes(call), 1)
    wanted = min(max(next_power_of_2(call.num_tokens), RUN), 1024)
    return Tile(num_tokens_per_block=min(wanted, 1 << most.bit_length() - 1))


def codes_of(slots: jax.Array, block: int, run: int) -> jax.Array:
    """The code of each token, i32 [blocks, 1, block]: its slot, SKIP, or FIRST_RUN - slot.

    `FIRST_RUN - slot` is for a token that shares a copy with the `run - 1` tokens after it. Several blocks may write to
    the same slot, because they run one after another.
    """
    slots = last_writes(slots, block)
    count = block - run + 1
    starts_run = slots[:, :count] >= 0
    for i in range(1, run):
        starts_run &= slots[:, i : i + count] == slots[:, :count] + i
    starts_run = jnp.pad(starts_run, ((0, 0), (0, run - 1)))
    return jnp.where(starts_run, FIRST_RUN - slots, slots)[:, None, :]


def kernel(codes: Any, rows: Any, initial: Any, pages: Any, semaphores: Any, *, run: int) -> None:
    """Write one block of tokens from `rows` in VMEM to `pages` [P * G, ...] in HBM, with one semaphore per array."""
    del initial  # aliases `pages`
    block = codes.shape[-1]

    def copy(token: Any, slot: Any, size: int) -> None:
        for i, (row, page) in enumerate(zip(rows, pages, strict=True)):
            source, target = row.at[pl.ds(token, size)], page.at[pl.ds(slot, size)]
            pltpu.make_async_copy(source, target, semaphores.at[i]).start()

    def step(state: Any) -> Any:
        token, copied = state
        code = codes[0, 0, token]
        is_run = code <= FIRST_RUN
        pl.when(is_run)(lambda: copy(token, FIRST_RUN - code, run))
        pl.when(code >= 0)(lambda: copy(token, code, 1))
        size = jnp.where(is_run, run, 1)
        return token + size, copied + jnp.where(code == SKIP, 0, size)

    def wait(_: Any, size: int) -> None:
        for i, row in enumerate(rows):
            some = row.at[pl.ds(0, size)]  # which rows are named does not matter, because a semaphore counts bytes
            pltpu.make_async_copy(some, some, semaphores.at[i]).wait()

    _, copied = lax.while_loop(lambda state: state[0] < block, step, (jnp.int32(0), jnp.int32(0)))
    in_powers_of_2(copied, block, wait)


def run(call: Any, tile: Tile, launch: Any) -> list[jax.Array]:
    """The new pages and scale pages, which reuse the memory of the old ones if those are donated."""
    arrays = [call.kv_pages] if call.combined else list(call.kv_pages)
    if 0 in (call.num_tokens, call.num_pages):
        return call.caches
    block = tile.num_tokens_per_block
    spare = -call.num_tokens % block
    k, v = (jnp.pad(new, ((0, spare), (0, 0), (0, 0))) for new in (call.k, call.v))
    new, slot = new_rows(call, k, v), slots(call)
    rows, scales = new[: len(arrays)], [each[: call.num_tokens] for each in new[len(arrays) :]]
    flat = [pages.reshape(-1, *pages.shape[2:]) for pages in arrays]
    together = min(RUN, block, len(flat[0]))
    codes = codes_of(slot, block, together)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    (written,) = pl.pallas_call(
        functools.partial(kernel, run=together),
        grid=(len(codes),),
        in_specs=[
            pl.BlockSpec((1, 1, block), lambda i: (i, 0, 0), memory_space=pltpu.SMEM),
            [pl.BlockSpec((block, *row.shape[1:]), lambda i: (i, 0, 0)) for row in rows],
            [anywhere for _ in flat],
        ],
        out_specs=([anywhere for _ in flat],),
        out_shape=([jax.ShapeDtypeStruct(pages.shape, pages.dtype) for pages in flat],),
        scratch_shapes=[pltpu.SemaphoreType.DMA((len(flat),))],
        input_output_aliases={1 + len(rows) + i: i for i in range(len(flat))},
        compiler_params=compiler_params(tile.vmem_limit_bytes),
        name="write_kv_pages",
    )(codes, rows, flat)
    pages = [pages.reshape(old.shape) for pages, old in zip(written, arrays, strict=True)]
    return [*pages, *write_scales(call, scales, slot)]
