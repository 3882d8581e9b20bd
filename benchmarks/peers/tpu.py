"""JAX's own TPU kernels, which are compiled for comparison with ours, with equal block sizes."""

import functools
from collections.abc import Mapping

from benchmarks.cases.tpu import BLOCKS, TpuCase, Traceable, find
from ragged_attention.calls import Device

# Name -> our case that does the same work.
PEERS: Mapping[str, TpuCase] = {
    f"jax_{name}": find(name)
    for name in (
        "rpa_32x8_d128_bf16", "rpa_32x8_d128_f32", "rpa_32x8_d128_fp8", "rpa_12x2_d128_bf16",
        "rpa_32x8_d128_bf16_window_cap", "rpa_16x8_d256_bf16", "paged_32x8_d128_bf16", "paged_32x8_d128_bf16_grid",
    )
}  # fmt: skip


def traceable(case: TpuCase) -> Traceable:
    """JAX's function with the arguments of the case. A decode uses blocks of 512 keys."""
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    arguments = case.call(Device(framework="jax", platform="tpu")).arguments()
    arrays = {name: (value.shape, value.dtype) for name, value in arguments.items() if hasattr(value, "shape")}
    if case.operation == "paged_attention":
        inline_seq_dim = case.options.get("inline_seq_dim", True)
        return Traceable(
            functools.partial(paged_attention, pages_per_compute_block=32, inline_seq_dim=inline_seq_dim), arrays
        )
    options = {name: arguments[name] for name in ("sliding_window", "soft_cap", "k_scale", "v_scale")}
    options |= {"sm_scale": arguments["q"].shape[2] ** -0.5, "vmem_limit_bytes": 32 << 20}
    options |= {name: size for name, size in BLOCKS.items() if name.endswith("_per_block")}
    return Traceable(functools.partial(ragged_paged_attention, **options), arrays | {"num_seqs": ((1,), "int32")})
