"""A mesh without values: where its rank stands, what it refuses, what may be assumed."""

import copy

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise import (
    DTensor,
    MeshError,
    OutlineError,
    RankTensor,
    Replicate,
    Shard,
    distribute_tensor,
    outline,
    simulate,
)
from shardwise.comm.without_values import device_for
from shardwise.parallel import data_parallel
from shardwise.testing.check import as_sample
from shardwise.testing.outlined import ASKS, compare_without_values
from shardwise.testing.spread import combinations
from shardwise.testing.subjects import subjects

OPERATORS = (  # some of each family; `benchmarks/estimate.py operators` has all of them
    "add", "nn.functional.linear", "cumsum", "softmax", "topk", "index_select", "cat", "std", "bernoulli", "as_strided",
    "nn.functional.embedding_bag", "nn.functional.conv_transpose1d", "min [reduction_no_dim]", "fft.fft", "linalg.lu",
    "_foreach_sqrt", "masked.norm", "nn.functional.interpolate [trilinear]", "nn.BatchNorm3d (train)", "unique",
    "combinations", "linalg.lstsq", "nn.functional.ctc_loss", "nn.TransformerEncoderLayer (train)",
)  # fmt: skip


def test_where_the_rank_stands():
    mesh = outline((512, 128), axis_names=("dp", "tp"), play=(3, 5))
    assert mesh.get_rank() == 3 * 128 + 5 and mesh.get_coordinate() == [3, 5]
    assert mesh["tp"].get_coordinate() == [5] and mesh["tp"].ranks == tuple(range(384, 512))
    assert mesh["dp"].get_local_rank() == 3 and mesh["dp"].ranks[:2] == (5, 133)
    assert mesh["dp", "tp"] is mesh and mesh["tp"] is mesh["tp"]
    assert mesh._flatten("all").get_coordinate() == [389] and mesh["all"].size() == 65536
    assert repr(mesh) == "OutlinedMesh(dp=512, tp=128, device='cpu', rank 389)"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"shape": ()}, "outline: shape must be one or more ints > 0"),
        ({"shape": (4,), "play": 4}, "play=4 is no rank of a mesh of 4 ranks"),
        ({"shape": (2, 2), "play": (0, 2)}, "must be a rank's number or coordinates"),
        ({"shape": (2,), "axis_names": ("a", "b")}, "must name each of the 1 axes"),
        ({"shape": (2,), "device": "toaster"}, "outline: device must be a kind of device"),
    ],
)
def test_what_describes_no_mesh(given, says):
    with pytest.raises(MeshError, match=says.replace("(", r"\(").replace("?", r"\?")):
        outline(**given)


@pytest.mark.parametrize("sizes", [(10, 6), (3, 6), (0, 6), (1, 1)])
def test_each_rank_holds_its_part(sizes):
    for rank in range(4):
        mesh = outline(4, play=rank)
        x = distribute_tensor(torch.zeros(sizes), mesh, [Shard(0)], src_data_rank=None)
        assert tuple(x.to_local().shape) == x._layout.local_shape_at((rank,))
        assert tuple(x.full_tensor().shape) == sizes


def test_no_memory_and_no_growth_with_ranks():
    with outline((1024, 1024), axis_names=("dp", "tp")) as mesh:
        w = nn.Parameter(shardwise.empty(1 << 20, 1 << 20, device_mesh=mesh, placements=[Shard(0), Shard(1)]))
        w.pow(2).sum().backward()
        assert tuple(w.grad.to_local().shape) == (1024, 1024)


def test_values_that_are_asked_for():
    with outline(4) as mesh:
        x = shardwise.ones(8, 2, device_mesh=mesh, placements=[Shard(0)])
        for ask in (
            lambda: x.sum().item(),
            lambda: x.tolist(),
            lambda: bool(x[0, 0] > 0),
            lambda: torch.ones(2).sum().item(),
        ):
            with pytest.raises(OutlineError, match=r"test_outline.py:\d+ asks for 'item'.*assume=\{'item': \.\.\.\}"):
                ask()
        with pytest.raises(OutlineError, match="'nonzero'"):
            torch.nonzero(x)


def test_values_that_are_assumed():
    with outline(4, assume={"item": 2.5, "nonzero": 0.5, "masked_select": 3, "unique": 7}) as mesh:
        x = shardwise.ones(8, 2, device_mesh=mesh, placements=[Shard(0)])
        assert x.sum().item() == 2.5 and torch.ones(3).sum().item() == 2.5
        assert x.to_local().nonzero().shape == (2, 2)
        assert torch.nonzero(x).shape == (8, 2)  # half of what each of 4 ranks holds
        assert torch.ones(9).masked_select(torch.ones(9) > 0).shape == (3,)
        assert torch.ones(9).unique().shape == (7,)


def test_numpy_reads_what_is_assumed():
    with outline(2) as mesh:
        x = shardwise.ones(3, device_mesh=mesh, placements=[Shard(0)])
        for ask in (lambda: x.full_tensor().numpy(), lambda: numpy.asarray(torch.zeros(3)), lambda: x.tolist()):
            with pytest.raises(OutlineError, match="say what to assume"):
                ask()
    real = torch.arange(3.0)
    with outline(2, assume={"item": 2.5}) as mesh:
        x = shardwise.ones(3, device_mesh=mesh, placements=[Shard(0)])
        assert (x.full_tensor().numpy() == numpy.full(3, 2.5)).all() and x.sum().full_tensor().numpy() == 2.5
        assert (real.numpy() == numpy.arange(3)).all()  # a tensor with values keeps them
    assert torch.ones(2).numpy().sum() == 2 and "numpy" not in vars(torch.Tensor)


def test_real_tensors_enter_and_take_gradients():
    mesh = outline(4)
    weight = torch.ones(6, 4, requires_grad=True)
    y = DTensor.from_local(weight, mesh, [Replicate()]) * 2
    y.sum().backward()
    assert weight.grad.shape == weight.shape


def test_device_that_is_not_here():
    with outline(2, device="cuda") as mesh:
        assert mesh.device_type == "cuda"
        x = torch.zeros(3, 4, device="cuda").to("cuda").cuda()
        y = DTensor.from_local(x, mesh, [Shard(0)])
        assert y.shape == (6, 4) and F.relu(y).to_local().shape == (3, 4)


WRITES = {
    "index_add": lambda x, i, v: x.index_add(0, i, v),
    "index_copy": lambda x, i, v: x.index_copy(0, i, v),
    "index_fill": lambda x, i, v: x.index_fill(0, i, 1.0),
    "index_reduce": lambda x, i, v: x.index_reduce(0, i, v, "amax"),
    "scatter_add": lambda x, i, v: x.scatter_add(0, i[:, None].expand(4, 3), v),
    "scatter_reduce": lambda x, i, v: x.scatter_reduce(0, i[:, None].expand(4, 3), v, "amin"),
    "index_put": lambda x, i, v: x.index_put((i,), v),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_at_indices_ask_for_no_values(name):
    """Which of the indices a rank holds only values tell; they are taken to be spread evenly."""
    mesh = outline(4, play=1)
    x, index, source = (
        distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, [place])
        for shape, dtype, place in (
            ((10, 3), torch.float32, Shard(0)),
            ((4,), torch.int64, Replicate()),
            ((4, 3), torch.float32, Replicate()),
        )
    )
    x.requires_grad_()
    source.requires_grad_()
    written = WRITES[name](x, index, source)
    assert written.shape == (10, 3) and written.placements == (Shard(0),) and written.to_local().shape == (3, 3)
    written.sum().backward()
    assert x.grad.to_local().shape == (3, 3)


@pytest.mark.parametrize("loss", [F.multi_margin_loss, F.multilabel_margin_loss])
def test_the_loss_of_one_row_is_a_number(loss):
    row, targets = torch.zeros(5), torch.zeros(5 if loss is F.multilabel_margin_loss else (), dtype=torch.int64)
    on = lambda value: distribute_tensor(value, outline(2), [Replicate()])
    assert loss(on(row), on(targets), reduction="none").shape == loss(row, targets, reduction="none").shape == ()


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_of_the_proof(name):
    sample = subjects()[name].samples("function", 1)[0]
    for shape in ((3,), (2, 2)):
        for layouts in combinations(sample.tensors, shape, limit=1 if len(shape) > 1 else 2, seed=name):
            outcome = compare_without_values(sample, shape, layouts)
            assert outcome.verdict == (ASKS if name == "unique" else "right"), outcome.message


def test_what_a_comparison_notices():
    """Results that are laid out otherwise, ranks that hold something else, calls that simulation refuses."""
    x = torch.arange(6.0, dtype=torch.float64)
    run = lambda call: compare_without_values(as_sample(call, (x,)), (2,), ((Shard(0),),))
    has_values = lambda t: isinstance(t.to_local(), RankTensor)
    assert run(torch.exp).verdict == "right" and not run(torch.exp).message
    assert run(lambda t: t.view(7)).verdict == "refused"
    otherwise = lambda t: t.exp() if has_values(t) else t.redistribute(placements=[Replicate()]).exp()
    assert run(otherwise).verdict == "wrong"
    part = lambda t: DTensor.from_local(t.to_local()[:1], t.device_mesh, [Shard(0)], shape=(6,), stride=(1,))
    uneven = lambda t: t if has_values(t) else part(t)
    assert "holds" in run(uneven).message


def test_modules_are_converted():
    with outline(2, device="cuda"):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).to("cuda").to(torch.bfloat16).cuda()
        weight = model[0].weight
        assert weight.dtype == torch.bfloat16 and model.float()[0].weight is weight and weight.dtype == torch.float32


def test_deep_copies_are_of_the_same_rank(recwarn):
    """They meet the tensors that they are copies of, and count as memory."""
    with outline(2) as mesh:
        model = data_parallel(nn.Linear(64, 64, bias=False), mesh)
        average = torch.optim.swa_utils.AveragedModel(model)
        x = shardwise.ones(4, device_mesh=mesh, placements=[Shard(0)])
        assert (copy.deepcopy(x) + x + copy.deepcopy(torch.zeros(4))).shape == (4,)
        memory = shardwise.estimate(lambda: average.update_parameters(model)).memory
    assert memory.categories["parameters"] == 2 * 64 * 64 * 4
    assert not [w for w in recwarn if "FakeTensor" in str(w.message)]


def test_a_longest_target_is_asked_for():
    logs, targets, lengths = torch.zeros(6, 2, 5), torch.ones(4, dtype=torch.int64), torch.full((2,), 2)
    with pytest.raises(OutlineError, match="'ctc_loss'.*the length of the longest target"):
        F.ctc_loss(*(distribute_tensor(x, outline(2), [Replicate()]) for x in (logs, targets, lengths, lengths)))
    mesh = outline(2, assume={"ctc_loss": 2})
    assert (
        F.ctc_loss(*(distribute_tensor(x, mesh, [Replicate()]) for x in (logs, targets, lengths, lengths))).shape == ()
    )


@pytest.mark.parametrize(("gpus", "reported"), [(0, "cpu"), (1, "cuda:0")])
def test_a_build_for_cuda_reports_the_gpu_only_where_there_is_one(monkeypatch, gpus, reported):
    """Whatever torch.cuda says: it answers for the device of the estimate while a script is played."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: gpus, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert str(device_for("cuda")) == reported


def test_writes_of_list_ops_are_counted():
    """By them data parallelism sees that an optimizer has stepped, and gathers the parameters again."""
    with outline(2), torch.no_grad():
        x, y = torch.zeros(3), torch.zeros(3)
        for count, write in enumerate(
            (
                lambda: torch._foreach_add_([x], [y]),
                lambda: torch._foreach_mul_(self=[x], scalar=2.0),
                lambda: torch._fused_sgd_([x], [y], [], lr=0.1, momentum=0.0, weight_decay=0.0, dampening=0.0,
                                          nesterov=False, maximize=False, is_first_step=False),
                lambda: torch.ops.aten._foreach_add.List_out([y], [y], out=[x]),
                lambda: x.add_(y),
            ),
            start=1,
        ):  # fmt: skip
            write()
            assert x._version == count


@pytest.mark.parametrize("how", [{"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_parameters_are_gathered_again_after_a_step_of_list_ops(shard, how):
    gathered = []
    for mesh in (outline(4), simulate(4)):
        model = data_parallel(nn.Linear(4, 8), mesh, shard)
        optimizer = torch.optim.SGD(model.parameters(), **how)
        with shardwise.debug.ledger() as log:
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
        gathered.append([entry.kind for entry in log].count("all_gather"))
    assert gathered[0] == gathered[1] == 3


def test_optimizers_choose_as_on_the_device_that_is_played():
    """On a GPU the default is list ops, whose temporary tensors are as large as all parameters together."""
    peaks = {}
    for device in ("cpu", "cuda"):
        with outline(2, device=device):
            w = [nn.Parameter(torch.zeros(1024, device=device)) for _ in range(8)]
            optimizer = torch.optim.AdamW(w)

            def step(w=w, optimizer=optimizer):
                sum(x.sum() for x in w).backward()
                optimizer.step()

            peaks[device] = shardwise.estimate(step).memory.peak
    assert peaks["cuda"] == peaks["cpu"] + 5 * 4096  # three temporary tensors at a time, and all eight
