"""Tiny random models of the families of Hugging Face transformers, for tests of the integration."""

from pathlib import Path
from typing import Any

from ragged_attention.errors import InvalidInput

COMMON = {"vocab_size": 259, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "pad_token_id": 256,
          "bos_token_id": 257, "eos_token_id": 258}  # fmt: skip
HEADS = {"head_dim": 16}
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 16, "qk_rope_head_dim": 8,
          "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
          "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}  # fmt: skip
# An indexer may select any of several keys with equal scores. With 16 heads, hardly any key has a score of 0 from all
# heads, so such ties are rare.
INDEXED = LATENT | {"index_topk": 8, "index_n_heads": 16, "index_head_dim": 16}
# Each family's prefix of class names, the name of its configuration, and the values that differ from COMMON.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "LlamaConfig", {}),
    "qwen3": ("Qwen3", "Qwen3Config", HEADS),
    "mistral": ("Mistral", "MistralConfig", {"sliding_window": 8}),
    "gemma2": ("Gemma2", "Gemma2Config", HEADS | WINDOW),
    "gemma3": ("Gemma3", "Gemma3TextConfig", HEADS | WINDOW),
    "gpt_oss": ("GptOss", "GptOssConfig", HEADS | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": ("DeepseekV3", "DeepseekV3Config", LATENT),
    "deepseek_v32": ("DeepseekV32", "DeepseekV32Config", INDEXED),
    "glm_moe_dsa": ("GlmMoeDsa", "GlmMoeDsaConfig", INDEXED | {"indexer_types": ["full", "shared"]}),
}


def tiny_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random model of two layers, in float32. Its tokens are bytes, and three more for padding, begin and end.

    Args:
        family: a name of FAMILIES.
        seed: the seed of its weights. They are larger than usual initial weights, so that its logits are far apart.
        changes: values of its configuration that differ from the family's.
    """
    import torch
    import transformers

    if family not in FAMILIES:
        raise InvalidInput(f"expected a family among {', '.join(FAMILIES)}, got {family!r}")
    kind, config, of_family = FAMILIES[family]
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        configured = getattr(transformers, config)(**(COMMON | of_family | changes))
        model = getattr(transformers, f"{kind}ForCausalLM")(configured)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or name.endswith("sinks"):
                torch.nn.init.normal_(parameter, std=0.2 if parameter.ndim > 1 else 1.0)
    finally:
        torch.random.set_rng_state(state)
    return model.eval()


def save_tiny(family: str, folder: Path) -> None:
    """Write a checkpoint of a tiny model, without a tokenizer, to a new or empty folder."""
    if folder.exists() and any(folder.iterdir()):
        raise InvalidInput(f"expected an empty folder for the new checkpoint, got {folder}")
    tiny_model(family).save_pretrained(folder)
