"""softmax and its relatives."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.rules.reduce import along, dims_of, needs_stages, two_stages, whole_along
from shardwise.rules.registry import rule
from shardwise.rules.spec import Algorithm, Operand

along("softmax log_softmax softmin _softmax _log_softmax _safe_softmax")


@rule("logsumexp")
def logsumexp(x: Operand, dim: Any, keepdim: bool = False) -> Any:
    dims = dims_of(dim, x.ndim)
    if needs_stages(x, dims):
        return Algorithm(lambda x, dim, keepdim=False: two_stages(torch.logsumexp, x, dims, keepdim))
    return whole_along(x, dims, keepdim)
