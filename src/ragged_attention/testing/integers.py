"""Meaningless integers for index arrays, and counts of sequences in each form that calls accept."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

INT32 = np.iinfo(np.int32)


def garbage(rng: np.random.Generator, shape: int | tuple[int, ...], near: int) -> NDArray[np.int32]:
    """Random int32: one third close to [-near, near], one third the smallest or largest int32, one third anything."""
    kind = rng.integers(0, 6, shape)
    wild = rng.integers(INT32.min, INT32.max, shape, np.int32, endpoint=True)
    close = rng.integers(-near - 1, near + 2, shape).astype(np.int32)
    return np.select([kind < 2, kind == 2, kind == 3], [close, INT32.max, INT32.min], wild).astype(np.int32)


def count_as(form: str, count: int) -> int | NDArray[np.int32] | None:
    """The number of live sequences in a form of `num_seqs`: "none", "int" or "array"."""
    return {"none": None, "int": count, "array": np.array([count], np.int32)}[form]


def garbage_places(rng: np.random.Generator, num_tokens: int, num_pages: int, page_size: int) -> dict[str, Any]:
    """The places of a write's tokens, filled with arbitrary integers: slots, or the tables of a step."""
    if rng.random() < 0.4:
        seqs = int(rng.integers(1, 4))
        return {
            "slot_mapping": None,
            "page_indices": garbage(rng, (seqs, int(rng.integers(0, 4))), num_pages),
            "kv_lens": garbage(rng, (seqs,), 20),
            "cu_q_lens": garbage(rng, (seqs + 1,), num_tokens),
            "num_seqs": garbage(rng, 1, seqs) if rng.random() < 0.5 else None,
        }
    slots = garbage(rng, (num_tokens,), num_pages * page_size)
    return {"slot_mapping": slots.astype(np.int64) << 8 if rng.random() < 0.3 else slots}
