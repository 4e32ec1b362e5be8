"""nn.Parameter and nn.Module with distributed parameters: state dicts, copies, files, casts, initialisers."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from shardwise import DTensor, Shard, distribute_module, distribute_tensor
from tests.random.common import as_torch_draws
from tests.tensor.common import R, checked_on, laid_out, layouts, on_one_axis, same, x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("steps", torch.arange(3), persistent=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(self.norm(h + self.down(self.up(h).relu()) * self.scale))


TOKENS = torch.tensor([[0, 3, 6, 2, 5], [1, 1, 4, 0, 2]])


def plain_net(seed=0):
    torch.manual_seed(seed)
    return Net().double()


def partition(name, module, mesh):
    """Columns, rows, a table by rows; the rest is left to be replicated."""
    cuts = {"up": 0, "down": 1, "embed": 0}
    if name in cuts:
        for key, param in list(module.named_parameters(recurse=False)):
            places = on_one_axis(mesh, Shard(cuts[name]) if param.dim() > cuts[name] else R)
            module.register_parameter(key, nn.Parameter(distribute_tensor(param.detach(), mesh, places)))
    if name == "":
        module.head.weight = None  # tied below, as model code does


def net(mesh, seed=0):
    made = distribute_module(plain_net(seed), mesh, partition)
    made.head.weight = made.embed.weight
    return made


def same_modules(got, want, where=""):
    mine, plain = dict(got.named_parameters()), dict(want.named_parameters())
    assert list(mine) == list(plain), where
    for name in plain:
        assert isinstance(mine[name], nn.Parameter) and isinstance(mine[name], DTensor), f"{name} {where}"
        assert mine[name].requires_grad == plain[name].requires_grad
        same(mine[name], plain[name], f"{name} {where}")


def distributing_a_module(mesh):
    model, plain = net(mesh), plain_net()
    same_modules(model, plain)
    assert model.up.weight.placements[0] == Shard(0) and model.norm.weight.placements == (R,) * mesh.ndim
    assert isinstance(model.scale, DTensor) and isinstance(model.steps, DTensor) and model.steps.dtype == torch.int64
    assert not model.scale.requires_grad and model.head.weight is model.embed.weight
    same(model(distribute_tensor(TOKENS, mesh)), plain(TOKENS))
    same(model(TOKENS), plain(TOKENS), "plain input")
    model(distribute_tensor(TOKENS, mesh, on_one_axis(mesh, Shard(1)))).pow(2).sum().backward()
    plain(TOKENS).pow(2).sum().backward()
    for (name, mine), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        same(mine.grad, want.grad, name)


def distributing_ties(mesh):
    """Without a partition function everything is replicated; tied parameters and frozen ones stay so."""
    plain = plain_net()
    plain.norm.bias.requires_grad_(False)
    model = distribute_module(copy.deepcopy(plain), mesh)
    assert model.head.weight is model.embed.weight and len(list(model.parameters())) == len(list(plain.parameters()))
    assert not model.norm.bias.requires_grad
    same_modules(model, plain)


def distributing_with_input_and_output(mesh):
    calls = []

    def inputs(module, args, mesh):
        calls.append("in")
        return (distribute_tensor(args[0], mesh, on_one_axis(mesh, Shard(0))), *args[1:])

    def outputs(module, out, mesh):
        calls.append("out")
        assert isinstance(out, DTensor)
        return out.full_tensor()

    model = distribute_module(plain_net(), mesh, input_fn=inputs, output_fn=outputs)
    got = model(TOKENS)
    assert type(got) is torch.Tensor and calls == ["in", "out"]
    torch.testing.assert_close(got, plain_net()(TOKENS))


def parameters_of_any_layout(mesh):
    for places in layouts(mesh, x(5, 4), partial=False):
        param = nn.Parameter(distribute_tensor(x(5, 4), mesh, places))
        assert isinstance(param, nn.Parameter) and isinstance(param, DTensor) and param.requires_grad and param.is_leaf
        assert not nn.Parameter(distribute_tensor(x(5, 4), mesh, places), requires_grad=False).requires_grad
        module = nn.Module()
        module.weight = param
        assert dict(module.named_parameters()) == {"weight": param}
        again = nn.Parameter(param)
        assert again.requires_grad and isinstance(again, DTensor)
        (param * param).sum().backward()
        same(param.grad, 2 * x(5, 4), str(places))
        assert not isinstance(param * 1, nn.Parameter) and not isinstance(param.detach(), nn.Parameter)


def state_dicts(mesh):
    source, target = net(mesh, 1), net(mesh, 2)
    state = source.state_dict()
    assert all(isinstance(v, DTensor) and not v.requires_grad for v in state.values())
    assert "steps" not in state and "scale" in state
    kept = dict(target.named_parameters())
    assert str(target.load_state_dict(state)) == "<All keys matched successfully>"
    same_modules(target, plain_net(1))
    assert all(kept[name] is p for name, p in target.named_parameters())
    for seed in (1, 3):
        target, plain = net(mesh, 2), plain_net(2)
        target.load_state_dict({k: v.clone() for k, v in net(mesh, seed).state_dict().items()}, assign=True)
        plain.load_state_dict({k: v.clone() for k, v in plain_net(seed).state_dict().items()}, assign=True)
        same_modules(target, plain)
        same(target(distribute_tensor(TOKENS, mesh)), plain(TOKENS))
    target = net(mesh, 2)
    whole = {name: value.full_tensor() for name, value in state.items()}
    target.load_state_dict(whole)  # plain values into distributed parameters
    same_modules(target, plain_net(1))
    assert target.up.weight.placements[0] == Shard(0)
    other = distribute_module(plain_net(4), mesh)  # another layout
    other.load_state_dict(state)
    same_modules(other, plain_net(1))
    assert other.up.weight.placements == (R,) * mesh.ndim
    with pytest.raises(RuntimeError, match="size mismatch for up.weight"):
        target.load_state_dict({**state, "up.weight": distribute_tensor(x(2, 2), mesh)})
    with pytest.raises(RuntimeError, match="Missing key"):
        target.load_state_dict({k: v for k, v in state.items() if k != "up.bias"})
    same_modules(target, plain_net(1))


def deep_copies(mesh):
    for places in layouts(mesh, x(5, 4)):
        value = laid_out(x(5, 4), mesh, places, requires_grad=True)
        (value * value).sum().backward()
        twin = copy.deepcopy(value)
        assert twin is not value and twin.requires_grad and twin.is_leaf and twin.placements == value.placements
        same(twin, x(5, 4), str(places))
        same(twin.grad, value.grad.full_tensor(), str(places))
        with torch.no_grad():
            twin.zero_()
            twin.grad.zero_()
        same(value, x(5, 4), str(places))
        same(value.grad, 2 * x(5, 4), str(places))
        pair = copy.deepcopy([value, value])
        assert pair[0] is pair[1]
        with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
            copy.deepcopy(value * 2)
        same(copy.copy(value), x(5, 4), str(places))
    model = net(mesh)
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embed.weight and twin.up.weight is not model.up.weight
    same_modules(twin, plain_net())
    with torch.no_grad():
        twin.up.weight.zero_()
    same_modules(model, plain_net())


def pickles(mesh):
    for places in layouts(mesh, x(5, 4)):
        value = laid_out(x(5, 4), mesh, places, requires_grad=True)
        for protocol in (2, pickle.HIGHEST_PROTOCOL):
            twin = pickle.loads(pickle.dumps(value, protocol))
            assert twin.requires_grad and twin.placements == value.placements and twin.device_mesh == mesh
            same(twin, x(5, 4), str(places))
    param = pickle.loads(pickle.dumps(nn.Parameter(distribute_tensor(x(3), mesh))))
    assert isinstance(param, nn.Parameter) and isinstance(param, DTensor)
    twin = pickle.loads(pickle.dumps(net(mesh)))
    same_modules(twin, plain_net())
    assert twin.head.weight is twin.embed.weight
    same(twin(distribute_tensor(TOKENS, mesh)), plain_net()(TOKENS))


def saved_and_loaded(mesh):
    state = net(mesh).state_dict() | {
        "leaf": distribute_tensor(x(5, 3), mesh, on_one_axis(mesh, Shard(0))).requires_grad_()
    }
    for weights_only in (False, True):
        file = io.BytesIO()
        torch.save({"model": state, "step": 3}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=weights_only)
        assert loaded["step"] == 3 and list(loaded["model"]) == list(state)
        for name, value in state.items():
            got = loaded["model"][name]
            assert isinstance(got, DTensor) and got.placements == value.placements, name
            assert got.requires_grad == value.requires_grad, name
            same(got, value.full_tensor(), name)
        fresh = net(mesh, 5)
        del loaded["model"]["leaf"]
        fresh.load_state_dict(loaded["model"])
        same_modules(fresh, plain_net())


def swapping(mesh):
    a = distribute_tensor(x(5, 4), mesh, on_one_axis(mesh, Shard(0)))
    b = distribute_tensor(x(3, 2), mesh, on_one_axis(mesh, Shard(1)))
    torch.utils.swap_tensors(a, b)
    assert a.shape == (3, 2) and b.shape == (5, 4) and a.placements[0] == Shard(1)
    same(a, x(3, 2))
    same(b, x(5, 4))
    same(a + 1, x(3, 2) + 1)
    first, second = nn.Parameter(distribute_tensor(x(4), mesh)), nn.Parameter(distribute_tensor(x(4, seed=1), mesh))
    torch.utils.swap_tensors(first, second)
    (first * first).sum().backward()
    same(first.grad, 2 * x(4, seed=1))
    assert second.grad is None
    old = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = net(mesh).float()
        same(model.up.weight, plain_net().float().up.weight)
        model.load_state_dict(net(mesh, 1).float().state_dict())
        same(model.up.weight, plain_net(1).float().up.weight)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(old)


def casts(mesh):
    for change in (
        lambda m: m.half(), lambda m: m.float(), lambda m: m.double(), lambda m: m.bfloat16(), lambda m: m.to(torch.float32),
        lambda m: m.cpu(), lambda m: m.to("cpu", torch.float16), lambda m: m.to(x(1, dtype=torch.float32)),
    ):  # fmt: skip
        model, plain = net(mesh), plain_net()
        kept = dict(model.named_parameters())
        assert change(model) is model
        change(plain)
        same_modules(model, plain)
        assert model.scale.dtype == plain.scale.dtype and model.steps.dtype == torch.int64
        assert all(kept[name] is p for name, p in model.named_parameters())
        assert model.up.weight.placements[0] == Shard(0) and model.head.weight is model.embed.weight
    model, plain = net(mesh).float(), plain_net().float()
    for m, t in ((model, distribute_tensor(TOKENS, mesh)), (plain, TOKENS)):
        m(t).sum().backward()
        m.double()
    same(model.up.weight.grad, plain.up.weight.grad, tolerance=1e-6)
    for places in layouts(mesh, x(5, 4)):
        value = laid_out(x(5, 4), mesh, places)
        for dtype in (torch.float32, torch.float64, torch.int32, torch.bool, torch.complex128):
            same(value.to(dtype), x(5, 4).to(dtype), f"{places} {dtype}", tolerance=1e-6)


def to_meta_and_empty(mesh):
    model = net(mesh).to("meta")
    weight = model.up.weight
    assert isinstance(weight, DTensor) and weight.device.type == "meta" and weight.shape == (9, 6)
    assert weight.placements[0] == Shard(0)
    model.to_empty(device="cpu")
    model.head.weight = model.embed.weight  # a new device unties, in plain torch as well
    assert model.up.weight.device.type == "cpu" and model.up.weight.placements[0] == Shard(0)
    model.load_state_dict(net(mesh).state_dict())
    same_modules(model, plain_net())


def born_on_meta(mesh):
    with torch.device("meta"):
        model = Net().double()
    distribute_module(model, mesh, partition)
    model.to_empty(device="cpu")
    model.head.weight = model.embed.weight
    assert model.up.weight.device.type == "cpu" and isinstance(model.up.weight, DTensor)
    model.load_state_dict(net(mesh, 1).state_dict())
    same_modules(model, plain_net(1))


def zeroing_and_freezing(mesh):
    model = net(mesh)
    tokens = distribute_tensor(TOKENS, mesh)
    model(tokens).sum().backward()
    kept = model.up.weight.grad
    model.zero_grad(set_to_none=False)
    assert model.up.weight.grad is kept
    same(kept, torch.zeros(9, 6, dtype=torch.float64))
    model(tokens).sum().backward()
    plain = plain_net()
    plain(TOKENS).sum().backward()
    same(model.up.weight.grad, plain.up.weight.grad)
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert model.requires_grad_(False) is model and not any(p.requires_grad for p in model.parameters())
    assert not model(tokens).requires_grad
    model.up.requires_grad_(True)
    model(tokens).sum().backward()
    same(model.up.weight.grad, plain.up.weight.grad)
    assert model.down.weight.grad is None
    assert model.train() is model and model.eval() is model and sum(p.numel() for p in model.parameters()) == 177


INITS = {
    "uniform": lambda t: nn.init.uniform_(t, -1, 2), "normal": lambda t: nn.init.normal_(t, 1, 2),
    "constant": lambda t: nn.init.constant_(t, 3), "ones": nn.init.ones_, "zeros": nn.init.zeros_, "eye": nn.init.eye_,
    "xavier_uniform": nn.init.xavier_uniform_, "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": lambda t: nn.init.kaiming_uniform_(t, a=5**0.5), "kaiming_normal": nn.init.kaiming_normal_,
    "trunc_normal": lambda t: nn.init.trunc_normal_(t, std=0.5), "orthogonal": nn.init.orthogonal_,
    "dirac": lambda t: nn.init.dirac_(t.view(6, 4, 1)),
}  # fmt: skip


@as_torch_draws
def initialisers(mesh):
    failed = []
    for name, fill in INITS.items():
        for places in layouts(mesh, x(6, 4), partial=False):
            if name == "dirac" and places != [R] * mesh.ndim:
                continue
            mine = nn.Parameter(distribute_tensor(x(6, 4), mesh, places))
            plain = nn.Parameter(x(6, 4))
            try:
                torch.manual_seed(11)
                fill(plain)
                after = torch.rand(1)
                torch.manual_seed(11)
                fill(mine)
                same(mine, plain)
                assert torch.equal(torch.rand(1), after), "the stream went on differently"
                assert mine.placements == distribute_tensor(x(6, 4), mesh, places).placements and mine.requires_grad
            except Exception as error:
                failed.append(f"{name} {places}: {type(error).__name__} {str(error)[:200]}")
    assert not failed, f"{len(failed)}\n" + "\n".join(failed)


@as_torch_draws
def sparse_initialiser(mesh):
    for places in layouts(mesh, x(6, 4), partial=False):
        mine, plain = nn.Parameter(distribute_tensor(x(6, 4), mesh, places)), nn.Parameter(x(6, 4))
        for t in (mine, plain):
            torch.manual_seed(11)
            nn.init.sparse_(t, 0.4)
        same(mine, plain, str(places))


def casts_that_change_nothing(mesh):
    for places in layouts(mesh, x(5, 4)):
        value = laid_out(x(5, 4), mesh, places)
        assert (
            value.to("cpu") is value
            and value.cpu() is value
            and value.double() is value
            and value.contiguous() is value
        )


@as_torch_draws
def resets(mesh):
    """module.reset_parameters() with distributed parameters draws what one device draws."""
    model, plain = net(mesh, 1), plain_net(1)
    for m in (model, plain):
        torch.manual_seed(3)
        for sub in (m.up, m.down, m.norm, m.embed):
            sub.reset_parameters()
    same_modules(model, plain)


CHECKS = [
    distributing_a_module, distributing_ties, distributing_with_input_and_output, parameters_of_any_layout, state_dicts,
    deep_copies, pickles, saved_and_loaded, swapping, casts, to_meta_and_empty, born_on_meta, zeroing_and_freezing, initialisers,
    resets, sparse_initialiser, casts_that_change_nothing,
]  # fmt: skip
test_simulated, test_processes = checked_on(__name__, CHECKS)
