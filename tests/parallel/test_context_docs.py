"""The examples of docs/context.md run and print what the page shows."""

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "context.md"


def test_examples():
    text, names, out = PAGE.read_text(), {"__name__": "page"}, io.StringIO()
    with contextlib.redirect_stdout(out):
        for block in re.findall(r"```python\n(.*?)```", text, re.S):
            exec(compile(block, "context.md", "exec"), names)
    shown = "".join(re.findall(r"```\n(.*?)```", re.sub(r"```python\n.*?```", "", text, flags=re.S), re.S))
    assert out.getvalue() == shown
