"""Runs other projects' attention tests, most of them of sparse attention, through our operations on a CPU.

In the modules of the tests, each function that calls a kernel is replaced by a function that calls our operation.
References, inputs and bounds remain those of the project. Nothing is copied from the project: `--checkout` names a
folder with its tests.

    python -m benchmarks.sparse_suites aiter --checkout ../aiter
    python -m benchmarks.sparse_suites fla --checkout ../flash-linear-attention
    python -m benchmarks.sparse_suites minimax_m3 --checkout ../vllm
    python -m benchmarks.sparse_suites qsa --checkout ../vllm

`aiter` needs torch and Triton, and `fla` also needs einops. `minimax_m3` and `qsa` need pytest and an environment with
vLLM of the checkout's version (docs/vllm.md explains how to make one). docs/judged.md has the numbers of cases and
outcomes.
"""
