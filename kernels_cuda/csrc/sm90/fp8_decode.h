// Sparse attention over an `fp8_v32` cache. A row has 512 e4m3 codes, four float32 scales and 64 bfloat16 rotary
// columns.
//
// A code is converted exactly to a float16 operand and is never multiplied by its scale. Instead, the scale of a group
// of 128 columns multiplies the group's part of the logits and the weights of the group's values. To keep the scaled
// weights near 1, they are relative to 2^`level`. The level follows the running maximum of (logit + exponent of the
// key's largest scale), and is raised only if it lags by more than kLag. Queries are float16 as well, after each row
// is divided by a power of two. The 64 rotary columns stay bfloat16.
//
// A producer warpgroup decodes rows into two stages. Warpgroup 0 (`SoftmaxConsumer`) computes logits and weights, and
// holds the left half of the output. Warpgroup 1 (`ValuesConsumer`) holds the right half. Both use the same weights:
// after a block's logits are computed, warpgroup 0 stores the weights over the block's rotary columns in slab 8. While
// warpgroup 0 computes exponentials, the tensor cores compute warpgroup 1's product for the previous block.
//
// The consumers wait for q_full and full, and the producer waits for q_empty and empty. `turn` counts segments.
//
//   barrier       who arrives                             count  one phase per   protects
//   q_full        each producer thread; thread 0 twice    129    segment         q, unit, nan, segments[turn % 2]
//   q_empty       one thread of each consumer warp        8      segment         q, unit, nan
//   full[S][0]    each producer thread                    128    use of stage S  left half of stage S, scales
//   full[S][1]    each producer thread, and its copies    256    use of stage S  right half of stage S, slab 8
//   empty[S][H]   one thread of each warp of warpgroup H  4      use of stage S  half H of stage S; both barriers
//                                                                                together: slab 8, scales
//   kWeights + S  warpgroup 0 arrives, warpgroup 1 waits  256    use of stage S  weights in slab 8, factor[S]
//   kSums         both warpgroups arrive and wait         256    segment         sums, reference, scale
//   kRestRead     warpgroup 0 arrives and waits           128    block           slab 8 before weights overwrite it;
//                                                                                `level`
#pragma once
#include "latent.h"

struct Fp8Decode : LatentBase<f16, bf16, true, 16, 1> {
  using Base = LatentBase<f16, bf16, true, 16, 1>;
  static constexpr int kColumns = 576, kGroups = 4;
  static constexpr float kSmallestRatio = 8.67361737988403547e-19f;  // 2^-60; replaces smaller magnitudes in logits
  // A row's `sum` adds weights 2^20 times as large as those of the values, and without the exponent of the key's scales
  // (-60 to 122). So the largest weight in it lies between 2^-102 and 2^86. Then float32 can represent both the smaller
  // weights that still count and the sum of 2^28 weights. A larger headroom would cost precision: the argument of exp2,
  // which includes the headroom, is rounded more coarsely the larger it is. With usual scales, whose exponents are -7
  // to -11, the argument is at most 31, or 37 if the level lags.
  static constexpr int kHeadroom = 20;

  // Named barriers. kWeights + S: the weights of the block in stage S are stored. kSums: the rows' sums are stored.
  // kRestRead, within warpgroup 0: slab 8 is no longer read.
  enum { kWeights, kSums = 2, kRestRead };

  struct alignas(1024) Smem {
    f16 q[9][kSlab];                  // slab 8 holds bfloat16
    f16 keys[2][9][kSlab];            // slab 8 holds rotary columns in bfloat16, then the block's weights
    float ratio[2][kGroups][64];      // scale of each group divided by 2^exponent
    float step[2][kGroups - 1][64];   // factors of the accumulators after groups 0 to 2
    float2 last[2][64];               // x: factor after group 3; y: added to it, 0 or, for a missing key, -inf
    float exponent[2][64], power[2][64];  // a key's exponent and 2^(exponent - kHeadroom); if missing, -inf and 0
    float unit[64], nan[64];          // factor of a row's logits; addend of its sum: 0 or NaN
    float factor[2][64];              // factor by which the output of earlier blocks is rescaled
    float reference[2][64], scale[2][64], sums[2][64];
    float level[64];                  // exponent that a row's output is relative to
    float2 most[128];                 // per thread of warpgroup 0: its two rows' largest logits, divided by `unit`
    Segment segments[2];              // the producer's segment, and the one that consumers may still be finishing
    op::MBar q_full, q_empty, full[2][2], empty[2][2];
  };
  static_assert(sizeof(Smem) <= 232448, "more than a block of sm_90 can have");

  template <class Tma>
  using Params = LatentParams<Tma>;

  // ---- producer

  // A thread's share of half H of a block: 16 codes of each of the half's two groups, for each of its four rows.
  struct Codes {
    uint4 of[4][2];
  };
  template <int H>
  RA_DEV static void load(Plan const& plan, Block const& block, int i, Codes& codes) {
    char const* const row = row_at(plan.keys.cache + op::fresh_tid() % 8 * 16, block.at[i]) + H * 256;
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) codes.of[i][j] = op::load16<kAgain>(row + j * 128, block.at[i] != kUnseen);
  }
  // Eight threads share four rows. Each of the first four of them handles the scales of one row. It selects the row
  // before the load, so that one load is enough.
  struct Scales {
    uint4 of;
    bool seen;
  };
  RA_DEV static Scales load_scales(Plan const& plan, Block const& block, int chunk) {
    uint32_t at = block.at[0];
    CUTE_UNROLL
    for (int i = 1; i < 4; ++i) at = chunk == i ? block.at[i] : at;
    return {op::load16<kAgain>(row_at(plan.keys.cache, at) + 512, chunk < 4 && at != kUnseen), at != kUnseen};
  }

  // Stores 16 codes of a row as 32 bytes of float16. The stores' order spreads a row's eight threads over the banks.
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

  // Stores a key's scales as factors. Logits are accumulated group by group, even groups in one accumulator and odd
  // groups in another. By Horner's scheme, after group i an accumulator is multiplied by ratio[i] / ratio[i + 2], while
  // products go to the other accumulator. After its last group, it is multiplied by that group's ratio and 2^exponent.
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
    s.power[stage][row] = seen ? power_of_two(exponent - kHeadroom) : 0.f;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) s.step[stage][i][row] = divisor[i] * op::reciprocal(divisor[i + 2]);
    s.step[stage][2][row] = divisor[2] * power_of_two(exponent);
    s.last[stage][row] = {divisor[3] * power_of_two(exponent), seen ? 0.f : -INFINITY};
  }

  // Fills the regions of a stage that belong to neither half, once both halves are free: the scales, and the rotary
  // columns, which are copied unchanged.
  RA_DEV static void begin(Plan const& plan, Block const& block, Scales const& scales, int turn, Smem& s, int t) {
    int const stage = turn & 1, row = t / 8, chunk = t % 8;
    for (int half = 0; half < 2; ++half) s.empty[stage][half].wait((turn >> 1 & 1) ^ 1);
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i)
      op::copy16<kAgain>(s.keys[stage][8] + offset_of(row + 16 * i, chunk),
                         row_at(plan.keys.cache + chunk * 16, block.at[i]) + 528, block.at[i] != kUnseen);
    op::arrive_after_copies(s.full[stage][1]);
    if (chunk < 4) store_scales(scales, stage, row + 16 * chunk, s);
  }
  // Decodes half H. After row i is decoded, its registers are free, and `load(i)` loads codes that are decoded six rows
  // later.
  template <int H, class Load>
  RA_DEV static void fill(Codes const& codes, int turn, Smem& s, Load load) {
    int const t = op::fresh_tid() % 128;
    int const stage = turn & 1, row = t / 8, chunk = t % 8;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j)
        decode(codes.of[i][j], s.keys[stage][H * kHalf + 2 * j + chunk / 4], row + 16 * i, chunk % 4, chunk >= 4);
      load(i);
    }
    op::fence_async_shared();
    s.full[stage][H].arrive();
  }

  // Stores a row of queries as float16, divided by a power of two that brings its largest non-rotary element below 2^9.
  // The rotary columns are divided by the same power and stored as bfloat16. The row is negated if the logits' scale is
  // negative, so that the largest product belongs to the largest logit. A row with an element that is not finite is
  // stored as zeros, because its products with missing keys, whose rows are zeros, would be NaN.
  RA_DEV static void fill_query(char const* at, bool valid, int row, int chunk, float scale, Smem& s) {
    uint32_t largest[2] = {0, 0};
    uint4 loaded[8];
    CUTE_UNROLL
    for (int slab = 8; slab >= 0; --slab) {  // slab 8 is not kept, but loaded again below
      uint4 const words = op::load16<kOnce>(at + (slab * 64 + chunk * 8) * 2, valid);
      if (slab < 8) loaded[slab] = words;
      raise_magnitude(largest[slab == 8], words);
    }
    CUTE_UNROLL
    for (int mask = 1; mask < 8; mask *= 2)
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) largest[i] = larger(largest[i], op::shfl_xor(largest[i], mask));
    int const exponent = unit_exponent(largest[0] << 16, largest[1] << 16);
    bool const finite = larger(largest[0], largest[1]) < 0x7f80;
    if (chunk == 0) {
      // The unit is kept a normal number, because missing keys have logits of -inf, and -inf times 0 is NaN. If the
      // scale is 0, all logits are 0 and any unit will do.
      s.unit[row] = scale == 0.f ? 1.f : fmaxf(power_of_two(exponent) * fabsf(scale), power_of_two(-126));
      s.nan[row] = finite ? 0.f : NAN;
    }
    float const factor = power_of_two(-exponent) * (scale == 0.f ? 0.f : scale < 0.f ? -1.f : 1.f);
    CUTE_UNROLL
    for (int slab = 0; slab < 9; ++slab) {
      uint4 const words = slab < 8 ? loaded[slab] : op::load16<kOnce>(at + 1024 + chunk * 16, valid);
      uint32_t divided[4] = {words.x, words.y, words.z, words.w};
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        float const low = low_of(divided[i]) * factor, high = high_of(divided[i]) * factor;
        divided[i] = !finite ? 0 : slab < 8 ? op::pack<f16>(low, high) : op::pack<bf16>(low, high);
      }
      op::store(reinterpret_cast<uint4*>(s.q[slab] + offset_of(row, chunk)),
                uint4{divided[0], divided[1], divided[2], divided[3]});
    }
  }
  RA_HD static uint32_t larger(uint32_t a, uint32_t b) { return a < b ? b : a; }
  // Raises `largest` to the largest magnitude of eight bfloat16. Without the sign, their bits compare like integers.
  RA_HD static void raise_magnitude(uint32_t& largest, uint4 const& words) {
    for (uint32_t word : {words.x, words.y, words.z, words.w})
      largest = larger(largest, larger(word & 0x7fff, word >> 16 & 0x7fff));
  }
  // These functions return the low and the high bfloat16 of a word as float32.
  RA_HD static float low_of(uint32_t word) { return float_of(word << 16); }
  RA_HD static float high_of(uint32_t word) { return float_of(word & 0xffff0000u); }

  static constexpr int kSoftmaxRegisters = 224, kValuesRegisters = 168, kProducerRegisters = 112;
  RA_DEV static void produce(Plan const& plan, Smem& s) {
    op::reg_dealloc<kProducerRegisters>();
    // The thread's index is read anew at each use, so that it takes no register beside the many codes.
    auto const t = [] { return op::fresh_tid() % 128; };
    int turn = 0, segment_turn = 0, seq = 0;
    for (bool more = true; more; ++segment_turn) {
      Segment const segment = next_segment(plan, seq);
      more = segment.slot != kAbsent;
      s.q_empty.wait((segment_turn & 1) ^ 1);
      if (segment.begin < segment.end) fill_queries(plan, segment.seq, s);
      if (t() == 0) {
        s.segments[segment_turn & 1] = segment;
        s.q_full.arrive();
      }
      op::fence_async_shared();
      s.q_full.arrive();
      if (segment.begin >= segment.end) continue;
      Lists const lists = lists_of(plan, segment, 0);
      int const last = segment.end - 1;
      // A block's rows are loaded in eight steps, four left halves and then four right halves. Each step's loads are
      // issued six steps before its codes are decoded. List entries are loaded one block before that.
      auto const load_entries = [&](int index) { return look_up(plan, lists, index < last ? index : last, t()); };
      Block block = locate(plan, lists, load_entries(segment.begin), segment.begin, t());
      Entries entries = load_entries(segment.begin + 1);
      Codes left, right;
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) load<0>(plan, block, i, left);
      load<1>(plan, block, 0, right);
      load<1>(plan, block, 1, right);
      Scales scales = load_scales(plan, block, t() % 8);
      for (int index = segment.begin; index <= last; ++index, ++turn) {
        Block const next = locate(plan, lists, entries, index + 1, t());
        entries = load_entries(index + 2);
        begin(plan, block, scales, turn, s, t());
        scales = load_scales(plan, next, t() % 8);
        fill<0>(left, turn, s, [&](int i) {
          if (i < 2) load<1>(plan, block, i + 2, right);
          else load<0>(plan, next, i - 2, left);
        });
        fill<1>(right, turn, s, [&](int i) {
          if (i < 2) load<0>(plan, next, i + 2, left);
          else load<1>(plan, next, i - 2, right);
        });
        block = next;
      }
    }
  }
  RA_DEV static void fill_queries(Plan const& plan, int seq, Smem& s) {
    Job const job = Base::job(plan);
    CUTE_NO_UNROLL
    for (int first = 0; first < 64; first += 16) {
      int const t = op::fresh_tid() % 128, inside = first + t / 8, row = job.tile * 64 + inside;
      fill_query(query_at(plan, job, seq, row < plan.rows ? row : 0), row < plan.rows, inside, t % 8, plan.scale, s);
    }
  }
  // ---- consumers

  struct Consumer : Base::Consumer {
    Smem& s;
    uint32_t phases = 0;  // bit 0: stage; bit 1: parity of its barriers; bit 2: parity of the queries' barriers

    RA_DEV Consumer(Smem& s, Plan const& plan) : Base::Consumer(plan), s(s) {}

    // Computes tOrO += weights x half W of the stage's values, 16 keys at a time. Each of the half's two groups of
    // columns has its own scales and therefore its own product. `weigh(keys).of(r + 2 * j)` has row r's weights of keys
    // 8 j + 2 pair and 8 j + 2 pair + 1 of the 16. Registers are scarce, so only one earlier product is in flight while
    // the operands of the next two are computed.
    template <int W, class Weigh>
    RA_DEV void add_values(int stage, int pair, Weigh weigh) {
      CUTE_UNROLL
      for (int keys = 0; keys < 4; ++keys) {
        auto const weights = weigh(keys);
        float const* const ratio = &s.ratio[stage][2 * W][16 * keys + 2 * pair];
        if (keys) op::wgmma_wait<1>();
        add_columns<W, 0>(stage, keys, weights, ratio);
        add_columns<W, 1>(stage, keys, weights, ratio + 64);
      }
    }
    using Left = cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::_1>>;
    template <int W, int I, class Weights>
    RA_DEV void add_columns(int stage, int keys, Weights const& weights, float const* ratio) {
      auto tOrP = cute::make_tensor<f16>(Left{});
      auto words = cute::recast<uint32_t>(cute::make_tensor(tOrP.data(), cute::Layout<cute::_4>{}));
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        float2 const weight = weights.of(i);
        words(i) = op::pack<f16>(weight.x * ratio[i / 2 * 8], weight.y * ratio[i / 2 * 8 + 1]);
      }
      auto columns = cute::make_tensor(
          tOrO.data() + 64 * I,
          cute::make_layout(cute::partition_shape_C(MmaValuesR<128>{}, cute::Shape<cute::_64, cute::_128>{})));
      auto const values = cute::local_tile(shared<Values<128>>(s.keys[stage][2 * (2 * W + I)]),
                                           cute::Shape<cute::_128, cute::_16>{}, cute::make_coord(0, keys));
      op::wgmma_rs(MmaValuesR<128>{}, thread(), tOrP, values, columns);
    }
    RA_DEV void next_block() { phases = (phases & 4) | ((phases + 1) & 3); }
    // Waits for the next segment. Returns whether there is one.
    RA_DEV bool begin() {
      s.q_full.wait(phases >> 2);
      cute::clear(tOrO);
      return segment().slot != kAbsent;
    }
    RA_DEV Segment const& segment() const { return s.segments[phases >> 2]; }
  };

  struct SoftmaxConsumer : Consumer {
    // Two accumulators of logits and one of the output leave no register free. So `level` and `most`, which a thread
    // keeps from block to block, are in shared memory, and the thread's index is read anew at each use.
    RA_DEV static int fresh_thread() { return op::fresh_tid() % 128; }
    Logits tSrS;
    RA_DEV SoftmaxConsumer(Smem& s, Plan const& plan) : Consumer(s, plan) {}

    // Weights in the registers in which they were computed: wgmma's accumulator and left operand have the same layout.
    struct OwnWeights {
      Logits const& tSrS;
      int first;
      RA_DEV float2 of(int i) const { return {tSrS(first + 2 * i), tSrS(first + 2 * i + 1)}; }
    };

    template <class T, int kGroup>
    RA_DEV void add_group(int stage, Logits& logits) {
      constexpr int kColumns = kGroup < kGroups ? 128 : 64;
      op::wgmma_ss(MmaLogits<T>{}, thread(), shared<Rows<kColumns, T>>(reinterpret_cast<T*>(s.q[2 * kGroup])),
                   shared<Rows<kColumns, T>>(reinterpret_cast<T*>(s.keys[stage][2 * kGroup])), logits, kGroup < 2);
    }
    RA_DEV static void take_step(float const (&step)[64], Logits& logits) {
      int const pair = op::fresh_tid() % 4;
      CUTE_UNROLL
      for (int j = 0; j < 8; ++j)
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) {
          float const factor = step[8 * j + 2 * pair + c];
          CUTE_UNROLL
          for (int r = 0; r < 2; ++r) logits(at(c, r, j)) *= factor;
        }
    }
    // Computes tSrS, the logits divided by `unit`. Even groups and rotary columns go to one accumulator, odd groups to
    // another. One accumulator is multiplied by its step while a product for the other one is in flight.
    RA_DEV void logits(int stage) {
      Logits odd;
      s.full[stage][0].wait(phases >> 1 & 1);
      add_group<f16, 0>(stage, tSrS);
      add_group<f16, 1>(stage, odd);
      s.full[stage][1].wait(phases >> 1 & 1);
      op::fence_async_shared();  // cp.async wrote slab 8 through the generic proxy
      op::wgmma_wait<1>(tSrS);
      take_step(s.step[stage][0], tSrS);
      add_group<f16, 2>(stage, tSrS);
      op::wgmma_wait<1>(odd);
      take_step(s.step[stage][1], odd);
      add_group<f16, 3>(stage, odd);
      op::wgmma_wait<1>(tSrS);
      take_step(s.step[stage][2], tSrS);
      add_group<bf16, 4>(stage, tSrS);
      op::wgmma_wait<1>(odd);
      int const pair = op::fresh_tid() % 4;
      CUTE_UNROLL
      for (int j = 0; j < 8; ++j)
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) {
          float2 const last = s.last[stage][8 * j + 2 * pair + c];
          CUTE_UNROLL
          for (int r = 0; r < 2; ++r) odd(at(c, r, j)) = odd(at(c, r, j)) * last.x + last.y;
        }
      op::wgmma_wait<0>(tSrS);
      CUTE_UNROLL
      for (int i = 0; i < cute::size(tSrS); ++i) tSrS(i) += odd(i);
    }

    // Raises the level to `reached` only if that is more than kLag higher. Until then weights grow up to 2^kLag, and
    // nothing has to be rescaled. Sets the factor that rescales sums and output, and returns whether the level rose.
    static constexpr float kLag = 6.f;
    RA_DEV static bool raise_level(float& level, float reached, float& factor) {
      bool const moves = reached > level + kLag;
      factor = moves ? op::exp2(level - reached) : 1.f;
      level = moves ? reached : level;
      return moves;
    }
    // Computes, for each row, the maximum over the keys of (logit + exponent of the key's largest scale).
    RA_DEV void reach(int stage, int pair, float const (&unit)[2], float (&reached)[2]) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) reached[r] = -INFINITY;
      CUTE_UNROLL
      for (int j = 0; j < 8; ++j)
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) {
          float const exponent = s.exponent[stage][8 * j + 2 * pair + c];
          CUTE_UNROLL
          for (int r = 0; r < 2; ++r) reached[r] = fmaxf(reached[r], fmaf(tSrS(at(c, r, j)), unit[r], exponent));
        }
      raise_in_row(reached);
      if (__builtin_expect(plan.call.max_logits != nullptr, false)) {
        float2 most = s.most[fresh_thread()];
        CUTE_UNROLL
        for (int i = 0; i < cute::size(tSrS); ++i) {
          float& largest = i / 2 % 2 ? most.y : most.x;
          largest = fmaxf(largest, tSrS(i));
        }
        s.most[fresh_thread()] = most;
      }
    }

    // Turns the logits into weights times 2^exponent of the key, relative to 2^`level`. Each row's `sum` adds the
    // weights times 2^kHeadroom, without that exponent.
    RA_DEV void weigh(int stage, int pair, float const (&unit)[2], float const (&level)[2]) {
      float const least[2] = {kHeadroom - finite(level[0]), kHeadroom - finite(level[1])};
      CUTE_UNROLL
      for (int j = 0; j < 8; ++j)
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) {
          float const power = s.power[stage][8 * j + 2 * pair + c];
          CUTE_UNROLL
          for (int r = 0; r < 2; ++r) {
            float& weight = tSrS(at(c, r, j));
            weight = op::exp2(fmaf(weight, unit[r], least[r]));
            sum[r] += weight;
            weight *= power;
          }
        }
    }
    RA_DEV void share_weights(int stage, int row0, int pair, float const (&level)[2], float const (&factor)[2]) {
      auto words = cute::make_tensor<uint32_t>(cute::Layout<cute::_16>{});
      CUTE_UNROLL
      for (int i = 0; i < 16; ++i) words(i) = op::pack<f16>(tSrS(2 * i), tSrS(2 * i + 1));
      // Other warps may still read slab 8, which the weights overwrite. Other threads of a row may still read its
      // level.
      op::named_sync(kRestRead, 128);
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (pair) continue;
        s.factor[stage][row0 + 8 * r] = factor[r];
        s.level[row0 + 8 * r] = level[r];
      }
      store_weights(s.keys[stage][8], fresh_thread(), words);
      op::named_arrive(kWeights + stage, 256);
    }

    RA_DEV void attend() {
      int const stage = phases & 1;
      float reached[2], factor[2];
      logits(stage);
      int const t = fresh_thread(), row0 = t / 32 * 16 + t % 32 / 4, pair = t % 4;
      float const unit[2] = {s.unit[row0], s.unit[row0 + 8]};
      float level[2] = {s.level[row0], s.level[row0 + 8]};
      reach(stage, pair, unit, reached);
      bool moves = false;
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        moves |= raise_level(level[r], reached[r], factor[r]);
        sum[r] *= factor[r];
      }
      weigh(stage, pair, unit, level);
      share_weights(stage, row0, pair, level, factor);
      if (__builtin_expect(op::any_in_warp(moves), false)) rescale(factor);
      add_values<0>(stage, pair, [&](int keys) { return OwnWeights{tSrS, 8 * keys}; });
      op::wgmma_wait<0>(tOrO);
      release(s.empty[stage][0]);
      next_block();
    }

    RA_DEV void run() {
      op::reg_alloc<kSoftmaxRegisters>();
      for (; begin(); phases ^= 4) {
        s.most[fresh_thread()] = {-INFINITY, -INFINITY};
        sum[0] = sum[1] = 0.f;
        op::syncwarp();  // all threads have read the previous segment's levels
        if (fresh_thread() % 32 < 16) s.level[fresh_thread() / 32 * 16 + fresh_thread() % 16] = -INFINITY;
        op::syncwarp();
        for (int blocks = segment().end - segment().begin; blocks > 0; --blocks) attend();
        finish_segment();
      }
    }
    // Scales each row's sum to a value from 1 to 2 and adjusts its reference. The weight of a sink, relative to this
    // reference, then overflows only if the sink is far above all logits.
    RA_DEV void finish_segment() {
      op::syncwarp();
      int const t = fresh_thread(), row0 = t / 32 * 16 + t % 32 / 4, pair = t % 4;
      float scale[2], level[2] = {s.level[row0], s.level[row0 + 8]};
      highest[0] = s.most[fresh_thread()].x, highest[1] = s.most[fresh_thread()].y;
      add_in_row();
      raise_in_row(highest);
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (highest[r] != -INFINITY) highest[r] *= s.unit[row0 + 8 * r];  // without keys, no unit was stored
        if (sum[r] > 0.f) sum[r] += s.nan[row0 + 8 * r];
        int const exponent = exponent_of(sum[r]);
        sum[r] *= power_of_two(-exponent);
        reference[r] = level[r] - kHeadroom + exponent;  // level - kHeadroom is rounded as in `weigh`
        scale[r] = power_of_two(kHeadroom) * power_of_two(-exponent);
        if (pair) continue;
        s.sums[phases >> 2][row0 + 8 * r] = sum[r];
        s.reference[phases >> 2][row0 + 8 * r] = reference[r];
        s.scale[phases >> 2][row0 + 8 * r] = scale[r];
      }
      release(s.q_empty);
      op::named_sync(kSums, 256);
      finish_rows<0>(segment(), scale[0], scale[1]);
    }
  };

  struct ValuesConsumer : Consumer {
    RA_DEV ValuesConsumer(Smem& s, Plan const& plan) : Consumer(s, plan) {}

    // Weights that warpgroup 0 has stored in shared memory.
    struct SharedWeights {
      uint4 words;
      RA_DEV float2 of(int i) const {
        uint32_t const word = i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
        return {op::low_half(word), op::high_half(word)};
      }
    };

    RA_DEV void attend() {
      int const stage = phases & 1;
      op::named_sync(kWeights + stage, 256);
      s.full[stage][1].wait(phases >> 1 & 1);
      float const factor[2] = {s.factor[stage][row0], s.factor[stage][row0 + 8]};
      if (op::any_in_warp(factor[0] != 1.f || factor[1] != 1.f)) rescale(factor);
      int const t = op::fresh_tid() % 128;  // offsets from a fresh index take no registers until here
      add_values<1>(stage, t % 4, [&](int keys) { return SharedWeights{load_weights(s.keys[stage][8], t, 2 * keys)}; });
      op::wgmma_wait<0>(tOrO);
      release(s.empty[stage][1]);
      next_block();
    }

    RA_DEV void run() {
      op::reg_alloc<kValuesRegisters>();
      for (; begin(); phases ^= 4) {
        for (int blocks = segment().end - segment().begin; blocks > 0; --blocks) attend();
        release(s.q_empty);
        op::named_sync(kSums, 256);
        float scale[2];
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
          sum[r] = s.sums[phases >> 2][row0 + 8 * r];
          reference[r] = s.reference[phases >> 2][row0 + 8 * r];
          scale[r] = s.scale[phases >> 2][row0 + 8 * r];
        }
        finish_rows<1>(segment(), scale[0], scale[1]);
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
          s.full[stage][half].init(half ? 256 : 128);  // the right half's barrier also counts slab 8's copies
          s.empty[stage][half].init(4);
        }
      op::fence_barrier_init();
    }
    op::let_dependents_launch();
    op::syncthreads();
    int const warpgroup = op::tid() / 128;
    if (warpgroup == 0) SoftmaxConsumer(s, params.plan).run();
    else if (warpgroup == 1) ValuesConsumer(s, params.plan).run();
    else produce(params.plan, s);
  }
};
