"""End-to-end checks in vLLM's engine: a small random model must give the same tokens with our backend and another one.

The other side is usually vLLM's own CPU backend. It has no caches with scales per token and head, so models with such
caches are compared with vLLM's Triton backend in Triton's interpreter. vLLM does not serve sparse models on a CPU. They
are compared with transformers' own model instead. Its indexer's queries and keys are rounded to 8 bits as vLLM stores
them, since the rounding decides which keys are selected. vLLM's CPU backend also lacks some masks: images whose tokens
see one another, small chunks, and prompts that stay in view. Models with such masks are compared with transformers too.

    python -m benchmarks.vllm_check [--models "llama;gemma2"] [--limit SECONDS]

Run it in a separate environment with vLLM for CPUs and this package. docs/vllm.md explains how to make one. Each model
is a checkpoint with random weights: a few layers with the features that matter, such as grouped heads, windows, soft
caps, sinks and latents. Each model is served twice, in two processes. The prompts have several lengths and do not fit
into one step, so that batches mix chunks of prompts and decodes. Encoders embed the prompts, and an encoder-decoder
model transcribes random sounds. The exit code is 1 if a run fails or a token differs. In bfloat16, with 8-bit caches
and for embeddings, it is 1 if the mean difference of the numbers exceeds a bound.
"""

import argparse
import dataclasses
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import vllm_images, vllm_m3, vllm_masks, vllm_v4

VOCABULARY = 512
REFERENCE, TRITON = "transformers", "triton"
PROMPT_LENGTHS = (3, 17, 70, 33, 1, 90)
NEW_TOKENS = 24
ANSWER = "answer: "
NEVER = -100.0  # the bias of a token that must never be drawn

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A tiny model: its transformers classes, configuration settings and engine settings."""

    config: str
    architecture: str
    settings: dict[str, Any]
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    # If set, tokens may differ, and `gap` bounds the mean difference of the prompts' log-probabilities.
    gap: float | None = None
    task: str = "generate"  # also "embed", "transcribe" or "look"
    toward_zero: bool = False  # round keys and values toward zero to e4m3 before our backend writes them
    # Our side has an nvfp4 cache. vLLM's side has a cache without scales, whose keys and values are rounded to nvfp4.
    is_nvfp4: bool = False
    # The other side: vLLM's CPU backend, its Triton backend, or transformers if vLLM needs our backend for the model.
    against: str = "vllm"
    # The mask of layers with windows, if the other side's model has no such mask. It is a function of the positions of
    # queries, the positions of keys, and the length of the prompt.
    sees: Callable[[Any, Any, int], Any] | None = None
    lengths: tuple[int, ...] = PROMPT_LENGTHS


# Engine settings for models that vLLM runs only with a tokenizer, with whole prompts in a step, and without a prefix
# cache.
_WHOLE = {"skip_tokenizer_init": False, "max_num_batched_tokens": 256, "enable_prefix_caching": False}
_LOOKING = {"skip_tokenizer_init": False, "max_num_batched_tokens": 96, "max_model_len": 320}
_V4, _M3 = "DeepseekV4Config", "MiniMaxM3VLTextConfig"
_RENAMED: dict[str, Any] = {
    _V4: vllm_v4,
    _M3: vllm_m3,
}  # models whose parameters have other names in vLLM's checkpoints
_LLAMA = Model("LlamaConfig", "LlamaForCausalLM", {})
_WINDOW = {"sliding_window": 16}
MODELS = {
    "llama": _LLAMA,
    "llama, pages of 128": dataclasses.replace(_LLAMA, engine={"block_size": 128}),
    # Roundings of 2^-9 decide between likely tokens, and after the first different token all later tokens differ.
    "llama, bfloat16": dataclasses.replace(_LLAMA, engine={"dtype": "bfloat16"}, gap=0.01),
    # vLLM's CPU operator rounds to e4m3 toward zero, and ours to nearest. So ours gets values that are already rounded.
    "llama, fp8 cache": dataclasses.replace(_LLAMA, engine={"kv_cache_dtype": "fp8_e4m3"}, toward_zero=True),
    **{
        f"llama, {name}": dataclasses.replace(
            _LLAMA, engine={"kv_cache_dtype": name}, against=TRITON, lengths=(3, 17, 40, 1)
        )
        for name in ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head")
    },
    "llama, nvfp4": dataclasses.replace(_LLAMA, is_nvfp4=True),
    "gemma2": Model(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        _WINDOW | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 32, "final_logit_softcapping": 30.0},
    ),
    "gemma3": Model(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        _WINDOW | {"query_pre_attn_scalar": 32, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt_oss": Model(
        "GptOssConfig",
        "GptOssForCausalLM",
        _WINDOW
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 256,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    ),
    "deepseek_v3": Model(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 64,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "head_dim": 64,
            "first_k_dense_replace": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 64,
        },
        {"block_size": 16},
        # vLLM 0.32 itself rotates queries of latent attention wrongly on a CPU, so that all its tokens are wrong.
        against=REFERENCE,
    ),
    "bert (no cache)": Model(
        "BertConfig",
        "BertModel",
        {"num_key_value_heads": 4},
        _WHOLE | {"runner": "pooling"},
        gap=1e-6,
        task="embed",
    ),
    "modernbert (window to both sides)": Model(
        "ModernBertConfig",
        "ModernBertModel",
        {
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "local_attention": 32,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
        _WHOLE | {"runner": "pooling"},
        gap=1e-6,
        task="embed",
    ),
    "embeddinggemma (window to both sides)": Model(
        "Gemma3TextConfig",
        "Gemma3TextModel",
        {
            "sliding_window": 17,
            "query_pre_attn_scalar": 32,
            "use_bidirectional_attention": True,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        _WHOLE | {"runner": "pooling"},
        gap=1e-6,
        task="embed",
    ),
    # vLLM's own CPU backend does not support chunks of fewer than 32 tokens.
    "llama4 (chunks)": Model(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            "num_hidden_layers": 4,
            "attention_chunk_size": 16,
            "no_rope_layers": [1, 1, 0, 1],  # 0: attention to all keys
            "intermediate_size_mlp": 256,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
        },
        {"block_size": 16},
        against=REFERENCE,
    ),
    # A Gemma 3 without images. A query sees two chunks: its own chunk and the previous one.
    "rnj1 (chunks with lookback)": Model(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        _WINDOW | {"query_pre_attn_scalar": 32, "layer_types": ["sliding_attention", "full_attention"]},
        {
            "hf_overrides": {
                "architectures": ["Rnj1ForCausalLM"],
                "layer_types": ["chunked_attention", "full_attention"],
                "rope_parameters": {
                    "chunked_attention": {"rope_type": "default", "rope_theta": 10000.0},
                    "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
                },
            }
        },
        against=REFERENCE,
        sees=lambda q, k, prompt: q // 8 - k // 8 <= 1,
    ),
    # vLLM loads this Llama as a DeepSeek without latents and experts. The text model of Unlimited-OCR, in which prompts
    # stay in view, is a DeepSeek with experts.
    "llama (prompts that stay in view)": Model(
        "LlamaConfig",
        "LlamaForCausalLM",
        {},
        {
            "hf_overrides": {
                "architectures": ["DeepseekForCausalLM"],
                "rswa_window": 8,
                "qk_nope_head_dim": 0,
                "qk_rope_head_dim": 0,
                "n_routed_experts": 4,
                "first_k_dense_replace": 2,
            }
        },
        against=REFERENCE,
        sees=lambda q, k, prompt: (k < prompt) | (q - k < 8),
    ),
    # vLLM's Gemma 3 treats an image with more tokens than the window as text. vLLM's own CPU backend treats every image
    # as text.
    "gemma3 (images)": Model(
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        _WINDOW
        | {
            "query_pre_attn_scalar": 32,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        _LOOKING,
        task="look",
        against=REFERENCE,
    ),
    # Images of 70 tokens. The window cuts off earlier images, and layers without a window see images as text.
    "gemma4 (images)": Model(
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        _WINDOW
        | {
            "use_bidirectional_attention": "vision",
            "hidden_size_per_layer_input": 0,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "global_head_dim": 64,
        },
        _LOOKING | {"limit_mm_per_prompt": {"video": 0}},
        task="look",
        against=REFERENCE,
    ),
    "whisper (cross attention)": Model(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            "num_key_value_heads": 4,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 256,
            "decoder_ffn_dim": 256,
            "max_source_positions": 50,
            "max_target_positions": 200,
            "decoder_start_token_id": 3,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
            "init_std": 0.2,
        },
        _WHOLE | {"max_model_len": 100, "skip_mm_profiling": True},
        task="transcribe",
    ),
}
_SPARSE = MODELS["deepseek_v3"].settings | {
    # vLLM reads these two settings from real checkpoints. transformers does not write them, since its model has only
    # these values.
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "index_topk": 16,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
}
_DEEPSEEK_V32 = Model("DeepseekV32Config", "DeepseekV32ForCausalLM", _SPARSE, against=REFERENCE)
_GLM = dataclasses.replace(
    _DEEPSEEK_V32, config="GlmMoeDsaConfig", architecture="GlmMoeDsaForCausalLM",
    # vLLM reads which layers have an indexer, and how the indexer rotates, from names that transformers does not write.
    settings=_SPARSE | {"index_topk_pattern": "FSF", "indexer_rope_interleave": True},
)  # fmt: skip
MODELS |= {
    "deepseek_v32, top 16": _DEEPSEEK_V32,
    # The top-k is larger than any context, so the tokens must be those of dense attention.
    "deepseek_v32, top 2048": dataclasses.replace(_DEEPSEEK_V32, settings=_SPARSE | {"index_topk": 2048}),
    "glm_moe_dsa, top 16": _GLM,
    # float16 is the most exact dtype that vLLM's operators support. Rounding to it moves some keys to the next 8-bit
    # number: transformers' own model with roundings to float16 has a mean gap of 0.046, and without sinks one of 0.22.
    "deepseek_v4, top 512": Model(
        _V4,
        "DeepseekV4ForCausalLM",
        {
            "head_dim": 512,
            "num_key_value_heads": 1,
            "q_lora_rank": 64,
            "o_lora_rank": 32,
            "o_groups": 2,
            "index_n_heads": 8,
            "sliding_window": 16,
            "hc_mult": 2,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            # vLLM's operators route to 6 or 8 of at least 64 experts.
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 64,
            "max_position_embeddings": 4096,
        },
        # not eager, so that vLLM tells kernels in advance what to compile
        {"dtype": "float16", "max_model_len": 2304, "max_num_batched_tokens": 128, "enforce_eager": False},
        gap=0.1,
        against=REFERENCE,
        lengths=(
            3,
            17,
            140,
            33,
            1,
            2200,
        ),  # the longest prompt has 550 entries of four tokens, of which 512 are selected
    ),
}
MODELS |= {
    # Blocks have 128 keys. vLLM's own kernels require pages of 128, but ours also take other pages.
    name: Model(
        _M3,
        "MiniMaxM3VLForCausalLM",
        {
            "head_dim": 128,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse", "dense"],
            "index_n_heads": 2,
            "index_topk_blocks": blocks,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "intermediate_size": 64,
            "dense_intermediate_size": 256,
            "shared_intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        {"max_model_len": 1024, "max_num_batched_tokens": 256, "block_size": page},
        against=REFERENCE,
        lengths=(3, 140, 700, 33, 1, 900),
    )
    for name, blocks, page in (
        ("minimax_m3, 2 of up to 8 blocks", 2, 32),
        ("minimax_m3, 3 of up to 8 blocks, pages of 128", 3, 128),
        ("minimax_m3, 16 blocks (all keys)", 16, 16),
    )
}


def save_checkpoint(model: Model, folder: Path) -> None:
    """Save a model with random weights, which are large enough that attention is not nearly uniform."""
    import torch
    import transformers

    torch.manual_seed(0)
    settings = _COMMON | model.settings | {"initializer_range": 0.2}
    if model.task == "look":
        config = vllm_images.configuration(model.config, settings)
    else:
        config = getattr(transformers, model.config)(**settings)
    made = getattr(transformers, model.architecture)(config)
    for name, parameter in made.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
        elif name.endswith("embed_tokens.weight") and config.tie_word_embeddings:
            torch.nn.init.normal_(
                parameter, std=0.02
            )  # with larger weights, the last token itself is always the likeliest
        elif name.endswith("mm_input_projection_weight"):
            torch.nn.init.normal_(parameter, std=0.2)  # with transformers' weights all images would be the same
    if model.config in _RENAMED:
        _RENAMED[model.config].prepare(made)
    made.to(torch.float32).save_pretrained(folder)
    if model.config in _RENAMED:
        _RENAMED[model.config].save_original(folder)
    if model.task == "embed":
        save_tokenizer(folder)
    if model.task == "transcribe":
        save_processor(folder)
    if model.task == "look":
        vllm_images.save_tokenizer(folder)


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer whose words are numbers. vLLM requires a tokenizer, although prompts are token ids."""
    import tokenizers
    import transformers

    words = tokenizers.models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), unk_token="0", pad_token="0"
    ).save_pretrained(folder)


def save_processor(folder: Path) -> None:
    """Save a tokenizer of Whisper's type, and an extractor that converts one second of sound to 50 positions."""
    import transformers

    (folder / "vocab.json").write_text(json.dumps({str(i): i for i in range(VOCABULARY)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = transformers.WhisperTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    extractor = transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=1)
    transformers.WhisperProcessor(extractor, tokenizer).save_pretrained(folder)


def prompts(model: Model) -> list[list[int]]:
    """Random token ids. A small congruential generator makes them equal in every process."""
    state, lists = 1, []
    for length in model.lengths:
        tokens = []
        for _ in range(length):
            state = (1103515245 * state + 12345) % 2**31
            tokens.append(3 + (state >> 8) % (VOCABULARY - 3))
        lists.append(tokens)
    return lists


def serve(folder: Path, backend: str, name: str) -> dict[str, Any]:
    """The results of one backend for the prompts, computed in this process."""
    model = MODELS[name]
    if backend == "ragged":
        from ragged_attention.integrations import vllm as ours

        ours.register(cpu=True)
        if model.toward_zero:
            round_toward_zero()
        if "lookback" in name:  # vLLM requires this name for chunks with lookback
            ours.RaggedAttentionBackend.NAME = "TRITON_ATTN"
    elif model.is_nvfp4:
        round_to_nvfp4()
    if backend == TRITON:
        vllm_masks.use_interpreter()
        registry: Any = importlib.import_module("vllm.v1.attention.backends.registry")
        registry.register_backend(
            registry.AttentionBackendEnum.CPU_ATTN, registry.AttentionBackendEnum.TRITON_ATTN.value
        )
    if model.task == "look":
        vllm_images.prepare_vllm(model.config)
    if model.config == _M3:
        vllm_m3.prepare_vllm()
    import torch

    vllm: Any = importlib.import_module("vllm")

    torch.set_num_threads(1)
    settings: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 32,
        "max_model_len": 256,
        "max_num_batched_tokens": 64,  # fewer than a prompt has, so that prompts are prefilled in chunks
        "max_num_seqs": 4,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
    }
    where = folder / "original" if model.config in _RENAMED else folder
    cache_options = {"kv_cache_dtype": "nvfp4"} if model.is_nvfp4 and backend == "ragged" else {}
    llm = vllm.LLM(model=str(where), **(settings | model.engine | cache_options))
    begin = time.perf_counter()
    if model.task == "look":
        results = generated(vllm, llm, vllm_images.requests_for_vllm(model.config, prompts(model)), vllm_images.NAMES)
    elif model.task == "generate":
        results = generated(vllm, llm, [{"prompt_token_ids": tokens} for tokens in prompts(model)])
    else:
        results = {"embed": embedded, "transcribe": transcribed}[model.task](vllm, llm, prompts(model))
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    seconds = time.perf_counter() - begin
    return results | {
        "version": vllm.__version__,
        "seconds": seconds,
        "implementations": sorted({name for layer in layers for name in implementation(layer)}),
    }


def implementation(layer: Any) -> list[str]:
    """The class of a layer's attention implementation, or the module of DeepSeek-V4's layer, which has none."""
    if hasattr(layer, "impl"):
        return [type(layer.impl).__name__]
    if hasattr(layer, "forward_mqa"):
        return [type(layer).forward_mqa.__module__.rpartition(".")[2]]
    return []


def generated(vllm: Any, llm: Any, requests: list[dict[str, Any]], never: Iterable[int] = ()) -> dict[str, Any]:
    """The generated tokens, which never include those of `never`, and the prompts' log-probabilities."""
    settings = {
        "temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "detokenize": False,
        "logit_bias": dict.fromkeys(never, NEVER) or None,
    }  # fmt: skip
    outputs = llm.generate(requests, vllm.SamplingParams(logprobs=1, prompt_logprobs=1, **settings), use_tqdm=False)
    # The same requests run again without prompt_logprobs, with which vLLM would not use its prefix cache.
    repeated = llm.generate(requests, vllm.SamplingParams(**settings), use_tqdm=False)
    return {
        "repeated": [list(output.outputs[0].token_ids) for output in repeated],
        "cached": sum(output.num_cached_tokens for output in repeated),
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "logprobs": [
            step[token].logprob
            for output in outputs
            for step, token in zip(output.prompt_logprobs, output.prompt_token_ids, strict=True)
            if step is not None
        ],
    }


def embedded(vllm: Any, llm: Any, token_lists: list[list[int]]) -> dict[str, Any]:
    """The prompts' embeddings, under the key "logprobs". There are no tokens."""
    outputs = llm.embed([{"prompt_token_ids": tokens} for tokens in token_lists], use_tqdm=False)
    return {"tokens": [], "logprobs": [number for output in outputs for number in output.outputs.embedding]}


def transcribed(vllm: Any, llm: Any, token_lists: list[list[int]]) -> dict[str, Any]:
    """The tokens for random sounds and prompts of several lengths, with their log-probabilities."""
    import numpy as np

    rng, rate = np.random.default_rng(0), 16000
    requests = [
        {
            "prompt_token_ids": tokens[:40],
            "multi_modal_data": {"audio": (rng.standard_normal(rate * (1 + i % 4) // 4).astype(np.float32), rate)},
        }
        for i, tokens in enumerate(token_lists)
    ]
    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1, detokenize=False
    )
    results = [output.outputs[0] for output in llm.generate(requests, sampling, use_tqdm=False)]
    return {
        "tokens": [list(result.token_ids) for result in results],
        "logprobs": [
            step[token].logprob
            for result in results
            for step, token in zip(result.logprobs, result.token_ids, strict=True)
        ],
    }


def round_toward_zero() -> None:
    """Round keys and values to e4m3 before our cache write: toward zero, as vLLM's CPU operator does."""
    import torch

    attention: Any = importlib.import_module("ragged_attention.integrations._vllm_attention")
    write = attention.write_kv_pages

    def rounded(x: Any) -> Any:
        step = torch.exp2((torch.frexp(x.float()).exponent - 4).clamp(min=-9).float())
        return (torch.trunc(x.float() / step) * step).clamp(-448, 448).to(x.dtype)

    attention.write_kv_pages = lambda k, v, *rest, **named: write(rounded(k), rounded(v), *rest, **named)


def round_to_nvfp4() -> None:
    """Make vLLM's CPU backend store keys and values that are rounded to nvfp4, as FlashInfer's append rounds them."""
    import torch

    from ragged_attention.compat import flashinfer

    implementation: Any = importlib.import_module("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackendImpl
    update, one = implementation.do_kv_cache_update, torch.ones(1)

    def stored(self: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        tokens, heads, size = key.shape
        codes, scales = (torch.zeros(tokens, 2, 1, heads, size // width, dtype=torch.uint8) for width in (2, 16))
        flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            key, value, torch.arange(tokens), codes, scales, 1.0, 1.0
        )
        rows = flashinfer.nvfp4_kv_dequantize(codes.flatten(0, 3), scales.flatten(0, 3), one, key.dtype)
        key, value = rows.view(tokens, 2, heads, size).unbind(1)
        update(self, layer, key.contiguous(), value.contiguous(), kv_cache, slot_mapping)

    implementation.do_kv_cache_update = stored


def transform(folder: Path, model: Model) -> dict[str, Any]:
    """The results of transformers' own model for the prompts, in float32.

    Prompts run one at a time, and each token recomputes the whole sequence.
    """
    import torch
    import transformers

    torch.set_num_threads(1)
    begin = time.perf_counter()
    if model.config in _RENAMED:
        _RENAMED[model.config].quantise()
    looks = model.task == "look"
    classes = transformers.AutoModelForImageTextToText if looks else transformers.AutoModelForCausalLM
    made = classes.from_pretrained(folder, dtype="float32", attn_implementation="eager")
    for layer in () if looks else made.model.layers:
        if hasattr(getattr(layer.self_attn, "indexer", None), "wq_b"):  # a DeepSeek indexer
            layer.self_attn.indexer.forward = functools.partial(quantised_indexer, layer.self_attn.indexer)
    inputs = vllm_images.expanded(model.config, prompts(model)) if looks else [(each, {}) for each in prompts(model)]
    tokens, logprobs = [], []

    def logits(whole: list[int], prompt: int, arrays: dict[str, Any]) -> Any:
        row = torch.tensor([whole])
        if looks:
            arrays = arrays | vllm_images.types(model.config, row)
        if model.sees is not None:
            arrays = arrays | {"attention_mask": masks(model, len(whole), prompt)}
        return made(row, use_cache=False, **arrays).logits[0]

    with torch.inference_mode():
        for prompt, arrays in inputs:
            whole = list(prompt)
            for _ in range(NEW_TOKENS):
                last = logits(whole, len(prompt), arrays)[-1]
                if looks:
                    last[list(vllm_images.NAMES)] += NEVER
                whole.append(int(last.argmax()))
            lines = logits(prompt, len(prompt), arrays)[:-1].log_softmax(-1)
            logprobs += [float(line[token]) for line, token in zip(lines, prompt[1:], strict=True)]
            tokens.append(whole[len(prompt) :])
    return {
        "version": None,  # vLLM's version
        "seconds": time.perf_counter() - begin,
        "implementations": [REFERENCE],
        "tokens": tokens,
        "logprobs": logprobs,
    }


def masks(model: Model, length: int, prompt: int) -> Any:
    """The additive mask of `model.sees`. For a model with layer types, a dict of this mask and the causal mask."""
    import torch

    assert model.sees is not None
    at = torch.arange(length)
    causal = at <= at[:, None]
    added = [
        torch.zeros(1, 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)
        for seen in (causal & model.sees(at[:, None], at, prompt), causal)
    ]
    if "layer_types" not in model.settings:
        return added[0]
    return dict(zip(("sliding_attention", "full_attention"), added, strict=True))


def quantised_indexer(
    indexer: Any, hidden_states: Any, q_resid: Any, position_embeddings: Any, *others: Any, **named: Any
) -> Any:
    """Replace the selection of transformers' indexer. Queries and keys are rounded to 8 bits, as in vLLM."""
    import torch

    home: Any = importlib.import_module(type(indexer).__module__)
    rotate = getattr(home, "apply_rotary_pos_emb", home.apply_rotary_pos_emb_interleave)
    rotary = indexer.qk_rope_head_dim
    q = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    k = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
    rotated = rotate(q[..., :rotary], k[..., :rotary], *position_embeddings, unsqueeze_dim=2)
    q, k = (torch.cat((head, x[..., rotary:]), -1).float() for head, x in zip(rotated, (q, k), strict=True))

    def rounded(x: Any) -> Any:
        scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(-1, keepdim=True) / 448)))
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    products = torch.einsum("bthd,bsd->bths", rounded(q), rounded(k).squeeze(2)).relu()
    weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float()
    scores = torch.einsum("bth,bths->bts", weights, products)
    length = scores.shape[-1]
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    return scores.topk(min(indexer.index_topk, length), dim=-1).indices.to(torch.int32)


def in_a_process(folder: Path, name: str, backend: str, limit: int) -> dict[str, Any]:
    """The result of `serve` or `transform` in a new process, since registrations last as long as a process."""
    command = [sys.executable, "-m", "benchmarks.vllm_check", "--serve", str(folder), backend, name]
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_PLUGINS": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {limit} s"}
    answers = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    if done.returncode or not answers:
        return {"error": reason(done.stderr), "log": done.stdout + done.stderr}
    return json.loads(answers[-1].removeprefix(ANSWER))


def reason(text: str) -> str:
    """The last line of `text` that names an error, or "no answer"."""
    lines = [line.strip() for line in text.splitlines() if "Error" in line or "Unsupported" in line]
    return lines[-1] if lines else "no answer"


def verdict(theirs: dict[str, Any], ours: dict[str, Any], allowed: float | None) -> tuple[str, list[str]]:
    """The verdict on a model, and the other cells of its table row."""
    for result in (theirs, ours):
        if "error" in result:
            return "FAILED", [f"{result['backend']}: {result['error']}", "", "", "", "", ""]
    tokens = [[token for request in result["tokens"] for token in request] for result in (theirs, ours)]
    equal = sum(a == b for a, b in zip(*tokens, strict=True))
    gaps = [abs(a - b) for a, b in zip(theirs["logprobs"], ours["logprobs"], strict=True)]
    mean = sum(gaps) / len(gaps)
    same = ours.get("repeated", ours["tokens"]) == ours["tokens"]
    right = equal == len(tokens[0]) and same if allowed is None else mean <= allowed
    is_ours_used = ours["implementations"] != theirs["implementations"]  # otherwise vLLM has run its own backend twice
    cells = [
        f"{equal} of {len(tokens[0])}" if tokens[0] else "embeddings",
        str(len(set(tokens[0]))),
        f"{mean:.1e} / {max(gaps):.1e}",
        str(ours.get("cached", 0)),
        ", ".join(theirs["implementations"]),
        ", ".join(ours["implementations"]),
        f"{theirs['seconds']:.1f} / {ours['seconds']:.1f}",
    ]
    return ("agrees" if allowed is None else f"gap <= {allowed}") if right and is_ours_used else "DIFFERS", cells


def check(names: list[str], limit: int, logs: Path | None) -> int:
    """Serve each model with our backend and with the other side, and print the table. Returns 1 if anything differs."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(
        "model", "equal tokens", "different", "gap of logprobs, mean / max", "cached", "other", "ours", "seconds", ""
    )
    failures, version = 0, "unknown"
    for name in names:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            save_checkpoint(MODELS[name], folder)
            backends = (MODELS[name].against, "ragged")
            results = [in_a_process(folder, name, backend, limit) for backend in backends]
        for backend, result in zip(backends, results, strict=True):
            result["backend"] = backend
            if logs is not None and "log" in result:
                (logs / f"{name}-{backend}.log").write_text(result["log"])
            version = result.get("version") or version
        word, cells = verdict(results[0], results[1], MODELS[name].gap)
        failures += word in ("FAILED", "DIFFERS")
        table.add_row(name, *cells, word)
    table.title = f"vLLM {version} on a CPU"
    console.print(table)
    return 1 if failures else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--models", default=";".join(MODELS), help="names separated by semicolons")
    parser.add_argument("--limit", type=int, default=300, help="time limit for one process, in seconds")
    parser.add_argument("--logs", type=Path, help="a folder for the output of failed processes")
    parser.add_argument("--serve", nargs=3, metavar=("FOLDER", "BACKEND", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        folder, backend, name = Path(options.serve[0]), *options.serve[1:]
        answer = transform(folder, MODELS[name]) if backend == REFERENCE else serve(folder, backend, name)
        print(ANSWER + json.dumps(answer), flush=True)
        return 0
    names = options.models.split(";")
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"expected --models to be some of {'; '.join(MODELS)}, got {'; '.join(unknown)}")
    return check(names, options.limit, options.logs)


if __name__ == "__main__":
    sys.exit(main())
