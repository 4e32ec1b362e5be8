"""Looking at what a distributed program does: what it communicates, and who holds what."""

from shardwise.debug.comm_mode import CommDebugMode
from shardwise.debug.ledger import Ledger, ledger
from shardwise.debug.visualize import visualize_sharding

__all__ = ["CommDebugMode", "Ledger", "ledger", "visualize_sharding"]
