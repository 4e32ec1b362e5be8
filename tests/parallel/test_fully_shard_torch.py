"""The same program with torch's fully_shard and with ours, on real processes: the same losses and parameters."""

import inspect

import pytest
import torch
import torch.distributed.fsdp as theirs
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
import shardwise.parallel as ours
from shardwise.errors import MeshError
from tests.parallel.data_net import Block, batch
from tests.workers import device_mesh, run_ranks


class Net(nn.Module):
    """Uneven sizes, fewer rows than ranks, a tied parameter, one that is frozen and a block that is called twice."""

    def __init__(self, again=None):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.again = nn.Embedding(9, 5), again
        self.blocks = nn.Sequential(*(Block(5) for _ in range(3)))
        self.blocks[1].up.bias.requires_grad_(False)
        self.narrow = nn.Linear(5, 1)
        self.last = nn.Linear(5, 9, bias=False)
        self.last.weight = self.first.weight

    def forward(self, tokens):
        x = self.first(tokens)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x) if self.again is None else checkpoint(block, x, use_reentrant=self.again)
        return self.last(x) * self.narrow(x).cos()


def train(library, mesh, rank, program, dtype=torch.float64, again=None, **options):
    of_blocks, of_all = dict(options), dict(options)
    if "mp_policy" in options:
        chosen = options["mp_policy"]
        of_all["mp_policy"] = library.MixedPrecisionPolicy(**chosen)
        of_blocks["mp_policy"] = library.MixedPrecisionPolicy(**(chosen | {"output_dtype": None}))
    model = Net(again).to(dtype)
    for block in model.blocks:
        library.fully_shard(block, mesh=mesh, **of_blocks)
    library.fully_shard(model, mesh=mesh, **of_all)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    return program(model, optimizer, rank, mesh.size()), model


def loss_of(model, step, rank, size, rows=None):
    tokens, targets = (v.chunk(size)[rank][:rows] for v in batch(step))
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def plain_steps(model, optimizer, rank, size):
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, step, rank, size)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses += [loss.item(), (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()]
    return losses


def accumulating(model, optimizer, rank, size):
    losses = []
    for step in range(6):
        last = step % 3 == 2
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last)
        loss = loss_of(model, step, rank, size, rows=rank + 2)
        loss.backward()
        losses.append(loss.item())
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def tuned(model, optimizer, rank, size):
    blocks = list(model.blocks)
    for module in (model, *blocks):
        module.set_gradient_divide_factor(3.0)
    for one, other in zip(blocks, blocks[1:], strict=False):
        one.set_modules_to_forward_prefetch([other])
        other.set_modules_to_backward_prefetch([one])
    model.set_reshard_after_forward(False)
    losses = plain_steps(model, optimizer, rank, size)
    model.eval()
    with torch.no_grad():
        losses.append(loss_of(model, 9, rank, size).item())
    for module in (model, *blocks):
        module.reshard()
    return losses


def stepped_in_backward(model, optimizer, rank, size):
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters() if p.requires_grad}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(step)
    losses = []
    for i in range(3):
        loss = loss_of(model, i, rank, size)
        loss.backward()
        losses.append(loss.item())
    return losses


HALF = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
CASES = {
    "plain": (plain_steps, {}),
    "accumulating": (accumulating, {}),
    "tuned": (tuned, {}),
    "stepped in backward": (stepped_in_backward, {}),
    "kept whole": (plain_steps, {"reshard_after_forward": False}),
    "mixed": (plain_steps, {"mp_policy": HALF, "dtype": torch.float32}),
    "mixed, output": (plain_steps, {"mp_policy": HALF | {"output_dtype": torch.float32}, "dtype": torch.float32}),
    "mixed, accumulating": (accumulating, {"mp_policy": HALF, "dtype": torch.float32}),
    "recomputed": (plain_steps, {"again": False}),
}


def compare(mesh, rank, only=None):
    for name, (program, options) in CASES.items():
        if only is not None and name not in only:
            continue
        want, reference = train(theirs, mesh, rank, program, **options)
        got, model = train(ours, mesh, rank, program, **options)
        half = "mp_policy" in options
        close = {"rtol": 1e-5, "atol": 1e-6} if half else {"rtol": 1e-12, "atol": 1e-12}
        torch.testing.assert_close(got, want, msg=lambda m, name=name: f"{name}: {m}", **close)
        for (path, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert tuple(map(str, p.placements)) == tuple(map(str, q.placements)), f"{name}: {path}"
            where = lambda m, name=name, path=path: f"{name}: {path}: {m}"  # noqa: E731
            torch.testing.assert_close(p.full_tensor(), q.full_tensor(), msg=where, **close)
            torch.testing.assert_close(p.to_local(), q.to_local(), msg=where, **close)


def _on_two(rank, world_size):
    compare(device_mesh((world_size,), ("dp",)), rank)


def test_two_processes():
    run_ranks(_on_two, 2)


def _on_four(rank, world_size):
    compare(device_mesh((2, 2), ("copies", "parts")), rank, ("plain", "accumulating", "mixed"))


def test_copies_and_parts():
    run_ranks(_on_four, 4)


def test_every_method_is_here():
    """Those of torch's FSDPModule that change no value are taken; those that would say so."""
    options = inspect.signature(ours.fully_shard).parameters
    assert [name for name in inspect.signature(theirs.fully_shard).parameters if name not in options] == []
    public = [name for name in dir(theirs.FSDPModule) if not name.startswith("_")]
    assert [name for name in public if not hasattr(ours.FSDPModule, name)] == []
    model = ours.fully_shard(nn.Linear(2, 2), mesh=shardwise.simulate(2))
    model.set_force_sum_reduction_for_comms(True)
    model.set_post_optim_event(None)
    for name in ("set_custom_all_gather", "set_custom_reduce_scatter"):
        with pytest.raises(MeshError, match=f"{name}: .* has no process group"):
            getattr(model, name)(print)
        with pytest.raises(TypeError, match=f"{name}: comm must be a function that communicates, got 3"):
            getattr(model, name)(3)
