"""Run the text of a program in a process that has loaded torch and nothing of this library.

Such processes are forked off one that has imported torch and does nothing else, since loading torch takes longer than
most of these programs. As many interpreters of their own would take minutes.
"""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import shardwise

SECONDS = 240
_SOURCE = str(Path(shardwise.__file__).parents[1])
_SERVER = """
import gc, json, os, signal, sys, torch
import numpy, sympy, torch.fx.experimental.symbolic_shapes  # what torch's own DTensor loads first
assert 'torch.distributed.tensor' not in sys.modules
gc.collect(), gc.freeze()  # most of the time of an end would be the collection of all that torch has loaded
for line in sys.stdin:
    text, arguments, folder, files, seconds = json.loads(line)
    pid = os.fork()
    if pid == 0:
        signal.alarm(seconds)  # a program that hangs ends by it
        for number, name in enumerate(("in", "out", "err")):
            os.dup2(os.open(f"{files}/{name}", os.O_RDWR | os.O_CREAT), number)
        os.chdir(folder)
        sys.path[0], sys.argv = folder, arguments
        exec(compile(text, "program", "exec"), {"__name__": "__main__"})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@functools.cache
def _server():
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": _SOURCE, "OMP_NUM_THREADS": "1"},
    )
    atexit.register(_end, process)
    return process


def _end(process):
    process.stdin.close()
    process.wait()
    process.stdout.close()


def run_with_torch(text, arguments=("program",), folder="/"):
    """A `subprocess.CompletedProcess` of the program, with `sys.argv` and the folder it was run in."""
    with tempfile.TemporaryDirectory(prefix="with-torch-") as files:
        server = _server()
        task = (textwrap.dedent(text), list(map(str, arguments)), str(folder), files, SECONDS)
        server.stdin.write(json.dumps(task) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        out, err = (Path(files, name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(arguments, code, out, err)
