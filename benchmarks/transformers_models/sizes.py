"""Sizes of tiny models. A key is a name that configurations use for a size.

Windows, chunks and top-k are smaller than the compared sequences, so that they have an effect. Heads are grouped. If
heads have more than 256 dimensions in a family's own configuration, they also have more than 256 here.
"""

from typing import Any

VOCABULARY = 211
LARGE_HEAD = 272  # the size of heads that have more than 256 dimensions in the family's own configuration

# Names of arguments. LAYERS is the number of layers, KINDS_OF_LAYERS are lists with an entry per layer, and
# NUMBERS_OF_LAYERS are lists of layer indices.
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "layers")
KINDS_OF_LAYERS = (
    "layer_types", "layers_block_type", "block_types", "attention_layers", "indexer_types", "no_rope_layers",
    "mlp_layer_types", "layer_rope_theta",
)  # fmt: skip
NUMBERS_OF_LAYERS = (
    "mlp_only_layers",
    "full_attn_idxs",
    "deepstack_visual_indexes",
    "moe_layers",
)  # such a list becomes [0]

_TOKENS: dict[str, Any] = {
    "vocab_size": VOCABULARY, "unpadded_vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY,
    "pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1, "cls_token_id": 1, "eos_token_id": 2,
    "sep_token_id": 2, "eod_token_id": 2, "mask_token_id": 3,
    "image_token_id": VOCABULARY - 1, "image_token_index": VOCABULARY - 1,
    "image_patch_id": VOCABULARY - 1, "video_token_id": VOCABULARY - 2,
    "video_token_index": VOCABULARY - 2, "audio_token_id": VOCABULARY - 3, "vision_start_token_id": VOCABULARY - 4,
    "vision_end_token_id": VOCABULARY - 4,
}  # fmt: skip
_WIDTHS = dict.fromkeys((
    "hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embed_dim", "embedding_dim", "embedding_size",
    "input_embedding_size", "output_embedding_size", "word_embed_proj_dim", "attention_hidden_size", "moe_hidden_size",
    "lru_width", "mamba_d_ssm", "dim_model_base", "out_hidden_size", "projection_dim", "qformer_hidden_size",
    "encoder_hidden_size", "text_hidden_size", "audio_hidden_size",
    "projector_hidden_size", "projection_hidden_size", "projection_hidden_dim", "decoder_hidden_size",
), 64) | dict.fromkeys((
    "intermediate_size", "intermediate_size_mlp", "dense_intermediate_size", "n_inner", "ffn_dim", "d_ff", "d_inner",
    "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "hidden_dim", "dff", "dim_ff", "feed_forward_size",
), 48) | dict.fromkeys((
    "moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size",
    "shared_experts_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size",
    "share_expert_dim", "ple_embed_dim",
), 32) | dict.fromkeys((
    "router_hidden_size", "hidden_size_per_layer_input", "pronunciation_embed_dim", "shape_embed_dim", "hc_lowrank",
), 16) | dict.fromkeys((
    "laurel_rank", "adapter_rank", "loop_gate_rank", "gated_norm_rank", "time_step_rank", "mamba_dt_rank",
), 8)  # fmt: skip
_HEADS = dict.fromkeys((
    "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads",
    "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads", "swa_num_attention_heads",
    "num_sliding_attention_heads", "mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "linear_num_heads",
    "linear_num_value_heads",
), 4) | dict.fromkeys((
    "num_key_value_heads", "kv_n_heads", "num_kv_heads", "num_query_groups", "swa_num_key_value_heads",
    "num_global_key_value_heads", "linear_num_key_heads",
), 2) | dict.fromkeys((
    "head_dim", "d_head", "d_kv", "dim_head", "kv_channels", "attention_head_dim", "attention_head_size",
    "swa_head_dim", "swa_v_head_dim", "query_pre_attn_scalar", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "linear_head_dim", "linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_headdim",
    "mamba_head_dim",
), 16) | {"qk_head_dim": 32, "global_head_dim": 32, "rotary_dim": 8}  # fmt: skip
_LATENTS = {
    "kv_lora_rank": 32, "q_lora_rank": 32, "o_lora_rank": 16, "o_groups": 2,
    "index_topk": 8, "index_n_heads": 16, "index_head_dim": 32, "index_block_size": 4, "index_topk_blocks": 2,
    "index_local_blocks": 1, "index_kpool": 4,
}  # fmt: skip
_REACH = dict.fromkeys((
    "sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size", "local_attention",
    "window_size", "keep_window_size",
), 7) | dict.fromkeys((
    "local_attn_chunk_length", "lsh_attn_chunk_length", "chunk_size", "mamba_chunk_size", "log_scaling_n_floor",
    "floor_scale", "d_rel",
), 8) | dict.fromkeys((
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length", "model_max_length",
), 256) | dict.fromkeys((
    "max_source_positions", "max_target_positions", "max_2d_position_embeddings",
), 64) | {
    "local_attention_window_len": 16, "rel_extent": 16, "position_bias_num_buckets": 16,
    "position_bias_max_distance": 32,
}  # fmt: skip
_EXPERTS = dict.fromkeys((
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
), 4) | dict.fromkeys((
    "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "zero_expert_num",
), 2) | dict.fromkeys((
    "n_shared_experts", "moe_num_shared_experts", "num_shared_experts", "n_group", "topk_group", "num_expert_group",
    "first_k_dense_replace", "num_dense_layers",
), 1) | {"moe_layer_end_index": 3}  # fmt: skip
_RECURRENCE = dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 16) | dict.fromkeys(
    ("mamba_expand", "expand", "n_groups"), 1
)
_COUNTS = dict.fromkeys((
    "encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers", "num_layers_per_stack",
    "num_blocks", "depth", "num_codebooks", "altup_num_inputs", "split_ngram_parts", "heads_per_ngram",
), 2) | {
    "num_nextn_predict_layers": 0, "num_kv_shared_layers": 0, "n_mem_blocks": 1, "additional_vocab_size": 4,
    "ngram_vocab_size_base": 97, "make_ngram_vocab_size_divisible_by": 8, "hash_vocab": 97,
    "pronunciation_vocab_size": 20, "shape_vocab_size": 20, "image_size": 28, "patch_size": 14,
    "mm_tokens_per_image": 4, "image_seq_length": 4, "num_image_tokens": 4,
}  # fmt: skip
_NOISE = dict.fromkeys((
    "dropout", "attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "emb_pdrop",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout", "dropout_rate", "residual_dropout",
    "embd_dropout", "dropout_p", "layerdrop", "decoder_layerdrop", "encoder_layerdrop", "router_jitter_noise",
    "input_jitter_noise",
), 0.0)  # fmt: skip

SIZES = _TOKENS | _WIDTHS | _HEADS | _LATENTS | _REACH | _EXPERTS | _RECURRENCE | _COUNTS | _NOISE
# The sizes of parts that read no text, such as images. Their query heads do not share KV heads.
OF_ENCODERS = SIZES | {
    "num_attention_heads": 4, "num_key_value_heads": 4, "num_heads": 4,
    "hidden_size": 64, "intermediate_size": 48,
}  # fmt: skip
TEXT = ("text", "decoder", "language", "llm", "thinker", "phi")  # parts of the names of text configurations

# Names that are set even if the configuration's own value is None (a size derived from others), or 0.
EVEN_FROM_NONE = (
    "head_dim", "num_key_value_heads", "pad_token_id", "bos_token_id", "eos_token_id", "image_token_id",
    "image_token_index",
)  # fmt: skip
EVEN_FROM_ZERO = ("pad_token_id", "bos_token_id", "eos_token_id", "sliding_window")
HEAD_SIZES = (
    "head_dim", "d_head", "d_kv", "dim_head", "kv_channels", "attention_head_dim", "attention_head_size",
    "swa_head_dim", "swa_v_head_dim", "global_head_dim", "v_head_dim",
)  # fmt: skip
