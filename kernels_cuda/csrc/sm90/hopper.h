// The machine layer on sm_90a; see ops.h.
#pragma once
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/atom/copy_traits_sm90_tma.hpp>
#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#define RA_DEV __device__ __forceinline__
#define RA_HD __host__ __device__ __forceinline__

namespace op {

RA_DEV int tid() { return threadIdx.x; }
// Reads %tid.x anew. The compiler cannot reuse a volatile read, so no register holds the index between two calls.
RA_DEV int fresh_tid() {
  int t;
  asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(t));
  __builtin_assume(t >= 0 && t < 1024);  // makes division by a power of two a shift
  return t;
}
RA_DEV int bid() { return blockIdx.x; }
RA_DEV int fresh_bid() {
  int b;
  asm volatile("mov.u32 %0, %%ctaid.x;\n" : "=r"(b));
  return b;
}
// Returns its argument, but hides from the compiler where the pointer comes from. Loads at constant offsets from it
// then use immediate offsets. Otherwise the compiler would compute each address separately.
template <class T>
RA_DEV T* opaque(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}
RA_DEV void syncthreads() { __syncthreads(); }
RA_DEV void syncwarp() { __syncwarp(); }
template <int N>
RA_DEV void reg_alloc() { cutlass::arch::warpgroup_reg_alloc<N>(); }
template <int N>
RA_DEV void reg_dealloc() { cutlass::arch::warpgroup_reg_dealloc<N>(); }
// CUTLASS reserves the first eight hardware barriers, so barrier `id` is hardware barrier 8 + `id`.
RA_DEV void named_sync(int id, int threads) { cutlass::arch::NamedBarrier::sync(threads, id); }
RA_DEV void named_arrive(int id, int threads) { cutlass::arch::NamedBarrier::arrive(threads, id); }
RA_DEV float shfl_xor(float value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
RA_DEV float shfl(float value, int lane) { return __shfl_sync(~0u, value, lane); }
RA_DEV uint32_t shfl_xor(uint32_t value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
RA_DEV bool any_in_warp(bool condition) { return __any_sync(~0u, condition); }
RA_DEV void fence_async_shared() { cutlass::arch::fence_view_async_shared(); }
RA_DEV void fence_barrier_init() { cutlass::arch::fence_barrier_init(); }

struct MBar {
  uint64_t state;
  using Barrier = cutlass::arch::ClusterTransactionBarrier;
  RA_DEV void init(int arrivals) { reinterpret_cast<Barrier*>(&state)->init(arrivals); }
  RA_DEV void arrive() { reinterpret_cast<Barrier*>(&state)->arrive(); }
  RA_DEV void arrive_expect(uint32_t bytes) { reinterpret_cast<Barrier*>(&state)->arrive_and_expect_tx(bytes); }
  RA_DEV void wait(uint32_t parity) { reinterpret_cast<Barrier*>(&state)->wait(parity); }
};

// kAgain asks that the data be evicted last. Copies set this hint for L2, and loads for L1, where two loads often share
// a sector. kAgain also makes L2 fetch 256 bytes at once instead of 128, because the rest of the row is read next.
template <Reuse kReuse>
RA_DEV void copy16(void* shared, void const* global, bool valid) {
  auto const to = cute::cast_smem_ptr_to_uint(shared);
  if constexpr (kReuse == kAgain)
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2, %3;\n" ::"r"(to), "l"(global),
                 "r"(valid ? 16 : 0), "l"(uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST))
                 : "memory");
  else
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to), "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
}
RA_DEV int load_constant(int const* global) { return __ldg(global); }
// These loads return zeros if `valid` is false. They use a predicate instead of a branch, so that loads overlap.
#define RA_LOAD16(hints)                                                                                    \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p ld.global.nc." hints ".v4.b32 {%0, %1, %2, %3}, [%4];\n}\n" \
               : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w)                                  \
               : "l"(global), "r"(int(valid)))
#define RA_LOAD8(hints)                                                                               \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p ld.global.nc." hints ".v2.b32 {%0, %1}, [%2];\n}\n" \
               : "+r"(words.x), "+r"(words.y)                                                          \
               : "l"(global), "r"(int(valid)))
template <Reuse kReuse>
RA_DEV uint4 load16(void const* global, bool valid) {
  uint4 words = {0, 0, 0, 0};
  if constexpr (kReuse == kAgain) RA_LOAD16("L1::evict_last.L2::256B");
  else RA_LOAD16("L1::no_allocate.L2::128B");
  return words;
}
template <Reuse kReuse>
RA_DEV uint2 load8(void const* global, bool valid) {
  uint2 words = {0, 0};
  if constexpr (kReuse == kAgain) RA_LOAD8("L1::evict_last.L2::256B");
  else RA_LOAD8("L1::no_allocate.L2::128B");
  return words;
}
#undef RA_LOAD16
#undef RA_LOAD8
RA_DEV uint32_t load4(void const* global, bool valid) {
  uint32_t word = 0;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.global.nc.b32 %0, [%1];\n}\n"
      : "+r"(word)
      : "l"(global), "r"(int(valid)));
  return word;
}
RA_DEV void arrive_after_copies(MBar& bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(
                   cute::cast_smem_ptr_to_uint(&bar.state))
               : "memory");
}

template <class Copy, class Shape>
struct Tma {
  Copy copy;
  Shape shape;
};
template <class Tensor, class Layout>
auto make_tma(Tensor const& global, Layout const& shared) {
  auto copy = cute::make_tma_copy(cute::SM90_TMA_LOAD{}, global, shared);
  return Tma<decltype(copy), std::decay_t<decltype(global.shape())>>{copy, global.shape()};
}
// The tensor map. If the driver rejects the tensor, CuTe only prints an error and leaves the tensor map zero.
template <class Tma>
auto const* descriptor_of(Tma const& tma) {
  return tma.copy.get_tma_descriptor();
}
template <class Tma, class Target>
RA_DEV void tma_load(Tma const& tma, int row_tile, int column_tile, int head, int page, MBar& bar, Target&& target) {
  using namespace cute;
  auto source = local_tile(tma.copy.get_tma_tensor(tma.shape)(_, _, make_coord(head, page)), Shape<_64, _64>{},
                           make_coord(row_tile, column_tile));
  auto slice = tma.copy.get_slice(_0{});
  copy(tma.copy.with(bar.state), slice.partition_S(source), slice.partition_D(target));
}

// Copies a multiple of 16 bytes. Both addresses are aligned to 16 bytes. `bar` counts the bytes, as it does for a TMA
// load.
RA_DEV void bulk_load(void* shared, void const* global, int bytes, MBar& bar) {
  cute::SM90_BULK_COPY_G2S::copy(global, &bar.state, shared, bytes);
}

template <class T>
RA_DEV void store(T* shared, T value) { *shared = value; }
// stmatrix.x4 stores four 8 x 8 matrices. Threads 8 i to 8 i + 7 give the addresses of matrix i's rows. Of each matrix,
// a thread holds row lane / 4 and columns 2 (lane % 4) and 2 (lane % 4) + 1, as in wgmma's accumulators.
RA_DEV void store_matrices(void* row, uint32_t const (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(
                   cute::cast_smem_ptr_to_uint(row)),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}
// ldmatrix.x4 is the inverse of `store_matrices`.
RA_DEV uint4 load_matrices(void const* row) {
  uint4 words;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(cute::cast_smem_ptr_to_uint(row))
               : "memory");
  return words;
}

template <class Mma, class SA, class SB, class Acc>
RA_DEV void wgmma_ss(Mma mma, int t, SA const& a, SB const& b, Acc& acc, bool zero) {
  using namespace cute;
  auto thread = mma.get_thread_slice(t);
  auto fa = thread.partition_fragment_A(a);
  auto fb = thread.partition_fragment_B(b);
  mma.accumulate_ = zero ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
  warpgroup_fence_operand(acc);
  warpgroup_arrive();
  CUTE_UNROLL
  for (int k = 0; k < size<2>(fa); ++k) {
    gemm(mma, fa(_, _, k), fb(_, _, k), acc);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
}
template <class Mma, class RA, class SB, class Acc>
RA_DEV void wgmma_rs(Mma mma, int t, RA& a, SB const& b, Acc& acc) {
  using namespace cute;
  auto fb = mma.get_thread_slice(t).partition_fragment_B(b);
  warpgroup_fence_operand(a);
  warpgroup_fence_operand(acc);
  warpgroup_arrive();
  CUTE_UNROLL
  for (int k = 0; k < size<2>(a); ++k) gemm(mma, a(_, _, k), fb(_, _, k), acc);
  warpgroup_commit_batch();
}
template <int N, class... Acc>
RA_DEV void wgmma_wait(Acc&... acc) {
  cute::warpgroup_wait<N>();
  (cute::warpgroup_fence_operand(acc), ...);
}

// Computes acc[m][n] += a[m] x b[n] by one warp, as 16 x 8 x 16 products. Registers hold operands and accumulators in
// the layouts of PTX's mma.m16n8k16: a thread holds rows lane / 4 and lane / 4 + 8 of each a[m], and column lane / 4 of
// each b[n].
template <class T, int M, int N>
RA_DEV void mma(float (&acc)[M][N][4], uint32_t const (&a)[M][4], uint32_t const (&b)[N][2]) {
  CUTE_UNROLL
  for (int m = 0; m < M; ++m)
    CUTE_UNROLL
    for (int n = 0; n < N; ++n) {
      float(&c)[4] = acc[m][n];
      if constexpr (std::is_same_v<T, bf16>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};\n"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[m][0]), "r"(a[m][1]), "r"(a[m][2]), "r"(a[m][3]), "r"(b[n][0]), "r"(b[n][1]));
      else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};\n"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[m][0]), "r"(a[m][1]), "r"(a[m][2]), "r"(a[m][3]), "r"(b[n][0]), "r"(b[n][1]));
    }
}

RA_DEV float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
RA_DEV float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
RA_DEV float log2(float x) { return __log2f(x); }
template <class T>
RA_DEV uint32_t pack(float low, float high) {
  uint32_t word;
  if constexpr (std::is_same_v<T, bf16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(word) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
// Multiplies two pairs of bfloat16.
RA_DEV uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t word;
  asm("mul.rn.bf16x2 %0, %1, %2;\n" : "=r"(word) : "r"(a), "r"(b));
  return word;
}
// Selects four of the eight bytes in `a` (bytes 0 to 3) and `b` (bytes 4 to 7). Hex digit i of the selector is the
// index of the byte that becomes byte i of the result. A digit of 8 + n fills byte i with the sign bit of byte n.
RA_DEV uint32_t bytes_of(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t word;
  asm("prmt.b32 %0, %1, %2, %3;\n" : "=r"(word) : "r"(a), "r"(b), "r"(selector));
  return word;
}
// Converts two e4m3 codes to two float16. The low byte has the first code.
RA_DEV uint32_t half_pair(uint16_t codes) {
  uint32_t word;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(word) : "h"(codes));
  return word;
}
// Converts four e4m3 codes to two words with two float16 each.
RA_DEV void half_pairs(uint32_t codes, uint32_t& low, uint32_t& high) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}\n"
      : "=r"(low), "=r"(high)
      : "r"(codes));
}

// These functions convert the low or the high float16 of a word to float32.
RA_DEV float low_half(uint32_t word) { return __half2float(__ushort_as_half(uint16_t(word))); }
RA_DEV float high_half(uint32_t word) { return __half2float(__ushort_as_half(uint16_t(word >> 16))); }

template <class Body, class Params>
__global__ void __launch_bounds__(Body::kThreads, 1) kernel(__grid_constant__ Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char shared[];
  Body::run(params, *reinterpret_cast<typename Body::Smem*>(shared));
#endif
}

RA_DEV void let_dependents_launch() { asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory"); }
RA_DEV void wait_for_previous_grid() { asm volatile("griddepcontrol.wait;\n" ::: "memory"); }
template <class T>
RA_DEV T load_result(T const* global) { return *global; }

template <class Body, class Params>
int launch(int64_t grid, int shared_bytes, void* stream, Params const& params, bool dependent = false) {
  auto function = kernel<Body, Params>;
  if (cudaError_t error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes))
    return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(Body::kThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = dependent;
  return cudaLaunchKernelEx(&config, function, params);  // returns only this launch's error, unlike cudaGetLastError
}

template <class Body, class Params>
int launch_dependent(int64_t grid, int shared_bytes, void* stream, Params const& params) {
  return launch<Body>(grid, shared_bytes, stream, params, true);
}

}  // namespace op
