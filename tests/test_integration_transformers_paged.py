"""Continuous batching of latent attention in transformers generates eager's tokens from pages of latents."""

import inspect
import os
from types import SimpleNamespace
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import GenerationConfig  # noqa: E402
from transformers.generation.configuration_utils import ContinuousBatchingConfig  # noqa: E402
from transformers.generation.continuous_batching import cache as theirs  # noqa: E402
from transformers.generation.continuous_batching import continuous_api, input_outputs  # noqa: E402

from benchmarks.transformers_models.building import KINDS, build, configuration, draw_weights  # noqa: E402
from ragged_attention.demo.tiny import tiny_model  # noqa: E402
from ragged_attention.errors import Unsupported  # noqa: E402
from ragged_attention.integrations import transformers as ragged  # noqa: E402
from ragged_attention.integrations.transformers import _host, _paged_latents  # noqa: E402
from ragged_attention.integrations.transformers._paged_latents import Held, PagedLatentCache, Row, Step  # noqa: E402
from tests.with_transformers import registered as registered  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("registered")]
LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "sarvam_mla", "youtu")
SPARSE = ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4")
NEW = 9  # the number of generated tokens
STEP = 24  # tokens per step; the longest prompt has more
SETTINGS: dict[str, Any] = {"page_size": 8, "num_blocks": 40, "max_batch_tokens": STEP, "max_requests_per_batch": 6}


def built(family: str, kind: str) -> Any:
    if family not in KINDS[kind][1]:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return build(family, kind)


def prompt(length: int) -> list[int]:
    return torch.randint(4, 200, (length,), generator=torch.Generator().manual_seed(length)).tolist()


PROMPTS = [prompt(length) for length in (3, 11, 30, 7, 8, 16, 1)]
PROMPTS += [[*PROMPTS[2][:20], 7, 8], PROMPTS[2][:24], PROMPTS[2]]  # prompts with shared beginnings


def alone(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens that transformers' eager attention generates after each prompt, run alone."""
    model.set_attn_implementation("eager")
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    made = (model.generate(torch.tensor([each]), max_new_tokens=NEW, do_sample=False) for each in prompts)
    return [tokens[0, -NEW:].tolist() for tokens in made]


def batched(model: Any, prompts: list[list[int]], end: int = -1, **settings: Any) -> list[list[int]]:
    """The tokens of `generate_batch`; each sequence ends with its first `end`."""
    model.set_attn_implementation(ragged.PAGED_NAME)
    made = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=end, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(**(SETTINGS | settings)),
        warmup=False,
    )
    return [made[name].generated_tokens for name in sorted(made, key=lambda name: int(name.rpartition("_")[2]))]


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that collects new caches, whose slots hold NaN until they are written."""
    made: list[Any] = []
    original = PagedLatentCache.__init__

    def poisoned(self: Any, *given: Any, **arguments: Any) -> None:
        original(self, *given, **arguments)
        self.cache_tensor.view(arguments["dtype"]).fill_(torch.nan)
        made.append(self)

    monkeypatch.setattr(PagedLatentCache, "__init__", poisoned)
    return made


# ---- generated tokens


@pytest.mark.parametrize("family", LATENT + SPARSE)
def test_every_family_has_the_tokens_of_eager(family: str, caches: list[Any]) -> None:
    """Every family generates eager's tokens.

    Prompts are split into pieces and share beginnings; requests wait, and end at different steps.
    """
    model = built(family, "causal")
    expected = alone(model, PROMPTS)
    end = expected[0][4]
    expected = [each[: each.index(end) + 1] if end in each else each for each in expected]
    assert len({len(each) for each in expected}) > 1
    ragged.absorb_mla(model)
    assert batched(model, PROMPTS, end) == expected
    assert len(caches) == 1
    told = ragged.explain()
    assert ("sparse_mla_prefill" in told and "mla_decode" in told and "indexer_topk" in told) == (family in SPARSE)
    assert ("ragged_mla_attention" in told) == (family in LATENT or family == "dots3_note_text")
    assert "dense" not in told


@pytest.mark.parametrize("family", ["mistral4", "hy_v4_vl"])
def test_models_of_images_batch_text(family: str, caches: list[Any]) -> None:
    model = built(family, "images")
    expected = alone(model, PROMPTS)
    assert batched(ragged.absorb_mla(model), PROMPTS) == expected
    assert caches


@pytest.mark.parametrize("indexers", ["full full full full", "full full shared full"])
def test_layers_that_share_latents_read_the_same_pages(indexers: str, caches: list[Any]) -> None:
    """Layers that share latents read the same pages in mistral_large4.

    Its layers without rotation share other latents than the rotated ones, and their indexers do not rotate.
    """
    config = configuration("mistral_large4", "images")
    text = config.text_config
    text.num_hidden_layers, text.mlp_layer_types = 4, ["dense", "sparse", "sparse", "sparse"]
    text.layer_types, text.indexer_types = ["indexed_attention"] * 4, indexers.split()
    text.no_rope_layers, text.kv_source_layers = [1, 0, 1, 0], [0, 1, 0, 1]
    model = KINDS["images"][0].from_config(config, attn_implementation="eager").eval().float()
    draw_weights(model)
    expected = alone(model, PROMPTS)
    assert batched(ragged.absorb_mla(model), PROMPTS) == expected
    assert [row.source for row in caches[0].rows.values()] == [0, 1, 0, 1]
    assert [row.latent for row in caches[0].rows.values()] == [48, 32, 0, 0]


@pytest.mark.parametrize("family", ["deepseek_v3", "glm_moe_dsa"])
def test_shared_beginnings_are_computed_once(family: str, caches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    original = theirs.PagedAttentionCache.search_prefix_match

    def counted(self: Any, *given: Any) -> int:
        found.append(original(self, *given))
        return found[-1]

    monkeypatch.setattr(theirs.PagedAttentionCache, "search_prefix_match", counted)
    model = tiny_model(family)
    prompts = [PROMPTS[2], [*PROMPTS[2], 9], PROMPTS[2][:25]]
    expected = alone(model, prompts)
    ragged.absorb_mla(model)
    assert batched(model, prompts, max_requests_per_batch=1) == expected
    assert found[0] == 0
    assert min(found[1:]) >= 24
    assert caches[0].use_prefix_sharing


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_requests_that_do_not_fit_wait(family: str, caches: list[Any]) -> None:
    model = tiny_model(family)
    expected = alone(model, PROMPTS)
    ragged.absorb_mla(model)
    assert batched(model, PROMPTS, num_blocks=8) == expected
    assert caches[0].num_blocks == 8


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_steps_of_fixed_shapes(family: str, caches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of fixed shapes, as device graphs need, work: padding tokens and keys belong to no sequence."""
    inputs = input_outputs.ContinuousBatchingIOs
    prepare, kwargs = inputs.prepare_batch_tensors, inputs.get_model_kwargs
    shapes: set[tuple[int, ...]] = set()

    def prepared(self: Any, **arguments: Any) -> None:
        read = self.cache.max_tokens_read if arguments["max_kv_read"] else 0
        prepare(self, **(arguments | {"num_q_tokens": STEP, "max_kv_read": read, "use_padding": True}))

    def padded(self: Any, use_padding: bool = False) -> Any:
        found = kwargs(self, use_padding=True)
        shapes.add((found["input_ids"].numel(), found["read_index"][0].numel(), found["cu_seq_lens_q"].numel()))
        return found

    monkeypatch.setattr(inputs, "prepare_batch_tensors", prepared)
    monkeypatch.setattr(inputs, "get_model_kwargs", padded)
    model = tiny_model(family)
    expected = alone(model, PROMPTS)
    ragged.absorb_mla(model)
    assert batched(model, PROMPTS) == expected
    assert shapes == {(STEP, 0, 7), (STEP, 40 * 8 + STEP, 7)}
    assert caches


def test_forked_requests_copy_their_pages(caches: list[Any]) -> None:
    model = tiny_model("deepseek_v32")
    expected = alone(model, PROMPTS[:3])
    ragged.absorb_mla(model)
    asked = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    asked.num_return_sequences = 3  # set later, because the constructor refuses it without sampling
    made = model.generate_batch(
        PROMPTS[:3],
        generation_config=asked,
        continuous_batching_config=ContinuousBatchingConfig(**SETTINGS),
        warmup=False,
    )
    found = sorted(each.generated_tokens for each in made.values())
    assert found == sorted(each for each in expected for _ in range(3))
    assert caches


def test_a_model_still_generates_afterwards(caches: list[Any]) -> None:
    model = ragged.absorb_mla(tiny_model("deepseek_v32"))
    tokens = torch.tensor([PROMPTS[2]])
    before = model(tokens, use_cache=False).logits
    batched(model, PROMPTS[:2])
    assert torch.equal(model(tokens, use_cache=False).logits, before)
    assert caches


def test_each_pass_finds_its_places_anew() -> None:
    """Each pass computes its slots anew, even from the same tensors, which a device graph refills before a replay."""
    cache = cache_of(ragged.absorb_mla(tiny_model("deepseek_v3")))
    edges, index = torch.tensor([0, 3], dtype=torch.int32), cache.cache_allocators["full_attention"].write_trash_index
    places = {
        "write_index": [torch.arange(3) + index], "read_index": [torch.empty(0, dtype=torch.int64)],
        "cu_seq_lens_q": edges, "cu_seq_lens_k": {"full_attention": edges}, "max_length_q": 3,
        "max_length_k": {"full_attention": 3},
    }  # fmt: skip
    first, second = cache.enter(0, places).step, cache.enter(1, places).step
    assert first is second
    assert cache.enter(0, places).step is not first
    page = int(first.table)
    assert first.slots.tolist() == [8 * page, 8 * page + 1, 8 * page + 2]
    assert 8 * page * cache.cache_allocators["full_attention"].bytes_per_block == 8 * cache.bytes_per_sector


# ---- memory


def cache_of(model: Any, **settings: Any) -> Any:
    model.set_attn_implementation(ragged.PAGED_NAME)
    manager = model.init_continuous_batching(
        GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        ContinuousBatchingConfig(**(SETTINGS | settings)),
    )
    return manager._create_batch_processor().cache


def test_a_block_has_the_bytes_of_its_latents_and_keys() -> None:
    """A block has the bytes of its latents and indexer keys.

    The second layer of glm_moe_dsa uses the selection of the first, so it has no indexer keys.
    """
    cache = cache_of(ragged.absorb_mla(tiny_model("glm_moe_dsa")))
    assert cache.rows == {0: Row(48, 16, 0), 1: Row(48, 0, 1)}  # 40 columns, padded with zeros to 48
    block = 8 * (48 + 16 + 48) * 4
    assert cache.cache_allocators["full_attention"].bytes_per_block == block
    assert cache.num_blocks == 40
    assert cache.cache_tensor.numel() == 40 * block + 2 * cache.bytes_per_sector
    held = cache._latents[1].untyped_storage().data_ptr(), cache._keys[0].untyped_storage().data_ptr()
    assert held == (cache.cache_tensor.data_ptr(),) * 2


def test_the_number_of_blocks_follows_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    available = 20_000_000
    monkeypatch.setattr(theirs.PagedAttentionMemoryHandler, "get_available_memory", lambda self: available)
    model = ragged.absorb_mla(tiny_model("deepseek_v3"))
    cache = cache_of(model, num_blocks=None)
    block = 8 * 2 * 48 * 4
    taken = cache.num_blocks * block
    assert 0.5 * available < taken < available
    heads = 4 * (16 + 8 + 16) * 2 * 8 * 4  # bytes of a block with keys and values of each head
    assert cache.num_blocks > available / heads


# ---- refusals


def test_a_model_that_is_not_absorbed_is_told_what_to_do() -> None:
    with pytest.raises(
        Unsupported, match=r"expected absorb_mla\(model\) before generate_batch, since transformers cannot page latents"
    ):
        batched(tiny_model("deepseek_v3"), PROMPTS)
    with pytest.raises(Unsupported, match=r"expected absorb_mla\(model\) before generate_batch, .* got DeepseekV32For"):
        batched(tiny_model("deepseek_v32"), PROMPTS)


def test_layers_of_other_kinds_are_refused() -> None:
    model = ragged.absorb_mla(tiny_model("deepseek_v3"))
    model.config.num_hidden_layers = 3
    with pytest.raises(Unsupported, match="expected latent attention in all layers in generate_batch, got 2 of 3 in D"):
        batched(model, PROMPTS)


def test_indexers_of_other_forms_are_refused() -> None:
    model = ragged.absorb_mla(tiny_model("deepseek_v32", index_head_dim=24))
    with pytest.raises(
        Unsupported, match="expected indexers of a known form in generate_batch, got DeepseekV32Indexer"
    ):
        batched(model, PROMPTS)


def test_tensor_parallelism_is_refused() -> None:
    arguments = {"config": None, "dtype": torch.float32, "distributed_helper": SimpleNamespace(tp_size=2)}
    with pytest.raises(Unsupported, match="expected continuous batching over latents on one device, got tensor para"):
        PagedLatentCache({0: Row(48, 0, 0)}, 1, **arguments)


@pytest.mark.parametrize("written", [False, True])
def test_what_lists_and_shared_latents_do_not_do_is_refused(written: bool) -> None:
    places = torch.zeros(1, dtype=torch.int32)
    step = Step(places[None], places, places, places, 1, 1, {0} if written else set())
    held = Held(0, torch.zeros(1, 8, 1, 48), torch.zeros(1, 8, 0), step)
    settings = {"sliding_window": 4, "soft_cap": None, "sm_scale": 1.0, "d_v": 32, "sinks": None}
    message = (
        "without a window in continuous batching, got Module" if written else "that write their latents in continu"
    )
    with pytest.raises(Unsupported, match=message):
        _paged_latents.attend(torch.nn.Module(), torch.zeros(1, 1, 4, 48), held, places[None, None], settings)


def test_a_soft_cap_beside_lists_is_that_of_a_decode() -> None:
    random = torch.Generator().manual_seed(0)
    q, latents = torch.randn(1, 5, 4, 48, generator=random), torch.randn(2, 8, 1, 48, generator=random)
    edges = torch.tensor([0, 5], dtype=torch.int32)
    step = Step(torch.tensor([[1, 0]]).int(), edges[1:] + 4, edges, edges, 9, 5, {0})
    lists = torch.tensor([8, 10, -1]).int().expand(1, 5, 3)
    settings = {"sliding_window": None, "soft_cap": 2.0, "sm_scale": 0.3, "d_v": 32, "sinks": None}
    found = _paged_latents.attend(torch.nn.Module(), q, Held(0, latents, latents, step), lists, settings)
    rows = latents.flatten(0, 2)[[8, 10]]
    weights = (2.0 * torch.tanh(torch.einsum("bthd,nd->bthn", q, rows) * 0.3 / 2.0)).softmax(-1)
    torch.testing.assert_close(found, torch.einsum("bthn,nd->bthd", weights, rows[:, :32]))


# ---- registration


def test_unregistering_puts_back_all_that_was_replaced() -> None:
    ragged.unregister()
    before = [vars(owner)[name] for owner, name, _ in _host.REPLACED]
    ragged.register()
    assert not any(vars(owner)[name] is was for (owner, name, _), was in zip(_host.REPLACED, before, strict=True))
    ragged.unregister()
    assert all(vars(owner)[name] is was for (owner, name, _), was in zip(_host.REPLACED, before, strict=True))
    assert inspect.isclass(vars(continuous_api)["PagedAttentionCache"])


def test_other_models_and_attentions_get_the_cache_of_transformers() -> None:
    assert type(cache_of(tiny_model("llama"))) is theirs.PagedAttentionCache
    llama = tiny_model("llama")
    llama.set_attn_implementation("sdpa")
    manager = llama.init_continuous_batching(
        GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0), ContinuousBatchingConfig(**SETTINGS)
    )
    assert type(manager._create_batch_processor().cache) is theirs.PagedAttentionCache
