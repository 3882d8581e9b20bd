"""vLLM's attention by our operations. vLLM's engine schedules and owns the cache, which our kernels read and write.

`register()` makes three names known to vLLM. The plug-in of this package calls it in every process of vLLM, so one
option is enough:

    vllm serve MODEL --attention-backend RAGGED            # for latent attention RAGGED_MLA or RAGGED_SPARSE_MLA

On a CPU, vLLM ignores the option. There `register(cpu=True)`, or `RAGGED_ATTENTION_VLLM_CPU=1` in the environment,
replaces vLLM's own backends by ours.

Sparse models also need an indexer. If vLLM has none for the device, `_vllm_bindings` replaces the functions that such a
model calls by ours, when the model is loaded. If vLLM has an indexer, it is kept, unless `register(indexer=True)` or
`RAGGED_ATTENTION_VLLM_INDEXER=1` requests ours. MiniMax M3 and Qwen4 have no choice of attention backends, so their
attention to selected keys is replaced in the same way. `unregister()` undoes all of these replacements.

vLLM is imported on the first use of `RaggedAttentionBackend`, `RaggedMLABackend` or `RaggedSparseMLABackend`. These
classes extend abstract classes of vLLM, whose interface changes between versions. So versions outside `TESTED` are
refused.
"""

import dataclasses
import functools
import importlib
import importlib.util
import logging
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from ragged_attention.errors import Unsupported
from ragged_attention.integrations import _vllm_indexer

if TYPE_CHECKING:
    from ragged_attention.integrations._vllm_attention import RaggedAttentionBackend
    from ragged_attention.integrations._vllm_mla import RaggedMLABackend
    from ragged_attention.integrations._vllm_sparse import RaggedSparseMLABackend

__all__ = [
    "TESTED", "RaggedAttentionBackend", "RaggedMLABackend", "RaggedSparseMLABackend", "plugin", "register",
    "unregister",
]  # fmt: skip

TESTED = ("0.32", "0.33")
CPU_VARIABLE = "RAGGED_ATTENTION_VLLM_CPU"
INDEXER_VARIABLE = "RAGGED_ATTENTION_VLLM_INDEXER"

_MODULES = {
    "RaggedAttentionBackend": "ragged_attention.integrations._vllm_attention",
    "RaggedMLABackend": "ragged_attention.integrations._vllm_mla",
    "RaggedSparseMLABackend": "ragged_attention.integrations._vllm_sparse",
}
_NAMES = {
    "RAGGED": "RaggedAttentionBackend",
    "RAGGED_MLA": "RaggedMLABackend",
    "RAGGED_SPARSE_MLA": "RaggedSparseMLABackend",
}
# The backends that vLLM's CPU platform selects, and our backends that replace them.
_ON_CPU = {"CPU_ATTN": "RaggedAttentionBackend", "CPU_MLA": "RaggedMLABackend", "AMX_MLA": "RaggedMLABackend"}
_SPARSE_MODELS = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
_M3_MODELS = ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration")
_QSA_MODELS = ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration")
_SPARSE_ON_CPU = (*_SPARSE_MODELS, "DeepseekV4ForCausalLM", *_M3_MODELS)


@dataclasses.dataclass
class _Changed:
    """The changes that `register` has made in vLLM, so that `unregister` can undo them."""

    on_cpu: bool = False
    models: dict[str, Any] = dataclasses.field(default_factory=dict)


_changed = _Changed()


def register(cpu: bool | None = None, indexer: bool | None = None) -> None:
    """Make `RAGGED`, `RAGGED_MLA` and `RAGGED_SPARSE_MLA` known to vLLM. Calling it again does no harm.

    Args:
        cpu: whether to replace vLLM's own backends on a CPU. vLLM's CPU platform ignores the backend that a user
            selects. The replaced backends are those of dense attention and of MLA. Sparse MLA, which that platform
            refuses, is enabled too. If None, `RAGGED_ATTENTION_VLLM_CPU` decides.
        indexer: whether sparse models use our indexer, and MiniMax M3 and Qwen4 also our attention, even if vLLM has
            its own for the device. If None, `RAGGED_ATTENTION_VLLM_INDEXER` decides.

    Raises:
        ImportError: vLLM is not installed.
        Unsupported: the version of vLLM is not in `TESTED`.
    """
    _check_version()
    _register(cpu, indexer)


def unregister() -> None:
    """Undo the replacements that `register` made in vLLM, for models that are loaded from now on.

    The three names stay registered, and still select our backends.
    """
    bindings = sys.modules.get("ragged_attention.integrations._vllm_bindings")
    if bindings is not None:
        bindings.unbind()
    if _changed.on_cpu:
        registry: Any = importlib.import_module("vllm.v1.attention.backends.registry")
        for name in _ON_CPU:
            registry.AttentionBackendEnum[name].clear_override()
    if _changed.models:
        importlib.import_module("vllm.model_executor.models.registry").ModelRegistry.models.update(_changed.models)
        _changed.models.clear()
    _changed.on_cpu = _vllm_indexer.asked = False


def plugin() -> None:
    """Call `register()` as the entry point in `vllm.general_plugins`. It never raises an exception.

    vLLM runs the plug-ins of all installed packages, even if the user has not requested ours, and does not catch their
    exceptions. The names are also registered with an untested version of vLLM. Selecting one of them then raises an
    error that lists the supported versions.
    """
    try:
        _register(None, None)
        _check_version()
    except Exception as error:
        logging.getLogger(__name__).warning("the backends of ragged_attention cannot be used: %s", error)


def _register(cpu: bool | None, indexer: bool | None) -> None:
    registry: Any = importlib.import_module("vllm.v1.attention.backends.registry")
    for name, attribute in _NAMES.items():
        if name not in registry.AttentionBackendEnum.__members__:
            registry.register_backend(name, f"{__name__}.{attribute}")
        # Some processes of vLLM unpickle its configuration before they load plug-ins. The name in it is not registered
        # at that time, so unpickling a name registers it.
        registry.AttentionBackendEnum[name].__reduce_ex__ = functools.partial(_reduced, name)
    on_cpu = os.environ.get(CPU_VARIABLE) == "1" if cpu is None else cpu
    if on_cpu:
        for name, attribute in _ON_CPU.items():
            registry.register_backend(registry.AttentionBackendEnum[name], f"{__name__}.{attribute}")
    _changed.on_cpu |= on_cpu
    if indexer is not None or os.environ.get(INDEXER_VARIABLE) == "1":
        _vllm_indexer.asked = indexer is not False
    platform: Any = importlib.import_module("vllm.platforms").current_platform
    if platform.is_cpu() and not on_cpu:
        return
    if platform.is_cpu():
        importlib.import_module("ragged_attention.integrations._vllm_bindings").bind_platform()
    if _vllm_indexer.asked or _vllm_indexer.lacking(platform):
        _lead_models_to_bindings(_SPARSE_ON_CPU if platform.is_cpu() else _SPARSE_MODELS)
    if _vllm_indexer.asked and platform.is_cuda():
        _lead_models_to_bindings((*_M3_MODELS, *_QSA_MODELS))


def _lead_models_to_bindings(architectures: tuple[str, ...]) -> None:
    """Let vLLM's registry load models from `_vllm_bindings`, which first puts our functions in place of vLLM's."""
    registry: Any = importlib.import_module("vllm.model_executor.models.registry").ModelRegistry
    for architecture in architectures:
        if architecture not in _changed.models:
            _changed.models[architecture] = registry.models[architecture]
            registry.register_model(architecture, f"ragged_attention.integrations._vllm_bindings:{architecture}")


def _reduced(name: str, protocol: int) -> tuple[Any, tuple[str]]:
    """The pickled form of one of our names."""
    return _member, (name,)


def _member(name: str) -> Any:
    """The member of vLLM's enumeration for one of our names. The names are registered if necessary."""
    _register(None, None)
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
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _check_version()
    return getattr(importlib.import_module(_MODULES[name]), name)
