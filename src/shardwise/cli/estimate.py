"""`shardwise estimate`: a training script as it is, on a mesh without values; its step's memory, bytes and time."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from rich.console import Console

from shardwise.cli import as_main
from shardwise.cli.help import Help
from shardwise.errors import ShardwiseError
from shardwise.forecast import Report, estimate, estimate_program, every_kind
from shardwise.forecast.hardware import known
from shardwise.forecast.progress import Bar
from shardwise.interop import adoption
from shardwise.mesh import OutlinedMesh, outline
from shardwise.protocols import Result
from shardwise.torch_paths.adopting import adopt, release

_EXAMPLES = """SCRIPT is a training script as you run it under torchrun. Its init_process_group, init_device_mesh and
DeviceMesh are played, with as many ranks as --mesh says; torch.distributed.tensor and fully_shard are shardwise's, as
under `shardwise run`. Two steps of its optimizer are played, and the script is ended.

Or SCRIPT has a function that gives the step:
  def build(mesh, batch=8):
      model = ...
      def step(): ...
      return step

examples:
  shardwise estimate train.py --mesh 512x128 --args="--lr 0.1"
  shardwise estimate train.py --mesh 64x8 --axes dp,tp --set batch=4 \\
      --hardware h200-sxm --save report.json
  shardwise estimate train.py --mesh 8 --kinds    the worst kind of rank
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "estimate",
        help="what a training step will cost on a mesh of any size",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    parser.add_argument("script", metavar="SCRIPT", help="a training script, or one with build(mesh, **settings)")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module that is run, not a file")
    parser.add_argument("--args", default="", type=shlex.split, help="the script's own arguments, in one string")
    parser.add_argument("--steps", default=2, type=int, help="steps to play; the last one counts (default: 2)")
    parser.add_argument("--tokens", type=int, help="tokens of all ranks in a step, for tokens per second")
    parser.add_argument("--mesh", required=True, type=_shape, help="ranks along each axis, as 512x128")
    parser.add_argument("--axes", type=lambda text: text.split(","), help="their names, as dp,tp")
    parser.add_argument("--device", default="cuda", help="the kind of device of the ranks (default: cuda)")
    parser.add_argument(
        "--hardware", default="h100-sxm", help=f"{', '.join(known())}, or a JSON file (default: h100-sxm)"
    )
    parser.add_argument("--play", type=int, default=0, help="the rank to play (default: 0)")
    parser.add_argument("--kinds", action="store_true", help="play one rank of each kind")
    for name, text in (("--set", "an argument of build"), ("--assume", "a value that the program asks for")):
        parser.add_argument(name, action="append", default=[], metavar="NAME=VALUE", type=_setting, help=text)
    parser.add_argument("--function", default="build", help="another name than build")
    parser.add_argument("--save", help="write the report: .json, .trace.json (Chrome), else text")
    parser.set_defaults(run=run)


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.lower().split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be ranks along each axis, as 512x128") from None


def _setting(text: str) -> tuple[str, Any]:
    name, found, value = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE")
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            pass
    return name, {"true": True, "false": False, "none": None}.get(value.lower(), value)


def run(options: argparse.Namespace, console: Console) -> int:
    """Estimate and print; the exit code is 0 where the step fits into the memory of the device, else 1."""
    path = Path(options.script)
    if not options.module and not path.exists():
        print(f"shardwise estimate: no such file: {options.script!r}", file=sys.stderr)
        return 2
    is_program = options.module or not _defines(path, options.function)
    if is_program and options.set:
        print(
            f"shardwise estimate: --set is for {options.function}(), which {path} has not; use --args", file=sys.stderr
        )
        return 2
    with Bar(options.steps) as bar:
        try:
            mesh = outline(
                options.mesh,
                axis_names=options.axes,
                device=options.device,
                play=options.play,
                assume=dict(options.assume),
            )
            report = _of_program(mesh, options, bar) if is_program else _of_build(path, mesh, options, bar)
        except ShardwiseError as error:
            bar.stop()
            hint = ". Here: --assume NAME=VALUE, as --assume item=1.0" if "assume={" in str(error) else ""
            print(f"shardwise estimate: {error}{hint}", file=sys.stderr)
            return 2
    for table in report.tables():
        console.print(table)
    if options.save:
        report.save(options.save)
    return 0 if report.fits else 1


def _of_build(path: Path, mesh: OutlinedMesh, options: argparse.Namespace, bar: Bar) -> Report:
    build, settings = getattr(_loaded(path), options.function), dict(options.set)
    bar.playing(_rank_of(mesh))
    if options.kinds:
        return every_kind(
            lambda mesh: _step(build(mesh, **settings)), mesh, hardware=options.hardware, tokens=options.tokens, bar=bar
        )
    with mesh:
        return estimate(
            _step(build(mesh, **settings)),
            hardware=options.hardware,
            mesh=mesh,
            warmup=options.steps - 1,
            tokens=options.tokens,
            told=bar.told,
        )


def _rank_of(mesh: OutlinedMesh) -> str:
    return f"rank {mesh.get_rank()} of {mesh.size():,}"


def _of_program(mesh: OutlinedMesh, options: argparse.Namespace, bar: Bar) -> Report:
    """The script as `__main__`; with --kinds once for each kind of rank."""

    def played(mesh: OutlinedMesh) -> tuple[Report, list[int]]:
        bar.playing(_rank_of(mesh))
        with _as_main(options) as program:
            return estimate_program(
                program.run,
                mesh,
                hardware=options.hardware,
                steps=options.steps,
                tokens=options.tokens,
                say=bar.say,
                told=bar.told,
            )

    worst, ranks = played(mesh)
    found = [(worst.rank, worst.memory.peak)]
    for rank in ranks if options.kinds else ():
        if rank != mesh.get_rank():
            report, _ = played(mesh.playing(rank))
            found.append((rank, report.memory.peak))
            worst = report if report.memory.peak > worst.memory.peak else worst
    worst.kinds = found if options.kinds else []
    return worst


@contextmanager
def _as_main(options: argparse.Namespace) -> Iterator[as_main.Program]:
    """The script, ready to be run; afterwards the process is as it was."""
    program = as_main.Program(options.script, options.module)
    is_first = adoption.active() is None
    adopt()
    main = sys.modules["__main__"]
    with (
        mock.patch.object(sys, "argv", [program.file, *options.args]),
        mock.patch.object(sys, "path", [program.folder, *sys.path[1:]]),
        mock.patch.dict(os.environ),
    ):
        try:
            yield program
        finally:
            sys.modules["__main__"] = main
            if is_first:
                release()


def _defines(path: Path, name: str) -> bool:
    """Whether a script has a function of that name."""
    body = ast.parse(path.read_text(), str(path)).body
    return any(isinstance(part, ast.FunctionDef) and part.name == name for part in body)


def _step(built: Result) -> Callable[[], Any]:
    """What build gave: the step, or a tuple whose last element is it."""
    return built[-1] if isinstance(built, tuple) else built


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
