"""How large the files and functions in src/ are, and how much of it is code: within the limits below, or it fails.

python .ci/sizes.py
"""

import ast
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

LIMITS = {"median file": 150, "largest file": 500, "p95 function": 25, "imports inside functions": 0}

Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def documented(tree: ast.AST) -> Iterator[int]:
    """The lines of docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *Function)) and ast.get_docstring(node, clean=False) is not None:
            yield from range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def lines_of_code(text: str, tree: ast.AST) -> int:
    """Lines without docstrings, comments and blanks."""
    words = set(documented(tree))
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(bool(line) and not line.startswith("#") and number not in words for number, line in lines)


def imports_inside(function: ast.AST) -> int:
    return sum(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.walk(function))


files, functions, code, inside = [], [], 0, 0
for path in Path("src").rglob("*.py"):
    text = path.read_text()
    tree = ast.parse(text)
    found = [node for node in ast.walk(tree) if isinstance(node, Function)]
    files.append(len(text.splitlines()))
    functions += [(node.end_lineno or 0) - node.lineno + 1 for node in found]
    code += lines_of_code(text, tree)
    inside += sum(map(imports_inside, found))

measured = {
    "median file": round(statistics.median(files)),
    "largest file": max(files),
    "p95 function": round(statistics.quantiles(functions, n=20)[-1]),
    "imports inside functions": inside,
}
print(f"{len(files)} files, {sum(files):,} lines, {code:,} of them code; {len(functions):,} functions")
for name, value in measured.items():
    print(f"{name}: {value} of at most {LIMITS[name]}")
sys.exit(any(value > LIMITS[name] for name, value in measured.items()))
