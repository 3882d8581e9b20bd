"""Properties of the Triton kernels: limits of tiles, splits, decoding of caches, and weights of rows with few keys."""

import dataclasses
import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import ragged_attention as ra
from benchmarks.compiled import compiling
from ragged_attention import dispatch
from ragged_attention.calls import CACHE_FORMATS, CacheFormat, IndexerTopk, SparseMlaPrefill, SparseMlaPrefillBackward
from ragged_attention.reference.quantize_mla_cache import quantize_mla_cache
from ragged_attention.reference.ragged_paged_attention import ragged_paged_attention as definition
from ragged_attention.reference.sparse_mla_prefill import sparse_mla_prefill
from ragged_attention.testing.compare import agrees
from ragged_attention.testing.mla.ragged import RaggedLatentSpec
from ragged_attention.testing.mla.specs import PrefillSpec
from ragged_attention.testing.paged.oracle import check_attention
from ragged_attention.testing.paged.specs import Spec
from ragged_attention.testing.runner import runner_for
from ragged_attention.tools.samples import FakeArray, LatentSample, Sample, device_of

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

import ragged_attention.torch as rt  # noqa: E402
from ragged_attention.kernels_triton import _mask, _splits  # noqa: E402


@pytest.mark.parametrize(
    ("operation", "fields", "text"),
    [
        ("ragged_paged_attention", {"block_q": 48}, "expected block_q to be a power of two from 16 to 256, got 48"),
        ("ragged_paged_attention", {"num_warps": 32}, "expected num_warps to be a power of two from 1 to 16, got 32"),
        ("ragged_paged_attention", {"num_splits": 0}, "expected num_splits from 1 to 4096, got 0"),
        ("ragged_paged_attention", {"edge_kv": 8}, "expected edge_kv to be a power of two from 16 to 256, got 8"),
        ("ragged_paged_attention", {"split_weights_below": -1}, "expected split_weights_below >= 0, got -1"),
        ("write_kv_pages", {"block_t": 3}, "expected block_t to be a power of two from 1 to 256, got 3"),
        ("merge_attention_states", {"num_warps": 3}, "expected num_warps to be a power of two from 1 to 16, got 3"),
        ("sparse_mla_prefill", {"block_h": 8}, "expected block_h to be a power of two from 16 to 128, got 8"),
        ("sparse_mla_prefill", {"decoded": 2}, "expected decoded to be True or False, got 2"),
        ("mla_decode", {"block_kv": 48}, "expected block_kv to be a power of two from 16 to 128, got 48"),
        ("mla_decode", {"num_splits": 0}, "expected num_splits from 1 to 256, got 0"),
        ("ragged_mla_attention", {"block_h": 8}, "expected block_h to be a power of two from 16 to 128, got 8"),
        (
            "ragged_mla_attention",
            {"split_block_kv": 256},
            "expected split_block_kv to be a power of two from 16 to 128, got 256",
        ),
        ("ragged_mla_attention", {"num_splits": 0}, "expected num_splits from 1 to 4096, got 0"),
        ("ragged_mla_attention", {"split_rows": 0}, "expected split_rows from 1 to 65536, got 0"),
        ("quantize_mla_cache", {"block_t": 3}, "expected block_t to be a power of two from 1 to 256, got 3"),
        ("write_mla_cache", {"num_warps": 5}, "expected num_warps to be a power of two from 1 to 16, got 5"),
        (
            "sparse_mla_prefill_backward",
            {"block_h": 128},
            "expected block_h to be a power of two from 16 to 64, got 128",
        ),
        ("sparse_mla_prefill_backward", {"chunk_tokens": 0}, "expected chunk_tokens from 1 to 2147483647, got 0"),
        ("varlen_attention", {"block_q": 48}, "expected block_q to be a power of two from 16 to 256, got 48"),
        ("varlen_attention", {"num_stages": 9}, "expected num_stages from 1 to 8, got 9"),
        (
            "varlen_attention_backward",
            {"dq_block_kv": 8},
            "expected dq_block_kv to be a power of two from 16 to 256, got 8",
        ),
        ("varlen_attention_backward", {"dq_num_stages": 0}, "expected dq_num_stages from 1 to 8, got 0"),
        ("make_decode_schedule", {"num_warps": 0}, "expected num_warps to be a power of two from 1 to 16, got 0"),
        ("indexer_logits", {"block_n": 8}, "expected block_n to be a power of two from 16 to 256, got 8"),
        ("indexer_logits", {"num_parts": 0}, "expected num_parts from 1 to 65535, got 0"),
        ("indexer_topk", {"chunk": 0}, "expected chunk from 1 to 2147483647, got 0"),
        ("indexer_topk", {"select_block": 32}, "expected block to be a power of two from 64 to 16384, got 32"),
        ("top_k_indices", {"num_splits": 65}, "expected num_splits from 1 to 64, got 65"),
        ("write_indexer_cache", {"block_t": 3}, "expected block_t to be a power of two from 1 to 256, got 3"),
    ],
)
def test_tiles_have_limits(operation: str, fields: dict[str, int], text: str) -> None:
    module = importlib.import_module(f"ragged_attention.kernels_triton.{operation}")
    with pytest.raises(ra.InvalidInput, match=f"^{text}$"):
        module.Tile(**fields)


@pytest.mark.parametrize(
    ("arch", "shape", "dtype", "reason"),
    [
        ("sm_90", (64, 1, 576), "float32", None),
        ("sm_86", (64, 1, 576), "bfloat16", None),
        (
            "sm_86",
            (64, 1, 576),
            "float32",
            "expected rows that fit 101376 bytes of shared memory, 16 at a time, got 576 columns of 4 bytes",
        ),
        (
            "sm_90",
            (2**30, 2, 576),
            "bfloat16",
            "expected fewer than 2**31 - 1 rows of kv for deterministic=True, got 1073741824 slots",
        ),
    ],
)
def test_the_gradient_of_sparse_prefill_says_what_it_cannot(
    arch: str, shape: tuple[int, ...], dtype: str, reason: str | None
) -> None:
    def array(*shape: int, dtype: str = dtype) -> FakeArray:
        return FakeArray(shape, dtype)

    call = SparseMlaPrefillBackward(
        d_out=array(4, 16, 512), q=array(4, 16, 576), kv=array(*shape), indices=array(4, shape[1], 64, dtype="int32"),
        out=array(4, 16, 512), lse=array(4, 16, dtype="float32"), deterministic=True, device=device_of("torch", arch),
    )  # fmt: skip
    module = importlib.import_module("ragged_attention.kernels_triton.sparse_mla_prefill_backward")
    assert module.why_not(call) == reason


PREFILL = SparseMlaPrefill(
    q=FakeArray((4096, 128, 576), "bfloat16"),
    kv=FakeArray((512, 64, 1, 656), "uint8"),
    indices=FakeArray((4096, 1, 2048), "int32"),
    device=device_of("torch", "sm_90"),
)
V4_PREFILL = {"q": FakeArray((4096, 64, 512), "bfloat16"), "kv": FakeArray((512, 64, 1, 584), "uint8")}


@pytest.mark.parametrize(
    ("changed", "want"),
    [
        ({}, True),
        (V4_PREFILL, True),
        ({"device": device_of("jax", "sm_90")}, True),
        ({"device": device_of("torch", "sm_80")}, False),  # no measurement shows that decoding first is faster on sm_80
        ({"q": FakeArray((4096, 16, 576), "bfloat16")}, False),  # no measurement shows that it is faster with 16 heads
        ({"q": FakeArray((4096, 128, 576), "float16")}, False),
        ({"kv": FakeArray((512, 64, 1, 576), "bfloat16")}, False),  # a plain cache needs no decoding
        ({"d_v": 576}, False),
        ({"kv": FakeArray((8192, 64, 1, 656), "uint8")}, True),  # each slot is listed 16 times on average
        ({"kv": FakeArray((8193, 64, 1, 656), "uint8")}, False),
        ({"indices": FakeArray((4096, 1, 16384), "int32"), "kv": FakeArray((14168, 64, 1, 656), "uint8")}, True),
        ({"indices": FakeArray((4096, 1, 16384), "int32"), "kv": FakeArray((14170, 64, 1, 656), "uint8")}, False),
        # Too few entries in all lists together.
        ({"indices": FakeArray((4096, 1, 31), "int32"), "kv": FakeArray((2, 64, 1, 656), "uint8")}, False),
    ],
)
def test_a_cache_is_decoded_first_where_its_rows_are_listed_often(changed: dict[str, Any], want: bool) -> None:
    module = importlib.import_module("ragged_attention.kernels_triton.sparse_mla_prefill")
    call = dataclasses.replace(PREFILL, **changed)
    assert module.heuristic(call).decoded == want
    assert not module.invariant_tile(call).decoded  # otherwise the choice would depend on the number of queries


def test_a_plain_cache_is_not_decoded() -> None:
    with pytest.raises(ra.InvalidInput, match=r"^expected decoded=False with a plain cache, got True$"):
        runner_for("triton", "torch").run(
            "sparse_mla_prefill", PrefillSpec(page_size=4).build(), options={"decoded": True}
        )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of NaN in the interpreter
@pytest.mark.parametrize("scale", [1.0, 2.0**100, 1e-30, float("nan"), float("inf")])
@pytest.mark.parametrize("listed", [True, False])
def test_decoded_rows_of_every_code(listed: bool, scale: float) -> None:
    """NaN codes and scales of any size affect the queries that list their rows, and no other queries."""
    rng = np.random.default_rng(0)
    cache = rng.integers(0, 256, (4, 5, 1, 656), np.uint8)
    cache[..., 528:] = 0
    cache[..., 512:528] = np.full(4, scale, np.float32).view(np.uint8)
    cache[:2] = quantize_mla_cache(rng.standard_normal((2, 5, 1, 576), np.float32) / 10, "fp8_v32")
    indices = np.array([[[0, 9, 3, 10 if listed else 5]], [[7, 7, 2, -1]]], np.int32)
    arguments = {"q": rng.standard_normal((2, 3, 576), np.float32), "kv": cache, "indices": indices}
    taken = {name: torch.from_numpy(array) for name, array in arguments.items()}
    run = importlib.import_module("ragged_attention.torch").sparse_mla_prefill
    got = run(**taken, backend="triton", options={"decoded": True})
    want = sparse_mla_prefill(**arguments)
    for index, name in ((0, "out"), (2, "lse")):  # max_logits, at index 1, is left out because it ignores NaN
        agrees(got[index].numpy(), want[index], f"prefill {name}", name)
    assert all(np.isfinite(result[1].numpy()).all() for result in got)
    assert np.isfinite(got[0][0].numpy()).all() != listed


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize(("heads", "topk"), [(16, 2048), (16, 2000), (64, 2048), (128, 512)])
def test_every_split_of_a_list_has_keys(batch: int, heads: int, topk: int) -> None:
    sample = LatentSample(num_q_heads=heads, topk=topk, num_tokens=batch, max_num_seqs=batch)
    module = importlib.import_module("ragged_attention.kernels_triton.mla_decode")
    tile = module.heuristic(sample.call("mla_decode", device_of("torch", "sm_90")))
    blocks = -(-topk // tile.block_kv)
    assert -(-blocks // -(-blocks // tile.num_splits)) == tile.num_splits


@pytest.mark.parametrize(
    ("heads", "ranges", "cache_format", "rows"),
    [
        (128, None, "plain", 64),
        (128, 1, "plain", 64),  # one range, which all rows of a tile share
        (16, 1, "plain", 32),
        (128, 2, "plain", 32),
        (128, 2, "fp8_v32", 16),
        (64, 2, "fp8_v4", 16),
    ],
)
def test_latents_have_fewer_rows_if_the_loop_looks_at_ranges(
    heads: int, ranges: int | None, cache_format: str, rows: int
) -> None:
    """Tiles of latents have fewer rows if a loop checks several ranges.

    With more rows the accumulators would spill, as docs/compile_matrix.md shows for each GPU.
    """
    sample = LatentSample(
        num_q_heads=heads,
        topk=0,
        num_tokens=300,
        max_num_seqs=3,
        key_ranges=ranges,
        causal=True,
        cache_format=cache_format,
    )
    module = importlib.import_module("ragged_attention.kernels_triton.ragged_mla_attention")
    tile = module.heuristic(sample.call("ragged_mla_attention", device_of("torch", "sm_90")))
    assert (tile.block_h, tile.split_block_h) == (rows, rows)


LATENTS, COMBINE = "ragged_latent_kernel", "combine_kernel"


@pytest.mark.parametrize(
    ("heads", "tokens", "max_q_len", "max_len", "kernels"),
    [
        (128, 32, 1, 4096, [LATENTS, COMBINE]),
        (16, 32, 1, 4096, [LATENTS, COMBINE]),
        (16, 32, 1, 64, [LATENTS]),  # too few keys for splits
        (128, 4096, None, 4096, [LATENTS, COMBINE]),  # prompts and single tokens use the same tile
        (4, 4096, None, 4096, [LATENTS, LATENTS, COMBINE]),
    ],
)
def test_what_ragged_latents_launch(
    heads: int, tokens: int, max_q_len: int | None, max_len: int, kernels: list[str]
) -> None:
    sample = LatentSample(cache_format="plain", num_q_heads=heads, num_tokens=tokens, max_len=max_len, causal=True)
    call = sample.call("ragged_mla_attention", device_of("torch", "sm_90"), max_q_len=max_q_len)
    assert [launch.name for launch in compiling.record(call)] == kernels


# Decodes and drafts of very different lengths, prompts, and sequences without queries or keys.
UNEVEN = ((1, 3), (2, 90), (1, 0), (30, 40), (0, 9), (1, 130), (3, 17), (1, 1), (70, 70))


@pytest.mark.parametrize("limit", [None, "1"])  # "1" is a wrong bound on the query lengths
@pytest.mark.parametrize(
    "options",
    [
        {"num_splits": 1},
        {"num_splits": 2},  # few sequences have more than one split
        {"num_splits": 9, "split_rows": 20, "block_h": 32},  # long and short sequences use different tiles
        {
            "num_splits": 9,
            "split_rows": 20,
            "split_block_h": 32,
            "block_h": 32,
        },  # all sequences share one tile and launch
        {"num_splits": 3, "split_rows": 1000},  # all sequences are short
        {"num_splits": 3, "invariant": True},
    ],
    ids=str,
)
def test_ragged_latents_in_parts(options: dict[str, Any], limit: str | None) -> None:
    tables = Spec(lens=UNEVEN, group=5, dtype="bfloat16", sliding_window=80, limit=limit, poison="nan", padding=2)
    check_attention(runner_for("triton", "torch"), RaggedLatentSpec(tables=tables).build(), options)


MANY = tuple((1, 40 + 9 * number) for number in range(12))


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("latent", [False, True], ids=["keys and values", "latents"])
def test_splits_of_more_sequences_than_a_program_sums_over(
    latent: bool, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches with more sequences than a program sums over get no splits. A lower limit stands in for the real 4096."""
    operation = "ragged_mla_attention" if latent else "ragged_paged_attention"
    for module in (_splits, dispatch.load(operation, "triton")):
        monkeypatch.setattr(module, "SEQUENCES", (4, 8))
    spec = Spec(lens=MANY, group=2, dtype="float32", poison="nan")
    batch = RaggedLatentSpec(tables=spec).build() if latent else spec.build()
    segments = {"segment_kv": 64} if invariant else {}
    options = {"num_splits": 3, "invariant": invariant} if latent else {"num_splits": 3, **segments}
    check_attention(runner_for("triton", "torch"), batch, options)


@pytest.mark.parametrize("window", [None, 100, 300, 5000])
@pytest.mark.parametrize("operation", ["ragged_mla_attention", "mla_decode", "ragged_paged_attention"])
def test_no_batch_invariant_tile_depends_on_the_page_table(operation: str, window: int | None) -> None:
    def tile(max_len: int) -> Any:
        sample: Any = Sample if operation == "ragged_paged_attention" else LatentSample
        latent = {} if sample is Sample else {"topk": 0, "causal": True}
        call = sample(max_len=max_len, sliding_window=window, **latent).call(operation, device_of("torch", "sm_90"))
        module: Any = dispatch.load(operation, "triton")
        return dataclasses.replace(module.invariant_tile(call), num_splits=1)

    assert tile(256) == tile(4096) == tile(2**20)  # `num_splits` is left out, because 256 keys need no splits


@triton.jit
def count_kernel(
    cu_q_lens_ptr, kv_lens_ptr, counts_ptr, each_ptr, num_seqs, num_tokens, max_num_seqs, capacity, num_splits,
    MASK: tl.constexpr, DIVISION: tl.constexpr,
):  # fmt: skip
    batch = _splits.Batch(cu_q_lens_ptr, kv_lens_ptr, num_seqs, max_num_seqs, num_tokens, capacity)
    mask = _mask.Mask(0)  # pyright: ignore[reportArgumentType]
    counts, each = _splits.balanced_splits(batch, mask, num_splits, MASK, DIVISION)
    tl.store(counts_ptr + tl.arange(0, DIVISION.MAX_SEQS), counts)  # pyright: ignore[reportAttributeAccessIssue]
    tl.store(each_ptr, each)


SIZES = {"GROUP": 4, "SHORT_ROWS": 16, "BLOCK_KV": 64, "SPLIT_KV": True, "MIN_BLOCKS": 4, "MAX_SEQS": 128}
CAUSAL = _mask.MaskKind(CAUSAL=True, HAS_WINDOW=False)
HUGE = 2**31 - 2**16  # the most keys that a sequence can have


@pytest.mark.parametrize("alone", [False, True], ids=["beside the tile kernel", "alone"])
@pytest.mark.parametrize(
    ("lens", "num_splits", "each", "counts"),
    [
        ([1000] * 8, 8, 16, [1] * 8),  # as many splits as requested
        ([1000] * 8, 1000, 4, [4] * 8),  # no split has fewer than 256 keys
        ([1000] * 7 + [10**6], 8, 1968, [1] * 7 + [8]),  # splits follow the actual lengths
        ([0, 1, 64, 65], 4, 4, [1] * 4),  # a sequence without keys has a program too
        ([HUGE] * 2, 4, HUGE // 64 // 2, [2] * 2),
        ([HUGE] * 64, 2, (2**31 - 1) // 64, [1] * 64),  # no 32-bit integer overflows
        ([HUGE, 5], 132, -(-(HUGE // 64 + 1) // 132), [132, 1]),
    ],
)
def test_keys_are_divided_by_the_lengths_of_all(
    lens: list[int], num_splits: int, each: int, counts: list[int], alone: bool
) -> None:
    """Keys are split by the lengths of all sequences, which have one query each.

    A prompt and a sequence that is not live follow. The sequence that is not live has no split. The prompt has one
    split if no tile kernel takes it.
    """
    count = len(lens) + 2
    edges = torch.tensor([*range(len(lens) + 1), len(lens) + 5, len(lens) + 6]).int()
    kv_lens, found, size = torch.tensor([*lens, 1000, 1000]).int(), torch.empty(128).int(), torch.empty(1).int()
    numbers = (count - 1, count + 4, count, HUGE, num_splits)
    division = _splits.Division(ALL_SEQUENCES=alone, **SIZES)
    count_kernel[(1,)](edges, kv_lens, found, size, *numbers, MASK=CAUSAL, DIVISION=division)
    assert found.tolist() == [*counts, int(alone)] + [0] * (127 - len(counts))
    assert size.item() == each
    assert sum(counts) <= num_splits + count


def test_few_keys_are_exact_enough_in_a_table_for_many() -> None:
    import ragged_attention.torch as rt

    random = torch.Generator().manual_seed(3)
    q = torch.randn(64, 8, 64, generator=random).bfloat16()
    kv_pages = torch.randn(16, 16, 4, 64, generator=random).bfloat16()
    page_indices = torch.arange(16, dtype=torch.int32).repeat(1, 16)  # a table for 4096 keys, of which 160 exist
    tables = (torch.tensor([160]).int(), page_indices, torch.tensor([0, 64]).int())
    got: Any = rt.ragged_paged_attention(q, kv_pages, *tables, sm_scale=1.0, backend="triton")
    values = [tensor.double().numpy() for tensor in (q, kv_pages)]
    want = definition(*values, *(table.numpy() for table in tables), sm_scale=1.0)
    agrees(np.asarray(got.float()), want, "bfloat16")


def test_few_keys_between_a_window_and_drafts_are_exact_enough() -> None:
    """The last of 96 drafts sees itself and 64 of the keys before the drafts, which are those in its window of 160."""
    import ragged_attention.torch as rt

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(96, 1, 16, generator=generator).bfloat16()
    pages = torch.randn(6, 50, 2, 16, generator=generator).bfloat16()
    lens, table, edges = torch.tensor([296]), torch.arange(6)[None], torch.tensor([0, 96])
    arguments = (q, pages, lens.int(), table.int(), edges.int())
    options: dict[str, Any] = {"draft_mask": torch.eye(96) > 0, "sliding_window": 160, "out_dtype": torch.float32}
    got = rt.ragged_paged_attention(*arguments, **options, backend="triton", options={"split_weights_below": 128})
    want = rt.ragged_paged_attention(*arguments, **options, backend="reference")
    assert (got - want)[64:].abs().max() < 1e-5  # with weights of a single bfloat16 term, the error would be 5e-4


@pytest.mark.parametrize(("smallest", "largest", "reach"), [(-20, -2, 1.0), (-3, 20, 1e-3), (-40, 3, 30.0)])
def test_scales_far_apart_are_honoured(smallest: int, largest: int, reach: float) -> None:
    """A visible key with a small scale keeps its precision beside an invisible key with a large scale."""
    import ragged_attention.torch as rt

    random = torch.Generator().manual_seed(1)
    cache = rt.quantize_mla_cache(torch.randn(6, 5, 1, 576, generator=random), "fp8_v32", backend="reference")
    exponents = torch.rand(6, 5, 4, generator=random) * (largest - smallest) + smallest - 9
    scales = exponents.exp2()
    scales[0, 0, 1] = 0
    cache[:, :, 0, 512:528] = scales.view(torch.uint8)
    q = (torch.randn(3, 2, 5, 576, generator=random) * reach).bfloat16()
    indices = torch.randint(-2, 30, (3, 2, 40), dtype=torch.int32, generator=random)
    call = {"indices": indices, "sm_scale": 0.5 / max(1, reach) / 2 ** max(0, largest)}
    out, lse = rt.mla_decode(q, cache, backend="triton", **call)
    want, want_lse = rt.mla_decode(q.float(), cache, backend="reference", **call)
    assert float((out.double() - want).norm() / want.norm()) < 2**-9  # the output's own rounding
    agrees(lse.numpy(), want_lse.numpy(), "decode lse", "lse")


@pytest.mark.parametrize("name", ["int4_token_head", "nvfp4"])
def test_rows_of_4_bit_codes_may_begin_at_odd_addresses(name: str) -> None:
    """Attention reads such rows two bytes at a time. A write copies no pages and changes only the rows."""
    spec = Spec(lens=((1, 9), (3, 7)), stored=(name, name), combined=False, num_kv_heads=2)
    batch, tables = spec.build(), ("kv_lens", "page_indices", "cu_q_lens")
    scales = [torch.from_numpy(array) for array in (batch.k_scale_pages, batch.v_scale_pages)]
    scales = [array.view(torch.float8_e4m3fn) if array.dtype == torch.uint8 else array for array in scales]
    pages = [torch.from_numpy(array) for array in batch.kv_pages]
    memory = [torch.full((*array.shape[:-1], array.shape[-1] + 1), 0xEE, dtype=torch.uint8) for array in pages]
    odd = tuple(array[..., 1:] for array in memory)
    for given, array in zip(odd, pages, strict=True):
        given.copy_(array)
    given = {name: torch.from_numpy(getattr(batch, name)) for name in tables}
    given |= {"k_scale_pages": scales[0], "v_scale_pages": scales[1], "backend": "triton"}
    q = torch.from_numpy(batch.q)
    assert torch.equal(rt.ragged_paged_attention(q, odd, **given), rt.ragged_paged_attention(q, tuple(pages), **given))
    rows = torch.randn(4, 2, 16)
    slots = torch.tensor([3, 0, 9, -1], dtype=torch.int32)
    for target in (odd, tuple(pages)):
        rt.write_kv_pages(rows, rows, target, slots, k_scale_pages=scales[0], v_scale_pages=scales[1], backend="triton")
    for given_pages, array, whole in zip(odd, pages, memory, strict=True):
        assert torch.equal(given_pages, array)
        assert (whole[..., 0] == 0xEE).all()


@pytest.mark.parametrize("cache_layout", ["token", "page"])
def test_a_row_of_the_table_of_formats_is_all_that_a_new_format_needs(cache_layout: str, monkeypatch: Any) -> None:
    """A new format works without new code: here 4-bit codes beside rotary columns, which no built-in format has."""
    import ragged_attention.torch as rt

    form = CacheFormat(
        name="fp4_rotary", codes="float4_e2m1fn", values=512, rotary=64, group=16, scales="float8_e4m3fn",
        token_bytes=416, layouts=("token", "page"),
    )  # fmt: skip
    monkeypatch.setitem(CACHE_FORMATS, form.name, form)
    random = torch.Generator().manual_seed(3)
    kv = torch.randn(4, 5, 1, 576, generator=random)
    cache, want = (
        rt.quantize_mla_cache(kv, form.name, cache_layout=cache_layout, backend=backend)
        for backend in ("triton", "reference")
    )
    assert torch.equal(cache, want)
    q = torch.randn(2, 16, 576, generator=random).bfloat16()
    indices = torch.randint(-1, 20, (2, 1, 24), dtype=torch.int32, generator=random)
    call: dict[str, Any] = {"cache_format": form.name, "cache_layout": cache_layout, "d_v": 576}
    exact, _, exact_lse = rt.sparse_mla_prefill(q.float(), cache, indices, backend="reference", **call)
    for decoded in (False, True):
        out, _, lse = rt.sparse_mla_prefill(q, cache, indices, backend="triton", options={"decoded": decoded}, **call)
        assert float((out.double() - exact).norm() / exact.norm()) < 2**-8
        agrees(lse.numpy(), exact_lse.numpy(), "prefill lse", "lse")


@pytest.mark.parametrize("options", [{"num_splits": 7, "block": 64}, {"num_splits": 1, "block": 256}])
@pytest.mark.parametrize("kind", ["few values", "outliers", "nothing", "close"])
def test_a_row_may_be_chosen_from_in_parts(kind: str, options: dict[str, int]) -> None:
    """Top-k is exact for any number of splits per row, even if it takes several passes to find the smallest winner."""
    import ragged_attention.torch as rt

    random = torch.Generator().manual_seed(2)
    logits = torch.randn(5, 1500, generator=random)
    if kind == "few values":
        logits = logits.round()
    elif kind == "outliers":
        logits[:, ::97] = 3e38 * logits[:, ::97].sign()
    elif kind == "nothing":
        logits[1:4] = torch.tensor([float("-inf"), float("nan"), -0.0])[:, None]
    else:
        logits = 1 + (logits * 20).round() * 2**-23
    for top_k in (1, 37, 300):
        found = rt.top_k_indices(logits, top_k, backend="triton", options=options)
        assert torch.equal(found, rt.top_k_indices(logits, top_k, backend="reference"))


def index_call(num_tokens: int, *, packed: bool) -> dict[str, Any]:
    """A call whose logits are exact in float32, with packed keys or with the pages of two sequences."""
    random = np.random.default_rng(3)

    def integers(*shape: int) -> Any:
        return torch.from_numpy(random.integers(-2, 3, shape).astype(np.float32))

    call = {"q": integers(num_tokens, 5, 16), "weights": integers(num_tokens, 5)}
    if packed:
        starts = torch.arange(num_tokens, dtype=torch.int32) * 3
        return call | {"keys": integers(90, 16), "starts": starts, "stops": starts + 33}
    return call | {
        "keys": integers(9, 16, 16),
        "page_indices": torch.tensor([[3, 0, 7, 1], [8, 99, 2, 5]], dtype=torch.int32),
        "kv_lens": torch.tensor([50, 64], dtype=torch.int32),
        "cu_q_lens": torch.tensor([0, 4, num_tokens - 1], dtype=torch.int32),
    }


@pytest.mark.parametrize("packed", [False, True], ids=["pages", "packed"])
@pytest.mark.parametrize("walk", [False, True], ids=["over tokens", "over keys"])
def test_both_ways_to_the_logits_are_the_definition(walk: bool, packed: bool) -> None:
    import ragged_attention.torch as rt

    call = index_call(13, packed=packed)
    want = rt.indexer_logits(**call, backend="reference")
    for more in ({"block_n": 16, "block_t": 2, "num_parts": 3}, {"block_n": 64, "block_t": 16}):
        assert torch.equal(rt.indexer_logits(**call, backend="triton", options={"walk": walk, **more}), want)


@pytest.mark.parametrize("packed", [False, True], ids=["pages", "packed"])
@pytest.mark.parametrize("walk", [False, True], ids=["over tokens", "over keys"])
@pytest.mark.parametrize("listed", [False, True], ids=["all", "candidates"])
def test_logits_may_be_made_in_chunks(walk: bool, packed: bool, listed: bool) -> None:
    """A chunk's results do not depend on what the previous chunk left in memory."""
    import ragged_attention.torch as rt

    call: dict[str, Any] = index_call(13, packed=packed) | {"top_k": 7}
    if listed:
        lists = torch.tensor([3, 3, -1, 0, 2**31 - 1, 5, -(2**31), 40], dtype=torch.int32)
        call |= {"candidate_blocks": lists.repeat(13, 1), "candidate_block_size": 6}
    want = rt.indexer_topk(**call, backend="reference")
    for more in ({"chunk": 5, "num_splits": 2, "select_block": 64}, {"chunk": 13, "block_t": 4}):
        assert torch.equal(rt.indexer_topk(**call, backend="triton", options={"walk": walk, **more}), want)


def test_candidates_beyond_counting_are_declined() -> None:
    def array(*shape: int, dtype: str = "int32") -> FakeArray:
        return FakeArray(shape, dtype)

    call = IndexerTopk(
        q=array(1, 1, 16, dtype="bfloat16"), keys=array(2**20, 16, dtype="bfloat16"), top_k=1,
        weights=array(1, 1, dtype="float32"), starts=array(1), stops=array(1), candidate_blocks=array(1, 2048),
        candidate_block_size=2**21, device=device_of("torch", "sm_90"),
    )  # fmt: skip
    module = importlib.import_module("ragged_attention.kernels_triton.indexer_topk")
    assert module.why_not(call) == "expected candidate_blocks of at most 1073741824 positions, got 2147483648"


def test_threads_may_launch_at_the_same_time() -> None:
    """Threads may launch kernels at the same time. A lock protects the interpreter, which is not thread-safe."""
    front = importlib.import_module("ragged_attention.torch")
    outs, lses = torch.randn(2, 2, 2, 16), torch.randn(2, 2, 2)

    def merged(_: int) -> Any:
        return front.merge_attention_states(outs, lses, backend="triton")[0]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(merged, range(24)))
    finally:
        sys.setswitchinterval(before)
    assert all(torch.equal(each, found[0]) for each in found)
