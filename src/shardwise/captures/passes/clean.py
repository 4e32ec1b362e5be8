"""Statements that do nothing for anybody: results nobody uses, and second names of a tensor."""

from __future__ import annotations

import torch

from shardwise.captures.operands import traits_of
from shardwise.captures.program import Program, Ref, Statement

_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def drop_unused(program: Program) -> None:
    """Drop calls that only make tensors which nobody uses."""
    wanted: set[Ref] = set(program.outputs)
    kept: list[Statement] = []
    for statement in reversed(program.statements):
        made = [ref for ref in statement.outs if ref is not None]
        if statement.is_pure and made and wanted.isdisjoint(made):  # what makes nothing checks something
            continue
        wanted.update(statement.refs())
        kept.append(statement)
    program.statements[:] = reversed(kept)


def drop_aliases(program: Program) -> None:
    """Use a tensor itself where a program takes a second name of it, unless that one leaves the program."""
    leaving = set(program.outputs)
    for statement in program.statements:
        if not statement.is_op:
            leaving.update(statement.refs())
        elif traits_of(statement.func).reshapes:
            leaving.update(statement.refs())  # it gets another shape: the two names differ from then on
    new: dict[Ref, Ref] = {}
    kept: list[Statement] = []
    for statement in program.statements:
        statement.replace_refs(new)
        made = statement.outs[0] if statement.outs else None
        if statement.func in _ALIASES and made is not None and made not in leaving:
            source = statement.args[0]
            if source not in leaving or source in program.state or source in program.inputs:
                new[made] = source
                continue
        kept.append(statement)
    program.statements[:] = kept
