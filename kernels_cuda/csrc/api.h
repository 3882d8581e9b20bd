// The C ABI of the kernels: what ctypes (torch) and the XLA FFI library (jax) call, and what the emulation offers too.
//
// Nothing here allocates, synchronises, prints or ends the process. A launcher enqueues on the given stream and returns
// 0, a cudaError_t, or one of the RA_ codes below; `ra_error_string` says what a code means.
#pragma once
#include <stdint.h>

#define RA_API __attribute__((visibility("default")))
#define RA_ABI_VERSION 3

#ifdef __cplusplus
extern "C" {
#endif

enum {
  RA_WRONG_DEVICE = -1,  // a device is here, but not of the architecture that the kernels are made for
  RA_NO_KERNEL = -2,     // arguments that no kernel was compiled for
  RA_DEADLOCK = -3,      // the emulation's: every thread waits, or does what the hardware does not define
  RA_NO_TENSOR_MAP = -4,  // the driver did not take the address, sizes or strides of the cache's pages for TMA
};

enum { RA_BFLOAT16 = 0, RA_FLOAT16 = 1 };              // RaLatent::dtype, of q, out and a plain cache
enum {  // RaLatent::format of the cache, and extra_format of the second
  RA_PLAIN = 0,
  RA_FP8_V32 = 1,
  RA_FP8_V4 = 2,
  RA_FP8_V41 = 3,
  RA_FP8_V41_PAGE = 4,  // with the scales of a page behind all its codes
  RA_FP4_V41 = 5,
  RA_FP4_V41_PAGE = 6,
};

// Attention over latent rows. Dense: `lists` is the page table [S, M] and `lens` the sequences' lengths [S]. Sparse:
// `lists` has slots (page * page_size + offset) [S, Q, K, N], `lens` their lengths [S, Q] or null. Any value in either
// is safe. A sparse call may have a second cache with lists of its own, whose keys count like those of the first; it is
// of the same format, or both are of the formats from RA_FP8_V41 on. Arrays first, in the order in which the FFI library
// takes its operands and results, then numbers.
// Strides count elements of the array's dtype (bytes of a quantised cache); a row's elements are adjacent. A page of an
// fp8_v4 cache has rows of 576 bytes, then rows of 8 with their scales; one of RA_FP8_V41_PAGE of 512 and 16, of
// RA_FP4_V41_PAGE of 256 and 32. These need no slot stride.
typedef struct RaLatent {
  // operands; null where the call has none
  const void* q;              // [S, Q, H, d_qk]
  const void* kv;             // [P, G, K, d_qk] or bytes; rows begin at multiples of 16 bytes (fp8_v4: 8)
  const int32_t* lists;
  const int32_t* lens;
  const float* sinks;         // [H]
  const int32_t* parts;       // a schedule's [num_parts, 8]
  const void* extra_kv;       // [P', G', 1, d_qk] or bytes
  const int32_t* extra_lists; // [S, Q, 1, N'], null exactly if there is no second cache
  const int32_t* extra_lens;  // [S, Q]
  // results, packed; null where not wanted
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
  int64_t num_splits;         // without a schedule: the most parts that a sequence is cut into
  int64_t num_partials;       // 0, S * num_splits, or 2 * num_parts with a schedule
  double sm_scale;
} RaLatent;

// How the sequences' blocks of 64 keys are dealt to parts; see reference/make_decode_schedule.py.
typedef struct RaSchedule {
  const int32_t* lens;        // [S]
  const int32_t* extra_lens;  // [S] or null
  int32_t* parts;             // [num_parts, 8]
  int32_t* num_splits;        // [S + 1]
  int64_t num_seqs, num_parts, overhead, sparse;
} RaSchedule;

RA_API int ra_abi_version(void);
RA_API int64_t ra_size_of_latent(void);    // sizeof(RaLatent), for bindings to compare with their own
RA_API int64_t ra_size_of_schedule(void);
RA_API int ra_status(int device, int* major, int* minor, int* num_multiprocessors);
// The newest CUDA that the driver knows, 0 where there is none, and that of the runtime in here: 13020 is 13.2.
RA_API void ra_versions(int* driver, int* runtime);
RA_API const char* ra_error_string(int code);

RA_API int ra_mla_decode_dense(const RaLatent* call, void* stream);        // plain cache
RA_API int ra_sparse_mla_prefill(const RaLatent* call, void* stream);      // plain cache, bfloat16; decode of lists too
RA_API int ra_mla_decode_sparse_fp8(const RaLatent* call, void* stream);   // fp8_v32 cache, bfloat16 queries
RA_API int ra_mla_decode_sparse_fp8_narrow(const RaLatent* call, void* stream);  // the same, of at most 32 heads
RA_API int ra_mla_decode_sparse_fp8_v4(const RaLatent* call, void* stream);  // fp8_v4 cache, bfloat16 queries
RA_API int ra_mla_decode_sparse_v41(const RaLatent* call, void* stream);  // formats from RA_FP8_V41 on, bfloat16 queries
RA_API int ra_make_decode_schedule(const RaSchedule* call, void* stream);

#ifdef __cplusplus
}
#endif
