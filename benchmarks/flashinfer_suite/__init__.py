"""FlashInfer's own tests and trace definitions, run through `compat.flashinfer` on a CPU.

Nothing is copied from FlashInfer. `--checkout` names a folder with `tests` and `flashinfer/trace` of its repository,
for example a clone made by `git clone --depth 1 https://github.com/flashinfer-ai/flashinfer`:

    python -m benchmarks.flashinfer_suite --checkout ../flashinfer
    python -m benchmarks.flashinfer_suite --checkout ../flashinfer --only merge --cases 40

docs/flashinfer.md has the numbers of cases and outcomes.
"""
