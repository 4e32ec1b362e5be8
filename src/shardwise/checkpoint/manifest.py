"""The manifest: what a checkpoint is, in JSON, written last. A folder without one is no checkpoint of this library."""

from __future__ import annotations

import base64
import json
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.checkpoint.blocks import Cuts
from shardwise.checkpoint.dtypes import from_short, short
from shardwise.checkpoint.files import DataFile, Entry, Place
from shardwise.checkpoint.tree import Json, Node
from shardwise.errors import CheckpointError
from shardwise.random.generator import get_state, stream

MANIFEST = "manifest.json"
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """What was read from a manifest.

    Attributes:
        step: The step that `save` was given.
        tensors: By name, what each tensor is and where its bytes are.
        checksums: By name, the CRC-32 of each of its blocks.
        block_bytes: The size of a block.
        tree: The state with its containers and values.
        random: The state of the random stream; None if the ranks did not share one.
        body: All that the file says.
    """

    step: int | None
    tensors: dict[str, tuple[Entry, Place]]
    checksums: dict[str, tuple[int, ...]]
    block_bytes: int
    tree: Node
    random: torch.Tensor | None
    body: dict[str, Json]


def manifest_text(
    entries: Sequence[Entry],
    files: Sequence[DataFile],
    checksums: Mapping[str, Sequence[int]],
    *,
    block_bytes: int,
    tree: Node,
    layouts: Mapping[str, Json],
    step: int | None,
    world_size: int,
    random: str | None,
) -> str:
    """The text of a manifest. It does not grow with the number of ranks."""
    place = {name: (i, start) for i, file in enumerate(files) for name, start in file.starts.items()}
    kinds: dict[str, int] = {}  # many tensors share a layout
    tensors: dict[str, Json] = {}
    for entry in entries:
        file, start = place[entry.name]
        kind = kinds.setdefault(json.dumps(layouts.get(entry.name)), len(kinds))
        crc = "".join(f"{n:08x}" for n in checksums[entry.name])
        tensors[entry.name] = [short(entry.dtype), list(entry.shape), file, start, kind, crc]
    body: dict[str, Json] = {
        "format": "shardwise",
        "version": VERSION,
        "step": step,
        "saved_at": time.time(),
        "versions": {"shardwise": _own_version(), "torch": torch.__version__, "python": sys.version.split()[0]},
        "processes": world_size,
        "random": None if random is None else {"stream": stream(), "state": random},
        "block_bytes": block_bytes,
        "files": [[file.name, file.size, zlib.crc32(file.header)] for file in files],
        "layouts": [json.loads(kind) for kind in kinds],
        "tensors": tensors,
        "tree": tree,
    }
    return json.dumps(body | {"checksum": _checksum(body)}, separators=(",", ":"))


def random_state() -> str:
    """The state of the random stream as text."""
    return base64.b64encode(get_state().numpy().tobytes()).decode()


def _own_version() -> str:
    return str(getattr(sys.modules.get("shardwise"), "__version__", "unknown"))


def _checksum(body: Mapping[str, Json]) -> int:
    return zlib.crc32(json.dumps(body, separators=(",", ":")).encode())


def parse_manifest(text: str, folder: Path) -> Manifest:
    """Read a manifest, and check it against itself.

    Raises:
        CheckpointError: It is damaged, or of a later version.
    """
    path = folder / MANIFEST
    try:
        body = json.loads(text)
        checksum = body.pop("checksum")
        if checksum != _checksum(body):
            raise ValueError("its checksum is another")
        if body["version"] > VERSION:
            raise CheckpointError(
                f"{path}: version {body['version']} of the format, this library reads up to {VERSION}; update it"
            )
        return _parsed(body, folder)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointError(f"{path}: the manifest is damaged: {error}") from error


def _parsed(body: dict[str, Json], folder: Path) -> Manifest:
    tensors, checksums, cuts = {}, {}, Cuts(body["block_bytes"])
    files = [folder / str(name) for name, _, _ in body["files"]]
    for name, (dtype, shape, file, start, _, crc) in body["tensors"].items():
        entry = Entry(name, from_short(dtype, name), tuple(shape))
        tensors[name] = entry, Place(files[file], start)
        checksums[name] = tuple(int(crc[i : i + 8], 16) for i in range(0, len(crc), 8))
        if len(checksums[name]) != len(cuts[entry.shape, entry.dtype.itemsize]):
            raise ValueError(f"tensor {name!r} has {len(checksums[name])} checksums")
    random = body["random"]
    state = None
    if random is not None:
        state = torch.frombuffer(bytearray(base64.b64decode(random["state"])), dtype=torch.uint8)
    return Manifest(body["step"], tensors, checksums, body["block_bytes"], body["tree"], state, body)


def check_file(folder: Path, name: str, size: int, header_crc: int) -> None:
    """Raise CheckpointError where a file is missing, of another size, or has another header."""
    path = folder / name
    if not path.exists():
        raise CheckpointError(f"{path}: the file is missing, the manifest lists it")
    found = path.stat().st_size
    if found != size:
        raise CheckpointError(f"{path}: cut short or overwritten: {found} bytes, the manifest says {size}")
    with open(path, "rb") as file:
        begin = file.read(8)
        length = int.from_bytes(begin, "little")
        if length > size or zlib.crc32(begin + file.read(length)) != header_crc:
            raise CheckpointError(f"{path}: the header (bytes 0 to {min(8 + length, size)}) is not what was written")
