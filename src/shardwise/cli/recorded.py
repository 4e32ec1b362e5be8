"""`shardwise report` and `shardwise blame`: what a recorded run did, and who hung."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from shardwise.cli.help import Help
from shardwise.drawing import size_name
from shardwise.reports import blame, read_run
from shardwise.reports.chrome import chrome_trace
from shardwise.reports.page import page
from shardwise.reports.summary import summary

_EXAMPLES = """examples:
  shardwise report run/                      run/report.html, for a browser
  shardwise report run/ --chrome trace.json  for https://ui.perfetto.dev
  shardwise report run/ --json -             tables for programs, on stdout
  shardwise blame run/                       which rank hung, and where
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    report = commands.add_parser(
        "report",
        help="a page of a recorded run",
        description="`shardwise report`: what a run did that `shardwise.debug.record(folder)` wrote down.",
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    report.add_argument("folder", help="what shardwise.debug.record(folder) wrote")
    report.add_argument("-o", "--out", help="the HTML file (default: report.html in the folder)")
    report.add_argument("--chrome", metavar="FILE", help="write a trace for Perfetto and chrome://tracing instead")
    report.add_argument("--json", metavar="FILE", help="write the tables as JSON instead; - is stdout")
    report.set_defaults(run=_report)
    who = commands.add_parser(
        "blame",
        help="who hung in a recorded run",
        description="`shardwise blame`: which rank of a recorded run hung, died or did something else, and where. "
        "The exit code is 1 where there is one.",
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    who.add_argument("folder", help="what shardwise.debug.record(folder) wrote")
    who.add_argument("--no-lines", action="store_true", help="ranks may be at different lines of the program")
    who.set_defaults(run=_blame)


def _report(options: argparse.Namespace, console: Console) -> int:
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("reading", total=None)
        try:
            run = read_run(options.folder, lambda done, ranks: progress.update(bar, completed=done, total=ranks))
        except FileNotFoundError as error:
            console.print(escape(str(error)))
            return 2
        progress.update(bar, description="writing", total=None)
        if options.json == "-":
            print(json.dumps(summary(run), indent=1))
            return 0
        if options.json or options.chrome:
            out = Path(options.json or options.chrome)
            out.write_text(json.dumps(summary(run) if options.json else chrome_trace(run)))
        else:
            out = Path(options.out or Path(options.folder, "report.html"))
            out.write_text(page(run))
    console.print(f"{out}: {size_name(out.stat().st_size)}, {len(run.ranks)} ranks", highlight=False)
    return 0


def _blame(options: argparse.Namespace, console: Console) -> int:
    try:
        verdict = blame(read_run(options.folder), lines=not options.no_lines)
    except FileNotFoundError as error:
        console.print(escape(str(error)))
        return 2
    console.print(escape(str(verdict)), highlight=False, soft_wrap=True)
    return 1 if verdict.ranks else 0
