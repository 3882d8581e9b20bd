// The division of work: pure functions of a call and of its index arrays, which may hold any values.
#pragma once
#include <string.h>

#include "api.h"
#include "ops.h"

constexpr double kLog2e = 1.4426950408889634;
constexpr int kBlock = 64;                     // keys
constexpr int kMostKeys = 2147483647 - 65535;  // per list, so that positions fit 32 bits
constexpr int kMostSplits = 65535;             // per list
constexpr int kWhole = -1, kAbsent = -2;       // in place of the number of a partial result

RA_HD int clamped(int64_t value, int64_t low, int64_t high) {
  return static_cast<int>(value < low ? low : value > high ? high : value);
}
RA_HD int ceil_div(int a, int b) { return (a + b - 1) / b; }

// A divisor known before the launch. Dividing a number below 2^31 by it takes a multiplication and a shift.
struct Divisor {
  uint32_t multiplier;  // 2^(31 + shift) / divisor, rounded up
  int shift;            // 2^shift is the divisor, or the next power of two
};
inline Divisor divisor_of(uint32_t number) {
  int shift = 0;
  while ((uint64_t(1) << shift) < number) ++shift;
  return {uint32_t(((uint64_t(1) << (31 + shift)) + number - 1) / number), shift};
}
RA_HD uint32_t divide(uint32_t number, Divisor by) {
  return uint32_t(uint64_t(number * 2) * by.multiplier >> 32) >> by.shift;
}

// The rows of a cache, and the lists that name them. The offset of a row is counted in units of a number of bytes, in 32
// bits, and intermediate sums may wrap: slot s of a sparse call is at s * slot + (s / page_size) * gap, position p of a
// page at p % page_size * slot + page * (page_size * slot + gap).
struct Keys {
  char const* cache;
  int const* lists;  // of slots, or in a dense call of pages
  int const* lens;
  int64_t seq_stride, token_stride, head_stride, lens_seq_stride, lens_token_stride;
  int longest;       // the most keys of a list
  uint32_t count;    // of slots, or of pages; entries from this number on are invalid
  int page_size;
  Divisor by_page_size;
  uint32_t slot, gap, head;
  // For formats with 8-bit scales: the offset of the scales of slot 0, and the `slot` and `gap` of scales.
  uint32_t scales, scale_slot, scale_gap;
};

// A call with numbers derived from it, which fit registers.
struct Plan {
  RaLatent call;
  Keys keys, extra;
  int num_seqs, num_q_tokens, num_q_heads, num_kv_heads, group, num_parts, num_splits;
  int rows;     // that share a list: the tokens and heads of a KV head; in sparse calls the heads of one token
  int tiles;    // of 64 rows
  int tokens;   // with their own lists
  float scale;  // of logits to base 2
};

// Whether a byte holds the codes of two columns: formats with 4-bit codes are the last ones.
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
// The call with its second cache in place of the first.
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
// The plan of a call; `unit` is the number of bytes in which offsets of rows are counted.
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

// Whether sizes fit the 32 bits in which kernels count rows, keys and parts. Products with strides have 64 bits.
inline bool sizes_fit(RaLatent const& call) {
  auto const fits = [](int64_t size, int64_t least) { return size >= least && size <= kMostKeys; };
  for (int64_t size : {call.num_seqs, call.num_q_tokens, call.num_q_heads, call.num_pages, call.list_length,
                       call.extra_num_pages, call.extra_list_length})
    if (!fits(size, 0)) return false;
  if (!fits(call.num_kv_heads, 1) || !fits(call.page_size, 1) || !fits(call.num_q_tokens * call.num_q_heads, 0)) return false;
  if (call.extra_lists && (!call.sparse || call.num_kv_heads != 1 || !fits(call.extra_page_size, 1))) return false;
  if (!fits(call.list_length + call.extra_list_length, 0)) return false;  // positions continue in the second list
  if (call.parts) return fits(call.num_parts, 1) && fits(2 * call.num_parts, 0);
  return call.num_splits >= 1 && call.num_splits <= kMostSplits && call.num_parts == call.num_seqs * call.num_splits &&
         fits(call.num_parts, 0);
}

// The keys of a sequence, or in sparse calls of the list of one of its query tokens.
RA_HD int length_of(Keys const& keys, int seq, int token) {
  if (keys.lens == nullptr) return keys.longest;
  return clamped(keys.lens[seq * keys.lens_seq_stride + token * keys.lens_token_stride], 0, keys.longest);
}
// The blocks of a sequence; a second list begins with a new block.
RA_HD int blocks_of(Plan const& plan, int seq, int token) {
  int const blocks = ceil_div(length_of(plan.keys, seq, token), kBlock);
  return plan.extra.lists ? blocks + ceil_div(length_of(plan.extra, seq, token), kBlock) : blocks;
}

// The beginning of a part: a sequence and one of its blocks. Each part ends where the next one begins, so all parts
// together cover all blocks, even if the schedule was made for other lengths.
struct Start {
  int seq, block;
};
RA_HD Start start_of(Plan const& plan, int part) {
  if (part >= plan.num_parts) return {plan.num_seqs, 0};
  int const* row = plan.call.parts + int64_t(8) * part;
  return {clamped(row[0], 0, plan.num_seqs), clamped(row[1], 0, kMostKeys)};
}

// The first and the last sequence of a part.
struct Seqs {
  int first, last;
};
RA_HD Seqs seqs_of(Plan const& plan, int part) {
  if (plan.call.parts == nullptr) return {part / plan.num_splits, part / plan.num_splits};
  Start const begin = start_of(plan, part), end = start_of(plan, part + 1);
  return {begin.seq, end.block > 0 && end.seq < plan.num_seqs ? end.seq : end.seq - 1};
}

// Which of a sequence's `blocks` a part computes, and where it writes: `slot` is kWhole (the output), kAbsent (nothing to
// compute), or the number of a partial result.
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

// The part that computes the first block of a sequence.
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
// Whether a part continues a sequence that an earlier part began.
RA_HD bool continues(Plan const& plan, int part, int seq) {
  if (part >= plan.num_parts) return false;
  return plan.call.parts == nullptr ? part / plan.num_splits == seq : start_of(plan, part).seq == seq;
}

// The job of a thread block: 64 of the rows that share a list, over the blocks of a part. Thread blocks that share keys
// have neighbouring numbers, so that the second one finds the keys in L2.
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

// Whether all bytes are zero.
inline bool is_zero(void const* memory, size_t size) {
  for (size_t i = 0; i < size; ++i)
    if (static_cast<unsigned char const*>(memory)[i]) return false;
  return true;
}

// The exponent of the power of two that divides a row of queries with this largest magnitude to bring it below 2^9. If the
// rotary columns are far larger, the power is greater, to bring them below 2^69: then their products fit float32.
RA_HD int unit_exponent(uint32_t largest_bits, uint32_t rest_bits = 0) {
  int const value = int(largest_bits >> 23) - 127 - 8, rest = int(rest_bits >> 23) - 127 - 68;
  return clamped(value > rest ? value : rest, -118, 119);
}
// The exponent to which a key's scales are relative: that of the largest scale, clamped. Scales below 2^-60 add nothing
// to a logit that could be told from 0; above 2^122, the excess stays in the scales.
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
