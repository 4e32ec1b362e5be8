"""Training steps of a GPT on several processes: shardwise against torch's own ways and a hand-written one.

    python benchmarks/train.py                 # 2 and 4 gloo processes on this machine
    python benchmarks/train.py --ranks 2 --only zero-3
    python benchmarks/train.py --one-gpu       # a mesh of one GPU, 12 layers x 768, batch 8 x 1024, bfloat16
    python benchmarks/train.py --device cuda --ranks 4   # NCCL ranks, which share a GPU where there are too few

Every step is forward, backward and AdamW on float32. Times are the best of several rounds in which all peers take
turns, in the same processes; the processor time beside them (all threads of rank 0) says what a step costs where other
programs keep the cores busy. Peak memory is what the resident size grows by, in processes of its own for each peer,
over the size they have after importing everything and joining the group; on GPUs, what torch allocated there at most.
Ranks that share a GPU are connected by sockets: their times are good as ratios only.
"""

import argparse
import functools
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from by_hand import cut_by_hand
from gpt_step import GPT
from rich.console import Console
from rich.table import Table
from torch import nn

Step = Callable[[], object]


# ------------------------------------------------------------------ the program


def build_model(options) -> GPT:
    torch.manual_seed(0)
    return GPT(options.vocabulary, options.context, options.width, options.heads, options.layers).to(options.device)


def batch(options, rank=0, parts=1):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(options.vocabulary, (options.batch, options.context + 1), generator=generator)
    tokens = tokens.chunk(parts)[rank]
    return tokens[:, :-1].contiguous().to(options.device), tokens[:, 1:].contiguous().to(options.device)


def stepper(model, inputs, targets, **options) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **options)

    def step():
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


COLUMN, ROW = ("qkv.0", "qkv.1", "qkv.2", "up"), ("project", "down")


# ------------------------------------------------------------------ tensor parallel


def by_styles(styles, options, mesh):
    """The plan with the parallel styles of a library: activations between the linears are plain local tensors."""
    return stepper(styled(build_model(options), styles, mesh), *batch(options))


def styled(model, styles, mesh):
    plan = dict.fromkeys(COLUMN, styles.ColwiseParallel()) | dict.fromkeys(ROW, styles.RowwiseParallel())
    for block in model.blocks:
        block.heads //= mesh.size()
        styles.parallelize_module(block, mesh, plan)
    return model


def torch_tensor_parallel(options, rank, parts):
    import torch.distributed.tensor.parallel as styles

    return by_styles(styles, options, mesh_of(parts, options.device))


def shardwise_styles(options, rank, parts):
    import shardwise.parallel as styles

    return by_styles(styles, options, mesh_of(parts, options.device))


def shardwise_layouts(options, rank, parts):
    """The same plan by layouts alone: all tensors are DTensors, the model is as it was."""
    from shardwise import Replicate, Shard, distribute_module, distribute_tensor

    mesh = mesh_of(parts, options.device)

    def partition(path, module, mesh):
        for name, param in list(module.named_parameters(recurse=False)):
            column, row = path.endswith(COLUMN), path.endswith(ROW) and name == "weight"
            place = Shard(0) if column else Shard(1) if row else Replicate()
            module.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), mesh, [place])))

    model = distribute_module(build_model(options), mesh, partition)
    return stepper(model, *(distribute_tensor(t, mesh, [Replicate()]) for t in batch(options)))


def hand_written(options, rank, parts):
    return stepper(cut_by_hand(build_model(options), rank, parts), *batch(options))


# ------------------------------------------------------------------ data parallel


def one_rank(options, rank, parts):
    """A step on this rank's part of the batch, alone: what no way of data parallelism can beat."""
    return stepper(build_model(options), *batch(options, rank, parts))


def torch_ddp(options, rank, parts):
    model = nn.parallel.DistributedDataParallel(build_model(options), gradient_as_bucket_view=True)
    return stepper(model, *batch(options, rank, parts))


def torch_fully_shard(options, rank, parts):
    from torch.distributed.fsdp import fully_shard

    return by_blocks(fully_shard, options, rank, parts)


def shardwise_fully_shard(options, rank, parts):
    from shardwise.parallel import fully_shard

    return by_blocks(fully_shard, options, rank, parts)


def by_blocks(fully_shard, options, rank, parts):
    """The `fully_shard` of a library, block by block and then on the whole."""
    model, mesh = build_model(options), mesh_of(parts, options.device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return stepper(model, *batch(options, rank, parts))


def shardwise_data(options, rank, parts, shard):
    from shardwise.parallel import data_parallel

    model = data_parallel(build_model(options), mesh_of(parts, options.device), shard)
    return stepper(model, *batch(options, rank, parts))


@functools.cache
def mesh_of(parts, device):
    return dist.device_mesh.init_device_mesh(device, (parts,), mesh_dim_names=("ranks",))


TABLES = {  # name: (title, {peer: builder}); the first peer is the base of the ratios
    "tensor": (
        "Tensor parallel",
        {
            "torch DTensor, parallel styles": torch_tensor_parallel,
            "hand-written, as Megatron": hand_written,
            "shardwise, parallel styles": shardwise_styles,
            "shardwise, layouts alone": shardwise_layouts,
        },
    ),
    "data": (
        "Data parallel",
        {
            "torch DistributedDataParallel": torch_ddp,
            "no communication": one_rank,
            "shardwise none": functools.partial(shardwise_data, shard="none"),
            "shardwise optimizer (ZeRO 1)": functools.partial(shardwise_data, shard="optimizer"),
            "shardwise gradients (ZeRO 2)": functools.partial(shardwise_data, shard="gradients"),
        },
    ),
    "zero-3": (
        "Data parallel with cut parameters",
        {
            "torch fully_shard": torch_fully_shard,
            "shardwise fully_shard": shardwise_fully_shard,
            "shardwise parameters (ZeRO 3)": functools.partial(shardwise_data, shard="parameters"),
        },
    ),
}


def peers_of(name) -> dict[str, Callable[..., Step]]:
    import shardwise.parallel

    peers = dict(TABLES[name][1])
    if not hasattr(shardwise.parallel, "parallelize_module"):
        peers.pop("shardwise, parallel styles", None)
    return peers


# ------------------------------------------------------------------ processes


SHARED_GPU = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}


def join(rank, parts, folder, device):
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "cuda":
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(rank % gpus)
        if gpus < parts:  # NCCL refuses two ranks of one host on a GPU: each rank claims a host of its own
            os.environ.update(SHARED_GPU, NCCL_HOSTID=f"host{rank}")
    backend, store = "nccl" if device == "cuda" else "gloo", Path(folder, "store").as_uri()
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=parts, timeout=timedelta(minutes=2))


def measure_times(rank, parts, folder, name, options, results):
    """Seconds a step for each peer, the best of all rounds; a round ends when the slowest rank has."""
    join(rank, parts, folder, options.device)
    steps = {peer: build(options, rank, parts) for peer, build in peers_of(name).items()}
    losses = {peer: [float(step().detach()) for _ in range(2)] for peer, step in steps.items()}
    together = functools.partial(meet, options.device)
    best = {peer: (float("inf"), float("inf")) for peer in steps}
    for _ in range(options.rounds):
        for peer, step in steps.items():
            together()
            gc.collect()
            start, busy = time.perf_counter(), time.process_time()
            for _ in range(options.steps):
                step()
            busy = time.process_time() - busy
            together()
            took = ((time.perf_counter() - start) / options.steps, busy / options.steps)
            best[peer] = tuple(map(min, best[peer], took))
    if rank == 0:
        results.put((best, {peer: loss[-1] for peer, loss in losses.items()}))
    dist.barrier()
    dist.destroy_process_group()


def meet(device):
    """All ranks are here, and their GPUs are done."""
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def measure_memory(rank, parts, folder, name, peer, options, results):
    """How far the resident size of this process, or what it has on its GPU, goes above where it starts."""
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401

    import shardwise.parallel  # noqa: F401

    join(rank, parts, folder, options.device)
    mesh_of(parts, options.device)
    gc.collect()
    peak = peak_from_here(options.device)
    step = peers_of(name)[peer](options, rank, parts)
    for _ in range(4):
        step()
    if rank == 0:
        results.put(peak())
    dist.barrier()
    dist.destroy_process_group()


def peak_from_here(device) -> Callable[[], int]:
    if device == "cuda":
        return torch.cuda.max_memory_allocated
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _status("VmRSS")
    return lambda: _status("VmHWM") - before


def _status(field) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def on_processes(function, parts, *args, seconds=600):
    """What rank 0 of `parts` processes puts into the queue."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=function, args=(rank, parts, folder, *args, results), daemon=True)
            for rank in range(parts)
        ]
        for worker in workers:
            worker.start()
        try:
            deadline = time.monotonic() + seconds
            while results.empty():
                if time.monotonic() > deadline or any(worker.exitcode for worker in workers):
                    raise SystemExit(f"{function.__name__} on {parts} processes did not finish")
                time.sleep(0.1)
            return results.get()
        finally:
            for worker in workers:
                worker.join(10)
                worker.kill()


def compare(options, console):
    found = {}
    for parts in options.ranks:
        for name in options.only:
            both, losses = on_processes(measure_times, parts, name, options)
            times, busy = ({peer: pair[i] for peer, pair in both.items()} for i in range(2))
            memory = {}
            if options.memory and (options.device == "cuda" or Path("/proc/self/clear_refs").exists()):
                os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # glibc: what is freed leaves the process at once
                memory = {peer: on_processes(measure_memory, parts, name, peer, options) for peer in times}
                del os.environ["MALLOC_MMAP_THRESHOLD_"]
            found[f"{name} {parts}"] = {"seconds": times, "processor seconds": busy, "peak bytes": memory}
            console.print(table(f"{TABLES[name][0]}, {parts} processes", times, memory, losses, busy))
    return found


def table(title, times, memory, losses, busy=None):
    base = next(iter(times))
    columns = {"step (ms)": (times, 1e3), "processor (ms)": (busy or {}, 1e3), "peak (MB)": (memory, 1e-6)}
    columns = {name: column for name, column in columns.items() if column[0]}
    made = Table(title=f"{title}; ratios to {base}", title_justify="left", title_style="bold")
    made.add_column("")
    for name in (*columns, "loss"):
        made.add_column(name, justify="right")
    for peer in times:
        cells = [f"{v[peer] * scale:.1f}  {v[peer] / v[base]:.2f}x" for v, scale in columns.values()]
        made.add_row(peer, *cells, f"{losses[peer]:.5f}")
    return made


# ------------------------------------------------------------------ one GPU


def one_gpu(options, console):
    """A mesh of one rank: plain torch, torch's DTensor and shardwise, each as a user would write it."""
    import torch.distributed.tensor as peer
    import torch.distributed.tensor.parallel as peer_styles

    import shardwise
    import shardwise.parallel as our_styles
    from shardwise.parallel import data_parallel

    device = options.device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = shardwise.init_device_mesh(device, (1,), mesh_dim_names=("dp",))
    inputs, targets = batch(options)

    def build(library):
        model = build_model(options).to(torch.bfloat16)
        if library is None:
            return stepper(model, inputs, targets)
        if library == "data":
            return stepper(data_parallel(model, mesh, "parameters"), inputs, targets)
        if library in (peer_styles, our_styles):
            return stepper(styled(model, library, mesh), inputs, targets)
        model = library.distribute_module(model, mesh)
        laid = (library.distribute_tensor(t, mesh, [library.Shard(0)]) for t in (inputs, targets))
        return stepper(model, *laid)

    makers = {
        "torch": None,
        "DTensor": peer,
        "DTensor styles": peer_styles,
        "shardwise": shardwise,
        "shardwise styles": our_styles,
        "shardwise data_parallel": "data",
    }
    steps, best = {}, {}
    for name, library in makers.items():
        try:
            step = build(library)
            for _ in range(3):
                step()
        except Exception as error:  # a peer may lack an op: its row says so
            if library not in (peer, peer_styles):
                raise
            console.print(f"{name}: {type(error).__name__}: {error}")
            continue
        steps[name], best[name] = step, float("inf")
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(options.rounds):
        for name, step in steps.items():
            sync()
            start = time.perf_counter()
            for _ in range(options.steps):
                step()
            sync()
            best[name] = min(best[name], (time.perf_counter() - start) / options.steps)
    size = f"{options.layers} layers x {options.width}, batch {options.batch} x {options.context}, bfloat16"
    losses = {name: float(step().detach()) for name, step in steps.items()}
    console.print(table(f"One rank on {device}: {size}", best, {}, losses))
    dist.destroy_process_group()
    return {"one rank": {"seconds": best}}


SMALL = {"layers": 4, "width": 256, "heads": 8, "context": 64, "batch": 8, "vocabulary": 2048, "steps": 3, "rounds": 5}
LARGE = SMALL | {"layers": 12, "width": 768, "heads": 12, "context": 1024, "vocabulary": 50304, "steps": 10}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one-gpu", action="store_true", help="a mesh of one rank instead of several processes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="gloo or NCCL processes")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES), help="these tables only")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="times only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there too")
    for name in SMALL:
        parser.add_argument(f"--{name}", type=int, help=f"default {SMALL[name]}, with --one-gpu {LARGE[name]}")
    options = parser.parse_args()
    for name, default in (LARGE if options.one_gpu else SMALL).items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    console = Console(width=120)
    found = one_gpu(options, console) if options.one_gpu else compare(options, console)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
