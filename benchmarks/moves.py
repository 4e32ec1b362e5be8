"""Changes of layout: bytes against the lower bound on large meshes, and wall time on real processes next to DTensor.

    python benchmarks/moves.py [--ranks 4] [--sizes 64 2048] [--repeats 12] [--quick] [--json FILE]

The first table needs no processes: it asks the planner for every ordered pair of layouts. The second starts `--ranks`
gloo processes on this machine, moves a square float32 matrix between all pairs of layouts on a 2-D mesh, and takes the
best of `--repeats` turns of each peer (the slowest rank counts). Where DTensor moves more than twice the bound, its
plan is the reason, not the wire.
"""

import argparse
import itertools
import json
import logging
import math
import os
import random
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode

import shardwise
from shardwise import DTensor, Layout, Partial, Replicate, Shard, plan_move, simulate
from shardwise.mesh import as_mesh

KINDS = {"S0": (Shard(0), TorchShard(0)), "S1": (Shard(1), TorchShard(1)), "R": (Replicate(), TorchReplicate())}
WITH_SUMS = KINDS | {"P": (Partial(), TorchPartial())}


# -- the planner alone -------------------------------------------------------------------------------------
def layout_of(mesh, placements, shape):
    return Layout.make(as_mesh(mesh), placements, shape, torch.float32)


def bytes_over_bound(mesh_shape, kinds, size, most=3000):
    """(geometric mean, worst) of bytes in over the lower bound, most memory over source + target, over all pairs."""
    mesh, meta = simulate(mesh_shape, device="meta"), (size, size)
    spots = list(itertools.product([ours for ours, _ in kinds.values()], repeat=len(mesh_shape)))
    layouts = {places: layout_of(mesh, places, meta) for places in spots}
    pairs = [(a, b) for a, b in itertools.product(spots, repeat=2) if a != b and not any(p.is_partial() for p in b)]
    if len(pairs) > most:
        pairs = random.Random(0).sample(pairs, most)
    ranks, ratios, memory = range(math.prod(mesh_shape)), [], 0.0
    for a, b in pairs:
        src, dst = layouts[a], layouts[b]
        plan = plan_move(src, dst)
        bound = sum(map(plan.lower_bound, ranks))
        if bound:
            ratios.append(sum(map(plan.bytes_in, ranks)) / bound)
        local = math.prod(src.local_shape(0)) + math.prod(dst.local_shape(0))
        memory = max(memory, plan.peak_bytes(0) / (4 * local))
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return {"pairs": len(ratios), "mean": mean, "worst": max(ratios), "memory": memory}


def planning_seconds(mesh_shape, repeats=5):
    """The slowest first plan of a new pair, the best of some tries each (a busy machine is not the planner's fault)."""
    mesh, n = simulate(mesh_shape, device="meta"), len(mesh_shape)
    kinds = [Shard(0), Shard(1), Replicate(), Partial()]
    rng, worst = random.Random(0), 0.0
    for _ in range(20):
        a, b = ([rng.choice(kinds[: 4 - end]) for _ in range(n)] for end in (0, 1))
        src, dst = layout_of(mesh, a, (4096, 4096)), layout_of(mesh, b, (4096, 4096))
        best = math.inf
        for _ in range(repeats):
            shardwise.clear_caches()
            started = time.perf_counter()
            plan_move(src, dst)
            best = min(best, time.perf_counter() - started)
        worst = max(worst, best)
    return worst


# -- real processes ----------------------------------------------------------------------------------------
def pairs_of(quick):
    names = ["S0", "S1", "R"] if quick else list(WITH_SUMS)
    spots = list(itertools.product(names, repeat=2))
    return [(a, b) for a, b in itertools.product(spots, repeat=2) if a != b and "P" not in b]


def work(rank, options, folder):
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks)
    mesh = shardwise.init_device_mesh("cpu", (2, options.ranks // 2), mesh_dim_names=("a", "b"))
    rows = [row for size in options.sizes for row in timed_pairs(mesh, size, options)]
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def timed_pairs(mesh, size, options):
    for before, after in pairs_of(options.quick):
        ours, theirs = ([[WITH_SUMS[n][peer] for n in spot] for spot in (before, after)] for peer in (0, 1))
        layout = layout_of(mesh, ours[0], (size, size))
        plan = plan_move(layout, layout.replace(placements=ours[1]))
        local = torch.rand(layout.local_shape(dist.get_rank()))
        x = DTensor.from_local(local, mesh, ours[0], shape=(size, size))
        y = TorchDTensor.from_local(local, mesh, theirs[0], run_check=False)
        calls = {
            "shardwise": lambda x=x, to=ours[1]: x.redistribute(placements=to).to_local(),
            "DTensor": lambda y=y, to=theirs[1]: y.redistribute(placements=to).to_local(),
        }
        with TorchCommDebugMode() as counted:
            calls["DTensor"]()
        best = dict.fromkeys(calls, math.inf)
        for _ in range(options.repeats):
            for peer, call in calls.items():
                dist.barrier()
                started = time.perf_counter()
                result = call()
                if hasattr(result, "wait"):
                    result.wait()
                took = torch.tensor(time.perf_counter() - started)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                best[peer] = min(best[peer], took.item())
        yield {
            "size": size,
            "pair": f"{' '.join(before)} -> {' '.join(after)}",
            "steps": sum(step.kind != "local" for step in plan.steps),
            "their steps": counted.get_total_counts(),
            "bytes": max(map(plan.bytes_in, range(options.ranks))),
            "bound": max(map(plan.lower_bound, range(options.ranks))),
            **best,
        }


# -- tables ------------------------------------------------------------------------------------------------
def show(console, planned, rows):
    table = Table("mesh", "layouts", "pairs", "bytes/bound", "worst", "memory/(source+target)", title="The planner")
    for row in planned["bytes"]:
        figures = f"{row['mean']:.3f}", f"{row['worst']:.2f}", f"{row['memory']:.2f}"
        table.add_row("x".join(map(str, row["mesh"])), row["layouts"], str(row["pairs"]), *figures)
    console.print(table)
    for mesh, seconds in planned["planning"]:
        console.print(f"a new pair on {'x'.join(map(str, mesh))} ranks: {seconds * 1e3:.2f} ms")
    table = Table("size", "move", "steps", "DTensor's", "bytes in", "bound", "shardwise ms", "DTensor ms", "ratio")
    for row in sorted(rows, key=lambda r: (r["size"], -r["shardwise"] / r["DTensor"])):
        ratio = row["shardwise"] / row["DTensor"]
        table.add_row(
            str(row["size"]),
            row["pair"],
            str(row["steps"]),
            str(row["their steps"]),
            f"{row['bytes']:,}",
            f"{row['bound']:,}",
            f"{row['shardwise'] * 1e3:.2f}",
            f"{row['DTensor'] * 1e3:.2f}",
            f"{ratio:.2f}",
        )
    console.print(table)
    for size in sorted({row["size"] for row in rows}):
        some = [row["shardwise"] / row["DTensor"] for row in rows if row["size"] == size and row["their steps"]]
        mean = math.exp(sum(map(math.log, some)) / len(some))
        slower = sum(r > 1 for r in some)
        console.print(f"size {size}: geometric mean {mean:.2f}x DTensor's time, {slower} of {len(some)} pairs slower")
    more = [row["pair"] for row in rows if row["steps"] > row["their steps"]]
    console.print(f"pairs with more steps than DTensor takes: {more or 'none'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 2048])
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="S and R only, smaller meshes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console(width=140)
    planned = {"bytes": [], "planning": []}
    for mesh in [(2, 4)] if options.quick else [(2, 4), (4, 4), (2, 2, 4)]:
        for name, kinds in (("S, R", KINDS), ("S, R, P", WITH_SUMS)):
            planned["bytes"].append({"mesh": mesh, "layouts": name} | bytes_over_bound(mesh, kinds, 8192))
    for mesh in [(4, 4, 4, 4)] if options.quick else [(4, 4, 4, 4), (16, 16, 16, 16)]:
        planned["planning"].append((mesh, planning_seconds(mesh)))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (options, folder), nprocs=options.ranks)
        rows = json.loads((Path(folder) / "rows.json").read_text())
    show(console, planned, rows)
    if options.json:
        options.json.write_text(json.dumps({"planner": planned, "moves": rows}, indent=1))


if __name__ == "__main__":
    main()
