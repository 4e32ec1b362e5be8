"""Train a vision transformer on a mesh, next to the same model on one device.

    python examples/vit.py                                 4 simulated ranks in this process
    torchrun --nproc-per-node 4 examples/vit.py            4 real processes (gloo)

"data" cuts the batch, "tensor" cuts heads and hidden layers by a plan, "image" cuts the rows of every picture, and
"zero" cuts parameters and optimizer state along with the batch. The model knows nothing of it.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from beside import beside, join, report
from torch import nn

import shardwise
from shardwise import Replicate, Shard, distribute_module, distribute_tensor
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SIZE, CLASSES, BATCH = 24, 5, 6


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.project(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self, patch=4, width=24, heads=4, layers=2):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.classify = nn.Parameter(torch.randn(1, 1, width))
        self.position = nn.Parameter(torch.randn(1 + (SIZE // patch) ** 2, width) * 0.1)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.classify.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


# ------------------------------------------------------------------ its layouts

PLAN = {
    "blocks.*.qkv": ColwiseParallel(parts=3),  # query, key and value are one layer: cut each of them
    "blocks.*.project": RowwiseParallel(),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
}

# name -> what the second of 2 x 2 axes does to images, whether the plan cuts the model over it, whether "dp" does
LAYOUTS = {
    "data x tensor": (Replicate(), True, False),
    "zero x tensor": (Replicate(), True, True),
    "data x image": (Shard(2), False, False),
    "zero x image": (Shard(2), False, True),
}


def make_mesh():
    if dist.is_initialized():
        return shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "mp"))
    return shardwise.simulate((2, 2), axis_names=("dp", "mp"))


def lay_out(model, mesh, layout):
    _, planned, zero = LAYOUTS[layout]
    distribute_module(parallelize_module(model, mesh, PLAN if planned else {}, axis="mp"), mesh)
    for module in model.modules() if zero else ():
        for name, param in module.named_parameters(recurse=False):
            mp = param.placements[1]
            whole = [Shard(dim) for dim in range(param.dim()) if not mp.is_shard(dim)]  # what "mp" leaves for "dp"
            laid = param.detach().redistribute(placements=[whole[0] if whole else Replicate(), mp])
            module.register_parameter(name, nn.Parameter(laid))
    return model


# ------------------------------------------------------------------ training, and the comparison


def pictures(step):
    """Noise with a bright square whose place is the class."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, 4 * label : 4 * label + 4, 4 * label : 4 * label + 4] += 3
    return images, labels


def train(model, steps, place):
    """The loss of every step, the last gradients and the parameters."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(steps):
        images, labels = place(*pictures(step))
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return [torch.tensor(losses), *(p.grad for p in model.parameters()), *(p.detach() for p in model.parameters())]


def compare(layout, mesh, steps=3):
    """The losses on the mesh, how far anything is from one device, and the bytes that a step moved."""
    torch.manual_seed(0)
    one = ViT().double()
    many = lay_out(copy.deepcopy(one), mesh, layout)

    def place(images, labels):
        laid = distribute_tensor(images, mesh, [Shard(0), LAYOUTS[layout][0]], src_data_rank=None)
        return laid, distribute_tensor(labels, mesh, [Shard(0), Replicate()], src_data_rank=None)

    return beside(lambda: train(one, steps, lambda *batch: batch), lambda: train(many, steps, place), steps)


def main():
    join()
    report((f"{layout:14}", compare(layout, make_mesh(), steps=8)) for layout in LAYOUTS)


if __name__ == "__main__":
    main()
