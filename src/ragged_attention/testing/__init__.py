"""The conformance kit: it tests this project's kernels, and other people's, against the NumPy reference.

`ragged-attention conformance --backend X` and `pytest --pyargs ragged_attention.testing --backend X` run the whole
suite on a backend. These are the kit's parts, for use in your own tests:

    Spec, Batch, WriteBatch, MergeBatch    a batch's structure, and the NumPy arrays built from it
    PagedSpec, ChunkSpec                   the structures of batches over heads-first pages
    PrefillSpec, DecodeSpec                the structures of batches for latent attention
    VarlenSpec, GradientSpec               the structures of batches of packed sequences, and of gradients
    CORNERS                                a named batch for each edge case of ragged_paged_attention
    agrees                                 the comparison with the reference, and its tolerances
    LAWS, HEADS_FIRST_LAWS, MLA_LAWS       properties that hold without a reference result
    VARLEN_LAWS, SPARSE_GRADIENT_LAWS      such properties for packed sequences and for gradients
    judge                                  tests a plain function or a command and returns a report
    arguments_of                           the arguments that `judge` passes to a function for a batch
    runner_for                             a backend, called through the torch or the jax front end
    guarded                                a copy of an array that ends where readable memory ends

`ragged_attention.testing.paged.strategies`, `.heads_first_suite`, `.mla_strategies` and `.varlen_strategies` have the
Hypothesis strategies.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragged_attention.testing.names import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Load a public name on first use, because the module `ptx` must be importable without the rest of the kit.

    Python also calls this function for a module that is not imported yet, as in
    `from ragged_attention.testing import ptx`.
    """
    if name.startswith("__") or importlib.util.find_spec(f"{__name__}.{name}"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.names"), name)
