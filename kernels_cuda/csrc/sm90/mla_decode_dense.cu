// Dense decode over a paged cache of bfloat16 or float16 rows.
#include "launch.h"
#include "seesaw.h"

extern "C" int ra_mla_decode_dense(RaLatent const* call, void* stream) {
  if (!takes(*call, RA_PLAIN, false)) return RA_NO_KERNEL;
  if (call->dtype == RA_BFLOAT16 && call->d_qk == 576) return launch_latent<Seesaw<bf16, 576, false>>(*call, stream);
  if (call->dtype == RA_BFLOAT16 && call->d_qk == 512) return launch_latent<Seesaw<bf16, 512, false>>(*call, stream);
  if (call->dtype == RA_FLOAT16 && call->d_qk == 576) return launch_latent<Seesaw<f16, 576, false>>(*call, stream);
  if (call->dtype == RA_FLOAT16 && call->d_qk == 512) return launch_latent<Seesaw<f16, 512, false>>(*call, stream);
  return RA_NO_KERNEL;
}
