"""The strategies of one op for one mesh axis. Where its rule answers with factors, they follow from the rule alone;
otherwise the op is run on two simulated ranks, once for every way to lay out its operands."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten, tree_map_only

import shardwise
from shardwise.errors import ShardwiseError
from shardwise.layout import Layout, Partial, Placement, Shard
from shardwise.layout.placement import REPLICATE
from shardwise.mesh import SimulatedMesh, as_mesh
from shardwise.strategy.notation import forms
from shardwise.strategy.registry import Rule
from shardwise.strategy.spec import Answer, Choice, Factors, Operand

Call = tuple[list[Any], dict[str, Any]]  # the arguments of a call, with blanks for tensors


class NoSample(Exception):
    """No arguments are known to suit the op."""


@dataclass(frozen=True)
class Blank:
    """A tensor to come, in the arguments of a call."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def __repr__(self) -> str:
        kind = "" if self.dtype == torch.float32 else f", {str(self.dtype).removeprefix('torch.')}"
        return f"tensor({list(self.shape)}{kind})"


class Row(NamedTuple):
    """One strategy: placements of the operands and results, and what travels."""

    name: str
    inputs: Sequence[Placement]
    outputs: Sequence[Placement | str]
    travels: str = ""  # seen where the op was run
    failed: bool = False


class Derivation(NamedTuple):
    call: str
    operands: int
    rows: list[Row]
    notes: list[str]


def derive(
    name: str, rule: Rule, tensors: Sequence[Blank], args: Sequence[object], kwargs: dict[str, object]
) -> Derivation:
    """The strategies of `rule` for a call with these tensors; without any, for some that it accepts."""
    mesh = shardwise.simulate(2)
    refused = ""
    guesses: Iterable[list[Any]] = ([*tensors], [[*tensors]]) if tensors else _guesses(rule)
    for blanks in guesses:
        call = ([*blanks, *args], kwargs)
        found = _derived(name, rule, call, mesh, bool(tensors))
        if found is not None and not all(row.failed for row in found.rows):
            return found
        if found is not None and not refused:
            refused = f"{found.call} raises {found.rows[-1].outputs[0]}"
    refused = refused or f"its rule knows no call with {', '.join(map(repr, tensors)) or 'a few small tensors'}"
    raise NoSample(
        f"{name}: {refused}. Say what it is called with, as --shapes 4,6 6,8 --args 1 dim=0; the rule takes "
        f"{inspect.signature(rule)}"
    )


def _derived(name: str, rule: Rule, call: Call, mesh: SimulatedMesh, is_given: bool) -> Derivation | None:
    """The strategies for one call; shapes that somebody has given may be wrong."""
    tensors = [x for x in tree_flatten(call)[0] if isinstance(x, Blank)]
    whole = [REPLICATE] * len(tensors)
    spec = _answer(rule, call, tensors, whole, mesh)
    if spec is None:
        return None
    args, kwargs = call
    written = ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])
    ways: list[Sequence[Placement]] = [*_ways(tensors), whole]
    if isinstance(spec, Factors) and all(isinstance(_answer(rule, call, tensors, way, mesh), Factors) for way in ways):
        wrong = _refusal(name, call) if is_given else None
        if wrong is not None:
            return Derivation(f"{name}({written})", len(tensors), [Row("run it", whole, [wrong], "?", True)], [])
        rows, notes = _rows_of_factors(spec, tensors, mesh)
    else:
        rows, notes = [_run(_function(name), call, way, mesh) for way in ways], []
    return Derivation(f"{name}({written})", len(tensors), rows, notes)


_LINE = re.compile(r"[\w\s*!?,().+-]+->[\w\s*!?,().+>|-]*")


def _guesses(rule: Rule) -> Iterator[list[Any]]:
    """Arguments to try: as a line says, or small matrices, with a dim, in a list, then images."""
    text = (rule.__doc__ or "").strip()
    text = text.split("``")[1] if text.startswith("``") else text
    if _LINE.fullmatch(text):
        for line in sorted(forms(text), key=lambda line: -sum(len(term.words) for term in line.inputs)):
            names = dict.fromkeys(name for term in line.inputs for name in term.names)
            sizes = {name: 4 + 2 * i for i, name in enumerate(names)}
            if not line.names_dims:
                yield [Blank(tuple(sizes[name] for name in term.names)) for term in line.inputs]
    x, index, rows, image = Blank((4, 6)), Blank((8,), torch.int64), Blank((2, 4, 8)), Blank((2, 4, 8, 8))
    yield from ([x], [x, x], [x, 0], [[x, x]], [x, x, x], [x, 0, x], [[x, x], [x, x]], [x, 0, index], [index, x])
    yield from ([rows, Blank((6, 4, 3))], [rows, 2], [image, Blank((6, 4, 3, 3))], [image, 2])


def _answer(
    rule: Rule, call: Call, tensors: Sequence[Blank], way: Sequence[Placement], mesh: SimulatedMesh
) -> Answer | ShardwiseError:
    """What the rule answers, or the error it raises on purpose; None where it does not take such a call."""
    spare = iter(_operands(tensors, way, mesh))
    args, kwargs = tree_map_only(Blank, lambda _: next(spare), call)
    try:
        return rule(*args, **kwargs)
    except ShardwiseError as error:
        return error
    except Exception:
        return None


def _operands(tensors: Sequence[Blank], way: Sequence[Placement], mesh: SimulatedMesh) -> list[Operand]:
    layouts = (Layout.make(as_mesh(mesh), [p], x.shape, x.dtype) for x, p in zip(tensors, way, strict=True))
    return [Operand(layout, i) for i, layout in enumerate(layouts)]


def _ways(tensors: Sequence[Blank]) -> Iterator[list[Placement]]:
    """One axis: one operand cut or pending and the others whole, then all of them alike."""
    for i, x in enumerate(tensors):
        pending = [Partial()] if x.dtype.is_floating_point else []
        for placement in (*(Shard(d) for d in range(len(x.shape))), *pending):
            yield [placement if j == i else REPLICATE for j in range(len(tensors))]
    if len(tensors) > 1:
        for dim in range(min(len(x.shape) for x in tensors)):
            yield [Shard(dim)] * len(tensors)


def _refusal(name: str, call: Call) -> str | None:
    """What torch says of shapes that do not fit, which a rule is not asked: seen on tensors without memory. None if one
    of the functions of that name takes them."""
    args, kwargs = tree_map_only(Blank, lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), call)
    said = None
    for function in _spellings(name):
        try:
            with torch.no_grad(), warnings.catch_warnings(action="ignore"):
                function(*args, **kwargs)
        except NotImplementedError:  # it has no kernel for such tensors
            return None
        except Exception as error:
            said = said or f"{type(error).__name__}: {_first_line(error)}"
        else:
            return None
    return said


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


# -- factors -----------------------------------------------------------------------------------------------
def _rows_of_factors(spec: Factors, tensors: Sequence[Blank], mesh: SimulatedMesh) -> tuple[list[Row], list[str]]:
    factors = dict.fromkeys(f for names in spec.inputs for f in names if f is not None)
    cuts = [(f"cut {factor}", spec.cut(factor, Shard(0))) for factor in factors]
    pending: dict[Choice, str] = {}
    for i in range(len(tensors)):
        operands = _operands(tensors, [Partial() if i == j else REPLICATE for j in range(len(tensors))], mesh)
        found = spec.choices(operands, 0, [[] for _ in tensors], {x.dtype for x in tensors})
        pending |= dict.fromkeys(found[:-1], "leave a sum pending")
    everywhere = Choice((REPLICATE,) * len(tensors), (REPLICATE,) * len(spec.outputs), "")
    named = [*cuts, *((name, choice) for choice, name in pending.items()), ("compute it everywhere", everywhere)]
    whole = [[str(d) for d, name in enumerate(names) if name is None] for names in spec.inputs]
    notes = [f"operand {i}: dim {' and '.join(dims)} must be whole" for i, dims in enumerate(whole) if dims]
    return [Row(name, choice.inputs, choice.outputs) for name, choice in named], notes


# -- anything else -----------------------------------------------------------------------------------------
_PLACES = (torch, F, torch.special, torch.linalg, torch.Tensor, torch.ops.aten)


def _function(name: str) -> Callable[..., Any]:
    return next(_spellings(name))


def _spellings(name: str) -> Iterator[Callable[..., Any]]:
    """All functions that an op's name is spelled for."""
    bare = name.removeprefix("aten::")
    spelled = [(place, bare) for place in (_PLACES if bare == name else (torch.ops.aten,))]
    spelled.append((torch.Tensor, f"__{bare}__"))  # what operators call, as x @ y
    return (getattr(place, word) for place, word in spelled if hasattr(place, word))


def _run(function: Callable[..., Any], call: Call, way: Sequence[Placement], mesh: SimulatedMesh) -> Row:
    """The op as it runs on tensors laid out this way."""
    spare = iter(way)
    small = lambda x: (2 * torch.rand(x.shape)).to(x.dtype)  # good as indices too
    made = lambda x: shardwise.distribute_tensor(small(x), mesh, [next(spare)])
    args, kwargs = tree_map_only(Blank, made, call)
    with shardwise.debug.ledger() as log, torch.no_grad(), warnings.catch_warnings(action="ignore"):
        try:
            results = tree_flatten(function(*args, **kwargs))[0]
        except Exception as error:
            return Row("run it", way, [f"{type(error).__name__}: {_first_line(error)}"], travels="?", failed=True)
    places = [x.placements[0] for x in results if isinstance(x, shardwise.DTensor)]
    kinds = dict.fromkeys(entry.kind for entry in log)
    travels = ", ".join(f"{kind} {sum(e.bytes for e in log if e.kind == kind)} B" for kind in kinds)
    return Row("run it", way, places, travels or "nothing")
