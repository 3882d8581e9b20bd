// Sparse attention over an `fp8_v32` cache: each query token has its own list of rows.
#include "fp8_decode.h"
#include "launch.h"

extern "C" int ra_mla_decode_sparse_fp8(RaLatent const* call, void* stream) {
  if (!takes_fp8_v32(*call)) return RA_NO_KERNEL;
  return launch_latent<Fp8Decode>(*call, stream);
}
