"""Custom masks: bits per query and key, as draft masks or as lists of the keys that each query sees."""

import dataclasses

import torch

from ragged_attention.calls import dtype_name
from ragged_attention.compat.flashinfer._tables import Tables
from ragged_attention.errors import InvalidInput


@dataclasses.dataclass(frozen=True)
class Mask:
    """A custom mask of a batch."""

    visible: torch.Tensor  # bool [T, N]: whether a query sees each position of its sequence
    positions: torch.Tensor  # i64 [T], the position of each query: kv_len - q_len + i
    sequences: torch.Tensor  # i64 [T], the sequence of each query
    draft: torch.Tensor | None  # an equivalent `draft_mask` of `ragged_paged_attention`, if there is one

    def lists(self, window_left: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Each query's positions, i64 [T, N], visible ones first, and the number of visible positions, i32 [T]."""
        columns = torch.arange(self.visible.shape[1], device=self.visible.device)
        seen = self.visible
        if window_left >= 0:
            seen = seen & (columns >= self.positions[:, None] - window_left)
        return (~seen).to(torch.uint8).sort(dim=1, stable=True)[1], seen.sum(1, dtype=torch.int32)


def mask_of(tables: Tables, custom_mask: torch.Tensor | None, packed_mask: torch.Tensor | None) -> Mask | None:
    """The mask of a batch from the bits of all its requests, `[q_len, kv_len]` each, one after another.

    A packed mask has 8 bits per byte, the first bit in the lowest place, and each request begins with a new byte.
    """
    if custom_mask is None and packed_mask is None:
        return None
    device = tables.cu_q_lens.device
    q_lens, kv_lens = tables.cu_q_lens.diff().long(), tables.kv_lens.long()
    bits = q_lens * kv_lens
    if packed_mask is not None:
        flat = unpacked(packed_mask.to(device))
        starts, total = _starts((bits + 7) // 8 * 8)
        name, num_bits = "packed_custom_mask", packed_mask.numel() * 8
    else:
        assert custom_mask is not None
        flat, (starts, total) = custom_mask.to(device).reshape(-1), _starts(bits)
        name, num_bits = "custom_mask", custom_mask.numel()
        if dtype_name(flat) != "bool":
            raise InvalidInput(f"expected custom_mask.dtype to be bool, got {dtype_name(flat)}")
    if num_bits < int(total):
        raise InvalidInput(f"expected {name} to have a bit for each query and key, {int(total)}, got {num_bits}")
    tokens = torch.arange(tables.num_q_tokens, device=device)
    sequences = torch.searchsorted(tables.cu_q_lens[1:].long(), tokens, right=True).clamp(max=max(len(q_lens) - 1, 0))
    rows, lens = tokens - tables.cu_q_lens.long()[sequences], kv_lens[sequences]
    columns = torch.arange(max(int(kv_lens.max()) if kv_lens.numel() else 0, 1), device=device)
    inside = columns < lens[:, None]
    offsets = (starts[sequences] + rows * lens)[:, None] + columns
    visible = inside & flat[offsets.clamp(max=max(flat.numel() - 1, 0))] if flat.numel() else torch.zeros_like(inside)
    prefixes = lens - q_lens[sequences]
    max_q_len = max(int(q_lens.max()) if q_lens.numel() else 0, 1)
    return Mask(visible, prefixes + rows, sequences, _draft(visible, inside, prefixes, max_q_len))


def _starts(sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The offset of each segment, and the total size of all segments."""
    ends = sizes.cumsum(0)
    return ends - sizes, ends[-1] if len(ends) else ends.sum()


def _draft(visible: torch.Tensor, inside: torch.Tensor, prefixes: torch.Tensor, max_q_len: int) -> torch.Tensor | None:
    """The mask as a draft mask, or None if a query does not see all keys before the new tokens."""
    is_prefix = torch.arange(visible.shape[1], device=visible.device) < prefixes[:, None]
    if not bool((visible | ~(is_prefix & inside)).all()):
        return None
    columns = prefixes[:, None] + torch.arange(max_q_len, device=visible.device)
    has_position = (columns >= 0) & (columns < visible.shape[1])
    return has_position & visible.gather(1, columns.clamp(0, visible.shape[1] - 1))


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """The bits of bytes, the lowest first."""
    if dtype_name(packed) != "uint8":
        raise InvalidInput(f"expected packed_custom_mask.dtype to be uint8, got {dtype_name(packed)}")
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.reshape(-1, 1) >> shifts & 1).bool().reshape(-1)
