"""Sparse grouped-query attention of transformers (MiniMax M3 and Qwen4) on our operations."""

import copy
import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ragged_attention.errors import Unsupported  # noqa: E402
from ragged_attention.integrations import transformers as ragged  # noqa: E402
from ragged_attention.integrations.transformers import _attention, _dense, _selection, _sequences  # noqa: E402
from ragged_attention.integrations.transformers._masks import Mask, Pattern  # noqa: E402
from tests.with_transformers import assert_close  # noqa: E402
from tests.with_transformers import registered as registered  # noqa: E402

# Ignore warnings of transformers about itself.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("registered")]
ROWS, LENGTH, NEW = 3, 45, 6
DENSE = _dense.attend
LENS = (45, 22, 38)  # the prompts' lengths in padded rows
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_experts_per_tok": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
# One dense layer and two sparse ones, whose lists of three blocks omit more than half of the last queries' keys.
MINIMAX_M3 = SIZES | {
    "intermediate_size": 32, "dense_intermediate_size": 32, "shared_intermediate_size": 16, "num_local_experts": 4,
    "layer_types": ["full_attention", *["minimax_m3_sparse"] * 2], "mlp_layer_types": ["dense", "sparse", "sparse"],
    "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 8, "index_topk_blocks": 3, "index_local_blocks": 1,
}  # fmt: skip
# There are enough index heads that no two groups both have a score of 0.
QWEN4 = SIZES | {
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4, "hc_lowrank": 8,
    "hc_count": 2,
    "layer_types": ["linear_attention", *["indexed_attention"] * 2], "indexer_n_heads": 16, "indexer_kv_heads": 1,
    "indexer_head_dim": 16, "indexer_budget": 12, "indexer_compress_ratio": 4,
}  # fmt: skip
FAMILIES = {"minimax_m3_vl_text": MINIMAX_M3, "qwen4_exp_text": QWEN4}
INDEXERS = {"minimax_m3_vl_text": "MiniMaxM3VLIndexer: select_blocks", "qwen4_exp_text": "QSAIndexer: indexer_topk"}


@functools.cache
def made(family: str, **changes: Any) -> Any:
    config = transformers.CONFIG_MAPPING[family](**(FAMILIES[family] | changes))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def never_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    def dense(*_: Any) -> Any:
        raise AssertionError("expected attention by lists, got dense attention")

    monkeypatch.setattr(_dense, "attend", dense)


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """A list that collects our operations' calls: the name, and the share of keys in the last query's lists or None."""
    found: list[tuple[str, Any]] = []

    def watched(operation: Any, kv_lens: Any) -> Any:
        def run(*args: Any, **settings: Any) -> Any:
            share, selected = None, settings.get("selected")
            if selected is not None:
                named = (selected[-1] >= 0).sum(-1).float().mean() * settings["block_size"]
                share = float(named / kv_lens(args).max())
            found.append((operation.__name__, share))
            return operation(*args, **settings)

        return run

    monkeypatch.setattr(
        _attention, "ragged_paged_attention", watched(_attention.ragged_paged_attention, lambda a: a[2])
    )
    monkeypatch.setattr(_sequences, "varlen_attention", watched(_sequences.varlen_attention, lambda a: a[4].diff()))
    return found


def tokens(rows: int = ROWS, length: int = LENGTH, seed: int = 0) -> Any:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


def shown(side: str) -> Any:
    """The attention mask of prompts of `LENS` tokens, padded on the given side."""
    left = (LENGTH - torch.arange(LENGTH) <= torch.tensor(LENS)[:, None]).long()
    return left if side == "left" else left.flip(1)


def answers(model: Any, name: str, ids: Any, mask: Any = None, **options: Any) -> tuple[Any, Any]:
    """The tokens that are generated after prompts, and their logits."""
    model.set_attn_implementation(name)
    made = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    return made.sequences[:, ids.shape[1] :], torch.stack(made.logits, 1)


def logits(model: Any, name: str, ids: Any, **arguments: Any) -> Any:
    model.set_attn_implementation(name)
    with torch.no_grad():
        return model(ids, **arguments).logits


def trained(model: Any, name: str, *batches: Any, weights: Any = (1.0,)) -> tuple[float, dict[str, Any]]:
    """The weighted loss of batches and its gradients."""
    model = copy.deepcopy(model).train()
    model.set_attn_implementation(name)
    loss = torch.stack([model(**batch, use_cache=False).loss for batch in batches]) @ torch.tensor(weights)
    loss.backward()
    return loss.item(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def expect_alike(found: tuple[float, dict[str, Any]], expected: tuple[float, dict[str, Any]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=2e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() <= 5e-5 * gradient.norm() + 1e-7, name


# ---- generation


@pytest.mark.parametrize("cache", [None, "static"])
def test_tokens_are_those_of_eager_and_sdpa(family: str, cache: str | None, lists: Any) -> None:
    model, ids = made(family), tokens()
    found, scores = answers(model, ragged.NAME, ids, cache_implementation=cache, disable_compile=True)
    for name in ("eager", "sdpa"):
        expected, theirs = answers(model, name, ids)
        assert torch.equal(found, expected)
        assert_close(scores, theirs)
    explanation = ragged.explain()
    assert INDEXERS[family] in explanation
    assert "dense" not in explanation
    for operation, times in (("varlen_attention", 1), ("ragged_paged_attention", NEW - 1)):
        shares = [share for name, share in lists if name == operation and share is not None]
        assert len(shares) == 2 * times  # there are two sparse layers
        assert max(shares) < 0.6


def test_beams_take_the_index_keys_with_them(family: str) -> None:
    model, ids = made(family), tokens(rows=2)
    (found, _), (expected, _) = (answers(model, name, ids, num_beams=3) for name in (ragged.NAME, "eager"))
    assert torch.equal(found, expected)


def test_prompts_with_padding_before_them_are_answered_as_if_alone(family: str) -> None:
    """Prompts with padding before them get the answers of single prompts.

    transformers' indexer of MiniMax M3 counts padding as keys of blocks; ours does not.
    """
    model, ids, mask = made(family), tokens(), shown("left")
    found, scores = answers(model, ragged.NAME, ids, mask)
    for row, length in enumerate(LENS):
        expected, theirs = answers(model, "eager", ids[row : row + 1, LENGTH - length :])
        assert torch.equal(found[row : row + 1], expected)
        assert_close(scores[row : row + 1], theirs)


def test_logits_with_padding_behind_are_those_of_eager(family: str) -> None:
    model, ids, mask = made(family), tokens(), shown("right")
    found, expected = (logits(model, name, ids, attention_mask=mask) for name in (ragged.NAME, "eager"))
    assert_close(found, expected, mask)


def test_a_prompt_in_pieces(family: str, lists: Any) -> None:
    """A prompt in pieces works if their lengths are not multiples of the block size."""
    model, parts = made(family), {}
    for name in (ragged.NAME, "eager"):
        model.set_attn_implementation(name)
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            pieces = [model(piece, past_key_values=cache).logits for piece in tokens().split([19, 1, 3, 22], 1)]
        parts[name] = torch.cat(pieces, 1)
    assert_close(parts[ragged.NAME], parts["eager"])
    assert min(share for name, share in lists if name == "varlen_attention" and share is not None) < 0.6


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("minimax_m3_vl_text", {"index_n_heads": 1, "index_head_dim": 24, "index_block_size": 4}),
        ("minimax_m3_vl_text", {"index_local_blocks": 3, "index_block_size": 2, "num_key_value_heads": 4,
                                "index_n_heads": 2}),
        ("minimax_m3_vl_text", {"index_local_blocks": 0, "head_dim": 24}),
        ("qwen4_exp_text", {"indexer_compress_ratio": 1, "indexer_budget": 9}),
        ("qwen4_exp_text", {"indexer_compress_ratio": 3, "indexer_head_dim": 24}),
        ("qwen4_exp_text", {"indexer_compress_ratio": 64, "indexer_budget": 64}),  # no group is complete
    ],
)  # fmt: skip
def test_other_sizes(family: str, changes: dict[str, Any]) -> None:
    model, ids = made(family, **changes), tokens()
    found, scores = answers(model, ragged.NAME, ids)
    expected, theirs = answers(model, "eager", ids)
    assert torch.equal(found, expected)
    assert_close(scores, theirs)
    assert "dense" not in ragged.explain()


# ---- training


def batch(ids: Any, mask: Any = None) -> dict[str, Any]:
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "labels": labels} | ({} if mask is None else {"attention_mask": mask})


@pytest.mark.parametrize("side", [None, "right"])
def test_losses_and_gradients_are_those_of_eager(family: str, side: str | None, lists: Any) -> None:
    model, given = made(family), batch(tokens(), None if side is None else shown(side))
    expect_alike(trained(model, ragged.NAME, given), trained(model, "eager", given))
    assert sum(share is not None for _, share in lists) == 2
    assert {name for name, _ in lists} == {"varlen_attention"}


def sequences() -> list[Any]:
    return [tokens(1, length, seed=length) for length in LENS]


def packed() -> dict[str, Any]:
    """The sequences in one row, separated by their positions; the first label of each is -100."""
    ids, labels = torch.cat(sequences(), 1), torch.cat(sequences(), 1)
    positions = torch.cat([torch.arange(length) for length in LENS])[None]
    return {"input_ids": ids, "labels": labels.masked_fill(positions == 0, -100), "position_ids": positions}


def edges() -> dict[str, Any]:
    """The arguments that `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` adds."""
    of_tokens = torch.nn.functional.pad(torch.tensor(LENS).cumsum(0), (1, 0)).int()
    return {"cu_seq_lens_q": of_tokens, "cu_seq_lens_k": of_tokens, "max_length_q": max(LENS),
            "max_length_k": max(LENS)}  # fmt: skip


@pytest.mark.parametrize("told_by", ["positions", "edges"])
def test_packed_sequences_of_minimax_m3_are_those_alone(told_by: str, lists: Any) -> None:
    """Packed sequences of MiniMax M3 have the loss and gradients of separate sequences.

    transformers' indexer mistakes the positions of packed sequences for indices in the row.
    """
    model, counts = made("minimax_m3_vl_text"), [length - 1 for length in LENS]
    given = packed() | (edges() if told_by == "edges" else {})
    weights = [count / sum(counts) for count in counts]
    alone = trained(model, "eager", *map(batch, sequences()), weights=weights)
    expect_alike(trained(model, ragged.NAME, given), alone)
    assert sum(share is not None for _, share in lists) == 2


def test_packed_sequences_of_qwen4_are_those_of_eager(lists: Any) -> None:
    """Packed sequences of Qwen4 agree with eager attention on the packed row.

    They differ from separate sequences, because sparse layers split sequences by positions and recurrent layers do not.
    """
    model, given = made("qwen4_exp_text"), packed()
    expect_alike(trained(model, ragged.NAME, given), trained(model, "eager", given))
    assert sum(share is not None for _, share in lists) == 2


# ---- selected blocks


def test_keys_of_blocks_that_are_not_named_are_not_read(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of blocks that are not listed are not read: here they are NaN."""
    model, ids, right, times = made(family), tokens(), _attention.ragged_paged_attention, []

    def poisoned(q: Any, pages: Any, *tables: Any, **settings: Any) -> Any:
        if (selected := settings.get("selected")) is not None:
            block = torch.arange(pages[0].shape[1]) // settings["block_size"]
            named = (
                (selected[..., None] == block).any(2).transpose(1, 2)
            )  # each page holds a whole row; the shape is [B, L, K or 1]
            pages = tuple(part.masked_fill(~named[..., None], torch.nan) for part in pages)
            times.append(float(named.float().mean()))
        return right(q, pages, *tables, **settings)

    expected = answers(model, "eager", ids)
    monkeypatch.setattr(_attention, "ragged_paged_attention", poisoned)
    found = answers(model, ragged.NAME, ids)
    assert torch.equal(found[0], expected[0])
    assert_close(found[1], expected[1])
    assert len(times) == 2 * (NEW - 1)
    assert max(times) < 0.6


def test_a_compiled_forward_of_minimax_m3_generates_the_same() -> None:
    model, ids, mask = made("minimax_m3_vl_text"), tokens(), torch.ones(ROWS, LENGTH, dtype=torch.long)
    expected, _ = answers(model, "eager", ids, mask)
    forward = model.forward
    torch._dynamo.reset()
    try:
        model.forward = torch.compile(forward, backend="eager", fullgraph=True)
        found, _ = answers(model, ragged.NAME, ids, mask, cache_implementation="static")
    finally:
        model.forward = forward
        torch._dynamo.reset()
    assert torch.equal(found, expected)


def test_other_attention_has_the_indexers_of_transformers() -> None:
    model = made("minimax_m3_vl_text")
    found: list[Any] = []
    hook = model.model.layers[1].self_attn.indexer.register_forward_hook(lambda *given: found.append(given[2]))
    logits(model, "sdpa", tokens())
    hook.remove()
    assert found[0].shape == (ROWS, 2, LENGTH, 3)
    ragged.unregister()
    assert not hasattr(type(model.model.layers[1].self_attn.indexer).forward, "original")


# ---- attention without lists


def test_masks_that_are_not_causal_stay_with_the_indexer_of_qwen4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen4 uses its own indexer if a mask has too many key ranges: here each visible key is a separate range."""
    model = made("qwen4_exp_text")
    monkeypatch.setattr(_dense, "attend", DENSE)
    mask = torch.ones(LENGTH, LENGTH).tril().bool() & ((torch.arange(LENGTH) % 2 == 0) | torch.eye(LENGTH).bool())
    numbers = torch.zeros(LENGTH, LENGTH).masked_fill(~mask, torch.finfo(torch.float32).min).expand(ROWS, 1, -1, -1)
    given = {"attention_mask": {"indexed_attention": numbers, "linear_attention": None}}
    assert_close(*(logits(model, name, tokens(), **given) for name in (ragged.NAME, "eager")))
    assert "its mask is not up to 8 ranges of keys for all heads" in ragged.explain()
    assert "indexer_topk" not in ragged.explain()


def test_numbers_of_64_bits_stay_with_the_indexer_of_qwen4(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(made("qwen4_exp_text")).double()
    model.set_experts_implementation("eager")  # the other implementation lacks float64
    monkeypatch.setattr(_dense, "attend", DENSE)
    assert_close(*(logits(model, name, tokens()) for name in (ragged.NAME, "eager")))
    assert "indexer_topk" not in ragged.explain()


REFUSED = "expected selected blocks of keys in calls that our operations take, got"


def test_dropped_weights_are_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dense, "attend", DENSE)  # the model's dense layer may be computed densely
    model = made(family, attention_dropout=0.1)
    with pytest.raises(Unsupported, match=f"{REFUSED} .*Attention: it drops weights"):
        trained(model, ragged.NAME, batch(tokens()))


def test_what_lists_of_minimax_m3_do_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dense, "attend", DENSE)  # the model's dense layer may be computed densely
    model, ids = made("minimax_m3_vl_text"), tokens()
    with pytest.raises(Unsupported, match=f"{REFUSED} MiniMaxM3VLAttention: it is in torch.float64"):
        logits(copy.deepcopy(model).double(), ragged.NAME, ids)
    near = torch.ones(LENGTH, LENGTH).tril().triu(-9)[None, None].bool()
    with pytest.raises(Unsupported, match=f"{REFUSED} .*: its mask is not causal, or hides more than padding and oth"):
        logits(model, ragged.NAME, ids, attention_mask=near)
    with pytest.raises(Unsupported, match=f"{REFUSED} .*: it has 3 index heads and 2 KV heads"):
        logits(made("minimax_m3_vl_text", index_n_heads=3), ragged.NAME, ids)


@pytest.mark.parametrize(
    "pattern", [Pattern(causal=True, window=3), Pattern(), Pattern(causal=True, blind=torch.ones(1))]
)
def test_patterns_from_which_no_indexer_selects(pattern: Pattern) -> None:
    assert not _selection.takes(pattern, q_len=2)


def eager_attention_forward(module: Any, query: Any, key: Any, value: Any, mask: Any, special: Any = None) -> Any:
    raise AssertionError


class Special(torch.nn.Module):
    def forward(self) -> Any:
        return eager_attention_forward


def test_keywords_of_eager_attention_alone_are_refused() -> None:
    x = torch.zeros(1, 2, 3, 16)
    selection = _selection.Blocks(None, x, x[:, :1])
    with pytest.raises(Unsupported, match=f"{REFUSED} Special: it has keywords that only the model's own eager"):
        _attention.attention(Special(), x, x, x, None, is_causal=True, block_indices=selection, special=x)


def test_nobody_else_reads_what_is_selected() -> None:
    x = torch.zeros(1, 1, 3, 16)
    groups: Any = _selection.Groups(None, x, x, (x, x))
    mask = Mask(Pattern(causal=True), (1, 1, 3, 3), torch.float32, "cpu")
    hidden = mask.masked_fill(~groups, torch.finfo(torch.float32).min)
    with pytest.raises(Unsupported, match="expected masks of selected keys to be read by our attention alone"):
        hidden.any()
    for misuse in (lambda: torch.add(mask, groups), lambda: mask.masked_fill(groups, 0.0)):
        with pytest.raises(Unsupported, match="expected selected groups of keys to hide keys of a mask alone"):
            misuse()


def test_continuous_batching_is_refused(family: str) -> None:
    """Continuous batching is refused, because transformers has no pages for these indexers' keys."""
    model = made(family)
    model.set_attn_implementation(ragged.PAGED_NAME)
    with pytest.raises(Unsupported, match="expected a model whose keys transformers can page in generate_batch, got"):
        model.generate_batch([[3, 4, 5]], transformers.GenerationConfig(max_new_tokens=2, do_sample=False))
