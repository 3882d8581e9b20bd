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

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragged_attention.testing.names import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Load what a name stands for: later than this package, because `ptx` needs none of it and stands alone.

    Modules are asked for here too, by `from ragged_attention.testing import ptx`, before they are imported.
    """
    if name.startswith("__") or importlib.util.find_spec(f"{__name__}.{name}"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.names"), name)
