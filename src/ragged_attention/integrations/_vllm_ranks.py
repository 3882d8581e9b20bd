"""vLLM's decode context parallelism: which positions this rank's cache has, and the exchange with other ranks.

vLLM divides the positions of a request among the ranks of a group, which hold the same KV heads and different query
heads. A rank computes attention of all ranks' query heads to its own positions. The results are merged by their lse,
and each rank keeps the results of its own query heads.
"""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch

from ragged_attention.calls.sharding import KvShard


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The ranks that share the cache of a group of layers."""

    shard: KvShard  # the rule that divides positions among ranks, and the number of this rank
    group: Any  # vLLM's process group
    combine: Callable[..., Any]  # vLLM's exchange of partial results

    def with_all_heads(self, q: torch.Tensor) -> torch.Tensor:
        """The queries of all ranks, [tokens, size * H, D], from this rank's queries [tokens, H, D]."""
        return self.group.all_gather(q.contiguous(), dim=1)

    def merged(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of this rank's heads to all ranks' keys, merged from attention of all heads to each rank's keys."""
        out, lse = self.combine(out, lse, self.group, return_lse=True)
        return out, lse.contiguous()


def ranks_of(kv_cache_spec: Any, vllm_config: Any) -> Ranks | None:
    """The ranks that share the cache of a group of layers, or None if this rank holds all of it."""
    parallel = vllm_config.parallel_config
    # A draft model may keep its whole cache, which is small, on every rank.
    if parallel.decode_context_parallel_size == 1 or not getattr(kv_cache_spec, "dcp_sharded", True):
        return None
    group = importlib.import_module("vllm.distributed.parallel_state").get_dcp_group()
    exchanges: Any = importlib.import_module("vllm.v1.attention.ops.dcp")
    all_to_all = parallel.dcp_comm_backend == "a2a"
    return Ranks(
        shard=KvShard(group.world_size, parallel.cp_kv_cache_interleave_size, group.rank_in_group), group=group,
        combine=exchanges.dcp_a2a_lse_reduce if all_to_all else exchanges.cp_lse_ag_out_rs,
    )  # fmt: skip
