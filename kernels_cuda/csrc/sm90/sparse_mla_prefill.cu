// Sparse attention over bfloat16 rows, packed or paged: each query token has its own list of rows.
#include "launch.h"
#include "seesaw.h"

extern "C" int ra_sparse_mla_prefill(RaLatent const* call, void* stream) {
  if (!takes(*call, RA_PLAIN, true) || call->dtype != RA_BFLOAT16) return RA_NO_KERNEL;
  if (call->d_qk == 576) return launch_latent<Seesaw<bf16, 576, true>>(*call, stream);
  if (call->d_qk == 512) return launch_latent<Seesaw<bf16, 512, true>>(*call, stream);
  return RA_NO_KERNEL;
}
