"""Other projects' own tests of attention with K and V heads, most of it sparse, run through our operations on a CPU.

In the tests' modules, each function that calls a kernel is replaced by one that calls an operation of ours. References,
inputs and bounds remain the project's. Nothing is copied from it: `--checkout` names a folder with its tests.

    python -m benchmarks.sparse_suites aiter --checkout ../aiter
    python -m benchmarks.sparse_suites fla --checkout ../flash-linear-attention
    python -m benchmarks.sparse_suites minimax_m3 --checkout ../vllm
    python -m benchmarks.sparse_suites qsa --checkout ../vllm

The first suite needs torch and Triton, the second einops too. The others need an environment with vLLM of the
checkout's version (docs/vllm.md explains how to make one) and pytest. docs/judged.md has the numbers of cases and
outcomes.
"""
