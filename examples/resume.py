"""A training run that kills itself in the middle of a save, and goes on, on another mesh, as if nothing had happened.

    python examples/resume.py            # simulated meshes of 4, then 3 x 2 ranks
    python examples/resume.py --steps 30

The losses of the killed and resumed run are those of a run on one device, dropout included.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

import shardwise
from shardwise import Replicate, Shard
from shardwise.checkpoint import Manager

MESHES = {"one": (1,), "four": (4,), "grid": (3, 2)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(24, 50), nn.Linear(50, 24)

    def forward(self, x):
        return self.down(F.dropout(F.gelu(self.up(x)), 0.2))


def build(shape):
    """The same model on any mesh: rows of the first layer over the last axis, columns of the second."""
    mesh = shardwise.simulate(shape)
    torch.manual_seed(0)
    model = Net().double()
    rest = [Replicate()] * (len(shape) - 1)
    for layer, dim in ((model.up, 0), (model.down, 1)):
        layer.weight = nn.Parameter(shardwise.distribute_tensor(layer.weight.detach(), mesh, [*rest, Shard(dim)]))
        place = Shard(0) if dim == 0 else Replicate()
        layer.bias = nn.Parameter(shardwise.distribute_tensor(layer.bias.detach(), mesh, [*rest, place]))
    return model, mesh


def train(shape, root, steps, die_at):
    """Train from the newest checkpoint on; print a loss a step."""
    model, mesh = build(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    manager = Manager(root, keep=2, every=2) if root else None
    start = manager.restore(state, default=0) if manager else 0
    for step in range(start + 1, steps + 1):
        rows = torch.randn(8, 24, dtype=torch.float64)  # drawn from the same stream on any mesh
        x = shardwise.distribute_tensor(rows, mesh, [Replicate()] * len(mesh.shape))
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, repr(loss.full_tensor().item()), flush=True)
        if step == die_at:  # the save of this step will not end
            os.posix_fallocate = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        if manager:
            manager.save(step, state)


def losses(*words):
    done = subprocess.run([sys.executable, __file__, "--worker", *map(str, words)], stdout=subprocess.PIPE, text=True)
    found = dict(line.split() for line in done.stdout.splitlines())
    return done.returncode, {int(step): float(loss) for step, loss in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--worker", nargs=4, metavar=("MESH", "ROOT", "STEPS", "DIE_AT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        mesh, root, steps, die_at = options.worker
        return train(MESHES[mesh], root if root != "-" else None, int(steps), int(die_at))
    console, half = Console(), options.steps // 4 * 2
    _, want = losses("one", "-", options.steps, 0)
    with tempfile.TemporaryDirectory() as root:
        code, first = losses("four", root, options.steps, half)
        console.print(f"on 4 ranks: killed (exit code {code}) while saving step {half}; steps 1 to {max(first)} done")
        _, second = losses("grid", root, options.steps, 0)
        console.print(f"on 3 x 2 ranks: went on at step {min(second)}, to step {max(second)}")
    got = first | second
    worst = max(abs(got[step] - want[step]) for step in want)
    console.print(f"largest difference of a loss from the run on one device: {worst:.1e}")
    return 0 if worst < 1e-12 and code == -signal.SIGKILL else 1


if __name__ == "__main__":
    sys.exit(main())
