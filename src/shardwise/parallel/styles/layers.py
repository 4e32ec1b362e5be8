"""ColwiseParallel and RowwiseParallel cut the parameters of a layer, SequenceParallel the positions it works on."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from shardwise.api import distribute_module
from shardwise.errors import LayoutError, RuleError
from shardwise.layout import Shard
from shardwise.layout.placement import REPLICATE, Placement
from shardwise.layout.split import chunk_bounds
from shardwise.mesh import DeviceMesh, SimulatedMesh
from shardwise.parallel.styles.axis import Placing, StyleAxis
from shardwise.parallel.styles.base import (
    Extended,
    PlacingArgument,
    StyleHook,
    WithOutput,
    as_placing,
    lay_out_module,
    refuse,
)
from shardwise.tensor import DTensor

Meshes = DeviceMesh | SimulatedMesh | None


class _LayerParallel(WithOutput):
    """A layer whose parameters are cut, with one tensor in and one out."""

    _methods = ("_partition_linear_fn", "_partition_embedding_fn", "_prepare_input_fn", "_prepare_output_fn")

    default_input: ClassVar[Placement]
    default_output: ClassVar[Placement]
    desired_input: ClassVar[Placement]  # what the layer computes with
    cut_dims: ClassVar[tuple[int, int]]  # of the weight of a linear layer, of the table of an embedding

    def __init__(
        self,
        *,
        input_layouts: PlacingArgument | None = None,
        output_layouts: PlacingArgument | None = None,
        use_local_output: bool | None = None,
        weight_dim: int | None = None,
    ) -> None:
        inputs = self.default_input if input_layouts is None else input_layouts
        outputs = self.default_output if output_layouts is None else output_layouts
        self._input: Placing = as_placing(inputs, "input_layouts")
        self._output: Placing = as_placing(outputs, "output_layouts")
        self._use_local, self.weight_dim = use_local_output, weight_dim
        # as programs that extend a style read and set them
        self.input_layouts, self.output_layouts = (self._input,), (self._output,)
        self.desired_input_layouts: tuple[Placing, ...] = (self.desired_input,)

    def _apply(self, module: nn.Module, device_mesh: Meshes) -> nn.Module:
        self._input = as_placing(self.input_layouts[0], "input_layouts")
        self._output = as_placing(self.output_layouts[0], "output_layouts")
        if self._is_extended(_LayerParallel):
            return self._apply_methods(module, device_mesh)
        axis = StyleAxis.of(device_mesh, self.axis)
        self._cut(module, axis)
        module.register_forward_pre_hook(StyleHook(self._before, axis), with_kwargs=True)
        module.register_forward_hook(StyleHook(self._after, axis), with_kwargs=True)
        return module

    def _cut(self, module: nn.Module, axis: StyleAxis) -> None:
        dim = self._cut_dim(module)
        placements = {name: self._placement(param, dim, axis) for name, param in module._parameters.items()}
        lay_out_module(module, placements, axis, self.src_data_rank)

    # -- what programs that extend a style define anew, or call --------------------------------------------
    def _apply_methods(self, module: nn.Module, device_mesh: Meshes) -> nn.Module:
        """`_apply` by way of the methods below, one of which is the program's."""
        self._check_mesh_of_methods(device_mesh)
        is_table = isinstance(module, nn.Embedding)
        if not is_table and not isinstance(module, nn.Linear):
            self._cut_dim(module)  # raises, unless the style was told what to cut
        return distribute_module(
            module,
            device_mesh,
            self._partition_embedding_fn if is_table else self._partition_linear_fn,
            partial(self._prepare_input_fn, self.input_layouts, (self._desired(module),)),
            partial(self._prepare_output_fn, self.output_layouts, self.use_local_output),
        )

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: Meshes) -> None:
        self._cut(module, StyleAxis.of(device_mesh, self.axis))

    def _partition_embedding_fn(self, name: str, module: nn.Module, device_mesh: Meshes) -> None:
        self._cut(module, StyleAxis.of(device_mesh, self.axis))

    @staticmethod
    def _prepare_input_fn(
        input_layouts: tuple[PlacingArgument, ...],
        desired_input_layouts: tuple[PlacingArgument, ...],
        mod: nn.Module,
        inputs: tuple[Any, ...],
        device_mesh: Meshes,
    ) -> DTensor:
        axis = StyleAxis.of(device_mesh, None)
        if not isinstance(inputs[0], torch.Tensor):
            refuse(inputs[0], f"the first input of {type(mod).__name__}")
        laid = axis.distributed(inputs[0], as_placing(input_layouts[0], "input_layouts"))
        return axis.move(laid, as_placing(desired_input_layouts[0], "desired_input_layouts"))

    @staticmethod
    def _prepare_output_fn(
        output_layouts: tuple[PlacingArgument, ...],
        use_local_output: bool,
        mod: nn.Module,
        outputs: torch.Tensor,
        device_mesh: Meshes,
    ) -> torch.Tensor:
        axis = StyleAxis.of(device_mesh, None)
        laid = axis.move(axis.distributed(outputs, REPLICATE), as_placing(output_layouts[0], "output_layouts"))
        return axis.handed_over(laid, use_local_output)

    # -- the hooks -----------------------------------------------------------------------------------------

    def _placement(self, param: torch.Tensor | None, dim: int, axis: StyleAxis) -> Placement:
        raise NotImplementedError

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], axis: StyleAxis
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self._prepared(module, args[0], axis), *args[1:]), kwargs
        name = next(iter(kwargs), None)
        if name is None:
            raise LayoutError(f"{type(self).__name__}: {type(module).__name__} was called without an input")
        return args, kwargs | {name: self._prepared(module, kwargs[name], axis)}

    def _prepared(self, module: nn.Module, x: Any, axis: StyleAxis) -> DTensor:
        if not isinstance(x, torch.Tensor):
            refuse(x, f"{type(self).__name__}: the first input of {type(module).__name__}")
        desired = self._desired(module)
        only_reads = type(module).forward is nn.Linear.forward  # of other modules one cannot know
        if only_reads and desired is REPLICATE:
            laid = axis.distributed_once(x, self._input, self._known_sizes(module))
        else:
            laid = axis.distributed(x, self._input, self._known_sizes(module), watched=not only_reads)
        return axis.move(laid, desired)

    def _known_sizes(self, module: nn.Module) -> dict[int, int]:
        """Global sizes of dims of the input that the layer knows."""
        return {}

    def _desired(self, module: nn.Module) -> Placing:
        return as_placing(self.desired_input_layouts[0], "desired_input_layouts")

    def _after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, axis: StyleAxis
    ) -> torch.Tensor:
        if not isinstance(output, torch.Tensor):
            refuse(output, f"{type(self).__name__}: the output of {type(module).__name__}")
        laid = axis.move(axis.distributed(output, REPLICATE), self._output, like=next(iter((*args, *kwargs.values()))))
        return axis.handed_over(laid, self._use_local)

    def _cut_dim(self, module: nn.Module) -> int:
        if self.weight_dim is not None:
            return self.weight_dim
        for kind, dim in zip((nn.Linear, nn.Embedding), self.cut_dims, strict=True):
            if isinstance(module, kind):
                return dim
        raise RuleError(
            f"{type(self).__name__} currently only support nn.Linear and nn.Embedding! Got {type(module).__name__}; "
            f"say which dim of its weight to cut with weight_dim=..."
        )

    def __repr__(self) -> str:
        inside = f"input_layouts={self.input_layouts}, output_layouts={self.output_layouts}"
        return f"{type(self).__name__}({inside}, use_local_output={self.use_local_output})"


class ColwiseParallel(_LayerParallel):
    """Cut a linear layer by its outputs, or an embedding by the columns of its table.

    Args:
        input_layouts: the placement of the input, which is made whole, on the axis; or by the names of axes. Default:
            Replicate().
        output_layouts: what the output becomes. Default: Shard(-1), as it is computed.
        use_local_output: whether the program gets a local tensor. Default: where the mesh has no other axis.
        weight_dim: the dim of the weight to cut, for modules of other types.
        parts: how many projections the outputs are, side by side, as query, key and value; every one of them is cut.

    Raises:
        LayoutError: a placement or `parts` is not one.
    """

    default_input, default_output = REPLICATE, Shard(-1)
    desired_input = REPLICATE
    cut_dims = (0, 1)

    def __init__(
        self,
        *,
        parts: int = 1,
        input_layouts: PlacingArgument | None = None,
        output_layouts: PlacingArgument | None = None,
        use_local_output: bool | None = None,
        weight_dim: int | None = None,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output,
            weight_dim=weight_dim,
        )  # fmt: skip
        if not isinstance(parts, int) or isinstance(parts, bool) or parts < 1:
            raise LayoutError(f"ColwiseParallel: parts must be an int > 0, got {parts!r}")
        self.parts = parts

    def _placement(self, param: torch.Tensor | None, dim: int, axis: StyleAxis) -> Placement:
        if param is None or not param.dim():
            return REPLICATE
        return _cut_in_parts(dim if param.dim() > 1 else 0, param.shape, self.parts, axis)


class RowwiseParallel(_LayerParallel):
    """Cut a linear layer by its inputs, or an embedding by the rows of its table.

    Args:
        input_layouts: the placement of the input, which is cut to fit the weight (the ids of an embedding are made
            whole), on the axis; or by the names of axes. Default: Shard(-1).
        output_layouts: what the output is summed to. Default: Replicate().
        use_local_output: whether the program gets a local tensor. Default: where the mesh has no other axis.
        weight_dim: the dim of the weight to cut, for modules of other types.

    Raises:
        LayoutError: a placement is not one.
    """

    default_input, default_output = Shard(-1), REPLICATE
    desired_input = Shard(-1)
    cut_dims = (1, 0)

    def _placement(self, param: torch.Tensor | None, dim: int, axis: StyleAxis) -> Placement:
        return Shard(dim) if param is not None and param.dim() > 1 else REPLICATE

    def _desired(self, module: nn.Module) -> Placing:
        return REPLICATE if isinstance(module, nn.Embedding) else Shard(-1)

    def _known_sizes(self, module: nn.Module) -> dict[int, int]:
        return {-1: module.in_features} if isinstance(module, nn.Linear) else {}


def _cut_in_parts(dim: int, shape: torch.Size, parts: int, axis: StyleAxis) -> Shard:
    """A Shard that cuts each of `parts` equal stretches of a dim like chunk: a rank has its share of every one."""
    if parts == 1:
        return Shard(dim)
    size, ranks = shape[dim], axis.mesh.shape[axis.number]
    if size % parts:
        raise LayoutError(
            f"ColwiseParallel: parts={parts} do not divide dim {dim} of a parameter of shape {tuple(shape)}"
        )
    each = size // parts

    def held(rank: int) -> list[tuple[int, int]]:
        start, stop = chunk_bounds(each, ranks, rank)
        return [(part * each + start, part * each + stop) for part in range(parts) if start < stop]

    return Shard(dim, pieces=[[held(rank) for rank in range(ranks)]])


class SequenceParallel(Extended):
    """Run a norm, dropout or other layer that treats positions alike on a part of the sequence.

    The parameters are replicated. The input is cut along the sequence, and so is the output.

    Args:
        sequence_dim: the dim of input and output that is the sequence. A plain input counts as each rank's part of it.
        use_local_output: whether the program gets a local tensor instead of a DTensor.
    """

    _methods = ("_replicate_module_fn", "_prepare_input_fn", "_prepare_output_fn")

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence = Shard(sequence_dim)
        self.sequence_sharding: tuple[PlacingArgument, ...] = (self.sequence,)
        self.use_local_output = use_local_output

    # -- what programs that extend a style define anew, or call --------------------------------------------
    def _replicate_module_fn(self, name: str, module: nn.Module, device_mesh: Meshes) -> None:
        axis = StyleAxis.of(device_mesh, self.axis)
        lay_out_module(module, dict.fromkeys(module._parameters, REPLICATE), axis, self.src_data_rank)

    @staticmethod
    def _prepare_input_fn(
        sequence_sharding: tuple[PlacingArgument, ...], mod: nn.Module, inputs: tuple[Any, ...], device_mesh: Meshes
    ) -> DTensor:
        return _LayerParallel._prepare_input_fn(sequence_sharding, sequence_sharding, mod, inputs, device_mesh)

    @staticmethod
    def _prepare_output_fn(
        use_local_output: bool, mod: nn.Module, outputs: torch.Tensor, device_mesh: Meshes
    ) -> torch.Tensor:
        return StyleAxis.of(device_mesh, None).handed_over(outputs, use_local_output)  # type: ignore[arg-type]

    # -- the hooks -----------------------------------------------------------------------------------------
    def _apply(self, module: nn.Module, device_mesh: Meshes) -> nn.Module:
        if self._is_extended(SequenceParallel):
            self._check_mesh_of_methods(device_mesh)
            return distribute_module(
                module,
                device_mesh,
                self._replicate_module_fn,
                partial(self._prepare_input_fn, self.sequence_sharding),
                partial(self._prepare_output_fn, self.use_local_output),
            )
        self.sequence = as_placing(self.sequence_sharding[0], "sequence_sharding")  # type: ignore[assignment]
        axis = StyleAxis.of(device_mesh, self.axis)
        lay_out_module(module, dict.fromkeys(module._parameters, REPLICATE), axis, self.src_data_rank)
        module.register_forward_pre_hook(StyleHook(self._before, axis))
        module.register_forward_hook(StyleHook(self._after, axis))
        return module

    def _before(self, module: nn.Module, args: tuple[Any, ...], axis: StyleAxis) -> tuple[Any, ...]:
        x = args[0]
        if not isinstance(x, torch.Tensor):
            refuse(x, f"SequenceParallel: the first input of {type(module).__name__}")
        return axis.move(axis.distributed(x, self.sequence), self.sequence), *args[1:]

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor, axis: StyleAxis) -> torch.Tensor:
        laid = axis.distributed(output, self.sequence)
        laid = axis.move(laid, laid.placements[axis.number], like=args[0])
        return axis.handed_over(laid, self.use_local_output)

    def __repr__(self) -> str:
        return f"SequenceParallel(sequence_dim={self.sequence.dim}, use_local_output={self.use_local_output})"
