"""transformers on our operations has the tokens, losses and gradients of its eager attention, in every mode."""

import copy
import importlib.metadata
import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import GenerationConfig  # noqa: E402
from transformers.data.data_collator import DataCollatorWithFlattening  # noqa: E402
from transformers.generation.configuration_utils import ContinuousBatchingConfig  # noqa: E402

from ragged_attention.demo.tiny import FAMILIES, tiny_model  # noqa: E402
from ragged_attention.errors import InvalidInput, Unsupported  # noqa: E402
from ragged_attention.integrations import transformers as ragged  # noqa: E402
from ragged_attention.integrations.transformers import _indexer, _layout, _lists, _masks  # noqa: E402
from ragged_attention.torch import indexer_topk  # noqa: E402
from tests.with_transformers import assert_close, padding  # noqa: E402
from tests.with_transformers import registered as registered  # noqa: E402

# Ignore warnings of transformers about itself.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("registered")]
LATENT = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
SPARSE = LATENT[1:]
PLAIN = tuple(family for family in FAMILIES if family not in LATENT)
NEW = 10  # the number of generated tokens


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {}


@pytest.fixture
def model(request: pytest.FixtureRequest, models: dict[str, Any]) -> Any:
    """The tiny model of a family, reset to eager attention, no gradients and evaluation mode."""
    family = request.param
    if family not in models:
        models[family] = tiny_model(family)
    models[family].set_attn_implementation("eager")
    models[family].zero_grad()
    return models[family].eval()


def each(families: tuple[str, ...]) -> Any:
    return pytest.mark.parametrize("model", families, indirect=True)


def tokens(rows: int = 3, length: int = 13, seed: int = 0) -> Any:
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(seed))


def generated(model: Any, name: str, shown: Any, **options: Any) -> Any:
    model.set_attn_implementation(name)
    return model.generate(tokens(), attention_mask=shown, max_new_tokens=NEW, do_sample=False, disable_compile=True,
                          **options)  # fmt: skip


def logits(model: Any, name: str, shown: Any = None, **arguments: Any) -> Any:
    model.set_attn_implementation(name)
    with torch.no_grad():
        found = model(tokens(), attention_mask=shown, **arguments)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


# ---- generation


@pytest.mark.parametrize("cache", [None, "static"])
@each(tuple(FAMILIES))
def test_generate_has_the_tokens_of_eager(model: Any, cache: str | None) -> None:
    shown = padding("left")
    expected = generated(model, "eager", shown, cache_implementation=cache)
    assert torch.equal(generated(model, ragged.NAME, shown, cache_implementation=cache), expected)


@pytest.mark.parametrize("kind", ["none", "left", "holes"])
@each(("llama", "mistral"))
def test_beams_and_masks_with_holes(model: Any, kind: str) -> None:
    shown = padding(kind)
    expected = generated(model, "eager", shown, num_beams=3)
    assert torch.equal(generated(model, ragged.NAME, shown, num_beams=3), expected)


@pytest.mark.parametrize("kind", ["none", "left", "right", "holes"])
@each(PLAIN)
def test_logits_with_padding_anywhere(model: Any, kind: str) -> None:
    shown = padding(kind)
    assert_close(logits(model, ragged.NAME, shown), logits(model, "eager", shown), shown)


@each(("gpt_oss",))
def test_a_compiled_forward_generates_the_same(model: Any) -> None:
    shown = padding("left")
    expected = generated(model, "eager", shown, cache_implementation="static")
    forward = model.forward
    torch._dynamo.reset()
    try:
        model.forward = torch.compile(forward, backend="aot_eager", fullgraph=True)
        found = generated(model, ragged.NAME, shown, cache_implementation="static")
    finally:
        model.forward = forward
        torch._dynamo.reset()
    assert torch.equal(found, expected)


def test_a_cache_is_read_where_it_lies() -> None:
    """A static cache is used in place, and its contents between the heads and after the last key do not matter."""
    memory = torch.full((2, 3, 20, 8), torch.nan)
    memory[:, :, :11] = torch.randn(2, 3, 11, 8)
    shown = torch.ones(2, 11, dtype=torch.bool)
    shown[1, :4] = False
    found = _layout.pages_of(memory, memory, shown)
    k_pages, _, kv_lens, table = found
    assert kv_lens.tolist() == [11, 7]
    assert k_pages.data_ptr() == memory.data_ptr()
    for row in range(2):
        kept = k_pages[table[row, : kv_lens[row]].long(), 0]
        assert torch.equal(kept, memory[row, :, :11][:, shown[row]].transpose(0, 1))


def test_keys_and_values_that_lie_otherwise_become_pages_too() -> None:
    """Values that are a [B, K, L, D_v] view of [B, L, K, D_v] become pages too.

    Layers that compute values from latents have this layout.
    """
    key, value = torch.randn(2, 3, 11, 8), torch.randn(2, 11, 3, 5).transpose(1, 2)
    shown = torch.ones(2, 11, dtype=torch.bool)
    shown[1, :4] = False
    found = _layout.pages_of(key, value, shown)
    k_pages, v_pages, kv_lens, table = found
    assert k_pages.data_ptr() == key.data_ptr()
    for pages, given in ((k_pages, key), (v_pages, value)):
        assert torch.equal(pages[table[1, : kv_lens[1]].long(), 0], given[1, :, 4:].transpose(0, 1))


def test_one_key_a_row_lies_anyhow() -> None:
    """Rows of one key become pages whatever their strides, because no second key exists."""
    key, value = torch.randn(3, 1, 2, 8).transpose(1, 2), torch.randn(3, 2, 1, 8)
    shown = torch.tensor([[True], [False], [True]])
    k_pages, v_pages, kv_lens, table = _layout.pages_of(key, value, shown)
    assert kv_lens.tolist() == [1, 0, 1]
    for pages, given in ((k_pages, key), (v_pages, value)):
        assert torch.equal(pages[table[:, 0].long()][:, 0], given[:, :, 0])


@each(("qwen3",))
def test_padding_is_sorted_once_for_all_layers(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_: list[Any] = []
    argsort = torch.argsort

    def counted(mask: Any, *rest: Any, **options: Any) -> Any:
        sorted_.append(mask)
        return argsort(mask, *rest, **options)

    monkeypatch.setattr(torch, "argsort", counted)
    generated(model, ragged.NAME, padding("left"))
    masks = [each for each in sorted_ if each.dtype == torch.bool]
    assert len(masks) == NEW  # each forward pass sorts one mask, which its two layers share


def test_what_is_found_out_about_a_mask_is_kept_for_those_of_a_forward_pass_only() -> None:
    shown = torch.tensor([[True, False]])
    assert _layout.shown_first(shown)[1].tolist() == [1]
    shown[:] = True
    assert _layout.shown_first(shown)[1].tolist() == [2]
    before = set(_masks._results.keys())  # results that other objects keep, such as a compiler's caches
    ours = _masks.mask(1, 1, 2, 1, attention_mask=torch.tensor([[0, 1]]))
    pattern = _masks.pattern_of(ours)
    assert pattern is not None
    assert pattern.shown is not None
    assert _layout.shown_first(pattern.shown) is _layout.shown_first(pattern.shown)
    assert len(_masks._results) == len(before) + 1
    del ours, pattern
    assert len(_masks._results) == len(before)


# ---- continuous batching


def batched(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    settings: dict[str, Any] = {"page_size": 8, "num_blocks": 40, "max_batch_tokens": 24, "max_requests_per_batch": 8}
    out = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(**(settings | options)),
        warmup=False,
    )
    return [out[name].generated_tokens for name in sorted(out, key=lambda name: int(name.rpartition("_")[2]))]


@each(PLAIN)
def test_continuous_batching_has_the_tokens_of_eager(model: Any) -> None:
    """Continuous batching generates the tokens of eager attention.

    Several prompts run at a time. One prompt is longer than a step, and two begin with the same tokens.
    """
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (3, 11, 7, 30, 5)]
    prompts.append([*prompts[3][:20], 7, 8])
    expected = [
        model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                       max_new_tokens=NEW, do_sample=False, eos_token_id=-1)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]  # fmt: skip
    model.set_attn_implementation(ragged.PAGED_NAME)
    assert batched(model, prompts) == expected
    assert model.config._attn_implementation == ragged.PAGED_NAME
    if model.config.model_type != "mistral":  # all layers of mistral have a window
        assert "ragged_paged_attention" in ragged.explain()


# ---- training


def gradients(model: Any) -> Any:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def trained(model: Any, name: str, **batch: Any) -> tuple[float, Any]:
    model.train()
    model.set_attn_implementation(name)
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.item(), gradients(model)


def assert_alike(found: tuple[float, Any], expected: tuple[float, Any]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=2e-6)
    assert (found[1] - expected[1]).norm() <= 1e-5 * expected[1].norm()


@pytest.mark.parametrize("kind", ["left", "right"])
@each(tuple(FAMILIES))
def test_training_with_padding(model: Any, kind: str) -> None:
    shown = padding(kind)
    labels = tokens().masked_fill(shown == 0, -100)
    labels[:, 1:][shown[:, :-1] == 0] = -100  # the labels that padding would predict
    batch = {"input_ids": tokens(), "attention_mask": shown, "labels": labels}
    assert_alike(trained(model, ragged.NAME, **batch), trained(model, "eager", **batch))


SEQUENCES = [tokens(1, length, seed=length)[0].tolist() for length in (5, 9, 2, 12)]


@pytest.mark.parametrize("told_by", ["lengths", "positions"])
@each((*PLAIN, "deepseek_v3"))
def test_packed_sequences_do_not_see_each_other(model: Any, told_by: str) -> None:
    """Packed sequences have the loss and gradients of the separate sequences.

    transformers' eager attention is not the reference here: in gpt_oss it lets packed sequences see each other.
    """
    collated = DataCollatorWithFlattening(return_flash_attn_kwargs=told_by == "lengths")
    packed = dict(collated([{"input_ids": each, "labels": each} for each in SEQUENCES]))
    model.train()
    model.set_attn_implementation("eager")
    model.zero_grad()
    weights = [len(each) - 1 for each in SEQUENCES]
    losses = [model(input_ids=torch.tensor([each]), labels=torch.tensor([each]), use_cache=False).loss
              for each in SEQUENCES]  # fmt: skip
    loss = (torch.stack(losses) * torch.tensor(weights)).sum() / sum(weights)
    loss.backward()
    assert_alike(trained(model, ragged.NAME, **packed), (loss.item(), gradients(model)))


@each(SPARSE)
def test_packed_sequences_of_sparse_attention(model: Any) -> None:
    collated = DataCollatorWithFlattening()
    packed = dict(collated([{"input_ids": each, "labels": each} for each in SEQUENCES]))
    assert_alike(trained(model, ragged.NAME, **packed), trained(model, "eager", **packed))


# ---- latents


@each(LATENT)
def test_absorbed_latent_attention(model: Any) -> None:
    shown = padding("left")
    absorbed = copy.deepcopy(model)
    assert ragged.absorb_mla(absorbed) is absorbed
    assert ragged.absorb_mla(absorbed) is absorbed  # a second call changes nothing
    assert absorbed.state_dict().keys() == model.state_dict().keys()
    for cache in (None, "static"):
        expected = generated(model, "eager", shown, cache_implementation=cache)
        assert torch.equal(generated(absorbed, ragged.NAME, shown, cache_implementation=cache), expected)
    assert_close(logits(absorbed, ragged.NAME, shown), logits(model, "eager", shown), shown)
    labels = tokens().masked_fill(shown == 0, -100)
    labels[:, 1:][shown[:, :-1] == 0] = -100
    batch = {"input_ids": tokens(), "attention_mask": shown, "labels": labels}
    assert_alike(trained(absorbed, ragged.NAME, **batch), trained(model, "eager", **batch))
    packed = dict(DataCollatorWithFlattening()([{"input_ids": each, "labels": each} for each in SEQUENCES]))
    assert_alike(trained(absorbed, ragged.NAME, **packed), trained(model, "eager", **packed))
    explanation = ragged.explain()
    assert "sparse_mla_prefill" in explanation
    assert ("ragged_mla_attention" in explanation) == (model.config.model_type == "deepseek_v3")


def chosen(model: Any, name: str, shown: Any, cache: str | None = None) -> tuple[Any, list[list[set[int]]]]:
    """The generated tokens, and for each indexer call a set per query: the selected keys that the query sees."""
    found: list[list[set[int]]] = []

    def keep(module: Any, arguments: Any, picked: Any) -> None:
        mask = arguments[3].expand(picked.shape[0], picked.shape[1], -1)
        seen = mask if mask.dtype == torch.bool else mask == 0
        found.append(
            [
                {key for key in keys if key >= 0 and sees[key]}
                for keys, sees in zip(picked.flatten(0, 1).tolist(), seen.flatten(0, 1).tolist(), strict=True)
            ]
        )

    indexers = [each for each in model.modules() if type(each).__name__.endswith("Indexer")]
    hooks = [each.register_forward_hook(keep) for each in indexers]
    out = generated(model, name, shown, cache_implementation=cache)
    for hook in hooks:
        hook.remove()
    return out, found


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", ["none", "left", "holes"])
@each(SPARSE)
def test_our_indexer_chooses_the_same_keys(model: Any, kind: str, cache: str | None) -> None:
    shown, absorbed = padding(kind), ragged.absorb_mla(copy.deepcopy(model))
    expected, theirs = chosen(model, "eager", shown, cache)
    found, ours = chosen(absorbed, ragged.NAME, shown, cache)
    assert torch.equal(found, expected)
    assert len(theirs) >= NEW
    assert ours == theirs
    assert any(len(keys) == model.config.index_topk for keys in ours[-1])  # some queries see more keys than they select
    assert "indexer_logits" in ragged.explain()


@each(SPARSE)
def test_the_fused_indexer_chooses_the_same_keys(model: Any) -> None:
    """`indexer_topk`, which gets the visible keys as ranges, selects the same keys as the model's indexer.

    Both get equal queries, keys and weights.
    """
    calls: list[tuple[Any, ...]] = []
    indexer = model.model.layers[0].self_attn.indexer
    hook = indexer.register_forward_hook(lambda module, arguments, picked: calls.append((*arguments[:4], picked)))
    logits(model, "eager", padding("left"))
    hook.remove()
    ((hidden, low, places, mask, theirs),) = calls
    with torch.no_grad():
        q = indexer.wq_b(low).unflatten(-1, (indexer.n_heads, indexer.head_dim))
        q, keys, weights = _indexer.operands(indexer, hidden, q, places, None)
    seen = (mask == 0).expand(len(q), -1, -1)
    first = torch.arange(len(q))[:, None] * 13
    starts, stops = first + seen.int().argmax(-1), first + 13 - seen.flip(-1).int().argmax(-1)
    stops = torch.where(seen.any(-1), stops, starts)
    ours = indexer_topk(q.flatten(0, 1), keys.flatten(0, 1), weights.flatten(0, 1), model.config.index_topk,
                        starts=starts.flatten().int(), stops=stops.flatten().int())  # fmt: skip
    for row, (picked, wanted, sees) in enumerate(
        zip(ours.tolist(), theirs.flatten(0, 1).tolist(), seen.flatten(0, 1).tolist(), strict=True)
    ):
        assert {key % 13 for key in picked if key >= 0} == {key for key in wanted if sees[key]}, row


def test_indexers_with_heads_of_other_sizes_stay_as_they_are() -> None:
    absorbed = ragged.absorb_mla(tiny_model("deepseek_v32", index_head_dim=24))
    assert type(absorbed.model.layers[0].self_attn.indexer).__name__ == "DeepseekV32Indexer"
    assert_close(logits(absorbed, ragged.NAME), logits(tiny_model("deepseek_v32", index_head_dim=24), "eager"))


@pytest.mark.parametrize("kind", ["none", "left", "right", "holes"])
@each(("deepseek_v3",))
def test_absorbed_prompts_with_padding_anywhere(model: Any, kind: str) -> None:
    """Absorbed prompts with padding anywhere have eager's logits, whether they run in one pass or in two."""
    shown, absorbed = padding(kind), ragged.absorb_mla(copy.deepcopy(model))
    expected = logits(model, "eager", shown)
    assert_close(logits(absorbed, ragged.NAME, shown), expected, shown)
    with torch.no_grad():
        first = absorbed(input_ids=tokens()[:, :4], attention_mask=shown[:, :4])
        rest = absorbed(input_ids=tokens()[:, 4:], attention_mask=shown, past_key_values=first.past_key_values)
    assert_close(rest.logits, expected[:, 4:], shown[:, 4:])
    assert "ragged_mla_attention" in ragged.explain()
    assert "sparse_mla_prefill" not in ragged.explain()


@pytest.mark.parametrize("kind", ["none", "holes"])
@each(("deepseek_v3",))
def test_absorbed_prompts_compile_whole(model: Any, kind: str) -> None:
    shown, absorbed = padding(kind), ragged.absorb_mla(copy.deepcopy(model))
    expected = logits(model, "eager", shown)
    with torch.no_grad():
        compiled = torch.compile(absorbed, backend="aot_eager", fullgraph=True)
        found = compiled(tokens(), attention_mask=shown, use_cache=False).logits
    assert_close(found, expected, shown)


@pytest.mark.parametrize("edges", [False, True], ids=["positions", "lengths"])
@each(("deepseek_v3",))
def test_absorbed_packed_sequences(model: Any, edges: bool) -> None:
    """Absorbed packed sequences have the logits of the separate sequences, and need no lists of keys."""
    absorbed = ragged.absorb_mla(copy.deepcopy(model))
    packed = dict(DataCollatorWithFlattening(return_flash_attn_kwargs=edges)([{"input_ids": s} for s in SEQUENCES]))
    with torch.no_grad():
        model.set_attn_implementation("eager")
        wanted = torch.cat([model(torch.tensor([s])).logits for s in SEQUENCES], 1)
        found = absorbed(**packed, use_cache=False).logits
    assert_close(found, wanted)
    assert "ragged_mla_attention" in ragged.explain()
    assert "sparse_mla_prefill" not in ragged.explain()


def test_latents_are_absorbed_for_long_prompts_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("deepseek_v32")
    absorbed = ragged.absorb_mla(copy.deepcopy(model))
    whole = logits(absorbed, ragged.NAME)
    monkeypatch.setattr(_lists, "QUERIES", 4)
    assert_close(logits(absorbed, ragged.NAME), whole)


def test_keys_and_values_of_heads_are_not_made() -> None:
    absorbed = ragged.absorb_mla(tiny_model("deepseek_v3"))
    attention = absorbed.model.layers[0].self_attn
    keys, values = attention.expand_kv(torch.zeros(1, 1, 5, 32), torch.zeros(1, 1, 5, 8))
    assert keys.shape == (1, 1, 5, 40)
    assert values.shape == (1, 1, 5, 32)


def test_what_absorbed_attention_does_not_do_is_refused() -> None:
    absorbed = ragged.absorb_mla(tiny_model("deepseek_v3", attention_dropout=0.5))
    with pytest.raises(Unsupported, match="expected absorbed latent attention without dropout, got AbsorbedDeepseekV3"):
        trained(absorbed, ragged.NAME, input_ids=tokens(), labels=tokens())
    query, latents = torch.zeros(1, 4, 3, 24), torch.zeros(1, 1, 3, 40)
    with pytest.raises(
        Unsupported, match="expected absorbed latent attention without continuous batching over another cache"
    ):
        ragged_attention(absorbed.model.layers[0].self_attn, query, latents, latents, None, cache=object())


def test_a_model_without_latents_cannot_be_absorbed() -> None:
    with pytest.raises(Unsupported, match="expected a model with latent attention, got Qwen3ForCausalLM"):
        ragged.absorb_mla(tiny_model("qwen3"))


# ---- other models, and dense attention


def ragged_attention(*arguments: Any, **named: Any) -> Any:
    from ragged_attention.integrations.transformers._attention import attention

    return attention(*arguments, **named)


def random(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4}  # fmt: skip
TWO_SIDED = {"vocab_size": 256, "d_model": 64, "pad_token_id": 0}
BART = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}  # fmt: skip


def other(kind: str) -> tuple[Any, dict[str, Any], str]:
    """A model, its arguments besides tokens, and the operation that computes its attention."""
    decoder = {"decoder_input_ids": tokens(seed=3)}
    if kind == "bert":
        return transformers.BertModel(transformers.BertConfig(**SMALL)), {}, "varlen_attention"
    if kind == "bart":
        config = transformers.BartConfig(**TWO_SIDED, **BART)
        return transformers.BartForConditionalGeneration(config), decoder, "varlen_attention"
    if kind == "t5":
        config = transformers.T5Config(**TWO_SIDED, d_kv=16, d_ff=64, num_layers=1, num_heads=4)
        return transformers.T5ForConditionalGeneration(config), decoder, "T5Attention: varlen_attention"
    config = transformers.Llama4TextConfig(**SMALL, num_key_value_heads=2, head_dim=16, attention_chunk_size=4,
                                           num_local_experts=2, intermediate_size_mlp=64, pad_token_id=0)  # fmt: skip
    return transformers.Llama4ForCausalLM(config), {}, "Llama4TextAttention: varlen_attention"


@pytest.mark.parametrize("padded", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("kind", ["bert", "bart", "t5", "llama4"])
def test_encoders_cross_attention_and_other_masks(kind: str, padded: str) -> None:
    model, arguments, becomes = other(kind)
    shown = padding(padded)
    expected = logits(random(model), "eager", shown, **arguments)
    judged = shown if kind in ("bert", "llama4") else None  # a decoder has queries of its own, none of which is padding
    assert_close(logits(model, ragged.NAME, shown, **arguments), expected, judged)
    assert becomes in ragged.explain()
    assert kind != "llama4" or "dense" not in ragged.explain()


def test_a_window_with_padding_inside_is_ranges_of_keys() -> None:
    model, shown = tiny_model("mistral"), padding("holes")
    assert_close(logits(model, ragged.NAME, shown), logits(model, "eager", shown), shown)
    assert ragged.explain().endswith(" MistralAttention: varlen_attention")


def test_other_numbers_are_computed_densely() -> None:
    model = tiny_model("llama").double()
    assert_close(logits(model, ragged.NAME), logits(model, "eager"))
    assert "since it is in torch.float64" in ragged.explain()


def test_dropped_weights_are_dropped_densely() -> None:
    model = tiny_model("llama", attention_dropout=1.0)
    loss, gradient = trained(model, ragged.NAME, input_ids=tokens(), labels=tokens())
    assert (loss, gradient.norm().item()) == pytest.approx(
        tuple(float(torch.as_tensor(x).norm()) for x in trained(model, "eager", input_ids=tokens(), labels=tokens())),
        rel=1e-5,
    )  # all weights are dropped, so the result is not random
    assert "since it drops weights" in ragged.explain()


@pytest.mark.parametrize("packed", [False, True])
def test_dense_attention_agrees_with_the_packed_one(packed: bool) -> None:
    """Dense attention, which a tiny dropout probability selects, agrees with packed attention under equal masks."""
    module = torch.nn.Module()
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 4, 9, 16, generator=generator), torch.randn(2, 2, 9, 16, generator=generator)
    edges, shown = torch.tensor([0, 4, 9, 11, 18]).int(), torch.arange(9) >= torch.tensor([[0], [3]])
    pattern = _masks.Pattern(True, 5, edges=edges) if packed else _masks.Pattern(True, 5, shown)
    mask = _masks.Mask(pattern, (2, 1, 9, 9), query.dtype, "cpu")
    known = {"softcap": 3.0, "s_aux": torch.randn(4, generator=generator)}
    found, expected = (
        ragged_attention(module, query, key, key, mask, dropout=chance, **known)[0] for chance in (1e-12, 0.0)
    )
    assert_close(found, expected, None if packed else shown)


def test_one_query_has_the_gradient_of_sinks_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 4, 1, 16, generator=generator), torch.randn(2, 2, 9, 16, generator=generator)
    ours, dense = (torch.zeros(4, requires_grad=True) for _ in range(2))
    for sinks, chance in ((ours, 0.0), (dense, 1e-12)):
        out, _ = ragged_attention(torch.nn.Module(), query, key, key, None, s_aux=sinks, dropout=chance)
        out.square().sum().backward()
    assert_close(ours.grad, dense.grad)


def test_selected_blocks_are_refused() -> None:
    x = torch.zeros(1, 2, 3, 16)
    with pytest.raises(Unsupported, match="expected attention without block_indices, got some from Module"):
        ragged_attention(torch.nn.Module(), x, x, x, None, block_indices=torch.zeros(1))


def test_layers_of_other_kinds_are_refused_in_continuous_batching() -> None:
    class Cache:
        layer_to_allocator = (type("Allocator", (), {"layer_type": "linear_attention"}),)

    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    x, edges = torch.zeros(1, 2, 3, 16), torch.tensor([0, 3])
    with pytest.raises(Unsupported, match="expected full or sliding attention in continuous batching, got linear_atte"):
        ragged_attention(module, x, x, x, None, cache=Cache(), cu_seq_lens_q=edges,
                         cu_seq_lens_k={"linear_attention": edges})  # fmt: skip


# ---- registration


def test_unregistering_leaves_nothing() -> None:
    from transformers.generation.continuous_batching import cache, continuous_api, initialization

    ragged.register()
    assert hasattr(vars(cache.PagedAttentionCache)["update"], "original")
    ragged.unregister()
    assert not hasattr(vars(cache.PagedAttentionCache)["update"], "original")
    asked = transformers.utils.generic.is_flash_attention_requested
    assert all(module.is_flash_attention_requested is asked for module in (cache, continuous_api, initialization))
    with pytest.raises(ValueError, match='attn_implementation="ragged"` is not supported'):
        tiny_model("llama").set_attn_implementation(ragged.NAME)
    ragged.unregister()  # a second call changes nothing


def test_other_implementations_are_asked_about_as_before() -> None:
    from transformers.generation.continuous_batching import continuous_api

    asked = vars(continuous_api)["is_flash_attention_requested"]
    assert asked(requested_attention_implementation="flash_attention_2")
    assert asked(requested_attention_implementation=ragged.NAME)
    assert not asked(requested_attention_implementation=ragged.NAME, version=2)
    assert not asked(requested_attention_implementation="sdpa")


@pytest.mark.parametrize("version", ["4.57.1", "5.22.4", "5.25.0", "6.0.0"])
def test_other_releases_are_refused_by_both_versions(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(
        Unsupported, match=f"expected transformers 5.23 or 5.24, with which this was tested, got {version}"
    ):
        ragged.register()


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(Unsupported, match=r"expected transformers to be installed: run pip install '\.\[transformers"):
        ragged.register()


def test_nothing_was_called() -> None:
    assert ragged.explain() == "no attention layer has been called"


def test_only_known_families_are_made() -> None:
    with pytest.raises(InvalidInput, match=r"expected a family among llama, .*, got 'gpt5'"):
        tiny_model("gpt5")
