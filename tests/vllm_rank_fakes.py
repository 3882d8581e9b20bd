"""Stand-ins for vLLM's groups of ranks and for the exchange of partial results. Ranks are threads of one process.

`vllm_fakes` puts them into `vllm.distributed.parallel_state` and `vllm.v1.attention.ops.dcp`.
"""

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import torch


class Group:
    """One rank's view of a group. The ranks are threads of this process, and one thread runs at a time."""

    def __init__(self, rank: int, sent: list[Any], meeting: threading.Barrier, turn: threading.Lock) -> None:
        self.world_size, self.rank_in_group = len(sent), rank
        self._sent, self._meeting, self._turn = sent, meeting, turn
        self.exchanges = 0

    def _exchanged(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.exchanges += 1
        self._sent[self.rank_in_group] = tensor.clone()
        self._turn.release()
        try:
            self._meeting.wait(60)
            received = [*self._sent]
            self._meeting.wait(60)
        finally:
            self._turn.acquire()
        return received

    def all_gather(self, input_, dim=-1):
        return torch.cat(self._exchanged(input_), dim=dim)

    def reduce_scatter(self, input_, dim=-1):
        whole = torch.stack(self._exchanged(input_)).sum(0)
        return whole.chunk(self.world_size, dim=dim)[self.rank_in_group].contiguous()


_of_thread = threading.local()


def group_of_thread() -> Any:
    return getattr(_of_thread, "group", None)


def get_dcp_group() -> Any:
    group = group_of_thread()
    assert group is not None, "decode context model parallel group is not initialized"
    return group


def on_ranks(size: int, function: Callable[[Group], Any]) -> list[Any]:
    """The results of a function on each rank of a group. All ranks use the caller's backend settings."""
    sent, meeting, turn = [None] * size, threading.Barrier(size), threading.Lock()
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        _of_thread.group = Group(rank, sent, meeting, turn)
        with turn:
            try:
                results[rank] = function(_of_thread.group)
            except BaseException as error:
                errors.append(error)
                meeting.abort()

    threads = [threading.Thread(target=contextvars.copy_context().run, args=(run, rank)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return results


def cp_lse_ag_out_rs(
    cp_attn_out, cp_attn_lse, cp_group, ctx=None, return_lse=False, is_lse_base_on_e=True, seq_lens=None,
    query_start_loc=None,
):  # fmt: skip
    """The merged results of all ranks. Unlike in vLLM, rows without keys must already be 0, with an lse of -inf."""
    assert is_lse_base_on_e
    assert cp_attn_lse.dtype == torch.float32
    assert not cp_attn_lse.isnan().any()
    assert not (cp_attn_lse == float("inf")).any()
    assert not cp_attn_out.isnan().any()
    assert not cp_attn_out[cp_attn_lse == float("-inf")].any()
    lses = cp_group.all_gather(cp_attn_lse.contiguous(), dim=0).view(cp_group.world_size, *cp_attn_lse.shape)
    lse = lses.logsumexp(0)
    weight = (cp_attn_lse - lse).exp().nan_to_num(0.0)
    out = cp_group.reduce_scatter((cp_attn_out * weight[..., None]).to(cp_attn_out.dtype), dim=1)
    return (out, lse.chunk(cp_group.world_size, dim=1)[cp_group.rank_in_group]) if return_lse else out


def dcp_a2a_lse_reduce(
    cp_attn_out, cp_attn_lse, cp_group, ctx=None, return_lse=False, is_lse_base_on_e=True, seq_lens=None,
    query_start_loc=None,
):  # fmt: skip
    return cp_lse_ag_out_rs(
        cp_attn_out, cp_attn_lse, cp_group, ctx, return_lse, is_lse_base_on_e, seq_lens, query_start_loc
    )
