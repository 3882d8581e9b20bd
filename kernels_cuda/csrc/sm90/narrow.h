// Sparse attention of at most 32 query heads over an `fp8_v32` cache. A row has 512 e4m3 codes, four float32 scales and
// 64 bfloat16 rotary columns. Such a call is limited by memory traffic and latency, so this kernel differs from those
// with tiles of 64 query rows (seesaw.h, fp8_decode.h). Heads are the columns of all products, so they are padded only
// to 8, 16 or 32. Rows of the cache stay in shared memory in their stored format, in four stages, and are decoded on
// the way to registers.
//
// There are two teams of four warps. Warp w of a team handles group w of the columns, both as keys and as values, and
// 16 of the 64 rotary columns. A group is the 128 codes that share a scale. The warp's part of a logit is (codes . q) *
// scale + rotary. The four parts are added through shared memory: each warp turns the logits of a quarter of the team's
// heads into weights, and stores the weights for all warps of the team. The product of a weight and a scale is a
// float16 operand. A running `level` per warp and head keeps this product near 1: the warp's output is relative to the
// level, and the sum of weights to the head's maximum. Queries are float16 too, after each group of a row is divided by
// a power of two.
//
// With at most 16 heads, each team has 32 of a block's 64 keys, and the teams merge their results at the end of a
// segment. With more heads, each team has half of the heads and all keys, and nothing has to be merged. A third
// warpgroup copies rows, each by one bulk copy of 656 bytes, which takes no registers. Only 16 threads of each of its
// warps copy, because a warp issues its bulk copies one by one.
//
// The teams wait for full, and the producer waits for empty.
//
//   barrier          who arrives                             count  one phase per   protects
//   full[S]          one thread per row, with its bytes      64     use of stage S  rows and seen of stage S
//   empty[S]         one thread of each warp of both teams   8      use of stage S  rows and seen of stage S
//   kLogits + team   the team arrives and waits              128    block           part; weight until it has been read
//   kWeights + team  the team arrives and waits              128    block           weight, maximum; part until it has
//                                                                                   been read
//   kMerge           both teams arrive and wait              256    segment         sent, top, sum, level
//   kMerged          both teams arrive and wait              256    segment         sent, top, sum, level until they
//                                                                                   have been read
//
// If the teams divide the heads, each team has its own kMerge + team and kMerged + team, with a count of 128.
#pragma once
#include "latent.h"
#include "narrow_combine.h"

// kTiles is the number of 8-head tiles per team. kByHeads: the teams divide the heads instead of the keys.
template <int kTiles, bool kByHeads>
struct Narrow : LatentBase<f16, bf16, true, 16, 1> {
  using Base = LatentBase<f16, bf16, true, 16, 1>;
  using Merge = NarrowCombine<bf16>;
  static constexpr int kTeams = 2, kWarps = 4, kThreads = (kTeams + 1) * 128;
  static constexpr int kStages = 4, kRow = 656, kScales = 512, kRest = 528;  // kScales, kRest: offsets in a row
  static constexpr int kTeamHeads = 8 * kTiles, kHeads = kTeamHeads * (kByHeads ? kTeams : 1);
  static constexpr int kTeamKeys = kByHeads ? kBlock : kBlock / kTeams, kSteps = kTeamKeys / 16;
  static constexpr int kColumnTiles = 8;                                             // tiles of 16 columns per group
  static constexpr int kKept = kByHeads ? kColumnTiles : kColumnTiles / kTeams;      // column tiles that a team writes
  static constexpr int kProducerRegisters = 40, kTeamRegisters = 232;
  // kWarpHeads is the number of heads whose weights a warp computes, kThreadKeys the number of weights per thread.
  static constexpr int kWarpHeads = kTeamHeads / kWarps, kThreadKeys = kTeamKeys * kWarpHeads / 32;

  enum { kLogits, kWeights = kLogits + kTeams, kMerge = kWeights + kTeams, kMerged = kMerge + kTeams };
  static constexpr int kMerging = kByHeads ? kWarps * 32 : kTeams * kWarps * 32;  // threads at kMerge and kMerged

  struct alignas(128) Smem {
    unsigned char rows[kStages][kBlock][kRow];
    float part[kTeams][kWarps][kTeamKeys * kTeamHeads];  // each warp's partial sums of logits, indexed by `part_at`
    float weight[kTeams][kTeamHeads][kTeamKeys + 8];     // rows padded by 8, so that four heads are in different banks
    float4 sent[kByHeads ? 1 : kTeams][kWarps][kByHeads ? 1 : kTiles * kKept][32];  // output that the other team writes
    float maximum[kTeams][kTeamHeads];  // running maximum over the segment's blocks so far
    float top[kTeams][kTeamHeads], sum[kTeams][kTeamHeads], level[kTeams][kWarps][kTeamHeads];  // values of a whole segment
    uint8_t seen[kStages][kBlock];
    op::MBar full[kStages], empty[kStages];
  };
  static_assert(sizeof(Smem) <= 232448, "more than a block of sm_90 can have");

  // The index of a logit in `part`. Pairs of heads are adjacent. There are no bank conflicts, neither when a warp
  // writes the logits of 8 keys x 4 pairs of heads nor when it reads those of the heads whose weights it computes.
  RA_HD static constexpr int part_at(int key, int head) {
    return kTiles == 2 ? key * 16 + (head ^ (key & 2) * 4 ^ (key & 4)) : key * 8 + (head ^ (key >> 2 & 3) * 2);
  }

  // ---- producer

  struct Source {
    uint32_t at;
    bool seen;
  };
  RA_DEV static Source find(Plan const& plan, int position, int length, int entry) {
    uint32_t const slot = uint32_t(entry);
    return {slot * plan.keys.slot + divide(slot, plan.keys.by_page_size) * plan.keys.gap,
            position < length && slot < plan.keys.count};
  }
  RA_DEV static void clear(unsigned char* row) {
    CUTE_NO_UNROLL
    for (int i = 0; i < kRow / 16; ++i) op::store(reinterpret_cast<uint4*>(row) + i, uint4{0, 0, 0, 0});
  }
  // Fills this thread's row of a block. An unseen row becomes zeros, because a weight of 0 times NaN would be NaN.
  RA_DEV static void fill(Plan const& plan, Source const& source, int t, int stage, Smem& s) {
    unsigned char* const row = s.rows[stage][t];
    s.seen[stage][t] = source.seen;
    if (source.seen) {
      s.full[stage].arrive_expect(kRow);
      op::bulk_load(row, plan.keys.cache + uint64_t(source.at) * kUnit, kRow, s.full[stage]);
    } else {
      clear(row);
      op::fence_async_shared();  // a later bulk copy writes the same bytes
      s.full[stage].arrive();
    }
  }
  RA_DEV static void produce(Plan const& plan, Smem& s) {
    int const lane = op::tid() % 32, t = op::tid() % 128 / 32 * 16 + lane;
    int turn = 0, seq = 0;
    if (lane >= 16) return;
    for (;;) {
      Segment const segment = Base::next_segment(plan, seq);
      if (segment.slot == kAbsent) return;
      if (segment.begin >= segment.end) continue;
      int const* const list = Base::lists_of(plan, segment, 0).entries;
      // List entries are loaded two blocks in advance. After the end of the list, its last entry is loaded again.
      auto const load_entry = [&](int block) {
        int const position = block * kBlock + t;
        return op::load_constant(list + (position < segment.length ? position : segment.length - 1));
      };
      int next[2] = {load_entry(segment.begin), load_entry(segment.begin + 1)};
      for (int block = segment.begin; block < segment.end; ++block, ++turn) {
        Source const source = find(plan, block * kBlock + t, segment.length, next[0]);
        next[0] = next[1], next[1] = load_entry(block + 2);
        s.empty[turn % kStages].wait((turn / kStages & 1) ^ 1);
        fill(plan, source, t, turn % kStages, s);
      }
    }
  }

  // ---- the teams

  template <int kTeam>
  struct Worker {
    Plan const& plan;
    Smem& s;
    // A thread holds rows `group` and `group` + 8 of a product, and columns 2 pair and 2 pair + 1 of every 8.
    int const warp = op::tid() % 128 / 32, lane = op::tid() % 32, group = lane / 4, pair = lane % 4;
    static constexpr int kFirstKey = kByHeads ? 0 : kTeam * kTeamKeys, kFirstHead = kByHeads ? kTeam * kTeamHeads : 0;

    uint32_t q[8][kTiles][2], q_rest[1][kTiles][2];  // right operands for head 8 t + group
    float unit[kTiles][2];                           // q's divisor times plan.scale, for head 8 t + 2 pair + c
    float out[kColumnTiles][kTiles][4];              // [j][t][c + 2r]: column 16 group + 2 j + r, head 8 t + 2 pair + c
    float level[kTiles];                             // level of head 8 t + group
    // The maximum of head warp * kWarpHeads + lane % kWarpHeads, and the sum of its weights for this thread's keys.
    float maximum, sum;

    RA_DEV Worker(Plan const& plan, Smem& s) : plan(plan), s(s) {}

    // Returns the value of head 8 t + 2 pair + c. Each thread passes the value of head 8 t + group.
    RA_DEV float of_head(float value, int c) const { return op::shfl(value, (2 * pair + c) * 4); }

    // Loads this warp's columns of the queries in the order in which a thread reads codes. In step i of the product, a
    // thread has columns 32 pair + 4 i to 32 pair + 4 i + 3 of the 128.
    RA_DEV void load_queries(int seq) {
      Job const job = Base::job(plan);
      CUTE_UNROLL
      for (int t = 0; t < kTiles; ++t) {
        int const row = kFirstHead + 8 * t + group;
        bool const valid = row < plan.rows;
        char const* const at = Base::query_at(plan, job, seq, valid ? row : 0);
        uint32_t words[16];
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          uint4 const four = op::load16<kOnce>(at + warp * 256 + pair * 64 + i * 16, valid);
          words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
        }
        uint2 const rest = op::load8<kOnce>(at + 1024 + warp * 32 + pair * 8, valid);
        q_rest[0][t][0] = rest.x, q_rest[0][t][1] = rest.y;
        float largest = 0.f;
        CUTE_UNROLL
        for (int i = 0; i < 16; ++i)
          largest = fmaxf(largest, fmaxf(fabsf(float_of(words[i] << 16)), fabsf(float_of(words[i] & 0xffff0000u))));
        largest = fmaxf(largest, op::shfl_xor(largest, 1));
        largest = fmaxf(largest, op::shfl_xor(largest, 2));
        int const exponent = unit_exponent(bits_of(largest));
        float const factor = power_of_two(-exponent), back = power_of_two(exponent) * plan.scale;
        CUTE_UNROLL
        for (int i = 0; i < 16; ++i)
          q[i / 2][t][i % 2] = op::pack<f16>(float_of(words[i] << 16) * factor, float_of(words[i] & 0xffff0000u) * factor);
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) unit[t][c] = of_head(back, c);
      }
    }

    // Computes this warp's part of the logits of its team's keys, 32 keys at a time.
    RA_DEV void logits(int stage) {
      CUTE_UNROLL
      for (int step = 0; step < kSteps; step += 2) {
        unsigned char const* const rows = s.rows[stage][kFirstKey + 16 * step + group];
        float codes[2][kTiles][4] = {}, rest[2][kTiles][4] = {};
        uint4 words[2][2][2];
        CUTE_UNROLL
        for (int m = 0; m < 2; ++m)
          CUTE_UNROLL
          for (int r = 0; r < 2; ++r)
            CUTE_UNROLL
            for (int i = 0; i < 2; ++i)
              words[m][r][i] =
                  *reinterpret_cast<uint4 const*>(rows + (16 * m + 8 * r) * kRow + warp * 128 + pair * 32 + i * 16);
        CUTE_UNROLL
        for (int i = 0; i < 8; ++i) {
          uint32_t a[2][4];
          CUTE_UNROLL
          for (int m = 0; m < 2; ++m)
            CUTE_UNROLL
            for (int r = 0; r < 2; ++r) {
              uint32_t const word = word_of(words[m][r][i / 4], i % 4);
              op::half_pairs(word, a[m][r], a[m][r + 2]);
            }
          op::mma<f16>(codes, a, q[i]);
        }
        uint32_t a[2][4];
        CUTE_UNROLL
        for (int m = 0; m < 2; ++m)
          CUTE_UNROLL
          for (int r = 0; r < 2; ++r) {
            uint2 const two = *reinterpret_cast<uint2 const*>(rows + (16 * m + 8 * r) * kRow + kRest + warp * 32 + pair * 8);
            a[m][r] = two.x, a[m][r + 2] = two.y;
          }
        op::mma<bf16>(rest, a, q_rest[0]);
        CUTE_UNROLL
        for (int m = 0; m < 2; ++m)
          CUTE_UNROLL
          for (int r = 0; r < 2; ++r) {
            int const key = 16 * (step + m) + 8 * r + group;
            float const scale = *reinterpret_cast<float const*>(rows + (16 * m + 8 * r) * kRow + kScales + warp * 4);
            CUTE_UNROLL
            for (int t = 0; t < kTiles; ++t) {
              float const low = codes[m][t][2 * r] * scale * unit[t][0] + rest[m][t][2 * r] * plan.scale;
              float const high = codes[m][t][2 * r + 1] * scale * unit[t][1] + rest[m][t][2 * r + 1] * plan.scale;
              *reinterpret_cast<float2*>(&s.part[kTeam][warp][part_at(key, 8 * t + 2 * pair)]) = float2{low, high};
            }
          }
      }
    }
    RA_DEV static uint32_t word_of(uint4 const& words, int i) {
      return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
    }

    // Turns the logits of this warp's heads into weights relative to each head's new maximum.
    RA_DEV void weigh(int stage) {
      int const head = warp * kWarpHeads + lane % kWarpHeads;
      float logit[kThreadKeys], m_new = maximum;
      CUTE_UNROLL
      for (int i = 0; i < kThreadKeys; ++i) {
        int const key = lane / kWarpHeads + i * (32 / kWarpHeads), at = part_at(key, head);
        float const whole = (s.part[kTeam][0][at] + s.part[kTeam][1][at]) + (s.part[kTeam][2][at] + s.part[kTeam][3][at]);
        logit[i] = s.seen[stage][kFirstKey + key] ? whole : -INFINITY;
        m_new = fmaxf(m_new, logit[i]);
      }
      CUTE_UNROLL
      for (int mask = kWarpHeads; mask < 32; mask *= 2) m_new = fmaxf(m_new, op::shfl_xor(m_new, mask));
      float const reference = finite(m_new);
      sum *= op::exp2(maximum - reference);
      maximum = m_new;
      CUTE_UNROLL
      for (int i = 0; i < kThreadKeys; ++i) {
        float const weight = op::exp2(logit[i] - reference);
        sum += weight;
        s.weight[kTeam][head][lane / kWarpHeads + i * (32 / kWarpHeads)] = weight;
      }
      if (lane < kWarpHeads) s.maximum[kTeam][head] = m_new;
    }
    RA_DEV static float finite(float x) { return x == -INFINITY ? 0.f : x; }

    // Computes out += transposed codes of this warp's columns x (weights times scales). Of every 16 keys, a thread has
    // four: 2 pair, 2 pair + 1, 2 pair + 8 and 2 pair + 9.
    RA_DEV void add_values(int stage) {
      unsigned char const* const rows = s.rows[stage][kFirstKey + 2 * pair];
      float scaled[kSteps][kTiles][4], shift[kTiles];
      CUTE_UNROLL
      for (int step = 0; step < kSteps; ++step) scale_weights(rows, step, scaled[step]);
      raise_levels(scaled, shift);
      if (kByHeads) op::syncwarp();  // makes the compiler reload weights below, since not all fit registers
      CUTE_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        if (kByHeads) scale_weights(rows, step, scaled[step]);
        uint32_t b[kTiles][2];
        CUTE_UNROLL
        for (int t = 0; t < kTiles; ++t)
          CUTE_UNROLL
          for (int i = 0; i < 2; ++i)
            b[t][i] = op::pack<f16>(scaled[step][t][2 * i] * shift[t], scaled[step][t][2 * i + 1] * shift[t]);
        uint4 codes[4];
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i)
          codes[i] = *reinterpret_cast<uint4 const*>(rows + (16 * step + key_of(i)) * kRow + warp * 128 + group * 16);
        uint32_t a[kColumnTiles][4];
        CUTE_UNROLL
        for (int j = 0; j < kColumnTiles; ++j)
          CUTE_UNROLL
          for (int i = 0; i < 2; ++i) {
            // The codes of two columns for two keys. Those of the first column come first.
            uint32_t const four = op::bytes_of(word_of(codes[2 * i], j / 2), word_of(codes[2 * i + 1], j / 2),
                                               j % 2 ? 0x7362 : 0x5140);
            op::half_pairs(four, a[j][2 * i], a[j][2 * i + 1]);
          }
        op::mma<f16>(out, a, b);
      }
    }
    RA_DEV void scale_weights(unsigned char const* rows, int step, float (&scaled)[kTiles][4]) const {
      float scale[4];
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i)
        scale[i] = *reinterpret_cast<float const*>(rows + (16 * step + key_of(i)) * kRow + kScales + warp * 4);
      CUTE_UNROLL
      for (int t = 0; t < kTiles; ++t)
        CUTE_UNROLL
        for (int i = 0; i < 4; i += 2) {
          float2 const two =
              *reinterpret_cast<float2 const*>(&s.weight[kTeam][8 * t + group][16 * step + 2 * pair + key_of(i)]);
          scaled[t][i] = two.x * scale[i];
          scaled[t][i + 1] = two.y * scale[i + 1];
        }
    }
    // A thread has four of every 16 keys. This is the distance of key i from the first of them.
    RA_HD static constexpr int key_of(int i) { return i % 2 + i / 2 * 8; }

    // Raises the levels so that products of weights and scales are below 2, and rescales the output. `shift` is the
    // factor that converts weights relative to the maximum into weights relative to the level.
    RA_DEV void raise_levels(float const (&scaled)[kSteps][kTiles][4], float (&shift)[kTiles]) {
      CUTE_UNROLL
      for (int t = 0; t < kTiles; ++t) {
        float largest = 0.f;
        CUTE_UNROLL
        for (int i = 0; i < 4 * kSteps; ++i) largest = fmaxf(largest, fabsf(scaled[i / 4][t][i % 4]));
        largest = fmaxf(largest, op::shfl_xor(largest, 1));
        largest = fmaxf(largest, op::shfl_xor(largest, 2));
        int const exponent = int(bits_of(largest) >> 23);  // 0 if all are zero or subnormal
        float const reference = s.maximum[kTeam][8 * t + group];
        float const reached = fmaxf(level[t], exponent ? reference + float(exponent - 127) : -INFINITY);
        float const factor = op::exp2(level[t] - finite(reached));
        shift[t] = reached == -INFINITY ? 0.f : op::exp2(reference - reached);
        level[t] = reached;
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) {
          float const by = of_head(factor, c);
          CUTE_UNROLL
          for (int j = 0; j < kColumnTiles; ++j) out[j][t][c] *= by, out[j][t][c + 2] *= by;
        }
      }
    }

    // ---- the end of a segment

    // Stores values that other warps need to finish: sums, maxima, levels, and the output of columns that the other
    // team writes.
    RA_DEV void share(bool first) {
      constexpr int kWhich = kByHeads ? kTeam : 0;
      CUTE_UNROLL
      for (int mask = kWarpHeads; mask < 32; mask *= 2) sum += op::shfl_xor(sum, mask);
      if (!first) op::named_sync(kMerged + kWhich, kMerging);
      if (lane < kWarpHeads) {
        s.top[kTeam][warp * kWarpHeads + lane] = maximum;
        s.sum[kTeam][warp * kWarpHeads + lane] = sum;
      }
      CUTE_UNROLL
      for (int t = 0; t < kTiles; ++t)
        if (pair == 0) s.level[kTeam][warp][8 * t + group] = level[t];
      if constexpr (!kByHeads) {
        CUTE_UNROLL
        for (int j = 0; j < kKept; ++j)
          CUTE_UNROLL
          for (int t = 0; t < kTiles; ++t) {
            float const(&four)[4] = out[(1 - kTeam) * kKept + j][t];
            s.sent[kTeam][warp][j * kTiles + t][lane] = float4{four[0], four[1], four[2], four[3]};
          }
      }
      op::named_sync(kMerge + kWhich, kMerging);
    }
    // A head's maximum and sum over all keys of the segment.
    struct Total {
      float maximum, sum;
    };
    RA_DEV Total total_of(int head) const {
      Total total = {s.top[kTeam][head], s.sum[kTeam][head]};
      if constexpr (!kByHeads) {
        float const other = s.top[1 - kTeam][head], both = fmaxf(total.maximum, other), reference = finite(both);
        total.sum = total.sum * op::exp2(total.maximum - reference) + s.sum[1 - kTeam][head] * op::exp2(other - reference);
        total.maximum = both;
      }
      return total;
    }
    static constexpr int kFirst = kByHeads ? 0 : kTeam * kKept;  // first column tile that this team writes
    RA_DEV void finish(Segment const& segment) {
      if constexpr (!kByHeads) {
        CUTE_UNROLL
        for (int t = 0; t < kTiles; ++t)
          CUTE_UNROLL
          for (int c = 0; c < 2; ++c) {
            int const head = 8 * t + 2 * pair + c;
            float const mine = s.level[kTeam][warp][head], other = s.level[1 - kTeam][warp][head];
            float const both = finite(fmaxf(mine, other)), factor = op::exp2(mine - both), theirs = op::exp2(other - both);
            CUTE_UNROLL
            for (int j = 0; j < kKept; ++j) {
              float const* const four = reinterpret_cast<float const*>(&s.sent[1 - kTeam][warp][j * kTiles + t][lane]);
              CUTE_UNROLL
              for (int i = c; i < 4; i += 2) out[kFirst + j][t][i] = out[kFirst + j][t][i] * factor + four[i] * theirs;
            }
          }
      }
      cute::for_each(cute::make_seq<2 * kTiles>{}, [&](auto which) { finish_head<which / 2, which % 2>(segment); });
    }
    // Writes the results of head 8 t + 2 pair + c.
    template <int t, int c>
    RA_DEV void finish_head(Segment const& segment) {
      Job const job = Base::job(plan);
      RaLatent const& call = plan.call;
      bool const whole = segment.slot == kWhole;
      int const head = 8 * t + 2 * pair + c, row = kFirstHead + head;
      if (row >= plan.rows) return;
      Total const total = total_of(head);
      float const mine = s.level[kTeam][warp][head];
      float const level = kByHeads ? mine : fmaxf(mine, s.level[1 - kTeam][warp][head]);
      bool const fully_masked = total.sum == 0.f;
      float denominator = total.sum;
      if (whole && call.sinks && !fully_masked)
        denominator += op::exp2(call.sinks[row] * float(kLog2e) - total.maximum);
      float const factor = fully_masked ? 0.f : op::exp2(level - total.maximum) / denominator;
      int64_t const index =
          ((whole ? segment.seq : segment.slot) * call.num_q_tokens + job.token) * call.num_q_heads + row;
      write<t, c>(index * kValue + warp * 128 + group * 16 + 2 * kFirst, whole, factor);
      if (warp == 0 && group == 0 && (kByHeads || kTeam == 0)) write_sums(segment, job, index, row, total);
    }
    template <int t, int c>
    RA_DEV void write(int64_t column, bool whole, float factor) {
      CUTE_UNROLL
      for (int j = 0; j < kKept; j += 4) {
        float wide[8];
        CUTE_UNROLL
        for (int i = 0; i < 8; ++i) wide[i] = out[kFirst + j + i / 2][t][c + i % 2 * 2] * factor;
        if (whole) {
          *reinterpret_cast<uint4*>(static_cast<Out*>(plan.call.out) + column + 2 * j) =
              uint4{op::pack<Out>(wide[0], wide[1]), op::pack<Out>(wide[2], wide[3]), op::pack<Out>(wide[4], wide[5]),
                    op::pack<Out>(wide[6], wide[7])};
        } else {
          float4* const to = reinterpret_cast<float4*>(plan.call.partial_out + column + 2 * j);
          to[0] = float4{wide[0], wide[1], wide[2], wide[3]};
          to[1] = float4{wide[4], wide[5], wide[6], wide[7]};
        }
      }
    }
    RA_DEV void write_sums(Segment const& segment, Job const& job, int64_t index, int row, Total const& total) {
      RaLatent const& call = plan.call;
      float const lse = total.sum == 0.f ? -INFINITY : lse_of(total.maximum, total.sum);
      int64_t const finished = (segment.seq * call.num_q_heads + row) * call.num_q_tokens + job.token;
      bool const whole = segment.slot == kWhole;
      if (whole) call.lse[finished] = lse * kLn2;
      else call.partial_lse[index] = lse;
      if (!call.max_logits) return;
      if (whole) call.max_logits[finished] = total.maximum * kLn2;
      else call.partial_max[index] = total.maximum;
    }

    RA_DEV void run() {
      int turn = 0, seq = 0;
      for (bool first = true;; first = false) {
        Segment const segment = Base::next_segment(plan, seq);
        if (segment.slot == kAbsent) return;
        if (segment.begin < segment.end) load_queries(segment.seq);
        maximum = -INFINITY, sum = 0.f;
        CUTE_UNROLL
        for (int t = 0; t < kTiles; ++t) {
          level[t] = -INFINITY;
          CUTE_UNROLL
          for (int i = 0; i < 4 * kColumnTiles; ++i) out[i / 4][t][i % 4] = 0.f;
        }
        CUTE_NO_UNROLL
        for (int block = segment.begin; block < segment.end; ++block, ++turn) {
          int const stage = turn % kStages;
          s.full[stage].wait(turn / kStages & 1);
          logits(stage);
          op::named_sync(kLogits + kTeam, 128);
          weigh(stage);
          op::named_sync(kWeights + kTeam, 128);
          add_values(stage);
          op::syncwarp();  // all threads have read their rows
          if (lane == 0) s.empty[stage].arrive();
        }
        share(first);
        finish(segment);
      }
    }
  };

  template <class Tma>
  RA_DEV static void run(LatentParams<Tma> const& params, Smem& s) {
    if (op::tid() == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        s.full[stage].init(kBlock);
        s.empty[stage].init(kTeams * kWarps);
      }
      op::fence_barrier_init();
    }
    op::let_dependents_launch();
    op::syncthreads();
    int const team = op::tid() / 128;
    if (team == kTeams) {
      op::reg_dealloc<kProducerRegisters>();
      produce(params.plan, s);
    } else {
      op::reg_alloc<kTeamRegisters>();
      if (team == 0) Worker<0>(params.plan, s).run();
      else Worker<1>(params.plan, s).run();
    }
  }
};
