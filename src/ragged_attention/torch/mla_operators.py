"""The operators of latent attention: how arguments come into a schema's form, the schemas, the fake kernels."""

from typing import Any

import torch

from ragged_attention import dispatch
from ragged_attention.calls import expect_bool, expect_count, schedule_arrays
from ragged_attention.errors import InvalidInput
from ragged_attention.torch.execute import by_name, define, gradient_fake, gradient_results, number
from ragged_attention.torch.launcher import DTYPES, device_facts

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
PREFILL_GRADIENTS = ("q", "kv", "sinks")


def prefill_form(
    q: Any, kv: Any, indices: Any, *, sm_scale: Any = None, d_v: Any = 512, sinks: Any = None, topk_lens: Any = None,
    cache_format: Any = None, deterministic: Any = False,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments in the order and form of the operator's schema."""
    expect_bool("deterministic", deterministic)  # a schema would take an int for it
    return q, kv, indices, number(sm_scale), d_v, sinks, topk_lens, cache_format, deterministic


def backward_form(
    d_out: Any, q: Any, kv: Any, indices: Any, out: Any, lse: Any, *, d_lse: Any = None, sm_scale: Any = None,
    d_v: Any = 512, sinks: Any = None, topk_lens: Any = None, deterministic: Any = False,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments in the order and form of the operator's schema."""
    expect_bool("deterministic", deterministic)
    return d_out, q, kv, indices, out, lse, d_lse, number(sm_scale), d_v, sinks, topk_lens, deterministic


def decode_form(
    q: Any, kv_cache: Any, page_indices: Any = None, kv_lens: Any = None, *, indices: Any = None, d_v: Any = 512,
    sm_scale: Any = None, causal: Any = False, sinks: Any = None, topk_lens: Any = None, extra_kv_cache: Any = None,
    extra_indices: Any = None, extra_topk_lens: Any = None, schedule: Any = None, cache_format: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    expect_bool("causal", causal)  # a schema would take an int for it
    arrays = schedule_arrays(schedule, q, kv_cache, indices, extra_indices) or ()
    return (
        q, kv_cache, page_indices, kv_lens, indices, d_v, number(sm_scale), causal, sinks, topk_lens, extra_kv_cache,
        extra_indices, extra_topk_lens, list(arrays), cache_format,
    )  # fmt: skip


def schedule_form(
    kv_lens: Any, batch_size: Any, num_q_tokens: Any, num_q_heads: Any, num_kv_heads: Any = 1, *,
    topk_lens: Any = None, extra_topk: Any = None, extra_topk_lens: Any = None, num_parts: Any = None,
    overhead: Any = 5, device: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The lengths as arrays of their own, which later changes of the caller's do not reach, and how much runs at once.

    That is `programs`: how many programs work side by side on one range of keys, one for each 64 rows of queries.
    """
    expect_count("batch_size", batch_size, 0)
    for name, value in (("num_q_tokens", num_q_tokens), ("num_q_heads", num_q_heads), ("num_kv_heads", num_kv_heads)):
        expect_count(name, value, 1)
    if num_q_heads % num_kv_heads:
        raise InvalidInput(f"expected num_q_heads to be a multiple of {num_kv_heads=}, got {num_q_heads}")
    if isinstance(kv_lens, torch.Tensor):
        for name, value in (("topk_lens", topk_lens), ("extra_topk", extra_topk), ("extra_topk_lens", extra_topk_lens)):
            if value is not None:
                raise InvalidInput(f"expected {name} only with a top-k in place of kv_lens, got it with kv_lens")
        if kv_lens.shape != (batch_size,):
            raise InvalidInput(f"expected kv_lens.shape to be [S] = [{batch_size}], got {list(kv_lens.shape)}")
        programs = num_kv_heads * -(-num_q_tokens * (num_q_heads // num_kv_heads) // 64)
        return kv_lens.clone(), None, False, num_parts, overhead, programs
    if not isinstance(kv_lens, int) or isinstance(kv_lens, bool):
        raise TypeError(f"expected kv_lens to be a torch.Tensor or an int, a top-k, got {type(kv_lens).__name__}")
    if num_kv_heads != 1:
        raise InvalidInput(f"expected num_kv_heads = 1 with a top-k in place of kv_lens, got {num_kv_heads}")
    if extra_topk is None and extra_topk_lens is not None:
        raise InvalidInput("expected extra_topk_lens only together with extra_topk, got it without")
    shape, given = (batch_size, num_q_tokens), next((a for a in (topk_lens, extra_topk_lens) if a is not None), None)
    device = device if given is None else getattr(given, "device", None)
    lens = _list_lens("kv_lens", kv_lens, "topk_lens", topk_lens, shape, device)
    extra = None
    if extra_topk is not None:
        extra = _list_lens("extra_topk", extra_topk, "extra_topk_lens", extra_topk_lens, shape, device)
    return lens, extra, True, num_parts, overhead, num_q_tokens * -(-num_q_heads // 64)


def _list_lens(name: str, most: Any, lens_name: str, lens: Any, shape: tuple[int, int], device: Any) -> torch.Tensor:
    """For each sequence the length of its longest list, held within what a list can hold."""
    expect_count(name, most, 1)
    if lens is None:
        return torch.full(shape[:1], most, dtype=torch.int32, device=device)
    if not isinstance(lens, torch.Tensor):
        raise TypeError(f"expected {lens_name} to be a torch.Tensor, got {type(lens).__name__}")
    if lens.dtype != torch.int32:
        raise InvalidInput(f"expected {lens_name}.dtype to be int32, got {DTYPE_NAMES.get(lens.dtype, lens.dtype)}")
    if lens.shape not in (shape[:1], shape):  # not `expect_array`, which torch.compile cannot follow
        wanted = f"[S] = {list(shape[:1])} or [S, Q] = {list(shape)}"
        raise InvalidInput(f"expected {lens_name}.shape to be {wanted}, got {list(lens.shape)}")
    held = lens.clamp(0, most)
    return held.amax(1) if held.dim() == 2 else held


def quantize_form(kv: Any, format: Any, power_of_two_scales: Any = True) -> tuple[Any, ...]:
    expect_bool("power_of_two_scales", power_of_two_scales)
    return kv, format, power_of_two_scales


def dequantize_form(cache: Any, format: Any = None, dtype: Any = "bfloat16") -> tuple[Any, ...]:
    return cache, format, DTYPE_NAMES.get(dtype, str(dtype)) if isinstance(dtype, torch.dtype) else dtype


def write_form(
    kv: Any, cache: Any, slot_mapping: Any, *, power_of_two_scales: Any = True, cache_format: Any = None
) -> tuple[Any, ...]:
    expect_bool("power_of_two_scales", power_of_two_scales)
    if isinstance(kv, torch.Tensor) and kv.dim() == 2:
        kv = kv.unsqueeze(1)
    return kv, cache, slot_mapping, power_of_two_scales, cache_format


def slots_form(positions: Any, page_indices: Any, page_size: Any) -> tuple[Any, ...]:
    return positions, page_indices, page_size


def _decode_arguments(*values: Any) -> dict[str, Any]:
    arguments = _decode_names(*values)
    arguments["schedule"] = tuple(arguments["schedule"]) or None
    return arguments


_decode_names = by_name("mla_decode")


def _schedule_arguments(
    lens: Any, extra_lens: Any, sparse: Any, num_parts: Any, overhead: Any, programs: Any
) -> dict[str, Any]:
    if num_parts is None:  # what keeps the whole device at work
        num_parts = max(device_facts(lens.device).num_multiprocessors // programs, 1)
    return {
        "lens": lens,
        "extra_lens": extra_lens,
        "sparse": sparse,
        "num_parts": num_parts,
        "overhead": overhead,
    }


def _prefill_fake(call: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out = call.q.new_empty(call.out_shape)
    return out, *(out.new_empty(call.out_shape[:2], dtype=DTYPES[call.lse_dtype]) for _ in range(2))


def _save_prefill(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, kv, indices, sm_scale, d_v, sinks, topk_lens, _, deterministic, backend, _ = inputs
    out, max_logits, lse = output
    ctx.mark_non_differentiable(max_logits)
    ctx.set_materialize_grads(False)  # of a log-sum-exp that nobody uses there is no gradient
    ctx.save_for_backward(q, kv, indices, out, lse, sinks, topk_lens)
    ctx.numbers, ctx.deterministic = (sm_scale, d_v), deterministic
    ctx.backend = dispatch.backends_offering("sparse_mla_prefill_backward", backend)


def _differentiate_prefill(ctx: Any, d_out: torch.Tensor | None, _: Any, d_lse: torch.Tensor | None) -> tuple[Any, ...]:
    q, kv, indices, out, lse, sinks, topk_lens = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    dq, dkv, d_sinks = torch.ops.ragged_attention.sparse_mla_prefill_backward(
        d_out, q, kv, indices, out, lse, d_lse, *ctx.numbers, sinks, topk_lens, ctx.deterministic, ctx.backend, None
    )
    return dq, dkv, None, None, None, None if sinks is None else d_sinks, *(None,) * 5


def _decode_fake(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return call.q.new_empty(call.out_shape), call.q.new_empty(call.lse_shape, dtype=torch.float32)


def _schedule_fake(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return call.lens.new_empty((call.num_parts, 8)), call.lens.new_empty(call.num_seqs + 1)


def _only(results: Any) -> torch.Tensor:
    return results[0] if isinstance(results, tuple | list) else results


define(
    "sparse_mla_prefill",
    "Tensor q, Tensor kv, Tensor indices, float? sm_scale, int d_v, Tensor? sinks, Tensor? topk_lens, "
    "str? cache_format, bool deterministic",
    "(Tensor, Tensor, Tensor)",
    form=prefill_form,
    arguments=by_name("sparse_mla_prefill"),
    results=tuple,
    fake=_prefill_fake,
    gradient=(_differentiate_prefill, _save_prefill),
)
define(
    "sparse_mla_prefill_backward",
    "Tensor d_out, Tensor q, Tensor kv, Tensor indices, Tensor out, Tensor lse, Tensor? d_lse, float? sm_scale, "
    "int d_v, Tensor? sinks, Tensor? topk_lens, bool deterministic",
    "(Tensor, Tensor, Tensor)",
    form=backward_form,
    arguments=by_name("sparse_mla_prefill_backward"),
    results=lambda found: gradient_results(found, PREFILL_GRADIENTS),
    fake=lambda call: gradient_fake(call, PREFILL_GRADIENTS),
)
define(
    "mla_decode",
    "Tensor q, Tensor kv_cache, Tensor? page_indices, Tensor? kv_lens, Tensor? indices, int d_v, float? sm_scale, "
    "bool causal, Tensor? sinks, Tensor? topk_lens, Tensor? extra_kv_cache, Tensor? extra_indices, "
    "Tensor? extra_topk_lens, Tensor[] schedule, str? cache_format",
    "(Tensor, Tensor)",
    form=decode_form,
    arguments=_decode_arguments,
    results=tuple,
    fake=_decode_fake,
)
define(
    "make_decode_schedule",
    "Tensor lens, Tensor? extra_lens, bool sparse, int? num_parts, int overhead, int programs",
    "(Tensor, Tensor)",
    form=schedule_form,
    arguments=_schedule_arguments,
    results=tuple,
    fake=_schedule_fake,
)
define(
    "quantize_mla_cache",
    "Tensor kv, str format, bool power_of_two_scales",
    "Tensor",
    form=quantize_form,
    arguments=by_name("quantize_mla_cache"),
    results=_only,
    fake=lambda call: call.kv.new_empty(call.out_shape, dtype=torch.uint8),
)
define(
    "dequantize_mla_cache",
    "Tensor cache, str? format, str dtype",
    "Tensor",
    form=dequantize_form,
    arguments=by_name("dequantize_mla_cache"),
    results=_only,
    fake=lambda call: call.cache.new_empty(call.out_shape, dtype=DTYPES[call.dtype]),
)
define(
    "write_mla_cache",
    "Tensor kv, Tensor(a!) cache, Tensor slot_mapping, bool power_of_two_scales, str? cache_format",
    "()",
    form=write_form,
    arguments=by_name("write_mla_cache"),
    results=lambda cache: None,
    fake=lambda call: None,
)
define(
    "page_indices_to_slots",
    "Tensor positions, Tensor page_indices, int page_size",
    "Tensor",
    form=slots_form,
    arguments=by_name("page_indices_to_slots"),
    results=_only,
    fake=lambda call: call.positions.new_empty(call.positions.shape),
)
