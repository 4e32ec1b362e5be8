"""What torch lets an `out` be, and what it makes of it: dtypes, sizes, strides, warnings, the kind of the result."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise import DTensor, Replicate, Shard, distribute_tensor, simulate
from shardwise.testing.trial import different

A = torch.arange(30.0).reshape(5, 6).sin()
SQUARE = A[:, :5] @ A[:, :5].T + torch.eye(5)

# calls that torch refuses, and those that it makes, with an out of another dtype or shape
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "round to a wider dtype": (torch.round, (A,), (A.double(),)),
    "gelu to a wider dtype": (torch._C._nn.gelu, (A,), (A.double(),)),
    "amax to a wider dtype": (torch.amax, (A, 1), (A[:, 0].double(),)),
    "any to integers": (torch.any, (A, 1), (A[:, 0].long(),)),
    "neg to a wider dtype": (torch.neg, (A.int(),), (A.long(),)),
    "sort to a wider dtype": (torch.sort, (A,), (A.double(), A.long())),
    "qr to a wider dtype": (torch.linalg.qr, (A,), (A[:, :5].double(), A.double())),
    "solve to a wider dtype": (torch.linalg.solve, (SQUARE, A), (A.double(),)),
    "cummax": (torch.cummax, (A, 0), (torch.zeros(5, 6), torch.zeros(5, 6).long())),
    "cummax of nothing yet": (torch.cummax, (A, 1), (torch.empty(0), torch.empty(0).long())),
    "exp of nothing yet": (torch.exp, (A.t(),), (torch.empty(0),)),
    "inverse of nothing yet": (torch.linalg.inv, (SQUARE,), (torch.empty(0),)),
    "exp of another shape": (torch.exp, (A,), (torch.zeros(3, 2),)),
    "multinomial of another shape": (torch.multinomial, (A.abs(), 3), (torch.zeros(7).long(),)),
}


def called(call: Callable[..., Any], outs: tuple[Any, ...]) -> tuple[Any, Exception | None, list[str]]:
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        try:
            result, error = call(out=outs[0] if len(outs) == 1 else outs), None
        except Exception as raised:
            result, error = None, raised
    return result, error, [str(warning.message) for warning in noted]


@pytest.mark.parametrize("plain_out", [False, True], ids=["distributed", "plain"])
@pytest.mark.parametrize("place", [Shard(0), Shard(-1), Replicate()], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_as_torch_does(name: str, place: Any, plain_out: bool) -> None:
    func, args, outs = CALLS[name]
    mesh = simulate(3)
    laid_out = lambda t: distribute_tensor(t.clone(), mesh, [place if t.dim() else Replicate()])
    mine = [laid_out(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
    theirs, ours = tuple(t.clone() for t in outs), tuple(t.clone() if plain_out else laid_out(t) for t in outs)
    want, wrong, said = called(lambda out: func(*args, out=out), theirs)
    got, mistake, told = called(lambda out: func(*mine, out=out), ours)
    assert type(mistake) is type(wrong)
    if wrong is not None:
        assert str(mistake) == str(wrong)
        return
    assert type(got).__name__ == ("DTensor" if isinstance(want, torch.Tensor) else type(want).__name__)
    assert told == said
    for mine_out, their_out in zip(ours, theirs, strict=True):
        assert not different(mine_out, their_out, values="multinomial" not in name), name
        assert mine_out.stride() == their_out.stride()


def test_plain_out_shares_memory_again() -> None:
    """A plain out that was resized is what the result shows."""
    x, out = distribute_tensor(A, simulate(3), [Shard(0)]), torch.empty(0)
    result = torch.exp(x, out=out)
    out.zero_()
    assert isinstance(result, DTensor)
    assert not result.full_tensor().any()
