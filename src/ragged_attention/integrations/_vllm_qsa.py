"""Qwen4's sparse attention (QSA) in vLLM: functions that its layers call to select groups of keys and attend to them.

The layer's indexer has one key for each group of `compress_ratio` tokens, and selects groups by these keys. vLLM then
lists single tokens for attention: the tokens of the selected groups, and the tokens after the last whole group. The
functions have vLLM's names and arguments. These arguments have neither lengths nor positions, only the number of groups
that each query sees and the request of each token.
"""

import torch

from ragged_attention.integrations._vllm_invariance import as_vllm_asks
from ragged_attention.torch import indexer_topk, ragged_paged_attention

_INT32_MAX = 2**31 - 1


def qsa_select_paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    visible_blocks: torch.Tensor,
    token_topk: int,
    compress_ratio: int,
    decode_query_len: int,
    block_indices: torch.Tensor,
) -> None:
    """Write the groups to which each query of a decode step attends, in ascending order and padded with -1.

    Args:
        q: [R * decode_query_len, H, D], the queries of the requests, one after another.
        k_cache: [P, G, 1, D] of q's dtype, a key for each group.
        page_table: i32 [R, M].
        visible_blocks: i32 [tokens], the number of groups that each query sees.
        token_topk: the number of selected tokens, `compress_ratio` for each group.
        block_indices: i32 [tokens, token_topk / compress_ratio], written.
    """
    edges = torch.arange(page_table.shape[0] + 1, dtype=torch.int32, device=q.device) * decode_query_len
    _select(q, k_cache, page_table, edges, visible_blocks, compress_ratio, block_indices)


def qsa_select_paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    visible_blocks: torch.Tensor,
    token_topk: int,
    compress_ratio: int,
    max_query_len: int,
    block_indices: torch.Tensor,
    max_seq_len: int,
) -> None:
    """`qsa_select_paged_decode` for any numbers of queries; `query_start_loc` i32 [R + 1] are the requests' edges."""
    edges = query_start_loc - query_start_loc[0]
    _select(q, k_cache, page_table, edges, visible_blocks, compress_ratio, block_indices)


def _select(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    edges: torch.Tensor,
    visible_blocks: torch.Tensor,
    compress_ratio: int,
    block_indices: torch.Tensor,
) -> None:
    weights = torch.ones(q.shape[:2], device=q.device)  # logits are the sums of the heads' positive products
    lengths = lengths_of(visible_blocks, edges, compress_ratio)
    with as_vllm_asks():
        selected = indexer_topk(
            q, k_cache.squeeze(2), weights, block_indices.shape[1], page_indices=page_table, kv_lens=lengths,
            cu_q_lens=edges, ratio=compress_ratio,
        )  # fmt: skip
    block_indices.copy_(selected)


def lengths_of(visible_blocks: torch.Tensor, edges: torch.Tensor, compress_ratio: int) -> torch.Tensor:
    """Lengths i32 [R] of the requests for which each query sees the number of whole groups in `visible_blocks`.

    If a query is k tokens before its request's last token and sees n groups, the request's length is at least
    `n * compress_ratio + k`. The largest of these bounds is not more than the true length. So with this bound as the
    length, every query sees as many groups as with the true length.
    """
    requests = edges.shape[0] - 1
    token = torch.arange(visible_blocks.shape[0], dtype=torch.int32, device=edges.device)
    request = torch.searchsorted(edges[1:], token, right=True)
    # Rows after the last request are padding. They count as an extra request, which is dropped at the end.
    stops = torch.cat((edges[1:], edges[-1:]))
    bounds = visible_blocks * compress_ratio + stops[request] - 1 - token
    lengths = torch.zeros(requests + 1, dtype=torch.int32, device=edges.device)
    return lengths.scatter_reduce(0, request, bounds.to(torch.int32), "amax")[:requests]


def qsa_sparse_paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    logical_indices: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    use_prefill_config: bool,
    out: torch.Tensor | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    *,
    output_gate: torch.Tensor,
) -> torch.Tensor:
    """Attention of each query to the tokens that its list names, times the sigmoid of its gate.

    Args:
        q: [T, H, D].
        k_cache, v_cache: [P, G, K, D] with any strides, of q's dtype or e4m3.
        logical_indices: i32 [T, N + 1], positions in the token's request; the last column has the number of valid
            positions. -1, and positions or pages outside the table, select nothing.
        block_table: i32 [R, M].
        token_to_req: i32 [T]; a row with a number outside [0, R) sees no keys.
        use_prefill_config: whether a request may have more queries than in a decode step.
        out: [T, H, D], written and returned; if None, a new tensor is returned.
        k_scale, v_scale: the scales of e4m3.
        output_gate: the gates, with as many elements as q.
    """
    out = torch.empty_like(q) if out is None else out
    positions, (requests, pages) = logical_indices[:, :-1], block_table.shape
    span = pages * k_cache.shape[1]
    column = torch.arange(positions.shape[1], device=q.device)
    has_request = (token_to_req >= 0) & (token_to_req < requests)
    is_listed = has_request[:, None] & (column < logical_indices[:, -1:]) & (positions >= 0) & (positions < span)
    request = token_to_req.clamp(0, requests - 1)
    tokens = q.shape[0]
    if use_prefill_config and requests * span <= _INT32_MAX:
        # The tables of all requests are joined, as if one request had all positions. So tokens may be in any order.
        positions, table = positions + (request * span)[:, None], block_table.reshape(1, -1)
        sequences, longest = 1, tokens
    else:
        table, sequences, longest = block_table[request.long()], tokens, 1
    edges = torch.arange(sequences + 1, dtype=torch.int32, device=q.device) * longest
    lengths = torch.full((sequences,), table.shape[1] * k_cache.shape[1], dtype=torch.int32, device=q.device)
    with as_vllm_asks():
        attended = ragged_paged_attention(
            q, (k_cache, v_cache), lengths, table, edges, max_q_len=longest, causal=False,
            k_scale=k_scale, v_scale=v_scale, selected=torch.where(is_listed, positions, -1).unsqueeze(1), block_size=1,
        )  # fmt: skip
    return out.copy_(attended.float() * torch.sigmoid(output_gate.view_as(q).float()))
