"""A program as Python: one line per statement, tensors in local variables, each dropped after its last use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shardwise.captures.program import GetGrad, Program, Ref, SetGrad, Statement
from shardwise.engine import autocast
from shardwise.protocols import Item
from shardwise.torch_private.tensors import below_autograd, set_grad_mode, without_python, without_torch_function

_INDENT = "    "


class replaying:
    """Inside, ops run below autograd and autocast, which have had their say, and no tensor class is asked."""

    def __enter__(self) -> None:
        self._casts = autocast.off() if autocast.is_on() else None
        if self._casts is not None:
            self._casts.__enter__()
        self._grad = torch.is_grad_enabled()
        set_grad_mode(False)
        self._below, self._plain = below_autograd(), without_torch_function()
        self._below.__enter__()
        self._plain.__enter__()

    def __exit__(self, *error: object) -> None:
        self._plain.__exit__(*error)
        self._below.__exit__(None, None, None)
        set_grad_mode(self._grad)
        if self._casts is not None:
            self._casts.__exit__(None, None, None)


class Code:
    """The text of a program and the function that it is.

    Attributes:
        text: Readable Python. Names of tensors: `x` arguments, `p` what was there before, `t` what the program makes.
        run: The function of the plain tensors of the arguments; it gives a tuple of plain tensors.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._globals: dict[str, Any] = {"replaying": replaying, "grad_mode": set_grad_mode}
        self._names: dict[Ref, str] = {ref: f"x{i}" for i, ref in enumerate(program.inputs)}
        for i, (ref, tensor) in enumerate(program.state.items()):
            self._names[ref] = f"p{i}"
            self._globals[f"p{i}"] = tensor
        self._called: dict[Any, str] = {}
        self.text = "\n".join(self._lines()) + "\n"
        exec(compile(self.text, "<captured program>", "exec"), self._globals)  # noqa: S102
        self.run: Callable[..., tuple[torch.Tensor, ...]] = self._globals["run"]

    # -- lines ------------------------------------------------------------------------------------------------------
    def _lines(self) -> Iterator[str]:
        program = self.program
        yield f"def run({', '.join(self._names[ref] for ref in program.inputs)}):"
        last = _last_uses(program)
        inside, with_grad = False, False
        for i, statement in enumerate(program.statements):
            if statement.outside == inside:
                inside, with_grad = not inside, False
                if inside:
                    yield f"{_INDENT}with replaying():"
            indent = _INDENT * (2 if inside else 1)
            if inside and statement.is_op and statement.with_grad is not with_grad:  # which some kernels ask for
                with_grad = statement.with_grad
                yield f"{indent}grad_mode({with_grad})"
            line = indent + self._line(statement)
            yield f"{line:<100}  # {statement.source}" if statement.source else line
            dead = [self._names[ref] for ref in last.get(i, ())]
            if dead:
                yield f"{indent}del {', '.join(dead)}"
        yield f"{_INDENT}return ({''.join(self._names[ref] + ', ' for ref in program.outputs)})"

    def _line(self, s: Statement) -> str:
        for ref in s.outs:
            if ref is not None:
                self._names[ref] = f"t{ref.number}"
        if isinstance(s.func, SetGrad):
            return f"{self._value(s.args[0])}.grad = {self._value(s.args[1])}"
        if isinstance(s.func, GetGrad):
            return f"{self._value(s.outs[0])} = {self._value(s.args[0])}.grad"
        args = [self._value(arg) for arg in s.args] + [f"{k}={self._value(v)}" for k, v in s.kwargs.items()]
        call = f"{self._function(s)}({', '.join(args)})"
        targets = ["_" if ref is None else self._names[ref] for ref in s.outs]
        if all(ref is None for ref in s.outs):
            return call
        return f"{targets[0]} = {call}" if s.single else f"{', '.join(targets)}{',' * (len(targets) == 1)} = {call}"

    def _function(self, s: Statement) -> str:
        key = s.func if s.is_op else id(s)
        found = self._called.get(key)
        if found is None:
            base = s.label.replace(".", "_").replace("+", "_") or "call"
            known = self._called.values()
            found, n = base, 1
            while found in known or found in self._globals or not found.isidentifier():
                n += 1
                found = f"{base if base.isidentifier() else 'f'}_{n}"
            self._called[key] = found
            self._globals[found] = without_python(s.func) if s.is_op else s.func
        return found

    def _value(self, value: Item) -> str:
        """The text of an argument."""
        if isinstance(value, Ref):
            return self._names[value]
        if type(value) in (list, tuple):
            inner = ", ".join(map(self._value, value))
            return f"[{inner}]" if type(value) is list else f"({inner}{',' * (len(value) == 1)})"
        if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Item) -> str:
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            name = str(value).replace(".", "_")
        elif isinstance(value, torch.device):
            name = f"device_{value.type}" + ("" if value.index is None else f"_{value.index}")
        else:
            name = f"c{len(self._globals)}"
        self._globals[name] = value
        return name


def _last_uses(program: Program) -> dict[int, list[Ref]]:
    """Per statement, the tensors that nobody uses after it."""
    kept = {*program.outputs, *program.state}
    last: dict[Ref, int] = dict.fromkeys(program.inputs, -1)
    for i, statement in enumerate(program.statements):
        for ref in (*statement.refs(), *(ref for ref in statement.outs if ref is not None)):
            last[ref] = i
    found: dict[int, list[Ref]] = {}
    for ref, i in last.items():
        if ref not in kept and i >= 0:
            found.setdefault(i, []).append(ref)
    return found
