"""Shapes for which the Pallas kernels are lowered and compiled, for every kind of TPU. No TPU is needed.

A case is a call over arrays without values. The same cases serve the lowering test and the table of compilations.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ragged_attention import dispatch
from ragged_attention.calls import CALLS, Call, Device
from ragged_attention.errors import Unsupported
from ragged_attention.tools import samples

# Kind of TPU -> (the compiler's name for a machine with such TPUs, jax's name for the device).
TARGETS: Mapping[str, tuple[str, str]] = {
    "v4": ("v4:2x2x1", "TPU v4"),
    "v5e": ("v5e:2x2", "TPU v5 lite"),
    "v5p": ("v5p:2x2x1", "TPU v5p"),
    "v6e": ("v6e:2x2", "TPU v6 lite"),
    "tpu7x": ("tpu7x:2x2x1", "TPU7x"),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TpuCase:
    """One call of an operation. `sample` changes the shapes of the sample call, and `arguments` its other arguments."""

    name: str
    operation: str
    sample: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(
        default_factory=dict
    )  # the kernel's options; if empty, its heuristic chooses them
    # The number of kernels that the call runs. None: the number depends on the size of the scalar memory.
    kernels: int | None = 1
    refused: str = ""  # part of the backend's reason for declining the call; empty if it accepts the call

    def call(self, device: Device) -> Call:
        return samples.sample_of(self.operation, **self.sample).call(self.operation, device, **self.arguments)


@dataclasses.dataclass(frozen=True, slots=True)
class Traceable:
    """A function of arrays, and the shapes to trace it with: name -> (shape, dtype)."""

    function: Callable[..., Any]
    arrays: Mapping[str, tuple[tuple[int, ...], str]]


def refusal(case: TpuCase) -> str | None:
    """The reason why the Pallas backend declines the case on the current mesh's TPU, or None."""
    from ragged_attention.jax._launcher import device_facts

    return dispatch.load(case.operation, "pallas").why_not(case.call(device_facts("tpu")))


def traceable(case: TpuCase) -> Traceable:
    """The case's call through the jax front end, on the Pallas kernels."""
    from ragged_attention.jax._launcher import join, split
    from ragged_attention.jax._lower import FRONT_END

    record = CALLS[case.operation]
    arrays, statics = split(record.flatten(case.call(Device(framework="jax", platform="tpu")).arguments()))

    def run(**values: Any) -> Any:
        if reason := refusal(case):
            raise Unsupported(reason)
        by_index = {index: values[f"array_{index}"] for index in arrays}
        return FRONT_END.run_prepared(record, join(record, by_index, statics), "pallas", dict(case.options))

    shapes = {f"array_{index}": (tuple(array.shape), str(array.dtype)) for index, array in arrays.items()}
    return Traceable(run, shapes)


# With these options our kernel has the block sizes of JAX's kernel and rounds weights as that kernel does.
BLOCKS = {"num_kv_pages_per_block": 8, "num_queries_per_block": 64, "split_weights_below": 0}
MIXED = {"num_tokens": 512, "max_num_seqs": 8, "max_len": 512}
SCALES = {"k_scale": 0.25, "v_scale": 0.25}
FP8, INT8 = "float8_e4m3fn", "int8"


def _attention(name: str, heads: tuple[int, int] = (32, 8), head_dim: int = 128, **fields: Any) -> TpuCase:
    """A mixed batch of ragged paged attention.

    The fields `arguments`, `options` and `kernels` are those of the case. Other fields belong to its sample.
    """
    more: dict[str, Any] = {"kernels": 2}  # one kernel for decodes, one for the other sequences
    more |= {key: fields.pop(key) for key in ("arguments", "options", "kernels") if key in fields}
    sample = MIXED | {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim} | fields
    return TpuCase(name=f"rpa_{name}", operation="ragged_paged_attention", sample=sample, **more)


def _fused(name: str, **fields: Any) -> TpuCase:
    """A mixed batch of attention that also writes the new keys and values."""
    new = samples.FakeArray((512, 8, 128), "bfloat16")
    arguments = {"new_kv": (new, new)} | fields.pop("arguments", {})
    return _attention(name, arguments=arguments, options={"fused_update": True}, **fields)


_RAGGED = (
    _attention("32x8_d128_bf16", options=BLOCKS),
    _attention("32x8_d128_f32", dtype="float32", options=BLOCKS),
    _attention("32x8_d128_fp8", cache_dtype=FP8, arguments=SCALES, options=BLOCKS),
    _attention("12x2_d128_bf16", (12, 2), options=BLOCKS),
    _attention("32x8_d128_bf16_window_cap", sliding_window=128, soft_cap=30.0, options=BLOCKS),
    _attention("16x8_d256_bf16", (16, 8), 256, options=BLOCKS),
    _attention("32x8_d128_bf16_auto"),
    _attention("32x8_d128_bf16_decode", num_tokens=32, max_num_seqs=32, max_len=4096),
    _attention("32x8_d128_bf16_lse", return_lse=True),
    _attention("32x8_d128_bf16_pair", split_pages=True),
    _attention("32x8_d128_bf16_page64", page_size=64),
    _attention("32x8_d128_bf16_page128", page_size=128),
    _attention("32x8_d128_fp8_page256", page_size=256, cache_dtype=FP8, arguments=SCALES),
    _attention("32x8_d128_e5m2", cache_dtype="float8_e5m2", arguments=SCALES),
    _attention("32x8_d128_int8", cache_dtype=INT8, arguments=SCALES),
    _attention("32x8_d128_int8_tokens", kv_format="int8_token_head"),
    _attention("8x4_d64_e4m3_tokens_pair", (8, 4), 64, kv_format="e4m3_token_head", split_pages=True),
    _attention("5x1_d128_e5m2_tokens_page256", (5, 1), kv_format="e5m2_token_head", page_size=256),
    _attention("12x6_d128_int8_tokens_f32_page24", (12, 6), kv_format="int8_token_head", page_size=24, dtype="float32"),
    _attention(
        "32x8_d128_table_of_2_mib",
        num_tokens=64,
        max_num_seqs=64,
        max_len=131072,
        kernels=None,
        arguments={"kv_pages": samples.FakeArray((4096, 16, 16, 128), "bfloat16")},
    ),
    _attention("64x8_d64_sinks_window", (64, 8), 64, sinks=True, sliding_window=128),
    _attention("32x8_d128_bf16_ranges", key_ranges=1),
    _attention("32x8_d128_fp8_ranges2_pair", key_ranges=2, cache_dtype=FP8, arguments=SCALES, split_pages=True),
    _attention("5x1_d128_bf16_ranges8", (5, 1), key_ranges=8, return_lse=True),
    _attention("16x8_d256_f32_ranges3", (16, 8), 256, key_ranges=3, dtype="float32"),
    _attention("8x1_d128_bf16", (8, 1)),
    _attention("8x1_d128_fp8", (8, 1), cache_dtype=FP8, arguments=SCALES),
    _attention("5x1_d128_bf16", (5, 1)),
    _attention("64x8_d128_bf16", (64, 8)),
    _attention("6x6_d128_bf16", (6, 6)),
    _attention("32x32_d80_bf16", (32, 32), 80),
    _attention("8x4_d96_bf16", (8, 4), 96),
    _attention("8x4_d192_bf16", (8, 4), 192),
    _attention("8x4_d256_f32", (8, 4), 256, dtype="float32"),
    _attention("32x4_d256_fp8", (32, 4), 256, cache_dtype=FP8, arguments=SCALES),
    _fused("32x8_d128_bf16_fused"),
    _fused("32x8_d128_fp8_fused", cache_dtype=FP8, arguments=SCALES),
    _fused("32x8_d128_int8_tokens_fused", kv_format="int8_token_head"),
)


def _write(name: str, slots: bool = False, **sample: Any) -> TpuCase:
    """A write of a mixed batch's new tokens, by tables or by slots."""
    tables: dict[str, Any] = {"page_indices": None, "kv_lens": None, "cu_q_lens": None}
    arguments = tables | {"slot_mapping": samples.FakeArray((512,), "int32")} if slots else {}
    arguments |= SCALES if sample.get("cache_dtype") else {}
    return TpuCase(name=f"write_{name}", operation="write_kv_pages", sample=MIXED | sample, arguments=arguments)


_WRITES = (
    _write("bf16"),
    _write("bf16_slots", slots=True),
    _write("f32_pair_d64", dtype="float32", split_pages=True, head_dim=64),
    _write("fp8", cache_dtype=FP8),
    _write("int8_slots", slots=True, cache_dtype=INT8),
    _write("int8_tokens", kv_format="int8_token_head"),
    _write("e4m3_tokens_pair_slots", slots=True, kv_format="e4m3_token_head", split_pages=True),
    _write("bf16_one_head", num_q_heads=8, num_kv_heads=1),
)


DECODE = {"max_num_seqs": 32, "num_tokens": 32, "max_len": 4096}
PREFILL = {"max_num_seqs": 1, "num_tokens": 512, "max_len": 4096}


def _paged(name: str, options: Mapping[str, Any] | None = None, **sample: Any) -> TpuCase:
    """A decode over pages in the heads-first layout."""
    return TpuCase(
        name=f"paged_{name}", operation="paged_attention", sample=DECODE | sample, options=dict(options or {})
    )


def _prefill(name: str, **sample: Any) -> TpuCase:
    """A prefill chunk of one sequence over pages in the heads-first layout."""
    return TpuCase(name=f"prefill_{name}", operation="prefill_attention", sample=PREFILL | sample)


MEGACORE = (("batch", False), ("kv_head", False), ("batch", True), ("kv_head", True))
_HEADS_FIRST = (
    _paged("32x8_d128_bf16"),
    _paged("32x8_d128_bf16_grid", {"inline_seq_dim": False}),
    *(
        _paged(f"32x8_d128_bf16_{mode}{'' if inline else '_grid'}", {"megacore_mode": mode, "inline_seq_dim": inline})
        for mode, inline in MEGACORE
    ),
    _paged("32x8_d128_f32_cap", dtype="float32", soft_cap=30.0),
    _paged("32x8_d128_int8", cache_dtype=INT8),
    _paged("32x8_d128_fp8", cache_dtype=FP8),
    _paged("7x1_d64_bf16", num_q_heads=7, num_kv_heads=1, head_dim=64),
    _paged("16x8_d256_bf16_page64", num_q_heads=16, head_dim=256, page_size=64),
    _prefill("32x8_d128_bf16"),
    _prefill("32x8_d128_f32_window_cap", dtype="float32", sliding_window=128, soft_cap=30.0),
    _prefill("32x8_d128_int8", cache_dtype=INT8),
    _prefill("7x1_d64_bf16", num_q_heads=7, num_kv_heads=1, head_dim=64),
    _prefill("16x8_d256_bf16_page64", num_q_heads=16, head_dim=256, page_size=64),
)


def _latent(
    name: str,
    operation: str = "mla_decode",
    arguments: Mapping[str, Any] | None = None,
    refused: str = "",
    kernels: int = 1,
    **sample: Any,
) -> TpuCase:
    """Latent attention. By default it is DeepSeek-V3.2's sparse decode from an fp8_v32 cache."""
    return TpuCase(
        name=f"mla_{name}",
        operation=operation,
        sample=sample,
        arguments=dict(arguments or {}),
        kernels=kernels,
        refused=refused,
    )


PLAIN: dict[str, Any] = {"cache_format": "plain"}
EXTRA = {
    "extra_kv_cache": samples.FakeArray((40, 16, 1, 656), "uint8"),
    "extra_indices": samples.FakeArray((32, 1, 130), "int32"),
}
V41: dict[str, Any] = {"cache_format": "fp8_v41", "num_q_heads": 64}
FP4: dict[str, Any] = {"cache_format": "fp4_v41", "num_q_heads": 64}
EXTRA_FP4 = {
    "extra_kv_cache": samples.FakeArray((40, 16, 1, 288), "uint8"),
    "extra_indices": samples.FakeArray((32, 1, 130), "int32"),
}
_LATENT = (
    _latent("dense_h128_bf16", **PLAIN, topk=0),
    _latent("dense_h16_bf16", **PLAIN, topk=0, num_q_heads=16),
    _latent("dense_h128_fp8_v32", topk=0),
    _latent("dense_h128_bf16_two_tokens", arguments={"causal": True}, **PLAIN, topk=0, sinks=True, num_tokens=64),
    _latent("dense_h16_f32", **PLAIN, topk=0, num_q_heads=16, dtype="float32"),
    _latent("dense_h16_f16", **PLAIN, topk=0, num_q_heads=16, dtype="float16"),
    _latent("dense_h7_bf16_page16", **PLAIN, topk=0, num_q_heads=7, page_size=16),
    _latent("dense_h16_bf16_page61", **PLAIN, topk=0, num_q_heads=16, page_size=61),
    _latent("dense_h16x2_bf16", **PLAIN, topk=0, num_q_heads=16, num_kv_heads=2),
    _latent("sparse_h128_bf16", **PLAIN),
    _latent("sparse_h128_fp8_v32"),
    _latent("sparse_h64_fp8_v32_extra", arguments=EXTRA, num_q_heads=64, sinks=True),
    _latent("sparse_h16_fp8_v32_v576_f32", num_q_heads=16, d_v=576, dtype="float32"),
    _latent("sparse_h16_f16", **PLAIN, num_q_heads=16, dtype="float16"),
    _latent("sparse_h5_d80_top9", **PLAIN, num_q_heads=5, d_qk=80, d_v=48, topk=9),
    _latent("sparse_h128_d512_top5000", **PLAIN, d_qk=512, topk=5000),
    _latent("sparse_prefill_h128_bf16", "sparse_mla_prefill", **PLAIN, num_tokens=512),
    _latent("sparse_prefill_h128_fp8_v32", "sparse_mla_prefill", num_tokens=512),
    _latent("sparse_prefill_h8x2_d128", "sparse_mla_prefill", **PLAIN, num_q_heads=8, num_kv_heads=2, d_qk=128, d_v=64),
    _latent("dense_h64_fp8_v41", **V41, topk=0),
    _latent("dense_h64_fp4_v41_f32", **FP4, topk=0, dtype="float32"),
    _latent("sparse_h64_fp8_v41", **V41),
    _latent("sparse_h64_fp4_v41", **FP4),
    _latent("sparse_h64_fp8_v41_beside_fp4_v41", arguments=EXTRA_FP4, kernels=2, **V41, sinks=True),
    _latent("sparse_prefill_h64_fp8_v41", "sparse_mla_prefill", **V41, num_tokens=512),
    _latent("sparse_fp8_v4", refused="got 'fp8_v4'", cache_format="fp8_v4"),
)


def _ragged_latent(name: str, **sample: Any) -> TpuCase:
    """A mixed batch of ragged attention over latents, in a plain cache by default."""
    fields: dict[str, Any] = PLAIN | MIXED | {"causal": True, "topk": 0} | sample
    return _latent(f"ragged_{name}", "ragged_mla_attention", **fields)


_RAGGED_LATENT = (
    _ragged_latent("h128_bf16"),
    _ragged_latent("h16_bf16", num_q_heads=16),
    _ragged_latent("h16_bf16_decode", num_q_heads=16, num_tokens=32, max_num_seqs=32, max_len=4096),
    _ragged_latent("h16_bf16_page16_window_cap", num_q_heads=16, page_size=16, sliding_window=128, soft_cap=30.0),
    _ragged_latent("h16_bf16_page1024", num_q_heads=16, page_size=1024, max_len=4096),
    _ragged_latent("h128_e4m3", stored=FP8, arguments={"kv_scale": 0.25}),
    _ragged_latent("h16_e4m3_page16", num_q_heads=16, page_size=16, stored=FP8, arguments={"kv_scale": 0.25}),
    _ragged_latent("h7_int8_f32", num_q_heads=7, dtype="float32", stored=INT8, arguments={"kv_scale": 0.25}),
    _ragged_latent("h12_e5m2_d512_lse", num_q_heads=12, d_qk=512, stored="float8_e5m2", arguments={"return_lse": True}),
    _ragged_latent("h16_fp8_v32_sinks", num_q_heads=16, cache_format="fp8_v32", sinks=True),
    _ragged_latent("h16_f16_page61", num_q_heads=16, dtype="float16", page_size=61),
    _ragged_latent("h16_bf16_to_f32", num_q_heads=16, arguments={"out_dtype": "float32", "causal": False}),
)


def _write_latents(name: str, slots: bool = False, **sample: Any) -> TpuCase:
    """A write of a mixed batch's new latents, by tables or by slots."""
    fields: dict[str, Any] = MIXED | {"causal": True, "topk": 0} | sample
    arguments = dict(fields.pop("arguments", {}))
    if slots:
        arguments["slot_mapping"] = samples.FakeArray((512,), "int32")
    else:
        ragged = samples.sample_of("ragged_mla_attention", **fields).arguments("ragged_mla_attention")
        arguments |= {"slot_mapping": None} | {name: ragged[name] for name in ("page_indices", "kv_lens", "cu_q_lens")}
    return _latent(f"write_{name}", "write_mla_cache", arguments, **fields)


_LATENT_WRITES = (
    _write_latents("bf16", **PLAIN),
    _write_latents("bf16_slots", slots=True, **PLAIN),
    _write_latents("f32_slots", slots=True, **PLAIN, dtype="float32"),
    _write_latents("e4m3", **PLAIN, stored=FP8, arguments={"kv_scale": 0.25}),
    _write_latents("fp8_v32_slots", slots=True),
    _write_latents("fp4_v41", cache_format="fp4_v41"),
    _write_latents("fp8_v4", slots=True, refused="got 'fp8_v4'", cache_format="fp8_v4"),
)


def _index(name: str, operation: str = "indexer_logits", **fields: Any) -> TpuCase:
    """A call of the indexer. By default it is DeepSeek-V3.2's decode from pages of bytes."""
    more = {key: fields.pop(key) for key in ("arguments", "kernels", "refused") if key in fields}
    return TpuCase(name=f"indexer_{name}", operation=operation, sample=fields, **more)


PACKED: dict[str, Any] = {"packed": True, "num_tokens": 512, "max_num_seqs": 1}
LONG: dict[str, Any] = PACKED | {"max_len": 2**14, "num_tokens": 4096}
CHUNK: dict[str, Any] = {"num_tokens": 512, "max_num_seqs": 4}
_INDEXER = (
    _index("decode_h64"),
    _index("decode_h64_bf16", dtype="bfloat16", cache_dtype="bfloat16"),
    _index("prefill_h64", **CHUNK),
    _index("prefill_h32_bf16_page16_d64", **CHUNK, dtype="bfloat16", cache_dtype="bfloat16", num_q_heads=32,
           page_size=16, head_dim=64),
    _index("prefill_h5_f32_page8", **CHUNK, dtype="float32", cache_dtype="float32", num_q_heads=5, page_size=8),
    _index("prefill_h16_f16_page256", **CHUNK, dtype="float16", cache_dtype="float16", num_q_heads=16, page_size=256),
    _index("packed_h64", **PACKED),
    _index("packed_h64_bf16", **PACKED, dtype="bfloat16"),
    _index("packed_h64_relative", **PACKED, arguments={"relative": True, "max_keys": 1024}),
    _index("topk_decode_h64", "indexer_topk", kernels=2),
    _index("topk_decode_h64_candidates", "indexer_topk", kernels=2, candidate_blocks=16),
    _index("topk_packed_h64_of_16k", "indexer_topk", kernels=2, **LONG),
    _index("select_2048_of_4096", "top_k_indices"),
    _index("select_512_of_128k", "top_k_indices", top_k=512, max_len=2**17),
    _index("select_2048_of_1m", "top_k_indices", max_len=2**20),
    _index("select_from_too_many", "top_k_indices", refused="takes at most 1048576 columns", max_len=2**20 + 1),
)  # fmt: skip

CASES: tuple[TpuCase, ...] = (*_RAGGED, *_WRITES, *_HEADS_FIRST, *_LATENT, *_RAGGED_LATENT, *_LATENT_WRITES, *_INDEXER)

# The cases on the page of compilations. EVERYWHERE is compiled for every kind of TPU, FURTHER only for MOST.
EVERYWHERE = (
    "rpa_32x8_d128_bf16", "rpa_32x8_d128_fp8", "write_bf16", "paged_32x8_d128_bf16", "prefill_32x8_d128_bf16",
    "mla_dense_h128_bf16", "mla_sparse_h128_fp8_v32", "mla_sparse_prefill_h128_bf16", "mla_ragged_h128_bf16",
    "mla_write_fp8_v32_slots",
    "indexer_decode_h64", "indexer_topk_decode_h64", "indexer_select_2048_of_4096",
)  # fmt: skip
FURTHER = (
    "rpa_32x8_d128_f32", "rpa_12x2_d128_bf16", "rpa_32x8_d128_bf16_window_cap", "rpa_16x8_d256_bf16",
    "rpa_32x8_d128_bf16_auto", "rpa_32x8_d128_int8", "rpa_64x8_d64_sinks_window", "rpa_8x1_d128_bf16",
    "rpa_32x8_d128_bf16_fused", "rpa_32x8_d128_table_of_2_mib", "write_fp8", "paged_32x8_d128_bf16_grid",
    "paged_32x8_d128_bf16_batch", "paged_32x8_d128_int8", "prefill_32x8_d128_int8", "mla_dense_h128_fp8_v32",
    "mla_write_bf16", "mla_ragged_h16_bf16_decode", "mla_ragged_h16_e4m3_page16", "indexer_prefill_h64",
    "indexer_packed_h64_bf16",
)  # fmt: skip
MOST = "v6e"


def find(name: str) -> TpuCase:
    """The case with this name."""
    return next(case for case in CASES if case.name == name)


def uncovered(folder: Path) -> list[str]:
    """The operations that a folder of kernels implements and that no case calls."""
    offered = {path.stem for path in folder.glob("*.py")} & set(CALLS)
    return sorted(offered - {case.operation for case in CASES})
