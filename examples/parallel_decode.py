"""Compute attention in several processes, and check the results against attention on one device.

    torchrun --nproc-per-node 2 examples/parallel_decode.py

This runs anywhere: with two, three or four processes on a CPU (gloo), or with one process for each GPU (nccl). Six
sequences are decoded for a few steps, with a KV cache that is divided by heads, and with a KV cache that is divided by
positions. Every process writes only the keys and values of its part. Then the example decodes with MLA over a latent
cache: once over all positions, and once over lists of positions. Last, it computes attention over packed sequences and
its gradients with ring attention.

Rank 0 prints the largest difference of each result from the result on one device. The exit status is 0 if all
differences are below 1e-4, and 1 otherwise.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ragged_attention.torch import (
    mla_decode,
    page_indices_to_slots,
    ragged_paged_attention,
    varlen_attention,
    write_kv_pages,
    write_mla_cache,
)
from ragged_attention.torch.distributed import (
    KvShard,
    context_parallel_decode,
    context_parallel_mla_decode,
    context_parallel_varlen_attention,
    zigzag_part,
    zigzag_whole,
)

SEQS, STEPS, PAGE = 6, 4, 16
KV_HEADS, GROUP, SIZE = 12, 2, 64  # 12 KV heads are divided by 2, 3, 4 or 6 processes
LATENT, D_V = 96, 64
SM_SCALE = 48**-0.5  # from the 48 columns of a head before absorption, not from the 96 columns after it
PROMPTS = (100, 37, 64, 5, 81, 16)
BOUND = 1e-4

Cache = tuple[torch.Tensor, torch.Tensor]  # pages, and the page table


def empty_cache(row: tuple[int, ...], device: torch.device) -> Cache:
    """A cache of zeros with enough pages for every sequence, in random order."""
    columns = -(-(max(PROMPTS) + STEPS) // PAGE)
    table = torch.randperm(SEQS * columns, device=device).reshape(SEQS, columns).to(torch.int32)
    return torch.zeros(SEQS * columns, PAGE, *row, device=device), table


def slots_of(positions: torch.Tensor, seqs: torch.Tensor, table: torch.Tensor, shard: KvShard) -> torch.Tensor:
    """The slots in which a rank stores the tokens at these positions, or -1 for the tokens of other ranks."""
    return page_indices_to_slots(shard.local(positions)[:, None], table[seqs.long()], PAGE).flatten()


def decode(device: torch.device) -> dict[str, float]:
    """Decode for a few steps with caches divided by heads and by positions, and compare with an undivided cache.

    The largest difference is returned for each of the two divided caches.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (size,))
    alone, shard = KvShard(1, PAGE, 0), KvShard(size, PAGE, rank)
    pages, table = empty_cache((2 * KV_HEADS, SIZE), device)
    own_pages = pages.clone()  # a server would allocate only this rank's part
    by_heads = distribute_tensor(pages.clone(), mesh, [Shard(2)], src_data_rank=None)
    differences = {"by heads": 0.0, "by positions": 0.0}

    def write(lens: list[int], first: list[int]) -> None:
        """Write new tokens of every sequence into the undivided cache, and this rank's share into its other caches."""
        spans = [torch.arange(start, stop, device=device) for start, stop in zip(first, lens, strict=True)]
        positions = torch.cat(spans).to(torch.int32)
        seqs = torch.cat([torch.full_like(span, seq) for seq, span in enumerate(spans)])
        k, v = (torch.randn(len(positions), KV_HEADS, SIZE, device=device) for _ in "kv")
        write_kv_pages(k, v, pages, slots_of(positions, seqs, table, alone))
        write_kv_pages(k, v, own_pages, slots_of(positions, seqs, table, shard))
        k, v = (distribute_tensor(new, mesh, [Shard(1)], src_data_rank=None) for new in (k, v))
        write_kv_pages(k, v, by_heads, slots_of(positions, seqs, table, alone))

    lens: list[int] = list(PROMPTS)
    write(lens, [0] * SEQS)
    edges = torch.arange(SEQS + 1, dtype=torch.int32, device=device)
    for _ in range(STEPS):
        write([length + 1 for length in lens], lens)
        lens = [length + 1 for length in lens]
        kv_lens = torch.tensor(lens, dtype=torch.int32, device=device)
        q = torch.randn(SEQS, GROUP * KV_HEADS, SIZE, device=device)
        expected = ragged_paged_attention(q, pages, kv_lens, table, edges)
        divided = distribute_tensor(q, mesh, [Shard(1)], src_data_rank=None)
        by_head = ragged_paged_attention(divided, by_heads, kv_lens, table, edges)
        assert isinstance(by_head, DTensor)
        assert by_head.placements == (Shard(1),)
        whole = by_head.redistribute(mesh, [Replicate()]).to_local()  # only for the comparison
        merged = context_parallel_decode(q, own_pages, kv_lens, table, edges, shard=shard, max_q_len=1)
        assert isinstance(merged, torch.Tensor)
        for name, result in (("by heads", whole), ("by positions", merged)):
            differences[name] = max(differences[name], float((result - expected).abs().max()))
    return differences


def decode_latents(device: torch.device) -> dict[str, float]:
    """Decode with MLA, first over all cached positions, and then over lists of positions as an indexer returns them."""
    alone, shard = KvShard(1, PAGE, 0), KvShard(dist.get_world_size(), PAGE, dist.get_rank())
    cache, table = empty_cache((1, LATENT), device)
    own_cache = cache.clone()
    spans = [torch.arange(length, device=device) for length in PROMPTS]
    positions = torch.cat(spans).to(torch.int32)
    seqs = torch.cat([torch.full_like(span, seq) for seq, span in enumerate(spans)])
    rows = torch.randn(len(positions), 1, LATENT, device=device)
    write_mla_cache(rows, cache, slots_of(positions, seqs, table, alone))
    write_mla_cache(rows, own_cache, slots_of(positions, seqs, table, shard))
    q = torch.randn(SEQS, 2, GROUP * KV_HEADS, LATENT, device=device)
    kv_lens = torch.tensor(PROMPTS, dtype=torch.int32, device=device)
    listed = torch.stack([torch.randint(-1, length, (2, 24), device=device) for length in PROMPTS]).to(torch.int32)
    sizes = {"d_v": D_V, "sm_scale": SM_SCALE}
    dense, _ = context_parallel_mla_decode(q, own_cache, table, kv_lens, causal=True, shard=shard, **sizes)
    sparse, _ = context_parallel_mla_decode(q, own_cache, table, indices=listed, shard=shard, **sizes)
    expected_dense, _ = mla_decode(q, cache, table, kv_lens, causal=True, **sizes)
    expected_sparse, _ = mla_decode(q, cache, indices=page_indices_to_slots(listed, table, PAGE), **sizes)
    return {
        "all latents": float((dense - expected_dense).abs().max()),
        "listed latents": float((sparse - expected_sparse).abs().max()),
    }


def train(device: torch.device) -> dict[str, float]:
    """Compute attention over packed sequences and its gradients, with ring attention and on one device."""
    tokens = 48 * dist.get_world_size()
    edges = torch.tensor([0, 30, 31, tokens - 5], dtype=torch.int32, device=device)
    heads = (GROUP * KV_HEADS, KV_HEADS, KV_HEADS)
    whole = [torch.randn(tokens, count, SIZE, device=device) for count in heads]
    weights = torch.randn(tokens, heads[0], SIZE, device=device)
    parts = [zigzag_part(leaf).requires_grad_() for leaf in whole]
    out = context_parallel_varlen_attention(parts[0], parts[1], parts[2], edges)
    assert isinstance(out, torch.Tensor)
    (out * zigzag_part(weights)).sum().backward()
    q, k, v = (leaf.requires_grad_() for leaf in whole)
    expected = varlen_attention(q, k, v, edges, edges, causal=True)
    (expected * weights).sum().backward()
    pairs = [(out.detach(), expected.detach())]
    for part, leaf in zip(parts, whole, strict=True):
        assert part.grad is not None
        assert leaf.grad is not None
        pairs.append((part.grad, leaf.grad))
    errors = [float((zigzag_whole(part) - value).abs().max()) for part, value in pairs]
    return {"ring attention": errors[0], "ring gradients": max(errors[1:])}


def main() -> int:
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo", timeout=timedelta(minutes=2))
    torch.manual_seed(0)  # every process draws the same numbers, and uses only its part
    differences = decode(device) | decode_latents(device) | train(device)
    worst = torch.tensor(list(differences.values()), device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    good = bool((worst < BOUND).all())
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes on {device.type}; largest difference from one device:")
        for name, difference in zip(differences, worst.tolist(), strict=True):
            print(f"  {name:<20} {difference:.1e} {'' if difference < BOUND else 'TOO LARGE'}".rstrip())
    dist.barrier()  # with gloo, a process fails if another one exits while they still communicate
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
