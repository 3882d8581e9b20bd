"""The fallback in plain torch operations, for CPUs and devices that have no kernel of ours."""
