"""FlashInfer's packing of mask bits into bytes."""

import itertools

import torch

from ragged_attention.errors import InvalidInput

__all__ = ["packbits", "segment_packbits"]


def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """The elements of `x`, 0 or 1 each, as bits of bytes: uint8 [ceil(len(x) / 8)], as `numpy.packbits` packs them.

    Args:
        x: any shape; elements that are not 0 count as 1.
        bitorder: "big" for the first element in the highest bit, "little" for the lowest.
    """
    if bitorder not in ("big", "little"):
        raise InvalidInput(f"expected bitorder to be big or little, got {bitorder!r}")
    bits = x.reshape(-1).bool()
    bits = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    shifts = torch.arange(8, dtype=torch.uint8, device=x.device)
    return (bits << (shifts if bitorder == "little" else shifts.flip(0))).sum(1, dtype=torch.uint8)


def segment_packbits(x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big") -> tuple[torch.Tensor, torch.Tensor]:
    """`packbits` of each segment `x[indptr[i]:indptr[i + 1]]`, each beginning with a new byte.

    Args:
        x: [indptr[-1]].
        indptr: [batch_size + 1].
        bitorder: as for `packbits`.

    Returns:
        uint8 [new_indptr[-1]], and new_indptr, like indptr, of bytes.
    """
    edges = indptr.tolist()
    packed = [packbits(x[start:end], bitorder) for start, end in itertools.pairwise(edges)]
    sizes = torch.tensor([0, *(len(segment) for segment in packed)], dtype=indptr.dtype, device=indptr.device)
    return torch.cat([x.new_empty(0, dtype=torch.uint8), *packed]), sizes.cumsum(0, dtype=indptr.dtype)
