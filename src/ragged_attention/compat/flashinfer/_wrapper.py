"""The base of the wrappers over a paged cache of keys and values: their state, and a run over the planned batch."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec

import torch

from ragged_attention.compat.flashinfer._arguments import (
    columns,
    expect_layout,
    expect_linear_scales,
    expect_planned,
    result_dtype,
    torch_dtype,
    with_lse,
)
from ragged_attention.compat.flashinfer._attention import Attention
from ragged_attention.compat.flashinfer._masks import Mask
from ragged_attention.compat.flashinfer._tables import Tables, block_table, expect_indptr, sequence_lens
from ragged_attention.compat.flashinfer.page import pages_of, scale_pages_of
from ragged_attention.errors import InvalidInput

Arguments = ParamSpec("Arguments")


class Dtypes(NamedTuple):
    """The dtypes of a plan."""

    q: torch.dtype
    kv: torch.dtype
    out: torch.dtype


def planned_dtypes(q_data_type: Any, kv_data_type: Any, o_data_type: Any) -> Dtypes:
    """The dtypes of queries, cache and results. By default, the cache has the dtype of the queries."""
    q = torch_dtype("q_data_type", q_data_type)
    kv = q if kv_data_type is None else torch_dtype("kv_data_type", kv_data_type)
    return Dtypes(q, kv, result_dtype(o_data_type, q))


def without_lse(method: Callable[Arguments, Any]) -> Callable[Arguments, Any]:
    """The method `forward` of a wrapper: `method`, which is its `forward_return_lse`, without lse in the result."""

    @functools.wraps(method)
    def forward(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Any:
        return method(*args, **kwargs)[0]

    forward.__name__, forward.__qualname__ = "forward", method.__qualname__.replace(method.__name__, "forward")
    forward.__doc__ = "`run` with settings that replace those of the plan; deprecated by FlashInfer."
    return forward


class Planned:
    """The state of a wrapper. Attributes that engines read, such as `_window_left`, have FlashInfer's names."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str, use_cuda_graph: bool) -> None:
        expect_layout(kv_layout)
        if not isinstance(float_workspace_buffer, torch.Tensor):
            got = type(float_workspace_buffer).__name__
            raise TypeError(f"expected float_workspace_buffer to be a torch.Tensor, got {got}")
        self._float_workspace_buffer = float_workspace_buffer
        self.device = float_workspace_buffer.device
        self._kv_layout = kv_layout
        self._use_cuda_graph = use_cuda_graph
        self._is_planned = False
        self._mask: Mask | None = None
        self._is_batch_invariant = False
        self._causal = False
        self._pos_encoding_mode = "NONE"
        self._window_left = -1
        self._logits_soft_cap: float | None = None
        self._sm_scale: float | None = None
        self._rope_scale: float | None = None
        self._rope_theta: float | None = None
        self._dtypes = Dtypes(torch.float16, torch.float16, torch.float16)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether later plans write into the first plan's tensors, which a captured graph reads."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None
    ) -> None:
        """Replace the workspace buffer, which no kernel uses."""
        del int_workspace_buffer
        self._float_workspace_buffer = float_workspace_buffer

    def _override(self, **settings: Any) -> None:
        """Set attributes as the deprecated functions `forward` and `forward_return_lse` do."""
        for name, value in settings.items():
            setattr(self, f"_{name}", value)

    def _expect_plan(self) -> None:
        if not self._is_planned:
            raise RuntimeError(f"expected plan() before run() of {type(self).__name__}")

    def _moved(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """An index tensor of any integer dtype as int32 on the wrapper's device."""
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"expected {name} to be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.is_floating_point() or tensor.dtype == torch.bool:
            raise InvalidInput(f"expected {name}.dtype to be an integer one, got {tensor.dtype}")
        return tensor.to(self.device, torch.int32)

    def _attention(self, **arguments: Any) -> Attention:
        """The planned attention with the arguments of a run."""
        return Attention(
            self._dtypes.out, self._sm_scale, logits_soft_cap=self._logits_soft_cap,
            pos_encoding_mode=self._pos_encoding_mode, mask=self._mask, is_batch_invariant=self._is_batch_invariant,
            **arguments,
        )  # fmt: skip

    def _expect_rows(self, q: torch.Tensor, num_q_tokens: int, num_heads: int, head_dim: int) -> None:
        expect_planned(
            **{
                "q.shape": (list(q.shape), [num_q_tokens, num_heads, head_dim]),
                "q.dtype": (q.dtype, self._dtypes.q),
            }
        )


class PagedWrapper(Planned):
    """The base of `BatchDecodeWithPagedKVCacheWrapper` and `BatchPrefillWithPagedKVCacheWrapper`."""

    _PREFIX = ""  # the prefix of the row pointers' argument names
    _backend: str
    _tables: Tables | None = None
    _sizes: tuple[int, int, int, int, int]  # H, K, D, D_v and the page size

    def _tables_of(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        page_size: int,
        block_tables: torch.Tensor | None,
        seq_lens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The lengths and the block table of a plan."""
        num_seqs = len(last_page_len)
        expect_indptr(f"{self._PREFIX}indptr", indptr, num_seqs)
        if page_size < 1:
            raise InvalidInput(f"expected page_size >= 1, got {page_size}")
        if seq_lens is None:
            lens = sequence_lens(indptr, last_page_len, page_size)
        else:
            lens = seq_lens.flatten()
            if len(lens) != num_seqs:
                raise InvalidInput(f"expected seq_lens to have batch_size={num_seqs} entries, got {len(lens)}")
        if block_tables is None:
            table = block_table(indptr, self._moved(f"{self._PREFIX}indices", indices))
        else:
            table = self._moved("block_tables", block_tables)
            if table.dim() != 2 or table.shape[0] != num_seqs:
                got = list(table.shape)
                raise InvalidInput(f"expected block_tables.shape to be [{num_seqs}, max_num_blocks_per_seq], got {got}")
        return self._moved("seq_lens", lens), table

    def _run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        attention: Attention,
        lse: torch.Tensor | None,
        return_lse: bool,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        *,
        kv_cache_sf: Any,
    ) -> Any:
        """Attention over the planned pages."""
        expect_linear_scales(self._backend, kv_cache_sf)
        tables = self._tables
        assert tables is not None
        num_qo_heads, num_kv_heads, head_dim, head_dim_vo, page_size = self._sizes
        k_pages, v_pages = pages_of(paged_kv_cache, self._kv_layout)
        self._expect_rows(q, tables.num_q_tokens, num_qo_heads, head_dim)
        expect_planned(
            **{
                "page_size of paged_kv_cache": (k_pages.shape[1], page_size),
                "num_kv_heads of paged_kv_cache": (k_pages.shape[2], num_kv_heads),
                "head_dim of paged_kv_cache[1]": (columns(v_pages), head_dim_vo),
                "dtype of paged_kv_cache": (k_pages.dtype, self._dtypes.kv),
            }
        )
        scale_pages = scale_pages_of(kv_cache_sf, self._kv_layout)
        out, natural = attention.over_pages(q, k_pages, v_pages, tables, scale_pages=scale_pages)
        return with_lse(out, natural, attention.sinks, lse, return_lse, lse_base, lse_layout)
