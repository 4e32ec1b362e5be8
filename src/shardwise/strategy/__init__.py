"""The language rules are written in: what a rule may answer, how an assignment follows from it, which rule an op has.

Knows no op; the rules themselves are in `shardwise.rules`."""
