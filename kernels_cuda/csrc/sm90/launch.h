// Launches the kernels of a call.
#pragma once
#include "combine.h"

// The size in bytes of the largest cache that 32-bit row offsets can address. `unit` is the number of bytes per unit.
constexpr int64_t most_bytes(int unit) { return ((int64_t(1) << 32) - 1) * unit; }
inline int64_t cache_bytes(RaLatent const& call) {
  return (call.num_pages * call.page_stride + call.page_size * call.slot_stride + call.num_kv_heads * call.head_stride) *
         (format_of(call.format).token ? 1 : 2);
}

// Whether TMA can fetch the cache block by block. It can if pages are whole numbers of blocks.
inline bool pages_by_tma(RaLatent const& call) { return call.page_size % kBlock == 0 && call.num_pages > 0; }

// The cache as a tensor (rows of a page, columns, (KV heads, pages)). If TMA is not used, the result is an arbitrary
// valid tensor.
template <class Kernel>
auto pages_of(RaLatent const& call) {
  bool const serves = pages_by_tma(call);
  // An axis of length 1 may have any stride, but a tensor map accepts only valid strides.
  int64_t const head_stride = serves && call.num_kv_heads > 1 ? call.head_stride : call.d_qk;
  int64_t const page_stride = serves && call.num_pages > 1 ? call.page_stride : call.d_qk;
  return cute::make_tensor(
      cute::make_gmem_ptr(static_cast<typename Kernel::Element const*>(serves ? call.kv : call.q)),
      cute::make_shape(serves ? int(call.page_size) : kBlock, cute::Int<Kernel::kColumns>{},
                       cute::make_shape(serves ? int(call.num_kv_heads) : 1, serves ? int(call.num_pages) : 1)),
      cute::make_stride(serves ? call.slot_stride : call.d_qk, cute::_1{}, cute::make_stride(head_stride, page_stride)));
}

// The kernel that merges the partial results of `Kernel`: Kernel::Merge if there is one, else Combine.
template <class Kernel, class = void>
struct MergeOf {
  using type = Combine<typename Kernel::Out>;
};
template <class Kernel>
struct MergeOf<Kernel, std::void_t<typename Kernel::Merge>> {
  using type = typename Kernel::Merge;
};

template <class Kernel>
int launch_latent(RaLatent const& call, void* stream) {
  using Merge = typename MergeOf<Kernel>::type;
  if (!sizes_fit(call)) return RA_NO_KERNEL;
  Plan const plan = plan_of(call, Kernel::kUnit);
  int64_t const jobs = num_jobs(plan), rows = call.num_seqs * call.num_q_tokens * call.num_q_heads;
  constexpr int64_t kMostRows = int64_t(INT32_MAX) * Merge::kRowsOfBlock;  // maximum rows that a grid can merge
  if (jobs <= 0) return 0;
  bool const splits = call.parts != nullptr || call.num_splits > 1;
  if (jobs > INT32_MAX || cache_bytes(call) > most_bytes(Kernel::kUnit)) return RA_NO_KERNEL;
  if (call.extra_lists && cache_bytes(extra_call_of(call)) > most_bytes(Kernel::kUnit)) return RA_NO_KERNEL;
  if (splits && (call.partial_out == nullptr || rows > kMostRows)) return RA_NO_KERNEL;
  int code;
  if constexpr (Kernel::kLists) {
    code = op::launch<Kernel>(jobs, sizeof(typename Kernel::Smem), stream, LatentParams<char>{plan, 0, false});
  } else {
    auto const tma = op::make_tma(pages_of<Kernel>(call), typename Kernel::template Rows<64>{});
    if (is_zero(op::descriptor_of(tma), sizeof *op::descriptor_of(tma))) return RA_NO_TENSOR_MAP;
    LatentParams<std::decay_t<decltype(tma)>> const params{plan, tma, pages_by_tma(call)};
    code = op::launch<Kernel>(jobs, sizeof(typename Kernel::Smem), stream, params);
  }
  if (code) return code;
  if (!splits) return 0;
  int64_t const blocks = (rows + Merge::kRowsOfBlock - 1) / Merge::kRowsOfBlock;
  return op::launch_dependent<Merge>(blocks, sizeof(typename Merge::Smem), stream, typename Merge::Params{plan});
}

inline bool takes(RaLatent const& call, int format, bool sparse) {
  return call.format == format && (call.sparse != 0) == sparse;
}
inline bool takes_fp8_v32(RaLatent const& call) {
  return takes(call, RA_FP8_V32, true) && !call.extra_lists && call.dtype == RA_BFLOAT16 && call.d_qk == 576;
}
