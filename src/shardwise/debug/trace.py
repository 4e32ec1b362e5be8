"""What each module of a program did: collectives and operations, as a tree, a table and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

# Operations that only look at a tensor differently; noise levels below 3 leave them out.
TRIVIAL = frozenset(
    ("detach", "view", "view_as", "reshape", "t", "transpose", "permute", "expand", "expand_as", "unsqueeze", "squeeze")
    + ("flatten", "unflatten", "clone", "contiguous", "to", "type_as", "size", "dim", "stride", "numel")
)


@dataclass(frozen=True)
class Operation:
    """One torch function that a module called; `input_sharding` is empty if no operand is distributed."""

    name: str
    input_shape: list[str]
    input_sharding: list[str]
    device_mesh: str
    is_bw: bool = False
    is_activation_checkpointing: bool = False

    def shown_at(self, noise_level: int) -> bool:
        """Level 1 shows distributed operations, 2 all, 3 the trivial ones too."""
        return noise_level >= (3 if self.name in TRIVIAL else 1 if self.input_sharding else 2)


@dataclass
class ModuleTrace:
    """A module, what it called itself, and the collectives in it and below, by pass (False: forward)."""

    fqn: str
    module_type: str = ""
    parameters: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    children: dict[str, ModuleTrace] = field(default_factory=dict)
    collectives: dict[bool, Counter[Any]] = field(default_factory=lambda: {False: Counter(), True: Counter()})
    operations: list[Operation] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)  # autograd sequence numbers its calls took

    def child(self, fqn: str, module: torch.nn.Module) -> ModuleTrace:
        """The trace of a module called inside of this one."""
        if fqn not in self.children:
            kind, parameters = type(module), dict(module.named_parameters(recurse=False))
            self.children[fqn] = ModuleTrace(fqn, f"{kind.__module__}.{kind.__qualname__}", parameters)
        return self.children[fqn]

    def path_to(self, sequence: int) -> list[ModuleTrace]:
        """The modules, this one first and the innermost last, whose call made the autograd node of that number."""
        for child in self.children.values():
            if any(start <= sequence < stop for start, stop in child.spans):
                return [self, *child.path_to(sequence)]
        return [self]

    def walk(self) -> Iterator[ModuleTrace]:
        """This module and all below."""
        yield self
        for child in self.children.values():
            yield from child.walk()

    # -- for people -----------------------------------------------------------------------------------------
    def lines(self, noise_level: int, depth: int = 0) -> Iterator[str]:
        """The lines of the table, indented by depth."""
        pad = "  " * depth
        yield f"{pad}{self.fqn}"
        if noise_level and self.module_type:
            yield f"{pad}  *module type: {self.module_type}"
        if noise_level and self.parameters:
            yield f"{pad}  *parameters"
            yield from (f"{pad}    *{name}: {placements_of(p)}" for name, p in self.parameters.items())
        for backward, title in ((False, "FORWARD PASS"), (True, "BACKWARD PASS")):
            inside = [f"{pad}    *{op}: {n}" for op, n in self.collectives[backward].items()]
            if not backward:
                inside += [line for op in self.operations if op.shown_at(noise_level) for line in _describe(op, pad)]
            if inside:
                yield f"{pad}  {title}"
                yield from inside
        for child in self.children.values():
            yield from child.lines(noise_level, depth + 1)

    # -- for programs ---------------------------------------------------------------------------------------
    def as_json(self, noise_level: int) -> dict[str, Any]:
        """The tree as JSON takes it, under torch's names."""
        return {
            "fqn": self.fqn,
            "module_type": self.module_type,
            "parameters": [[name, placements_of(p)] for name, p in self.parameters.items()],
            "children": [child.as_json(noise_level) for child in self.children.values()],
            "collectives_forward": [[str(op), n] for op, n in self.collectives[False].items()],
            "collectives_backward": [[str(op), n] for op, n in self.collectives[True].items()],
            "operations_forward": [asdict(op) for op in self.operations if op.shown_at(noise_level)],
            "operations_backward": [],
            "operations_checkpointing": [],
        }


def placements_of(tensor: torch.Tensor) -> str:
    """How the tables show where a parameter lives."""
    places = getattr(tensor, "placements", None)
    return "plain tensor" if places is None else str(tuple(places))


def _describe(op: Operation, pad: str) -> Iterator[str]:
    yield f"{pad}    **{op.name}"
    if op.input_sharding:
        yield f"{pad}      shape: [{', '.join(op.input_shape)}]"
        yield f"{pad}      sharding: [{', '.join(op.input_sharding)}]"
        yield f"{pad}      device mesh: {op.device_mesh}"
