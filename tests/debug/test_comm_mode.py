"""CommDebugMode counts as torch's own does, and knows the module."""

import json

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.tensor as theirs
from torch.distributed.tensor.debug import CommDebugMode as TheirMode

from shardwise import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor, simulate
from shardwise.debug import CommDebugMode, ledger
from shardwise.parallel import fully_shard
from tests.workers import device_mesh, run_ranks

ops = torch.ops.c10d_functional
R = Replicate()


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(8, 16, bias=False)
        self.down = torch.nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([MLP(), MLP()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x).redistribute(placements=[R])
        return x


def tensor_parallel(name, module, mesh):
    dims = {"up": 0, "down": 1}
    if (leaf := name.rpartition(".")[2]) in dims:
        module.weight = torch.nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(dims[leaf])]))


@pytest.fixture
def traced():
    mesh = simulate(4)
    model = distribute_module(Model(), mesh, tensor_parallel)
    x = distribute_tensor(torch.randn(4, 8), mesh, [R])
    with CommDebugMode() as mode:
        model(x).sum().backward()
    return mode


def node(mode, *path):
    found = mode.root
    for name in path:
        found = found.children[name]
    return found


def test_counts(traced):
    # forward: one all-reduce a block; backward: one for the input of each block but the first, which needs no gradient
    assert traced.get_comm_counts() == {ops.all_reduce: 3}
    assert traced.get_total_counts() == 3
    assert traced.get_comm_counts()[ops.all_gather_into_tensor] == 0
    assert repr(traced) == "CommDebugMode(total=3, c10d_functional.all_reduce: 3)"


def test_modules(traced):
    top = node(traced, "Model")
    assert top.collectives == {False: {ops.all_reduce: 2}, True: {ops.all_reduce: 1}}
    second = node(traced, "Model", "Model.blocks.1")
    assert second.collectives == {False: {}, True: {ops.all_reduce: 1}}
    assert node(traced, "Model", "Model.blocks.1", "Model.blocks.1.up").collectives[True] == {ops.all_reduce: 1}
    assert node(traced, "Model", "Model.blocks.1", "Model.blocks.1.down").collectives[True] == {}
    assert node(traced, "Model", "Model.blocks.0").collectives == {False: {}, True: {}}


def test_parameters(traced):
    info = traced.get_sharding_info()
    assert info["Model.blocks.0.up.weight"] == (Shard(0),)
    assert info["Model.blocks.1.down.weight"] == (Shard(1),)
    assert len(info) == 4
    assert isinstance(traced.get_parameter_info()["Model.blocks.0.up"]["weight"], DTensor)


def test_noise_levels(traced):
    tables = [traced.generate_comm_debug_tracing_table(level) for level in range(4)]
    assert tables[0].splitlines()[:6] == [
        "Global",
        "  FORWARD PASS",
        "    *c10d_functional.all_reduce: 2",
        "  BACKWARD PASS",
        "    *c10d_functional.all_reduce: 1",
        "  Model",
    ]
    assert "**" not in tables[0] and "Linear" not in tables[0]
    for text in ("**linear", "**relu", "sharding: [(Replicate(),), (Shard(dim=0),)]", "*weight: (Shard(dim=0),)"):
        assert text in tables[1]
    assert [len(t) for t in tables] == sorted(len(t) for t in tables)


def test_files(traced, tmp_path):
    traced.log_comm_debug_tracing_table_to_file(str(tmp_path / "log.txt"), noise_level=1)
    assert (tmp_path / "log.txt").read_text() == traced.generate_comm_debug_tracing_table(1)
    traced.generate_json_dump(str(tmp_path / "log.json"), noise_level=1)
    tree = json.loads((tmp_path / "log.json").read_text())
    assert tree["collectives_forward"] == [["c10d_functional.all_reduce", 2]]
    up = tree["children"][0]["children"][0]["children"][0]
    assert up["fqn"] == "Model.blocks.0.up"
    assert up["parameters"] == [["weight", "(Shard(dim=0),)"]]
    assert up["operations_forward"][0]["name"] == "linear"
    assert up["operations_forward"][0]["input_sharding"] == ["(Replicate(),)", "(Shard(dim=0),)"]


def test_entering_again_starts_from_zero():
    x = distribute_tensor(torch.ones(8), simulate(4), [Shard(0)])
    mode = CommDebugMode()
    for _ in range(2):
        with mode:
            x.full_tensor()
        x.full_tensor()
        assert mode.get_comm_counts() == {ops.all_gather_into_tensor: 1}


def test_beside_a_ledger_and_each_other():
    x = distribute_tensor(torch.ones(8, 8), simulate(4), [Shard(0)])
    with CommDebugMode() as outer, ledger() as log:
        with CommDebugMode() as inner:
            x.redistribute(placements=[Shard(1)])
        x.full_tensor()
    assert inner.get_comm_counts() == {ops.all_to_all_single: 1}
    assert outer.get_total_counts() == len(log) == 2


def test_a_module_that_raises_is_left():
    class Broken(torch.nn.Module):
        def forward(self, x):
            raise KeyError("no")

    x = distribute_tensor(torch.ones(8), simulate(4), [Shard(0)])
    with CommDebugMode() as mode:
        with pytest.raises(KeyError):
            Broken()(x)
        x.full_tensor()
    assert node(mode, "Broken").collectives[False] == {}
    assert mode.get_total_counts() == 1
    assert not torch.nn.modules.module._global_forward_hooks


def test_checkpointed_module_counts_the_recomputation():
    mesh = simulate(4)
    model = distribute_module(MLP(), mesh, tensor_parallel)
    x = distribute_tensor(torch.randn(4, 8), mesh, [R]).requires_grad_()

    def run(x):
        return model(x).redistribute(placements=[R])

    with CommDebugMode() as mode:
        torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False).sum().backward()
    assert mode.root.collectives[False] == {ops.all_reduce: 1}
    # again the forward's (torch stops recomputing early where it can), and the gradient's of x
    assert mode.root.collectives[True][ops.all_reduce] in (1, 2)
    assert node(mode, "MLP", "MLP.up").collectives[True] == {ops.all_reduce: 1}


# -- against torch -----------------------------------------------------------------------------------------
def named(mode):
    """The counts in a form that pickles."""
    return {str(op): n for op, n in mode.get_comm_counts().items()}


def compare(rank, world_size):
    """What both modes count for the same moves and the same functional collective."""
    mesh = device_mesh((4,))
    local = torch.ones(8, 8)
    pairs = []
    for source, target in [("S0", "R"), ("P", "R"), ("P", "S0"), ("R", "S0"), ("R", "R")]:
        ours = {"S0": Shard(0), "R": R, "P": Partial()}
        torchs = {"S0": theirs.Shard(0), "R": theirs.Replicate(), "P": theirs.Partial()}
        x = DTensor.from_local(local, mesh, [ours[source]])
        y = theirs.DTensor.from_local(local, mesh, [torchs[source]])
        with CommDebugMode() as mine:
            x.redistribute(placements=[ours[target]])
        with TheirMode() as peer:
            y.redistribute(placements=[torchs[target]]).to_local() + 1
        pairs.append((named(mine), named(peer)))
    with CommDebugMode() as mine:
        torch.distributed._functional_collectives.all_reduce(local, "sum", mesh) + 1
    with TheirMode() as peer:
        torch.distributed._functional_collectives.all_reduce(local, "sum", mesh) + 1
    pairs.append((named(mine), named(peer)))
    return pairs


def test_counts_equal_torchs():
    for pairs in run_ranks(compare, 4):
        assert all(mine == peer for mine, peer in pairs), pairs
        assert [sum(mine.values()) for mine, _ in pairs] == [1, 1, 1, 0, 0, 1]


def test_fully_shard_counts_under_the_names_of_its_torch_twin():
    mesh = simulate(4, axis_names=("dp",))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = distribute_tensor(torch.ones(4, 8), mesh, [Shard(0)])
    c10d = torch.ops.c10d
    with CommDebugMode() as mode:
        loss = model(x).sum()
    assert dict(mode.get_comm_counts()) == {c10d._allgather_base_: 2}
    with CommDebugMode() as mode:
        loss.backward()
    counts = mode.get_comm_counts()
    assert counts[c10d._reduce_scatter_base_] == 2 and counts[c10d._allgather_base_] <= 2


def count_fully_shard(rank, world_size):
    """The counts of a step of ours and of torch's own."""
    seen = []
    for shard, mode_of in ((fully_shard, CommDebugMode), (torch.distributed.fsdp.fully_shard, TheirMode)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
        for part in (model[0], model[2], model):
            shard(part, mesh=device_mesh((world_size,), ("dp",)))
        with mode_of() as mode:
            model(torch.ones(4, 8)).sum().backward()
        seen.append({str(op): n for op, n in mode.get_comm_counts().items() if n})
    return seen


def test_fully_shard_counts_equal_torchs():
    for ours, torchs in run_ranks(count_fully_shard, 4):
        assert ours == torchs and ours


def test_fully_shard_over_copies_reduces_among_parts_and_then_over_copies():
    mesh = simulate((2, 2), axis_names=("copies", "parts"))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 5))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    x = torch.ones(4, 8)
    with CommDebugMode() as mode:
        model(x).sum().backward()
    counts, c10d = mode.get_comm_counts(), torch.ops.c10d
    assert counts[c10d._reduce_scatter_base_] == counts[c10d.allreduce_] == 2
    assert set(counts) == {c10d._reduce_scatter_base_, c10d.allreduce_, c10d._allgather_base_}
    assert torch.equal(model[1].bias.grad.full_tensor(), torch.full((5,), 4.0))
