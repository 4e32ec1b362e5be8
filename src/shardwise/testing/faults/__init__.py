"""Faults that are put into programs of real processes, to see how those end: ``python -m shardwise.testing.faults``."""
