"""vLLM's own CPU operators for sparse models as oracles of ours, on the same bytes.

    python -m benchmarks.vllm_operators

It wants the environment of `benchmarks.vllm_check`. vLLM's operators serve DeepSeek-V4 on CPUs: its indexer is
`fp8_paged_mqa_logits_cpu` and `topk_transform_512_cpu`, and `flash_mla_with_kvcache_cpu` attends to a window and to a
list of compressed keys.
"""

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Console

BOUNDS = {"fp8_paged_mqa_logits_cpu": 5e-6, "topk_transform_512_cpu": 0.0, "flash_mla_with_kvcache_cpu": 5e-6}


def cosine_difference(a: Any, b: Any) -> float:
    """DeepGEMM's `calc_diff`: 0 for equal arrays."""
    a, b = (np.asarray(x.float(), np.float64) for x in (a, b))
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def differences() -> Iterator[tuple[str, float]]:
    """The name of each operator, and how far ours is from it."""
    import torch

    from ragged_attention.integrations import _vllm_bindings as ours
    from ragged_attention.torch import mla_decode, quantize_mla_cache, write_indexer_cache

    vllm: Any = importlib.import_module("vllm._custom_ops")
    torch.manual_seed(0)
    page, pages, heads, size = 64, 36, 64, 128
    lens, table = torch.tensor([700, 64, 1], dtype=torch.int32), torch.randperm(pages).view(3, 12).int()
    cache = torch.zeros(pages, page, 1, size + 4, dtype=torch.uint8)
    write_indexer_cache(torch.randn(pages * page, size), cache, torch.arange(pages * page), power_of_two=True)
    q, weights = torch.randn(3, heads, size).to(torch.float8_e4m3fn), torch.randn(3, heads)
    given = (q, cache.view(pages, -1), weights, lens, table, page, 700)
    theirs, own = vllm.fp8_paged_mqa_logits_cpu(*given), ours.fp8_paged_mqa_logits_cpu(*given)
    seen = torch.arange(700) < lens[:, None]
    yield "fp8_paged_mqa_logits_cpu", cosine_difference(theirs[seen], own[seen])

    chosen = []
    for module in (vllm, ours):
        slots, positions = (torch.empty(3, 512, dtype=torch.int32) for _ in range(2))
        module.topk_transform_512_cpu(own, lens, table, slots, page, positions)
        chosen.append((slots.sort().values, positions.sort().values))
    yield "topk_transform_512_cpu", float(sum((a != b).sum() for a, b in zip(*chosen, strict=True)))

    caches = [quantize_mla_cache(torch.randn(4, page, 1, 512).bfloat16(), "fp8_v4") for _ in range(2)]
    window, compressed = (torch.randint(-1, 4 * page, (5, count), dtype=torch.int64) for count in (128, 96))
    q, sinks, out = torch.randn(5, 16, 512).bfloat16(), torch.randn(16), torch.empty(5, 16, 512).bfloat16()
    first, second = (one.view(4, -1) for one in caches)
    vllm.flash_mla_with_kvcache_cpu(out, q, first, window, page, second, compressed, page, sinks, 512**-0.5)
    own, _ = mla_decode(
        q.unsqueeze(1), caches[0], indices=window.int().unsqueeze(1), sinks=sinks, extra_kv_cache=caches[1],
        extra_indices=compressed.int().unsqueeze(1), sm_scale=512**-0.5,
    )  # fmt: skip
    yield "flash_mla_with_kvcache_cpu", cosine_difference(out, own.squeeze(1))


def main() -> int:
    failures = 0
    for name, difference in differences():
        right = difference <= BOUNDS[name]
        failures += not right
        Console().print(f"{name}: {difference:.1e} from ours, {'agrees' if right else 'DIFFERS'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
