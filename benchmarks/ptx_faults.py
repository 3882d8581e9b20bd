"""Single faults planted in compiled kernels, and what notices them: how much the emulator of PTX is worth.

    python -m benchmarks.ptx_faults [--arch sm_90] [--kernel tile_kernel] [--kind TEXT] [--most 4] [--seed N]

One attention over a paged cache is run as it is compiled, and then once for each fault: an instruction of the kernel's
PTX is dropped or changed. What notices is a report of the emulator, with a right or a wrong result; a fault, with which
a run cannot go on; or the definition alone, to which the result does not agree. What is left is unnoticed: some
barriers and waits are there for no access of this batch, or of any.
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
SWIZZLE = 3 << 62  # the bits of a wgmma descriptor that say how rows are swizzled


def _one_more(text: str) -> str:
    return re.sub(r"(\d+);", lambda found: f"{int(found[1]) + 1};", text)


def _transposed(text: str) -> str:
    return text.replace(".trans", "") if ".trans" in text else re.sub(r"(\.x[124])", r"\1.trans", text)


def _other_swizzle(text: str) -> str:
    return re.sub(r"-?\d{18,20}", lambda found: str((int(found[0]) % 2**64) ^ SWIZZLE), text)


def _other_lane(text: str) -> str:
    return re.sub(r", (\d+), 31,", lambda found: f", {int(found[1]) ^ 3}, 31,", text)


# Where a fault can be planted in a line of PTX, and what the line is then.
KINDS: dict[str, tuple[str, Edit]] = {
    "bar.sync dropped": (r"\s*bar\.sync\s+0;", lambda text: ""),
    "cp.async.wait_group dropped": (r"\s*cp\.async\.wait_group\s+\d+;", lambda text: ""),
    "cp.async.wait_group, one group less": (r"\s*cp\.async\.wait_group\s+\d+;", _one_more),
    "cp.async.commit_group dropped": (r"\s*cp\.async\.commit_group;", lambda text: ""),
    "fence.proxy.async dropped": (r"\s*fence\.proxy\.async\S*;", lambda text: ""),
    "wgmma.wait_group dropped": (r"\s*wgmma\.wait_group\S*\s+\d+;", lambda text: ""),
    "wgmma.wait_group, one group less": (r"\s*wgmma\.wait_group\S*\s+\d+;", _one_more),
    "wgmma descriptor, another swizzle": (r".*\.b64.*-?\d{18,20};", _other_swizzle),
    "swizzle by or, not xor": (r"\s*xor\.b32.*;", lambda text: text.replace("xor", "or")),
    "ldmatrix transposed, or not": (r"\s*ldmatrix.*;", _transposed),
    "shfl from another lane": (r"\s*shfl\.sync\.bfly.*, \d+, 31,", _other_lane),
}
ANSWERS = ("report, wrong", "report, right", "fault", "wrong", "other bits", "unnoticed")


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came of a fault: one of ANSWERS, and what was said first."""

    kind: str
    text: str = ""


class Judge:
    """Runs one batch with a kernel's PTX changed, and holds the results to the definition and to the kernel's own."""

    def __init__(self, arch: str, kernel: str, seed: int | None = None) -> None:
        from ragged_attention.testing.paged.specs import Spec

        lens = ((1, 300), (20, 400), (40, 200), (3, 3))
        batch = Spec(lens=lens, page_size=16, num_kv_heads=2, group=2, head_dim=64, dtype="bfloat16").build()
        self.arch, self.kernel, self.seed = arch, kernel, seed
        self.batch, self.wanted = batch, batch.expected()
        self.text, self.reached = "", set[int]()
        self.right = self.results(None)[0]

    def results(self, text: str | None) -> tuple[list[Any], list[str]]:
        """Out and lse with another PTX of the kernel, or as it is, and what was reported."""
        from ragged_attention import dispatch
        from ragged_attention.calls import CALLS
        from ragged_attention.testing import ptx, ptx_runner, torch_front

        def change(name: str, own: str) -> str:
            if name == self.kernel and text is None:
                self.text = own
            return text if name == self.kernel and text is not None else own

        def notice(name: str, outcome: Any) -> None:
            reports.extend(report.text for report in outcome.reports.values())
            if name == self.kernel and text is None:
                self.reached |= outcome.lines

        reports: list[str] = []
        runner, emulator = (
            ptx_runner.CompiledRunner(arch=self.arch),
            ptx.Emulator(self.arch, seed=self.seed, lanes=8192, change=change),
        )
        arguments = {name: runner._bring(self.batch, name, value) for name, value in self.batch.arguments().items()}
        record: Any = CALLS["ragged_paged_attention"]
        call = record(**arguments, return_lse=True, device=ptx_runner.device_of(self.arch))
        module = dispatch.load(call.OPERATION, "triton")
        found = module.run(call, module.heuristic(call), ptx_runner.launcher_of(emulator, notice=notice))
        return [torch_front.take_back(array) for array in found], reports

    def __call__(self, number: int, edit: Edit) -> Answer:
        """What comes of an edit of the line of this number, counted from 1."""
        from ragged_attention.testing import compare, ptx

        lines = self.text.split("\n")
        lines[number - 1] = edit(lines[number - 1])
        try:
            found, reports = self.results("\n".join(lines))
        except (ptx.Fault, ptx.Hazard) as error:
            return Answer("fault", str(error))
        same = all((a.view("u1") == b.view("u1")).all() for a, b in zip(found, self.right, strict=True))
        try:
            compare.agrees(found[0], self.wanted[0], self.batch.kind)
            compare.agrees(found[1], self.wanted[1], f"lse {self.batch.kind}", "lse")
            wrong = ""
        except AssertionError as error:
            wrong = str(error)
        if reports:
            return Answer("report, wrong" if wrong else "report, right", reports[0])
        return Answer("wrong", wrong) if wrong else Answer("unnoticed" if same else "other bits")

    def sites(self, kind: str, most: int) -> Iterator[int]:
        """The numbers of lines that run and where a fault can be planted, spread evenly."""
        pattern, edit = KINDS[kind]
        every = [
            number
            for number, line in enumerate(self.text.split("\n"), 1)
            if number in self.reached and re.match(pattern, line) and edit(line) != line
        ]
        count = min(most, len(every))
        yield from (every[index * len(every) // count] for index in range(count))


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table of what notices what, and each fault that nothing noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90", help="sm_80, sm_86, sm_89 or sm_90")
    parser.add_argument("--kernel", default="tile_kernel", help="tile_kernel or split_kernel")
    parser.add_argument("--kind", default="", help="kinds of faults whose name contains this")
    parser.add_argument("--most", type=int, default=4, help="places that each kind is planted in, one at a time")
    parser.add_argument("--seed", type=int, help="draws the order in which warps run (default: in turn)")
    options = parser.parse_args(argv)
    environment.prepare(f"{environment.PTX}{options.arch}")
    console, judge = Console(), Judge(options.arch, options.kernel, options.seed)
    table = Table(title=f"{options.kernel}, {options.arch}", title_justify="left")
    for name in ("fault", "planted", *ANSWERS):
        table.add_column(name, justify="left" if name == "fault" else "right")
    for kind in (kind for kind in KINDS if options.kind in kind):
        answers = {number: judge(number, KINDS[kind][1]) for number in judge.sites(kind, options.most)}
        counts = Counter(answer.kind for answer in answers.values())
        table.add_row(kind, str(len(answers)), *(str(counts[name] or "") for name in ANSWERS))
        for number, answer in answers.items():
            console.print(f"{kind}, line {number}: {answer.kind} {answer.text[:100]}", highlight=False, markup=False)
    console.print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
