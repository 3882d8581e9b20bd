"""Arguments of calls that are divided among several devices, for tests in torch and in jax."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ragged_attention.calls import CALLS
from ragged_attention.calls.sharding import Heads, KvShard, heads_of_fields
from ragged_attention.reference.quantize_mla_cache import quantize_mla_cache
from ragged_attention.tools.samples import BlocksSample, LatentSample, Sample, VarlenSample, sample_of

PAGE = 4
LENS = (41, 3, 0, 18)  # sequence lengths; some ranks hold no keys of some sequences
HEADS, KV_HEADS, WIDTH = 12, 4, 16
TRAFFIC = {
    "tokens": 32,
    "heads": 12,
    "kv_heads": 4,
    "width": 32,
    "piece": 64,
}  # sizes of the calls whose traffic is counted


def shards_of(size: int) -> list[KvShard]:
    """Sharding rules that deal out pages, pairs of pages, positions, three positions and four pages in turn."""
    return [KvShard(size, interleave) for interleave in (PAGE, 2 * PAGE, 1, 3, 4 * PAGE)]


def divisible_arguments(operation: str, size: int) -> dict[str, Any]:
    """An operation's arguments as NumPy arrays, whose heads can be divided among `size` ranks."""
    small: dict[str, Any] = {"dtype": "float32", "num_q_heads": 4 * size, "max_num_seqs": 3, "num_tokens": 6}
    kind = type(sample_of(operation))
    if kind is LatentSample:
        fp8 = operation in ("quantize_mla_cache", "dequantize_mla_cache")
        # With fewer heads, tokens share a block of rows or leave it partly empty, which may change the rounding.
        small |= {"num_q_heads": 32 * size, "max_len": 8, "page_size": PAGE, "topk": 5, "sinks": True}
        small |= {"cache_format": "fp8_v32"} if fp8 else {"cache_format": "plain", "d_qk": 32, "d_v": 16}
        small |= {"rotary": 8, "return_max_logits": True}
    elif kind is Sample:
        small |= {"num_kv_heads": size, "head_dim": 16, "max_len": 8, "page_size": PAGE, "return_lse": True}
        small |= {"return_max_logits": True}
        small |= {"sinks": True, "alibi_slopes": True, "relative_bias": True, "selected": 3, "block_size": 2}
    elif kind is VarlenSample:
        small |= {"num_kv_heads": size, "head_dim": 16, "num_tokens": 24, "sinks": True, "return_max_logits": True}
        small |= {"alibi_slopes": True, "relative_bias": True, "selected": 3, "block_size": 2}
    else:
        small |= {"num_kv_heads": size, "block_size": 2} if kind is BlocksSample else {}
        small |= {"cache_dtype": "float32", "head_dim": 16, "page_size": PAGE, "max_len": 8, "top_k": 3}
    record, random = CALLS[operation], np.random.default_rng(0)
    arguments = dict.fromkeys(record.KINDS) | dict(record.DEFAULTS) | sample_of(operation, **small).arguments(operation)
    arguments = {name: _filled(name, value, operation, random) for name, value in arguments.items()}
    if "k_scale" in arguments:
        arguments |= {name: random.random(size).astype(np.float32) + 0.5 for name in ("k_scale", "v_scale")}
    return arguments


def random_ranges(tokens: int, longest: int) -> Any:
    """Random `key_ranges` of `tokens` queries, with gaps, overlaps and empty ranges."""
    return np.random.default_rng(6).integers(-1, longest + 2, (tokens, 3, 2), np.int32)


def writing_calls() -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Calls that write a cache: the operation, the arguments, and whether each rank has the whole cache.

    Each call is yielded with one KV head, so that each rank has the whole cache. A call that has two KV heads, which
    two ranks can divide, is also yielded with both.
    """
    from tests.test_features import CALLS_WITH, SCALED_PAGES, TABLES, floats  # needs pytest

    latents = quantize_mla_cache(floats(6, 4, 1, 576), "fp8_v32")
    calls = CALLS_WITH | {
        "ragged_paged_attention": [
            *CALLS_WITH["ragged_paged_attention"],
            TABLES | SCALED_PAGES | {"q": floats(5, 4, 16), "new_kv": (floats(5, 2, 16), floats(5, 2, 16))},
        ],
        "ragged_mla_attention": [
            *CALLS_WITH["ragged_mla_attention"],
            TABLES | {"q": floats(5, 4, 576), "kv_cache": latents, "new_kv": floats(5, 576), "sm_scale": 0.05},
        ],
    }  # fmt: skip
    for operation, arguments in ((name, each) for name, group in calls.items() for each in group):
        record = CALLS[operation]
        if record.WRITES or "new_kv" in arguments:
            alone = {name: _one_kv_head(operation, name, value) for name, value in arguments.items()}
            cut = any(one is not arguments[name] for name, one in alone.items())
            if cut:
                yield operation, arguments, False
            yield operation, alone, True


def _one_kv_head(operation: str, name: str, value: Any) -> Any:
    """The part of an argument that belongs to the first KV head."""
    if isinstance(value, tuple):
        return tuple(_one_kv_head(operation, f"{name}[]", part) for part in value)
    heads = heads_of_fields(CALLS[operation]).get(name.removesuffix("[]"))
    if name.endswith("_scale_pages"):
        heads = Heads(2 - value.ndim, "K")
    if heads is None or heads.letter != "K" or np.ndim(value) < -heads.axis:
        return value
    count = 2 if name == "kv_pages" else 1  # keys and values are interleaved
    size = value.shape[heads.axis]
    return value if size == count or value.ndim == 2 else np.take(value, np.arange(count), heads.axis)


def _filled(name: str, array: Any, operation: str, random: np.random.Generator) -> Any:
    """An array of a sample's shape and dtype whose values are plausible for an argument of this name."""
    if isinstance(array, tuple):
        return tuple(_filled(name, part, operation, random) for part in array)
    if not hasattr(array, "shape"):
        return array
    dtype, shape = np.dtype(array.dtype), array.shape
    if name.startswith("cu_"):
        return np.arange(shape[0], dtype=dtype) * (8 if operation.startswith("varlen") else 2)
    if name in ("kv_lens", "lengths", "length", "lens", "stops"):
        return random.integers(2, 8, shape, dtype)
    if name == "starts":
        return np.zeros(shape, dtype)
    if name == "page_indices":
        return np.arange(np.prod(shape), dtype=dtype).reshape(shape)
    if name == "slot_mapping":
        return random.permutation(shape[0]).astype(dtype)
    if dtype == np.uint8:
        return random.integers(0, 100, shape, dtype)
    if dtype.kind == "i":
        return random.integers(-1, 8, shape, dtype)
    return random.normal(size=shape).astype(dtype) + (3 if name == "lse" else 0)
