"""Compares vLLM's own CPU operators and modules with ours on the same bytes.

    python -m benchmarks.vllm_operators

Run it in the environment of `benchmarks.vllm_check`. vLLM's operators serve DeepSeek-V4 on CPUs:
`fp8_paged_mqa_logits_cpu` and `topk_transform_512_cpu` are its indexer, `flash_mla_with_kvcache_cpu` attends to a
window and to a list of compressed keys, and `fused_qnorm_rope_kv_insert_cpu` writes the window. On CPUs vLLM does not
fuse norms, rotation and the cache write before attention. So our backend's fused steps are compared with vLLM's modules
RMSNorm and RotaryEmbedding in float32. The shapes are those of vLLM's own tests, plus a few larger ones.
"""

import importlib
import itertools
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console

# Name -> the greatest difference. It allows for results that are rounded to bfloat16 or float16.
BOUNDS = {
    "fp8_paged_mqa_logits_cpu": 5e-6,
    "topk_transform_512_cpu": 0.0,
    "flash_mla_with_kvcache_cpu": 5e-6,
    "flash_mla_with_kvcache_cpu, no key": 0.0,
    "fused_qnorm_rope_kv_insert_cpu": 5e-6,
    "do_qk_norm_rope_kvcache_update": 5e-6,
    "do_rope_and_kv_cache_update": 5e-6,
    "values, and slots that no token has": 0.0,
}


def cosine_difference(a: Any, b: Any) -> float:
    """DeepGEMM's `calc_diff`: 0 for equal arrays."""
    a, b = (np.asarray(x.float(), np.float64) for x in (a, b))
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def differences() -> Iterator[tuple[str, float]]:
    """Yield (name of vLLM's operator or of our step, difference) for each case."""
    import torch

    torch.manual_seed(0)
    yield from of_the_indexer()
    yield from of_attention()
    yield from of_the_window()
    yield from of_fused_steps()


def of_the_indexer() -> Iterator[tuple[str, float]]:
    import torch

    from ragged_attention.integrations import _vllm_bindings as ours
    from ragged_attention.torch import write_indexer_cache

    vllm: Any = importlib.import_module("vllm._custom_ops")
    for page, heads, gap in ((64, 64, 0), (64, 4, 48), (256, 4, 0)):
        lens = torch.tensor([1, page + 7, 3 * page, 700], dtype=torch.int32)
        per_request, pages, size = 12, 50, 128
        table = torch.randperm(pages)[: 4 * per_request].view(4, per_request).int()
        table[torch.arange(per_request) >= ((lens + page - 1) // page)[:, None]] = -1
        rows = torch.zeros(pages, page * (size + 4) + gap, dtype=torch.uint8)[:, : page * (size + 4)]
        cache = rows.as_strided((pages, page, 1, size + 4), (rows.stride(0), size + 4, size + 4, 1))
        write_indexer_cache(torch.randn(pages * page, size), cache, torch.arange(pages * page), power_of_two=True)
        q, weights = torch.randn(4, heads, size).to(torch.float8_e4m3fn), torch.randn(4, heads)
        arguments = (q, rows, weights, lens, table, page, 900)
        theirs, our_result = vllm.fp8_paged_mqa_logits_cpu(*arguments), ours.fp8_paged_mqa_logits_cpu(*arguments)
        seen = torch.arange(900) < lens[:, None]
        yield "fp8_paged_mqa_logits_cpu", cosine_difference(theirs[seen], our_result[seen])

        selections = []
        for module in (vllm, ours):
            slots, positions = (torch.empty(4, 512, dtype=torch.int32) for _ in range(2))
            module.topk_transform_512_cpu(our_result, lens, table, slots, page, positions)
            selections.append((slots.sort().values, positions.sort().values))
        yield "topk_transform_512_cpu", float(sum((a != b).sum() for a, b in zip(*selections, strict=True)))


def of_attention() -> Iterator[tuple[str, float]]:
    """Yield the differences for attention.

    The cases are those of vLLM's test, with and without compressed keys, and a case with the model's sizes. Each case
    also runs with lists that have no keys.
    """
    import torch

    from ragged_attention.torch import mla_decode, quantize_mla_cache

    vllm: Any = importlib.import_module("vllm._custom_ops")
    cases = [(*case, 16, 8, 6) for case in itertools.product((1, 64), (1, 17), (0, 5))] + [(16, 5, 96, 64, 64, 128)]
    for heads, tokens, entries, page, second_page, keys in cases:
        first, second = (
            quantize_mla_cache(torch.randn(12, size, 1, 512).bfloat16(), "fp8_v4") for size in (page, second_page)
        )
        window = torch.randint(-1, 12 * page, (tokens, keys))
        compressed = torch.randint(-1, 12 * second_page, (tokens, entries))
        for name, lists in (
            ("flash_mla_with_kvcache_cpu", (window, compressed)),
            ("flash_mla_with_kvcache_cpu, no key", tuple(torch.full_like(slots, -1) for slots in (window, compressed))),
        ):
            q, sinks = torch.randn(tokens, heads, 512).bfloat16(), torch.randn(heads)
            theirs = torch.empty_like(q)
            vllm.flash_mla_with_kvcache_cpu(
                theirs, q, first.view(12, -1), lists[0], page, second.view(12, -1), lists[1], second_page, sinks,
                512**-0.5,
            )  # fmt: skip
            extra: dict[str, Any] = (
                dict(extra_kv_cache=second, extra_indices=lists[1].int().unsqueeze(1)) if entries else {}
            )
            our_result, _ = mla_decode(
                q.unsqueeze(1), first, indices=lists[0].int().unsqueeze(1), sinks=sinks, sm_scale=512**-0.5, **extra
            )
            if "no key" in name:
                yield name, float(theirs.abs().max() + our_result.abs().max())
            else:
                yield name, cosine_difference(theirs, our_result.squeeze(1))


def of_the_window() -> Iterator[tuple[str, float]]:
    """Yield the differences between the keys of vLLM's operator and of our fused write. Some tokens have no slot."""
    import torch

    from ragged_attention.torch import dequantize_mla_cache, latent_norm_rope_write

    vllm: Any = importlib.import_module("vllm._custom_ops")
    for tokens in (1, 17, 64):
        q, kv = torch.randn(tokens, 8, 512).bfloat16(), torch.randn(tokens, 512).bfloat16()
        positions, angles = (
            torch.randint(0, 4096, (tokens,)),
            torch.arange(4096)[:, None] / 10000 ** torch.arange(0, 1, 1 / 32),
        )
        cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
        slots = torch.randperm(5 * 16)[:tokens]
        slots[1:][-1:] = -1
        theirs, our_result = (torch.zeros(5, 16, 1, 584, dtype=torch.uint8) for _ in range(2))
        vllm.fused_qnorm_rope_kv_insert_cpu(q, kv, positions, theirs.view(5, -1), slots, cos_sin, 8, 1e-6, 16)
        latent_norm_rope_write(
            q[..., 448:].contiguous(), kv, our_result, slots, positions=positions, cos_sin=cos_sin, interleaved=True,
            cache_format="fp8_v4",
        )  # fmt: skip
        rows = [dequantize_mla_cache(cache, "fp8_v4") for cache in (theirs, our_result)]
        yield "fused_qnorm_rope_kv_insert_cpu", cosine_difference(*rows)


def of_fused_steps() -> Iterator[tuple[str, float]]:
    """Yield the differences of our layers' fused steps.

    The shapes are those of vLLM's test of a fused write. Some cases have fewer slots than tokens.
    """
    import torch

    config: Any = importlib.import_module("vllm.config")
    shapes = ((32, 8, 128, 128), (16, 4, 64, 64), (8, 2, 256, 256), (8, 8, 128, 128), (32, 8, 128, 64))
    counts = ((1, 1, 0), (5, 5, 0), (300, 300, 0), (64, 64, 7), (64, 40, 0), (300, 290, 5))
    with config.set_current_vllm_config(config.VllmConfig()):
        for shape, is_neox, dtype in itertools.product(shapes, (True, False), (torch.bfloat16, torch.float16)):
            for count in counts:
                yield from of_a_fused_step(shape, is_neox, dtype, *count)
        yield from of_a_fused_step(shapes[0], True, torch.bfloat16, 2048, 2048, 0)


def of_a_fused_step(
    shape: tuple[int, int, int, int], is_neox: bool, dtype: Any, tokens: int, slot_count: int, without_slot: int
) -> Iterator[tuple[str, float]]:
    import torch

    from ragged_attention.integrations.vllm import RaggedAttentionBackend

    norms: Any = importlib.import_module("vllm.model_executor.layers.layernorm")
    rotary: Any = importlib.import_module("vllm.model_executor.layers.rotary_embedding")
    heads, kv_heads, size, rotary_size = shape
    impl: Any = RaggedAttentionBackend.get_impl_cls()(heads, size, size**-0.5, kv_heads)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size).to(dtype)
    positions = torch.randint(0, 4096, (tokens,))
    weights = [(torch.randn(size) * 0.1 + 1).to(dtype) for _ in range(2)]
    rope = rotary.RotaryEmbedding(
        head_size=size, rotary_dim=rotary_size, max_position_embeddings=4096, base=10000.0, is_neox_style=is_neox,
        dtype=dtype,
    )  # fmt: skip
    cos_sin = rope.cos_sin_cache.clone()
    rope.cos_sin_cache = cos_sin.float()
    layer = SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(()))
    for name in ("do_qk_norm_rope_kvcache_update", "do_rope_and_kv_cache_update"):
        q, k, v = qkv.clone().split([heads * size, kv_heads * size, kv_heads * size], -1)
        new = [q.float().view(tokens, -1, size), k.float().view(tokens, -1, size)]
        if "norm" in name:
            for at, weight in enumerate(weights):
                norm = norms.RMSNorm(size, 1e-6, dtype=torch.float32)
                norm.weight.data.copy_(weight)
                new[at] = norm.forward_native(new[at])
        new = rope.forward_native(positions, new[0].flatten(1), new[1].flatten(1))
        wanted = [array.view(tokens, -1, size) for array in new]
        before = torch.randn(tokens // 16 + 3, kv_heads, 16, 2 * size).to(dtype)
        cache, slots = before.clone(), torch.randperm(before.shape[0] * 16)[:slot_count]
        slots[slot_count - without_slot :] = -1
        if "norm" in name:
            query, key = torch.empty_like(q), torch.empty_like(k)
            impl.do_qk_norm_rope_kvcache_update(
                layer, qkv, query, key, positions, *weights, 1e-6, cos_sin, is_neox, cache, slots
            )
        else:
            query = q.contiguous()
            impl.do_rope_and_kv_cache_update(layer, query, k, v, positions, cos_sin, is_neox, cache, slots)
        has = slots >= 0
        rows = cache.transpose(1, 2).flatten(0, 1)
        written = rows[slots[has]]
        yield name, cosine_difference(query[:slot_count].view(slot_count, -1, size), wanted[0][:slot_count])
        yield name, cosine_difference(written[..., :size], wanted[1][:slot_count][has])
        value = v.view(tokens, -1, size)[:slot_count][has]
        free = torch.ones(len(rows), dtype=torch.bool)
        free[slots[has]] = False
        unwritten = before.transpose(1, 2).flatten(0, 1)[free]
        wrong = (written[..., size:] != value).sum() + (rows[free] != unwritten).sum()
        yield "values, and slots that no token has", float(wrong)


def main() -> int:
    worst, cases = dict.fromkeys(BOUNDS, 0.0), dict.fromkeys(BOUNDS, 0)
    for name, difference in differences():
        worst[name] = float(np.maximum(worst[name], difference))  # NaN stays NaN
        cases[name] += 1
    failures = 0
    for name, difference in worst.items():
        right = difference <= BOUNDS[name]
        failures += not right
        verdict = "agrees" if right else "DIFFERS"
        Console().print(f"{name}: {difference:.1e} at most from ours in {cases[name]} cases, {verdict}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
