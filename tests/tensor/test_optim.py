"""Every torch.optim optimizer on parameters of mixed layouts: three steps equal plain torch's."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise import DTensor, Shard, distribute_tensor, simulate
from tests.tensor.common import R, checked_on, on_one_axis, same, x

SHAPES = [(5, 4), (4, 5), (6, 4), (4,), (3, 4), ()]


def values():
    return [x(*shape, seed=i) for i, shape in enumerate(SHAPES)]


def mixed(mesh):
    """Replicate, both dims, uneven, with empty parts, and all axes on one dim."""
    k = mesh.shape[0]
    sizes = [0] * k
    sizes[-1] = 3
    return [[R] * mesh.ndim, on_one_axis(mesh, Shard(1)), [Shard(0)] * mesh.ndim, on_one_axis(mesh, Shard(0), -1), on_one_axis(mesh, Shard(0, sizes=sizes)), [R] * mesh.ndim]  # fmt: skip


def parameters(mesh=None):
    if mesh is None:
        return [nn.Parameter(v) for v in values()]
    return [nn.Parameter(distribute_tensor(v, mesh, p)) for v, p in zip(values(), mixed(mesh), strict=True)]


def loss_of(params):
    a, b, c, d, e, f = params
    return (
        ((a @ b).tanh() * f).pow(2).sum()
        + F.linear(c, e, None).sin().sum()
        + (c * d).pow(2).mean()
        + (e + d).exp().mean()
    )


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "SGD nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "SGD foreach": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "foreach": True}),
    "SGD fused": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "fused": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    "Adam foreach": (torch.optim.Adam, {"lr": 0.01, "foreach": True}),
    "Adam fused": (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "AdamW maximize": (torch.optim.AdamW, {"lr": 0.01, "maximize": True}),
    "AdamW tensor lr": (torch.optim.AdamW, {"lr": torch.tensor(0.01), "foreach": False}),
    "AdamW capturable": (torch.optim.AdamW, {"lr": 0.01, "foreach": False, "betas": (0.8, 0.95)}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "Adagrad foreach": (torch.optim.Adagrad, {"lr": 0.05, "foreach": True}),
    "Adagrad fused": (torch.optim.Adagrad, {"lr": 0.05, "fused": True}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "Adadelta foreach": (torch.optim.Adadelta, {"lr": 0.5, "foreach": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "RMSprop foreach": (torch.optim.RMSprop, {"lr": 0.01, "foreach": True}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "Rprop foreach": (torch.optim.Rprop, {"lr": 0.01, "foreach": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "NAdam foreach": (torch.optim.NAdam, {"lr": 0.01, "foreach": True}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "RAdam foreach": (torch.optim.RAdam, {"lr": 0.01, "foreach": True}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "Adamax foreach": (torch.optim.Adamax, {"lr": 0.01, "foreach": True}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
    "ASGD foreach": (torch.optim.ASGD, {"lr": 0.01, "foreach": True}),
    "LBFGS": (torch.optim.LBFGS, {"lr": 0.1, "max_iter": 4}),
    "LBFGS line search": (torch.optim.LBFGS, {"max_iter": 3, "line_search_fn": "strong_wolfe"}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "Adafactor foreach": (torch.optim.Adafactor, {"lr": 0.01, "foreach": True}),
}


def train(params, make, options, steps=3):
    optimizer = make(params, **options)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(params)
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return optimizer


def compare(mine, plain, where=""):
    for i, (m, p) in enumerate(zip(mine, plain, strict=True)):
        same(m, p, f"{where} parameter {i} {m.placements}")


def run_optimizer(mesh, name):
    make, options = OPTIMIZERS[name]
    plain, mine = parameters(), parameters(mesh)
    train(plain, make, options)
    optimizer = train(mine, make, options)
    compare(mine, plain, name)
    for p, before in zip(mine, mixed(mesh), strict=True):
        assert p.placements == distribute_tensor(torch.zeros(p.shape), mesh, before).placements
    if make is not torch.optim.LBFGS:
        for p in mine:
            for key, state in optimizer.state[p].items():
                if isinstance(state, DTensor) and state.shape == p.shape and p.dim():
                    assert state.placements == p.placements, f"{name}: state {key} is not laid out as its parameter"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name):
    run_optimizer(simulate((2, 2) if len(name) % 2 else (3,)), name)


def some_optimizers(mesh):
    for name in ("SGD momentum", "Adam foreach", "AdamW", "AdamW fused", "Adagrad", "NAdam foreach", "Adafactor"):
        run_optimizer(mesh, name)


def clipping(mesh):
    for norm_type in (2.0, 1.0, float("inf")):
        for foreach in (None, True, False):
            plain, mine = parameters(), parameters(mesh)
            totals = []
            for params in (plain, mine):
                loss_of(params).backward()
                totals.append(nn.utils.clip_grad_norm_(params, 0.3, norm_type, foreach=foreach))
            same(totals[1], totals[0], f"norm {norm_type} foreach={foreach}")
            assert isinstance(totals[1], DTensor)
            for m, p in zip(mine, plain, strict=True):
                same(m.grad, p.grad, f"norm {norm_type} foreach={foreach}")
    for foreach in (None, False):
        plain, mine = parameters(), parameters(mesh)
        for params in (plain, mine):
            loss_of(params).backward()
            nn.utils.clip_grad_value_(params, 0.05, foreach=foreach)
        for m, p in zip(mine, plain, strict=True):
            same(m.grad, p.grad, f"value foreach={foreach}")
    norm = nn.utils.get_total_norm([p.grad for p in mine])
    same(norm, nn.utils.get_total_norm([p.grad for p in plain]))


def optimizer_state_dicts(mesh):
    """Stop after two steps, load into a new optimizer, go on: the same as never having stopped."""
    for name in ("SGD momentum", "AdamW", "AdamW foreach", "AdamW fused", "Adagrad", "RMSprop"):
        make, options = OPTIMIZERS[name]
        plain = parameters()
        train(plain, make, options, steps=4)
        mine = parameters(mesh)
        first = train(mine, make, options, steps=2)
        state = first.state_dict()
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        for loaded in (copy.deepcopy(state), torch.load(file, weights_only=True)):
            twins = [copy.deepcopy(p) for p in mine]
            second = make(twins, **options)
            second.load_state_dict(loaded)
            for _ in range(2):
                second.zero_grad()
                loss_of(twins).backward()
                second.step()
            compare(twins, plain, name)


def schedulers(mesh):
    make = {
        "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
        "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
        "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
        "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    }  # fmt: skip
    for name, schedule in make.items():
        plain, mine = parameters(), parameters(mesh)
        for params in (plain, mine):
            optimizer = torch.optim.AdamW(params, lr=0.01)
            scheduler = schedule(optimizer)
            for _ in range(3):
                optimizer.zero_grad()
                loss_of(params).backward()
                optimizer.step()
                scheduler.step()
        compare(mine, plain, name)
    mine, plain = parameters(mesh), parameters()
    for params in (plain, mine):
        optimizer = torch.optim.SGD(params, lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        for _ in range(3):
            plateau.step(loss_of(params))
        params.append(optimizer.param_groups[0]["lr"])
    assert mine[-1] == plain[-1]


def parameter_groups(mesh):
    plain, mine = parameters(), parameters(mesh)
    for params in (plain, mine):
        groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "weight_decay": 0.3}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)
            loss_of(params).backward()
            optimizer.step()
    compare(mine, plain)


def averaging(mesh):
    class Bag(nn.Module):
        def __init__(self, params):
            super().__init__()
            self.all = nn.ParameterList(params)

    results = []
    for params in (parameters(), parameters(mesh)):
        bag = Bag(params)
        average = torch.optim.swa_utils.AveragedModel(bag)
        optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(list(bag.all)).backward()
            optimizer.step()
            average.update_parameters(bag)
        results.append(list(average.module.all))
    compare(results[1], results[0])


def gradient_scaler(mesh):
    plain, mine = parameters(), parameters(mesh)
    for params in (plain, mine):
        optimizer = torch.optim.SGD(params, lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(params)
            if step == 1:
                loss = loss * float("inf")  # this step is skipped
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, 1.0)
            scaler.step(optimizer)
            scaler.update()
        params.append(scaler.get_scale())
    assert mine.pop() == plain.pop()
    compare(mine, plain)


def autocasting(mesh):
    for places in (on_one_axis(mesh, Shard(0)), on_one_axis(mesh, Shard(1)), [R] * mesh.ndim):
        value, weight = x(6, 4, dtype=torch.float32), x(5, 4, dtype=torch.float32)
        results = []
        for t, w in (
            (value.clone().requires_grad_(), weight.clone().requires_grad_()),
            (distribute_tensor(value, mesh, places).requires_grad_(), distribute_tensor(weight, mesh).requires_grad_()),
        ):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                hidden = F.linear(t, w)
                matmul = t @ w.t()
                loss = F.mse_loss(hidden.softmax(-1).float(), matmul.float())
                added = hidden + 1
            assert hidden.dtype == matmul.dtype == added.dtype == torch.bfloat16, places
            assert F.linear(t, w).dtype == torch.float32, "no plan of autocast outside of it"
            loss.backward()
            results.append((hidden, loss, t.grad, w.grad))
        for got, want in zip(results[1], results[0], strict=True):
            same(got, want, str(places), tolerance=0.05)


def views_of_one_tensor(mesh):
    """Parameters that are views of one tensor, copied where it is cut: every write reaches it."""

    def trained(flat, make):
        params = [flat[0].detach().requires_grad_(), flat[1].detach().requires_grad_(), flat[2:].detach().requires_grad_()]
        optimizer = make(params)
        for _ in range(2):
            optimizer.zero_grad()
            sum(((p * (i + 1)) ** 2).sum() for i, p in enumerate(params)).backward()
            optimizer.step()
        return [flat, *params]

    makers = [lambda p: torch.optim.SGD(p, 0.1, foreach=True), lambda p: torch.optim.Adam(p, 0.1)]
    for make in makers:
        mine = trained(distribute_tensor(x(5, 4), mesh, on_one_axis(mesh, Shard(0))), make)
        for got, want in zip(mine, trained(x(5, 4), make), strict=True):
            same(got, want, "views of one tensor")


CHECKS = [
    views_of_one_tensor, some_optimizers, clipping, optimizer_state_dicts, schedulers, parameter_groups, averaging, gradient_scaler, autocasting,
]  # fmt: skip
test_simulated, test_processes = checked_on(__name__, CHECKS, simulated=[(2, 2)])
