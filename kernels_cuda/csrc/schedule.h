// Divides the blocks of a batch among parts. The result equals that of reference/make_decode_schedule.py.
#pragma once
#include "ops.h"
#include "work.h"

// The number of blocks of a sequence. In a sparse call, a list counts as at least one key. A second list begins with a
// new block.
RA_HD int blocks_of(RaSchedule const& call, int64_t seq) {
  int64_t keys = call.lens[seq];
  if (call.sparse && keys < 1) keys = 1;
  if (call.extra_lens) {
    int64_t const extra = call.extra_lens[seq];
    keys = clamped((keys + kBlock - 1) / kBlock * kBlock, 0, kMostKeys) + (extra > 0 ? extra : 0);
  }
  return clamped((clamped(keys, 0, kMostKeys) + int64_t(kBlock) - 1) / kBlock, 0, kMostKeys);
}
RA_HD int cost_of(int blocks) { return blocks > 1 ? blocks : 1; }

struct Deal {
  static constexpr int kThreads = 32, kAtOnce = 2048;
  struct Smem {
    int64_t costs[kThreads];
    int blocks[kAtOnce];  // block counts of up to kAtOnce sequences
  };

  // The state of the division. `payload` is the budget of each part, and `budget` is what remains of the current part's
  // payload. A part pays `overhead` per sequence, and 1 per block (also 1 for a sequence without blocks). `last_end` is
  // the number of blocks of the previous sequence.
  struct State {
    int64_t payload, budget;
    int part, last_end;
  };

  RA_DEV static void run(RaSchedule const& call, Smem& s) {
    int const lane = op::tid(), num_seqs = int(call.num_seqs);
    int64_t cost = 0;
    for (int seq = lane; seq < num_seqs; seq += kThreads) cost += cost_of(blocks_of(call, seq)) + call.overhead;
    s.costs[lane] = cost;
    op::syncthreads();
    State state{0, 0, 0, 0};
    for (int i = 0; i < kThreads; ++i) state.payload += s.costs[i];
    state.payload = (state.payload + call.num_parts - 1) / call.num_parts + call.overhead;
    state.budget = state.payload;
    if (lane == 0) {
      call.num_splits[0] = 0;
      begin(call, 0, 0, 0, 0);
    }
    for (int first = 0; first < num_seqs; first += kAtOnce) {
      int const count = num_seqs - first < kAtOnce ? num_seqs - first : kAtOnce;
      op::syncthreads();
      for (int i = lane; i < count; i += kThreads) s.blocks[i] = blocks_of(call, first + i);
      op::syncthreads();
      if (lane == 0)
        for (int i = 0; i < count; ++i) deal(call, state, first + i, s.blocks[i]);
    }
    if (lane == 0) {
      end(call, state.part, num_seqs - 1, state.last_end);
      for (int part = state.part + 1; part < call.num_parts; ++part) {
        begin(call, part, num_seqs, 0, 0);
        end(call, part, num_seqs - 1, state.last_end);
      }
    }
  }

  // Divides one sequence. A part that cannot afford the rest of the sequence takes as many blocks as its budget allows,
  // and the next part begins there. The last part takes all remaining blocks.
  RA_DEV static void deal(RaSchedule const& call, State& state, int seq, int blocks) {
    int64_t block = 0;
    int split = 0;
    while (state.budget < cost_of(blocks) - block + call.overhead && state.part + 1 < call.num_parts) {
      if (state.budget > call.overhead) {
        block += state.budget - call.overhead;
        ++split;
      }
      end(call, state.part, block > 0 ? seq : seq - 1, block > 0 ? int(block) : state.last_end);
      begin(call, ++state.part, seq, int(block), split);
      state.budget = state.payload;
    }
    state.budget -= cost_of(blocks) - block + call.overhead;
    call.num_splits[seq + 1] = call.num_splits[seq] + split + 1;
    state.last_end = blocks;
  }

  RA_DEV static void begin(RaSchedule const& call, int64_t part, int seq, int block, int split) {
    int* const row = call.parts + 8 * part;
    row[0] = seq;
    row[1] = block;
    row[4] = split;
    row[5] = row[6] = row[7] = 0;
  }
  RA_DEV static void end(RaSchedule const& call, int64_t part, int seq, int block) {
    call.parts[8 * part + 2] = seq;
    call.parts[8 * part + 3] = block;
  }
};
