"""Which of several right ways a call takes: what the result is laid out like, and how many exchanges it costs."""

import pytest
import torch

from shardwise import Partial, Replicate, Shard, distribute_tensor, simulate
from shardwise.debug import CommDebugMode

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
MESH = simulate(4)
# sizes of the operands and how they are laid out -> the product's placement, and the exchanges
PRODUCTS = [
    ((8, 16), S0, (16, 12), S0, S0, 1),  # the second is gathered: a pending sum would have to be added up later
    ((8, 16), S1, (16, 12), S1, S1, 1),
    ((6, 7), S0, (7, 5), S0, S0, 1),
    ((3, 2), S0, (2, 5), S0, S0, 1),  # fewer rows than ranks
    ((8, 16), S1, (16, 12), S0, P, 0),  # nothing moves: then a sum may wait
    ((8, 16), R, (16, 12), S0, P, 0),
    ((8, 16), S0, (16, 12), R, S0, 0),
    ((8, 1 << 18), S0, (1 << 18, 8), S0, P, 1),  # the sum is small, and both operands are large
]


@pytest.mark.parametrize(("left", "p", "right", "q", "there", "exchanges"), PRODUCTS)
def test_products_of_cut_matrices(left, p, right, q, there, exchanges):
    x, y = torch.randint(-2, 3, left).float(), torch.randint(-2, 3, right).float()  # sums of these are exact
    a, b = distribute_tensor(x, MESH, [p]), distribute_tensor(y, MESH, [q])
    with CommDebugMode() as mode:
        product = a @ b
    assert (product.placements[0], mode.get_total_counts()) == (there, exchanges)
    assert torch.equal(product.full_tensor(), x @ y)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
@pytest.mark.parametrize("rows", [10, 3])
def test_statistics_of_all_ranks_are_exchanged_at_once(name, rows):
    x = torch.randn(rows, 3, dtype=torch.float64)
    with CommDebugMode() as mode:
        found = getattr(torch, name)(distribute_tensor(x, MESH, [S0]), 0)
    assert mode.get_total_counts() == 1
    wanted = getattr(torch, name)(x, 0)
    pairs = zip(found, wanted, strict=True) if name.endswith("mean") else [(found, wanted)]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.full_tensor(), theirs)
