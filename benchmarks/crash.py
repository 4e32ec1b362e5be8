"""Kills and damage: is the newest checkpoint always readable, and is every damaged file found?

    python benchmarks/crash.py                           # 500 kills, 200 damaged files
    python benchmarks/crash.py --kills 20 --damages 20   # the part that the tests run

A child process saves checkpoint after checkpoint and is killed (SIGKILL) at a random moment. Then `latest()` must load,
hold the values of its step, and be at least as new as the last save that the child saw end. A damaged file has a bit
flipped, its end cut off, or bytes overwritten; loading it must raise an error.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.progress import track

from shardwise import Shard, checkpoint, distribute_tensor, simulate
from shardwise.checkpoint import CheckpointError, Manager

ROWS = 4000


def state(step):
    mesh = simulate(4)
    x = torch.full((ROWS, 16), float(step))
    return {"a": distribute_tensor(x, mesh, [Shard(0)]), "b": distribute_tensor(x, mesh, [Shard(1)]), "n": step}


def saves(root, told):
    """The child: save until killed, and tell each step whose save ended."""
    manager = Manager(root, keep=2, sigterm=False)
    newest = manager.steps()
    step = newest[-1] if newest else 0
    os.write(told, bytes(8))
    while True:
        step += 1
        manager.save(step, state(step))
        os.write(told, step.to_bytes(8, "little"))


def one_kill(root, seconds):
    """Kill a child at a random moment of its first saves, which take `seconds` each; the last step that it told."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(ours)
            saves(root, theirs)
        finally:
            os._exit(1)
    os.close(theirs)
    os.read(ours, 8)
    time.sleep(random.uniform(0, 2.5 * seconds))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    said = b""
    while part := os.read(ours, 1 << 16):
        said += part
    os.close(ours)
    return int.from_bytes(said[-8:], "little") if said else 0


def kills(count, root):
    """How many kills left no readable newest checkpoint, or an older one than was there."""
    bad, known, root = 0, 0, Path(root)
    begin = time.perf_counter()
    for i in range(3):
        checkpoint.save(root.parent / "first", state(i))
    seconds = (time.perf_counter() - begin) / 3
    for _ in track(range(count), "kills"):
        known = max(known, one_kill(root, seconds))
        manager = Manager(root, keep=2, sigterm=False)
        into = state(0)
        found = manager.restore(into, default=0)
        wrong = found < known or (found and any(bool((into[k].full_tensor() != found).any()) for k in "ab"))
        bad += bool(wrong)
        known = max(known, found)
    return bad, known


def damages(count, folder):
    """How many damaged copies of a checkpoint loaded without an error."""
    path = Path(folder) / "whole"
    checkpoint.save(path, state(7))
    silent = 0
    for _ in track(range(count), "damaged files"):
        copy = Path(folder) / "copy"
        shutil.copytree(path, copy)
        file = random.choice(sorted(copy.iterdir()))
        content = bytearray(file.read_bytes())
        at = random.randrange(len(content))
        how = random.choice(("flip", "cut", "overwrite"))
        if how == "flip":
            content[at] ^= 1 << random.randrange(8)
        elif how == "cut":
            del content[at:]
        else:
            content[at : at + 64] = os.urandom(len(content[at : at + 64]))
        changed = bytes(content) != file.read_bytes()
        file.write_bytes(content)
        into = state(0)
        try:
            checkpoint.load(copy, into)
            silent += changed
        except CheckpointError:
            assert not into["a"].full_tensor().any() and into["n"] == 0  # untouched
        shutil.rmtree(copy)
    return silent


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--damages", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    random.seed(options.seed)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        bad, steps = kills(options.kills, Path(folder) / "kills")
        silent = damages(options.damages, folder)
    print(f"{options.kills} kills during {steps} saves: {bad} without a readable newest checkpoint")
    print(f"{options.damages} damaged files: {silent} loaded without an error")
    return int(bool(bad or silent))


if __name__ == "__main__":
    sys.exit(main())
