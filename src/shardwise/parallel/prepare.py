"""Styles that lay out what goes into a module and what comes out of it, and leave its parameters alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.errors import LayoutError, MismatchError
from shardwise.mesh import DeviceMesh, SimulatedMesh
from shardwise.parallel.styles.axis import Placing, StyleAxis
from shardwise.parallel.styles.base import (
    Extended,
    ParallelStyle,
    PlacingArgument,
    StyleHook,
    WithOutput,
    as_placing,
    refuse,
)

Placings = tuple[Placing | None, ...]  # one for each tensor; None for what is left alone
PlacingsArgument = PlacingArgument | Sequence[PlacingArgument | None] | None
NamedArgument = Mapping[str, PlacingArgument | None] | None
Meshes = DeviceMesh | SimulatedMesh | None
_Layout = PlacingArgument | None
Call = tuple[tuple[Any, ...], dict[str, Any]]


def _as_placings(value: PlacingsArgument, name: str) -> Placings:
    """One for each tensor; a single one counts as a tuple of one."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(None if v is None else as_placing(v, f"{name}[{i}]") for i, v in enumerate(values))


def _as_named(value: NamedArgument, name: str) -> dict[str, Placing | None]:
    if value is not None and not isinstance(value, Mapping):
        raise LayoutError(f"{name} = {value!r}: expected a dict of layouts by the names of keyword arguments")
    return {key: None if v is None else as_placing(v, f"{name}[{key!r}]") for key, v in (value or {}).items()}


def _check_lengths(layouts: Placings, desired: Placings, name: str) -> None:
    if len(layouts) != len(desired):
        raise MismatchError(
            f"{name} and desired_{name} should have same length! They have {len(layouts)} and {len(desired)}"
        )


def _check_desired(layouts: object, desired: object, name: str) -> None:
    if layouts is not None and desired is None:
        named = f"{name} and desired_{name} should have same length!"
        words = named if "kwarg" in name else "desired module inputs should not be None!"
        raise MismatchError(f"{words} {name} are given, so say by desired_{name} what they become")


def _prepared(
    x: Any, layout: Placing | None, desired: Placing | None, use_local: bool | None, axis: StyleAxis, what: str
) -> Any:
    if layout is None or x is None:
        return x
    if not isinstance(x, torch.Tensor):
        refuse(x, what)
    laid = axis.distributed(x, layout)
    if desired is not None:
        laid = axis.move(laid, desired)
    return axis.handed_over(laid, use_local)


def _all_prepared(
    values: Sequence[Any],
    layouts: Placings,
    desired: Placings,
    use_local: bool | None,
    axis: StyleAxis,
    kind: str,
    found: str,
) -> tuple[Any, ...]:
    _check_number(values, layouts, kind, found)
    triples = enumerate(zip(values, layouts, desired, strict=True))
    return tuple(_prepared(x, a, b, use_local, axis, f"{kind} {i}") for i, (x, a, b) in triples)


def _check_number(values: Sequence[Any], layouts: Sequence[object], kind: str, found: str) -> None:
    if len(values) != len(layouts):
        raise LayoutError(
            f"module {kind}s and {kind}_layouts should have same length! {kind}_layouts: {len(layouts)} given, but "
            f"{found}; give one for each (None leaves it alone)"
        )


_INPUT_NAMES = ("input_layouts", "desired_input_layouts", "input_kwarg_layouts", "desired_input_kwarg_layouts")
_OUTPUT_NAMES = ("output_layouts", "desired_output_layouts")


def _shown(style: ParallelStyle, *names: str) -> str:
    return ", ".join(f"{name}={getattr(style, name)!r}" for name in names)


class PrepareModuleInput(Extended):
    """Lay out the inputs of a module before it runs.

    Args:
        input_layouts: of each positional input a placement on the axis, or by the names of axes; None leaves it alone.
        desired_input_layouts: what each becomes.
        input_kwarg_layouts: the same for keyword arguments, by name.
        desired_input_kwarg_layouts: what they become.
        use_local_output: whether the module gets local tensors.

    Raises:
        LayoutError: the arguments do not fit each other, or one is not a placement.
    """

    _methods = ("_prepare_input_arg", "_prepare_input_fn", "_prepare_input_kwarg_fn")

    def __init__(
        self,
        *,
        input_layouts: PlacingsArgument = None,
        desired_input_layouts: PlacingsArgument = None,
        input_kwarg_layouts: NamedArgument = None,
        desired_input_kwarg_layouts: NamedArgument = None,
        use_local_output: bool = False,
    ) -> None:
        _check_desired(input_layouts, desired_input_layouts, "input_layouts")
        _check_desired(input_kwarg_layouts, desired_input_kwarg_layouts, "input_kwarg_layouts")
        desired = () if desired_input_layouts is None else _as_placings(desired_input_layouts, "desired_input_layouts")
        self.input_layouts = None if input_layouts is None else _as_placings(input_layouts, "input_layouts")
        self.desired_input_layouts = desired or None
        self.input_kwarg_layouts = _as_named(input_kwarg_layouts, "input_kwarg_layouts")
        self.desired_input_kwarg_layouts = _as_named(desired_input_kwarg_layouts, "desired_input_kwarg_layouts")
        self.use_local_output = use_local_output
        self.with_kwargs = input_kwarg_layouts is not None
        if self.input_layouts is not None:
            _check_lengths(self.input_layouts, desired, "input_layouts")
        if self.input_kwarg_layouts.keys() != self.desired_input_kwarg_layouts.keys():
            raise MismatchError(
                f"input_kwarg_layouts and desired_input_kwarg_layouts should have same length! And the same names: "
                f"they are given for {sorted(self.input_kwarg_layouts)} and {sorted(self.desired_input_kwarg_layouts)}"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh | SimulatedMesh | None) -> nn.Module:
        if self._is_extended(PrepareModuleInput):
            self._apply_methods(module, device_mesh)
        else:
            axis = StyleAxis.of(device_mesh, self.axis)
            module.register_forward_pre_hook(StyleHook(self._before, axis), with_kwargs=True)
        return module

    # -- what programs that extend the style define anew, or call ------------------------------------------
    def _apply_methods(self, module: nn.Module, device_mesh: Meshes) -> None:
        """`_apply` by way of the methods below, one of which is the program's."""
        if self.with_kwargs:
            module.register_forward_pre_hook(
                lambda _, args, kwargs: self._prepare_input_kwarg_fn(args, kwargs, device_mesh), with_kwargs=True
            )
        else:
            module.register_forward_pre_hook(lambda _, args: self._prepare_input_fn(args, device_mesh))

    def _prepare_input_arg(self, input: object, mesh: Meshes, input_layout: _Layout, desired_layout: _Layout) -> object:
        axis = StyleAxis.of(mesh, self.axis)
        have = None if input_layout is None else as_placing(input_layout, "input_layouts")
        want = None if desired_layout is None else as_placing(desired_layout, "desired_input_layouts")
        return _prepared(input, have, want, self.use_local_output, axis, "an input")

    def _prepare_input_fn(self, inputs: object, device_mesh: Meshes) -> object:
        if self.input_layouts is None:
            return inputs
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        layouts, desired = self.input_layouts, self.desired_input_layouts or ()
        _check_number(inputs, layouts, "input", f"the module was called with {len(inputs)} positional inputs")
        return tuple(
            self._prepare_input_arg(x, device_mesh, a, b) for x, a, b in zip(inputs, layouts, desired, strict=True)
        )

    def _prepare_input_kwarg_fn(
        self, inputs: object, kwarg_inputs: dict[str, object], device_mesh: Meshes
    ) -> tuple[object, dict[str, object]]:
        changed = {
            key: self._prepare_input_arg(kwarg_inputs[key], device_mesh, have, self.desired_input_kwarg_layouts[key])
            for key, have in self.input_kwarg_layouts.items()
            if key in kwarg_inputs
        }
        return self._prepare_input_fn(inputs, device_mesh), kwarg_inputs | changed

    # -- the hook ------------------------------------------------------------------------------------------
    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], axis: StyleAxis) -> Call:
        if self.input_layouts is not None:
            found = f"{type(module).__name__} was called with {len(args)} positional inputs"
            layouts = self.input_layouts, self.desired_input_layouts or ()
            args = _all_prepared(args, *layouts, self.use_local_output, axis, "input", found)
        wanted = self.desired_input_kwarg_layouts
        changed = {
            key: _prepared(kwargs[key], have, wanted[key], self.use_local_output, axis, f"input {key!r}")
            for key, have in self.input_kwarg_layouts.items()
            if key in kwargs
        }
        return args, kwargs | changed

    def __repr__(self) -> str:
        return f"PrepareModuleInput({_shown(self, *_INPUT_NAMES, 'use_local_output')})"


class PrepareModuleOutput(WithOutput):
    """Lay out the outputs of a module after it ran.

    Args:
        output_layouts: of each output a placement on the axis, or by the names of axes; None leaves it alone.
        desired_output_layouts: what each becomes.
        use_local_output: whether the program gets local tensors. Default: where the mesh has no other axis.

    Raises:
        LayoutError: the arguments do not fit each other, or one is not a placement.
    """

    _methods = ("_prepare_out_fn",)

    def __init__(
        self,
        *,
        output_layouts: PlacingsArgument,
        desired_output_layouts: PlacingsArgument,
        use_local_output: bool | None = None,
    ) -> None:
        self.output_layouts = _as_placings(output_layouts, "output_layouts")
        self.desired_output_layouts = _as_placings(desired_output_layouts, "desired_output_layouts")
        _check_lengths(self.output_layouts, self.desired_output_layouts, "output_layouts")
        self._use_local = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh | SimulatedMesh | None) -> nn.Module:
        if self._is_extended(PrepareModuleOutput):
            module.register_forward_hook(lambda _, inputs, outputs: self._prepare_out_fn(outputs, device_mesh))
        else:
            module.register_forward_hook(StyleHook(self._after, StyleAxis.of(device_mesh, self.axis)))
        return module

    def _prepare_out_fn(self, outputs: object, device_mesh: Meshes) -> object:
        """What programs that extend the style define anew, or call."""
        return self._laid_out(outputs, StyleAxis.of(device_mesh, self.axis), "the module")

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: object, axis: StyleAxis) -> object:
        return self._laid_out(output, axis, type(module).__name__)

    def _laid_out(self, output: object, axis: StyleAxis, name: str) -> object:
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        found = f"{name} returned {len(outputs)} outputs"
        layouts = self.output_layouts, self.desired_output_layouts
        made = _all_prepared(outputs, *layouts, self._use_local, axis, "output", found)
        if output is outputs:
            return type(output)(*made) if hasattr(output, "_fields") else type(output)(made)
        return made[0]

    def __repr__(self) -> str:
        return f"PrepareModuleOutput({_shown(self, *_OUTPUT_NAMES, 'use_local_output')})"


class PrepareModuleInputOutput(ParallelStyle):
    """PrepareModuleInput and PrepareModuleOutput in one, with the arguments of both.

    Args:
        use_local_input: whether the module gets local tensors.
        use_local_output: whether the program does. Default: where the mesh has no other axis.
    """

    def __init__(
        self,
        *,
        input_layouts: PlacingsArgument = None,
        desired_input_layouts: PlacingsArgument = None,
        output_layouts: PlacingsArgument,
        desired_output_layouts: PlacingsArgument,
        input_kwarg_layouts: NamedArgument = None,
        desired_input_kwarg_layouts: NamedArgument = None,
        use_local_input: bool = False,
        use_local_output: bool | None = None,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts, desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts, desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )  # fmt: skip
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts, desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )  # fmt: skip

    def __repr__(self) -> str:
        before, after = self.prepare_module_input, self.prepare_module_output
        inputs = f"{_shown(before, *_INPUT_NAMES)}, use_local_input={before.use_local_output}"
        return f"PrepareModuleInputOutput({inputs}, {_shown(after, *_OUTPUT_NAMES, 'use_local_output')})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh | SimulatedMesh | None) -> nn.Module:
        for style in (self.prepare_module_input, self.prepare_module_output):
            style.axis, style.src_data_rank = self.axis, self.src_data_rank
            style._apply(module, device_mesh)
        return module
