"""Fine-tune a frozen model with LoRA adapters on a mesh, next to one device.

    python examples/lora.py                                4 simulated ranks in this process
    torchrun --nproc-per-node 4 examples/lora.py           4 real processes (gloo)

An adapter adds a product of two thin matrices to a frozen linear layer. A plan cuts the base over "tp", and adapters
with it: the wide matrix of a pair as the layer, the thin one not. "zero" cuts the frozen base, which takes most of the
memory, over "dp" too. Only adapters have gradients and optimizer state.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from beside import beside, join, report
from torch import nn

import shardwise
from shardwise import Replicate, Shard, distribute_module, distribute_tensor
from shardwise.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

VOCABULARY, WIDTH, CONTEXT, BATCH = 47, 24, 10, 6


class LoRA(nn.Module):
    """A frozen linear layer and its adapter."""

    def __init__(self, base, rank=3, scale=2.0):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)

    def forward(self, x):
        return self.base(x) + self.scale * self.up(self.down(x))


class Model(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.RMSNorm(WIDTH),
                    "mix": nn.Linear(WIDTH, WIDTH),
                    "up": nn.Linear(WIDTH, 4 * WIDTH),
                    "down": nn.Linear(4 * WIDTH, WIDTH),
                }
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.token(tokens)
        for layer in self.layers:
            past = layer["mix"](x).cumsum(1) / torch.arange(1, tokens.shape[1] + 1).unsqueeze(-1)
            x = x + layer["down"](F.silu(layer["up"](layer["norm"](x + past))))
        return self.head(x)


def with_adapters(model):
    """Freeze the model and put an adapter on every linear layer of its blocks."""
    model.requires_grad_(False)
    for layer in model.layers:
        for name in ("mix", "up", "down"):
            layer[name] = LoRA(layer[name])
    return model


# ------------------------------------------------------------------ its layouts

COLUMNS, ROWS = ColwiseParallel(), RowwiseParallel()
PLAN = {
    "token": RowwiseParallel(input_layouts=Replicate()),
    "layers.*.up.base": COLUMNS, "layers.*.up.up": COLUMNS,
    "layers.*.down.base": ROWS, "layers.*.down.down": ROWS,
    "head": COLUMNS,
}  # fmt: skip
LAYOUTS = {"data x tensor": False, "zero x tensor": True}  # whether "dp" cuts the frozen base too


def make_mesh():
    if dist.is_initialized():
        return shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return shardwise.simulate((2, 2), axis_names=("dp", "tp"))


def lay_out(model, mesh, layout):
    distribute_module(parallelize_module(model, mesh, PLAN, axis="tp"), mesh)
    for module in model.modules() if LAYOUTS[layout] else ():
        for name, param in module.named_parameters(recurse=False):
            if not param.requires_grad and param.dim() == 2:
                tp = param.placements[1]
                laid = param.detach().redistribute(placements=[Shard(1 if tp.is_shard(0) else 0), tp])
                module.register_parameter(name, nn.Parameter(laid, requires_grad=False))
    return model


# ------------------------------------------------------------------ training, and the comparison


def train(model, batches, place):
    """The loss of every step, the last gradients of the adapters and all parameters."""
    tuned = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(tuned, lr=1e-2), []
    for rows in batches:
        tokens, targets = place(rows[:, :-1].contiguous()), place(rows[:, 1:].contiguous())
        with loss_parallel():
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    return [torch.tensor(losses), *(p.grad for p in tuned), *(p.detach() for p in model.parameters())]


def compare(layout, mesh, steps=3):
    """The losses on the mesh, how far anything is from one device, and the bytes that a step moved."""
    torch.manual_seed(0)
    one = with_adapters(Model().double()).double()
    many = lay_out(copy.deepcopy(one), mesh, layout)
    batches = [torch.randint(VOCABULARY, (BATCH, CONTEXT + 1)) % (1 + step % 7) for step in range(steps)]

    def place(rows):
        return distribute_tensor(rows, mesh, [Shard(0), Replicate()], src_data_rank=None)

    return beside(lambda: train(one, batches, lambda rows: rows), lambda: train(many, batches, place), steps)


def main():
    join()
    report((f"{layout:14}", compare(layout, make_mesh(), steps=8)) for layout in LAYOUTS)


if __name__ == "__main__":
    main()
