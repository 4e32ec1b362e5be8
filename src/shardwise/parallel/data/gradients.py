"""Gradients of several parameters, reduced together while the backward pass goes on, in the same order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set

import torch

from shardwise.comm.capturing import tape_here, tapes
from shardwise.comm.rank_tensor import RankTensor
from shardwise.comm.record import Note
from shardwise.errors import AutogradError
from shardwise.layout import Layout, Partial
from shardwise.layout.placement import REPLICATE, Shard
from shardwise.move import start_move
from shardwise.parallel.data.layouts import DataMesh
from shardwise.parallel.data.own_collectives import ReduceScatter, allocated, reduce_by
from shardwise.parallel.data.parameter import ManagedParameter, has_hooks
from shardwise.parallel.data.rows import Rows
from shardwise.parallel.data.states import GRADIENTS, Gradients, State
from shardwise.tensor import DTensor

BUCKET_BYTES = 25 << 20


class GradBucket:
    """The gradients of some parameters.

    Each is taken from its leaf as it comes, into one matrix for each rank that this process runs. The matrices are made
    when half of the gradients have come, and these are kept as they are until then: the first and the last layers of a
    model may be in one bucket, and most of the backward pass lies between their gradients. Once no gradient is
    `missing`, the matrices are summed over the data axis, and each parameter gets its gradient. A matrix has one row
    for each part that a rank keeps. A row ends with one flag for each parameter: whether a rank had a gradient."""

    def __init__(
        self, parameters: Sequence[ManagedParameter], data: DataMesh, reduce_dtype: torch.dtype | None
    ) -> None:
        self.parameters, self.data = list(parameters), data
        self.cut = data.parts > 1 and any(p.layouts.dim is not None for p in parameters)
        kept = parameters[0].layouts.kept
        self.kept_dtype, self.kept_device, self.device = kept.dtype, kept.device, parameters[0].device
        self.dtype = reduce_dtype or parameters[0].dtype
        parts = data.parts if self.cut else 1
        dims = [p.layouts.dim if self.cut else None for p in parameters]
        ranks = range(len(data.coords))
        self.rows = [Rows([tuple(p.leaves[r].shape) for p in parameters], dims, parts) for r in ranks]
        self.even = all(rows.even and rows.length == self.rows[0].length for rows in self.rows)
        self.flags_at = max(rows.length for rows in self.rows)
        shape = (parts, self.flags_at + len(parameters))
        summed = data.placements(REPLICATE, Shard(0) if self.cut else REPLICATE)
        self.unreduced = Layout.make(data.mesh, [Partial()] * len(summed), shape, self.dtype, None, self.device)
        self.reduced = self.unreduced.replace(placements=summed)
        # With copies along a first axis: summed among the ranks that have parts, then each part over its copies, which
        # moves the fewest bytes and keeps the larger exchange where parts are, on the faster axis.
        self.via: Layout | None = None
        if self.cut and len(summed) > 1:
            self.via = self.unreduced.replace(placements=data.placements(Partial(), Shard(0)))
        self.places: dict[int, list[tuple[int, int]]] = {}  # by id of a leaf: ranks, and the number of its parameter
        for i, p in enumerate(parameters):
            for r, leaf in enumerate(p.leaves):
                self.places.setdefault(id(leaf), []).append((r, i))
        self._sizes = {id(leaf): leaf.numel() for p in parameters for leaf in p.leaves}
        self.state = State("a bucket of gradients", Gradients.COLLECTING, GRADIENTS)
        self.scale = 1.0  # what gradients are multiplied with before they are summed
        self.after_sum: Callable[[torch.Tensor], object] | None = None  # may write the sums
        self.reduces_by: ReduceScatter | None = None  # sums over the ranks that have parts in the library's place
        self._late: dict[int, torch.Tensor] = {}  # gradients that came after the others were sent, by id of a leaf
        self.comes_again = False  # whether there were such: then it waits for the end of a pass
        self.begin()

    def begin(self) -> None:
        self.state.to(Gradients.COLLECTING)
        self.missing = set(self.places)
        self.taken: set[int] = set()  # leaves whose gradient is in the matrices
        self.matrices: list[torch.Tensor] | None = None
        self._kept: dict[int, torch.Tensor] = {}  # gradients that came before there were matrices, by id of a leaf
        self._reducing: tuple[torch.Tensor, Callable[[], object]] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether no other gradient can come in this pass."""
        return not self.missing and not self.comes_again

    # -- taking ---------------------------------------------------------------------------------------------
    @torch.no_grad()
    def take(self, leaf: torch.Tensor) -> None:
        grad = self._gradient_of(leaf)
        if grad is None:
            return
        if not self.has_half_with(leaf):
            earlier = self._kept.get(id(leaf))
            self._kept[id(leaf)] = grad if earlier is None else earlier + grad
            return
        self._pack_kept()
        self._pack(id(leaf), grad)

    @torch.no_grad()
    def take_late(self, leaf: torch.Tensor) -> None:
        """Keep a gradient that came after the first was sent: reentrant checkpoints that share a parameter bring one
        each, in backward passes of their own. The program's hooks were called with the first, so they are an error."""
        self.comes_again = True
        if any(has_hooks(self.parameters[i].param) for _, i in self.places[id(leaf)]):
            raise AutogradError(
                f"data_parallel: a parameter of shape {tuple(leaf.shape)} got another gradient in one backward pass "
                f"after its hooks were called with the first: it is shared by reentrant checkpoints; "
                f"use checkpoint(use_reentrant=False)"
            )
        grad, earlier = self._gradient_of(leaf), self._late.get(id(leaf))
        if grad is not None:
            self._late[id(leaf)] = grad if earlier is None else earlier + grad

    def begin_again(self) -> bool:
        """Whether there are late gradients; then they are what is reduced next."""
        late, self._late = self._late, {}
        if late:
            self.begin()
            for leaf, grad in late.items():
                self._pack(leaf, grad)
        return bool(late)

    def has_half_with(self, leaf: torch.Tensor) -> bool:
        """Whether half of the gradients will have come with that of `leaf`, or had before."""
        if self.matrices is not None:
            return True
        return 2 * sum(self._sizes[key] for key in {*self._kept, id(leaf)}) >= sum(self._sizes.values())

    def _pack_kept(self) -> None:
        while self._kept:
            self._pack(*self._kept.popitem())

    def _pack(self, leaf: int, grad: torch.Tensor) -> None:
        """Put the gradient of a leaf, given by its id, into the matrices."""
        scale = self.scale
        for r, i in self.places[leaf]:
            rows, matrix = self.rows[r], self._matrices()[r]
            for into, part in zip(rows.in_matrix(i, matrix), rows.in_whole(i, grad), strict=True):
                if leaf in self.taken:
                    into.add_(part, alpha=scale)
                elif scale != 1 and part.dtype == into.dtype:
                    torch.mul(part, scale, out=into)
                else:
                    into.copy_(part).mul_(scale) if scale != 1 else into.copy_(part)
        self.taken.add(leaf)

    def _gradient_of(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """What came for a leaf, and what has waited for this."""
        grad, leaf.grad = leaf.grad, None
        if grad is not None and grad.layout != torch.strided:
            grad = grad.to_dense()
        waiting = self.parameters[self.places[id(leaf)][0][1]].waiting.pop(id(leaf), None)
        if waiting is None or grad is None:
            return waiting if grad is None else grad
        return waiting.add_(grad)

    @torch.no_grad()
    def set_aside(self, leaf: torch.Tensor) -> None:
        """Nothing is reduced in this pass: the gradient waits, in the dtype of the reduction."""
        if leaf.grad is not None and leaf.dtype != self.dtype:
            p = self.parameters[self.places[id(leaf)][0][1]]
            grad = self._gradient_of(leaf)
            if grad is not None:
                p.waiting[id(leaf)] = grad.to(self.dtype)

    def _matrices(self) -> list[torch.Tensor]:
        if self.matrices is None:
            parts, length = self.unreduced.shape
            by = self.reduces_by if self.cut else None
            flat = [allocated(by, (parts * length,), self.dtype, self.device) for _ in self.rows]
            self.matrices = [memory.view(parts, length) for memory in flat]
            if not self.even:  # holes between the parts of a row are summed too
                for matrix in self.matrices:
                    matrix.zero_()
        return self.matrices

    def _take_the_rest(self) -> None:
        """Take what has waited since earlier passes, and zeros where there is nothing."""
        self._pack_kept()
        for p in self.parameters:
            for leaf in p.leaves:
                if id(leaf) not in self.taken:
                    self.take(leaf)
        self._pack_kept()
        matrices = self._matrices()
        lacking = [place for key, places in self.places.items() if key not in self.taken for place in places]
        for r, i in lacking:
            for into in self.rows[r].in_matrix(i, matrices[r]):
                into.zero_()

    # -- reducing -------------------------------------------------------------------------------------------
    @torch.no_grad()
    def start(self) -> None:
        if len(self.taken) < len(self.places):
            self._take_the_rest()
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
        if self.cut and self.reduces_by is not None:
            self._reducing = reduce_by(self.reduces_by, value, self.data, self.unreduced, self.reduced, note)
        else:
            self._reducing = start_move(value, self.unreduced, self.reduced, note, owned=True, via=self.via)

    def give_up(self, active: bool) -> None:
        """Drop what has come in a pass that failed, wherever it failed. Gradients that were not to be reduced in it
        (not `active`) wait on, as plain torch's would be there, until the program clears them."""
        self.matrices = None
        self._kept.clear()
        self._late.clear()
        for p in self.parameters:
            p.drop_waiting() if active else p.mark_unreduced()
        under_way, self._reducing = self._reducing, None
        if self.state.now is Gradients.REDUCING:
            self.state.to(Gradients.REDUCED)
        if under_way is not None:
            under_way[1]()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the sum, and add to each parameter's gradient what came."""
        assert self._reducing is not None  # the state says so
        (local, wait), self._reducing = self._reducing, None
        wait()
        self.state.to(Gradients.REDUCED)
        arrived = self._rows_of(local)
        if self.after_sum is not None:
            self._call_after_sum(arrived)
        places = self.data.coords if self.cut else [0] * len(self.data.coords)
        has_gradient = [True] * len(self.parameters)
        if len(self.taken) < len(self.places) and not self.data.mesh.comm.outlined:  # another rank may have had it
            has_gradient = [flag > 0 for flag in arrived[0][self.flags_at :].tolist()]
        found = zip(self.rows, arrived, places, strict=True)
        parts = [rows.kept(row.to(self.kept_device, self.kept_dtype), place) for rows, row, place in found]
        for i, p in enumerate(self.parameters):
            if has_gradient[i]:
                p.unmark()
                _add_gradient(p.param, [mine[i] for mine in parts])

    def _rows_of(self, local: torch.Tensor) -> list[torch.Tensor]:
        """What each rank that this process runs has of the sum; simulated ranks that share it, share it here."""
        matrices = local.ranks if isinstance(local, RankTensor) else (local,)
        first = {id(matrix): matrix[0] for matrix in matrices}
        return [first[id(matrix)] for matrix in matrices]

    def _call_after_sum(self, arrived: Sequence[torch.Tensor]) -> None:
        assert self.after_sum is not None  # the caller has asked
        tape = tape_here() if tapes else None
        if tape is not None:
            tape.refuse("a hook on the sums of gradients may do more than compute")
        sums = {id(row): row[: self.flags_at] for row in arrived}
        mine = [sums[id(row)] for row in arrived]
        self.after_sum(RankTensor(mine) if self.data.mesh.comm.simulated else mine[0])


def _add_gradient(param: DTensor, parts: list[torch.Tensor]) -> None:
    comm, mine = param._layout.mesh.comm, param._local
    local = RankTensor(parts) if comm.simulated else parts[0]
    if has_hooks(param):
        torch.autograd.backward(comm.values(mine), comm.pick(comm.structure(mine), local))
        return
    for value, part in zip(comm.values(mine), comm.pick(comm.structure(mine), local), strict=True):
        tape = tape_here() if tapes else None
        if tape is not None:
            tape.number_of(value)
        if value.grad is not None:
            value.grad.add_(part)
            continue
        value.grad = part
        if tape is not None:
            tape.set_grad(value, part)


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
        self._started, self._active = 0, self.buckets
        self._in_flight: list[GradBucket] = []

    def begin(self, active: Set[GradBucket]) -> None:
        """A backward pass begins, that reduces these buckets; the gradients of the others wait."""
        self._started = 0
        self._active = [bucket for bucket in self.buckets if bucket in active]
        self._active.sort(key=lambda bucket: bucket.comes_again)
        for bucket in self.buckets:
            bucket.begin()

    def take(self, leaf: torch.Tensor) -> None:
        bucket = self._bucket_of.get(id(leaf))
        if bucket is None:
            raise AutogradError(
                f"data_parallel: a parameter of shape {tuple(leaf.shape)} was cast, moved or replaced between the "
                f"forward and the backward pass; do it before the forward"
            )
        if bucket not in self._active:
            bucket.set_aside(leaf)
            return
        if bucket.state.now is not Gradients.COLLECTING:
            bucket.take_late(leaf)
            return
        if self.one_at_a_time and bucket.has_half_with(leaf):  # the one before has had its time
            self._finish_all()
        bucket.take(leaf)
        bucket.missing.discard(id(leaf))
        if not bucket.missing:
            self._start(everything=False)

    def _start(self, everything: bool) -> None:
        """Start the reductions whose turn it is and that miss nothing, or all that are left."""
        while self._started < len(self._active) and (everything or self._active[self._started].is_complete):
            bucket = self._active[self._started]
            self._started += 1
            self._send(bucket)

    def _send(self, bucket: GradBucket) -> None:
        if self.one_at_a_time:
            self._finish_all()
        self._in_flight.append(bucket)
        bucket.start()

    def finish(self) -> None:
        """Reduce what is left; afterwards every parameter of the active buckets has its gradient."""
        self._start(everything=True)
        self._finish_all()
        for bucket in self._active:
            if bucket.begin_again():
                self._send(bucket)
        self._finish_all()

    def _finish_all(self) -> None:
        while self._in_flight:
            self._in_flight[0].finish()
            self._in_flight.pop(0)

    def give_up(self) -> None:
        """The backward pass failed: wait for what is under way, and drop what came of the pass."""
        self._in_flight.clear()
        for bucket in self.buckets:
            bucket.give_up(bucket in self._active)
