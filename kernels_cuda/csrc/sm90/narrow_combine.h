// Merges the partial results of sequences that several parts computed. One thread block merges a query row, in the
// order of the parts. This suits calls with few rows and many parts: one warp per row (`combine.h`) would leave most of
// the GPU idle and would wait for one part after another. Here all threads first load one part's lse each, at the same
// time. Then each thread loads 4 columns of 16 parts at a time. This grid may start while the grid that computes the
// partial results is ending.
#pragma once
#include "combine.h"

template <class Out>
struct NarrowCombine {
  static constexpr int kThreads = 128, kRowsOfBlock = 1, kValue = 512, kAtOnce = 16;
  // The current parts, one per thread: the index of the part's result (kAbsent if it adds nothing), and the row's lse
  // and largest logit over the part.
  struct Smem {
    int slot[kThreads];
    float lse[kThreads], maximum[kThreads];
    int exists[kThreads];  // whether this part belongs to the sequence, even if it has no blocks
  };
  struct Params {
    Plan plan;
  };

  RA_DEV static void run(Params const& params, Smem& s) {
    Plan const& plan = params.plan;
    RaLatent const& call = plan.call;
    op::wait_for_previous_grid();
    int64_t const row = op::bid();
    int const t = op::tid();
    MergedRow const merged(plan, row);
    if (merged.slot_of(merged.first) == kWhole) return;
    float m_i = -INFINITY, maximum = -INFINITY, l_i = 0.f;
    float4 acc = {};
    // Each iteration merges up to kThreads parts. Usually that is all of them.
    bool more = true;
    for (int from = merged.first; more; from += kThreads) {
      look(merged, s, from + t);
      op::syncthreads();
      float m_new = m_i;
      int count = 0;
      for (; count < kThreads && s.exists[count]; ++count) {
        m_new = fmaxf(m_new, s.lse[count]);
        maximum = fmaxf(maximum, s.maximum[count]);
      }
      float const reference = m_new == -INFINITY ? 0.f : m_new, factor = op::exp2(m_i - reference);
      l_i *= factor;
      acc = float4{acc.x * factor, acc.y * factor, acc.z * factor, acc.w * factor};
      m_i = m_new;
      for (int i = 0; i < count; i += kAtOnce) add(merged, s, i, reference, t, l_i, acc);
      more = count == kThreads;
      op::syncthreads();
    }
    float const factor = merged.factor(m_i, l_i);
    *reinterpret_cast<uint2*>(static_cast<Out*>(call.out) + row * kValue + 4 * t) =
        uint2{op::pack<Out>(acc.x * factor, acc.y * factor), op::pack<Out>(acc.z * factor, acc.w * factor)};
    if (t == 0) merged.write_sums(m_i, l_i, maximum);
  }

  // Loads the lse and the largest logit of this thread's part.
  RA_DEV static void look(MergedRow const& merged, Smem& s, int part) {
    RaLatent const& call = merged.plan.call;
    int const t = op::tid();
    s.exists[t] = merged.has(part);
    s.slot[t] = kAbsent;
    s.lse[t] = s.maximum[t] = -INFINITY;
    if (!s.exists[t]) return;
    int const slot = merged.slot_of(part);
    if (slot < 0) return;
    s.lse[t] = op::load_result(call.partial_lse + merged.index_of(slot));
    if (call.max_logits) s.maximum[t] = op::load_result(call.partial_max + merged.index_of(slot));
    if (s.lse[t] != -INFINITY) s.slot[t] = slot;
  }
  // Adds this thread's four columns of kAtOnce parts. All of them are loaded before any is used, so that the loads
  // overlap.
  RA_DEV static void add(MergedRow const& merged, Smem const& s, int from, float reference, int t, float& sum, float4& acc) {
    float const* const partial_out = merged.plan.call.partial_out;
    float4 out[kAtOnce];
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      int const slot = s.slot[from + i];  // kAbsent after the last part
      out[i] = float4{};
      if (slot >= 0) out[i] = op::load_result(reinterpret_cast<float4 const*>(partial_out + merged.index_of(slot) * kValue) + t);
    }
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      float const weight = op::exp2(s.lse[from + i] - reference);
      sum += weight;
      acc.x += weight * out[i].x;
      acc.y += weight * out[i].y;
      acc.z += weight * out[i].z;
      acc.w += weight * out[i].w;
    }
  }
};
