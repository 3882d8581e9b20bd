// Merges the partial results of sequences that several parts computed. One warp merges a query row, in the order of the
// parts. This grid may start while the grid that computes the partial results is ending, and waits for that end.
#pragma once
#include "latent.h"

// A query row whose partial results are merged.
struct MergedRow {
  Plan const& plan;
  int const head, token, seq, blocks, first;

  RA_DEV MergedRow(Plan const& plan, int64_t row)
      : plan(plan),
        head(int(row % plan.call.num_q_heads)),
        token(int(row / plan.call.num_q_heads % plan.call.num_q_tokens)),
        seq(int(row / (plan.call.num_q_heads * plan.call.num_q_tokens))),
        blocks(blocks_of(plan, seq, token)),
        first(first_part_of(plan, seq)) {}

  RA_DEV int slot_of(int part) const { return range_of(plan, part, seq, blocks).slot; }
  RA_DEV bool has(int part) const { return part == first || continues(plan, part, seq); }
  RA_DEV int64_t index_of(int slot) const {
    return (int64_t(slot) * plan.call.num_q_tokens + token) * plan.call.num_q_heads + head;
  }
  // The factor that normalises the weighted sum of a row's partial outputs, sink included. `m_i` is the largest lse of
  // the partial results, and `l_i` is the sum of their weights.
  RA_DEV float factor(float m_i, float l_i) const {
    if (m_i == -INFINITY) return 0.f;  // the row is fully masked
    return 1.f / (plan.call.sinks ? l_i + op::exp2(plan.call.sinks[head] * float(kLog2e) - m_i) : l_i);
  }
  RA_DEV void write_sums(float m_i, float l_i, float maximum) const {
    int64_t const finished = (int64_t(seq) * plan.call.num_q_heads + head) * plan.call.num_q_tokens + token;
    plan.call.lse[finished] = m_i == -INFINITY ? -INFINITY : lse_of(m_i, l_i) * kLn2;
    if (plan.call.max_logits) plan.call.max_logits[finished] = maximum * kLn2;
  }
};

template <class Out>
struct Combine {
  static constexpr int kThreads = 128, kRowsOfBlock = kThreads / 32, kValue = 512;
  struct Smem {
    char none;
  };
  struct Params {
    Plan plan;
  };

  RA_DEV static void run(Params const& params, Smem&) {
    Plan const& plan = params.plan;
    RaLatent const& call = plan.call;
    op::wait_for_previous_grid();
    int64_t const row = int64_t(op::bid()) * kRowsOfBlock + op::tid() / 32, lane = op::tid() % 32;
    if (row >= call.num_seqs * call.num_q_tokens * call.num_q_heads) return;
    MergedRow const merged(plan, row);
    if (merged.slot_of(merged.first) == kWhole) return;
    float m_i = -INFINITY, maximum = -INFINITY, l_i = 0.f;
    float4 acc[4] = {};
    for (int part = merged.first; merged.has(part); ++part) {
      int const slot = merged.slot_of(part);
      if (slot < 0) continue;
      int64_t const index = merged.index_of(slot);
      m_i = fmaxf(m_i, op::load_result(call.partial_lse + index));
      if (call.max_logits) maximum = fmaxf(maximum, op::load_result(call.partial_max + index));
    }
    for (int part = merged.first; merged.has(part); ++part) {
      int const slot = merged.slot_of(part);
      if (slot < 0) continue;
      int64_t const index = merged.index_of(slot);
      float const lse = op::load_result(call.partial_lse + index);
      if (lse == -INFINITY) continue;
      float const weight = op::exp2(lse - m_i);
      l_i += weight;
      float4 const* const partial_row = reinterpret_cast<float4 const*>(call.partial_out + index * kValue);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        float4 const part_out = op::load_result(partial_row + lane + 32 * i);
        acc[i].x += weight * part_out.x;
        acc[i].y += weight * part_out.y;
        acc[i].z += weight * part_out.z;
        acc[i].w += weight * part_out.w;
      }
    }
    float const factor = merged.factor(m_i, l_i);
    Out* const out = static_cast<Out*>(call.out) + row * kValue;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      uint2 const words = {op::pack<Out>(acc[i].x * factor, acc[i].y * factor),
                           op::pack<Out>(acc[i].z * factor, acc[i].w * factor)};
      *reinterpret_cast<uint2*>(out + 4 * (lane + 32 * i)) = words;
    }
    if (lane == 0) merged.write_sums(m_i, l_i, maximum);
  }
};
