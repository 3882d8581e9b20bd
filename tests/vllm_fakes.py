"""Stand-ins for the parts of vLLM on which `ragged_attention.integrations.vllm` builds.

They have the names, signatures and abstract methods of vLLM 0.33, and only enough behaviour to run a layer. If vLLM is
installed, `test_integration_vllm.py` compares them with it.
"""

import dataclasses
import enum
import importlib
import importlib.util
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any, ClassVar

import pytest
import torch

from ragged_attention.integrations import vllm as plug_in
from tests import vllm_m3_fakes, vllm_qsa_fakes, vllm_sparse_fakes
from tests import vllm_rank_fakes as ranks

OURS = (
    "_vllm_caches",
    "_vllm_rope",
    "_vllm_ranks",
    "_vllm_masks",
    "_vllm_attention",
    "_vllm_mla",
    "_vllm_sparse",
    "_vllm_bindings",
    "_vllm_m3",
)


# vllm.v1.attention.backend


@dataclasses.dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionBackend(ABC):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(1)]

    @staticmethod
    @abstractmethod
    def get_name() -> Any: ...

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> Any: ...

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> Any: ...

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []

    @classmethod
    def supports_head_size(cls, head_size):
        sizes = cls.get_supported_head_sizes()
        return not sizes or head_size in sizes

    @classmethod
    def supports_dtype(cls, dtype):
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype):
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_combination(
        cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix,
        device_capability,
    ):  # fmt: skip
        return None

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type == "decoder"

    @classmethod
    def customize_spec(cls, spec):
        return spec


def _says_no(name: str) -> classmethod:
    def method(cls):
        return False

    method.__name__ = name
    return classmethod(method)


NOT_BY_DEFAULT = (
    "is_mla", "is_sparse", "supports_sink", "supports_sliding_window", "supports_alibi_sqrt", "supports_mm_prefix",
    "supports_rswa", "supports_per_head_quant_scales", "supports_non_causal", "supports_batch_invariance",
)  # fmt: skip
for _name in NOT_BY_DEFAULT:
    setattr(AttentionBackend, _name, _says_no(_name))


class AttentionMetadata:
    pass


@dataclasses.dataclass
class CommonAttentionMetadata:
    """A step as vLLM's runner describes it, with the fields that we read or that vLLM requires."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True
    encoder_seq_lens: torch.Tensor | None = None
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    mm_req_doc_ranges: Any = None
    rswa_prefix_lens: Any = None


class AttentionMetadataBuilder(ABC):
    _cudagraph_support = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None
    supports_update_block_table = False

    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)

    def _init_reorder_batch_threshold(
        self, reorder_batch_threshold: int | None = 1, supports_spec_as_decode=False, supports_dcp_with_varlen=False
    ):
        self.reorder_batch_threshold = reorder_batch_threshold
        if self.vllm_config.parallel_config.decode_context_parallel_size > 1 and not supports_dcp_with_varlen:
            self.reorder_batch_threshold = 1

    def update_block_table(self, metadata, blk_table, slot_mapping):
        raise NotImplementedError


class AttentionImplBase(ABC):
    is_sparse: ClassVar[bool] = False
    supports_dense_mha_prefill = True
    can_return_lse_for_decode = False
    lse_base_on_e = True
    supports_pcp = False
    supports_dcp = False
    supports_mtp_with_cp_non_trivial_interleave_size = False
    need_to_return_lse_for_decode = False
    supports_quant_query_input = False
    dcp_world_size: int
    dcp_rank: int

    def __new__(cls, *args, **kwargs):
        self = super().__new__(cls)
        group = ranks.group_of_thread()
        self.dcp_world_size, self.dcp_rank = (1, 0) if group is None else (group.world_size, group.rank_in_group)
        self.need_to_return_lse_for_decode = self.dcp_world_size > 1 and self.can_return_lse_for_decode
        return self


class AttentionImpl(AttentionImplBase):
    @abstractmethod
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None,
        kv_cache_dtype="auto", logits_soft_cap=None, attn_type="decoder", kv_sharing_target_layer_name=None,
    ): ...  # fmt: skip

    @abstractmethod
    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ): ...

    def fused_output_quant_supported(self, quant_key):
        return False

    def fused_qk_norm_rope_kvcache_supported(self):
        return False

    def fused_rope_kvcache_supported(self):
        return False

    def do_qk_norm_rope_kvcache_update(
        self, layer, qkv, q_out, k_out, positions, q_weight, k_weight, rms_norm_eps, cos_sin_cache, is_neox, kv_cache,
        layer_slot_mapping,
    ):  # fmt: skip
        raise NotImplementedError

    def do_rope_and_kv_cache_update(
        self, layer, query, key, value, positions, cos_sin_cache, is_neox, kv_cache, layer_slot_mapping
    ):
        raise NotImplementedError


class MLAAttentionImpl(AttentionImplBase):
    supports_pcp = True

    @abstractmethod
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype,
        logits_soft_cap, attn_type, kv_sharing_target_layer_name, q_lora_rank, kv_lora_rank, qk_nope_head_dim,
        qk_rope_head_dim, qk_head_dim, v_head_dim, kv_b_proj, indexer=None, q_pad_num_heads=None,
    ): ...  # fmt: skip

    def forward_mha(
        self, q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale=None
    ): ...

    @abstractmethod
    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer): ...

    def fused_output_quant_supported(self, quant_key):
        return True

    def do_kv_cache_update(
        self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, skip_scale=False
    ): ...


# vllm.model_executor.layers.attention.mla_attention


class QueryLenSupport(enum.Enum):
    SINGLE_ONLY = "single_only"
    UNIFORM = "uniform"
    VARLEN = "varlen"


class MLACommonBackend(AttentionBackend):
    @staticmethod
    def get_name():
        return "TRITON_MLA"

    @staticmethod
    def get_builder_cls():
        return MLACommonMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls):
        return [320, 512, 576]

    @classmethod
    def is_mla(cls):
        return True


class MLACommonMetadataBuilder(AttentionMetadataBuilder):
    query_len_support = QueryLenSupport.SINGLE_ONLY
    reorder_batch_threshold = 1

    def __init__(
        self, kv_cache_spec, layer_names, vllm_config, device, metadata_cls=None, supports_dcp_with_varlen=False
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(
            self.reorder_batch_threshold,
            self.query_len_support != QueryLenSupport.SINGLE_ONLY,
            supports_dcp_with_varlen,
        )

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        raise NotImplementedError("the tests make the metadata of latent attention themselves")


class MLACommonImpl(MLAAttentionImpl):
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype,
        logits_soft_cap, attn_type, kv_sharing_target_layer_name, q_lora_rank, kv_lora_rank, qk_nope_head_dim,
        qk_rope_head_dim, qk_head_dim, v_head_dim, kv_b_proj, indexer=None, q_pad_num_heads=None,
    ):  # fmt: skip
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.kv_cache_dtype, self.kv_lora_rank, self.kv_b_proj = kv_cache_dtype, kv_lora_rank, kv_b_proj
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        self.supports_quant_query_input = True

    def forward_mha(self, q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale=None):
        output.fill_(7)  # the tests recognise vLLM's own path by this value


# vllm.model_executor.layers.attention.sparse_mla_attention


class SharedTopkIndicesBuffer:
    _indexer: Any = None
    _topk_indices_buffer: torch.Tensor | None = None

    def init_topk_indices_buffer(self, indexer, topk_indices_buffer):
        self._indexer, self._topk_indices_buffer = indexer, topk_indices_buffer

    @property
    def topk_indices_buffer(self):
        return self._topk_indices_buffer if self._indexer is None else self._indexer.topk_indices_buffer


# vllm.v1.attention.backends.registry


class AttentionBackendEnum(enum.Enum):
    TRITON_ATTN = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"
    CPU_ATTN = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    CPU_MLA = "vllm.v1.attention.backends.mla.cpu_mla.CPUMLABackend"
    AMX_MLA = "vllm.v1.attention.backends.mla.amx_mla.AMXMLABackend"

    def clear_override(self) -> None:
        sys.modules["vllm.v1.attention.backends.registry"].AttentionBackendEnum.overrides.pop(self, None)


class Member:
    """An added member of the enumeration.

    It cannot be pickled. vLLM pickles members by value, and a process whose enumeration lacks the value cannot load it.
    """

    def __reduce_ex__(self, protocol):
        raise ValueError("not a valid AttentionBackendEnum")


class Registry:
    """vLLM's enumeration of backends, to which members can be added, and the class paths that override members."""

    def __init__(self) -> None:
        self.members: dict[str, Any] = dict(AttentionBackendEnum.__members__)
        self.overrides: dict[Any, str] = {}

    @property
    def __members__(self) -> dict[str, Any]:
        return self.members

    def __getitem__(self, name: str) -> Any:
        return self.members[name]

    def register_backend(self, backend, class_path=None, is_mamba=False):
        assert class_path
        if isinstance(backend, str):
            if backend in self.members:
                raise ValueError(f"Backend {backend} already exists")
            backend = self.members.setdefault(backend, Member())
        self.overrides[backend] = class_path

    def path(self, name: str) -> str:
        return self.overrides.get(self.members[name], getattr(self.members[name], "value", name))


CONTENTS: dict[str, tuple[Any, ...]] = {
    "vllm.distributed.parallel_state": (ranks.get_dcp_group,),
    "vllm.v1.attention.ops.dcp": (ranks.cp_lse_ag_out_rs, ranks.dcp_a2a_lse_reduce),
    "vllm.v1.attention.backend": (
        MultipleOf, AttentionCGSupport, AttentionBackend, AttentionMetadata, CommonAttentionMetadata,
        AttentionMetadataBuilder, AttentionImplBase, AttentionImpl, MLAAttentionImpl,
    ),
    "vllm.model_executor.layers.attention.mla_attention": (
        QueryLenSupport, MLACommonBackend, MLACommonMetadataBuilder, MLACommonImpl,
    ),
    "vllm.model_executor.layers.attention.sparse_mla_attention": (SharedTopkIndicesBuffer,),
}  # fmt: skip


def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:
        ours = name.rpartition(".")[2] in OURS and name.startswith("ragged_attention.integrations.")
        if ours or name.partition(".")[0] == "vllm":
            monkeypatch.delitem(sys.modules, name)


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch, version: str = "0.33.0", device: str = "sm90") -> Iterator[Registry]:
    """A context in which a fake vLLM of a version is installed, for a device. It yields the registry of backends.

    Our classes build on the fake, so the modules that define them are removed at the end.
    """
    _without_vllm(monkeypatch)
    registry = Registry()
    contents: dict[str, dict[str, Any]] = {
        "vllm.version": {"__version__": version},
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": registry,
            "register_backend": registry.register_backend,
        },
    }
    contents |= {name: {thing.__name__: thing for thing in things} for name, things in CONTENTS.items()}
    blocks = vllm_m3_fakes.contents(AttentionBackend), vllm_qsa_fakes.contents()
    for sparse in (vllm_sparse_fakes.contents(device), *blocks):
        for name, things in sparse.items():
            contents[name] = contents.get(name, {}) | things
    for name, things in contents.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                module = types.ModuleType(path)
                module.__spec__, module.__path__ = ModuleSpec(path, None), []
                monkeypatch.setitem(sys.modules, path, module)
        vars(sys.modules[name]).update(things)
    yield registry
    importlib.import_module("ragged_attention.integrations.vllm").unregister()
    for name in OURS:
        sys.modules.pop(f"ragged_attention.integrations.{name}", None)
        vars(sys.modules["ragged_attention.integrations"]).pop(name, None)


def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that vLLM is not installed."""
    _without_vllm(monkeypatch)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else find_spec(name, *rest)
    )


@contextmanager
def unbound(monkeypatch: pytest.MonkeyPatch, name: str, device: str = "cpu") -> Iterator[Any]:
    """A context that yields a module of our plug-in with a fake vLLM for a device.

    Nothing of vLLM is replaced yet, whatever the environment variables say.
    """
    for variable in (plug_in.CPU_VARIABLE, plug_in.INDEXER_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    with installed(monkeypatch, device=device):
        yield importlib.import_module(f"ragged_attention.integrations.{name}")
