// Sparse attention over quantised rows. The producer decodes rows to bfloat16, and everything else is as in `Seesaw`.
// The derived class `Format` has `fill<S, H>`, which fills half H of stage S by calling `decode`.
#pragma once
#include "seesaw.h"

template <class Format, int kUnit>
struct Decoding : SeesawBase<bf16, 512, true, kUnit> {
  using Body = SeesawBase<bf16, 512, true, kUnit>;
  using Base = typename Body::Base;
  using Smem = typename Body::Smem;
  static constexpr int kProducerRegisters = 80, kConsumerRegisters[2] = {208, 216};

  // A thread's four rows of a block.
  struct Rows {
    Block block;
    uint32_t scales[4];  // offsets of the rows' scales, in units of kUnit bytes
    bool extra;          // whether the block is in the second cache
  };
  RA_DEV static Rows find(Plan const& plan, Lists const& lists, Entries const& entries, int index, int t) {
    bool const extra = Base::is_extra(lists, index);
    Rows rows = {Base::locate(plan, lists, entries, index, t), {}, extra};
    Keys const &keys = plan.keys, &more = plan.extra;
    uint32_t const begin = extra ? more.scales : keys.scales, step = extra ? more.scale_slot : keys.scale_slot;
    uint32_t const gap = extra ? more.scale_gap : keys.scale_gap;
    Divisor const by = {extra ? more.by_page_size.multiplier : keys.by_page_size.multiplier,
                        extra ? more.by_page_size.shift : keys.by_page_size.shift};
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      uint32_t const slot = uint32_t(entries.of[i]);
      rows.scales[i] = begin + slot * step + divide(slot, by) * gap;
    }
    return rows;
  }

  // Fills half H of stage S. `load` loads this thread's share of the rows, and `store` decodes it to shared memory. The
  // loads are in flight while the thread waits until the half's last reader has released it.
  template <int S, int H, class Share, class Load, class Store>
  RA_DEV static void decode(Rows const& rows, int turn, Smem& s, Load load, Store store) {
    Share share = {};
    load(share);
    s.empty[S][H].wait((turn & 1) ^ 1);
    if (S == H) Body::store_seen(s.seen[S], rows.block, op::fresh_tid() % 128, s.full[S][H]);
    store(share, op::fresh_tid() % 128);
    op::fence_async_shared();
    s.full[S][H].arrive();
  }

  template <class Tma>
  RA_DEV static void produce(LatentParams<Tma> const& params, Smem& s) {
    Plan const& plan = params.plan;
    int turns[2] = {0, 0};
    Body::produce(plan, s, [&](Segment const& segment, int t) {
      Lists const lists = Base::lists_of(plan, segment, 0);
      int const last = segment.end - 1;
      // List entries are loaded only one fill before they are needed, because registers are scarce.
      auto const load_entries = [&](int index) { return Base::look_up(plan, lists, index < last ? index : last, t); };
      Entries next = load_entries(segment.begin);
      for (int index = segment.begin; index <= last; index += 2) {
        bool const two = index < last;
        Rows const first = find(plan, lists, next, index, t);
        next = load_entries(index + 1);
        Format::template fill<0, 0>(plan, first, turns[0], s);
        Rows const second = find(plan, lists, next, index + two, t);
        if (two) Format::template fill<1, 1>(plan, second, turns[1], s);
        Format::template fill<0, 1>(plan, first, turns[0]++, s);
        next = load_entries(index + 2);
        if (two) Format::template fill<1, 0>(plan, second, turns[1]++, s);
      }
    });
  }
  template <class Tma>
  RA_DEV static void run(LatentParams<Tma> const& params, Smem& s) {
    Body::template run_as<Format>(params, s);
  }
};
