// Attention by lists over rows of an `fp8_v32` cache: 512 e4m3 codes, four float32 scales, 64 bfloat16 columns.
//
// A code becomes a float16 operand, exactly, and is never multiplied: the scale of a group of 128 columns is folded into
// its share of the logits and into the weights of its values. Such weights are held near 1 by `level`, a running maximum
// of logit plus exponent of the key's largest scale, which is followed only where it lags. Queries become float16 as
// well, divided by a power of two a row; the 64 columns behind the value stay bfloat16.
//
// A producer warpgroup decodes rows into two stages. Warpgroup 0, the leader, computes logits and weights and holds the
// left half of the output; warpgroup 1, the follower, holds the right half. Both read the weights from shared memory,
// where they take the place of the block's last 64 columns, whose logits are done by then. While the leader is at its
// exponentials, the follower's product of the block before has the tensor cores.
//
//   barrier       who arrives                                     of    a phase is    protects
//   q_full        each producer thread; one for the segment       129   a segment     q, unit, spoilt, segments[turn % 2]
//   q_empty       a thread of each consumer warp                  8     a segment     q, unit, spoilt
//   full[S][0]    each producer thread                            128   a use of S    left half of stage S, scales
//   full[S][1]    each producer thread, and its copies            256   a use of S    right half, and slab 8
//   empty[S][H]   a thread of each warp of warpgroup H            4     a use of S    half H; slab 8 and scales are both's
//   kWeights + S  the leader; the follower waits                  256   a use of S    weights in slab 8, factor[S]
//   kSums         both, and wait                                  256   a segment     sums, reference, regain
//   kRestRead     the leader, and waits                           128   a block       slab 8 before weights take its place; level
#pragma once
#include "latent.h"

struct Fp8Decode : LatentBase<f16, bf16, true, 16, 1> {
  using Base = LatentBase<f16, bf16, true, 16, 1>;
  static constexpr int kColumns = 576, kGroups = 4;
  static constexpr float kSmallestRatio = 8.67361737988403547e-19f;  // 2^-60, in place of a scale of 0 in logits
  // The sum's weights are 2^20 times those of values, of which each has its key's exponent, -60 to 122, taken off: so that
  // the largest lies between 2^-102 and 2^86 and neither what counts beside it nor the sum of 2^28 of them leaves float32.
  // No more than that, for an exponent is rounded by what it is large: those of usual scales, -7 to -11, stay below 32.
  static constexpr int kHeadroom = 20;

  // Named barriers: the weights of a block, one for each stage; the rows' sums; and, of the leader alone, that the rest
  // is no longer read.
  enum { kWeights, kSums = 2, kRestRead };

  struct alignas(1024) Smem {
    f16 q[9][kSlab];                  // slab 8: bfloat16
    f16 keys[2][9][kSlab];            // slab 8: the rest in bfloat16, then the block's weights
    float ratio[2][kGroups][64];      // a group's scale over 2^exponent
    float step[2][kGroups - 1][64];   // what logits are multiplied by after groups 0 to 2
    float2 last[2][64];               // and after the last, and what is added then: 0, of a key that is not there -inf
    float exponent[2][64], power[2][64];  // power: 2^(exponent - kHeadroom); of a key that is not there -inf and 0
    float unit[64], spoilt[64];       // what logits of a row are multiplied by, and sums gain: 0, or NaN
    float factor[2][64];              // what the output of the blocks before is multiplied by
    float reference[2][64], regain[2][64], sums[2][64];
    float level[64];                  // what the output is relative to
    float2 most[128];                 // of the leader's threads, the largest logits of both rows
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
  RA_DEV static void load(Plan const& plan, Block const& block, int i, Codes& codes) {
    char const* const row = row_at(plan.keys.cache + op::fresh_tid() % 8 * 16, block.at[i]) + H * 256;
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) codes.of[i][j] = op::load16<kAgain>(row + j * 128, block.at[i] != kUnseen);
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
    return {op::load16<kAgain>(row_at(plan.keys.cache, at) + 512, chunk < 4 && at != kUnseen), at != kUnseen};
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

  // Logits grow group by group, those of even groups in one accumulator, those of odd ones in another. After each group
  // they are multiplied by what suits the next of theirs (Horner's scheme), while the other accumulator grows; after the
  // last by its own ratio and the power that all ratios are relative to.
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

  // What belongs to neither half, once both are free: scales, which keys there are, and the rest, copied as it is.
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
  // Decode half H. Once a row of it is, and its registers are free, `load(i)` asks for what comes six rows later.
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

  // A row of queries as float16, divided by a power of two that brings its largest below 2^9; the rest, divided by the
  // same, as bfloat16. So that the largest product is the largest logit, the sign of their scale is the queries'. A row
  // with what is no finite number becomes zeros, for it must not spoil products with keys that are not there.
  RA_DEV static void fill_query(char const* at, bool valid, int row, int chunk, float scale, Smem& s) {
    uint32_t largest[2] = {0, 0};
    uint4 given[8];
    CUTE_UNROLL
    for (int slab = 8; slab >= 0; --slab) {  // the rest is loaded once more
      uint4 const words = op::load16<kOnce>(at + (slab * 64 + chunk * 8) * 2, valid);
      if (slab < 8) given[slab] = words;
      raise_magnitude(largest[slab == 8], words);
    }
    CUTE_UNROLL
    for (int mask = 1; mask < 8; mask *= 2)
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) largest[i] = larger(largest[i], op::shfl_xor(largest[i], mask));
    int const exponent = unit_exponent(largest[0] << 16, largest[1] << 16);
    bool const finite = larger(largest[0], largest[1]) < 0x7f80;
    if (chunk == 0) {
      // Where all logits are 0 any unit serves that is a normal number, which -inf can be multiplied with.
      s.unit[row] = scale == 0.f ? 1.f : fmaxf(power_of_two(exponent) * fabsf(scale), power_of_two(-126));
      s.spoilt[row] = finite ? 0.f : NAN;
    }
    float const factor = power_of_two(-exponent) * (scale == 0.f ? 0.f : scale < 0.f ? -1.f : 1.f);
    CUTE_UNROLL
    for (int slab = 0; slab < 9; ++slab) {
      uint4 const words = slab < 8 ? given[slab] : op::load16<kOnce>(at + 1024 + chunk * 16, valid);
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
  // The largest of some bfloat16, without their signs: as whole numbers they are in the same order.
  RA_HD static void raise_magnitude(uint32_t& largest, uint4 const& words) {
    for (uint32_t word : {words.x, words.y, words.z, words.w})
      largest = larger(largest, larger(word & 0x7fff, word >> 16 & 0x7fff));
  }
  // The two bfloat16 of a word.
  RA_HD static float low_of(uint32_t word) { return float_of(word << 16); }
  RA_HD static float high_of(uint32_t word) { return float_of(word & 0xffff0000u); }

  static constexpr int kLeaderRegisters = 224, kFollowerRegisters = 168, kProducerRegisters = 112;
  RA_DEV static void produce(Plan const& plan, Smem& s) {
    op::reg_dealloc<kProducerRegisters>();
    // The thread's number is read again wherever it is asked for, so that it takes no register beside so many codes.
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
      // A block's rows are loaded in eight steps, four of left halves and four of right ones, six steps before they are
      // decoded; what the list says is asked for a block before that.
      auto const ahead = [&](int index) { return look_up(plan, lists, index < last ? index : last, t()); };
      Block block = locate(plan, lists, ahead(segment.begin), segment.begin, t());
      Entries entries = ahead(segment.begin + 1);
      Codes left, right;
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) load<0>(plan, block, i, left);
      load<1>(plan, block, 0, right);
      load<1>(plan, block, 1, right);
      Scales scales = load_scales(plan, block, t() % 8);
      for (int index = segment.begin; index <= last; ++index, ++turn) {
        Block const next = locate(plan, lists, entries, index + 1, t());
        entries = ahead(index + 2);
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
      int const t = op::fresh_tid() % 128, inside = first + t / 8, row = job.tile * 64 + inside;  // as in `fill`
      fill_query(query_at(plan, job, seq, row < plan.rows ? row : 0), row < plan.rows, inside, t % 8, plan.scale, s);
    }
  }
  // ---- consumers

  struct Consumer : Base::Consumer {
    Smem& s;
    uint32_t phases = 0;  // bit 0: the stage; bit 1: of its barriers; bit 2: of the queries'

    RA_DEV Consumer(Smem& s, Plan const& plan) : Base::Consumer(plan), s(s) {}

    // tOrO += the weights x half W of the stage's values, 16 keys at a time, by the two groups of columns with scales of
    // their own. `weigh(keys).of(r + 2 * j)`: the weights of row r and keys 8 j + 2 pair and the next. Registers are few, so
    // the operands of two products are made while only the one before them is under way.
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
    // Wait for the next segment; whether there is one.
    RA_DEV bool begin() {
      s.q_full.wait(phases >> 2);
      cute::clear(tOrO);
      return segment().slot != kAbsent;
    }
    RA_DEV Segment const& segment() const { return s.segments[phases >> 2]; }
  };

  struct Leader : Consumer {
    // While two accumulators are at work no register is to spare. So what a thread keeps from block to block is in shared
    // memory: `level` and `most`; and its number is read again where it is asked for.
    RA_DEV static int mine() { return op::fresh_tid() % 128; }
    Logits tSrS;
    RA_DEV Leader(Smem& s, Plan const& plan) : Consumer(s, plan) {}

    // Its weights where they were computed: those of wgmma's accumulators lie as its left operand needs them.
    struct Held {
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
    // tSrS = q . keys, yet to be multiplied by `unit`. Even groups and the rest grow in one accumulator, odd groups in
    // another: a product is always under way while the result of the one before is multiplied.
    RA_DEV void logits(int stage) {
      Logits odd;
      s.full[stage][0].wait(phases >> 1 & 1);
      add_group<f16, 0>(stage, tSrS);
      add_group<f16, 1>(stage, odd);
      s.full[stage][1].wait(phases >> 1 & 1);
      op::fence_async_shared();  // the rest was copied by ordinary writes
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

    // The level follows what is reached only where that is ahead by more than kLag: until then weights grow to 2^kLag, and
    // nothing is multiplied anew. By what factor that which is relative to it shrinks, and whether it does.
    static constexpr float kLag = 6.f;
    RA_DEV static bool follow(float& level, float reached, float& factor) {
      bool const moves = reached > level + kLag;
      factor = moves ? op::exp2(level - reached) : 1.f;
      level = moves ? reached : level;
      return moves;
    }
    // What the rows' logits reach, each with the exponent of its key.
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
        float2 most = s.most[mine()];
        CUTE_UNROLL
        for (int i = 0; i < cute::size(tSrS); ++i) {
          float& largest = i / 2 % 2 ? most.y : most.x;
          largest = fmaxf(largest, tSrS(i));
        }
        s.most[mine()] = most;
      }
    }

    // The logits become weights relative to `level`. The rows' sums are of such without the keys' exponents.
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
      // Other warps may still multiply the rest, whose place the weights take, and a row's other threads read its level.
      op::named_sync(kRestRead, 128);
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (pair) continue;
        s.factor[stage][row0 + 8 * r] = factor[r];
        s.level[row0 + 8 * r] = level[r];
      }
      store_weights(s.keys[stage][8], mine(), words);
      op::named_arrive(kWeights + stage, 256);
    }

    RA_DEV void attend() {
      int const stage = phases & 1;
      float reached[2], factor[2];
      logits(stage);
      int const t = mine(), row0 = t / 32 * 16 + t % 32 / 4, pair = t % 4;
      float const unit[2] = {s.unit[row0], s.unit[row0 + 8]};
      float level[2] = {s.level[row0], s.level[row0 + 8]};
      reach(stage, pair, unit, reached);
      bool moves = false;
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        moves |= follow(level[r], reached[r], factor[r]);
        sum[r] *= factor[r];
      }
      weigh(stage, pair, unit, level);
      share_weights(stage, row0, pair, level, factor);
      if (__builtin_expect(op::any_in_warp(moves), false)) rescale(factor);
      add_values<0>(stage, pair, [&](int keys) { return Held{tSrS, 8 * keys}; });
      op::wgmma_wait<0>(tOrO);
      release(s.empty[stage][0]);
      next_block();
    }

    RA_DEV void run() {
      op::reg_alloc<kLeaderRegisters>();
      for (; begin(); phases ^= 4) {
        s.most[mine()] = {-INFINITY, -INFINITY};
        sum[0] = sum[1] = 0.f;
        op::syncwarp();  // what was level so far has been read
        if (mine() % 32 < 16) s.level[mine() / 32 * 16 + mine() % 16] = -INFINITY;
        op::syncwarp();
        for (int blocks = segment().end - segment().begin; blocks > 0; --blocks) attend();
        finish_segment();
      }
    }
    // The sum becomes a number of 1 to 2, and the reference what suits that: then sinks may lie far from it.
    RA_DEV void finish_segment() {
      op::syncwarp();
      int const t = mine(), row0 = t / 32 * 16 + t % 32 / 4, pair = t % 4;
      float regain[2], level[2] = {s.level[row0], s.level[row0 + 8]};
      highest[0] = s.most[mine()].x, highest[1] = s.most[mine()].y;
      add_in_row();
      raise_in_row(highest);
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (highest[r] != -INFINITY) highest[r] *= s.unit[row0 + 8 * r];  // without keys no query brought a unit
        if (sum[r] > 0.f) sum[r] += s.spoilt[row0 + 8 * r];
        int const exponent = exponent_of(sum[r]);
        sum[r] *= power_of_two(-exponent);
        reference[r] = level[r] - kHeadroom + exponent;  // the first difference rounded as `weigh` rounds it
        regain[r] = power_of_two(kHeadroom) * power_of_two(-exponent);
        if (pair) continue;
        s.sums[phases >> 2][row0 + 8 * r] = sum[r];
        s.reference[phases >> 2][row0 + 8 * r] = reference[r];
        s.regain[phases >> 2][row0 + 8 * r] = regain[r];
      }
      release(s.q_empty);
      op::named_sync(kSums, 256);
      finish_rows<0>(segment(), regain[0], regain[1]);
    }
  };

  struct Follower : Consumer {
    RA_DEV Follower(Smem& s, Plan const& plan) : Consumer(s, plan) {}

    // Weights as the leader has shared them.
    struct Shared {
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
      int const t = op::fresh_tid() % 128;  // offsets are computed anew
      add_values<1>(stage, t % 4, [&](int keys) { return Shared{load_weights(s.keys[stage][8], t, 2 * keys)}; });
      op::wgmma_wait<0>(tOrO);
      release(s.empty[stage][1]);
      next_block();
    }

    RA_DEV void run() {
      op::reg_alloc<kFollowerRegisters>();
      for (; begin(); phases ^= 4) {
        for (int blocks = segment().end - segment().begin; blocks > 0; --blocks) attend();
        release(s.q_empty);
        op::named_sync(kSums, 256);
        float regain[2];
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
          sum[r] = s.sums[phases >> 2][row0 + 8 * r];
          reference[r] = s.reference[phases >> 2][row0 + 8 * r];
          regain[r] = s.regain[phases >> 2][row0 + 8 * r];
        }
        finish_rows<1>(segment(), regain[0], regain[1]);
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
    op::let_dependents_launch();
    op::syncthreads();
    int const warpgroup = op::tid() / 128;
    if (warpgroup == 0) Leader(s, params.plan).run();
    else if (warpgroup == 1) Follower(s, params.plan).run();
    else produce(params.plan, s);
  }
};
