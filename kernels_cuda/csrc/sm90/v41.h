// Sparse attention over `fp8_v41` and `fp4_v41` caches, or over one of each. A row of `fp8_v41` has 512 e4m3 codes and
// an e8m0 scale per 32 codes. A row of `fp4_v41` has 512 e2m1 codes, two per byte, and an e4m3 scale per 16 codes. The
// scales follow either each row's codes or all codes of a page.
//
// The product of a code and its scale is exact in bfloat16: an e8m0 scale is a power of two, and an e2m1 code times an
// e4m3 scale has six significant bits. Eight threads decode a row, each 16 of every 128 columns. Such a 16-column piece
// has one scale in both formats. e2m1 codes are first converted to e4m3 codes of equal value. All rows of a block are
// in one cache, so threads do not diverge on the format.
#pragma once
#include "fp8_v4.h"

struct V41 : Decoding<V41, 16> {
  static constexpr int kPieces = 2;  // 16-column pieces per thread in half a row

  // A thread's share of half H of a block. The e2m1 codes of a piece take only the first two words.
  struct Share {
    uint4 codes[4][kPieces];
    uint32_t scales[4][kPieces];  // words of four scales, one of which is the piece's
  };

  template <int H, bool kFour>
  RA_DEV static void load(Plan const& plan, Rows const& rows, Share& share) {
    // kBytes: bytes of a piece's codes. kScales: bytes of 128 columns' scales.
    constexpr int kBytes = kFour ? 8 : 16, kScales = kFour ? 8 : 4;
    char const* const cache = rows.extra ? plan.extra.cache : plan.keys.cache;
    int const chunk = op::fresh_tid() % 8;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      bool const seen = rows.block.at[i] != kUnseen;
      char const* const row = row_at(cache + chunk * kBytes, rows.block.at[i]);
      char const* const scales = row_at(cache + (kFour ? chunk / 4 * 4 : 0), rows.scales[i]);
      CUTE_UNROLL
      for (int j = 0; j < kPieces; ++j) {
        share.scales[i][j] = op::load4(scales + (H * kPieces + j) * kScales, seen);
        if constexpr (kFour) {
          uint2 const words = op::load8<kAgain>(row + (H * kPieces + j) * 8 * kBytes, seen);
          share.codes[i][j] = {words.x, words.y, 0, 0};
        } else {
          share.codes[i][j] = op::load16<kAgain>(row + (H * kPieces + j) * 8 * kBytes, seen);
        }
      }
    }
  }
  // Converts the four e2m1 codes in the low 16 bits to e4m3 codes of equal value. A table has the eight magnitudes.
  RA_DEV static uint32_t widened(uint32_t codes) {
    uint32_t const magnitudes = op::bytes_of(0x3c383000, 0x4c484440, codes & 0x7777);
    uint32_t const signs = op::bytes_of(0x80808080, 0x80808080, codes);  // 0xff for a negative code, else 0x80
    return magnitudes | (signs << 1 & 0x80808080);
  }
  // The value of a scale as two bfloat16. Its code is e4m3 if `four` is true, else e8m0.
  RA_DEV static uint32_t scale_of(uint32_t code, bool four) {
    if (!four) return Fp8V4::scale_of(code);
    float const value = op::low_half(op::half_pair(uint16_t(code)));
    return op::pack<bf16>(value, value);
  }
  template <int S, int H, bool kFour>
  RA_DEV static void store(Share const& share, Smem& s, int t) {
    int const chunk = t % 8;
    bool const high_first = chunk >= 4;  // spreads a row's eight threads over the banks
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i)
      CUTE_UNROLL
      for (int j = 0; j < kPieces; ++j) {
        uint4 codes = share.codes[i][j];
        if constexpr (kFour) codes = {widened(codes.x), widened(codes.x >> 16), widened(codes.y), widened(codes.y >> 16)};
        uint32_t const words[4] = {high_first ? codes.z : codes.x, high_first ? codes.w : codes.y,
                                   high_first ? codes.x : codes.z, high_first ? codes.y : codes.w};
        uint32_t const scale = scale_of(share.scales[i][j] >> 8 * (kFour ? chunk % 4 : chunk / 2) & 0xff, kFour);
        bf16* const slab = s.keys[S][H * kHalf + 2 * j + chunk / 4];
        CUTE_UNROLL
        for (int k = 0; k < 2; ++k) {
          uint32_t halves[4];
          op::half_pairs(words[2 * k], halves[0], halves[1]);
          op::half_pairs(words[2 * k + 1], halves[2], halves[3]);
          CUTE_UNROLL
          for (uint32_t& word : halves)
            word = op::multiply(op::pack<bf16>(op::low_half(word), op::high_half(word)), scale);
          op::store(reinterpret_cast<uint4*>(slab + offset_of(t / 8 + 16 * i, 2 * (chunk % 4) + (high_first ? 1 - k : k))),
                    uint4{halves[0], halves[1], halves[2], halves[3]});
        }
      }
  }
  template <int S, int H, bool kFour>
  RA_DEV static void fill_of(Plan const& plan, Rows const& rows, int turn, Smem& s) {
    decode<S, H, Share>(
        rows, turn, s, [&](Share& share) { load<H, kFour>(plan, rows, share); },
        [&](Share const& share, int t) { store<S, H, kFour>(share, s, t); });
  }
  template <int S, int H>
  RA_DEV static void fill(Plan const& plan, Rows const& rows, int turn, Smem& s) {
    if (has_packed_codes(rows.extra ? plan.call.extra_format : plan.call.format)) fill_of<S, H, true>(plan, rows, turn, s);
    else fill_of<S, H, false>(plan, rows, turn, s);
  }
};
