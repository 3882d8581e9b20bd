"""The `key_ranges` of a step's tokens in decoder layers, computed once for all layers with the same mask.

In vLLM, a query of a causal request sees the keys up to its own key, and a query of any other request sees all keys.
One of three rules may limit these keys further: a sliding window; the query's chunk with a number of earlier chunks; or
the prompt together with a window (R-SWA). A query within the span of an image also sees the whole span. Plain causal
attention, with or without a window, and attention to all keys need no ranges.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch

from ragged_attention.errors import Unsupported
from ragged_attention.key_ranges import (
    causal_ranges,
    chunked_ranges,
    per_sequence_causal,
    prefix_window_ranges,
    span_ranges,
    spans_from_vllm,
    window_ranges,
)


class Mask(NamedTuple):
    """The properties of a layer that decide which keys its queries see."""

    sliding_window: int | None = None
    chunk_lookback: int = -1  # number of visible chunks before the query's own chunk; -1: no chunks
    has_spans: bool = True  # whether tokens of an image see one another, if the model has spans
    clamp_spans: bool = False  # whether the window also limits spans

    @property
    def chunk(self) -> int | None:
        """The size of a chunk, or None without chunks."""
        if self.chunk_lookback < 0 or self.sliding_window is None:
            return None
        return self.sliding_window // (self.chunk_lookback + 1)


class ModelMasks(NamedTuple):
    """The properties of a model's configuration that affect the masks of all layers."""

    has_spans: bool = False
    prefix_window: int | None = None  # the window of R-SWA, in which queries also see the prompt

    @classmethod
    def of(cls, model_config: Any) -> "ModelMasks":
        return cls() if model_config is None else cls(model_config.is_mm_prefix_lm, model_config.rswa_window)


@dataclasses.dataclass
class StepMasks:
    """The `key_ranges` of a step for each `Mask`. `places` are the builder's tensors for the ranges of all steps."""

    cu_q_lens: torch.Tensor
    kv_lens: torch.Tensor
    num_tokens: int
    causal: bool | torch.Tensor  # a tensor has a flag for each request
    spans: torch.Tensor | None  # [S, N, 2], spans that may contain queries of this step; None if the model has none
    prefix_lens: torch.Tensor | None  # [S], the lengths of the prompts under R-SWA
    prefix_window: int | None
    places: dict[Any, torch.Tensor]
    most_tokens: int  # the maximum number of tokens in a step
    made: dict[Mask, torch.Tensor | None] = dataclasses.field(default_factory=dict)

    def of(self, mask: Mask) -> torch.Tensor | None:
        """The ranges of the layers with this mask; None if `causal` and `sliding_window` express the mask.

        A captured graph is replayed for other requests. So the requests decide only by `causal` whether the result is
        None, and the ranges of all steps have the same address.
        """
        if mask not in self.made:
            self.made[mask] = self._placed(mask, self._ranges(mask)) if self._needs_ranges(mask) else None
        return self.made[mask]

    def _needs_ranges(self, mask: Mask) -> bool:
        is_bounded = mask.sliding_window is not None or self.prefix_lens is not None
        if self.causal is False:  # without a window or prefix, all keys are visible, with or without spans
            return is_bounded
        has_spans = mask.has_spans and self.spans is not None
        others = mask.chunk is not None or has_spans or self.prefix_lens is not None
        return others or isinstance(self.causal, torch.Tensor)

    def _placed(self, mask: Mask, ranges: torch.Tensor) -> torch.Tensor:
        tokens, *rest = ranges.shape
        if tokens > self.most_tokens:  # more than in any captured graph
            return ranges
        if (mask, *rest) not in self.places:
            self.places[mask, *rest] = ranges.new_empty(self.most_tokens, *rest)
        return self.places[mask, *rest][:tokens].copy_(ranges)

    def _ranges(self, mask: Mask) -> torch.Tensor:
        step, window = (self.cu_q_lens, self.kv_lens, self.num_tokens), mask.sliding_window
        if self.causal is not True and (mask.chunk is not None or self.prefix_lens is not None):
            got = "False" if self.causal is False else "a flag for each request"
            raise Unsupported(f"expected causal=True with chunk_lookback or R-SWA for RAGGED, got {got}")
        if isinstance(self.causal, torch.Tensor):
            seen = per_sequence_causal(*step, causal=self.causal != 0)
        else:
            seen = causal_ranges(*step) if self.causal else window_ranges(*step)
        if self.prefix_lens is not None:
            assert self.prefix_window is not None
            prompt = prefix_window_ranges(*step, prefix=self.prefix_lens, sliding_window=self.prefix_window)
            seen = _intersected(seen, prompt)
        elif mask.chunk is not None:
            seen = _intersected(seen, chunked_ranges(*step, chunk=mask.chunk, lookback=mask.chunk_lookback))
        elif window is not None:
            seen = _intersected(seen, window_ranges(*step, left=window - 1, right=window - 1))
        if not mask.has_spans or self.spans is None or not self.spans.shape[1]:
            return seen
        # `span` is a range with the query's own key and its span. The last range of `seen` has the query's own key too,
        # so their union is one range.
        span = span_ranges(*step, spans=self.spans, sliding_window=1)
        if mask.clamp_spans and window is not None:
            span = _intersected(span, window_ranges(*step, left=window - 1))
        own = seen[:, -1:]
        joined = torch.stack([torch.minimum(own[..., 0], span[..., 0]), torch.maximum(own[..., 1], span[..., 1])], -1)
        return torch.cat((seen[:, :-1], joined), 1)


def _intersected(ranges: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The intersections of ranges. Either operand may have a single range per query."""
    return torch.stack(
        [torch.maximum(ranges[..., 0], others[..., 0]), torch.minimum(ranges[..., 1], others[..., 1])], -1
    )


def spans_of_step(common: Any) -> torch.Tensor:
    """The spans [S, N, 2] of vLLM's step that may contain queries of the step.

    vLLM lists all spans of a request in every step. For a decoding request, the host knows only an upper bound of its
    length. The bound is good enough: all spans are in the prompt, and a greater length only moves the queries further
    beyond the prompt.
    """
    starts, longest = common.query_start_loc_cpu, common.seq_lens_cpu_upper_bound
    of_requests: dict[int, list[tuple[int, int]]] = {}
    for request, spans in (common.mm_req_doc_ranges or {}).items():
        of_requests[request] = spans
        if longest is not None:
            end = int(longest[request])
            begin = end - int(starts[request + 1] - starts[request])
            of_requests[request] = [(first, last) for first, last in spans if first < end and last >= begin]
    table = np.zeros((len(starts) - 1, max(map(len, of_requests.values()), default=0), 2), np.int32)
    for request, spans in of_requests.items():
        table[request, : len(spans)] = np.reshape(spans, (-1, 2))
    return torch.from_numpy(spans_from_vllm(table)).to(common.query_start_loc.device, non_blocking=True)
