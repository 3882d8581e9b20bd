"""Stand-ins for the modules of tpu-inference 0.32 that our backend uses, with their signatures, and dense attention.

`python -m tests.tpu_inference_fakes` runs attention over meshes of two and of four virtual devices. It prints the
largest differences from the results of one device.
"""

import abc
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

if __name__ == "__main__":  # jax reads this variable when it looks for devices
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 4, 2, 16, 4
NO_PAGE = 12345


class AttentionBackend(abc.ABC):
    """tpu-inference's abstract class of attention backends."""

    @abc.abstractmethod
    def get_kv_cache_shape(
        self, total_num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, kv_dtype: Any
    ) -> tuple[int, ...]:
        """The shape of one device's cache."""

    @abc.abstractmethod
    def attention(
        self,
        kv_cache: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        md: Any,
        shared_md: Any,
        mesh: Mesh,
        *,
        head_dim_original: int,
        sm_scale: float,
        attention_chunk_size: int | None,
        q_scale: float | None,
        k_scale: float | None,
        v_scale: float | None,
        sinks: jax.Array | None,
        update_kv_cache: bool,
        use_causal_mask: bool,
        attn_logits_soft_cap: float | None,
        decode_query_size: int,
    ) -> tuple[jax.Array, jax.Array]:
        """The updated cache and the output of attention."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["input_positions", "block_tables", "seq_lens", "query_start_loc", "request_distribution"],
    meta_fields=["padded_num_reqs", "use_causal_mask"],
)
@dataclasses.dataclass
class AttentionMetadata:
    """The metadata of a step, with the fields that attention without context parallelism reads."""

    input_positions: Any
    block_tables: Any = None
    seq_lens: Any = None
    query_start_loc: Any = None
    request_distribution: Any = None
    padded_num_reqs: int = -1
    use_causal_mask: bool = True


class ShardingAxisName:
    """The default names of the mesh's axes."""

    ATTN_DATA = "data"
    ATTN_HEAD = "model"


class PallasAttentionBackendImpl:
    """The class of which vLLM makes an instance for each layer."""

    attention_backend = "rpa"


class PallasAttentionBackend:
    """The backend class that vLLM imports by its path."""

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @staticmethod
    def get_impl_cls() -> type:
        return PallasAttentionBackendImpl


@dataclasses.dataclass
class Member:
    """A member of vLLM's enumeration of backends."""

    path: str

    def get_path(self) -> str:
        return self.path


def registry() -> ModuleType:
    """vLLM's registry module, which has only tpu-inference's default backend."""
    module = ModuleType("vllm.v1.attention.backends.registry")

    class AttentionBackendEnum:
        __members__: ClassVar[dict[str, Member]] = {"FLASH_ATTN": Member("tpu_inference.Default")}

    def register_backend(backend: Member | str, class_path: str) -> None:
        member = (
            AttentionBackendEnum.__members__.setdefault(backend, Member("")) if isinstance(backend, str) else backend
        )
        member.path = class_path

    module.__dict__.update(AttentionBackendEnum=AttentionBackendEnum, register_backend=register_backend)
    return module


def modules() -> dict[str, ModuleType]:
    """The fake modules of tpu-inference and vLLM. `_REGISTERED_BACKENDS` has the registered backends."""
    names = (
        "tpu_inference", "tpu_inference.layers", "tpu_inference.layers.common", "tpu_inference.layers.vllm",
        "tpu_inference.layers.vllm.backends", "tpu_inference.layers.common.attention_backend",
        "tpu_inference.layers.common.sharding", "tpu_inference.layers.vllm.backends.flash_attn",
        "tpu_inference.layers.common.attention_interface",
    )  # fmt: skip
    made = {name: ModuleType(name) for name in names}
    made |= {name: ModuleType(name) for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends")}
    vllm = registry()
    made[vllm.__name__] = vllm
    known: dict[str, Member] = vllm.AttentionBackendEnum.__members__
    registered: dict[str, Callable[[], AttentionBackend]] = {}

    def register_attention_backend(
        name: str,
        *,
        attention: Callable[[], AttentionBackend],
        vllm_backend: str,
        linear_attention: Callable[[], Any] = object,
    ) -> None:
        del linear_attention
        if (path := known.setdefault(name.upper(), Member(vllm_backend)).get_path()) != vllm_backend:
            raise ValueError(f"vLLM already has an attention backend named {name.upper()}, at {path}.")
        registered[name.lower()] = attention

    backends, pallas = made[names[5]].__dict__, made[names[7]].__dict__
    backends |= {"AttentionBackend": AttentionBackend, "register_attention_backend": register_attention_backend}
    made[names[8]].__dict__["mla_ragged_paged_attention"] = None  # stands for tpu-inference's own kernel
    backends["_REGISTERED_BACKENDS"] = registered
    backends["create_attention_backend"] = lambda name: registered[name]()
    made[names[6]].__dict__["ShardingAxisName"] = ShardingAxisName
    pallas |= {"PallasAttentionBackend": PallasAttentionBackend}
    pallas |= {"PallasAttentionBackendImpl": PallasAttentionBackendImpl}
    return made


def installed(folder: Path, version: str) -> str:
    """The folder, for `sys.path`, after adding the metadata of an installed tpu-inference without its modules."""
    info = folder / f"tpu_inference-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tpu-inference\nVersion: {version}\n")
    return str(folder)


def mesh_of(data: int = 1, model: int = 1) -> Mesh:
    return Mesh(np.array(jax.devices()[: data * model]).reshape(data, model), ("data", "model"))


@dataclasses.dataclass
class Batch:
    """A step's arrays in NumPy. `cache` [P, G, 2K, D] does not have the new rows yet."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    cache: np.ndarray
    kv_lens: np.ndarray
    tables: np.ndarray
    cu_q_lens: np.ndarray
    num_seqs: int

    def metadata(self) -> AttentionMetadata:
        decodes = int(np.sum(np.diff(self.cu_q_lens)[: self.num_seqs] == 1))
        return AttentionMetadata(
            input_positions=jnp.zeros(len(self.q), jnp.int32),
            block_tables=jnp.asarray(self.tables.reshape(-1)),
            seq_lens=jnp.asarray(self.kv_lens),
            query_start_loc=jnp.asarray(self.cu_q_lens),
            request_distribution=jnp.asarray([decodes, decodes, self.num_seqs], jnp.int32),
        )


def batch_of(lens: Sequence[tuple[int, int]], seed: int = 0) -> Batch:
    """A batch of sequences (new tokens, all tokens), followed by two unused sequences and three padding rows."""
    generator = np.random.default_rng(seed)
    pages = [-(-kv_len // PAGE_SIZE) for _, kv_len in lens]
    shuffled = generator.permutation(sum(pages) + 2)  # two more pages, which no sequence uses
    tables = np.full((len(lens) + 2, max(pages) + 1), NO_PAGE, np.int32)
    for row, count in enumerate(pages):
        tables[row, :count], shuffled = shuffled[:count], shuffled[count:]
    num_tokens = sum(q_len for q_len, _ in lens) + 3

    def drawn(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(np.float32)

    return Batch(
        q=drawn(num_tokens, HEADS, HEAD_DIM),
        k=drawn(num_tokens, KV_HEADS, HEAD_DIM),
        v=drawn(num_tokens, KV_HEADS, HEAD_DIM),
        cache=drawn(sum(pages) + 2, PAGE_SIZE, 2 * KV_HEADS, HEAD_DIM),
        kv_lens=np.array([kv_len for _, kv_len in lens] + [0, 0], np.int32),
        tables=tables,
        cu_q_lens=np.cumsum([0, *[q_len for q_len, _ in lens], 0, 0]).astype(np.int32),
        num_seqs=len(lens),
    )


def written(batch: Batch) -> np.ndarray:
    """The batch's cache with the new rows written to their slots."""
    cache = batch.cache.copy()
    for seq in range(batch.num_seqs):
        first, last = batch.cu_q_lens[seq : seq + 2]
        for row in range(first, last):
            position = batch.kv_lens[seq] - (last - row)
            page = batch.tables[seq, position // PAGE_SIZE]
            cache[page, position % PAGE_SIZE, 0::2] = batch.k[row]
            cache[page, position % PAGE_SIZE, 1::2] = batch.v[row]
    return cache


def dense(
    batch: Batch,
    cache: np.ndarray,
    *,
    sm_scale: float,
    window: int | None = None,
    causal: bool = True,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Attention by softmax over whole rows of logits in float64, for one query and head at a time.

    `cache` holds dequantised values.
    """
    out = np.zeros(batch.q.shape)
    group = batch.q.shape[1] // (cache.shape[2] // 2)
    for seq in range(batch.num_seqs):
        first, last = batch.cu_q_lens[seq : seq + 2]
        kv_len = batch.kv_lens[seq]
        positions = np.arange(kv_len)
        rows = cache[batch.tables[seq, positions // PAGE_SIZE], positions % PAGE_SIZE].astype(np.float64)
        for row, head in np.ndindex(last - first, batch.q.shape[1]):
            own = kv_len - (last - first) + row
            keys, values = rows[:, head // group * 2], rows[:, head // group * 2 + 1]
            logits = keys @ batch.q[first + row, head].astype(np.float64) * sm_scale
            if soft_cap is not None:
                logits = soft_cap * np.tanh(logits / soft_cap)
            seen = positions <= own if causal else positions >= 0
            seen &= positions > own - (window or kv_len + own + 1)
            weights = np.where(seen, np.exp(logits - logits.max()), 0)
            total = weights.sum() + (0 if sinks is None else np.exp(float(sinks[head]) - logits.max()))
            out[first + row, head] = weights @ values / total
    return out


def mla_layer(interface: ModuleType, batch: Batch, arrays: Sequence[Any], mesh: Mesh, **scales: Any) -> Any:
    """Latent attention as tpu-inference's layers call their kernel, with heads sharded over a mesh."""
    md = batch.metadata()
    tables = md.seq_lens, md.block_tables, md.query_start_loc, md.request_distribution

    def local(*arrays: Any) -> Any:
        return interface.mla_ragged_paged_attention(
            *arrays, sm_scale=0.1, num_kv_pages_per_block=(3, 4, 5), num_queries_per_block=(1, 7, 9),
            decode_batch_size=4, mixed_q_split=2, transpose_kv_cache=False, **scales,
        )  # fmt: skip

    whole, heads = PartitionSpec(), PartitionSpec("model")
    specs = heads, PartitionSpec(None, "model"), *[whole] * 7
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(heads, whole), check_vma=False)
    return jax.jit(mapped, donate_argnums=4)(*arrays, *tables)


def allotted(backend: Any, batch: Batch, dtype: Any, devices: int = 1) -> jax.Array:
    """The batch's cache in an array of tpu-inference's shape: that of one device, with `devices` times the heads."""
    num_pages, page_size, rows, head_dim = batch.cache.shape
    shape = list(backend.get_kv_cache_shape(num_pages, page_size, rows // 2 // devices, head_dim, dtype))
    shape[2] *= devices
    return jnp.zeros(shape, dtype).at[..., :head_dim].set(jnp.asarray(batch.cache).astype(dtype))


def call(backend: Any, batch: Batch, cache: jax.Array, mesh: Mesh, **changes: Any) -> tuple[jax.Array, jax.Array]:
    """The cache and the output of attention, called as by tpu-inference's layers."""
    settings: dict[str, Any] = {
        "head_dim_original": HEAD_DIM, "sm_scale": HEAD_DIM**-0.5, "attention_chunk_size": None, "q_scale": None,
        "k_scale": None, "v_scale": None, "sinks": None, "update_kv_cache": True, "use_causal_mask": True,
        "attn_logits_soft_cap": None, "decode_query_size": 1,
    }  # fmt: skip
    md = changes.pop("md", None) or batch.metadata()
    new = [jnp.asarray(changes.pop(name, getattr(batch, name)), cache.dtype) for name in "kv"]
    q = jnp.asarray(batch.q, changes.pop("q_dtype", jnp.float32))

    @jax.jit
    def layer(cache: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, md: Any) -> tuple[jax.Array, jax.Array]:
        return backend.attention(cache, q, k, v, md, md, mesh, **settings | changes)

    return layer(cache, q, *new, md)


def two_halves(backend: Any, dtype: Any) -> tuple[Any, Any]:
    """The results of two batches that are sharded over the data axis, and of the same batches run separately."""
    parts = [batch_of(((3, 7), (1, 5)), seed=seed) for seed in (1, 2)]
    caches = [allotted(backend, part, dtype) for part in parts]
    tables = [part.metadata() for part in parts]
    both = Batch(**{
        field.name: np.concatenate([getattr(part, field.name) for part in parts])
        for field in dataclasses.fields(Batch) if field.name != "num_seqs"
    }, num_seqs=2)  # fmt: skip
    md = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *tables)
    got = call(backend, both, jnp.concatenate(caches), mesh_of(data=2), md=md)
    alone = [call(backend, part, cache, mesh_of()) for part, cache in zip(parts, caches, strict=True)]
    return got, [jnp.concatenate(arrays) for arrays in zip(*alone, strict=True)]


def main() -> None:
    """Print the largest differences from one device, for heads over two and four devices and batches over two."""
    from ragged_attention import set_backend
    from ragged_attention.integrations import tpu_inference

    made = modules()
    sys.modules.update(made)
    backend = tpu_inference._attention_backend(made["tpu_inference.layers.common.attention_backend"])()
    set_backend("xla")
    sinks = jnp.linspace(-1, 1, HEADS)
    found = {}

    def differ(got: Any, want: Any) -> float:
        return max(float(np.abs(np.subtract(one, other)).max()) for one, other in zip(got, want, strict=True))

    batch = batch_of(((5, 9), (1, 11), (1, 1)))
    cache = allotted(backend, batch, jnp.float32)
    want = call(backend, batch, cache, mesh_of(), sinks=sinks)
    got = jax.jit(lambda cache: call(backend, batch, cache, mesh_of(model=2), sinks=sinks))(cache)
    found["heads"] = differ(got, want)
    found["devices"] = len(got[1].sharding.device_set)

    # With four devices for two KV heads, two neighbouring devices hold copies of each head.
    pages, size, rows, columns = cache.shape
    twice = jnp.repeat(cache.reshape(pages, size, rows // 2, 2, columns), 2, axis=2).reshape(pages, size, -1, columns)
    shared, out = call(backend, batch, twice, mesh_of(model=4), sinks=sinks)
    shared = np.asarray(shared).reshape(pages, size, -1, 2, 2, columns)
    kept = [shared[:, :, :, copy].reshape(cache.shape) for copy in (0, 1)]
    found["heads kept twice"] = differ((*kept, out), (want[0], *want))
    found["batches"] = differ(*two_halves(backend, jnp.float32))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
