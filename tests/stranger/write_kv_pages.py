"""A write of new keys and values into pages, divided by their scales: one program for each token and KV head."""

import triton
import triton.language as tl

FEATURES = {"slot_mapping", "k_scale", "v_scale"}


def why_not(call):
    if call.copies or not call.combined or call.cache_dtype == "int8":
        return "expected floats to be converted into a combined cache of floats"
    if call.slot_mapping is None or any(hasattr(scale, "shape") for scale in (call.k_scale, call.v_scale)):
        return "expected slot_mapping, and scales that are numbers"


@triton.jit
def scatter(
    k_ptr, v_ptr, slots_ptr, given_ptr, pages_ptr, k_scale, v_scale, num_slots, page_stride, slot_stride, head_stride,
    KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_D: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)
    slot = tl.load(slots_ptr + token)
    mask = (dims < D) & (slot >= 0) & (slot < num_slots)
    source = (token * KV_HEADS + head) * D + dims
    k = tl.load(k_ptr + source, mask=mask, other=0.0).to(tl.float32) / k_scale
    v = tl.load(v_ptr + source, mask=mask, other=0.0).to(tl.float32) / v_scale
    if FLOAT8 is not None:
        k = k.to(FLOAT8).to(tl.uint8, bitcast=True)
        v = v.to(FLOAT8).to(tl.uint8, bitcast=True)
    row = pages_ptr + slot // PAGE * page_stride + slot % PAGE * slot_stride + 2 * head * head_stride + dims
    tl.store(row, k, mask=mask)
    tl.store(row + head_stride, v, mask=mask)


def run(call, tile, launch):
    tokens, heads, d = call.k.shape
    page_stride, slot_stride, head_stride, _ = launch.strides(call.kv_pages)
    arrays = [launch.contiguous(array) for array in (call.k, call.v, call.slot_mapping)]
    return launch(
        scatter, (tokens, heads), [*arrays, call.kv_pages], [], inplace=(3,),
        k_scale=1.0 if call.k_scale is None else call.k_scale, v_scale=1.0 if call.v_scale is None else call.v_scale,
        num_slots=call.num_slots, page_stride=page_stride, slot_stride=slot_stride, head_stride=head_stride,
        KV_HEADS=heads, D=d, PAGE=call.page_size, BLOCK_D=triton.next_power_of_2(d),
        FLOAT8={"float8_e4m3fn": tl.float8e4nv, "float8_e5m2": tl.float8e5}.get(call.cache_dtype),
    )  # fmt: skip
