"""A random program as text: Python statements, one per line, that can be read, kept, replayed and made shorter."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field, replace

_MESH = re.compile(r"^# mesh \(([\d, ]*)\)$")


@dataclass(frozen=True)
class Program:
    """The shape of a mesh, and statements.

    The words that the statements use besides `torch` and `F` are those of `setting.py`: ``tensor(...)`` makes an input
    and ``move(x, [...])`` gives a tensor another layout. Without a mesh the same text is a program of plain torch.

    >>> print(Program((2,), ("x = tensor((3, 2), seed=1, at=[Shard(0)])", "y = torch.relu(x)")))
    # mesh (2,)
    x = tensor((3, 2), seed=1, at=[Shard(0)])
    y = torch.relu(x)
    """

    mesh: tuple[int, ...]
    lines: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        return "\n".join([f"# mesh {self.mesh}", *self.lines])

    @classmethod
    def parse(cls, text: str) -> Program:
        """The program that `str` wrote.

        Raises:
            ValueError: If the first line does not say the mesh.
        """
        first, *lines = [line for line in text.strip().splitlines() if line.strip()]
        said = _MESH.match(first.strip())
        if said is None:
            raise ValueError(f"the first line of a program is {first!r}; write the mesh, for instance '# mesh (2, 2)'")
        return cls(tuple(int(n) for n in said[1].split(",") if n.strip()), tuple(lines))

    def with_lines(self, lines: list[str]) -> Program:
        return replace(self, lines=tuple(lines))


def names_made(line: str) -> list[str]:
    """The names that a statement assigns."""
    nodes = ast.walk(ast.parse(line))
    return [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def names_used(line: str) -> list[str]:
    """The names that a statement reads, in their order, each once."""
    nodes = ast.walk(ast.parse(line))
    used = (node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return list(dict.fromkeys(used))
