"""What holds for a part of the program: `strict()`, and which op's program is running."""

from __future__ import annotations

import threading
from typing import Any, NoReturn

from shardwise.errors import StrictError
from shardwise.layout import Layout


class _OfThread(threading.local):
    """What holds in one thread."""

    depth = 0  # of strict() blocks
    switched = False  # whether strict.enable() was called last
    op: str | None = None  # whose program is running
    replicating = 0  # depth of implicit_replication() blocks
    hidden: list[Any] | None = None  # transforms of torch.func under way that torch does not see at the moment
    compiling: dict[str, Any] | None = None  # options of torch.compile for what ranks run of a function of torch's
    applying = False  # whether `custom_function`, which knows distributed tensors, is applying an autograd.Function


of_thread = _OfThread()


class strict:
    """Raise on any communication that the program did not ask for: as a context manager, or as a switch.

    It applies to the thread that enters it or switches it on.

    >>> with strict():
    ...     pass
    >>> strict.enable(); strict.disable()
    """

    def __enter__(self) -> strict:
        of_thread.depth = of_thread.depth + 1
        return self

    def __exit__(self, *exc: object) -> None:
        of_thread.depth -= 1

    @staticmethod
    def enable() -> None:
        """From now on, communication that the program did not ask for raises."""
        of_thread.switched = True

    @staticmethod
    def disable() -> None:
        """Undo `enable`."""
        of_thread.switched = False


def is_strict() -> bool:
    """Whether communication that the program did not ask for raises."""
    return of_thread.depth > 0 or of_thread.switched


class relaxed:
    """Inside, communication counts as asked for: the library does what the program requested."""

    def __enter__(self) -> None:
        self.saved = (of_thread.depth, of_thread.switched)
        of_thread.depth, of_thread.switched = 0, False

    def __exit__(self, *exc: object) -> None:
        of_thread.depth, of_thread.switched = self.saved


class running:
    """Inside, the program that a rule has for an op is running. The user asked for the op, not for the moves that its
    program makes: strict() refuses them, and the ledger notes them under the name of the op."""

    def __init__(self, op: str) -> None:
        self.op = op

    def __enter__(self) -> None:
        self.outer, of_thread.op = of_thread.op, self.op

    def __exit__(self, *exc: object) -> None:
        of_thread.op = self.outer


def running_op() -> str | None:
    """The name of the op whose program is running, if any."""
    return of_thread.op


def refuse_in_program(op: str, here: Layout, there: str) -> NoReturn:
    """Raise under strict(), and say what the program of an op would move."""
    places = ", ".join(map(str, here.placements))
    raise StrictError(
        f"{op} would communicate under strict(): on the way it moves a tensor of shape {here.shape} from "
        f"[{places}] to {there}. Redistribute its operands first so that no dim it works along is cut"
    )


class implicit_replication:
    """Inside, plain tensors that are combined with distributed ones count as replicated, also under strict().

    So do tensors on a sub-mesh (`mesh["tp"]`) that are combined with tensors on the whole mesh: they are assumed to be
    the same along the axes that they do not have. Outside of this block such a call raises, since each group of the
    sub-mesh may hold a different tensor.

    >>> with strict(), implicit_replication():
    ...     pass
    """

    def __enter__(self) -> implicit_replication:
        of_thread.replicating = of_thread.replicating + 1
        return self

    def __exit__(self, *exc: object) -> None:
        of_thread.replicating -= 1


def refuses_plain() -> bool:
    """Whether a plain tensor may not meet a distributed one."""
    return is_strict() and not of_thread.replicating
