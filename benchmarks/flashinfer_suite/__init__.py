"""FlashInfer's own tests and trace definitions, run through `compat.flashinfer` on a CPU.

Nothing of FlashInfer is copied. `--checkout` names a folder with `tests` and `flashinfer/trace` of its repository, such
as `git clone --depth 1 https://github.com/flashinfer-ai/flashinfer` makes:

    python -m benchmarks.flashinfer_suite --checkout ../flashinfer
    python -m benchmarks.flashinfer_suite --checkout ../flashinfer --only merge --cases 40

docs/flashinfer.md has the counts.
"""
