"""What a program will cost on a mesh of any size: memory, bytes and time of one rank, played without values."""

from shardwise.forecast.hardware import Figure, Hardware, Link
from shardwise.forecast.playing import estimate
from shardwise.forecast.programs import estimate_program
from shardwise.forecast.questions import compare, every_kind, largest, sweep
from shardwise.forecast.report import Check, Report

__all__ = [
    "Check",
    "Figure",
    "Hardware",
    "Link",
    "Report",
    "compare",
    "estimate",
    "estimate_program",
    "every_kind",
    "largest",
    "sweep",
]
