"""From files to files: a checkpoint in another format, other names or other sizes of files, a block at a time."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import torch

from shardwise.checkpoint import crc
from shardwise.checkpoint.blocks import Block
from shardwise.checkpoint.commit import draft_of, drop_draft, folder_of
from shardwise.checkpoint.holders import Held, as_bytes
from shardwise.checkpoint.jobs import Writer, jobs_of
from shardwise.checkpoint.source import Source
from shardwise.checkpoint.world import World
from shardwise.checkpoint.write import Draft, begin, finish
from shardwise.errors import CheckpointError
from shardwise.layout.tiles import Tiles, meetings

_BATCH = 8 << 20
_Some = list[tuple[str, int]]  # blocks: the names of their tensors, and their numbers


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
    folder = folder_of(path)
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
    as_it_is = {name: _is_copied(source, draft, name) for name in ordered}
    meeting: dict[str, list[list[int]]] = {}  # of the tensor at hand
    total = 0
    with Writer(draft_of(draft.path), draft.files) as writer, closing(_read_ahead(source, ordered)) as blocks:
        for name, i, values in blocks:
            (file, start), block = place[name], source.blocks(name)[i]
            if as_it_is[name]:
                writer.put(file, as_bytes(values), start + block.start, f"tensor {name!r} at {block.tile.offsets}")
                known = source.checksum(name, i) or 0
                sums[draft.first[name] + i] = crc.whole(known, block.stop - block.start)
                total += block.stop - block.start
            else:
                entry, out = source.entries[name], draft.blocks[name]
                if name not in meeting:
                    meeting = {name: _meeting(source.blocks(name), out, len(entry.shape))}
                piece = Held(block.tile, values)
                for job in jobs_of(file, start, entry, out, draft.first[name], [piece], meeting[name][i]):
                    linear, written = writer.do(job)
                    sums[job.number] ^= linear
                    total += written
            if progress is not None:
                progress(source.size(name, i))
    return sums, total


def _is_copied(source: Source, draft: Draft, name: str) -> bool:
    """Whether a tensor is cut in the same blocks on both sides, with checksums that reading has compared."""
    blocks = source.blocks(name)
    known = all(source.checksum(name, i) is not None for i in range(len(blocks)))
    return known and list(blocks) == list(draft.blocks[name])


def _read_ahead(source: Source, names: Sequence[str]) -> Generator[tuple[str, int, torch.Tensor]]:
    """All blocks of some tensors, each with its values until the next is asked for; meanwhile further ones are read."""
    rooms = [torch.empty(0, dtype=torch.uint8)] * 2

    def fill(some: _Some, next_: _Some, turn: int) -> list[tuple[str, int, torch.Tensor]]:
        if next_ and next_[0][0] == next_[-1][0]:
            source.begin(*next_[0], len(next_))
        sizes = [-(-source.size(name, i) // 64) * 64 for name, i in some]
        if rooms[turn].numel() < sum(sizes):
            rooms[turn] = torch.empty(sum(sizes), dtype=torch.uint8)
        parts = rooms[turn][: sum(sizes)].split(sizes)
        return [(name, i, source.read_block(name, i, room)) for (name, i), room in zip(some, parts)]

    found = [*_batches(source, names), _Some()]
    with ThreadPoolExecutor(1, "shardwise reader") as thread:
        coming = None
        for number, (some, next_) in enumerate(zip(found[:-1], found[1:])):
            following = thread.submit(fill, some, next_, number % 2)
            if coming is not None:
                yield from coming.result()
            coming = following
        if coming is not None:
            yield from coming.result()


def _batches(source: Source, names: Sequence[str]) -> Iterator[_Some]:
    """All blocks of some tensors, as many together as a hand-over between threads is worth."""
    some, size = _Some(), 0
    for name in names:
        for i in range(len(source.blocks(name))):
            if some and size + source.size(name, i) > _BATCH:
                yield some
                some, size = [], 0
            some.append((name, i))
            size += source.size(name, i)
    if some:
        yield some


def _meeting(blocks: Sequence[Block], out: Sequence[Block], ndim: int) -> list[list[int]]:
    """For each block that is read, the numbers of those that are written of which it has a part."""
    one, other = (Tiles.of([block.tile for block in found], ndim) for found in (blocks, out))
    found: list[list[int]] = [[] for _ in blocks]
    for i, j in zip(*(numbers.tolist() for numbers in meetings(one, other))):
        found[i].append(j)
    return found


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()
