// The partial results of sequences that were computed in several parts, merged in their order: one warp a query row. Its
// launch overlaps with the end of the grid that leaves them.
#pragma once
#include "latent.h"

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
    op::wait_for_grid_before();
    int64_t const row = int64_t(op::bid()) * (kThreads / 32) + op::tid() / 32, lane = op::tid() % 32;
    if (row >= call.num_seqs * call.num_q_tokens * call.num_q_heads) return;
    int const head = int(row % call.num_q_heads), token = int(row / call.num_q_heads % call.num_q_tokens);
    int const seq = int(row / (call.num_q_heads * call.num_q_tokens));
    int const blocks = blocks_of(plan, seq, token), first = first_part_of(plan, seq);
    if (range_of(plan, first, seq, blocks).slot == kWhole) return;
    float m_i = -INFINITY, maximum = -INFINITY, l_i = 0.f;
    float4 acc[4] = {};
    for (int part = first; part == first || goes_on(plan, part, seq); ++part) {
      Range const range = range_of(plan, part, seq, blocks);
      if (range.slot < 0) continue;
      int64_t const index = (range.slot * call.num_q_tokens + token) * call.num_q_heads + head;
      m_i = fmaxf(m_i, op::given(call.partial_lse + index));
      if (call.max_logits) maximum = fmaxf(maximum, op::given(call.partial_max + index));
    }
    for (int part = first; part == first || goes_on(plan, part, seq); ++part) {
      Range const range = range_of(plan, part, seq, blocks);
      if (range.slot < 0) continue;
      int64_t const index = (range.slot * call.num_q_tokens + token) * call.num_q_heads + head;
      float const lse = op::given(call.partial_lse + index);
      if (lse == -INFINITY) continue;
      float const weight = op::exp2(lse - m_i);
      l_i += weight;
      float4 const* const given = reinterpret_cast<float4 const*>(call.partial_out + index * kValue);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        float4 const part_out = op::given(given + lane + 32 * i);
        acc[i].x += weight * part_out.x;
        acc[i].y += weight * part_out.y;
        acc[i].z += weight * part_out.z;
        acc[i].w += weight * part_out.w;
      }
    }
    bool const fully_masked = m_i == -INFINITY;
    float denominator = l_i;
    if (call.sinks && !fully_masked) denominator += op::exp2(call.sinks[head] * float(kLog2e) - m_i);
    float const factor = fully_masked ? 0.f : 1.f / denominator;
    Out* const out = static_cast<Out*>(call.out) + row * kValue;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      uint2 const words = {op::pack<Out>(acc[i].x * factor, acc[i].y * factor),
                           op::pack<Out>(acc[i].z * factor, acc[i].w * factor)};
      *reinterpret_cast<uint2*>(out + 4 * (lane + 32 * i)) = words;
    }
    if (lane == 0) {
      int64_t const finished = (int64_t(seq) * call.num_q_heads + head) * call.num_q_tokens + token;
      call.lse[finished] = fully_masked ? -INFINITY : (m_i + op::log2(l_i)) * kLn2;
      if (call.max_logits) call.max_logits[finished] = maximum * kLn2;
    }
  }
};
