// Attention over plain rows, dense or sparse. Two consumer warpgroups alternate on the two blocks of a pair.
//
// Warpgroup W computes the logits and weights of block W, and holds half W of the output columns. It multiplies its own
// weights with half W of its block's values. Then it reads the other warpgroup's weights from shared memory and
// multiplies them with half W of the other block's values. While one warpgroup computes exponentials, the other uses
// the tensor cores ("seesaw"). A producer warpgroup fills two stages, one half of the columns at a time. Warpgroup H is
// the last reader of half H of both stages. It alone releases that half, and the producer fills it again at once. If
// d_qk is 576, slab 8 holds the last 64 columns of each key. They are not part of the value, so after the logits are
// computed, the block's weights overwrite them.
//
// The consumers wait for q_full and full, and the producer waits for q_empty and empty. `turn` counts segments.
//
//   barrier         who arrives                             count  one phase per        protects
//   q_full          each producer thread's copies;          129    segment              q, segments[turn % 2]
//                   thread 0 also for the segment
//   q_empty         one thread of each consumer warp        8      segment              q
//   full[S][1 - S]  each producer thread's copies; with     128    use of stage S       half 1 - S of stage S, slab 8
//                   TMA, each thread and TMA's bytes
//   full[S][S]      as above, plus a second arrival of      144    use of stage S       half S of stage S, `seen`
//                   the 16 writers of `seen`
//   empty[S][H]     one thread of each warp of warpgroup H  4      use of stage S       half H of stage S
//   kFirstMaximum   warpgroup 0 arrives, warpgroup 1 waits  256    pair                 maximum[0]
//   kSecondWeights  warpgroup 1 arrives, warpgroup 0 waits  256    pair of two blocks   maximum[1], weights of block 1
//   kFirstWeights   warpgroup 0 arrives, warpgroup 1 waits  256    pair                 weights of block 0
//   kSums           both warpgroups arrive and wait         256    segment with blocks  sums[turn % 2]
//   kRestRead       warpgroup 0 arrives and waits           128    pair of one block    slab 8 of stage 0
#pragma once
#include "latent.h"

template <class Element, int kWidth, bool kSparse, int kUnit>
struct SeesawBase : LatentBase<Element, Element, kSparse, kUnit> {
  using Base = LatentBase<Element, Element, kSparse, kUnit>;
  using Base::kHalf, Base::kSlab;
  template <int kColumns>
  using Rows = typename Base::template Rows<kColumns>;
  template <int kColumns>
  using Values = typename Base::template Values<kColumns>;
  static constexpr int kColumns = kWidth;
  static constexpr bool kRest = kWidth == 576;  // whether the key has more columns than the value
  static_assert(kWidth == 512 || kWidth == 576);

  // Named barriers. kFirstMaximum: block 0's maximum is stored. kSecondWeights: block 1's maximum and weights are
  // stored. kFirstWeights: block 0's weights are stored. kSums: both warpgroups' sums are stored. kRestRead: slab 8 is
  // no longer read.
  enum { kFirstMaximum, kSecondWeights, kFirstWeights, kSums, kRestRead };

  struct alignas(1024) Smem {
    Element q[kWidth / 64][kSlab];
    Element keys[2][9][kSlab];           // slab 8 holds the key's last columns, then the block's weights
    float maximum[2][64], sums[2][2][64];
    uint8_t seen[2][64];
    Segment segments[2];                 // the producer's segment, and the one that consumers may still be finishing
    op::MBar q_full, q_empty, full[2][2], empty[2][2];
  };
  static_assert(sizeof(Smem) <= 232448, "more than a block of sm_90 can have");

  template <class Tma>
  using Params = LatentParams<Tma>;

  // ---- producer

  template <int S, int H>
  static constexpr int kFilled = kHalf + (kRest && H != S);  // slab 8 is filled with the half that is read second
  template <int S, int H>
  RA_HD static constexpr int slab_of(int i) {
    return i < kHalf ? H * kHalf + i : 8;
  }

  template <Addressing kAddressing, class Tma>
  RA_DEV static Block locate(Params<Tma> const& params, Lists const& lists, Entries const& entries, int block, int t) {
    Keys const& keys = params.plan.keys;
    if constexpr (!kSparse) {
      int const first = block * kBlock, page = entries.of[0];
      if (params.use_tma && first + kBlock <= lists.length && uint32_t(page) < keys.count) {
        int const inside = first - int(divide(first, keys.by_page_size)) * keys.page_size;
        return {lists.rows, {0, 0, 0, 0}, page, inside / kBlock};
      }
    }
    return Base::template locate<kAddressing>(params.plan, lists, entries, block, t);
  }

  // Stores which keys of a block exist. The arrival of asynchronous copies does not cover ordinary writes, so the
  // sixteen threads that write `seen` arrive a second time.
  static constexpr int kWriters = 16;
  RA_DEV static void store_seen(uint8_t (&seen)[64], Block const& block, int t, op::MBar& bar) {
    if (t % 8) return;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) seen[t / 8 + 16 * i] = block.at[i] != kUnseen;
    bar.arrive();
  }

  // Fills half H of stage S after its last reader has released it.
  template <int S, int H, class Tma>
  RA_DEV static void fill(Params<Tma> const& params, Block const& block, int turn, Smem& s, int t) {
    s.empty[S][H].wait((turn & 1) ^ 1);
    if (S == H) store_seen(s.seen[S], block, t, s.full[S][H]);
    if constexpr (!kSparse) {
      if (block.page >= 0) return fetch<S, H>(params, block, s, t);
    }
    int const chunk = t % 8;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      char const* const row = Base::row_at(block.rows, block.at[i]);
      CUTE_UNROLL
      for (int j = 0; j < kFilled<S, H>; ++j) {
        int const slab = slab_of<S, H>(j);
        op::copy16<kAgain>(s.keys[S][slab] + Base::offset_of(t / 8 + 16 * i, chunk), row + slab * 128,
                           block.at[i] != kUnseen);
      }
    }
    op::arrive_after_copies(s.full[S][H]);
  }
  template <int S, int H, class Tma>
  RA_DEV static void fetch(Params<Tma> const& params, Block const& block, Smem& s, int t) {
    if (t) return s.full[S][H].arrive();
    int const head = Base::job(params.plan).kv_head;
    s.full[S][H].arrive_expect(kFilled<S, H> * kSlab * sizeof(Element));
    for (int i = 0; i < kFilled<S, H>; ++i)
      op::tma_load(params.tma, block.tile, slab_of<S, H>(i), head, block.page, s.full[S][H],
                   Base::template shared<Rows<64>>(s.keys[S][slab_of<S, H>(i)]));
  }

  RA_DEV static void fill_queries(Plan const& plan, int seq, Smem& s, int t) {
    Job const job = Base::job(plan);
    int const chunk = t % 8;
    CUTE_NO_UNROLL
    for (int inside = t / 8; inside < 64; inside += 16) {
      int const row = job.tile * 64 + inside;
      char const* const at = Base::query_at(plan, job, seq, row < plan.rows ? row : 0);
      CUTE_UNROLL
      for (int slab = 0; slab < kWidth / 64; ++slab)
        op::copy16<kOnce>(s.q[slab] + Base::offset_of(inside, chunk), at + (slab * 64 + chunk * 8) * 2, row < plan.rows);
    }
  }

  // Produces this thread block's segments. For each segment, it copies the queries and calls `pairs(segment, thread)`,
  // which fills the stages with the segment's blocks. The thread's index is read anew each time, so that no value
  // derived from it takes a register in between.
  template <class Pairs>
  RA_DEV static void produce(Plan const& plan, Smem& s, Pairs pairs) {
    int turn = 0, seq = 0;
    for (bool more = true; more; ++turn) {
      Segment const segment = Base::next_segment(plan, seq);
      more = segment.slot != kAbsent;
      s.q_empty.wait((turn & 1) ^ 1);
      if (segment.begin < segment.end) fill_queries(plan, segment.seq, s, op::fresh_tid() % 128);
      if (op::fresh_tid() % 128 == 0) {
        s.segments[turn & 1] = segment;
        s.q_full.arrive();
      }
      op::arrive_after_copies(s.q_full);
      if (segment.begin < segment.end) pairs(segment, op::fresh_tid() % 128);
    }
  }
  template <Addressing kAddressing, class Tma>
  RA_DEV static void produce(Params<Tma> const& params, Smem& s) {
    Plan const& plan = params.plan;
    int turns[2] = {0, 0};
    produce(plan, s, [&](Segment const& segment, int t) {
      Lists lists = Base::lists_of(plan, segment, t % 8 * 16);
      lists.rows = op::opaque(lists.rows);
      int const last = segment.end - 1;
      // List entries are loaded one pair of blocks in advance.
      auto const load_entries = [&](int block) {
        return Base::template look_up<kAddressing>(plan, lists, block < last ? block : last, t);
      };
      Entries entries[2] = {load_entries(segment.begin), load_entries(segment.begin + 1)};
      for (int index = segment.begin; index <= last; index += 2) {
        bool const two = index < last;
        Block const first = locate<kAddressing>(params, lists, entries[0], index, t);
        Block const second = locate<kAddressing>(params, lists, entries[1], index + two, t);
        entries[0] = load_entries(index + 2);
        entries[1] = load_entries(index + 3);
        fill<0, 0>(params, first, turns[0], s, t);
        if (two) fill<1, 1>(params, second, turns[1], s, t);
        fill<0, 1>(params, first, turns[0]++, s, t);
        if (two) fill<1, 0>(params, second, turns[1]++, s, t);
      }
    });
  }
  static constexpr int kProducerRegisters = 72, kConsumerRegisters[2] = {216, 216};
  template <class Tma>
  RA_DEV static void produce(Params<Tma> const& params, Smem& s) {
    if (Base::is_packed(params.plan)) produce<Addressing::kPacked>(params, s);
    else produce<Addressing::kAny>(params, s);
  }

  // ---- consumers

  // The layout of a thread's share of 64 x 64 weights as wgmma's left operand in registers: four 64 x 16 fragments
  // (PTX, "WGMMA .m64k16 register fragment layout for matrix A"). Its words are in the order of the logits'
  // accumulator.
  using WeightsA = cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::_4>,
                                cute::Stride<cute::Stride<cute::_1, cute::_2, cute::_4>, cute::_0, cute::_8>>;

  template <int W>
  struct Consumer : Base::Consumer {
    using Parent = typename Base::Consumer;
    using Parent::tOrO, Parent::reference, Parent::sum, Parent::row0, Parent::plan, Parent::release, Parent::thread;
    Smem& s;
    uint32_t phases = 0;  // bit S: parity of stage S's barriers; bit 2: parity of the queries' barriers
    typename Base::Logits tSrS;

    RA_DEV Consumer(Smem& s, Plan const& plan) : Base::Consumer(plan), s(s) {}

    RA_DEV void wait_full(int stage, int half) {
      s.full[stage][half].wait(phases >> stage & 1);
      op::fence_async_shared();  // cp.async writes through the generic proxy
    }
    RA_DEV static void both_arrive(int id) { op::named_arrive(id, 256); }
    RA_DEV static void both_sync(int id) { op::named_sync(id, 256); }

    // Computes tSrS = q . keys of stage W. The columns of half W come first, because they are filled first.
    RA_DEV void logits() {
      wait_full(W, W);
      add_logits<kHalf>(W * kHalf, true);
      wait_full(W, 1 - W);
      add_logits<kHalf>((1 - W) * kHalf, false);
      if constexpr (kRest) add_logits<1>(8, false);
      op::wgmma_wait<0>(tSrS);
    }
    template <int kSlabs>
    RA_DEV void add_logits(int slab, bool zero) {
      op::wgmma_ss(typename Base::template MmaLogits<Element>{}, thread(),
                   Base::template shared<Rows<64 * kSlabs>>(s.q[slab]),
                   Base::template shared<Rows<64 * kSlabs>>(s.keys[W][slab]), tSrS, zero);
    }

    // Scales and masks the logits, and computes each row's maximum over this block.
    RA_DEV void mask(int first, int const (&limit)[2], float (&m_new)[2]) {
      m_new[0] = m_new[1] = -INFINITY;
      CUTE_UNROLL
      for (int j = 0; j < 8; ++j)
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) {
          int const column = 8 * j + 2 * this->pair + c;
          bool const seen = s.seen[W][column];
          CUTE_UNROLL
          for (int r = 0; r < 2; ++r) {
            float& logit = tSrS(Base::at(c, r, j));
            logit = seen && (kSparse || first + column < limit[r]) ? logit * plan.scale : -INFINITY;
            m_new[r] = fmaxf(m_new[r], logit);
          }
        }
      Parent::raise_in_row(m_new);
    }
    // Turns the logits into weights relative to `m_new`, and sums each row's weights.
    RA_DEV void weigh(float const (&m_new)[2], float (&l_new)[2]) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        float const reference = Parent::finite(m_new[r]);
        l_new[r] = 0.f;
        CUTE_UNROLL
        for (int j = 0; j < 8; ++j)
          CUTE_UNROLL
          for (int c = 0; c < 2; ++c) {
            float& weight = tSrS(Base::at(c, r, j));
            weight = op::exp2(weight - reference);
            l_new[r] += weight;
          }
      }
    }
    RA_DEV void share_weights(float const (&factor)[2]) {
      auto words = cute::make_tensor<uint32_t>(cute::Layout<cute::_16>{});
      CUTE_UNROLL
      for (int i = 0; i < 16; ++i)
        words(i) = op::template pack<Element>(tSrS(2 * i) * factor[i % 2], tSrS(2 * i + 1) * factor[i % 2]);
      if constexpr (W == 0) {
        Base::store_weights(s.keys[W][8], thread(), words);
      } else {  // this warpgroup's product follows these stores, so each word is stored as soon as it is ready
        CUTE_UNROLL
        for (int i = 0; i < 16; ++i)
          op::store(Base::weight_word(s.keys[W][8], row0 + i % 2 * 8, i / 2, this->pair), words(i));
      }
      op::fence_async_shared();
    }
    RA_DEV void share_maximum(float const (&m_new)[2]) {
      if (this->pair) return;
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) s.maximum[W][row0 + 8 * r] = m_new[r];
    }
    RA_DEV void read_maximum(float (&m_new)[2]) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) m_new[r] = s.maximum[1 - W][row0 + 8 * r];
    }

    // Computes tOrO += this warpgroup's weights x half W of stage W's values.
    RA_DEV void add_own() {
      auto tOrP = cute::make_tensor<Element>(WeightsA{});
      auto words = cute::recast<uint32_t>(cute::make_tensor(tOrP.data(), cute::Layout<cute::_32>{}));
      CUTE_UNROLL
      for (int j = 0; j < 8; ++j)
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r)
          words(r + 2 * j) = op::template pack<Element>(tSrS(Base::at(0, r, j)), tSrS(Base::at(1, r, j)));
      op::wgmma_rs(typename Base::template MmaValuesR<256>{}, thread(), tOrP,
                   Base::template shared<Values<256>>(s.keys[W][W * kHalf]), tOrO);
    }
    // Computes tOrO += the other warpgroup's weights x half W of the other stage's values.
    RA_DEV void add_other() {
      wait_full(1 - W, W);
      op::wgmma_ss(typename Base::template MmaValuesS<256>{}, thread(), Base::template shared<Rows<64>>(s.keys[1 - W][8]),
                   Base::template shared<Values<256>>(s.keys[1 - W][W * kHalf]), tOrO, false);
    }

    // Rescales the sums and the output to a new maximum, and adds `l_new` to the sums.
    RA_DEV void move(float const (&m_new)[2], float const (&l_new)[2]) {
      float factor[2];
      Parent::factors(reference, m_new, factor);
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        sum[r] = sum[r] * factor[r] + l_new[r];
        reference[r] = m_new[r];
      }
      Parent::rescale(factor);
    }

    // Attends to a pair of blocks, or to its first block alone if `two` is false.
    RA_DEV void attend(int first, bool two, int const (&limit)[2]) {
      constexpr float kOne[2] = {1.f, 1.f}, kNone[2] = {0.f, 0.f};
      float m_new[2], l_new[2], other_maximum[2], factor[2] = {1.f, 1.f};
      if constexpr (W == 0) {
        logits();
        mask(first, limit, m_new);
        Parent::raise(m_new, reference);
        weigh(m_new, l_new);
        share_maximum(m_new);
        both_arrive(kFirstMaximum);
        move(m_new, l_new);
        add_own();
        if (two) {
          both_sync(kSecondWeights);
          read_maximum(other_maximum);
          Parent::factors(reference, other_maximum, factor);
        } else if constexpr (kRest) {
          op::named_sync(kRestRead, 128);  // other warps may still read slab 8, which the weights will overwrite
        }
        share_weights(factor);
        both_arrive(kFirstWeights);
        op::wgmma_wait<0>(tOrO);
        release(s.empty[0][0]);
        if (two) {
          move(other_maximum, kNone);
          add_other();
          op::wgmma_wait<0>(tOrO);
          release(s.empty[1][0]);
        }
      } else {
        if (two) {
          logits();
          mask(first + kBlock, limit, m_new);
        }
        both_sync(kFirstMaximum);
        read_maximum(other_maximum);
        if (two) {
          Parent::raise(m_new, other_maximum);
          weigh(m_new, l_new);
          share_maximum(m_new);
          share_weights(kOne);
          both_arrive(kSecondWeights);
          move(m_new, l_new);
          add_own();
        } else {
          move(other_maximum, kNone);
        }
        both_sync(kFirstWeights);
        add_other();
        if (two) {
          op::wgmma_wait<1>();
          release(s.empty[1][1]);
        }
        op::wgmma_wait<0>(tOrO);
        release(s.empty[0][1]);
      }
      phases ^= two ? 3 : 1;
    }

    template <int kRegisters>
    RA_DEV void run() {
      op::reg_alloc<kRegisters>();
      for (;; phases ^= 4) {
        s.q_full.wait(phases >> 2);
        op::fence_async_shared();
        Segment const& segment = s.segments[phases >> 2];
        if (segment.slot == kAbsent) return;
        cute::clear(tOrO);
        int limit[2];
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
          reference[r] = -INFINITY;
          sum[r] = 0.f;
          Job const job = Base::job(plan);
          limit[r] = Base::limit_of(plan, job, job.tile * 64 + row0 + 8 * r, segment.length);
        }
        int index = segment.begin, end = segment.end;
        bool const some = index < end;
        for (; index < end; index += 2) attend(index * kBlock, index + 1 < end, limit);
        release(s.q_empty);
        if (some) add_sums(phases >> 2);
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) this->highest[r] = reference[r];
        this->template finish_rows<W>(s.segments[phases >> 2], 1.f, 1.f);
      }
    }

    // Adds the other warpgroup's sums. There are two buffers, because one warpgroup may be a segment ahead of the
    // other.
    RA_DEV void add_sums(int buffer) {
      Parent::add_in_row();
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r)
        if (this->pair == 0) s.sums[buffer][W][row0 + 8 * r] = sum[r];
      both_sync(kSums);
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) sum[r] += s.sums[buffer][1 - W][row0 + 8 * r];
    }
  };

  // Runs the kernel. `Kernel` derives from this class and may replace `produce`.
  template <class Kernel, class Tma>
  RA_DEV static void run_as(Params<Tma> const& params, Smem& s) {
    if (op::tid() == 0) {
      s.q_full.init(128 + 1);
      s.q_empty.init(8);
      for (int i = 0; i < 4; ++i) {
        s.full[i / 2][i % 2].init(128 + (i / 2 == i % 2 ? kWriters : 0));
        s.empty[i / 2][i % 2].init(4);
      }
      op::fence_barrier_init();
    }
    op::let_dependents_launch();
    op::syncthreads();
    int const warpgroup = op::tid() / 128;
    if (warpgroup == 0) {
      Consumer<0>(s, params.plan).template run<Kernel::kConsumerRegisters[0]>();
    } else if (warpgroup == 1) {
      Consumer<1>(s, params.plan).template run<Kernel::kConsumerRegisters[1]>();
    } else {
      op::reg_dealloc<Kernel::kProducerRegisters>();
      Kernel::produce(params, s);
    }
  }
};

template <class Element, int kWidth, bool kSparse>
struct Seesaw : SeesawBase<Element, kWidth, kSparse, 16> {
  using Body = SeesawBase<Element, kWidth, kSparse, 16>;
  template <class Tma>
  RA_DEV static void run(LatentParams<Tma> const& params, typename Body::Smem& s) {
    Body::template run_as<Seesaw>(params, s);
  }
};
