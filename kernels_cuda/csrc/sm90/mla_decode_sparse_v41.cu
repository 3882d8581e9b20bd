// Sparse attention over an `fp8_v41` or `fp4_v41` cache, and optionally over a second cache in either format.
#include "launch.h"
#include "v41.h"

extern "C" int ra_mla_decode_sparse_v41(RaLatent const* call, void* stream) {
  auto const known = [](int64_t format) { return format >= RA_FP8_V41 && format <= RA_FP4_V41_PAGE; };
  if (!known(call->format) || !call->sparse || call->dtype != RA_BFLOAT16 || call->d_qk != 512) return RA_NO_KERNEL;
  if (call->extra_lists && !known(call->extra_format)) return RA_NO_KERNEL;
  return launch_latent<V41>(*call, stream);
}
