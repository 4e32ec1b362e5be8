"""Train a GPT in a pipeline whose stages are cut by tensor parallelism and ZeRO, next to the same model on one device.

    torchrun --nproc-per-node 4 examples/gpt_4d.py      4 processes (gloo): 2 stages, each on 2 of them
    torchrun --nproc-per-node 8 examples/gpt_4d.py      8 processes: 2 stages x 2 parts of the batch x 2 of the model
    torchrun --nproc-per-node 4 examples/gpt_4d.py 20   20 steps instead of 5

The pipeline is torch.distributed.pipelining, with the schedules 1F1B and interleaved 1F1B. A stage takes and gives
plain tensors. Inside, a plan of styles cuts its layers and the sequence over "tp", and `fully_shard` cuts parameters,
gradients and the optimizer's state over "dp".
"""

import copy
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from beside import beside, join, report
from gpt_3d import GPT
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

import shardwise
from shardwise import Replicate, Shard
from shardwise.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    fully_shard,
    parallelize_module,
)

SCHEDULES = {"1F1B": (Schedule1F1B, 1), "interleaved 1F1B": (ScheduleInterleaved1F1B, 2)}  # and the stages of a rank
SIZES = {4: [(2, 1, 2), (2, 2, 1)], 8: [(2, 2, 2)]}  # by the number of ranks: of "pp", "dp" and "tp"
MICRO_BATCHES = 4

COLUMNS, ROWS = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
PLAN = {
    "blocks": PrepareModuleInputOutput(  # inside, each rank has a part of the sequence
        input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_input=True,
        output_layouts=Shard(1), desired_output_layouts=Replicate(),
    ),
    "blocks.*.norm?": SequenceParallel(),
    "blocks.*.query": COLUMNS, "blocks.*.key": COLUMNS, "blocks.*.value": COLUMNS, "blocks.*.project": ROWS,
    "blocks.*.up": COLUMNS, "blocks.*.down": ROWS,
}  # fmt: skip


class Stage(nn.Module):
    """Some blocks of a GPT; in the first stage also its embeddings, in the last its head."""

    def __init__(self, gpt, index, stages):
        super().__init__()
        blocks = len(gpt.blocks) // stages
        self.first, self.last = index == 0, index == stages - 1
        self.blocks = gpt.blocks[index * blocks : (index + 1) * blocks]
        if self.first:
            self.token, self.position = gpt.token, gpt.position
        if self.last:
            self.norm, self.head = gpt.norm, gpt.head

    def forward(self, x):
        if self.first:
            x = self.token(x) + self.position.weight[: x.shape[1]]
        x = self.blocks(x)
        return self.head(self.norm(x)) if self.last else x


def lay_out(stage, mesh):
    parallelize_module(stage, mesh["tp"], PLAN)
    for block in stage.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(stage, mesh=mesh["dp"])


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gradients_and_parameters(modules):
    params = [p for module in modules for p in module.parameters()]
    return [*(p.grad for p in params), *(p.detach() for p in params)]


def train_one(gpt, batches, compared):
    optimizer, losses = torch.optim.AdamW(gpt.parameters(), lr=1e-2), torch.zeros(len(batches), dtype=torch.float64)
    for step, rows in enumerate(batches):
        optimizer.zero_grad()
        loss = loss_of(gpt(rows[:, :-1]), rows[:, 1:])
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
    return [losses, *gradients_and_parameters(compared)]


def train_pipeline(stages, indices, count, schedule, batches, mesh):
    pp, dp = mesh["pp"], mesh["dp"]
    first, last = 0 in indices, count - 1 in indices
    parts = [
        PipelineStage(stage, index, count, torch.device("cpu"), group=pp.get_group())
        for stage, index in zip(stages, indices, strict=True)
    ]
    run = schedule(parts if len(parts) > 1 else parts[0], MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.parameters()], lr=1e-2)
    losses = torch.zeros(len(batches), dtype=torch.float64)
    for step, rows in enumerate(batches):
        mine, found = rows.chunk(dp.size())[dp.get_local_rank()], [] if last else None
        optimizer.zero_grad()
        run.step(*[mine[:, :-1].contiguous()][:first], target=mine[:, 1:] if last else None, losses=found)
        optimizer.step()
        losses[step] = sum(loss.item() for loss in found or ()) / MICRO_BATCHES
    dist.all_reduce(losses)  # the ranks of the last stage have them
    return [losses / mesh["dp"].size() / mesh["tp"].size(), *gradients_and_parameters(stages)]


def compare(name, mesh, steps=3):
    """The losses in the pipeline, how far anything on this rank is from one device, and the bytes that a step moved."""
    schedule, each = SCHEDULES[name]
    count = each * mesh["pp"].size()
    torch.manual_seed(0)
    one = GPT(layers=4).double()
    indices = range(mesh["pp"].get_local_rank(), count, mesh["pp"].size())
    stages = [lay_out(Stage(copy.deepcopy(one), i, count), mesh) for i in indices]
    batches = [torch.randint(61, (8, 17)) % (1 + step % 7) for step in range(steps)]
    compared = [Stage(one, i, count) for i in indices]
    return beside(
        lambda: train_one(one, batches, compared),
        lambda: train_pipeline(stages, indices, count, schedule, batches, mesh),
        steps,
    )


def main(steps):
    join()
    found = []
    for sizes in SIZES[dist.get_world_size()]:
        mesh = shardwise.init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))
        for name in SCHEDULES:
            shape = " x ".join(f"{axis}={size}" for axis, size in zip(mesh.mesh_dim_names, sizes, strict=True))
            found.append((f"{name:20} {shape:20}", compare(name, mesh, steps)))
    report(found)


if __name__ == "__main__":
    main(steps=int(sys.argv[1]) if len(sys.argv) > 1 else 5)
