"""Named batches for the edge cases of attention over packed sequences, its gradient, and sparse prefill's gradient."""

import dataclasses
from collections.abc import Callable

from ragged_attention.testing import selected
from ragged_attention.testing.mla.corners import PREFILL_CORNERS
from ragged_attention.testing.mla.specs import PrefillSpec
from ragged_attention.testing.ranges import KINDS
from ragged_attention.testing.selected import Selection
from ragged_attention.testing.varlen.gradients import GradientBatch, GradientSpec
from ragged_attention.testing.varlen.specs import VarlenSpec

LONG = ((70, 150), (130, 130), (1, 65))
SHORTER_KEYS = ((9, 4), (6, 6), (3, 0))

VARLENS: dict[str, VarlenSpec] = {
    # Lengths.
    "one key": VarlenSpec(lens=((1, 1),)),
    "causal": VarlenSpec(causal=True, poison="nan"),
    "not causal": VarlenSpec(poison="nan"),
    "more queries than keys, causal": VarlenSpec(lens=SHORTER_KEYS, causal=True, poison="nan", dtype="bfloat16"),
    "more queries than keys": VarlenSpec(lens=SHORTER_KEYS, poison="inf", sinks="mixed", group=2),
    "empty on either side": VarlenSpec(lens=((0, 3), (4, 0), (2, 5), (0, 0), (3, 1)), causal=True, poison="nan"),
    "no sequences": VarlenSpec(lens=(), q_padding=3, kv_padding=2, poison="nan", sinks="normal"),
    "no queries": VarlenSpec(lens=((0, 7),)),
    "no keys": VarlenSpec(lens=((5, 0),), sinks="mixed", group=3),
    "padding": VarlenSpec(q_padding=20, kv_padding=70, causal=True, poison="nan", dtype="bfloat16"),
    "several blocks": VarlenSpec(lens=LONG, causal=True, dtype="bfloat16", poison="nan"),
    "several blocks, not causal": VarlenSpec(lens=LONG, group=2, d=32, d_v=32, poison="nan"),
    "lengths given": VarlenSpec(lens=((5, 9), (20, 70)), limits="exact", causal=True, poison="nan"),
    "more than the lengths given": VarlenSpec(limits="loose", q_padding=2, kv_padding=1, poison="nan"),
    # Masks and logits.
    "window of one": VarlenSpec(lens=((9, 9), (5, 9)), causal=True, sliding_window=1, poison="nan"),
    "window": VarlenSpec(lens=((20, 40), (30, 20)), causal=True, sliding_window=7, poison="nan", dtype="bfloat16"),
    "window, not causal": VarlenSpec(lens=((30, 40), (40, 9)), sliding_window=5, poison="nan"),
    "window over blocks": VarlenSpec(lens=((140, 200),), causal=True, sliding_window=67, poison="nan"),
    **{f"ranges, {kind}": VarlenSpec(ranges=kind, group=2, poison="nan", q_padding=3) for kind in KINDS},
    "ranges, empty on either side": VarlenSpec(
        lens=((0, 3), (4, 0), (2, 5), (0, 0), (3, 1)), ranges="any", poison="nan", sinks="mixed"
    ),
    "ranges over blocks": VarlenSpec(lens=LONG, ranges="few", group=2, dtype="bfloat16", poison="nan"),
    "spans over blocks": VarlenSpec(lens=LONG, ranges="spans", d=64, d_v=64, dtype="bfloat16", poison="nan", seed=2),
    "chunks over blocks": VarlenSpec(lens=LONG, ranges="chunks", poison="nan", seed=1),
    "prefixes over blocks": VarlenSpec(lens=LONG, ranges="prefix", kv_heads=2, sinks="normal", poison="nan"),
    "many ranges over blocks": VarlenSpec(lens=((70, 150),), ranges="many", dtype="float16", poison="nan"),
    "ranges with biases, sinks and a soft cap": VarlenSpec(
        lens=((20, 40), (30, 20)), ranges="few", bias="shared", alibi="mixed", sinks="mixed", soft_cap=2.0, group=2,
        poison="nan",
    ),
    **{
        f"blocks, {kind}": VarlenSpec(
            lens=((5, 9), (3, 3), (20, 40)), selection=Selection(kind=kind, size=4), kv_heads=2, group=2, poison="nan",
            q_padding=3, causal=kind != "few",
        )
        for kind in selected.KINDS
    },
    **{
        f"blocks of {size} of one list for all heads": VarlenSpec(
            lens=((9, 300), (70, 70)), selection=Selection(kind="own", size=size, shared=True), kv_heads=2,
            causal=True, poison="nan",
        )
        for size in (1, 8, 16, 128, 256)
    },
    "blocks, empty on either side": VarlenSpec(
        lens=((0, 3), (4, 0), (2, 5), (0, 0), (3, 1)), selection=Selection(kind="few", size=2), poison="nan",
        sinks="mixed", kv_heads=2,
    ),
    "blocks over blocks": VarlenSpec(
        lens=LONG, selection=Selection(kind="own", size=16, length=3), kv_heads=2, group=2, causal=True,
        dtype="bfloat16", poison="nan",
    ),
    "large blocks over blocks": VarlenSpec(
        lens=LONG, selection=Selection(kind="own", size=64, length=2), kv_heads=2, causal=True, poison="nan"
    ),
    "blocks in a window": VarlenSpec(
        lens=((140, 200),), selection=Selection(kind="own", size=8, length=12), causal=True, sliding_window=67,
        poison="nan",
    ),
    "blocks within ranges": VarlenSpec(
        lens=((20, 40), (30, 20)), selection=Selection(kind="few", size=4), ranges="few", kv_heads=2, group=2,
        poison="nan",
    ),
    "blocks with biases, sinks and a soft cap": VarlenSpec(
        lens=((20, 40), (30, 20)), selection=Selection(kind="own", size=8, length=2), bias="shared", alibi="mixed",
        sinks="mixed", soft_cap=2.0, kv_heads=2, group=2, poison="nan",
    ),
    "soft cap": VarlenSpec(soft_cap=1.5, magnitude=2.0, causal=True),
    "soft cap with sinks and a window": VarlenSpec(
        lens=((20, 33),), soft_cap=2.0, sinks="normal", sliding_window=9, group=3, dtype="float16", poison="nan"
    ),
    "sm_scale 0": VarlenSpec(sm_scale=0.0, causal=True),
    "sm_scale negative": VarlenSpec(sm_scale=-0.2, magnitude=2.0),
    "large logits": VarlenSpec(lens=((12, 20),), sm_scale=2.0, magnitude=3.0),
    "sinks": VarlenSpec(sinks="normal", group=5, causal=True, dtype="bfloat16"),
    "sinks -inf": VarlenSpec(sinks="-inf", group=2),
    "sinks +inf": VarlenSpec(sinks="+inf", group=2, kv_heads=2),
    "ALiBi": VarlenSpec(lens=LONG, alibi="usual", kv_heads=2, group=2, causal=True, dtype="bfloat16", poison="nan"),
    "ALiBi, not causal": VarlenSpec(lens=((20, 70), (9, 4)), alibi="mixed", group=3, poison="nan"),
    "ALiBi with a window, sinks and a soft cap": VarlenSpec(
        lens=((20, 40), (30, 20)), alibi="mixed", causal=True, sliding_window=7, sinks="mixed", soft_cap=2.0, group=2,
        poison="nan",
    ),
    "ALiBi, sm_scale 0": VarlenSpec(lens=((70, 70),), alibi="usual", sm_scale=0.0, causal=True, dtype="float16"),
    "ALiBi, sm_scale negative": VarlenSpec(alibi="mixed", sm_scale=-0.2, soft_cap=3.0, group=2),
    "a relative bias": VarlenSpec(lens=LONG, bias="shared", kv_heads=2, group=2, causal=True, dtype="bfloat16"),
    # The seed determines the number of columns: 1 (seed 1) or 12 (seed 3) in shared tables, and 40 (seed 1) or 12
    # (seed 5) in tables of each query.
    "a relative bias, not causal": VarlenSpec(lens=((20, 70), (9, 4)), bias="shared", group=3, poison="nan", seed=3),
    "a relative bias of one column": VarlenSpec(lens=((20, 33), (4, 0), (9, 4)), bias="shared", poison="nan", seed=1),
    "a relative bias of each query": VarlenSpec(
        lens=((20, 40), (30, 20)), bias="own", alibi="mixed", causal=True, sliding_window=7, sinks="mixed",
        soft_cap=2.0, group=2, q_padding=3, poison="nan", seed=5,
    ),
    "a relative bias of each query, not causal": VarlenSpec(
        lens=((20, 40), (0, 3), (30, 9)), bias="own", sinks="normal", group=2, q_padding=3, poison="nan", seed=1
    ),
    # Heads, widths, dtypes.
    "grouped heads": VarlenSpec(lens=((17, 40), (3, 9)), kv_heads=2, group=3, causal=True, poison="nan"),
    "16 heads of one": VarlenSpec(group=16, dtype="bfloat16", causal=True),
    "128/128": VarlenSpec(d=128, d_v=128, kv_heads=2, causal=True, dtype="bfloat16", poison="nan"),
    "192/128": VarlenSpec(d=192, d_v=128, group=2, causal=True, dtype="bfloat16", poison="nan"),
    "256/256": VarlenSpec(d=256, d_v=256, dtype="float16"),
    "512/512": VarlenSpec(d=512, d_v=512, group=2, causal=True, dtype="bfloat16", poison="nan"),
    "300/464": VarlenSpec(d=300, d_v=464, causal=True, sliding_window=5, soft_cap=30.0, sinks="normal"),
    "33/7": VarlenSpec(lens=((20, 70),), d=33, d_v=7, causal=True, poison="nan"),
    "7/255": VarlenSpec(d=7, d_v=255, dtype="bfloat16"),
    "1/1": VarlenSpec(d=1, d_v=1),
    "float16": VarlenSpec(lens=((20, 40),), dtype="float16", magnitude=2.0, causal=True),
    "strided": VarlenSpec(
        lens=((5, 9), (20, 33)), strided=True, group=3, sinks="normal", q_padding=2, dtype="bfloat16", poison="nan"
    ),
}  # fmt: skip
_SPARSE = PrefillSpec(shrink=4.0, heads=2, topk=9)


def _sparse(**fields: object) -> PrefillSpec:
    return dataclasses.replace(_SPARSE, **fields)  # type: ignore[arg-type]


SPARSES: dict[str, PrefillSpec] = {
    "odd top-k": _sparse(topk=13, heads=3, poison="nan"),
    "many rows, few of them listed": _sparse(rows=300, topk=70, dtype="bfloat16", poison="nan"),
    "duplicates": _sparse(topk=33, rows=5, seed=3, dtype="bfloat16"),
    "duplicates in a fixed order": _sparse(topk=33, rows=5, seed=3, deterministic=True, tokens=6),
    "one row over and over": _sparse(topk=21, entries="repeated", poison="nan", deterministic=True),
    "indices of all kinds anywhere": _sparse(tokens=4, topk=24, seed=5, poison="inf"),
    "no index valid, with sinks": _sparse(entries="none", heads=5, sinks="mixed", poison="nan"),
    "no rows": _sparse(rows=0, sinks="normal", deterministic=True),
    "no tokens": _sparse(tokens=0),
    "lengths over top-k and negative": _sparse(tokens=8, lens="wild", poison="nan", seed=1, deterministic=True),
    "sinks of all kinds": _sparse(sinks="mixed", heads=9, tokens=4, lens="wild", seed=2, poison="nan"),
    "17 heads": _sparse(heads=17, topk=11, dtype="bfloat16"),
    "two KV heads": _sparse(heads=6, kv_heads=2, lens="inside", poison="nan", deterministic=True),
    "V as wide as K": _sparse(d_qk=64, d_v=64),
    "V of 16": _sparse(d_qk=208, d_v=16, poison="nan"),
    "576/512": _sparse(d_qk=576, d_v=512, heads=16, dtype="bfloat16", lens="wild", poison="nan"),
    "512/512": _sparse(d_qk=512, d_v=512, heads=4, dtype="float16", sinks="normal", deterministic=True),
    "sm_scale negative": _sparse(sm_scale=-0.2),
    "pages of 7": _sparse(page_size=7, rows=30, topk=15, dtype="bfloat16", poison="nan"),
    "strided pages of two KV heads": _sparse(strided=True, page_size=3, heads=4, kv_heads=2, poison="nan"),
    "576/512, 40 heads": _sparse(
        d_qk=576, d_v=512, heads=40, topk=70, dtype="bfloat16", sinks="normal", lens="wild", poison="nan",
    ),
}  # fmt: skip


def _next_to_the_rows() -> GradientBatch:
    """A batch with invalid indices that a kernel could mistake for rows, among valid ones."""
    batch = GradientSpec(of=_sparse(tokens=1, rows=6, topk=16, d_qk=48), d_lse=True).build()
    return batch.change(indices=PREFILL_CORNERS["indices next to the rows"]().indices)


# Every second batch also has a gradient with respect to lse.
DENSE_GRADIENTS: dict[str, Callable[[], GradientBatch]] = {
    name: GradientSpec(of=spec, d_lse=index % 2 == 0).build for index, (name, spec) in enumerate(VARLENS.items())
}
SPARSE_GRADIENTS: dict[str, Callable[[], GradientBatch]] = {
    **{name: GradientSpec(of=spec, d_lse=index % 2 == 0).build for index, (name, spec) in enumerate(SPARSES.items())},
    "indices next to the rows": _next_to_the_rows,
}
ON_EVERY_PATH = ("grouped heads", "window")
SPARSES_ON_EVERY_PATH = ("duplicates in a fixed order", "two KV heads", "indices of all kinds anywhere")
SAME_BITS = {
    "dense": GradientSpec(of=VarlenSpec(lens=((40, 70), (9, 3)), group=2, causal=True, sinks="normal"), d_lse=True),
    "sparse": GradientSpec(of=_sparse(tokens=12, rows=6, topk=17, heads=1, sinks="normal"), d_lse=True),
}
