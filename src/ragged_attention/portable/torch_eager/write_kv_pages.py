"""Writes this step's K and V to the pages, in place, in plain torch operations.

If the call gives tables, the slots are computed on the host; K and V stay on their device.
"""

from typing import Any

import numpy as np
import torch

from ragged_attention.calls import WriteKvPages
from ragged_attention.calls.fields import SMALLEST_FLOAT32
from ragged_attention.portable.torch_eager._cache import encode
from ragged_attention.portable.torch_eager._host import clamped_kv_lens, on_host, sequence_bounds
from ragged_attention.portable.torch_eager._host import why_not as why_not
from ragged_attention.portable.torch_eager._scaled_rows import quantized

FEATURES = frozenset({
    "slot_mapping", "page_indices", "kv_lens", "cu_q_lens", "num_seqs", "k_scale", "v_scale", "k_scale_pages",
    "v_scale_pages",
})  # fmt: skip


def slots_of(call: Any) -> torch.Tensor:
    """The slot of each token, from `slot_mapping` if given, else from the tables; -1 if the tables have none."""
    if call.slot_mapping is not None:
        return call.slot_mapping.to(torch.int64)
    page_size, bounds = call.page_size, sequence_bounds(call)
    tables = on_host(call.page_indices)
    slots = np.full(call.num_tokens, -1, np.int64)
    for seq, ((start, stop), kv_len) in enumerate(zip(bounds, clamped_kv_lens(call, len(bounds)), strict=True)):
        positions = np.arange(kv_len - (stop - start), kv_len)
        skipped = int(np.count_nonzero(positions < 0))  # leading tokens without a position, if kv_len < stop - start
        positions = positions[skipped:]
        pages = tables[seq, positions // page_size].astype(np.int64)
        valid = (pages >= 0) & (pages < call.num_pages)
        slots[start + skipped : stop] = np.where(valid, pages * page_size + positions % page_size, -1)
    return torch.from_numpy(slots).to(call.page_indices.device)


def last_writers(slots: torch.Tensor, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The distinct valid slots, and the last token that is written to each slot."""
    ordered, tokens = torch.sort(slots, stable=True)
    keep = (ordered >= 0) & (ordered < num_slots)
    keep[:-1] &= ordered[1:] != ordered[:-1]
    return ordered[keep], tokens[keep]


def stored(tokens: torch.Tensor, scale: Any, dtype: torch.dtype) -> torch.Tensor:
    """Rows [n, K, D] divided by their KV heads' scales and rounded to `dtype`; 8-bit floats are returned as bits."""
    if scale is None and tokens.dtype == dtype:
        return tokens
    values = tokens.to(torch.float32)
    if scale is not None:
        values = values / divisors(scale, tokens.device)[:, None]
    return encode(values, dtype)


def divisors(scale: Any, device: torch.device) -> torch.Tensor:
    """The divisors of each KV head's new rows, float32 [K] or [1]; a zero of the same sign for a subnormal scale.

    They are a tensor: some devices would replace a Python number by its reciprocal, and so round differently.
    """
    scale = torch.as_tensor(scale, dtype=torch.float32, device=device).reshape(-1)
    return torch.where(scale.abs() < SMALLEST_FLOAT32, scale * 0, scale)


def write(call: Any, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """Write K and V to the pages of a call, at the tokens' slots; returns the written arrays."""
    arrays = [call.kv_pages] if call.combined else list(call.kv_pages)
    slots, tokens = last_writers(slots_of(call), call.num_pages * call.page_size)
    if not len(slots):
        return call.caches
    page, offset = slots // call.page_size, slots % call.page_size
    bits = [as_bits(pages) for pages in arrays]
    k_pages, v_pages = (bits[0][:, :, 0::2], bits[0][:, :, 1::2]) if call.combined else bits
    sides = (k_pages, k, call.k_scale, call.k_format), (v_pages, v, call.v_scale, call.v_format)
    for (target, new, scale, form), scale_pages in zip(sides, call.scale_pages, strict=True):
        if scale_pages is not None:
            divided_by = None if scale is None else divisors(scale, new.device)
            codes, scales = quantized(new[tokens], divided_by, form)
            target[page, offset] = codes.view(target.dtype)
            as_bits(scale_pages)[page, offset] = scales
        elif call.copies:
            target[page, offset] = new.view(torch.uint8)[tokens]
        else:
            target[page, offset] = stored(new[tokens], scale, getattr(torch, form.codes)).view(target.dtype)
    return call.caches


def as_bits(array: torch.Tensor) -> torch.Tensor:
    """The array, or its bytes if its elements have 8 bits."""
    return array.view(torch.uint8) if array.element_size() == 1 else array


def run(call: WriteKvPages, tile: Any, launch: Any) -> list[torch.Tensor]:
    return write(call, call.k, call.v)
