"""The tables of a batch: from FlashInfer's row pointers to the block table and lengths of our operations."""

import dataclasses

import torch

from ragged_attention.errors import InvalidInput


@dataclasses.dataclass(frozen=True)
class Tables:
    """The tables of a batch that `plan` keeps. All tensors are on the device of the wrapper."""

    cu_q_lens: torch.Tensor  # i32 [S + 1]
    kv_lens: torch.Tensor  # i32 [S]
    page_indices: torch.Tensor  # i32 [S, M], -1 where a sequence has no page
    num_q_tokens: int
    max_q_len: int | None  # None if a captured graph may see longer queries than the planned ones

    @property
    def num_seqs(self) -> int:
        return self.kv_lens.shape[0]


def sequence_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """The number of cached positions per sequence, i32 [S]; 0 for a sequence without pages."""
    pages = kv_indptr.diff()
    lens = (pages - 1).clamp(min=0) * page_size + kv_last_page_len.to(kv_indptr.device)
    return torch.where(pages > 0, lens, 0).int()


def block_table(indptr: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The block table i32 [S, M] of the pages `indices[indptr[s]:indptr[s + 1]]`; entries past them are -1."""
    counts = indptr.diff()
    width = max(int(counts.max()) if counts.numel() else 0, 1)
    columns = torch.arange(width, device=indices.device)
    starts, counts = indptr[:-1, None].to(indices.device), counts[:, None].to(indices.device)
    if not indices.numel():
        return columns.new_full((counts.shape[0], width), -1, dtype=torch.int32)
    entries = indices[(starts + columns).long().clamp(0, indices.numel() - 1)]
    return torch.where(columns < counts, entries, -1).int()


def expect_indptr(name: str, indptr: torch.Tensor, num_seqs: int | None = None) -> None:
    """Check the shape of row pointers, of `num_seqs` rows if that is known."""
    if not isinstance(indptr, torch.Tensor):
        raise TypeError(f"expected {name} to be a torch.Tensor, got {type(indptr).__name__}")
    if indptr.dim() != 1 or not indptr.numel() or num_seqs not in (None, indptr.numel() - 1):
        wanted = "[batch_size + 1]" if num_seqs is None else f"[{num_seqs + 1}]"
        raise InvalidInput(f"expected {name}.shape to be {wanted}, got {list(indptr.shape)}")


def replaced(kept: Tables | None, new: Tables, in_place: bool, indices_buffer: torch.Tensor | None = None) -> Tables:
    """The tables after a plan: the new tables, or for CUDA graphs the kept tensors with the new contents.

    The kept block table has about as many entries as the caller's buffer for page indices, but not fewer columns than
    the first plan needs.
    """
    if not in_place:
        return new
    width = new.page_indices.shape[1]
    if kept is None:  # copies, because `new` may hold tensors of the caller
        capacity = 0 if indices_buffer is None else -(-indices_buffer.numel() // max(new.num_seqs, 1))
        table = torch.nn.functional.pad(new.page_indices, (0, max(capacity - width, 0)), value=-1).clone()
        return Tables(new.cu_q_lens.clone(), new.kv_lens.clone(), table, new.num_q_tokens, None)
    if kept.num_seqs != new.num_seqs:
        raise InvalidInput(
            f"expected batch_size={kept.num_seqs}, which is fixed with use_cuda_graph=True, got {new.num_seqs}"
        )
    planned = kept.page_indices.shape[1]
    if width > planned:
        raise InvalidInput(
            f"expected at most {planned} pages per sequence with use_cuda_graph=True, got {width}: the buffer for page "
            "indices needs as many entries for each sequence, or the first plan() as many columns"
        )
    kept.cu_q_lens.copy_(new.cu_q_lens)
    kept.kv_lens.copy_(new.kv_lens)
    kept.page_indices.fill_(-1)[:, :width].copy_(new.page_indices)
    return dataclasses.replace(kept, num_q_tokens=new.num_q_tokens)
