"""Batches of gradients: a call, and the gradient of a scalar with respect to its results.

The gradients with respect to `out` and `lse` are standard normal numbers times a small factor. Larger ones would exceed
the tolerances where sums over many rows, with weights rounded to 16 bits, cancel to almost 0.
"""

import dataclasses
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from ragged_attention.reference.sparse_mla_prefill_backward import sparse_mla_prefill_backward
from ragged_attention.reference.varlen_attention_backward import varlen_attention_backward
from ragged_attention.testing import formats
from ragged_attention.testing.mla.specs import PrefillBatch, PrefillSpec
from ragged_attention.testing.paged.specs import Arrays
from ragged_attention.testing.varlen.specs import VarlenBatch, VarlenSpec

Forward = VarlenBatch | PrefillBatch
DEFINITIONS = {
    "varlen_attention": varlen_attention_backward,
    "sparse_mla_prefill": sparse_mla_prefill_backward,
}  # the reference gradients, by the differentiated operation
DIFFERENTIABLE = ("q", "k", "v", "kv", "sinks", "relative_bias")
NOT_OF_THE_GRADIENT = ("cache_format", "cache_layout", "out_dtype")  # arguments of the forward operation only


@dataclasses.dataclass(frozen=True, slots=True)
class Gradients:
    """Out and lse of a call, and its gradients, by the names of the arguments."""

    out: NDArray[Any]
    lse: NDArray[Any]
    of: dict[str, NDArray[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BackwardBatch(Arrays):
    """The arguments of one `varlen_attention_backward` or `sparse_mla_prefill_backward` call in NumPy."""

    forward: Forward
    d_out: NDArray[np.float32]
    out: NDArray[np.float32]
    lse: NDArray[np.float32]
    d_lse: NDArray[np.float32] | None

    def arguments(self) -> dict[str, Any]:
        arguments = {"d_out": self.d_out, "out": self.out, "lse": self.lse, "d_lse": self.d_lse}
        forward_arguments = self.forward.arguments()
        if forward_arguments.get("relative_bias") is not None:
            arguments["return_d_relative_bias"] = True
        return arguments | {name: value for name, value in forward_arguments.items() if name not in NOT_OF_THE_GRADIENT}

    def dtype_of(self, name: str, array: NDArray[Any]) -> str:
        return self.forward.dtype if name in ("d_out", "out") else self.forward.dtype_of(name, array)

    def layout_of(self, name: str) -> str:
        return self.forward.layout_of(name)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GradientBatch:
    """A forward call, and the gradients with respect to its out and lse."""

    forward: Forward
    d_out: NDArray[np.float32]
    d_lse: NDArray[np.float32] | None = None

    @property
    def operation(self) -> str:
        return self.forward.OPERATION

    @property
    def differentiated(self) -> list[str]:
        """The names of the arguments that have gradients."""
        arguments = self.forward.arguments()
        return [name for name in DIFFERENTIABLE if arguments.get(name) is not None]

    def change(self, **fields: Any) -> Self:
        """The batch with other values for its own fields or those of its forward call."""
        own_fields = {name: fields.pop(name) for name in ("d_out", "d_lse") if name in fields}
        return dataclasses.replace(self, **own_fields, forward=self.forward.change(**fields))

    def poisoned(self, kind: str, seed: int = 0) -> Self:
        """The batch with NaN or infinities in all that takes no part, including d_out and d_lse of idle heads."""
        rng, fully_masked = np.random.default_rng(seed), self.forward.fully_masked_heads()
        poison = formats.poison(kind, "float32", self.d_out.shape, rng)
        d_lse = None if self.d_lse is None else np.where(fully_masked, poison[..., 0], self.d_lse)
        d_out = np.where(fully_masked[..., None], poison, self.d_out)
        return dataclasses.replace(self, forward=self.forward.poisoned(kind, seed), d_out=d_out, d_lse=d_lse)

    def results(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The reference's out and lse, rounded as the operation returns them."""
        results = self.forward.expected()
        return formats.rounded(results[0], self.forward.dtype), np.asarray(results[-1], np.float32)

    def backward(self, out: NDArray[Any], lse: NDArray[Any]) -> BackwardBatch:
        """The call of the backward operation, given the forward results."""
        forward, strided = self.forward, self.forward.strided
        return BackwardBatch(forward=forward, d_out=self.d_out, out=out, lse=lse, d_lse=self.d_lse, strided=strided)


def expected(batch: BackwardBatch) -> dict[str, NDArray[np.float64]]:
    """The reference's gradients, by the names of the arguments."""
    forward = batch.forward
    results = DEFINITIONS[forward.OPERATION](**batch.arguments())
    gradients = [array for array in results if array is not None]
    names = [name for name in DIFFERENTIABLE if forward.arguments().get(name) is not None]
    return dict(zip(names, gradients, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientSpec:
    """The parameters of a gradient: those of its forward call, and whether lse has a gradient."""

    SIZES: ClassVar[dict[str, float]] = {"float32": 0.3, "float16": 0.03, "bfloat16": 0.03}

    of: VarlenSpec | PrefillSpec
    d_lse: bool = False  # whether there is a gradient with respect to lse

    def build(self) -> GradientBatch:
        clean = dataclasses.replace(self.of, poison=None).build()
        rng = np.random.default_rng(self.of.seed + 1)
        heads = clean.q.shape[:2]
        size = self.SIZES[clean.dtype]
        width = clean.v.shape[2] if isinstance(clean, VarlenBatch) else clean.d_v
        batch = GradientBatch(
            forward=clean,
            d_out=formats.rounded(rng.standard_normal((*heads, width)) * size, clean.dtype),
            d_lse=(rng.standard_normal(heads) * size).astype(np.float32) if self.d_lse else None,
        )
        return batch.poisoned(self.of.poison, self.of.seed) if self.of.poison else batch
