"""Whose calls these modules take."""

from ragged_attention.calls import Call


def why_not(call: Call) -> str | None:
    if call.device.framework != "jax":
        return f"runs on jax arrays, got a call from {call.device.framework}"
    return None
