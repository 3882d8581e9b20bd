// Divides the work of a call among thread blocks. All functions are pure. Lengths and schedules may hold any values:
// each value is clamped to its range as it is read.
#pragma once
#include <string.h>

#include "api.h"
#include "ops.h"

constexpr double kLog2e = 1.4426950408889634;
constexpr int kBlock = 64;                     // keys per block
constexpr int kMostKeys = 2147483647 - 65535;  // keys per list; the sum with kMostSplits fits 32 bits
constexpr int kMostSplits = 65535;             // KV splits per list
constexpr int kWhole = -1, kAbsent = -2;       // values of `slot` that name no partial result; see Range

RA_HD int clamped(int64_t value, int64_t low, int64_t high) {
  return static_cast<int>(value < low ? low : value > high ? high : value);
}
RA_HD int ceil_div(int a, int b) { return (a + b - 1) / b; }

// A divisor that is known before the launch. `divide` divides a number below 2^31 by it with one multiplication and a
// shift.
struct Divisor {
  uint32_t multiplier;  // 2^(31 + shift) / divisor, rounded up
  int shift;            // exponent of the divisor rounded up to a power of two
};
inline Divisor divisor_of(uint32_t number) {
  int shift = 0;
  while ((uint64_t(1) << shift) < number) ++shift;
  return {uint32_t(((uint64_t(1) << (31 + shift)) + number - 1) / number), shift};
}
RA_HD uint32_t divide(uint32_t number, Divisor by) {
  return uint32_t(uint64_t(number * 2) * by.multiplier >> 32) >> by.shift;
}

// One cache and the lists that select its rows. Offsets of rows are 32-bit and count units of a fixed number of bytes.
// In a sparse call, slot s begins at s * slot + (s / page_size) * gap. In a dense call, position p of a sequence, which
// lies in page n, begins at p % page_size * slot + n * (page_size * slot + gap). Intermediate sums may wrap around. KV
// head h begins h * head later.
struct Keys {
  char const* cache;
  int const* lists;  // lists of slots; in a dense call, lists of pages
  int const* lens;
  int64_t seq_stride, token_stride, head_stride, lens_seq_stride, lens_token_stride;
  int longest;       // maximum number of keys per list
  uint32_t count;    // number of slots, or of pages in a dense call; valid list entries are below it
  int page_size;
  Divisor by_page_size;
  uint32_t slot, gap, head;
  // In formats with 8-bit scales: the offset of slot 0's scales, and `slot` and `gap` for scales instead of rows.
  uint32_t scales, scale_slot, scale_gap;
};

// A call, and 32-bit numbers derived from it.
struct Plan {
  RaLatent call;
  Keys keys, extra;
  int num_seqs, num_q_tokens, num_q_heads, num_kv_heads, group, num_parts, num_splits;
  int rows;     // query rows per list: (token, head) pairs of a KV head; in a sparse call, of one token only
  int tiles;    // tiles of 64 query rows per list
  int tokens;   // lists per sequence and KV head: one per query token in sparse calls, else 1
  float scale;  // factor that turns q . k into a base-2 logit
};

// Whether a byte of the format holds the codes of two columns. Formats with 4-bit codes have the highest numbers.
RA_HD bool has_packed_codes(int64_t format) { return format >= RA_FP4_V41; }

inline Keys keys_of(RaLatent const& call, int unit) {
  RaFormat const format = format_of(call.format);
  int const size = format.token ? 1 : 2;
  auto const units = [=](int64_t elements) { return uint32_t(elements * size / unit); };
  int64_t const keys = call.sparse ? call.list_length : call.list_length * call.page_size;
  int64_t const entries = call.sparse ? call.num_pages * call.page_size : call.num_pages;
  uint32_t const slot = units(format.row ? format.row : call.slot_stride), page = units(call.page_stride);
  uint32_t const page_size = uint32_t(call.page_size), scale_slot = format.row ? units(format.scales) : slot;
  uint32_t const scales = format.row ? page_size * slot : units(format.scales_at);
  return {
      static_cast<char const*>(call.kv), call.lists, call.lens, call.list_seq_stride, call.list_token_stride,
      call.list_head_stride, call.lens_seq_stride, call.lens_token_stride, clamped(keys, 0, kMostKeys),
      uint32_t(clamped(entries, 0, INT32_MAX)), int(call.page_size), divisor_of(uint32_t(call.page_size)), slot,
      page - page_size * slot, units(call.head_stride), scales, scale_slot, page - page_size * scale_slot,
  };
}
// The call with its second cache and lists in place of the first.
inline RaLatent extra_call_of(RaLatent call) {
  call.format = call.extra_format;
  call.kv = call.extra_kv, call.lists = call.extra_lists, call.lens = call.extra_lens;
  call.num_pages = call.extra_num_pages, call.page_size = call.extra_page_size;
  call.page_stride = call.extra_page_stride, call.slot_stride = call.extra_slot_stride, call.head_stride = 0;
  call.list_seq_stride = call.extra_list_seq_stride, call.list_token_stride = call.extra_list_token_stride;
  call.list_head_stride = 0, call.list_length = call.extra_list_length;
  call.lens_seq_stride = call.extra_lens_seq_stride, call.lens_token_stride = call.extra_lens_token_stride;
  return call;
}
// The plan of a call. `unit` is the number of bytes per unit of row offsets.
inline Plan plan_of(RaLatent const& call, int unit) {
  Plan plan{};
  plan.call = call;
  plan.keys = keys_of(call, unit);
  if (call.extra_lists) plan.extra = keys_of(extra_call_of(call), unit);
  plan.num_seqs = int(call.num_seqs);
  plan.num_q_tokens = int(call.num_q_tokens);
  plan.num_q_heads = int(call.num_q_heads);
  plan.num_kv_heads = int(call.num_kv_heads);
  plan.group = int(call.num_q_heads / call.num_kv_heads);
  plan.num_parts = int(call.num_parts);
  plan.num_splits = int(call.num_splits);
  plan.rows = call.sparse ? plan.group : plan.group * plan.num_q_tokens;
  plan.tiles = ceil_div(plan.rows, 64);
  plan.tokens = call.sparse ? plan.num_q_tokens : 1;
  plan.scale = float(call.sm_scale * kLog2e);
  return plan;
}

// Whether the sizes are valid and fit the 32 bits in which kernels count rows, keys and parts. Products with strides
// have 64 bits.
inline bool sizes_fit(RaLatent const& call) {
  auto const fits = [](int64_t size, int64_t least) { return size >= least && size <= kMostKeys; };
  for (int64_t size : {call.num_seqs, call.num_q_tokens, call.num_q_heads, call.num_pages, call.list_length,
                       call.extra_num_pages, call.extra_list_length})
    if (!fits(size, 0)) return false;
  if (!fits(call.num_kv_heads, 1) || !fits(call.page_size, 1) || !fits(call.num_q_tokens * call.num_q_heads, 0)) return false;
  if (call.extra_lists && (!call.sparse || call.num_kv_heads != 1 || !fits(call.extra_page_size, 1))) return false;
  // Positions of the second list continue those of the first.
  if (!fits(call.list_length + call.extra_list_length, 0)) return false;
  if (call.parts) return fits(call.num_parts, 1) && fits(2 * call.num_parts, 0);
  return call.num_splits >= 1 && call.num_splits <= kMostSplits && call.num_parts == call.num_seqs * call.num_splits &&
         fits(call.num_parts, 0);
}

// The number of keys of a sequence or, in a sparse call, of a query token's list.
RA_HD int length_of(Keys const& keys, int seq, int token) {
  if (keys.lens == nullptr) return keys.longest;
  return clamped(keys.lens[seq * keys.lens_seq_stride + token * keys.lens_token_stride], 0, keys.longest);
}
// The number of blocks of a sequence or list. A second list begins with a new block.
RA_HD int blocks_of(Plan const& plan, int seq, int token) {
  int const blocks = ceil_div(length_of(plan.keys, seq, token), kBlock);
  return plan.extra.lists ? blocks + ceil_div(length_of(plan.extra, seq, token), kBlock) : blocks;
}

// The first sequence of a part, and the part's first block in it. A part is a run of blocks, possibly over several
// sequences. It ends where the next part begins. So the parts of a schedule cover all blocks of a call, even if the
// schedule was made for different lengths.
struct Start {
  int seq, block;
};
RA_HD Start start_of(Plan const& plan, int part) {
  if (part >= plan.num_parts) return {plan.num_seqs, 0};
  int const* row = plan.call.parts + int64_t(8) * part;
  return {clamped(row[0], 0, plan.num_seqs), clamped(row[1], 0, kMostKeys)};
}

// The first and the last sequence of a part. A part without blocks may have `last` < `first`.
struct Seqs {
  int first, last;
};
RA_HD Seqs seqs_of(Plan const& plan, int part) {
  if (plan.call.parts == nullptr) return {part / plan.num_splits, part / plan.num_splits};
  Start const begin = start_of(plan, part), end = start_of(plan, part + 1);
  return {begin.seq, end.block > 0 && end.seq < plan.num_seqs ? end.seq : end.seq - 1};
}

// The blocks [begin, end) of a sequence that a part computes, and where it writes their result. `slot` is kWhole (the
// output, because the part has all blocks), kAbsent (nowhere, because it has none), or the index of a partial result.
struct Range {
  int begin, end, slot;
};
RA_HD Range range_of(Plan const& plan, int part, int seq, int blocks) {
  int begin, end, slot;
  if (plan.call.parts == nullptr) {
    int const each = ceil_div(blocks > 0 ? blocks : 1, plan.num_splits);
    int64_t const from = int64_t(part % plan.num_splits) * each;
    begin = clamped(from, 0, kMostKeys);
    end = clamped(from + each, 0, blocks);
    slot = part;
  } else {
    Start const from = start_of(plan, part), to = start_of(plan, part + 1);
    begin = from.seq == seq ? from.block : 0;
    end = to.seq == seq ? clamped(to.block, 0, blocks) : blocks;
    slot = 2 * part + (from.seq != seq);
  }
  if (begin == 0 && end >= blocks) return {0, blocks, kWhole};
  if (begin >= end) return {0, 0, kAbsent};
  return {begin, end, slot};
}

// The part that computes a sequence's first block.
RA_HD int first_part_of(Plan const& plan, int seq) {
  if (plan.call.parts == nullptr) return seq * plan.num_splits;
  int low = 0, high = plan.num_parts - 1;
  while (low < high) {
    int const middle = low + (high - low + 1) / 2;
    Start const start = start_of(plan, middle);
    if (start.seq < seq || (start.seq == seq && start.block == 0)) low = middle;
    else high = middle - 1;
  }
  return low;
}
// Whether a part after a sequence's first one belongs to the sequence too.
RA_HD bool continues(Plan const& plan, int part, int seq) {
  if (part >= plan.num_parts) return false;
  return plan.call.parts == nullptr ? part / plan.num_splits == seq : start_of(plan, part).seq == seq;
}

// The work of a thread block: one tile of 64 query rows that share a list, and the blocks of one part. Thread blocks
// that read the same keys have adjacent indices, so that all except the first find the keys in L2.
struct Job {
  int part, token, kv_head, tile;
};
RA_HD Job job_of(Plan const& plan, int block) {
  return {block / (plan.tiles * plan.num_kv_heads * plan.tokens), block / (plan.tiles * plan.num_kv_heads) % plan.tokens,
          block / plan.tiles % plan.num_kv_heads, block % plan.tiles};
}
inline int64_t num_jobs(Plan const& plan) {
  return int64_t(plan.num_parts) * plan.tokens * plan.num_kv_heads * plan.tiles;
}

struct Query {
  int token, head;
};
RA_HD Query query_of(Plan const& plan, Job const& job, int row, bool sparse) {
  if (sparse) return {job.token, job.kv_head * plan.group + row};
  return {row / plan.group, job.kv_head * plan.group + row % plan.group};
}

// Whether all bytes of an object are zero.
inline bool is_zero(void const* memory, size_t size) {
  for (size_t i = 0; i < size; ++i)
    if (static_cast<unsigned char const*>(memory)[i]) return false;
  return true;
}

// The exponent of the power of two by which a row of queries is divided. `largest_bits` are the bits of the row's
// largest magnitude, which is then below 2^9. If the rotary columns are divided too, `rest_bits` are the bits of their
// largest magnitude, which is then below 2^69, so that their products fit float32.
RA_HD int unit_exponent(uint32_t largest_bits, uint32_t rest_bits = 0) {
  int const value = int(largest_bits >> 23) - 127 - 8, rest = int(rest_bits >> 23) - 127 - 68;
  return clamped(value > rest ? value : rest, -118, 119);
}
// The exponent of the power of two by which a key's scales are divided: that of the largest scale, in [-60, 122].
// Scales below 2^-60 change no logit noticeably. If the largest is above 2^122, the excess stays in the quotients.
RA_HD int scale_exponent(uint32_t largest_bits) { return clamped(int(largest_bits >> 23) - 127, -60, 122); }
RA_HD uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
RA_HD float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
RA_HD float power_of_two(int exponent) { return float_of(uint32_t(exponent + 127) << 23); }
// The exponent of a positive finite number; 0 for any other value.
RA_HD int exponent_of(float x) { return x > 0.f && x < INFINITY ? int(bits_of(x) >> 23) - 127 : 0; }
