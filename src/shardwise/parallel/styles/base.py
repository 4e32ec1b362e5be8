"""What every style has: the class to extend, its hooks, what it is told of tensors, and parameters laid out."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn, Protocol

from torch import nn

from shardwise.errors import LayoutError, MeshError
from shardwise.layout.placement import Placement, as_placement
from shardwise.mesh import DeviceMesh, SimulatedMesh, as_mesh
from shardwise.parallel.styles.axis import Placing, StyleAxis


class PlacementLike(Protocol):
    """A placement of ours or of torch."""

    def is_replicate(self) -> bool: ...


PlacingArgument = PlacementLike | Mapping[str, PlacementLike]


def as_placing(value: Any, name: str) -> Placing:
    """What a user gave as the argument `name`, in our placements."""
    if isinstance(value, Mapping):
        return {axis: as_placement(place, f"{name}[{axis!r}]") for axis, place in value.items()}
    return as_placement(value, name)


def refuse(x: object, what: str) -> NoReturn:
    raise LayoutError(f"{what} is a {type(x).__name__}, not a tensor; give it the layout None")


class ParallelStyle(ABC):
    """What `parallelize_module` does with a module. A style of your own defines `_apply(module, device_mesh)`.

    Attributes:
        src_data_rank: as given to `parallelize_module`: the rank whose values the parameters take.
        axis: as given to `parallelize_module`: the mesh axis to work on.
    """

    src_data_rank: int | None = 0
    axis: int | str | None = None

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh | SimulatedMesh | None) -> nn.Module: ...


class Extended(ParallelStyle):
    """A style that a program may extend as it extends torch's: by a class that defines some of `_methods` anew, calls
    them in an `_apply` of its own, or sets other layouts after `__init__`.

    Attributes:
        _methods: what may be defined anew. Where none is, the style does the same faster.
    """

    _methods: ClassVar[tuple[str, ...]] = ()

    def _is_extended(self, base: type[ParallelStyle]) -> bool:
        """Whether a program's class, or the program on this object, has put a method in place of that of `base`."""
        return any(
            name in vars(self) or inspect.getattr_static(type(self), name) is not inspect.getattr_static(base, name)
            for name in self._methods
        )

    def _check_mesh_of_methods(self, device_mesh: DeviceMesh | SimulatedMesh | None) -> None:
        """Raise if the methods, which get the mesh alone, could not know which of its axes is meant."""
        names = as_mesh(device_mesh, outside=True).axis_names
        if self.axis is not None and len(names) > 1:
            axis = self.axis if isinstance(self.axis, str) else names[self.axis]
            raise MeshError(
                f"{type(self).__name__} defines methods of a style anew, and these get a mesh but no axis: give "
                f"parallelize_module the mesh of that axis alone, device_mesh[{axis!r}], without axis={self.axis!r}"
            )


class WithOutput(Extended):
    """A style whose outputs are local tensors by default where the mesh has no other axis (`_use_local` is None)."""

    _use_local: bool | None

    @property
    def use_local_output(self) -> bool:
        """Whether the program gets local tensors."""
        return self._use_local is not False

    @use_local_output.setter
    def use_local_output(self, value: bool) -> None:
        self._use_local = value


class StyleHook:
    """A hook of a module that also gets the style's axis. It is no state of the module: copies share it."""

    def __init__(self, run: Callable[..., Any], axis: StyleAxis) -> None:
        self.run, self.axis = run, axis

    def __call__(self, *args: Any) -> Any:
        return self.run(*args, self.axis)

    def __deepcopy__(self, memo: dict[int, object]) -> StyleHook:
        return self


def lay_out_module(module: nn.Module, placements: Mapping[str, Placement], axis: StyleAxis, source: int | None) -> None:
    """Lay the module's own parameters out as `placements` says by name, with the values of the rank `source`."""
    for name, param in list(module._parameters.items()):
        if param is not None:
            laid = axis.lay_out(param, placements[name], source)
            module.register_parameter(name, nn.Parameter(laid, param.requires_grad))
