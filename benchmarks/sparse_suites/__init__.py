"""Other projects' own tests of attention with keys and values per head, most of it sparse, by our operations on a CPU.

In the tests' modules each function around a kernel is replaced by one around an operation of ours; references, inputs
and bounds stay theirs. Nothing of theirs is copied: `--checkout` names a folder with the project's tests.

    python -m benchmarks.sparse_suites aiter --checkout ../aiter
    python -m benchmarks.sparse_suites fla --checkout ../flash-linear-attention
    python -m benchmarks.sparse_suites minimax_m3 --checkout ../vllm
    python -m benchmarks.sparse_suites qsa --checkout ../vllm

The first needs torch and Triton, the second einops too, the others an environment with vLLM of the checkout's version
(docs/vllm.md says how to make one), in which pytest is installed. docs/judged.md has the counts.
"""
