"""A small GPT and the layouts it is tested in."""

import torch
import torch.nn.functional as F
from torch import nn

from shardwise import Replicate, Shard, distribute_module, distribute_tensor

WIDTH, HEADS, LAYERS, CONTEXT, VOCABULARY, BATCH = 24, 6, 2, 10, 17, 5  # batch and context divide nothing evenly


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)  # a key bias has gradient zero: AdamW would amplify rounding
        self.project = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


COLUMN = {"query": 0, "key": 0, "value": 0, "up": 0}
ROW = {"project": 1, "down": 1}
R = Replicate()


def tensor_parallel(name, param):
    """The dim of a parameter that tensor parallelism cuts, or None."""
    layer, kind = name.split(".")[-2:]
    if layer in COLUMN:
        return 0
    if layer in ROW and kind == "weight":
        return 1
    return None


# layout name -> (mesh shape, placements of a parameter, placements of the batch)
LAYOUTS = {
    "data": ((4,), lambda n, p: [R], [Shard(0)]),
    "tensor": ((4,), lambda n, p: [R if tensor_parallel(n, p) is None else Shard(tensor_parallel(n, p))], [R]),
    "sequence": ((4,), lambda n, p: [R], [Shard(1)]),
    "zero": ((4,), lambda n, p: [Shard(0)], [Shard(0)]),
    "vocabulary": ((4,), lambda n, p: [Shard(0) if n in ("token.weight", "head.weight") else R], [R]),
    "data x tensor": (
        (2, 2),
        lambda n, p: [R, R if tensor_parallel(n, p) is None else Shard(tensor_parallel(n, p))],
        [Shard(0), R],
    ),
    "zero x tensor": (
        (2, 2),
        lambda n, p: [Shard(0), R if tensor_parallel(n, p) is None else Shard(tensor_parallel(n, p))],
        [Shard(0), R],
    ),
    "data x sequence": ((2, 2), lambda n, p: [R, R], [Shard(0), Shard(1)]),
}


def build(seed=0):
    torch.manual_seed(seed)
    return GPT().double()


def batch(seed=1):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=generator)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def lay_out(model, mesh, places):
    def partition(path, module, mesh):
        for name, param in list(module.named_parameters(recurse=False)):
            full = f"{path}.{name}" if path else name
            module.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), mesh, places(full, param))))

    return distribute_module(model, mesh, partition)


def step(model, tokens, targets, foreach=None, fused=None):
    """The loss, every gradient and every parameter after one step of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=foreach, fused=fused)
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    return loss.detach(), grads, dict(model.named_parameters())


def run(mesh, layout, **options):
    """One step of the laid-out model, as plain tensors."""
    _, places, where = LAYOUTS[layout]
    model = lay_out(build(), mesh, places)
    tokens, targets = (distribute_tensor(t, mesh, where) for t in batch())
    loss, grads, params = step(model, tokens, targets, **options)
    return (
        loss.full_tensor(),
        {n: g.full_tensor() for n, g in grads.items()},
        {n: p.detach().full_tensor() for n, p in params.items()},
    )


def assert_equal(mine, want, atol=1e-10):
    torch.testing.assert_close(mine[0], want[0], rtol=0, atol=atol)
    for name in want[1]:
        torch.testing.assert_close(
            mine[1][name], want[1][name], rtol=0, atol=atol, msg=lambda m, n=name: f"grad of {n}: {m}"
        )
        torch.testing.assert_close(
            mine[2][name], want[2][name].detach(), rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
