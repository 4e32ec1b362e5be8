"""Run the text of a program in several processes, each forked off the one that has loaded torch (`preloaded.py`).

Unlike workers, they make their own world, and may die; unlike processes of their own, they do not load torch first.
"""

import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.workers import TASK_SECONDS, preloaded


@dataclass(frozen=True)
class Ended:
    said: str
    noise: str
    code: int | None  # of the exit


def run_forked(program, arguments, only=None, timeout=TASK_SECONDS):
    """How the processes ended, one for each list of arguments: what they find in `sys.argv`. If `only` is given, the
    others are killed when that one has ended."""
    with tempfile.TemporaryDirectory(prefix="forked-") as folder:
        context = preloaded()
        processes = [
            context.Process(target=_run, args=(program, [str(a) for a in mine], f"{folder}/{i}"), daemon=True)
            for i, mine in enumerate(arguments)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        for i in range(len(processes)) if only is None else [only]:
            processes[i].join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        text = lambda name: path.read_text() if (path := Path(folder, name)).exists() else ""
        return [Ended(text(f"{i}.out"), text(f"{i}.err"), code) for i, code in enumerate(codes)]


def _run(program, arguments, files):
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{files}.{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
    sys.argv = ["program", *arguments]
    exec(compile(program, "program", "exec"), {"__name__": "__main__"})
