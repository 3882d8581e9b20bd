"""Computes the bytes that attention over 8 to 1024 devices sends, and plans its time. Nothing here is measured.

    python -m benchmarks.scaling            the tables of docs/scaling.md
    python -m benchmarks.scaling --bandwidth 50 --latency 5     another network: GB/s and microseconds

The numbers of bytes are those that `ragged_attention.torch.distributed` passes to process groups. Tests compare them
with the operating system's counts. The times are for a machine that reads memory, computes and sends at its full rates,
so they are bounds for planning, not forecasts.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence

FLOAT32 = 4  # bytes; partial results and gradients of keys are sent as float32


# ---- bytes that one device sends in one call


def decode_bytes(tokens: int, heads: int, d_v: int, size: int, *, own_heads: bool = False) -> int:
    """The bytes of `context_parallel_decode` and `context_parallel_mla_decode` over `size` devices.

    Both functions send out and lse as float32.
    """
    whole = (size - 1) * tokens * heads * (d_v + 1) * FLOAT32
    return whole // size if own_heads else whole


def ring_bytes(rows: int, kv_heads: int, widths: int, itemsize: int, size: int) -> int:
    """The bytes of the forward pass of `context_parallel_varlen_attention`.

    `rows` are the rows per device, and `widths` is D + D_v.
    """
    return (size - 1) * rows * kv_heads * widths * itemsize


def training_bytes(rows: int, kv_heads: int, widths: int, itemsize: int, size: int) -> int:
    """The bytes of `context_parallel_varlen_attention` with its gradient.

    Keys and values are sent twice. Their gradients pass through the whole ring, back to the device that owns the keys.
    """
    gradients = size * rows * kv_heads * widths * FLOAT32 if size > 1 else 0
    return 2 * ring_bytes(rows, kv_heads, widths, itemsize, size) + gradients


# ---- networks, machines, models and steps


@dataclasses.dataclass(frozen=True, slots=True)
class Network:
    """A flat network: every device sends and receives at the same rate, to and from any other device."""

    name: str
    bandwidth: float  # bytes per second that a device sends
    latency: float  # seconds until the first byte arrives

    def exchange(self, sent: float, size: int) -> float:
        """The seconds of a collective in which each device sends `sent` bytes.

        It runs in rounds, and the number of devices reached doubles with each round.
        """
        return 0.0 if size == 1 else math.ceil(math.log2(size)) * self.latency + sent / self.bandwidth


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """A device. By default it is an H200."""

    memory: float = 141e9  # bytes
    memory_bandwidth: float = 4.8e12
    flops: float = 989e12  # operations per second in bfloat16


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A decoder. With `kv_heads` 1 and rows of latents it uses multi-head latent attention."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int  # columns of a query or key head
    d_v: int
    row_bytes: int  # bytes of the cache for one position in one layer
    weight_bytes: float  # bytes of weights that a step of a large batch reads


NETWORKS = (
    Network("NVLink", 450e9, 2e-6),  # fourth generation, as in one server of 8 or one rack with switches
    Network("InfiniBand", 50e9, 5e-6),  # NDR, with one port of 400 Gb/s per device
    Network("ICI", 90e9, 1e-6),  # TPU v5p, with one of its six links, as in a ring along one axis of the torus
)
MODELS = (
    Model("8B", 32, 4096, 32, 8, 128, 128, 2 * 8 * 128 * 2, 16e9),
    Model("70B", 80, 8192, 64, 8, 128, 128, 2 * 8 * 128 * 2, 141e9),
    Model("DeepSeek-V3", 61, 7168, 128, 1, 576, 512, 656, 671e9),
)
DEVICES = (8, 32, 128, 512, 1024)
BATCH, CONTEXT = 16, 131072


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One decode step of a batch. There are `by_heads` times `by_positions` devices."""

    devices: int
    by_heads: int
    by_positions: int
    fits: bool
    exchanged: int  # bytes that a device sends in all layers for attention: queries, then out and lse
    reduced: int  # bytes that a device sends in all layers for two all-reduces, which any division of weights needs
    reading: float  # seconds for reading weights and cache
    sending: float  # seconds for sending

    @property
    def tokens_a_second(self) -> float:
        return BATCH / (self.reading + self.sending)


def decode_step(model: Model, devices: int, network: Network, machine: Machine) -> Step:
    """The plan of a decode step. KV heads are divided among devices first, which needs no exchange, then positions.

    Weights are divided among all devices. Each device computes some query heads. It gets the queries of all devices
    that have other positions of the same KV heads. Of the merged result it gets only the heads that it computed
    (`own_heads`).
    """
    by_heads = math.gcd(devices, model.kv_heads)
    by_positions = devices // by_heads
    heads = model.heads // by_heads  # query heads that attend on the devices of one KV head
    cache = model.layers * model.row_bytes * CONTEXT * BATCH / devices
    held = cache + model.weight_bytes / devices
    queries = BATCH * heads * model.head_dim * 2 * (by_positions - 1) // by_positions
    # A device has at least one head. With more devices than heads, several devices have the same head.
    merged = decode_bytes(BATCH, heads, model.d_v, by_positions, own_heads=True)
    # twice per layer, each a reduce-scatter and an all-gather
    reduced = 2 * 2 * BATCH * model.hidden * 2 * (devices - 1) // devices
    layer = network.exchange(queries, by_positions) + network.exchange(merged, by_positions)
    layer += 2 * network.exchange(reduced / 2, devices) + 2 * math.ceil(math.log2(devices)) * network.latency
    return Step(
        devices=devices,
        by_heads=by_heads,
        by_positions=by_positions,
        fits=held <= machine.memory,
        exchanged=model.layers * (queries + merged),
        reduced=model.layers * reduced,
        reading=held / machine.memory_bandwidth,
        sending=model.layers * layer,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Prefill:
    """The forward pass of causal attention over one prompt in one layer. A ring of devices divides the prompt."""

    devices: int
    moved: int  # bytes that a device sends
    computing: float  # seconds
    sending: float  # seconds; only the part that exceeds `computing` causes a wait


def prefill(model: Model, tokens: int, devices: int, network: Network, machine: Machine) -> Prefill:
    """The plan of a prefill. Latents are expanded to the keys and values of each head before they are sent."""
    kv_heads = model.heads if model.kv_heads == 1 else model.kv_heads
    widths = 192 + 128 if model.kv_heads == 1 else model.head_dim + model.d_v
    moved = ring_bytes(tokens // devices, kv_heads, widths, 2, devices)
    products = model.heads * widths * tokens * tokens  # multiplications and additions of the visible half
    sending = moved / network.bandwidth + (devices - 1) * network.latency
    return Prefill(devices, moved, products / devices / machine.flops, sending)


# ---- tables


def bytes_of(count: float) -> str:
    """A number of bytes as text."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError


def milliseconds(seconds: float) -> str:
    """A time as text, in milliseconds."""
    count = 1e3 * seconds
    return f"{count:.0f} ms" if count >= 100 else f"{count:.3g} ms"


def decode_table(networks: Sequence[Network], machine: Machine) -> Iterator[str]:
    names = [network.name for network in networks]
    yield f"| model | devices | heads x positions | exchanged | all-reduced | {' | '.join(names)} |"
    yield "|" + "---|" * (5 + len(names))
    for model in MODELS:
        for devices in DEVICES:
            steps = [decode_step(model, devices, network, machine) for network in networks]
            first = steps[0]
            rates = [f"{step.tokens_a_second:.0f}" if step.fits else "does not fit" for step in steps]
            moved = f"{bytes_of(first.exchanged)} | {bytes_of(first.reduced)}"
            division = f"{first.by_heads} x {first.by_positions}"
            yield f"| {model.name} | {devices} | {division} | {moved} | {' | '.join(rates)} |"


def prefill_table(networks: Sequence[Network], machine: Machine, tokens: int = 2**20) -> Iterator[str]:
    names = [f"sending, {network.name}" for network in networks]
    yield f"| model | devices | moved | computing | {' | '.join(names)} |"
    yield "|" + "---|" * (4 + len(names))
    for model in MODELS:
        for devices in DEVICES:
            plans = [prefill(model, tokens, devices, network, machine) for network in networks]
            times = [milliseconds(plan.sending) for plan in plans]
            computing = milliseconds(plans[0].computing)
            yield f"| {model.name} | {devices} | {bytes_of(plans[0].moved)} | {computing} | {' | '.join(times)} |"


def tables(networks: Sequence[Network] = NETWORKS, machine: Machine | None = None) -> dict[str, str]:
    """The tables of docs/scaling.md. A key is the name in the marks around its table."""
    machine = Machine() if machine is None else machine
    return {
        "decode": "\n".join(decode_table(networks, machine)),
        "prefill": "\n".join(prefill_table(networks, machine)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description="Plan attention over many devices."
    )
    parser.add_argument("--bandwidth", type=float, help="GB/s that a device sends, for another network")
    parser.add_argument(
        "--latency", type=float, default=5.0, help="latency of that network in microseconds (default: 5)"
    )
    options = parser.parse_args(argv)
    networks = NETWORKS
    if options.bandwidth is not None:
        networks = (Network("network", options.bandwidth * 1e9, options.latency * 1e-6),)
    for name, table in tables(networks).items():
        print(f"{name}\n\n{table}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
