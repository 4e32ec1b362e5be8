"""A move under way. The first use of its values waits for it; if it failed, every use raises the error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from shardwise.comm.record import user_line
from shardwise.errors import MoveError, RanksDifferError
from shardwise.protocols import LocalValue

Finish = Callable[[], object]


class Arrival:
    """The local value that a move is filling. `wait` returns it once it is complete.

    The source is read until the move is done, so a write to it in the meantime is an error.

    Args:
        local: The tensors that the move fills.
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
        """Whether the move is known to have failed."""
        return self._error is not None

    def wait(self) -> LocalValue:
        """The value, once the move is done. If the first call raised an error, every later one raises it too."""
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
        except RanksDifferError:  # found before the wait: the values still arrive
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
