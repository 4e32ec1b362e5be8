"""Random programs, on one device and on a mesh: whatever differs is a defect. ``python -m shardwise.testing.fuzz``."""

from shardwise.testing.fuzz.compose import compose
from shardwise.testing.fuzz.judge import Verdict, judge
from shardwise.testing.fuzz.program import Program
from shardwise.testing.fuzz.shrink import shrink

__all__ = ["Program", "Verdict", "compose", "judge", "shrink"]
