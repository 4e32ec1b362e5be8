"""A small net of awkward parameters, trained on one device and data parallel, for the tests of data_parallel."""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise import DTensor, RankTensor, Shard, distribute_tensor
from shardwise.mesh import as_mesh
from tests.tensor.common import same

BATCH = 12


class Block(nn.Module):
    def __init__(self, width, again=False):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 7), nn.Linear(7, width)
        self.again = again

    def forward(self, x):
        return x + (checkpoint(self.inside, x, use_reentrant=False) if self.again else self.inside(x))

    def inside(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Uneven sizes, fewer rows than ranks, a 0-d parameter, one frozen, one that is tied and one that is never used."""

    def __init__(self, width=5, again=False):
        super().__init__()
        self.first = nn.Embedding(9, width)
        self.blocks = nn.Sequential(*(Block(width, again) for _ in range(3)))
        self.blocks[1].up.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(width, 9, bias=False)
        self.last.weight = self.first.weight
        self.narrow = nn.Linear(width, 1)
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens):
        x = self.blocks(self.first(tokens)) * self.scale * (1 + self.narrow.weight.square().mean())
        return self.last(x) * self.narrow(x).cos()


def stepped_in_backward(model):
    """`model`, each parameter of which is stepped as soon as its gradient is there."""
    for p in model.parameters():
        if p.requires_grad:
            optimizer = torch.optim.AdamW([p], lr=0.01)

            def step(p, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(step)
    return model


def build(**options):
    torch.manual_seed(3)
    return Net(**options).double()


def batch(step=0):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(9, (BATCH, 4), generator=generator), torch.randint(9, (BATCH, 4), generator=generator)


def loss_of(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


@functools.cache
def one_device(steps=3, accumulate=1):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            loss_of(model, *batch(step * accumulate + part)).backward()
        optimizer.step()
    return model


def own_part(value, data):
    """Each rank's rows of a batch, as plain tensors (of all ranks, where they are simulated)."""
    comm = as_mesh(data).comm
    parts = value.chunk(data.size())
    if comm.simulated:
        return RankTensor([parts[c[0]] for c in comm.coords_here()])
    return parts[comm.coords[0]]


def feed(value, data, typed):
    return distribute_tensor(value, data, [Shard(0)]) if typed else own_part(value, data)


def equal(model, want, where=""):
    for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        assert isinstance(p, DTensor), f"{name} {where}"
        same(p.grad, q.grad, f"gradient of {name} {where}")
        same(p, q, f"{name} {where}")


def train(model, data, typed=False, steps=3, accumulate=1, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            inputs = [feed(v, data, typed) for v in batch(step * accumulate + part)]
            if part < accumulate - 1:
                with model.no_sync():
                    loss_of(model, *inputs).backward()
            else:
                loss_of(model, *inputs).backward()
        optimizer.step()
    return model


def run_checks(mesh, checks):
    for check in checks:
        try:
            check(mesh)
        except Exception as error:
            raise AssertionError(f"{check.__name__}: {type(error).__name__}: {error}") from error
