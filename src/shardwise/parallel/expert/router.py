"""The router: which experts a token goes to."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardwise.errors import LayoutError


def top_k(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k likeliest experts of each token.

    Args:
        logits: (tokens, experts).
        k: how many.

    Returns:
        Their weights, which add up to one, and their numbers; both (tokens, k).

    Raises:
        LayoutError: k is not an int from 1 to the number of experts.
    """
    experts = logits.shape[-1]
    if not isinstance(k, int) or not 0 < k <= experts:
        raise LayoutError(f"top_k: k must be an int from 1 to the number of experts {experts}, got {k!r}")
    values, chosen = logits.softmax(-1).topk(k, -1)
    return values / values.sum(-1, keepdim=True), chosen


def balance_loss(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """A loss that is 1 where all experts get equally many tokens, and grows as the router prefers some of them.

    Args:
        logits: (tokens, experts).
        chosen: (tokens, k), the numbers of the experts.
    """
    experts = logits.shape[-1]
    share = F.one_hot(chosen, experts).to(logits.dtype).mean((0, 1))
    return experts * (share * logits.softmax(-1).mean(0)).sum()
