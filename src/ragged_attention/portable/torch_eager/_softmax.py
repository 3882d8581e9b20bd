"""Online softmax over blocks of keys, and the per-row terms of its gradient."""

import torch


def wide(tensor: torch.Tensor) -> torch.dtype:
    """The compute dtype: float64 for float64, else float32: 16-bit weights would exceed the tests' error bound."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def soft_capped(scores: torch.Tensor, soft_cap: float | None) -> torch.Tensor:
    """`soft_cap` * tanh(scores / `soft_cap`), which autograd can differentiate; the scores if there is no cap."""
    if soft_cap is None:
        return scores
    # Near 0, tanh(x) == x, so return the score itself: with a huge cap x is subnormal, and some devices flush it to 0.
    # The queries are not divided by the cap, because with a tiny cap their products could be infinity minus infinity.
    x = scores / soft_cap
    same = x.detach().abs() < torch.finfo(x.dtype).eps ** 0.5 / 2
    return torch.where(same, scores, x.tanh_() * soft_cap)


def sum_of_seen(weights: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """The sums [B, R, d_v] of values [B, n, d_v] times weights [B, R, n], over the keys that each row sees.

    The weight of a hidden key must be 0, but its value may be NaN or infinite, and still adds nothing.
    """
    infinite = ~values.isfinite().all(-1)
    sums = torch.bmm(weights, values.masked_fill(infinite[..., None], 0.0))
    for key in infinite.any(0).nonzero().flatten().tolist():
        adds = infinite[:, key, None, None] & seen[..., key, None]
        sums += torch.where(adds, weights[..., key, None] * values[:, None, key], 0.0)
    return sums


class Softmax:
    """The online softmax of a batch of query rows, in the compute dtype.

    Autograd can differentiate out and lse. It treats m_i as a constant, because neither depends on the choice of m_i.
    """

    def __init__(
        self, q: torch.Tensor, scale: float | torch.Tensor, d_v: int, soft_cap: float | None = None, *,
        keeps_largest: bool = False,
    ) -> None:  # fmt: skip
        """`q` is [B, R, d_qk] of any float dtype. `keeps_largest`: keep the largest logits before the soft cap."""
        self.q = q.to(wide(q)) * scale
        self.d_v, self.soft_cap = d_v, soft_cap
        self.keeps_largest = keeps_largest
        self.m_i: torch.Tensor | None = None  # [B, R]
        self.largest: torch.Tensor | None = None  # [B, R]
        self.l_i = self.acc = self.q  # placeholders until `add` sets l_i [B, R] and acc [B, R, d_v]

    def add(self, rows: torch.Tensor, hidden: torch.Tensor | None) -> None:
        """Add the keys `rows` [B, n, d_qk], n > 0, whose first columns are the values.

        `hidden` is True where a query does not see a key, and broadcasts against [B, R, n]. A key that is hidden from a
        query must be finite, unless all of `rows` are hidden from that query.
        """
        logits = torch.bmm(self.q, rows.transpose(1, 2))
        if self.keeps_largest:
            some = (logits if hidden is None else logits.masked_fill(hidden, -torch.inf)).detach().amax(-1)
            self.largest = some if self.largest is None else torch.maximum(self.largest, some)
        scores = soft_capped(logits, self.soft_cap)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        largest = scores.detach().amax(-1)
        fully_masked = largest == -torch.inf
        m_i = largest if self.m_i is None else torch.maximum(self.m_i, largest)
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
        """Out [B, R, d_v], max_logits [B, R] and lse [B, R]; `sinks` broadcasts against [B, R]."""
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
    """The per-row terms of the gradient, for query rows [B, R].

    A row whose log-sum-exp is -inf saw no key and contributes nothing.
    """

    def __init__(
        self, d_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, d_lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """d_out, out [B, R, d_v] and lse, d_lse [B, R] have one compute dtype; `sinks` broadcasts against `lse`."""
        fully_masked = lse == -torch.inf
        delta = (out * d_out).sum(-1).masked_fill_(fully_masked, 0.0)
        self.lse = lse.masked_fill(fully_masked, torch.inf)[..., None]
        self.d_out = d_out
        self.d_sinks = offset = -delta
        if sinks is not None:
            share = torch.sigmoid(lse - sinks).masked_fill_(fully_masked, 0.0)  # -inf - -inf is NaN
            self.d_out, offset = d_out * share[..., None], share * offset
            self.d_sinks = torch.sigmoid(sinks - lse).mul_(self.d_sinks).masked_fill_(fully_masked, 0.0)  # [B, R]
        if d_lse is not None:
            offset = offset + d_lse.masked_fill(fully_masked, 0.0)
        self.offset = offset[..., None]

    def weights(self, scores: torch.Tensor) -> torch.Tensor:
        """The softmax weights of logits [B, R, n], which are -inf where hidden and are overwritten."""
        return scores.sub_(self.lse).exp_()

    def d_logits(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The gradient with respect to the logits, given their weights [B, R, n] and values [B, n, d_v]."""
        return torch.bmm(self.d_out, values.transpose(1, 2)).add_(self.offset).mul_(weights)
