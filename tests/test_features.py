"""FEATURES: a backend refuses an optional argument that it does not list, by name, and honours one that it lists.

For each operation, `CALLS_WITH` has calls on NumPy arrays that together set all its optional arguments. Add every new
argument there.
"""

import itertools
import types
from typing import Any

import numpy as np
import pytest

from ragged_attention import dispatch
from ragged_attention.calls import CALLS, Call, Device
from ragged_attention.errors import BackendMissing, InvalidInput
from ragged_attention.protocols import complete
from ragged_attention.reference.dequantize_mla_cache import dequantize_mla_cache
from ragged_attention.reference.make_decode_schedule import make_decode_schedule
from ragged_attention.reference.quantize_mla_cache import quantize_mla_cache
from ragged_attention.tools.samples import device_of, sample_of
from tests.arrays import ints

RNG = np.random.default_rng(0)
SAME = {
    "deterministic",
    "cache_format",
    "cache_layout",
    "format",
}  # arguments that do not change the results


def floats(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


# Two sequences with 3 and 2 queries, 4 query heads, 2 KV heads of width 16, and pages of 4 tokens.
TABLES: dict[str, Any] = {"page_indices": ints([1, 3, 0], [2, 5, 4]), "kv_lens": ints(9, 7), "cu_q_lens": ints(0, 3, 5)}
SCALES = {"k_scale": 0.5, "v_scale": 2.0}
SHARED = {"sm_scale": 0.3, "soft_cap": 1.5}
PAGES = {"q": floats(5, 4, 16), "k_pages": floats(2, 6, 4, 16), "v_pages": floats(2, 6, 4, 16)}
# A scale for each token and head of int8 keys and values.
SCALED_PAGES = {
    "kv_pages": RNG.integers(-99, 99, (6, 4, 4, 16)).astype(np.int8), "k_scale_pages": abs(floats(6, 4, 2, 1)),
    "v_scale_pages": abs(floats(6, 4, 2, 1)),
}  # fmt: skip
SLOPES = np.array([0.5, 0.25, -0.25, 0.125], np.float32)
BIAS = np.cos(np.arange(12, dtype=np.float32)).reshape(4, 3)
VARLEN = {
    "q": floats(5, 4, 16), "k": floats(8, 2, 16), "v": floats(8, 2, 16), "cu_q_lens": ints(0, 3, 5),
    "cu_kv_lens": ints(0, 5, 8), "max_q_len": 3, "max_kv_len": 5, "causal": True, "sliding_window": 2,
    "sinks": floats(4), "alibi_slopes": SLOPES, "relative_bias": BIAS, "deterministic": True,
}  # fmt: skip
KEY_RANGES = ints([[0, 2], [3, 4]], [[0, 1], [1, 3]], [[2, 5], [0, 0]], [[0, 3], [1, 2]], [[0, 9], [-4, 0]])
SELECTED = {  # lists for two KV heads with some invalid entries; every query sees a key in each list
    "selected": ints([[1, -1], [0, 1]], [[1, 1], [9, 1]], [[-1, 2], [1, 0]], [[0, 1], [-1, 0]], [[1, -7], [0, 0]]),
    "block_size": 2,
}
BY_RANGES = {name: value for name, value in VARLEN.items() if name not in ("causal", "sliding_window")}
BY_RANGES["key_ranges"] = KEY_RANGES
OUT = {"d_out": floats(5, 4, 16), "out": floats(5, 4, 16), "lse": floats(5, 4) + 2, "d_lse": floats(5, 4)}
# Latent rows of the default width, for which the default of d_v is 512.
LATENT = {"sm_scale": 0.05, "sinks": floats(4), "d_v": 256}
SPARSE = {
    "q": floats(3, 4, 576), "kv": floats(3, 4, 1, 576), "indices": ints([[0, 5, 7]], [[1, 9, 2]], [[4, -1, 3]]),
    "topk_lens": ints(1, 3, 2), "deterministic": True,
}  # fmt: skip
DECODE = {"q": floats(2, 2, 4, 576), "kv_cache": floats(4, 4, 1, 576), "cache_format": "plain", "cache_layout": "token"}
SECOND = {"extra_kv_cache": floats(2, 4, 1, 576), "extra_indices": ints([[1, 6], [2, 3]], [[7, 0], [5, 4]])}
LISTS = {"indices": ints([[0, 5, 7], [1, 9, 2]], [[4, 11, 3], [8, 1, 6]]), "topk_lens": ints(2, 3)}
SCHEDULE = tuple(make_decode_schedule(ints(2, 3), sparse=True, num_parts=1))
# The indexer: three tokens with 2 heads of 16, packed keys with scales, or the pages of TABLES.
INDEX = {"q": floats(5, 2, 16), "weights": floats(5, 2)}
RANGES = {
    "keys": floats(9, 16), "key_scale": floats(9) ** 2 * 10 + 0.1, "starts": ints(0, 1, 2, 3, 4),
    "stops": ints(3, 5, 7, 8, 9), "relative": True, "max_keys": 2,
}  # fmt: skip
LISTED_KEYS = {
    "keys": RANGES["keys"], "key_scale": RANGES["key_scale"],
    "indices": ints([0, 3, -1], [8, 1, 2], [-1, -1, 4], [7, 7, 6], [5, 9, 0]),
}  # fmt: skip
TARGET = {"q": floats(5, 2, 16), "keys": floats(9, 16), "lse": floats(5, 2) + 2}
INDEX_PAGES = TABLES | {"keys": floats(6, 4, 16), "num_seqs": ints(1), "ratio": 2}
BLOCK_RANGES = {name: value for name, value in RANGES.items() if name not in ("keys", "key_scale", "relative")}
BLOCK_KEYS = {"q": floats(5, 4, 16), "block_size": 1, "top_k": 2}
BLOCKS = (
    BLOCK_KEYS | BLOCK_RANGES | {"keys": floats(9, 2, 16), "key_scale": floats(9, 2) ** 2 * 10 + 0.1, "top_k": 1},
    BLOCK_KEYS | TABLES | {"keys": floats(6, 4, 2, 16), "num_seqs": ints(1), "init_blocks": 1, "local_blocks": 1},
)
BYTES = quantize_mla_cache(floats(2, 3, 1, 576), "fp8_v32", power_of_two_scales=False)

ROTARY = {"positions": ints(3, 0, 2, 8, 1), "cos_sin": floats(9, 8)}

CALLS_WITH: dict[str, list[dict[str, Any]]] = {
    "ragged_paged_attention": [
        TABLES | SHARED | SCALES | {
            "q": floats(5, 4, 16), "kv_pages": floats(6, 4, 4, 16), "num_seqs": ints(1), "causal": False,
            "sliding_window": 4, "sinks": floats(4), "return_lse": True,
            "new_kv": (floats(5, 2, 16), floats(5, 2, 16)), "out_dtype": "float16",
        },
        # A draft mask replaces `causal` among the new tokens.
        TABLES | {"q": floats(5, 4, 16), "kv_pages": floats(6, 4, 4, 16), "draft_mask": RNG.random((5, 3)) < 0.5,
                  "max_q_len": 3, "alibi_slopes": SLOPES,
                  "relative_bias": BIAS},
        TABLES | {"q": floats(5, 4, 16), "kv_pages": floats(6, 4, 4, 16), "key_ranges": KEY_RANGES, "sinks": floats(4),
                  "return_max_logits": True},
        TABLES | SELECTED | {"q": floats(5, 4, 16), "kv_pages": floats(6, 4, 4, 16), "sinks": floats(4)},
        TABLES | {"q": floats(5, 4, 16), **SCALED_PAGES},
    ],
    "write_kv_pages": [
        TABLES | SCALES | {
            "k": floats(5, 2, 16), "v": floats(5, 2, 16), "kv_pages": floats(6, 4, 4, 16), "num_seqs": ints(1),
        },
        SCALES | {
            "k": floats(5, 2, 16), "v": floats(5, 2, 16), "kv_pages": floats(6, 4, 4, 16),
            "slot_mapping": ints(3, -1, 7, 0, 21),
        },
        {"k": floats(5, 2, 16), "v": floats(5, 2, 16), "slot_mapping": ints(3, -1, 7, 0, 21), **SCALED_PAGES},
    ],
    "norm_rope_write": [
        TABLES | SCALES | ROTARY | {
            "q": floats(5, 4, 16), "k": floats(5, 2, 16), "v": floats(5, 2, 16), "kv_pages": floats(6, 4, 4, 16),
            "num_seqs": ints(1), "q_weight": floats(16), "k_weight": floats(16), "eps": 0.5, "interleaved": True,
        },
        SCALES | ROTARY | {
            "q": floats(5, 4, 16), "k": floats(5, 2, 16), "v": floats(5, 2, 16), "kv_pages": floats(6, 4, 4, 16),
            "slot_mapping": ints(3, -1, 7, 0, 21),
        },
    ],
    "merge_attention_states": [
        {"outs": floats(2, 3, 4, 16), "lses": floats(2, 3, 4), "sinks": floats(4), "out_dtype": "float16"},
    ],
    "paged_attention": [PAGES | SHARED | {"q": floats(2, 4, 16), "lengths": ints(9, 7), **TABLES}],
    "prefill_attention": [
        PAGES | SHARED | {"length": ints(8), "page_indices": ints(1, 3, 0), "sliding_window": 2, "align": "end"},
    ],
    "varlen_attention": [
        VARLEN | SHARED, BY_RANGES | SHARED, VARLEN | SHARED | SELECTED,
        {name: VARLEN[name] for name in ("q", "k", "v", "cu_q_lens", "cu_kv_lens", "causal", "sinks")}
        | {"return_max_logits": True},
    ],
    "varlen_attention_backward": [
        VARLEN | SHARED | OUT | {"return_d_relative_bias": True}, BY_RANGES | SHARED | OUT,
        VARLEN | SHARED | OUT | SELECTED | {"return_d_relative_bias": True},
    ],
    "sparse_mla_prefill": [
        SPARSE | LATENT | {"cache_format": "plain", "cache_layout": "token", "out_dtype": "float16"},
    ],
    "sparse_mla_prefill_backward": [
        SPARSE | LATENT | {
            "d_out": floats(3, 4, 256), "out": floats(3, 4, 256), "lse": floats(3, 4) + 2, "d_lse": floats(3, 4),
        },
    ],
    "mla_decode": [
        DECODE | LISTS | SECOND | LATENT | {"extra_topk_lens": ints(1, 2), "schedule": SCHEDULE, "soft_cap": 1.5},
        DECODE | LATENT | {
            "page_indices": ints([2, 0], [1, 3]), "kv_lens": ints(7, 5), "causal": True, "sliding_window": 4,
            "soft_cap": 1.5, "out_dtype": "float16",
        },
    ],
    "ragged_mla_attention": [
        TABLES | LATENT | {
            "q": floats(5, 4, 576), "kv_cache": floats(6, 4, 1, 576), "num_seqs": ints(1), "max_q_len": 3,
            "causal": False, "sliding_window": 4, "soft_cap": 1.5, "kv_scale": 0.5, "rope_scale": 2.0,
            "return_lse": True, "new_kv": floats(5, 1, 576), "cache_format": "plain", "cache_layout": "token",
            "out_dtype": "float16",
        },
        TABLES | LATENT | {"q": floats(5, 4, 576), "kv_cache": floats(6, 4, 1, 576), "key_ranges": KEY_RANGES,
                          "return_max_logits": True},
    ],
    "make_decode_schedule": [
        {"lens": ints(100, 0, 900), "extra_lens": ints(70, 1, 200), "sparse": True, "num_parts": 3, "overhead": 2,
         "programs": 2},
    ],
    "quantize_mla_cache": [
        {"kv": floats(2, 3, 1, 576), "format": "fp8_v32", "power_of_two_scales": False, "cache_layout": "token"},
    ],
    "dequantize_mla_cache": [
        {"cache": BYTES, "format": "fp8_v32", "dtype": "float32", "cache_layout": "token"},
    ],
    "write_mla_cache": [
        {
            "kv": floats(3, 1, 576), "cache": BYTES, "slot_mapping": ints(4, -1, 1), "power_of_two_scales": False,
            "cache_format": "fp8_v32", "cache_layout": "token",
        },
        TABLES | {"kv": floats(5, 1, 16), "cache": floats(6, 4, 1, 16), "num_seqs": ints(1), "kv_scale": 0.5,
                  "rope_scale": 2.0, "d_v": 8},
    ],
    "latent_norm_rope_write": [
        {
            "q": floats(3, 2, 64), "kv": floats(3, 1, 576), "cache": BYTES, "slot_mapping": ints(4, -1, 1),
            "positions": ints(3, 0, 2), "cos_sin": floats(9, 64), "kv_weight": floats(512), "eps": 0.5,
            "interleaved": True, "power_of_two_scales": False, "cache_format": "fp8_v32", "cache_layout": "token",
        },
        TABLES | ROTARY | {
            "q": floats(5, 2, 8), "kv": floats(5, 1, 16), "cache": floats(6, 4, 1, 16), "num_seqs": ints(1),
            "kv_scale": 0.5, "rope_scale": 2.0,
        },
    ],
    "indexer_logits": [INDEX | RANGES, INDEX | INDEX_PAGES, INDEX | LISTED_KEYS],
    "attention_target": [
        TARGET | {"indices": LISTED_KEYS["indices"], "sm_scale": 0.7, "topk_lens": ints(1, 2, 3, 2, 2)},
        TARGET | {"starts": RANGES["starts"], "stops": RANGES["stops"], "relative": True, "max_keys": 2},
    ],
    "indexer_logits_backward": [
        INDEX | RANGES | {"d_logits": floats(5, 2)}, INDEX | LISTED_KEYS | {"d_logits": floats(5, 3)},
    ],
    "indexer_topk": [
        INDEX | RANGES | {"top_k": 1},
        INDEX | INDEX_PAGES | {
            "top_k": 2, "candidate_blocks": ints([0, 3], [1, 2], [3, 1], [0, 1], [0, 1]), "candidate_block_size": 2,
        },
    ],
    "top_k_indices": [
        {"logits": floats(3, 9), "top_k": 4, "starts": ints(1, 5, 0), "stops": ints(4, 9, 6)},
    ],
    "block_scores": [*BLOCKS],
    "select_blocks": [*BLOCKS],
    "top_k_blocks": [{"scores": floats(3, 2, 9), "top_k": 4, "init_blocks": 2, "local_blocks": 1}],
    "quantize_indexer_keys": [{"k": floats(3, 16), "power_of_two": True}],
    "write_indexer_cache": [
        {"k": floats(3, 16), "cache": np.zeros((2, 4, 1, 20), np.uint8), "slot_mapping": ints(4, -1, 1),
         "power_of_two": True},
        TABLES | {"k": floats(5, 16), "cache": np.zeros((6, 4, 1, 20), np.uint8), "num_seqs": ints(1)},
    ],
    "page_indices_to_slots": [
        {"positions": ints([[3, 9], [-1, 5]], [[11, 12], [0, 7]]), "page_indices": TABLES["page_indices"],
         "page_size": 4},
        {"positions": ints([3, 9], [-1, 5], [11, 12], [0, 7]), "page_indices": TABLES["page_indices"], "page_size": 4,
         "cu_q_lens": ints(0, 3, 99), "num_seqs": ints(1)},
    ],
    "quantize_kv": [
        {"x": floats(2, 3, 2, 16), "format": "int4_token_head", "scale": 0.5, "zero": "stored",
         "scales_dtype": "float16"},
    ],
    "dequantize_kv": [
        {"codes": np.arange(96, dtype=np.int8).reshape(3, 2, 16), "scales": floats(3, 2), "scale": 0.5,
         "dtype": "float16"},
    ],
}  # fmt: skip
EACH = [(operation, index) for operation, calls in CALLS_WITH.items() for index in range(len(calls))]
DEVICES = {
    "cuda": [device_of("torch", "sm_90"), device_of("jax", "sm_90")],
    "rocm": [device_of("torch", "gfx942")],
    "tpu": [Device(framework="jax", platform="tpu", shared_memory=2**27, scalar_memory=2**20)],
    "cpu": [Device(framework=name, platform="cpu") for name in ("torch", "jax")],
}


def arguments_of(operation: str, index: int) -> dict[str, Any]:
    names = CALLS[operation].argument_names()
    return {name: value for name, value in CALLS_WITH[operation][index].items() if name in names}


def modules(operation: str) -> dict[str, Any]:
    """The modules of the operation, by backend, that can be imported on this machine."""
    found = {}
    for backend in dispatch.PACKAGES:
        try:
            found[backend] = dispatch.load(operation, backend)
        except BackendMissing:
            continue
    return found


@pytest.mark.parametrize("operation", CALLS)
def test_every_optional_argument_has_a_value_here(operation):
    record = CALLS[operation]
    # These arguments are applied before a backend sees the call.
    applied = {name for name, kind in record.KINDS.items() if not kind.schema(name)}
    missing = ", ".join(set(record.DEFAULTS) - applied - set().union(*CALLS_WITH.get(operation, [])))
    assert not missing, f"give {missing} of {operation} a value in CALLS_WITH of {__file__}"


@pytest.mark.parametrize("operation", CALLS)
def test_features_are_optional_arguments(operation):
    for backend, module in modules(operation).items():
        unknown = module.FEATURES - CALLS[operation].DEFAULTS.keys()
        assert not unknown, f"{operation} has no optional argument {', '.join(unknown)}, which {backend} lists"


def refusable(operation: str) -> list[str]:
    """The optional arguments that a backend must list to honour them.

    Hints are not among them. Neither are arguments that another operation can apply before the call.
    """
    record = CALLS[operation]
    return [name for name in record.DEFAULTS if not record.KINDS[name].hint and name not in record.SEPARABLE]


@pytest.mark.parametrize(("operation", "index"), EACH)
def test_what_is_not_listed_is_refused_by_name(operation, index, monkeypatch):
    """A call is refused, before the backend's `why_not`, if it sets an argument that the backend does not list.

    A backend without a list honours no optional arguments.
    """
    record, arguments = CALLS[operation], arguments_of(operation, index)
    fields = record.DEFAULTS
    given = [name for name in refusable(operation) if name in arguments]
    module: Any = complete(types.SimpleNamespace(why_not=lambda call: "asked"))
    monkeypatch.setattr(dispatch, "load", lambda operation, backend: module)
    call = record(**arguments)  # type: ignore[call-arg]
    assert dispatch.refusal("other", call) == (f"does not honour {given[0]}" if given else "asked")
    for name in given:
        module.FEATURES = frozenset(fields) - {name}
        assert dispatch.refusal("other", call) == f"does not honour {name}"
    module.FEATURES = frozenset(fields)
    assert dispatch.refusal("other", call) == "asked"


@pytest.mark.parametrize("operation", CALLS)
def test_defaults_are_never_refused(operation, monkeypatch):
    fields = CALLS[operation].DEFAULTS
    module = types.SimpleNamespace(FEATURES=frozenset(), why_not=lambda call: "asked")
    monkeypatch.setattr(dispatch, "load", lambda operation, backend: module)
    same = {name: np.bool_(value) if isinstance(value, bool) else value for name, value in fields.items()}
    required = dict.fromkeys(CALLS[operation].argument_names())
    call = CALLS[operation].unchecked(**required | same, device=Device(framework="torch", platform="cpu"))
    assert dispatch.refusal("other", call) == "asked"


@pytest.mark.parametrize("platform", DEVICES)
@pytest.mark.parametrize(("operation", "index"), EACH)
def test_each_backend_is_asked_by_its_own_list(operation, index, platform):
    arguments = arguments_of(operation, index)
    given = [name for name in refusable(operation) if name in arguments]
    for device in DEVICES[platform]:
        call = CALLS[operation](**arguments, device=device)  # type: ignore[call-arg]
        for backend, module in modules(operation).items():
            reason = dispatch.refusal(backend, call)
            lacking = [name for name in given if name not in module.FEATURES]
            if lacking:
                assert reason == f"does not honour {lacking[0]}"
            else:
                assert "does not honour" not in (reason or ""), backend


def results_of(backend: str, operation: str, arguments: dict[str, Any]) -> list[np.ndarray]:
    """The results of a backend, with their dtypes."""
    framework = "jax" if backend == "xla" else "torch"
    pytest.importorskip(framework)
    record, device = CALLS[operation], Device(framework=framework, platform="cpu")
    if framework == "jax":
        import jax

        def run(values: dict[str, Any]) -> Any:
            call = record(**arguments | values, device=device)  # type: ignore[call-arg]
            choice = dispatch.choose(call, backend=backend)
            return choice.run(call, None)  # type: ignore[arg-type]  # the tile is not used

        results = jax.jit(run)({name: value for name, value in arguments.items() if is_data(value)})
    else:
        import torch

        from ragged_attention.torch._launcher import LAUNCHER

        call: Call = record(**arguments, device=device).map(lambda array: torch.from_numpy(array.copy()))  # type: ignore[call-arg]
        results = dispatch.choose(call, backend=backend).run(call, LAUNCHER)
    flat = [as_numpy(array) for array in (results if isinstance(results, tuple | list) else [results])]
    if operation == "latent_norm_rope_write" and flat[1].dtype == np.uint8:
        # Dequantise, because the norm rounds in float32 and the bytes of close float32 scales may differ a lot.
        flat[1] = dequantize_mla_cache(flat[1], arguments["cache_format"])
    return flat


def as_numpy(array: Any) -> np.ndarray:
    """A framework's array as a NumPy array; dtypes that NumPy lacks become float32."""
    if str(array.dtype) in ("torch.bfloat16", "torch.float8_e4m3fn"):
        array = array.float()
    return np.asarray(array.astype("float32") if str(array.dtype) == "float8_e4m3fn" else array)


def is_data(value: Any) -> bool:
    return isinstance(value, np.ndarray | tuple)


def agree(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    if len(one) != len(other) or any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(one, other, strict=True)):
        return False
    return all(np.allclose(a, b, 1e-3, 1e-3, equal_nan=True) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("operation", "index"), EACH)
def test_what_is_listed_counts(operation, index):
    """Each value in `CALLS_WITH` changes the reference's result or is needed for a valid call, and backends agree."""
    fields = CALLS[operation].DEFAULTS
    here = {backend: module for backend, module in modules(operation).items() if backend not in ("pallas", "cuda")}
    arguments = arguments_of(operation, index)
    arguments = {name: value for name, value in arguments.items() if name not in CALLS[operation].SEPARABLE}
    for name in set(arguments) & set(refusable(operation)) - here["reference"].FEATURES:
        # If a backend had the feature, its results would have to be compared below.
        assert all(name not in module.FEATURES for module in here.values())
        del arguments[name]
    wanted = results_of("reference", operation, arguments)
    hints = {name for name, kind in CALLS[operation].KINDS.items() if kind.hint}
    for name in set(arguments) & set(fields) - SAME - hints:
        try:
            without = results_of("reference", operation, {k: v for k, v in arguments.items() if k != name})
        except InvalidInput:
            continue
        assert not agree(wanted, without), f"{name} changes nothing"
    for backend in here:
        reason = dispatch.refusal(backend, CALLS[operation](**arguments, device=here_of(backend)))  # type: ignore[call-arg]
        assert reason is None or reason.startswith("does not honour")
        if reason is None:
            assert agree(results_of(backend, operation, arguments), wanted), backend


def here_of(backend: str) -> Device:
    return Device(framework="jax" if backend == "xla" else "torch", platform="cpu")


def test_a_representative_call_is_taken_somewhere():
    """For each operation and device, some backend accepts the representative call that `explain` shows."""
    for operation in CALLS:
        for device in itertools.chain.from_iterable(DEVICES.values()):
            assert dispatch.choose(sample_of(operation).call(operation, device)).backend in dispatch.backends()
