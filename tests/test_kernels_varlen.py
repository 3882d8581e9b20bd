"""Properties of the Triton kernels for attention without a cache: head widths, far strides, small blocks."""

import itertools
from typing import Any

import numpy as np
import pytest

from ragged_attention.reference.varlen_attention import varlen_attention as definition
from ragged_attention.reference.varlen_attention_backward import varlen_attention_backward as gradient
from ragged_attention.testing.compare import agrees
from ragged_attention.tools.samples import VarlenSample, device_of

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from ragged_attention.kernels_triton import _bias_gradient, _varlen, varlen_attention, varlen_attention_backward  # noqa: E402
from ragged_attention.kernels_triton._mask import MaskKind  # noqa: E402
from ragged_attention.kernels_triton._selected import list_kind  # noqa: E402
from ragged_attention.torch._launcher import LAUNCHER  # noqa: E402


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (1, (16, 0)), (16, (16, 0)), (24, (32, 0)), (64, (64, 0)), (72, (64, 16)), (80, (64, 16)), (96, (64, 32)),
        (128, (128, 0)), (160, (128, 32)), (192, (128, 64)), (200, (256, 0)), (256, (256, 0)),
    ],
)  # fmt: skip
def test_a_head_is_held_in_the_narrowest_two_parts(width: int, expected: tuple[int, int]) -> None:
    assert _varlen.parts(width) == expected
    assert _varlen.parts(width, split=False) == (max(16, 1 << (width - 1).bit_length()), 0)
    assert width <= sum(expected) < 2 * max(width, 16)


@pytest.mark.parametrize("operation", ["varlen_attention", "varlen_attention_backward"])
def test_float64_is_for_others(operation: str) -> None:
    module = {"varlen_attention": varlen_attention, "varlen_attention_backward": varlen_attention_backward}[operation]
    call = VarlenSample(dtype="float64").call(operation, device_of("torch", "sm_90"))
    assert module.why_not(call) == "expected q.dtype to be bfloat16, float16 or float32, got float64"
    assert module.why_not(VarlenSample().call(operation, device_of("torch", "sm_90"))) is None


@pytest.mark.parametrize(("strides", "copied"), [((64, 16, 1), False), ((2**23, 16, 1), True), ((16, 2**29, 1), True)])
def test_rows_too_far_apart_are_copied(strides: tuple[int, int, int], copied: bool) -> None:
    array = torch.empty_strided((5, 4, 16), strides, device="meta")
    assert (_varlen.near(array, 4, LAUNCHER) is not array) == copied


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950"])
@pytest.mark.parametrize(
    ("dtype", "widths"), [*itertools.product(("bfloat16", "float32"), ((128, 128), (256, 256), (1, 7)))]
)
def test_blocks_fit_the_shared_memory(arch: str, dtype: str, widths: tuple[int, int]) -> None:
    sample = VarlenSample(dtype=dtype, head_dim=widths[0], d_v=widths[1])
    call: Any = sample.call("varlen_attention_backward", device_of("torch", arch))
    tile = varlen_attention_backward.heuristic(call)
    size = 4 if dtype == "float32" else 2
    row = size * _varlen.columns(call)
    for kept, step, stages in (
        (tile.block_kv, tile.block_q, tile.num_stages),
        (tile.dq_block_q, tile.dq_block_kv, tile.dq_num_stages),
    ):
        assert (kept + stages * step) * row <= call.device.shared_memory


SMALL: dict[str, Any] = {"block_q": 16, "block_kv": 16}
# Lengths with whole blocks, with blocks masked at either end, with rows that see no key, and without queries.
LENGTHS = ((5, 0, 34, 2), (2, 3, 37, 18))


@pytest.mark.parametrize(
    ("heads", "widths", "options"),
    [
        ((2, 1), (24, 16), {"causal": True}),
        ((3, 1), (72, 40), {"causal": True, "sliding_window": 21, "sinks": True, "d_lse": True}),
        ((1, 1), (16, 80), {"sliding_window": 4, "soft_cap": 1.5, "sm_scale": -0.3, "d_lse": True}),
        ((2, 1), (16, 16), {"sm_scale": 0.0, "sinks": True}),
        ((2, 1), (16, 16), {"causal": True, "bias": (9,), "sinks": True, "d_lse": True}),
        ((4, 2), (16, 24), {"sliding_window": 4, "bias": (60,), "soft_cap": 1.5}),
        ((2, 2), (16, 16), {"causal": True, "bias": (43, 12)}),
        ((2, 1), (16, 16), {"bias": (43, 60), "alibi_slopes": True}),
        ((2, 1), (24, 16), {"causal": True, "lists": (5, 4, 8)}),
        ((40, 2), (16, 40), {"lists": (3, 8, 1), "sinks": True, "d_lse": True}),
        ((3, 1), (16, 16), {"causal": True, "sliding_window": 9, "lists": (9, 1, 4), "soft_cap": 1.5}),
        ((4, 2), (16, 16), {"causal": True, "bias": (9,), "lists": (2, 16, 4), "alibi_slopes": True}),
        ((2, 2), (16, 16), {"bias": (43, 12), "lists": (6, 2, 2)}),
    ],
)
def test_small_blocks_give_what_the_definition_says(
    heads: tuple[int, int], widths: tuple[int, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ragged_attention.torch as rt

    monkeypatch.setattr(_bias_gradient, "PROGRAMS", 4)  # each program then has several blocks
    generator = np.random.default_rng(3)
    edges = [np.concatenate([[0], np.cumsum(lens)]).astype(np.int32) for lens in LENGTHS]
    tokens, keys = edges[0][-1] + 2, edges[1][-1] + 3

    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(np.float32)

    arrays = {"q": normal(tokens, heads[0], widths[0]), "k": normal(keys, heads[1], widths[0])}
    arrays |= {"v": normal(keys, heads[1], widths[1]), "cu_q_lens": edges[0], "cu_kv_lens": edges[1]}
    options = dict(options)
    extra: dict[str, Any] = {"d_lse": normal(tokens, heads[0])} if options.pop("d_lse", False) else {}
    arrays |= {name: normal(heads[0]) for name in ("sinks", "alibi_slopes") if options.pop(name, False)}
    if bias := options.pop("bias", None):
        arrays["relative_bias"] = normal(*bias[:-1], heads[0], bias[-1])
        extra["return_d_relative_bias"] = True
    joined: dict[str, int] = {}
    if lists := options.pop("lists", None):
        length, options["block_size"], joined["joined_tokens"] = lists
        shape = (tokens, heads[1], length)
        arrays["selected"] = generator.integers(-2, 40 // options["block_size"], shape).astype(np.int32)
    given = {name: torch.from_numpy(array) for name, array in arrays.items()}
    out, lse = rt.varlen_attention(**given, **options, return_lse=True, backend="triton", options=SMALL | joined)
    for got, want, name in zip((out, lse), definition(**arrays, **options), ("out", "lse"), strict=True):
        agrees(got.numpy(), want, "float32", name)

    extra |= {"d_out": normal(tokens, heads[0], widths[1])}
    more = {name: torch.from_numpy(array) if hasattr(array, "shape") else array for name, array in extra.items()}
    tile = SMALL | {f"dq_{name}": size for name, size in SMALL.items()} | joined
    found = rt.varlen_attention_backward(
        **given, **more, out=out, lse=lse, **options, backend="triton", options=tile
    )  # fmt: skip
    wanted = gradient(**arrays, **extra, out=out.numpy(), lse=lse.numpy(), **options)
    for got, want, name in zip(found, wanted, ("dq", "dk", "dv", "d_sinks", "d_bias"), strict=True):
        assert (got is None) == (want is None)
        if got is not None and want is not None:
            agrees(got.numpy(), want, "float32", name)


@pytest.mark.parametrize(
    ("arch", "dtype", "width", "columns"),
    [("sm_86", "float32", 512, 1024), ("sm_86", "float32", 320, None), ("sm_86", "bfloat16", 512, None),
     ("sm_90", "float32", 512, None), ("gfx942", "float32", 512, None)],
)  # fmt: skip
def test_the_gradient_refuses_rows_that_do_not_fit_shared_memory(
    arch: str, dtype: str, width: int, columns: int | None
) -> None:
    sample = VarlenSample(dtype=dtype, head_dim=width, d_v=width)
    call: Any = sample.call("varlen_attention_backward", device_of("torch", arch))
    reason = varlen_attention_backward.why_not(call)
    expected = "expected float32 rows that fit 101376 bytes of shared memory, 16 at a time, got 1024 columns of queries"
    assert reason is None if columns is None else str(reason).startswith(expected)


@pytest.mark.parametrize(
    ("operation", "sizes", "reason"),
    [
        ("varlen_attention", {"selected": 2**15}, None),
        ("varlen_attention", {"selected": 2**15 + 1}, "expected lists of at most 32768 blocks, got 32769"),
        ("varlen_attention_backward", {"selected": 2**15 + 1}, "expected lists of at most 32768 blocks, got 32769"),
        (
            "varlen_attention_backward",
            {"selected": 2**10, "num_tokens": 2**18},
            "expected fewer than 2**31 - 1 entries",
        ),
    ],
)
def test_lists_of_blocks_that_cannot_be_sorted_are_refused(
    operation: str, sizes: dict[str, Any], reason: str | None
) -> None:
    call: Any = VarlenSample(block_size=16, **sizes).call(operation, device_of("torch", "sm_90"))
    module: Any = varlen_attention_backward if operation.endswith("backward") else varlen_attention
    found = module.why_not(call)
    assert found is None if reason is None else str(found).startswith(reason)


@pytest.mark.parametrize(
    ("keys", "entries", "ranges", "tokens"),
    [(4096, 16, None, 16), (4096, 1000, None, 4), (4096, 2**14, None, 1), (2**30, 16, None, 1), (4096, 16, 1, 1)],
)
def test_lists_are_joined_while_a_program_can_sort_them(
    keys: int, entries: int, ranges: int | None, tokens: int
) -> None:
    sample = VarlenSample(block_size=1, selected=entries, key_ranges=ranges, causal=not ranges)
    call: Any = sample.call("varlen_attention", device_of("torch", "sm_90"))
    found = list_kind(call, 16, keys, MaskKind(CAUSAL=True, HAS_WINDOW=False)).plain
    assert tokens == found.TOKENS
    assert tokens * entries == found.WIDTH
