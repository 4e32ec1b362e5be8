"""Moves for a compiler: plain ops and functional collectives of torch, which it sees, fuses around and reorders.

Each step of a move is run once on tensors whose values do not matter, and the ops are written down; in the place of
what would communicate stands a collective of `torch.ops._c10d_functional`. Even gathers are `all_gather_into_tensor`,
sums `all_reduce`, even reductions on NCCL `reduce_scatter_tensor`; everything else, of even or uneven sizes, is
`all_to_all_single` with the sums behind it, in the order in which an eager run adds them up. What torch has no
collective for (groups that are no process group, dtypes that no backend reduces, moves in rounds) stays a `Move`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from shardwise.captures.program import Move, Program, Ref, Statement, items_in, with_items, written_by, written_places
from shardwise.comm.messages import WIRE, Along, as_wire, from_wire, width
from shardwise.comm.process_group import ProcessGroupComm
from shardwise.comm.reduction import reduce_parts
from shardwise.layout.region import Region
from shardwise.move.exchange import Exchange
from shardwise.move.pack import build, pick, place
from shardwise.move.schedule import Pieces
from shardwise.move.steps import AllReduce, GatherParts, Step
from shardwise.move.transfer import reduce_and_scatter
from shardwise.protocols import Args, Item, Kwargs, Op, Result
from shardwise.torch_private.distributed import functional_collectives
from shardwise.torch_private.tensors import DispatchMode, without_torch_function

_NAMES = {"sum": "sum", "product": "product", "max": "max", "min": "min"}  # of reductions, as torch's collectives say


class _NoCollective(Exception):
    """Torch has no functional collective for a step."""


def lower_moves(program: Program) -> None:
    """Put ops and functional collectives in the place of the moves of a program on processes."""
    if not any(_may_be_lowered(s) for s in program.statements):
        return
    assert functional_collectives is not None  # which tells torch.fx that nobody may leave out a wait
    highest = max(
        (ref.number for s in program.statements for ref in (*s.refs(), *s.outs) if ref is not None), default=0
    )
    numbers = itertools.count(1 + max(highest, *(ref.number for ref in (*program.inputs, *program.state)), 0))
    kept: list[Statement] = []
    for statement in program.statements:
        if _may_be_lowered(statement):
            try:
                kept += _lowered(statement, program, numbers)
                continue
            except _NoCollective:
                pass
        kept.append(statement)
    program.statements[:] = kept


def _may_be_lowered(s: Statement) -> bool:
    return (
        type(s.func) is Move
        and not s.outside
        and len(s.outs) == 1
        and s.outs[0] is not None
        and isinstance(s.func.comm, ProcessGroupComm)
        and s.func.comm_after is s.func.comm
    )


def _lowered(statement: Statement, program: Program, numbers: Iterator[int]) -> list[Statement]:
    """The statements of one move.

    Raises:
        _NoCollective: Where a step has none, or the result would look otherwise than in an eager run.
    """
    move: Move = statement.func  # type: ignore[assignment]
    shape, stride, dtype, device = statement.taken[0]
    with without_torch_function(), torch.no_grad():
        value = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        writer = _Writer(statement, numbers)
        writer.refs[id(value)] = statement.args[0]
        with writer:
            found = value
            for step in move.steps:
                found = _run(step, move.comm, found, writer)
    if (found.shape, found.stride(), found.dtype) != statement.kinds[0][:3] or id(found) not in writer.made:
        raise _NoCollective
    last = writer.refs[id(found)]
    for made in writer.statements:
        made.replace_refs({last: statement.outs[0]})  # type: ignore[dict-item]
        made.outs = [statement.outs[0] if ref == last else ref for ref in made.outs]
    program.state.update(writer.state)
    writer.statements[-1].lowered = move
    return writer.statements


class _Writer(DispatchMode):  # type: ignore[misc]
    """Writes down the ops of a move; tensors that are met are constants: indices."""

    def __init__(self, move: Statement, numbers: Iterator[int]) -> None:
        super().__init__()
        self._move, self._numbers = move, numbers
        self.statements: list[Statement] = []
        self.refs: dict[int, Ref] = {}
        self.made: set[int] = set()
        self.state: dict[Ref, torch.Tensor] = {}
        self._alive: list[torch.Tensor] = []  # so that no two have one id

    def _ref(self, tensor: torch.Tensor) -> Ref:
        found = self.refs.get(id(tensor))
        if found is None:
            found = self.refs[id(tensor)] = Ref(next(self._numbers))
            self.state[found] = tensor
            self._alive.append(tensor)
        return found

    def __torch_dispatch__(self, func: Op, types: Args, args: Args = (), kwargs: Kwargs | None = None) -> Result:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.add(func, args, kwargs, out)
        return out

    def add(self, func: Op, args: Args, kwargs: Kwargs, out: Item) -> None:
        """One statement."""
        refs, named = (with_items(given, torch.Tensor, self._ref) for given in (args, kwargs))
        statement = Statement(func, refs, named, label=func.overloadpacket.__name__)
        statement.source, statement.note = self._move.source, self._move.note
        statement.single = isinstance(out, torch.Tensor)
        statement.writes = written_by(written_places(func), refs, named)
        for tensor in items_in(out):
            if id(tensor) in self.refs:  # an op that writes into its argument
                statement.outs.append(None)
                continue
            ref = self.refs[id(tensor)] = Ref(next(self._numbers))
            statement.outs.append(ref)
            self.made.add(id(tensor))
            self._alive.append(tensor)
        self.statements.append(statement)

    def collective(self, name: str, x: torch.Tensor, size: Sequence[int], *args: Item) -> torch.Tensor:
        """A functional collective of `x` whose result has this size, and the wait for it."""
        functional = torch.ops._c10d_functional
        begun, done = (x.new_empty(size) for _ in range(2))
        del self.statements[-2:]
        for made in (begun, done):
            del self.refs[id(made)]
        self.add(getattr(functional, name).default, (x, *args), {}, begun)
        self.add(functional.wait_tensor.default, (begun,), {}, done)
        return done


def _run(step: Step, comm: ProcessGroupComm, x: torch.Tensor, writer: _Writer) -> torch.Tensor:
    if step.kind == "local":
        return step.run(comm, x)
    if isinstance(step, AllReduce):
        return _reduced(step, comm, x, writer)
    if isinstance(step, GatherParts):
        along = _group_of(comm, step.axes)
        if x.dtype not in WIRE or not along.in_order:
            raise _NoCollective
        return _gathered(x, along, writer)
    if type(step) is Exchange and step.rounds == 1:
        return _exchanged(step, comm, x, writer)
    raise _NoCollective


def _group_of(comm: ProcessGroupComm, axes: Sequence[int]) -> Along:
    along = comm.along(axes)
    if along.group is None:
        raise _NoCollective
    return along


def _name_of(along: Along) -> str:
    return along.group.group_name  # type: ignore[union-attr]


def _reduced(step: AllReduce, comm: ProcessGroupComm, x: torch.Tensor, writer: _Writer) -> torch.Tensor:
    along = _group_of(comm, step.axes)
    is_ordered = x.is_floating_point() and step.reduce_op in ("max", "min")  # backends lose NaNs there
    if x.dtype not in WIRE or step.reduce_op not in _NAMES or is_ordered:
        raise _NoCollective
    return writer.collective("all_reduce", x.contiguous(), x.shape, _NAMES[step.reduce_op], _name_of(along))


def _gathered(x: torch.Tensor, along: Along, writer: _Writer) -> torch.Tensor:
    """Everyone's tensor, stacked in the order of the group."""
    n, flat = len(along.ranks), x.contiguous().view(-1)
    whole = writer.collective("all_gather_into_tensor", flat, (n * flat.numel(),), n, _name_of(along))
    return whole.view(n, *x.shape)


def _exchanged(step: Exchange, comm: ProcessGroupComm, x: torch.Tensor, writer: _Writer) -> torch.Tensor:
    me, along = comm.coords, _group_of(comm, step.crossed)
    routes = step.routes(me)
    if routes.stays:
        raise _NoCollective
    if step.kind == "all_gather" and step.even and x.dtype in WIRE and x.numel():
        parts = _gathered(x, along, writer)
        if step.stacks and along.in_order and not step.zeros:
            return parts.view(routes.needed[0])
        came = dict(zip(along.peers, parts.unbind(), strict=True))
        routed = [
            (_whole(route.pieces, x).regions_in(routes.needed)[0], came[route.sources[0]]) for route in routes.takes
        ]
        return _built(step, routes.needed[0], routed, x)
    if step.native(along) is reduce_and_scatter:
        sent = [
            pick(x, region).reshape(-1) for peer in along.peers for region in routes.sends[peer].regions_in([x.shape])
        ]
        n, size = len(along.ranks), sum(map(torch.numel, sent)) // len(along.ranks)
        made = writer.collective("reduce_scatter_tensor", torch.cat(sent), (size,), "sum", n, _name_of(along))
        return made.view(routes.needed[0])
    return _swapped(step, comm, x, along, writer)


def _whole(pieces: Pieces, tensor: torch.Tensor) -> Pieces:
    """What a peer has, which must be in one piece."""
    if pieces.shapes != (tuple(tensor.shape),):
        raise _NoCollective
    return pieces


def _swapped(step: Exchange, comm: ProcessGroupComm, x: torch.Tensor, along: Along, writer: _Writer) -> torch.Tensor:
    """Everyone sends each peer what it needs; parts of sums are added up in the order of their coordinates."""
    me, routes = comm.coords, step.routes(comm.coords)
    sent: list[torch.Tensor] = []
    counts, sizes = [0] * len(along.peers), [0] * len(along.peers)
    for number, peer in enumerate(along.peers):
        if peer == me:
            continue
        if (pieces := routes.sends.get(peer)) is not None:
            sent += [pick(x, region).reshape(-1) for region in pieces.regions_in(routes.held)]
            counts[number] = pieces.size
        sizes[number] = sum(route.pieces.size for route in routes.takes if peer in route.sources)
    packed = torch.cat(sent) if len(sent) > 1 else sent[0] if sent else x.new_empty(0)
    wide = width(x.dtype)
    wire = as_wire(packed)
    into, out = ([n * wide for n in numbers] for numbers in (sizes, counts))
    came = writer.collective("all_to_all_single", wire, (sum(into),), into, out, _name_of(along))
    messages = dict(zip(along.peers, came.split(into), strict=True))
    read = dict.fromkeys(along.peers, 0)
    kept = routes.sends[me].regions_in(routes.held) if me in routes.sends else ()
    own = (pick(x, region) for region in kept)
    routed: list[tuple[Region, torch.Tensor]] = []
    for route in routes.takes:
        columns: list[list[torch.Tensor]] = []
        for peer in route.sources:
            if peer == me:
                columns.append([next(own) for _ in route.pieces.slots])
                continue
            column = []
            for shape in route.pieces.shapes:
                length = torch.Size(shape).numel() * wide
                column.append(from_wire(messages[peer].narrow(0, read[peer], length), x.dtype, shape))
                read[peer] += length
            columns.append(column)
        for region, parts in zip(route.pieces.regions_in(routes.needed), zip(*columns, strict=True), strict=True):
            value = parts[0] if len(parts) == 1 else reduce_parts(parts, step.reduce_op)
            routed.append((region, value))
    return _built(step, routes.needed[0], routed, x)


def _built(
    step: Exchange, shape: Sequence[int], routed: Sequence[tuple[Region, torch.Tensor]], like: torch.Tensor
) -> torch.Tensor:
    if not step.zeros:
        return build(shape, routed, like) if routed else like.new_empty(shape)
    out = like.new_zeros(shape)
    for region, part in routed:
        place(out, region, part)
    return out
