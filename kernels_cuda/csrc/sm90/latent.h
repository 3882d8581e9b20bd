// The base class of all kernels of attention over latent rows: tiles, the keys that a thread block reads, and the
// epilogue.
//
// A thread block's query rows, at most 64, attend to blocks of 64 latent rows. Each latent row is loaded once. It is
// the key, and its first 512 columns, transposed, are the value. Logits are in base 2.
//
// In all kernels except `Narrow`, two warpgroups, W = 0 and 1, hold the 64 x 512 output in float32. Each has half of
// the columns. A tile in shared memory consists of slabs of 64 rows x 64 columns in the 128-byte swizzle.
#pragma once
#include "ops.h"
#include "work.h"

constexpr float kLn2 = 0.6931471805599453f;

// log2 of a sum of weights, plus the exponent `reference` that the weights are relative to. The hardware's logarithm
// has a relative error of 2^-22, but for arguments from 1/2 to 2 an absolute error of 2^-22. So the sum is scaled to
// that range first.
RA_DEV float lse_of(float reference, float sum) {
  int const exponent = exponent_of(sum);
  return reference + exponent + op::log2(sum * power_of_two(-exponent));
}

// The blocks [begin, end) of one sequence that a part computes. `length` and `extra` are the numbers of keys in the
// first and in the second list. `slot` says where the result goes (see Range).
struct Segment {
  int seq, length, extra, begin, end, slot;
};

// The list entries of a producer thread's four rows of a block, loaded before they are needed. Eight threads copy a
// row, and a thread's rows are 16 apart.
struct Entries {
  int of[4];
};
constexpr uint32_t kUnseen = ~0u;
// The offsets `at` of the same four rows in the cache, in units of kUnit bytes. kUnseen marks a row that must not be
// read.
struct Block {
  char const* rows;  // address of this thread's share of row 0 in the block's cache
  uint32_t at[4];
  int page, tile;  // for TMA: the block's page (-1 if TMA cannot fetch it), and its index within the page
};

// A segment's lists of keys in the first and the second cache.
struct Lists {
  int const *entries, *extra_entries;
  int length, extra_length;
  uint32_t head;     // offset of the KV head within a row's slot, in units of kUnit bytes
  char const* rows;  // see Block
  int share;         // first byte of this thread's share of a row
};
// The cases for which `look_up` and `locate`, which compute rows' offsets, are compiled separately. kPacked: a sparse
// call with one list, over pages without gaps between them. kAny: any lists.
enum class Addressing { kPacked, kAny };

// A kernel's parameters: the plan, and a tensor map of the cache, which is used if pages are whole numbers of blocks.
template <class Tma>
struct LatentParams {
  Plan plan;
  Tma tma;
  bool use_tma;
};

template <class Element_, class Out_, bool kSparse, int kUnit_ = 16, int kCaches = 2>
struct LatentBase {
  using Element = Element_;  // type of wgmma's operands
  using Out = Out_;          // type of queries and results
  static constexpr int kThreads = 384, kSlab = 64 * 64, kHalf = 4;  // kHalf: slabs per half of the value's columns
  static constexpr int kValue = 512, kUnit = kUnit_;  // kUnit: bytes per unit of row offsets
  static constexpr bool kLists = kSparse, kTwo = kSparse && kCaches == 2;  // kTwo: a call may have a second cache

  // ---- tiles

  template <int kColumns, class T = Element>
  using Rows = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<T>{},
                                            cute::Shape<cute::_64, cute::Int<kColumns>>{}));
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
  // Accumulators and operands have CuTe's names: tSrS holds the logits, tOrO the output, and tOrP the weights as a left
  // operand. A thread holds two rows, 8 apart, and two adjacent columns of every 8 (PTX, "WGMMA .m64nNk16 register
  // fragment layout for accumulator matrix D"). `at` is the index of row lane / 4 + 8 r, column 8 j + 2 (lane % 4) + c.
  using Logits = decltype(cute::partition_fragment_C(MmaLogits<Element>{}, cute::Shape<cute::_64, cute::_64>{}));
  using Output = decltype(cute::partition_fragment_C(MmaValuesS<256>{}, cute::Shape<cute::_64, cute::_256>{}));
  RA_HD static constexpr int at(int c, int r, int j) { return c + 2 * r + 4 * j; }

  template <class Layout, class T>
  RA_DEV static auto shared(T* pointer) {
    return cute::make_tensor(cute::make_smem_ptr(pointer), Layout{});
  }
  // The offset in a slab of row `row`, columns 8 chunk to 8 chunk + 7.
  RA_HD static int offset_of(int row, int chunk) { return row * 64 + ((chunk ^ (row & 7)) * 8); }
  // Writes a warpgroup's 64 x 64 weights to a slab, four 8 x 8 matrices at a time. words(r + 2 * j) has this thread's row
  // r, columns 8 j + 2 pair and 8 j + 2 pair + 1, where pair = t % 4.
  template <class Words>
  RA_DEV static void store_weights(Element* slab, int t, Words const& words) {
    CUTE_UNROLL
    for (int j = 0; j < 8; j += 2)
      op::store_matrices(weights_at(slab, t, j), {words(2 * j), words(2 * j + 1), words(2 * j + 2), words(2 * j + 3)});
  }
  // The address in a slab of the word that holds the weights of row `row`, columns 8 j + 2 pair and 8 j + 2 pair + 1.
  RA_DEV static uint32_t* weight_word(Element* slab, int row, int j, int pair) {
    return reinterpret_cast<uint32_t*>(slab + offset_of(row, j)) + pair;
  }
  // Reads the weights of 16 columns, from chunk j on. Word i has this thread's row r = i % 2, and chunk j + i / 2.
  RA_DEV static uint4 load_weights(Element* slab, int t, int j) { return op::load_matrices(weights_at(slab, t, j)); }
  RA_DEV static Element* weights_at(Element* slab, int t, int j) {
    return slab + offset_of(t / 32 * 16 + t % 16, j + t % 32 / 16);
  }

  // ---- the keys of a thread block

  RA_DEV static Job job(Plan const& plan) { return job_of(plan, op::fresh_bid()); }
  // A query row attends only to positions below this limit.
  RA_DEV static int limit_of(Plan const& plan, Job const& job, int row, int length) {
    if (kSparse || !plan.call.causal) return length;
    return length - (plan.num_q_tokens - 1 - query_of(plan, job, row, kSparse).token);
  }
  // The next segment for which this part writes a result, even if the segment has no keys. The search begins with
  // sequence `seq`, and `seq` becomes the sequence after the segment. After the last segment, the returned slot is
  // kAbsent.
  RA_DEV static Segment next_segment(Plan const& plan, int& seq) {
    Job const job = LatentBase::job(plan);
    Seqs const seqs = seqs_of(plan, job.part);
    for (seq = seq < seqs.first ? seqs.first : seq; seq <= seqs.last;) {
      int const length = length_of(plan.keys, seq, job.token);
      int const blocks = kTwo ? blocks_of(plan, seq, job.token) : ceil_div(length, kBlock);
      int const extra = kTwo && plan.extra.lists ? length_of(plan.extra, seq, job.token) : 0;
      Range const range = range_of(plan, job.part, seq, blocks);
      int stop = blocks;
      if (!kSparse) {
        int const last = (job.tile < plan.tiles - 1 ? job.tile * 64 + 64 : plan.rows) - 1;
        int const seen = limit_of(plan, job, last, length);
        stop = ceil_div(seen > 0 ? seen : 0, kBlock);
      }
      Segment const segment = {seq++, length, extra, range.begin, range.end < stop ? range.end : stop, range.slot};
      if (range.slot != kAbsent) return segment;
    }
    return {0, 0, 0, 0, 0, kAbsent};
  }

  // The lists of a segment, for a thread whose share of a row begins at byte `share`.
  RA_DEV static Lists lists_of(Plan const& plan, Segment const& segment, int share) {
    Job const job = LatentBase::job(plan);
    Keys const &keys = plan.keys, &extra = plan.extra;
    int const* entries = keys.lists + segment.seq * keys.seq_stride;
    if (kSparse) entries += job.token * keys.token_stride + job.kv_head * keys.head_stride;
    int const* const extra_entries = extra.lists + segment.seq * extra.seq_stride + job.token * extra.token_stride;
    return {op::opaque(entries), kTwo ? extra_entries : nullptr, segment.length, segment.extra, job.kv_head * keys.head,
            keys.cache + share, share};
  }
  // These two functions return whether a block is in the second list, and the position in its list at which it begins,
  // respectively.
  RA_DEV static bool is_extra(Lists const& lists, int block) { return kTwo && block * kBlock >= lists.length; }
  RA_DEV static int first_of(Lists const& lists, int block, bool extra) {
    return block * kBlock - (extra ? (lists.length + kBlock - 1) / kBlock * kBlock : 0);
  }
  // The list entries of this thread's four rows. After the end of the list its last entry is loaded again, so that no
  // load needs a branch. The list must not be empty.
  template <Addressing kAddressing = Addressing::kAny>
  RA_DEV static Entries look_up(Plan const& plan, Lists const& lists, int block, int t) {
    bool const extra = kAddressing == Addressing::kAny && is_extra(lists, block);
    int const* const entries = extra ? lists.extra_entries : lists.entries;
    int const first = first_of(lists, block, extra);
    int const last = (extra ? lists.extra_length : lists.length) - 1;
    Entries loaded;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      int const position = first + t / 8 + 16 * i;
      uint32_t const inside = position < last ? position : last;
      loaded.of[i] = op::load_constant(entries + (kSparse ? inside : divide(inside, plan.keys.by_page_size)));
    }
    return loaded;
  }
  // The block whose entries `look_up` has loaded: the offsets of this thread's four rows in the cache.
  template <Addressing kAddressing = Addressing::kAny>
  RA_DEV static Block locate(Plan const& plan, Lists const& lists, Entries const& entries, int block, int t) {
    bool const extra = kAddressing == Addressing::kAny && is_extra(lists, block);
    Keys const &keys = plan.keys, &more = plan.extra;
    int const first = first_of(lists, block, extra), length = extra ? lists.extra_length : lists.length;
    uint32_t const count = extra ? more.count : keys.count, step = extra ? more.slot : keys.slot;
    uint32_t const gap = extra ? more.gap : keys.gap;
    Divisor const by = {extra ? more.by_page_size.multiplier : keys.by_page_size.multiplier,
                        extra ? more.by_page_size.shift : keys.by_page_size.shift};
    Block located;
    located.rows = extra ? more.cache + lists.share : lists.rows;
    located.page = -1;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      int const position = first + t / 8 + 16 * i;
      uint32_t const entry = uint32_t(entries.of[i]), slot = kSparse ? entry : uint32_t(position);
      uint32_t at = slot * step + (extra ? 0 : lists.head);
      if (!kSparse) {
        uint32_t const rows = uint32_t(keys.page_size) * step;
        at += entry * (rows + gap) - divide(slot, by) * rows;
      } else if (kAddressing == Addressing::kAny) {
        at += divide(slot, by) * gap;
      }
      located.at[i] = position < length && entry < count ? at : kUnseen;
    }
    return located;
  }
  // Whether a sparse call has one list over pages without gaps between them.
  RA_DEV static bool is_packed(Plan const& plan) { return kSparse && plan.keys.gap == 0 && !plan.extra.lists; }
  // The address of a thread's share of the row at offset `at`; `cache` is the address of its share of row 0. If `at` is
  // kUnseen, the address is invalid and must not be read.
  RA_DEV static char const* row_at(char const* cache, uint32_t at) {
    return op::opaque(cache + uint64_t(at) * kUnit);
  }
  RA_DEV static char const* query_at(Plan const& plan, Job const& job, int seq, int row) {
    RaLatent const& call = plan.call;
    Query const query = query_of(plan, job, row, kSparse);
    return static_cast<char const*>(call.q) +
           2 * (seq * call.q_seq_stride + query.token * call.q_token_stride + query.head * call.q_head_stride);
  }

  // ---- the consumers' rows

  struct Consumer {
    Plan const& plan;
    // This thread's first row in the tile, and the index of its pair of columns within every 8 columns.
    int const row0 = op::tid() % 128 / 32 * 16 + op::tid() % 32 / 4, pair = op::tid() % 4;
    // For each of the two rows: the exponent that the weights in `sum` are relative to (in `Seesaw` the running
    // maximum), the sum of weights, and the largest logit.
    float reference[2], sum[2], highest[2];
    Output tOrO;

    RA_DEV explicit Consumer(Plan const& plan) : plan(plan) {}

    RA_DEV static int thread() { return op::tid() % 128; }
    RA_DEV void release(op::MBar& bar) const {
      op::syncwarp();  // now all threads of the warp have waited for their products, so one may arrive for all
      if (op::fresh_tid() % 32 == 0) bar.arrive();  // fresh_tid takes no register during the loop
    }
    RA_DEV static float finite(float x) { return x == -INFINITY ? 0.f : x; }
    // Computes the factors that change the reference of weights from `from` to `to`.
    RA_DEV static void factors(float const (&from)[2], float const (&to)[2], float (&factor)[2]) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) factor[r] = op::exp2(from[r] - finite(to[r]));
    }
    RA_DEV static void raise(float (&value)[2], float const (&least)[2]) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) value[r] = fmaxf(value[r], least[r]);
    }
    // Raises each value to the maximum over the four threads that share the row.
    RA_DEV static void raise_in_row(float (&value)[2]) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r)
        CUTE_UNROLL
        for (int mask = 1; mask < 4; mask *= 2) value[r] = fmaxf(value[r], op::shfl_xor(value[r], mask));
    }
    RA_DEV void rescale(float const (&factor)[2]) {
      CUTE_UNROLL
      for (int i = 0; i < cute::size(tOrO); ++i) tOrO(i) *= factor[i / 2 % 2];
    }
    RA_DEV void add_in_row() {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r)
        CUTE_UNROLL
        for (int mask = 1; mask < 4; mask *= 2) sum[r] += op::shfl_xor(sum[r], mask);
    }

    template <int W>
    RA_DEV void finish_rows(Segment const& segment, float first_scale, float second_scale) {
      finish<W, 0>(segment, first_scale, op::fresh_tid());
      finish<W, 1>(segment, second_scale, op::fresh_tid());
    }
    // Writes half W of this thread's row R. The accumulator times `scale` has the same reference as `sum`. Offsets are
    // recomputed from the thread's index, so that they take no registers during the loop over blocks.
    template <int W, int R>
    RA_DEV void finish(Segment const& segment, float scale, int thread) {
      Job const job = LatentBase::job(plan);
      RaLatent const& call = plan.call;
      bool const whole = segment.slot == kWhole;
      int const row = job.tile * 64 + thread % 128 / 32 * 16 + thread % 32 / 4 + 8 * R;
      bool const exists = row < plan.rows;  // threads without a row still take part in shuffles
      Query const query = query_of(plan, job, row, kSparse);
      int64_t const index =
          ((whole ? segment.seq : segment.slot) * call.num_q_tokens + query.token) * call.num_q_heads + query.head;
      bool const fully_masked = sum[R] == 0.f;
      float denominator = sum[R];
      if (exists && whole && call.sinks && !fully_masked)
        denominator += op::exp2(call.sinks[query.head] * float(kLog2e) - reference[R]);
      float const factor = fully_masked ? 0.f : scale / denominator;
      int64_t const column = index * kValue + W * 256;
      if (whole) {
        // Two adjacent threads exchange words. Then the even one has four adjacent columns of chunk j, and the odd one
        // has the same four of chunk j + 1. So the four threads of a row write a whole 32-byte sector.
        bool const odd = thread % 2;
        Out* const to = static_cast<Out*>(call.out) + column + 8 * odd + thread % 4 / 2 * 4;
        CUTE_UNROLL
        for (int j = 0; j < 32; j += 2) {
          uint32_t const first = op::pack<Out>(tOrO(at(0, R, j)) * factor, tOrO(at(1, R, j)) * factor);
          uint32_t const second = op::pack<Out>(tOrO(at(0, R, j + 1)) * factor, tOrO(at(1, R, j + 1)) * factor);
          uint32_t const other = op::shfl_xor(odd ? first : second, 1);
          if (exists) *reinterpret_cast<uint2*>(to + 8 * j) = odd ? uint2{other, second} : uint2{first, other};
        }
      } else if (exists) {
        float* const to = call.partial_out + column + 2 * (thread % 4);
        CUTE_UNROLL
        for (int j = 0; j < 32; ++j)
          *reinterpret_cast<float2*>(to + 8 * j) = float2{tOrO(at(0, R, j)) * factor, tOrO(at(1, R, j)) * factor};
      }
      if (W == 0 && exists && thread % 4 == 0) {
        float const lse = fully_masked ? -INFINITY : lse_of(reference[R], sum[R]);
        int64_t const finished = (segment.seq * call.num_q_heads + query.head) * call.num_q_tokens + query.token;
        if (whole) call.lse[finished] = lse * kLn2;
        else call.partial_lse[index] = lse;
        if (call.max_logits) {
          if (whole) call.max_logits[finished] = highest[R] * kLn2;
          else call.partial_max[index] = highest[R];
        }
      }
    }
  };
};
