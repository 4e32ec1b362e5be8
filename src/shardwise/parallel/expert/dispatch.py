"""dispatch and combine: rows of tokens to where their experts are, and back. Which rows go from which ranks to which,
all ranks work out alike from the number of tokens of each expert."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy
import torch

from shardwise.comm.base import Coords
from shardwise.comm.record import Note
from shardwise.comm.without_values import assumption_of
from shardwise.errors import LayoutError, MeshError, OutlineError, check_type
from shardwise.layout import Layout, Placement, Shard
from shardwise.layout.placement import REPLICATE
from shardwise.layout.split import Intervals, normalize
from shardwise.move import move
from shardwise.sizes import coords_on, cut_as_held
from shardwise.strategy.program import run_local
from shardwise.tensor import DTensor
from shardwise.torch_private.tensors import is_abstract
from shardwise.wrapper import wrap

_BAD = -(1 << 62)  # what a rank adds to the number of an expert that does not exist, in place of its counts
_ASKS = "how often each expert is chosen"


class Run(NamedTuple):
    """Tokens in a row that one rank holds."""

    start: int  # the first token
    holder: tuple[int, ...]  # the rank's coordinates on the axes that cut the tokens


class Routes:
    """Which rank holds which rows, by token before they travel and by expert afterwards.

    Of run r, counts[r, e] tokens chose expert e, which takes kept[r, e] of them: all, or the first ones up to its
    `capacity`. Sorted by expert and then by token, first[r, e] is the first of those rows."""

    def __init__(self, runs: Sequence[Run], counts: numpy.ndarray, capacity: int | None) -> None:
        self.runs, self.counts = list(runs), counts
        before = counts.cumsum(0) - counts
        self.kept = counts if capacity is None else numpy.clip(capacity - before, 0, counts)
        per_expert = self.kept.sum(0)
        self.sizes = tuple(int(n) for n in per_expert)  # how many rows each expert takes, over all ranks
        self.total = sum(self.sizes)
        self.first = (per_expert.cumsum() - per_expert)[None, :] + self.kept.cumsum(0) - self.kept
        self._layouts: dict[tuple[str, Layout], Layout] = {}
        self.token_axes: tuple[int, ...] = ()
        self.expert_axes: tuple[int, ...] = ()
        self.experts_at: Callable[[Coords], Sequence[int]] = lambda coords: range(counts.shape[1])

    @staticmethod
    def on_one_device(chosen: torch.Tensor, experts: int, capacity: int | None) -> Routes:
        if is_abstract(chosen):
            return Routes([Run(0, ())], _assumed_counts(chosen, chosen.numel(), experts)[None], capacity)
        counts = _checked(_counted(chosen, experts, ((0, len(chosen)),), 1))
        return Routes([Run(0, ())], counts, capacity)

    @staticmethod
    def between_ranks(chosen: DTensor, holders: Layout | None, experts: int, capacity: int | None) -> Routes:
        """The routes of tokens that are cut as `chosen` is, to experts cut as the first dim of `holders`.

        The ranks exchange how often they chose each expert, so that all know what each of them holds."""
        known = _exchanged_counts(chosen, experts)
        kept = _assumed_routes.setdefault(chosen._layout, {}) if chosen._layout.mesh.comm.outlined else {}
        key = holders, experts, capacity  # what is assumed is the same every time
        if key in kept:
            return kept[key]
        routes = kept[key] = Routes(*_runs_in_order(chosen._layout, known, experts), capacity)
        routes.token_axes = chosen._layout.axes_of(0)
        if holders is not None:
            routes.expert_axes = holders.axes_of(0)
            routes.experts_at = lambda coords: [e for a, b in holders.held(0, coords) for e in range(a, b)]
        return routes

    # -- layouts --------------------------------------------------------------------------------------------
    def layout_by_token(self, tokens: Layout) -> Layout:
        """The layout in which each rank holds the rows of its own tokens; columns as those of `tokens`."""
        every = range(len(self.sizes))
        return self._layout("token", tokens, self.token_axes, lambda coords: self._rows(self._own_runs(coords), every))

    def layout_by_expert(self, tokens: Layout) -> Layout:
        """The layout in which each rank holds the rows of its experts, of all tokens along the axes that cut these."""
        axes = tuple(sorted({*self.token_axes, *self.expert_axes}))
        return self._layout(
            "expert", tokens, axes, lambda coords: self._rows(self._runs_for(coords), self.experts_at(coords))
        )

    def _layout(self, by: str, tokens: Layout, axes: tuple[int, ...], held: Callable[[Coords], Intervals]) -> Layout:
        found = self._layouts.get((by, tokens))
        if found is None:
            places = cut_as_held(tokens, axes, 0, self.total, held)
            found = tokens.replace(shape=(self.total, tokens.shape[1]), placements=places)
            self._layouts[by, tokens] = found
        return found

    def _own_runs(self, coords: Coords) -> list[int]:
        mine = tuple(coords[a] for a in self.token_axes)
        return [r for r, run in enumerate(self.runs) if run.holder == mine]

    def _runs_for(self, coords: Coords) -> list[int]:
        fixed = [(i, coords[a]) for i, a in enumerate(self.token_axes) if a not in self.expert_axes]
        return [r for r, run in enumerate(self.runs) if all(run.holder[i] == c for i, c in fixed)]

    def _rows(self, runs: Sequence[int], experts: Sequence[int]) -> Intervals:
        first, kept = self.first[runs][:, experts], self.kept[runs][:, experts]
        return normalize(zip(first.ravel().tolist(), (first + kept).ravel().tolist(), strict=True))

    # -- numbers for local work -----------------------------------------------------------------------------
    def own_counts(self, coords: Coords) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How many rows the rank at `coords` has, and how many of them are kept: for each expert, for each run."""
        mine = self._own_runs(coords)
        return tuple(self.counts[mine].T.ravel().tolist()), tuple(self.kept[mine].T.ravel().tolist())

    def rows_per_expert(self, coords: Coords) -> tuple[int, ...]:
        return tuple(self.kept[self._runs_for(coords)][:, self.experts_at(coords)].sum(0).tolist())


def _pieces(layout: Layout) -> tuple[dict[tuple[int, ...], Intervals], int]:
    """The runs of tokens that each rank holds, by its coordinates on the axes that cut them; and the most of one."""
    axes, shape = layout.axes_of(0), layout.mesh.shape
    holders = numpy.ndindex(*(shape[a] for a in axes))
    pieces = {holder: layout.held(0, coords_on(axes, holder, len(shape))) for holder in holders}
    return pieces, max(1, max(map(len, pieces.values())))


def _exchanged_counts(chosen: DTensor, experts: int) -> torch.Tensor:
    """How often each expert is chosen in each run of tokens of each rank, zeros where a rank has fewer runs."""
    layout = chosen._layout
    mesh, (pieces, most) = layout.mesh, _pieces(layout)
    evenly = [Shard(0) if p.is_shard(0) else REPLICATE for p in layout.placements]
    table = layout.replace(shape=(len(pieces) * most, experts), placements=evenly)
    count = lambda local, held: _counted(local, experts, held, most)
    counts = run_local(count, [chosen], table, lambda coords: layout.held(0, coords))
    whole = table.replicated()
    known = mesh.comm.agreed(move(counts._local, table, whole, Note("dispatch", "sizes")), "tokens per expert")
    if is_abstract(known):  # a rank looks at the counts here every time, and waits for its device
        assumption_of(known, "experts", _ASKS)
    return known


def _runs_in_order(layout: Layout, known: torch.Tensor, experts: int) -> tuple[list[Run], numpy.ndarray]:
    """The runs of tokens of all ranks, in order, and how often each expert is chosen in each."""
    pieces, most = _pieces(layout)
    if is_abstract(known):
        numbers = numpy.zeros((len(pieces), most, experts), dtype=numpy.int64)
        for i, held in enumerate(pieces.values()):
            for j, (a, b) in enumerate(held):
                numbers[i, j] = _assumed_counts(known, (b - a) * math.prod(layout.shape[1:]), experts)
    else:
        numbers = _checked(known).reshape(len(pieces), most, experts)
    found = sorted(
        (Run(start, holder), tuple(numbers[i, j]))
        for i, (holder, held) in enumerate(pieces.items())
        for j, (start, _) in enumerate(held)
    )
    rows = numpy.array([row for _, row in found], dtype=numpy.int64).reshape(len(found), experts)
    return [run for run, _ in found], rows


def _counted(chosen: torch.Tensor, experts: int, held: Intervals, most: int) -> torch.Tensor:
    """How often each expert is chosen in each run of tokens. There are `most` rows, zeros where there is no run."""
    counts = chosen.new_zeros(most, experts)
    if is_abstract(chosen):
        return counts
    if chosen.numel() and not (int(chosen.min()) >= 0 and int(chosen.max()) < experts):
        return counts + (_BAD + chosen[(chosen < 0) | (chosen >= experts)][0])
    for row, part in zip(counts, chosen.split([b - a for a, b in held]), strict=False):
        row += part.flatten().bincount(minlength=experts)
    return counts


def _assumed_counts(chosen: torch.Tensor, choices: int, experts: int) -> numpy.ndarray:
    """How often each expert is chosen where there are no values: what the program assumes."""
    said = assumption_of(chosen, "experts", _ASKS)
    if said != "even":
        raise OutlineError(f"assume={{'experts': {said!r}}}: must be 'even'")
    each, rest = divmod(choices, experts)
    return numpy.array([each + (e < rest) for e in range(experts)], dtype=numpy.int64)


def _checked(counts: torch.Tensor) -> numpy.ndarray:
    """The counts as an array. An expert that does not exist raises on all ranks, since all have the same counts."""
    known = counts.numpy(force=True)
    if known.min(initial=0) < 0:
        raise LayoutError(
            f"dispatch: chosen has {known.min() - _BAD}, but there are {counts.shape[-1]} experts, numbered from 0"
        )
    return known


_Key = tuple[Layout | None, int, int | None]
_assumed_routes: weakref.WeakKeyDictionary[Layout, dict[_Key, Routes]] = weakref.WeakKeyDictionary()  # without values


class Routed:
    """Rows of tokens, sorted by expert, where their experts are: `rows` (kept, width), and `sizes`, how many rows each
    expert has over all ranks."""

    def __init__(
        self, rows: torch.Tensor, routes: Routes, slots: torch.Tensor, tokens: Layout | int, choices: int
    ) -> None:
        check_type(routes, Routes, "Routed: routes", "dispatch(...) makes a Routed")
        self.rows, self.sizes, self._routes, self._slots = rows, routes.sizes, routes, slots
        self._tokens, self._choices = tokens, choices  # layout (or number) of the tokens, how many experts each has


def dispatch(
    x: torch.Tensor, chosen: torch.Tensor, experts: torch.Tensor | int, *, capacity: int | None = None
) -> Routed:
    """Bring tokens to their experts; differentiable.

    Args:
        x: (tokens, width).
        chosen: (tokens, k), the numbers of the experts that each token goes to.
        experts: any weight of theirs, whose layout says who holds which; or their number, where every rank holds all.
        capacity: how many rows an expert takes at most, those of the first tokens; the others are dropped.

    Returns:
        The rows of `x`, one for each expert that a token goes to, sorted by expert.

    Raises:
        LayoutError: the arguments do not fit each other, or `chosen` names an expert that does not exist.
        MeshError: `x` and `experts` are on different meshes.
    """
    count = _check_arguments(x, chosen, experts, capacity)
    choices = chosen.shape[1]
    if not (isinstance(x, DTensor) and isinstance(chosen, DTensor)):
        routes = Routes.on_one_device(chosen, count, capacity)
        slots = _sorted_slots(chosen, routes.own_counts(()))
        return Routed(_taken(x, slots, choices), routes, slots, len(x), choices)
    holders = experts._layout if isinstance(experts, DTensor) else None
    x, chosen = _by_rows(x, chosen, holders)
    routes = Routes.between_ranks(chosen, holders, count, capacity)
    by_token = routes.layout_by_token(x._layout)
    order = by_token.replace(shape=by_token.shape[:1], placements=_rows_only(by_token), dtype=torch.int64)
    slots = run_local(_sorted_slots, [chosen], order, routes.own_counts)
    rows = run_local(_taken, [x, slots, choices], by_token)
    return Routed(_moved(rows, routes.layout_by_expert(x._layout), "dispatch"), routes, slots, x._layout, choices)


def combine(routed: Routed, outputs: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Bring what the experts made of the rows back to the tokens; differentiable.

    Args:
        routed: what `dispatch` gave.
        outputs: (kept, any width), one row for each of `routed.rows`.
        weights: (tokens, k), by which rows are multiplied.

    Returns:
        For each token the sum of its rows, laid out as the tokens were; zeros where all of its rows were dropped.

    Raises:
        LayoutError: `outputs` has another number of rows, or `weights` are plain where the tokens are not.
    """
    check_type(routed, Routed, "combine: routed", "give what dispatch(...) gave")
    check_type(outputs, torch.Tensor, "combine: outputs")
    check_type(weights, (torch.Tensor, type(None)), "combine: weights")
    if outputs.dim() != 2 or outputs.shape[0] != sum(routed.sizes):
        raise LayoutError(
            f"combine: outputs of shape {tuple(outputs.shape)} must have the {sum(routed.sizes)} rows dispatch gave"
        )
    choices, tokens = routed._choices, routed._tokens
    if isinstance(tokens, int):
        return _added_up(outputs, weights, routed._slots, choices, tokens)
    outputs = _on_mesh(outputs, tokens, "outputs")
    shape = (tokens.shape[0], outputs.shape[1])
    target = tokens.replace(shape=shape, placements=_rows_only(tokens), dtype=outputs.dtype)
    back = _moved(outputs, routed._routes.layout_by_token(target), "combine")
    if weights is not None:
        weights = _on_mesh(weights, tokens, "weights").redistribute(placements=target.placements)
    here = lambda coords: target.local_shape_at(coords)[0]
    return run_local(_added_up, [back, weights, routed._slots, choices], target, here)


def _moved(rows: DTensor, target: Layout, op: str) -> DTensor:
    return rows if rows._layout is target else wrap(move(rows._local, rows._layout, target, Note(op)), target)


def _check_arguments(x: torch.Tensor, chosen: torch.Tensor, experts: object, capacity: object) -> int:
    """The number of experts, once the arguments are found to fit each other."""
    check_type(x, torch.Tensor, "dispatch: x")
    check_type(chosen, torch.Tensor, "dispatch: chosen")
    check_type(experts, (torch.Tensor, int), "dispatch: experts")
    if x.dim() != 2 or chosen.dim() != 2 or x.shape[0] != chosen.shape[0]:
        raise LayoutError(
            f"dispatch: x must be (tokens, width) and chosen (tokens, k), got {tuple(x.shape)} and "
            f"{tuple(chosen.shape)}; flatten the dims before the last"
        )
    if chosen.dtype != torch.int64:
        raise LayoutError(f"dispatch: chosen must be int64, the numbers of experts, got {chosen.dtype}")
    if isinstance(x, DTensor) != isinstance(chosen, DTensor):
        raise LayoutError("dispatch: x and chosen must both be DTensors, or both plain; distribute the plain one")
    if capacity is not None and (not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 0):
        raise LayoutError(f"dispatch: capacity must be an int >= 0, the rows an expert takes, got {capacity!r}")
    if isinstance(experts, torch.Tensor):
        if isinstance(experts, DTensor) and isinstance(x, DTensor) and experts._layout.mesh is not x._layout.mesh:
            raise MeshError(f"dispatch: x is on {x._layout.mesh!r}, experts on {experts._layout.mesh!r}; use one mesh")
        return experts.shape[0]
    if not isinstance(experts, int) or isinstance(experts, bool) or experts < 1:
        raise LayoutError(
            f"dispatch: experts must be their number or a DTensor of one slice an expert, got {experts!r}"
        )
    return experts


# -- who holds what ----------------------------------------------------------------------------------------
def _rows_only(layout: Layout) -> list[Placement]:
    return [p if p.is_shard(0) else REPLICATE for p in layout.placements]


def _by_rows(x: DTensor, chosen: DTensor, holders: Layout | None) -> tuple[DTensor, DTensor]:
    """Tokens and choices, cut alike along the tokens. Columns stay cut on axes that do not cut the experts."""
    travel = () if holders is None else holders.axes_of(0)
    places = [REPLICATE if p.is_partial() or (p.is_shard(1) and a in travel) else p for a, p in enumerate(x.placements)]
    x = x.redistribute(placements=places)
    return x, chosen.redistribute(placements=_rows_only(x._layout))


def _on_mesh(value: torch.Tensor, tokens: Layout, what: str) -> DTensor:
    if not isinstance(value, DTensor):
        raise LayoutError(f"combine: {what} must be a DTensor on {tokens.mesh!r} as the tokens are; distribute it")
    return value


# -- local work --------------------------------------------------------------------------------------------
def _sorted_slots(chosen: torch.Tensor, groups: tuple[tuple[int, ...], tuple[int, ...]]) -> torch.Tensor:
    """The places in the flat `chosen` whose rows are kept, sorted by expert."""
    counts, kept = groups
    slots = chosen.flatten().argsort(stable=True)
    if counts == kept:
        return slots
    if is_abstract(slots):
        return slots[: sum(kept)].clone()
    sizes = torch.tensor(counts, device=slots.device)
    limit = (sizes.cumsum(0) - sizes + torch.tensor(kept, device=slots.device)).repeat_interleave(sizes)
    return slots[torch.arange(len(slots), device=slots.device) < limit]


def _taken(x: torch.Tensor, slots: torch.Tensor, choices: int) -> torch.Tensor:
    return x.index_select(0, slots // max(choices, 1))


def _added_up(
    rows: torch.Tensor, weights: torch.Tensor | None, slots: torch.Tensor, choices: int, tokens: int
) -> torch.Tensor:
    if weights is not None:
        rows = rows * weights.flatten().index_select(0, slots).unsqueeze(-1)
    return rows.new_zeros(tokens, rows.shape[1]).index_add(0, slots // max(choices, 1), rows)
