"""vLLM's attention by our operations: its engine schedules and keeps the cache, our kernels read and write it.

`register()` makes three names known to vLLM; the plug-in of this package calls it in every process of vLLM, so that

    vllm serve MODEL --attention-backend RAGGED            # RAGGED_MLA, or RAGGED_SPARSE_MLA, for latent attention

is all it takes. On a CPU vLLM chooses its backend itself and listens to no name; there `register(cpu=True)`, or
`RAGGED_ATTENTION_VLLM_CPU=1` in the environment, puts ours in the place of its own.

vLLM is imported when one of the classes is first asked for: `RaggedAttentionBackend`, `RaggedMLABackend`,
`RaggedSparseMLABackend`. They are built upon its abstract classes, whose interface changes between versions, so a vLLM
outside `TESTED` is refused.
"""

import functools
import importlib
import importlib.util
import logging
import os
import re
from typing import TYPE_CHECKING, Any

from ragged_attention.errors import Unsupported

if TYPE_CHECKING:
    from ragged_attention.integrations._vllm_attention import RaggedAttentionBackend
    from ragged_attention.integrations._vllm_mla import RaggedMLABackend
    from ragged_attention.integrations._vllm_sparse import RaggedSparseMLABackend

__all__ = ["TESTED", "RaggedAttentionBackend", "RaggedMLABackend", "RaggedSparseMLABackend", "plugin", "register"]

TESTED = ("0.32", "0.33")
CPU_VARIABLE = "RAGGED_ATTENTION_VLLM_CPU"

_HOMES = {
    "RaggedAttentionBackend": "ragged_attention.integrations._vllm_attention",
    "RaggedMLABackend": "ragged_attention.integrations._vllm_mla",
    "RaggedSparseMLABackend": "ragged_attention.integrations._vllm_sparse",
}
_NAMES = {
    "RAGGED": "RaggedAttentionBackend",
    "RAGGED_MLA": "RaggedMLABackend",
    "RAGGED_SPARSE_MLA": "RaggedSparseMLABackend",
}
# What vLLM's CPU platform picks by itself, and what stands in for it.
_ON_CPU = {
    "CPU_ATTN": "RaggedAttentionBackend",
    "CPU_MLA": "RaggedMLABackend",
    "AMX_MLA": "RaggedMLABackend",
}


def register(cpu: bool | None = None) -> None:
    """Make our backends known to vLLM under `RAGGED`, `RAGGED_MLA` and `RAGGED_SPARSE_MLA`; again does no harm.

    Args:
        cpu: also replace what vLLM runs on a CPU, dense attention and MLA (it offers no sparse MLA there), since its
            CPU platform ignores the name that a user selects. None asks the environment: `RAGGED_ATTENTION_VLLM_CPU=1`.

    Raises:
        ImportError: vLLM is not installed.
        Unsupported: its version is not among `TESTED`.
    """
    _check_version()
    _register(cpu)


def plugin() -> None:
    """What the entry point in `vllm.general_plugins` calls: `register()` that never stops vLLM.

    vLLM runs the plug-ins of whatever is installed, also for users who have not asked for ours, and does not catch
    what they raise. With a version that we do not know the names are registered all the same; choosing one of them
    then raises the error that says which versions would do.
    """
    try:
        _register(None)
        _check_version()
    except Exception as error:
        logging.getLogger(__name__).warning("the backends of ragged_attention cannot be used: %s", error)


def _register(cpu: bool | None) -> None:
    registry: Any = importlib.import_module("vllm.v1.attention.backends.registry")
    for name, attribute in _NAMES.items():
        if name not in registry.AttentionBackendEnum.__members__:
            registry.register_backend(name, f"{__name__}.{attribute}")
        # vLLM sends its configuration to processes that read it before they load plug-ins, and there the name that it
        # holds would not be known yet; so the name brings along what registers it.
        member = registry.AttentionBackendEnum[name]
        member.__reduce_ex__ = functools.partial(_reduced, name)
    if os.environ.get(CPU_VARIABLE) == "1" if cpu is None else cpu:
        for name, attribute in _ON_CPU.items():
            registry.register_backend(registry.AttentionBackendEnum[name], f"{__name__}.{attribute}")


def _reduced(name: str, protocol: int) -> tuple[Any, tuple[str]]:
    """How one of our names is pickled."""
    return _member, (name,)


def _member(name: str) -> Any:
    """One of our names in vLLM's enumeration, where it is put if need be."""
    _register(None)
    return importlib.import_module("vllm.v1.attention.backends.registry").AttentionBackendEnum[name]


def _check_version() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ImportError(f"expected vllm {_tested()} to be installed (pip install vllm), got none")
    version = str(importlib.import_module("vllm.version").__version__)
    release = re.match(r"\d+\.\d+", version)
    if release is None or release.group() not in TESTED:
        raise Unsupported(
            f"expected vllm {_tested()}, the versions that ragged_attention was tested with, got vllm {version}"
        )


def _tested() -> str:
    return " or ".join(TESTED)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _check_version()
    return getattr(importlib.import_module(_HOMES[name]), name)
