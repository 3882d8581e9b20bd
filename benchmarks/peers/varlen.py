"""Other implementations of attention without a cache, and of its gradient."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from benchmarks.cases.varlen import VarlenCase

Run = Callable[[], Any]


def refuses(*, soft_cap: bool = False, sinks: bool = True, window: bool = False) -> Callable[[VarlenCase], str | None]:
    """A function that returns the reason why a peer without these features declines a case, or None.

    A flag is True if the peer lacks the feature. No peer accepts a gradient of lse.
    """

    def declines(case: VarlenCase) -> str | None:
        used = {"sliding_window": case.sliding_window, "soft_cap": case.soft_cap, "sinks": case.sinks}
        missing = {"sliding_window": window, "soft_cap": soft_cap, "sinks": sinks}
        found = next((name for name, value in used.items() if value and missing[name]), None)
        if found or case.d_lse:
            return f"does not take {found or 'd_lse'}"
        return None

    return declines


def sdpa_declines(case: VarlenCase) -> str | None:
    """The reason why SDPA is not timed, or None.

    It has no ragged batches, and the time of splitting a batch into sequences would be included.
    """
    if len(set(case.q_lens)) > 1 or case.q_lens != case.kv_lens:
        return "sequences must have one length here"
    return refuses(soft_cap=True, window=True)(case)


def _gradients(out: Any, arrays: tuple[Any, ...], d_out: Any) -> Run:
    """A function that runs the backward pass of a finished forward pass."""
    import torch

    return lambda: torch.autograd.grad(out, arrays, d_out, retain_graph=True)


def sdpa(case: VarlenCase, inputs: dict[str, Any], backend: str = "") -> Run:
    """torch's SDPA over sequences of equal length, on one of its backends, such as `FLASH_ATTENTION`, or on any."""
    import torch
    from torch.nn import attention

    allowed = [getattr(attention.SDPBackend, backend)] if backend else list(attention.SDPBackend.__members__.values())
    arrays = tuple(
        inputs[name].detach().clone().requires_grad_(case.backward) for name in ("q", "k", "v")
    )  # the copies keep the layout of the case, so the gradients have it too

    def forward() -> Any:
        batched = (array.view(len(case.q_lens), -1, *array.shape[1:]).transpose(1, 2) for array in arrays)
        with attention.sdpa_kernel(allowed):
            out = torch.nn.functional.scaled_dot_product_attention(
                *batched, is_causal=case.causal, enable_gqa=case.num_q_heads != case.num_kv_heads
            )
        return out.transpose(1, 2).reshape(case.out_shape)

    return _gradients(forward(), arrays, inputs["d_out"]) if case.backward else forward


def flash_attention(case: VarlenCase, inputs: dict[str, Any], module: str) -> Run:
    """`flash_attn_varlen_func` of FlashAttention-2 (`flash_attn`) or FlashAttention-3 (`flash_attn_interface`)."""
    function = importlib.import_module(module).flash_attn_varlen_func
    arrays = tuple(inputs[name].detach().clone().requires_grad_(case.backward) for name in ("q", "k", "v"))
    window = (case.sliding_window - 1, 0 if case.causal else -1) if case.sliding_window else (-1, -1)

    def forward() -> Any:
        out = function(
            *arrays, inputs["cu_q_lens"], inputs["cu_kv_lens"], max(case.q_lens), max(case.kv_lens),
            causal=case.causal, window_size=window, softcap=case.soft_cap or 0.0,
        )  # fmt: skip
        return out[0] if isinstance(out, tuple) else out

    return _gradients(forward(), arrays, inputs["d_out"]) if case.backward else forward


def fa3_declines(case: VarlenCase) -> str | None:
    return "as vLLM ships it, it has no gradient" if case.backward else refuses(sinks=False)(case)


def fa3(case: VarlenCase, inputs: dict[str, Any], forward: Any) -> Run:
    """FlashAttention-3's forward operator, which takes arguments by position."""
    window = case.sliding_window
    right = 0 if case.causal and window else -1
    arguments = [
        inputs["q"], inputs["k"], inputs["v"],
        None, None, None, None,  # new k and v, q_v, out
        inputs["cu_q_lens"], inputs["cu_kv_lens"], None, None, None, max(case.q_lens), max(case.kv_lens),
        None, None, None,  # page table, batch index, left padding
        None, None, None, None, None, None,  # rotary, scales
        case.head_dim**-0.5, case.causal, (window or 0) - 1, right, case.soft_cap or 0.0, True, None, 0, None, 0,
        inputs["sinks"].to(inputs["q"].dtype) if case.sinks else None, 1, 0, None,
    ]  # fmt: skip
    arguments = arguments[: len(forward.default._schema.arguments)]
    return lambda: forward(*arguments)[0]
