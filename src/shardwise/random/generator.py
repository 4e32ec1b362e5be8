"""Where the keys come from. The stream is torch's own CPU generator: each random op on distributed tensors draws one
64-bit key from it, and the key and the elements' numbers give the rest.

So whatever seeds, saves, restores or forks torch's CPU generator does the same to this stream: `torch.manual_seed`,
`torch.get_rng_state`, `torch.random.fork_rng`, activation checkpointing, training frameworks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import numpy as np
import torch

from shardwise.errors import ShardwiseError, check_type
from shardwise.random.philox import words
from shardwise.torch_private.autograd import current_node
from shardwise.torch_private.tensors import count_dispatch_modes, without_modes

PHILOX, TORCH = "philox", "torch"
_LOWEST = -(1 << 63)


class Generator(torch.Generator):
    """A stream of its own, good wherever torch takes a generator. Seed it alike on all ranks.

    Example:
        >>> generator = Generator().manual_seed(3)
        >>> child = generator.fork()
    """

    def fork(self) -> Generator:
        """Return a new generator whose stream is independent of this one. This one advances by one key."""
        child = Generator(self.device)
        child.manual_seed(next_key(self) >> 1)
        return child


def manual_seed(seed: int) -> torch.Generator:
    """Seed the random stream of this rank. Call it with the same seed on all ranks. `torch.manual_seed` does the same.

    Args:
        seed: Any int that torch takes.

    Returns:
        torch's default generator.

    Raises:
        ValueError: `seed` is a tensor of several numbers.
    """
    check_type(seed, (int, float, torch.Tensor), "manual_seed: seed", "give an int")
    if isinstance(seed, torch.Tensor) and seed.numel() != 1:
        raise ValueError(f"manual_seed: seed is a tensor of shape {tuple(seed.shape)}; give an int")
    return torch.manual_seed(seed)


def get_state() -> torch.Tensor:
    """Return the state of the stream, for `set_state`."""
    return torch.default_generator.get_state()


def set_state(state: torch.Tensor) -> None:
    """Go on from a state that `get_state` gave.

    Args:
        state: What `get_state` returned.

    Raises:
        TypeError: It is something else.
    """
    check_type(state, torch.Tensor, "random.set_state: state", "give what get_state() gave")
    if state.dtype != torch.uint8:
        raise TypeError(
            f"random.set_state: state must be of torch.uint8, got {state.dtype}; give what get_state() gave"
        )
    torch.default_generator.set_state(state)


@contextlib.contextmanager
def fork() -> Iterator[None]:
    """Draw inside what you like: outside, the stream goes on as if nothing had been drawn."""
    state = get_state()
    try:
        yield
    finally:
        set_state(state)


def next_key(generator: torch.Generator | None = None) -> int:
    """A new key: 64 bits drawn from a generator (default: torch's)."""
    generator = torch.default_generator if generator is None else generator
    if generator.device.type == "cpu":
        with without_modes() if count_dispatch_modes() else contextlib.nullcontext():  # a fake tensor has no value
            number = torch.empty((), dtype=torch.int64, device="cpu").random_(_LOWEST, None, generator=generator)
            return int(number) % (1 << 64)
    # a GPU's generator counts: take the next count, without waiting for the GPU
    offset = generator.get_offset()
    generator.set_offset(offset + 4)
    return int(words(np.array([offset]), generator.initial_seed()).pairs()[0, 0])


class _Chosen(threading.local):
    stream: str | None = None


_chosen = _Chosen()
_chosen_last = [PHILOX]  # by any thread: what a thread of autograd draws from, which cannot choose


class use:
    """Choose how this thread draws numbers: for good or, as a context manager, for a while.

    Other threads are not affected. Where a backward pass draws (activation checkpointing) and autograd runs it on a
    thread of its own, as for a GPU, the stream chosen last holds.

    Args:
        stream: "philox" (the default): every rank makes its own elements, from a key and their place in the global
            tensor. "torch": exactly plain torch's numbers on one device; every rank draws them all and keeps its part.

    Raises:
        UnknownStream: There is no such stream.

    Example:
        >>> with use("torch"):
        ...     pass
    """

    def __init__(self, stream: str) -> None:
        if stream not in (PHILOX, TORCH):
            raise UnknownStream(f"use: stream = {stream!r}; give 'philox' or 'torch'")
        self.before = _chosen.stream
        _chosen.stream = _chosen_last[0] = stream

    def __enter__(self) -> use:
        return self

    def __exit__(self, *exc: object) -> None:
        _chosen.stream = self.before
        _chosen_last[0] = self.before or PHILOX


def stream() -> str:
    """The name of the stream that this thread draws from."""
    own = _chosen.stream
    if own is None:
        return PHILOX if current_node() is None else _chosen_last[0]
    return own


class UnknownStream(ShardwiseError, ValueError):
    """There is no stream of that name."""
