"""The `shardwise` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console

import shardwise
from shardwise.cli import calibrate, checkpoint, estimate, recorded, rules, run
from shardwise.cli.help import Help


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    about = "Distributed tensors for PyTorch."
    parser = argparse.ArgumentParser(prog="shardwise", description=about, formatter_class=Help)
    parser.add_argument("--version", action="version", version=f"shardwise {shardwise.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    rules.add_to(commands)
    run.add_to(commands)
    checkpoint.add_to(commands)
    estimate.add_to(commands)
    calibrate.add_to(commands)
    recorded.add_to(commands)
    options = parser.parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # in a pipe there is no edge to wrap at
    return options.run(options, console)
