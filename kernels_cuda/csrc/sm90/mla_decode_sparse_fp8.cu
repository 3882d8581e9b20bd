// Attention of each query token over its own list of rows of an `fp8_v32` cache.
#include "fp8_decode.h"
#include "launch.h"

extern "C" int ra_mla_decode_sparse_fp8(RaLatent const* call, void* stream) {
  if (!takes(*call, RA_FP8_V32, true) || call->extra_lists || call->dtype != RA_BFLOAT16 || call->d_qk != 576) return RA_NO_KERNEL;
  return launch_latent<Fp8Decode>(*call, stream);
}
