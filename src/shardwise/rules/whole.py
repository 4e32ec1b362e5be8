"""Functions whose operands are gathered although their parts have rules: below function level torch picks a kernel by a
flag the wrapper does not carry (whether a tensor requires grad), and would pick one without a gradient."""

from __future__ import annotations

from typing import Any

from shardwise.rules.registry import rule
from shardwise.rules.spec import Gathered


@rule("embedding_bag")
def gathered(*args: Any, **kwargs: Any) -> Gathered:
    return Gathered("gather, since torch picks its kernel by requires_grad, and compute it on every rank")
