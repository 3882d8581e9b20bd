"""Items: the named cases. Each case is checked, then timed together with the installed peers. Nothing else runs."""

from typing import Any

from benchmarks.device.plan import QUICK, WITHOUT_PEERS
from benchmarks.device.record import FAILED, PASSED
from ragged_attention.testing import environment

LATENT = ("W9", "W10", "W11", "W12")
ROUNDS, FEW_ROUNDS = 20, 3
LENGTH = 48  # the longest sequence in a rehearsal on a CPU
MANY_TOKENS = 64  # with more tokens, eager takes minutes, and its time is not needed


class Items:
    def __init__(self, device: str, *options: str) -> None:
        environment.prepare(device)
        self.with_peers = device == "cuda" and WITHOUT_PEERS not in options
        from benchmarks import run, timing
        from benchmarks.cases.catalogue import CASES
        from benchmarks.device import cuda

        self.run_case, self.default_backends, self.cuda, self.device = run.run_case, run.default_backends, cuda, device
        self.cases = CASES if device == "cuda" else {n: c.scaled_down(length=LENGTH) for n, c in CASES.items()}
        if device == "cpu":
            self.machine = run.Machine("torch", False, "CPU")
        else:
            rates = timing.copy_bandwidth(), timing.matmul_rate()
            self.machine = run.Machine("torch", True, run.this_machine("torch").name, *rates)

    def facts(self) -> dict[str, Any]:
        """The measured rates from which floors are computed, and whether each of torch's peers is installed."""
        from benchmarks.peers import registry

        return {
            "device": self.machine.name,
            "bytes_per_second": self.machine.bytes_per_second,
            "flops_per_second": self.machine.flops_per_second,
            "peers": registry.presence("torch"),
        }

    def names(self, what: str) -> list[str]:
        if what == "quick":
            return list(QUICK)
        return [name for name, case in self.cases.items() if what == "all" or case.workload in LATENT]

    def run(self, what: str, name: str) -> dict[str, Any]:
        case, backends = self.cases[name], self.default_backends(self.machine)
        gpu = self.machine.gpu
        with self.cuda.in_place(self.device):
            if self.cuda.absent(self.device) is None and self.cuda.takes(case, self.device):
                backends.insert(0, "cuda")  # the first backend is the base of the ratios
            if gpu and case.num_tokens > MANY_TOKENS:
                backends.remove("eager")
            results = self.run_case(
                case, self.machine, backends, with_peers=self.with_peers, rounds=ROUNDS if gpu else FEW_ROUNDS
            )
        rows = [result.as_json() for result in results]
        ours = [result for result in results if result.who in backends]
        broken = [result for result in ours if result.why and not result.why.startswith("Unsupported")]
        message = "; ".join(f"{result.who}: {result.why}" for result in broken)
        return {"result": FAILED if broken else PASSED, "message": message, "rows": rows}

    def settle(self) -> None:
        """Free the memory of a case, since the next case may need all memory."""
        if self.machine.gpu:
            import torch

            torch.cuda.synchronize()
            torch.cuda.empty_cache()


CALLS = 2  # calls before the profiled call


def call(name: str, backend: str) -> None:
    """Call a case several times, with the profiler enabled for the last call."""
    import torch

    from benchmarks import run
    from benchmarks.cases.catalogue import CASES
    from benchmarks.device import carried

    carried.use("cuda")
    machine = run.Machine("torch", True, "")
    attention = run.our_call(CASES[name], run.make_inputs(CASES[name], machine, 0), machine, backend)
    for _ in range(CALLS):
        attention()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()  # type: ignore[attr-defined]
    attention()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()  # type: ignore[attr-defined]
