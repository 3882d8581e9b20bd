"""Masks of transformers as key ranges: chunks, images, prefixes, blocks, and masks that a model makes itself."""

import inspect
import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from transformers import masking_utils  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.models.llama.modeling_llama import eager_attention_forward  # noqa: E402

from benchmarks.transformers_models import running  # noqa: E402
from benchmarks.transformers_models.building import build  # noqa: E402
from benchmarks.transformers_models.images import image_inputs  # noqa: E402
from ragged_attention.demo.tiny import tiny_model  # noqa: E402
from ragged_attention.errors import Unsupported  # noqa: E402
from ragged_attention.integrations import transformers as ragged  # noqa: E402
from ragged_attention.integrations.transformers import _calls, _masks, _ranges, _tensors  # noqa: E402
from ragged_attention.integrations.transformers._attention import attention  # noqa: E402
from ragged_attention.integrations.transformers._distance_bias import DistanceBias, Tables  # noqa: E402
from tests.with_transformers import assert_close, padding, random  # noqa: E402
from tests.with_transformers import registered as registered  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("registered")]
ROWS, HEADS, GROUPS, WIDTH = 2, 4, 2, 16
CACHE = "cache" if "cache" in inspect.signature(masking_utils.create_causal_mask).parameters else "past_key_values"
LEAST = torch.finfo(torch.float32).min


def module_of() -> Any:
    module = torch.nn.Module().eval()
    module.num_key_value_groups = HEADS // GROUPS  # type: ignore[assignment]
    return module


def inputs(q_len: int, kv_len: int) -> tuple[Any, Any, Any]:
    keys = (random(ROWS, GROUPS, kv_len, WIDTH, seed=seed) for seed in (1, 2))
    return random(ROWS, HEADS, q_len, WIDTH), *keys  # type: ignore[return-value]


def hiding(sees: Any, number: float = LEAST) -> Any:
    return torch.where(sees, 0.0, number)


def expect_ours() -> None:
    """Assert that no layer fell back to dense attention or to the model's own attention."""
    assert "attention" in ragged.explain()
    assert "since" not in ragged.explain(), ragged.explain()


# ---- our masks as key ranges


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 7), st.integers(1, 24), st.floats(0, 1))
def test_ranges_show_what_the_mask_shows(seed: int, rows: int, q_len: int, kv_len: int, share: float) -> None:
    sees = torch.rand(rows, q_len, kv_len, generator=torch.Generator().manual_seed(seed)) < share
    most = max(_runs(row) for row in sees.flatten(0, 1).tolist())
    found = _ranges.ranges_of(sees[:, queries] for queries in _ranges.blocks(rows, q_len, kv_len))
    assert (found is None) == (most > 8)
    if found is not None:
        assert found.shape == (rows, q_len, max(1, most), 2)
        assert torch.equal(_ranges.shown_by(found, kv_len), sees)


def _runs(row: list[bool]) -> int:
    return sum(now and not before for before, now in zip([False, *row], row, strict=False))


@pytest.mark.parametrize("most", [1, 40, 10**9])
def test_masks_are_read_in_parts(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ranges, "BLOCK", most)
    function, shown = masking_utils.chunked_causal_mask_function(3, torch.tensor([2, 0])), torch.ones(2, 9)
    shown[0, :2] = 0
    told: dict[str, Any] = {"mask_function": function, "attention_mask": shown.bool()}
    mask, whole = _masks.mask(2, 9, 9, **told), masking_utils.eager_mask(2, 9, 9, **told)
    pattern = _masks.pattern_of(mask)
    assert pattern is not None
    assert pattern.ranges is not None
    assert pattern.ranges.shape == (2, 9, 1, 2)
    assert torch.equal(mask + 0, whole)
    again = _tensors.pattern_of_numbers(whole, (2, HEADS, 9, 9))
    assert again is not None
    assert torch.equal(again.ranges[~again.blind], pattern.ranges[~again.blind])  # type: ignore[index]


def test_rows_that_see_alike_share_their_ranges() -> None:
    mask = _masks.mask(3, 5, 5, mask_function=masking_utils.sliding_window_bidirectional_mask_function(2))
    assert mask.pattern.ranges.shape == (1, 5, 1, 2)  # type: ignore[attr-defined]
    assert torch.equal(mask[:, 0, 0, 0], torch.zeros(3))


# ---- masks that other code makes


def chunked(q_len: int, kv_len: int) -> Any:
    query, key = torch.arange(q_len)[:, None] + kv_len - q_len, torch.arange(kv_len)
    return (key <= query) & (key // 3 == query // 3)


def blocked(q_len: int, kv_len: int) -> Any:
    return torch.arange(kv_len) < ((torch.arange(q_len) + kv_len - q_len) // 4 * 4 + 4)[:, None]


@pytest.mark.parametrize("number", [LEAST, -torch.inf, -1e9, None], ids=["least", "infinite", "billion", "bool"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(7, 7), (3, 8), (1, 8)])
def test_masks_of_ones_own_run_by_our_operations(q_len: int, kv_len: int, number: float | None) -> None:
    """Custom masks run by our operations, whether each axis (rows, queries, heads) has size 1 or its full size."""
    q, k, v = inputs(q_len, kv_len)
    padded = torch.arange(kv_len) >= torch.tensor([[0], [2]])
    for sees in (
        chunked(q_len, kv_len),
        blocked(q_len, kv_len)[None, None],
        (chunked(q_len, kv_len) & padded[:, None])[:, None],
        blocked(q_len, kv_len)[None, None].expand(ROWS, HEADS, -1, -1),
        (blocked(q_len, kv_len) & padded[:, None])[:, None].repeat(1, HEADS, 1, 1),
        padded[:, None, None],
        torch.tensor([False, True] * 4)[None, None, None, :kv_len],  # padding between tokens
        torch.ones(1, 1, 1, kv_len, dtype=torch.bool),
    ):
        if number == -1e9:
            sees = sees | (torch.arange(kv_len) == kv_len - 1)  # a query that sees no key would need dense attention
        mask = sees if number is None else hiding(sees, number)
        found, _ = attention(module_of(), q, k, v, mask)
        # If all keys of a query are hidden by -inf, eager attention gives NaN, and our result is 0.
        right = mask if number == LEAST else sees
        expected, _ = sdpa_attention_forward(module_of(), q, k, v, right[(None,) * (4 - right.ndim)])
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    expect_ours()


def test_queries_without_keys_have_the_weights_of_eager_attention() -> None:
    """Queries without visible keys have the weights of eager attention, which adds the smallest number to all logits.

    The smallest number swallows the logits. Twice that number is -inf, as in kosmos-2.
    """
    q, k, v = inputs(4, 4)
    least = hiding(torch.ones(4, 4).bool().tril())
    twice = least + hiding(torch.arange(4) >= 2)
    assert twice.isinf().any()
    sinks = random(HEADS, seed=3)
    of_queries = random(ROWS, HEADS, 4, 1, seed=4)
    for mask in (hiding(torch.arange(4)[:, None] >= torch.tensor([2, 2, 2, 2])), twice, hiding(torch.zeros(4) > 0)):
        expected, _ = eager_attention_forward(module_of(), q, k, v, mask, WIDTH**-0.5)
        torch.testing.assert_close(attention(module_of(), q, k, v, mask)[0], expected, rtol=2e-5, atol=2e-5)
        blind = (mask < 0).all(-1)
        assert blind.any()
        for named in ({"s_aux": sinks}, {"sinks": of_queries}):
            out, _ = attention(module_of(), q, k, v, mask, **named)
            assert (out[:, blind] == 0).all()
    expect_ours()
    bias = random(1, HEADS, 4, 4, seed=5)
    found, _ = attention(module_of(), q, k, v, twice, position_bias=bias)
    expected, _ = eager_attention_forward(module_of(), q, k, v, twice + bias, WIDTH**-0.5)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    assert "since it has a bias of positions, some of which are padding" in ragged.explain()


def test_other_numbers_stay_dense() -> None:
    q, k, v = inputs(40, 40)
    causal = torch.ones(40, 40).bool().tril()
    trained = hiding(causal).requires_grad_()
    stripes = causal & (torch.arange(40) % 4 < 2)  # the last query sees ten ranges of keys
    heads = torch.stack([causal, causal & chunked(40, 40), causal, causal])[None]
    for mask in (
        hiding(causal, -1e4), hiding(causal & (torch.arange(40)[:, None] > 3), -1e9), random(40, 40),
        trained, hiding(stripes), stripes, hiding(heads), heads,
        hiding(causal).masked_fill(causal, 1.0), random(40, 40).masked_fill(~causal, LEAST),
    ):  # fmt: skip
        _calls.calls.clear()
        found, _ = attention(module_of(), q, k, v, mask)
        expected, _ = sdpa_attention_forward(module_of(), q, k, v, mask)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
        assert "dense attention in torch, since its mask is not up to 8 ranges of keys for all heads" in (
            ragged.explain()
        )
    assert _tensors.pattern_of_numbers(hiding(causal)[None, None, None], (ROWS, HEADS, 40, 40)) is None
    assert _tensors.pattern_of_numbers(hiding(causal)[:, :39], (ROWS, HEADS, 40, 40)) is None
    assert _tensors.pattern_of_numbers(hiding(causal)[:39], (ROWS, HEADS, 40, 40)) is None


def test_a_mask_is_read_once_until_it_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    made = _tensors._pattern
    monkeypatch.setattr(_tensors, "_pattern", lambda *arguments: read.append(1) or made(*arguments))
    q, k, v = inputs(6, 6)
    mask = hiding(blocked(6, 6))[None, None]

    def ours(mask: Any) -> Any:
        found = attention(module_of(), q, k, v, mask)[0]
        torch.testing.assert_close(found, sdpa_attention_forward(module_of(), q, k, v, mask)[0], rtol=2e-5, atol=2e-5)

    for _ in range(3):
        ours(mask)
        ours(mask[:, :, :, :6])  # a slice, as layers make
    assert len(read) == 1
    mask[:, :, 1, 1] = LEAST
    ours(mask)
    ours(mask[:, :, :, :6])
    assert len(read) == 2
    held = len(_tensors._known)
    del mask
    assert len(_tensors._known) == held - 1
    with torch.inference_mode():
        mask = hiding(blocked(6, 6))
        for length in (1, 2):  # inference tensors have no version that counts writes
            mask[1, length] = LEAST
            ours(mask)
    expect_ours()


def test_a_mask_for_all_lengths_keeps_few_patterns() -> None:
    whole = hiding(torch.ones(64, 64).bool().tril())
    for length in range(1, 65):
        pattern = _tensors.pattern_of_numbers(whole[:length, :length], (ROWS, HEADS, length, length))
        assert pattern is not None
        if pattern.ranges is not None:
            assert pattern.ranges[0, -1].tolist() == [[0, length]]
    assert len(_tensors._known[whole]) <= _tensors.PLACES


def test_masks_that_differ_within_a_transformation_are_dense() -> None:
    q, k, v = inputs(6, 6)
    masks = torch.stack([hiding(blocked(6, 6)), hiding(chunked(6, 6))])
    found = torch.func.vmap(lambda mask: attention(module_of(), q, k, v, mask)[0])(masks)
    for out, mask in zip(found, masks, strict=True):
        torch.testing.assert_close(out, attention(module_of(), q, k, v, mask)[0], rtol=2e-5, atol=2e-5)


def test_masks_of_rows_are_those_of_padding_and_are_kept() -> None:
    shown = hiding(torch.arange(8) >= torch.tensor([[2], [0]]))[:, None, None]
    pattern = _tensors.pattern_of_numbers(shown, (ROWS, HEADS, 8, 8))
    assert pattern is not None
    assert pattern.shown in _masks._results
    assert _tensors.pattern_of_numbers(torch.zeros(1, 1, 1, 8), (ROWS, HEADS, 8, 8)) == _masks.Pattern()


def test_keys_that_no_query_sees_are_not_read() -> None:
    q, k, v = inputs(6, 12)
    sees = torch.zeros(6, 12, dtype=torch.bool)
    sees[:, 1:3] = sees[:3, 6:8] = True
    for tensor in (k, v):
        tensor[:, :, ~sees.any(0)] = torch.nan
    found, _ = attention(module_of(), q, k, v, hiding(sees))
    expected, _ = sdpa_attention_forward(module_of(), q, k.nan_to_num(), v.nan_to_num(), sees)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def test_a_bias_by_distance_beside_ranges() -> None:
    q, k, v = inputs(5, 7)
    values = random(1, HEADS, 1, 9, seed=7)
    places = (2 + torch.arange(5)[:, None] - torch.arange(7) + 4).clamp(0, 8)
    whole = values[0, :, 0][:, places][None]
    bias = DistanceBias(Tables(values, 4, 2), (1, HEADS, 5, 7), lambda: whole)
    mask = hiding(chunked(5, 7))
    found, _ = attention(module_of(), q, k, v, mask, position_bias=bias)
    expected, _ = eager_attention_forward(module_of(), q, k, v, mask + whole, WIDTH**-0.5)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    expect_ours()


def test_gradients_through_ranges() -> None:
    for mask in (hiding(blocked(7, 7)), _masks.mask(2, 7, 7, mask_function=masking_utils.chunked_causal_mask_function(
        3, torch.zeros(2, dtype=torch.long)))):  # fmt: skip
        gradients = []
        attend: Any
        for attend, given_mask in ((attention, mask), (eager_attention_forward, mask + 0)):
            tensors = [each.requires_grad_() for each in inputs(7, 7)]
            out, _ = attend(module_of(), *tensors, given_mask, scaling=0.3)
            (out * random(*out.shape, seed=9)).sum().backward()
            gradients.append([each.grad for each in tensors])
        torch.testing.assert_close(*gradients, rtol=2e-5, atol=2e-5)
    expect_ours()


def test_compiled_layers_take_ranges_that_were_made_outside() -> None:
    def by_layer(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return attention(module_of(), q, k, v, mask, scaling=0.3)[0]

    function = masking_utils.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.long))
    torch._dynamo.reset()
    compiled = torch.compile(by_layer, backend="aot_eager", fullgraph=True)
    for length in (5, 8):
        arguments = (*inputs(length, length), _masks.mask(2, length, length, mask_function=function))
        torch.testing.assert_close(compiled(*arguments), by_layer(*arguments))
    expect_ours()
    own = hiding(chunked(6, 6))  # the compiler cannot read the values of this mask
    torch.testing.assert_close(compiled(*inputs(6, 6), own), by_layer(*inputs(6, 6), own), rtol=2e-5, atol=2e-5)


def test_continuous_batching_takes_no_mask_of_ranges() -> None:
    mask = _masks.mask(1, 3, 3, mask_function=masking_utils.sliding_window_bidirectional_mask_function(1))
    x = random(1, 2, 3, WIDTH)
    with pytest.raises(Unsupported, match="expected continuous batching without masks, got one of Module's own"):
        attention(module_of(), x, x, x, mask, cache=object(), cu_seq_lens_q=torch.tensor([0, 3]))


# ---- models


SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip


def llama4() -> Any:
    config = transformers.Llama4TextConfig(
        **SMALL, num_hidden_layers=4, attention_chunk_size=4, num_local_experts=2, intermediate_size_mlp=48,
        no_rope_layers=[1, 1, 1, 0],
    )  # fmt: skip
    return shuffled(transformers.Llama4ForCausalLM(config))


def shuffled(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15, generator=generator)
    return model.eval()


def prompts(length: int = 13, seed: int = 0) -> Any:
    return torch.randint(3, 64, (3, length), generator=torch.Generator().manual_seed(seed))


def generated(model: Any, name: str, arguments: dict[str, Any], **options: Any) -> Any:
    model.set_attn_implementation(name)
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    with torch.no_grad():
        return model.generate(**arguments, max_new_tokens=8, do_sample=False, disable_compile=True, **options)


CACHES = {"dynamic": {}, "static": {"cache_implementation": "static"}, "in pieces": {"prefill_chunk_size": 5},
          "beams": {"num_beams": 2}}  # fmt: skip


@pytest.mark.parametrize("cached", CACHES)
@pytest.mark.parametrize("padded", ["none", "left"])
def test_chunked_layers_generate_the_tokens_of_eager(cached: str, padded: str) -> None:
    model = llama4()
    assert set(model.config.layer_types) == {"chunked_attention", "full_attention"}
    arguments = {"input_ids": prompts(), "attention_mask": padding(padded)}
    found, eager, sdpa = (
        generated(model, name, arguments, **CACHES[cached]) for name in (ragged.NAME, "eager", "sdpa")
    )
    assert found[:, 13:].unique().numel() > 3
    assert torch.equal(found, eager)
    assert torch.equal(found, sdpa)
    expect_ours()


def losses(model: Any, name: str, **arguments: Any) -> tuple[Any, Any]:
    model.set_attn_implementation(name)
    model.zero_grad()
    loss = model(**arguments, use_cache=False).loss
    loss.backward()
    return loss.detach(), torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


@pytest.mark.parametrize("padded", ["none", "right", "packed"])
def test_chunked_layers_have_the_gradients_of_eager(padded: str) -> None:
    model, arguments = llama4(), {"input_ids": prompts(), "labels": prompts()}
    if padded == "packed":
        arguments["position_ids"] = torch.tensor([[*range(6), *range(7)]]).expand(3, -1)
    elif padded == "right":
        arguments["attention_mask"] = padding(padded)
        arguments["labels"] = prompts().masked_fill(padding(padded) == 0, -100)
    (loss, gradient), (right, expected) = (losses(model, name, **arguments) for name in (ragged.NAME, "eager"))
    torch.testing.assert_close(loss, right)
    assert (gradient - expected).norm() <= 1e-4 * expected.norm()
    expect_ours()


@pytest.mark.parametrize("family", ["gemma3", "paligemma", "gemma4_unified", "mistral3", "idefics", "molmo2", "mllama"])
def test_images_run_by_ours_and_generate_the_tokens_of_eager(family: str) -> None:
    """Prompts with images run by our operations and generate eager's tokens, with dynamic and static caches.

    Each prompt has an image, and one prompt is padded. Training with them works too.
    """
    model = build(family, "images")
    given_inputs = image_inputs(model)
    found, expected = (running.generate(model, name, given_inputs)[0] for name in (ragged.NAME, "eager"))
    assert (found - expected).norm() <= 1e-4 * expected.norm()
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    if family == "gemma3":
        static = running.generate(model, ragged.NAME, given_inputs, cache_implementation="static")[0]
        assert (static - expected).norm() <= 1e-4 * expected.norm()
        tokens, right = (generated(model, name, given_inputs) for name in (ragged.NAME, "eager"))
        assert torch.equal(tokens, right)
        labels = given_inputs["input_ids"].clone()
        labels[:, :-5] = -100
        (_, gradient), (_, wanted) = (
            losses(model, name, **given_inputs, labels=labels) for name in (ragged.NAME, "eager")
        )
        assert (gradient - wanted).norm() <= 1e-4 * wanted.norm()
    expect_ours()


@pytest.mark.parametrize(
    ("family", "kind"), [("t5gemma", "seq2seq"), ("t5gemma2", "seq2seq"), ("switch_transformers", "seq2seq")]
)
def test_windows_to_both_sides_and_masks_of_numbers(family: str, kind: str) -> None:
    model = build(family, kind)
    found, expected = (running.generate(model, name)[0] for name in (ragged.NAME, "eager"))
    assert (found - expected).norm() <= 1e-4 * expected.norm()
    expect_ours()


# ---- a block-causal model that generates a block at a time


def blockwise(length: int, block: int = 4, past: int = 0) -> Any:
    query, key = torch.arange(past, length)[:, None] // block, torch.arange(length) // block
    return (key <= query)[None, None]


@pytest.mark.parametrize("number", [LEAST, -torch.inf, None], ids=["least", "infinite", "bool"])
def test_a_block_causal_model_runs_by_ours(number: float | None) -> None:
    """A block-causal model runs by our operations with 4-D masks: prompt, blocks over a cache, and training."""
    model, tokens = tiny_model("qwen3"), prompts(16)

    def shown(length: int, past: int = 0) -> Any:
        sees = blockwise(length, past=past).expand(3, -1, -1, -1)
        return sees if number is None else hiding(sees, number)

    found = []
    for name in (ragged.NAME, "sdpa"):
        model.set_attn_implementation(name)
        cache, made = transformers.DynamicCache(config=model.config), []
        with torch.no_grad():
            out = model(tokens[:, :8], attention_mask=shown(8), **{CACHE: cache}, use_cache=True)
            made.append(out.logits)
            for past in (8, 12):  # each block is filled with the likeliest tokens and then cached
                block = tokens[:, past : past + 4]
                for _ in range(2):
                    out = model(block, attention_mask=shown(past + 4, past), **{CACHE: cache}, use_cache=True)
                    block = out.logits.argmax(-1)
                    cache.crop(-4)
                made.append(model(block, attention_mask=shown(past + 4, past), **{CACHE: cache}).logits)
        loss, gradient = losses(model, name, input_ids=tokens, labels=tokens, attention_mask=shown(16))
        found.append((torch.cat(made, 1), loss, gradient))
    assert torch.equal(found[0][0].argmax(-1), found[1][0].argmax(-1))
    for ours, right in zip(*found, strict=True):
        assert (ours - right).norm() <= 1e-4 * right.norm()
    expect_ours()


def test_blocks_by_a_mask_function_and_prefixes() -> None:
    """Blocks and prefixes work, which models of transformers express with `or_mask_function` or block ids."""
    embedded = torch.zeros(3, 13, 64)
    prefix = torch.where(torch.arange(13) < torch.tensor([[4], [1], [9]]), 0, -1)
    config = tiny_model("qwen3").config
    for told in (
        {"or_mask_function": lambda b, h, q, k: q // 4 == k // 4},
        {"block_sequence_ids": prefix},
        {"block_sequence_ids": torch.arange(13).expand(3, -1) // 5},
    ):
        for padded in ("none", "left", "right"):
            shown = None if padded == "none" else padding(padded)
            masks = []
            for name in (ragged.NAME, "eager"):
                config._attn_implementation = name
                masks.append(masking_utils.create_causal_mask(config, embedded, shown, **{CACHE: None}, **told))
            q, k, v = random(3, HEADS, 13, WIDTH), *(random(3, GROUPS, 13, WIDTH, seed=s) for s in (1, 2))
            found, _ = attention(module_of(), q, k, v, masks[0])
            expected, _ = eager_attention_forward(module_of(), q, k, v, masks[1], WIDTH**-0.5)
            assert_close(found, expected, (masks[1] == 0).any(-1)[:, 0].expand(3, -1))
    expect_ours()
