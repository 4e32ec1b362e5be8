"""A state as a tree: what is a tensor, what is a value, and the names they have in files.

The name of a tensor is its path, joined by dots: `{"model": model}` gives `model.layers.0.weight`, and a model alone
gives `layers.0.weight`, as other programs call it. The tree itself, with the kinds of containers and the values, is
JSON in the manifest.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from shardwise.errors import CheckpointError

Json: TypeAlias = Any  # what json.loads gives
Node: TypeAlias = dict[str, Json]  # {kind: content}: "dict", "list", "tuple", "state", "tensor", "array" or "value"
Value: TypeAlias = object  # whatever a state may have in it


@dataclass
class Flat:
    """The tensors and the values of a state by name, and its tree."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Json] = field(default_factory=dict)  # the nodes of values
    tree: Node = field(default_factory=dict)


def is_stateful(value: Value) -> bool:
    """Whether it has a state dict to save: a module, an optimizer, a scheduler, anything with the two methods."""
    return (
        callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
        and not isinstance(value, type)
    )


def state_of(value: Value) -> Json:
    """The state dict of an object that has one."""
    return value.state_dict()  # type: ignore[attr-defined]


def joined(name: str, key: Value) -> str:
    return f"{name}.{key}" if name else str(key)


def flatten(state: Value) -> Flat:
    """Take a state apart.

    Raises:
        TypeError: Something in it is neither a tensor nor a value that JSON can say.
        CheckpointError: Two entries would have one name, or the state contains itself.
    """
    flat = Flat()
    try:
        flat.tree = _node(state, "", flat)
    except RecursionError:
        raise CheckpointError("the state is nested too deeply, or contains itself") from None
    return flat


def _node(value: Value, name: str, flat: Flat) -> Node:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        _check_name(name)
        if name in flat.values:
            raise _twice(name)
        _add(flat.tensors, name, value if isinstance(value, torch.Tensor) else _of_array(value, name))
        return {"array" if isinstance(value, np.ndarray) else "tensor": name}
    if is_stateful(value):
        return {"state": _node(state_of(value), name, flat)}
    if isinstance(value, Mapping):
        return {"dict": [[_value(k, name), _node(v, joined(name, k), flat)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)) and type(value) is not torch.Size:
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_node(v, joined(name, i), flat) for i, v in enumerate(value)]}
    said = _value(value, name)
    _add(flat.values, name, said)
    if name in flat.tensors:
        raise _twice(name)
    return {"value": said}


def _add(found: dict, name: str, value: Value) -> None:
    if name in found:
        raise _twice(name)
    found[name] = value


def _twice(name: str) -> CheckpointError:
    return CheckpointError(
        f"two entries of the state are called {name!r} once their keys are joined by dots; rename one"
    )


def _check_name(name: str) -> None:
    """Raise where a safetensors file has no room for a tensor of this name."""
    odd = not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name)
    if odd or name == "__metadata__":
        raise CheckpointError(f"a tensor cannot be called {name!r} in a file; rename it")


def _of_array(value: np.ndarray, name: str) -> torch.Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: a numpy array of dtype {value.dtype} cannot be saved: {error}") from error


# -- values --------------------------------------------------------------------------------------------------
def _value(value: Value, name: str) -> Json:
    """A value in JSON: what JSON has no word for is a list of a kind and a text."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, (float, np.floating)) and not _loses_digits(value):
        return float(value) if math.isfinite(value) else ["float", str(float(value))]
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, complex):
        return ["complex", [_value(value.real, name), _value(value.imag, name)]]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", base64.b64encode(value).decode()]
    if isinstance(value, torch.Size):
        return ["size", list(value)]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, tuple):  # a key of a mapping
        return ["tuple", [_value(v, name) for v in value]]
    raise TypeError(
        f"{name or 'state'}: a {type(value).__name__} cannot be saved; a state has tensors, numbers, strings, bytes, "
        f"None, lists, tuples and dicts of those, and objects with state_dict() and load_state_dict()"
    )


def _loses_digits(value: float | np.floating) -> bool:
    """Whether a number has more digits than Python's own (numpy.longdouble may)."""
    return value == value and value != float(value)


_READ: dict[str, Callable[..., Value]] = {
    "float": float,
    "complex": lambda parts: complex(float(value_of(parts[0])), float(value_of(parts[1]))),
    "bytes": base64.b64decode,
    "size": torch.Size,
    "dtype": lambda text: getattr(torch, text),
    "tuple": lambda parts: tuple(map(value_of, parts)),
}


def value_of(said: Json) -> Json:
    """The value that a node says.

    >>> value_of(_value(float("inf"), ""))
    inf
    """
    if isinstance(said, list):
        kind, inside = said
        return _READ[str(kind)](inside)
    return said


def walk(node: Node, name: str = "") -> list[tuple[str, str, Json]]:
    """The name, the kind ("tensor", "array" or "value") and the content of every leaf below a node."""
    ((kind, inside),) = node.items()
    if kind == "state":
        return walk(inside, name)
    if kind == "dict":
        return [leaf for key, child in inside for leaf in walk(child, joined(name, value_of(key)))]
    if kind in ("list", "tuple"):
        return [leaf for i, child in enumerate(inside) for leaf in walk(child, joined(name, i))]
    return [(name, kind, inside)]


class Lookup:
    """Finds children of nodes of one tree by key; what it has looked at once it finds at once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Node, dict[Value, Node]]] = {}  # by id: the node is kept, so that the id stays its

    def __call__(self, node: Node | None, key: Value) -> Node | None:
        """The node under a key of a container; None where there is none."""
        return None if node is None else self.children(node).get(key)

    def children(self, node: Node) -> dict[Value, Node]:
        """What a container has in it."""
        found = self._known.get(id(node))
        if found is None:
            found = self._known[id(node)] = (node, self._children(node))
        return found[1]

    def _children(self, node: Node) -> dict[Value, Node]:
        ((kind, inside),) = node.items()
        if kind == "state":
            return self.children(inside)
        if kind == "dict":
            return {value_of(key): child for key, child in inside}
        return dict(enumerate(inside)) if kind in ("list", "tuple") else {}


def built(node: Node, tensor_of: Callable[[str], torch.Tensor], *, arrays: bool = True) -> Value:
    """The state that a node says, with the tensors that `tensor_of` gives for names; without `arrays`, numpy arrays are
    tensors too."""
    ((kind, inside),) = node.items()
    if kind == "state":
        return built(inside, tensor_of, arrays=arrays)
    if kind == "dict":
        return {value_of(key): built(child, tensor_of, arrays=arrays) for key, child in inside}
    if kind in ("list", "tuple"):
        made = [built(child, tensor_of, arrays=arrays) for child in inside]
        return made if kind == "list" else tuple(made)
    if kind in ("tensor", "array"):
        found = tensor_of(str(inside))
        return found.numpy() if kind == "array" and arrays else found
    return value_of(inside)


def flat_tree(names: Sequence[str], values: Mapping[str, Json]) -> Node:
    """The tree of a file that has names only."""
    entries: list[Json] = [[name, {"tensor": name}] for name in names]
    entries += [[name, {"value": value}] for name, value in values.items()]
    return {"dict": entries}


def nested(leaves: Mapping[str, Node], like: Value) -> Node:
    """A tree from names whose parts are joined by dots. What is a list and what a dict follows from an object of the
    same form as far as it goes; beyond it, numbers from 0 on are those of a list."""
    ((first, only),) = list(leaves.items())[:1]
    if not first and len(leaves) == 1:
        return only
    children: dict[str, dict[str, Node]] = {}
    for name, leaf in leaves.items():
        head, _, rest = name.partition(".")
        children.setdefault(head, {})[rest] = leaf
    counted = list(children) == [str(i) for i in range(len(children))]
    if counted and not isinstance(like, Mapping):
        kind = "tuple" if isinstance(like, tuple) else "list"
        items = list(like) if isinstance(like, (list, tuple)) else []
        return {kind: [nested(c, items[i] if i < len(items) else None) for i, c in enumerate(children.values())]}
    known = {str(key): key for key in like} if isinstance(like, Mapping) else {}
    keys = {head: known.get(head, int(head) if head.isdigit() else head) for head in children}
    inner = like if isinstance(like, Mapping) else {}
    return {"dict": [[_value(keys[h], h), nested(child, inner.get(keys[h]))] for h, child in children.items()]}
