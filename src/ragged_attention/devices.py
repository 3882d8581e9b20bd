"""Facts about GPU architectures that need no driver."""

# Bytes of shared memory (LDS on AMD) that one program can have.
SHARED_MEMORY = {
    "sm_75": 64 * 1024,
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_87": 163 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_103": 227 * 1024,
    "sm_120": 99 * 1024,
    "sm_121": 99 * 1024,
    "gfx950": 160 * 1024,
}
SMALLEST = 64 * 1024


def shared_memory_of(arch: str) -> int:
    """The shared memory of one program on `arch`, or the smallest known one for an unknown architecture."""
    return SHARED_MEMORY.get(arch, SMALLEST)
