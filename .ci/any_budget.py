"""How many annotations in src/ are a bare `Any`: never more than the budget, which only goes down.

python .ci/any_budget.py
"""

import ast
import sys
from pathlib import Path

BUDGET = 673

found: dict[str, int] = {}
for path in Path("src").rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            args = node.args
            every = [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg))]
            notes = [*(arg.annotation for arg in every), node.returns]
        elif isinstance(node, ast.AnnAssign):
            notes = [node.annotation]
        else:
            continue
        count = sum(isinstance(note, ast.Name) and note.id == "Any" for note in notes)
        if count:
            found[str(path)] = found.get(str(path), 0) + count

total = sum(found.values())
if total > BUDGET:
    worst = sorted(found.items(), key=lambda item: -item[1])[:10]
    print(f"{total} annotations are a bare Any, the budget is {BUDGET}. Say the type. Most are in:")
    print("\n".join(f"  {count:4} {path}" for path, count in worst))
    sys.exit(1)
print(f"bare Any: {total} of a budget of {BUDGET}" + ("; lower the budget" if total < BUDGET else ""))
