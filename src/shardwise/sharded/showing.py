"""What `print` shows of a ShardedTensor: its tiles in a few lines, and the values of those that are here."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.comm.shown import value_text
from shardwise.drawing import Box, Panel, Picture, rank_names
from shardwise.sharded.metadata import ShardedTensorMetadata, ShardMetadata
from shardwise.sharded.shard import Shard

_SHOWN = 3  # tiles that are listed
_MOST_TILES, _MOST_PANELS = 200, 6  # that are drawn


def text_of(kind: str, metadata: ShardedTensorMetadata, shards: Sequence[Shard]) -> str:
    """What `repr` gives."""
    tiles, properties = metadata.shards_metadata, metadata.tensor_properties
    owners = sorted({tile.placement.rank() for tile in tiles if tile.placement is not None})  # type: ignore[type-var]
    on = f" on {rank_names(owners)}" if owners else ""  # type: ignore[arg-type]
    grad = ", requires_grad=True" if properties.requires_grad else ""
    count = _tiles(len(tiles))
    head = f"{kind}(shape={tuple(metadata.size)}, dtype={properties.dtype}, {count}{on}{grad}"
    lines = [_line(tile) for tile in tiles[:_SHOWN]]
    if len(tiles) > _SHOWN:
        lines.append(f"... {len(tiles) - _SHOWN:,} more; .metadata() has them all")
    if not shards:
        return "\n  ".join([head, *lines, "none of them is here)"])
    first = shards[0]
    here = f"here: {box_of(first.metadata)}" + (f" and {len(shards) - 1} more" if len(shards) > 1 else "")
    return "\n  ".join([head, *lines, here]) + f"\n{value_text(first.tensor)})"


def box_of(tile: ShardMetadata) -> str:
    """The indices of a tile, as they are sliced."""
    sides = zip(tile.shard_offsets, tile.shard_sizes, strict=True)
    return "[" + ", ".join(f"{start}:{start + size}" for start, size in sides) + "]"


def _tiles(count: int) -> str:
    return f"{count:,} tile{'' if count == 1 else 's'}"


def _line(tile: ShardMetadata) -> str:
    return f"{box_of(tile)} on {tile.placement}"


def picture_of(metadata: ShardedTensorMetadata) -> Picture:
    """The tiles at their places: the last two dims as rows and columns, the others as panels."""
    panels: dict[str, list[Box]] = {}
    empty = left_out = 0
    for tile in metadata.shards_metadata:
        if 0 in tile.shard_sizes:
            empty += 1
            continue
        sides = [(start, start + size) for start, size in zip(tile.shard_offsets, tile.shard_sizes, strict=True)]
        outer, inner = sides[:-2], [*([(0, 1)] * (2 - len(sides))), *sides[-2:]]
        title = f"[{', '.join(f'{a}:{b}' for a, b in outer)}, :, :]" if outer else ""
        if len(panels.get(title, ())) >= _MOST_TILES or (title not in panels and len(panels) >= _MOST_PANELS):
            left_out += 1
            continue
        rank = tile.placement.rank() if tile.placement is not None else 0
        box = Box(inner[0], inner[1], (rank or 0,), 1, f"{box_of(tile)} {tile.placement}")
        panels.setdefault(title, []).append(box)
    names = ("Row", "Col") if len(metadata.size) >= 2 else ("", "Row")
    notes = [f"... and {left_out:,} more tiles"] * bool(left_out) + [f"{empty:,} tiles are empty"] * bool(empty)
    title = f"ShardedTensor of shape {tuple(metadata.size)}, {_tiles(len(metadata.shards_metadata))}"
    return Picture(title, [Panel(boxes, title, *names) for title, boxes in panels.items()], notes)
