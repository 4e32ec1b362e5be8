"""How one module is parallelized: its parameters laid out, its inputs and outputs moved by hooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.errors import LayoutError, RuleError
from shardwise.layout import Replicate, Shard
from shardwise.layout.placement import REPLICATE, Placement
from shardwise.layout.split import chunk_bounds
from shardwise.parallel.along import Along, Layout, as_layout, refuse
from shardwise.tensor import DTensor


class ParallelStyle(ABC):
    """What `parallelize_module` does with a module. A style of your own defines `_apply(module, device_mesh)`.

    `src_data_rank` and `axis` are what `parallelize_module` was given."""

    src_data_rank: int | None = 0
    axis: int | str | None = None

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module: ...


class Hook:
    """A style's part in a module's forward. It is no state of the module: copies share it."""

    def __init__(self, run: Callable[..., Any], along: Along) -> None:
        self.run, self.along = run, along

    def __call__(self, *args: Any) -> Any:
        return self.run(*args, self.along)

    def __deepcopy__(self, memo: Any) -> Hook:
        return self


def leaves(local: bool | None, x: DTensor, along: Along) -> Any:
    """What the program gets: by default the local tensor, but on a mesh of several axes the distributed one."""
    return along.leave(x) if (along.alone if local is None else local) else x


def lay_out_parameters(
    module: nn.Module, placements: Mapping[str, Placement], along: Along, source: int | None
) -> None:
    """The module's own parameters laid out so, by name, with the values of the rank `source`."""
    for name, param in list(module._parameters.items()):
        if param is not None:
            laid = along.lay_out(param, placements[name], source)
            module.register_parameter(name, nn.Parameter(laid, param.requires_grad))


class _LayerParallel(ParallelStyle):
    """A layer whose parameters are cut, with one tensor in and one out."""

    desired_input: Placement
    cut_dims: tuple[int, int]  # of the weight of a linear layer, of the table of an embedding
    weight_dim: int | None

    def __init__(self, input_layouts: Any, output_layouts: Any, use_local_output: bool | None) -> None:
        self._input: Layout = as_layout(input_layouts, "input_layouts")
        self._output: Layout = as_layout(output_layouts, "output_layouts")
        self._local_output = use_local_output
        # as programs that extend a style read them
        self.input_layouts, self.output_layouts = (self._input,), (self._output,)
        self.desired_input_layouts = (self.desired_input,)
        self.use_local_output = use_local_output is not False

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        along = Along.of(device_mesh, self.axis)
        dim = self._cut_dim(module)
        placements = {name: self._placement(param, dim, along) for name, param in module._parameters.items()}
        lay_out_parameters(module, placements, along, self.src_data_rank)
        module.register_forward_pre_hook(Hook(self._enter, along), with_kwargs=True)
        module.register_forward_hook(Hook(self._leave, along), with_kwargs=True)
        return module

    def _placement(self, param: torch.Tensor | None, dim: int, along: Along) -> Placement:
        raise NotImplementedError

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], along: Along) -> Any:
        if args:
            return (self._prepared(module, args[0], along), *args[1:]), kwargs
        name = next(iter(kwargs), None)
        if name is None:
            raise LayoutError(f"{type(self).__name__}: {type(module).__name__} was called without an input")
        return args, kwargs | {name: self._prepared(module, kwargs[name], along)}

    def _prepared(self, module: nn.Module, x: Any, along: Along) -> DTensor:
        if not isinstance(x, torch.Tensor):
            refuse(x, f"{type(self).__name__}: the first input of {type(module).__name__}")
        desired = self._desired(module)
        only_reads = type(module).forward is nn.Linear.forward  # of other modules one cannot know
        if only_reads and desired is REPLICATE:
            entered = along.enter_once(x, self._input, self._known(module))
        else:
            entered = along.enter(x, self._input, self._known(module), watched=not only_reads)
        return along.move(entered, desired)

    def _known(self, module: nn.Module) -> dict[int, int]:
        """Global sizes of the input that the layer knows."""
        return {}

    def _desired(self, module: nn.Module) -> Placement:
        return self.desired_input

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any, along: Along) -> Any:
        if not isinstance(output, torch.Tensor):
            refuse(output, f"{type(self).__name__}: the output of {type(module).__name__}")
        output, given = along.enter(output, REPLICATE), next(iter((*args, *kwargs.values())))
        output = along.move(output, self._output, given)
        return leaves(self._local_output, output, along)

    def _cut_dim(self, module: nn.Module) -> int:
        """The dim of the weight that is cut."""
        if self.weight_dim is not None:
            return self.weight_dim
        for kind, dim in zip((nn.Linear, nn.Embedding), self.cut_dims, strict=True):
            if isinstance(module, kind):
                return dim
        raise RuleError(
            f"{type(self).__name__} knows nn.Linear and nn.Embedding, got {type(module).__name__}; say which dim of "
            f"its weight to cut with weight_dim=..."
        )

    def __repr__(self) -> str:
        inside = f"input_layouts={self.input_layouts}, output_layouts={self.output_layouts}"
        return f"{type(self).__name__}({inside}, use_local_output={self.use_local_output})"


class ColwiseParallel(_LayerParallel):
    """Cut a linear layer by its outputs, or an embedding by the columns of its table.

    The input comes as `input_layouts` (default: Replicate()) and is made whole along the axis; the output goes as
    `output_layouts` (default: Shard(-1)), as a local tensor with `use_local_output` (default: on a mesh of one axis).

    `weight_dim` says which dim of the weight to cut, for modules of other types. With `parts`, the outputs are that
    many projections side by side, as the query, key and value of one fused layer, and every one of them is cut.
    """

    desired_input = REPLICATE
    cut_dims = (0, 1)

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        output_layouts: Any = None,
        use_local_output: bool | None = None,
        weight_dim: int | None = None,
        parts: int = 1,
    ) -> None:
        super().__init__(
            Replicate() if input_layouts is None else input_layouts,
            Shard(-1) if output_layouts is None else output_layouts,
            use_local_output,
        )
        if not isinstance(parts, int) or isinstance(parts, bool) or parts < 1:
            raise LayoutError(f"ColwiseParallel: parts must be an int > 0, got {parts!r}")
        self.weight_dim, self.parts = weight_dim, parts

    def _placement(self, param: torch.Tensor | None, dim: int, along: Along) -> Placement:
        if param is None or not param.dim():
            return REPLICATE
        return cut_in_parts(dim if param.dim() > 1 else 0, param.shape, self.parts, along)


class RowwiseParallel(_LayerParallel):
    """Cut a linear layer by its inputs, or an embedding by the rows of its table.

    The input comes as `input_layouts` (default: Shard(-1)) and is cut to fit (the ids of an embedding are made whole);
    the output is summed to `output_layouts` (default: Replicate()), a local tensor with `use_local_output` (default: on
    a mesh of one axis). `weight_dim` says which dim of the weight to cut, for modules of other types.
    """

    desired_input = Shard(-1)
    cut_dims = (1, 0)

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        output_layouts: Any = None,
        use_local_output: bool | None = None,
        weight_dim: int | None = None,
    ) -> None:
        super().__init__(
            Shard(-1) if input_layouts is None else input_layouts,
            Replicate() if output_layouts is None else output_layouts,
            use_local_output,
        )
        self.weight_dim = weight_dim

    def _placement(self, param: torch.Tensor | None, dim: int, along: Along) -> Placement:
        return Shard(dim) if param is not None and param.dim() > 1 else REPLICATE

    def _desired(self, module: nn.Module) -> Placement:
        return REPLICATE if isinstance(module, nn.Embedding) else Shard(-1)

    def _known(self, module: nn.Module) -> dict[int, int]:
        return {-1: module.in_features} if isinstance(module, nn.Linear) else {}


class SequenceParallel(ParallelStyle):
    """Run a norm, dropout or other layer that treats positions alike on a part of the sequence; replicate parameters.

    The input is cut along `sequence_dim` (a plain tensor counts as each rank's part of it) and so is the output, a
    local tensor with `use_local_output`.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence = Shard(sequence_dim)
        self.sequence_sharding = (self.sequence,)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        along = Along.of(device_mesh, self.axis)
        lay_out_parameters(module, dict.fromkeys(module._parameters, REPLICATE), along, self.src_data_rank)
        module.register_forward_pre_hook(Hook(self._enter, along))
        module.register_forward_hook(Hook(self._leave, along))
        return module

    def _enter(self, module: nn.Module, args: tuple[Any, ...], along: Along) -> Any:
        x = args[0]
        if not isinstance(x, torch.Tensor):
            refuse(x, f"SequenceParallel: the first input of {type(module).__name__}")
        return along.move(along.enter(x, self.sequence), self.sequence), *args[1:]

    def _leave(self, module: nn.Module, args: Any, output: Any, along: Along) -> Any:
        output = along.enter(output, self.sequence)
        output = along.move(output, output.placements[along.axis], args[0])
        return leaves(self.use_local_output, output, along)

    def __repr__(self) -> str:
        return f"SequenceParallel(sequence_dim={self.sequence.dim}, use_local_output={self.use_local_output})"


def cut_in_parts(dim: int, shape: torch.Size, parts: int, along: Along) -> Shard:
    """A Shard that cuts each of `parts` equal stretches of a dim like chunk: a rank has its share of every one."""
    if parts == 1:
        return Shard(dim)
    size, ranks = shape[dim], along.mesh.shape[along.axis]
    if size % parts:
        raise LayoutError(
            f"ColwiseParallel: parts={parts} do not divide dim {dim} of a parameter of shape {tuple(shape)}"
        )
    each = size // parts

    def held(rank: int) -> list[tuple[int, int]]:
        start, stop = chunk_bounds(each, ranks, rank)
        return [(part * each + start, part * each + stop) for part in range(parts) if start < stop]

    return Shard(dim, pieces=[[held(rank) for rank in range(ranks)]])
