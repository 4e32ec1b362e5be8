"""`open_source`: which format a path has, and the source that reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from shardwise.checkpoint.commit import folder_of, recover
from shardwise.checkpoint.files import INDEX, Entry, Header, Place, read_header
from shardwise.checkpoint.foreign import METADATA, DcpSource, TorchSource
from shardwise.checkpoint.manifest import MANIFEST, check_file, parse_manifest
from shardwise.checkpoint.source import FileSource, Source
from shardwise.errors import CheckpointError

VERIFY = ("fast", "full", "none")
_Tensors = dict[str, tuple[Entry, Place]]


def open_source(path: str | os.PathLike[str], *, verify: str = "fast") -> Source:
    """Open a checkpoint of any format.

    Args:
        path: A folder of `save`, a Hugging Face folder, a safetensors file, a folder of torch.distributed.checkpoint,
            or a file of torch.save.
        verify: "none" does not look at checksums.

    Raises:
        CheckpointError: There is no checkpoint, or its files are damaged.
    """
    found = Path(os.path.abspath(path))
    try:
        recover(folder_of(path))
        return _opened(found, verify)
    except OSError as error:
        raise CheckpointError(f"{error.filename or found}: cannot be read: {error.strerror}") from error


def _opened(found: Path, verify: str) -> Source:
    if found.is_file():
        if found.suffix == ".safetensors":
            return _one_file(found, verify)
        return TorchSource(found, verify=verify != "none")
    elif (found / MANIFEST).exists():
        return _own(found, verify)
    elif (found / METADATA).exists():
        return DcpSource(found, verify=verify != "none")
    elif any(found.glob("*.safetensors")):
        return _hugging_face(found, verify)
    elif found.is_dir():
        raise CheckpointError(
            f"{found}: no checkpoint: there is neither a {MANIFEST} nor a safetensors file nor a .metadata in it"
            + ("; a save to it did not end" if (found.parent / f".{found.name}.saving").exists() else "")
        )
    raise CheckpointError(f"{found}: there is no checkpoint at this path")


def _own(folder: Path, verify: str) -> Source:
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{folder / MANIFEST}: the manifest is damaged: {error}") from error
    manifest = parse_manifest(text, folder)
    for name, size, header in manifest.body["files"]:
        check_file(folder, name, size, header)
    return FileSource(folder, manifest.tensors, manifest, verify=verify != "none")


def _one_file(path: Path, verify: str) -> Source:
    """One safetensors file. One of a folder of `save` is compared with what the manifest there says."""
    header = read_header(path)
    if header.manifest and verify != "none" and (path.parent / MANIFEST).exists():
        whole = _own(path.parent, verify)
        assert isinstance(whole, FileSource)
        header = header._replace(block_bytes=whole.block_bytes, manifest=False)
        header = header._replace(checksums={name: whole.checksums[name] for name in header.tensors})
    return _without_manifest(path, header.tensors, [header], verify)


def _without_manifest(path: Path, tensors: _Tensors, headers: Sequence[Header], verify: str) -> Source:
    if verify != "none":
        _check_one_save(path, headers)
    if verify != "none" and any(header.manifest for header in headers):
        raise CheckpointError(
            f"{path}: {MANIFEST} is missing, which has the checksums of the files and what is no tensor; "
            f"verify='none' loads the tensors as they are"
        )
    return FileSource(path, tensors, headers=headers, verify=verify != "none")


def _check_one_save(path: Path, headers: Sequence[Header]) -> None:
    """Raise where files of different saves are together: each is whole, but they are no checkpoint."""
    files: dict[str, str] = {}  # the first of each save
    for header in headers:
        if header.save is not None and header.tensors:
            files.setdefault(header.save, next(iter(header.tensors.values()))[1].file.name)
    if len(files) > 1:
        raise CheckpointError(
            f"{path}: {' and '.join(files.values())} are of different saves; put the files of one save together, or "
            f"load them with verify='none'"
        )


def _hugging_face(folder: Path, verify: str) -> Source:
    """All safetensors files of a folder, or those that its index names."""
    index = folder / INDEX
    if not index.exists():
        tensors: _Tensors = {}
        all_headers = []
        for path in sorted(folder.glob("*.safetensors")):
            header = read_header(path)
            all_headers.append(header)
            for name in header.tensors.keys() & tensors.keys():
                raise CheckpointError(
                    f"{path}: tensor {name!r} is in {tensors[name][1].file.name} too, and no {INDEX} says which one "
                    f"counts"
                )
            tensors |= header.tensors
        return _without_manifest(folder, tensors, all_headers, verify)
    try:
        weights = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = dict.fromkeys(weights.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index}: the index is damaged: {error}") from error
    headers = {}
    for file in files:
        path = folder / str(file)
        if path.parent != folder or not path.exists():
            raise CheckpointError(f"{path}: the file is missing, {index.name} names it")
        headers[file] = read_header(path)
    for name, file in weights.items():
        if name not in headers[file].tensors:
            raise CheckpointError(f"{folder / file}: tensor {name!r} is not in it, {index.name} says so")
    tensors = {name: headers[file].tensors[name] for name, file in weights.items()}
    return _without_manifest(folder, tensors, list(headers.values()), verify)
