"""The estimated memory is what a rank's tensors take: two processes run each configuration with every storage counted
after every op, and the same rank is played."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import DTensor, Replicate, distribute_module, outline
from shardwise.forecast.memory import rounded
from shardwise.parallel import (
    ColwiseParallel,
    MixedPrecisionPolicy,
    RowwiseParallel,
    data_parallel,
    fully_shard,
    parallelize_module,
)
from tests.outline.programs import Block
from tests.workers import device_mesh, run_ranks

AXES = ("dp", "tp")
WIDTH, WORDS, LENGTH = 64, 500, 48


class Net(nn.Module):
    def __init__(self, layers=2, recompute=False):
        super().__init__()
        self.token, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks, self.recompute = nn.ModuleList(Block(WIDTH) for _ in range(layers)), recompute

    def forward(self, tokens):
        x = self.token(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def data(mesh, shard, batch=4, recompute=False, dtype=None):
    return data_parallel(Net(recompute=recompute), mesh["dp"], shard, compute_dtype=dtype, unit_bytes=1), batch


def sharded(mesh, batch=4, recompute=False, dtype=None, after=True):
    model, policy = Net(recompute=recompute), MixedPrecisionPolicy(param_dtype=dtype)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=after)
    return fully_shard(model, mesh=mesh["dp"], mp_policy=policy), batch


def tensor(mesh, batch=4, recompute=False):
    styles = {f"blocks.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "up")}
    styles |= {f"blocks.*.{name}": RowwiseParallel() for name in ("project", "down")}
    model = parallelize_module(Net(recompute=recompute), mesh["tp"], styles)
    return distribute_module(model, mesh["tp"]), batch


CONFIGURATIONS = {  # the shape of the mesh, and what is built on it
    "copies": ((2, 1), data, {"shard": "none"}),
    "copies, recomputed": ((2, 1), data, {"shard": "none", "recompute": True}),
    "zero 1": ((2, 1), data, {"shard": "optimizer"}),
    "zero 2": ((2, 1), data, {"shard": "gradients", "batch": 8}),
    "zero 3": ((2, 1), data, {"shard": "parameters"}),
    "zero 3, bfloat16": ((2, 1), data, {"shard": "parameters", "dtype": torch.bfloat16}),
    "zero 3, recomputed": ((2, 1), data, {"shard": "parameters", "recompute": True, "batch": 8}),
    "fully_shard": ((2, 1), sharded, {}),
    "fully_shard, bfloat16": ((2, 1), sharded, {"dtype": torch.bfloat16, "recompute": True}),
    "fully_shard, kept": ((2, 1), sharded, {"after": False}),
    "tensor parallel": ((1, 2), tensor, {}),
    "tensor parallel, recomputed": ((1, 2), tensor, {"recompute": True, "batch": 8}),
}


def step_of(mesh, build, settings):
    model, batch = build(mesh, **settings)
    tokens = (torch.arange(batch * LENGTH) % WORDS).view(batch, LENGTH)
    if build is tensor:
        tokens = DTensor.from_local(tokens, mesh["tp"], [Replicate()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Counted(TorchDispatchMode):
    """Inside, the storages of all tensors that an op takes or gives are known; while it is `counting`, `peak` is the
    most that they take."""

    def __init__(self):
        super().__init__()
        self.peak, self.counting, self._known = 0, False, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        wrapped = next((t for t in types if issubclass(t, DTensor)), None)
        if wrapped is not None:
            with self:
                return wrapped.__torch_dispatch__(func, types, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        for x in tree_iter((args, kwargs, out)):
            if isinstance(x, torch.Tensor) and not isinstance(x, DTensor) and x.device.type != "meta":
                storage = x.untyped_storage()
                key = storage._cdata
                if key not in self._known:
                    self._known[key] = weakref.ref(storage, lambda _, key=key: self._known.pop(key, None))
        if self.counting:
            alive = [storage for ref in self._known.values() if (storage := ref()) is not None]
            self.peak = max(self.peak, sum(rounded(storage.nbytes()) for storage in alive))
        return out


def counted(rank, world_size):
    """The peak of each configuration, on a process."""
    peaks = {}
    for name, (shape, build, settings) in CONFIGURATIONS.items():
        with Counted() as count:
            step = step_of(device_mesh(shape, AXES), build, settings)
            step()  # the optimizer's state is there from here on
            gc.collect()
            count.counting = True
            step()
        peaks[name] = count.peak
        del step
    return peaks


@pytest.fixture(scope="module")
def processes():
    return run_ranks(counted, 2, timeout=300)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_peak_is_that_of_a_process(name, processes):
    shape, build, settings = CONFIGURATIONS[name]
    rank = list(CONFIGURATIONS).index(name) % 2
    with outline(shape, axis_names=AXES, play=rank) as mesh:
        estimated = shardwise.estimate(step_of(mesh, build, settings), warmup=1).memory.peak
    assert estimated == pytest.approx(processes[rank][name], rel=0.001)
