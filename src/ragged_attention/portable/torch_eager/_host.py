"""Reads index arrays on the host, clamped to what the other arrays can hold, and says why a call is declined."""

import itertools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ragged_attention.calls import Call
from ragged_attention.portable import torch_eager

Ints = NDArray[np.integer[Any]]


def on_host(tensor: torch.Tensor) -> Ints:
    """A NumPy array of the tensor's values: a view if the tensor is on a CPU, else a copy."""
    return tensor.detach().cpu().numpy()


def bounds_of(cu_lens: torch.Tensor, num_tokens: int) -> list[tuple[int, int]]:
    """The rows [start, stop) of each sequence, clamped to [0, num_tokens]."""
    edges = np.clip(on_host(cu_lens), 0, num_tokens).tolist()
    return [(start, max(start, stop)) for start, stop in itertools.pairwise(edges)]


def sequence_bounds(call: Any) -> list[tuple[int, int]]:
    """The query rows [start, stop) of each live sequence: only the first `num_seqs` are live."""
    max_num_seqs = call.kv_lens.shape[0]
    count = max_num_seqs if call.num_seqs is None else int(call.num_seqs)
    count = min(max(count, 0), max_num_seqs)
    return bounds_of(call.cu_q_lens[: count + 1], call.num_tokens)


def result_dtype(call: Any) -> torch.dtype:
    """The dtype of `out`; the call gives it as a dtype or by its name."""
    dtype = call.result_dtype
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def clamped_kv_lens(call: Any, count: int) -> list[int]:
    """The first `count` entries of `kv_lens`, clamped to the positions that one sequence's block table can hold."""
    return np.clip(on_host(call.kv_lens)[:count].astype(np.int64), 0, call.capacity).tolist()


def why_not(call: Call) -> str | None:
    """Why a call is declined: a CUDA graph is being captured, or its arrays are not torch tensors. Else None."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "expected a stream that is not being captured, since lengths are read on the host, got one that is"
    return torch_eager.why_not(call)
