"""The fallback in plain torch operations, for CPUs and for devices that have no kernels in this package."""
