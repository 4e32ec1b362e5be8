"""Looking at what a distributed program does."""

from shardwise.debug.ledger import Ledger, ledger

__all__ = ["Ledger", "ledger"]
