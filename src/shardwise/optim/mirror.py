"""A dict of an optimizer (its attributes, the options of a group) as a step on local tensors sees it."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.tensor import DTensor

_NOTHING = object()


class Mirror:
    """A copy of a dict in which DTensors (a learning rate, a gradient scale) are plain tensors.

    `enter` brings the copy to what the dict holds now, `leave` puts what was changed on the copy into the dict. What
    somebody else changed in the dict in between stays, unless the copy was changed at the same key.
    """

    def __init__(self, skip: tuple[str, ...]) -> None:
        self.inner: dict[str, Any] = {}
        self._skip = skip  # keys under which the copy holds something of its own
        self._entered: dict[str, Any] = {}
        self._tensors: list[tuple[str, DTensor, int]] = []  # DTensors, and the version of their plain tensors

    def enter(self, outer: dict[str, Any], **own: Any) -> dict[str, Any]:
        """The copy, the same object at every call, with `own` in place of the skipped keys."""
        inner = self.inner
        inner.clear()
        inner.update(outer)
        self._tensors = []
        for key, value in outer.items():
            if isinstance(value, DTensor):
                inner[key] = whole = value.full_tensor().detach()
                self._tensors.append((key, value, whole._version))
        inner.update(own)
        self._entered = inner.copy()
        return inner

    def leave(self, outer: dict[str, Any]) -> None:
        """Put what was changed on the copy since `enter` into the dict."""
        inner, entered = self.inner, self._entered
        for key, value in inner.items():
            if value is not entered.get(key, _NOTHING) and key not in self._skip:
                outer[key] = value
        if inner.keys() != entered.keys():
            for key in entered.keys() - inner.keys():
                outer.pop(key, None)
        for key, tensor, version in self._tensors:  # written in place
            whole = inner.get(key)
            if whole is entered[key] and whole._version != version:
                with torch.no_grad():
                    tensor.copy_(whole)
        self._entered, self._tensors = {}, []
