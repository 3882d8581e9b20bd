"""Write the tables of docs/support.md and docs/sparse_attention.md that show which backends run a call.

    python docs/support_table.py

The tables come from the backends' `why_not`, so nothing is run and no device is needed. Each cell lists the backends
that take a call, in the platform's order; the first one runs it. The summary in docs/support.md names only this first
backend. Operations with the same backends share a row of the summary.
"""

import dataclasses
from pathlib import Path
from typing import Any

from ragged_attention import dispatch
from ragged_attention.calls import CACHE_FORMATS, FLOATS, Device
from ragged_attention.tools.samples import BlocksSample, IndexerSample, LatentSample, Sample, VarlenSample, device_of

DOCS = Path(__file__).resolve().parent
PAGE, SPARSE = DOCS / "support.md", DOCS / "sparse_attention.md"
MARKS = "<!-- support table: written by `make docs` -->\n", "<!-- end of support table -->\n"
SUMMARY = "<!-- summary: written by `make docs` -->\n", "<!-- end of summary -->\n"

# The (framework, device) pairs of each column.
COLUMNS = {
    "NVIDIA Hopper and newer": (("torch", "sm_90"), ("torch", "sm_100"), ("torch", "sm_120")),
    "NVIDIA Ampere, Ada": (("torch", "sm_80"), ("torch", "sm_86"), ("torch", "sm_89")),
    "AMD CDNA 3, 4": (("torch", "gfx942"), ("torch", "gfx950")),
    "TPU": (("jax", "tpu"),),
    "CPU": (("torch", "cpu"), ("jax", "cpu")),
    "MPS, XPU": (("torch", "mps"), ("torch", "xpu")),
}
DECODE = Sample()
BIASES = ("alibi_slopes", "relative_bias")
WIDE = dataclasses.replace(DECODE, num_tokens=512)
LATENT = LatentSample()
PLAIN = [LatentSample(cache_format="plain", dtype=dtype) for dtype in FLOATS]
RAGGED_PLAIN = [dataclasses.replace(sample, num_tokens=512, causal=True) for sample in PLAIN]
QUANTIZED_LATENTS = {name: [LatentSample(cache_format=name, dtype=dtype) for dtype in FLOATS] for name in CACHE_FORMATS}
ANY_LATENTS = [sample for samples in QUANTIZED_LATENTS.values() for sample in samples]
FORMATS = ", ".join(CACHE_FORMATS)
ODD = "1, 3, 7, 16 heads; top-k of 100; pages of 1; sinks"
ODD_SHAPES = [
    *(LatentSample(num_q_heads=heads) for heads in (1, 3, 7, 16)),
    LatentSample(topk=100),
    LatentSample(page_size=1),
    LatentSample(sinks=True),
]
VARLEN = [VarlenSample(dtype=dtype) for dtype in FLOATS]
ODD_VARLEN = [
    *(VarlenSample(**change) for change in ({"sliding_window": 128}, {"soft_cap": 30.0}, {"sinks": True})),
    *(VarlenSample(head_dim=head_dim) for head_dim in (40, 80, 256, 512)),
    VarlenSample(head_dim=192, d_v=128),
    VarlenSample(num_q_heads=28, num_kv_heads=4),
]
ODD_HEADS = [
    *(dataclasses.replace(DECODE, head_dim=head_dim) for head_dim in (80, 96, 256)),
    dataclasses.replace(DECODE, num_q_heads=28, num_kv_heads=4),
    dataclasses.replace(DECODE, page_size=24),
]


def of_floats(operation: str, *samples: Sample) -> dict[tuple[str, str], list[Sample]]:
    """The rows for calls without quantisation. float16 has its own row, because TPUs do not support it."""
    kinds = {"f32, bf16": ("float32", "bfloat16"), "f16": ("float16",)}
    return {
        (operation, what): [dataclasses.replace(sample, dtype=dtype) for dtype in dtypes for sample in samples]
        for what, dtypes in kinds.items()
    }


def of_eight_bits(operation: str, what: str, *samples: Any) -> dict[tuple[str, str], list[Any]]:
    """The rows for 8-bit caches. e4m3fnuz has its own row, because `pallas` declines it."""
    kinds = {"e4m3, e5m2, int8": ("float8_e4m3fn", "float8_e5m2", "int8"), "e4m3fnuz": ("float8_e4m3fnuz",)}
    field = "stored" if operation == "ragged_mla_attention" else "cache_dtype"
    return {
        (operation, f"{kind} {what}"): [
            dataclasses.replace(sample, **{field: dtype}) for dtype in dtypes for sample in samples
        ]
        for kind, dtypes in kinds.items()
    }


def of_scale_pages(operation: str, *samples: Sample) -> dict[tuple[str, str], list[Sample]]:
    """The rows for caches with scale pages. Formats with a scale per token and head have their own row."""
    kinds = {
        "e4m3, e5m2, int8 with a scale for each token and head": (
            "e4m3_token_head",
            "e5m2_token_head",
            "int8_token_head",
        ),
        "int4 with zero points, nvfp4, mxfp8, mxfp4": ("int4_token_head", "nvfp4", "mxfp8", "mxfp4"),
    }
    return {
        (operation, what): [dataclasses.replace(sample, kv_format=name) for name in names for sample in samples]
        for what, names in kinds.items()
    }


# The formats of the lightning indexer's keys.
KEYS = {
    "pages of bytes": [IndexerSample(dtype=dtype) for dtype in ("float8_e4m3fn", *FLOATS)],
    "e4m3 keys with scales, packed": [IndexerSample(packed=True)],
    "f32, f16, bf16 keys, packed or in pages": [
        IndexerSample(dtype=dtype, cache_dtype=dtype, packed=packed) for dtype in FLOATS for packed in (False, True)
    ],
    "pages of bytes; 4 tokens per row; 1, 3, 32 heads of dimension 32, 64, 256; pages of 1, 16": [
        IndexerSample(ratio=4),
        *(IndexerSample(num_q_heads=heads) for heads in (1, 3, 32)),
        *(IndexerSample(head_dim=head_dim) for head_dim in (32, 64, 256)),
        *(IndexerSample(page_size=size) for size in (1, 16)),
    ],
}
NEW_KEYS = [IndexerSample(dtype=dtype) for dtype in FLOATS]
INDEXER_ROWS = {
    **{
        (operation, what): samples for operation in ("indexer_logits", "indexer_topk") for what, samples in KEYS.items()
    },
    ("indexer_logits", "lists of packed keys"): [
        IndexerSample(dtype=dtype, cache_dtype=dtype, listed=True) for dtype in ("float8_e4m3fn", *FLOATS)
    ],
    ("indexer_logits_backward", "f32, f16, bf16"): [
        IndexerSample(dtype=dtype, packed=True, listed=listed) for dtype in FLOATS for listed in (False, True)
    ],
    ("attention_target", "f32, f16, bf16"): [
        LatentSample(cache_format="plain", dtype=dtype, num_tokens=512, topk=topk)
        for dtype in FLOATS
        for topk in (2048, 0)
    ],
    ("indexer_topk", "candidate blocks"): [IndexerSample(candidate_blocks=16)],
    ("top_k_indices", "any"): [IndexerSample(top_k=top_k) for top_k in (1, 100, 2048, 4096)],
    ("quantize_indexer_keys", "f32, f16, bf16"): NEW_KEYS,
    ("write_indexer_cache", "f32, f16, bf16"): NEW_KEYS,
}

BLOCKS_ROWS = {
    **{
        (operation, what): samples
        for operation in ("block_scores", "select_blocks")
        for what, samples in {
            "f32, f16, bf16 keys, packed or in pages": [
                BlocksSample(dtype=dtype, cache_dtype=dtype, packed=packed)
                for dtype in FLOATS
                for packed in (False, True)
            ],
            "pages of bytes, or e4m3 keys": [
                BlocksSample(dtype=dtype, cache_dtype=stored)
                for dtype in ("float8_e4m3fn", *FLOATS)
                for stored in ("uint8", "float8_e4m3fn")
            ],
            "1, 7 heads of dimension 32, 256; 4 key heads; blocks of 1, 8, 256; pages of 1, 24": [
                *(BlocksSample(num_q_heads=heads) for heads in (1, 7)),
                *(BlocksSample(head_dim=head_dim) for head_dim in (32, 256)),
                BlocksSample(num_kv_heads=4),
                *(BlocksSample(block_size=size) for size in (1, 8, 256)),
                *(BlocksSample(page_size=size) for size in (1, 24)),
            ],
        }.items()
    },
    ("top_k_blocks", "any"): [BlocksSample(top_k=top_k) for top_k in (1, 16, 4096)],
}

# The calls of each row. A backend is listed if it takes all of them.
ROWS = {
    **of_floats("ragged_paged_attention", DECODE, WIDE),
    **of_eight_bits("ragged_paged_attention", "cache", DECODE, WIDE),
    **of_scale_pages("ragged_paged_attention", DECODE, WIDE),
    ("ragged_paged_attention", "window, soft cap, sinks, lse"): [
        dataclasses.replace(DECODE, **change)
        for change in ({"sliding_window": 128}, {"soft_cap": 30.0}, {"sinks": True}, {"return_lse": True})
    ],
    ("ragged_paged_attention", "ALiBi, relative bias"): [
        dataclasses.replace(sample, **{name: True}) for name in BIASES for sample in (DECODE, WIDE)
    ],
    ("ragged_paged_attention", "ranges of keys"): [
        dataclasses.replace(sample, key_ranges=2) for sample in (DECODE, WIDE)
    ],
    ("ragged_paged_attention", "lists of blocks of keys"): [
        dataclasses.replace(sample, selected=16, block_size=size) for size in (1, 128) for sample in (DECODE, WIDE)
    ],
    ("ragged_paged_attention", "largest logits"): [
        dataclasses.replace(sample, return_max_logits=True) for sample in (DECODE, WIDE)
    ],
    ("ragged_paged_attention", "draft masks"): [dataclasses.replace(sample, draft=8) for sample in (DECODE, WIDE)],
    ("ragged_paged_attention", "head dimensions 80, 96, 256, 512; 7 query heads per KV head; pages of 24"): [
        *(dataclasses.replace(DECODE, head_dim=head_dim) for head_dim in (80, 96, 256, 512)),
        dataclasses.replace(DECODE, num_q_heads=28, num_kv_heads=4),
        dataclasses.replace(DECODE, page_size=24),
    ],
    **of_floats("write_kv_pages", DECODE),
    ("quantize_kv", "f32, f16, bf16"): [dataclasses.replace(DECODE, dtype=dtype) for dtype in FLOATS],
    ("dequantize_kv", "any"): [DECODE],
    **of_eight_bits("write_kv_pages", "cache", DECODE),
    **of_scale_pages("write_kv_pages", DECODE),
    **of_floats("norm_rope_write", DECODE),
    **of_eight_bits("norm_rope_write", "cache", DECODE),
    ("merge_attention_states", "f32, f16, bf16"): [dataclasses.replace(DECODE, dtype=dtype) for dtype in FLOATS],
    **of_floats("paged_attention", DECODE),
    **of_eight_bits("paged_attention", "pages with scales", DECODE),
    ("paged_attention", "soft cap; head dimensions 80, 96, 256; 7 query heads per KV head; pages of 24"): [
        dataclasses.replace(DECODE, soft_cap=30.0),
        *ODD_HEADS,
    ],
    **of_floats("prefill_attention", WIDE),
    **of_eight_bits("prefill_attention", "pages with scales", WIDE),
    ("prefill_attention", "window, soft cap; head dimensions 80, 96, 256; 7 query heads per KV head; pages of 24"): [
        *(dataclasses.replace(WIDE, **change) for change in ({"sliding_window": 128}, {"soft_cap": 30.0})),
        *(dataclasses.replace(sample, num_tokens=512) for sample in ODD_HEADS),
    ],
    **{
        ("mla_decode", f"{kind}; {what}"): [dataclasses.replace(sample, topk=topk) for sample in samples]
        for kind, topk in (("dense", 0), ("sparse", LATENT.topk))
        for what, samples in (
            ("f32, f16, bf16", PLAIN),
            *((f"{name} cache", QUANTIZED_LATENTS[name]) for name in QUANTIZED_LATENTS),
        )
    },
    ("mla_decode", ODD): ODD_SHAPES,
    ("mla_decode", "window, soft cap"): [
        dataclasses.replace(LATENT, topk=0, sliding_window=128),
        *(dataclasses.replace(LATENT, topk=topk, soft_cap=30.0) for topk in (0, 2048)),
    ],
    ("ragged_mla_attention", "f32, f16, bf16"): RAGGED_PLAIN,
    **of_eight_bits("ragged_mla_attention", "cache with a scale", *RAGGED_PLAIN[1:]),
    **{
        ("ragged_mla_attention", f"{name} cache"): [dataclasses.replace(sample, num_tokens=512) for sample in samples]
        for name, samples in QUANTIZED_LATENTS.items()
    },
    ("ragged_mla_attention", "window, soft cap, sinks"): [
        dataclasses.replace(RAGGED_PLAIN[2], **change)
        for change in ({"sliding_window": 128}, {"soft_cap": 30.0}, {"sinks": True})
    ],
    ("ragged_mla_attention", "a separate scale for rotary columns"): [
        dataclasses.replace(RAGGED_PLAIN[2], stored="float8_e4m3fn", rope_scale=0.5)
    ],
    ("ragged_mla_attention", "largest logits"): [dataclasses.replace(RAGGED_PLAIN[2], return_max_logits=True)],
    ("ragged_mla_attention", "ranges of keys"): [dataclasses.replace(RAGGED_PLAIN[2], key_ranges=2)],
    ("sparse_mla_prefill", "f32, f16, bf16"): [dataclasses.replace(sample, num_tokens=512) for sample in PLAIN],
    **{
        ("sparse_mla_prefill", f"{name} cache"): [dataclasses.replace(sample, num_tokens=512) for sample in samples]
        for name, samples in QUANTIZED_LATENTS.items()
    },
    ("sparse_mla_prefill", ODD): ODD_SHAPES,
    ("sparse_mla_prefill_backward", "f16, bf16; f32 of 192 columns"): [
        *(dataclasses.replace(sample, num_tokens=512) for sample in PLAIN[1:]),
        # Latents of 576 float32 columns do not fit the shared memory of every GPU.
        LatentSample(cache_format="plain", dtype="float32", num_tokens=512, d_qk=192, d_v=128),
    ],
    **{
        (operation, what): samples
        for operation in ("varlen_attention", "varlen_attention_backward")
        for what, samples in {
            "f32, f16, bf16": VARLEN,
            "window, soft cap, sinks; head dimensions 40, 80, 256, 512, 192/128; 7 query heads per KV head": ODD_VARLEN,
            "ranges of keys": [VarlenSample(causal=False, key_ranges=2)],
            "lists of blocks of keys": [VarlenSample(selected=16, block_size=size) for size in (1, 128)],
            "ALiBi, relative bias": [VarlenSample(**{name: True}) for name in BIASES],
        }.items()
    },
    ("varlen_attention", "largest logits"): [VarlenSample(return_max_logits=True)],
    ("make_decode_schedule", "dense, sparse"): [dataclasses.replace(LATENT, topk=topk) for topk in (0, 2048)],
    ("quantize_mla_cache", FORMATS): ANY_LATENTS,
    ("dequantize_mla_cache", FORMATS): ANY_LATENTS,
    ("latent_norm_rope_write", "f32, f16, bf16"): PLAIN,
    ("latent_norm_rope_write", f"{FORMATS} cache"): ANY_LATENTS,
    ("write_mla_cache", "f32, f16, bf16"): PLAIN,
    ("write_mla_cache", f"{FORMATS} cache"): ANY_LATENTS,
    ("page_indices_to_slots", "any"): [LATENT],
    **INDEXER_ROWS,
    **BLOCKS_ROWS,
}
SPARSE_ROWS = [
    (operation, what)
    for operation, what in ROWS
    if (operation, what) in {**INDEXER_ROWS, **BLOCKS_ROWS}
    or what == "lists of blocks of keys"
    or operation == "sparse_mla_prefill"
    or (operation == "mla_decode" and not what.startswith("dense"))
]


def takers(operation: str, samples: list[Sample], device: Device) -> list[str]:
    """The backends that take all of the calls, in the platform's order. `eager` and `xla` are called `portable`."""
    names = dispatch.candidates(operation, device, "auto")
    by_default = dispatch.by_default(operation, device, "auto")
    refusals = [dispatch.verdicts(sample.call(operation, device), names, by_default) for sample in samples]
    taken = [name for name in names if all(reasons[name] is None for reasons in refusals)]
    return ["portable" if name in dispatch.PORTABLE.values() else name for name in taken]


def _device(framework: str, name: str) -> Device:
    here = name in ("cpu", "mps", "xpu")
    return Device(framework=framework, platform=name) if here else device_of(framework, name)


def common(operation: str, samples: list[Sample], devices: tuple[tuple[str, str], ...]) -> list[str]:
    """The backends that take all of the calls on every device of a column, for GPUs from torch and also from jax."""
    answers = [takers(operation, samples, _device(*device)) for device in devices]
    if devices[0][1].startswith(("sm_", "gfx")):
        answers += [takers(operation, samples, _device("jax", name)) for _, name in devices]
    return [name for name in answers[0] if all(name in answer for answer in answers)]


Answers = dict[tuple[str, str], list[list[str]]]  # for each row, the backends of each column


def answers() -> Answers:
    """The backends that take the calls of each row, for each column."""
    return {
        (operation, what): [common(operation, samples, devices) for devices in COLUMNS.values()]
        for (operation, what), samples in ROWS.items()
    }


def table(rows: Answers) -> str:
    """A Markdown table with all backends that take the calls of each row."""
    lines = ["| operation | call | " + " | ".join(COLUMNS) + " |", "|---" * (2 + len(COLUMNS)) + "|"]
    for (operation, what), columns in rows.items():
        cells = [", ".join(names) or "none" for names in columns]
        lines.append(f"| `{operation}` | {what} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def short_table(all_rows: Answers) -> str:
    """A Markdown table of the backends that `"auto"` picks. Operations with the same picks share a row.

    If the pick for an operation depends on the call, the cell has all picks.
    """
    lines = ["| operations | " + " | ".join(COLUMNS) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    pages: dict[str, list[str]] = {}
    for operation in dict.fromkeys(operation for operation, _ in all_rows):
        rows = [columns for (name, _), columns in all_rows.items() if name == operation]
        picked = [
            dict.fromkeys(names[0] if names else "none" for names in column) for column in zip(*rows, strict=True)
        ]
        pages.setdefault(" | ".join(" or ".join(names) for names in picked), []).append(
            f"[`{operation}`](operations/{operation}.md)"
        )
    lines += [f"| {', '.join(names)} | {cells} |" for cells, names in pages.items()]
    return "\n".join(lines) + "\n"


def with_table(text: str, written: str, begin: str, end: str) -> str:
    """A page's text with a new table between two marks."""
    before, mark, rest = text.partition(begin)
    if not mark or end not in rest:
        raise ValueError(f"expected a page with the lines {begin!r} and {end!r}")
    return f"{before}{begin}{written}{end}{rest.partition(end)[2]}"


def pages() -> dict[Path, str]:
    """The up-to-date text of docs/support.md and docs/sparse_attention.md, by path."""
    rows = answers()
    return {
        PAGE: with_table(with_table(PAGE.read_text(), table(rows), *MARKS), short_table(rows), *SUMMARY),
        SPARSE: with_table(SPARSE.read_text(), table({row: rows[row] for row in SPARSE_ROWS}), *MARKS),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
