"""The resources of an H200's multiprocessors, and the bytes in flight that keep its memory busy."""

ARCH = "sm_90"
MULTIPROCESSORS = 132
CLOCK = 1.75e9  # cycles per second under load; not measured
LATENCIES = (1000.0, 1500.0)  # latencies of memory under load, in cycles

THREADS, PROGRAMS = 2048, 32  # the most resident threads and programs of a multiprocessor
# registers of a multiprocessor, and how many are allocated to a warp at a time
REGISTERS, PER_WARP = 65536, 256
PARTITIONS = 4  # partitions of a multiprocessor, which divide its registers and warps equally
SHARED, RESERVED = (
    228 * 1024,
    1024,
)  # bytes of shared memory per multiprocessor, and the bytes that the system reserves per program


def programs_at_once(registers: int, shared: int, num_warps: int) -> int:
    """The number of programs that fit a multiprocessor, which may be 0.

    The arguments are a program's registers per thread, bytes of shared memory and warps.
    """
    each = -(-registers * 32 // PER_WARP) * PER_WARP
    warps = REGISTERS // PARTITIONS // each * PARTITIONS
    return min(warps // num_warps, SHARED // (shared + RESERVED), THREADS // (32 * num_warps), PROGRAMS)


def in_flight_for(bytes_per_second: float, latency: float) -> float:
    """Little's law: the bytes that each multiprocessor must have in flight for this rate and latency (in cycles)."""
    return bytes_per_second / MULTIPROCESSORS / CLOCK * latency
