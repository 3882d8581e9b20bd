"""Whose calls these modules take."""

from ragged_attention.calls import Call


def why_not(call: Call) -> str | None:
    """The reason to decline arrays that are not torch's, or None."""
    return None if call.device.framework == "torch" else f"expected torch tensors, got a {call.device.framework} call"
