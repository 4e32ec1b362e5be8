"""Every operator of the proof on a mesh without values, beside simulation (`python benchmarks/estimate.py operators`).

Of each operator two samples of PyTorch's database are laid out in three ways on meshes of 3 and of 2 x 2 ranks. The
call and its gradient run simulated, and on outlined meshes that play each rank. Compared are layouts, shapes, dtypes,
strides, what each rank holds, and every communication with its bytes.

What was tried stands in build/estimate_operators.json, so that a run may be stopped and goes on later.
"""

import itertools
import json
import multiprocessing
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from rich.progress import Progress
from rich.table import Table

from shardwise.testing.outlined import compare_without_values
from shardwise.testing.spread import combinations
from shardwise.testing.subjects import subjects

TRIED = Path("build/estimate_operators.json")
SHAPES = ((3,), (2, 2))


def outcomes(name):
    """Of each comparison of an operator its verdict, the layouts and what was said."""
    found = []
    for sample, shape in itertools.product(subjects()[name].samples("function", 2), SHAPES):
        for layouts in combinations(sample.tensors, shape, limit=3, seed=name):
            outcome = compare_without_values(sample, shape, layouts)
            found.append((outcome.verdict, str(layouts), outcome.message[:400]))
    return found


def compare_operators(console, seconds, only=None, fresh=False, jobs=1):
    """Prints how many comparisons and operators ended how; returns how many comparisons are wrong."""
    known = [name for name in subjects() if only is None or only in name]
    tried = json.loads(TRIED.read_text()) if TRIED.exists() and not fresh and only is None else {}
    for name, found in _tried_now([name for name in known if name not in tried], len(known), seconds, jobs, console):
        tried[name] = found
        if only is None:  # at once, so that a run which is killed has not been in vain
            TRIED.parent.mkdir(exist_ok=True)
            TRIED.write_text(json.dumps(tried))
    console.print(summary(tried, len(known)))
    for name, found in tried.items():
        for verdict, layouts, message in found:
            if verdict in ("wrong", "asks for values") or only:
                console.print(f"{name} {layouts}: {verdict} {message}", markup=False, soft_wrap=True)
    return sum(verdict == "wrong" for found in tried.values() for verdict, *_ in found)


def _tried_now(names, total, seconds, jobs, console):
    """Operators and what comes of them, as processes get done; nothing is begun after `seconds`."""
    started = time.monotonic()
    spawn, one_thread = multiprocessing.get_context("spawn"), (torch.set_num_threads, (1,))  # they share the machine
    with Progress(console=console) as progress, ProcessPoolExecutor(jobs, spawn, *one_thread) as pool:
        bar = progress.add_task("operators", total=total, completed=total - len(names))
        tasks = {pool.submit(outcomes, name): name for name in names}
        for task in as_completed(tasks):
            if task.cancelled():
                continue
            yield tasks[task], task.result()
            progress.advance(bar)
            if time.monotonic() - started > seconds:
                for waiting in tasks:
                    waiting.cancel()


RIGHT, NO_GRADIENT = "right", "right, without the gradient, which simulation refuses"
ENDS = (RIGHT, NO_GRADIENT, "refused by simulation", "asks for values", "wrong")
NO_SAMPLE = "no sample with a dense tensor"


def ended(verdict, message):
    """How a comparison ended, in the words of the table."""
    if verdict == "right":
        return NO_GRADIENT if message else RIGHT
    return "refused by simulation" if verdict == "refused" else verdict


def summary(tried, known):
    """Comparisons and operators by how they ended; an operator counts where its worst comparison does."""
    table = Table("", "comparisons", "operators", title=f"{len(tried)} of {known} operators tried")
    comparisons, operators = Counter(), Counter()
    for found in tried.values():
        said = [ended(verdict, message) for verdict, _, message in found]
        comparisons.update(said)
        operators[max(said, key=ENDS.index, default=NO_SAMPLE)] += 1
    for said in (*ENDS, NO_SAMPLE):
        table.add_row(said, f"{comparisons[said]:,}", f"{operators[said]:,}")
    return table
