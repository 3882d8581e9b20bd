"""Check ragged attention on an interpreted TPU whose scalar memory holds three rows of the block table at a time."""

from jax.experimental.pallas import tpu as pltpu

from ragged_attention.kernels_pallas import ragged_paged_attention as kernels
from ragged_attention.testing import compare
from ragged_attention.testing.paged.specs import Spec
from ragged_attention.testing.runner import runner_for

LENS = ((1, 9), (5, 18), (1, 40), (0, 3), (3, 3))
batch = Spec(lens=LENS, page_size=4, num_kv_heads=1, group=2, count="array", spare_seqs=2).build()
launches = []
attend = kernels.attend
kernels.attend = lambda *arguments: launches.append(1) or attend(*arguments)
kernels.table_bytes = lambda call: 3 * 4 * call.page_indices.shape[1]  # bytes of three rows
with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
    out, lse = runner_for("pallas", "jax").run("ragged_paged_attention", batch, return_lse=True)
assert len(launches) == 6, launches
compare.agrees(out, batch.expected()[0], batch.kind)
compare.agrees(lse, batch.expected()[1], f"lse {batch.kind}", "lse")
