"""Masks of transformers on our operations: for every mask, the result is that of eager attention with its own mask."""

import copy
import inspect
import os
import sys
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache, masking_utils  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.models.llama.modeling_llama import eager_attention_forward  # noqa: E402

from ragged_attention.demo.tiny import tiny_model  # noqa: E402
from ragged_attention.errors import Unsupported  # noqa: E402
from ragged_attention.integrations import transformers as ragged  # noqa: E402
from ragged_attention.integrations.transformers import _calls, _continuous, _masks  # noqa: E402
from ragged_attention.integrations.transformers._attention import attention  # noqa: E402
from tests.with_transformers import registered as registered  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("registered")]
ROWS, HEADS, GROUPS, WIDTH, LENGTH, WINDOW = 3, 4, 2, 16, 9, 4
CACHE = "cache" if "cache" in inspect.signature(masking_utils.create_causal_mask).parameters else "past_key_values"
MAKERS = {name: getattr(masking_utils, f"create_{name}_mask") for name in (
    "causal", "sliding_window_causal", "chunked_causal", "bidirectional", "bidirectional_sliding_window"
)}  # fmt: skip


def config(name: str, **options: Any) -> Any:
    made = transformers.MistralConfig(
        hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, num_key_value_heads=GROUPS, num_hidden_layers=1, **options
    )  # fmt: skip
    made._attn_implementation = name
    return made


def random(*size: int, seed: int = 0, dtype: Any = None) -> Any:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype or torch.float32)


def module_of(causal: bool | None) -> Any:
    module = torch.nn.Module().eval()
    module.num_key_value_groups = HEADS // GROUPS  # type: ignore[assignment]
    if causal is not None:
        module.is_causal = causal  # type: ignore[assignment]
    return module


def padding(kind: str, length: int = LENGTH) -> Any:
    shown = torch.ones(ROWS, length, dtype=torch.long)
    if kind == "left":
        shown[0, :3] = shown[2, :5] = 0
    elif kind == "right":
        shown[0, -2:] = shown[2, -1:] = 0
    elif kind == "holes":
        shown[0, 2:4] = shown[1, :1] = shown[1, 4:5] = 0
    return None if kind == "none" else shown


def cache_of(kind: str, past: int, windowed: bool, options: dict[str, Any]) -> Any:
    if kind == "none":
        return None
    if kind == "static":
        made = StaticCache(config("eager", **options), max_cache_len=16)
    else:
        made = DynamicCache(config=config("eager", **options)) if windowed else DynamicCache()
    if past:
        made.update(random(ROWS, GROUPS, past, WIDTH), random(ROWS, GROUPS, past, WIDTH), 0)
    return made


def masks(maker: str, q_len: int, cache: Any, options: dict[str, Any], **arguments: Any) -> tuple[Any, Any]:
    """The mask for eager attention, and the mask for our operations."""
    embedded = torch.zeros(ROWS, q_len, HEADS * WIDTH)
    return tuple(  # type: ignore[return-value]
        MAKERS[maker](config(name, **options), inputs_embeds=embedded, **{CACHE: cache}, **arguments)
        for name in ("eager", ragged.NAME)
    )


def assert_attends_alike(whole: Any, ours: Any, q_len: int, kv_len: int, judged: Any = None) -> None:
    """Assert that both masks give equal attention, whether a module's `is_causal` is True, False or missing."""
    q, k, v = random(ROWS, HEADS, q_len, WIDTH), *(random(ROWS, GROUPS, kv_len, WIDTH, seed=s) for s in (1, 2))
    if whole is not None:
        assert torch.equal(ours + 0, whole)
        sees = (whole == 0).any(-1)[:, 0].expand(ROWS, -1)
        judged = sees if judged is None else sees & judged
    for causal in (True, False, None):
        module = module_of(causal)
        found, weights = attention(module, q, k, v, ours, scaling=0.3)
        expected, _ = eager_attention_forward(module, q, k, v, whole, scaling=0.3)
        assert weights is None
        assert found.isfinite().all()
        if judged is not None:
            found, expected = found[judged], expected[judged]
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("cached", ["none", "none+1", "dynamic+1", "dynamic+3", "static+0", "static+1", "static+3"])
@pytest.mark.parametrize("maker", MAKERS)
def test_masks_with_padding_over_every_cache(maker: str, cached: str) -> None:
    kind, _, new = cached.partition("+")
    past = 6 if new and int(new) and kind != "none" else 0
    q_len = int(new) if new and int(new) else LENGTH
    windowed = "sliding" in maker
    options = {"sliding_window": WINDOW if windowed else None, "attention_chunk_size": WINDOW, "layer_types": None}
    if maker == "chunked_causal":
        options["sliding_window"] = None
    for padded in ("none", "ones", "left", "right", "holes") if cached != "none+1" else ("none", "ones"):
        _calls.calls.clear()
        cache, shown = cache_of(kind, past, windowed, options), padding(padded, past + q_len)
        whole, ours = masks(maker, q_len, cache, options, attention_mask=shown)
        kv_len, _ = cache.get_mask_sizes(q_len, 0) if cache is not None else (q_len, 0)
        judged = None if shown is None or "bidirectional" in maker else shown[:, -q_len:].bool()
        assert_attends_alike(whole, ours, q_len, kv_len, judged)
        assert "dense" not in ragged.explain(), (padded, ragged.explain())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("maker", ["bidirectional", "bidirectional_sliding_window"])
def test_cross_attention_sees_the_whole_other_side(maker: str, causal: bool) -> None:
    for kv_len in (LENGTH - 4, LENGTH, LENGTH + 5):
        for padded in ("none", "ones", "left", "right"):
            for q_len in (1, LENGTH):
                other = torch.zeros(ROWS, kv_len, HEADS * WIDTH)
                whole, ours = masks(maker, q_len, None, {"sliding_window": WINDOW}, encoder_hidden_states=other,
                                    attention_mask=padding(padded, kv_len))  # fmt: skip
                assert_attends_alike(whole, ours, q_len, kv_len)
    assert "dense" not in ragged.explain()


@pytest.mark.parametrize("maker", ["causal", "sliding_window_causal", "chunked_causal"])
def test_packed_rows_and_functions_of_ones_own(maker: str) -> None:
    options = {"sliding_window": WINDOW, "attention_chunk_size": WINDOW}
    packed = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0, 1], [*range(9)], [0, 0, 1, 2, 3, 4, 5, 6, 0]])
    jumps = torch.tensor([[0, 1, 7, 8, 9, 10, 11, 12, 13]])
    blocks = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, 1]]).expand(ROWS, -1)
    first = masking_utils.padding_mask_function((torch.arange(LENGTH) < 2).expand(ROWS, -1))
    later = masking_utils.padding_mask_function((torch.arange(LENGTH) > 0).expand(ROWS, -1))
    arguments: dict[str, Any]
    for arguments in (
        {"position_ids": packed},
        {"position_ids": jumps},
        {"position_ids": packed, "block_sequence_ids": blocks},
        {"block_sequence_ids": blocks},
        {"or_mask_function": first},
        {"and_mask_function": later},
        {"position_ids": packed, "or_mask_function": first},
        {"position_ids": jumps, "attention_mask": padding("ones")},
        {"position_ids": packed, "attention_mask": padding("left")},
        {"allow_is_causal_skip": False},
    ):
        _calls.calls.clear()
        whole, ours = masks(maker, LENGTH, None, options, **{"attention_mask": None, **arguments})
        shown: Any = arguments.get("attention_mask")
        assert_attends_alike(whole, ours, LENGTH, LENGTH, None if shown is None else shown.bool())
        assert "dense" not in ragged.explain(), arguments
    cache = DynamicCache()
    whole, ours = masks("causal", LENGTH, cache, options, attention_mask=None, position_ids=packed)
    assert_attends_alike(whole, ours, LENGTH, LENGTH)


class Turning(torch.nn.Module):
    is_causal, num_key_value_groups = True, HEADS // GROUPS

    def forward(self, hidden_states: Any, position_embeddings: Any = None) -> Any: ...


def test_positions_are_no_packed_sequences_where_a_mask_or_a_cache_is_given() -> None:
    """Restarting positions separate packed sequences only in a rotary layer that has neither a mask nor a cache.

    In that case the model has left the packed sequences out of its mask.
    """
    q, k = random(1, HEADS, 5, WIDTH), random(1, GROUPS, 5, WIDTH, seed=1)
    apart, jumps, text = (torch.tensor([x]) for x in ([0, 1, 0, 1, 2], [0, 1, 7, 8, 9], [0, 1, 2, 3, 4]))
    ones = torch.ones(1, 5, dtype=torch.bool)
    for module, shown, positions, use_cache, splits in (
        (Turning(), None, apart, False, True), (module_of(True), None, apart, False, False),
        (Turning(), None, jumps, False, False), (Turning(), None, text, False, False),
        (Turning(), ones, apart, False, False), (Turning(), None, apart, True, False),
        (Turning(), None, apart, None, False),
    ):  # fmt: skip
        ours = _masks.mask(1, 5, 5, attention_mask=shown)
        found, _ = attention(module, q, k, k, ours, position_ids=positions, use_cache=use_cache)
        whole = _masks.mask(1, 5, 5) + 0
        if splits:
            whole[:, :, 2:, :2] = -torch.inf
        torch.testing.assert_close(found, eager_attention_forward(module.eval(), q, k, k, whole, WIDTH**-0.5)[0])


def turned(tensor: Any) -> Any:
    """A copy of the tensor in which the last stride is not 1."""
    return tensor.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize("widths", [(512, 512), (264, 16), (12, 12), (8, 24), (520, 16)], ids=str)
@pytest.mark.parametrize("maker", ["causal", "sliding_window_causal", "bidirectional"])
def test_heads_of_any_size(maker: str, widths: tuple[int, int]) -> None:
    """Heads of any size work. Single queries run over pages if these support the sizes, else as packed sequences.

    Beyond 512 dimensions attention is dense.
    """
    for q_len in (1, LENGTH):
        for padded in ("none", "left", "right") if q_len > 1 else ("none",):
            shown = padding(padded, q_len)
            whole, ours = masks(maker, q_len, None, {"sliding_window": WINDOW}, attention_mask=shown)
            q, k = random(ROWS, HEADS, q_len, widths[0]), random(ROWS, GROUPS, q_len, widths[0], seed=1)
            v = random(ROWS, GROUPS, q_len, widths[1], seed=2)
            expected, _ = eager_attention_forward(module_of(None), q, k, v, whole, scaling=0.1)
            _calls.calls.clear()
            found = [attention(module_of(None), q, k, v, ours, scaling=0.1)[0]]
            assert ("dense" in ragged.explain()) == (max(widths) > 512)
            found.append(attention(module_of(None), q.requires_grad_(), k, v, ours, scaling=0.1)[0])
            assert ("dense" in ragged.explain()) == (max(widths) > 512)
            q.requires_grad_(False)
            found.append(attention(module_of(None), q, turned(k), turned(v), ours, scaling=0.1)[0])
            judged = torch.ones(ROWS, q_len).bool() if shown is None or maker == "bidirectional" else shown.bool()
            for each in found:
                torch.testing.assert_close(each[judged], expected[judged], rtol=2e-5, atol=2e-5)


# ---- mask functions that are recognised


def test_functions_that_only_look_like_ours_are_not_taken_for_them() -> None:
    def sliding_window_overlay(size: int) -> Any:
        def inner_mask(b: Any, h: Any, q: Any, k: Any) -> Any:
            return k > q - size - 1

        return inner_mask

    functions = masking_utils.and_masks(sliding_window_overlay(2), masking_utils.causal_mask_function)
    assert _masks.rules_of(sliding_window_overlay(2)) is None
    assert _masks.rules_of(functions) is None
    mask = _masks.mask(1, 4, 4, mask_function=functions)
    assert [[number == 0 for number in row] for row in mask[0, 0].tolist()] == [
        [i - 2 <= j <= i for j in range(4)] for i in range(4)
    ]


def test_windows_are_those_of_the_function_and_no_others() -> None:
    v = torch.arange(5.0)[:, None].expand(5, WIDTH)[None, None]
    zero = torch.zeros(1, 1, 5, WIDTH)
    function = masking_utils.sliding_window_causal_mask_function(2)
    module = module_of(True)
    module.config, module.layer_idx = config("ragged", sliding_window=3), 0
    for mask, given, expected in (
        (_masks.mask(1, 5, 5, mask_function=function), None, [0, 0.5, 1.5, 2.5, 3.5]),
        (_masks.mask(1, 5, 5, mask_function=function), 4, [0, 0.5, 1.5, 2.5, 3.5]),
        (_masks.mask(1, 5, 5), 2, [0, 0.5, 1, 1.5, 2]),
    ):
        out, _ = attention(module, zero, zero, v, mask, sliding_window=given)
        torch.testing.assert_close(out[0, :, 0, 0], torch.tensor(expected))


def assert_ranges_alone(mask: Any) -> None:
    pattern = _masks.pattern_of(mask)
    assert pattern is not None
    assert pattern == _masks.Pattern(ranges=pattern.ranges)
    assert pattern.ranges is not None


@pytest.mark.parametrize("numbers", [[[0, 1, 0]], [[1, 0, 0]]], ids=["again", "down"])
def test_packed_tokens_that_do_not_lie_together_are_ranges(numbers: Any) -> None:
    function = masking_utils.and_masks(
        masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(torch.tensor(numbers))
    )
    mask = _masks.mask(1, 3, 3, mask_function=function)
    assert_ranges_alone(mask)
    assert mask[0, 0, 2, 0] == (0 if numbers[0][2] == numbers[0][0] else torch.finfo(mask.dtype).min)


def test_positions_alone_do_not_part_sequences() -> None:
    moved = masking_utils.remap_positions_for_packed_sequence(
        masking_utils.causal_mask_function, torch.tensor([[0, 1, 0]])
    )
    assert_ranges_alone(_masks.mask(1, 3, 3, mask_function=moved))
    odd = masking_utils.and_masks(
        masking_utils.packed_sequence_mask_function(torch.tensor([[0, 0, 0]])),
        masking_utils.remap_positions_for_packed_sequence(
            masking_utils.causal_mask_function, torch.tensor([[2, 1, 0]])
        ),
    )
    assert_ranges_alone(_masks.mask(1, 3, 3, mask_function=odd))


# ---- masks that models change


def test_a_mask_is_a_tensor_like_any_other() -> None:
    shown = torch.tensor([[False, True, True, True]])
    ours = _masks.mask(1, 4, 4, attention_mask=shown, dtype=torch.bfloat16)
    whole = masking_utils.eager_mask(1, 4, 4, attention_mask=shown, dtype=torch.bfloat16)
    assert ours.shape == (1, 1, 4, 4)
    assert ours.dtype == torch.bfloat16
    for use in (
        lambda mask: mask[:, :, 1:, :3], lambda mask: mask[:, 0], lambda mask: mask + 1, lambda mask: mask.bool(),
        lambda mask: mask.float(), lambda mask: torch.cat((mask, mask), 1), lambda mask: mask.expand(2, -1, -1, -1),
        lambda mask: torch.where(mask == 0, 1, 2), lambda mask: mask.transpose(2, 3),
    ):  # fmt: skip
        assert type(use(ours)) is torch.Tensor
        assert torch.equal(use(ours), use(whole))
    for keep in (
        lambda mask: mask[:, :, :, :4], lambda mask: mask[:], lambda mask: torch.narrow(mask, 3, 0, 4),
        lambda mask: mask.detach(), lambda mask: mask.to("cpu"), lambda mask: mask.clone(), copy.deepcopy,
    ):  # fmt: skip
        assert torch.equal(keep(ours) + 0, whole)
        assert _masks.pattern_of(keep(ours)) is not None
    assert "Mask(" in repr(ours)


@pytest.mark.parametrize("write", ["itself", "a part"])
def test_a_mask_that_is_written_to_is_taken_by_its_numbers(write: str) -> None:
    q, k = random(1, HEADS, 4, WIDTH), random(1, GROUPS, 4, WIDTH, seed=1)
    mask = _masks.mask(1, 4, 4)
    if write == "itself":
        mask.masked_fill_(torch.ones(1, 1, 4, 4).tril(-2).bool(), -1e9)
    else:
        mask[:, :, 2:].masked_fill_(torch.tensor([True, False, False, False]), -1e9)
    found, _ = attention(module_of(True), q, k, k, mask)
    expected, _ = eager_attention_forward(module_of(True), q, k, k, mask + 0, WIDTH**-0.5)
    torch.testing.assert_close(found, expected)
    assert (mask[0, 0, 3, 0] == -1e9).item()


def test_other_masks_are_taken_by_their_word() -> None:
    q, k = random(2, HEADS, 4, WIDTH), random(2, GROUPS, 6, WIDTH, seed=1)
    for mask in (
        random(2, 1, 4, 6), random(2, HEADS, 4, 6), random(1, 1, 4, 6), random(4, 6), random(2, 1, 1, 6),
        _masks.mask(1, 4, 6, 2).expand(2, -1, -1, -1), _masks.mask(1, 1, 6, 5),
    ):  # fmt: skip
        for mine in (mask, mask > -1):
            for causal in (True, False):
                found, _ = attention(module_of(causal), q, k, k, mine)
                expected, _ = sdpa_attention_forward(module_of(causal), q, k, k, mine + 0 if mine is mask else mine)
                torch.testing.assert_close(found, expected)
    for rows in ((1, 2), (2, 1)):  # learned queries or keys that all rows share
        q, k = random(rows[0], HEADS, 4, WIDTH), random(rows[1], GROUPS, 4, WIDTH, seed=1)
        for mask in (
            _masks.mask(2, 4, 4),
            _masks.mask(2, 4, 4, attention_mask=torch.arange(4) > torch.tensor([[-1], [0]])),
        ):
            found, _ = attention(module_of(True), q, k, k, mask)
            expected, _ = eager_attention_forward(module_of(True), q, k, k, mask + 0, WIDTH**-0.5)
            torch.testing.assert_close(found[:, 1:], expected[:, 1:])
    for mask in (torch.ones(2, 6, dtype=torch.long), "causal"):
        with pytest.raises(Unsupported, match="expected a mask of bool or of numbers to add, got"):
            attention(module_of(True), q, k, k, mask)  # type: ignore[arg-type]


@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 5), (3, 7), (7, 3), (1, 7)])
def test_without_a_mask_all_see_all_or_what_sdpa_lets_them_see(q_len: int, kv_len: int) -> None:
    q, k = random(1, HEADS, q_len, WIDTH), random(1, GROUPS, kv_len, WIDTH, seed=1)
    for module, told in ((True, None), (False, None), (True, False), (False, True)):
        found, _ = attention(module_of(module), q, k, k, None, is_causal=told, sliding_window=2)
        expected, _ = sdpa_attention_forward(module_of(module), q, k, k, None, is_causal=told)
        torch.testing.assert_close(found, expected)
    found, _ = attention(module_of(None), q, k, k, None)
    torch.testing.assert_close(found, eager_attention_forward(module_of(None), q, k, k, None, WIDTH**-0.5)[0])


def test_checkpointed_layers_keep_the_pattern() -> None:
    q, k = random(1, HEADS, 4, WIDTH).requires_grad_(), random(1, GROUPS, 4, WIDTH, seed=1)
    mask = _masks.mask(1, 4, 4)
    for reentrant in (True, False):
        _calls.calls.clear()
        out = torch.utils.checkpoint.checkpoint(
            lambda q, mask: attention(module_of(False), q, k, k, mask)[0], q, mask, use_reentrant=reentrant
        )
        out.sum().backward()
        assert "dense" not in ragged.explain()


# ---- compiled models


def by_layer(q: Any, k: Any, mask: Any) -> Any:
    return attention(module_of(None), q, k, k, mask)[0]


@pytest.mark.parametrize("kind", ["padded", "open", "of one query", "anyone's"])
def test_layers_are_compiled_with_the_masks_they_are_given(kind: str) -> None:
    """Compiled layers take masks that are made outside, as `generate` does, at changing lengths."""
    torch._dynamo.reset()
    compiled = torch.compile(by_layer, backend="aot_eager", fullgraph=True)
    for kv_len in (5, 8):
        q, k = random(1, HEADS, 3, WIDTH), random(1, GROUPS, kv_len, WIDTH, seed=1)
        if kind == "padded":
            mask = _masks.mask(1, 3, kv_len, kv_len - 3, attention_mask=torch.arange(kv_len)[None] > 0)
        elif kind == "open":
            mask = _masks.mask(1, 3, kv_len, kv_len - 3)
        elif kind == "of one query":
            q, mask = q[:, :, :1], _masks.mask(1, 1, kv_len, torch.tensor(2))
        else:
            mask = _masks.mask(1, 4, kv_len, 1)[:, :, 1:]
        torch.testing.assert_close(compiled(q, k, mask), by_layer(q, k, mask))


def test_masks_are_made_in_the_graph() -> None:
    """Masks of plain functions, and masks of one query with any function, can be made in the compiled graph.

    Mask values that nothing reads are not in the graph.
    """

    def made(q: Any, k: Any, shown: Any, size: int, offset: Any) -> Any:
        window = masking_utils.sliding_window_causal_mask_function(size)
        last = masking_utils.chunked_causal_mask_function(3, offset - offset + torch.zeros(1, dtype=torch.long))
        masks = (
            _masks.mask(1, 3, 6, 3), _masks.mask(1, 3, 6, 3, attention_mask=shown), _masks.mask(1, 3, 6, offset),
            _masks.mask(1, 3, 6, 3, mask_function=window),
            _masks.mask(1, 3, 6, mask_function=masking_utils.bidirectional_mask_function, attention_mask=shown),
        )  # fmt: skip
        alone = _masks.mask(1, 1, 6, offset, mask_function=last, attention_mask=shown)
        whole = [attention(module_of(None), q, k, k, mask)[0] for mask in masks]
        return torch.cat((*whole, attention(module_of(None), q[:, :, :1], k, k, alone)[0]), 1)

    torch._dynamo.reset()
    arguments = (random(1, HEADS, 3, WIDTH), random(1, GROUPS, 6, WIDTH, seed=1), torch.arange(6)[None] > 0, 2,
                 torch.tensor(2))  # fmt: skip
    found = torch.compile(made, backend="aot_eager", fullgraph=True)(*arguments)
    torch.testing.assert_close(found, made(*arguments))


def test_masks_that_the_host_must_look_at_leave_the_graph() -> None:
    def made(q: Any, shown: Any, numbers: Any) -> Any:
        window = masking_utils.sliding_window_causal_mask_function(2)
        packed = masking_utils.and_masks(
            masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(numbers)
        )
        padded = _masks.mask(1, 3, 3, mask_function=window, attention_mask=shown)
        apart = _masks.mask(1, 3, 3, mask_function=packed, allow_is_causal_skip=False)
        return torch.cat([attention(module_of(None), q, q, q, mask)[0] for mask in (padded, apart)])

    arguments = random(1, HEADS, 3, WIDTH), torch.tensor([[False, True, True]]), torch.tensor([[0, 0, 1]])
    for fullgraph in (False, True):  # this graph has none of our operations
        torch._dynamo.reset()
        found = torch.compile(made, backend="aot_eager", fullgraph=fullgraph)(*arguments)
        for row in (0, 1):
            real = 1 - row
            torch.testing.assert_close(found[row, real:], made(*arguments)[row, real:])


# ---- keywords


class Layer(torch.nn.Module):
    """A layer whose eager attention takes `lift`, which the layer passes on; the layer itself names `other`."""

    def forward(self, *arguments: Any, other: Any = None, **named: Any) -> Any:
        return attention(self, *arguments, other=other, **named) if other else attention(self, *arguments, **named)


def lifting_eager_attention_forward(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, dropout: float = 0.0,
    lift: float = 0.0, **others: Any,
) -> Any:  # fmt: skip
    module.num_key_value_groups = HEADS // GROUPS
    return eager_attention_forward(module, query, key, value + lift, attention_mask, scaling)


class Lifting(Layer):
    def forward(self, *arguments: Any, other: Any = None, **named: Any) -> Any:
        if other is not None:
            return attention(self, *arguments, other=other, **named)
        return (attention or lifting_eager_attention_forward)(self, *arguments, **named)


def test_keywords_are_never_swallowed() -> None:
    q, k = random(1, HEADS, 3, WIDTH), random(1, GROUPS, 3, WIDTH, seed=1)
    mask = _masks.mask(1, 3, 3)
    plain, lifted = Lifting()(q, k, k, mask)[0], Lifting()(q, k, k, mask, lift=2.0)[0]
    torch.testing.assert_close(lifted, plain + 2)
    assert "the model's own eager attention" in ragged.explain()
    torch.testing.assert_close(Lifting()(q, k, k, mask, only_handed_on=1, position_ids=2)[0], plain)
    for layer, named in ((Lifting(), {"other": 1}), (torch.nn.Module(), {"another": 1})):
        call = layer if isinstance(layer, Lifting) else lambda *x, **y: attention(torch.nn.Module(), *x, **y)
        with pytest.raises(Unsupported, match=f"expected attention without {next(iter(named))}, got some from"):
            call(q, k, k, mask, **named)
    with pytest.raises(Unsupported, match="expected output_attentions=False, got True"):
        attention(torch.nn.Module(), q, k, k, mask, output_attentions=True)
    named: Any
    for named in ({"dropout": 0.5}, {"position_bias": q}, {"indices": q}, {"lift": 1}):
        with pytest.raises(Unsupported, match=f"expected .* without {next(iter(named))}, got some from Lifting"):
            attention(Lifting(), q, k, k, None, cache=object(), **named)


# ---- models


SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
TWO_SIDED = {"vocab_size": 64, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}  # fmt: skip
SIDE = {**GROUPED, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 4}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {  # each tiny model's class, configuration and tested feature
    "phimoe": ("PhimoeForCausalLM", {**GROUPED, "sliding_window": 4, "num_local_experts": 2}, "a mask's own window"),
    "splinter": ("SplinterModel", SMALL, "an encoder that does not declare itself one"),
    "align": ("AlignTextModel", SMALL, "another such encoder"),
    "clap": ("ClapTextModel", SMALL, "another such encoder"),
    "bart": ("BartForConditionalGeneration", TWO_SIDED, "a longer encoder without a mask"),
    "t5": ("T5ForConditionalGeneration", {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1,
                                          "num_heads": 4}, "a longer encoder, with a position bias"),
    "bigbird": ("BigBirdPegasusForCausalLM", TWO_SIDED, "a decoder that calls itself not causal"),
    "t5gemma": ("T5GemmaForConditionalGeneration",
                {"encoder": SIDE, "decoder": {**SIDE, "cross_attention_hidden_size": 64}, "vocab_size": 64},
                "a window that cross-attention does not have"),
    "modernbert": ("ModernBertModel", {**SMALL, "local_attention": 6, "deterministic_flash_attn": True},
                   "windows to both sides, and gradients with the same bits"),
    "doge": ("DogeForCausalLM", {**GROUPED, "keep_window_size": 4}, "masks that are made of ours"),
    "git": ("GitForCausalLM", {**SMALL, "vision_config": VISION}, "attention of its own"),
}  # fmt: skip


def tiny(name: str) -> Any:
    family, options, _ = MODELS[name]
    kind = getattr(transformers, family)
    model = kind(kind.config_class(**options)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15, generator=generator)
    return model


def tokens(length: int, seed: int = 0) -> Any:
    return torch.randint(3, 64, (ROWS, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("padded", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_values_of_eager(name: str, padded: str) -> None:
    model, shown = tiny(name), padding(padded, 13)
    arguments = {"input_ids": tokens(13), "attention_mask": shown, "use_cache": False}
    if model.config.is_encoder_decoder:
        arguments["decoder_input_ids"] = tokens(5, seed=1)
    found = []
    for implementation in ("eager", ragged.NAME):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            out = model(**arguments)
        found.append(out.logits if hasattr(out, "logits") else out[0])
    if shown is not None and not model.config.is_encoder_decoder:
        found = [each[shown.bool()] for each in found]
    assert (found[1] - found[0]).abs().max() <= 2e-5 * found[0].abs().max()


@pytest.mark.parametrize("kind", ["plain", "window", "packed", "numbers", "training"])
def test_absorbed_layers_carry_over_what_they_are_told(kind: str) -> None:
    """Absorbed layers keep the sinks, soft caps and windows that they are given.

    Training needs lists of keys, which take no soft cap.
    """
    model = tiny_model("deepseek_v3")
    layer, absorbed = (each.model.layers[0].self_attn for each in (model, ragged.absorb_mla(copy.deepcopy(model))))
    model.set_attn_implementation(ragged.NAME)
    function = masking_utils.causal_mask_function
    if kind == "window":
        function = masking_utils.sliding_window_causal_mask_function(3)
    elif kind == "packed":
        numbers = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [*range(7)]])
        function = masking_utils.and_masks(function, masking_utils.packed_sequence_mask_function(numbers))
    mask = _masks.mask(2, 7, 7, mask_function=function)
    mask = mask + 0 if kind == "numbers" else mask
    hidden = random(2, 7, model.config.hidden_size)
    told = {"s_aux": random(model.config.num_attention_heads, seed=3), "softcap": 2.0}
    with torch.set_grad_enabled(kind == "training"):
        turned = model.model.rotary_emb(hidden, torch.arange(7)[None])
        if kind == "training":
            with pytest.raises(Unsupported, match="expected lists of latents without a soft cap, got AbsorbedDeepseek"):
                absorbed(hidden, turned, mask, **told)
            del told["softcap"]
        found, expected = (each(hidden, turned, mask, **told)[0] for each in (absorbed, layer))
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def test_absorbed_layers_have_the_gradient_of_sinks_alone() -> None:
    model = tiny_model("deepseek_v3").requires_grad_(False)
    layers = (each.model.layers[0].self_attn for each in (model, ragged.absorb_mla(copy.deepcopy(model))))
    model.set_attn_implementation(ragged.NAME)
    hidden, mask = random(2, 7, model.config.hidden_size), _masks.mask(2, 7, 7)
    turned, gradients = model.model.rotary_emb(hidden, torch.arange(7)[None]), []
    for layer in layers:
        sinks = random(model.config.num_attention_heads, seed=3).requires_grad_()
        layer(hidden, turned, mask, s_aux=sinks)[0].square().sum().backward()
        gradients.append(sinks.grad)
    torch.testing.assert_close(*gradients, rtol=2e-5, atol=2e-5)


def test_masks_that_lists_of_latents_cannot_say_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ragged.absorb_mla(tiny_model("deepseek_v3"))
    absorbed = model.model.layers[0].self_attn
    query, latents = random(1, 4, 3, 24), random(1, 1, 3, 40)
    with torch.no_grad():
        with pytest.raises(Unsupported, match="expected one mask for all heads over latents, got one of shape"):
            attention(absorbed, query, latents, latents, random(1, 4, 3, 3))
        with pytest.raises(Unsupported, match="expected a mask over latents to be bool, or 0 and the smallest number"):
            attention(absorbed, query, latents, latents, random(1, 1, 3, 3))
        with pytest.raises(Unsupported, match="expected absorbed latent attention without a bias of positions, got"):
            attention(absorbed, query, latents, latents, None, position_bias=random(1, 4, 3, 3))
        with pytest.raises(Unsupported, match="expected absorbed latent attention without sinks of each query, got"):
            attention(absorbed, query, latents, latents, None, sinks=random(1, 4, 3, 1))
        with pytest.raises(
            Unsupported, match="expected absorbed latent attention without deterministic gradients, got"
        ):
            attention(absorbed, query, latents, latents, None, deterministic=True)
        monkeypatch.setattr(
            sys.modules[type(model).__module__], "eager_attention_forward", lifting_eager_attention_forward
        )
        with pytest.raises(Unsupported, match="expected absorbed latent attention without keywords that only its own"):
            attention(absorbed, query, latents, latents, None, lift=1.0)


# ---- continuous batching


def test_layers_attend_once_in_a_step_of_another_cache() -> None:
    class Cache:
        layer_to_allocator = (type("Allocator", (), {"layer_type": "linear_attention"}),)

    layer, cache, x, edges = torch.nn.Module(), Cache(), random(1, 2, 3, WIDTH), torch.tensor([0, 3])
    layer.layer_idx = 0  # type: ignore[assignment]
    step: dict[str, Any] = {
        "cu_seq_lens_q": edges,
        "cu_seq_lens_k": {"linear_attention": edges},
        "write_index": [edges],
    }
    other, twice = "got linear_attention", "expected layers that attend once in a step of continuous batching, got Mod"
    for named, refused in ((step, other), (step, twice), ({**step, "write_index": [edges]}, other)):
        with pytest.raises(Unsupported, match=refused):
            attention(layer, x, x, x, None, cache=cache, **named)
    with pytest.raises(Unsupported, match="expected continuous batching without masks, got one of Module's own"):
        attention(layer, x, x, x, random(1, 1, 3, 3), cache=cache, **step)
    with pytest.raises(Unsupported, match="expected continuous batching with a cache for each layer, got Module with"):
        attention(layer, x, x, x, None, read_index=[edges], **step)


def test_keys_are_gathered_where_a_layer_reads_them() -> None:
    """Keys stay in their pages, and are gathered only if a layer reads them.

    A layer does so if it attends twice, to the halves of its values, or repeats keys.
    """
    slots, edges = torch.tensor([9, 8, 2, 3, 1]), torch.tensor([0, 2, 5]).int()
    tokens = random(12, GROUPS, WIDTH), random(12, GROUPS, WIDTH, seed=1)
    pages = tuple(each[:, None] for each in tokens)
    held = _continuous.Pages(tokens, pages, slots, edges, 3, 1)  # type: ignore[arg-type]
    key, value = _continuous.Gathered(held, 0), _continuous.Gathered(held, 1)
    query, layer = random(1, HEADS, 2, WIDTH, seed=2), module_of(True)
    places = {"cu_seq_lens_q": torch.tensor([0, 1, 2]), "cu_seq_lens_k": edges, "read_index": [slots]}
    found = [attention(layer, query, *each, None, **places)[0] for each in ((key, value), (key + 0, value + 0))]
    torch.testing.assert_close(found[0], found[1])
    whole, there = (each[slots].transpose(0, 1)[None] for each in tokens)
    assert torch.equal(key + 0, whole)
    for i, part in enumerate((slice(0, 2), slice(2, 5))):
        alone = attention(layer, query[:, :, i : i + 1], whole[:, :, part], there[:, :, part], None)[0]
        torch.testing.assert_close(found[0][:, i : i + 1], alone)
    halves = [attention(layer, query, key, half, None, **places)[0] for half in value.chunk(2, dim=-1)]
    torch.testing.assert_close(torch.cat(halves, -1), found[0])
    swapped = attention(layer, query, key, key, None, **places)[0]
    torch.testing.assert_close(swapped, attention(layer, query, key + 0, key + 0, None, **places)[0])
    assert "ragged_paged_attention" in ragged.explain()
