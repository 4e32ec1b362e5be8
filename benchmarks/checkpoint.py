"""Checkpoints beside torch.distributed.checkpoint, on local processes.

    python benchmarks/checkpoint.py                  # GPT of about 150 M parameters with AdamW, 1.8 GB, 4 processes
    python benchmarks/checkpoint.py --layers 2       # smaller
    python benchmarks/checkpoint.py --rows blocked   # some rows alone: those whose names have this in them
    python benchmarks/checkpoint.py --plan           # planning and metadata for 65,536 ranks
    python benchmarks/checkpoint.py --merge 4        # 4 GiB in files of 256 MiB to one file, and to others; beside cp

Bytes are those that the processes read by calls (/proc/self/io). Before each load the page cache is dropped; before
each save what the last one wrote is removed and the disk is idle, so that neither pays for the other.
"""

import argparse
import contextlib
import datetime
import functools
import gc
import mmap
import os
import queue
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as theirs
import torch.multiprocessing as mp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import shardwise
from shardwise import checkpoint

WIDTH, VOCABULARY, CONTEXT = 768, 50257, 1024


def shapes(layers):
    found = {"wte": (VOCABULARY, WIDTH), "wpe": (CONTEXT, WIDTH), "ln_f": (WIDTH,)}
    for i in range(layers):
        found |= {
            f"h.{i}.ln_1": (WIDTH,),
            f"h.{i}.attn.qkv": (3 * WIDTH, WIDTH),
            f"h.{i}.attn.proj": (WIDTH, WIDTH),
            f"h.{i}.ln_2": (WIDTH,),
            f"h.{i}.mlp.up": (4 * WIDTH, WIDTH),
            f"h.{i}.mlp.down": (WIDTH, 4 * WIDTH),
        }
    return found


def placement(library, how, name, shape):
    if how == "rows":
        return library.Shard(0)
    if how == "columns":
        return library.Shard(len(shape) - 1)
    if len(shape) == 1 or name == "wpe":  # tensor parallel
        return library.Replicate()
    return library.Shard(1 if name.endswith(("proj", "down")) else 0)


def state(library, mesh, layers, how, fill):
    """Parameters and the two states of AdamW."""
    out = {}
    for name, shape in shapes(layers).items():
        for kind in ("model", "exp_avg", "exp_avg_sq"):
            place = [placement(library, how, name, shape)]
            if library is theirs:
                full = torch.empty(shape, device="meta")
                local = theirs.distribute_tensor(full, mesh, place).to_local()
                local = torch.rand(local.shape) if fill else torch.zeros(local.shape)
                made = theirs.DTensor.from_local(local, mesh, place, run_check=False, shape=shape, stride=full.stride())
            else:
                made = library.zeros(*shape, device_mesh=mesh, placements=place)
                if fill:
                    made.to_local().uniform_()
            out[f"{kind}.{name}"] = made
    return out


def read_so_far():
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def drop_cache(folder):
    for path in Path(folder).rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


class Peak:
    """The memory of this process beyond what it was, at its most."""

    def __enter__(self):
        self.most = self.first = self._now()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _now(self):
        with open("/proc/self/smaps_rollup") as file:  # what is shared with others counts by its part
            lines = dict(line.split()[:2] for line in file if line.startswith("Pss_"))
        return (int(lines["Pss_Anon:"]) + int(lines["Pss_Shmem:"])) << 10

    def _watch(self):
        while not self.stop.wait(0.02):
            self.most = max(self.most, self._now())

    def __exit__(self, *exc):
        self.stop.set()
        self.thread.join()
        self.extra = self.most - self.first


class Measured(NamedTuple):
    """A run of a task, or the best of several: seconds of the slowest process, bytes that all read, memory of the
    process that took most, seconds of processors; of several runs also the middle of the seconds."""

    seconds: float
    read: float
    extra: float
    processors: float
    median: float


class Task(NamedTuple):
    """What is measured, with what comes before and after it, outside of the time that counts."""

    run: Callable[[], object]
    cached: str | None = None  # a folder of which the page cache is dropped before
    written: str | None = None  # a folder that is removed before, so that no task waits for what another one left
    then: Callable[[object], object] | None = None


def prepared(task):
    """Leave the disk with nothing to do."""
    if dist.get_rank() == 0:
        if task.written is not None:
            shutil.rmtree(task.written, ignore_errors=True)
            os.sync()
        if task.cached is not None:
            drop_cache(task.cached)
    gc.collect()


def measured(task, watch=False):
    """One run of a task. Memory is known with `watch` alone, and times are too long then."""
    prepared(task)
    with Peak() if watch else contextlib.nullcontext() as peak:
        dist.barrier()
        before, begin, spent = read_so_far(), time.perf_counter(), time.process_time()
        made = task.run()
        seconds, spent = time.perf_counter() - begin, time.process_time() - spent
    if task.then is not None:
        task.then(made)  # nobody talks before it has ended: it may use the same process group
    found = torch.tensor([seconds, float(peak.extra if watch else 0)], dtype=torch.float64)
    total = torch.tensor([read_so_far() - before, spent], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return Measured(found[0].item(), total[0].item(), found[1].item(), total[1].item(), found[0].item())


def best_of(times, *tasks):
    """The best of some runs of each task, in turns, so that all meet the same machine, after one of each that warms up
    and whose memory is watched. Who comes first changes from turn to turn."""
    runs = [[] for _ in tasks]
    for i in range(times + 1):
        for found, task in list(zip(runs, tasks))[:: -1 if i % 2 else 1]:
            found.append(measured(task, watch=i == 0))
    return [best(found) for found in runs]


def best(runs):
    """The quickest of some runs, and the middle one, with the memory of the first, which was watched."""
    first, timed = runs[0], runs[1:] or runs
    seconds = [run.seconds for run in timed]
    processors = min(run.processors for run in timed)
    return Measured(min(seconds), first.read, first.extra, processors, statistics.median(seconds))


def worker(rank, size, store, job, results):
    warnings.filterwarnings("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=datetime.timedelta(minutes=5)
    )
    found = job(size)
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()


def _answer(results, processes):
    while True:
        try:
            return results.get(timeout=2)
        except queue.Empty:
            if any(process.exitcode for process in processes):
                raise SystemExit("a process failed") from None


def on_processes(size, job):
    context = mp.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        args = (size, os.path.join(folder, "store"), job, results)
        processes = [context.Process(target=worker, args=(rank, *args)) for rank in range(size)]
        for process in processes:
            process.start()
        try:
            found = _answer(results, processes)
        finally:
            failed = any(process.exitcode for process in processes)
            for process in processes:
                process.join(1 if failed else 30)
                if process.is_alive():
                    process.kill()
    return found


# -- what the machine takes for the same bytes, without a library ---------------------------------------------
CHUNK = 2 << 20


def by_two(work, chunks):
    """`work` for each of some chunks, by two threads, so that the disk always has one to do."""
    with ThreadPoolExecutor(2) as threads:
        for _ in threads.map(work, chunks):
            pass


class Machine:
    """The least that a save, a load or a staged copy can take on this machine: system calls and nothing else. Every
    process does its share."""

    def __init__(self, root, tensors):
        self.root, self.rank, self.size = root, dist.get_rank(), dist.get_world_size()
        self.held = [x.to_local() for x in tensors.values()]
        self.bytes = sum(x.numel() * x.element_size() for x in self.held)
        self.copies = [torch.zeros_like(x) for x in self.held]
        self.memory = threading.local()

    def buffer(self):
        if not hasattr(self.memory, "buffer"):
            self.memory.buffer = mmap.mmap(-1, CHUNK)
            self.memory.buffer.write(os.urandom(CHUNK))
        return memoryview(self.memory.buffer)

    def read(self):
        for path in sorted(Path(f"{self.root}/ours").glob("*.safetensors")):
            handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
            every = range(0, path.stat().st_size, CHUNK)
            by_two(lambda at, handle=handle: os.preadv(handle, [self.buffer()], at), every[self.rank :: self.size])
            os.close(handle)

    def write(self):
        handle = os.open(f"{self.root}/alone-{self.rank}", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
        os.posix_fallocate(handle, 0, self.bytes)
        by_two(lambda at: os.pwritev(handle, [self.buffer()], at), range(0, self.bytes, CHUNK))
        os.fsync(handle)
        os.close(handle)

    def forget(self, _):
        os.remove(f"{self.root}/alone-{self.rank}")

    def copy(self):
        torch._foreach_copy_(self.copies, self.held)


# -- what is measured ------------------------------------------------------------------------------------------
def both(size, layers, how, fill):
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    ours = state(shardwise, mesh, layers, how, fill)
    peers = state(theirs, mesh, layers, how, fill)
    return ours, peers


SAVE, PUBLISHED, BLOCKED = "save", "save as safetensors (beside: native)", "blocked by an asynchronous save"
LOADS = {
    "load 4 -> 4 ranks, as saved": (4, "rows"),
    "load 4 -> 3 ranks": (3, "rows"),
    "load dim 0 -> dim 1": (4, "columns"),
    "load ZeRO 3 -> tensor parallel": (4, "tp"),
}


def saves(size, root, layers, times, rows):
    """The rows of saves that are asked for; both checkpoints are there for loads in any case."""
    ours, peers = both(size, layers, "rows", True)
    found = {}
    native = Task(lambda: checkpoint.save(f"{root}/ours", ours), written=f"{root}/ours")
    peer = Task(lambda: dcp.save(peers, checkpoint_id=f"{root}/dcp"), written=f"{root}/dcp")
    published = Task(lambda: checkpoint.save(f"{root}/hf", ours, format="safetensors"), written=f"{root}/hf")
    machine = Machine(root, ours)
    alone = Task(machine.write, then=machine.forget)
    if PUBLISHED in rows:
        mine, other, least, files = best_of(times, native, peer, alone, published)
        found |= {SAVE: (mine, other, least), PUBLISHED: (files, mine, least)}
    elif SAVE in rows:
        found[SAVE] = best_of(times, native, peer, alone)
    elif rows != [BLOCKED]:
        best_of(0, native, peer)
    if BLOCKED in rows:
        found[BLOCKED] = blocked(times, ours, peers, root)
    found["bytes"] = sum(x.numel() * 4 for x in ours.values())
    return found


def blocked(times, ours, peers, root):
    """How long the call takes; the second and later ones, when memory to copy to is there. Nobody writes meanwhile."""
    path, beside, own = f"{root}/async", f"{root}/dcp-async", dist.new_group(backend="gloo")
    mine = Task(lambda: checkpoint.save(path, ours, async_=True), written=path, then=lambda handle: handle.wait())
    save = functools.partial(dcp.async_save, peers, checkpoint_id=beside, process_group=own)
    other = Task(save, written=beside, then=lambda future: future.result())
    found = best_of(times, mine, other, Task(Machine(root, ours).copy))
    if dist.get_rank() == 0:
        for folder in (path, beside):
            shutil.rmtree(folder, ignore_errors=True)
    return found


def loads(size, root, layers, how, times):
    ours, peers = both(size, layers, how, False)
    mine = lambda: checkpoint.load(f"{root}/ours", ours)  # noqa: E731
    other = lambda: dcp.load(peers, checkpoint_id=f"{root}/dcp")  # noqa: E731
    alone = Task(Machine(root, ours).read, cached=f"{root}/ours")
    return best_of(times, Task(mine, cached=f"{root}/ours"), Task(other, cached=f"{root}/dcp"), alone)


def planning():
    """1,000 tensors on 65,536 ranks: what one rank works out to save them, and what the manifest says."""
    from shardwise.checkpoint.blocks import Cuts, block_bytes_for
    from shardwise.checkpoint.files import Entry, lay_out
    from shardwise.checkpoint.holders import replicas
    from shardwise.checkpoint.jobs import meet
    from shardwise.checkpoint.manifest import manifest_text
    from shardwise.layout import Layout
    from shardwise.mesh import as_mesh

    mesh = as_mesh(shardwise.simulate((64, 64, 16)))
    entries = [Entry(f"layers.{i}.weight", torch.bfloat16, (16384, 8192)) for i in range(1000)]
    begin = time.process_time()
    files = lay_out(entries, 5 << 30)
    size = block_bytes_for(sum(entry.nbytes for entry in entries))
    coords, written = mesh.coords(mesh.ranks[12345]), 0
    cuts = Cuts(size)
    blocks = {entry.name: cuts[entry.shape, 2] for entry in entries}
    for entry in entries:
        layout = Layout.make(
            mesh, [shardwise.Shard(0), shardwise.Replicate(), shardwise.Shard(1)], entry.shape, torch.bfloat16
        )
        turns = blocks[entry.name][coords[1] :: replicas(layout)]
        written += sum(meet(tile, block.tile) is not None for tile in layout.tiles_at(coords) for block in turns)
    seconds = time.process_time() - begin
    layouts = dict.fromkeys(
        (entry.name for entry in entries), {"mesh": [64, 64, 16], "placements": ["S(0)", "R", "S(1)"]}
    )
    sums = {name: [0] * len(found) for name, found in blocks.items()}
    tree = {"dict": [[entry.name, {"tensor": entry.name}] for entry in entries]}
    text = manifest_text(
        entries, files, sums, block_bytes=size, tree=tree, layouts=layouts, step=1, world_size=65536, random=None
    )
    return seconds, len(text), load_planning(mesh, entries, size)


def load_planning(mesh, entries, block_bytes):
    """What one rank works out to load them in another layout, 8 ranks a host."""
    from shardwise.checkpoint.files import Place
    from shardwise.checkpoint.holders import side_of_layout
    from shardwise.checkpoint.plan import MEMORY, plan
    from shardwise.checkpoint.source import FileSource
    from shardwise.layout import Layout

    begin = time.process_time()
    source = FileSource(Path("simulated"), {entry.name: (entry, Place(Path("simulated"), 0)) for entry in entries})
    source.block_bytes = block_bytes
    places = [shardwise.Shard(1), shardwise.Replicate(), shardwise.Shard(0)]
    side = side_of_layout(Layout.make(mesh, places, entries[0].shape, torch.bfloat16))
    hosts = [rank // 8 for rank in range(len(mesh.ranks))]
    plan(source, {entry.name: side for entry in entries}, mesh.ranks, mesh.ranks[12345], MEMORY, hosts=hosts)
    return time.process_time() - begin


def merging(gib, root, times):
    """Seconds of `merge`, `reshard` and `cp` for a checkpoint in several files, to the disk, the best of some runs of
    each, in turns; and memory of the first two in MiB."""
    names = [f"t{i}" for i in range(int(gib * 16))]
    checkpoint.save(f"{root}/parts", {name: torch.rand(16 << 20) for name in names}, max_file_bytes=256 << 20)
    seconds, memory = {"merge": [], "reshard": [], "cp": []}, 0
    for _ in range(times):
        for what, found in seconds.items():
            shutil.rmtree(f"{root}/{what}", ignore_errors=True)
            drop_cache(f"{root}/parts")
            if what == "cp":
                found.append(copied(root))
                continue
            command = [sys.executable, "-c", _MERGE, what, f"{root}/parts", f"{root}/{what}"]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            took, extra = said.splitlines()[-1].split()
            found.append(float(took))
            memory = max(memory, int(extra))
    return {what: min(found) for what, found in seconds.items()}, memory


_MERGE = """
import sys, time
import shardwise.checkpoint
from shardwise.cli import main
def most(key):  # ru_maxrss would count what the parent process once had
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))
before = most("VmRSS")
begin = time.perf_counter()
code = main(["checkpoint", *sys.argv[1:]])
seconds = time.perf_counter() - begin
sys.stdout = sys.__stdout__
print()
print(seconds, (most("VmHWM") - before) >> 10)
sys.exit(code)
"""


def copied(root):
    begin = time.perf_counter()
    subprocess.run(["cp", "-r", f"{root}/parts", f"{root}/cp"], check=True)
    subprocess.run(["sync", "-f", f"{root}/cp"], check=True)  # a merge is on the disk when it ends, too
    return time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--times", type=int, default=3, help="runs of each; the best counts")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="only rows with this in their names")
    parser.add_argument("--folder", default=None, help="where to write")
    parser.add_argument("--plan", action="store_true", help="only planning for 65,536 ranks")
    parser.add_argument(
        "--merge", type=float, metavar="GIB", help="only `shardwise checkpoint merge` of so much, and cp"
    )
    options = parser.parse_args()
    console = Console(width=130)
    if options.plan:
        seconds, size, load = planning()
        console.print(
            f"1,000 tensors on 65,536 ranks: a save planned in {seconds:.2f} s, a load in {load:.2f} s of CPU time, "
            f"manifest of {size / 2**20:.2f} MiB"
        )
        return 0
    root = tempfile.mkdtemp(dir=options.folder, prefix="checkpoint-")
    try:
        if options.merge:
            seconds, memory = merging(options.merge, root, options.times)
            cp = seconds.pop("cp")
            said = ", ".join(f"{what} {took:.2f} s: {cp / took:.2f}x its speed" for what, took in seconds.items())
            console.print(f"cp and sync {cp:.2f} s; {said}; {memory} MiB beside")
            return 0
        table(root, options, console)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return 0


def table(root, options, console):
    every = [SAVE, PUBLISHED, BLOCKED, *LOADS]
    rows = [row for row in every if not options.rows or any(asked in row for asked in options.rows)]
    if not rows:
        raise SystemExit(f"--rows {' '.join(options.rows)}: no row has that in its name; there are {', '.join(every)}")
    cases = {name: case for name, case in LOADS.items() if name in rows}
    size = {"root": root, "layers": options.layers, "times": options.times}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("save", total=1 + len(cases))
        found = on_processes(4, functools.partial(saves, rows=rows, **size))
        total = found.pop("bytes")
        progress.advance(task)
        for name, (ranks, how) in cases.items():
            progress.update(task, description=name)
            found[name] = on_processes(ranks, functools.partial(loads, how=how, **size))
            progress.advance(task)
    shown = Table(
        title=f"{total / 1e9:.2f} GB, best and median of {options.times} in turns, torch {torch.__version__}",
        caption="Both sync their files (DCP: sync_files=True, its default) and compute with one thread a process (DCP: "
        "thread_count=1, its default; shardwise has one more that waits for the disk); loads: page cache dropped. "
        "Machine: the same bytes written, copied or read by the same processes with system calls alone, past the page "
        "cache.",
    )
    for column in (
        "",
        "shardwise s",
        "DCP s",
        "machine s",
        "ratio",
        "of medians",
        "of CPU s",
        "bytes read / total",
        "DCP",
        "extra MiB a rank",
        "DCP ",
    ):
        shown.add_column(column, justify="left" if not column else "right")
    for name, (mine, other, least) in found.items():
        row = [name, *(f"{one.seconds:.2f} {one.median:.2f}" for one in (mine, other, least))]
        for what in ("seconds", "median", "processors"):
            row.append(f"{getattr(mine, what) / getattr(other, what):.2f}x")
        row += [f"{one.read / total:.2f}" if "load" in name else "" for one in (mine, other)]
        row += [f"{one.extra / 2**20:.0f}" for one in (mine, other)]
        shown.add_row(*row)
    console.print(shown)


if __name__ == "__main__":
    sys.exit(main())
