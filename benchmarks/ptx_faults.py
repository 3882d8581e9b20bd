"""Plant single faults in compiled kernels, and report which faults the PTX emulator or the reference notices.

    python -m benchmarks.ptx_faults [--arch sm_90] [--kernel tile_kernel] [--kind TEXT] [--most 4] [--seed N]

One call runs with its PTX unchanged, and then once for each fault: an instruction of the kernel's PTX is dropped or
changed. The Triton kernels are called for attention over a paged cache. The CUDA kernels are called for decodes over
latents, which the table `CUDA` lists. A fault is noticed in one of three ways: the emulator reports it, with a right or
a wrong result; the emulation cannot continue; or nothing is reported, but the result differs from the reference. Some
faults remain unnoticed, because some barriers and waits do not protect any access of this batch, or of any batch.
"""

import argparse
import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ragged_attention.testing import environment

Edit = Callable[[str], str]
SWIZZLE = 3 << 62  # the bits of a wgmma descriptor for the swizzle of rows


def _one_more(text: str) -> str:
    return re.sub(r"(\d+);", lambda found: f"{int(found[1]) + 1};", text)


def _transposed(text: str) -> str:
    return text.replace(".trans", "") if ".trans" in text else re.sub(r"(\.x[124])", r"\1.trans", text)


def _other_swizzle(text: str) -> str:
    return re.sub(r"-?\d{18,20}", lambda found: str((int(found[0]) % 2**64) ^ SWIZZLE), text)


def _other_lane(text: str) -> str:
    return re.sub(r", (\d+), 31,", lambda found: f", {int(found[1]) ^ 3}, 31,", text)


def _dropped(text: str) -> str:
    return ""


def _counted(number: int) -> Edit:
    """An edit that makes an mbarrier expect `number` more arrivals."""
    instead = rf"{{ .reg .b32 count; add.s32 count, \2, {number}; mbarrier.init.shared::cta.b64 \1, count; }}"
    return lambda text: re.sub(r"mbarrier\.init\S* (\S+), (%r\d+);", instead, text)


def _more_bytes(text: str) -> str:
    instead = r"{ .reg .b32 bytes; add.s32 bytes, \2, 16; mbarrier.arrive.expect_tx.shared::cta.b64 _, \1, bytes; }"
    return re.sub(r"mbarrier\.arrive\.expect_tx\S* _, (\S+), (%r\d+);", instead, text)


# Kind of fault -> a pattern of the PTX lines in which it can be planted, and the edit of such a line.
KINDS: dict[str, tuple[str, Edit]] = {
    "bar.sync dropped": (r"\s*bar\.sync\s+\S.*;", _dropped),
    "bar.arrive dropped": (r"\s*bar\.arrive\s.*;", _dropped),
    "mbarrier wait dropped": (r"\s*mbarrier\.try_wait\S* P1,.*;", lambda text: "setp.eq.b32 P1, 0, 0;"),
    "mbarrier arrival dropped": (r"\s*mbarrier\.arrive\.shared.*;", _dropped),
    "mbarrier for one arrival more": (r"\s*mbarrier\.init.*;", _counted(1)),
    "mbarrier for one arrival less": (r"\s*mbarrier\.init.*;", _counted(-1)),
    "more bytes expected at an mbarrier": (r"\s*mbarrier\.arrive\.expect_tx.*;", _more_bytes),
    "arrival after copies dropped": (r"\s*cp\.async\.mbarrier\.arrive.*;", _dropped),
    "cp.async dropped": (r"\s*cp\.async\.c[ag]\..*;", _dropped),
    "bulk copy dropped": (r"\s*cp\.async\.bulk\.shared.*;", _dropped),
    "cp.async.wait_group dropped": (r"\s*cp\.async\.wait_group\s+\d+;", _dropped),
    "cp.async.wait_group, one group less": (r"\s*cp\.async\.wait_group\s+\d+;", _one_more),
    "cp.async.commit_group dropped": (r"\s*cp\.async\.commit_group;", _dropped),
    "fence.proxy.async dropped": (r"\s*fence\.proxy\.async\S*;", _dropped),
    "wgmma.wait_group dropped": (r"\s*wgmma\.wait_group\S*\s+\d+;", _dropped),
    "wgmma.wait_group, one group less": (r"\s*wgmma\.wait_group\S*\s+\d+;", _one_more),
    "wgmma.fence dropped": (r"\s*wgmma\.fence\S*;", _dropped),
    "wgmma.commit_group dropped": (r"\s*wgmma\.commit_group\S*;", _dropped),
    "setmaxnreg.dec dropped": (r"\s*setmaxnreg\.dec.*;", _dropped),
    "griddepcontrol.wait dropped": (r"\s*griddepcontrol\.wait;", _dropped),
    "wgmma descriptor, another swizzle": (r".*\.b64.*-?\d{18,20};", _other_swizzle),
    "swizzle by or, not xor": (r"\s*xor\.b32.*;", lambda text: text.replace("xor", "or")),
    "matrices transposed, or not": (r"\s*(?:ld|st)matrix.*;", _transposed),
    "shfl from another lane": (r"\s*shfl\.sync\.bfly.*, \d+, 31,", _other_lane),
}
ANSWERS = ("report, wrong", "report, right", "fault", "wrong", "other bits", "unnoticed")


# CUDA kernel -> (a part of its name in the PTX, fields of a latent decode batch, the number of KV splits). Instead of a
# number, "parts" is a schedule of two parts, in which a CTA continues with the next sequence after it has ended one.
CUDA: dict[str, tuple[str, dict[str, Any], int | str]] = {
    "cuda dense": ("Seesaw", {"topk": 0, "heads": 16, "q_tokens": 2}, "parts"),
    "cuda dense, row by row": ("Seesaw", {"topk": 0, "heads": 16, "page_size": 16}, 1),
    "cuda lists": ("Seesaw", {"heads": 16}, "parts"),
    "cuda fp8_v32": ("Fp8Decode", {"heads": 40, "format": "fp8_v32"}, "parts"),
    "cuda fp8_v32 of 16 heads": ("NarrowILi2ELb0", {"heads": 16, "format": "fp8_v32"}, "parts"),
    "cuda fp8_v32 of 32 heads": ("NarrowILi2ELb1", {"heads": 32, "format": "fp8_v32"}, "parts"),
    "cuda fp8_v4": ("Fp8V4", {"heads": 16, "format": "fp8_v4"}, "parts"),
    "cuda fp8_v41 and fp4_v41": (
        "V41", {"heads": 16, "format": "fp8_v41", "extra_format": "fp4_v41", "extra_topk": 70, "extra_slots": 128}, 1,
    ),
    "cuda merge": ("7Combine", {"heads": 16}, 2),
    "cuda merge of few rows": ("NarrowCombine", {"heads": 16, "format": "fp8_v32"}, 3),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of a fault: one of ANSWERS, and the first message."""

    kind: str
    text: str = ""


class Judge:
    """Runs a batch with a changed kernel, and compares the result with the reference and the unchanged kernel's."""

    def __init__(self, arch: str, kernel: str, seed: int | None = None) -> None:
        self.arch, self.seed = arch, seed
        self.kernel, self.launch = self._cuda(*CUDA[kernel]) if kernel in CUDA else self._triton(kernel)
        self.text, self.reached = "", set[int]()
        self.right = self.results(None)[0]

    def _triton(self, kernel: str) -> tuple[str, Callable[..., Any]]:
        from ragged_attention.testing.paged.specs import Spec

        lens = ((1, 300), (20, 400), (40, 200), (3, 3))
        batch = Spec(lens=lens, page_size=16, num_kv_heads=2, group=2, head_dim=64, dtype="bfloat16").build()
        self.kind, self.wanted = batch.kind, batch.expected()
        return kernel, self._prepared("triton", "ragged_paged_attention", batch, None, return_lse=True)

    def _cuda(self, kernel: str, fields: dict[str, Any], splits: int | str) -> tuple[str, Callable[..., Any]]:
        from ragged_attention.reference.mla_decode import mla_decode
        from ragged_attention.testing.mla.specs import DecodeSpec
        from ragged_attention.testing.runner import runner_for

        parameters = {"topk": 330, "kv_lens": (400, 60, 330), "page_size": 64, "dtype": "bfloat16", "d_v": 512} | fields
        batch = DecodeSpec(**parameters, d_qk=576, entries="distinct").build()
        self.kind, self.wanted = "bfloat16", mla_decode(**batch.arguments())
        if splits == "parts":
            from ragged_attention.testing.mla.cache_specs import schedule_batch

            schedule = runner_for("reference", "torch").schedule(schedule_batch(batch, num_parts=2))
            parts = schedule.parts, schedule.num_splits
            return kernel, self._prepared("cuda", "mla_decode", batch, None, schedule=parts)
        return kernel, self._prepared("cuda", "mla_decode", batch, {"num_splits": splits})

    def _prepared(self, backend: str, operation: str, batch: Any, tile: Any, **extra: Any) -> Callable[..., Any]:
        """A function of a launcher that makes the call of the batch."""
        from ragged_attention import dispatch
        from ragged_attention.calls import CALLS
        from ragged_attention.testing import ptx_runner

        runner = ptx_runner.CompiledRunner(arch=self.arch)
        record: Any = CALLS[operation]
        module = dispatch.load(operation, backend)

        def launch(launcher: Any) -> Any:
            arguments = {name: runner._bring(batch, name, value) for name, value in batch.arguments().items()}
            call = record(**arguments, **extra, device=ptx_runner.device_of(self.arch))
            return module.run(call, module.Tile(**tile) if tile else module.heuristic(call), launcher)

        return launch

    def results(self, text: str | None) -> tuple[list[Any], list[str]]:
        """(out and lse, the texts of the emulator's reports). `text` replaces the kernel's PTX, unless it is None."""
        from ragged_attention.testing import ptx, ptx_runner, torch_front

        def change(name: str, unchanged: str) -> str:
            if self.kernel in name and text is None:
                self.text = unchanged
            return text if self.kernel in name and text is not None else unchanged

        def notice(name: str, outcome: Any) -> None:
            reports.extend(report.text for report in outcome.reports.values())
            if self.kernel in name and text is None:
                self.reached |= outcome.lines

        reports: list[str] = []
        emulator = ptx.Emulator(self.arch, schedule=self.seed, lanes=8192, change=change)
        arrays = self.launch(ptx_runner.launcher_of(emulator, notice=notice))
        return [torch_front.take_back(array) for array in arrays], reports

    def __call__(self, number: int, edit: Edit) -> Answer:
        """The result of a fault: `edit` changes line `number` of the PTX, counted from 1."""
        from ragged_attention.testing import compare, ptx

        lines = self.text.split("\n")
        lines[number - 1] = edit(lines[number - 1])
        try:
            found, reports = self.results("\n".join(lines))
        except (ptx.Fault, ptx.Hazard) as error:
            return Answer("fault", str(error))
        same = all((a.view("u1") == b.view("u1")).all() for a, b in zip(found, self.right, strict=True))
        try:
            compare.agrees(found[0], self.wanted[0], self.kind)
            compare.agrees(found[1], self.wanted[1], f"lse {self.kind}", "lse")
            wrong = ""
        except AssertionError as error:
            wrong = str(error)
        if reports:
            return Answer("report, wrong" if wrong else "report, right", reports[0])
        return Answer("wrong", wrong) if wrong else Answer("unnoticed" if same else "other bits")

    def sites(self, kind: str, most: int) -> Iterator[int]:
        """Yield the numbers of at most `most` executed lines for a fault of this kind, evenly spread."""
        pattern, edit = KINDS[kind]
        lines = [
            number
            for number, line in enumerate(self.text.split("\n"), 1)
            if number in self.reached and re.match(pattern, line) and edit(line) != line
        ]
        count = min(most, len(lines))
        yield from (lines[index * len(lines) // count] for index in range(count))


def main(argv: Sequence[str] | None = None) -> int:
    """Print every single fault with its result, and a table with the number of results per kind of fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90", help="sm_80, sm_86, sm_89 or sm_90")
    parser.add_argument("--kernel", default="tile_kernel", help=f"tile_kernel, split_kernel, {', '.join(CUDA)}")
    parser.add_argument("--kind", default="", help="only kinds of faults whose name contains this")
    parser.add_argument("--most", type=int, default=4, help="the maximum number of faults of each kind")
    parser.add_argument("--seed", type=int, help="seed for a random order of the warps (default: round robin)")
    options = parser.parse_args(argv)
    environment.prepare(f"{environment.PTX}{options.arch}")
    console, judge = Console(), Judge(options.arch, options.kernel, options.seed)
    table = Table(title=f"{options.kernel}, {options.arch}", title_justify="left")
    for name in ("fault", "planted", *ANSWERS):
        table.add_column(name, justify="left" if name == "fault" else "right")
    for kind in (kind for kind in KINDS if options.kind in kind):
        answers = {number: judge(number, KINDS[kind][1]) for number in judge.sites(kind, options.most)}
        if not answers:
            continue
        counts = Counter(answer.kind for answer in answers.values())
        table.add_row(kind, str(len(answers)), *(str(counts[name] or "") for name in ANSWERS))
        for number, answer in answers.items():
            console.print(f"{kind}, line {number}: {answer.kind} {answer.text[:100]}", highlight=False, markup=False)
    console.print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
