"""One parameter of a data-parallel module, and the tensors that stand in for it inside the forward."""

from __future__ import annotations

import copy
from typing import Any

import torch

from shardwise.autograd.leaves import leaf_local, leaf_values
from shardwise.comm.bridge import share
from shardwise.comm.rank_tensor import RankTensor
from shardwise.comm.record import Note
from shardwise.move import run_move
from shardwise.move.steps import Spread
from shardwise.parallel.data.layouts import DataAxis, ParameterLayouts
from shardwise.tensor import DTensor
from shardwise.wrapper import wrap

Owners = list[tuple[torch.nn.Module, str]]  # the modules that have a parameter, and under which name


class ManagedParameter:
    """A parameter (the DTensor that the optimizer sees), who uses it, and its leaves, in which the module computes."""

    # The tensors that stand in for it, one for each rank that this process runs; each collects its rank's gradient.
    leaves: list[torch.Tensor]

    def __init__(self, param: DTensor, layouts: ParameterLayouts, owners: Owners, dtype: torch.dtype) -> None:
        self.param, self.layouts, self.owners, self.dtype = param, layouts, owners, dtype
        # The gradients that the optimizer sees, and their versions, when `no_sync` left some of a gradient unreduced.
        self.unreduced: list[tuple[torch.Tensor, int]] | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> ManagedParameter:
        made = ManagedParameter.__new__(ManagedParameter)
        memo[id(self)] = made
        made.__dict__.update(self.__getstate__())
        made.param, made.owners = copy.deepcopy(self.param, memo), copy.deepcopy(self.owners, memo)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """A copy gets leaves of its own when it is first used."""
        return {k: v for k, v in self.__dict__.items() if k != "leaves"} | {"unreduced": None}

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        return leaf_values(self.param)

    def values_by_rank(self) -> tuple[torch.Tensor, ...]:
        local = leaf_local(self.param)
        return local.ranks if isinstance(local, RankTensor) else (local,)

    def distinct_leaves(self) -> list[torch.Tensor]:
        """The leaves, each one once: simulated ranks may share one."""
        return list({id(leaf): leaf for leaf in self.leaves}.values())

    def set_leaves(self, leaves: list[torch.Tensor]) -> None:
        """Take these leaves. Simulated ranks that hold the same along the inner axes share one, as everywhere."""
        inner = self.layouts.inner
        if len(leaves) > 1 and inner is not None:
            replicas = [a for a, p in enumerate(inner.placements) if p.is_replicate()]
            leaves = list(inner.mesh.comm.first_of_replicas(RankTensor(leaves), replicas).ranks)
        self.leaves = leaves

    # -- gradients that wait (no_sync) ----------------------------------------------------------------------
    # The optimizer sees the parameter's own gradient, not those of the leaves. So a parameter with a gradient that
    # waits gets one of zeros and a mark, which `optim` refuses to step on; and if the program clears or replaces that
    # gradient (zero_grad), what waits is dropped too.
    def mark_unreduced(self) -> None:
        """Remember the gradients that the optimizer sees, if the leaves have some that are not in them."""
        if any(leaf.grad is not None for leaf in self.leaves):
            self.unreduced = []
            for value in self.values:
                if value.grad is None:
                    value.grad = torch.zeros_like(value)
                self.unreduced.append((value.grad, value.grad._version))
            self.param._unreduced = True  # type: ignore[attr-defined]

    def unmark(self) -> None:
        if self.unreduced is not None:
            self.unreduced = None
            self.param.__dict__.pop("_unreduced", None)

    def drop_if_cleared(self) -> None:
        """Drop the gradients that wait if the program has cleared or replaced those that it sees."""
        if self.unreduced is not None and not all(
            value.grad is grad and grad._version == version
            for value, (grad, version) in zip(self.values, self.unreduced, strict=True)
        ):
            self.unmark()
            for leaf in self.leaves:
                leaf.grad = None

    # -- standing in ----------------------------------------------------------------------------------------
    def _local(self) -> torch.Tensor:
        return RankTensor(self.leaves) if self.layouts.kept.mesh.comm.simulated else self.leaves[0]

    def stand_in(self) -> torch.Tensor:
        """What stands in for the parameter where every rank computes on a plain batch of its own."""
        inner = self.layouts.inner
        return self._local() if inner is None else wrap(self._local(), inner.replace(dtype=self.dtype, stride=None))

    def distributed_stand_in(self, data: DataAxis) -> DTensor:
        """What stands in for it where the batch is a DTensor: Replicate over the data axis.

        Its gradient must reach the leaves as parts of a sum. A call that is split over the data axis gives parts: it
        gets the leaf itself, the spread form of the tensor. Of the whole gradient of other uses, each takes a share."""
        axis, layout = self.layouts.axis, self.layouts.whole.replace(dtype=self.dtype)
        comm = layout.mesh.comm
        replicas = [a for a, p in enumerate(layout.placements) if p.is_replicate()]
        leaf = share(comm, self._local(), [a for a in replicas if a != axis])
        if not self.leaves[0].requires_grad or data.size == 1:
            return wrap(share(comm, leaf, replicas), layout)
        shares = [_with_share_of_gradient(value, 1 / data.size) for value in comm.values(leaf)]
        local = share(comm, comm.rebuild(leaf, shares), replicas)
        tensor = wrap(local, layout)
        version = comm.first(local)._version
        others = [a for a in replicas if a != axis and layout.mesh.shape[a] > 1]
        tensor._spreads = {}
        for chosen in range(1 << len(others)):  # every set of the other axes that a call may be split over too
            rest = tuple(a for i, a in enumerate(others) if chosen >> i & 1)
            value = run_move(leaf, comm, (Spread(layout, rest),), Note("data_parallel")) if rest else leaf
            tensor._spreads[(tuple(sorted((axis, *rest))),)] = (local, version, value)
        return tensor


def _with_share_of_gradient(value: torch.Tensor, part: float) -> torch.Tensor:
    """The same value; of its gradient, which is the same on every rank, this part reaches `value`."""
    seen = value.view_as(value)
    if seen.requires_grad:
        seen.register_hook(lambda grad: grad * part)
    return seen
