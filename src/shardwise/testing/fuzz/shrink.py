"""The shortest program that still fails: drop statements, undo layouts, make tensors small."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from shardwise.testing.fuzz.judge import Verdict
from shardwise.testing.fuzz.program import Program, names_made, names_used

Judge = Callable[[Program], Verdict]
_SHAPE = re.compile(r"tensor\((\([\d, ]*\))")


def shrink(program: Program, verdict: Verdict, judge: Judge, attempts: int = 400) -> tuple[Program, Verdict]:
    """Make a program that fails shorter, as long as it fails in the same way.

    Args:
        program: The program.
        verdict: How it fails.
        judge: Runs a program.
        attempts: How many programs to run at most.

    Returns:
        The shorter program, and how it fails.
    """
    progress = True
    while progress and attempts > 0:
        progress = False
        for candidate in _shorter(program):
            attempts -= 1
            if attempts < 0:
                break
            found = _judged(candidate, judge)
            if found is not None and _alike(found, verdict):
                program, verdict, progress = candidate, found, True
                break
    return program, verdict


def _judged(program: Program, judge: Judge) -> Verdict | None:
    """None where the text is no program any more."""
    verdict = judge(program)
    broken = ("NameError", "SyntaxError", "UnboundLocalError")
    return None if any(word in verdict.message.split(": ")[0] for word in broken) else verdict


def _alike(found: Verdict, wanted: Verdict) -> bool:
    return found.kind == wanted.kind and _topic(found.message) == _topic(wanted.message)


def _topic(message: str) -> str:
    """What a message is about, without names and numbers."""
    for word in ("stride", "is_leaf", "requires_grad", "dtype", "shape", "Tensor-likes", "None"):
        if f"{word} " in message:
            return word
    found = re.search(r"(\w+(?:Error|Exception))", message)
    return found[1] if found else ""


def _shorter(program: Program) -> Iterator[Program]:
    """Programs that are a little simpler, those that save most first."""
    lines = list(program.lines)
    for size in (len(lines) // 2, len(lines) // 4, 1):
        for start in range(len(lines) - size, -1, -size) if size else ():
            yield program.with_lines(lines[:start] + lines[start + size :])
    for n in reversed(range(len(lines))):
        yield from _without(program, n)
    if program.mesh != (2,):
        yield _on_axis(program)
    for n, line in enumerate(lines):
        for other in _simpler(line):
            yield program.with_lines([*lines[:n], other, *lines[n + 1 :]])


def _without(program: Program, n: int) -> Iterator[Program]:
    """The program without a statement, whose result something it was computed from replaces."""
    lines = list(program.lines)
    made = names_made(lines[n])
    if len(made) != 1:
        return
    for other in names_used(lines[n]):
        if re.fullmatch(r"[xy]\d+", other):
            rest = [re.sub(rf"\b{made[0]}\b", other, line) for line in lines[n + 1 :]]
            yield program.with_lines(lines[:n] + rest)


def _on_axis(program: Program) -> Program:
    """The program on a mesh of one axis of two ranks: of each list of placements, the first that does something."""

    def first(found: re.Match[str]) -> str:
        places = re.findall(r"\w+\((?:[^()]|\([^()]*\))*\)", found[0])
        kept = next((p for p in places if not p.startswith("Replicate")), "Replicate()")
        return f"[{re.sub(r', sizes=.*', ')', kept)}]"

    text = re.compile(r"\[(?:(?:Shard|Replicate|Partial)\((?:[^()]|\([^()]*\))*\)(?:, )?)+\]")
    return Program((2,), tuple(text.sub(first, line) for line in program.lines))


def _simpler(line: str) -> Iterator[str]:
    """A statement with a smaller shape, fewer cuts, or less around it."""
    shape = _SHAPE.search(line)
    if shape:
        sizes = ast.literal_eval(shape[1])
        for dim, size in enumerate(sizes):
            for smaller in (2, size - 1):
                if 0 < smaller < size:
                    new = (*sizes[:dim], smaller, *sizes[dim + 1 :])
                    yield re.sub(r", sizes=\([\d, ]*\)", "", line.replace(shape[1], str(new), 1))
    for placement in re.findall(r"(?:Shard|Partial)\((?:[^()]|\([^()]*\))*\)", line):
        yield line.replace(placement, "Replicate()", 1)
    if "sizes=" in line:
        yield re.sub(r", sizes=\([\d, ]*\)", "", line)
    if "with torch.no_grad(): " in line:
        yield line.replace("with torch.no_grad(): ", "")
    if ", grad=True" in line:
        yield line.replace(", grad=True", ", grad=False")
    if "torch.float64" not in line and "tensor(" in line:
        yield re.sub(r"torch\.\w+, seed", "torch.float64, seed", line)
    if "second(" in line:
        yield line.replace("second(", "grads(")
    for many in re.findall(r"(?:weigh\(|, \[)(\w+(?:, \w+)+)[\])]", line):
        for name in many.split(", "):
            yield line.replace(many, ", ".join(other for other in many.split(", ") if other != name))
