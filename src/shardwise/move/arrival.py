"""A move under way. Whoever needs the values first waits for it; an error is raised to all who ask."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from shardwise.comm.record import user_line
from shardwise.errors import MoveError, RanksDifferError
from shardwise.protocols import LocalValue

Finish = Callable[[], object]


class Arrival:
    """The local value that a move will have filled, given to those who wait for it.

    The source is read until the move is done, so a write to it in the meantime is an error.

    Args:
        local: The value that is coming.
        finish: Waits for it.
        sources: The tensors it is read from, and their versions when the move began.
        what: The source in words.
    """

    def __init__(
        self, local: LocalValue, finish: Finish, sources: Sequence[tuple[torch.Tensor, int]], what: str
    ) -> None:
        self.local, self.what, self.line = local, what, user_line()
        self._finish: Finish | None = finish
        self._sources = sources
        self._error: Exception | None = None
        self._lock = threading.Lock()

    @property
    def failed(self) -> bool:
        """Whether it is known that the value will not come."""
        return self._error is not None

    def wait(self) -> LocalValue:
        """The value, once it is there. Every call raises what the first one raised."""
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                self._run(finish)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self.local

    def _run(self, finish: Finish) -> None:
        sources, self._sources = self._sources, ()
        try:
            finish()
        except RanksDifferError:  # found before the wait: the values still come
            self._finish, self._sources = finish, sources
            raise
        except Exception as error:
            self._error = error
        except BaseException as error:
            self._error = MoveError(
                f"the wait for the move of {self.what}, begun at {self.line}, was ended by a {type(error).__name__}: "
                f"its values never came; begin it anew"
            )
            raise
        else:
            if any(source._version != version for source, version in sources):
                self._error = MoveError(
                    f"{self.what} was written to while a move of it was under way, begun at {self.line} with "
                    f"async_op=True: the result may hold old and new values. Wait for the result before the write, or "
                    f"move a clone()"
                )


def versions_of(values: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """Tensors with their versions; those of inference mode have none."""
    return [(value, value._version) for value in values if not value.is_inference()]
