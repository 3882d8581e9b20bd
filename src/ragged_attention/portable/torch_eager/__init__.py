"""Fallback on plain torch operations: CPUs, and any device without a kernel of ours."""
