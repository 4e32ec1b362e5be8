"""Where a program that runs once for all simulated ranks meets what differs between them: values, nodes, hooks, memory."""

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from shardwise import LayoutError, RankTensor, Replicate, Shard, distribute_module, distribute_tensor, simulate
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

R = Replicate()
DIFFER, ALIKE = RankTensor([torch.tensor(1.0), torch.tensor(2.0)]), RankTensor([torch.tensor(3.0), torch.tensor(3.0)])


@pytest.mark.parametrize(
    "ask",
    [bool, int, float, complex, torch.is_nonzero, lambda x: range(x.long())],
    ids=["bool", "int", "float", "complex", "is_nonzero", "range"],
)
def test_one_value_where_ranks_agree(ask):
    assert ask(ALIKE) == ask(torch.tensor(3.0))
    with pytest.raises(LayoutError, match=r"the ranks differ in value: .* read it off \.ranks\[i\]"):
        ask(RankTensor([torch.tensor(0.0), torch.tensor(2.0)]))


def test_decisions_by_what_differs():
    with pytest.raises(LayoutError, match="the ranks differ"):
        assert torch.equal(DIFFER, torch.tensor(1.0))  # True on one rank, False on the other
    with pytest.raises(LayoutError, match="the ranks differ"):
        assert 1.0 in RankTensor([torch.ones(2), torch.zeros(2)])
    assert f"{DIFFER:.1f} {ALIKE:.1f} {ALIKE}" == "[1.0, 2.0] 3.0 3.0"
    with pytest.raises(LayoutError, match=r"take those of rank i: tensor\.ranks\[i\]"):
        numpy.asarray(DIFFER)
    assert [part.tolist() for part in DIFFER.numpy()] == [1.0, 2.0]


def test_nodes():
    made = DIFFER.clone().requires_grad_() * 2
    assert made.grad_fn[1].name() == "MulBackward0"
    with pytest.raises(
        AttributeError, match=r"name: each simulated rank has its own MulBackward0; take that of rank i"
    ):
        made.grad_fn.name()


def test_hooks_are_removed_together():
    leaf, seen = RankTensor([torch.ones(2).requires_grad_() for _ in range(3)]), []
    with leaf.register_hook(lambda grad: seen.append(grad)):
        leaf.sum().backward()
    leaf.sum().backward()
    assert len(seen) == 3


def seen_by_hooks(module, value, *watched):
    seen = []
    for part in watched:
        part.register_full_backward_hook(lambda mod, into, out: seen.append((into[0], out[0])))
        part.register_full_backward_pre_hook(lambda mod, out: seen.append(out[0]))
    module(value).square().sum().backward()
    return [x for entry in seen for x in (entry if isinstance(entry, tuple) else (entry,))]


def test_backward_hooks_of_modules_that_take_and_give_plain_tensors():
    """Hooks of a parallel module run once and see all ranks; what they see is what one device's see."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    ours = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    ours.load_state_dict(plain.state_dict())
    parallelize_module(ours, simulate(2), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    value = torch.randn(3, 4)
    want = seen_by_hooks(plain, value.clone().requires_grad_(), plain, plain[2])
    got = seen_by_hooks(ours, value.clone().requires_grad_(), ours, ours[2])
    assert len(want) == len(got)
    for mine, theirs in zip(got, want, strict=True):
        if hasattr(mine, "full_tensor"):
            torch.testing.assert_close(mine.full_tensor(), theirs)
        elif isinstance(mine, RankTensor) and mine.ranks[0].shape == theirs.shape:
            for rank in mine.ranks:
                torch.testing.assert_close(rank, theirs)


def test_backward_hooks_on_what_ranks_hold():
    """Each rank's own gradients, and a hook that replaces them."""
    module, seen = nn.Linear(3, 2, bias=False), []
    module.register_full_backward_hook(lambda mod, into, out: seen.append((into[0], out[0])) or (into[0] * 10,))
    leaf = RankTensor([torch.ones(1, 3).requires_grad_(), torch.full((2, 3), 2.0).requires_grad_()])
    (module(leaf) * RankTensor([torch.tensor(1.0), torch.tensor(5.0)])).sum().backward()
    assert len(seen) == 1
    columns = module.weight.detach().sum(0)
    for rank, (factor, rows) in enumerate([(1, 1), (5, 2)]):
        torch.testing.assert_close(seen[0][0].ranks[rank], columns.expand(rows, 3) * factor)
        assert seen[0][1].ranks[rank].tolist() == [[factor] * 2] * rows
        torch.testing.assert_close(leaf.ranks[rank].grad, columns.expand(rows, 3) * factor * 10)


def uneven_model(mesh):
    def cut(name, module, mesh):
        for key, value in list(module._parameters.items()):
            module.register_parameter(key, nn.Parameter(distribute_tensor(value, mesh, [Shard(0), R])))

    return distribute_module(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)), mesh, cut)


def test_async_save(tmp_path):
    mesh = simulate((2, 2))
    model, other = uneven_model(mesh), uneven_model(mesh)
    want = {name: value.full_tensor() for name, value in model.state_dict().items()}
    saving = dcp.async_save(model.state_dict(), checkpoint_id=tmp_path)
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()  # the copy was taken before
    saving.result()
    state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    for name, value in state.items():
        assert torch.equal(value.full_tensor(), want[name]), name
