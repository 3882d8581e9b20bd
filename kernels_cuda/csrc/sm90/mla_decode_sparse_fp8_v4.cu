// Sparse attention over an `fp8_v4` cache: each query token has its own list of rows.
#include "fp8_v4.h"
#include "launch.h"

extern "C" int ra_mla_decode_sparse_fp8_v4(RaLatent const* call, void* stream) {
  if (!takes(*call, RA_FP8_V4, true) || call->dtype != RA_BFLOAT16 || call->d_qk != 512) return RA_NO_KERNEL;
  return launch_latent<Fp8V4>(*call, stream);
}
