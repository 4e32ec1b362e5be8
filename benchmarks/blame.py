"""Faults in programs of 4 gloo processes, and whether `shardwise blame` names the rank and the line.

    python benchmarks/blame.py --count 100

    python benchmarks/blame.py --count 20 --flight-recorder   # what torch's own recorder says of the same faults

Each fault is a world of its own whose ranks record what they do. One of them raises, exits, is killed or stopped, or
does something else than the others; when the others have ended, the record is read. torch's flight recorder is kept by
each process in memory: here every rank that still can writes it to a file when it ends (gloo has no watchdog that would
do so), and torch's `torchfrtrace` reads the files. A rank that was killed leaves none.
"""

import argparse
import itertools
import os
import pickle
import random
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

from shardwise import Replicate, Shard, debug, distribute_tensor
from shardwise.parallel import ColwiseParallel, RowwiseParallel, data_parallel, parallelize_module
from shardwise.reports import blame, read_run
from shardwise.testing.faults.differences import DIFFERENCES, THE_END
from shardwise.testing.faults.run import FORK, store, warm_up
from shardwise.testing.faults.scene import HAPPENS, TIMEOUT_SECONDS, Scene

SIZE = 4
FILE = os.path.basename(__file__)
R = Replicate()


# -- programs: `happens` is what the faulty rank does, and nothing on the others ------------------------------
def moves(scene, happens):
    """Moves of one tensor."""
    x = distribute_tensor(scene.tensor(), scene.mesh(), [Shard(0)], src_data_rank=None)
    for step in range(4):
        y = x.redistribute(placements=[Shard(1)])
        if step == 1 + scene.seed % 3:
            happens()
        y.redistribute(placements=[R])


def forward(scene, happens):
    """A module whose layers are cut, with a hook in its forward."""
    train(scene, lambda model: model[2].register_forward_pre_hook(lambda *_: happens()))


def backward(scene, happens):
    """The same with a hook in its backward."""
    train(scene, lambda model: model[1].register_forward_hook(
        lambda module, given, out: out.register_hook(lambda grad: happens()) and None))  # fmt: skip


def train(scene, spoil):
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 4))
    mesh = scene.mesh()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for step in range(3):
        if step == scene.seed % 3:
            spoil(model)
        x = distribute_tensor(scene.tensor(), mesh, [R], src_data_rank=None)
        (model(x) - 1).square().mean().backward()


def zero(scene, happens):
    """Training with parameters cut over the ranks (ZeRO 3)."""
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 4))
    mesh = scene.mesh()
    data_parallel(model, mesh, shard="parameters", units=[model[0], model[2]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[2].register_forward_pre_hook(lambda *_: happens())
    for _ in range(2):
        x = distribute_tensor(scene.tensor(), mesh, [Shard(0)], src_data_rank=None)
        (model(x) - 1).square().mean().backward()
        optimizer.step()


def async_moves(scene, happens):
    """Two moves under way at once."""
    mesh = scene.mesh()
    x, y = (distribute_tensor(scene.tensor(number=i), mesh, [Shard(0)], src_data_rank=None) for i in range(2))
    a = x.redistribute(placements=[R], async_op=True)
    happens()
    b = y.redistribute(placements=[Shard(1)], async_op=True)
    a.wait()
    b.wait()
    x.redistribute(placements=[Shard(1)])


def different(scene, what):
    """At one of three steps the faulty rank does the other thing."""
    x = distribute_tensor(scene.tensor(12, 6), scene.mesh(), [Shard(0)], src_data_rank=None)
    usual, other = DIFFERENCES[what]
    for step in range(3):
        x.redistribute(placements=[R])
        if scene.faulty and step == scene.seed % 3:
            other(x)  # THE OTHER
        else:
            usual(x)
        x.redistribute(placements=[Shard(1)]).redistribute(placements=[R])  # WHAT COMES NEXT


def skipped(scene, what):
    """A rank that does not go into a branch."""
    x = distribute_tensor(scene.tensor(12, 6), scene.mesh(), [Shard(0)], src_data_rank=None)
    for step in range(3):
        if not (scene.faulty and step == 1):
            x.redistribute(placements=[R])
        x.redistribute(placements=[R])  # THE OTHER


PLACES = {"moves": moves, "forward": forward, "backward": backward, "a ZeRO step": zero, "async moves": async_moves}
FAULTS = [(f"a rank {what} in {where}", (place, what)) for where, place in PLACES.items() for what in HAPPENS]
FAULTS += [(f"a rank does another thing: {what}", (different, what)) for what in DIFFERENCES]
FAULTS += [("a rank skips a branch", (skipped, "")), ("a rank never comes", (None, ""))]


@dataclass
class Trial:
    """One fault."""

    name: str
    program: tuple
    faulty: int
    seed: int
    folder: Path
    ranks: list = field(default_factory=list)
    started: float = 0.0
    verdict: str = ""
    wrong: str = ""
    of_torch: str = ""  # what torchfrtrace prints

    def start(self, port):
        self.folder.mkdir()
        self.started = time.monotonic()
        for rank in range(SIZE):
            scene = Scene(rank, SIZE, self.faulty, self.folder, self.seed, port)
            process = FORK.Process(target=play, args=(scene, self.program), daemon=True)
            process.start()
            self.ranks.append(process)

    def is_over(self):
        stays = self.program[1] == "is stopped"
        alive = [r for r, p in enumerate(self.ranks) if p.is_alive() and not (stays and r == self.faulty)]
        if alive and time.monotonic() - self.started < 5 * TIMEOUT_SECONDS:
            return False
        found = blame(read_run(self.folder / "run"))
        for process in self.ranks:
            process.kill()
            process.join()
        self.verdict, self.wrong = str(found), self.judge(found)
        if BUFFER in os.environ:
            self.of_torch = asked_of_torch(self.folder)
        return True

    def judge(self, found):
        if found.ranks != (self.faulty,):
            return f"names {found.ranks} instead of rank {self.faulty}"
        place, what = self.program
        if place is not None and f"{FILE}:" not in found.text and "scene.py" not in found.text:
            return "names no line"
        line = NEXT if what == "a move left out" else OTHER.get(place)  # a rank that does nothing is found at the next
        if line and what != THE_END and f"{FILE}:{line} " not in found.text.replace(";", " "):
            return f"does not name line {line}"
        return ""


BUFFER = "TORCH_FR_BUFFER_SIZE"  # what turns torch's flight recorder on


def dump(folder, rank):
    """Write what torch's flight recorder has of this process."""
    from torch._C._distributed_c10d import _dump_fr_trace

    found = pickle.loads(_dump_fr_trace())
    groups = {entry["process_group"][0]: entry["process_group"][1] for entry in found["entries"]}
    for name, words in groups.items():  # torch 2.13 leaves the names of gloo's groups out, and then cannot read it
        everyone = str(list(range(SIZE)))
        found["pg_config"].setdefault(name, {"name": name, "desc": words, "ranks": everyone})
    found["pg_config"].pop("", None)
    Path(folder, f"torch_{rank}").write_bytes(pickle.dumps(found))


def asked_of_torch(folder):
    """What `torchfrtrace` says of the files of all ranks that left one."""
    from torch.distributed.flight_recorder import fr_trace

    with tempfile.TemporaryFile("w+") as out:  # it prints, and logs to a stderr of its own
        kept = [os.dup(1), os.dup(2)]
        sys.stdout.flush()
        try:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
            fr_trace.main([str(folder), "-p", "torch_", "--allow-incomplete-ranks"])
        except (Exception, SystemExit) as error:  # where ranks are missing it may raise
            os.write(2, f"{type(error).__name__}: {error}".encode())
        finally:
            sys.stdout.flush()
            for number, old in enumerate(kept, 1):
                os.dup2(old, number)
                os.close(old)
        out.seek(0)
        return out.read().strip()


def line_with(mark, function):
    """The first line of a function that ends with a comment."""
    lines = enumerate(Path(__file__).read_text().splitlines(), 1)
    return next(n for n, text in lines if n > function.__code__.co_firstlineno and text.endswith(f"# {mark}"))


OTHER = {function: line_with("THE OTHER", function) for function in (different, skipped)}
NEXT = line_with("WHAT COMES NEXT", different)


def play(scene, program):
    """The life of one rank."""
    noise = os.open(scene.folder / f"noise-{scene.rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(noise, 1)
    os.dup2(noise, 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    place, what = program
    scene.join()
    try:
        if place is None and scene.faulty:
            os._exit(0)
        with debug.record(scene.folder / "run", keep=4096):
            if place is None:
                moves(scene, lambda: None)
            elif place in (different, skipped):
                place(scene, what)
            else:
                happens = HAPPENS[what]
                place(scene, lambda: happens() if scene.faulty else None)
    except SystemExit:
        raise
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        if BUFFER in os.environ:
            dump(scene.folder, scene.rank)


def trials(count, seed, folder, only=""):
    chance = random.Random(seed)
    wanted = [fault for fault in FAULTS if only in fault[0]]
    for i, (name, program) in zip(range(count), itertools.cycle(wanted)):
        yield Trial(name, program, chance.randrange(SIZE), chance.randrange(1000), Path(folder, str(i)))


def run(count, seed=0, jobs=2, only="", show=False):
    """Put so many faults into programs, and return the trials."""
    warm_up()
    done, running = [], []
    with store() as port, tempfile.TemporaryDirectory() as folder, Progress(disable=not show) as progress:
        bar = progress.add_task("faults", total=count)
        waiting = list(trials(count, seed, folder, only))
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(waiting.pop(0))
                running[-1].start(port)
            time.sleep(0.1)
            over = [trial for trial in running if trial.is_over()]
            running = [trial for trial in running if trial not in over]
            done += over
            progress.update(bar, advance=len(over))
    return done


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="faults whose names have this in them")
    parser.add_argument("-v", action="store_true", help="print what was said of each")
    parser.add_argument("--flight-recorder", action="store_true", help="ask torch's flight recorder too")
    options = parser.parse_args()
    if options.flight_recorder:
        os.environ[BUFFER] = "2000"
    console = Console()
    found = run(options.count, options.seed, options.jobs, options.only, show=console.is_terminal)
    for trial in found:
        if trial.wrong or options.v:
            print(f"{trial.name} (rank {trial.faulty}, seed {trial.seed}): {trial.wrong or 'right'}")
            print("    " + trial.verdict.replace("\n", "\n    "), flush=True)
            if trial.of_torch:
                print("    torch: " + trial.of_torch.replace("\n", "\n           "), flush=True)
    print(f"{sum(not trial.wrong for trial in found)} of {len(found)} faults: rank and line named")
    if options.flight_recorder:
        alone = lambda trial: rf"(missing ranks: |from ranks \()\{{{trial.faulty}\}}"  # the rank and no other
        named = [trial for trial in found if re.search(alone(trial), trial.of_torch)]
        lines = [trial for trial in named if FILE in trial.of_torch]
        print(f"torch's flight recorder: the rank in {len(named)} of {len(found)}, its line in {len(lines)}")
    for (name, right), n in sorted(Counter((t.name.split(" in ")[0], not t.wrong) for t in found).items()):
        print(f"  {n:3d} {'right' if right else 'WRONG'}  {name}")


if __name__ == "__main__":
    main()
