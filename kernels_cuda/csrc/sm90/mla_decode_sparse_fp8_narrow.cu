// Attention of each query token over its own list of rows of an `fp8_v32` cache, for at most 32 heads.
#include "launch.h"
#include "narrow.h"

extern "C" int ra_mla_decode_sparse_fp8_narrow(RaLatent const* call, void* stream) {
  if (!takes(*call, RA_FP8_V32, true) || call->extra_lists || call->dtype != RA_BFLOAT16 || call->d_qk != 576) return RA_NO_KERNEL;
  if (call->num_kv_heads != 1) return RA_NO_KERNEL;
  if (call->num_q_heads <= 8) return launch_latent<Narrow<1, false>>(*call, stream);
  if (call->num_q_heads <= 16) return launch_latent<Narrow<2, false>>(*call, stream);
  if (call->num_q_heads <= 32) return launch_latent<Narrow<2, true>>(*call, stream);
  return RA_NO_KERNEL;
}
