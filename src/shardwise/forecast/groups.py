"""Process groups of a rank that is played, and the collectives that a script calls on them itself.

They move nothing: what a rank would receive goes to the ledger and to whoever watches. Results that another tensor
takes are there already, without values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.comm.outline import OutlineComm, Work
from shardwise.comm.record import Note, recorders, tell
from shardwise.errors import OutlineError
from shardwise.wrapper import Wrapper


class Group:
    """Stands for a ProcessGroup.

    Args:
        comm: The rank that is played, on a mesh of the ranks of the group.
        ranks: Their numbers.
    """

    def __init__(self, comm: OutlineComm, ranks: Sequence[int]) -> None:
        self.comm, self.ranks = comm, ranks

    def size(self) -> int:
        return math.prod(self.comm.shape)

    def rank(self) -> int:
        """The place of the rank that is played."""
        place = 0
        for size, c in zip(self.comm.shape, self.comm.coords, strict=True):
            place = place * size + c
        return place

    def name(self) -> str:
        return "outlined"

    def begin(self, kind: str, received: int) -> Work:
        """A collective of the script begins."""
        axes = [a for a, size in enumerate(self.comm.shape) if size > 1]
        if not axes:
            return Work(self.comm, None)
        note = Note(kind)
        to = recorders()
        if to:
            tell("+".join(self.comm.axis_names[a] for a in axes), kind, received, note, to)
        return Work(self.comm, self.comm.passage(kind, axes, received, note))


def _bytes(tensors: torch.Tensor | Sequence[torch.Tensor], of: str) -> int:
    """How many bytes there are in plain tensors."""
    some = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if any(isinstance(x, Wrapper) for x in some):
        raise OutlineError(
            f"{of}: a distributed tensor was given where torch.distributed takes plain ones; use redistribute"
        )
    return sum(x.nbytes for x in some)


class Collectives:
    """torch.distributed's collectives by their names, for a script whose rank is played.

    Args:
        group_of: Gives the Group that a script means, by what it says; None is that of all ranks.
    """

    def __init__(self, group_of: Callable[[Any], Group]) -> None:
        self._group_of = group_of

    def _run(self, kind: str, group: object, received: Callable[[int, int], int], async_op: bool) -> Work | None:
        """Run a collective of which a rank receives received(size of the group, its place in it) bytes."""
        meant = self._group_of(group)
        work = meant.begin(kind, received(meant.size(), meant.rank()))
        if async_op:
            return work
        work.wait()
        return None

    def all_reduce(
        self, tensor: torch.Tensor, op: object = None, group: object = None, async_op: bool = False
    ) -> Work | None:
        n = _bytes(tensor, "all_reduce")
        return self._run("all_reduce", group, lambda k, _: 2 * (k - 1) * n // k, async_op)

    def reduce(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        op: object = None,
        group: object = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Work | None:
        n = _bytes(tensor, "reduce")
        return self._run("reduce", group, lambda k, _: (k - 1) * n // k, async_op)

    def broadcast(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: object = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Work | None:
        n, ranks = _bytes(tensor, "broadcast"), self._group_of(group).ranks
        source = group_src if src is None else ranks.index(src)
        return self._run("broadcast", group, lambda _, me: 0 if me == source else n, async_op)

    def all_gather(
        self, tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, group: object = None, async_op: bool = False
    ) -> Work | None:
        n = _bytes(tensor_list, "all_gather") - _bytes(tensor, "all_gather")
        return self._run("all_gather", group, lambda k, _: n, async_op)

    def all_gather_into_tensor(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: object = None, async_op: bool = False
    ) -> Work | None:
        return self.all_gather([output_tensor], input_tensor, group, async_op)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input_list: Sequence[torch.Tensor],
        op: object = None,
        group: object = None,
        async_op: bool = False,
    ) -> Work | None:
        n = _bytes(output, "reduce_scatter")
        return self._run("reduce_scatter", group, lambda k, _: (k - 1) * n, async_op)

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: object = None,
        group: object = None,
        async_op: bool = False,
    ) -> Work | None:
        return self.reduce_scatter(output, [input], op, group, async_op)

    def all_to_all(
        self,
        output_tensor_list: Sequence[torch.Tensor],
        input_tensor_list: Sequence[torch.Tensor],
        group: object = None,
        async_op: bool = False,
    ) -> Work | None:
        sizes = [x.nbytes for x in output_tensor_list]
        return self._run("all_to_all", group, lambda _, me: sum(sizes) - sizes[me], async_op)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: object = None,
        async_op: bool = False,
    ) -> Work | None:
        n, rows = _bytes(output, "all_to_all_single"), list(output_split_sizes or ())

        def received(k: int, me: int) -> int:
            return n - (n * rows[me] // max(sum(rows), 1) if rows else n // k)

        return self._run("all_to_all", group, received, async_op)

    def barrier(self, group: object = None, async_op: bool = False, device_ids: object = None) -> Work | None:
        return self._run("barrier", group, lambda k, _: 0, async_op)

    def send(
        self, tensor: torch.Tensor, dst: int | None = None, group: object = None, *args: object, **kw: object
    ) -> Work | None:
        _bytes(tensor, "send")
        return self._run("send_recv", group, lambda k, _: 0, False)

    def recv(
        self, tensor: torch.Tensor, src: int | None = None, group: object = None, *args: object, **kw: object
    ) -> int:
        n = _bytes(tensor, "recv")
        self._run("send_recv", group, lambda k, _: n, False)
        return 0 if src is None else src

    def isend(
        self, tensor: torch.Tensor, dst: int | None = None, group: object = None, *args: object, **kw: object
    ) -> Work | None:
        _bytes(tensor, "isend")
        return self._run("send_recv", group, lambda k, _: 0, True)

    def irecv(
        self, tensor: torch.Tensor, src: int | None = None, group: object = None, *args: object, **kw: object
    ) -> Work | None:
        n = _bytes(tensor, "irecv")
        return self._run("send_recv", group, lambda k, _: n, True)

    # -- of Python objects: every rank is taken to say the same ------------------------------------------------------
    def all_gather_object(self, object_list: list[Any], obj: object, group: object = None) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather_object(
        self, obj: object, object_gather_list: list[Any] | None = None, dst: int = 0, group: object = None, **kw: object
    ) -> None:
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    def broadcast_object_list(self, object_list: list[Any], src: int = 0, *args: object, **kw: object) -> None:
        return None
