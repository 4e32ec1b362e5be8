"""`shardwise checkpoint`: look at checkpoints, check them, and write them anew, without a process group."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from shardwise.checkpoint import others
from shardwise.checkpoint.commit import folder_of, is_checkpoint
from shardwise.checkpoint.files import MOST_FILE_BYTES
from shardwise.checkpoint.foreign import whole_tensors
from shardwise.checkpoint.manifest import MANIFEST
from shardwise.checkpoint.mapped_source import MappedSource
from shardwise.checkpoint.mapping import Map
from shardwise.checkpoint.opening import open_source
from shardwise.checkpoint.presets import PRESETS, preset
from shardwise.checkpoint.rewrite import rewrite
from shardwise.checkpoint.source import Source
from shardwise.checkpoint.tree import Json, built, flat_tree, value_of
from shardwise.checkpoint.verify import check_blocks
from shardwise.checkpoint.world import World
from shardwise.cli.help import Help
from shardwise.errors import CheckpointError, ShardwiseError

_EXAMPLES = """examples:
  shardwise checkpoint ls runs/7                    the checkpoints of a folder
  shardwise checkpoint show runs/7/step-00000100    its tensors and values
  shardwise checkpoint verify PATH                  compare all checksums
  shardwise checkpoint diff A B                     what differs
  shardwise checkpoint stats PATH                   least, greatest, mean values
  shardwise checkpoint reshard A B --max-file-size 5GiB
  shardwise checkpoint merge A B                    all tensors in one file
  shardwise checkpoint convert A B --format safetensors \\
      --map llama --inverse --heads 32 --kv-heads 8
"""
_ANY = "a checkpoint of any format"
_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "checkpoint",
        help="look at, check and convert checkpoints",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    for name, action, text in (
        ("ls", _ls, "the checkpoints of a folder"),
        ("show", _show, "the tensors and values of a checkpoint"),
        ("verify", _verify, "every byte against its checksum"),
        ("stats", _stats, "the smallest, largest and mean value of each tensor"),
    ):
        one = actions.add_parser(name, help=text)
        one.add_argument("path", metavar="PATH", help="a folder of checkpoints" if name == "ls" else _ANY)
        one.set_defaults(run=_guarded(action))
    diff = actions.add_parser("diff", help="what differs between two checkpoints")
    for name, text in (
        ("reshard", "the same tensors in files of another size"),
        ("merge", "all tensors in one file"),
        ("convert", "another format, or other names"),
    ):
        one = actions.add_parser(name, help=text)
        one.add_argument("path", metavar="FROM", help=_ANY)
        one.add_argument("target", metavar="TO", help="what to write")
        one.set_defaults(
            run=_guarded(_convert),
            format=None,
            map=None,
            inverse=False,
            drop_values=False,
            max_file_size=MOST_FILE_BYTES,
        )
        one.add_argument("--unchecked", action="store_true", help="compare no checksums, as where the manifest is lost")
        if name == "merge":
            one.set_defaults(max_file_size=1 << 62)
        else:
            one.add_argument("--max-file-size", type=_bytes, default=MOST_FILE_BYTES, metavar="SIZE", help="as 5GiB")
        if name == "convert":
            _add_format(one)
    diff.add_argument("path", metavar="A", help=_ANY)
    diff.add_argument("target", metavar="B", help="the one that it is compared with")
    diff.set_defaults(run=_guarded(_diff))


def _add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("shardwise", "safetensors", "dcp", "pt"), help="by default shardwise")
    parser.add_argument("--drop-values", action="store_true", help="leave out all that is no tensor")
    parser.add_argument("--map", choices=PRESETS, help="a table of names")
    parser.add_argument("--inverse", action="store_true", help="the table from the program's names to those of files")
    parser.add_argument("--prefix", default="", help="what stands before names on the program's side")
    parser.add_argument("--heads", type=int, default=1, help="of the model, for a table that asks for them")
    parser.add_argument("--kv-heads", type=int, default=None, help="heads of keys and values, if they are fewer")


def _bytes(text: str) -> int:
    """
    >>> _bytes("5GiB"), _bytes("300")
    (5368709120, 300)
    """
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text[len(digits) :].strip().lower()
    if not digits.isdigit() or unit not in _UNITS or int(digits) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write a size as 300MiB or 5GB")
    return int(digits) * _UNITS[unit]


def _guarded(action: Callable[[argparse.Namespace, Console], int]) -> Callable[[argparse.Namespace, Console], int]:
    def run(options: argparse.Namespace, console: Console) -> int:
        try:
            return action(options, console)
        except (ShardwiseError, OSError) as error:
            print(f"shardwise checkpoint: {error}", file=sys.stderr)
            return 1

    return run


@contextmanager
def _bar(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda n: progress.advance(task, n)


def size_text(n: float) -> str:
    """
    >>> size_text(3 << 20)
    '3 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.4g} {unit}"
        n /= 1024
    return f"{n:.4g} TiB"


def total_bytes(source: Source) -> int:
    return sum(entry.nbytes for entry in source.entries.values())


# -- actions -------------------------------------------------------------------------------------------------
def _ls(options: argparse.Namespace, console: Console) -> int:
    root = Path(options.path)
    if not root.exists():
        raise CheckpointError(f"{root}: there is no such folder")
    folders = [root] if is_checkpoint(root) or root.is_file() else sorted(p for p in root.iterdir() if is_checkpoint(p))
    table = Table("checkpoint", "step", "tensors", "size")
    bad = 0
    for folder in folders:
        try:
            source = open_source(folder)
            step = "" if source.step is None else str(source.step)
            table.add_row(str(folder), step, str(len(source.entries)), size_text(total_bytes(source)))
        except ShardwiseError as error:
            bad += 1
            table.add_row(str(folder), "", "", Text(str(error), "red"))
    console.print(table if folders else f"no checkpoints in {root}")
    return int(bad > 0)


def _show(options: argparse.Namespace, console: Console) -> int:
    source = open_source(options.path, verify="none")
    manifest = Path(options.path) / MANIFEST
    body = json.loads(manifest.read_text()) if manifest.exists() else {}
    table = Table("tensor", "dtype", "shape", "size", "layout when saved")
    for name, entry in source.entries.items():
        said = body["layouts"][body["tensors"][name][4]] if body else None
        dtype, shape = str(entry.dtype).removeprefix("torch."), str(list(entry.shape))
        table.add_row(name, dtype, shape, size_text(entry.nbytes), _layout_text(said))
    console.print(table)
    for name, value in source.values.items():
        console.print(f"{name} = {str(value_of(value))[:100]}", markup=False, highlight=False)
    step = "" if source.step is None else f", step {source.step}"
    console.print(f"{len(source.entries)} tensors, {size_text(total_bytes(source))}{step}")
    return 0


def _layout_text(said: Json) -> str:
    """
    >>> _layout_text({"mesh": {"shape": [2, 4], "axes": ["dp", "tp"]}, "placements": ["R", "S(0)"]})
    'dp 2: R, tp 4: S(0)'
    """
    if not said:
        return ""
    if "mesh" not in said:
        return f"{said['tiles']} tiles"
    mesh = said["mesh"]
    return ", ".join(f"{axis} {n}: {how}" for axis, n, how in zip(mesh["axes"], mesh["shape"], said["placements"]))


def _verify(options: argparse.Namespace, console: Console) -> int:
    source = open_source(options.path)
    with _bar(console, "verify", total_bytes(source)) as advance:
        check_blocks(source, World(0, (0,), None), advance)
    unknown = [name for name in source.entries if not source.compares(name)]
    own = all(source.checksum(name, 0) is not None for name in source.entries)  # else what is beside has none
    checked = f"every {'byte' if own else 'tensor'} is what was written"
    checked = f"readable; {len(unknown)} tensors have no checksums" if unknown else checked
    console.print(f"{options.path}: {checked}")
    return 0


def _stats(options: argparse.Namespace, console: Console) -> int:
    source = open_source(options.path)
    table = Table("tensor", "dtype", "shape", "smallest", "largest", "mean", "std", "NaN", "inf")
    with _bar(console, "stats", total_bytes(source)) as advance:
        for name, entry in source.entries.items():
            table.add_row(
                name, str(entry.dtype).removeprefix("torch."), str(list(entry.shape)), *_figures(source, name, advance)
            )
    console.print(table)
    return 0


def _figures(source: Source, name: str, advance: Callable[[int], None]) -> list[str]:
    low, high, nans, infs = float("inf"), float("-inf"), 0, 0
    count, mean, spread = 0, 0.0, 0.0  # `spread`: the sum of squared distances to the mean
    for values, size in blocks_in(source, name):
        x = (values.abs() if values.is_complex() else values).double().reshape(-1)
        finite = x[x.isfinite()]
        nans, infs = nans + int(x.isnan().sum()), infs + int(x.isinf().sum())
        if finite.numel():
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            n, own = finite.numel(), float(finite.mean())
            spread += float(((finite - own) ** 2).sum()) + (own - mean) ** 2 * count * n / (count + n)
            mean, count = mean + (own - mean) * n / (count + n), count + n
        advance(size)
    if not count:
        return ["", "", "", "", str(nans), str(infs)]
    return [*(f"{x:.4g}" for x in (low, high, mean, (spread / count) ** 0.5)), str(nans), str(infs)]


def blocks_in(source: Source, name: str) -> Iterator[tuple[torch.Tensor, int]]:
    """The values of a tensor, a block at a time, with the bytes that were read."""
    for i in range(len(source.blocks(name))):
        size = source.size(name, i)
        yield source.read_block(name, i, torch.empty(size, dtype=torch.uint8)), size


def _diff(options: argparse.Namespace, console: Console) -> int:
    one, other = open_source(options.path), open_source(options.target)
    lines = []
    for name in {**one.entries, **other.entries}:
        a, b = one.entries.get(name), other.entries.get(name)
        if a is None or b is None:
            lines.append(f"{name}: only in {options.path if b is None else options.target}")
        elif a != b:
            lines.append(f"{name}: {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}")
    both = [name for name, entry in one.entries.items() if other.entries.get(name) == entry]
    with _bar(console, "diff", sum(one.entries[name].nbytes for name in both)) as advance:
        lines += [line for name in both if (line := _difference(one, other, name, advance))]
    for name in {**one.values, **other.values}:
        if one.values.get(name, "nothing") != other.values.get(name, "nothing"):
            lines.append(f"{name}: {one.values.get(name, 'nothing')} and {other.values.get(name, 'nothing')}")
    for line in lines:
        console.print(line, markup=False, highlight=False)
    console.print(f"{len(lines)} differences" if lines else "no differences")
    return int(bool(lines))


def _difference(one: Source, other: Source, name: str, advance: Callable[[int], None]) -> str:
    """What differs in a tensor; blocks of both that are not alike are compared as a whole."""
    if [b.tile for b in one.blocks(name)] == [b.tile for b in other.blocks(name)]:
        pairs = zip(blocks_in(one, name), blocks_in(other, name))
    else:
        only = Map()
        a, b = (whole_tensors(_only(source, name, only))[name] for source in (one, other))
        pairs = zip([(a, one.entries[name].nbytes)], [(b, 0)])
    count, most = 0, 0.0
    for (x, size), (y, _) in pairs:
        wide = torch.complex128 if x.is_complex() else x.dtype if x.dtype == torch.int64 else torch.float64
        a, b = x.to(wide), y.to(wide)
        differ = (a != b) & ~((a != a) & (b != b))
        if differ.any():
            count += int(differ.sum())
            most = max(most, float((a[differ] - b[differ]).abs().max()))
        advance(size)
    return f"{name}: {count} elements differ, by at most {most:.4g}" if count else ""


def _only(source: Source, name: str, table: Map) -> Source:
    made = MappedSource(source, table)
    made.entries = {name: made.entries[name]}
    return made


def _convert(options: argparse.Namespace, console: Console) -> int:
    source = open_source(options.path, verify="none" if options.unchecked else "fast")
    if options.map is not None:
        table = preset(options.map, prefix=options.prefix, heads=options.heads, kv_heads=options.kv_heads)
        source = MappedSource(source, table.inverse if options.inverse else table)
    found = folder_of(options.path)
    if folder_of(options.target) in (found, *found.parents):
        print("shardwise checkpoint: FROM and TO are the same path, or FROM is in TO", file=sys.stderr)
        return 1
    if options.drop_values:
        source.tree = flat_tree(list(source.entries), {})
    with _bar(console, "write", total_bytes(source)) as advance:
        if options.format in ("pt", "dcp"):
            tensors = whole_tensors(source, advance)
            state = built(source.tree, tensors.__getitem__)
            others.save(options.target, state, World(0, (0,), None), options.format)
        else:
            manifest = options.format != "safetensors"
            rewrite(source, options.target, manifest=manifest, most=options.max_file_size, progress=advance)
    console.print(f"{options.target}: {len(source.entries)} tensors, {size_text(total_bytes(source))}")
    return 0
