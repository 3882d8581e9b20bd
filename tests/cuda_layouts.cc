// What emulation takes for granted: that the descriptors which CuTe makes for wgmma address what PTX's layouts say, and
// that the tensor maps which it asks the driver for address the cache's rows. Both are computed here as the hardware does,
// from the encoded numbers alone, and compared with where the elements are.
#include <cuda.h>
#include <cuda_runtime.h>
#include <string.h>

namespace {
struct Map {
  int count, type, rank, swizzle, interleave;
  char const* address;
  uint64_t sizes[5], strides[5];  // of elements, and in bytes from the second dimension on
  uint32_t box[5], steps[5];
} encoded;
}  // namespace

// CuTe makes tensor maps where nvcc compiles it, and calls the driver by name where it is told to.
#define __CUDACC_VER_MAJOR__ 13
#define CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL 1
// In the driver's place: it refuses what the driver's documentation says it refuses, and keeps the rest.
extern "C" CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                           cuuint64_t const* sizes, cuuint64_t const* strides, cuuint32_t const* box,
                                           cuuint32_t const* steps, CUtensorMapInterleave interleave,
                                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                           CUtensorMapFloatOOBfill) {
  bool bad = reinterpret_cast<uintptr_t>(address) % 16 != 0 || rank < 3 || rank > 5;
  Map found = {encoded.count + 1, int(type), int(rank), int(swizzle), int(interleave), static_cast<char*>(address)};
  for (uint32_t i = 0; i < rank && !bad; ++i) {
    found.sizes[i] = sizes[i];
    found.strides[i] = i ? strides[i - 1] : 2;
    found.box[i] = box[i];
    found.steps[i] = steps[i];
    bad |= sizes[i] < 1 || sizes[i] > (uint64_t(1) << 32) || box[i] < 1 || box[i] > 256 || steps[i] < 1 || steps[i] > 8;
    bad |= i > 0 && (found.strides[i] % 16 != 0 || found.strides[i] >= uint64_t(1) << 40);
  }
  if (bad || (swizzle == CU_TENSOR_MAP_SWIZZLE_128B && box[0] * 2 > 128)) return CUDA_ERROR_INVALID_VALUE;
  encoded = found;
  memset(map, 1, sizeof *map);
  return CUDA_SUCCESS;
}

#include "sm90/fp8_decode.h"
#include "sm90/launch.h"
#include <cute/atom/mma_traits_sm80.hpp>

#include "sm90/seesaw.h"

namespace {
using namespace cute;
using Plain = Seesaw<bf16, 576, false>;

// ---- descriptors of wgmma

enum Fault { kNone, kStride, kLeading, kSwizzle };

int swizzled(int byte) { return byte ^ ((byte >> 7 & 7) << 4); }
// The byte of element (mn, k) of a tile of 16 in k, as PTX's canonical layouts with the 128-byte swizzle have it. K-major:
// 8 rows of 128 bytes, then the stride offset. MN-major: 64 elements, then the leading offset; 8 of k, then the stride's.
template <bool kMn>
int byte_of(uint64_t descriptor, int mn, int k) {
  auto const field = [&](int bit) { return int(descriptor >> bit & 0x3fff) << 4; };
  int const start = field(0), leading = field(16), stride = field(32);
  if (kMn) return swizzled(start + mn % 64 * 2 + mn / 64 * leading + k % 8 * 128 + k / 8 * stride);
  return swizzled(start + mn % 8 * 128 + mn / 8 * stride + k * 2);
}
uint64_t with(uint64_t descriptor, Fault fault) {
  if (fault == kStride) return descriptor + (uint64_t(1) << 32);
  if (fault == kLeading) return descriptor + (uint64_t(1) << 16);
  return fault == kSwizzle ? descriptor ^ uint64_t(3) << 62 : descriptor;
}
constexpr uint64_t k128Bytes = 1;  // the swizzle, in the topmost bits
// Elements of an operand that its descriptors put elsewhere than its layout does.
template <bool kMn, class Mma, bool kLeft, class Tensor>
int wrong(Tensor const& tile, char const* memory, Fault fault) {
  auto const thread = Mma{}.get_thread_slice(0);
  auto const fragment = [&] {
    if constexpr (kLeft) return thread.partition_fragment_A(tile);
    else return thread.partition_fragment_B(tile);
  }();
  // An address in the host's memory is none in a descriptor: there every tile begins at 0.
  int const start = int(reinterpret_cast<char const*>(&tile(0, 0)) - memory);
  int bad = 0;
  for (int k = 0; k < size<2>(fragment); ++k) {
    uint64_t const descriptor = with(uint64_t((*fragment(_, _, k).data()).desc_), fault) + (uint64_t(start) >> 4);
    for (int mn = 0; mn < size<0>(tile); ++mn)
      for (int i = 0; i < 16; ++i) {
        int const at = int(reinterpret_cast<char const*>(&tile(mn, k * 16 + i)) - memory);
        bad += descriptor >> 62 != k128Bytes || byte_of<kMn>(descriptor, mn, i) != at;
      }
  }
  return bad;
}

alignas(1024) char memory[1 << 17];
template <class T, class Layout>
auto tile_of() {
  return make_tensor(make_smem_ptr(reinterpret_cast<T*>(memory)), Layout{});
}
template <bool kMn, class Mma, bool kLeft, class T, class Layout>
int operand(Fault fault) {
  return wrong<kMn, Mma, kLeft>(tile_of<T, Layout>(), memory, fault);
}
// 16 keys of two slabs of values, as the fp8 kernel multiplies them.
int some_keys(int keys, Fault fault) {
  auto const values = tile_of<f16, Fp8Decode::Values<128>>();
  auto const some = local_tile(values, Shape<_128, _16>{}, make_coord(0, keys));
  return wrong<true, Fp8Decode::MmaValuesR<128>, false>(some, memory, fault);
}

// ---- fragments of mma.m16n8k16

// Elements of the sums that the emulation computes from other elements of the operands than CuTe's layouts of (thread,
// element) say.
int wrong_fragments() {
  using Traits = MMA_Traits<SM80_16x8x16_F32F16F16F32_TN>;
  int bad = 0;
  static uint32_t a[32][4], b[32][2];
  static float acc[32][4];
  emu::Warp warp;
  for (int lane = 0; lane < 32; ++lane) warp.fragments[lane] = {a[lane], b[lane], acc[lane]};
  // One element of a and one of b is 1 at a time, wherever CuTe says that it lies.
  typename Traits::ALayout left;
  typename Traits::BLayout right;
  typename Traits::CLayout sums;
  auto const put = [](uint32_t* words, int element) { words[element / 2] |= 0x3c00u << 16 * (element % 2); };
  for (int lane = 0; lane < 32; ++lane)
    for (int element = 0; element < 8; ++element) {
      int const at = left(lane, element), row = at % 16, k = at / 16;
      for (int other = 0; other < 32; ++other)
        for (int i = 0; i < 4; ++i) {
          int const place = right(other, i), column = place % 8;
          memset(a, 0, sizeof a), memset(b, 0, sizeof b), memset(acc, 0, sizeof acc);
          put(a[lane], element);
          put(b[other], i);
          emu::multiply_tile<f16>(warp, 0, 0, 0);
          for (int thread = 0; thread < 32; ++thread)
            for (int c = 0; c < 4; ++c) {
              int const sum = sums(thread, c);
              bool const here = sum % 16 == row && sum / 16 == column && place / 8 == k;
              bad += acc[thread][c] != float(here);
            }
        }
    }
  return bad;
}

// ---- tensor maps

RaLatent call_of(char* pages, int64_t const* numbers) {
  RaLatent call = {};
  call.q = call.kv = pages;
  call.d_qk = 576;
  call.num_pages = numbers[0], call.page_size = numbers[1], call.num_kv_heads = numbers[2];
  call.page_stride = numbers[3], call.slot_stride = numbers[4], call.head_stride = numbers[5];
  return call;
}

}  // namespace

extern "C" {
RA_API int wrong_elements(int which, int fault_number) {
  Fault const fault = Fault(fault_number);
  using Eight = Fp8Decode;
  switch (which) {
    case 0: return operand<false, Plain::MmaLogits<bf16>, true, bf16, Plain::Rows<256>>(fault);
    case 1: return operand<false, Plain::MmaLogits<bf16>, false, bf16, Plain::Rows<256>>(fault);
    case 2: return operand<false, Plain::MmaLogits<bf16>, false, bf16, Plain::Rows<64>>(fault);
    case 3: return operand<false, Plain::MmaValuesS<256>, true, bf16, Plain::Rows<64>>(fault);
    case 4: return operand<false, Eight::MmaLogits<f16>, true, f16, Eight::Rows<128>>(fault);
    case 5: return operand<false, Eight::MmaLogits<bf16>, false, bf16, Eight::Rows<64, bf16>>(fault);
    case 6: return operand<true, Plain::MmaValuesS<256>, false, bf16, Plain::Values<256>>(fault);
    case 7: return operand<true, Plain::MmaValuesR<256>, false, bf16, Plain::Values<256>>(fault);
    case 8: case 9: case 10: case 11: return some_keys(which - 8, fault);
  }
  return -1;
}

RA_API int wrong_products(void) { return wrong_fragments(); }

// Make the tensor map of a cache of pages: 0 if the driver takes it. `numbers`: pages, page size, KV heads, and the strides
// of page, slot and head. Of the tile (row_tile, column_tile, head, page) it returns the first byte and the box.
RA_API int tensor_map(char* pages, int64_t const* numbers, int64_t const* tile, int64_t* byte, int64_t* box) {
  auto const source = pages_of<Plain>(call_of(pages, numbers));
  int const before = encoded.count;
  auto const copy = make_tma_copy(SM90_TMA_LOAD{}, source, Plain::Rows<64>{});
  bool const zeros = is_zero(copy.get_tma_descriptor(), sizeof(TmaDescriptor));
  if (encoded.count == before) return zeros ? RA_NO_TENSOR_MAP : -1;
  auto const tiles = local_tile(copy.get_tma_tensor(source.shape())(_, _, make_coord(int(tile[2]), int(tile[3]))),
                                Shape<_64, _64>{}, make_coord(int(tile[0]), int(tile[1])));
  auto const at = tiles(0, 0);  // coordinates, the fastest first
  *byte = encoded.address - pages;
  int dimension = 0;
  for_each(at, [&](auto const& coordinate) { *byte += int64_t(coordinate) * encoded.strides[dimension++]; });
  box[0] = encoded.box[0], box[1] = encoded.box[1], box[2] = encoded.box[2], box[3] = encoded.box[3];
  box[4] = encoded.swizzle, box[5] = encoded.steps[0], box[6] = zeros;
  return 0;
}
}

#include "emulator/emulation.cc"
