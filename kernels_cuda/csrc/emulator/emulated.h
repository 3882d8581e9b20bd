// The machine layer on a CPU. ops.h describes its functions, and machine.h describes the order in which threads run.
//
// The emulation exposes undefined behaviour. Shared memory starts as NaN and has two copies, one per proxy. wgmma reads
// the async proxy's copy. An ordinary write (`store`, `copy16`) appears there only after a proxy fence covers it: a
// fence by the writer after the write has landed, or by a thread that knows of the write through a barrier. A product
// belongs to one warp. It is computed when the warp's last lane issues it, or when the warp waits for it. Each lane
// gets the accumulator elements that CuTe's layout assigns to it.
#pragma once
#include <math.h>

#include "api.h"
#include "machine.h"

#define RA_DEV inline
#define RA_HD inline

namespace emu {

template <class T>
float widened(uint16_t bits) {
  uint32_t word;
  float value;
  if constexpr (std::is_same_v<T, bf16>) {
    word = uint32_t(bits) << 16;
    memcpy(&value, &word, 4);
    return value;
  }
  static_assert(std::is_same_v<T, bf16> || std::is_same_v<T, f16>, "operands are bfloat16 or float16");
  word = uint32_t(bits & 0x7fff) << 13;  // as a float32, too small by a factor of 2^112
  memcpy(&value, &word, 4);
  value *= 0x1p112f;
  if ((bits & 0x7c00) == 0x7c00) value = (bits & 0x3ff) != 0 ? NAN : INFINITY;
  return (bits & 0x8000) != 0 ? -value : value;
}

// The offsets of a tensor's elements from its first one, in elements, with rows varying fastest. Tensors of one type
// have the same offsets if they begin at the same place in the swizzle's period, so the last result is kept.
template <class Tensor>
std::vector<int> const& offsets_of(Tensor const& tensor) {
  static std::vector<int> offsets;
  static uintptr_t phase;
  constexpr int rows = decltype(cute::size<0>(tensor))::value, columns = decltype(cute::size<1>(tensor))::value;
  auto const* const first = &tensor(0, 0);
  uintptr_t const start = reinterpret_cast<uintptr_t>(first) % kSwizzle;
  if (!offsets.empty() && phase == start) return offsets;
  phase = start;
  offsets.clear();
  for (int column = 0; column < columns; ++column)
    for (int row = 0; row < rows; ++row) offsets.push_back(&tensor(row, column) - first);
  return offsets;
}

// The address of a tensor's first element in the async proxy's copy of memory.
template <class Tensor>
auto* seen_by_async(Tensor const& tensor) {
  auto* const first = &tensor(0, 0);
  if (!machine.is_shared(first, sizeof *first)) machine.fault("expected an operand in shared memory");
  return reinterpret_cast<decltype(first)>(reinterpret_cast<uintptr_t>(first) + machine.apart);
}

// Gathers rows [from, from + rows) of each column as float32 in `wide`, one column after another.
template <class Tensor>
void gather(Tensor const& tensor, int from, int rows, std::vector<float>& wide) {
  using T = std::remove_const_t<typename Tensor::value_type>;
  auto const* const first = reinterpret_cast<uint16_t const*>(seen_by_async(tensor));
  std::vector<int> const& offsets = emu::offsets_of(tensor);
  constexpr int all = decltype(cute::size<0>(tensor))::value, columns = decltype(cute::size<1>(tensor))::value;
  wide.resize(size_t(rows) * columns);
  int const* offset = offsets.data() + from;
  float* to = wide.data();
  for (int column = 0; column < columns; ++column, offset += all, to += rows) {
    for (int row = 0; row < rows; ++row) to[row] = widened<T>(first[offset[row]]);
    watch::reads(first, offset, rows);
  }
}

// Computes sums[16][n] += left[k][16]^T right[k][n].
inline void multiply(float const* left, float const* right, float* sums, int n, int depth) {
  typedef float Four __attribute__((vector_size(16)));
  for (int row = 0; row < 16; row += 4)
    for (int column = 0; column < n; column += 8) {
      Four sum[4][2];
      for (int i = 0; i < 4; ++i) memcpy(sum[i], sums + (row + i) * n + column, sizeof sum[i]);
      for (int k = 0; k < depth; ++k) {
        Four part[2];
        memcpy(part, right + size_t(k) * n + column, sizeof part);
        for (int i = 0; i < 4; ++i) {
          float const factor = left[k * 16 + row + i];
          sum[i][0] += factor * part[0];
          sum[i][1] += factor * part[1];
        }
      }
      for (int i = 0; i < 4; ++i) memcpy(sums + (row + i) * n + column, sum[i], sizeof sum[i]);
    }
}

// Computes one m16n8k16 product of a warp in PTX's layouts. The integers are the product's offsets in each lane's
// operands and accumulators.
template <class T>
void multiply_tile(Warp& warp, int left, int right, int sums) {
  float a[16][16], b[8][16];  // operands, contiguous along k
  for (int lane = 0; lane < kWarp; ++lane) {
    Fragment const& own = warp.fragments[lane];
    int const group = lane / 4, pair = lane % 4;
    for (int half = 0; half < 2; ++half)  // halves of a word
      for (int i = 0; i < 4; ++i) {
        int const k = 2 * pair + half + i / 2 * 8;
        a[group + i % 2 * 8][k] = widened<T>(uint16_t(own.a[left + i] >> 16 * half));
        if (i % 2 == 0) b[group][k] = widened<T>(uint16_t(own.b[right + i / 2] >> 16 * half));
      }
  }
  for (int lane = 0; lane < kWarp; ++lane)
    for (int i = 0; i < 4; ++i) {
      float const *const row = a[lane / 4 + i / 2 * 8], *const column = b[lane % 4 * 2 + i % 2];
      float sum = warp.fragments[lane].acc[sums + i];
      for (int k = 0; k < 16; ++k) sum += row[k] * column[k];
      warp.fragments[lane].acc[sums + i] = sum;
    }
}

// For each lane of a warp, the elements that it holds of a 16 x n accumulator or a 16 x depth left operand: their
// offsets in the tile and in the lane's registers.
struct Share {
  std::vector<int> in_tile[kWarp], in_registers;
};
template <class Fragment, class Partition>
Share share_of(Fragment const& fragment, Partition partition, int row_stride, int column_stride) {
  using namespace cute;
  Share share;
  for (int i = 0; i < size(fragment); ++i) share.in_registers.push_back(&fragment(i) - &fragment(0));
  for (int thread = 0; thread < 4 * kWarp; ++thread) {
    auto const coordinates = partition(thread);
    static_assert(decltype(size(coordinates))::value == decltype(size(fragment))::value);
    for (int i = 0; i < size(fragment); ++i) {
      int const row = get<0>(coordinates(i)), column = get<1>(coordinates(i)), warp = thread / kWarp;
      int const offset = (row - 16 * warp) * row_stride + column * column_stride;
      std::vector<int>& lane = share.in_tile[thread % kWarp];
      if (row / 16 != warp || (warp > 0 && lane[i] != offset)) machine.fault("expected 16 rows to each warp");
      if (warp == 0) lane.push_back(offset);
    }
  }
  return share;
}
template <class Mma, int N, class Acc>
Share const& share_of_sums(Acc const& acc) {
  using namespace cute;
  static Share const share = share_of(
      acc, [](int t) { return Mma{}.get_thread_slice(t).partition_C(make_identity_tensor(Shape<_64, Int<N>>{})); }, N,
      1);
  return share;
}
template <class Mma, int Depth, class Left>
Share const& share_of_left(Left const& left) {
  using namespace cute;
  static Share const share = share_of(
      left, [](int t) { return Mma{}.get_thread_slice(t).partition_A(make_identity_tensor(Shape<_64, Int<Depth>>{})); },
      1, 16);
  return share;
}

// Computes a whole product. `left_of` returns the left operand. The product is added to the accumulators, or replaces
// them if `zero` is true.
template <class SB, class LeftOf>
void compute(Product& product, Share const& share, SB const& b, bool zero, LeftOf left_of) {
  constexpr int n = decltype(cute::size<0>(b))::value, depth = decltype(cute::size<1>(b))::value;
  static std::vector<float> right;
  float sums[16 * n];
  gather(b, 0, n, right);
  std::vector<float> const& left = left_of();
  size_t const count = share.in_registers.size();
  memset(sums, 0, sizeof sums);
  for (int lane = 0; lane < kWarp && !zero; ++lane)
    for (size_t i = 0; i < count; ++i) sums[share.in_tile[lane][i]] = product.sums[lane][share.in_registers[i]];
  multiply(left.data(), right.data(), sums, n, depth);
  for (int lane = 0; lane < kWarp; ++lane)
    for (size_t i = 0; i < count; ++i) product.sums[lane][share.in_registers[i]] = sums[share.in_tile[lane][i]];
}

inline void finish(Product& product) {
  int const warp = machine.current / kWarp;
  machine.multipliers[warp].run(&machine.warps[warp].begun, &machine.warps[warp].ended, [&] {
    watch::Unseen unseen;
    product.multiply(product);
  });
  product.done = true;
}

// Registers this lane's accumulators as targets of its warp's next product. Returns that product.
template <class SB, class Acc>
Product& enlist(int t, SB const& b, Acc& acc) {
  Warp& warp = machine.warps[machine.current / kWarp];
  int const lane = machine.current % kWarp;
  if (t != machine.current % 128) machine.fault("expected the thread's index in its warpgroup, got %d", t);
  uint64_t const number = warp.issued[lane]++ - warp.settled;
  if (number == warp.products.size()) warp.products.emplace_back();
  Product& product = warp.products[number];
  if (product.lanes > 0 && product.operand != &b(0, 0)) machine.fault("expected one product of all lanes of a warp");
  product.operand = &b(0, 0);
  product.sums[lane] = &acc(0);
  watch::release(&warp.begun);
  return product;
}
// Counts this lane's arrival at a product. In eager mode the product is computed before any lane continues, because a
// fence after the product must not affect its operands.
inline void enlisted(Product& product) {
  ++product.lanes;
  if (machine.products_at_once()) machine.meet(false, "warp %ld at a product", [&] { finish(product); });
}

// The values of all lanes of the warp. Each lane waits until all lanes have executed this instruction.
inline float const* of_lanes(float value, char const* what) {
  Warp& warp = machine.warps[machine.current / kWarp];
  warp.lanes[warp.turn & 1][machine.current % kWarp] = value;
  return warp.lanes[machine.meet(false, what, [] {}) & 1];
}

// Whether an address is aligned for instructions that move 16 bytes.
inline bool is_aligned(void const* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }
inline void expect_row_of_matrices(void const* row) {
  if (!machine.is_shared(row, 16) || !is_aligned(row))
    machine.fault("expected rows of matrices at 16 aligned bytes of shared memory");
}

// Performs a TMA load or a bulk copy, at once or as late as possible. `fill` writes the data; `bar` counts the bytes.
template <class Fill>
void land(CountedBarrier& bar, int number, int64_t bytes, Fill fill) {
  if (machine.copies_at_once()) {
    fill();
    watch::release(&bar.tags[bar.turn & 1]);
    return machine.complete(bar, 0, bytes);
  }
  watch::release(&bar.loads);
  machine.loads.push_back([fill, &bar, number, bytes] {
    machine.loaders[number].run(&bar.loads, &bar.tags[bar.turn & 1], [&] {
      watch::Unseen unseen;
      fill();
    });
    machine.complete(bar, 0, bytes);
  });
  machine.stir();
}

// Waits until at most `most` of the warp's products are in flight.
inline void settle(size_t most) {
  Warp& warp = machine.warps[machine.current / kWarp];
  uint64_t const issued = warp.issued[machine.current % kWarp];
  machine.meet(false, "warp %ld at wgmma_wait", [&] {
    for (; warp.settled + most < issued; ++warp.settled, warp.products.pop_front())
      if (!warp.products.front().done) finish(warp.products.front());
  });
  watch::acquire(&warp.ended);
}

// Writes a TMA box to both proxies' copies of memory. Elements outside the source are 0.
template <class Source, class Target>
void fill(Source const& source, int row_tile, int column_tile, int head, int page, Target const& target) {
  using namespace cute;
  using T = typename Target::value_type;
  constexpr int rows = decltype(size<0>(target))::value, columns = decltype(size<1>(target))::value;
  static_assert(rows == 64 && columns == 64);
  T* const generic = &target(0, 0);
  T* const async = seen_by_async(target);
  std::vector<int> const& offsets = emu::offsets_of(target);
  bool const inside = head >= 0 && head < size<2, 0>(source) && page >= 0 && page < size<2, 1>(source);
  for (int column = 0; column < columns; ++column)
    for (int row = 0; row < rows; ++row) {
      int const from_row = row_tile * rows + row, from_column = column_tile * columns + column;
      bool const exists = inside && from_row >= 0 && from_row < size<0>(source) && from_column < size<1>(source);
      int const offset = offsets[column * rows + row];
      generic[offset] = async[offset] = exists ? T(source(from_row, from_column, make_coord(head, page))) : T(0);
      watch::writes(reinterpret_cast<unsigned char*>(generic + offset), sizeof(T));
      watch::writes(reinterpret_cast<unsigned char*>(async + offset), sizeof(T));
    }
}

}  // namespace emu

namespace op {

using emu::machine;

inline int tid() { return machine.current; }
inline int fresh_tid() { return machine.current; }
inline int fresh_bid() { return machine.block; }
inline int bid() { return machine.block; }
template <class T>
T* opaque(T* pointer) {
  return pointer;
}
inline void syncthreads() {
  emu::watch::Unseen unseen;
  machine.sync(0, machine.threads);
}
inline void syncwarp() {
  emu::watch::Unseen unseen;
  machine.meet(true, "warp %ld at syncwarp", [] {});
}
inline float shfl(float value, int from) {
  emu::watch::Unseen unseen;
  return emu::of_lanes(value, "warp %ld at a shuffle")[from % emu::kWarp];
}
inline float shfl_xor(float value, int mask) { return shfl(value, machine.current ^ mask); }
inline uint32_t shfl_xor(uint32_t value, int mask) {
  float bits;
  memcpy(&bits, &value, sizeof bits);
  bits = shfl_xor(bits, mask);
  memcpy(&value, &bits, sizeof bits);
  return value;
}
inline bool any_in_warp(bool condition) {
  emu::watch::Unseen unseen;
  float const* const votes = emu::of_lanes(condition, "warp %ld at a vote");
  return std::any_of(votes, votes + emu::kWarp, [](float one) { return one != 0; });
}
// As in hopper.h, barrier `id` is hardware barrier 8 + `id`.
inline void named_sync(int id, int threads) {
  emu::watch::Unseen unseen;
  machine.stir();
  machine.sync(8 + id, threads);
}
inline void named_arrive(int id, int threads) {
  emu::watch::Unseen unseen;
  machine.arrive(8 + id, threads);
  machine.stir();
}

// Registers that a warpgroup releases become available to other warpgroups.
template <int N>
void reg_dealloc() {
  emu::watch::Unseen unseen;
  int& held = machine.fibers[machine.current].registers;
  if (N % 8 != 0 || N > held) machine.fault("expected at most %d registers to keep, got %d", held, N);
  machine.free_registers += held - N;
  held = N;
  machine.wake(machine.for_registers);
}
template <int N>
void reg_alloc() {
  emu::watch::Unseen unseen;
  int& held = machine.fibers[machine.current].registers;
  if (N % 8 != 0 || N < held) machine.fault("expected at least %d registers to want, got %d", held, N);
  while (machine.free_registers < N - held) machine.wait(machine.for_registers, {"%ld registers", N, 0});
  machine.free_registers -= N - held;
  held = N;
}

struct MBar {
  uint64_t state;  // a mark, and the barrier's index in machine.counted

  void init(int arrivals) {
    emu::watch::Unseen unseen;
    machine.counted.emplace_back();
    machine.loaders.resize(std::max(machine.loaders.size(), machine.counted.size()));
    machine.make(machine.counted.back(), arrivals);
    state = kMark << 32 | (machine.counted.size() - 1);
    emu::watch::writes(reinterpret_cast<unsigned char*>(&state), sizeof state);
  }
  void arrive() {
    emu::CountedBarrier& bar = made();
    emu::watch::Unseen unseen;
    machine.give(bar);
    machine.complete(bar, 1, 0);
    machine.stir();
  }
  void arrive_expect(uint32_t bytes) {
    emu::CountedBarrier& bar = made();
    emu::watch::Unseen unseen;
    machine.give(bar);
    machine.complete(bar, 1, -int64_t(bytes));
    machine.stir();
  }
  void wait(uint32_t parity) {
    emu::CountedBarrier& bar = made();
    emu::watch::Unseen unseen;
    machine.wait_for(bar, parity, reinterpret_cast<unsigned char*>(this) - machine.shared);
  }
  emu::CountedBarrier& made() {
    uint64_t const which = state;
    emu::watch::Unseen unseen;
    if (which >> 32 != kMark || uint32_t(which) >= machine.counted.size())
      machine.fault("expected an mbarrier that was made, got none at byte %ld",
                    long(reinterpret_cast<unsigned char*>(this) - machine.shared));
    emu::CountedBarrier& bar = machine.counted[uint32_t(which)];
    machine.check_known(bar);
    return bar;
  }
  static constexpr uint64_t kMark = 0x6d626172;
};

inline void fence_barrier_init() {
  emu::watch::Unseen unseen;
  for (emu::CountedBarrier& bar : machine.counted)
    if (bar.made_by == machine.current) bar.fenced = true;
}
inline void fence_async_shared() {
  emu::watch::Unseen unseen;
  machine.fence();
  machine.stir();
}

template <Reuse>
void copy16(void* shared, void const* global, bool valid) {
  emu::watch::Unseen unseen;
  if (!machine.is_shared(shared, 16) || !emu::is_aligned(shared))
    machine.fault("expected a copy to 16 aligned bytes of shared memory");
  if (valid && !emu::is_aligned(global)) machine.fault("expected a copy from 16 aligned bytes");
  auto const offset = uint32_t(static_cast<unsigned char*>(shared) - machine.shared);
  uint32_t const epoch = machine.copies_of(machine.fibers[machine.current].clock, machine.current);
  emu::Copy const copy{offset, epoch, valid ? global : nullptr, nullptr};
  if (machine.copies_at_once()) machine.land(machine.current, copy);
  else machine.begin(copy);
}
inline int load_constant(int const* global) { return *global; }
template <class Words>
Words load(void const* global, bool valid) {
  Words words = {};
  emu::watch::Unseen unseen;
  if (!valid) return words;
  if (reinterpret_cast<uintptr_t>(global) % sizeof words != 0)
    machine.fault("expected a load from %ld aligned bytes", long(sizeof words));
  memcpy(&words, global, sizeof words);
  return words;
}
template <Reuse>
uint4 load16(void const* global, bool valid) { return load<uint4>(global, valid); }
template <Reuse>
uint2 load8(void const* global, bool valid) { return load<uint2>(global, valid); }
inline uint32_t load4(void const* global, bool valid) { return load<uint32_t>(global, valid); }
inline void arrive_after_copies(MBar& bar) {
  emu::CountedBarrier& made = bar.made();
  emu::watch::Unseen unseen;
  emu::Fiber& self = machine.fibers[machine.current];
  uint32_t const epoch = machine.copies_of(self.clock, machine.current);
  machine.step(self);
  if (machine.copies_at_once()) {
    machine.give_copies(made, machine.current, epoch);
    emu::watch::release(&made.tags[made.turn & 1]);
    machine.complete(made, 1, 0);
  } else {
    machine.begin({0, epoch, nullptr, &made});
  }
  machine.stir();
}
template <class T>
void store(T* shared, T value) {
  emu::watch::Unseen unseen;
  if (!machine.is_shared(shared, sizeof(T))) machine.fault("expected a store to shared memory");
  auto const offset = uint32_t(reinterpret_cast<unsigned char*>(shared) - machine.shared);
  emu::Fiber& self = machine.fibers[machine.current];
  machine.write(self.stored, machine.current, offset, self.clock[machine.current], &value, sizeof(T));
}

// Each thread writes the row at its address. Four threads hold the words of each row.
inline void store_matrices(void* row, uint32_t const (&words)[4]) {
  uint4 row_words;
  {
    emu::watch::Unseen unseen;
    emu::Warp& warp = machine.warps[machine.current / emu::kWarp];
    int const lane = machine.current % emu::kWarp;
    emu::expect_row_of_matrices(row);
    memcpy(warp.matrices[warp.turn & 1][lane], words, sizeof words);
    unsigned const turn = machine.meet(false, "warp %ld at a store of matrices", [] {});
    auto const* const holders = &warp.matrices[turn & 1][lane % 8 * 4];
    row_words = {holders[0][lane / 8], holders[1][lane / 8], holders[2][lane / 8], holders[3][lane / 8]};
  }
  store(static_cast<uint4*>(row), row_words);
}

// Each thread reads one word of each matrix. Other threads bring the addresses of the rows that have these words.
inline uint4 load_matrices(void const* row) {
  uint32_t const* rows[4];
  int const lane = machine.current % emu::kWarp;
  {
    emu::watch::Unseen unseen;
    emu::Warp& warp = machine.warps[machine.current / emu::kWarp];
    emu::expect_row_of_matrices(row);
    memcpy(warp.matrices[warp.turn & 1][lane], &row, sizeof row);
    unsigned const turn = machine.meet(false, "warp %ld at a load of matrices", [] {});
    for (int i = 0; i < 4; ++i) memcpy(&rows[i], warp.matrices[turn & 1][8 * i + lane / 4], sizeof rows[i]);
  }
  return {rows[0][lane % 4], rows[1][lane % 4], rows[2][lane % 4], rows[3][lane % 4]};
}

template <class Tensor, class Layout>
Tensor make_tma(Tensor const& global, Layout const&) {
  return global;
}
template <class Tensor>
Tensor const* descriptor_of(Tensor const& tensor) {
  return &tensor;  // the tensor contains a shape, so its bytes are not all zero
}
template <class Source, class Target>
void tma_load(Source const& source, int row_tile, int column_tile, int head, int page, MBar& mbar, Target&& target) {
  using namespace cute;
  emu::CountedBarrier& bar = mbar.made();
  int const number = int(uint32_t(mbar.state));
  emu::watch::Unseen unseen;
  if (!bar.fenced) machine.fault("expected fence_barrier_init before a load that arrives at an mbarrier");
  auto const at = uint32_t(reinterpret_cast<unsigned char*>(&target(0, 0)) - machine.shared);
  if (machine.is_unfenced(at, sizeof(target(0, 0)) * decltype(size(target))::value))
    machine.fault("expected a proxy fence between ordinary writes and a load by TMA to the same place");
  auto const fill = [source, row_tile, column_tile, head, page, target] {
    emu::fill(source, row_tile, column_tile, head, page, target);
  };
  emu::land(bar, number, sizeof(target(0, 0)) * decltype(size(target))::value, fill);
}

inline void bulk_load(void* shared, void const* global, int bytes, MBar& mbar) {
  emu::CountedBarrier& bar = mbar.made();
  int const number = int(uint32_t(mbar.state));
  emu::watch::Unseen unseen;
  if (!bar.fenced) machine.fault("expected fence_barrier_init before a load that arrives at an mbarrier");
  if (bytes <= 0 || bytes % 16 != 0 || !emu::is_aligned(global))
    machine.fault("expected a bulk copy of whole 16 bytes from 16 aligned ones, got %d", bytes);
  auto* const to = static_cast<unsigned char*>(shared);
  if (!machine.is_shared(to, bytes) || !emu::is_aligned(to))
    machine.fault("expected a bulk copy to 16 aligned bytes of shared memory");
  if (machine.is_unfenced(uint32_t(to - machine.shared), bytes))
    machine.fault("expected a proxy fence between ordinary writes and a bulk copy to the same place");
  auto const fill = [=] {
    for (unsigned char* proxy : {to, to + machine.apart}) {
      memcpy(proxy, global, bytes);
      emu::watch::writes(proxy, bytes);
    }
  };
  emu::land(bar, number, bytes, fill);
}

// Computes products of one warp when its last lane arrives. Each lane brings its share of operands and accumulators.
template <class T, int M, int N>
void mma(float (&acc)[M][N][4], uint32_t const (&a)[M][4], uint32_t const (&b)[N][2]) {
  emu::watch::Unseen unseen;
  emu::Warp& warp = machine.warps[machine.current / emu::kWarp];
  warp.fragments[machine.current % emu::kWarp] = {&a[0][0], &b[0][0], &acc[0][0][0]};
  machine.meet(false, "warp %ld at a product", [&] {
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n) emu::multiply_tile<T>(warp, 4 * m, 2 * n, 4 * (m * N + n));
  });
}

// These two functions issue a product. `t` is the thread's index in its warpgroup.
template <class Mma, class SA, class SB, class Acc>
void wgmma_ss(Mma, int t, SA const& a, SB const& b, Acc& acc, bool zero) {
  emu::watch::Unseen unseen;
  emu::Product& product = emu::enlist(t, b, acc);
  emu::Share const& share = emu::share_of_sums<Mma, decltype(cute::size<0>(b))::value>(acc);
  int const row = t / emu::kWarp * 16;
  if (product.lanes == 0)
    product.multiply = [&share, a, b, zero, row](emu::Product& whole) {
      emu::compute(whole, share, b, zero, [&]() -> std::vector<float> const& {
        emu::gather(a, row, 16, whole.left);
        return whole.left;
      });
    };
  emu::enlisted(product);
}
template <class Mma, class RA, class SB, class Acc>
void wgmma_rs(Mma, int t, RA& a, SB const& b, Acc& acc, bool zero = false) {
  emu::watch::Unseen unseen;
  emu::Product& product = emu::enlist(t, b, acc);
  constexpr int depth = decltype(cute::size<1>(b))::value;
  emu::Share const& share = emu::share_of_sums<Mma, decltype(cute::size<0>(b))::value>(acc);
  emu::Share const& left = emu::share_of_left<Mma, depth>(a);
  product.left.resize(16 * depth);
  std::vector<int> const& offsets = left.in_tile[t % emu::kWarp];
  for (size_t i = 0; i < offsets.size(); ++i) {
    product.left[offsets[i]] = float(a(int(i)));
    // The hardware may read these registers until the product has been waited for. They become NaN, which exposes code
    // that uses them earlier.
    a(int(i)) = std::remove_reference_t<decltype(a(0))>(NAN);
  }
  if (product.lanes == 0)
    product.multiply = [&share, b, zero](emu::Product& whole) {
      emu::compute(whole, share, b, zero, [&]() -> std::vector<float> const& { return whole.left; });
    };
  emu::enlisted(product);
}
template <int N, class... Acc>
void wgmma_wait(Acc&...) {
  emu::watch::Unseen unseen;
  emu::settle(N);
}

// The hardware's functions are approximate. The functions below err by up to 2 units in the last place, by an amount
// that depends on the argument. They flush subnormal arguments and results to 0.
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }
inline float perturbed(float exact, float argument) {
  uint32_t word, mixed;
  memcpy(&word, &exact, sizeof word);
  memcpy(&mixed, &argument, sizeof mixed);
  if (flushed(exact) == 0.f || !std::isfinite(exact)) return flushed(exact);
  int const ulps = int((mixed * 2654435761u >> 24) % 5) - 2;
  word += uint32_t(ulps);
  memcpy(&exact, &word, sizeof word);
  return flushed(exact);
}
inline float exp2(float x) { return perturbed(std::exp2(flushed(x)), x); }
inline float reciprocal(float x) { return perturbed(1.f / flushed(x), x); }
inline float log2(float x) { return perturbed(std::log2(flushed(x)), x); }
template <class T>
uint32_t pack(float low, float high) {
  return uint32_t(T(low).storage) | uint32_t(T(high).storage) << 16;
}
inline uint32_t multiply(uint32_t a, uint32_t b) {
  auto const wide = [](uint32_t bits) { return emu::widened<bf16>(uint16_t(bits)); };
  return pack<bf16>(wide(a) * wide(b), wide(a >> 16) * wide(b >> 16));
}
inline uint32_t bytes_of(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t const bytes = uint64_t(b) << 32 | a;
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t const digit = selector >> 4 * i & 15, byte = bytes >> 8 * (digit & 7) & 0xff;
    word |= (digit < 8 ? byte : byte < 0x80 ? 0 : 0xff) << 8 * i;
  }
  return word;
}
// Converts two e4m3 codes to two float16. The low byte has the first code.
inline uint32_t half_pair(uint16_t codes) {
  uint32_t word = 0;
  for (int i = 0; i < 2; ++i) {
    uint32_t const code = codes >> 8 * i & 0xff, magnitude = code & 0x7f;
    uint32_t const bits = magnitude == 0x7f ? 0x7fff : f16(float(f16::bitcast(magnitude << 7)) * 256.0f).raw();
    word |= (bits | (magnitude == 0x7f ? 0 : (code & 0x80) << 8)) << 16 * i;
  }
  return word;
}
inline void half_pairs(uint32_t codes, uint32_t& low, uint32_t& high) {
  low = half_pair(uint16_t(codes));
  high = half_pair(uint16_t(codes >> 16));
}
inline float low_half(uint32_t word) { return emu::widened<f16>(uint16_t(word)); }
inline float high_half(uint32_t word) { return emu::widened<f16>(uint16_t(word >> 16)); }

inline void let_dependents_launch() {}
inline void wait_for_previous_grid() { machine.fibers[machine.current].waited = true; }
template <class T>
T load_result(T const* global) {
  if (machine.dependent && !machine.fibers[machine.current].waited)
    machine.fault("expected a wait for the grid before what it has written is read");
  return *global;
}

// Runs the whole grid before it returns.
template <class Body, class Params>
int launch(int64_t grid, int shared_bytes, void*, Params const& params, bool dependent = false) {
  static_assert(Body::kThreads % emu::kWarp == 0 && Body::kThreads <= emu::kMostThreads);
  std::lock_guard<std::mutex> const alone(machine.busy);
  if (shared_bytes > emu::kMostShared) return RA_NO_KERNEL;
  machine.prepare(Body::kThreads, shared_bytes);
  machine.params = &params;
  machine.dependent = dependent;
  machine.body = [](void const* params, void* shared) {
    Body::run(*static_cast<Params const*>(params), *static_cast<typename Body::Smem*>(shared));
  };
  return machine.run(grid) ? 0 : RA_DEADLOCK;
}

template <class Body, class Params>
int launch_dependent(int64_t grid, int shared_bytes, void* stream, Params const& params) {
  return launch<Body>(grid, shared_bytes, stream, params, true);
}

}  // namespace op
