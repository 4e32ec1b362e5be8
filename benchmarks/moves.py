"""Changes of layout: bytes against the lower bound on large meshes, and wall time on real processes next to DTensor.

    python benchmarks/moves.py [--ranks 4] [--sizes 64 2048] [--repeats 12] [--again 4] [--quick] [--json FILE]

The first table needs no processes: it asks the planner for every ordered pair of layouts. The second starts `--ranks`
gloo processes on this machine and moves a square float32 matrix between all pairs of layouts on a 2-D mesh. The peers
take turns, `--repeats` of them (five times as many for small matrices), and the slowest rank counts. "ratio" is the
time of shardwise that a quarter of its turns stay within over DTensor's: on fewer cores than ranks the quickest turn is
luck and the median is the scheduler's. Those of the best turns and of the medians stand beside it. Pairs that look
slower than they should be are timed up to `--again` times more, all turns counting: a busy machine can spoil all turns
of a pair. DTensor's bytes are counted at its collectives; where they are more than twice the bound, its plan is the
reason, not the wire.
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
from _timing import shown
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

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
    pairs = [(a, b) for a, b in itertools.product(spots, repeat=2) if a != b]
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
        memory = max(memory, max(map(plan.peak_bytes, ranks)) / (4 * local))
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


class BytesIn(TorchDispatchMode):
    """Counts what this rank receives in DTensor's collectives, by the rules our ledger goes by."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, _, _ = str(func).removeprefix("_c10d_functional.").partition(".")
        if name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single"):
            k = dist.distributed_c10d._resolve_process_group(args[-1]).size()
            whole = {"all_gather_into_tensor": k, "all_reduce": 2}.get(name, 1) * args[0].nbytes
            self.bytes += whole * (k - 1) // k
        return func(*args, **(kwargs or {}))


def timed_pairs(mesh, size, options):
    for before, after in shown(pairs_of(options.quick), f"{size} x {size}", dist.get_rank() == 0):
        ours, theirs = ([[WITH_SUMS[n][peer] for n in spot] for spot in (before, after)] for peer in (0, 1))
        layout = layout_of(mesh, ours[0], (size, size))
        plan = plan_move(layout, layout.replace(placements=ours[1]))
        local = torch.rand(layout.local_shape(dist.get_rank()))
        x = DTensor.from_local(local, mesh, ours[0], shape=(size, size))
        y = TorchDTensor.from_local(local, mesh, theirs[0], run_check=False)
        calls = [lambda: x.redistribute(placements=ours[1]), lambda: y.redistribute(placements=theirs[1])]  # noqa: B023
        with TorchCommDebugMode() as counted:
            finished(calls[1]())
        with BytesIn() as received:
            finished(calls[1]())
        their_bytes = torch.tensor(received.bytes)
        dist.all_reduce(their_bytes)
        bound, bytes_in = (sum(map(of, range(options.ranks))) for of in (plan.lower_bound, plan.bytes_in))
        goal = 0.5 if their_bytes > 2 * bound else 1.0
        repeats = options.repeats * (1 if size > 512 else 5)
        turns = taken_in_turns(calls, repeats)
        for _ in range(options.again):
            if ratio(turns, 0.25) <= goal:
                break
            turns += taken_in_turns(calls, repeats)
        yield {
            "size": size,
            "pair": f"{' '.join(before)} -> {' '.join(after)}",
            "steps": sum(step.kind != "local" for step in plan.steps),
            "their steps": counted.get_total_counts(),
            "bytes": bytes_in,
            "their bytes": their_bytes.item(),
            "bound": bound,
            "goal": goal,
            "turns": len(turns),
            "shardwise": within([mine for mine, _ in turns], 0.25),
            "DTensor": within([their for _, their in turns], 0.25),
            "ratio": ratio(turns, 0.25),
            "best": ratio(turns, 0),
            "median": ratio(turns, 0.5),
        }


def finished(result):
    local = result.to_local()
    return local.wait() if hasattr(local, "wait") else local


def taken_in_turns(calls, repeats):
    """Seconds of both peers, turn by turn, the slowest rank's; who goes first alternates."""
    turns = []
    for turn in range(repeats):
        seconds = torch.zeros(2, dtype=torch.float64)
        for peer in (0, 1) if turn % 2 else (1, 0):
            dist.barrier()
            started = time.perf_counter()
            finished(calls[peer]())
            seconds[peer] = time.perf_counter() - started
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        turns.append(tuple(seconds.tolist()))
    return turns


def within(seconds, share):
    """The time that this share of the turns stays within."""
    return sorted(seconds)[int(len(seconds) * share)]


def ratio(turns, share):
    """Of shardwise over DTensor."""
    mine, theirs = (within(seconds, share) for seconds in zip(*turns, strict=True))
    return mine / theirs


# -- tables ------------------------------------------------------------------------------------------------
def show(console, planned, rows):
    table = Table("mesh", "layouts", "pairs", "bytes/bound", "worst", "memory/(source+target)", title="The planner")
    for row in planned["bytes"]:
        figures = f"{row['mean']:.3f}", f"{row['worst']:.2f}", f"{row['memory']:.2f}"
        table.add_row("x".join(map(str, row["mesh"])), row["layouts"], str(row["pairs"]), *figures)
    console.print(table)
    for mesh, seconds in planned["planning"]:
        console.print(f"a new pair on {'x'.join(map(str, mesh))} ranks: {seconds * 1e3:.2f} ms")
    heads = (
        "size",
        "move",
        "steps",
        "DTensor's",
        "bytes in",
        "DTensor's",
        "bound",
        "ms",
        "DTensor ms",
        "ratio",
        "best",
        "median",
    )
    table = Table(*heads)
    for row in sorted(rows, key=lambda r: (r["size"], -r["ratio"])):
        table.add_row(
            str(row["size"]),
            row["pair"],
            str(row["steps"]),
            str(row["their steps"]),
            f"{row['bytes']:,}",
            f"{row['their bytes']:,}",
            f"{row['bound']:,}",
            f"{row['shardwise'] * 1e3:.2f}",
            f"{row['DTensor'] * 1e3:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['best']:.2f}",
            f"{row['median']:.2f}",
        )
    console.print(table)
    for size in sorted({row["size"] for row in rows}):
        some = [row for row in rows if row["size"] == size]
        mean = math.exp(sum(math.log(row["ratio"]) for row in some) / len(some))
        console.print(f"size {size}: geometric mean {mean:.2f}x DTensor's time over {len(some)} pairs")
        for goal, title in ((1.0, "slower"), (0.5, "more than half its time where it moves more than twice the bound")):
            aimed = [row for row in some if row["goal"] == goal]
            found = [
                f"{row['pair']} ({row['ratio']:.2f}; best turn {row['best']:.2f}, median {row['median']:.2f})"
                for row in aimed
                if row["ratio"] > goal
            ]
            console.print(f"  {title}: {len(found)} of {len(aimed)}", *found, sep="\n    ")
    more = [row["pair"] for row in rows if row["steps"] > row["their steps"]]
    console.print(f"pairs with more steps than DTensor takes: {more or 'none'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 2048])
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--again", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="S and R only, smaller meshes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console(width=150)
    planned = {"bytes": [], "planning": []}
    meshes = [(2, 4)] if options.quick else [(2, 4), (4, 4), (2, 2, 4)]
    for mesh, name in shown(itertools.product(meshes, ("S, R", "S, R, P")), "bytes"):
        kinds = WITH_SUMS if "P" in name else KINDS
        planned["bytes"].append({"mesh": mesh, "layouts": name} | bytes_over_bound(mesh, kinds, 8192))
    for mesh in shown([(4, 4, 4, 4)] if options.quick else [(4, 4, 4, 4), (16, 16, 16, 16)], "plans"):
        planned["planning"].append((mesh, planning_seconds(mesh)))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (options, folder), nprocs=options.ranks)
        rows = json.loads((Path(folder) / "rows.json").read_text())
    show(console, planned, rows)
    if options.json:
        options.json.write_text(json.dumps({"planner": planned, "moves": rows}, indent=1))


if __name__ == "__main__":
    main()
