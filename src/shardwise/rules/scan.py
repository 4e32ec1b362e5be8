"""Cumulative ops."""

from __future__ import annotations

from shardwise.rules.reduce import along

along("cumsum cumprod logcumsumexp")
along("cummax cummin", outputs=2)
