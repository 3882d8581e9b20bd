"""Configuration arguments that single families need in addition to the common sizes. OWN keeps a default value."""

from typing import Any

OWN = "the configuration's own"
LINEAR, FULL, WINDOW = "linear_attention", "full_attention", "sliding_attention"

_STARTS = {"decoder_start_token_id": 1, "pad_token_id": 0}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ROPE_OF_IMAGES = {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [2, 3, 3]}}}
_ZAMBA = {
    "num_hidden_layers": 3, "layers_block_type": [LINEAR, "hybrid", "hybrid"], "num_key_value_heads": 4,
    "mamba_expand": 2,
}  # fmt: skip
_COHERE_COMPASS = {
    "num_hidden_layers": 2, "layer_types": [FULL, WINDOW], "rope_parameters": {FULL: _ROPE, WINDOW: _ROPE},
}  # fmt: skip
_DOTS3 = {
    "head_dim": 32, "num_hidden_layers": 2, "layer_types": ["indexed_attention", WINDOW],
    "mlp_layer_types": ["dense", "sparse"], "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
    "swa_kv_lora_rank": 32, "swa_q_lora_rank": 16, "swa_qk_nope_head_dim": 16, "swa_qk_rope_head_dim": 16,
    "swa_v_head_dim": 16, "swa_head_dim": 32,
}  # fmt: skip
_MINIMAX_M3 = {
    "num_hidden_layers": 2, "layer_types": [FULL, "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"],
    "index_n_heads": 2,
}  # fmt: skip
_QWEN4 = {
    "num_hidden_layers": 2, "layer_types": [LINEAR, "indexed_attention"], "indexer_n_heads": 4, "indexer_kv_heads": 1,
    "indexer_head_dim": 16, "indexer_budget": 6, "indexer_compress_ratio": 2,
}  # fmt: skip
_BYTES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}

_GEMMA4_VISION = {
    "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "patch_size": 14, "pooling_kernel_size": 2,
}  # fmt: skip
_IMAGE_WORDS = {"<image>": 210} | {f"IMGIMG{letter}Z": 100 + number for number, letter in enumerate("ABCDEFGH")}
_WINDOWS = {"vision_config": {"window_size": 28}}  # in pixels
_CROPS = {"image_grid_pinpoints": [[28, 56], [56, 28]]}

FAMILIES: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {4: 2}},
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1], "layers_block_type": OWN},
    "blt": {
        "num_hidden_layers": 2,
        "encoder_hash_byte_group_vocab": 97,
        "patcher_config": _BYTES | {"num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 211},
        "encoder_config": _BYTES | {"hidden_size_global": 64, "cross_attn_k": 1, "vocab_size": 211},
        "decoder_config": _BYTES | {"hidden_size_global": 64, "cross_attn_k": 1, "vocab_size": 211},
        "global_config": _BYTES,
    },
    "chameleon": {"vocabulary_map": _IMAGE_WORDS, "vq_config": {"base_channels": 32, "num_embeddings": 8}},
    "cohere_compass": {"text_config": _COHERE_COMPASS},
    "cohere_compass_text": _COHERE_COMPASS,
    "cosmos3_edge": _ROPE_OF_IMAGES,
    "dbrx": {
        "attn_config": {"clip_qkv": 8.0, "rope_theta": 10000.0, "kv_n_heads": 2, "attn_pdrop": 0.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_ocr2": {
        "vision_config": {"sam_config": {"downsample_channels": [48, 64]}},
        "text_config": {
            "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
            "mlp_layer_types": ["dense", "sparse"],
        },
    },
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "deepseek_v4": {
        "num_hidden_layers": 4,
        "layer_types": [WINDOW, "heavily_compressed_attention", *["compressed_sparse_attention"] * 2],
        "mlp_layer_types": OWN,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "index_topk": 3,
    },
    "deepseek_vl_hybrid": {"high_res_vision_config": {"global_attn_indexes": [0, 1]}},
    "diffusion_gemma": {
        "canvas_length": 12, "text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    },
    "dory": {
        "num_hidden_layers": 4, "layer_types": [WINDOW, FULL, WINDOW, FULL], "n_input_layers": 1,
        "n_recurrent_layers": 2, "n_output_layers": 1,
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {
            "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "num_attention_heads": 4, "depth": 2,
            "num_hidden_layers": 2, "pyramid_num_routed": [-1, 4], "adapter_in_dim": 64, "adapter_out_dim": 64,
            "intermediate_size": 48, "moe_intermediate_size": 32, "mlp_layer_types": OWN, "num_local_experts": OWN,
            "num_experts_per_tok": OWN,
        },
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": _DOTS3,
    "emu3": {
        "vocabulary_map": {"<image>": 210}, "vq_config": {"base_channels": 32, "codebook_size": 8, "hidden_size": 128},
    },
    "encoder-decoder": _STARTS,
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [3, 3, 2]}}},
    "exaone4_5": _WINDOWS,
    "florence2": {
        "vision_config": {
            "embed_dim": [16, 16, 32, 64], "num_heads": [2, 2, 4, 4], "num_groups": [2, 2, 4, 4], "window_size": 4,
        },
    },
    "gemma4": {"vision_config": _GEMMA4_VISION},
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": OWN},
    },
    "gemma4_unified": {"vision_config": _GEMMA4_VISION},
    "glm46v": _ROPE_OF_IMAGES,
    "glm4v": _ROPE_OF_IMAGES,
    "glm4v_moe": {
        "text_config": {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
    },
    "glm5_next": {"text_config": {"index_kpool": 2}},
    "glm_ocr": _ROPE_OF_IMAGES,
    "glmga": _ROPE_OF_IMAGES,
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1], "downsample_rate": "1/2", **_CROPS,
    },
    "granite_docling": {"vision_config": {"image_size": 112}},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": [LINEAR, FULL]},
    "hrm_text": {"num_hidden_layers": 1, "num_layers_per_stack": OWN},
    "hunyuan_vl": _ROPE_OF_IMAGES,
    "hy_v4_vl": _ROPE_OF_IMAGES,
    "hyperclovax_vision_v2": _WINDOWS,
    "inkling_text": {"num_hidden_layers": 2},
    "jamba": {
        "num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "janus": {"vq_config": {"base_channels": 32, "num_embeddings": 64, "embed_dim": 8}},
    "laguna": {
        "num_hidden_layers": 2, "num_attention_heads_per_layer": [4, 8], "layer_types": [FULL, WINDOW],
        "sliding_window": 7,
    },
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", FULL], "num_dense_layers": 1},
    "llama4": {
        "vision_config": {
            "intermediate_size": 256, "projector_input_dim": 64, "projector_output_dim": 64, "vision_output_dim": 64,
        },
    },
    "llava_next": _CROPS,
    "llava_next_video": _CROPS,
    "llava_onevision": _CROPS,
    "longt5": _STARTS,
    # With images, all keys are in one block. Otherwise blocks would differ, because transformers' own indexer counts
    # padding tokens.
    "minimax_m3_vl": {"text_config": _MINIMAX_M3 | {"index_block_size": 256}},
    "minimax_m3_vl_text": _MINIMAX_M3,
    "mistral4": {"num_key_value_heads": 4, "head_dim": 32},
    "mistral_large4": {"text_config": {"kv_source_layers": OWN}},
    "mixtral": {"sliding_window": 7},
    "mllama": {
        "text_config": {"cross_attention_layers": [1]},
        "vision_config": {"intermediate_layers_indices": [0], "vision_output_dim": 128},
    },
    "molmo2": {
        "vision_config": {"image_size": [28, 28], "num_position_embeddings": 4},
        "adapter_config": {"vision_feature_layer": [0, 1]},
    },
    "muse_glimmer": {"out_hidden_size": 256},
    "muse_spark": {"out_hidden_size": 256},
    "nemo_speechlm": {"word_timestamp_config": {"blank_token_id": 210}},
    "nemotron_h_omni": {"vision_hidden_size": 64, "vision_config": {"video_temporal_patch_size": 2}},
    "paddleocr_vl": _ROPE_OF_IMAGES,
    "phi3": {"sliding_window": 7},
    "prophetnet": {"num_hidden_layers": OWN, "is_decoder": True},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "layer_types": [FULL, WINDOW], "sliding_window": 7},
    "qwen2_5_omni_thinker": _ROPE_OF_IMAGES | _WINDOWS | {"vision_start_token_id": 207},
    "qwen2_5_vl": _ROPE_OF_IMAGES | _WINDOWS,
    "qwen2_vl": _ROPE_OF_IMAGES,
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 207},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"]},
    "reformer": {
        "attn_layers": ["local", "lsh"], "axial_pos_embds": False, "is_decoder": True, "num_hidden_layers": 2,
        "hash_seed": 0,
    },
    "starcoder2": {"sliding_window": 7},
    "step3p7": {"text_config": {"sliding_window": 7}},
    "switch_transformers": _STARTS,
    "t5": _STARTS,
    "udop": _STARTS,
    "unlimited_ocr": {
        "text_config": {"num_key_value_heads": 4}, "vision_config": {"sam_config": {"downsample_channels": [48, 64]}},
    },
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "vibevoice_asr": {
        f"{name}_tokenizer_encoder_config": {"num_filters": 2, "depths": [1] * 7} for name in ("acoustic", "semantic")
    },
    "vision-encoder-decoder": _STARTS | {"decoder": {"add_cross_attention": True, "is_decoder": True}},
    "xlstm": {
        "embedding_dim": 64, "hidden_size": 64, "num_heads": 4, "qk_dim_factor": 1.0, "v_dim_factor": 1.0,
        "chunk_size": 16, "num_hidden_layers": 2, "num_blocks": 2,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": _ZAMBA
    | {
        "hidden_size": 272, "attention_hidden_size": 544, "attention_head_dim": 272, "num_attention_heads": 2,
        "num_key_value_heads": 2, "mamba_dt_rank": 8, "n_mamba_heads": 2,
    },
    "zamba2": _ZAMBA
    | {
        "attention_hidden_size": 128, "attention_head_dim": 32, "n_mamba_heads": 8, "mamba_headdim": 16,
        "hybrid_layer_ids": [1, 2], "kv_channels": 16,
    },
    "zaya": {"num_experts_per_tok": 1, "num_hidden_layers": 2, "layer_types": ["hybrid", "hybrid"]},
}  # fmt: skip
