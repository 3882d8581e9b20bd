"""Writes into pages on a TPU: runs of slots are copied together, skipped slots are not, and no page is copied."""

import numpy as np
import pytest

from ragged_attention.calls import Device, WriteKvPages
from ragged_attention.tools.samples import Sample
from tests.processes import printed

jax = pytest.importorskip("jax")

from ragged_attention.kernels_pallas import write_kv_pages as kernels  # noqa: E402

TPU = Device(framework="jax", platform="tpu", shared_memory=128 << 20)


@pytest.mark.parametrize("mode", ["on_wait", "eager"])
def test_runs_and_slots_that_come_twice_are_written_without_a_race(mode):
    printed("-W", "error", "-m", "tests.programs.tpu_writes", mode)


@pytest.mark.parametrize("block", [1, 4, 7, 32])
@pytest.mark.parametrize("run", [1, 3, 8])
def test_codes_send_each_slot_of_a_block_once(block, run):
    """The kernel's codes, carried out one by one, write each token to its slot exactly once."""
    run = min(run, block)
    rng = np.random.default_rng(block)
    slots = rng.integers(-1, 40, 50).astype(np.int32)
    slots[10:30] = np.arange(20) + 3
    codes = np.asarray(kernels.codes_of(jax.numpy.asarray(slots), block, run))[:, 0]
    assert codes.shape == (-(-50 // block), block)
    sent, copies = {}, 0
    for number, line in enumerate(codes.tolist()):
        token, used = 0, set()
        while token < block:
            whole = line[token] <= kernels.FIRST_RUN
            first = kernels.FIRST_RUN - line[token] if whole else line[token]
            size = run if whole else 1
            for i in range(size if first != kernels.SKIP else 0):
                assert first + i not in used
                used.add(first + i)
                sent[first + i] = number * block + token + i
            copies += first != kernels.SKIP
            token += size
        assert token == block  # no run crosses the end of a block
    assert sent == {slot: token for token, slot in enumerate(slots.tolist()) if slot >= 0}
    if run == 8 and block == 32:
        assert copies < len(sent) - 7


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        (Sample(dtype="float16"), "TPUs have no float16, got kv_pages of it"),
        (Sample(cache_dtype="float8_e4m3fnuz"), "reads no cache of float8_e4m3fnuz"),
        (Sample(max_num_seqs=2**20), r"expected num_pages * page_size < 2**31 - 1, got 4294967296"),
        (Sample(dtype="float16", cache_dtype="int8"), None),
    ],
)
def test_what_the_kernel_takes(sample, reason):
    assert kernels.why_not(sample.call("write_kv_pages", TPU)) == reason


@pytest.mark.parametrize(
    ("sample", "tokens"),
    [
        (Sample(num_tokens=1), 8),
        (Sample(num_tokens=48), 64),
        (Sample(num_tokens=8192), 1024),
        (Sample(num_tokens=8192, dtype="float32", num_kv_heads=32), 128),
        (Sample(num_tokens=8192, dtype="float32", num_kv_heads=1024, head_dim=512, num_q_heads=1024), 1),
    ],
)
def test_a_block_of_tokens_fits_vector_memory(sample, tokens):
    assert kernels.heuristic(sample.call("write_kv_pages", TPU)).num_tokens_per_block == tokens


@pytest.mark.parametrize("split", [False, True])
def test_pages_are_written_where_they_lie(split):
    """The lowered call aliases its results to its pages. `make tpu-compile` shows that XLA adds no copy."""
    sharding, shape = jax.sharding, jax.ShapeDtypeStruct
    new, slots = shape((64, 8, 128), "bfloat16"), shape((64,), "int32")
    pages = [shape((100, 16, 8 if split else 16, 128), "bfloat16")] * (2 if split else 1)

    def write(k, v, slots, *pages):
        call = WriteKvPages(k=k, v=v, kv_pages=pages if split else pages[0], slot_mapping=slots, device=TPU)
        return kernels.run(call, kernels.heuristic(call), None)

    device = sharding.AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
    donated = jax.jit(write, donate_argnums=tuple(range(3, 3 + len(pages))))
    with sharding.use_abstract_mesh(sharding.AbstractMesh((), (), abstract_device=device)):
        module = jax.export.export(donated, platforms=["tpu"])(new, new, slots, *pages).mlir_module()
    assert module.count("stablehlo.output_operand_alias<") == len(pages)
    assert module.count("tf.aliasing_output") == len(pages)
