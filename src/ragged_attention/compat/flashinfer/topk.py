"""FlashInfer's selection of the largest entries of rows, and their positions in pages or packed rows."""

import enum

import torch

from ragged_attention.compat.flashinfer._arguments import stored
from ragged_attention.compat.names import named_as
from ragged_attention.errors import InvalidInput
from ragged_attention.torch import top_k_indices

__all__ = ["TopKTieBreak", "top_k", "top_k_page_table_transform", "top_k_ragged_transform", "topk"]


class TopKTieBreak(enum.IntEnum):
    """The rule for equal entries: select any, the one with the smaller index, or the one with the larger index."""

    NONE = 0
    SMALL = 1
    LARGE = 2


def top_k(
    input: torch.Tensor,
    k: int,
    sorted: bool = False,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest entries of each row.

    Args:
        input: float [batch_size, d].
        k: up to d.
        sorted: whether the entries are in descending order; otherwise they are in the order of their columns.
        deterministic, dsa_graph_safe: without effect, because results are always deterministic and never wait for the
            host.
        tie_break: a `TopKTieBreak`.

    Returns:
        values [batch_size, k] of input's dtype, and their columns, int64 [batch_size, k].
    """
    del deterministic, dsa_graph_safe
    tie = _tie_break(tie_break)
    if input.dim() != 2 or not 1 <= k <= input.shape[1]:
        raise InvalidInput(
            f"expected input.shape to be [batch_size, d] with 1 <= k <= d, got {list(input.shape)}, {k=}"
        )
    if tie == TopKTieBreak.NONE:
        columns = torch.topk(input, k, dim=1)[1]
    else:
        ordered = input.flip(1) if tie == TopKTieBreak.LARGE else input
        columns = ordered.sort(dim=1, descending=True, stable=True)[1][:, :k]
        columns = input.shape[1] - 1 - columns if tie == TopKTieBreak.LARGE else columns.contiguous()
    columns = columns if sorted else columns.sort(1)[0]
    return input.gather(1, columns), columns


topk = top_k


def top_k_page_table_transform(
    input: torch.Tensor,
    src_page_table: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    row_to_batch: torch.Tensor | None = None,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
    page_table_row_starts: torch.Tensor | None = None,
    *,
    page_size: int = 1,
    out: torch.Tensor | None = None,
    out_raw_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """The slots of the k largest entries of each row's window, i32 [num_rows, k]; unused places are -1.

    Args:
        input: float [num_rows, max_len], the scores.
        src_page_table: i32 [batch_size, max_page_table_length], the block tables. An entry stands for `page_size`
            positions.
        lengths: i32 [num_rows]; the window of row i is the columns `[row_starts[i], row_starts[i] + lengths[i])`, and
            positions count from its start. All columns of a window with at most k columns are selected. In longer
            windows, -inf and NaN are never selected.
        k: up to 4096.
        row_to_batch: i32 [num_rows], the row of `src_page_table` for each row of `input`; by default, row i has table
            i.
        deterministic, dsa_graph_safe: without effect, as for `top_k`.
        tie_break: a `TopKTieBreak`.
        row_starts: i32 [num_rows], default 0.
        page_table_row_starts: i32 [num_rows], the entry of its table where each row's window begins; default
            `row_starts`.
        page_size: positions per entry of `src_page_table`.
        out, out_raw_indices: i32 [num_rows, k], for the slots and for the positions.
    """
    del deterministic, dsa_graph_safe
    if page_size < 1:
        raise InvalidInput(f"expected page_size >= 1, got {page_size}")
    if page_size > 1 and row_starts is not None and page_table_row_starts is None:
        raise InvalidInput("expected page_table_row_starts with page_size > 1 and row_starts, got None")
    positions = _selected(input, lengths, k, tie_break, row_starts)
    starts = row_starts if page_table_row_starts is None else page_table_row_starts
    known = positions >= 0
    entries = positions.clamp(min=0).long() // page_size
    if starts is not None:
        entries = entries + starts.long()[:, None]
    num_tables, width = src_page_table.shape
    if row_to_batch is None and len(positions) > num_tables:
        raise InvalidInput(
            f"expected row_to_batch with more rows than block tables, got None and {len(positions)} rows"
        )
    rows = torch.arange(len(positions), device=input.device) if row_to_batch is None else row_to_batch.long()
    known &= (entries < width) & ((rows >= 0) & (rows < num_tables))[:, None]
    pages = src_page_table[rows.clamp(0, max(num_tables - 1, 0))[:, None], entries.clamp(0, max(width - 1, 0))]
    slots = torch.where(known, pages * page_size + positions % page_size, -1).int()
    stored("out_raw_indices", out_raw_indices, positions)
    return stored("out", out, slots)


def top_k_ragged_transform(
    input: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """The positions of the k largest entries of each row's window plus `offsets`, i32 [num_rows, k]; -1 if unused.

    Args:
        offsets: i32 [num_rows].

    The other arguments are those of `top_k_page_table_transform`.
    """
    del deterministic, dsa_graph_safe
    positions = _selected(input, lengths, k, tie_break, row_starts)
    return torch.where(positions >= 0, positions + offsets[:, None], -1).int()


def _tie_break(tie_break: int) -> TopKTieBreak:
    try:
        return TopKTieBreak(tie_break)
    except ValueError:
        raise InvalidInput(f"expected tie_break to be 0, 1 or 2, got {tie_break!r}") from None


def _selected(
    input: torch.Tensor, lengths: torch.Tensor, k: int, tie_break: int, row_starts: torch.Tensor | None
) -> torch.Tensor:
    """The positions in each row's window of its k largest entries, i32 [num_rows, k], then -1."""
    logits, width = input.float(), input.shape[1]
    starts = torch.zeros_like(lengths) if row_starts is None else row_starts
    stops = starts + lengths
    is_small = _tie_break(tie_break) == TopKTieBreak.SMALL
    with named_as({"logits": "input", "top_k": "k", "starts": "row_starts", "stops": "lengths"}):
        if is_small:  # if logits are equal, `top_k_indices` selects the larger column
            columns = width - 1 - top_k_indices(logits.flip(1), k, (width - stops).int(), (width - starts).int())
            columns = columns.sort(1)[0]  # the flip turns -1, an unused entry, into `width`
        else:
            columns = top_k_indices(logits, k, starts, stops)
    positions = torch.where((columns >= 0) & (columns < width), columns - starts[:, None], -1)
    entry = torch.arange(k, dtype=torch.int32, device=input.device)
    whole_window = torch.where(entry < lengths[:, None], entry, -1)
    return torch.where(lengths[:, None] <= k, whole_window, positions).int()
