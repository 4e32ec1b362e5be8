"""What the examples share: a program run on one device and on a mesh, and how far apart the two are."""

import os

import torch.distributed as dist

import shardwise


def join():
    """Under torchrun, the group of its processes."""
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")


def beside(on_one, on_mesh, steps):
    """The losses on the mesh, how far anything is from one device, and the bytes that a step moved.

    Either trains for `steps` steps and returns tensors to compare, first of all the losses."""
    want = on_one()
    with shardwise.debug.ledger() as log:
        got = on_mesh()
    return got[0], max((a - b).abs().max().item() for a, b in zip(got, want, strict=True)), log.total_bytes // steps


def report(results):
    """Print a line for each name and what `beside` gave for it, and make sure that nothing is further apart."""
    say, worst = print if not dist.is_initialized() or dist.get_rank() == 0 else lambda *words: None, 0.0
    for name, (losses, difference, moved) in results:
        say(f"{name} loss {losses[0]:.4f} -> {losses[-1]:.4f}   {moved:10,} bytes a step")
        worst = max(worst, difference)
    say(f"largest difference to one device, over losses, gradients and parameters: {worst:.1e}")
    assert worst < 1e-10
