"""Attention of query rows over keys that come piece by piece."""

import torch


class Softmax:
    """A batch of query rows, and what they have seen of their keys so far: online softmax, all in float32."""

    def __init__(self, q: torch.Tensor, scale: float, d_v: int) -> None:
        """`q` is [B, R, d_qk] of any float dtype."""
        self.q = q.to(torch.float32) * scale
        self.d_v = d_v
        self.highest: torch.Tensor | None = None  # [B, R]
        self.total = self.out = self.q  # set with it: [B, R] and [B, R, d_v]

    def add(self, rows: torch.Tensor, hidden: torch.Tensor | None) -> None:
        """Keys `rows` [B, n, d_qk], n > 0, whose first columns are the values.

        `hidden`, which broadcasts against [B, R, n], tells which of them a query does not see. What is hidden from
        some query must be finite, unless all of these keys are hidden from it.
        """
        scores = torch.bmm(self.q, rows.transpose(1, 2))
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        found = scores.amax(-1)
        blind = found == -torch.inf
        highest = found if self.highest is None else torch.maximum(self.highest, found)
        base = highest.masked_fill(highest == -torch.inf, 0.0)
        weights = scores.sub_(base[..., None]).exp_()
        total = weights.sum(-1)
        out = torch.bmm(weights, rows[..., : self.d_v])
        if hidden is not None:
            out.masked_fill_(blind[..., None], 0.0)
        if self.highest is not None:
            factor = torch.exp(self.highest - base)
            total.addcmul_(self.total, factor)
            out.addcmul_(self.out, factor[..., None])
        self.highest, self.total, self.out = highest, total, out

    def finish(self, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Out [B, R, d_v], the highest logit [B, R] and the log-sum-exp [B, R]; `sinks` goes along R."""
        if self.highest is None:
            none = torch.full(self.q.shape[:2], -torch.inf, dtype=torch.float32, device=self.q.device)
            return self.q.new_zeros((*self.q.shape[:2], self.d_v)), none, none.clone()
        lonely = self.highest == -torch.inf
        lse = self.highest + torch.log(self.total.masked_fill(lonely, 1.0))
        out = self.out.div_(self.total.masked_fill(lonely, 1.0)[..., None])
        if sinks is not None:
            out.mul_(torch.sigmoid(lse - sinks)[..., None])
        return out.masked_fill_(lonely[..., None], 0.0), self.highest, lse
