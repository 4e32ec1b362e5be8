"""A mixture-of-experts layer."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.parallel.expert.dispatch import combine, dispatch
from shardwise.parallel.expert.grouped import grouped_linear
from shardwise.parallel.expert.router import balance_loss, top_k


class MixtureOfExperts(nn.Module):
    """A feed-forward layer of two-layer experts, of which each token goes through some.

    It is written for one device, and laid out over a mesh by giving `up`, `down` and their biases a Shard(0). The
    forward gives the output and `balance_loss`.

    Args:
        width: of the tokens.
        hidden: the width inside of an expert.
        experts: how many there are.
        k: how many of them each token goes through.
        capacity_factor: an expert takes at most this many times its even share of rows; None takes all.
    """

    def __init__(self, width: int, hidden: int, experts: int, k: int, capacity_factor: float | None = None) -> None:
        super().__init__()
        self.k, self.capacity_factor = k, capacity_factor
        self.router = nn.Linear(width, experts, bias=False)
        self.up, self.down = (nn.Parameter(torch.empty(experts, *s)) for s in ((hidden, width), (width, hidden)))
        self.up_bias, self.down_bias = (nn.Parameter(torch.zeros(experts, n)) for n in (hidden, width))
        for weight in (self.up, self.down):
            nn.init.uniform_(weight, -1 / math.sqrt(weight.shape[2]), 1 / math.sqrt(weight.shape[2]))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = x.flatten(0, -2)
        logits = self.router(tokens)
        weights, chosen = top_k(logits, self.k)
        routed = dispatch(tokens, chosen, self.up, capacity=self._capacity(tokens.shape[0]))
        y = F.gelu(grouped_linear(routed, routed.rows, self.up, self.up_bias))
        y = combine(routed, grouped_linear(routed, y, self.down, self.down_bias), weights)
        return y.unflatten(0, x.shape[:-1]), balance_loss(logits, chosen)

    def _capacity(self, tokens: int) -> int | None:
        if self.capacity_factor is None:
            return None
        return math.ceil(self.capacity_factor * tokens * self.k / self.up.shape[0])
