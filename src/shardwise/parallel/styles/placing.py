"""What a style is told of a tensor: its placement on the style's axis, or placements by the names of axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

from shardwise.errors import LayoutError
from shardwise.layout import Placement, Shard
from shardwise.layout.placement import as_placement

Placing = Placement | Mapping[str, Placement]


class PlacementLike(Protocol):
    """A placement of ours or of torch."""

    def is_replicate(self) -> bool: ...


PlacingArgument = PlacementLike | Mapping[str, PlacementLike]


def as_placing(value: Any, name: str) -> Placing:
    """What a user gave as the argument `name`, in our placements.

    Raises:
        LayoutError: it is neither a placement nor a mapping of axis names to placements.
    """
    if isinstance(value, Mapping):
        return {axis: as_placement(place, f"{name}[{axis!r}]") for axis, place in value.items()}
    return as_placement(value, name)


def placing_key(placing: Placing) -> Placement | tuple[tuple[str, Placement], ...]:
    """The same as something that can be hashed."""
    return placing if isinstance(placing, Placement) else tuple(placing.items())


def unless_cut(want: Placement, have: Placement, ndim: int) -> Placement:
    """`want`; but `have` where that cuts the same dim and `want` asks for no particular sizes."""
    is_met = (
        isinstance(want, Shard)
        and want.pieces is None
        and isinstance(have, Shard)
        and want.dim % max(ndim, 1) == have.dim
    )
    return have if is_met else want


def refuse(x: object, what: str) -> NoReturn:
    """Raise, because only tensors can be laid out."""
    raise LayoutError(f"{what} is a {type(x).__name__}, not a tensor; give it the layout None")
