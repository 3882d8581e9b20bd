"""Compile ahead of time, without a GPU, every Triton kernel that a call will use, into a cache that can be sent.

    python -m benchmarks.device.precompile CACHE --list FILE [--shard 0/2] [--kinds corners,drawn,checks,bench,peers]

The command runs the suite and the cases with a stand-in for Triton's driver. Kernels are compiled for `sm_90`, but a
launch does nothing. The C code that launches kernels is compiled too. The names of the used folders of the cache are
written to FILE. The command must run with the versions of Triton and Python on the machine with the GPU, and `prepare`
starts it with these versions.
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.device import carried
from benchmarks.device.plan import QUICK
from benchmarks.peers import registry
from ragged_attention.testing import environment

ARCH = "sm_90"
KINDS = ("bench", "checks", "corners", "peers", "drawn")
STUB = "libcuda.so.1"
# the comparisons to skip, since nothing is computed
COMPARISONS = ("agrees", "identical", "logits_agree", "chosen_agree")


def stub_of_the_driver(folder: Path) -> None:
    """Build a library with the driver's name. Triton's launchers link against its functions, which do nothing.

    If the library had no functions, the linker could drop the reference to it. Then a launcher would not load on the
    device.
    """
    launchers = Path(importlib.util.find_spec("triton").origin).parent / "backends" / "nvidia"  # type: ignore[union-attr,arg-type]
    sources = [path.read_text() for path in launchers.glob("driver.*")]
    functions = sorted({name for text in sources for name in re.findall(r"\bcu[A-Z]\w*(?=\()", text)})
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{STUB}", "-x", "c", "-", "-o", str(folder / STUB)]
    subprocess.run(command, input="".join(f"void {name}(void) {{}}\n" for name in functions), text=True, check=True)


class Used:
    """The cache folders that were used, and the number of kernels that were compiled anew."""

    def __init__(self) -> None:
        self.folders: set[str] = set()
        self.compiled = self.requested = 0

    def kernel(self, *, metadata_group: dict[str, str], cache_hit: bool, **rest: Any) -> None:
        self.folders |= {Path(path).parent.name for path in metadata_group.values()}
        self.requested += 1
        self.compiled += not cache_hit

    def module(self, name: str, path: str) -> Any:
        """A stand-in for a compiled C module, which could not be loaded without the driver."""
        del name
        self.folders.add(Path(path).parent.name)
        return registry.Nothing()


def driver_of(used: Used) -> Any:
    """A stand-in for Triton's driver that also compiles the launchers of kernels."""
    nvidia = importlib.import_module("triton.backends.nvidia.driver")
    overhead = importlib.import_module("benchmarks.overhead")
    builder: Any = importlib.import_module("triton.runtime.build")
    builder._load_module_from_path = used.module
    nvidia.CudaUtils()

    class Driver(overhead.StandInDriver):
        def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., Any]:
            nvidia.CudaLauncher(source, metadata)
            return self.note

    return Driver(ARCH)


# ---- the calls


def calls(kinds: Sequence[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """All calls that run Triton kernels on the device, by name."""
    from benchmarks import overhead
    from benchmarks.cases.catalogue import CASES
    from benchmarks.device import checks

    front = importlib.import_module("ragged_attention.torch")

    def of_case(case: Any) -> Callable[[], Any]:
        return lambda: getattr(front, case.operation)(**overhead.inputs_of(case, "cpu"), backend="triton")

    if "bench" in kinds:
        for name in sorted(CASES, key=lambda name: name not in QUICK):
            yield f"bench {name}", of_case(CASES[name])
    if "checks" in kinds:
        for name in checks.SMALL["triton"]:
            small = CASES[name].scaled_down(length=checks.LENGTH, sequences=checks.SEQUENCES)
            yield f"checks {name}", of_case(small)
    if "peers" in kinds:
        yield from of_peers()
    yield from of_suite([kind for kind in ("corners", "drawn") if kind in kinds])


def of_peers() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls of vLLM's Triton kernels on the cases that they support."""
    from benchmarks import overhead
    from benchmarks.cases.catalogue import CASES
    from benchmarks.cases.paged import PagedCase

    if not any(registry.FOLDER.glob("**/triton_unified_attention.py")):
        return
    for name, case in CASES.items():
        if isinstance(case, PagedCase) and registry._vllm_declines(case) is None:
            yield f"vLLM {name}", lambda case=case: registry._vllm_triton(case, overhead.inputs_of(case, "cpu"))()


def of_suite(kinds: Sequence[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    from benchmarks.device.suite import EXAMPLES, KINDS
    from ragged_attention.testing.runner import Runner
    from ragged_attention.testing.suite import checks
    from ragged_attention.testing.verdicts import verdict_of

    runner = Runner(framework="torch", backend="triton")
    wanted = [name for kind in kinds for name in KINDS[kind.removesuffix("s")]]
    for check in checks():
        if check.kind in wanted:
            yield str(check), lambda check=check: verdict_of(runner, check, EXAMPLES)


@contextlib.contextmanager
def nothing_compared() -> Iterator[None]:
    """A context without comparisons. Launches do nothing here, so results are uninitialised memory."""
    compare = importlib.import_module("ragged_attention.testing.compare")
    with contextlib.ExitStack() as stack:
        for name in COMPARISONS:
            old = getattr(compare, name)
            for module in list(sys.modules.values()):
                if getattr(module, name, None) is old:
                    stack.enter_context(mock.patch.object(module, name, return_value=True))
        yield


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device.precompile", description=__doc__)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--list", type=Path, required=True)
    parser.add_argument("--shard", default="0/1", help="one part of the calls, such as 1/4")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--peers", type=Path, help="the folder of vLLM's kernels")
    options = parser.parse_args(argv)
    which, count = map(int, options.shard.split("/"))
    with tempfile.TemporaryDirectory() as folder:
        stub_of_the_driver(Path(folder))
        os.environ |= carried.environment() | {"TRITON_CACHE_DIR": str(options.cache), "TRITON_LIBCUDA_PATH": folder}
        environment.prepare("cuda")
        used, failed = compile_all(options.kinds.split(","), which, count, options.peers)
    options.list.write_text(json.dumps({"folders": sorted(used.folders), "failed": failed}))
    return 0


def compile_all(kinds: Sequence[str], which: int, count: int, peers: Path | None) -> tuple[Used, dict[str, str]]:
    """Make all calls of a shard. Returns the used folders, and the failed calls, which the device must compile."""
    from benchmarks import overhead
    from ragged_attention.testing import torch_front
    from ragged_attention.tools.samples import device_of

    carried.steady_kernel_keys()
    registry.FOLDER = peers or registry.FOLDER
    used, failed, began = Used(), {}, time.monotonic()
    importlib.import_module("triton").knobs.compilation.listener = used.kernel
    facts = mock.patch.object(torch_front, "facts", return_value=device_of("torch", ARCH))
    with overhead.standing_in(driver_of(used)), facts:
        every = list(calls(kinds))[which::count]
        with nothing_compared():
            for number, (name, call) in enumerate(every, 1):
                try:
                    call()
                except Exception as error:
                    failed[name] = f"{type(error).__name__}: {error}"[:200]
                if number % 50 == 0 or number == len(every):
                    print(
                        f"{number} of {len(every)} calls, {used.compiled} of {used.requested} kernels compiled anew, "
                        f"{time.monotonic() - began:.0f} s", flush=True,
                    )  # fmt: skip
    return used, failed


if __name__ == "__main__":
    sys.exit(main())
