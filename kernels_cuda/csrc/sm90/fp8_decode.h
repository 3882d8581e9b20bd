// Attention by lists over rows of an `fp8_v32` cache: 512 e4m3 codes, four float32 scales, 64 bfloat16 columns.
//
// A code becomes a float16 operand, exactly, and is never multiplied: the scale of a group of 128 columns is folded into
// its share of the logits and into the weights of its values. Such weights are held near 1 by a second running maximum,
// `level`, of logit plus exponent of the key's largest scale. Queries become float16 as well, divided by a power of two
// a row; the 64 columns behind the value stay bfloat16.
//
// A producer warpgroup decodes rows into two stages. Warpgroup 0, the leader, computes logits and weights and holds the
// left half of the output; warpgroup 1, the follower, holds the right half. Both read the weights from shared memory,
// where they take the place of the block's last 64 columns, whose logits are done by then. While the leader is at its
// exponentials, the follower's product of the block before has the tensor cores.
//
//   barrier       who arrives                                     of    a phase is    protects
//   q_full        each producer thread; one for the segment       129   a segment     q, unit, segments[turn % 2]
//   q_empty       a thread of each consumer warp                  8     a segment     q, unit
//   full[S][0]    each producer thread                            128   a use of S    left half of stage S, scales
//   full[S][1]    each producer thread, and its copies            256   a use of S    right half, and slab 8
//   empty[S][H]   a thread of each warp of warpgroup H            4     a use of S    half H; slab 8 and scales are both's
//   kWeights + S  the leader; the follower waits                  256   a use of S    weights in slab 8, factor[S]
//   kSums         both, and wait                                  256   a segment     sums, maximum, level
//   kRestRead     the leader, and waits                           128   a block       slab 8 before weights take its place
#pragma once
#include "latent.h"

struct Fp8Decode : LatentBase<f16, bf16, true, 16, 1> {
  using Base = LatentBase<f16, bf16, true, 16, 1>;
  static constexpr int kColumns = 576, kGroups = 4;
  static constexpr float kSmallestRatio = 8.67361737988403547e-19f;  // 2^-60, in place of a scale of 0 in logits

  // Named barriers: the weights of a block, one for each stage; the rows' sums; and, of the leader alone, that the rest
  // is no longer read.
  enum { kWeights, kSums = 2, kRestRead };

  struct alignas(1024) Smem {
    f16 q[9][kSlab];                  // slab 8: bfloat16
    f16 keys[2][9][kSlab];            // slab 8: the rest in bfloat16, then the block's weights
    float ratio[2][kGroups][64];      // a group's scale over 2^exponent
    float step[2][kGroups][64];       // what logits are multiplied by after each group
    float exponent[2][64], power[2][64];  // power: 2^exponent; of a key that is not there -inf and 0
    float unit[64];                   // what rows of q were divided by
    float factor[2][64];              // what the output of the blocks before is multiplied by
    float maximum[2][64], level[2][64], sums[2][64];
    Segment segments[2];              // that the producer is at, and that consumers may still be finishing
    op::MBar q_full, q_empty, full[2][2], empty[2][2];
  };
  static_assert(sizeof(Smem) <= 232448, "more than a block of sm_90 can have");

  template <class Tma>
  using Params = LatentParams<Tma>;

  // ---- producer

  // A thread's share of half H of a block: of each of its rows 16 codes of either group.
  struct Codes {
    uint4 of[4][2];
  };
  template <int H>
  RA_DEV static void load(char const* rows, Block const& block, Codes& codes) {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i)
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j)
        codes.of[i][j] = op::load16(row_at(rows, block.at[i]) + H * 256 + j * 128, block.at[i] != kUnseen);
  }
  // A row's scales are loaded and stored by one of its first four threads: which row that is comes first, so that one
  // load is enough.
  struct Scales {
    uint4 of;
    bool seen;
  };
  RA_DEV static Scales load_scales(Plan const& plan, Block const& block, int chunk) {
    uint32_t at = block.at[0];
    CUTE_UNROLL
    for (int i = 1; i < 4; ++i) at = chunk == i ? block.at[i] : at;
    return {op::load16(row_at(plan.keys.cache, at) + 512, chunk < 4 && at != kUnseen), at != kUnseen};
  }

  // 16 codes of a row become 32 bytes of float16; the order of the two stores spreads a row's eight threads over banks.
  RA_DEV static void decode(uint4 const& codes, f16* slab, int row, int chunk_pair, bool high_first) {
    uint32_t const words[4] = {high_first ? codes.z : codes.x, high_first ? codes.w : codes.y,
                               high_first ? codes.x : codes.z, high_first ? codes.y : codes.w};
    int const first = 2 * chunk_pair + high_first;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      uint32_t const low = words[2 * i], high = words[2 * i + 1];
      op::store(reinterpret_cast<uint4*>(slab + offset_of(row, first ^ i)),
                uint4{op::half_pair(low & 0xffff), op::half_pair(low >> 16), op::half_pair(high & 0xffff),
                      op::half_pair(high >> 16)});
    }
  }

  // Logits grow group by group; after each group they are multiplied by what suits the next (Horner's scheme), so that
  // one accumulator is enough: after the last group by its own ratio and the power that all ratios are relative to.
  RA_DEV static void store_scales(Scales const& scales, int stage, int row, Smem& s) {
    bool const seen = scales.seen;
    float ratio[kGroups] = {float_of(scales.of.x), float_of(scales.of.y), float_of(scales.of.z), float_of(scales.of.w)};
    float divisor[kGroups];
    float largest = 0.f;
    CUTE_UNROLL
    for (int i = 0; i < kGroups; ++i) largest = fmaxf(largest, fabsf(ratio[i]));
    int const exponent = scale_exponent(bits_of(largest));
    CUTE_UNROLL
    for (int i = 0; i < kGroups; ++i) {
      ratio[i] *= power_of_two(-exponent);
      s.ratio[stage][i][row] = ratio[i];
      divisor[i] = fabsf(ratio[i]) < kSmallestRatio ? kSmallestRatio : ratio[i];
    }
    s.exponent[stage][row] = seen ? float(exponent) : -INFINITY;
    s.power[stage][row] = seen ? power_of_two(exponent) : 0.f;
    CUTE_UNROLL
    for (int i = 0; i < kGroups - 1; ++i) s.step[stage][i][row] = divisor[i] * op::reciprocal(divisor[i + 1]);
    s.step[stage][kGroups - 1][row] = divisor[kGroups - 1] * power_of_two(exponent);
  }

  // What belongs to neither half, once both are free: scales, which keys there are, and the rest, copied as it is.
  RA_DEV static void begin(char const* rows, Block const& block, Scales const& scales, int turn, Smem& s, int t) {
    int const stage = turn & 1, row = t / 8, chunk = t % 8;
    for (int half = 0; half < 2; ++half) s.empty[stage][half].wait((turn >> 1 & 1) ^ 1);
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i)
      op::copy16(s.keys[stage][8] + offset_of(row + 16 * i, chunk), row_at(rows, block.at[i]) + 528,
                 block.at[i] != kUnseen);
    op::arrive_after_copies(s.full[stage][1]);
    if (chunk < 4) store_scales(scales, stage, row + 16 * chunk, s);
  }
  template <int H>
  RA_DEV static void fill(Codes const& codes, int turn, Smem& s) {
    // The thread's number is read again, so that what follows from it is not kept in registers beside so many codes.
    int const t = op::fresh_tid() % 128;
    int const stage = turn & 1, row = t / 8, chunk = t % 8;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i)
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j)
        decode(codes.of[i][j], s.keys[stage][H * kHalf + 2 * j + chunk / 4], row + 16 * i, chunk % 4, chunk >= 4);
    op::fence_async_shared();
    s.full[stage][H].arrive();
  }

  // A row of queries as float16, divided by a power of two that brings its largest below 2^9; the rest as it is.
  RA_DEV static void fill_query(char const* at, bool valid, int row, int chunk, Smem& s) {
    uint4 given[8];
    float largest = 0.f;
    CUTE_UNROLL
    for (int slab = 0; slab < 8; ++slab) {
      given[slab] = op::load16(at + (slab * 64 + chunk * 8) * 2, valid);
      uint32_t const words[4] = {given[slab].x, given[slab].y, given[slab].z, given[slab].w};
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) largest = fmaxf(largest, fmaxf(fabsf(low_of(words[i])), fabsf(high_of(words[i]))));
    }
    CUTE_UNROLL
    for (int mask = 1; mask < 8; mask *= 2) largest = fmaxf(largest, op::shfl_xor(largest, mask));
    int const exponent = unit_exponent(bits_of(largest));
    if (chunk == 0) s.unit[row] = power_of_two(exponent);
    float const factor = power_of_two(-exponent);
    CUTE_UNROLL
    for (int slab = 0; slab < 8; ++slab) {
      uint32_t words[4] = {given[slab].x, given[slab].y, given[slab].z, given[slab].w};
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) words[i] = op::pack<f16>(low_of(words[i]) * factor, high_of(words[i]) * factor);
      op::store(reinterpret_cast<uint4*>(s.q[slab] + offset_of(row, chunk)), uint4{words[0], words[1], words[2], words[3]});
    }
    op::store(reinterpret_cast<uint4*>(s.q[8] + offset_of(row, chunk)), op::load16(at + 1024 + chunk * 16, valid));
  }
  // The two bfloat16 of a word.
  RA_HD static float low_of(uint32_t word) { return float_of(word << 16); }
  RA_HD static float high_of(uint32_t word) { return float_of(word & 0xffff0000u); }

  RA_DEV static void produce(Plan const& plan, Smem& s) {
    op::reg_dealloc<120>();
    int const t = op::tid() % 128, chunk = t % 8;
    char const* const rows = plan.keys.cache + chunk * 16;
    int turn = 0, segment_turn = 0, seq = 0;
    for (bool more = true; more; ++segment_turn) {
      Segment const segment = next_segment(plan, seq);
      more = segment.slot != kAbsent;
      s.q_empty.wait((segment_turn & 1) ^ 1);
      if (segment.begin < segment.end) fill_queries(plan, segment.seq, s, t);
      if (t == 0) {
        s.segments[segment_turn & 1] = segment;
        s.q_full.arrive();
      }
      op::fence_async_shared();
      s.q_full.arrive();
      if (segment.begin >= segment.end) continue;
      Lists const lists = lists_of(plan, segment, 0);
      int const last = segment.end - 1;
      // What is loaded is decoded one half later, and what the list says is asked for before the half before is decoded:
      // there is always something under way, and registers are left.
      Block block = locate(plan, lists, look_up(plan, lists, segment.begin, t), segment.begin, t);
      Codes left, right;
      load<0>(rows, block, left);
      Scales scales = load_scales(plan, block, chunk);
      for (int index = segment.begin; index <= last; ++index, ++turn) {
        int const next = index < last ? index + 1 : last;
        load<1>(rows, block, right);
        begin(rows, block, scales, turn, s, t);
        Entries const entries = look_up(plan, lists, next, t);
        fill<0>(left, turn, s);
        block = locate(plan, lists, entries, next, t);
        load<0>(rows, block, left);
        scales = load_scales(plan, block, chunk);
        fill<1>(right, turn, s);
      }
    }
  }
  RA_DEV static void fill_queries(Plan const& plan, int seq, Smem& s, int t) {
    Job const job = Base::job(plan);
    CUTE_NO_UNROLL
    for (int inside = t / 8; inside < 64; inside += 16) {
      int const row = job.tile * 64 + inside;
      fill_query(query_at(plan, job, seq, row < plan.rows ? row : 0), row < plan.rows, inside, t % 8, s);
    }
  }
  // ---- consumers

  struct Consumer : Base::Consumer {
    Smem& s;
    uint32_t phases = 0;  // bit 0: the stage; bit 1: of its barriers; bit 2: of the queries'

    RA_DEV Consumer(Smem& s, Plan const& plan) : Base::Consumer(plan), s(s) {}

    // out += the weights in shared memory x half W of the stage's values, 16 keys at a time, by the two groups of
    // columns with scales of their own.
    template <int W>
    RA_DEV void add_values(int stage) {
      int const t = op::fresh_tid() % 128, row0 = t / 32 * 16 + t % 32 / 4, pair = t % 4;  // offsets are computed anew
      CUTE_UNROLL
      for (int keys = 0; keys < 4; ++keys) {
        if (keys >= 2) op::wgmma_wait<2>();  // registers for so many weights, no more
        auto first = cute::make_tensor<f16>(Left{}), second = cute::make_tensor<f16>(Left{});
        auto words = cute::recast<uint32_t>(cute::make_tensor(first.data(), cute::Layout<cute::_4>{}));
        auto others = cute::recast<uint32_t>(cute::make_tensor(second.data(), cute::Layout<cute::_4>{}));
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          int const j = 2 * keys + i / 2, column = 8 * j + 2 * pair;
          uint32_t const word = *weight_word(s.keys[stage][8], row0 + i % 2 * 8, j, pair);
          float const low = op::low_half(word), high = op::high_half(word);
          float const* const ratio = &s.ratio[stage][2 * W][column];
          words(i) = op::pack<f16>(low * ratio[0], high * ratio[1]);
          others(i) = op::pack<f16>(low * ratio[64], high * ratio[65]);
        }
        add_columns<W, 0>(stage, keys, first);
        add_columns<W, 1>(stage, keys, second);
      }
    }
    using Left = cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::_1>>;
    template <int W, int I, class Weights>
    RA_DEV void add_columns(int stage, int keys, Weights& weights) {
      auto columns = cute::make_tensor(
          out.data() + 64 * I,
          cute::make_layout(cute::partition_shape_C(MmaValuesR<128>{}, cute::Shape<cute::_64, cute::_128>{})));
      auto const values = cute::local_tile(shared<Values<128>>(s.keys[stage][2 * (2 * W + I)]),
                                           cute::Shape<cute::_128, cute::_16>{}, cute::make_coord(0, keys));
      op::wgmma_rs(MmaValuesR<128>{}, thread(), weights, values, columns);
    }
    RA_DEV void next_block() { phases = (phases & 4) | ((phases + 1) & 3); }
    // Wait for the next segment; whether there is one.
    RA_DEV bool begin() {
      s.q_full.wait(phases >> 2);
      cute::clear(out);
      return segment().slot != kAbsent;
    }
    RA_DEV Segment const& segment() const { return s.segments[phases >> 2]; }
    // The output is relative to `level`, the sum to `maximum`.
    template <int W>
    RA_DEV void finish_rows(float const (&level)[2]) {
      float regain[2];
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) regain[r] = sum[r] == 0.f ? 0.f : op::exp2(level[r] - maximum[r]);
      Base::Consumer::template finish_rows<W>(segment(), regain[0], regain[1]);
    }
  };

  struct Leader : Consumer {
    float level[2];
    Logits block;
    RA_DEV Leader(Smem& s, Plan const& plan) : Consumer(s, plan) {}

    // block = q . keys.
    RA_DEV void logits(int stage) {
      s.full[stage][0].wait(phases >> 1 & 1);
      CUTE_UNROLL
      for (int group = 0; group < kGroups; ++group) {
        if (group == 2) s.full[stage][1].wait(phases >> 1 & 1);
        op::wgmma_ss(MmaLogits<f16>{}, thread(), shared<Rows<128>>(s.q[2 * group]),
                     shared<Rows<128>>(s.keys[stage][2 * group]), block, group == 0);
        op::wgmma_wait<0>(block);
        CUTE_UNROLL
        for (int j = 0; j < 8; ++j)
          CUTE_UNROLL
          for (int c = 0; c < 2; ++c) {
            float const step = s.step[stage][group][8 * j + 2 * pair + c];
            CUTE_UNROLL
            for (int r = 0; r < 2; ++r)
              block(at(c, r, j)) *= group < kGroups - 1 ? step : step * s.unit[row0 + 8 * r];
          }
      }
      op::fence_async_shared();  // the rest was copied by ordinary writes
      op::wgmma_ss(MmaLogits<bf16>{}, thread(), shared<Rows<64, bf16>>(reinterpret_cast<bf16*>(s.q[8])),
                   shared<Rows<64, bf16>>(reinterpret_cast<bf16*>(s.keys[stage][8])), block, false);
      op::wgmma_wait<0>(block);
    }

    // Scale and mask the logits; the rows' new maxima and levels.
    RA_DEV void mask(int stage, float (&m_new)[2], float (&reached)[2]) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) m_new[r] = reached[r] = -INFINITY;
      CUTE_UNROLL
      for (int j = 0; j < 8; ++j)
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) {
          int const column = 8 * j + 2 * pair + c;
          float const exponent = s.exponent[stage][column];
          CUTE_UNROLL
          for (int r = 0; r < 2; ++r) {
            float& logit = block(at(c, r, j));
            logit = exponent == -INFINITY ? -INFINITY : logit * plan.scale;
            m_new[r] = fmaxf(m_new[r], logit);
            reached[r] = fmaxf(reached[r], logit + exponent);
          }
        }
      raise_in_row(m_new);
      raise_in_row(reached);
      raise(m_new, maximum);
      raise(reached, level);
    }

    // The logits become weights relative to `reached`, in shared memory; the rows' sums are relative to `m_new`.
    RA_DEV void weigh(int stage, float const (&m_new)[2], float const (&reached)[2]) {
      float factor[2];
      factors(maximum, m_new, factor);
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        float const reference = finite(m_new[r]), shift = op::exp2(reference - finite(reached[r]));
        sum[r] *= factor[r];
        CUTE_UNROLL
        for (int j = 0; j < 8; ++j) {
          float weight[2];
          CUTE_UNROLL
          for (int c = 0; c < 2; ++c) {
            weight[c] = op::exp2(block(at(c, r, j)) - reference);
            sum[r] += weight[c];
            weight[c] *= shift * s.power[stage][8 * j + 2 * pair + c];
          }
          op::store(weight_word(s.keys[stage][8], row0 + 8 * r, j, pair), op::pack<f16>(weight[0], weight[1]));
        }
        maximum[r] = m_new[r];
      }
    }

    RA_DEV void attend() {
      int const stage = phases & 1;
      float m_new[2], reached[2], factor[2];
      logits(stage);
      mask(stage, m_new, reached);
      op::named_sync(kRestRead, 128);  // other warps may still multiply the rest, whose place the weights take
      weigh(stage, m_new, reached);
      factors(level, reached, factor);
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        level[r] = reached[r];
        if (pair == 0) s.factor[stage][row0 + 8 * r] = factor[r];
      }
      op::named_arrive(kWeights + stage, 256);
      rescale(factor);
      add_values<0>(stage);
      op::wgmma_wait<0>(out);
      release(s.empty[stage][0]);
      next_block();
    }

    RA_DEV void run() {
      op::reg_alloc<208>();
      for (; begin(); phases ^= 4) {
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
          maximum[r] = level[r] = -INFINITY;
          sum[r] = 0.f;
        }
        for (int blocks = segment().end - segment().begin; blocks > 0; --blocks) attend();
        add_in_row();
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
          if (pair) continue;
          s.sums[phases >> 2][row0 + 8 * r] = sum[r];
          s.maximum[phases >> 2][row0 + 8 * r] = maximum[r];
          s.level[phases >> 2][row0 + 8 * r] = level[r];
        }
        release(s.q_empty);
        op::named_sync(kSums, 256);
        finish_rows<0>(level);
      }
    }
  };

  struct Follower : Consumer {
    RA_DEV Follower(Smem& s, Plan const& plan) : Consumer(s, plan) {}

    RA_DEV void attend() {
      int const stage = phases & 1;
      op::named_sync(kWeights + stage, 256);
      s.full[stage][1].wait(phases >> 1 & 1);
      float const factor[2] = {s.factor[stage][row0], s.factor[stage][row0 + 8]};
      rescale(factor);
      add_values<1>(stage);
      op::wgmma_wait<0>(out);
      release(s.empty[stage][1]);
      next_block();
    }

    RA_DEV void run() {
      op::reg_alloc<176>();
      for (; begin(); phases ^= 4) {
        for (int blocks = segment().end - segment().begin; blocks > 0; --blocks) attend();
        release(s.q_empty);
        op::named_sync(kSums, 256);
        float level[2];
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
          sum[r] = s.sums[phases >> 2][row0 + 8 * r];
          maximum[r] = s.maximum[phases >> 2][row0 + 8 * r];
          level[r] = s.level[phases >> 2][row0 + 8 * r];
        }
        finish_rows<1>(level);
      }
    }
  };

  template <class Tma>
  RA_DEV static void run(Params<Tma> const& params, Smem& s) {
    if (op::tid() == 0) {
      s.q_full.init(128 + 1);
      s.q_empty.init(8);
      for (int stage = 0; stage < 2; ++stage)
        for (int half = 0; half < 2; ++half) {
          s.full[stage][half].init(half ? 256 : 128);  // with the right half comes the rest, by itself
          s.empty[stage][half].init(4);
        }
      op::fence_barrier_init();
    }
    op::syncthreads();
    int const warpgroup = op::tid() / 128;
    if (warpgroup == 0) Leader(s, params.plan).run();
    else if (warpgroup == 1) Follower(s, params.plan).run();
    else produce(params.plan, s);
  }
};
