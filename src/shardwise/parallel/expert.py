"""Expert parallel: tokens travel to the ranks that hold their experts, and back.

    weights, chosen = top_k(router(x), k=2)             # x is (tokens, width), chosen (tokens, k)
    routed = dispatch(x, chosen, up)                    # rows of x sorted by expert, where the experts are
    y = grouped_linear(routed, F.gelu(grouped_linear(routed, routed.rows, up)), down)
    y = combine(routed, y, weights)                     # (tokens, width), laid out as x was

Sorted by expert, the rows are one global tensor: those of expert 0 in the order of their tokens, those of expert 1, and
so on. Before the journey a rank holds the rows of its own tokens, several pieces of it; after, those of its experts. So
dispatch and combine are changes of layout, in which exactly the rows that change rank travel. The same functions work
on plain tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy
import torch
import torch.nn.functional as F
from torch import nn

from shardwise.comm.base import Coords
from shardwise.comm.record import Note
from shardwise.errors import LayoutError, MeshError
from shardwise.layout import Layout, Partial, Placement, Shard
from shardwise.layout.layout import shards_from_table
from shardwise.layout.placement import REPLICATE
from shardwise.layout.split import Intervals, normalize
from shardwise.move import move
from shardwise.strategy.program import run_local
from shardwise.tensor import DTensor
from shardwise.wrapper import wrap

__all__ = ["MixtureOfExperts", "Routed", "balance_loss", "combine", "dispatch", "grouped_linear", "top_k"]

_BAD = -(1 << 62)  # what a rank adds to the number of an expert that there is not, in place of its counts


# -- the router --------------------------------------------------------------------------------------------
def top_k(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k likeliest experts of each token and their weights, which add up to one: (weights, chosen)."""
    experts = logits.shape[-1]
    if not isinstance(k, int) or not 0 < k <= experts:
        raise LayoutError(f"top_k: k must be an int from 1 to the number of experts {experts}, got {k!r}")
    values, chosen = logits.softmax(-1).topk(k, -1)
    return values / values.sum(-1, keepdim=True), chosen


def balance_loss(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """1 where all experts get as many tokens as the others; grows as the router prefers some of them."""
    experts = logits.shape[-1]
    share = F.one_hot(chosen, experts).to(logits.dtype).mean((0, 1))
    return experts * (share * logits.softmax(-1).mean(0)).sum()


# -- there and back ----------------------------------------------------------------------------------------
class Routed:
    """Rows of tokens, sorted by expert, where their experts are.

    `rows` is (kept, width); `sizes` says how many rows each expert has, over all ranks."""

    def __init__(self, rows: Any, sizes: tuple[int, ...], journey: _Journey, slots: Any, tokens: Any, choices: int):
        self.rows, self.sizes = rows, sizes
        self._journey, self._slots = journey, slots
        self._tokens, self._choices = tokens, choices  # layout (or number) of the tokens, how many experts each has


def dispatch(x: Any, chosen: Any, experts: Any, *, capacity: int | None = None) -> Routed:
    """The rows of `x` (tokens, width), one for each expert that `chosen` (tokens, k) names, sorted by expert.

    Differentiable. `experts` is a DTensor whose first dim is the experts, as any weight of theirs: its layout says who
    holds which. Or their number, where every rank holds all. With `capacity` an expert takes so many rows at most,
    those of the first tokens; the others are dropped.
    """
    count = _check_arguments(x, chosen, experts, capacity)
    if not isinstance(x, DTensor):
        journey = _Journey.plain(chosen, count, capacity)
        slots = _sorted_slots(chosen, journey.at_home(()))
        return Routed(_taken(x, slots, chosen.shape[1]), journey.sizes, journey, slots, len(x), chosen.shape[1])
    holders = experts._layout if isinstance(experts, DTensor) else None
    x, chosen = _by_rows(x, chosen, holders)
    journey = _Journey.between(chosen, holders, count, capacity)
    home = journey.layout(x._layout, journey.home)
    order = home.replace(shape=home.shape[:1], placements=_rows_only(home), dtype=torch.int64)
    slots = run_local(_sorted_slots, [chosen], order, journey.at_home)
    rows = run_local(_taken, [x, slots, chosen.shape[1]], home)
    away = journey.layout(x._layout, journey.away)
    return Routed(_moved(rows, away, "dispatch"), journey.sizes, journey, slots, x._layout, chosen.shape[1])


def combine(routed: Routed, outputs: Any, weights: Any = None) -> Any:
    """For each token the sum of its rows in `outputs` (kept, any width), times their weights in `weights` (tokens, k).

    The result is laid out as the tokens were; a token all of whose rows were dropped gets zeros. Differentiable."""
    if outputs.shape[0] != sum(routed.sizes):
        raise LayoutError(
            f"combine: outputs of shape {tuple(outputs.shape)} must have the {sum(routed.sizes)} rows dispatch gave"
        )
    choices = routed._choices
    if not isinstance(outputs, DTensor):
        return _added_up(outputs, weights, routed._slots, choices, routed._tokens)
    tokens: Layout = routed._tokens
    shape = (tokens.shape[0], outputs.shape[1])
    target = tokens.replace(shape=shape, placements=_rows_only(tokens), dtype=outputs.dtype)
    home = routed._journey.layout(target, routed._journey.home)
    back = _moved(outputs, home, "combine")
    if weights is not None:
        weights = _laid_out(weights, tokens, "weights").redistribute(placements=target.placements)
    here = lambda coords: target.local_shape_at(coords)[0]  # noqa: E731
    add = lambda rows, weights, slots, n: _added_up(rows, weights, slots, choices, n)  # noqa: E731
    return run_local(add, [back, weights, routed._slots], target, here)


def _moved(rows: Any, target: Layout, op: str) -> Any:
    """Rows in another layout, on the account of `op`."""
    return rows if rows._layout is target else wrap(move(rows._local, rows._layout, target, Note(op)), target)


def _check_arguments(x: Any, chosen: Any, experts: Any, capacity: Any) -> int:
    """The number of experts, once the arguments are found to fit each other."""
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
    """The placements with nothing cut but the rows."""
    return [p if p.is_shard(0) else REPLICATE for p in layout.placements]


def _by_rows(x: Any, chosen: Any, holders: Layout | None) -> tuple[Any, Any]:
    """Tokens and choices, cut alike along the tokens. Columns may stay cut where no experts are."""
    travel = () if holders is None else holders.axes_of(0)
    places = [REPLICATE if p.is_partial() or (p.is_shard(1) and a in travel) else p for a, p in enumerate(x.placements)]
    x = x.redistribute(placements=places)
    return x, chosen.redistribute(placements=_rows_only(x._layout))


def _laid_out(value: Any, tokens: Layout, what: str) -> Any:
    if not isinstance(value, DTensor):
        raise LayoutError(f"combine: {what} must be a DTensor on {tokens.mesh!r} as the tokens are; distribute it")
    return value


class _Source(NamedTuple):
    """A run of tokens that one rank holds: where it starts, and its holder on the axes that cut the tokens."""

    start: int
    spot: tuple[int, ...]


class _Journey:
    """Who holds which rows before and after. `kept[s, e]`: how many rows of source s expert e takes; sources stand in
    the order of their tokens, so that sorted by expert row `first[s, e]` is the first of them."""

    def __init__(self, sources: Sequence[_Source], counts: numpy.ndarray, capacity: int | None) -> None:
        self.sources, self.counts = list(sources), counts
        before = counts.cumsum(0) - counts
        self.kept = counts if capacity is None else numpy.clip(capacity - before, 0, counts)
        per_expert = self.kept.sum(0)
        self.sizes = tuple(int(n) for n in per_expert)
        self.total = sum(self.sizes)
        self.first = (per_expert.cumsum() - per_expert)[None, :] + self.kept.cumsum(0) - self.kept
        self.token_axes: tuple[int, ...] = ()
        self.expert_axes: tuple[int, ...] = ()
        self.experts_at: Callable[[Coords], Sequence[int]] = lambda coords: range(counts.shape[1])

    @staticmethod
    def plain(chosen: torch.Tensor, experts: int, capacity: int | None) -> _Journey:
        counts = _checked(_counted(chosen, experts, ((0, len(chosen)),), 1))
        return _Journey([_Source(0, ())], counts, capacity)

    @staticmethod
    def between(chosen: Any, holders: Layout | None, experts: int, capacity: int | None) -> _Journey:
        """For distributed choices: sizes are exchanged, so that every rank knows what all of them hold."""
        layout: Layout = chosen._layout
        mesh, axes = layout.mesh, layout.axes_of(0)
        spots = list(numpy.ndindex(*(mesh.shape[a] for a in axes)))
        pieces = {spot: layout.held(0, _coords(mesh, axes, spot)) for spot in spots}
        most = max(1, max(map(len, pieces.values())))
        table = layout.replace(shape=(len(spots) * most, experts), placements=_even(layout))
        count = lambda local, held: _counted(local, experts, held, most)  # noqa: E731
        counts = run_local(count, [chosen], table, lambda coords: layout.held(0, coords))
        whole = table.replace(placements=[REPLICATE] * len(table.placements))
        known = mesh.comm.first(move(counts._local, table, whole, Note("dispatch", "sizes")))
        numbers = _checked(known).reshape(len(spots), most, experts)
        found = sorted(
            (_Source(start, spot), tuple(numbers[i, j]))
            for i, spot in enumerate(spots)
            for j, (start, _) in enumerate(pieces[spot])
        )
        rows = numpy.array([row for _, row in found], dtype=numpy.int64).reshape(len(found), experts)
        journey = _Journey([source for source, _ in found], rows, capacity)
        journey.token_axes = axes
        if holders is not None:
            journey.expert_axes = holders.axes_of(0)
            journey.experts_at = lambda coords: [e for a, b in holders.held(0, coords) for e in range(a, b)]
        return journey

    # -- layouts --------------------------------------------------------------------------------------------
    def home(self, coords: Coords) -> Intervals:
        """The rows of the tokens at `coords`."""
        spot = tuple(coords[a] for a in self.token_axes)
        mine = [s for s, source in enumerate(self.sources) if source.spot == spot]
        return self._rows(mine, range(len(self.sizes)))

    def away(self, coords: Coords) -> Intervals:
        """The rows of the experts at `coords`: of all tokens along the axes on which experts are cut."""
        return self._rows(self._fellows(coords), self.experts_at(coords))

    def _fellows(self, coords: Coords) -> list[int]:
        fixed = [(i, coords[a]) for i, a in enumerate(self.token_axes) if a not in self.expert_axes]
        return [s for s, source in enumerate(self.sources) if all(source.spot[i] == c for i, c in fixed)]

    def _rows(self, sources: Sequence[int], experts: Sequence[int]) -> Intervals:
        first, kept = self.first[sources][:, experts], self.kept[sources][:, experts]
        return normalize(zip(first.ravel().tolist(), (first + kept).ravel().tolist(), strict=True))

    def layout(self, tokens: Layout, held: Callable[[Coords], Intervals]) -> Layout:
        """The layout of rows of which `coords` holds `held(coords)`; columns as those of `tokens`."""
        mesh = tokens.mesh
        axes = sorted({*self.token_axes, *(self.expert_axes if held == self.away else ())})
        table = lambda spot: held(_coords(mesh, axes, spot))  # noqa: E731
        places = list(tokens.placements)
        for axis, shard in zip(axes, shards_from_table([mesh.shape[a] for a in axes], self.total, table, 0)):
            places[axis] = shard
        return tokens.replace(shape=(self.total, tokens.shape[1]), placements=places)

    # -- what the ranks need to know --------------------------------------------------------------------------
    def at_home(self, coords: Coords) -> tuple[Any, Any]:
        """For each of a rank's groups of rows, experts first, then runs of tokens: how many there are, and are kept."""
        spot = tuple(coords[a] for a in self.token_axes)
        mine = [s for s, source in enumerate(self.sources) if source.spot == spot]
        return tuple(self.counts[mine].T.ravel().tolist()), tuple(self.kept[mine].T.ravel().tolist())

    def groups(self, coords: Coords) -> tuple[int, ...]:
        """How many rows each of the experts at `coords` has there."""
        kept = self.kept[self._fellows(coords)][:, self.experts_at(coords)]
        return tuple(kept.sum(0).tolist())


def _coords(mesh: Any, axes: Sequence[int], spot: Sequence[int]) -> Coords:
    at = dict(zip(axes, spot, strict=True))
    return tuple(at.get(a, 0) for a in range(len(mesh.shape)))


def _even(layout: Layout) -> list[Placement]:
    return [Shard(0) if p.is_shard(0) else REPLICATE for p in layout.placements]


# -- local work --------------------------------------------------------------------------------------------
def _counted(chosen: torch.Tensor, experts: int, held: Intervals, most: int) -> torch.Tensor:
    """How often each expert is chosen in each run of tokens; `most` runs, the last ones empty."""
    counts = chosen.new_zeros(most, experts)
    if chosen.numel() and not (int(chosen.min()) >= 0 and int(chosen.max()) < experts):
        return counts + (_BAD + chosen[(chosen < 0) | (chosen >= experts)][0])
    for row, part in zip(counts, chosen.split([b - a for a, b in held]), strict=False):
        row += part.flatten().bincount(minlength=experts)
    return counts


def _checked(counts: torch.Tensor) -> numpy.ndarray:
    """The counts of all ranks. An expert that there is not raises on all of them: else the others would wait."""
    known = counts.numpy(force=True)
    if known.min(initial=0) < 0:
        raise LayoutError(
            f"dispatch: chosen has {known.min() - _BAD}, but there are {counts.shape[-1]} experts, numbered from 0"
        )
    return known


def _sorted_slots(chosen: torch.Tensor, groups: tuple[Any, Any]) -> torch.Tensor:
    """The places in the flat `chosen` whose rows are kept, sorted by expert."""
    counts, kept = groups
    slots = chosen.flatten().argsort(stable=True)
    if counts == kept:
        return slots
    sizes = torch.tensor(counts, device=slots.device)
    limit = (sizes.cumsum(0) - sizes + torch.tensor(kept, device=slots.device)).repeat_interleave(sizes)
    return slots[torch.arange(len(slots), device=slots.device) < limit]


def _taken(x: torch.Tensor, slots: torch.Tensor, choices: int) -> torch.Tensor:
    return x.index_select(0, slots // max(choices, 1))


def _added_up(rows: Any, weights: Any, slots: Any, choices: int, tokens: int) -> torch.Tensor:
    if weights is not None:
        rows = rows * weights.flatten().index_select(0, slots).unsqueeze(-1)
    return rows.new_zeros(tokens, rows.shape[1]).index_add(0, slots // max(choices, 1), rows)


# -- what experts do with their rows -----------------------------------------------------------------------
def grouped_linear(routed: Routed, rows: Any, weight: Any, bias: Any = None) -> Any:
    """Each expert's rows times its own matrix: `weight` is (experts, out, in), `bias` (experts, out). Differentiable.

    Beside the experts, `weight` may be cut along `out` or, where the columns of `rows` are cut alike, along `in`."""
    if weight.dim() != 3 or rows.shape[-1] != weight.shape[2] or weight.shape[0] != len(routed.sizes):
        raise LayoutError(
            f"grouped_linear: weight must be ({len(routed.sizes)} experts, out, in = {rows.shape[-1]}), "
            f"got {tuple(weight.shape)}"
        )
    if not isinstance(rows, DTensor):
        out = _multiplied(rows, weight, routed.sizes)
        return out if bias is None else out + _repeated(bias, routed.sizes)
    journey, layout = routed._journey, rows._layout
    rows, placements = _meeting(rows, weight, journey)
    shape = (layout.shape[0], weight.shape[1])
    out = run_local(_multiplied, [rows, weight], layout.replace(shape=shape, placements=placements), journey.groups)
    if bias is None:
        return out
    places = [p if isinstance(p, Shard) else REPLICATE for p in placements]
    bias = bias.redistribute(placements=[_bias_place(w, p) for w, p in zip(weight.placements, places, strict=True)])
    return out + run_local(_repeated, [bias], layout.replace(shape=shape, placements=places), journey.groups)


def _bias_place(weight: Placement, rows: Placement) -> Placement:
    if weight.is_shard(0):
        return weight
    return rows if rows.is_shard(1) else REPLICATE


def _meeting(rows: Any, weight: Any, journey: _Journey) -> tuple[Any, list[Placement]]:
    """The rows as the weight needs them, and how the product is laid out."""
    if weight._layout.axes_of(0) != journey.expert_axes:
        raise LayoutError(
            f"grouped_linear: weight is laid out {list(weight.placements)}, but the rows were dispatched to experts "
            f"cut on axes {list(journey.expert_axes)}; give dispatch this weight"
        )
    places, results = list(rows.placements), list(rows.placements)
    for axis, w in enumerate(weight.placements):
        if axis in journey.expert_axes:
            continue
        if not w.is_replicate() and places[axis].is_shard(0):
            raise LayoutError(
                f"grouped_linear: weight is {w} on axis {axis}, which cuts the tokens; replicate it there"
            )
        if w.is_partial():
            raise LayoutError(f"grouped_linear: weight is {w} on axis {axis}; redistribute it first")
        if w.is_shard(1):
            places[axis], results[axis] = REPLICATE, w
        elif w.is_shard(2):
            places[axis], results[axis] = w.at(1), Partial("sum")  # type: ignore[attr-defined]
        elif not places[axis].is_shard(0):
            places[axis] = results[axis] = REPLICATE
    return rows.redistribute(placements=places), results


def _multiplied(rows: torch.Tensor, weight: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    if not len(sizes):
        return rows.new_zeros(len(rows), weight.shape[1]) + 0 * (rows.sum() + weight.sum())  # the same graph everywhere
    return torch.cat([part @ w.T for part, w in zip(rows.split(list(sizes)), weight.unbind(0), strict=True)])


def _repeated(bias: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    return bias.repeat_interleave(torch.tensor(sizes, dtype=torch.int64, device=bias.device), 0)


# -- the layer ---------------------------------------------------------------------------------------------
class MixtureOfExperts(nn.Module):
    """A feed-forward layer of `experts` two-layer experts, of which each token goes through `k`.

    Written for one device; laid out over a mesh by giving `up`, `down` and their biases a Shard(0). With
    `capacity_factor` f an expert takes at most f times its even share of rows. Gives the output and `balance_loss`."""

    def __init__(self, width: int, hidden: int, experts: int, k: int, capacity_factor: float | None = None) -> None:
        super().__init__()
        self.k, self.capacity_factor = k, capacity_factor
        self.router = nn.Linear(width, experts, bias=False)
        self.up, self.down = (nn.Parameter(torch.empty(experts, *s)) for s in ((hidden, width), (width, hidden)))
        self.up_bias, self.down_bias = (nn.Parameter(torch.zeros(experts, n)) for n in (hidden, width))
        for weight in (self.up, self.down):
            nn.init.uniform_(weight, -1 / math.sqrt(weight.shape[2]), 1 / math.sqrt(weight.shape[2]))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = x.flatten(0, -2)
        logits = self.router(tokens)
        weights, chosen = top_k(logits, self.k)
        routed = dispatch(tokens, chosen, self.up, capacity=self._capacity(tokens.shape[0]))
        y = F.gelu(grouped_linear(routed, routed.rows, self.up, self.up_bias))
        y = combine(routed, grouped_linear(routed, y, self.down, self.down_bias), weights)
        return y.unflatten(0, x.shape[:-1]), balance_loss(logits, chosen)

    def _capacity(self, tokens: int) -> int | None:
        if self.capacity_factor is None:
            return None
        return math.ceil(self.capacity_factor * tokens * self.k / self.up.shape[0])
