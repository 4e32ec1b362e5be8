"""dispatch and combine: rows of tokens to where their experts are, and back."""

from __future__ import annotations

import torch

from shardwise.comm.record import Note
from shardwise.errors import LayoutError, MeshError, check_type
from shardwise.layout import Layout, Placement
from shardwise.layout.placement import REPLICATE
from shardwise.move import move
from shardwise.parallel.expert.routes import Routes
from shardwise.strategy.program import run_local
from shardwise.tensor import DTensor
from shardwise.wrapper import wrap


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
