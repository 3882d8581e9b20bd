"""Compressed attention of transformers (deepseek_v4), in which keys are also values, on our operations."""

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ragged_attention.integrations import transformers as ragged  # noqa: E402
from ragged_attention.integrations.transformers import _calls, _lists  # noqa: E402
from ragged_attention.integrations.transformers._attention import attention  # noqa: E402
from tests.with_transformers import padding  # noqa: E402
from tests.with_transformers import registered as registered  # noqa: E402

# Ignore warnings of transformers about itself.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("registered")]
ROWS, LENGTH, NEW = 3, 13, 10
# Every kind of layer, the last kind twice. Windows, compression rates and lists are shorter than the sequences.
CONFIG: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4,
    "head_dim": 32, "partial_rotary_factor": 0.25, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "mlp_layer_types": ["moe"] * 4, "max_position_embeddings": 512,
    "layer_types": ["sliding_attention", "heavily_compressed_attention", *["compressed_sparse_attention"] * 2],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}, "sliding_window": 8,
    "index_n_heads": 16, "index_head_dim": 16, "index_topk": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def made(**changes: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**(CONFIG | changes)))
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or name.endswith("sinks"):
                torch.nn.init.normal_(parameter, std=0.2 if parameter.ndim > 1 else 1.0)
    return model.eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return made()


def tokens(rows: int = ROWS, length: int = LENGTH, seed: int = 0) -> Any:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


def expect_close(found: Any, expected: Any) -> None:
    assert found.isfinite().all()
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


def answers(model: Any, name: str, shown: Any = None, **options: Any) -> Any:
    model.set_attn_implementation(name)
    return model.generate(tokens(), attention_mask=shown, max_new_tokens=NEW, do_sample=False, output_logits=True,
                          return_dict_in_generate=True, **options)  # fmt: skip


def logits(model: Any, name: str, **arguments: Any) -> Any:
    model.set_attn_implementation(name)
    with torch.no_grad():
        return model(**({"input_ids": tokens()} | arguments)).logits


def trained(model: Any, name: str, **batch: Any) -> tuple[float, dict[str, Any]]:
    model = copy.deepcopy(model).train()
    model.set_attn_implementation(name)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def expect_alike(found: tuple[float, dict[str, Any]], expected: tuple[float, dict[str, Any]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=2e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() <= 2e-5 * gradient.norm() + 1e-7, name


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
@pytest.mark.parametrize("kind", ["none", "left"])
def test_generated_tokens_are_those_of_eager(model: Any, kind: str, options: dict[str, Any]) -> None:
    found, expected = (answers(model, name, padding(kind), **options) for name in (ragged.NAME, "eager"))
    assert torch.equal(found.sequences, expected.sequences)
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        expect_close(ours, theirs)
    explanation = ragged.explain()
    assert "mla_decode" in explanation
    assert "sparse_mla_prefill" in explanation
    assert "dense" not in explanation


@pytest.mark.parametrize("kind", ["none", "left", "right", "holes"])
def test_logits_are_those_of_eager_at_padding_too(model: Any, kind: str) -> None:
    """Logits equal eager's at padding too, because padding's outputs are pooled into compressed keys."""
    found, expected = (logits(model, name, attention_mask=padding(kind)) for name in (ragged.NAME, "eager"))
    expect_close(found, expected)
    assert "dense" not in ragged.explain()


def test_a_prompt_in_pieces(model: Any) -> None:
    """A prompt in pieces works if their lengths are not multiples of the compression rates.

    The cache then holds tokens for the next window.
    """
    found: dict[str, list[Any]] = {ragged.NAME: [], "eager": []}
    for name, parts in found.items():
        model.set_attn_implementation(name)
        cache = transformers.DynamicCache(config=model.config)
        for piece in tokens(length=24).split([7, 1, 3, 13], 1):
            with torch.no_grad():
                parts.append(model(piece, past_key_values=cache).logits)
    for ours, theirs in zip(*found.values(), strict=True):
        expect_close(ours, theirs)
    assert "dense" not in ragged.explain()


@pytest.mark.parametrize("kind", ["none", "left"])
def test_losses_and_gradients_are_those_of_eager(model: Any, kind: str) -> None:
    shown = padding(kind)
    batch = {"input_ids": tokens(), "attention_mask": shown, "labels": tokens().masked_fill(shown == 0, -100)}
    expect_alike(trained(model, ragged.NAME, **batch), trained(model, "eager", **batch))
    explanation = ragged.explain()
    assert "sparse_mla_prefill" in explanation
    assert "dense" not in explanation
    assert "mla_decode" not in explanation


def test_long_prompts_are_attended_to_in_parts(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = logits(model, ragged.NAME)
    monkeypatch.setattr(_lists, "QUERIES", 4)
    expect_close(logits(model, ragged.NAME), whole)


def random(*shape: int, seed: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


ROWS_OF_KEYS = random(2, 1, 5, 32, seed=1)
SHOWN = random(2, 1, 5, 5, seed=2) < 0.3
SHOWN[1, 0, 2] = False  # this query sees nothing


def shared(mask: Any = SHOWN, value: Any = ROWS_OF_KEYS, **named: Any) -> tuple[Any, bool]:
    """The attention of a layer whose keys are also its values, and whether it ran over lists of keys."""
    _calls.calls.clear()
    out, _ = attention(torch.nn.Module(), random(2, 3, 5, 32, seed=3), ROWS_OF_KEYS, value, mask, **named)
    return out, "mla" in ragged.explain()


def test_what_lists_do_not_take_is_computed_densely() -> None:
    expected, by_lists = shared()
    assert by_lists
    out, by_lists = shared(value=ROWS_OF_KEYS.clone())  # equal values, but not the same tensor
    assert not by_lists
    torch.testing.assert_close(out, expected)
    for mask in (SHOWN.expand(2, 3, 5, 5).clone(), torch.zeros(1, 1, 5, 5) + 0.5):
        assert not shared(mask)[1]
    out, by_lists = shared(torch.zeros(2, 1, 5, 5).masked_fill(~SHOWN, -torch.inf))
    assert by_lists
    torch.testing.assert_close(out, expected)
    for changes in ({"softcap": 3.0}, {"dropout": 0.5}, {"position_bias": torch.zeros(1, 3, 5, 5)},
                    {"sinks": torch.zeros(2, 3, 5, 1)},
                    {"indices": torch.zeros(2, 5, 2, dtype=torch.int32)}):  # fmt: skip
        assert not shared(**changes)[1], changes


def test_one_query_has_the_gradient_of_sinks_alone() -> None:
    query, shown = random(2, 3, 1, 32, seed=3), SHOWN[:, :, :1]
    sinks, dense = (torch.zeros(3, requires_grad=True) for _ in range(2))
    _calls.calls.clear()
    out, _ = attention(torch.nn.Module(), query, ROWS_OF_KEYS, ROWS_OF_KEYS, shown, s_aux=sinks, scaling=0.3)
    assert "sparse_mla_prefill" in ragged.explain()
    logits = (0.3 * query @ ROWS_OF_KEYS.mT).masked_fill(~shown, -torch.inf)
    weights = torch.cat([logits, dense[:, None, None].expand(2, 3, 1, 1)], -1).softmax(-1)[..., :-1]
    expected = (weights @ ROWS_OF_KEYS).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    for result in (out, expected):
        result.square().sum().backward()
    torch.testing.assert_close(sinks.grad, dense.grad)
