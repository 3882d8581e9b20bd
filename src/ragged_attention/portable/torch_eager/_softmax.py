"""Attention of query rows over keys that come piece by piece, and what its gradient needs of each row."""

import torch


def wide(tensor: torch.Tensor) -> torch.dtype:
    """The dtype to compute in: 16-bit weights would miss the error bound, and float64 inputs ask for exactness."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def soft_capped(scores: torch.Tensor, soft_cap: float) -> torch.Tensor:
    """`soft_cap` * tanh(scores / `soft_cap`), known to torch's automatic differentiation."""
    x = scores / soft_cap
    # Where x is its own tangent; over a huge cap it is subnormal, and some devices take that for 0.
    same = x.detach().abs() < torch.finfo(x.dtype).eps ** 0.5 / 2
    return torch.where(same, scores, x.tanh_() * soft_cap)


class Softmax:
    """A batch of query rows, and what they have seen of their keys so far: online softmax, all in the keys' dtype.

    Known to torch's automatic differentiation, for which m_i is a constant: it changes no result.
    """

    def __init__(self, q: torch.Tensor, scale: float | torch.Tensor, d_v: int, soft_cap: float | None = None) -> None:
        """`q` is [B, R, d_qk] of any float dtype."""
        self.q = q.to(wide(q)) * scale
        self.d_v, self.soft_cap = d_v, soft_cap
        self.m_i: torch.Tensor | None = None  # [B, R]
        self.l_i = self.acc = self.q  # set with it: [B, R] and [B, R, d_v]

    def add(self, rows: torch.Tensor, hidden: torch.Tensor | None) -> None:
        """Keys `rows` [B, n, d_qk], n > 0, whose first columns are the values.

        `hidden`, which broadcasts against [B, R, n], tells which of them a query does not see. What is hidden from
        some query must be finite, unless all of these keys are hidden from it.
        """
        scores = torch.bmm(self.q, rows.transpose(1, 2))
        if self.soft_cap is not None:
            # Not by dividing the queries by the cap: with a tiny one their products would be infinity minus infinity.
            scores = soft_capped(scores, self.soft_cap)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        found = scores.detach().amax(-1)
        fully_masked = found == -torch.inf
        m_i = found if self.m_i is None else torch.maximum(self.m_i, found)
        base = m_i.masked_fill(m_i == -torch.inf, 0.0)
        weights = scores.sub_(base[..., None]).exp_()
        l_i = weights.sum(-1)
        acc = torch.bmm(weights, rows[..., : self.d_v])
        if hidden is not None:
            acc.masked_fill_(fully_masked[..., None], 0.0)
        if self.m_i is not None:
            alpha = torch.exp(self.m_i - base)
            l_i.addcmul_(self.l_i, alpha)
            acc.addcmul_(self.acc, alpha[..., None])
        self.m_i, self.l_i, self.acc = m_i, l_i, acc

    def finish(self, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Out [B, R, d_v], max_logits [B, R] and the log-sum-exp [B, R]; `sinks` goes along R."""
        if self.m_i is None:
            none = torch.full(self.q.shape[:2], -torch.inf, dtype=self.q.dtype, device=self.q.device)
            return self.q.new_zeros((*self.q.shape[:2], self.d_v)), none, none.clone()
        fully_masked = self.m_i == -torch.inf
        lse = self.m_i + torch.log(self.l_i.masked_fill(fully_masked, 1.0))
        out = self.acc.div_(self.l_i.masked_fill(fully_masked, 1.0)[..., None])
        if sinks is not None:
            out.mul_(torch.sigmoid((lse - sinks).masked_fill_(fully_masked, 0.0))[..., None])
        return out.masked_fill_(fully_masked[..., None], 0.0), self.m_i, lse


class RowTerms:
    """All that the gradient needs of a batch of query rows [B, R] besides their logits.

    A row whose log-sum-exp is -inf saw no key, and contributes nothing.
    """

    def __init__(
        self, d_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, d_lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """d_out, out [B, R, d_v] and lse, d_lse [B, R] of one wide dtype; `sinks` broadcasts against the latter."""
        fully_masked = lse == -torch.inf
        delta = (out * d_out).sum(-1).masked_fill_(fully_masked, 0.0)
        self.lse = lse.masked_fill(fully_masked, torch.inf)[..., None]
        self.d_out = d_out
        self.d_sinks = offset = -delta
        if sinks is not None:
            share = torch.sigmoid(lse - sinks).masked_fill_(fully_masked, 0.0)  # of -inf and -inf it would be NaN
            self.d_out, offset = d_out * share[..., None], share * offset
            self.d_sinks = torch.sigmoid(sinks - lse).mul_(self.d_sinks).masked_fill_(fully_masked, 0.0)  # [B, R]
        if d_lse is not None:
            offset = offset + d_lse.masked_fill(fully_masked, 0.0)
        self.offset = offset[..., None]

    def weights(self, scores: torch.Tensor) -> torch.Tensor:
        """Logits [B, R, n], -inf where hidden, as weights; in place."""
        return scores.sub_(self.lse).exp_()

    def d_logits(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The gradient with respect to the logits, given their weights [B, R, n] and values [B, n, d_v]."""
        return torch.bmm(self.d_out, values.transpose(1, 2)).add_(self.offset).mul_(weights)
