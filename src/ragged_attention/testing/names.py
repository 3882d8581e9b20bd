"""The public names of `ragged_attention.testing`, which loads this module when one of them is first used."""

from ragged_attention.testing.environment import missing_tools

if reason := missing_tools():
    raise ImportError(f"ragged_attention.testing {reason}")

from ragged_attention.testing.compare import agrees as agrees
from ragged_attention.testing.functions import arguments_of as arguments_of
from ragged_attention.testing.guarding import guarded as guarded
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
