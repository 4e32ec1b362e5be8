"""The prover finds what it is there to find: wrong values, wrong gradients, refusals, missed chances, dear plans."""

import pytest
import torch

from shardwise import Partial, Replicate, RuleError, Shard, simulate
from shardwise.comm.reduction import reduce_parts
from shardwise.testing import check_rule, spread_out
from shardwise.testing.chances import cheapest_known, missed_chance
from shardwise.testing.check import as_sample
from shardwise.testing.spread import combinations, reductions_of, with_spare_bits
from shardwise.testing.trial import RAISED, REFUSED, RIGHT, WRONG, Outcome, attempt, reference

X, Y = torch.randn(5, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)


def local_only(func):
    """A broken op: it forgets that the others hold something too."""

    def op(x, *args):
        if hasattr(x, "_layout"):
            return type(x).from_local(
                func(x.to_local(), *args), x.device_mesh, x.placements, shape=func(X, *args).shape
            )
        return func(x, *args)

    return op


def test_right_ops_pass():
    assert check_rule(torch.add, [(X, Y), (X, X)]) >= 150
    assert check_rule(torch.sum, [X, ((X, 0), {"keepdim": True})]) > 50
    check_rule(torch.nn.functional.relu, [X], mesh_shapes=[(2, 2, 2)], limit=20)
    check_rule(torch.bitwise_xor, [(torch.arange(7), torch.arange(7) * 3)], limit=30)


def test_wrong_values_are_found():
    with pytest.raises(AssertionError, match=r"wrong on sample 0, mesh \(3,\)[\s\S]*Shard\(dim=1\)[\s\S]*result 0"):
        check_rule(local_only(lambda x: x.softmax(1)), [X])


def test_wrong_gradients_are_found():
    def doubled(x):
        if hasattr(x, "_layout"):
            return x * 2 - x.detach()
        return x * 1

    with pytest.raises(AssertionError, match="gradient of operand 0"):
        check_rule(doubled, [X])
    assert check_rule(doubled, [X], grad=False)


def test_refusals_and_errors_are_told_apart():
    def refuses(x):
        if hasattr(x, "_layout"):
            raise RuleError("not today")
        return x

    def raises(x):
        if hasattr(x, "_layout"):
            raise TypeError("no")
        return x

    mesh, here = simulate((3,)), ((Shard(0),),)
    for op, verdict in ((refuses, REFUSED), (raises, RAISED), (torch.neg, RIGHT), (local_only(torch.cumsum), WRONG)):
        args = (X, 0) if verdict == WRONG else (X,)
        assert attempt(reference(as_sample(op, args)), mesh, here).verdict == verdict


def test_bad_samples_say_so():
    with pytest.raises(RuleError, match="sample 0 = 3"):
        check_rule(torch.add, [3])
    with pytest.raises(RuleError, match="no tensor"):
        check_rule(torch.add, [(1, 2)])
    with pytest.raises(RuntimeError, match="must match"):  # plain torch's own error
        check_rule(torch.add, [(X, torch.randn(4))])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.int64, torch.uint8, torch.bool])
def test_parts_reduce_to_the_tensor(dtype):
    x = with_spare_bits(torch.randn(7, 3, dtype=torch.float64) * 5)
    x = x > 0 if dtype is torch.bool else x.abs().to(dtype) if dtype is torch.uint8 else x.to(dtype)
    for op in reductions_of(dtype):
        for size in (2, 3, 4):
            laid = spread_out(x, simulate((size,)), [Partial(op)], seed=size)
            torch.testing.assert_close(laid.full_tensor(), x)
            parts = laid.to_local().ranks
            if op in ("sum", "max", "bxor"):
                torch.testing.assert_close(reduce_parts(parts, op), x, rtol=0, atol=0)
            assert len({str(part.tolist()) for part in parts}) > 1, f"the parts of {op} are all alike"


def test_combinations_differ_and_cover():
    found = list(combinations([X, Y], (4,), 40, 0))
    assert len({str(c) for c in found}) == len(found) == 40
    first = {str(c[0]) for c in found}
    assert {"(Shard(dim=0),)", "(Shard(dim=1),)", "(Partial(sum),)", "(Partial(max),)", "(Replicate(),)"} <= first
    assert any("sizes" in text or "pieces" in text for text in first)
    assert found == list(combinations([X, Y], (4,), 40, 0))


def test_missed_chances():
    expected = reference(as_sample(torch.softmax, (X, 1)))
    mesh = simulate((3,))
    assert missed_chance(expected, mesh, ((Shard(0),),), 0) == "S(0) -> S(0)"
    assert missed_chance(expected, mesh, ((Shard(1),),), 0) == ""
    expected = reference(as_sample(torch.matmul, (X, X.t())))
    assert missed_chance(expected, mesh, ((Shard(1),), (Shard(0),)), 0) == "S(1) S(0) -> P(sum)"


def test_cheapest_known_plan():
    expected = reference(as_sample(torch.add, (X, X)))
    mesh = simulate((3,))
    tried = [
        (((Shard(0),), (Shard(0),)), Outcome(RIGHT, bytes=0)),
        (((Shard(0),), (Replicate(),)), Outcome(RIGHT, bytes=500)),
        (((Shard(1),), (Shard(1),)), Outcome(RIGHT, bytes=0)),
    ]
    here, cost = tried[1]
    assert cheapest_known(expected, mesh, here, cost, tried) == (0, tried[0][0])
