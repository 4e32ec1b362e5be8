"""From files to files: a checkpoint in another format, other names or other sizes of files, a block at a time."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from shardwise.checkpoint.blocks import Block
from shardwise.checkpoint.commit import draft_of, drop_draft
from shardwise.checkpoint.copying import batches, copy, is_copied
from shardwise.checkpoint.holders import Held
from shardwise.checkpoint.jobs import jobs_of, write_jobs
from shardwise.checkpoint.source import Source
from shardwise.checkpoint.world import World
from shardwise.checkpoint.write import Draft, begin, finish
from shardwise.errors import CheckpointError
from shardwise.layout.tiles import Tiles, meetings


def rewrite(
    source: Source,
    path: str | os.PathLike[str],
    *,
    manifest: bool = True,
    most: int,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write a source as a checkpoint. Memory: two batches of blocks, whatever the size."""
    entries = list(source.entries.values())
    if source.values and not manifest:
        raise CheckpointError(
            f"{source.path}: {next(iter(source.values))!r} is a value, which safetensors files alone cannot hold; "
            f"convert to format shardwise, or leave values out (--drop-values)"
        )
    folder = Path(os.path.abspath(path))
    random = None if source.random is None else _text(source.random)
    draft = Draft(folder, entries, most, [], source.tree, {}, source.step, random, manifest)
    alone = World(0, (0,), None)
    begin(draft)
    try:
        finish(draft, draft_of(folder), *_copied(source, draft, progress), alone)
    except BaseException:
        drop_draft(draft_of(folder))
        raise


def _copied(source: Source, draft: Draft, progress: Callable[[int], None] | None) -> tuple[np.ndarray, int]:
    place = {name: (i, start) for i, file in enumerate(draft.files) for name, start in file.starts.items()}
    sums = np.zeros(draft.count, dtype=np.int64)
    ordered = sorted(source.entries, key=lambda name: place[name])
    as_it_is = {name: is_copied(source, draft, name) for name in ordered}
    total = copy(source, draft, [name for name in ordered if as_it_is[name]], sums, progress)
    names = [name for name in ordered if not as_it_is[name]]
    meeting: dict[str, list[list[int]]] = {}  # of the tensor at hand
    with write_jobs(draft_of(draft.path), draft.files) as put, closing(_read_ahead(source, names)) as blocks:
        for name, i, values in blocks:
            entry, out, block = source.entries[name], draft.blocks[name], source.blocks(name)[i]
            if name not in meeting:
                meeting = {name: _meeting(source.blocks(name), out, len(entry.shape))}
            piece = Held(block.tile, values)
            for job in jobs_of(*place[name], entry, out, draft.first[name], [piece], meeting[name][i]):
                linear, written = put(job)
                sums[job.number] ^= linear
                total += written
            if progress is not None:
                progress(source.size(name, i))
    return sums, total


def _read_ahead(source: Source, names: Sequence[str]) -> Generator[tuple[str, int, torch.Tensor]]:
    """All blocks of some tensors, each with its values until the next is asked for; meanwhile further ones are read."""
    rooms = [torch.empty(0, dtype=torch.uint8)] * 2

    def fill(some: Sequence[tuple[str, int]], turn: int) -> list[tuple[str, int, torch.Tensor]]:
        sizes = [-(-source.size(name, i) // 64) * 64 for name, i in some]
        if rooms[turn].numel() < sum(sizes):
            rooms[turn] = torch.empty(sum(sizes), dtype=torch.uint8)
        parts = rooms[turn][: sum(sizes)].split(sizes)
        return [(name, i, source.read_block(name, i, room)) for (name, i), room in zip(some, parts)]

    with ThreadPoolExecutor(1, "shardwise reader") as thread:
        coming = None
        for number, some in enumerate(batches(source, names)):
            following = thread.submit(fill, some, number % 2)
            if coming is not None:
                yield from coming.result()
            coming = following
        if coming is not None:
            yield from coming.result()


def _meeting(blocks: Sequence[Block], out: Sequence[Block], ndim: int) -> list[list[int]]:
    """For each block that is read, the numbers of those that are written of which it has a part."""
    one, other = (Tiles.of([block.tile for block in found], ndim) for found in (blocks, out))
    found: list[list[int]] = [[] for _ in blocks]
    for i, j in zip(*(numbers.tolist() for numbers in meetings(one, other))):
        found[i].append(j)
    return found


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()
