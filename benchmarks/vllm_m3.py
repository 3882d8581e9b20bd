"""MiniMax M3 for `benchmarks.vllm_check`: vLLM's checkpoint, and transformers' model with the same roundings.

vLLM reads a checkpoint with the published names, and stores index keys in bfloat16.
"""

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

ARCHITECTURE = "MiniMaxM3SparseForCausalLM"
_NAMES = {
    ".indexer.q_": ".index_q_",
    ".indexer.k_": ".index_k_",
    ".mlp.gate.e_score": ".block_sparse_moe.e_score",
    ".mlp.gate.": ".block_sparse_moe.gate.",
    ".mlp.shared_experts.": ".block_sparse_moe.shared_experts.",
    ".mlp.experts.": ".block_sparse_moe.experts.",
}
PROCESSORS = "vllm.transformers_utils.processors.minimax_m3"
# Names that vLLM's model imports from PROCESSORS, but uses only for images.
_IMAGE_NAMES = (
    "MIN_SHORT_SIDE_PIXEL", "MiniMaxM3VLImageProcessor", "MiniMaxM3VLVideoProcessor", "MiniMaxVLProcessor",
    "smart_resize",
)  # fmt: skip


def prepare(made: Any) -> None:
    """Randomise the norms' weights and the experts' bias, which transformers sets to 0."""
    import torch

    for name, parameter in made.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    for name, buffer in made.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer)


def save_original(folder: Path) -> None:
    """Save the checkpoint in `folder` again, in `folder/original`, with the names that vLLM reads."""
    safetensors: Any = importlib.import_module("safetensors.torch")
    (folder / "original").mkdir()
    weights = {}
    for name, tensor in safetensors.load_file(folder / "model.safetensors").items():
        for theirs, original in _NAMES.items():
            name = name.replace(theirs, original)
        if name.endswith("gate_up_proj.weight"):
            for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
                weights[name.replace("gate_up", part)] = half.contiguous()
        elif name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                for part, half in zip(("w1", "w3"), both.chunk(2), strict=True):
                    weights[name.replace("gate_up_proj", f"{expert}.{part}.weight")] = half.contiguous()
        elif name.endswith("experts.down_proj"):
            for expert, weight in enumerate(tensor):
                weights[name.replace("down_proj", f"{expert}.w2.weight")] = weight.contiguous()
        else:
            weights[name] = tensor
    safetensors.save_file(weights, folder / "original" / "model.safetensors", {"format": "pt"})
    (folder / "original" / "config.json").write_text(json.dumps(_configuration(folder)))


def _configuration(folder: Path) -> dict[str, Any]:
    theirs = json.loads((folder / "config.json").read_text())
    sparse = [int(kind == "minimax_m3_sparse") for kind in theirs["layer_types"]]
    same = (
        "vocab_size", "hidden_size", "intermediate_size", "dense_intermediate_size", "shared_intermediate_size",
        "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
        "rms_norm_eps", "rotary_dim", "num_local_experts", "num_experts_per_tok", "routed_scaling_factor",
        "swiglu_alpha", "swiglu_limit",
    )  # fmt: skip
    rotary = theirs["rope_parameters"]
    text = {name: theirs[name] for name in same} | {
        "rope_theta": rotary["rope_theta"],
        "partial_rotary_factor": rotary["partial_rotary_factor"],
        "moe_layer_freq": [int(kind == "sparse") for kind in theirs["mlp_layer_types"]],
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": theirs["index_head_dim"],
            "sparse_num_index_heads": theirs["index_n_heads"],
            "sparse_topk_blocks": theirs["index_topk_blocks"],
            "sparse_block_size": theirs["index_block_size"],
            "sparse_local_block": theirs["index_local_blocks"],
            "sparse_init_block": 0,
            "sparse_score_type": "max",
            "sparse_attention_freq": sparse,
        },
    }
    return {"model_type": "minimax_m3_vl", "architectures": [ARCHITECTURE], "text_config": text, "dtype": "float32"}


def without_images() -> types.ModuleType:
    """A module that replaces vLLM's image processors, which import torchvision."""
    processors = types.ModuleType(PROCESSORS)
    vars(processors).update({name: type(name, (), {}) for name in _IMAGE_NAMES})
    return processors


def prepare_vllm() -> None:
    """Let vLLM load the text model without torchvision, whose installed build may be for another torch.

    The class of the model is registered, since vLLM would otherwise inspect it in another process, without this change.
    """
    sys.modules[PROCESSORS] = without_images()
    bindings: Any = importlib.import_module("ragged_attention.integrations._vllm_bindings")
    registry: Any = importlib.import_module("vllm.model_executor.models.registry").ModelRegistry
    registry.register_model(ARCHITECTURE, getattr(bindings, ARCHITECTURE))


def quantise() -> None:
    """Let the indexer of transformers' model select blocks by queries and keys rounded to bfloat16, as in vLLM."""
    home: Any = importlib.import_module("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
    select, rotate = home.MiniMaxM3VLIndexer.forward, home.apply_rotary_pos_emb

    def rotate_and_round(*arguments: Any) -> Any:
        return tuple(x.bfloat16().to(x.dtype) for x in rotate(*arguments))

    def select_by_bfloat16(*arguments: Any) -> Any:
        home.apply_rotary_pos_emb = rotate_and_round
        try:
            return select(*arguments)
        finally:
            home.apply_rotary_pos_emb = rotate

    home.MiniMaxM3VLIndexer.forward = select_by_bfloat16
