// XLA handlers for the C ABI. Operands, results and numbers are in the order of the records in api.h.
//
// Every array is contiguous. An array without entries stands for one that the call lacks, and the record gets null for
// it. `numbers` is one attribute with the record's integers in their order, and `sm_scale` is a separate attribute.
// Anyone who knows a handler's name can call it, so the handler first checks the counts, types and sizes of arrays
// against the numbers.
//
// With RA_EMULATE, the handlers are for XLA's CPU platform, which has no stream. They then fill results with 0xff
// bytes, which are NaN or -1, before the call, to detect entries that no kernel writes.
#include <stdint.h>
#include <string.h>

#include <initializer_list>
#include <string>

#include "api.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kDv = 512;

// An array that XLA passes to a handler.
struct Array {
  ffi::AnyBuffer buffer;
  const char* name;
  int64_t count() const { return int64_t(buffer.element_count()); }
  void* data() const { return count() ? buffer.untyped_data() : nullptr; }
};

// The product of sizes, or -1 if it overflows. No array has -1 entries.
int64_t product(std::initializer_list<int64_t> sizes) {
  int64_t all = 1;
  bool countable = true;
  for (int64_t size : sizes) countable &= size >= 0 && !__builtin_mul_overflow(all, size, &all);
  return countable ? all : -1;
}

std::string text_of(ffi::AnyBuffer::Dimensions dims) {
  std::string text = "[";
  for (int64_t n : dims) text += (text.size() > 1 ? ", " : "") + std::to_string(n);
  return text + "]";
}

const char* name_of(ffi::DataType type) {
  switch (type) {
    case ffi::BF16: return "bfloat16";
    case ffi::F16: return "float16";
    case ffi::F32: return "float32";
    case ffi::S32: return "int32";
    case ffi::U8: return "uint8";
    default: return "another type";
  }
}

// Checks a call and keeps its first error.
class Check {
 public:
  explicit Check(const char* function) : function_(function) {}

  bool failed() const { return !error_message_.empty(); }
  ffi::Error error() const { return ffi::Error::InvalidArgument(std::string(function_) + ": " + error_message_); }

  void that(bool holds, std::string const& expected, std::string const& got) {
    if (!failed() && !holds) error_message_ = "expected " + expected + ", got " + got;
  }
  void count(const char* what, size_t wanted, size_t got) {
    that(wanted == got, std::to_string(wanted) + " " + what, std::to_string(got));
  }
  void type(Array const& array, ffi::DataType wanted) {
    if (!array.count()) return;
    ffi::DataType const got = array.buffer.element_type();
    bool const byte = wanted == ffi::U8 && (got == ffi::S8 || got == ffi::F8E4M3FN);
    that(got == wanted || byte, std::string(array.name) + " of " + name_of(wanted), name_of(got));
  }
  // Checks the number of entries. An optional array may have none.
  void entries(Array const& array, int64_t wanted, bool optional = false) {
    that(array.count() == wanted || (optional && !array.count()),
         std::string(array.name) + " of " + (wanted < 0 ? "too many" : std::to_string(wanted)) + " entries",
         text_of(array.buffer.dimensions()));
  }
  // Checks that the array contains all rows, of `row` elements each, that these sizes and strides address.
  void within(Array const& array, std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides,
              int64_t row) {
    int64_t last = row;
    auto stride = strides.begin();
    if (!array.count()) return;
    for (int64_t size : sizes) {
      that(*stride >= 0 && *stride <= array.count(), std::string("strides of ") + array.name + " from 0 to its entries",
           std::to_string(*stride));
      int64_t const far = product({size - 1, *stride++});
      last = failed() ? 0 : far < 0 || __builtin_add_overflow(last, far, &last) ? INT64_MAX : last;
    }
    that(last <= array.count(), std::string("strides of ") + array.name + " that end within it",
         std::to_string(last) + " entries of " + std::to_string(array.count()));
  }
  void aligned(Array const& array) {
    that(reinterpret_cast<uintptr_t>(array.data()) % 16 == 0, std::string(array.name) + " at a multiple of 16 bytes",
         "another address");
  }

 private:
  const char* function_;
  std::string error_message_;
};

// The arrays of a call. Before a handler uses any of them, it must call `complete`, which checks their number.
template <size_t kOperands, size_t kResults>
struct Arrays {
  const char* const (&names)[kOperands + kResults];
  ffi::RemainingArgs operands;
  ffi::RemainingRets results;

  bool complete(Check& check) const {
    check.count("operands", kOperands, operands.size());
    check.count("results", kResults, results.size());
    return !check.failed();
  }
  Array operator[](size_t index) const {
    if (index < kOperands) return {*operands.get<ffi::AnyBuffer>(index), names[index]};
    return {**results.get<ffi::AnyBuffer>(index - kOperands), names[index]};
  }
  void poison() const {
#ifdef RA_EMULATE
    for (size_t index = kOperands; index < kOperands + kResults; ++index) {
      Array const array = (*this)[index];
      if (array.count()) memset(array.data(), 0xff, array.buffer.size_bytes());
    }
#endif
  }
  ffi::Error outcome(const char* function, int code) const {
    if (!code) return ffi::Error::Success();
    std::string text = std::string(function) + " failed with code " + std::to_string(code) + ", " +
                       ra_error_string(code) + ":";
    for (size_t index = 0; index < kOperands + kResults; ++index) {
      Array const array = (*this)[index];
      if (!array.count()) continue;
      text += (text.back() == ':' ? " " : ", ") + std::string(array.name) + " " + text_of(array.buffer.dimensions());
    }
    return ffi::Error::Internal(text);
  }
};

enum {
  kQ, kKv, kLists, kLens, kSinks, kParts, kExtraKv, kExtraLists, kExtraLens,
  kOut, kLse, kMaxLogits, kPartialOut, kPartialLse, kPartialMax
};
constexpr const char* kLatentNames[] = {"q",   "kv",  "lists",      "lens",        "sinks",       "parts",
                                        "extra_kv", "extra_lists", "extra_lens",
                                        "out", "lse", "max_logits", "partial_out", "partial_lse", "partial_max"};
using LatentArrays = Arrays<9, 6>;
constexpr size_t kLatentNumbers = (offsetof(RaLatent, sm_scale) - offsetof(RaLatent, num_seqs)) / sizeof(int64_t);

void check_types(Check& check, LatentArrays const& arrays, RaLatent const& call) {
  check.that(call.dtype == RA_BFLOAT16 || call.dtype == RA_FLOAT16, "dtype 0 or 1", std::to_string(call.dtype));
  for (int64_t format : {call.format, call.extra_format})
    check.that(format >= 0 && format < kNumFormats, "a format from 0 to " + std::to_string(kNumFormats - 1),
               std::to_string(format));
  ffi::DataType const type = call.dtype == RA_BFLOAT16 ? ffi::BF16 : ffi::F16;
  check.type(arrays[kQ], type);
  check.type(arrays[kKv], format_of(call.format).token ? ffi::U8 : type);
  check.type(arrays[kExtraKv], format_of(call.extra_format).token ? ffi::U8 : type);
  for (size_t index : {kLists, kLens, kParts, kExtraLists, kExtraLens}) check.type(arrays[index], ffi::S32);
  check.type(arrays[kSinks], ffi::F32);
  check.type(arrays[kOut], type);
  for (size_t index : {kLse, kMaxLogits, kPartialOut, kPartialLse, kPartialMax}) check.type(arrays[index], ffi::F32);
}

int64_t width_of(RaLatent const& call, int64_t format) {
  int const token = format_of(format).token;
  return token ? token : call.d_qk;
}
void check_sizes(Check& check, LatentArrays const& arrays, RaLatent const& call) {
  int64_t const width = width_of(call, call.format);
  int64_t const rows = product({call.num_seqs, call.num_q_tokens, call.num_q_heads});
  int64_t const lists = call.sparse ? call.num_q_tokens * call.num_kv_heads : 1;
  int64_t const partial_rows = product({call.num_partials, call.num_q_tokens, call.num_q_heads});
  check.entries(arrays[kQ], product({rows, call.d_qk}));
  check.entries(arrays[kKv], product({call.num_pages, call.page_size, call.num_kv_heads, width}));
  check.entries(arrays[kLists], product({call.num_seqs, lists, call.list_length}));
  check.entries(arrays[kLens], product({call.num_seqs, call.lens_token_stride ? call.num_q_tokens : 1}), true);
  check.entries(arrays[kSinks], call.num_q_heads, true);
  check.entries(arrays[kParts], product({call.num_parts, 8}), true);
  check.entries(arrays[kExtraKv], product({call.extra_num_pages, call.extra_page_size, width_of(call, call.extra_format)}));
  check.entries(arrays[kExtraLists], product({call.num_seqs, call.num_q_tokens, call.extra_list_length}));
  check.entries(arrays[kExtraLens], product({call.num_seqs, call.extra_lens_token_stride ? call.num_q_tokens : 1}), true);
  check.entries(arrays[kOut], product({rows, kDv}));
  check.entries(arrays[kLse], rows);
  check.entries(arrays[kMaxLogits], rows, true);
  check.entries(arrays[kPartialOut], product({partial_rows, kDv}));
  check.entries(arrays[kPartialLse], partial_rows);
  check.entries(arrays[kPartialMax], arrays[kMaxLogits].count() ? partial_rows : 0);
  check.that(call.num_splits >= 1, "num_splits of at least 1", std::to_string(call.num_splits));
  int64_t const parts = product({call.num_seqs, call.num_splits}), scheduled = arrays[kParts].count();
  check.that(scheduled || call.num_parts == parts, std::to_string(parts) + " parts", std::to_string(call.num_parts));
  int64_t const partials = scheduled ? 2 * call.num_parts : call.num_splits == 1 ? 0 : parts;
  check.that(call.num_partials >= partials, "at least " + std::to_string(partials) + " partial results",
             std::to_string(call.num_partials));
}

void check_strides(Check& check, LatentArrays const& arrays, RaLatent const& call) {
  int64_t const width = width_of(call, call.format);
  check.within(arrays[kQ], {call.num_seqs, call.num_q_tokens, call.num_q_heads},
               {call.q_seq_stride, call.q_token_stride, call.q_head_stride}, call.d_qk);
  check.within(arrays[kKv], {call.num_pages, call.page_size, call.num_kv_heads},
               {call.page_stride, call.slot_stride, call.head_stride}, width);
  check.within(arrays[kLists], {call.num_seqs, call.num_q_tokens, call.num_kv_heads},
               {call.list_seq_stride, call.list_token_stride, call.list_head_stride}, call.list_length);
  if (arrays[kLens].count())
    check.within(arrays[kLens], {call.num_seqs, call.num_q_tokens}, {call.lens_seq_stride, call.lens_token_stride}, 1);
  check.within(arrays[kExtraKv], {call.extra_num_pages, call.extra_page_size},
               {call.extra_page_stride, call.extra_slot_stride}, width_of(call, call.extra_format));
  check.within(arrays[kExtraLists], {call.num_seqs, call.num_q_tokens},
               {call.extra_list_seq_stride, call.extra_list_token_stride}, call.extra_list_length);
  if (arrays[kExtraLens].count())
    check.within(arrays[kExtraLens], {call.num_seqs, call.num_q_tokens},
                 {call.extra_lens_seq_stride, call.extra_lens_token_stride}, 1);
  for (size_t index : {kQ, kKv, kExtraKv}) check.aligned(arrays[index]);
}

void check_numbers(Check& check, RaLatent const& call) {
  for (int64_t size : {call.num_seqs, call.num_pages, call.list_length, call.num_parts, call.num_partials,
                       call.extra_num_pages, call.extra_list_length})
    check.that(size >= 0 && size < (int64_t(1) << 31), "sizes below 2^31", std::to_string(size));
  for (int64_t size : {call.num_q_tokens, call.num_q_heads, call.num_kv_heads, call.d_qk, call.page_size,
                       call.extra_page_size})
    check.that(size >= 1 && size < (int64_t(1) << 31), "sizes from 1 to 2^31", std::to_string(size));
}

// Checks the arrays and numbers of a call, and launches it. A record begins with the addresses of all arrays, and its
// integers follow. `checks(check, arrays, call)` checks a record whose integers are set.
template <class Record, size_t kOperands, size_t kResults, class Checks>
ffi::Error run(const char* function, int (*launch)(const Record*, void*), void* stream,
               Arrays<kOperands, kResults> const& arrays, ffi::Span<const int64_t> numbers, size_t count, Record call,
               Checks checks) {
  static_assert(offsetof(Record, num_seqs) == (kOperands + kResults) * sizeof(void*), "numbers follow all arrays");
  Check check(function);
  check.count("numbers", count, numbers.size());
  if (!arrays.complete(check)) return check.error();
  memcpy(&call.num_seqs, numbers.begin(), sizeof(int64_t) * count);
  checks(check, arrays, call);
  if (check.failed()) return check.error();
  for (size_t index = 0; index < kOperands + kResults; ++index) {
    void* const data = arrays[index].data();
    memcpy(reinterpret_cast<char*>(&call) + index * sizeof data, &data, sizeof data);
  }
  arrays.poison();
  return arrays.outcome(function, launch(&call, stream));
}

ffi::Error latent(const char* function, int (*launch)(const RaLatent*, void*), void* stream,
                  ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Span<const int64_t> numbers,
                  double sm_scale) {
  RaLatent call = {};
  call.sm_scale = sm_scale;
  return run(function, launch, stream, LatentArrays{kLatentNames, operands, results}, numbers, kLatentNumbers, call,
             [](Check& check, LatentArrays const& arrays, RaLatent const& call) {
               check_numbers(check, call);
               if (check.failed()) return;  // the sizes that are computed below could overflow
               check_types(check, arrays, call);
               check_sizes(check, arrays, call);
               check_strides(check, arrays, call);
             });
}

enum { kScheduleLens, kScheduleExtraLens, kScheduleParts, kNumSplits };
constexpr const char* kScheduleNames[] = {"lens", "extra_lens", "parts", "num_splits"};
using ScheduleArrays = Arrays<2, 2>;
constexpr size_t kScheduleNumbers = (sizeof(RaSchedule) - offsetof(RaSchedule, num_seqs)) / sizeof(int64_t);

void check_schedule(Check& check, ScheduleArrays const& arrays, RaSchedule const& call) {
  check.that(call.num_parts >= 1, "num_parts of at least 1", std::to_string(call.num_parts));
  for (size_t index : {kScheduleLens, kScheduleExtraLens, kScheduleParts, kNumSplits}) check.type(arrays[index], ffi::S32);
  check.entries(arrays[kScheduleLens], call.num_seqs);
  check.entries(arrays[kScheduleExtraLens], call.num_seqs, true);
  check.entries(arrays[kScheduleParts], product({call.num_parts, 8}));
  check.entries(arrays[kNumSplits], product({call.num_seqs}) + 1);
}

auto bind() {
#ifdef RA_EMULATE
  return ffi::Ffi::Bind();
#else
  return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>();
#endif
}

}  // namespace

#ifdef RA_EMULATE
#define RA_STREAM_PARAMETER
#define RA_STREAM nullptr
#else
#define RA_STREAM_PARAMETER void *stream,
#define RA_STREAM stream
#endif

// A call only enqueues work on the stream, so it may become part of a CUDA graph.
#define RA_LATENT_HANDLER(name)                                                                                \
  extern "C" RA_API XLA_FFI_Error* name##_ffi(XLA_FFI_CallFrame* frame);                                       \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                               \
      name##_ffi,                                                                                              \
      [](RA_STREAM_PARAMETER ffi::RemainingArgs operands, ffi::RemainingRets results,                          \
         ffi::Span<const int64_t> numbers,                                                                     \
         double sm_scale) { return latent(#name, name, RA_STREAM, operands, results, numbers, sm_scale); },    \
      bind().RemainingArgs().RemainingRets().Attr<ffi::Span<const int64_t>>("numbers").Attr<double>("sm_scale"), \
      {ffi::Traits::kCmdBufferCompatible});

RA_LATENT_HANDLER(ra_mla_decode_dense)
RA_LATENT_HANDLER(ra_sparse_mla_prefill)
RA_LATENT_HANDLER(ra_mla_decode_sparse_fp8)
RA_LATENT_HANDLER(ra_mla_decode_sparse_fp8_narrow)
RA_LATENT_HANDLER(ra_mla_decode_sparse_fp8_v4)
RA_LATENT_HANDLER(ra_mla_decode_sparse_v41)

extern "C" RA_API XLA_FFI_Error* ra_make_decode_schedule_ffi(XLA_FFI_CallFrame* frame);
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    ra_make_decode_schedule_ffi,
    [](RA_STREAM_PARAMETER ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Span<const int64_t> numbers) {
      return run("ra_make_decode_schedule", ra_make_decode_schedule, RA_STREAM,
                 ScheduleArrays{kScheduleNames, operands, results}, numbers, kScheduleNumbers, RaSchedule{},
                 check_schedule);
    },
    bind().RemainingArgs().RemainingRets().Attr<ffi::Span<const int64_t>>("numbers"),
    {ffi::Traits::kCmdBufferCompatible});
