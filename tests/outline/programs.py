"""Programs that run on any mesh with the axes "dp" and "tp": simulated, of processes, or outlined. Each is a function
that lays something out on the mesh and gives a step to run."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import Partial, Replicate, Shard, distribute_module, distribute_tensor
from shardwise.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    combine,
    data_parallel,
    dispatch,
    fully_shard,
    grouped_linear,
    input_reshard,
    loss_parallel,
    parallelize_module,
    sequence_exchange,
)


def numbers(*shape, dtype=torch.float32):
    return torch.linspace(-1, 1, max(torch.Size(shape).numel(), 1))[: torch.Size(shape).numel()].view(shape).to(dtype)


def laid(mesh, *placements, shape, dtype=torch.float32):
    return distribute_tensor(numbers(*shape, dtype=dtype), mesh, placements, src_data_rank=None)


class Block(nn.Module):
    def __init__(self, width=16, heads=4):
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.project, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 40), nn.Linear(40, width)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (
            f(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers=2, recompute=False, dropout=0.0):
        super().__init__()
        self.token, self.blocks = nn.Embedding(37, 16), nn.Sequential(*(Block() for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 37, bias=False)
        self.recompute, self.dropout = recompute, dropout

    def forward(self, tokens):
        x = F.dropout(self.token(tokens), self.dropout)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


TENSOR = {"token": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel()}
TENSOR |= {f"blocks.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "up")}
TENSOR |= {f"blocks.*.{name}": RowwiseParallel() for name in ("project", "down")}
SEQUENCE = TENSOR | {
    "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.norm?": SequenceParallel(), "norm": SequenceParallel(),
    "blocks.*.project": RowwiseParallel(output_layouts=Shard(1)), "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
}  # fmt: skip


def _trained(model, mesh, batch, optimizer=torch.optim.AdamW, clip=None, loss_cut=False):
    tokens = distribute_tensor(
        (torch.arange(batch * 9) % 37).view(batch, 9), mesh, _cut_batch(mesh), src_data_rank=None
    )
    optimizer = optimizer(model.parameters(), lr=1e-2)

    def step():
        with loss_parallel() if loss_cut else torch.enable_grad():
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _cut_batch(mesh):
    return [Shard(0) if name == "dp" else Replicate() for name in mesh.mesh_dim_names]


# -- the programs ------------------------------------------------------------------------------------------------------
def tensor_parallel(mesh):
    model = distribute_module(parallelize_module(GPT(), mesh, TENSOR, axis="tp"), mesh)
    return _trained(model, mesh, 6, loss_cut=True)


def sequence_parallel(mesh):
    model = distribute_module(parallelize_module(GPT(), mesh, SEQUENCE, axis="tp"), mesh)
    return _trained(model, mesh, 5)


def _of_plain_tensors(mesh, resharded):
    """Tensor parallelism as most scripts have it: tensors between the modules are plain ones. What query, key and value
    projections send back is one exchange."""
    styles = {name.removeprefix("blocks.*."): style for name, style in TENSOR.items() if name.startswith("blocks")}
    model = nn.Sequential(*(parallelize_module(Block(), mesh["tp"], styles) for _ in range(2)))
    if resharded:
        for block in model:
            input_reshard(block.up, mesh["tp"], 0)
    fully_shard(model, mesh=mesh["dp"])
    optimizer, x = torch.optim.AdamW(model.parameters(), lr=1e-2), numbers(4, 7, 16)

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain_between_modules(mesh):
    return _of_plain_tensors(mesh, False)


def inputs_resharded(mesh):
    return _of_plain_tensors(mesh, True)


def recomputed_in_bfloat16(mesh):
    model = distribute_module(parallelize_module(GPT(recompute=True, dropout=0.1), mesh, TENSOR, axis="tp"), mesh)
    step = _trained(model, mesh, 6)

    def autocast():
        with torch.autocast("cpu", torch.bfloat16):
            step()

    return autocast


def ddp(mesh):
    return _trained(data_parallel(GPT(), mesh["dp"]), mesh["dp"], 6)


def zero1(mesh):
    return _trained(data_parallel(GPT(), mesh["dp"], "optimizer"), mesh["dp"], 6, torch.optim.SGD)


def zero2(mesh):
    return _trained(data_parallel(GPT(), mesh["dp"], "gradients", reduce_dtype=torch.bfloat16), mesh["dp"], 5)


def zero3(mesh):
    model = data_parallel(GPT(3), mesh["dp"], "parameters", unit_bytes=1)
    return _trained(model, mesh["dp"], 6, clip=1.0)


def fully_sharded(mesh):
    model = GPT(3)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return _trained(fully_shard(model, mesh=mesh["dp"]), mesh["dp"], 6, clip=1.0)


def zero_and_tensor(mesh):
    model = data_parallel(parallelize_module(GPT(), mesh, TENSOR, axis="tp"), mesh["dp"], "parameters", unit_bytes=1)
    tokens = (torch.arange(3 * 9) % 37).view(3, 9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = distribute_tensor(tokens, mesh, [Shard(0), Replicate()], src_data_rank=None)

    def step():
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def moves(mesh):
    ways = [
        (Shard(0), Shard(1)), (Shard(0), Shard(0)), (Replicate(), Shard(0)), (Shard(1), Replicate()),
        (Replicate(), Replicate()), (Shard(1), Shard(0)), (Partial(), Shard(1)), (Partial(), Partial()),
    ]  # fmt: skip

    def step():
        for shape in ((17, 6), (3, 5), (1, 9), (0, 4)):
            for before in ways:
                for after in ways:
                    x = laid(mesh, *before, shape=shape).requires_grad_()
                    y = x.redistribute(placements=after)
                    if not any(p.is_partial() for p in after):
                        y.backward(y.detach())

    return step


def operators(mesh):
    def step():
        x = laid(mesh, Shard(0), Shard(1), shape=(7, 10)).requires_grad_()
        w = laid(mesh, Replicate(), Shard(0), shape=(10, 9)).requires_grad_()
        y = (x @ w).softmax(1) + x.cumsum(0).sum(1, keepdim=True)
        (F.layer_norm(y, (9,)) * y.amax(0)).std().backward()
        image = laid(mesh, Shard(0), Shard(3), shape=(3, 2, 6, 13)).requires_grad_()
        kernel = laid(mesh, Replicate(), Replicate(), shape=(4, 2, 3, 3)).requires_grad_()
        F.max_pool2d(F.conv2d(image, kernel, padding=1), 2).sum().backward()
        table = laid(mesh, Replicate(), Shard(0), shape=(11, 4)).requires_grad_()
        F.embedding((torch.arange(6) % 11), table).pow(2).sum().backward()
        torch.cat([x[1:3], x.flip(0)[:2]]).reshape(-1, 5).sum().backward()

    return step


def attention_ring(mesh):
    def step():
        q, k, v = (laid(mesh, Shard(0), Shard(2), shape=(3, 2, 13, 4)).requires_grad_() for _ in range(3))
        for way in ("ring", "gather", "auto"):
            with sequence_exchange(way):
                F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    return step


def experts(mesh):
    up = nn.Parameter(laid(mesh, Replicate(), Shard(0), shape=(8, 6, 4)))
    tokens = laid(mesh, Shard(0), Shard(0), shape=(32, 4)).requires_grad_()
    chosen = distribute_tensor(
        (torch.arange(64) % 8).view(32, 2), mesh, [Shard(0), Shard(0)], src_data_rank=None
    )  # each rank of 4 and of 8 chooses every expert equally often

    def step():
        routed = dispatch(tokens, chosen, up)
        y = combine(routed, grouped_linear(routed, routed.rows, up))
        y.sum().backward()

    return step


PROGRAMS = {
    program.__name__: program
    for program in (
        tensor_parallel, sequence_parallel, recomputed_in_bfloat16, ddp, zero1, zero2, zero3, fully_sharded,
        zero_and_tensor, moves, operators, attention_ring, experts, plain_between_modules, inputs_resharded,
    )
}  # fmt: skip


def entries(program, mesh, steps=2):
    """What two steps of a program communicate: for each entry all that a ledger has."""
    torch.manual_seed(0)
    step = program(mesh)
    with shardwise.debug.ledger() as log:
        for _ in range(steps):
            step()
    return [(e.op, e.kind, e.axis, e.backward, e.reason, e.source, e.bytes) for e in log if e.op != "random"]
