"""Mutants of our own CUDA kernels, each with one planted fault that the emulation or the suite must catch.

`build` writes a mutant's sources to a folder and puts its library into the cache. As a script,
`python -m tests.cuda_mutants NAME FOLDER` checks the mutant that was built there and prints the check that failed, or
nothing if none did. Add `--sanitized` if it was built with ThreadSanitizer. Only the kernel that has the fault is
built, for the width that shows it.
"""

import dataclasses
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ragged_attention.kernels_cuda import _abi, _latent, _native
from ragged_attention.kernels_cuda._build import compile
from ragged_attention.testing import environment, verdicts
from ragged_attention.testing.cuda_emulator import EmulatedRunner
from ragged_attention.testing.suite import checks

SOURCES = Path(__file__).parent.parent / "kernels_cuda" / "csrc"
# For each kind of mutant: the kernel's unit, its header and its class.
UNITS = {
    "dense": ("mla_decode_dense", "seesaw", "Seesaw<bf16, 576, false>"),
    "lists": ("sparse_mla_prefill", "seesaw", "Seesaw<bf16, 576, true>"),
    "fp8": ("mla_decode_sparse_fp8", "fp8_decode", "Fp8Decode"),
    "v4": ("mla_decode_sparse_fp8_v4", "fp8_v4", "Fp8V4"),
    "v41": ("mla_decode_sparse_v41", "v41", "V41"),
    "narrow": ("mla_decode_sparse_fp8_narrow", "narrow", "Narrow<2, false>"),
}
# `fp8_v32` caches have two kernels. Each kind of mutant builds one of them, which then runs all such calls.
FP8 = {"fp8": "ra_mla_decode_sparse_fp8", "narrow": "ra_mla_decode_sparse_fp8_narrow"}
CHECKS = {
    "dense": (
        "corner: latent decode, dense, pages of 64",
        "corner: latent decode, dense, 576/512",
        "corner: latent decode, dense, sinks of all kinds",
        "corner: latent decode on every path, dense, a long sequence",
        "corner: latent decode on every path, dense, pages of 128 with two KV heads",
    ),
    "lists": (
        "corner: sparse prefill, lengths",
        "corner: sparse prefill on every path, many blocks of keys",
        "corner: sparse prefill, two KV heads",
    ),
    "fp8": (
        "corner: latent decode, fp8_v32",
        "corner: latent decode, fp8_v32, scales far apart",
        "corner: sparse prefill on every path, fp8_v32",
        "corner: latent decode on every path, fp8_v32, many blocks of keys",
    ),
    "v4": (
        "corner: latent decode, fp8_v4, 64 heads",
        "corner: latent decode, fp8_v4, pages of 61",
        "corner: latent decode, extra cache fp8_v4",
        "corner: latent decode on every path, extra cache fp8_v4",
        "corner: latent decode, fp8_v4, scales far apart",
    ),
    "v41": (
        "corner: latent decode, extra cache fp4_v41 beside fp8_v41",
        "corner: latent decode, extra cache fp4_v41 beside fp8_v41, page",
        "corner: latent decode, fp4_v41, scales any sign",
        "corner: latent decode, fp8_v41, 12 heads, top-k 640",
    ),
    "narrow": (
        "corner: latent decode, fp8_v32, 13 heads",
        "corner: latent decode on every path, fp8_v32, many short lists",
        "corner: latent decode on every path, fp8_v32, many blocks of keys",
        "corner: latent decode, fp8_v32, scales far apart",
    ),
}
# The reduced library: one kernel, the schedule and the query functions, in one file because that compiles fastest.
WHOLE = """
#include "sm90/launch.h"
#include "sm90/{body}.h"
extern "C" int ra_{unit}(RaLatent const* call, void* stream) {{ return launch_latent<{kernel}>(*call, stream); }}
#include "emulator/emulation.cc"
"""
NONE = '#include "api.h"\nextern "C" int ra_{unit}(RaLatent const*, void*) {{ return RA_NO_KERNEL; }}\n'


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A planted fault: all occurrences of `honest` in a header become `faulty`. It builds a `kind` of kernel."""

    file: str
    honest: str
    faulty: str
    kind: str = "dense"
    mode: str = "late"

    def source(self) -> str:
        text = (SOURCES / self.file).read_text()
        if self.honest not in text:
            raise ValueError(f"expected kernels_cuda/csrc/{self.file} to have the text {self.honest!r}")
        return text.replace(self.honest, self.faulty)


HONEST = {f"honest {kind}": Mutant("api.h", "#pragma once", "#pragma once", kind) for kind in UNITS}
MUTANTS = {
    # Faults in barriers, phases and byte counts.
    "a stage is filled a turn early": Mutant(
        "sm90/seesaw.h", "s.empty[S][H].wait((turn & 1) ^ 1);", "s.empty[S][H].wait(turn & 1);"
    ),
    "a stage is not waited for": Mutant("sm90/seesaw.h", "    s.empty[S][H].wait((turn & 1) ^ 1);\n", ""),
    "a load tells too many bytes": Mutant("sm90/seesaw.h", "kFilled<S, H> * kSlab * sizeof", "9 * kSlab * sizeof"),
    "the first maximum is not waited for": Mutant(
        "sm90/seesaw.h", "both_sync(kFirstMaximum)", "both_arrive(kFirstMaximum)"
    ),
    "a stage is handed back while it is read": Mutant(
        "sm90/seesaw.h", "op::wgmma_wait<1>()", "op::wgmma_wait<2>()", mode="crossed"
    ),
    "every thread hands a stage back, not one of a group": Mutant(
        "sm90/latent.h", "if (op::fresh_tid() % 32 == 0) bar.arrive();", "bar.arrive();"
    ),
    "queries are not waited for": Mutant("sm90/seesaw.h", "        s.q_full.wait(phases >> 2);\n", ""),
    # Missing fences between the generic and the async proxy.
    "copies are not fenced": Mutant(
        "sm90/seesaw.h", "      op::fence_async_shared();  // cp.async writes through the generic proxy\n", "", "lists"
    ),
    # This mutant needs eager products. Late products are computed after the reader's fence for the rotary columns. That
    # fence would hide the missing one.
    "codes are not fenced": Mutant(
        "sm90/fp8_decode.h", "    op::fence_async_shared();\n    s.full[stage][H]", "    s.full[stage][H]", "fp8",
        mode="eager",
    ),
    "products are not waited for": Mutant("sm90/seesaw.h", "      op::wgmma_wait<0>(tSrS);\n", ""),
    # Faults in arithmetic and addresses.
    "one key too many": Mutant("sm90/seesaw.h", "first + column < limit[r]", "first + column <= limit[r]"),
    "the output is not rescaled": Mutant("sm90/seesaw.h", "      Parent::rescale(factor);\n", ""),
    "the wrong half of the values": Mutant(
        "sm90/seesaw.h", "s.keys[1 - W][W * kHalf]", "s.keys[1 - W][(1 - W) * kHalf]"
    ),
    "keys that are not there weigh": Mutant(
        "sm90/seesaw.h", "seen[t / 8 + 16 * i] = block.at[i] != kUnseen", "seen[t / 8 + 16 * i] = true", "lists"
    ),
    "a row that is not there is read": Mutant(
        "sm90/latent.h", "&& entry < count ?", "&& int(entry) >= 0 ?", "lists"
    ),
    "a part's result goes to its neighbour's place": Mutant("work.h", "    slot = part;\n", "    slot = part + 1;\n"),
    "a part begins a block late": Mutant("work.h", "begin = clamped(from, 0", "begin = clamped(from + (from > 0), 0"),
    "parts have the same weight": Mutant("sm90/combine.h", "op::exp2(lse - m_i)", "1.f"),
    "the scale of another group": Mutant(
        "sm90/fp8_decode.h", "s.ratio[stage][2 * W][16", "s.ratio[stage][2 - 2 * W][16", "fp8"
    ),
    "the scales of the row before": Mutant("sm90/decoding.h", "begin + slot * step", "begin + (slot - 1) * step", "v4"),
    "a half is decoded before its reader is done": Mutant(
        "sm90/decoding.h", "    s.empty[S][H].wait((turn & 1) ^ 1);\n", "", "v4"
    ),
    "a half's rows are the next block's": Mutant(
        "sm90/decoding.h", "fill<0, 1>(plan, first,", "fill<0, 1>(plan, second,", "v4"
    ),
    "the scales of the other half": Mutant("sm90/fp8_v4.h", "+ 4 * H, seen", "+ 4 - 4 * H, seen", "v4"),
    "the last columns twice": Mutant("sm90/fp8_v4.h", "row + 456", "row + 448", "v4"),
    "a second list is read from the first cache": Mutant(
        "sm90/fp8_v4.h", "rows.extra ? plan.extra.cache : plan.keys.cache", "plan.keys.cache", "v4"
    ),
    "a second list begins where the first ends": Mutant(
        "sm90/latent.h", "? (lists.length + kBlock - 1) / kBlock * kBlock :", "? lists.length :", "v4"
    ),
    "values and sums are relative to the same": Mutant(
        "sm90/fp8_decode.h", "power_of_two(kHeadroom) * power_of_two(-exponent)", "power_of_two(-exponent)", "fp8"
    ),
    "the level moves, and the output stays": Mutant(
        "sm90/fp8_decode.h", "      if (__builtin_expect(op::any_in_warp(moves), false)) rescale(factor);\n", "", "fp8"
    ),
    "an accumulator is multiplied while it grows": Mutant(
        "sm90/fp8_decode.h", "wgmma_wait<1>(odd);\n      take_step", "wgmma_wait<2>(odd);\n      take_step", "fp8"
    ),
    "the step of another group": Mutant(
        "sm90/fp8_decode.h", "take_step(s.step[stage][1], odd)", "take_step(s.step[stage][0], odd)", "fp8"
    ),
    "the rest is not divided as the queries are": Mutant(
        "sm90/fp8_decode.h", "op::pack<bf16>(low, high)", "op::pack<bf16>(low / factor, high / factor)", "fp8"
    ),
    "rows of weights are stored in each other's place": Mutant(
        "sm90/latent.h", "offset_of(t / 32 * 16 + t % 16, j", "offset_of(t / 32 * 16 + (t % 16 ^ 8), j", "lists"
    ),
    "the output's neighbours exchange the wrong words": Mutant(
        "sm90/latent.h", "op::shfl_xor(odd ? first : second, 1)", "op::shfl_xor(odd ? second : first, 1)"
    ),
    "partial results are not waited for": Mutant("sm90/combine.h", "    op::wait_for_previous_grid();\n", ""),
    "partial results of few heads are not waited for": Mutant(
        "sm90/narrow_combine.h", "    op::wait_for_previous_grid();\n", "", "narrow"
    ),
    # Faults in the kernel for few heads.
    "rows are read before they are there": Mutant(
        "sm90/narrow.h", "          s.full[stage].wait(turn / kStages & 1);\n", "", "narrow"
    ),
    "a stage of rows is filled while it is read": Mutant(
        "sm90/narrow.h",
        "        s.empty[turn % kStages].wait((turn / kStages & 1) ^ 1);\n",
        "",
        "narrow",
        mode="crossed",
    ),
    "a stage of rows is handed back too early": Mutant(
        "sm90/narrow.h",
        "          add_values(stage);\n          op::syncwarp();  // all threads have read their rows\n"
        "          if (lane == 0) s.empty[stage].arrive();\n",
        "          if (lane == 0) s.empty[stage].arrive();\n          add_values(stage);\n",
        "narrow",
        mode="crossed",
    ),
    "a row tells too few bytes": Mutant("sm90/narrow.h", "arrive_expect(kRow)", "arrive_expect(kRow - 16)", "narrow"),
    "zeros are not fenced from copies": Mutant(
        "sm90/narrow.h", "      op::fence_async_shared();  // a later bulk copy writes the same bytes\n", "", "narrow"
    ),
    "rows that are not there keep what was there": Mutant("sm90/narrow.h", "      clear(row);\n", "", "narrow"),
    "logits are not waited for": Mutant(
        "sm90/narrow.h", "          op::named_sync(kLogits + kTeam, 128);\n", "", "narrow"
    ),
    "weights are not waited for": Mutant(
        "sm90/narrow.h", "          op::named_sync(kWeights + kTeam, 128);\n", "", "narrow", mode="crossed"
    ),
    "the other team is not waited for": Mutant(
        "sm90/narrow.h", "op::named_sync(kMerge + kWhich", "op::named_arrive(kMerge + kWhich", "narrow"
    ),
    "the other team's level is taken for this one's": Mutant(
        "sm90/narrow.h", "theirs = op::exp2(other - both)", "theirs = factor", "narrow"
    ),
    "a team's keys are those of the other": Mutant(
        "sm90/narrow.h", "kByHeads ? 0 : kTeam * kTeamKeys,", "kByHeads ? 0 : (1 - kTeam / 2) * kTeamKeys,", "narrow"
    ),
    "columns of values change places": Mutant("sm90/narrow.h", "j % 2 ? 0x7362 : 0x5140", "0x5140", "narrow"),
    "the output is not brought to the new level": Mutant(
        "sm90/narrow.h", "out[j][t][c] *= by, out[j][t][c + 2] *= by;", ";", "narrow"
    ),
    "a part counts as much as another": Mutant(
        "sm90/narrow_combine.h",
        "op::exp2(s.lse[from + i] - reference)",
        "(s.slot[from + i] < 0 ? 0.f : 1.f)",
        "narrow",
    ),
    # Faults in the kernel for the cache formats of 2026.
    "the format of the first cache is the second's": Mutant(
        "sm90/v41.h", "rows.extra ? plan.call.extra_format : plan.call.format", "plan.call.format", "v41"
    ),
    "odd columns before even ones": Mutant(
        "sm90/v41.h", "codes & 0x7777", "(codes >> 4 & 0x707 | codes << 4 & 0x7070)", "v41"
    ),
    "the scales of a page begin where its rows do": Mutant(
        "work.h", "format.row ? page_size * slot :", "format.row ? 0 :", "v41"
    ),
    "a scale for each 64": Mutant("sm90/v41.h", "chunk % 4 : chunk / 2)", "chunk % 4 : chunk / 4)", "v41"),
    "sinks weigh before the maximum is taken off": Mutant(
        "sm90/latent.h", " * float(kLog2e) - reference[R])", " * float(kLog2e))"
    ),
}  # fmt: skip
# Faults that leave all results right, because the emulation happens to run the threads of a block in a safe order.
# ThreadSanitizer reports these faults.
RACES = {
    "the sums are not waited for": Mutant("sm90/seesaw.h", "both_sync(kSums);", "both_arrive(kSums);"),
    "the next segment's sums come early": Mutant(
        "sm90/narrow.h", "      if (!first) op::named_sync(kMerged + kWhich, kMerging);\n", "", "narrow"
    ),
    "a stage of rows is handed back by one for all": Mutant(
        "sm90/narrow.h", "          op::syncwarp();  // all threads have read their rows\n", "", "narrow"
    ),
    "a row's level is written while its other threads read it": Mutant(
        "sm90/fp8_decode.h", "      op::named_sync(kRestRead, 128);\n      CUTE_UNROLL", "      CUTE_UNROLL", "fp8"
    ),
    "weights take the place of what others read": Mutant(
        "sm90/seesaw.h", "          op::named_sync(kRestRead, 128);", "          ;"
    ),
}  # fmt: skip


def plant(mutant: Mutant, folder: Path) -> None:
    """Write the sources with the fault, and with only one kernel, to a folder."""
    shutil.copytree(SOURCES, folder)
    (folder / mutant.file).write_text(mutant.source())
    (folder / "emulator" / "emulation.cc").rename(folder / "emulator" / "emulation.inc")
    for kind, (unit, body, kernel) in UNITS.items():
        text = WHOLE.replace(".cc", ".inc") if kind == mutant.kind else NONE
        (folder / "sm90" / f"{unit}.cu").write_text(text.format(unit=unit, body=body, kernel=kernel))
    (folder / "emulator" / "emulation.cc").touch()


def flags_of(sanitized: bool) -> tuple[str, ...]:
    return ("-O1", "-fsanitize=thread", "-g1") if sanitized else ("-O1",)


def build(mutant: Mutant, folder: Path, sanitized: bool) -> None:
    """Put the library with the fault into the cache and its sources into `folder`."""
    plant(mutant, folder)
    compile.build(compile.emulation_recipe(flags_of(sanitized), folder))


def judge(mutant: Mutant, folder: Path, flags: tuple[str, ...], modes: Sequence[str], most: int) -> str:
    """The first failing check among the library's first `most` checks, in each of `modes`, with its message, or ""."""
    built = _native.emulation(flags, folder)
    _native.emulation = lambda *_: built
    known = {str(check): check for check in checks()}
    if mutant.kind in FP8:
        _latent.NARROW, _latent.LIST_FUNCTIONS[_abi.FP8_V32] = {}, _native.Native(FP8[mutant.kind])
    for mode in modes:
        for name in CHECKS[mutant.kind][:most]:
            verdict = verdicts.verdict_of(EmulatedRunner(framework="torch", mode=mode), known[name], 10)
            if verdict.result == "FAILED":
                return f"{verdict.check}: {verdict.message}"
    return ""


if __name__ == "__main__":
    environment.prepare("cpu")
    name, folder, *sanitized = sys.argv[1:]
    mutant = {**HONEST, **MUTANTS, **RACES}[name]
    modes = ["eager", "late"] if sanitized else [mutant.mode]
    # The sanitizer is slow, and further checks show no other races. For few heads, two checks are needed: one has many
    # segments, and the other has many blocks.
    most = len(CHECKS[mutant.kind]) if not sanitized else 2 if mutant.kind == "narrow" else 1
    sys.stdout.write(judge(mutant, Path(folder), flags_of(bool(sanitized)), modes, most))
