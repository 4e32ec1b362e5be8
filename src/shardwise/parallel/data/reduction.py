"""The buckets of all units: which gradients are reduced when, in the same order on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.parallel.data.gradients import GradBucket


class Reduction:
    """The order in which the buckets of one module are reduced, and how far the present backward pass has come.

    Args:
        buckets: in the order of their reductions.
        one_at_a_time: whether a reduction must end before the next begins, because no rank has room for all gradients.
    """

    def __init__(self, buckets: Sequence[GradBucket], one_at_a_time: bool) -> None:
        self.buckets, self.one_at_a_time = list(buckets), one_at_a_time
        self._bucket_of = {leaf: bucket for bucket in buckets for leaf in bucket.places}
        self._started = 0
        self._in_flight: list[GradBucket] = []

    def begin(self) -> None:
        """Get ready for another backward pass."""
        self._started = 0
        for bucket in self.buckets:
            bucket.begin()

    def take(self, leaf: torch.Tensor, scale: float) -> None:
        """Take the gradient of a leaf, times `scale`, and start the reductions that have all they need."""
        bucket = self._bucket_of[id(leaf)]
        bucket.take(leaf, scale)
        bucket.missing.discard(id(leaf))
        if self.one_at_a_time and 2 * len(bucket.missing) < len(bucket.places):  # the one before has had its time
            self._finish_all()
        if not bucket.missing:
            self._start(scale, everything=False)

    def _start(self, scale: float, everything: bool) -> None:
        """Start the reductions whose turn it is and that miss nothing, or all that are left."""
        while self._started < len(self.buckets) and (everything or not self.buckets[self._started].missing):
            bucket = self.buckets[self._started]
            self._started += 1
            if self.one_at_a_time:
                self._finish_all()
            bucket.start(scale)
            self._in_flight.append(bucket)

    def finish(self, scale: float) -> None:
        """Reduce what is left; afterwards every parameter has its gradient."""
        self._start(scale, everything=True)
        self._finish_all()

    def _finish_all(self) -> None:
        while self._in_flight:
            self._in_flight.pop(0).finish()

    def give_up(self) -> None:
        """The backward pass failed: wait for what is under way, and drop what came of the pass."""
        while self._in_flight:
            self._in_flight.pop(0).drop()
        for bucket in self.buckets:
            bucket.matrices = None
