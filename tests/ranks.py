"""Checks that several processes make together, as ranks of a gloo group; run as a script.

`python -m tests.ranks 4 heads decode` forks four ranks, which is quicker than to start them, and has all of them make
these checks one after another. A check is a function `check_<name>(rank, size)` that raises where something is wrong;
what rank 0 returns is printed as JSON. A rank that fails ends all.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import ragged_attention as ra
from ragged_attention import torch as rt
from ragged_attention.calls import CALLS
from ragged_attention.errors import InvalidInput
from ragged_attention.samples import LatentSample, Sample, VarlenSample, sample_of
from ragged_attention.sharding import heads_of_arguments
from ragged_attention.torch import distributed as rd

PAGE = 4
TIMEOUT = timedelta(seconds=60)


# ---- what is counted


class Watched(TorchDispatchMode):
    """Counts the operations of process groups, and the most bytes of new tensors that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.alive = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self.calls[func._schema.name.partition("::")[2]] += 1
        for tensor in torch.utils._pytree.tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                self._meet(tensor.untyped_storage())
        return found

    def _meet(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.alive += size
            self.most = max(self.most, self.alive)
            weakref.finalize(storage, self._part, key, size)

    def _part(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def written_bytes() -> int:
    """What this process has written so far by system calls, sockets among it."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["wchar"])


def same(found: Any, expected: Any, said: str) -> None:
    assert torch.equal(found, expected), f"{said}: {(found.double() - expected.double()).abs().max()}"


def refused(match: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
    try:
        function(*arguments, **keywords)
    except InvalidInput as error:
        assert str(error) == match, str(error)
    else:
        raise AssertionError(f"nothing refused it: {match}")


# ---- heads


def filled(name: str, array: Any, operation: str) -> Any:
    """A tensor of a sample's shape and dtype with values that make sense under its name."""
    if isinstance(array, tuple):
        return tuple(filled(name, part, operation) for part in array)
    if not hasattr(array, "shape"):
        return array
    dtype, shape = getattr(torch, array.dtype), array.shape
    if name.startswith("cu_"):  # two queries of each sequence, or for packed ones as many tokens
        return torch.arange(shape[0], dtype=dtype) * (8 if operation.startswith("varlen") else 2)
    if name in ("kv_lens", "lengths", "length", "lens", "stops"):
        return torch.randint(2, 8, shape, dtype=dtype)
    if name == "starts":
        return torch.zeros(shape, dtype=dtype)
    if name == "page_indices":
        return torch.arange(array.shape[-1] * (shape[0] if len(shape) > 1 else 1), dtype=dtype).reshape(shape)
    if name == "slot_mapping":
        return torch.randperm(shape[0]).to(dtype)
    if dtype in (torch.int32, torch.int64):
        return torch.randint(-1, 8, shape, dtype=dtype)
    if dtype == torch.uint8:
        return torch.randint(0, 100, shape, dtype=dtype)
    return torch.randn(shape).to(dtype)


def operator_call(operation: str, size: int) -> tuple[dict[str, Any], list[Any]]:
    """A record's arguments with heads that `size` ranks divide, and the same as its operator takes them."""
    small: dict[str, Any] = {"dtype": "float32", "num_q_heads": 4 * size, "max_num_seqs": 3, "num_tokens": 6}
    kind = type(sample_of(operation))
    if kind is LatentSample:
        fp8 = operation in ("quantize_mla_cache", "dequantize_mla_cache")
        small |= {
            "cache_format": "fp8_v32" if fp8 else "plain",
            "max_len": 8,
            "page_size": PAGE,
            "topk": 5,
            "sinks": True,
        }
        small |= {} if fp8 else {"d_qk": 32, "d_v": 16}
    elif kind is Sample:
        small |= {
            "num_kv_heads": size,
            "head_dim": 16,
            "max_len": 8,
            "page_size": PAGE,
            "return_lse": True,
            "sinks": True,
        }
    elif kind is VarlenSample:
        small |= {"num_kv_heads": size, "head_dim": 16, "num_tokens": 24, "sinks": True}
    else:
        small |= {"cache_dtype": "float32", "head_dim": 16, "page_size": PAGE, "max_len": 8, "top_k": 3}
    record = CALLS[operation]
    torch.manual_seed(0)
    arguments = dict.fromkeys(record.KINDS) | dict(record.DEFAULTS) | sample_of(operation, **small).arguments(operation)
    arguments = {name: filled(name, value, operation) for name, value in arguments.items()}
    if "k_scale" in arguments:
        arguments |= {name: torch.rand(size) + 0.5 for name in ("k_scale", "v_scale")}
    if operation.endswith("_backward"):  # what the forward gives
        forward = CALLS[operation.removesuffix("_backward")]
        known = {name: arguments.get(name) for name in forward.KINDS} | {"deterministic": False}
        known = dict(forward.DEFAULTS) | {name: value for name, value in known.items() if value is not None}
        operator = getattr(torch.ops.ragged_attention, forward.OPERATION)
        results = operator(*forward.flatten(dict.fromkeys(forward.KINDS) | known), None, None)
        arguments |= {"out": results[0], "lse": results[-1]}
    return arguments, record.flatten(arguments)


def check_heads(rank: int, size: int) -> Any:
    """Every operator on DTensors that are sharded over heads: the bits of one device, and not one message."""
    mesh = init_device_mesh("cpu", (size,))
    divided = []
    for operation, record in CALLS.items():
        arguments, flat = operator_call(operation, size)
        operator = getattr(torch.ops.ragged_attention, operation)
        heads = heads_of_arguments(record)
        names = [argument.name for argument in operator.default._schema.arguments]
        whole = [value.clone() if isinstance(value, torch.Tensor) else value for value in flat]
        parts = []
        for name, value in zip(names, flat, strict=False):
            if isinstance(value, torch.Tensor):
                where = heads.get(name) if operation != "indexer_topk" else None
                combined = name == "kv_pages" and arguments["kv_pages"] is value
                many = where is not None and where.count(tuple(value.shape), combined) > 1
                placement = Shard(value.ndim + where.axis) if where is not None and many else Replicate()
                value = distribute_tensor(value, mesh, [placement], src_data_rank=None)
            parts.append(value)
        expected = operator(*whole, None, None)
        with Watched() as watched:
            found = operator(*parts, None, None)
        assert not watched.calls, (operation, watched.calls)
        if expected is None:  # what was written
            pairs = [(part, value) for part, value in zip(parts, whole, strict=True) if isinstance(part, DTensor)]
        else:
            several = isinstance(expected, tuple | list)
            pairs = list(zip(found if several else [found], expected if several else [expected], strict=True))
        for index, (part, value) in enumerate(pairs):
            assert part.shape == value.shape, (operation, index, part.shape, value.shape)
            placed = part.placements[0]
            divided += [operation] * placed.is_shard()
            if placed.is_partial():
                torch.testing.assert_close(part.full_tensor(), value, rtol=1e-4, atol=1e-5)
            else:
                same(
                    part.to_local(), distribute_tensor(value, mesh, [placed], src_data_rank=None).to_local(), operation
                )
    return sorted(set(divided))


# ---- the processes


def work(rank: int, size: int, checks: list[str], rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        for name in checks:
            found = globals()[f"check_{name}"](rank, size)
            if rank == 0:
                sys.stdout.write(json.dumps({name: found}) + "\n")
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # without waiting for ranks that wait for this one
    sys.stdout.flush()
    dist.destroy_process_group()


def main(size: int, checks: list[str]) -> int:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=work, args=(rank, size, checks, f"{folder}/ranks")) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
