"""The language rules are written in: what a rule may answer, how an assignment follows from it, which rule an op has.

Knows no op; the rules themselves are in `shardwise.rules`."""
# ruff: noqa: F401

from shardwise.strategy.program import Tensor, needs_grad, reduced, run_local, sum_dtype, unfinished, whole
from shardwise.strategy.reading import Named, factors, line, rearrangement
from shardwise.strategy.relayout import Relayout, call_with, same_call
from shardwise.strategy.spec import Algorithm, Answer, Factors, Gathered, Operand, Order, PerCoords, Result, operands_in
