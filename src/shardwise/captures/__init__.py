"""Programs written down once and run again as straight-line local code."""

from shardwise.captures.captured import Captured, capture

__all__ = ["Captured", "capture"]
