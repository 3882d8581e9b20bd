"""What an H200's multiprocessors hold, and how much of memory must be under way to keep it busy."""

ARCH = "sm_90"
MULTIPROCESSORS = 132
CLOCK = 1.75e9  # cycles in a second, at work; not measured
LATENCIES = (1000.0, 1500.0)  # cycles, of memory under load

THREADS, PROGRAMS = 2048, 32
REGISTERS, PER_WARP = 65536, 256  # of a multiprocessor; a warp's come in pieces of so many
PARTITIONS = 4  # of a multiprocessor, among which warps are divided
SHARED, RESERVED = 228 * 1024, 1024  # bytes, and what each program costs beside its own


def programs_at_once(registers: int, shared: int, num_warps: int) -> int:
    """Programs of so many registers a thread, bytes of shared memory and warps; 0 where not even one fits."""
    each = -(-registers * 32 // PER_WARP) * PER_WARP
    warps = REGISTERS // PARTITIONS // each * PARTITIONS
    return min(warps // num_warps, SHARED // (shared + RESERVED), THREADS // (32 * num_warps), PROGRAMS)


def in_flight_for(bytes_per_second: float, latency: float) -> float:
    """Little's law: the bytes that each multiprocessor must have under way for a rate at a latency in cycles."""
    return bytes_per_second / MULTIPROCESSORS / CLOCK * latency
