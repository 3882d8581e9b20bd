"""vLLM on TPUs: the attention layers of tpu-inference run `ragged_paged_attention` under `--attention-backend ragged`.

`register()` must be called in every process of vLLM before the command line is parsed. vLLM calls the entry points of
the group `vllm.general_plugins` early enough, and `plugin()` is meant to be such an entry point. By default, neither
function imports jax, which most processes that load plugins do not need. Tested with tpu-inference 0.32.

Models with latent attention (MLA) always use tpu-inference's own backend. `register(mla=True)`, or
`RAGGED_ATTENTION_TPU_MLA=1` in the environment, replaces the kernel that this backend calls by `ragged_mla_attention`.

A layer's cache is [P, G, 2K, D]. K of head h is at 2h, and V at 2h + 1. D is the head size rounded up to a multiple of
128. Keys and values arrive in the cache's dtype: tpu-inference quantises them before attention, and passes their
scales, by which logits and results have to be multiplied.
"""

import functools
import importlib
import importlib.metadata
import logging
import math
import os
import re
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ragged_attention.errors import InvalidInput, Unsupported

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

NAME = "ragged"  # the value of --attention-backend
PACKAGE = "tpu-inference"
TESTED = (0, 32)  # the supported minor release; any patch release of it is supported
OTHER_PATH = "ragged_attention.integrations.vllm.RaggedAttentionBackend"
LANES = 128  # columns of a TPU's tiles; XLA would copy a cache with narrower heads in each step
MLA_VARIABLE = "RAGGED_ATTENTION_TPU_MLA"
MLA_KERNEL = "mla_ragged_paged_attention"  # the kernel's name in the module of tpu-inference's layers
CACHE_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")


def register(mla: bool | None = None) -> None:
    """Make `--attention-backend ragged` known to tpu-inference and vLLM. Calling it again changes nothing.

    Args:
        mla: whether to replace the kernel of latent attention too, whichever backend is selected. This imports jax. If
            None, the kernel is replaced if the environment has `RAGGED_ATTENTION_TPU_MLA=1`.

    Raises:
        ImportError: tpu-inference or a package that it needs is missing, or its version was not tested.
        ValueError: another package has registered a backend of that name with vLLM.
    """
    host = _tested_host()
    path = f"{__name__}.RaggedPallasBackend"
    # Our plug-in for vLLM registers this name too. Under tpu-inference the name must select the backend of this module.
    registry: Any = importlib.import_module("vllm.v1.attention.backends.registry")
    member = registry.AttentionBackendEnum.__members__.get(NAME.upper())
    if member is not None and member.get_path() == OTHER_PATH:
        registry.register_backend(member, path)
    host.register_attention_backend(NAME, attention=lambda: _attention_backend(host)(), vllm_backend=path)
    if os.environ.get(MLA_VARIABLE) == "1" if mla is None else mla:
        layers = _imported("tpu_inference.layers.common.attention_interface")
        if not hasattr(layers, MLA_KERNEL):
            raise ImportError(f"expected {layers.__name__} to call {MLA_KERNEL}, got no such name in it")
        setattr(layers, MLA_KERNEL, _latent_attention)


def plugin() -> None:
    """Call `register()` as an entry point of vLLM. Without tpu-inference, this does nothing.

    If `register` fails, the error is only logged, because vLLM would not catch it and could not start.
    """
    try:
        importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return
    try:
        register()
    except Exception as error:
        logging.getLogger(__name__).warning("--attention-backend %s is not available: %s", NAME, error)


def _tested_host() -> ModuleType:
    """The module of tpu-inference that registers backends."""
    wanted = "expected tpu-inference >= {0}.{1}, < {0}.{2}".format(*TESTED, TESTED[1] + 1)
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"{wanted}, to be installed, got no such package") from None
    if tuple(map(int, re.findall(r"\d+", version)[:2])) != TESTED:
        raise ImportError(f"{wanted}, the version that ragged_attention was tested with, got {version}")
    return _imported("tpu_inference.layers.common.attention_backend")


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"expected {name} to be importable, got {type(error).__name__}: {error}") from error


def _latent_attention(*arrays: Any, **settings: Any) -> "tuple[jax.Array, jax.Array]":
    """The replacement of tpu-inference's kernel. It ignores the block sizes that are tuned for that kernel."""
    from ragged_attention.compat import tpu_inference

    for size in ("num_kv_pages_per_block", "num_queries_per_block", "decode_batch_size", "mixed_q_split"):
        settings.pop(size, None)
    return tpu_inference.mla_ragged_paged_attention(*arrays, **settings)


class _Attention:
    """The two methods of tpu-inference's `AttentionBackend`."""

    def get_kv_cache_shape(
        self, total_num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, kv_dtype: Any
    ) -> tuple[int, ...]:
        """The shape of one layer's cache for the heads of one device: [P, G, 2K, D]."""
        import jax.numpy as jnp

        if (name := jnp.dtype(kv_dtype).name) not in CACHE_DTYPES:
            raise Unsupported(
                f"expected kv_dtype to be {', '.join(CACHE_DTYPES[:-1])} or {CACHE_DTYPES[-1]}, got {name}"
            )
        return total_num_pages, page_size, 2 * num_kv_heads, -(-head_dim // LANES) * LANES

    def attention(
        self,
        kv_cache: "jax.Array",
        q: "jax.Array",
        k: "jax.Array",
        v: "jax.Array",
        md: Any,
        shared_md: Any,
        mesh: "Mesh",
        *,
        head_dim_original: int,
        sm_scale: float,
        attention_chunk_size: int | None,
        q_scale: float | None,
        k_scale: float | None,
        v_scale: float | None,
        sinks: "jax.Array | None",
        update_kv_cache: bool,
        use_causal_mask: bool,
        attn_logits_soft_cap: float | None,
        decode_query_size: int,
    ) -> "tuple[jax.Array, jax.Array]":
        """Write this step's keys and values into the cache if `update_kv_cache`, and attend over it.

        Args:
            kv_cache: [P, G, 2K, D], its heads sharded over the mesh.
            q: [T, H, D]; k, v: [T, K, D] of the cache's dtype, one row per query.
            md: its `block_tables` are i32 [S * M].
            shared_md: its `seq_lens` are i32 [S], `query_start_loc` i32 [S + 1] and `request_distribution` i32 [3],
                whose last number counts the sequences.
            mesh: its axes `ATTN_DATA` divide the batch, and its axes `ATTN_HEAD` divide the heads.
            head_dim_original: without effect, because `sm_scale` is given.
            sm_scale: factor on q . k.
            attention_chunk_size: the sliding window. The name is that of tpu-inference, but its layers pass a window,
                which its own kernels call `sliding_window`. It is not the chunk size of Llama 4.
            q_scale: queries are divided by this number and rounded to the cache's float8_e4m3fn; logits are multiplied
                by it.
            k_scale, v_scale: numbers; a cached value times its scale is the true value.
            sinks: [H], logits that join the softmax's denominator only.
            update_kv_cache: whether k and v are written; otherwise they are already in the cache.
            use_causal_mask: whether positions after a query's own position are hidden from the query.
            attn_logits_soft_cap: as in `ragged_paged_attention`.
            decode_query_size: without effect; a hint for kernels that treat decodes separately.

        Returns:
            The cache, and the result [T, H, D] in q's dtype.

        Raises:
            Unsupported: an argument is not supported.
            InvalidInput: an argument contradicts the other arguments.
        """
        del head_dim_original, decode_query_size
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        _refuse(kv_cache, k, v, md, mesh, scales, update_kv_cache)
        settings = dict(
            sm_scale=sm_scale * (1.0 if k_scale is None else k_scale), causal=use_causal_mask,
            sliding_window=attention_chunk_size, soft_cap=attn_logits_soft_cap, q_scale=q_scale,
        )  # fmt: skip
        local = functools.partial(_attend, settings, 1.0 if v_scale is None else v_scale)
        tables = shared_md.seq_lens, md.block_tables, shared_md.query_start_loc, shared_md.request_distribution
        return _over_heads(local, mesh, kv_cache, q, (k, v), update_kv_cache, tables, sinks)


def _refuse(kv_cache: Any, k: Any, v: Any, md: Any, mesh: Any, scales: dict[str, Any], update_kv_cache: bool) -> None:
    """Raise an error for unsupported arguments. `ragged_paged_attention` checks all further arguments."""
    for axis in ("dcp", "pcp"):
        if (size := mesh.shape.get(axis, 1)) > 1:
            raise Unsupported(f"expected mesh axis {axis!r} of size 1, since context is not shared out, got {size}")
    if md.block_tables is None:
        raise Unsupported("expected md.block_tables to be an array, since attention is over a cache, got None")
    if len(kv_cache.shape) != 4:
        raise InvalidInput(f"expected kv_cache of shape [P, G, 2K, D], got {list(kv_cache.shape)}")
    for name, scale in scales.items():
        if scale is not None and not isinstance(scale, int | float):
            raise TypeError(f"expected {name} to be a number or None, got {type(scale).__name__}")
    if scales["q_scale"] is not None and kv_cache.dtype != "float8_e4m3fn":
        raise Unsupported(f"expected q_scale only with a cache of float8_e4m3fn, got {kv_cache.dtype}")
    for name, new in (("k", k), ("v", v)) if update_kv_cache else ():
        if new.dtype != kv_cache.dtype:
            raise InvalidInput(f"expected {name}.dtype to be that of kv_cache, {kv_cache.dtype}, got {new.dtype}")


def _over_heads(
    local: Callable[..., Any], mesh: Any, kv_cache: Any, q: Any, new_kv: Any, is_written: bool, tables: Any, sinks: Any
) -> Any:
    """Run `local` on each device of the mesh, with the device's part of the heads and, on data axes, of the batch."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    names = importlib.import_module("tpu_inference.layers.common.sharding").ShardingAxisName
    data, heads = names.ATTN_DATA, names.ATTN_HEAD
    devices = math.prod(mesh.shape.get(axis, 1) for axis in ((heads,) if isinstance(heads, str) else heads or ()))
    if (num_kv_heads := new_kv[0].shape[1]) < devices:
        # The cache has a head for each device, so devices that share a KV head store copies of its keys and values.
        if devices % num_kv_heads:
            raise Unsupported(f"expected the number of KV heads to divide {devices} devices, got {num_kv_heads}")
        new_kv = tuple(jnp.repeat(new, devices // num_kv_heads, axis=1) for new in new_kv)
    rows, pages = PartitionSpec(data, heads, None), PartitionSpec(data, None, heads, None)
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    arguments = kv_cache, q, new_kv if is_written else None, tables, sinks
    specs = pages, rows, rows, PartitionSpec(data), PartitionSpec(heads)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(pages, rows), check_vma=False)(*arguments)


def _attend(
    settings: dict[str, Any], v_scale: float, kv_cache: Any, q: Any, new_kv: Any, tables: Any, sinks: Any
) -> Any:
    """The cache and the result of one device. If `new_kv` is None, nothing is written to the cache."""
    import jax.numpy as jnp

    from ragged_attention.jax import ragged_paged_attention

    dtype, queries, scale = q.dtype, q, settings["q_scale"]
    if scale is not None:
        largest = float(jnp.finfo(kv_cache.dtype).max)
        queries = jnp.clip(q.astype(jnp.float32) / scale, -largest, largest).astype(kv_cache.dtype)
        dtype = jnp.bfloat16  # the operation converts the queries to this dtype

    def padded(rows: Any) -> Any:
        """The rows with zeros up to the width of the cache's rows."""
        return jnp.pad(rows, ((0, 0), (0, 0), (0, kv_cache.shape[-1] - rows.shape[-1])))

    # The new rows are already divided by their scales. The arguments `k_scale` and `v_scale` would divide them again,
    # so they are 1 for int8 pages. Instead, `sm_scale` includes the scale of keys, and the result is multiplied by the
    # scale of values. `dtype` represents every value of an 8-bit cache exactly.
    kv_lens, block_tables, cu_q_lens, distribution = tables
    settings = settings | {"num_seqs": distribution[2:], "sinks": sinks}
    if kv_cache.dtype == jnp.int8:
        settings |= {"k_scale": 1.0, "v_scale": 1.0}
    arguments = padded(queries), kv_cache, kv_lens, block_tables.reshape(len(kv_lens), -1), cu_q_lens
    if new_kv is None:
        out = ragged_paged_attention(*arguments, **settings)
    else:
        new_kv = tuple(padded(rows.astype(dtype)) for rows in new_kv)
        out, kv_cache = ragged_paged_attention(*arguments, new_kv=new_kv, **settings)
    out = out[..., : q.shape[-1]]
    return kv_cache, (out if v_scale == 1.0 else out.astype(jnp.float32) * v_scale).astype(q.dtype)


def _class(name: str, doc: str, *bases: type, **members: Any) -> type:
    """A new class of this module. Its bases are known only at run time."""
    return type(name, bases, {"__module__": __name__, "__doc__": doc, **members})


@functools.cache
def _attention_backend(host: ModuleType) -> type:
    """The class that tells tpu-inference the shape of caches, and runs attention."""
    doc = "Attention by `ragged_paged_attention`, under tpu-inference's interface."
    return _class("RaggedAttentionBackend", doc, _Attention, host.AttentionBackend)


@functools.cache
def _vllm_backends(host: ModuleType) -> dict[str, type]:
    """The classes that vLLM uses. They extend those of tpu-inference, and have the name of our backend."""
    doc = "A layer's attention by the registered backend."
    impl = _class("RaggedPallasImpl", doc, host.PallasAttentionBackendImpl, attention_backend=NAME)
    getters = {"get_name": staticmethod(lambda: NAME.upper()), "get_impl_cls": staticmethod(lambda: impl)}
    doc = "The class that vLLM loads for the registered name."
    backend = _class("RaggedPallasBackend", doc, host.PallasAttentionBackend, **getters)
    return {"RaggedPallasBackend": backend, "RaggedPallasImpl": impl}


def __getattr__(name: str) -> type:
    """`RaggedAttentionBackend`, `RaggedPallasBackend` and `RaggedPallasImpl`, which extend classes of tpu-inference.

    These classes are made on first use. vLLM imports `RaggedPallasBackend` from this module, by its path.
    """
    if name == "RaggedAttentionBackend":
        return _attention_backend(_tested_host())
    if name in ("RaggedPallasBackend", "RaggedPallasImpl"):
        return _vllm_backends(importlib.import_module("tpu_inference.layers.vllm.backends.flash_attn"))[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
