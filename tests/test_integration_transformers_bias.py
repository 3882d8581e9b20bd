"""Position biases in transformers as our tables of biases by distance: t5, its relatives and inkling."""

import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ragged_attention.errors import Unsupported  # noqa: E402
from ragged_attention.integrations import transformers as ragged  # noqa: E402
from ragged_attention.integrations.transformers import _host, _masks  # noqa: E402
from ragged_attention.integrations.transformers._attention import attention  # noqa: E402
from ragged_attention.integrations.transformers._distance_bias import DistanceBias  # noqa: E402
from tests.with_transformers import assert_close, padding, random  # noqa: E402
from tests.with_transformers import registered as registered  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("registered")]

# The sequences have distances beyond the last bucket.
T5 = {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
      "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6, "dropout_rate": 0.0,
      "pad_token_id": 0, "decoder_start_token_id": 0}  # fmt: skip
SPARSE = {"num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0}
PIX = {"vocab_size": 64, "hidden_size": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4,
       "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6, "dropout_rate": 0.0,
       "is_decoder": True, "initializer_range": 0.02}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "mt5": ("MT5ForConditionalGeneration", "MT5Config", T5),
    "umt5": ("UMT5ForConditionalGeneration", "UMT5Config", T5),
    "longt5": ("LongT5ForConditionalGeneration", "LongT5Config", {**T5, "local_radius": 3}),
    "switch_transformers": ("SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig", {**T5, **SPARSE}),
    "pop2piano": ("Pop2PianoForConditionalGeneration", "Pop2PianoConfig", T5),
    "pix2struct": ("Pix2StructTextModel", "Pix2StructTextConfig", PIX),
}
COUNTED = "since it has a bias of positions that is not known to follow from distance"


def tiny(kind: str, **changes: Any) -> Any:
    """A random model whose biases are as large as its logits."""
    name, configuration, settings = MODELS[kind]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, configuration)(**settings, **changes))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for label, each in model.named_parameters():
            scale = 2.0 if "relative_attention_bias" in label else 0.15
            each.copy_(torch.randn(each.shape, generator=generator) * scale)
    return model.eval()


def inkling(kind: str) -> Any:
    """A random model with a bias for each query; inkling2 also has sinks for each query."""
    name = kind.capitalize()
    config = getattr(transformers, f"{name}TextConfig")(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=16, intermediate_size=64, d_rel=4,
        moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
        dense_intermediate_size=64, rel_extent=5, sliding_window_size=4, log_scaling_n_floor=4, pad_token_id=0,
        layer_types=["hybrid_sliding", "hybrid"], unpadded_vocab_size=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for label, each in model.named_parameters():
            scale = 0.3 if kind == "inkling2" else 1.0 if "rel_logits" in label else 0.15
            each.copy_(torch.randn_like(each) * scale)
    return model.eval()


QUERIES = ("inkling", "inkling2")


def tokens(rows: int = 3, length: int = 13, seed: int = 0) -> Any:
    return torch.randint(1, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits(model: Any, name: str, shown: Any = None, **arguments: Any) -> Any:
    model.set_attn_implementation(name)
    if model.config.is_encoder_decoder:
        arguments |= {"decoder_input_ids": tokens(length=16, seed=3)}
    with torch.no_grad():
        return model(input_ids=tokens(), attention_mask=shown, **arguments).logits


def assert_none_dense() -> None:
    explanation = ragged.explain()
    assert "dense" not in explanation, explanation
    assert "varlen_attention" in explanation


# ---- models


@pytest.mark.parametrize("padded", ["none", "left", "right"])
@pytest.mark.parametrize("kind", list(MODELS))
def test_a_bias_by_distance_runs_by_our_operations(kind: str, padded: str) -> None:
    model, shown = tiny(kind), padding(padded)
    is_judged = kind == "pix2struct"  # this decoder's own queries are padded
    expected = logits(model, "eager", shown)
    assert_close(logits(model, ragged.NAME, shown), expected, shown if is_judged else None)
    if kind != "switch_transformers":  # its encoder makes its own mask
        assert_none_dense()


@pytest.mark.parametrize("padded", ["none", "left", "right"])
@pytest.mark.parametrize("kind", QUERIES)
def test_a_bias_of_each_query_runs_by_our_operations(kind: str, padded: str) -> None:
    model, shown = inkling(kind), padding(padded)
    assert_close(logits(model, ragged.NAME, shown), logits(model, "eager", shown), shown)
    assert_none_dense()


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", ["t5", "umt5", "longt5", "inkling", "inkling2"])
def test_generation_has_the_tokens_of_eager(kind: str, cache: str | None) -> None:
    if kind in QUERIES and cache:
        return  # transformers' own attention fails in this case
    model, shown = inkling(kind) if kind in QUERIES else tiny(kind), padding("left")

    def generated(name: str) -> Any:
        model.set_attn_implementation(name)
        return model.generate(tokens(), attention_mask=shown, max_new_tokens=12, do_sample=False, disable_compile=True,
                              cache_implementation=cache, eos_token_id=None)  # fmt: skip

    expected = generated("eager")
    assert torch.equal(generated(ragged.NAME), expected)
    explanation = ragged.explain()
    assert "ragged_paged_attention" in explanation
    assert "dense" not in explanation


@pytest.mark.parametrize("kind", QUERIES)
def test_a_prompt_in_pieces(kind: str) -> None:
    model, ids = inkling(kind), tokens()
    expected = logits(model, "eager")
    model.set_attn_implementation(ragged.NAME)
    with torch.no_grad():
        first = model(input_ids=ids[:, :5], use_cache=True)
        cache = first.cache if "cache" in first else first.past_key_values
        name = "cache" if "cache" in first else "past_key_values"
        rest = model(input_ids=ids[:, 5:], **{name: cache})
    assert_close(torch.cat((first.logits, rest.logits), 1), expected)
    assert_none_dense()


def test_padding_between_tokens_is_computed_densely() -> None:
    model, shown = tiny("t5"), padding("holes")
    assert_close(logits(model, ragged.NAME, shown), logits(model, "eager", shown))
    assert "since it has a bias of positions, some of which are padding" in ragged.explain()


def test_what_is_not_ours_gets_numbers() -> None:
    model, changed = tiny("t5"), inkling("inkling")
    own = model.encoder.block[0].layer[0].SelfAttention
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        assert type(own.compute_bias(3, 3)) is torch.Tensor
    model.set_attn_implementation(ragged.NAME)
    assert isinstance(own.compute_bias(3, 3), DistanceBias)
    own.train().gradient_checkpointing = True
    assert not isinstance(own.compute_bias(3, 3), DistanceBias)
    made = []
    for layer in changed.model.layers:
        layer.self_attn.rel_logits_proj.register_forward_hook(lambda _, __, out: made.append(type(out)))
    for name in ("eager", ragged.NAME, "eager"):
        logits(changed, name)
    assert made == 2 * [torch.Tensor] + 2 * [DistanceBias] + 2 * [torch.Tensor]


def test_a_subclass_may_count_otherwise() -> None:
    class Other(type(tiny("t5").encoder.block[0].layer[0].SelfAttention)):
        pass

    config = transformers.T5Config(**T5)
    config._attn_implementation = ragged.NAME
    assert not isinstance(Other(config, True, 0).compute_bias(3, 3), DistanceBias)


def test_everything_is_put_back() -> None:
    places = [(owner, name) for owner, name, _ in _host.REPLACED]
    ragged.unregister()
    before = [getattr(*place) for place in places]
    ragged.register()
    assert all(getattr(*place) is not old for place, old in zip(places, before, strict=True))
    ragged.unregister()
    assert [getattr(*place) for place in places] == before


def gradients(model: Any, name: str) -> list[Any]:
    model.set_attn_implementation(name)
    model.zero_grad()
    model(input_ids=tokens(), labels=tokens(seed=5)).loss.backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def assert_same_gradients(found: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max() + 1e-9


@pytest.mark.parametrize("kind", ["t5", *QUERIES])
def test_training_has_the_gradients_of_eager(kind: str) -> None:
    model = inkling(kind) if kind in QUERIES else tiny(kind)
    assert_same_gradients(gradients(model, ragged.NAME), gradients(model, "eager"))
    assert "dense" not in ragged.explain()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["t5", "umt5"])
def test_checkpoints_have_the_gradients_of_eager(kind: str, reentrant: bool) -> None:
    model = tiny(kind).train()
    expected = gradients(model, "eager")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert_same_gradients(gradients(model, ragged.NAME), expected)
    assert ("dense" in ragged.explain()) is (kind == "t5" and reentrant)  # each layer of umt5 computes its own bias


def test_compiled_models_are_computed_with_numbers() -> None:
    model, shown = tiny("t5").encoder, padding("right")

    def states(name: str, call: Any) -> Any:
        model.set_attn_implementation(name)
        with torch.no_grad():
            return call(input_ids=tokens(), attention_mask=shown).last_hidden_state

    expected = states("eager", model)
    torch._dynamo.reset()
    try:
        assert_close(states(ragged.NAME, torch.compile(model, backend="aot_eager")), expected, shown)
    finally:
        torch._dynamo.reset()


# ---- the bias itself


def bias(q_len: int = 4, kv_len: int = 9, first: Any = 5, trained: bool = False) -> Any:
    """A bias of t5 whose last bucket begins at a distance of 6."""
    model = tiny("t5")
    model.set_attn_implementation(ragged.NAME)
    model.requires_grad_(trained)
    return model.encoder.block[0].layer[0].SelfAttention.compute_bias(q_len, kv_len, past_seen_tokens=first)


def test_tables_are_the_numbers() -> None:
    for q_len, kv_len, first in ((4, 9, 5), (1, 30, 29), (20, 20, 0)):
        made = bias(q_len, kv_len, first)
        distance = (first + torch.arange(q_len))[:, None] - torch.arange(kv_len)
        columns = (made.tables.own + distance).clamp(0, made.tables.values.shape[-1] - 1)
        assert torch.equal(made.tables.values[:, :, 0, columns.flatten()].unflatten(-1, (q_len, kv_len)), made + 0)


def test_what_is_computed_with_a_bias() -> None:
    made = bias()
    assert (made.shape, made.dtype) == ((1, 4, 4, 9), torch.float32)
    assert made.numbers() is made.numbers()
    factor = torch.arange(1.0, 5.0).view(1, 1, -1, 1)
    changed = (made.float() * factor).to(torch.bfloat16) * 2
    assert isinstance(changed, DistanceBias)
    assert changed.dtype == torch.bfloat16
    expected = (made.numbers().float() * factor).to(torch.bfloat16) * 2
    assert torch.equal(changed + 0, expected)
    assert changed.tables.values.shape[2] == 4
    for read in (
        made * torch.ones(9),
        made + 1,
        made[:, :1],
        made.to("cpu", torch.float64),
        made * made,
        made.unsqueeze(0) * 1,
        torch.cat((made, made)),
        made.to(torch.int32),
        made * torch.ones(2, 1, 1, 1),
    ):
        assert not isinstance(read, DistanceBias)
    assert torch.equal(made * torch.ones(2, 1, 1, 1), made.numbers().expand(2, -1, -1, -1))


def test_gradients_flow_through_numbers_and_no_other_way() -> None:
    made = bias(trained=True)
    with torch.no_grad():
        assert not (made + 0).requires_grad
    assert (made + 0).requires_grad
    expected = r"expected a trained bias of positions to be read by functions of torch, got"
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(Unsupported, match=expected):
        _ = made + 0
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(bias() + 0, bias().numbers())


# ---- calls of a layer


class Layer(torch.nn.Module):
    is_causal = False


def judged(q_len: int, kv_len: int, given: Any, mask: Any = None, reason: str = "", **others: Any) -> None:
    """Assert that a layer's call has the result of an explicit bias, and that it is dense only for the given reason."""
    query, key, value = random(3, 4, q_len, 16), random(3, 2, kv_len, 16, seed=1), random(3, 2, kv_len, 16, seed=2)
    found, _ = attention(Layer(), query, key, value, mask, position_bias=given, **others)
    shown = torch.zeros(1, 1, 1, kv_len) if mask is None else mask + 0
    weights = (query @ key.repeat_interleave(2, 1).mT) / 4 + given + shown
    expected = (weights.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)
    assert_close(found, expected)
    explanation = ragged.explain()
    assert ("dense" in explanation) is bool(reason), explanation
    assert reason in explanation


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("padded", ["none", "left", "holes"])
def test_one_query_takes_any_bias(padded: str, rows: int) -> None:
    shown = padding(padded)
    mask = _masks.mask(3, 1, 13, 12, attention_mask=shown)
    judged(1, 13, random(rows, 4, 1, 13, seed=3), mask)


def test_one_query_of_heads_that_no_page_takes() -> None:
    mask = _masks.mask(3, 1, 13, 12, attention_mask=padding("holes"))
    query, key, value = random(3, 2, 1, 12), random(3, 2, 13, 12, seed=1), random(3, 2, 13, 12, seed=2)
    given = random(1, 2, 1, 13, seed=3)
    found, _ = attention(Layer(), query, key, value, mask, position_bias=given)
    weights = query @ key.mT * 12**-0.5 + given + (mask + 0)
    assert_close(found, (weights.softmax(-1) @ value).transpose(1, 2))
    assert_none_dense()


def test_a_bias_of_zeros_is_none() -> None:
    zeros = torch.zeros(1, 4, 5, 9)
    judged(5, 9, zeros)
    zeros[0, 1, 2, 3] = 4.0
    judged(5, 9, zeros, reason=COUNTED)


def test_what_is_computed_densely() -> None:
    judged(4, 9, bias())
    for given, mask, reason in (
        (random(1, 4, 4, 9), None, COUNTED),
        (bias(first=4), None, "since its bias counts positions otherwise than its mask"),
        (bias()[:, :1], None, "since it has a bias of positions of another shape"),
    ):
        _calls_cleared()
        judged(4, 9, given.detach() if reason == COUNTED else given, mask, reason)


def _calls_cleared() -> None:
    from ragged_attention.integrations.transformers import _calls

    _calls.calls.clear()


def test_packed_sequences_keep_their_distances() -> None:
    edges = torch.tensor([0, 4, 9, 15])
    query, key, value = (random(1, 4, 15, 16, seed=seed) for seed in range(3))
    given = bias(15, 15, 0)
    arguments = {"position_bias": given, "cu_seq_lens_q": edges}
    found, _ = attention(Layer(), query, key, value, None, is_causal=True, cu_seq_lens_k=edges, **arguments)
    number = torch.bucketize(torch.arange(15), edges[1:], right=True)
    seen = (number[:, None] == number) & torch.ones(15, 15).tril().bool()
    weights = (query @ key.mT / 4 + given).masked_fill(~seen, -torch.inf)
    assert_close(found, (weights.softmax(-1) @ value).transpose(1, 2))
    assert "dense" not in ragged.explain()
    others = torch.tensor([0, 5, 9, 15])
    attention(Layer(), query, key, value, None, is_causal=True, cu_seq_lens_k=others, **arguments)
    assert "since it has a bias of positions between other sequences" in ragged.explain()


# ---- sinks for each query


@pytest.mark.parametrize("padded", ["none", "left", "holes"])
@pytest.mark.parametrize("q_len", [1, 13])
def test_sinks_of_each_query(q_len: int, padded: str) -> None:
    """Sinks for each query are computed by our operations, or densely if weights are dropped."""
    shown = padding(padded)
    mask = _masks.mask(3, q_len, 13, 13 - q_len, attention_mask=shown)
    query, key, value = random(3, 4, q_len, 16), random(3, 2, 13, 16, seed=1), random(3, 2, 13, 16, seed=2)
    sinks = random(3, 4, q_len, 1, seed=4) * 3
    logits = query @ key.repeat_interleave(2, 1).mT / 4 + (mask + 0)
    weights = torch.cat((logits, sinks), -1).softmax(-1)[..., :-1]
    expected = (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)
    judged = shown[:, -q_len:]
    found, _ = attention(Layer(), query, key, value, mask, sinks=sinks)
    assert_close(found, expected, judged)
    assert "dense" not in ragged.explain()
    found, _ = attention(Layer(), query, key, value, mask, sinks=sinks, dropout=1e-12)
    assert_close(found, expected, judged)


@pytest.mark.parametrize("chance", [0.0, 0.5])
def test_sinks_of_another_shape_are_refused(chance: float) -> None:
    x = random(2, 4, 5, 16)
    for sinks in (random(4), random(2, 4, 1, 1)):
        with pytest.raises(Unsupported, match=r"expected sinks of each query, \[2, 4, 5, 1\], got"):
            attention(Layer(), x, x, x, None, sinks=sinks, dropout=chance)


def test_sinks_of_each_query_have_a_gradient() -> None:
    query, key, value = (random(2, 4, 5, 16, seed=seed).requires_grad_() for seed in range(3))
    sinks, gradients = random(2, 4, 5, 1, seed=4).requires_grad_(), []
    for chance in (0.0, 1e-12):
        out, _ = attention(Layer(), query, key, value, None, sinks=sinks, dropout=chance)
        gradients.append(torch.autograd.grad(out.square().sum(), (query, key, value, sinks)))
    for found, expected in zip(*gradients, strict=True):
        assert_close(found, expected)


def test_one_query_has_the_gradient_of_its_bias_alone() -> None:
    query, key, value = random(2, 4, 1, 16), random(2, 4, 9, 16, seed=1), random(2, 4, 9, 16, seed=2)
    given, gradients = random(1, 4, 1, 9, seed=3).requires_grad_(), []
    for chance in (0.0, 1e-12):
        out, _ = attention(Layer(), query, key, value, None, position_bias=given, dropout=chance)
        gradients.append(torch.autograd.grad(out.square().sum(), given)[0])
    assert_close(*gradients)
