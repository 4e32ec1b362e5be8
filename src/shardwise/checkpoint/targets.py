"""What a load writes into: the tensors of `into` by name, and the values that are put in afterwards."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import numpy as np
import torch
from torch import nn

from shardwise.checkpoint.files import Entry
from shardwise.checkpoint.holders import held
from shardwise.checkpoint.tree import (
    Json,
    Lookup,
    Node,
    Value,
    built,
    flatten,
    is_stateful,
    joined,
    nested,
    state_of,
    walk,
)
from shardwise.errors import CheckpointError
from shardwise.torch_private.loading import loads_itself

_EXTRA = "_extra_state"


@dataclass
class Targets:
    """The tensors to load into, by name; what the checkpoint lacks; and what of it was asked for."""

    entries: Mapping[str, Entry]
    values: Mapping[str, Json]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    absent: dict[str, torch.Tensor] = field(default_factory=dict)  # those of `missing` that are tensors
    taken: set[str] = field(default_factory=set)
    below: Lookup = field(default_factory=Lookup)
    from_names: dict[str, Node | None] = field(default_factory=dict)  # what `_node` has made
    own: dict[str, dict[str, Value]] = field(default_factory=dict)  # states that modules and optimizers load themselves

    @cached_property
    def _leaves(self) -> dict[str, Node]:
        """The nodes of all tensors and values by name."""
        tensors: dict[str, Node] = {leaf: {"tensor": leaf} for leaf in self.entries}
        return tensors | {leaf: {"value": said} for leaf, said in self.values.items()}

    def _keys(self, node: Node | None) -> list[Json]:
        return [] if node is None else list(self.below.children(node))

    def _node(self, node: Node | None, name: str, state: Value) -> Node | None:
        """The node of an object; of a checkpoint that has names only, one made from them, shaped as its state is."""
        if node is None and name not in self.from_names:
            leaves = self._leaves
            below = {leaf.removeprefix(f"{name}."): at for leaf, at in leaves.items() if leaf.startswith(f"{name}.")}
            self.from_names[name] = nested(below, state) if below else leaves.get(name)
        return self.from_names.get(name) if node is None else node

    def _load_state(self, into: Value, state: Value, name: str) -> None:
        try:
            into.load_state_dict(state)  # type: ignore[attr-defined]
        except Exception as error:
            raise CheckpointError(
                f"{name!r}: load_state_dict of {type(into).__name__} raised {type(error).__name__}: {error}; the "
                f"tensors of `into` have their new values, and so have the objects and values before this one"
            ) from error

    # -- first: which tensors ---------------------------------------------------------------------------------
    def collect(self, into: Value, node: Node | None, name: str = "") -> None:
        """Find what is to be loaded into `into`, which has the node's place in the checkpoint's tree."""
        if isinstance(into, np.ndarray):
            if not into.flags.writeable:
                raise CheckpointError(f"{name!r}: the numpy array in `into` is read-only; give a copy of it")
            self._tensor(name, _view_of(into, name))
        elif isinstance(into, torch.Tensor):
            self._tensor(name, into)
        elif isinstance(into, nn.Module):
            self._module(into, node, name)
        elif isinstance(into, torch.optim.Optimizer):
            self._optimizer(into, node, name)
        elif is_stateful(into):
            self._stateful(state_of(into), node, name)
        elif isinstance(into, Mapping):
            self._entries(into, node, name)
        elif isinstance(into, (list, tuple)) and not _is_value(into):
            for i, item in enumerate(into):
                self.collect(item, self.below(node, i), joined(name, i))
        elif isinstance(into, (list, tuple)) and node is not None and not _is_values(node):
            raise CheckpointError(f"{name!r}: a list of values in `into`, but the checkpoint has tensors there")
        else:
            self._value(name, node, into)

    def _tensor(self, name: str, tensor: torch.Tensor) -> None:
        if name in self.entries:
            self.tensors[name] = tensor
            self.taken.add(name)
        elif name in self.values:
            raise CheckpointError(f"{name!r}: a tensor in `into`, but a value in the checkpoint: {self.values[name]!r}")
        else:
            self.missing.append(name)
            self.absent[name] = tensor

    def _entries(self, into: Mapping[Json, Value], node: Node | None, name: str) -> None:
        for key, item in into.items():
            self.collect(item, self.below(node, key), joined(name, key))

    def _module(self, module: nn.Module, node: Node | None, name: str) -> None:
        """The entries of a module's state dict. Where some are values or copies (made by hooks, or by the module
        itself), or the module has hooks for loading, all goes to its own `load_state_dict` afterwards."""
        state = module.state_dict()
        for key, item in state.items():
            if key.rpartition(".")[2] == _EXTRA:
                self._stateful(item, self.below(node, key), joined(name, key))
            else:
                self.collect(item, self.below(node, key), joined(name, key))
        known = {memory for tensor in (*module.parameters(), *module.buffers()) for memory in _memories(tensor)}
        items = [item for key, item in state.items() if key.rpartition(".")[2] != _EXTRA]
        in_place = all(isinstance(item, torch.Tensor) and known.issuperset(_memories(item)) for item in items)
        if loads_itself(module) or not in_place:
            self.own[name] = state

    def _value(self, name: str, node: Node | None, into: Value) -> None:
        node = self._node(node, name, into)
        found = [leaf for leaf, _, _ in walk(node, name)] if node is not None else [name]
        if any(leaf in self.entries for leaf in found):
            raise CheckpointError(f"{name!r}: a value in `into`, but a tensor in the checkpoint")
        if node is None and name not in self.values:
            self.missing.append(name)
        self.taken.update(found)

    def _optimizer(self, optimizer: torch.optim.Optimizer, node: Node | None, name: str) -> None:
        """The states there are; those that are not there yet are made as the parameters are laid out. An optimizer
        with more than that, or with hooks for loading, gets all by its own `load_state_dict` afterwards."""
        state = optimizer.state_dict()
        more = [key for key in state if key not in ("state", "param_groups")]
        if more or loads_itself(optimizer):
            self.own[name] = state
        if not all(isinstance(i, int) for i in state.get("state", {"": None})):
            self._stateful(state, node, name)
            return
        node = self._node(node, name, state)
        for key in more:
            self._stateful(state[key], self.below(node, key), joined(name, key))
        params = params_of(optimizer)
        states = self.below(node, "state")
        for i in {**state["state"], **dict.fromkeys(self._keys(states))}:
            if not isinstance(i, int) or i >= len(params):
                raise CheckpointError(
                    f"{joined(name, 'state')}: state {i} in the checkpoint, of {len(params)} parameters"
                )
            here, there = state["state"].get(i, {}), self.below(states, i)
            for key in {**here, **dict.fromkeys(self._keys(there))}:
                full = joined(joined(joined(name, "state"), i), key)
                inside = self.below(there, key)
                if key in here and (inside is None or (isinstance(here[key], torch.Tensor) and full in self.entries)):
                    self.collect(here[key], inside, full)
                elif full in self.entries:
                    self._tensor(full, like(params[i], self.entries[full]))
                elif inside is not None:
                    for leaf, kind, _ in walk(inside, full):  # lists and the like come from the checkpoint as they are
                        self.taken.add(leaf)
                        if kind != "value":
                            self.tensors[leaf] = like(params[i], self.entries[leaf])
        groups = self.below(node, "param_groups")
        if groups is not None:
            ((_, inside),) = groups.items()
            if len(inside) != len(optimizer.param_groups):
                raise CheckpointError(
                    f"{name!r}: {len(inside)} groups of parameters in the checkpoint, "
                    f"{len(optimizer.param_groups)} in the optimizer"
                )
            for i, group in enumerate(optimizer.param_groups):
                full, at = joined(joined(name, "param_groups"), i), self.below(groups, i)
                self._group(group, at, full)
                if name not in self.own:
                    self._check_order(group, at, full)
        elif not any(leaf.startswith(joined(name, "param_groups")) for leaf in self.values):
            self.missing.append(joined(name, "param_groups"))

    def _group(self, group: dict[str, Json], node: Node | None, name: str) -> None:
        """The options of a group of parameters."""
        numbers = len(self._keys(self.below(node, "params")))
        if numbers != len(group["params"]):
            raise CheckpointError(
                f"{name!r}: {numbers} parameters in the checkpoint, {len(group['params'])} in the optimizer"
            )
        for key in self._keys(node):
            for leaf, kind, _ in walk(self.below(node, key) or {}, joined(name, key)):
                self.taken.add(leaf)
                if kind != "value":
                    own, entry = group.get(str(key)), self.entries[leaf]
                    whole = isinstance(own, torch.Tensor) and leaf == joined(name, key)
                    made = own if whole else torch.zeros(entry.shape, dtype=entry.dtype)
                    self.tensors[leaf] = cast(torch.Tensor, made)

    def _check_order(self, group: dict[str, Json], node: Node | None, name: str) -> None:
        """Raise where parameters are known by name, and the states of one would go to another."""
        saved = self.below(node, "param_names")
        names = [] if saved is None else list(cast(Sequence[str], built(saved, self.tensors.__getitem__)))
        for i, own in enumerate(group.get("param_names", ())):
            if own in names and names[i : i + 1] != [own]:
                raise CheckpointError(
                    f"{name!r}: parameter {i} of the optimizer is {own!r}, in the checkpoint that is parameter "
                    f"{names.index(own)}; give the optimizer its parameters in the order of the checkpoint"
                )

    def _stateful(self, state: Value, node: Node | None, name: str) -> None:
        """Of an object that loads itself, all that the checkpoint has is taken; its own tensors are loaded in place."""
        node = self._node(node, name, state)
        if node is None:
            self.collect(state, None, name)
            return
        own = {joined(name, leaf) if name else leaf: tensor for leaf, tensor in flatten(state).tensors.items()}
        for leaf, kind, _ in walk(node, name):
            self.taken.add(leaf)
            if kind != "value":
                entry, mine = self.entries[leaf], own.get(leaf)
                fits = mine is not None and (tuple(mine.shape), mine.dtype) == (entry.shape, entry.dtype)
                self.tensors[leaf] = mine if fits and mine is not None else torch.empty(entry.shape, dtype=entry.dtype)

    @property
    def unexpected(self) -> list[str]:
        """What the checkpoint has and nobody asked for."""
        return [name for name in (*self.entries, *self.values) if name not in self.taken]

    # -- then: the values -------------------------------------------------------------------------------------
    def apply(self, into: Value, node: Node | None, name: str = "") -> Value:
        """Put the values in, after the tensors have theirs; what belongs in the place of `into`."""
        if isinstance(into, (torch.Tensor, np.ndarray)):
            return into
        if isinstance(into, nn.Module):
            self._apply_module(into, node, name)
        elif isinstance(into, torch.optim.Optimizer):
            self._apply_optimizer(into, node, name)
        elif is_stateful(into):
            node = self._node(node, name, None)
            if node is not None:
                self._load_state(into, built(node, self.tensors.__getitem__), name)
        elif isinstance(into, MutableMapping):
            for key, item in list(into.items()):
                new = self.apply(item, self.below(node, key), joined(name, key))
                if new is not item:
                    into[key] = new
        elif isinstance(into, (list, tuple)) and not _is_value(into):
            return self._apply_items(into, node, name)
        else:
            found = self._node(node, name, into)
            return into if found is None else _in_place(into, built(found, self.tensors.__getitem__))
        return into

    def _apply_items(self, into: Sequence[Value], node: Node | None, name: str) -> Value:
        new = [self.apply(item, self.below(node, i), joined(name, i)) for i, item in enumerate(into)]
        if isinstance(into, list):
            into[:] = new
            return into
        if all(a is b for a, b in zip(new, into)):
            return into
        return type(into)(*new) if hasattr(into, "_fields") else tuple(new)

    def _apply_module(self, module: nn.Module, node: Node | None, name: str) -> None:
        """What modules keep beside parameters and buffers: extra states, and what they load themselves."""
        state = self.own.get(name)
        for prefix, inner in module.named_modules():
            key = joined(prefix, _EXTRA)
            found = self._node(self.below(node, key), joined(name, key), None)
            if found is None:
                continue
            extra = built(found, self.tensors.__getitem__)
            if state is None:
                inner.set_extra_state(extra)
            else:
                state[key] = extra
        if state is not None:
            for key in [key for key in state if key.rpartition(".")[2] != _EXTRA]:
                state[key] = self.apply(state[key], self.below(node, key), joined(name, key))
            self._load_state(module, state, name)

    def _apply_optimizer(self, optimizer: torch.optim.Optimizer, node: Node | None, name: str) -> None:
        node = self._node(node, name, None)
        if name in self.own:
            own = self.own[name]
            nodes = {key: self.below(node, key) for key in own}
            theirs = {key: built(at, self.tensors.__getitem__) for key, at in nodes.items() if at is not None}
            self._load_state(optimizer, _over(own, theirs), name)
            return
        params, states = params_of(optimizer), self.below(node, "state")
        for i in self._keys(states):
            for key in self._keys(self.below(states, i)):
                full = joined(joined(joined(name, "state"), i), key)
                inside = self.below(self.below(states, i), key)
                if full in self.tensors:
                    optimizer.state[params[i]][key] = self.tensors[full]
                elif inside is not None:
                    optimizer.state[params[i]][key] = built(inside, self.tensors.__getitem__)
        groups = self.below(node, "param_groups")
        for i, group in enumerate(optimizer.param_groups):
            found = self.below(groups, i)
            for key in self._keys(found):
                inside = self.below(found, key)
                if key != "params" and inside is not None:
                    new = built(inside, self.tensors.__getitem__)
                    as_tuple = isinstance(group.get(str(key)), tuple) and isinstance(new, list)
                    group[str(key)] = tuple(new) if as_tuple and isinstance(new, list) else new


def _over(old: Value, new: Value) -> Value:
    """A new value, with what only the old one has where both are dicts."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    return {**old, **{key: _over(old.get(key), value) for key, value in new.items()}}


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters in the order in which state dicts number them."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def like(param: torch.Tensor, entry: Entry) -> torch.Tensor:
    """Room for a state of a parameter: laid out as it is where the shapes agree."""
    if entry.shape == tuple(param.shape) and entry.shape:
        return torch.zeros_like(param.detach(), dtype=entry.dtype)
    return torch.zeros(entry.shape, dtype=entry.dtype)


def _view_of(array: np.ndarray, name: str) -> torch.Tensor:
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name!r}: the numpy array in `into` cannot be loaded into: {error}") from error


def _memories(tensor: torch.Tensor) -> list[int]:
    """The pieces of memory that a tensor is in."""
    return [values.untyped_storage().data_ptr() for _, values in held(tensor)]


def _in_place(old: Value, new: Value) -> Value:
    """A new value for the place of an old one: lists stay the same lists, and named tuples get their names."""
    if isinstance(old, list) and isinstance(new, list):
        old[:] = new
        return old
    names = getattr(old, "_fields", None)
    if isinstance(new, tuple) and names is not None and len(new) == len(names):
        return type(old)(*new)  # type: ignore[call-arg]
    return new


def fixed_value(into: Value, name: str = "") -> str | None:
    """The name of a value that nothing can replace: it is in no dict and no list; None where there is none."""
    if isinstance(into, (torch.Tensor, np.ndarray, MutableMapping, list)) or is_stateful(into):
        return None
    if not isinstance(into, (Mapping, tuple)):
        return name
    items = into.items() if isinstance(into, Mapping) else enumerate(into)
    found = (fixed_value(item, joined(name, key)) for key, item in items)
    return next((at for at in found if at is not None), None)


def _is_value(item: Value) -> bool:
    """Whether it is a value, or a list or tuple of values only: the checkpoint's may be longer or shorter."""
    if isinstance(item, (list, tuple)):
        return all(map(_is_value, item))
    return not isinstance(item, (torch.Tensor, np.ndarray, Mapping)) and not is_stateful(item)


def _is_values(node: Node) -> bool:
    return all(kind == "value" for _, kind, _ in walk(node))
