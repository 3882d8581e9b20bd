"""The GPUs that commands take by name, and which devices have been verified."""

from ragged_attention.calls import Device
from ragged_attention.calls.base import SHARED_MEMORY
from ragged_attention.tools.arguments import nearest

# GPUs that commands take by name: the architecture, the name that frameworks have for the device, and the number of
# multiprocessors. The first GPU of an architecture stands for all GPUs of that architecture.
GPUS = {
    "a100": ("sm_80", "NVIDIA A100", 108),
    "rtx3090": ("sm_86", "NVIDIA GeForce RTX 3090", 82),
    "a10": ("sm_86", "NVIDIA A10", 72),
    "a40": ("sm_86", "NVIDIA A40", 84),
    "rtxa6000": ("sm_86", "NVIDIA RTX A6000", 84),
    "rtx4090": ("sm_89", "NVIDIA GeForce RTX 4090", 128),
    "l4": ("sm_89", "NVIDIA L4", 58),
    "l40s": ("sm_89", "NVIDIA L40S", 142),
    "rtx6000ada": ("sm_89", "NVIDIA RTX 6000 Ada Generation", 142),
    "h100": ("sm_90", "NVIDIA H100", 132),
    "h200": ("sm_90", "NVIDIA H200", 132),
    "gh200": ("sm_90", "NVIDIA GH200", 132),
    "h20": ("sm_90", "NVIDIA H20", 78),
    "b200": ("sm_100", "NVIDIA B200", 148),
    "b300": ("sm_103", "NVIDIA B300", 148),
    "rtxpro6000": ("sm_120", "NVIDIA RTX PRO 6000", 188),
    "rtx5090": ("sm_120", "NVIDIA GeForce RTX 5090", 170),
    "gb10": ("sm_121", "NVIDIA GB10", 48),
    "mi300x": ("gfx942", "AMD Instinct MI300X", 304),
    "mi325x": ("gfx942", "AMD Instinct MI325X", 304),
    "mi355x": ("gfx950", "AMD Instinct MI355X", 256),
}
# GPUs that are too old for the Triton and CUDA kernels, by name.
OLD_GPUS = {"t4": "sm_75", "rtx2080ti": "sm_75", "v100": "sm_70", "p100": "sm_60"}
# The devices on which kernels have passed checks. tests/test_cli.py compares them with benchmarks/results/.
VERIFIED = ("NVIDIA H200",)
NEVER = "not yet verified on hardware"
STATUS = "What has run on which hardware: docs/status.md"
ARCHITECTURES = tuple(dict.fromkeys((*(arch for arch, *_ in GPUS.values()), *SHARED_MEMORY)))  # other names for GPUs


def multiprocessors_of(arch: str) -> int:
    """The number of multiprocessors of the first known GPU of an architecture; 1 if none is known."""
    return next((count for each, _, count in GPUS.values() if each == arch), 1)


def why_too_old(name: str | None) -> str | None:
    """The reason to refuse a GPU by its name if it is too old for the kernels, or None."""
    arch = OLD_GPUS.get((name or "").lower())
    expected = f"expected a GPU of sm_80 or newer, got {name!r}, which is {arch}"
    return arch and f"{expected}: the kernels do not support sm_75 and older GPUs"


def unknown_device(here: str, got: str) -> str:
    """The error message for an unknown device; `here` describes the devices of this machine."""
    known = (*GPUS, *ARCHITECTURES, "tpu")
    expected = f"expected device to be {here} one that need not be here, got {got}{nearest(got.lower(), known)}"
    return f"{expected} (such devices are {', '.join(known)})"


def verification_of(device: Device) -> str:
    """One line: whether kernels have passed checks on a device, and which document lists such devices."""
    archs = {arch for arch, full_name, _ in GPUS.values() if full_name in VERIFIED}
    if device.name in VERIFIED or (not device.name and device.arch in archs):
        return STATUS
    what = "TPUs are" if device.platform == "tpu" else f"{device.name or device.arch} is"
    return f"{what} {NEVER}. {STATUS}"
