"""Where something happens to a rank: in forward, backward, an asynchronous move, a ZeRO step, a checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from shardwise import Replicate, Shard, checkpoint, distribute_tensor, sharded
from shardwise.parallel import ColwiseParallel, RowwiseParallel, data_parallel, parallelize_module
from shardwise.testing.faults.scene import (
    Happens,
    Scene,
    WrongValueError,
)


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 4))


def in_forward(scene: Scene, happens: Happens) -> None:
    """A module whose layers are cut over the ranks, with a hook in its forward."""
    _train_cut(scene, lambda model: model[2].register_forward_pre_hook(lambda *_: happens()))


def in_backward(scene: Scene, happens: Happens) -> None:
    """The same with a hook in its backward."""
    _train_cut(
        scene,
        lambda model: model[1].register_forward_hook(
            lambda module, given, out: out.register_hook(lambda grad: happens()) and None
        ),
    )


def _train_cut(scene: Scene, spoil: Callable[[nn.Sequential], object]) -> None:
    scene.join()
    mesh, model, plain, whole = scene.mesh(), _net(), _net(), scene.tensor()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    at = scene.seed % 3
    for step in range(3):
        if scene.faulty and step == at:
            spoil(model)
        x = distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None)
        _step(scene, model, x, plain, whole)


def _step(scene: Scene, model: nn.Module, x: torch.Tensor, plain: nn.Module, whole: torch.Tensor) -> None:
    for one, given in ((model, x), (plain, whole)):
        loss = (one(given) - 1).square().mean()
        loss.backward()
        if one is model:
            found = loss
    scene.check(found, loss)
    for one in (model, plain):
        with torch.no_grad():
            for param in one.parameters():
                assert param.grad is not None
                param.sub_(param.grad, alpha=0.1)
                param.grad = None


def in_zero_step(scene: Scene, happens: Happens) -> None:
    """Training with all state cut over the ranks (ZeRO 3), each on its part of the batch."""
    scene.join()
    mesh, model, plain, whole = scene.mesh(), _net(), _net(), scene.tensor()
    shard = ("optimizer", "gradients", "parameters")[scene.seed % 3]
    data_parallel(model, mesh, shard=shard, units=[model[0], model[2]] if shard == "parameters" else None)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    if scene.faulty:
        if scene.seed % 2:
            model[2].register_forward_pre_hook(lambda *_: happens())
        else:
            model[0].register_full_backward_pre_hook(lambda *_: happens())
    for _ in range(2):
        x = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        losses = [(one(given) - 1).square().mean() for one, given in ((model, x), (plain, whole))]
        scene.check(losses[0], losses[1])
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def in_async_move(scene: Scene, happens: Happens) -> None:
    """Two moves under way at once; it happens before the first, between them, or before the wait."""
    scene.join()
    mesh, whole, other = scene.mesh(), scene.tensor(), scene.tensor(number=1)
    x, y = (distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for t in (whole, other))
    if scene.faulty and scene.seed % 3 == 0:
        happens()
    a = x.redistribute(placements=[Replicate()], async_op=True)
    if scene.faulty and scene.seed % 3 == 1:
        happens()
    b = y.redistribute(placements=[Shard(1)], async_op=True)
    if scene.faulty and scene.seed % 3 == 2:
        happens()
    scene.check(a, whole)
    scene.check(b.redistribute(placements=[Shard(0)]), other)


class _Writer(dcp.FileSystemWriter):
    """Writes a checkpoint, and something happens meanwhile."""

    happens: Happens | None = None

    def write_data(self, plan, planner):  # type: ignore[no-untyped-def]
        if self.happens is not None:
            self.happens()
        return super().write_data(plan, planner)


def in_save(scene: Scene, happens: Happens) -> None:
    """A checkpoint that is being written. What is there afterwards must not load as if it were whole."""
    scene.join()
    mesh, whole, folder = scene.mesh(), scene.tensor(), scene.folder / "checkpoint"
    x = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    writer = _Writer(folder)
    writer.happens = happens if scene.faulty else None
    try:
        dcp.save({"x": x}, storage_writer=writer)
    finally:
        if (folder / ".metadata").exists():
            raise WrongValueError("a checkpoint that failed looks like a whole one")


class _Part:
    """A part of a state to which something happens while it is saved."""

    def __init__(self, happens: Happens | None) -> None:
        self.happens = happens

    def state_dict(self) -> dict[str, int]:
        if self.happens is not None:
            self.happens()
        return {"epoch": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing of it is kept."""


def in_our_save(scene: Scene, happens: Happens) -> None:
    """A checkpoint of `shardwise.checkpoint`: what failed leaves nothing under its name."""
    scene.join()
    x = distribute_tensor(scene.tensor(), scene.mesh(), [Shard(0)], src_data_rank=None)
    path = scene.folder / "ours"
    try:
        checkpoint.save(path, {"x": x, "part": _Part(happens if scene.faulty else None)}, async_=scene.seed % 2 == 1)
    finally:
        if path.exists():
            raise WrongValueError("a save that failed left a checkpoint")


def in_init_from_local_shards(scene: Scene, happens: Happens) -> None:
    """Ranks that tell each other which shards they hold; there is no mesh."""
    scene.join()
    for turn in range(2):
        if scene.faulty and turn == scene.seed % 2:
            happens()
        held = sharded.ShardMetadata([2 * scene.rank, 0], [2, 3], f"rank:{scene.rank}/cpu")
        shard = sharded.Shard(torch.full((2, 3), float(scene.rank)), held)
        sharded.init_from_local_shards([shard], 2 * scene.size, 3)


def in_reshard(scene: Scene, happens: Happens) -> None:
    """A ShardedTensor that changes its tiles and is gathered; there is no mesh."""
    scene.join()
    specs = [sharded.ChunkShardingSpec(dim, [f"rank:{i}/cpu" for i in range(scene.size)]) for dim in (0, 1)]
    tiles, out = sharded.ones(specs[0], 12, 6), torch.empty(12, 6) if scene.rank == 0 else None
    tiles.gather(0, out)
    if scene.faulty and scene.seed % 2:
        happens()
    tiles.reshard(specs[1])
    if scene.faulty and not scene.seed % 2:
        happens()
    tiles.gather(0, out)
    if out is not None:
        scene.check(out, torch.ones(12, 6))


PLACES = {
    "forward": in_forward, "backward": in_backward, "a ZeRO step": in_zero_step, "an async move": in_async_move,
    "a checkpoint save": in_save, "a save of ours": in_our_save,
    "init_from_local_shards": in_init_from_local_shards, "a reshard": in_reshard,
}  # fmt: skip
