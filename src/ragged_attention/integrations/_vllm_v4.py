"""Replacements for DeepSeek-V4 in vLLM on a CPU, for `_vllm_bindings`: attention, and the tables of a step.

vLLM has the model and its operators for CPUs. But it computes the tables of a step with Triton kernels, and no vLLM
package includes a Triton compiler for CPUs. The functions here replace these kernels and have their argument names.
"""

import importlib
from typing import Any

import torch

from ragged_attention.torch import mla_decode, page_indices_to_slots

_ROW_BYTES = 584  # bytes of a token in the cache, format fp8_v4


# The tables of a step


def compute_token_to_req_indices(
    query_start_loc: torch.Tensor, out: torch.Tensor, num_mapped_tokens: int, num_tokens: int
) -> torch.Tensor:
    """Write the request of each token into `out`, or 0 after the last mapped token. Return the written part."""
    token = torch.arange(num_tokens, dtype=torch.int32, device=out.device)
    request = torch.searchsorted(query_start_loc[1:], token, right=True, out_int32=True)
    request.clamp_(max=query_start_loc.shape[0] - 2)
    return out[:num_tokens].copy_(torch.where(token < num_mapped_tokens, request, 0))


def compressed_slot_mapping(
    compressed_slot_mapping: torch.Tensor,
    slot_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    compress_ratio: int,
    dcp_world_size: int,
    cp_interleave: int,
) -> None:
    """Write, for each token, the slot of the compressed entry that it completes, or -1 if it completes none.

    A token without a slot of its own gets -1 too. `block_size` counts compressed entries. Under decode context
    parallelism, the block table has this rank's positions.
    """
    token, request, position = _tokens(query_start_loc, seq_lens, block_table.shape[0])
    slots = slot_mapping[: token.shape[0]]
    writes = ((position + 1) % compress_ratio == 0) & (slots != -1)
    local = position // (cp_interleave * dcp_world_size) * cp_interleave + position % cp_interleave
    entry = local // compress_ratio
    block = block_table[request, (entry // block_size).clamp(0, block_table.shape[1] - 1)].long()
    compressed_slot_mapping[: token.shape[0]] = torch.where(writes, block * block_size + entry % block_size, -1)


def compute_swa_indices_and_lens(
    swa_indices: torch.Tensor,
    swa_lens: torch.Tensor,
    window_size: int,
    index_width: int,
    left_visible: torch.Tensor,
    right_visible: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    is_valid_token: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    replay_start: torch.Tensor,
    num_tokens: int,
    token_offset: int,
    has_image: bool = False,
) -> None:
    """Write the slots of each token's window in order, padded with -1, and their number, which is 0 for padding tokens.

    Args:
        swa_indices: i32 [>= num_tokens, 1, >= index_width], written from its first row on.
        left_visible, right_visible: i32, how far image tokens see to each side; read if `has_image`.
        token_offset: the token of the first row.
    """
    token = torch.arange(token_offset, token_offset + num_tokens, device=swa_indices.device)
    request, valid = token_to_req_indices[token].long(), is_valid_token[token]
    position = seq_lens[request] - query_start_loc[request + 1] + token
    left = right = torch.zeros_like(position)
    if has_image:
        left, right = left_visible[token], right_visible[token]
    start = position - (window_size - 1) - (left - (window_size - 1)).clamp(min=0)
    start = torch.maximum(start.clamp(min=0), replay_start[request])
    lens = torch.where(valid, position + right + 1 - start, 0).clamp(min=0)
    offset = torch.arange(index_width, device=swa_indices.device)
    seen = start[:, None] + offset
    block = block_table[request[:, None], (seen // block_size).clamp(0, block_table.shape[1] - 1)]
    slots = torch.where(offset < lens[:, None], block * block_size + seen % block_size, -1)
    swa_indices[:num_tokens, 0, :index_width] = slots
    swa_lens[:num_tokens] = lens


def compute_prefill_metadata(
    prefill_gather_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    replay_start: torch.Tensor,
    num_prefills: int,
    num_decodes: int,
    window_size: int,
) -> None:
    """Write the number of keys that each prefill's new tokens see: the new keys and the window before them."""
    prefills = slice(num_decodes, num_decodes + num_prefills)
    new = query_start_loc.diff()[prefills]
    before = (seq_lens[prefills] - new - replay_start[prefills]).clamp(0, window_size - 1)
    prefill_gather_lens[:num_prefills] = new + before


def _tokens(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, requests: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tokens of a step, the request of each token, and the token's position in its request."""
    token = torch.arange(int(query_start_loc[requests]), device=query_start_loc.device)
    request = torch.searchsorted(query_start_loc[1 : requests + 1], token, right=True)
    return token, request, seq_lens[request] - query_start_loc[request + 1] + token


def all_kinds_of_layers(original: Any) -> Any:
    """Add two kinds of layers to the result. V4 has no such layers, but vLLM 0.32 for CPUs later looks them up."""

    def build_tile_scheduler(self: Any, num_decode_tokens: int) -> dict[str, Any]:
        return {"c1a": None, "c2a": None} | original(self, num_decode_tokens)

    return build_tile_scheduler


# Attention


def forward_mqa(self: Any, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, output: torch.Tensor) -> None:
    """A layer's attention to each token's window, and to all visible or to the selected compressed entries.

    Args:
        self: vLLM's layer.
        q: [tokens, H, 512].
        kv: not read, because the step's keys are already in the cache.
        positions: [tokens].
        output: [tokens, H, 512], written.
    """
    metadata: Any = importlib.import_module("vllm.forward_context").get_forward_context().attn_metadata
    if metadata is None:  # in vLLM's profiling run
        output.zero_()
        return
    step = metadata[self.swa_cache_layer.prefix]
    parts = [part for part in (step.decode_swa_indices, step.prefill_swa_indices) if part is not None]
    widest = max(part.shape[-1] for part in parts)
    window = torch.cat([torch.nn.functional.pad(part, (0, widest - part.shape[-1]), value=-1) for part in parts])
    tokens = window.shape[0]
    keywords: dict[str, Any] = dict(indices=window, sinks=self.attn_sink.detach(), sm_scale=self.scale)
    if self.compress_ratio > 1:
        tables = metadata[self.prefix]
        entries = _compressed_entries(self, positions[:tokens])
        table = tables.block_table[step.token_to_req_indices[:tokens].long()]
        slots = page_indices_to_slots(entries, table, tables.block_size // self.compress_ratio)
        keywords |= dict(extra_kv_cache=_pages(self.kv_cache), extra_indices=slots.unsqueeze(1))
    out, _ = mla_decode(
        q[:tokens].unsqueeze(1), _pages(self.swa_cache_layer.kv_cache), cache_format="fp8_v4", **keywords
    )
    output[:tokens] = out.squeeze(1)


def _compressed_entries(layer: Any, positions: torch.Tensor) -> torch.Tensor:
    """The compressed entries i32 [tokens, N] to which each token attends, padded with -1."""
    if layer.indexer is not None:
        return layer.topk_indices_buffer[: positions.shape[0]]
    entry = torch.arange(-(-layer.max_model_len // layer.compress_ratio), dtype=torch.int32, device=positions.device)
    complete = (positions + 1) // layer.compress_ratio
    return torch.where(entry < complete.unsqueeze(1), entry, -1)


def _pages(cache: torch.Tensor) -> torch.Tensor:
    """vLLM's cache [blocks, block, 584] as pages of bytes. Blocks need not be contiguous."""
    return cache.view(torch.uint8).as_strided(
        (cache.shape[0], cache.shape[1], 1, _ROW_BYTES), (cache.stride(0), _ROW_BYTES, _ROW_BYTES, 1)
    )
