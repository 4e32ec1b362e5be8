"""Programs written for torch.distributed.tensor, run with both libraries in the same processes.

A program is a function of a namespace (torch's or ours) and returns what it saw: tensors, flags, names of exceptions.
"""

from types import SimpleNamespace

import torch
import torch.distributed.tensor
import torch.distributed.tensor.debug
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel
from torch.utils._pytree import tree_flatten

import shardwise
import shardwise.placement_types
from tests.workers import device_mesh


def namespaces():
    theirs = torch.distributed.tensor
    names = [name for name in theirs.__all__ if name != "Placement"]
    torchs = SimpleNamespace(
        **{name: getattr(theirs, name) for name in names},
        debug=theirs.debug,
        experimental=theirs.experimental,
        parallel=theirs.parallel,
        name=theirs.__name__,
        placement_types=theirs.placement_types,
    )
    ours = SimpleNamespace(
        **{name: getattr(shardwise, name) for name in names},
        debug=shardwise.debug,
        experimental=shardwise.experimental,
        parallel=shardwise.parallel,
        name=shardwise.__name__,
        placement_types=shardwise.placement_types,
    )
    return torchs, ours


def line():
    return device_mesh((torch.distributed.get_world_size(),), ("x",))


def grid():
    return device_mesh((2, torch.distributed.get_world_size() // 2), ("dp", "tp"))


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def raises(call, kind):
    """Whether the call raises the built-in that people catch."""
    try:
        call()
    except kind:
        return True
    return False


def compare(got, want, where):
    got, tree = tree_flatten(got)
    want, wanted = tree_flatten(want)
    assert tree == wanted, f"{where}: {tree} is not {wanted}"
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if isinstance(b, torch.Tensor):
            assert type(a) is torch.Tensor, f"{where}[{i}]: {type(a).__name__}"
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m, i=i: f"{where}[{i}]: {m}")
        else:
            assert a == b, f"{where}[{i}]: {a!r} is not torch's {b!r}"
