"""Muon on distributed matrices: the example of an optimizer that needs its parameters whole.

Each matrix gets one owner: a layout in which that rank holds everything. Two moves do the rest: the averaged gradient
goes to its owner, which lets torch's own Muon orthogonalize it, and the step comes back in the layout of the parameter.
Owners are chosen so that all ranks have about the same work.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from shardwise.comm.rank_tensor import RankTensor
from shardwise.layout import Placement
from shardwise.layout.nesting import shards_from_table
from shardwise.layout.region import whole_region
from shardwise.mesh import Mesh
from shardwise.tensor import DTensor

Group = dict[str, Any]  # an optimizer's param_group: "params", and options of any type
Places = Sequence[Placement]


class Muon(torch.optim.Muon):
    """`torch.optim.Muon`, with the same options, for parameters of any layout.

    Its state (momentum) is laid out as the parameters are. Plain parameters may be among them.

    Example:
        >>> import shardwise, torch
        >>> mesh = shardwise.simulate(4)
        >>> weight = torch.nn.Parameter(shardwise.distribute_tensor(torch.randn(6, 5), mesh, [shardwise.Shard(0)]))
        >>> optimizer = shardwise.optim.Muon([weight], lr=0.1)
        >>> weight.square().sum().backward(); optimizer.step()
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters. Every rank of the mesh calls it.

        Args:
            closure: Called first, where given: it computes the gradients.

        Returns:
            The loss that the closure returned; None without one.

        Raises:
            RuntimeError: A parameter is complex, or a gradient sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        owners = self._owners()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            updates = [self._averaged(p, group) for p in params]
            whole = [_move(u, owners.get(id(p))) for p, u in zip(params, updates, strict=True)]
            home = [getattr(p, "placements", None) for p in params]
            steps = list(map(_move, _steps(whole, group), home))
            decay = 1 - float(group["lr"]) * group["weight_decay"]
            for param, change in zip(params, steps, strict=True):
                param.mul_(decay).add_(change)
        return loss

    def _averaged(self, param: torch.Tensor, group: Group) -> torch.Tensor:
        """The gradient with momentum, laid out as the parameter."""
        grad, state, momentum = param.grad, self.state[param], group["momentum"]
        assert grad is not None
        if torch.is_complex(param) or grad.is_sparse:
            raise RuntimeError("Muon does not support complex parameters or sparse gradients")
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        average = state["momentum_buffer"].lerp_(grad, 1 - momentum)
        return grad.lerp(average, momentum) if group["nesterov"] else average.clone()

    def _owners(self) -> dict[int, Places]:
        """The placements under which the owner of each distributed parameter holds it whole."""
        matrices = [p for group in self.param_groups for p in group["params"] if isinstance(p, DTensor)]
        known = [(id(p), p._layout) for p in matrices]
        if self.__dict__.get("_dealt") != known:
            self._dealt, self._placements = known, _deal(matrices)
        return self._placements


def _deal(matrices: Iterable[DTensor]) -> dict[int, Places]:
    """The dearest matrix first, each to the rank with the least work so far."""
    work: dict[Mesh, dict[tuple[int, ...], float]] = {}
    found: dict[int, Places] = {}
    for matrix in sorted(matrices, key=_cost, reverse=True):
        layout = matrix._layout
        loads = work.setdefault(layout.mesh, dict.fromkeys(itertools.product(*map(range, layout.mesh.shape)), 0.0))
        owner = min(loads, key=loads.__getitem__)
        loads[owner] += _cost(matrix)
        rows = defaultdict(tuple, {owner: whole_region(layout.shape)[0]})  # the owner has all of them
        found[id(matrix)] = shards_from_table(layout.mesh.shape, layout.shape[0], rows.__getitem__, 0)
    return found


def _cost(matrix: DTensor) -> float:
    rows, columns = matrix._layout.shape
    return float(rows * columns * min(rows, columns))


def _move(value: torch.Tensor, placements: Places | None) -> torch.Tensor:
    """The value on its way to these placements; a plain one stays."""
    return value.redistribute(placements=placements, async_op=True) if isinstance(value, DTensor) else value


def _steps(whole: list[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """How far torch's Muon goes along each update. This rank has some of them whole, and nothing of the others."""
    local_updates = [x.to_local() if isinstance(x, DTensor) else x for x in whole]
    parts = [list(x.ranks) if isinstance(x, RankTensor) else [x] for x in local_updates]
    here = {id(v): v for values in parts for v in values if v.numel()}
    moved = dict(zip(here, _torch_steps(list(here.values()), group), strict=True))
    steps = []
    for x, local, values in zip(whole, local_updates, parts, strict=True):
        out = [moved[id(v)] if v.numel() else v.to(_precise_dtype(v)) for v in values]
        step: torch.Tensor = RankTensor(out) if isinstance(local, RankTensor) else out[0]
        if isinstance(x, DTensor):
            step = DTensor.from_local(step, x.device_mesh, x.placements, shape=x.shape)
        steps.append(step)
    return steps


def _torch_steps(updates: list[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """The step of torch's own Muon from zero, without momentum or decay, for each of these updates."""
    if not updates:
        return []
    stand_ins = [torch.zeros_like(update, dtype=_precise_dtype(update), requires_grad=True) for update in updates]
    for stand_in, update in zip(stand_ins, updates, strict=True):
        stand_in.grad = update.to(stand_in.dtype)
    options = {name: group[name] for name in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    torch.optim.Muon(stand_ins, weight_decay=0.0, momentum=0.0, nesterov=False, **options).step()
    return [stand_in.detach() for stand_in in stand_ins]


def _precise_dtype(update: torch.Tensor) -> torch.dtype:
    """A dtype in which a step loses nothing: it is rounded once, when it is added to the parameter."""
    return torch.promote_types(update.dtype, torch.float32)
