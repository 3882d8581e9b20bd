// Sparse attention of at most 32 heads over an `fp8_v32` cache: each query token has its own list of rows.
#include "launch.h"
#include "narrow.h"

extern "C" int ra_mla_decode_sparse_fp8_narrow(RaLatent const* call, void* stream) {
  if (!takes_fp8_v32(*call) || call->num_kv_heads != 1) return RA_NO_KERNEL;
  if (call->num_q_heads <= 8) return launch_latent<Narrow<1, false>>(*call, stream);
  if (call->num_q_heads <= 16) return launch_latent<Narrow<2, false>>(*call, stream);
  if (call->num_q_heads <= 32) return launch_latent<Narrow<2, true>>(*call, stream);
  return RA_NO_KERNEL;
}
