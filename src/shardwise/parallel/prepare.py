"""Styles that lay out what goes into a module and what comes out of it, and leave its parameters alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.errors import LayoutError
from shardwise.parallel.along import Along, Layout, as_layout, refuse
from shardwise.parallel.styles import Hook, ParallelStyle, leaves

Layouts = tuple[Layout | None, ...]


def _as_layouts(value: Any, name: str) -> Layouts:
    """One layout for each tensor, None for what is left alone; a single one counts as a tuple of one."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(None if v is None else as_layout(v, f"{name}[{i}]") for i, v in enumerate(values))


def _as_named(value: Any, name: str) -> dict[str, Layout | None]:
    if not isinstance(value, Mapping):
        raise LayoutError(f"{name} = {value!r}: expected a dict of layouts by the names of keyword arguments")
    return {key: None if v is None else as_layout(v, f"{name}[{key!r}]") for key, v in value.items()}


def _check_lengths(first: Sequence[Any], second: Sequence[Any], names: tuple[str, str]) -> None:
    if len(first) != len(second):
        raise LayoutError(f"{names[1]}: {len(second)} given for {len(first)} {names[0]}; give one for each")


class _Inputs:
    """What a style does with positional and keyword arguments."""

    def __init__(self, layouts: Any, desired: Any, named: Any, desired_named: Any) -> None:
        if layouts is not None and desired is None:
            raise LayoutError("desired_input_layouts: missing; input_layouts are given, so say what they become")
        if named is not None and desired_named is None:
            raise LayoutError(
                "desired_input_kwarg_layouts: missing; input_kwarg_layouts are given, so say what they become"
            )
        self.layouts = None if layouts is None else _as_layouts(layouts, "input_layouts")
        self.desired = () if desired is None else _as_layouts(desired, "desired_input_layouts")
        self.named = {} if named is None else _as_named(named, "input_kwarg_layouts")
        self.desired_named = {} if desired_named is None else _as_named(desired_named, "desired_input_kwarg_layouts")
        if self.layouts is not None:
            _check_lengths(self.layouts, self.desired, ("input_layouts", "desired_input_layouts"))
        if self.named.keys() != self.desired_named.keys():
            raise LayoutError(
                f"desired_input_kwarg_layouts: given for {sorted(self.desired_named)}, but input_kwarg_layouts for "
                f"{sorted(self.named)}; name the same arguments in both"
            )

    def prepare(self, module: nn.Module, args: Any, kwargs: Any, local: bool | None, along: Along) -> Any:
        if self.layouts is not None:
            if len(args) != len(self.layouts):
                raise LayoutError(
                    f"input_layouts: {len(self.layouts)} given, but {type(module).__name__} was called with "
                    f"{len(args)} positional inputs; give one for each (None leaves it alone)"
                )
            pairs = zip(args, self.layouts, self.desired, strict=True)
            args = tuple(_prepared(x, a, b, local, along, f"input {i}") for i, (x, a, b) in enumerate(pairs))
        changed = {
            key: _prepared(kwargs[key], self.named[key], self.desired_named[key], local, along, f"input {key!r}")
            for key in self.named
            if key in kwargs
        }
        return args, kwargs | changed


def _prepared(
    x: Any, layout: Layout | None, desired: Layout | None, local: bool | None, along: Along, what: str
) -> Any:
    if layout is None or x is None:
        return x
    if not isinstance(x, torch.Tensor):
        refuse(x, what)
    laid = along.enter(x, layout)
    if desired is not None:
        laid = along.move(laid, desired)
    return leaves(local, laid, along)


class _Outputs:
    """What a style does with the outputs."""

    def __init__(self, layouts: Any, desired: Any) -> None:
        self.layouts = _as_layouts(layouts, "output_layouts")
        self.desired = _as_layouts(desired, "desired_output_layouts")
        _check_lengths(self.layouts, self.desired, ("output_layouts", "desired_output_layouts"))

    def prepare(self, module: nn.Module, output: Any, local: bool | None, along: Along) -> Any:
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        if len(outputs) != len(self.layouts):
            raise LayoutError(
                f"output_layouts: {len(self.layouts)} given, but {type(module).__name__} returned {len(outputs)} "
                f"outputs; give one for each (None leaves it alone)"
            )
        triples = zip(outputs, self.layouts, self.desired, strict=True)
        made = tuple(_prepared(x, a, b, local, along, f"output {i}") for i, (x, a, b) in enumerate(triples))
        if output is outputs:
            return type(output)(*made) if hasattr(output, "_fields") else type(output)(made)
        return made[0]


_INPUT_NAMES = ("input_layouts", "desired_input_layouts", "input_kwarg_layouts", "desired_input_kwarg_layouts")
_OUTPUT_NAMES = ("output_layouts", "desired_output_layouts")


def _shown(style: ParallelStyle, *names: str) -> str:
    return ", ".join(f"{name}={getattr(style, name)!r}" for name in names)


class PrepareModuleInput(ParallelStyle):
    """Before the module runs, its inputs come as `input_layouts` and are moved to `desired_input_layouts`.

    One layout for each positional input, None for one that is left alone; keyword arguments by name in
    `input_kwarg_layouts` and `desired_input_kwarg_layouts`. With `use_local_output` the module gets local tensors.
    """

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        desired_input_layouts: Any = None,
        input_kwarg_layouts: Mapping[str, Any] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Any] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.inputs = _Inputs(input_layouts, desired_input_layouts, input_kwarg_layouts, desired_input_kwarg_layouts)
        self.use_local_output = use_local_output
        self.input_layouts, self.desired_input_layouts = self.inputs.layouts, self.inputs.desired or None
        self.input_kwarg_layouts, self.desired_input_kwarg_layouts = self.inputs.named, self.inputs.desired_named

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        module.register_forward_pre_hook(Hook(self._enter, Along.of(device_mesh, self.axis)), with_kwargs=True)
        return module

    def _enter(self, module: nn.Module, args: Any, kwargs: Any, along: Along) -> Any:
        return self.inputs.prepare(module, args, kwargs, self.use_local_output, along)

    def __repr__(self) -> str:
        return f"PrepareModuleInput({_shown(self, *_INPUT_NAMES, 'use_local_output')})"


class PrepareModuleOutput(ParallelStyle):
    """After the module ran, its outputs come as `output_layouts` and are moved to `desired_output_layouts`, as local
    tensors with `use_local_output` (default: on a mesh of one axis)."""

    def __init__(
        self, *, output_layouts: Any, desired_output_layouts: Any, use_local_output: bool | None = None
    ) -> None:
        self.outputs = _Outputs(output_layouts, desired_output_layouts)
        self.output_layouts, self.desired_output_layouts = self.outputs.layouts, self.outputs.desired
        self._local_output, self.use_local_output = use_local_output, use_local_output is not False

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        module.register_forward_hook(Hook(self._leave, Along.of(device_mesh, self.axis)))
        return module

    def _leave(self, module: nn.Module, args: Any, output: Any, along: Along) -> Any:
        return self.outputs.prepare(module, output, self._local_output, along)

    def __repr__(self) -> str:
        return f"PrepareModuleOutput({_shown(self, *_OUTPUT_NAMES, 'use_local_output')})"


class PrepareModuleInputOutput(ParallelStyle):
    """PrepareModuleInput and PrepareModuleOutput in one; `use_local_input` is what the module gets."""

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        desired_input_layouts: Any = None,
        input_kwarg_layouts: Mapping[str, Any] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Any] | None = None,
        use_local_input: bool = False,
        output_layouts: Any,
        desired_output_layouts: Any,
        use_local_output: bool | None = None,
    ) -> None:
        self.before = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.after = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def __repr__(self) -> str:
        inputs = f"{_shown(self.before, *_INPUT_NAMES)}, use_local_input={self.before.use_local_output}"
        return f"PrepareModuleInputOutput({inputs}, {_shown(self.after, *_OUTPUT_NAMES, 'use_local_output')})"

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        for style in (self.before, self.after):
            style.axis, style.src_data_rank = self.axis, self.src_data_rank
            style._apply(module, device_mesh)
        return module
