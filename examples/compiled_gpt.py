"""Train a small GPT eagerly, captured and compiled, on simulated ranks: the same losses, and how long a step takes.

    python examples/compiled_gpt.py                    4 simulated ranks, replayed
    python examples/compiled_gpt.py --compile          torch.compile with Inductor beside it (needs g++; takes a minute)
    python examples/compiled_gpt.py --explain          what the captured step communicates
"""

import argparse
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from train_gpt import GPT, lay_out, lay_out_batch

import shardwise

WORDS, LENGTH = 64, 32


def make_step(mesh):
    """A model and its training step; the same weights at every call."""
    torch.manual_seed(0)
    model = lay_out(GPT(WORDS, LENGTH, 64, 4, 2), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def train(step, mesh, steps):
    """Losses, and the seconds of the quickest step."""
    torch.manual_seed(1)
    losses, best = [], float("inf")
    for _ in track(range(steps), "training", transient=True):
        tokens = torch.randint(WORDS, (8, LENGTH + 1))
        batch = lay_out_batch((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), mesh)
        start = time.perf_counter()
        loss = step(*batch)
        best = min(best, time.perf_counter() - start)
        losses.append(loss.full_tensor().item())
    return losses, best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compile", action="store_true", help="with Inductor too")
    parser.add_argument("--explain", action="store_true", help="print what the captured step communicates")
    options = parser.parse_args()
    mesh = shardwise.simulate((2, 2), axis_names=("dp", "tp"))
    captured = shardwise.capture(make_step(mesh))
    steps = {"eager": make_step(mesh), "captured": captured}
    if options.compile:
        steps["compiled"] = torch.compile(make_step(mesh))
    table = Table("step", "last loss", "largest difference", "quickest step")
    first = None
    for name, step in steps.items():
        losses, best = train(step, mesh, options.steps)
        first = first or losses
        difference = max(abs(a - b) for a, b in zip(first, losses, strict=True))
        table.add_row(name, f"{losses[-1]:.6f}", f"{difference:.1e}", f"{best * 1e3:.1f} ms")
    Console().print(table)
    if options.explain:
        Console().print(captured.explain(), highlight=False)
    return first, losses


if __name__ == "__main__":
    main()
