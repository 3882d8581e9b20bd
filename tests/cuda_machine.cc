// Small bodies for the emulated machine to judge: each but the last four does what the hardware does not define, or
// waits for what never comes. `judge` returns the code of the launch, and leaves the report to `ra_error_string`.
#include "ops.h"
#include "work.h"

namespace {

using Tile = decltype(
    cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<bf16>{}, cute::Shape<cute::_64, cute::_64>{}));
using Mma = decltype(cute::make_tiled_mma(
    cute::GMMA::ss_op_selector<bf16, bf16, float, cute::Shape<cute::_64, cute::_64, cute::_64>>()));

enum Deed {
  kWaitAlone, kOtherCount, kHalfWarp, kNoSuchBarrier, kApart, kUnmade, kUnknown, kTooMany, kCopyAskew, kCopyFromAskew,
  kStoreAside, kNoRegisters, kKeepMore, kWantLess, kLoadUnfenced, kWrongPlace, kTwoTiles, kOperandAside, kLoadOver,
  kMatricesAskew, kNeverWaits, kReadsEarly,
  kUnfenced, kCopied, kStored, kArrived, kDeeds
};

template <int kDeed>
struct Body {
  static constexpr int kThreads = 384;
  struct alignas(1024) Smem {
    bf16 tiles[2][4096];
    op::MBar bar, full;
  };
  struct Params {
    char const* global;
    float* sums;  // [64, 64]
  };
  static auto tile(bf16* pointer) { return cute::make_tensor(cute::make_smem_ptr(pointer), Tile{}); }

  // tiles[0] times itself, of a warpgroup; each row of it is 1.
  static void multiply(Params const& params, Smem& s, int t, bf16* left, bool fenced, bool given = false) {
    auto sums = cute::partition_fragment_C(Mma{}, cute::Shape<cute::_64, cute::_64>{});
    for (int i = t; i < 4096 && !given; i += 128) op::store(&s.tiles[0][i], bf16(1.f));
    if (fenced) op::fence_async_shared();
    op::named_sync(0, 128);
    op::wgmma_ss(Mma{}, t, tile(left), tile(s.tiles[0]), sums, true);
    op::wgmma_wait<0>(sums);
    auto const places = Mma{}.get_thread_slice(t).partition_C(
        cute::make_identity_tensor(cute::Shape<cute::_64, cute::_64>{}));
    for (int i = 0; i < cute::size(sums); ++i)
      params.sums[cute::get<0>(places(i)) * 64 + cute::get<1>(places(i))] = sums(i);
  }
  // The same, with operands that another warpgroup has written, which says so by an arrival of its own or by one that its
  // copies bring about.
  static void pass_on(Params const& params, Smem& s, int t) {
    auto sums = cute::partition_fragment_C(Mma{}, cute::Shape<cute::_64, cute::_64>{});
    if (t >= 256) return;
    if (t >= 128) {
      for (int i = t - 128; i < 4096; i += 128) op::store(&s.tiles[0][i], bf16(1.f));
      if (kDeed == kCopied) op::arrive_after_copies(s.full);
      else s.full.arrive();
      return;
    }
    s.full.wait(0);
    multiply(params, s, t, s.tiles[0], true, true);
  }
  static void run(Params const& params, Smem& s) {
    int const t = op::tid();
    bool const first = t == 0;
    if (kDeed == kWaitAlone && t < 32) op::named_sync(1, 64);
    if (kDeed == kOtherCount && first) op::named_arrive(1, 64), op::named_arrive(1, 96);
    if (kDeed == kHalfWarp && first) op::named_arrive(1, 33);
    if (kDeed == kNoSuchBarrier && first) op::named_arrive(8, 64);
    if (kDeed == kApart && t < 16) op::shfl_xor(0.f, 1);
    if (kDeed == kApart && t >= 16) op::syncwarp();
    if (kDeed == kUnmade && first) s.bar.arrive();
    if (first) s.bar.init(1), s.full.init(128);
    if (kDeed == kUnknown && t == 32) s.bar.arrive();
    if (kDeed != kLoadUnfenced && first) op::fence_barrier_init();
    op::syncthreads();
    if (kDeed == kTooMany && first) s.bar.arrive_expect(16), s.bar.arrive();
    if (kDeed == kCopyAskew && first) op::copy16<kOnce>(&s.tiles[0][1], params.global, true);
    if (kDeed == kCopyFromAskew && first) op::copy16<kOnce>(s.tiles[0], params.global + 1, true);
    float aside = 0;
    if (kDeed == kStoreAside && first) op::store(&aside, 1.f);
    if (kDeed == kMatricesAskew && t < 32) op::store_matrices(&s.tiles[0][t * 8 + 4], {0, 0, 0, 0});
    if (kDeed == kReadsEarly) op::load_result(params.sums), op::wait_for_previous_grid();
    if (kDeed == kNoRegisters) op::reg_alloc<216>();
    if (kDeed == kKeepMore && first) op::reg_dealloc<200>();
    if (kDeed == kWantLess && first) op::reg_alloc<40>();
    if (kDeed == kLoadOver && first) op::store(&s.tiles[0][7], bf16(1.f));
    if ((kDeed == kLoadUnfenced || kDeed == kLoadOver) && first) {
      auto const source = cute::make_tensor(reinterpret_cast<bf16 const*>(params.global),
                                            cute::make_shape(64, 64, cute::make_shape(1, 1)));
      op::tma_load(source, 0, 0, 0, 0, s.bar, tile(s.tiles[0]));
    }
    if (kDeed == kCopied || kDeed == kArrived) return pass_on(params, s, t);
    static bf16 elsewhere[8192];
    auto* const outside = reinterpret_cast<bf16*>((reinterpret_cast<uintptr_t>(elsewhere) + 1023) / 1024 * 1024);
    if (t >= 128) return;
    if (kDeed == kWrongPlace) multiply(params, s, t == 5 ? 6 : t, s.tiles[0], true);
    if (kDeed == kTwoTiles) two_tiles(s, t);
    if (kDeed == kOperandAside) multiply(params, s, t, outside, true);
    if (kDeed == kUnfenced) multiply(params, s, t, s.tiles[0], false);
    if (kDeed == kStored) multiply(params, s, t, s.tiles[0], true);
  }
  static void two_tiles(Smem& s, int t) {
    auto sums = cute::partition_fragment_C(Mma{}, cute::Shape<cute::_64, cute::_64>{});
    op::wgmma_ss(Mma{}, t, tile(s.tiles[0]), tile(s.tiles[t % 2]), sums, true);
  }
};

template <int kDeed = 0>
int launch(int deed, char const* global, float* sums) {
  if constexpr (kDeed < kDeeds) {
    using B = Body<kDeed>;
    if (deed != kDeed) return launch<kDeed + 1>(deed, global, sums);
    bool const dependent = kDeed == kNeverWaits || kDeed == kReadsEarly;
    return op::launch<B>(1, sizeof(typename B::Smem), nullptr, typename B::Params{global, sums}, dependent);
  }
  return RA_NO_KERNEL;
}

}  // namespace

extern "C" {
RA_API int judge(int deed, char const* global, float* sums) { return launch(deed, global, sums); }
RA_API int most_shared(int bytes) { return op::launch<Body<kStored>>(0, bytes, nullptr, Body<kStored>::Params{}); }
RA_API float approximate(int function, float x) {
  return function == 0 ? op::exp2(x) : function == 1 ? op::reciprocal(x) : op::log2(x);
}
RA_API uint32_t quotient(uint32_t number, uint32_t by) { return divide(number, divisor_of(by)); }
RA_API uint32_t half_pair(uint32_t codes) { return op::half_pair(uint16_t(codes)); }
RA_API float low_half(uint32_t word) { return op::low_half(word); }
RA_API uint32_t pack_halves(float low, float high) { return op::pack<f16>(low, high); }
RA_API uint32_t pack_bfloats(float low, float high) { return op::pack<bf16>(low, high); }
}

#include "emulator/emulation.cc"
