"""Checks of the CUDA kernels for a machine with a Hopper GPU. On a CPU the kernels run in the emulation."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.cases.base import Case
from benchmarks.cases.mla import LatentCase, batch
from benchmarks.run import to_numpy
from ragged_attention import dispatch, kernels_cuda
from ragged_attention.errors import BackendMissing
from ragged_attention.kernels_cuda import _native
from ragged_attention.kernels_cuda._build import toolchain
from ragged_attention.testing.integers import garbage
from ragged_attention.tools.samples import device_of


def _small(name: str, heads: int, num_seqs: int = 3, **fields: Any) -> LatentCase:
    return batch(name, "-", num_seqs, heads, max_len=150, **fields)


# A case for each kernel and each way to address rows (pages or lists). The cases are small, since a memory checker
# slows kernels down a hundredfold.
SMALL = (
    _small("dense", 128, num_q_tokens=2, causal=True),
    _small("dense_odd_pages", 16, page_size=24, dtype="float16"),
    _small("dense_512", 8, d_qk=512, num_kv_heads=2),
    _small("lists", 64, topk=130),
    _small("lists_512", 128, topk=70, d_qk=512, page_size=1),
    _small("lists_fp8", 128, topk=130, num_q_tokens=2, cache_format="fp8_v32"),
    _small("lists_fp8_h16", 16, topk=130, cache_format="fp8_v32", sinks=True),
    _small("lists_fp8_h32", 32, topk=130, cache_format="fp8_v32"),
    _small("lists_v4", 64, topk=130, d_qk=512, cache_format="fp8_v4"),
    _small("lists_v41_fp4", 64, topk=130, d_qk=512, cache_format="fp8_v41", extra_topk=70, extra_format="fp4_v41"),
    _small("prefill", 128, num_seqs=1, num_q_tokens=3, topk=130, prefill=True, sinks=True),
    _small("prefill_fp8", 16, num_seqs=1, num_q_tokens=3, topk=90, prefill=True, cache_format="fp8_v32"),
)


def exercise(seeds: int, device: str = "cuda", cases: tuple[LatentCase, ...] = SMALL) -> None:
    """Run every kind of call with one and with two KV splits, with valid index arrays and with arbitrary ones."""
    for seed in range(seeds):
        for case in cases:
            _valid(case, seed, device)
            _invalid(case, seed, device)


def _valid(case: LatentCase, seed: int, device: str) -> None:
    """Check results with one and two KV splits, and for a decode also with a schedule."""
    import ragged_attention.torch as front

    inputs = case.torch_inputs(seed, device)
    operation = getattr(front, case.operation)
    for num_splits in (1, 2):
        out = operation(**inputs, backend="cuda", options={"num_splits": num_splits})[0]
        case.check(inputs, out, to_numpy)
    if not case.prefill:
        schedule = front.make_decode_schedule(
            None if case.topk else inputs["kv_lens"], case.max_num_seqs, case.num_q_tokens, case.num_q_heads,
            case.num_kv_heads, topk=case.topk or None, extra_topk=case.extra_topk or None, num_parts=4, device=device,
            backend="cuda",
        )  # fmt: skip
        case.check(inputs, operation(**inputs, backend="cuda", schedule=schedule)[0], to_numpy)


def _invalid(case: LatentCase, seed: int, device: str) -> None:
    """Check that results are finite with arbitrary index arrays. A memory checker sees any stray access."""
    import torch

    import ragged_attention.torch as front

    generator, inputs = np.random.default_rng(seed), case.torch_inputs(seed, device)
    for name, table in case.numpy_inputs(seed).items():
        if name in ("page_indices", "kv_lens", "indices"):
            near = case.max_num_seqs * case.max_len
            inputs[name] = torch.from_numpy(garbage(generator, table.shape, near)).to(device)
    out = getattr(front, case.operation)(**inputs, backend="cuda", options={"num_splits": 2})[0]
    if not bool(out.isfinite().all()):
        raise AssertionError(f"expected finite results of {case.name} from finite inputs, got others")


# ---- where the kernels can run


@contextlib.contextmanager
def in_place(device: str) -> Iterator[None]:
    """A context in which backend `cuda` runs. On a CPU it runs in the emulation, if the emulation can be built."""
    emulated = device == "cpu" and absent(device) is None
    with kernels_cuda.emulating() if emulated else contextlib.nullcontext():
        yield


def absent(device: str) -> str | None:
    """The reason why backend `cuda` does not run here, or None."""
    if device == "cpu":
        return toolchain.missing_to_emulate()
    try:
        status = _native.status()
    except BackendMissing as missing:
        return str(missing)
    return status.text if status.code else None


def takes(case: Case, device: str) -> bool:
    """Whether the CUDA kernels support a case when called from torch."""
    try:
        return dispatch.refusal("cuda", case.attention_call(device_of("torch", device))) is None
    except BackendMissing:
        return False
