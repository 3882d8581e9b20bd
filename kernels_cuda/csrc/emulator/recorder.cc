// Replaces the CUDA runtime and driver on a machine without them. The launches and tensor maps that the kernels' host
// code requests go to callbacks, and nothing runs. The library is linked with nvcc's output for the kernels, so it
// contains their PTX.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <map>
#include <string>

#include "../api.h"

extern "C" {

// The callback for a launch. It receives the kernel's name in the PTX, its arguments, and an array of numbers with the
// indices below (grid and block have three numbers each). It returns a cudaError_t.
enum { RA_GRID = 0, RA_BLOCK = 3, RA_SHARED = 6, RA_DEPENDENT = 7, RA_LAUNCH_NUMBERS = 8 };
typedef int (*RaLaunched)(char const* kernel, void** arguments, int64_t const* numbers);
// The callback for cuTensorMapEncodeTiled. It receives the arguments of that function. `codes` are the data type,
// interleaving, swizzle and out-of-bounds fill. It returns a CUresult.
typedef int (*RaEncoded)(void* map, void* address, uint32_t rank, uint64_t const* dims, uint64_t const* strides,
                         uint32_t const* box, uint32_t const* steps, int32_t const* codes);

static RaLaunched launched;
static RaEncoded encoded;
static void const* binary;

static std::map<void const*, std::string>& kernels() {
  static std::map<void const*, std::string> names;  // made on first use, possibly while libraries are loaded
  return names;
}

RA_API void ra_listen(RaLaunched on_launch, RaEncoded on_encode) { launched = on_launch, encoded = on_encode; }
RA_API void const* ra_fat_binary(void) { return binary; }

// ---- functions that nvcc's generated code calls when the library is loaded

struct FatBinary {
  int magic, version;
  void const* data;
  void const* unused;
};
void** __cudaRegisterFatBinary(void* wrapper) {
  static void* handle;
  binary = static_cast<FatBinary*>(wrapper)->data;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, char const* function, char*, char const* name, int, void*, void*, void*, void*, int*) {
  kernels()[function] = name;
}
// Registers a device variable. The kernels have none.
void __cudaRegisterVar(void**, char*, char*, char const*, int, size_t, int, int) {}
// These functions serve launches by <<< >>>. The kernels' host code has no such launches, but nvcc's generated code
// needs the symbols. CUDA 12 and CUDA 13 need different ones.
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaErrorNotSupported; }
cudaError_t __cudaGetKernel(cudaKernel_t*, void const*) { return cudaErrorNotSupported; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t cudaLaunchKernel(void const*, dim3, dim3, void**, size_t, cudaStream_t) { return cudaErrorNotSupported; }

// ---- the runtime

cudaError_t cudaFuncSetAttribute(void const*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaLaunchKernelExC(cudaLaunchConfig_t const* config, void const* function, void** arguments) {
  int64_t dependent = 0;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id != cudaLaunchAttributeProgrammaticStreamSerialization) return cudaErrorNotSupported;
    dependent = config->attrs[i].val.programmaticStreamSerializationAllowed;
  }
  auto const entry = kernels().find(function);
  if (!launched || entry == kernels().end()) return cudaErrorInvalidDeviceFunction;
  dim3 const grid = config->gridDim, block = config->blockDim;
  int64_t const numbers[RA_LAUNCH_NUMBERS] = {
      grid.x, grid.y, grid.z, block.x, block.y, block.z, int64_t(config->dynamicSmemBytes), dependent};
  return cudaError_t(launched(entry->second.c_str(), arguments, numbers));
}

static CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, cuuint64_t const* dims,
                       cuuint64_t const* strides, cuuint32_t const* box, cuuint32_t const* steps,
                       CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                       CUtensorMapFloatOOBfill fill) {
  int32_t const codes[] = {int32_t(type), int32_t(interleave), int32_t(swizzle), int32_t(fill)};
  if (!encoded) return CUDA_ERROR_NOT_INITIALIZED;
  return CUresult(encoded(map, address, rank, reinterpret_cast<uint64_t const*>(dims),
                          reinterpret_cast<uint64_t const*>(strides), box, steps, codes));
}
cudaError_t cudaGetDriverEntryPointByVersion(char const* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  bool const known = !strcmp(name, "cuTensorMapEncodeTiled");
  *function = known ? reinterpret_cast<void*>(&encode) : nullptr;
  *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// These functions query a device or describe an error. They are called only on a machine with a GPU.
cudaError_t cudaDeviceGetAttribute(int*, cudaDeviceAttr, int) { return cudaErrorNoDevice; }
cudaError_t cudaDriverGetVersion(int*) { return cudaErrorNoDevice; }
cudaError_t cudaRuntimeGetVersion(int*) { return cudaErrorNoDevice; }
char const* cudaGetErrorString(cudaError_t) { return "no device is here"; }

}  // extern "C"
