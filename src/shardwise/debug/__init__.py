"""Looking at what a distributed program does: what it communicates, and who holds what."""

from shardwise.debug.check_ranks import CheckedMove, CheckRanks, check_ranks, whole_program
from shardwise.debug.comm_mode import CommDebugMode
from shardwise.debug.ledger import Ledger, ledger
from shardwise.debug.record import Record, record
from shardwise.debug.visualize import visualize_sharding

__all__ = [
    "CheckRanks", "CheckedMove", "CommDebugMode", "Ledger", "Record",
    "check_ranks", "ledger", "record", "visualize_sharding", "whole_program",
]  # fmt: skip
