"""A picture of who holds what in the terminal: one cell for each rectangle of indices, with the ranks that hold it."""

from __future__ import annotations

from rich.console import Console

from shardwise.drawing import markup, plain
from shardwise.errors import LayoutError, check_type
from shardwise.layout.picture import picture_of
from shardwise.tensor import DTensor


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = False) -> None:
    """Print which ranks hold which rectangle of a tensor. Only the first rank of the mesh prints.

    A tensor of more than 2 dims is printed slice by slice. In a notebook, put the tensor itself (or its `.layout`) on
    the last line of a cell to see a picture.

    Args:
        dtensor: A distributed tensor.
        header: A line to print first.
        use_rich: Whether to print it in colours, one for each rank.

    Raises:
        LayoutError: `dtensor` is not a DTensor.
    """
    if not isinstance(dtensor, DTensor):
        raise LayoutError(f"visualize_sharding: expected a DTensor, got {type(dtensor).__name__}")
    check_type(header, str, "visualize_sharding: header")
    check_type(use_rich, bool, "visualize_sharding: use_rich")
    layout = dtensor.layout
    if not layout.mesh.comm.simulated and any(layout.mesh.comm.coords):
        return
    if header:
        print(header)
    if use_rich:
        Console().print(markup(picture_of(layout)), highlight=False)
    else:
        print(plain(picture_of(layout)))
