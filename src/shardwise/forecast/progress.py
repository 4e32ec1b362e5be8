"""A bar that shows how far playing is, on terminals."""

from __future__ import annotations

from rich.console import Console
from rich.errors import LiveError
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Bar(Progress):
    """Ops so far, and once a step is done, how many there will be. Shows nothing where stderr is no terminal, and where
    another bar is being shown.

    Args:
        steps: How many steps are played each time.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        console = Console(stderr=True)
        words = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[ops]}")
        shown = SpinnerColumn(), *words, TimeElapsedColumn()
        super().__init__(*shown, console=console, transient=True, disable=not console.is_terminal)
        self._task = self.add_task("playing", total=None, ops="")

    def start(self) -> None:
        """Show it."""
        try:
            super().start()
        except LiveError:  # another one is shown
            self.disable = True

    def playing(self, what: str) -> None:
        """Something else is played from now on."""
        self.reset(self._task, total=None, description=f"playing {what}", ops="")

    def told(self, done: int, ops: int) -> None:
        """So many steps and ops are done."""
        if done and self.tasks[0].total is None:  # a step is like the one before
            self.update(self._task, total=ops * self._steps // done)
        self.update(self._task, completed=ops, ops=f"{ops:,} ops, {done} of {self._steps} steps")

    def say(self, what: str) -> None:
        """Print a line above the bar."""
        self.console.print(what, highlight=False, soft_wrap=True)
