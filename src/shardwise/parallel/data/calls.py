"""Forwards that are under way, known by the Python frames that called the hooks before them.

A module may call itself, or a method that is registered as a forward: only the outermost of these calls ends the
forward. A call that was interrupted (Ctrl-C in a notebook) never tells that it ended; its frame does.
"""

from __future__ import annotations

from types import FrameType


class Calls:
    """The forwards of one unit that are under way, the outermost first."""

    def __init__(self) -> None:
        self._frames: list[FrameType] = []

    def begin(self, frame: FrameType) -> None:
        self._frames.append(frame)

    def end(self, frame: FrameType) -> None:
        """The forward that this frame began is over, if it began one; so are those whose frames have ended."""
        if self._frames and self._frames[-1] is frame:
            self._frames.pop()
        self._drop_ended()

    def forget(self) -> None:
        self._frames.clear()

    def __bool__(self) -> bool:
        self._drop_ended()
        return bool(self._frames)

    def _drop_ended(self) -> None:
        while self._frames and _has_ended(self._frames[-1]):
            self._frames.pop()


def _has_ended(frame: FrameType) -> bool:
    try:
        frame.clear()  # torch's frame, or one of this package; of one that runs, Python refuses it
    except RuntimeError:
        return False
    return True
