"""parallelize_module: a plan of styles by module names, applied."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

from torch import nn

from shardwise.errors import LayoutError, ShardwiseError
from shardwise.mesh import DeviceMesh, SimulatedMesh
from shardwise.modules import unchanged_on_error
from shardwise.parallel.styles.axis import StyleAxis
from shardwise.parallel.styles.base import ParallelStyle

Owners = list[tuple[str, nn.Module, str]]  # of a parameter: its path, the module that has it, its name there


class PlanError(ShardwiseError, TypeError):
    """A plan that is not made of names and styles."""


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | SimulatedMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
    axis: int | str | None = None,
) -> nn.Module:
    """Cut the parameters of a module over a mesh axis, in place, as a plan says. If the call fails, the module is
    unchanged.

    Args:
        module: the module. Parameters that several of its modules share stay shared.
        device_mesh: the mesh. Over axes that the plan does not cut, parameters are replicated.
        parallelize_plan: a style, or styles by module path, as "layers.*.mlp"; a path that matches nothing warns.
        src_data_rank: the rank whose values the parameters take; None trusts that all ranks have the same.
        axis: the mesh axis that the plan cuts; needed where the mesh has several.

    Returns:
        The module itself.

    Raises:
        PlanError: the plan is not made of module paths and styles.
        MeshError: the mesh has several axes and `axis` does not say which.
        LayoutError: two styles lay a shared parameter out differently.
    """
    if not isinstance(module, nn.Module):
        raise PlanError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    StyleAxis.of(device_mesh, axis)  # complains of a mesh or axis before anything is changed
    if parallelize_plan is None:
        warnings.warn("No parallelize_plan is provided, so this parallelize_module call does nothing", stacklevel=2)
        return module
    work = list(_resolve(module, parallelize_plan))
    shared = _shared_parameters(module)
    with unchanged_on_error(module, "parallelize_module"):
        for target, style in work:
            style.src_data_rank, style.axis = src_data_rank, axis
            style._apply(target, device_mesh)
        for old, owners in shared:
            _share_again(old, owners)
    return module


def _instead(path: object, style: object) -> str:
    """What to write for an entry that is no name and style."""
    if not isinstance(path, str):
        return "keys are paths of modules, as 'layers.0.up'"
    if isinstance(style, type) and issubclass(style, ParallelStyle):
        return f"give an instance: {style.__name__}()"
    return "give a style, as ColwiseParallel()"


def _resolve(module: nn.Module, plan: object) -> Iterator[tuple[nn.Module, ParallelStyle]]:
    if isinstance(plan, ParallelStyle):
        plan = {"": plan}
    if not isinstance(plan, Mapping):
        raise PlanError(
            f"Expect Union[ParallelStyle, Dict[str, ParallelStyle]] for parallelize_plan, {type(plan)} found! The keys "
            f"are paths of modules"
        )
    for path, style in plan.items():
        if not isinstance(path, str) or not isinstance(style, ParallelStyle):
            raise PlanError(
                f"Expect Union[ParallelStyle, Dict[str, ParallelStyle]] for parallelize_plan, {type(style)} found! It "
                f"is at parallelize_plan[{path!r}] = {style!r}; {_instead(path, style)}"
            )
        found = _matching(module, path)
        if not found:
            warnings.warn(
                f"Parallelize plan key {path!r} could not be resolved: no submodule of {type(module).__name__} matches "
                f"it, so nothing is done with it; {_where_it_ends(module, path)}",
                stacklevel=3,
            )
        for target in found:
            yield target, style


def _matching(module: nn.Module, path: str) -> list[nn.Module]:
    found = [module]
    for atom in path.split(".") if path else ():
        found = [child for parent in found for name, child in parent.named_children() if fnmatch(name, atom)]
    return found


def _where_it_ends(module: nn.Module, path: str) -> str:
    """The first atom of a path that nothing matches, and what there is instead."""
    atoms = path.split(".")
    for i, atom in enumerate(atoms):
        if not _matching(module, ".".join(atoms[: i + 1])):
            parents = _matching(module, ".".join(atoms[:i]))
            names = list(dict.fromkeys(name for parent in parents for name, _ in parent.named_children()))
            here = ".".join(atoms[:i]) or type(module).__name__
            return f"the children of {here} are {names}" if names else f"{here} has no children, so no {atom!r}"
    raise LayoutError(f"{path!r} matches a module")


def _shared_parameters(root: nn.Module) -> list[tuple[nn.Parameter, Owners]]:
    owners: dict[nn.Parameter, Owners] = {}
    for path, module in root.named_modules():
        for name, param in module._parameters.items():
            if param is not None:
                owners.setdefault(param, []).append((f"{path}.{name}".lstrip("."), module, name))
    return [(param, found) for param, found in owners.items() if len(found) > 1]


def _share_again(old: nn.Parameter, owners: Owners) -> None:
    """A style has replaced a shared parameter in one module: the others must follow."""
    now: list[tuple[str, Any]] = [(path, module._parameters[name]) for path, module, name in owners]
    changed = [(path, param) for path, param in now if param is not old and param is not None]
    if not changed:
        return
    path, first = changed[0]
    for other, param in changed[1:]:
        if param._layout is not first._layout:
            raise LayoutError(
                f"parallelize_plan: {path} and {other} are one parameter, but their styles lay it out as "
                f"{list(first.placements)} and {list(param.placements)}; choose styles that agree, such as "
                f"RowwiseParallel for an embedding and ColwiseParallel for a linear layer"
            )
    for _, module, name in owners:
        module._parameters[name] = first
