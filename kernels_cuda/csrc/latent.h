// Attention of 64 query rows over blocks of 64 latent rows, each read once and used as key and, transposed, as value.
//
// Two consumer warpgroups each hold one half of the output, 64 x 256 in float32, and take turns on pairs of blocks
// ("seesaw"): warpgroup W computes the logits and weights of block W of the pair, multiplies them with its own half of
// that block's values, then multiplies the other warpgroup's weights, from shared memory, with its half of the other
// block's values. While one is at its exponentials the other has the tensor cores. A producer warpgroup fills the two
// stages in halves of four slabs (64 keys x 64 columns each); half h of either stage is last read by warpgroup h, which
// alone hands it back, so a half is refilled as soon as its reader is done. Slab 8 holds the last 64 columns of 576,
// which are key and not value; once its logits are computed, the block's weights take that slab's place.
//
// Rows of a quantised cache stay float16 codes. A group of 128 columns has its scale folded into its share of the
// logits and into the weights of its values; these are held near 1 by a second running maximum, `level`, of logit plus
// exponent of the key's largest scale. Without scales `level` is the maximum itself. Logits are to base 2.
#pragma once
#include "ops.h"
#include "work.h"

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

template <class Element_, int kWidth, bool kSparse, bool kQuantised>
struct Latent {
  using Element = Element_;                                             // of the operands
  using Out = std::conditional_t<kQuantised, bf16, Element>;            // of queries and results
  static constexpr int kThreads = 384, kHalf = 4, kSlab = 64 * 64;      // half: slabs; slab: elements
  static constexpr int kColumns = kWidth;
  static constexpr bool kLists = kSparse;
  static constexpr bool kRest = kWidth == 576;                          // columns behind the value
  static constexpr int kValue = 512, kGroups = 4;
  static constexpr float kSmallestRatio = 8.67361737988403547e-19f;     // 2^-60, in place of a scale of 0
  static_assert(kWidth == 512 || kWidth == 576);
  static_assert(!kQuantised || (kSparse && kRest));

  // ---- what a part has to do, sequence by sequence

  struct Segment {
    int seq, length, begin, end, slot;
  };
  struct Walk {
    Job job;
    int seq, last;
    RA_DEV static Walk begin(Plan const& plan) {
      Job const job = job_of(plan, op::bid());
      Seqs const seqs = seqs_of(plan, job.part);
      return {job, seqs.first, seqs.last};
    }
    // The next sequence of which there is something to write, if only that it sees nothing.
    RA_DEV bool next(Plan const& plan, Segment& segment) {
      while (seq <= last) {
        int const length = length_of(plan, seq, job.token);
        Range const range = range_of(plan, job.part, seq, ceil_div(length, kBlock));
        int const seen = limit_of(plan, job, (job.tile < plan.tiles - 1 ? job.tile * 64 + 64 : plan.rows) - 1, length);
        int const stop = ceil_div(seen > 0 ? seen : 0, kBlock);
        segment = {seq, length, range.begin, range.end < stop ? range.end : stop, range.slot};
        ++seq;
        if (range.slot != kAbsent) return true;
      }
      segment = {0, 0, 0, 0, kAbsent};
      return false;
    }
    // Positions from here on a row does not see.
    RA_DEV static int limit_of(Plan const& plan, Job const& job, int row, int length) {
      if (kSparse || !plan.call.causal) return length;
      return length - (plan.num_q_tokens - 1 - query_of(plan, job, row, kSparse).token);
    }
  };

  // Hardware barriers: the maximum and level of block 0, those of block 1 with its weights, the weights of block 0,
  // and the sums of both. All but the last are one warpgroup's word to the other.
  enum { kFirstMaximum, kSecondWeights, kFirstWeights, kSums };

  struct alignas(1024) Smem {
    Element q[9][kSlab];
    Element keys[2][9][kSlab];       // slab 8: the rest, then the block's weights
    float maximum[2][64], level[2][64], sums[2][2][64];
    float ratio[2][kGroups][64];     // a group's scale over 2^exponent
    float step[2][kGroups][64];      // what logits are multiplied by after each group, in the order of the stage
    float exponent[2][64], power[2][64];  // power: 2^exponent
    float unit[64];                  // what rows of q were divided by
    uint8_t seen[2][64];
    Segment segments[2];             // that the producer is at, and that consumers may still be finishing
    op::MBar q_full, q_empty, full[2][2], empty[2][2];
  };
  static_assert(sizeof(Smem) <= 232448, "more than a block of sm_90 can have");

  template <class Tma>
  struct Params {
    Plan plan;
    Tma tma;
    bool use_tma;  // pages are whole numbers of blocks
  };

  // ---- layouts

  template <int kColumns, class T = Element>
  using Rows = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<T>{}, cute::Shape<cute::_64, cute::Int<kColumns>>{}));
  template <int kColumns>
  using Values = decltype(cute::composition(
      Rows<kColumns>{},
      cute::Layout<cute::Shape<cute::Int<kColumns>, cute::_64>, cute::Stride<cute::_64, cute::_1>>{}));
  template <class T>
  using MmaLogits = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<T, T, float, cute::Shape<cute::_64, cute::_64, cute::_64>>()));
  template <int kColumns>
  using MmaValuesR = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<kColumns>, cute::_64>,
                                 cute::GMMA::Major::K, cute::GMMA::Major::MN>()));
  template <int kColumns>
  using MmaValuesS = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<kColumns>, cute::_64>,
                                 cute::GMMA::Major::K, cute::GMMA::Major::MN>()));

  template <class Layout, class T>
  RA_DEV static auto shared(T* pointer) { return cute::make_tensor(cute::make_smem_ptr(pointer), Layout{}); }
  // Element of a slab where 8 columns of a row begin: the swizzle of 128 bytes.
  RA_HD static int place(int row, int chunk) { return row * 64 + ((chunk ^ (row & 7)) * 8); }

  // ---- producer

  // Its threads stand eight to a row and sixteen rows apart four times: these are a thread's rows of a block, as what
  // lies before them in the cache, in units of 16 bytes.
  static constexpr uint32_t kUnseen = ~0u;
  struct Block {
    uint32_t at[4];
    int page, tile;  // where TMA finds it; page -1: it does not
  };

  RA_DEV static uint32_t locate_row(Plan const& plan, Walk const& walk, Segment const& segment, int position) {
    RaLatent const& call = plan.call;
    if (position >= segment.length) return kUnseen;
    int const* list = call.lists + segment.seq * call.list_seq_stride;
    if (kSparse) list += walk.job.token * call.list_token_stride + walk.job.kv_head * call.list_head_stride;
    int const entry = kSparse ? list[position] : list[position / plan.page_size];
    int const page = kSparse && entry >= 0 ? entry / plan.page_size : entry;
    if (page < 0 || page >= plan.num_pages) return kUnseen;
    int const inside = (kSparse ? entry : position) % plan.page_size;
    int64_t const offset = page * call.page_stride + inside * call.slot_stride + walk.job.kv_head * call.head_stride;
    return uint32_t(offset * (kQuantised ? 1 : 2) >> 4);
  }

  template <class Tma>
  RA_DEV static void locate(Params<Tma> const& params, Walk const& walk, Segment const& segment, int block, int t,
                            Block& found) {
    found.page = -1;
    if constexpr (!kSparse) {
      int const first = block * kBlock;
      if (params.use_tma && first + kBlock <= segment.length) {
        int const page_size = params.plan.page_size;
        int const page = params.plan.call.lists[segment.seq * params.plan.call.list_seq_stride + first / page_size];
        if (page >= 0 && page < params.plan.num_pages) {
          found.page = page;
          found.tile = first % page_size / kBlock;
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) found.at[i] = 0;
          return;
        }
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) found.at[i] = locate_row(params.plan, walk, segment, block * kBlock + t / 8 + 16 * i);
  }
  RA_DEV static char const* row_at(RaLatent const& call, uint32_t at) {
    return static_cast<char const*>(call.kv) + (at == kUnseen ? 0 : int64_t(at) * 16);
  }

  template <int S, int H>
  static constexpr int kFilled = kHalf + (kRest && H != S);  // slabs of a half; the rest comes with that read last
  template <int S, int H>
  RA_HD static constexpr int slab_of(int i) { return i < kHalf ? H * kHalf + i : 8; }

  // The half of a stage that its own warpgroup reads first also brings which keys are there at all. Their writers
  // arrive once more than others: the arrival that asynchronous copies bring about speaks of these alone.
  static constexpr int kWriters = 16;
  RA_DEV static void tell_seen(Smem& s, Block const& block, int stage, int t) {
    if (t % 8) return;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) s.seen[stage][t / 8 + 16 * i] = block.at[i] != kUnseen;
    s.full[stage][stage].arrive();
  }

  // Fill half H of stage S when its reader is done with what was there.
  template <int S, int H, class Tma>
  RA_DEV static void fill(Params<Tma> const& params, Walk const& walk, Block const& block, int turn, Smem& s, int t) {
    if constexpr (kQuantised) {
      fill_codes<S, H>(params.plan.call, block, turn, s, t);
    } else {
      s.empty[S][H].wait((turn & 1) ^ 1);
      if (S == H) tell_seen(s, block, S, t);
      if constexpr (!kSparse) {
        if (block.page >= 0) return fetch<S, H>(params, walk, block, s, t);
      }
      int const chunk = t % 8;
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        char const* const row = row_at(params.plan.call, block.at[i]);
        CUTE_UNROLL
        for (int j = 0; j < kFilled<S, H>; ++j) {
          int const slab = slab_of<S, H>(j);
          op::copy16(s.keys[S][slab] + place(t / 8 + 16 * i, chunk), row + (slab * 64 + chunk * 8) * 2,
                     block.at[i] != kUnseen);
        }
      }
      op::arrive_after_copies(s.full[S][H]);
    }
  }

  template <int S, int H, class Tma>
  RA_DEV static void fetch(Params<Tma> const& params, Walk const& walk, Block const& block, Smem& s, int t) {
    if (t) return s.full[S][H].arrive();
    s.full[S][H].arrive_expect(kFilled<S, H> * kSlab * sizeof(Element));
    for (int i = 0; i < kFilled<S, H>; ++i)
      op::tma_load(params.tma, block.tile, slab_of<S, H>(i), walk.job.kv_head, block.page, s.full[S][H],
                   shared<Rows<64>>(s.keys[S][slab_of<S, H>(i)]));
  }

  RA_DEV static uint4 load16(char const* at, bool seen) {
    return seen ? *reinterpret_cast<uint4 const*>(at) : uint4{0, 0, 0, 0};
  }

  // 16 codes of a row become 32 bytes of float16; the order of the two stores spreads a row's eight threads over banks.
  RA_DEV static void decode(uint4 const& codes, Element* slab, int row, int pair, bool high_first) {
    uint32_t const words[4] = {codes.x, codes.y, codes.z, codes.w};
    uint32_t halves[8];
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      halves[2 * i] = op::half_pair(words[i] & 0xffff);
      halves[2 * i + 1] = op::half_pair(words[i] >> 16);
    }
    uint4 const low = {halves[0], halves[1], halves[2], halves[3]}, high = {halves[4], halves[5], halves[6], halves[7]};
    op::store(reinterpret_cast<uint4*>(slab + place(row, 2 * pair + high_first)), high_first ? high : low);
    op::store(reinterpret_cast<uint4*>(slab + place(row, 2 * pair + !high_first)), high_first ? low : high);
  }

  // Logits gain a group at a time, and after each are multiplied to what suits the next (Horner's scheme), so that one
  // accumulator does: after the last group by its own ratio and the power that all ratios are relative to.
  template <int S, int H>
  RA_DEV static void tell_scales(float4 const& scales, int row, Smem& s) {
    float ratio[kGroups] = {scales.x, scales.y, scales.z, scales.w}, divisor[kGroups];
    float largest = 0.f;
    CUTE_UNROLL
    for (int i = 0; i < kGroups; ++i) largest = fmaxf(largest, fabsf(ratio[i]));
    int const exponent = scale_exponent(bits_of(largest));
    CUTE_UNROLL
    for (int i = 0; i < kGroups; ++i) {
      ratio[i] *= power_of_two(-exponent);
      divisor[i] = fabsf(ratio[i]) < kSmallestRatio ? kSmallestRatio : ratio[i];
    }
    s.ratio[S][2 * H][row] = ratio[2 * H];
    s.ratio[S][2 * H + 1][row] = ratio[2 * H + 1];
    if (S != H) return;
    s.exponent[S][row] = float(exponent);
    s.power[S][row] = power_of_two(exponent);
    CUTE_UNROLL
    for (int i = 0; i < kGroups; ++i) {
      int const group = (i + 2 * S) % kGroups, next = (group + 1) % kGroups;
      s.step[S][i][row] = i < kGroups - 1 ? divisor[group] / divisor[next] : divisor[group] * power_of_two(exponent);
    }
  }

  // The same from rows of bytes: 512 codes, four float32 scales, 64 bfloat16.
  template <int S, int H>
  RA_DEV static void fill_codes(RaLatent const& call, Block const& block, int turn, Smem& s, int t) {
    int const row = t / 8, chunk = t % 8;
    uint4 codes[4][2], rest[4];
    float4 scales{0.f, 0.f, 0.f, 0.f};
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) codes[i][j] = load16(row_at(call, block.at[i]) + H * 256 + j * 128 + chunk * 16, block.at[i] != kUnseen);
      if (chunk == i && block.at[i] != kUnseen)
        scales = *reinterpret_cast<float4 const*>(row_at(call, block.at[i]) + 512);
    }
    s.empty[S][H].wait((turn & 1) ^ 1);
    if (S == H) tell_seen(s, block, S, t);
    if (chunk < 4) tell_scales<S, H>(scales, row + 16 * chunk, s);
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j)
        decode(codes[i][j], s.keys[S][H * kHalf + 2 * j + chunk / 4], row + 16 * i, chunk % 4, chunk >= 4);
      // Now that there are registers for it.
      if (kFilled<S, H> > kHalf) rest[i] = load16(row_at(call, block.at[i]) + 528 + chunk * 16, block.at[i] != kUnseen);
    }
    if (kFilled<S, H> > kHalf) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i)
        op::store(reinterpret_cast<uint4*>(s.keys[S][8] + place(row + 16 * i, chunk)), rest[i]);
    }
    op::fence_async_shared();
    s.full[S][H].arrive();
  }

  RA_DEV static char const* query_row(Plan const& plan, Walk const& walk, int seq, int row) {
    RaLatent const& call = plan.call;
    Query const query = query_of(plan, walk.job, row, kSparse);
    return static_cast<char const*>(call.q) +
           2 * (seq * call.q_seq_stride + query.token * call.q_token_stride + query.head * call.q_head_stride);
  }

  RA_DEV static void fill_queries(Plan const& plan, Walk const& walk, int seq, Smem& s, int t) {
    int const rows = plan.rows, chunk = t % 8;
    for (int i = 0; i < 4; ++i) {
      int const inside = t / 8 + 16 * i, row = walk.job.tile * 64 + inside;
      bool const valid = row < rows;
      char const* const at = query_row(plan, walk, seq, valid ? row : 0);
      if constexpr (!kQuantised) {
        CUTE_UNROLL
        for (int slab = 0; slab < kWidth / 64; ++slab)
          op::copy16(s.q[slab] + place(inside, chunk), at + (slab * 64 + chunk * 8) * 2, valid);
      } else {
        fill_halves(at, valid, inside, chunk, s);
      }
    }
    if (kQuantised) op::fence_async_shared();
  }

  // A row of queries as float16, divided by a power of two that brings its largest below 2^9; the rest as it is.
  RA_DEV static void fill_halves(char const* at, bool valid, int row, int chunk, Smem& s) {
    uint4 given[8];
    float largest = 0.f;
    CUTE_UNROLL
    for (int slab = 0; slab < 8; ++slab) {
      given[slab] = load16(at + (slab * 64 + chunk * 8) * 2, valid);
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
      op::store(reinterpret_cast<uint4*>(s.q[slab] + place(row, chunk)), uint4{words[0], words[1], words[2], words[3]});
    }
    op::store(reinterpret_cast<uint4*>(s.q[8] + place(row, chunk)), load16(at + 1024 + chunk * 16, valid));
  }
  // The two bfloat16 of a word.
  RA_HD static float low_of(uint32_t word) { return float_of(word << 16); }
  RA_HD static float high_of(uint32_t word) { return float_of(word & 0xffff0000u); }

  template <class Tma>
  RA_DEV static void produce(Params<Tma> const& params, Smem& s) {
    op::reg_dealloc<72>();
    int const t = op::tid() % 128;
    int turns[2] = {0, 0}, turn = 0;
    Walk walk = Walk::begin(params.plan);
    Segment segment;
    for (bool more = true; more; ++turn) {
      more = walk.next(params.plan, segment);
      s.q_empty.wait((turn & 1) ^ 1);
      if (more && segment.begin < segment.end) fill_queries(params.plan, walk, segment.seq, s, t);
      if (t == 0) {
        s.segments[turn & 1] = segment;
        s.q_full.arrive();
      }
      if (kQuantised) s.q_full.arrive();
      else op::arrive_after_copies(s.q_full);
      for (int index = segment.begin; more && index < segment.end; index += 2) {
        bool const two = index + 1 < segment.end;
        Block first, second;
        locate(params, walk, segment, index, t, first);
        if (two) locate(params, walk, segment, index + 1, t, second);
        fill<0, 0>(params, walk, first, turns[0], s, t);
        if (two) fill<1, 1>(params, walk, second, turns[1], s, t);
        fill<0, 1>(params, walk, first, turns[0]++, s, t);
        if (two) fill<1, 0>(params, walk, second, turns[1]++, s, t);
      }
    }
  }

  // ---- consumers

  // Logits and weights of a block: a thread has rows row0 and row0 + 8 and, of every 8 columns, two neighbours.
  static constexpr int at(int c, int r, int j) { return c + 2 * r + 4 * j; }
  using WeightsA = cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::_4>,
                                cute::Stride<cute::Stride<cute::_1, cute::_2, cute::_4>, cute::_0, cute::_8>>;

  template <int W>
  struct Consumer {
    Smem& s;
    Plan const& plan;
    // This thread's first row, and which two of 8 columns it has.
    int const row0 = op::tid() % 128 / 32 * 16 + op::tid() % 32 / 4, quad = op::tid() % 4;
    uint32_t phases = 0;  // bit S: of the barriers of stage S; bit 2: of the queries'
    float maximum[2], level[2], sum[2];
    decltype(cute::partition_fragment_C(MmaValuesS<256>{}, cute::Shape<cute::_64, cute::_256>{})) out;
    decltype(cute::partition_fragment_C(MmaLogits<Element>{}, cute::Shape<cute::_64, cute::_64>{})) block;

    RA_DEV Consumer(Smem& s, Plan const& plan) : s(s), plan(plan) {}

    RA_DEV void wait_full(int stage, int half) {
      s.full[stage][half].wait(phases >> stage & 1);
      if (!kQuantised) op::fence_async_shared();  // copies are ordinary writes
    }
    RA_DEV void hand_back(op::MBar& bar) {
      op::syncwarp();  // each warp's own products are done, so each says so
      if (is_first_lane()) bar.arrive();
    }
    RA_DEV bool is_first_lane() const { return quad == 0 && row0 % 8 == 0; }
    RA_DEV void both_arrive(int id) { op::named_arrive(id, 256); }
    RA_DEV void both_sync(int id) { op::named_sync(id, 256); }

    // block = q . keys of stage W, its own half first.
    RA_DEV void logits() {
      wait_full(W, W);
      if constexpr (!kQuantised) {
        add_logits<kHalf>(W * kHalf, true);
        wait_full(W, 1 - W);
        add_logits<kHalf>((1 - W) * kHalf, false);
        if constexpr (kRest) add_logits<1>(8, false);
        op::wgmma_wait<0>(block);
      } else {
        CUTE_UNROLL
        for (int i = 0; i < kGroups; ++i) {
          if (i == 2) wait_full(W, 1 - W);
          int const group = (i + 2 * W) % kGroups;
          op::wgmma_ss(MmaLogits<Element>{}, op::tid() % 128, shared<Rows<128>>(s.q[2 * group]),
                       shared<Rows<128>>(s.keys[W][2 * group]), block, i == 0);
          op::wgmma_wait<0>(block);
          CUTE_UNROLL
          for (int j = 0; j < 8; ++j)
            CUTE_UNROLL
            for (int c = 0; c < 2; ++c) {
              float const step = s.step[W][i][8 * j + 2 * quad + c];
              CUTE_UNROLL
              for (int r = 0; r < 2; ++r)
                block(at(c, r, j)) *= i < kGroups - 1 ? step : step * s.unit[row0 + 8 * r];
            }
        }
        op::wgmma_ss(MmaLogits<bf16>{}, op::tid() % 128, shared<Rows<64, bf16>>(reinterpret_cast<bf16*>(s.q[8])),
                     shared<Rows<64, bf16>>(reinterpret_cast<bf16*>(s.keys[W][8])), block, false);
        op::wgmma_wait<0>(block);
      }
    }
    template <int kSlabs>
    RA_DEV void add_logits(int slab, bool zero) {
      op::wgmma_ss(MmaLogits<Element>{}, op::tid() % 128, shared<Rows<64 * kSlabs>>(s.q[slab]),
                   shared<Rows<64 * kSlabs>>(s.keys[W][slab]), block, zero);
    }

    // Scale and mask the logits; the rows' maxima and levels over this block.
    RA_DEV void mask(int first, int const (&limit)[2], float (&highest)[2], float (&reached)[2]) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) highest[r] = reached[r] = -INFINITY;
      CUTE_UNROLL
      for (int j = 0; j < 8; ++j)
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) {
          int const column = 8 * j + 2 * quad + c;
          bool const seen = s.seen[W][column];
          float const exponent = kQuantised ? s.exponent[W][column] : 0.f;
          CUTE_UNROLL
          for (int r = 0; r < 2; ++r) {
            float& logit = block(at(c, r, j));
            logit = seen && (kSparse || first + column < limit[r]) ? logit * plan.scale : -INFINITY;
            highest[r] = fmaxf(highest[r], logit);
            if (kQuantised) reached[r] = fmaxf(reached[r], logit + exponent);
          }
        }
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r)
        CUTE_UNROLL
        for (int mask = 1; mask < 4; mask *= 2) {
          highest[r] = fmaxf(highest[r], op::shfl_xor(highest[r], mask));
          if (kQuantised) reached[r] = fmaxf(reached[r], op::shfl_xor(reached[r], mask));
        }
    }
    RA_DEV static float finite(float x) { return x == -INFINITY ? 0.f : x; }

    // The logits become weights relative to `level`; returns each row's sum relative to `highest`.
    RA_DEV void weigh(float const (&highest)[2], float const (&reached)[2], float (&total)[2]) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        float const reference = finite(highest[r]);
        float const shift = kQuantised ? op::exp2(reference - finite(reached[r])) : 1.f;
        total[r] = 0.f;
        CUTE_UNROLL
        for (int j = 0; j < 8; ++j)
          CUTE_UNROLL
          for (int c = 0; c < 2; ++c) {
            float& weight = block(at(c, r, j));
            weight = op::exp2(weight - reference);
            total[r] += weight;
            if (kQuantised) weight *= shift * s.power[W][8 * j + 2 * quad + c];
          }
      }
    }

    RA_DEV void rescale(float const (&factor)[2]) {
      CUTE_UNROLL
      for (int i = 0; i < cute::size(out); ++i) out(i) *= factor[i / 2 % 2];
    }

    // Word (r, j) of the weights in shared memory, in the slab of the rest.
    RA_DEV uint32_t* weight_word(int stage, int r, int j) {
      return reinterpret_cast<uint32_t*>(s.keys[stage][8] + place(row0 + 8 * r, j)) + quad;
    }
    RA_DEV void share_weights(float const (&factor)[2]) {
      CUTE_UNROLL
      for (int j = 0; j < 8; ++j)
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r)
          op::store(weight_word(W, r, j),
                    op::pack<Element>(block(at(0, r, j)) * factor[r], block(at(1, r, j)) * factor[r]));
      op::fence_async_shared();
    }

    // Weights as a left operand in registers; those of a group of scaled columns times the keys' scales.
    template <class Weight>
    RA_DEV auto operand(Weight&& weight) {
      auto a = cute::make_tensor<Element>(WeightsA{});
      auto words = cute::recast<uint32_t>(cute::make_tensor(a.data(), cute::Layout<cute::_32>{}));
      CUTE_UNROLL
      for (int j = 0; j < 8; ++j)
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) words(r + 2 * j) = weight(r, j);
      return a;
    }
    // out += this warpgroup's weights x its half of the values of stage W.
    RA_DEV void add_own() {
      if constexpr (!kQuantised) {
        auto a = operand([&](int r, int j) { return op::pack<Element>(block(at(0, r, j)), block(at(1, r, j))); });
        op::wgmma_rs(MmaValuesR<256>{}, op::tid() % 128, a, shared<Values<256>>(s.keys[W][W * kHalf]), out);
      } else {
        constexpr float kOne[2] = {1.f, 1.f};
        add_groups<W>(kOne);
      }
    }
    // out += the other warpgroup's weights x this one's half of the values of its stage; `factor` is for those that
    // pass through registers.
    RA_DEV void add_other(float const (&factor)[2]) {
      if constexpr (!kQuantised)
        op::wgmma_ss(MmaValuesS<256>{}, op::tid() % 128, shared<Rows<64>>(s.keys[1 - W][8]),
                     shared<Values<256>>(s.keys[1 - W][W * kHalf]), out, false);
      else
        add_groups<1 - W>(factor);
    }
    // Stage S, by groups of columns, each with the weights in shared memory times the keys' scales.
    template <int S>
    RA_DEV void add_groups(float const (&factor)[2]) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        int const group = 2 * W + i;
        auto a = operand([&](int r, int j) {
          uint32_t const word = *weight_word(S, r, j);
          float const* const ratio = &s.ratio[S][group][8 * j + 2 * quad];
          return op::pack<Element>(op::low_half(word) * (factor[r] * ratio[0]),
                                   op::high_half(word) * (factor[r] * ratio[1]));
        });
        auto columns = cute::make_tensor(out.data() + 64 * i, cute::make_layout(cute::partition_shape_C(
                                                                  MmaValuesR<128>{}, cute::Shape<cute::_64, cute::_128>{})));
        op::wgmma_rs(MmaValuesR<128>{}, op::tid() % 128, a, shared<Values<128>>(s.keys[S][2 * group]), columns);
      }
    }

    RA_DEV void tell(float const (&highest)[2], float const (&reached)[2]) {
      if (quad == 0) {
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
          s.maximum[W][row0 + 8 * r] = highest[r];
          if constexpr (kQuantised) s.level[W][row0 + 8 * r] = reached[r];
        }
      }
    }
    RA_DEV void hear(float (&highest)[2], float (&reached)[2]) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        highest[r] = s.maximum[1 - W][row0 + 8 * r];
        if constexpr (kQuantised) reached[r] = s.level[1 - W][row0 + 8 * r];
      }
    }
    // What is relative to `from` becomes relative to `to` by this factor.
    RA_DEV static void factors(float const (&from)[2], float const (&to)[2], float (&factor)[2]) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) factor[r] = op::exp2(from[r] - finite(to[r]));
    }
    RA_DEV static void raise(float (&value)[2], float const (&least)[2]) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) value[r] = fmaxf(value[r], least[r]);
    }

    // What weights and output are relative to.
    RA_DEV static auto& reference(float (&highest)[2], float (&reached)[2]) {
      if constexpr (kQuantised) return reached;
      else return highest;
    }

    // Move to a new maximum and level; `total` is what the row's sum gains.
    RA_DEV void move(float const (&highest)[2], float const (&reached)[2], float const (&total)[2]) {
      float factor[2];
      factors(maximum, highest, factor);
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        sum[r] = sum[r] * factor[r] + total[r];
        maximum[r] = highest[r];
      }
      if constexpr (kQuantised) {
        factors(level, reached, factor);
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) level[r] = reached[r];
      }
      rescale(factor);
    }

    // A pair of blocks, of which the second may be missing.
    RA_DEV void pair(int first, bool two, int const (&limit)[2]) {
      constexpr float kOne[2] = {1.f, 1.f}, kNone[2] = {0.f, 0.f};
      float highest[2], reached[2], total[2], others[2], others_level[2], factor[2] = {1.f, 1.f};
      if constexpr (W == 0) {
        logits();
        mask(first, limit, highest, reached);
        raise(highest, maximum);
        if constexpr (kQuantised) raise(reached, level);
        weigh(highest, reached, total);
        tell(highest, reached);
        if constexpr (kQuantised) share_weights(kOne);  // who reads them from registers rescales them
        both_arrive(kFirstMaximum);
        move(highest, reached, total);
        add_own();
        if (two) {
          both_sync(kSecondWeights);
          hear(others, others_level);
        }
        if constexpr (!kQuantised) {
          if (two) factors(maximum, others, factor);
          share_weights(factor);
          both_arrive(kFirstWeights);
        }
        op::wgmma_wait<0>(out);
        hand_back(s.empty[0][0]);
        if (two) {
          move(others, others_level, kNone);
          wait_full(1, 0);
          add_other(kOne);
          op::wgmma_wait<0>(out);
          hand_back(s.empty[1][0]);
        }
      } else {
        if (two) {
          logits();
          mask(first + kBlock, limit, highest, reached);
        }
        both_sync(kFirstMaximum);
        hear(others, others_level);
        if (two) {
          raise(highest, others);
          if constexpr (kQuantised) raise(reached, others_level);
          weigh(highest, reached, total);
          tell(highest, reached);
          share_weights(kOne);
          both_arrive(kSecondWeights);
          move(highest, reached, total);
          add_own();
          if constexpr (kQuantised) {
            factors(others_level, level, factor);
            op::wgmma_wait<0>(out);  // there are no registers for more operands at a time
            hand_back(s.empty[1][1]);
          }
        } else {
          move(others, others_level, kNone);
        }
        if constexpr (!kQuantised) both_sync(kFirstWeights);
        wait_full(0, 1);
        add_other(factor);
        if constexpr (!kQuantised) {
          if (two) {
            op::wgmma_wait<1>();
            hand_back(s.empty[1][1]);
          }
        }
        op::wgmma_wait<0>(out);
        hand_back(s.empty[0][1]);
      }
      phases ^= two ? 3 : 1;
    }

    RA_DEV void run() {
      op::reg_alloc<216>();
      for (;; phases ^= 4) {
        s.q_full.wait(phases >> 2);
        if (!kQuantised) op::fence_async_shared();
        Segment const& segment = s.segments[phases >> 2];
        if (segment.slot == kAbsent) return;
        cute::clear(out);
        int limit[2];
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
          maximum[r] = -INFINITY;
          if constexpr (kQuantised) level[r] = -INFINITY;
          sum[r] = 0.f;
          Job const job = job_of(plan, op::bid());
          limit[r] = Walk::limit_of(plan, job, job.tile * 64 + row0 + 8 * r, segment.length);
        }
        int index = segment.begin, end = segment.end;
        bool const some = index < end;
        for (; index < end; index += 2) pair(index * kBlock, index + 1 < end, limit);
        hand_back(s.q_empty);
        if (some) add_sums(phases >> 2);
        finish_row<0>(op::fresh_tid());
        finish_row<1>(op::fresh_tid());
      }
    }

    // The row's sum is that of both warpgroups. Two buffers, since one may be a segment ahead of the other.
    RA_DEV void add_sums(int buffer) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        CUTE_UNROLL
        for (int mask = 1; mask < 4; mask *= 2) sum[r] += op::shfl_xor(sum[r], mask);
        if (quad == 0) s.sums[buffer][W][row0 + 8 * r] = sum[r];
      }
      both_sync(kSums);
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) sum[r] += s.sums[buffer][1 - W][row0 + 8 * r];
    }

    // Places are computed anew from the thread's number, not kept in registers through the loop.
    template <int R>
    RA_DEV void finish_row(int thread) {
      Segment const segment = s.segments[phases >> 2];
      Job const job = job_of(plan, op::fresh_bid());
      bool const whole = segment.slot == kWhole;
      RaLatent const& call = plan.call;
      int const row = job.tile * 64 + thread % 128 / 32 * 16 + thread % 32 / 4 + 8 * R, pair = thread % 4;
      if (row >= plan.rows) return;
      Query const query = query_of(plan, job, row, kSparse);
      int64_t const place =
          ((whole ? segment.seq : segment.slot) * call.num_q_tokens + query.token) * call.num_q_heads + query.head;
      bool const empty = sum[R] == 0.f;
      float denominator = sum[R];
      if (whole && call.sinks && !empty) denominator += op::exp2(call.sinks[query.head] * kLog2e - maximum[R]);
      float factor = empty ? 0.f : 1.f / denominator;
      if (kQuantised && !empty) factor *= op::exp2(level[R] - maximum[R]);
      int64_t const column = place * kValue + W * 256 + 2 * pair;
      if (whole) {
        Out* const to = static_cast<Out*>(call.out) + column;
        CUTE_UNROLL
        for (int j = 0; j < 32; ++j)
          *reinterpret_cast<uint32_t*>(to + 8 * j) = op::pack<Out>(out(at(0, R, j)) * factor, out(at(1, R, j)) * factor);
      } else {
        float* const to = call.partial_out + column;
        CUTE_UNROLL
        for (int j = 0; j < 32; ++j)
          *reinterpret_cast<float2*>(to + 8 * j) = float2{out(at(0, R, j)) * factor, out(at(1, R, j)) * factor};
      }
      if (W == 0 && pair == 0) {
        float const lse = empty ? -INFINITY : maximum[R] + op::log2(sum[R]);
        int64_t const finished = (segment.seq * call.num_q_heads + query.head) * call.num_q_tokens + query.token;
        if (whole) call.lse[finished] = lse * kLn2;
        else call.partial_lse[place] = lse;
        if (call.max_logits) {
          if (whole) call.max_logits[finished] = maximum[R] * kLn2;
          else call.partial_max[place] = maximum[R];
        }
      }
    }
  };

  template <class Tma>
  RA_DEV static void run(Params<Tma> const& params, Smem& s) {
    if (op::tid() == 0) {
      s.q_full.init(128 + 1);
      s.q_empty.init(8);
      for (int i = 0; i < 4; ++i) {
        s.full[i / 2][i % 2].init(128 + (i / 2 == i % 2 ? kWriters : 0));
        s.empty[i / 2][i % 2].init(4);
      }
      op::fence_barrier_init();
    }
    op::syncthreads();
    int const warpgroup = op::tid() / 128;
    if (warpgroup == 0) Consumer<0>(s, params.plan).run();
    else if (warpgroup == 1) Consumer<1>(s, params.plan).run();
    else produce(params, s);
  }
};
