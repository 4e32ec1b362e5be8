"""The layout of what `--help` shows: prose is wrapped to the terminal, examples stay as they are written."""

from __future__ import annotations

import argparse
import textwrap

_INDENT = 2  # columns that a list is indented


class Help(argparse.RawDescriptionHelpFormatter):
    """Paragraphs with an indented line are examples or code."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, indent_increment=_INDENT, max_help_position=26)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += _INDENT  # commands are indented, which argparse forgets

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = (textwrap.dedent(block).rstrip() for block in text.split("\n\n"))
        return "\n\n".join(block if "\n  " in block else textwrap.fill(block, width) for block in blocks)
