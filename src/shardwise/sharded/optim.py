"""Optimizers for sharded parameters: any torch optimizer, run on the local shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import optim

from shardwise.errors import check_type
from shardwise.sharded.tensor import ShardedTensor, parts_of


class ShardedOptimizer(optim.Optimizer):
    """A torch optimizer over the local shards of sharded parameters, and over plain parameters.

    Steps are local. The state dict is keyed by the names of the parameters. State that has a value for each element of
    a sharded parameter is a ShardedTensor in it, so that it can be resharded with its parameter.

    Args:
        named_params: The parameters by name, such as `named_params_with_sharded_tensor` yields them.
        optimizer_class: The class of the optimizer.
        *optimizer_args: Passed to the class after the parameters.
        **optimizer_kwargs: Passed to the class after the parameters.
    """

    def __init__(
        self,
        named_params: Mapping[str, torch.Tensor],
        optimizer_class: type[optim.Optimizer],
        *optimizer_args: Any,
        **optimizer_kwargs: Any,
    ) -> None:
        check_type(named_params, (Mapping, Iterable), "ShardedOptimizer: named_params", "give parameters by name")
        pairs = list(named_params.items() if isinstance(named_params, Mapping) else named_params)
        for pair in pairs:
            if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[1], torch.Tensor):
                raise TypeError(f"ShardedOptimizer: named_params: expected names with tensors, got {pair!r}")
        if not callable(optimizer_class):
            raise TypeError(f"ShardedOptimizer: optimizer_class: expected a class, got {optimizer_class!r}")
        self.named_params = dict(pairs)  # on a rank without tiles the empty one: all ranks have the same state
        self._params = {name: parts_of(param) for name, param in self.named_params.items()}
        tensors = [t for held in self._params.values() for t in held]
        self._optim = optimizer_class(tensors, *optimizer_args, **optimizer_kwargs)

    # What an Optimizer keeps is kept by the optimizer inside.
    param_groups = property(lambda self: self._optim.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self._optim.state)  # type: ignore[assignment]
    defaults = property(lambda self: self._optim.defaults)  # type: ignore[assignment]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters.

        Args:
            set_to_none: Whether they become None; else zeros.
        """
        self._optim.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Do one step on every local shard and plain parameter.

        Args:
            closure: Called first, where given: it computes the gradients.

        Returns:
            The loss that the closure returned; None without one.
        """
        return self._optim.step(closure)

    def __repr__(self) -> str:
        return f"ShardedOptimizer({self._optim!r})"

    # -- state, by name -----------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return state and groups by parameter name; sharded state as ShardedTensors."""
        state = {name: self._state_of(name) for name in self.named_params}
        names = {id(t): name for name, held in self._params.items() for t in held}
        groups = []
        for group in self._optim.param_groups:
            inside = dict.fromkeys(names[id(t)] for t in group["params"] if id(t) in names)
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": list(inside)})
        return {"state": state, "param_groups": groups}

    def _state_of(self, name: str) -> dict[str, Any]:
        param, held = self.named_params[name], self._params[name]
        states = [self._optim.state.get(t, {}) for t in held]
        if not isinstance(param, ShardedTensor):
            return dict(states[0])
        out: dict[str, Any] = {}
        for key in states[0]:
            values = [s[key] for s in states]
            each = all(isinstance(v, torch.Tensor) and v.shape == t.shape and v.dim() for v, t in zip(values, held))
            out[key] = param._with_parts(values) if each else values[0]
        return out

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load what `state_dict` returned, for the same parameter names; sharded state may be in other tiles.

        Args:
            state_dict: State and groups by parameter name.

        Raises:
            KeyError: If parameters are missing or unknown.
            ValueError: If the number of groups differs.
        """
        unknown = [n for n in state_dict["state"] if n not in self.named_params]
        missing = [n for n in self.named_params if n not in state_dict["state"]]
        if unknown or missing:
            raise KeyError(f"state_dict: unknown parameters {unknown}, missing parameters {missing}")
        given, known = len(state_dict["param_groups"]), len(self._optim.param_groups)
        if given != known:
            raise ValueError(f"state_dict: {given} param_groups, the optimizer has {known}")
        for name, saved in state_dict["state"].items():
            param: Any = self.named_params[name]
            held = self._params[name]
            local = [{} for _ in held]  # type: list[dict[str, Any]]
            for key, value in saved.items():
                parts = value._in_tiles_of(param)._parts if isinstance(value, ShardedTensor) else [value] * len(held)
                for state, part in zip(local, parts):
                    state[key] = part.detach().clone() if isinstance(part, torch.Tensor) else part
            for tensor, state in zip(held, local):
                if state:
                    self._optim.state[tensor] = state
        for group, saved in zip(self._optim.param_groups, state_dict["param_groups"]):
            group.update({k: v for k, v in saved.items() if k != "params"})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters.

        Args:
            param_group: `{"params": {name: tensor}, **options}`, or with a list of (name, tensor).

        Raises:
            TypeError: If there are no "params".
            ValueError: If a name is in the optimizer already.
        """
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f"param_group: expected a dict with 'params', got {param_group!r}")
        named = dict(param_group["params"])
        taken = [name for name in named if name in self.named_params]
        if taken:
            raise ValueError(f"params: names {taken} are in the optimizer already")
        self.named_params.update(named)
        self._params.update({name: parts_of(param) for name, param in named.items()})
        tensors = [t for name in named for t in self._params[name]]
        self._optim.add_param_group({**param_group, "params": tensors})
