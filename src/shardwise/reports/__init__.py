"""What a recorded run did: read from its files, as a report, and who hung."""

from shardwise.reports.blame import Verdict, blame
from shardwise.reports.read import Event, Rank, Run, read_run

__all__ = ["Event", "Rank", "Run", "Verdict", "blame", "read_run"]
