"""The target distribution by which an indexer of sparse attention is trained."""

from collections.abc import Mapping, Sequence
from typing import Any

from ragged_attention.calls import AttentionTarget
from ragged_attention.operations.base import Array, FrontEnd, Memory


class Targets(FrontEnd[Array, Memory]):
    """The training target of an indexer, computed from attention."""

    def attention_target(
        self,
        q: Array,
        keys: Array,
        lse: Array,
        indices: Array | None = None,
        *,
        sm_scale: float | None = None,
        topk_lens: Array | None = None,
        starts: Array | None = None,
        stops: Array | None = None,
        relative: bool = False,
        max_keys: int | None = None,
        backend: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Array:
        """The distribution of attention over each token's keys, summed over heads: what an indexer is trained to match.

            p[t, s] = sum over h of exp(sm_scale * q[t, h] . key[s] - lse[t, h]),  target[t, s] = p[t, s] / sum of p[t]

        The caller computes the loss, such as the Kullback-Leibler divergence from the target to the softmax of
        `indexer_logits` over the same keys. Shapes in letters: T query tokens, H heads, D head size, N selected keys
        per query, s_kv packed keys, which all heads share.

        Args:
            q: [T, H, D] bfloat16, float16 or float32, the queries of the attention; D a multiple of 16 up to 1024.
            keys: [s_kv, D] or [s_kv, 1, D] of q's dtype, packed: such as `kv` of `sparse_mla_prefill`.
            lse: f32 [T, H], the natural log-sum-exp of the attention's scaled logits, as `sparse_mla_prefill` returns
                it. This lse excludes sinks. For the probabilities of attention with sinks, pass
                `logaddexp(lse, sinks)`. A head without keys, whose lse is -inf, adds nothing.
            indices: i32 [T, N] or [T, 1, N], the selected keys of each query, in any order, as `indexer_topk` returns
                them and `sparse_mla_prefill` takes them. An index outside [0, s_kv), such as -1, is no key.
            sm_scale: factor on q . k; default `D ** -0.5`.
            topk_lens: i32 [T], with `indices`: the lengths of the lists, clamped to [0, N]; later entries are ignored.
            starts, stops, relative, max_keys: instead of `indices`, a range of keys for each query, as in
                `indexer_logits`. The result is then the dense target, for a warm-up over all keys.
            backend, options: as in `ragged_paged_attention`.

        Returns:
            f32 [T, N] or, with ranges, [T, columns] with the columns of `indexer_logits`. Each row sums to 1 over its
            query's keys and is 0 in all other columns. If the query has no key, or if none of its probabilities is
            above 0 in float32, the whole row is 0. An index that is listed twice counts twice. Keys that no query sees,
            and all arguments of a query without keys, may hold NaN. Products and sums are in float32, in the same order
            in every run.

            The result is a constant: it has no gradient, and in torch it never requires one.

        Raises:
            InvalidInput, TypeError, Unsupported: as `ragged_paged_attention`.

        The target is that of DeepSeek-V3.2's technical report: attention scores summed over the heads, and normalised
        to a sum of 1 over the sequence (in the dense warm-up) or over the selected keys.
        """
        arguments = dict(
            q=q, keys=keys, lse=lse, indices=indices, sm_scale=sm_scale, topk_lens=topk_lens, starts=starts,
            stops=stops, relative=relative, max_keys=max_keys,
        )  # fmt: skip
        return self.run(AttentionTarget, arguments, backend, options)
