"""nn.init, reset_parameters and materialize: modules have the same parameters in every layout."""

import pytest
import torch
from torch import nn

import shardwise
from shardwise import LayoutError, Replicate, Shard, distribute_module, distribute_tensor, simulate
from tests.random.common import as_torch_draws

INITS = {
    "uniform": lambda t: nn.init.uniform_(t, -1, 2),
    "normal": lambda t: nn.init.normal_(t, 1, 2),
    "trunc_normal": lambda t: nn.init.trunc_normal_(t, std=0.5),
    "constant": lambda t: nn.init.constant_(t, 3),
    "ones": nn.init.ones_,
    "zeros": nn.init.zeros_,
    "eye": nn.init.eye_,
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "kaiming_normal": nn.init.kaiming_normal_,
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda t: nn.init.sparse_(t, 0.4),
}
LAYOUTS = [((3,), [Shard(0)]), ((4,), [Shard(1)]), ((2, 2), [Shard(1), Shard(0)]), ((2,), [Replicate()])]


def with_init(name, mesh, placements):
    parameter = nn.Parameter(distribute_tensor(torch.zeros(7, 6), mesh, placements))
    torch.manual_seed(5)
    INITS[name](parameter)
    return parameter.detach().full_tensor(), torch.rand(1)


@pytest.mark.parametrize("name", INITS)
def test_init(name):
    want, after = with_init(name, simulate((1,)), [Replicate()])
    for shape, placements in LAYOUTS:
        got, then = with_init(name, simulate(shape), placements)
        if name in ("orthogonal", "trunc_normal"):  # computed from what is drawn, by ops that round by position
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(got, want), (name, placements)
        assert torch.equal(then, after)


# -- every module of torch.nn with parameters ------------------------------------------------------------------------
def modules():
    """A maker of each kind of module in PyTorch's database that has parameters or buffers."""
    from torch.testing._internal.common_modules import module_db

    found = {}
    for info in module_db:
        if torch.float32 not in info.dtypes:
            continue
        for given in info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
        ):
            make = given.constructor_input
            build = lambda info=info, make=make: info.module_cls(*make.args, **make.kwargs)
            with torch.device("meta"):  # some samples ask for a device themselves
                module = build()
            tensors = [*module.parameters(), *module.buffers()]
            if tensors and all(t.is_meta and not nn.parameter.is_lazy(t) for t in tensors):
                found[info.name] = build
                break
    return found


def born_on_meta(build, mesh, dim):
    """Built without memory, laid out with every parameter cut along some dim, given values."""
    made = {}  # tied parameters stay tied

    def cut(path, module, mesh):
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                places = [Shard(dim % parameter.dim()) if parameter.dim() else Replicate()]
                if id(parameter) not in made:
                    laid_out = distribute_tensor(parameter.detach(), mesh, places)
                    made[id(parameter)] = parameter, nn.Parameter(laid_out, parameter.requires_grad)
                module.register_parameter(name, made[id(parameter)][1])

    with torch.device("meta"):
        module = build()
    distribute_module(module, mesh, cut)
    torch.manual_seed(3)
    shardwise.materialize(module)
    return module


def state(module):
    return {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in module.state_dict().items()}


@pytest.fixture(scope="module")
def every_module():
    return modules()


@as_torch_draws
def test_materialized_modules_are_those_of_plain_torch(every_module):
    assert len(every_module) > 25
    for name, build in every_module.items():
        torch.manual_seed(3)
        want = state(build())
        got = state(born_on_meta(build, simulate((3,)), 0))
        assert want.keys() == got.keys()
        for key in want:
            assert torch.equal(got[key], want[key]), (name, key)


def test_materialized_modules_are_the_same_in_every_layout(every_module):
    for name, build in every_module.items():
        want = state(born_on_meta(build, simulate((1,)), 0))
        got = state(born_on_meta(build, simulate((3,)), 1))
        for key in want:
            assert torch.equal(got[key], want[key]), (name, key)


def test_reset_parameters_of_every_module(every_module):
    for name, build in every_module.items():
        found = []
        for mesh, dim in ((simulate((1,)), 0), (simulate((4,)), -1)):
            module = born_on_meta(build, mesh, dim)
            torch.manual_seed(8)
            for part in module.modules():
                if hasattr(part, "reset_parameters"):
                    part.reset_parameters()
            found.append(state(module))
        for key in found[0]:
            assert torch.equal(found[0][key], found[1][key]), (name, key)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.token.weight


@as_torch_draws
def test_ties_stay():
    torch.manual_seed(3)
    want = Tied()
    got = born_on_meta(Tied, simulate((2,)), 0)
    assert got.head.weight is got.token.weight and got.token.weight.requires_grad
    assert torch.equal(got.head.weight.full_tensor(), want.head.weight)


def test_materialize_says_what_is_missing():
    mesh = simulate((2,))
    with torch.device("meta"):
        plain = nn.Linear(3, 3)
    with pytest.raises(LayoutError, match="materialize: weight is a plain meta tensor; lay the module out first"):
        shardwise.materialize(plain)

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3))

    with torch.device("meta"):
        bare = nn.Sequential(nn.Linear(3, 3), Bare())
    distribute_module(bare, mesh)
    with pytest.raises(
        LayoutError, match=r"materialize: 1.scale has no values and Bare no reset_parameters\(\); give init="
    ):
        shardwise.materialize(bare)
    assert bare[0].weight.device.type == "meta", "nothing was done"
    made = shardwise.materialize(bare, init=lambda m: [nn.init.constant_(p, 2) for p in m.parameters(recurse=False)])
    assert made is bare and all((p == 2).all() for p in bare.parameters())
    with pytest.raises(LayoutError, match="module must be a torch.nn.Module, got int"):
        shardwise.materialize(3)


def test_materialize_leaves_what_has_values():
    mesh = simulate((2,))
    with torch.device("meta"):
        later = nn.Linear(4, 4)
    model = distribute_module(nn.Sequential(nn.Linear(4, 4), later), mesh)
    before, parameter = model[0].weight.full_tensor().clone(), model[0].weight
    shardwise.materialize(model)
    assert model[0].weight is parameter and torch.equal(parameter.full_tensor(), before)
    assert model[1].weight.device.type == "cpu" and model(shardwise.randn(2, 4, device_mesh=mesh)).shape == (2, 4)
