"""Checks that decode loops prefetch: two blocks of keys in flight, and a wait that leaves some copies in flight.

    python -m benchmarks.compiled.gate [--cases NAME ...] [--jobs N]

If a loop waits for a block of keys right after it has requested it, the latency of memory limits the decode. `NOT_YET`
lists the loops that still do so. The check fails for any other such loop, and for an entry that is no longer needed.
"""

import argparse
import os
import sys
from collections.abc import Collection, Mapping, Sequence

from benchmarks.compiled import compiling, pipelines
from benchmarks.compiled.pipelines import DECODING, LEAST_BLOCKS, Walk

# The cases whose decode kernels compile to different code.
CASES = (
    "decode_64x4k", "decode_64x4k_page1", "decode_64x4k_page64", "decode_64x4k_page256", "decode_64x4k_split_pages",
    "decode_32x1k", "decode_255x1k_1x128k", "decode_70b_tp8_64x4k", "speculative_64q4s4k", "speculative_tree_64q4s4k",
    "gpt_oss_window_64x4k", "gpt_oss_full_64x4k", "gemma2_32x4k", "gemma3_32x4k", "gemma4_global_32x4k", "fp8_64x4k",
    "fp8_64x4k_page64", "mla_dense_h128_128x4k", "mla_dense_h16_128x4k", "mla_dense_fp8_h128_128x4k",
    "mla_sparse_h128_128q2", "mla_sparse_bf16_h128_32q2", "mla_sparse_v4_h64_128q2", "mla_sparse_h16_b8",
    "mla_sparse_h32_b8",
)  # fmt: skip

Place = tuple[str, str, int]  # (case, kernel, loop)
DECODED = "decoded rows fill the shared memory: a second buffer would cost the second program, or does not fit"
WIDE = "64 keys per iteration fill the shared memory, but are faster than 32 keys with a block ahead"
NOT_YET: dict[Place, str] = {
    ("mla_dense_h128_128x4k", "latent_kernel", 0): WIDE,
    ("mla_sparse_bf16_h128_32q2", "latent_kernel", 0): WIDE,
    ("mla_sparse_h16_b8", "latent_kernel", 0): DECODED,
    ("mla_sparse_h32_b8", "latent_kernel", 0): DECODED,
}


def failures(found: Mapping[str, Sequence[Walk]], known: Collection[Place] = NOT_YET) -> list[str]:
    """The loops that fail the check, and the entries of `NOT_YET` that are no longer needed, one line each."""
    messages = []
    for case, walks in found.items():
        decoding = {(case, walk.kernel, walk.loop): walk for walk in walks if walk.kernel in DECODING}
        for (_, kernel, loop), walk in decoding.items():
            where, listed = f"{case}, {kernel}, loop {loop}", (case, kernel, loop) in known
            if walk.pipelined and listed:
                messages.append(f"{where}: prefetches enough now; remove it from NOT_YET")
            elif not walk.pipelined and not listed:
                messages.append(
                    f"{where}: wait {walk.least_wait}, {walk.blocks:.1f} blocks ahead; expected a wait above 0 and "
                    f"{LEAST_BLOCKS} blocks"
                )
        messages += [
            f"{name}, {kernel}, loop {loop}: there is no such loop; remove it from NOT_YET"
            for name, kernel, loop in sorted(known)
            if name == case and (name, kernel, loop) not in decoding
        ]
    return messages


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compiled.gate", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--cases", "--case", nargs="+", default=CASES, help="only these cases")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes")
    options = parser.parse_args(argv)
    if reason := compiling.why_not():
        print(reason, file=sys.stderr)
        return 2
    with compiling.processes(options.jobs) as pool:
        walks = pool.map(pipelines.read_case, options.cases, [DECODING] * len(options.cases))
        wrong = failures(dict(zip(options.cases, walks, strict=True)))
    print("\n".join(wrong) or f"{len(options.cases)} cases prefetch keys, except {len(NOT_YET)} loops")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
