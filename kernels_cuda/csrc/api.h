// The C ABI of the kernels. torch calls it through ctypes, and jax through the XLA FFI library. The emulation has the
// same ABI.
//
// No function here allocates memory, synchronises, prints or ends the process. A launcher enqueues kernels on the given
// stream and returns 0, a cudaError_t or one of the RA_ codes below. `ra_error_string` explains a code.
#pragma once
#include <stdint.h>

#define RA_API __attribute__((visibility("default")))
#define RA_ABI_VERSION 3

#ifdef __cplusplus
extern "C" {
#endif

enum {
  RA_WRONG_DEVICE = -1,   // the device's architecture is not the one that the kernels are compiled for
  RA_NO_KERNEL = -2,      // no kernel is compiled for these arguments
  RA_DEADLOCK = -3,       // emulation only: every thread waits, or a thread did something undefined on the hardware
  RA_NO_TENSOR_MAP = -4,  // the driver rejected the tensor map of the cache's pages: address, sizes or strides
};

enum { RA_BFLOAT16 = 0, RA_FLOAT16 = 1 };  // RaLatent::dtype, the type of q, out and a plain cache
enum {  // RaLatent::format of the cache and extra_format of the second cache
  RA_PLAIN = 0,
  RA_FP8_V32 = 1,
  RA_FP8_V4 = 2,
  RA_FP8_V41 = 3,
  RA_FP8_V41_PAGE = 4,  // a page stores the codes of all its tokens, then all their scales
  RA_FP4_V41 = 5,
  RA_FP4_V41_PAGE = 6,
};

// The arguments of attention over latent rows. There are S sequences of Q query tokens with H query heads, and a cache
// of P pages of G slots with K KV heads. In a dense call, `lists` is the block table [S, M], and `lens` [S] has the
// sequences' lengths. In a sparse call, `lists` [S, Q, K, N] has slots (page * page_size + offset), and `lens` [S, Q]
// has the lists' lengths, or is null if each list has N entries. Both arrays may hold any values: lengths are clamped,
// and entries outside the cache are skipped. A sparse call may have a second cache with its own lists. The softmax is
// over the keys of both caches. Their formats are the same, or both are RA_FP8_V41 or a later format.
//
// The FFI library takes operands and results in the order of the pointers below, and numbers in the order of the
// integers. Strides count elements of the array's dtype (bytes of a quantised cache). The elements of a row are
// contiguous. A format with a nonzero RaFormat::row needs no slot stride.
typedef struct RaLatent {
  // operands; null if the call lacks the operand
  const void* q;              // [S, Q, H, d_qk]
  const void* kv;             // [P, G, K, d_qk], or bytes; rows are aligned to 16 bytes (fp8_v4: 8)
  const int32_t* lists;
  const int32_t* lens;
  const float* sinks;         // [H]
  const int32_t* parts;       // a schedule [num_parts, 8]
  const void* extra_kv;       // [P', G', 1, d_qk], or bytes
  const int32_t* extra_lists;  // [S, Q, 1, N']; null if and only if there is no second cache
  const int32_t* extra_lens;  // [S, Q]
  // results, contiguous; an optional one is null if the caller does not want it
  void* out;                  // [S, Q, H, d_v]
  float* lse;                 // [S, H, Q]
  float* max_logits;          // [S, H, Q], optional
  float* partial_out;         // scratch [num_partials, Q, H, d_v]; null if and only if no sequence can be split
  float* partial_lse;         // scratch [num_partials, Q, H], base-2 log-sum-exp
  float* partial_max;         // scratch [num_partials, Q, H]; null if max_logits is null
  // integers; list_length is M or N
  int64_t num_seqs, num_q_tokens, num_q_heads, num_kv_heads, d_qk;
  int64_t dtype, format, extra_format, sparse, causal;
  int64_t q_seq_stride, q_token_stride, q_head_stride;
  int64_t num_pages, page_size, page_stride, slot_stride, head_stride;
  int64_t list_seq_stride, list_token_stride, list_head_stride, list_length;
  int64_t lens_seq_stride, lens_token_stride;
  int64_t extra_num_pages, extra_page_size, extra_page_stride, extra_slot_stride;
  int64_t extra_list_seq_stride, extra_list_token_stride, extra_list_length;
  int64_t extra_lens_seq_stride, extra_lens_token_stride;
  int64_t num_parts;          // parts of the schedule; S * num_splits without one
  int64_t num_splits;         // without a schedule: the maximum KV splits per sequence or list
  int64_t num_partials;       // 0, or S * num_splits, or with a schedule 2 * num_parts
  double sm_scale;
} RaLatent;

// The arguments of ra_make_decode_schedule, which divides the sequences' blocks of 64 keys among parts.
// reference/make_decode_schedule.py defines the result. `overhead` is the cost of each sequence in a part, in blocks.
typedef struct RaSchedule {
  const int32_t* lens;        // [S]
  const int32_t* extra_lens;  // [S], or null
  int32_t* parts;             // [num_parts, 8]
  int32_t* num_splits;        // [S + 1], cumulative
  int64_t num_seqs, num_parts, overhead, sparse;
} RaSchedule;

RA_API int ra_abi_version(void);
RA_API int64_t ra_size_of_latent(void);    // sizeof(RaLatent), which bindings compare with the size of their own record
RA_API int64_t ra_size_of_schedule(void);
RA_API int ra_status(int device, int* major, int* minor, int* num_multiprocessors);
// Writes the newest CUDA version that the driver supports (0 without a driver) and the linked runtime's version. 13020
// means CUDA 13.2.
RA_API void ra_versions(int* driver, int* runtime);
RA_API const char* ra_error_string(int code);

RA_API int ra_mla_decode_dense(const RaLatent* call, void* stream);        // plain cache
RA_API int ra_sparse_mla_prefill(const RaLatent* call, void* stream);      // plain cache, bfloat16; also sparse decode
RA_API int ra_mla_decode_sparse_fp8(const RaLatent* call, void* stream);   // fp8_v32 cache, bfloat16 queries
RA_API int ra_mla_decode_sparse_fp8_narrow(const RaLatent* call, void* stream);  // fp8_v32 cache, at most 32 heads
RA_API int ra_mla_decode_sparse_fp8_v4(const RaLatent* call, void* stream);  // fp8_v4 cache, bfloat16 queries
RA_API int ra_mla_decode_sparse_v41(const RaLatent* call, void* stream);  // RA_FP8_V41 and later, bfloat16 queries
RA_API int ra_make_decode_schedule(const RaSchedule* call, void* stream);

#ifdef __cplusplus
}

// The byte layout of a cache format. Formats either interleave codes and scales, or store a page's rows and then its
// scales.
struct RaFormat {
  int token;      // bytes per token, scales included; 0 for plain rows of d_qk 16-bit numbers
  int row;        // distance between rows, if a page's scales follow its rows; else 0
  int scales;     // distance between the scales of adjacent tokens, if a page's scales follow its rows; else 0
  int scales_at;  // offset of a token's scales in its row, if the format interleaves them; else 0
};
constexpr RaFormat kFormats[] = {{0, 0, 0, 0},    {656, 0, 0, 512},  {584, 576, 8, 0}, {528, 0, 0, 512},
                                 {528, 512, 16, 0}, {288, 0, 0, 256}, {288, 256, 32, 0}};
constexpr int kNumFormats = sizeof(kFormats) / sizeof(kFormats[0]);
constexpr RaFormat format_of(int64_t code) { return code >= 0 && code < kNumFormats ? kFormats[code] : kFormats[RA_PLAIN]; }
#endif
