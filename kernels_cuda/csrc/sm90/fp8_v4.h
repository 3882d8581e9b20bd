// Sparse attention over an `fp8_v4` cache. A row has 448 e4m3 codes and 64 bfloat16 columns. A page stores its rows
// first, then 8 bytes for each row, which are seven e8m0 scales and a byte of padding.
//
// The bfloat16 columns belong to the value too. Weights multiply all columns of the value and have one type, so codes
// cannot stay float16 as in `Fp8Decode`. But a scale is a power of two, so the product of a code and its scale is exact
// in bfloat16. Eight threads decode a row, each 8 columns of each of the row's eight slabs. One scale applies to a
// whole slab of 64 columns. The last slab is copied unchanged.
#pragma once
#include "decoding.h"

struct Fp8V4 : Decoding<Fp8V4, 8> {
  // A thread's share of half H of a block: for each of its four rows, 8 codes and the scale of each of the half's four
  // slabs. A row's slab 7 (H = 1) is bfloat16: of its 8 numbers, `codes[i][3]` has the first four, `rest[i]` the others.
  struct Share {
    uint2 codes[4][kHalf], rest[4];
    uint32_t scales[4];
  };

  template <int H>
  RA_DEV static void load(Plan const& plan, Rows const& rows, Share& share) {
    char const* const cache = rows.extra ? plan.extra.cache : plan.keys.cache;
    int const chunk = op::fresh_tid() % 8;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      bool const seen = rows.block.at[i] != kUnseen;
      char const* const row = row_at(cache + chunk * 8, rows.block.at[i]);
      share.scales[i] = op::load4(row_at(cache, rows.scales[i]) + 4 * H, seen);
      CUTE_UNROLL
      for (int j = 0; j < kHalf; ++j)
        if (H * kHalf + j < 7) share.codes[i][j] = op::load8<kAgain>(row + (H * kHalf + j) * 64, seen);
      if (H == 0) continue;
      share.codes[i][3] = op::load8<kAgain>(row + 448 + chunk * 8, seen);  // first 8 of this thread's 16 bytes
      share.rest[i] = op::load8<kAgain>(row + 456 + chunk * 8, seen);
    }
  }
  // 2^(code - 127) as two bfloat16. Code 255 is NaN.
  RA_DEV static uint32_t scale_of(uint32_t code) {
    return (code == 255 ? 0x7fc0 : code == 0 ? 0x40 : code << 7) * 0x10001;
  }
  // The products of two codes and their scale, as two bfloat16. They are exact, since the scale is a power of two.
  RA_DEV static uint32_t decoded(uint32_t codes, uint32_t scale) {
    uint32_t const halves = op::half_pair(uint16_t(codes));
    return op::multiply(op::pack<bf16>(op::low_half(halves), op::high_half(halves)), scale);
  }
  template <int S, int H>
  RA_DEV static void store(Share const& share, Smem& s, int t) {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i)
      CUTE_UNROLL
      for (int j = 0; j < kHalf; ++j) {
        uint2 const codes = share.codes[i][j];
        uint4 words = {codes.x, codes.y, share.rest[i].x, share.rest[i].y};
        if (H * kHalf + j < 7) {
          uint32_t const scale = scale_of(share.scales[i] >> 8 * j & 0xff);
          words = {decoded(codes.x & 0xffff, scale), decoded(codes.x >> 16, scale), decoded(codes.y & 0xffff, scale),
                   decoded(codes.y >> 16, scale)};
        }
        op::store(reinterpret_cast<uint4*>(s.keys[S][H * kHalf + j] + offset_of(t / 8 + 16 * i, t % 8)), words);
      }
  }
  template <int S, int H>
  RA_DEV static void fill(Plan const& plan, Rows const& rows, int turn, Smem& s) {
    decode<S, H, Share>(
        rows, turn, s, [&](Share& share) { load<H>(plan, rows, share); },
        [&](Share const& share, int t) { store<S, H>(share, s, t); });
  }
};
