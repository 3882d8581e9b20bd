"""What the tokens of a step see in a decoder's layers, as `key_ranges`: made once a step for all layers that agree.

vLLM's rule for a query: the keys up to its own, or all of them, as the request is causal or not; of these, those in its
window, or in its chunk and some before it, or in the prompt and a window; and the whole of each span of images in which
it lies. Plain causal attention, with a window or without, and attention to all keys need no ranges.
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
    """What of a layer decides about what its queries see."""

    sliding_window: int | None = None
    chunk_lookback: int = -1  # chunks before the query's own that it sees; -1: the window is not one of chunks
    has_spans: bool = True  # whether tokens of an image see one another, if the model has spans
    clamp_spans: bool = False  # whether the window bounds what a span adds

    @property
    def chunk(self) -> int | None:
        """The size of a chunk, if there are any."""
        if self.chunk_lookback < 0 or self.sliding_window is None:
            return None
        return self.sliding_window // (self.chunk_lookback + 1)


class ModelMasks(NamedTuple):
    """What a model's configuration says about all of its layers."""

    has_spans: bool = False
    prefix_window: int | None = None  # R-SWA: the window of queries that see the prompt as well

    @classmethod
    def of(cls, model_config: Any) -> "ModelMasks":
        return cls() if model_config is None else cls(model_config.is_mm_prefix_lm, model_config.rswa_window)


@dataclasses.dataclass
class StepMasks:
    """The `key_ranges` of a step by a layer's `Mask`; `places` are the builder's, where ranges of all steps lie."""

    cu_q_lens: torch.Tensor
    kv_lens: torch.Tensor
    num_tokens: int
    causal: bool | torch.Tensor  # a tensor has a flag for each request
    spans: torch.Tensor | None  # [S, N, 2], those that queries of this step may lie in; None: the model has none
    prefix_lens: torch.Tensor | None  # of requests under R-SWA, then with its window
    prefix_window: int | None
    places: dict[Any, torch.Tensor]
    most_tokens: int  # of a step
    made: dict[Mask, torch.Tensor | None] = dataclasses.field(default_factory=dict)

    def of(self, mask: Mask) -> torch.Tensor | None:
        """The ranges of the layers with a mask; None if `causal` and `sliding_window` say what they see.

        Whether there are any does not depend on the requests, except by `causal`, because a graph is replayed for
        others than it was captured with. For the same reason all steps have theirs at one address.
        """
        if mask not in self.made:
            self.made[mask] = self._placed(mask, self._ranges(mask)) if self._needs_ranges(mask) else None
        return self.made[mask]

    def _needs_ranges(self, mask: Mask) -> bool:
        is_bounded = mask.sliding_window is not None or self.prefix_lens is not None
        if self.causal is False:  # otherwise all keys are seen, in spans or not
            return is_bounded
        has_spans = mask.has_spans and self.spans is not None
        others = mask.chunk is not None or has_spans or self.prefix_lens is not None
        return others or isinstance(self.causal, torch.Tensor)

    def _placed(self, mask: Mask, ranges: torch.Tensor) -> torch.Tensor:
        tokens, *rest = ranges.shape
        if tokens > self.most_tokens:  # no graph is so large
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
        # The query's own key, which all masks have, and with it the spans: so each touches what is seen, and they join.
        span = span_ranges(*step, spans=self.spans, sliding_window=1)
        if mask.clamp_spans and window is not None:
            span = _intersected(span, window_ranges(*step, left=window - 1))
        own = seen[:, -1:]
        joined = torch.stack([torch.minimum(own[..., 0], span[..., 0]), torch.maximum(own[..., 1], span[..., 1])], -1)
        return torch.cat((seen[:, :-1], joined), 1)


def _intersected(ranges: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """What lies in both; either may have one range for each query."""
    return torch.stack(
        [torch.maximum(ranges[..., 0], others[..., 0]), torch.minimum(ranges[..., 1], others[..., 1])], -1
    )


def spans_of_step(common: Any) -> torch.Tensor:
    """The spans [S, N, 2] of vLLM's step in which queries of the step may lie.

    vLLM names all spans of a request in every step. The host knows no more than a bound of the length of a request that
    decodes, but there the bound only moves the queries further behind the prompt, in which all spans lie.
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
