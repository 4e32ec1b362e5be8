"""`shardwise run`: a program as it is, with torch's modules of distributed tensors being shardwise."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from shardwise.cli import as_main
from shardwise.cli.help import Help
from shardwise.torch_paths.adopting import adopt

_EXAMPLES = """examples:
  shardwise run train.py --lr 0.1        like python train.py --lr 0.1
  shardwise run -m package.train         like python -m package.train
  torchrun --nproc-per-node 4 -m shardwise run train.py --lr 0.1
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "run",
        help="run a program written for torch.distributed.tensor",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module, not a file")
    parser.add_argument("program", metavar="PROGRAM", help="a Python file, a folder with a __main__.py, or a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the program's own arguments")
    parser.set_defaults(run=lambda options, _: run(options.program, options.arguments, options.module))


def run(program: str, arguments: Sequence[str], is_module: bool = False) -> int:
    """Run a program after adopt(), in this process, as Python would. What it raises is raised here."""
    if not is_module and not os.path.exists(program):
        print(f"shardwise run: no such file: {program!r}", file=sys.stderr)
        return 2
    adopt()
    main = as_main.Program(program, is_module)
    sys.argv = [main.file, *arguments]
    if not sys.flags.safe_path:  # the first entry is where the `shardwise` command, or what is run by -m, was found
        sys.path[0] = main.folder
    main.run()
    return 0
