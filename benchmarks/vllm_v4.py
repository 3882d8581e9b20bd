"""DeepSeek-V4 for `benchmarks.vllm_check`: vLLM's checkpoint, and transformers' model with 8-bit keys.

vLLM reads a checkpoint with the published names. It stores keys and the indexer's keys in 8 bits, so transformers'
model gets values that are rounded in the same way. vLLM also projects the output of attention in bfloat16.
"""

import importlib
import json
from pathlib import Path
from typing import Any

_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_NAMES = {".attn.norm.": ".attn.kv_norm.", "embed_tokens.": "embed.", "hc_head.hc_": "hc_head_"}
# Fields of transformers' configuration that vLLM refuses.
_REFUSED_BY_VLLM = ("mlp_layer_types", "layer_types", "compress_rates", "partial_rotary_factor")
_LATENT, _GROUP = 448, 64  # the columns that are not rotated, and the columns per scale


def prepare(made: Any) -> None:
    """Randomise parameters that transformers sets to constants, and round every weight to bfloat16.

    The experts' bias is so large that it alone selects the experts. With a smaller bias, roundings would decide.
    """
    import torch

    for name, parameter in made.named_parameters():
        if name.endswith("position_bias"):
            torch.nn.init.normal_(parameter)
        elif name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith(("hc.base", "hc_base")):
            torch.nn.init.normal_(parameter, std=0.2)
        elif name.endswith(("hc.scale", "hc_scale")):
            torch.nn.init.uniform_(parameter, 0.5, 1.0)
        parameter.data = parameter.data.bfloat16().float()
    for name, buffer in made.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(torch.rand(len(buffer), made.config.n_routed_experts).argsort(1)[:, : buffer.shape[1]])
        elif name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=10.0)


def save_original(folder: Path) -> None:
    """Save the checkpoint in `folder` again, in `folder/original`, with the names that vLLM reads."""
    safetensors: Any = importlib.import_module("safetensors.torch")
    (folder / "original").mkdir()
    weights = {}
    for name, tensor in safetensors.load_file(folder / "model.safetensors").items():
        name = name.removeprefix("model.")
        for theirs, original in _NAMES.items():
            name = name.replace(theirs, original)
        weights[name] = tensor.int() if "tid2eid" in name else tensor
    safetensors.save_file(weights, folder / "original" / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "compress_ratios": [_RATIOS[kind] for kind in config["layer_types"]],
        "num_hash_layers": config["mlp_layer_types"].count("hash_moe"),
        "topk_method": "noaux_tc",
        "expert_dtype": "bf16",
    }
    config = {name: value for name, value in config.items() if name not in _REFUSED_BY_VLLM}
    (folder / "original" / "config.json").write_text(json.dumps(config))


def quantise() -> None:
    """Give transformers' model vLLM's rounding of keys, of the indexer's queries and keys, and of projections."""
    import torch

    home: Any = importlib.import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")
    attend, score = home.eager_attention_forward, home.DeepseekV4IndexerScorer.forward
    project = home.DeepseekV4GroupedLinear.forward

    def rounded(x: Any, group: int) -> Any:
        x = x.float().unflatten(-1, (-1, group))
        scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
        return ((x / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)

    def attend_to_8_bits(module: Any, query: Any, key: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        key = key.bfloat16()
        key = torch.cat((rounded(key[..., :_LATENT], _GROUP), key[..., _LATENT:].float()), -1).to(query.dtype)
        return attend(module, query, key, key, mask, *rest, **named)

    def select_by_8_bits(self: Any, q: Any, compressed_kv: Any, hidden_states: Any) -> Any:
        q, keys = (rounded(x, x.shape[-1]) for x in (q, compressed_kv))
        return score(self, q, keys, hidden_states)

    home.eager_attention_forward = attend_to_8_bits
    home.DeepseekV4IndexerScorer.forward = select_by_8_bits
    home.DeepseekV4GroupedLinear.forward = lambda self, x: project(self, x.bfloat16().float()).bfloat16().float()
