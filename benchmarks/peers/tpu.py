"""JAX's own TPU kernels at the shapes of our cases, to be compiled beside them: the same work, the same blocks."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.cases.tpu import Traceable

I32 = "int32"


def _ragged(
    q_heads: int, kv_heads: int, head_dim: int, dtype: str = "bfloat16", cache_dtype: str | None = None, **options: Any
) -> Traceable:
    """512 tokens of 8 sequences of up to 512 positions in pages of 16, blocks of 64 queries and 128 keys."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    arrays = {
        "q": ((512, q_heads, head_dim), dtype),
        "kv_pages": ((256, 16, 2 * kv_heads, head_dim), cache_dtype or dtype),
        "kv_lens": ((8,), I32),
        "page_indices": ((8, 32), I32),
        "cu_q_lens": ((9,), I32),
        "num_seqs": ((1,), I32),
    }
    blocks: dict[str, Any] = {"num_kv_pages_per_block": 8, "num_queries_per_block": 64, "vmem_limit_bytes": 32 << 20}
    return Traceable(functools.partial(ragged_paged_attention, sm_scale=head_dim**-0.5, **blocks, **options), arrays)


def _paged(
    q_heads: int, kv_heads: int, head_dim: int, dtype: str = "bfloat16", inline_seq_dim: bool = True
) -> Traceable:
    """A decode of 32 sequences of up to 4096 positions in pages of 16, blocks of 512 keys."""
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    pages = ((kv_heads, 8192, 16, head_dim), dtype)
    arrays = {
        "q": ((32, q_heads, head_dim), dtype),
        "k_pages": pages,
        "v_pages": pages,
        "lengths": ((32,), I32),
        "page_indices": ((32, 256), I32),
    }
    function = functools.partial(paged_attention, pages_per_compute_block=32, inline_seq_dim=inline_seq_dim)
    return Traceable(function, arrays)


RPA, PAGED = "ragged_paged_attention", "paged_attention"
# Name -> the operation of ours that does the same, and what makes the function.
PEERS: Mapping[str, tuple[str, Callable[[], Traceable]]] = {
    "jax_rpa_32x8_d128_bf16": (RPA, functools.partial(_ragged, 32, 8, 128)),
    "jax_rpa_32x8_d128_f32": (RPA, functools.partial(_ragged, 32, 8, 128, "float32")),
    "jax_rpa_32x8_d128_fp8": (
        RPA, functools.partial(_ragged, 32, 8, 128, cache_dtype="float8_e4m3fn", k_scale=0.25, v_scale=0.25),
    ),
    "jax_rpa_12x2_d128_bf16": (RPA, functools.partial(_ragged, 12, 2, 128)),
    "jax_rpa_32x8_d128_bf16_window_cap": (
        RPA, functools.partial(_ragged, 32, 8, 128, sliding_window=128, soft_cap=30.0),
    ),
    "jax_rpa_16x8_d256_bf16": (RPA, functools.partial(_ragged, 16, 8, 256)),
    "jax_paged_32x8_d128_bf16": (PAGED, functools.partial(_paged, 32, 8, 128)),
    "jax_paged_32x8_d128_bf16_grid": (PAGED, functools.partial(_paged, 32, 8, 128, inline_seq_dim=False)),
}  # fmt: skip
