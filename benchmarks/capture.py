"""Captured and compiled steps beside eager ones: plain torch, torch's DTensor and shardwise in one run, on the CPU.

    python benchmarks/capture.py                        a mesh of one rank: a transformer block, and a GPT's step
    python benchmarks/capture.py --compile              compiled ones too (Inductor; some minutes)
    python benchmarks/capture.py --compile-time         how long compilers take for the GPT's step, caches empty
    python benchmarks/capture.py --shapes               1,000 steps over 8 shapes: how many captures, and are bits equal
    python benchmarks/capture.py --processes 4          tensor parallel, ZeRO 3 on gloo processes, eager and captured;
                                                        tensor parallel also in plain torch, by hand
    python benchmarks/capture.py --processes 4 --bits 100     are losses, gradients and parameters of all ranks equal
    python benchmarks/capture.py --processes 4 --bits 10 --compile      the same for steps that Inductor compiled

Peers take turns, and the best of many slices counts, because machines are noisy. Ratios are to plain torch, same run.
"plain compiled" is `torch.compile(step)` of the same step: forward, backward and optimizer, as for shardwise.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from _timing import Missing, comparison, warm
from by_hand import cut_by_hand
from gpt_step import GPT
from overhead import Block
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise.parallel import data_parallel


def library_of(peer):
    if peer.startswith("plain"):
        return None
    return shardwise if peer.startswith("shardwise") else __import__("torch.distributed.tensor", fromlist=["tensor"])


def finished(peer, step):
    """The step as the peer runs it: as it is, captured, or compiled."""
    if "captured" in peer:
        return shardwise.capture(step)
    return torch.compile(step) if "compiled" in peer else step


def block_step(peer, mesh):
    """Forward and backward of a small transformer block."""
    torch.manual_seed(0)
    block, x, library = Block(), torch.randn(2, 16, 32), library_of(peer)
    if library is not None:
        block = library.distribute_module(block, mesh)
        x = library.distribute_tensor(x, mesh, [library.Shard(0)])

    def step(x):
        block.zero_grad()
        loss = block(x).sum()
        loss.backward()
        return loss

    run = finished(peer, step)
    return lambda: run(x)


def training_step(model, optimizer):
    """One step on a batch, as a function."""

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def gpt_step(peer, mesh, layers=4, width=256):
    """A whole step of a GPT with AdamW."""
    torch.manual_seed(0)
    model, library = GPT(512, 64, width, 4, layers), library_of(peer)
    tokens = torch.randint(512, (2, 65))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if library is not None:
        model = library.distribute_module(model, mesh)
        inputs, targets = (library.distribute_tensor(t, mesh, [library.Shard(0)]) for t in (inputs, targets))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    run = finished(peer, training_step(model, optimizer))
    return lambda: run(inputs, targets)


def on_one_rank(options):
    console = Console(width=None if sys.stdout.isatty() else 200)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=Path(folder, "store").as_uri(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        peers = ["plain", "DTensor", "shardwise", "shardwise captured"]
        if options.compile:
            peers += ["plain compiled", "DTensor compiled", "shardwise compiled"]
        if options.compile_time:
            console.print(_compile_times(mesh))
        elif options.shapes:
            console.print(_mixed_shapes(mesh))
        else:
            _time_steps(peers, mesh, options, console)
        dist.destroy_process_group()


def _time_steps(peers, mesh, options, console):
    rows = {}
    for name, program in {"transformer block": block_step, "GPT 4 x 256 step": gpt_step}.items():
        with console.status(name):
            makers = {peer: lambda peer=peer, program=program: program(peer, mesh) for peer in peers}
            rows[name] = warm(makers, repeats=options.repeats, slice_seconds=0.05)
        if options.compile:
            ours, plain = rows[name]["shardwise compiled"], rows[name]["plain compiled"]
            console.print(f"{name}: shardwise compiled / plain compiled {ours / plain:.2f}x")
    console.print(comparison("A mesh of one rank", rows, unit="us", base="plain"))
    first, second = _first_steps(mesh)
    console.print(f"first captured step: {first:.1f} eager steps; the first replay, which makes the code: {second:.1f}")


def _compile_times(mesh):
    """How long the first three steps take with Inductor, its cache empty: in the third everything is compiled. The
    compiler itself is loaded before."""
    torch.compile(lambda x: x + 1)(torch.ones(3))
    took = {}
    for peer in ("plain compiled", "shardwise compiled", "plain compiled", "shardwise compiled"):
        torch.compiler.reset()
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
            call = gpt_step(peer, mesh)
            seconds = _seconds(lambda call=call: [call() for _ in range(3)])
            took[peer] = min(seconds, took.get(peer, seconds))
    plain, ours = took.values()
    return f"compile time of the GPT step: plain {plain:.1f} s, shardwise {ours:.1f} s ({ours / plain:.2f}x)"


def _mixed_shapes(mesh, steps=1000):
    """Two small models that begin alike, one trained eagerly and one captured, with batches of eight shapes."""
    shapes = [(1, 8), (2, 8), (3, 8), (2, 16), (5, 16), (1, 24), (4, 24), (3, 31)]
    trained = {}
    for peer in ("shardwise", "shardwise captured"):
        torch.manual_seed(0)
        model = shardwise.distribute_module(GPT(64, 32, 32, 2, 1), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(inputs, targets, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            return loss.detach()

        run, losses = finished(peer, step), []
        for number in range(steps):
            batch, length = shapes[number * 5 % 8]
            tokens = torch.randint(64, (batch, length + 1), generator=torch.Generator().manual_seed(number))
            given = (shardwise.distribute_tensor(t.contiguous(), mesh, [shardwise.Shard(0)]) for t in _shifted(tokens))
            losses.append(run(*given).full_tensor())
        trained[peer] = [*losses, *(p.full_tensor() for p in model.parameters())]
    same = all(map(torch.equal, *trained.values()))
    return f"{steps} steps over 8 shapes: {run!r}; losses and parameters equal to the eager run: {same}"


def _shifted(tokens):
    return tokens[:, :-1], tokens[:, 1:]


def _first_steps(mesh):
    """How many eager steps the capturing one takes, and the first replay; plans are warm."""
    eager = gpt_step("shardwise", mesh)
    for _ in range(3):
        eager()
    best = min(_seconds(eager) for _ in range(5))
    call = gpt_step("shardwise captured", mesh)
    return _seconds(call) / best, _seconds(call) / best


def _seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# -- processes ------------------------------------------------------------------------------------------------------
BATCHES = 1, 2  # sequences for each rank
CUTS = {"qkv.0": 0, "qkv.1": 0, "qkv.2": 0, "project": 1, "up": 0, "down": 1}


def distributed(kind, mesh):
    torch.manual_seed(0)
    model = GPT(512, 64, 256, 4, 4).to(mesh.device_type)
    if kind == "ZeRO 3":
        return data_parallel(model, mesh, "parameters"), [shardwise.Shard(0)]

    def cut(name, layer, mesh):
        for path, dim in CUTS.items():
            if name.endswith(path):
                for which in ("weight", "bias"):
                    if which == "weight" or dim == 0:
                        whole = getattr(layer, which).detach()
                        value = shardwise.distribute_tensor(whole, mesh, [shardwise.Shard(dim)])
                        setattr(layer, which, nn.Parameter(value))

    return shardwise.distribute_module(model, mesh, cut), [shardwise.Replicate()]


def rank_step(kind, how, mesh, batch=2):
    """A call that makes one step on this rank, and the model. There are `batch` sequences for each rank of the mesh."""
    model, places = distributed(kind, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    step = training_step(model, optimizer)
    torch.manual_seed(1)
    tokens = torch.randint(512, (batch * mesh.size(), 65), device=mesh.device_type)
    batch = [shardwise.distribute_tensor(t.contiguous(), mesh, places) for t in _shifted(tokens)]
    if how == "compiled":
        step = torch.compile(step, fullgraph=True)
    elif how != "eager":
        passes = ("aliases", "merge", "inverse", "unused", *(["overlap"] if "overlap" in how else []))
        step = shardwise.capture(step, passes=passes, whole=True)
    return lambda: step(*batch), model


def by_hand_step(mesh, batch):
    """The step with tensor parallelism in plain torch, by hand."""
    torch.manual_seed(0)
    model = cut_by_hand(GPT(512, 64, 256, 4, 4), mesh.get_local_rank(), mesh.size())
    step = training_step(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    torch.manual_seed(1)
    data = [t.contiguous() for t in _shifted(torch.randint(512, (batch * mesh.size(), 65)))]
    return lambda: step(*data)


def compare_bits(rank, mesh, steps, how, queue):
    """Train eagerly and captured or compiled: what each rank has, bit for bit."""
    for kind in ("tensor parallel", "ZeRO 3"):
        (eager, one), (other, two) = (rank_step(kind, name, mesh) for name in ("eager", how))
        apart, equal = 0.0, True
        for _ in range(steps):
            losses = eager().to_local(), other().to_local()
            pairs = [
                losses,
                *((a.detach().to_local(), b.detach().to_local()) for a, b in zip(one.parameters(), two.parameters())),
            ]
            equal = equal and all(torch.equal(*pair) for pair in pairs)
            apart = max([apart, *(float((a - b).abs().max()) for a, b in pairs if a.numel())])
        everyone = [None] * mesh.size()
        dist.all_gather_object(everyone, (equal, apart))
        if rank == 0:
            queue.put((kind, everyone))


def rank_main(rank, world_size, store, options, queue):
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", init_method=Path(store).as_uri(), rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    if options.bits:
        compare_bits(rank, mesh, options.bits, "compiled" if options.compile else "captured", queue)
    else:
        time_ranks(rank, mesh, options, queue)
    dist.barrier()
    dist.destroy_process_group()


def time_ranks(rank, mesh, options, queue):
    for kind, batch in product(("tensor parallel", "ZeRO 3"), BATCHES):
        calls = {"by hand": by_hand_step(mesh, batch)} if kind == "tensor parallel" else {}
        for how in ("eager", "captured", "captured, overlap", *(["compiled"] if options.compile else [])):
            calls[how], _ = rank_step(kind, how, mesh, batch)
        for call in calls.values():
            for _ in range(3):
                call()
        best = dict.fromkeys(calls, float("inf"))
        for _ in range(options.repeats):
            for how, call in calls.items():
                dist.barrier()
                best[how] = min(best[how], _seconds(lambda call=call: [call() for _ in range(3)]) / 3)
        if rank == 0:
            best = {"by hand": Missing("train.py has fully_shard")} | best
            queue.put((f"{kind}, batch {batch * mesh.size()} x 64", best))


def on_processes(options):
    console = Console(width=None if sys.stdout.isatty() else 200)
    with tempfile.TemporaryDirectory() as folder:
        queue = mp.get_context("spawn").SimpleQueue()
        context = mp.spawn(
            rank_main,
            (options.processes, str(Path(folder, "store")), options, queue),
            nprocs=options.processes,
            join=False,
        )
        rows = {}
        with console.status("training"):
            for _ in range(2 if options.bits else 2 * len(BATCHES)):
                name, best = queue.get()
                rows[name] = best
            while not context.join():
                pass
    if options.bits:
        for kind, ranks in rows.items():
            same, apart = sum(equal for equal, _ in ranks), max(apart for _, apart in ranks)
            console.print(f"{kind}, {options.bits} steps: equal to eager in every bit on {same} of {len(ranks)} ranks")
            console.print(f"   largest difference of a loss or a parameter: {apart:.1e}")
        return
    console.print(comparison(f"{options.processes} gloo processes, GPT 4 x 256", rows, unit="us", base="eager"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="compiled steps too")
    parser.add_argument("--compile-time", action="store_true", help="how long compilers take, and nothing else")
    parser.add_argument("--shapes", action="store_true", help="1,000 steps over eight shapes, and nothing else")
    parser.add_argument("--bits", type=int, default=0, metavar="STEPS", help="with --processes: compare every bit")
    parser.add_argument("--processes", type=int, default=0, help="on gloo processes instead")
    parser.add_argument("--repeats", type=int, default=10, help="slices or rounds; the best counts")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if options.processes:
        on_processes(options)
    else:
        on_one_rank(options)


if __name__ == "__main__":
    main()
