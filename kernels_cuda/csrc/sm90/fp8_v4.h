// Attention by lists over rows of an `fp8_v4` cache: 448 e4m3 codes, 64 bfloat16 columns, and in the page's second part
// seven e8m0 scales.
//
// All 512 columns are value, so there is no slab to spare in which products of two types could meet. But a scale is a
// power of two, so a code times its scale is a bfloat16 exactly: the producer decodes rows into what `Seesaw` reads, and
// all else is its own. Eight threads take a row, each 8 columns of each of its eight slabs: a group of 64 columns with a
// scale is a slab, and the last slab is copied as it is.
#pragma once
#include "seesaw.h"

struct Fp8V4 : SeesawBase<bf16, 512, true, 8> {
  using Body = SeesawBase<bf16, 512, true, 8>;
  static constexpr int kProducerRegisters = 80, kConsumerRegisters[2] = {208, 216};

  // A thread's share of half H of a block: 8 codes of each row and slab, and of the last slab 8 columns instead; the scales of
  // the half's four slabs.
  struct Share {
    uint2 codes[4][kHalf], rest[4];
    uint32_t scales[4];
  };

  // A row's scales lie behind all rows of its page: that many units from its page's first row.
  struct Rows {
    Block block;
    uint32_t scales[4];
    bool extra;  // of the second cache
  };
  RA_DEV static Rows find(Plan const& plan, Lists const& lists, Entries const& entries, int index, int t) {
    bool const extra = Body::Base::is_extra(lists, index);
    Rows found = {Body::Base::locate(plan, lists, entries, index, t), {}, extra};
    Keys const &keys = plan.keys, &more = plan.extra;
    uint32_t const size = extra ? more.page_size : keys.page_size, gap = extra ? more.gap : keys.gap;
    Divisor const by = {extra ? more.by_page_size.multiplier : keys.by_page_size.multiplier,
                        extra ? more.by_page_size.shift : keys.by_page_size.shift};
    constexpr uint32_t kRow = kV4Row / kUnit, kScales = kV4Scales / kUnit;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      uint32_t const slot = uint32_t(entries.of[i]), page = divide(slot, by);
      found.scales[i] = page * (gap + size * kRow) + size * kRow + (slot - page * size) * kScales;
    }
    return found;
  }

  template <int H>
  RA_DEV static void load(Plan const& plan, Rows const& rows, Share& share) {
    char const* const cache = rows.extra ? plan.extra.cache : plan.keys.cache;
    int const chunk = op::fresh_tid() % 8;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      bool const seen = rows.block.at[i] != kUnseen;
      char const* const row = row_at(cache + chunk * 8, rows.block.at[i]);
      share.scales[i] = op::load4(row_at(cache, seen ? rows.scales[i] : kUnseen) + 4 * H, seen);
      CUTE_UNROLL
      for (int j = 0; j < kHalf; ++j)
        if (H * kHalf + j < 7) share.codes[i][j] = op::load8(row + (H * kHalf + j) * 64, seen);
      if (H == 0) continue;
      share.codes[i][3] = op::load8(row + 448 + chunk * 8, seen);  // 16 bytes a thread: 8 of them here
      share.rest[i] = op::load8(row + 456 + chunk * 8, seen);
    }
  }
  // 2^(code - 127) as two bfloat16; 255 is no number.
  RA_DEV static uint32_t scale_of(uint32_t code) {
    return (code == 255 ? 0x7fc0 : code == 0 ? 0x40 : code << 7) * 0x10001;
  }
  // Codes become bfloat16 exactly, and so do they times a power of two.
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
  // Fill half H of stage S. Its rows are on their way while its reader is waited for.
  template <int S, int H>
  RA_DEV static void fill(Plan const& plan, Rows const& rows, int turn, Smem& s) {
    Share share = {};
    load<H>(plan, rows, share);
    s.empty[S][H].wait((turn & 1) ^ 1);
    if (S == H) store_seen(s.seen[S], rows.block, op::fresh_tid() % 128, s.full[S][H]);
    store<S, H>(share, s, op::fresh_tid() % 128);
    op::fence_async_shared();
    s.full[S][H].arrive();
  }

  template <class Tma>
  RA_DEV static void produce(LatentParams<Tma> const& params, Smem& s) {
    Plan const& plan = params.plan;
    int turns[2] = {0, 0};
    Body::produce(plan, s, [&](Segment const& segment, int t) {
      Lists const lists = Body::Base::lists_of(plan, segment, 0);
      int const last = segment.end - 1;
      // What the lists say is asked for a fill before it is needed, and no sooner: registers are scarce.
      auto const ask = [&](int index) { return Body::Base::look_up(plan, lists, index < last ? index : last, t); };
      Entries next = ask(segment.begin);
      for (int index = segment.begin; index <= last; index += 2) {
        bool const two = index < last;
        Rows const first = find(plan, lists, next, index, t);
        next = ask(index + 1);
        fill<0, 0>(plan, first, turns[0], s);
        Rows const second = find(plan, lists, next, index + two, t);
        if (two) fill<1, 1>(plan, second, turns[1], s);
        fill<0, 1>(plan, first, turns[0]++, s);
        next = ask(index + 2);
        if (two) fill<1, 0>(plan, second, turns[1]++, s);
      }
    });
  }
  template <class Tma>
  RA_DEV static void run(LatentParams<Tma> const& params, Smem& s) {
    Body::template run_as<Fp8V4>(params, s);
  }
};
