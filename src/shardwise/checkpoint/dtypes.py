"""The names that safetensors files have for dtypes, and how dtypes without a name are stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.errors import CheckpointError

NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_BY_NAME = {name: dtype for dtype, name in NAMES.items()}
# dtypes that every reader knows by the memory they take: pairs of floats, or plain bytes
_PAIRS = {torch.complex128: "F64", torch.complex64: "F32", torch.complex32: "F16"}
_BYTES = {
    getattr(torch, name) for name in ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu") if hasattr(torch, name)
}


def stored(dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, list[int]]:
    """The dtype and shape under which a file has a tensor.

    >>> stored(torch.complex64, (3, 4))
    ('F32', [3, 4, 2])
    """
    if dtype in NAMES:
        return NAMES[dtype], list(shape)
    if dtype in _PAIRS:
        return _PAIRS[dtype], [*shape, 2]
    if dtype in _BYTES:
        return "U8", list(shape)
    raise CheckpointError(
        f"dtype {dtype} cannot be stored; save a tensor of one of {', '.join(str(d) for d in NAMES)} or a complex one"
    )


def from_name(name: str, where: str) -> torch.dtype:
    """The dtype that a file calls so."""
    if name not in _BY_NAME:
        raise CheckpointError(f"{where}: dtype {name!r} is not known; the known ones are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def short(dtype: torch.dtype) -> str:
    """
    >>> short(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def from_short(text: object, where: str) -> torch.dtype:
    """The dtype of a name that `short` gave."""
    found = getattr(torch, text, None) if isinstance(text, str) else None
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{where}: {text!r} is no dtype of torch")
    return found
