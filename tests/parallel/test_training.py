"""What people put around a training step works on a parallel model as on one device: clipping, scaling, averaging,
tied and frozen parameters, parameter groups, activation checkpointing, parametrizations, checkpoints."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import DTensor, Replicate, Shard, distribute_module, distribute_tensor, simulate
from shardwise.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from tests.workers import device_mesh, run_ranks

R = Replicate()
WORDS, WIDTH, HIDDEN = 11, 6, 10


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, saving=False):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.saving = saving
        self.head.weight = self.words.weight  # tied

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.saving else layer(x)
        return self.head(x)


PLAN = {
    "words": RowwiseParallel(input_layouts=R),
    "layers.*.up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(),
    "head": ColwiseParallel(),
}


def net(mesh=None, saving=False, change=lambda model: None):
    """The model on one device or on a mesh (dp, tp), where dp cuts what tp leaves whole of every matrix."""
    torch.manual_seed(0)
    model = Net(saving).double()
    change(model)
    if mesh is None:
        return model
    distribute_module(parallelize_module(model, mesh, PLAN, axis="tp"), mesh)
    made = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if param.dim() == 2:
                places = [Shard(1 if param.placements[1].is_shard(0) else 0), param.placements[1]]
                if param not in made:
                    made[param] = nn.Parameter(param.detach().redistribute(placements=places), param.requires_grad)
                module.register_parameter(name, made[param])
    return model


def batch(step, mesh=None):
    rows = torch.randint(WORDS, (5, 7), generator=torch.Generator().manual_seed(step))
    if mesh is None:
        return rows[:, :-1], rows[:, 1:]
    return [
        distribute_tensor(t.contiguous(), mesh, [Shard(0), R], src_data_rank=None) for t in (rows[:, :-1], rows[:, 1:])
    ]


def loss_of(model, step, mesh):
    tokens, targets = batch(step, mesh)
    with loss_parallel():
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def whole(x):
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def same(got, want, where=""):
    torch.testing.assert_close(whole(got), whole(want), rtol=0, atol=1e-10, msg=lambda m: f"{where}: {m}")


def same_models(got, want):
    mine, plain = dict(got.named_parameters()), dict(want.named_parameters())
    assert list(mine) == list(plain)
    for name in plain:
        same(mine[name], plain[name], name)
        if plain[name].grad is None:
            assert mine[name].grad is None, name
        else:
            same(mine[name].grad, plain[name].grad, f"gradient of {name}")


def both(mesh, train, **options):
    """What `train(model, mesh)` returns on the mesh and on one device; the models must agree after it."""
    mine, plain = net(mesh, **options), net(**options)
    got, want = train(mine, mesh), train(plain, None)
    same_models(mine, plain)
    return mine, plain, got, want


def steps(model, optimizer, mesh, after=lambda step: None, count=3):
    losses = []
    for step in range(count):
        loss = loss_of(model, step, mesh)
        optimizer.zero_grad()
        loss.backward()
        after(step)
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


# ------------------------------------------------------------------ the checks, each of a mesh (dp, tp)


def clipping(mesh):
    for foreach in (None, True, False):
        for norm in (2.0, 1.0, float("inf")):
            norms = []

            def train(model, mesh, foreach=foreach, norm=norm, norms=norms):
                clip = lambda step: norms.append(
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm, foreach=foreach)
                )  # noqa: E731
                return steps(model, torch.optim.AdamW(model.parameters(), lr=0.01), mesh, clip, count=2)

            _, _, got, want = both(mesh, train)
            same(got, want)
            for mine, plain in zip(norms[:2], norms[2:], strict=True):
                same(mine, plain, f"norm {norm} foreach={foreach}")


def gradient_scaling(mesh):
    def train(model, mesh):
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2), torch.optim.SGD(model.parameters(), lr=0.1)  # fmt: skip
        for step in range(4):
            loss = loss_of(model, step, mesh) * (float("inf") if step == 1 else 1)  # that step is skipped
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    _, _, got, want = both(mesh, train)
    assert got == want == 8.0


def averaging(mesh):
    def train(model, mesh):
        ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        swa = torch.optim.swa_utils.AveragedModel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        steps(model, optimizer, mesh, lambda step: (ema.update_parameters(model), swa.update_parameters(model)))
        return ema.module, swa.module, whole(loss_of(ema, 9, mesh))

    _, _, got, want = both(mesh, train)
    for mine, plain in zip(got[:2], want[:2], strict=True):
        same_models(mine, plain)
        assert mine.layers[0].up.weight.placements == (Shard(1), Shard(0)), "laid out as the model is"
    same(got[2], want[2])


def ties(mesh):
    mine, _, got, want = both(
        mesh, lambda model, mesh: steps(model, torch.optim.AdamW(model.parameters(), lr=0.01), mesh)
    )
    assert mine.head.weight is mine.words.weight and len(list(mine.parameters())) == 13
    same(got, want)


def freezing(mesh):
    def freeze(model):
        model.words.requires_grad_(False)
        model.layers[0].requires_grad_(False)

    before = net(change=freeze)
    mine, _, got, want = both(
        mesh,
        lambda model, mesh: steps(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), mesh),
        change=freeze,
    )
    same(got, want)
    assert mine.words.weight.grad is None and mine.layers[1].up.weight.grad is not None
    same(mine.layers[0].up.weight, before.layers[0].up.weight)


def groups(mesh):
    def train(model, mesh):
        matrices = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() < 2]
        optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.3}, {"params": rest, "lr": 0.1}], lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        return steps(model, optimizer, mesh, lambda step: scheduler.step() if step else None)

    _, _, got, want = both(mesh, train)
    same(got, want)


def activation_checkpointing(mesh):
    def train(model, mesh):
        return steps(model, torch.optim.AdamW(model.parameters(), lr=0.01), mesh)

    _, _, got, want = both(mesh, train, saving=True)
    same(got, want)
    same(want, train(net(), None))


class Symmetric(nn.Module):
    def forward(self, x):
        return x.tril() + x.tril(-1).mT

    def right_inverse(self, x):
        return x.tril()


def parametrizing(mesh):
    """After the plan, as of plain parameters: weight normalisation, spectral normalisation, one of one's own."""
    ways = {
        "weight_norm": parametrizations.weight_norm,
        "spectral_norm": parametrizations.spectral_norm,
        "orthogonal": lambda layer: parametrizations.orthogonal(layer, use_trivialization=False),
        "own": lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric()),
    }
    for name, way in ways.items():
        results = []
        for where in (mesh, None):
            torch.manual_seed(0)
            layer = nn.Linear(WIDTH, WIDTH).double()
            x = torch.randn(5, WIDTH, dtype=torch.float64)
            if where is not None:
                parallelize_module(layer, mesh, ColwiseParallel(), axis="tp")
                x = distribute_tensor(x, mesh, [Shard(0), R])
            with shardwise.random.use("torch"):  # spectral_norm starts from random vectors
                way(layer)
            optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
            for _ in range(3):
                optimizer.zero_grad()
                loss = layer(x).square().mean()
                loss.backward()
                optimizer.step()
            results.append([loss, *layer.parameters(), *(p.grad for p in layer.parameters()), layer.weight])
            parametrize.remove_parametrizations(layer, "weight")
            results[-1].append(layer.weight)
        for mine, plain in zip(*results, strict=True):
            same(mine, plain, name)
        assert isinstance(results[0][-1], DTensor), name


def copies_and_state(mesh):
    """Stop, copy everything by state dicts into a fresh model and optimizer, go on: as if never stopped."""
    model = net(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps(model, optimizer, mesh, count=2)
    twin = net(mesh)
    other = torch.optim.AdamW(twin.parameters(), lr=0.01)
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    same(steps(model, optimizer, mesh), steps(twin, other, mesh))
    same_models(model, twin)


CHECKS = [clipping, gradient_scaling, averaging, ties, freezing, groups, activation_checkpointing, parametrizing, copies_and_state]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_simulated(check):
    check(simulate((2, 2), axis_names=("dp", "tp")))


def test_more_ranks_than_rows():
    ties(simulate((3, 4), axis_names=("dp", "tp")))


def on_ranks(rank, world_size, names):
    for check in CHECKS:
        if check.__name__ in names:
            check(device_mesh((2, 2), ("dp", "tp")))


def test_on_processes():
    run_ranks(
        on_ranks,
        4,
        ["gradient_scaling", "averaging", "groups", "activation_checkpointing", "parametrizing"],
        timeout=240,
    )


# ------------------------------------------------------------------ torch.distributed.checkpoint


def state(model, optimizer):
    named = dict(model.named_parameters())
    kept = {f"{name}/{key}": value for name, p in named.items() for key, value in optimizer.state[p].items()}
    return {"model": model.state_dict(), "optimizer": kept}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_one_layout_goes_on_in_another(tmp_path):
    """Saved on (2, 2), loaded on (1, 3) and on one device; the losses go on as if nothing had happened."""
    plain = net()
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    steps(plain, reference, None, count=2)
    mesh = simulate((2, 2), axis_names=("dp", "tp"))
    model = net(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps(model, optimizer, mesh, count=2)
    dcp.save(state(model, optimizer), checkpoint_id=tmp_path, no_dist=True)
    want = steps(plain, reference, None)
    for other in (simulate((1, 3), axis_names=("dp", "tp")), simulate((4, 1), axis_names=("dp", "tp"))):
        model = net(other)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        steps(model, optimizer, other, count=1)  # other numbers than those saved, all of them
        loaded = state(model, optimizer)
        dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
        same(steps(model, optimizer, other), want, str(other))
        same_models(model, plain)
