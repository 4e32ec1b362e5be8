"""The backward program of a call of which only some results are differentiated.

Autograd leaves out what depends on the other results alone: leaves that only they depend on get no gradient at all,
which is another thing than a gradient of zeros to an optimizer, and no move is made for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from shardwise.captures.program import GRADIENT_SUMS, Program, Ref, Statement


def without(program: Program, seeds: Collection[Ref], missing: Collection[Ref]) -> tuple[Program, list[bool]]:
    """A backward program as it is where some results have no gradient.

    Args:
        program: The whole program.
        seeds: The gradients of the results, among its inputs.
        missing: Those that are not given. Where an op takes one together with others it is zeros, as in an eager run.

    Returns:
        Another program with the same inputs, without the outputs that depend on nothing that is given; and which of the
        outputs are left.
    """
    given, none = set(seeds) - set(missing), set(missing)
    new: dict[Ref, Ref] = {}
    statements: list[tuple[bool, Statement]] = []
    for original in program.statements:
        statement = dataclasses.replace(original, outs=list(original.outs))
        statement.replace_refs(new)
        refs = set(statement.refs())
        is_missing = bool(refs & none) and not refs & given
        if refs & none and refs & given and statement.func in GRADIENT_SUMS and not statement.kwargs:
            (there,) = (ref for ref in statement.args[:2] if ref in given)
            new.update((ref, there) for ref in (statement.args[0], *statement.outs) if ref not in (None, there))
            continue
        (none if is_missing else given if refs & given else set[Ref]()).update(r for r in statement.outs if r)
        statements.append((is_missing, statement))
    left = [new.get(ref, ref) not in none for ref in program.outputs]
    outputs = [new.get(ref, ref) for ref, is_left in zip(program.outputs, left, strict=True) if is_left]
    return Program(program.inputs, program.state, _needed(statements, outputs), outputs), left


def _needed(statements: list[tuple[bool, Statement]], outputs: list[Ref]) -> list[Statement]:
    """All statements, but of those about gradients that are not there only what others take."""
    wanted, kept = set(outputs), []
    for is_missing, statement in reversed(statements):
        if not is_missing or not wanted.isdisjoint(ref for ref in statement.outs if ref is not None):
            wanted.update(statement.refs())
            kept.append(statement)
    return kept[::-1]
