"""local_map: a function of local tensors as a function of distributed ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.errors import LayoutError, MeshError, MismatchError
from shardwise.layout import Placement, as_placements
from shardwise.mesh import DeviceMesh, Mesh, SimulatedMesh, as_mesh
from shardwise.tensor import DTensor

Places = tuple[Placement, ...] | None  # one placement for each axis; None where nothing is asked for


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Any = None,
    in_placements: Sequence[Any] | None = None,
    in_grad_placements: Sequence[Any] | None = None,
    device_mesh: DeviceMesh | SimulatedMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """Turn a function of local tensors into a function of DTensors; differentiable. Also a decorator.

    On a simulated mesh, `func` is called for one rank after the other, with plain tensors, and must not communicate. If
    an output is cut, each call costs one small exchange, in which the ranks learn each other's sizes.

    Args:
        func: takes and gives local tensors. Without it, `local_map` gives a decorator.
        out_placements: those of a single output, or a tuple with one entry for each flattened output (None for what is
            not a tensor; a tensor with None is replicated, which takes arguments that are).
        in_placements: what `func` needs, one entry for each flattened positional argument, None for what is no DTensor.
            Without it, every layout is taken.
        in_grad_placements: how the gradients of the inputs are laid out, if not like the inputs. For a replicated input
            of which each rank uses only a part, give [Partial()].
        device_mesh: where the outputs live; default: the first DTensor's mesh.
        redistribute_inputs: whether to redistribute an argument that is laid out otherwise, instead of raising.

    Returns:
        A function of DTensors. Called without any, it is `func`.

    Raises:
        LayoutError: (when called) placements do not fit the arguments or outputs, or `func` gives a DTensor.
        MeshError: (when called) an argument is on a mesh of another world.

    Example:
        >>> from shardwise import Partial, Shard, distribute_tensor, simulate
        >>> mesh = simulate(4)
        >>> x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
        >>> total = local_map(lambda part: part.sum(), out_placements=[Partial()])
        >>> total(x).item()
        28.0
    """
    if func is None:
        given = (out_placements, in_placements, in_grad_placements, device_mesh)
        return lambda func: local_map(func, *given, redistribute_inputs=redistribute_inputs)
    name = getattr(func, "__name__", repr(func))
    by_output = [out_placements] if _is_of_one(out_placements) else list(out_placements)

    @functools.wraps(func)
    def on_distributed(*args: object, **kwargs: object) -> Any:
        flat, tree = tree_flatten((args, kwargs))
        positional = len(tree_flatten(args)[0])
        tensors = [x for x in flat if isinstance(x, DTensor)]
        if not tensors:
            return func(*args, **kwargs)
        mesh = as_mesh(device_mesh) if device_mesh is not None else tensors[0]._layout.mesh
        needs = _one_each(in_placements, positional, len(flat), "in_placements", name)
        if in_placements is not None:
            _check_needs(flat[:positional], needs, name)
        grads = _one_each(in_grad_placements, positional, len(flat), "in_grad_placements", name)
        local_args = [
            _local_argument(x, need, grad, mesh, redistribute_inputs, f"{name}: argument {i}")
            for i, (x, need, grad) in enumerate(zip(flat, needs, grads, strict=True))
        ]
        out_tree: list[Any] = []

        @functools.wraps(func, updated=())
        def on_one_rank(*leaves: object) -> tuple[Any, ...]:
            call_args, call_kwargs = tree_unflatten(leaves, tree)
            outs, spec = tree_flatten(func(*call_args, **call_kwargs))
            if any(isinstance(out, DTensor) for out in outs):
                raise LayoutError(f"{name} gives a DTensor; the function of local_map takes and gives local tensors")
            out_tree.append(spec)
            return tuple(outs)

        # Ranks share a call where all they get and give is the same: not along an axis that any of it is split on.
        split = _split_axes(tensors, mesh, [as_placements(p) for p in by_output if p is not None])
        outs = mesh.comm.bind_program(on_one_rank, split)(*local_args)
        if len(by_output) != len(outs):
            raise MismatchError(
                f"{name}: local_map requires one PlacementType be provided for each output value, received "
                f"{len(by_output)} out_placements but {len(outs)} is expected! Give a tuple with one for each "
                f"flattened output, None for what is not a tensor"
            )
        wrapped = [_distributed(out, by_output[i], mesh, split, f"{name}: output {i}") for i, out in enumerate(outs)]
        return tree_unflatten(wrapped, out_tree[0])

    return on_distributed


# -- arguments ---------------------------------------------------------------------------------------------
def _one_each(given: Sequence[Any] | None, positional: int, total: int, what: str, name: str) -> list[Places]:
    """The placements for each flattened argument; keyword arguments are taken as they are laid out."""
    if given is None:
        return [None] * total
    if len(given) != positional:
        raise MismatchError(
            f"{name}: {what} length {len(given)} does not match the number of input args {positional}! Give one for "
            f"each flattened positional argument, None for what is not a tensor"
        )
    return [None if p is None else as_placements(p) for p in given] + [None] * (total - positional)


def _check_needs(flat: Sequence[object], needs: Sequence[Places], name: str) -> None:
    for i, (x, need) in enumerate(zip(flat, needs, strict=False)):
        if isinstance(x, DTensor) and need is None:
            raise MismatchError(
                f"{name}: DTensor input, argument {i} of shape {tuple(x.shape)}, expects placements but received None! "
                f"Give in_placements for it, or none at all"
            )


def _local_argument(tensor: object, need: Places, grad: Places, mesh: Mesh, redistribute: bool, what: str) -> Any:
    if not isinstance(tensor, DTensor):
        return tensor
    comm = tensor._layout.mesh.comm
    if comm.simulated != mesh.comm.simulated or len(comm.coords_here()) != len(mesh.comm.coords_here()):
        raise MeshError(f"{what} is on {tensor._layout.mesh!r}, which is not of the same world as {mesh!r}")
    if need is not None and tensor._layout.replace(placements=need).placements != tensor.placements:
        if not redistribute:
            raise LayoutError(
                f"{what} in local_map has a mismatched placements: arg placements is {tuple(tensor.placements)} but "
                f"in_placements asks for {tuple(need)}! Redistribute it, or set redistribute_inputs=True"
            )
        tensor = tensor.redistribute(placements=need)
    return tensor.to_local(grad_placements=grad)


# -- outputs -----------------------------------------------------------------------------------------------
def _is_of_one(placements: object) -> bool:
    """Whether this is the layout of one output: a list, a placement, or a tuple of placements."""
    return not isinstance(placements, tuple) or (
        bool(placements) and all(hasattr(p, "is_replicate") for p in placements)
    )


def _split_axes(inputs: Sequence[DTensor], mesh: Mesh, outputs: Sequence[tuple[Placement, ...]]) -> tuple[int, ...]:
    layouts = [x.placements for x in inputs if x._layout.mesh is mesh]
    layouts += [p for p in outputs if len(p) == len(mesh.shape)]
    return tuple(axis for axis in range(len(mesh.shape)) if any(not p[axis].is_replicate() for p in layouts))


def _distributed(out: object, placements: Any, mesh: Mesh, split: tuple[int, ...], what: str) -> Any:
    if isinstance(out, torch.Tensor):
        if placements is None and split:
            raise LayoutError(
                f"{what} is a tensor that each rank made of its own part of the arguments, but out_placements does not "
                f"say how it is laid out; give its placements: [Shard(0)], say, or [Partial()]"
            )
        return DTensor.from_local(out, mesh, placements)
    if placements is not None:
        raise MismatchError(
            f"{what}: Non-tensor output {out!r} expects None placements but received {list(placements)}!"
        )
    return out
