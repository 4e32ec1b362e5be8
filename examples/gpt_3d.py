"""Train a GPT on 2-D and 3-D meshes, each next to the same model on one device.

    python examples/gpt_3d.py                              8 simulated ranks in this process
    torchrun --nproc-per-node 4 examples/gpt_3d.py         4 real processes (gloo)

The model knows nothing of meshes. A plan of styles cuts it over the axis "tp"; the batch is cut over "dp", the sequence
over "sp"; and "zero" cuts the parameters, their gradients and the optimizer's state over "dp" as well.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from beside import beside, join, report
from torch import nn

import shardwise
from shardwise import Replicate, Shard, distribute_module, distribute_tensor
from shardwise.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, loss_parallel, parallelize_module


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.key, self.project = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.head_width)) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary=61, context=16, width=32, heads=4, layers=2):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


# ------------------------------------------------------------------ its layouts

COLUMNS, ROWS, SEQUENCE_ROWS = ColwiseParallel(), RowwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
TENSOR = {
    "token": RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.query": COLUMNS, "blocks.*.key": COLUMNS, "blocks.*.value": COLUMNS, "blocks.*.project": ROWS,
    "blocks.*.up": COLUMNS, "blocks.*.down": ROWS,
    "head": COLUMNS,
}  # fmt: skip
SEQUENCE = TENSOR | {  # between the linear layers, what "tp" cuts is the sequence
    "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.norm?": SequenceParallel(), "blocks.*.project": SEQUENCE_ROWS, "blocks.*.down": SEQUENCE_ROWS,
    "norm": SequenceParallel(),
}  # fmt: skip

# name -> (axes and their sizes on 4 ranks, on 8 ranks), plan, whether "dp" cuts the parameters too
LAYOUTS = {
    "data x tensor": ({"dp": (2, 2), "tp": (2, 4)}, TENSOR, False),
    "zero x tensor": ({"dp": (2, 2), "tp": (2, 4)}, TENSOR, True),
    "zero x tensor, sequence-parallel norms": ({"dp": (2, 2), "tp": (2, 4)}, SEQUENCE, True),
    "data x sequence x tensor": ({"dp": (2, 2), "sp": (1, 2), "tp": (2, 2)}, TENSOR, False),
    "zero x sequence x tensor": ({"dp": (1, 2), "sp": (2, 2), "tp": (2, 2)}, TENSOR, True),
}


def make_mesh(layout, ranks):
    axes = LAYOUTS[layout][0]
    sizes = tuple(size[ranks == 8] for size in axes.values())
    if dist.is_initialized():
        return shardwise.init_device_mesh("cpu", sizes, mesh_dim_names=tuple(axes))
    return shardwise.simulate(sizes, axis_names=tuple(axes))


def lay_out(model, mesh, layout):
    _, plan, zero = LAYOUTS[layout]
    distribute_module(parallelize_module(model, mesh, plan, axis="tp"), mesh)
    for module in model.modules() if zero else ():
        for name, param in module.named_parameters(recurse=False):
            rest = param.placements[1:]
            whole = [Shard(dim) for dim in range(param.dim()) if Shard(dim) not in rest]  # what "tp" leaves for "dp"
            laid = param.detach().redistribute(placements=[whole[0] if whole else Replicate(), *rest])
            module.register_parameter(name, nn.Parameter(laid))
    return model


def lay_out_batch(rows, mesh):
    places = {"dp": Shard(0), "sp": Shard(1), "tp": Replicate()}
    return distribute_tensor(rows, mesh, [places[name] for name in mesh.mesh_dim_names], src_data_rank=None)


# ------------------------------------------------------------------ training, and the comparison


def train(model, batches, place):
    """The loss of every step, the last gradients and the parameters."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for rows in batches:
        logits, targets = model(place(rows[:, :-1].contiguous())), place(rows[:, 1:].contiguous())
        with loss_parallel():
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [torch.tensor(losses), *(p.grad for p in model.parameters()), *(p.detach() for p in model.parameters())]


def compare(layout, mesh, steps=3, **sizes):
    """The losses on the mesh, how far anything is from one device, and the bytes that a step moved."""
    torch.manual_seed(0)
    one = GPT(**sizes).double()
    many = lay_out(copy.deepcopy(one), mesh, layout)
    vocabulary, length = one.head.out_features, one.position.num_embeddings + 1
    batches = [torch.randint(vocabulary, (6, length)) % (1 + step % 7) for step in range(steps)]
    place = lambda rows: lay_out_batch(rows, mesh)  # noqa: E731
    return beside(lambda: train(one, batches, lambda rows: rows), lambda: train(many, batches, place), steps)


def main():
    join()
    ranks, results = dist.get_world_size() if dist.is_initialized() else 8, []
    for layout in LAYOUTS:
        mesh = make_mesh(layout, ranks)
        shape = " x ".join(f"{name}={size}" for name, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        results.append((f"{layout:40} {shape:20}", compare(layout, mesh, steps=5)))
    report(results)


if __name__ == "__main__":
    main()
