"""Gradients of several parameters, reduced together while the backward pass goes on, in the same order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from shardwise.autograd.leaves import leaf_local
from shardwise.comm.rank_tensor import RankTensor
from shardwise.comm.record import Note
from shardwise.errors import AutogradError
from shardwise.layout import Layout, Partial
from shardwise.layout.placement import REPLICATE, Shard
from shardwise.move import start_move
from shardwise.parallel.data.layouts import DataAxis
from shardwise.parallel.data.parameter import ManagedParameter
from shardwise.parallel.data.rows import Rows
from shardwise.parallel.data.states import GRADIENTS, Gradients, State
from shardwise.tensor import DTensor

BUCKET_BYTES = 25 << 20


class GradBucket:
    """The gradients of some parameters.

    Each is taken from its leaf as it comes, into one matrix for each rank that this process runs. Once no gradient is
    `missing`, the matrices are summed over the data axis, and each parameter gets its gradient. A matrix has one row
    for each part that a rank keeps. A row ends with one flag for each parameter: whether a rank had a gradient."""

    def __init__(
        self, parameters: Sequence[ManagedParameter], data: DataAxis, reduce_dtype: torch.dtype | None
    ) -> None:
        self.parameters, self.data = list(parameters), data
        self.cut = data.size > 1 and any(p.layouts.dim is not None for p in parameters)
        kept = parameters[0].layouts.kept
        self.kept_dtype, self.device = kept.dtype, kept.device
        self.dtype = reduce_dtype or parameters[0].dtype
        parts = data.size if self.cut else 1
        dims = [p.layouts.dim if self.cut else None for p in parameters]
        ranks = range(len(data.coords))
        self.rows = [Rows([tuple(p.leaves[r].shape) for p in parameters], dims, parts) for r in ranks]
        self.even = all(rows.even and rows.length == self.rows[0].length for rows in self.rows)
        self.flags_at = max(rows.length for rows in self.rows)
        shape = (parts, self.flags_at + len(parameters))
        self.unreduced = Layout.make(data.mesh, [Partial()], shape, self.dtype, None, self.device)
        self.reduced = self.unreduced.replace(placements=[Shard(0) if self.cut else REPLICATE])
        self.places: dict[int, list[tuple[int, int]]] = {}  # by id of a leaf: ranks, and the number of its parameter
        for i, p in enumerate(parameters):
            for r, leaf in enumerate(p.leaves):
                self.places.setdefault(id(leaf), []).append((r, i))
        self.state = State("a bucket of gradients", Gradients.COLLECTING, GRADIENTS)
        self.begin()

    def begin(self) -> None:
        self.state.to(Gradients.COLLECTING)
        self.missing = set(self.places)
        self.taken: set[int] = set()  # leaves whose gradient is in the matrices
        self.matrices: list[torch.Tensor] | None = None
        self._reducing: tuple[torch.Tensor, Callable[[], object]] | None = None

    # -- taking ---------------------------------------------------------------------------------------------
    @torch.no_grad()
    def take(self, leaf: torch.Tensor, scale: float) -> None:
        if self.state.now is not Gradients.COLLECTING:
            raise AutogradError(
                f"data_parallel: a parameter of shape {tuple(leaf.shape)} got another gradient in one backward pass "
                f"after the first was sent: it is shared by reentrant checkpoints; use checkpoint(use_reentrant=False)"
            )
        grad, leaf.grad = leaf.grad, None
        if grad is None:
            return
        grad = grad.to_dense() if grad.layout != torch.strided else grad
        for r, i in self.places[id(leaf)]:
            rows, matrix = self.rows[r], self._matrices()[r]
            for into, part in zip(rows.in_matrix(i, matrix), rows.in_whole(i, grad), strict=True):
                if id(leaf) in self.taken:
                    into.add_(part, alpha=scale)
                elif scale != 1 and part.dtype == into.dtype:
                    torch.mul(part, scale, out=into)
                else:
                    into.copy_(part).mul_(scale) if scale != 1 else into.copy_(part)
        self.taken.add(id(leaf))

    def _matrices(self) -> list[torch.Tensor]:
        if self.matrices is None:
            make = torch.empty if self.even else torch.zeros  # holes between the parts of a row are summed too
            shape = self.unreduced.shape
            self.matrices = [make(shape, dtype=self.dtype, device=self.device) for _ in self.rows]
        return self.matrices

    def _take_the_rest(self, scale: float) -> None:
        """Take what has waited since earlier passes, and zeros where there is nothing."""
        for p in self.parameters:
            for leaf in p.leaves:
                if id(leaf) not in self.taken:
                    self.take(leaf, scale)
        matrices = self._matrices()
        lacking = [place for key, places in self.places.items() if key not in self.taken for place in places]
        for r, i in lacking:
            for into in self.rows[r].in_matrix(i, matrices[r]):
                into.zero_()

    # -- reducing -------------------------------------------------------------------------------------------
    @torch.no_grad()
    def start(self, scale: float) -> None:
        if len(self.taken) < len(self.places):
            self._take_the_rest(scale)
        self.state.to(Gradients.REDUCING)
        matrices, self.matrices = self._matrices(), None
        for r, matrix in enumerate(matrices):
            flags = matrix[:, self.flags_at :]
            if len(self.taken) == len(self.places):
                flags.fill_(1)
            else:
                here = [float(id(p.leaves[r]) in self.taken) for p in self.parameters]
                flags.copy_(torch.tensor(here, dtype=self.dtype))
        value = RankTensor(matrices) if self.data.mesh.comm.simulated else matrices[0]
        note = Note("data_parallel", backward=True)
        self._reducing = start_move(value, self.unreduced, self.reduced, note, owned=True)

    def drop(self) -> None:
        if self._reducing is not None:
            self._reducing[1]()
        self.state.to(Gradients.REDUCED)
        self._reducing = None

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the sum, and add to each parameter's gradient what came."""
        assert self._reducing is not None  # the state says so
        (local, wait), self._reducing = self._reducing, None
        wait()
        self.state.to(Gradients.REDUCED)
        arrived = [matrix[0] for matrix in (local.ranks if isinstance(local, RankTensor) else (local,))]
        places = self.data.coords if self.cut else [0] * len(self.data.coords)
        has_gradient = [True] * len(self.parameters)
        if len(self.taken) < len(self.places):  # another rank may have had what this one lacks
            has_gradient = [flag > 0 for flag in arrived[0][self.flags_at :].tolist()]
        found = zip(self.rows, arrived, places, strict=True)
        parts = [rows.kept(row.to(self.kept_dtype), place) for rows, row, place in found]
        for i, p in enumerate(self.parameters):
            if has_gradient[i]:
                _add_gradient(p.param, [mine[i] for mine in parts])


def _add_gradient(param: DTensor, parts: list[torch.Tensor]) -> None:
    comm, mine = param._layout.mesh.comm, leaf_local(param)
    local = RankTensor(parts) if comm.simulated else parts[0]
    for value, part in zip(comm.values(mine), comm.pick(comm.structure(mine), local), strict=True):
        if value.grad is None:
            value.grad = part
        else:
            value.grad.add_(part)


def in_buckets(parameters: Iterable[ManagedParameter]) -> Iterator[list[ManagedParameter]]:
    """The parameters in lists of up to BUCKET_BYTES."""
    bucket: list[ManagedParameter] = []
    size = 0
    for p in parameters:
        n = p.leaves[0].nbytes
        if bucket and size + n > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(p)
        size += n
    if bucket:
        yield bucket


class Reduction:
    """The buckets of one module in the order of their reductions, and how far the present backward pass has come.

    `one_at_a_time`: a reduction must end before the next begins, because no rank has room for all gradients."""

    def __init__(self, buckets: Sequence[GradBucket], one_at_a_time: bool) -> None:
        self.buckets, self.one_at_a_time = list(buckets), one_at_a_time
        self._bucket_of = {leaf: bucket for bucket in buckets for leaf in bucket.places}
        self._started = 0
        self._in_flight: list[GradBucket] = []

    def begin(self) -> None:
        self._started = 0
        for bucket in self.buckets:
            bucket.begin()

    def take(self, leaf: torch.Tensor, scale: float) -> None:
        bucket = self._bucket_of[id(leaf)]
        bucket.take(leaf, scale)
        bucket.missing.discard(id(leaf))
        if self.one_at_a_time and 2 * len(bucket.missing) < len(bucket.places):  # the one before has had its time
            self._finish_all()
        if not bucket.missing:
            self._start(scale, everything=False)

    def _start(self, scale: float, everything: bool) -> None:
        """Start the reductions whose turn it is and that miss nothing, or all that are left."""
        while self._started < len(self.buckets) and (everything or not self.buckets[self._started].missing):
            bucket = self.buckets[self._started]
            self._started += 1
            if self.one_at_a_time:
                self._finish_all()
            bucket.start(scale)
            self._in_flight.append(bucket)

    def finish(self, scale: float) -> None:
        """Reduce what is left; afterwards every parameter has its gradient."""
        self._start(scale, everything=True)
        self._finish_all()

    def _finish_all(self) -> None:
        while self._in_flight:
            self._in_flight.pop(0).finish()

    def give_up(self) -> None:
        """The backward pass failed: wait for what is under way, and drop what came of the pass."""
        while self._in_flight:
            self._in_flight.pop(0).drop()
        for bucket in self.buckets:
            bucket.matrices = None
