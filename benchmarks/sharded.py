"""shardwise.sharded against torch.distributed._shard: creation, gather, reshard, and the cost of metadata.

    python benchmarks/sharded.py                 2 local processes (gloo)
    python benchmarks/sharded.py --ranks 4 --size 2048

Both libraries run the same calls in the same processes, taking turns, each going first every other turn; a row is the
best of several repeats, of the slowest rank. A row in which shardwise looks slower is measured again, both libraries
alike, up to ten times: what is still slower then is listed. Reshards also show the bytes the busiest rank receives and
the fewest it could.
"""

import argparse
import importlib
import itertools
import os
import subprocess
import sys
import time
import warnings

import torch
import torch.distributed as dist
from _timing import shown
from rich.console import Console
from rich.table import Table

OURS, THEIRS = "shardwise", "torch"


class Library:
    """The same names from either."""

    def __init__(self, root):
        load = lambda name: importlib.import_module(root + name)
        self.tensor, self.spec, self.metadata = load(".sharded_tensor"), load(".sharding_spec"), load(".metadata")

    def chunks(self, dim, ranks):
        return self.spec.ChunkShardingSpec(dim, [f"rank:{r}/cpu" for r in ranks])

    def grid(self, n, world):
        """n tiles of 4 x 4, as square a grid as can be, dealt out to the ranks in turn."""
        across = next(k for k in range(int(n**0.5), 0, -1) if n % k == 0)
        make = self.metadata.ShardMetadata
        tiles = [make([4 * (i // across), 4 * (i % across)], [4, 4], f"rank:{i % world}/cpu") for i in range(n)]
        return tiles, (4 * (n // across), 4 * across)


ROUNDS = 10  # of measuring a row, as long as it looks slower


def measured(calls, repeats):
    """By peer, the best time of the slowest rank; None where a peer cannot do it."""
    best, spent = {}, dict.fromkeys(calls, 0.0)
    for _ in range(ROUNDS):
        take_turns(calls, repeats, best, spent)
        if best[THEIRS] is None or best[OURS] <= best[THEIRS]:
            break
    return best


def take_turns(calls, repeats, best, spent, limit=20.0):
    """Both peers `repeats` times, in both orders, as long as their time lasts; `best` and `spent` are brought up to
    date. The times are agreed on, so all ranks do the same."""
    for turn in range(repeats):
        for peer in list(calls)[:: 1 if turn % 2 else -1]:
            if peer in best and (best[peer] is None or spent[peer] > limit):
                continue
            seconds = one_call(calls[peer])
            best[peer] = None if seconds is None else min(best.get(peer, seconds), seconds)
            spent[peer] += seconds or 0.0


def one_call(prepare):
    """The seconds of the slowest rank, None where the library cannot do it."""
    try:
        call = prepare()
        dist.barrier()
        start = time.perf_counter()
        call()
        seconds = torch.tensor(time.perf_counter() - start)
    except NotImplementedError:
        return None
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def creation(libraries, world, size):
    for name, dims in (("zeros", (size, size)), ("zeros, fewer rows than ranks", (1, size))):
        calls = {}
        for peer, lib in libraries.items():
            spec = lib.chunks(0, range(world))
            calls[peer] = lambda lib=lib, spec=spec, dims=dims: lambda: lib.tensor.zeros(spec, *dims)
        yield name, calls, None
    calls = {}
    for peer, lib in libraries.items():
        shards = lib.tensor.ones(lib.chunks(0, range(world)), size, size).local_shards()
        calls[peer] = lambda lib=lib, shards=shards: lambda: lib.tensor.init_from_local_shards(shards, size, size)
    yield "init_from_local_shards", calls, None


def gathering(libraries, world, size):
    for name, rows, dim in (("rows", size, 0), ("columns", size, 1), ("uneven rows", size + 1, 0)):
        calls = {}
        for peer, lib in libraries.items():
            st = lib.tensor.ones(lib.chunks(dim, range(world)), rows, size)
            out = torch.empty(rows, size) if dist.get_rank() == 0 else None
            calls[peer] = lambda st=st, out=out: lambda: st.gather(0, out)
        yield name, calls, None


def resharding(libraries, world, size):
    orders = {"": list(range(world)), " turned": list(range(world))[::-1]}
    layouts = {f"{d}{o}": (d, ranks) for d in (0, 1) for o, ranks in orders.items()}
    for source, target in itertools.permutations(layouts, 2):
        calls = {}
        for peer, lib in libraries.items():
            before, after = lib.chunks(*layouts[source]), lib.chunks(*layouts[target])

            def prepare(lib=lib, before=before, after=after):
                st = lib.tensor.ones(before, size, size)
                return lambda: st.reshard(after)

            calls[peer] = prepare
        yield f"{source} -> {target}", calls, (layouts[source], layouts[target])


def warm_up(libraries, world, size):
    """Connections and memory that nobody has used yet would count against whoever comes first."""
    for _, calls, _ in resharding(libraries, world, size):
        take_turns(calls, 3, {}, dict.fromkeys(calls, 0.0))


def bytes_moved(lib, pair, size):
    """What the busiest rank receives, and the fewest bytes it could."""
    from shardwise.sharded.tiles import plan_between

    one, other = (lib.tensor.empty(lib.chunks(*layout), size, size)._tiles for layout in pair)
    plan = plan_between(one, other, 4)
    ranks = range(dist.get_world_size())
    return max(map(plan.bytes_in, ranks)), max(map(plan.lower_bound, ranks))


def metadata(libraries, world, n):
    built = {peer: lib.grid(n, world) for peer, lib in libraries.items()}

    def each(make):
        return {peer: (lambda lib=lib, peer=peer: make(lib, *built[peer])) for peer, lib in libraries.items()}

    yield (
        f"{n:,} tiles: spec, overlaps checked",
        each(lambda lib, tiles, dims: lambda: lib.spec.EnumerableShardingSpec(tiles)),
        None,
    )

    def create(lib, tiles, dims):
        spec = lib.spec.EnumerableShardingSpec(tiles)
        return lambda: lib.tensor.empty(spec, *dims)

    def show(lib, tiles, dims):
        st = lib.tensor.empty(lib.spec.EnumerableShardingSpec(tiles), *dims)
        return lambda: repr(st)

    def move(lib, tiles, dims):
        st = lib.tensor.empty(lib.spec.EnumerableShardingSpec(tiles), *dims)
        turned = [
            lib.metadata.ShardMetadata(t.shard_offsets, t.shard_sizes, o.placement)
            for t, o in zip(tiles, tiles[1:] + tiles[:1])
        ]
        target = lib.spec.EnumerableShardingSpec(turned)
        return lambda: st.reshard(target)

    yield f"{n:,} tiles: tensor", each(create), None
    yield f"{n:,} tiles: print", each(show), None
    yield f"{n:,} tiles: reshard, every tile moves", each(move), None


def run(options):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    world, size = dist.get_world_size(), options.size
    libraries = {THEIRS: Library("torch.distributed._shard"), OURS: Library("shardwise.sharded")}
    sections = {
        "creation": creation(libraries, world, size),
        "gather to rank 0": gathering(libraries, world, size),
        "reshard, chunks of dim": resharding(libraries, world, size),
    }
    for n in (10, 1_000, 10_000):
        sections[f"metadata {n}"] = metadata(libraries, world, n)
    warm_up(libraries, world, size)
    console, slower = Console(width=120), []
    table = Table("what", "torch (ms)", "shardwise (ms)", "torch / shardwise", "bytes in / fewest")
    for title, rows in sections.items():
        table.add_section()
        for name, calls, pair in shown(rows, title, dist.get_rank() == 0):
            found = measured(calls, options.repeats)
            moved = "" if pair is None else "{:,} / {:,}".format(*bytes_moved(libraries[OURS], pair, size))
            theirs, ours = found[THEIRS], found[OURS]
            ratio = "" if theirs is None else f"{theirs / ours:.2f}"
            if theirs is not None and ours > theirs:
                slower.append(f"{title}: {name}")
            cell = lambda s: "n/a" if s is None else f"{1e3 * s:.2f}"
            label = name if title.startswith("metadata") else f"{title}: {name}"
            table.add_row(label, cell(theirs), cell(ours), ratio, moved)
    if dist.get_rank() == 0:
        console.print(f"{world} processes (gloo), tensors of {size} x {size} float32, torch {torch.__version__}")
        console.print(table)
        console.print(f"slower than torch: {slower or 'nothing'}")
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
        sys.exit(subprocess.call([sys.executable, *launcher, __file__, *sys.argv[1:]]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own tensors warn of their deprecation in every call
        run(options)


if __name__ == "__main__":
    main()
