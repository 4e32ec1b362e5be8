"""torch's primitives, and as_strided with a tensor's own strides, keep layouts: nothing is gathered."""

import pytest
import torch

from shardwise import Partial, Shard, debug, distribute_tensor, simulate
from shardwise.testing.spread import spread_out

prims = torch.ops.prims
VALUE = torch.arange(12.0).view(4, 3).sin()
CALLS = {
    "neg": prims.neg, "exp": prims.exp, "add": lambda t: prims.add(t, t), "mul": lambda t: prims.mul(t, 2.0),
    "div": lambda t: prims.div(t, t + 3), "ints": lambda t: prims.div(t.long() + 9, t.long() + 7),
    "convert": lambda t: prims.convert_element_type(t, torch.float64), "transpose": lambda t: prims.transpose(t, [1, 0]),
    "sum": lambda t: prims.sum(t, [1]), "amax": lambda t: prims.amax(t, [1]), "where": lambda t: prims.where(t > 0, t, t * 2),
    "broadcast": lambda t: prims.broadcast_in_dim(t, [2, 4, 3], [1, 2]), "cat": lambda t: prims.cat([t, t], 1),
    "reshape": lambda t: prims.reshape(t, [12]), "split": lambda t: prims.split_dim(t, 1, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_primitives(name):
    call, mesh = CALLS[name], simulate(2)
    want = call(VALUE)
    with debug.ledger() as log:
        got = call(distribute_tensor(VALUE, mesh, [Shard(0)]))
    assert not list(log) and not got.placements[0].is_replicate()
    torch.testing.assert_close(got.full_tensor(), want)
    assert got.stride() == want.stride()


def test_errors_are_torchs():
    x = distribute_tensor(VALUE, simulate(2), [Shard(0)])
    with pytest.raises(RuntimeError, match="is not the expected dtype"):
        prims.add(x, x.long())


@pytest.mark.parametrize("place", [Shard(0), Shard(1), Partial(), Partial("max")], ids=str)
def test_as_strided_with_own_strides(place):
    for value in (VALUE, VALUE.t()):
        x = spread_out(value.clone(), simulate(3), [place], requires_grad=True)
        with debug.ledger() as log:
            view = x.as_strided(x.shape, x.stride())
            copy = torch.as_strided_copy(x.detach(), x.shape, x.stride(), 0)
        assert not list(log) and view.placements == copy.placements == (place,)
        torch.testing.assert_close(view.full_tensor(), value)
        torch.testing.assert_close(copy.full_tensor(), value)
        view.sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), torch.ones_like(value))
        plain = x.detach()
        plain.as_strided(plain.shape, plain.stride()).zero_()
        assert plain.full_tensor().abs().sum() == 0
