// The C ABI of the kernels, which ctypes (torch) and the XLA FFI library (jax) call. The emulation has the same ABI.
//
// No function here allocates, synchronises, prints or ends the process. A launcher enqueues on the given stream and
// returns 0, a cudaError_t, or one of the RA_ codes below; `ra_error_string` explains a code.
#pragma once
#include <stdint.h>

#define RA_API __attribute__((visibility("default")))
#define RA_ABI_VERSION 3

#ifdef __cplusplus
extern "C" {
#endif

enum {
  RA_WRONG_DEVICE = -1,   // the device has another architecture than the kernels are compiled for
  RA_NO_KERNEL = -2,      // no kernel was compiled for these arguments
  RA_DEADLOCK = -3,       // emulation only: all threads wait, or one did something that the hardware leaves undefined
  RA_NO_TENSOR_MAP = -4,  // the driver rejected the address, sizes or strides of the cache's pages for TMA
};

enum { RA_BFLOAT16 = 0, RA_FLOAT16 = 1 };  // RaLatent::dtype: of q, of out and of a plain cache
enum {  // RaLatent::format of the cache, and extra_format of the second cache
  RA_PLAIN = 0,
  RA_FP8_V32 = 1,
  RA_FP8_V4 = 2,
  RA_FP8_V41 = 3,
  RA_FP8_V41_PAGE = 4,  // a page holds the scales of all its tokens after all their codes
  RA_FP4_V41 = 5,
  RA_FP4_V41_PAGE = 6,
};

// Attention over latent rows. In a dense call, `lists` is the page table [S, M] and `lens` has the lengths of the
// sequences [S]. In a sparse call, `lists` has slots (page * page_size + offset) [S, Q, K, N], and `lens` their lengths
// [S, Q] or null. Any values in both are safe. A sparse call may have a second cache with its own lists, whose keys count
// like those of the first. It has the same format, or both have formats from RA_FP8_V41 on. Arrays come first, in the
// order in which the FFI library takes its operands and results; numbers follow.
// Strides count elements of the array's dtype (bytes of a quantised cache). The elements of a row are contiguous. A cache
// whose pages hold rows and scales apart (kFormats) needs no slot stride.
typedef struct RaLatent {
  // operands; null if the call has none
  const void* q;              // [S, Q, H, d_qk]
  const void* kv;             // [P, G, K, d_qk] or bytes; rows begin at multiples of 16 bytes (fp8_v4: 8)
  const int32_t* lists;
  const int32_t* lens;
  const float* sinks;         // [H]
  const int32_t* parts;       // a schedule's [num_parts, 8]
  const void* extra_kv;       // [P', G', 1, d_qk] or bytes
  const int32_t* extra_lists; // [S, Q, 1, N'], null exactly if there is no second cache
  const int32_t* extra_lens;  // [S, Q]
  // results, packed; null if not wanted
  void* out;                  // [S, Q, H, d_v]
  float* lse;                 // [S, H, Q]
  float* max_logits;          // [S, H, Q]
  float* partial_out;         // scratch [num_partials, Q, H, d_v]; null exactly if no sequence is ever split
  float* partial_lse;         // scratch [num_partials, Q, H], to base 2
  float* partial_max;         // scratch [num_partials, Q, H]; null with max_logits
  // numbers
  int64_t num_seqs, num_q_tokens, num_q_heads, num_kv_heads, d_qk;
  int64_t dtype, format, extra_format, sparse, causal;
  int64_t q_seq_stride, q_token_stride, q_head_stride;
  int64_t num_pages, page_size, page_stride, slot_stride, head_stride;
  int64_t list_seq_stride, list_token_stride, list_head_stride, list_length;  // length: M of a table, N of lists
  int64_t lens_seq_stride, lens_token_stride;
  int64_t extra_num_pages, extra_page_size, extra_page_stride, extra_slot_stride;
  int64_t extra_list_seq_stride, extra_list_token_stride, extra_list_length;
  int64_t extra_lens_seq_stride, extra_lens_token_stride;
  int64_t num_parts;          // of the schedule, or S * num_splits without one
  int64_t num_splits;         // without a schedule: the most parts that a sequence is divided into
  int64_t num_partials;       // 0, S * num_splits, or 2 * num_parts with a schedule
  double sm_scale;
} RaLatent;

// How the sequences' blocks of 64 keys are divided among parts; see reference/make_decode_schedule.py.
typedef struct RaSchedule {
  const int32_t* lens;        // [S]
  const int32_t* extra_lens;  // [S] or null
  int32_t* parts;             // [num_parts, 8]
  int32_t* num_splits;        // [S + 1]
  int64_t num_seqs, num_parts, overhead, sparse;
} RaSchedule;

RA_API int ra_abi_version(void);
RA_API int64_t ra_size_of_latent(void);    // sizeof(RaLatent), which bindings compare with their own
RA_API int64_t ra_size_of_schedule(void);
RA_API int ra_status(int device, int* major, int* minor, int* num_multiprocessors);
// The newest CUDA version that the driver supports, 0 without a driver, and that of the linked runtime: 13020 is 13.2.
RA_API void ra_versions(int* driver, int* runtime);
RA_API const char* ra_error_string(int code);

RA_API int ra_mla_decode_dense(const RaLatent* call, void* stream);        // plain cache
RA_API int ra_sparse_mla_prefill(const RaLatent* call, void* stream);      // plain cache, bfloat16; sparse decode too
RA_API int ra_mla_decode_sparse_fp8(const RaLatent* call, void* stream);   // fp8_v32 cache, bfloat16 queries
RA_API int ra_mla_decode_sparse_fp8_narrow(const RaLatent* call, void* stream);  // fp8_v32 cache, at most 32 heads
RA_API int ra_mla_decode_sparse_fp8_v4(const RaLatent* call, void* stream);  // fp8_v4 cache, bfloat16 queries
RA_API int ra_mla_decode_sparse_v41(const RaLatent* call, void* stream);  // formats from RA_FP8_V41 on, bfloat16 queries
RA_API int ra_make_decode_schedule(const RaSchedule* call, void* stream);

#ifdef __cplusplus
}

// The bytes that a cache of each format holds.
struct RaFormat {
  int token;      // per token; 0: d_qk numbers of 16 bits
  int row;        // if a page holds the scales of all tokens after all rows: from one row to the next; else 0
  int scales;     // in such a page: from one token's scales to the next one's
  int scales_at;  // in any other page: where a token's scales begin
};
constexpr RaFormat kFormats[] = {{0, 0, 0, 0},    {656, 0, 0, 512},  {584, 576, 8, 0}, {528, 0, 0, 512},
                                 {528, 512, 16, 0}, {288, 0, 0, 256}, {288, 256, 32, 0}};
constexpr int kNumFormats = sizeof(kFormats) / sizeof(kFormats[0]);
constexpr RaFormat format_of(int64_t code) { return code >= 0 && code < kNumFormats ? kFormats[code] : kFormats[RA_PLAIN]; }
#endif
