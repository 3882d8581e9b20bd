"""The check that a call has torch tensors."""

from ragged_attention.calls import Call


def why_not(call: Call) -> str | None:
    """Why a call is declined: its arrays are not torch's. None if they are."""
    return None if call.device.framework == "torch" else f"expected torch tensors, got a {call.device.framework} call"
