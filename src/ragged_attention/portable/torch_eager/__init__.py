"""The fallback in plain torch operations, for CPUs and for devices that have no kernels in this package."""

from ragged_attention.calls import Call


def why_not(call: Call) -> str | None:
    """Why a call is declined: its arrays are not torch tensors. None if they are."""
    return None if call.device.framework == "torch" else f"expected torch tensors, got a {call.device.framework} call"
