// The partial results of sequences that were computed in several parts, merged in their order: a thread block a query
// row. For calls with few rows and many parts, where a warp a row (`combine.h`) would leave most of the GPU idle and wait
// for one part after the other: here each thread asks for one part's lse, all at once, then for 4 columns of 16 parts.
// Its launch overlaps with the end of the grid that leaves them.
#pragma once
#include "latent.h"

template <class Out>
struct NarrowCombine {
  static constexpr int kThreads = 128, kRowsOfBlock = 1, kValue = 512, kAtOnce = 16;
  // Of the parts at hand, one a thread: where their results are, kAbsent if nowhere, and the rows' lse and maximum.
  struct Smem {
    int slot[kThreads];
    float lse[kThreads], maximum[kThreads];
    int going[kThreads];  // whether the sequence has this part at all, empty or not
  };
  struct Params {
    Plan plan;
  };

  RA_DEV static void run(Params const& params, Smem& s) {
    Plan const& plan = params.plan;
    RaLatent const& call = plan.call;
    op::wait_for_grid_before();
    int64_t const row = op::bid();
    int const t = op::tid(), head = int(row % call.num_q_heads), token = int(row / call.num_q_heads % call.num_q_tokens);
    int const seq = int(row / (call.num_q_heads * call.num_q_tokens));
    int const blocks = blocks_of(plan, seq, token), first = first_part_of(plan, seq);
    if (range_of(plan, first, seq, blocks).slot == kWhole) return;
    auto const index_of = [&](int slot) {
      return (int64_t(slot) * call.num_q_tokens + token) * call.num_q_heads + head;
    };
    float m_i = -INFINITY, maximum = -INFINITY, l_i = 0.f;
    float4 acc = {};
    // kThreads parts at a time, as a rule all of them.
    bool more = true;
    for (int from = first; more; from += kThreads) {
      look(plan, s, from, first, seq, blocks, index_of);
      op::syncthreads();
      float m_new = m_i;
      int count = 0;
      for (; count < kThreads && s.going[count]; ++count) {
        m_new = fmaxf(m_new, s.lse[count]);
        maximum = fmaxf(maximum, s.maximum[count]);
      }
      float const reference = m_new == -INFINITY ? 0.f : m_new, factor = op::exp2(m_i - reference);
      l_i *= factor;
      acc = float4{acc.x * factor, acc.y * factor, acc.z * factor, acc.w * factor};
      m_i = m_new;
      for (int i = 0; i < count; i += kAtOnce) add(call, s, i, reference, index_of, t, l_i, acc);
      more = count == kThreads;
      op::syncthreads();
    }
    bool const fully_masked = m_i == -INFINITY;
    float denominator = l_i;
    if (call.sinks && !fully_masked) denominator += op::exp2(call.sinks[head] * float(kLog2e) - m_i);
    float const factor = fully_masked ? 0.f : 1.f / denominator;
    *reinterpret_cast<uint2*>(static_cast<Out*>(call.out) + row * kValue + 4 * t) =
        uint2{op::pack<Out>(acc.x * factor, acc.y * factor), op::pack<Out>(acc.z * factor, acc.w * factor)};
    if (t) return;
    int64_t const finished = (int64_t(seq) * call.num_q_heads + head) * call.num_q_tokens + token;
    call.lse[finished] = fully_masked ? -INFINITY : (m_i + op::log2(l_i)) * kLn2;
    if (call.max_logits) call.max_logits[finished] = maximum * kLn2;
  }

  // This thread's part.
  template <class IndexOf>
  RA_DEV static void look(Plan const& plan, Smem& s, int from, int first, int seq, int blocks, IndexOf index_of) {
    int const t = op::tid(), part = from + t;
    s.going[t] = part == first || goes_on(plan, part, seq);
    s.slot[t] = kAbsent;
    s.lse[t] = s.maximum[t] = -INFINITY;
    if (!s.going[t]) return;
    int const slot = range_of(plan, part, seq, blocks).slot;
    if (slot < 0) return;
    s.lse[t] = op::given(plan.call.partial_lse + index_of(slot));
    if (plan.call.max_logits) s.maximum[t] = op::given(plan.call.partial_max + index_of(slot));
    if (s.lse[t] != -INFINITY) s.slot[t] = slot;
  }
  // The columns of this thread of so many parts, asked for before any is needed.
  template <class IndexOf>
  RA_DEV static void add(RaLatent const& call, Smem const& s, int from, float reference, IndexOf index_of, int t, float& sum,
                         float4& acc) {
    float4 out[kAtOnce];
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      int const slot = s.slot[from + i];  // kAbsent behind the last part
      out[i] = float4{};
      if (slot >= 0) out[i] = op::given(reinterpret_cast<float4 const*>(call.partial_out + index_of(slot) * kValue) + t);
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
