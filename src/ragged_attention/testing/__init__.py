"""What holds a kernel to its definition: strategies, comparator, laws, guarded memory; for kernels of others too.

`ragged-attention conformance --backend X` and `pytest --pyargs ragged_attention.testing --backend X` run all of it
on a backend. The parts, for tests of one's own:

    Spec, Batch, WriteBatch, MergeBatch    a batch's structure, and the NumPy arrays made from it
    PagedSpec, ChunkSpec                   the structures of batches over heads-first pages
    PrefillSpec, DecodeSpec                the structures of latent attention's batches
    VarlenSpec, GradientSpec               the structures of batches of packed sequences, and of gradients
    CORNERS                                a named batch for every edge of the definition
    agrees                                 the one comparison, with the one set of bounds
    LAWS, HEADS_FIRST_LAWS, MLA_LAWS       what holds without an oracle
    VARLEN_LAWS, SPARSE_GRADIENT_LAWS      the same of packed sequences and of gradients
    judge                                  a report on a plain function, or on a command
    runner_for                             a backend, called through the torch or the jax front end
    guarded                                arrays that end where readable memory ends

`ragged_attention.testing.paged.strategies`, `.heads_first_suite`, `.mla_strategies` and `.varlen_strategies` have the
Hypothesis strategies.
"""

from importlib.util import find_spec

if missing := [name for name in ("hypothesis", "ml_dtypes", "pytest") if find_spec(name) is None]:
    raise ImportError(
        f"ragged_attention.testing needs {' and '.join(missing)}: install the extra, ragged-attention[testing]"
    )

from ragged_attention.testing.compare import agrees as agrees
from ragged_attention.testing.guarded import guarded as guarded
from ragged_attention.testing.heads_first.specs import ChunkSpec as ChunkSpec
from ragged_attention.testing.heads_first.specs import PagedSpec as PagedSpec
from ragged_attention.testing.heads_first.suite import HEADS_FIRST_LAWS as HEADS_FIRST_LAWS
from ragged_attention.testing.judging import judge as judge
from ragged_attention.testing.mla.laws import MLA_LAWS as MLA_LAWS
from ragged_attention.testing.mla.specs import DecodeSpec as DecodeSpec
from ragged_attention.testing.mla.specs import PrefillSpec as PrefillSpec
from ragged_attention.testing.paged.corners import CORNERS as CORNERS
from ragged_attention.testing.paged.laws import LAWS as LAWS
from ragged_attention.testing.paged.specs import Batch as Batch
from ragged_attention.testing.paged.specs import MergeBatch as MergeBatch
from ragged_attention.testing.paged.specs import Spec as Spec
from ragged_attention.testing.paged.specs import WriteBatch as WriteBatch
from ragged_attention.testing.runner import runner_for as runner_for
from ragged_attention.testing.varlen.gradients import GradientSpec as GradientSpec
from ragged_attention.testing.varlen.laws import SPARSE_GRADIENT_LAWS as SPARSE_GRADIENT_LAWS
from ragged_attention.testing.varlen.laws import VARLEN_LAWS as VARLEN_LAWS
from ragged_attention.testing.varlen.specs import VarlenSpec as VarlenSpec
