"""Captured, compiled and graphed training steps of a GPT on one GPU: plain torch, torch's DTensor and shardwise.

    python benchmarks/capture_gpu.py                    compiled 12 x 768, and CUDA graphs of two small models
    python benchmarks/capture_gpu.py --quick            no compilers
    python benchmarks/capture_gpu.py --only graphs      CUDA graphs alone; `--only compiled` the other table
    python benchmarks/capture_gpu.py --profile          which kernels take the time: plain, captured and compiled steps
    python ../shared/nccl_ranks.py 4 benchmarks/capture_gpu.py --ranks      NCCL: captured beside eager, with values

A step is forward, loss, backward and AdamW (capturable) in bfloat16, on a mesh of one rank. Peers take turns; the best
of several slices counts. The losses of five steps are compared with plain torch's: they are bfloat16, so this finds
gross errors only; tests/captures/test_graph_cuda.py compares bits.
"""

import argparse
import gc
import logging
import time

import torch
import torch.distributed as dist
import torch.distributed.tensor as peer_tensor
import torch.nn.functional as F
from capture import rank_step, training_step
from gpt_step import GPT
from rich.console import Console
from rich.table import Table
from torch._inductor.utils import fresh_inductor_cache

import shardwise

MODELS = {  # layers, width, heads, batch, context
    "GPT 12 x 768, 8 x 1024": (12, 768, 12, 8, 1024),
    "GPT 24 x 256, 1 x 64": (24, 256, 4, 1, 64),
    "GPT 12 x 768, 1 x 128": (12, 768, 12, 1, 128),
}
COMPILED = [
    "plain",
    "plain compiled",
    "plain compiled, optimizer eager",
    "DTensor compiled",
    "shardwise",
    "shardwise captured",
    "shardwise compiled",
]
OVERHEAD = ["plain", "plain reduce-overhead", "shardwise reduce-overhead"]
GRAPHS = ["plain", "plain graph", "shardwise", "shardwise captured", "shardwise graph"]


def build(peer, mesh, sizes):
    """A call that makes one step and returns the loss."""
    layers, width, heads, batch, context = sizes
    torch.manual_seed(0)
    vocabulary = 50304 if context > 512 else 512
    model = GPT(vocabulary, context, width, heads, layers).to("cuda", torch.bfloat16)
    tokens = torch.randint(vocabulary, (batch, context + 1), device="cuda")
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    library = {"plain": None, "DTensor": peer_tensor, "shardwise": shardwise}[peer.split()[0]]
    if library is not None:
        model = library.distribute_module(model, mesh)
        inputs, targets = (library.distribute_tensor(t, mesh, [library.Shard(0)]) for t in (inputs, targets))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True)
    step = training_step(model, optimizer)
    if peer == "plain graph":
        return graphed(step, inputs, targets)
    if "compiled" in peer or "reduce-overhead" in peer:
        mode = "reduce-overhead" if "reduce-overhead" in peer else None
        if library is not shardwise:
            step = compiled_parts(model, optimizer, mode, with_optimizer="optimizer eager" not in peer)
        else:
            step = torch.compile(step, mode=mode)
    elif "captured" in peer:
        step = shardwise.capture(step)
    elif "graph" in peer:
        step = shardwise.capture(step, passes=("aliases", "merge", "inverse", "unused", "cuda_graph"))
    run = lambda: step(inputs, targets)
    run.step = step
    return run


def compiled_parts(model, optimizer, mode=None, with_optimizer=True):
    """Forward and backward compiled, and the step of the optimizer: what people write without capture."""

    def loss_of(inputs, targets):
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    compiled = torch.compile(loss_of, mode=mode)
    step_optimizer = torch.compile(optimizer.step, mode=mode) if with_optimizer else optimizer.step

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = compiled(inputs, targets)
        loss.backward()
        step_optimizer()
        return loss.detach()

    return step


def graphed(step, inputs, targets):
    """Plain torch's own whole-step CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    warm = []
    with torch.cuda.stream(stream):
        for _ in range(2):
            warm.append(step(inputs, targets).clone())
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(inputs, targets)

    def run():
        if warm:
            return warm.pop(0)
        graph.replay()
        return loss.clone()

    run.memory = step, inputs, targets  # the graph reads and writes it
    return run


def measure(names, sizes, mesh, repeats, console, title):
    calls, losses, first = {}, {}, {}
    if any("compiled" in name for name in names):
        torch.compile(lambda x: x + 1)(torch.ones(3, device="cuda"))  # compilers are loaded, their workers run
    for name in names:
        try:
            with fresh_inductor_cache():  # so that no peer finds what another one has compiled
                start = time.perf_counter()
                calls[name] = build(name, mesh, sizes)
                losses[name] = [float(value(calls[name]())) for _ in range(5)]
                first[name] = time.perf_counter() - start
        except Exception as error:
            calls.pop(name, None)
            console.print(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    if "shardwise compiled" in first and "plain compiled" in first:
        took = [first[name] - first[name.split()[0]] for name in ("shardwise compiled", "plain compiled")]
        console.print(f"compile time, forward, backward and optimizer on both sides: shardwise {took[0]:.1f} s, ")
        console.print(f"   plain {took[1]:.1f} s, {took[0] / took[1]:.2f}x")
    best = dict.fromkeys(calls, float("inf"))
    loops = 20 if sizes[3] * sizes[4] < 1000 else 5
    for call in calls.values():
        for _ in range(5):
            call()
    gc.collect()
    gc.freeze()
    for _ in range(repeats):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(loops):
                call()
            torch.cuda.synchronize()
            best[name] = min(best[name], (time.perf_counter() - start) / loops * 1e3)
    gc.unfreeze()
    table = Table("step", "ms", "/ plain", "first five (s)", "largest difference of five losses", title=title)
    for name, base in (("shardwise compiled", "plain compiled"), ("shardwise graph", "plain graph")):
        if name in best and base in best:
            console.print(f"{title}: {name} / {base} {best[name] / best[base]:.3f}x")
    for name, took in best.items():
        apart = max(abs(a - b) for a, b in zip(losses[name], losses["plain"]))
        table.add_row(name, f"{took:.3f}", f"{took / best['plain']:.3f}x", f"{first[name]:.1f}", f"{apart:.1e}")
    console.print(table)
    for name, call in calls.items():
        step = getattr(call, "step", None)
        if isinstance(step, type(shardwise.capture(print))):
            said = [line for line in step.explain().splitlines() if line.startswith(("no CUDA", "eager"))]
            console.print(f"{name}: {step!r} {' '.join(said)}")


def profile(mesh, console, compilers):
    """The kernels that take most of the time of a step of the large model."""
    sizes = MODELS["GPT 12 x 768, 8 x 1024"]
    for name in ["plain", "shardwise captured", *(["plain compiled", "shardwise compiled"] if compilers else [])]:
        call = build(name, mesh, sizes)
        for _ in range(4):
            call()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            start = time.perf_counter()
            for _ in range(3):
                call()
            torch.cuda.synchronize()
            took = (time.perf_counter() - start) / 3 * 1e3
        events = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)
        total = sum(e.self_device_time_total for e in events) / 3e3
        kernels = sum(e.count for e in events) // 3
        console.print(f"{name}: {took:.1f} ms with a profiler, {total:.1f} ms of kernels, {kernels} of them")
        for event in events[:9]:
            each = event.self_device_time_total / 3e3
            console.print(f"   {each:7.2f} ms {event.count // 3:5d}x  {event.key[:95]}", highlight=False)
        del call
        gc.collect()


def on_ranks(repeats):
    """Steps of a small GPT on NCCL ranks: eager, captured and with moves that overlap; losses must be equal."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = shardwise.init_device_mesh("cuda", (world,))
    for kind in ("tensor parallel", "ZeRO 3"):
        calls, losses = {}, {}
        for how in ("eager", "captured", "captured, overlap"):
            calls[how], _ = rank_step(kind, how, mesh)
            losses[how] = [float(calls[how]().full_tensor()) for _ in range(6)]
        best = dict.fromkeys(calls, float("inf"))
        for _ in range(repeats):
            for how, call in calls.items():
                torch.cuda.synchronize()
                dist.barrier()
                start = time.perf_counter()
                for _ in range(3):
                    call()
                torch.cuda.synchronize()
                best[how] = min(best[how], (time.perf_counter() - start) / 3 * 1e3)
        if rank == 0:
            ratios = ", ".join(f"{how} {t:.1f} ms ({t / best['eager']:.2f}x)" for how, t in best.items())
            same = all(losses[how] == losses["eager"] for how in calls)
            apart = max(abs(a - b) for how in calls for a, b in zip(losses[how], losses["eager"]))
            print(f"{kind}, {world} NCCL ranks: {ratios}; losses of six steps equal: {same} ({apart:.1e})", flush=True)
    dist.destroy_process_group()


def value(loss):
    return loss.full_tensor() if hasattr(loss, "full_tensor") else loss


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="no compilers")
    parser.add_argument("--repeats", type=int, default=6, help="slices; the best counts")
    parser.add_argument("--only", choices=["compiled", "graphs", "overhead"], help="one kind of table")
    parser.add_argument("--skip-peer", action="store_true", help="without torch's DTensor")
    parser.add_argument("--profile", action="store_true", help="kernels instead of times")
    parser.add_argument("--ranks", action="store_true", help="one of several NCCL ranks")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if options.ranks:
        on_ranks(options.repeats)
        return
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    mesh = shardwise.init_device_mesh("cuda", (1,))
    console = Console(width=120)
    if options.profile:
        profile(mesh, console, not options.quick)
        return
    for title, sizes in MODELS.items():
        if options.only is not None and (options.only == "compiled") != (sizes[4] > 512):
            continue
        names = COMPILED if sizes[4] > 512 else OVERHEAD if options.only == "overhead" else GRAPHS
        names = [name for name in names if not options.quick or "compiled" not in name]
        if options.skip_peer:
            names = [name for name in names if "DTensor" not in name]
        measure(names, sizes, mesh, options.repeats, console, title)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
