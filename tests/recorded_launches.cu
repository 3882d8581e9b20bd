// Launches and tensor maps that no kernel of ours asks for, for tests of what tells of launches.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <cstdint>

struct Call {
  float* x;
  int64_t what;
};
enum { SCALE, TWO_DIMENSIONS, CLUSTER, MAP, MAP_WITH_STEPS, MAP_UNALIGNED, MUCH_SHARED };

__global__ void scale(float* x, float factor, int count) {
  int const i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) x[i] *= factor;
}

static int launch(float* x, dim3 block, unsigned cluster, size_t shared) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(2);
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = cluster > 1;
  return cudaLaunchKernelEx(&config, scale, x, 3.f, 100);
}

static int encode(void* address, cuuint32_t step, CUtensorMap* map) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
  cuuint64_t const dims[] = {32, 4}, strides[] = {128};
  cuuint32_t const box[] = {32, 4}, steps[] = {step, 1};
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function)(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, address, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

static CUtensorMap map;
extern "C" __attribute__((visibility("default"))) CUtensorMap const* made_map() { return &map; }
extern "C" __attribute__((visibility("default"))) int call(Call const* call, void*) {
  switch (call->what) {
    case SCALE: return launch(call->x, dim3(64), 1, 0);
    case TWO_DIMENSIONS: return launch(call->x, dim3(32, 2), 1, 0);
    case CLUSTER: return launch(call->x, dim3(64), 2, 0);
    case MAP: return encode(reinterpret_cast<void*>(4096), 1, &map);
    case MAP_WITH_STEPS: return encode(reinterpret_cast<void*>(4096), 2, &map);
    case MAP_UNALIGNED: return encode(reinterpret_cast<void*>(4100), 1, &map);
    case MUCH_SHARED: return launch(call->x, dim3(64), 1, 1 << 20);
  }
  return -1;
}
