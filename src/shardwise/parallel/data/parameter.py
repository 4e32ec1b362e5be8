"""One parameter of a data-parallel module, and the tensors that stand in for it inside the forward."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.autograd.leaves import leaf_values
from shardwise.comm.bridge import share
from shardwise.comm.rank_tensor import RankTensor
from shardwise.comm.record import Note
from shardwise.errors import LayoutError
from shardwise.move import run_move
from shardwise.move.steps import Spread
from shardwise.parallel.data.layouts import ParameterLayouts, moved
from shardwise.protocols import LocalValue
from shardwise.tensor import DTensor
from shardwise.torch_private.autograd import has_gradient_hooks
from shardwise.wrapper import wrap

Owners = list[tuple[torch.nn.Module, str]]  # the modules that have a parameter, and under which name


def has_hooks(param: torch.Tensor) -> bool:
    """Whether a hook waits for the gradient of a parameter."""
    if isinstance(param, DTensor):
        return any(map(has_gradient_hooks, leaf_values(param)))
    return has_gradient_hooks(param)


class ManagedParameter:
    """A parameter (the DTensor that the optimizer sees), who uses it, and its leaves, in which the module computes."""

    # The tensors that stand in for it, one for each rank that this process runs; each collects its rank's gradient.
    leaves: list[torch.Tensor]

    def __init__(
        self, param: DTensor, layouts: ParameterLayouts, owners: Owners, dtype: torch.dtype | None, device: torch.device
    ) -> None:
        self.param, self.layouts, self.owners = param, layouts, owners
        param._is_managed = True
        self.compute_dtype, self.device = dtype, device  # of the leaves; a dtype of None: that of the parameter
        # The gradients that the optimizer sees, and their versions, when `no_sync` left some of a gradient unreduced.
        self.unreduced: list[tuple[torch.Tensor, int]] | None = None
        # Gradients that wait in the dtype in which they are reduced, by id of a leaf, where that is not the leaf's own.
        self.waiting: dict[int, torch.Tensor] = {}
        self.has_new_owners = False

    def __deepcopy__(self, memo: dict[int, object]) -> ManagedParameter:
        made = ManagedParameter.__new__(ManagedParameter)
        memo[id(self)] = made
        made.__dict__.update(self.__getstate__())
        made.param, made.owners = copy.deepcopy(self.param, memo), copy.deepcopy(self.owners, memo)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """A copy gets leaves of its own when it is first used."""
        return {k: v for k, v in self.__dict__.items() if k != "leaves"} | {"unreduced": None, "waiting": {}}

    @property
    def dtype(self) -> torch.dtype:
        """In which the module computes."""
        kept = self.layouts.kept.dtype
        return kept if self.compute_dtype is None or not kept.is_floating_point else self.compute_dtype

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        return leaf_values(self.param)

    def values_by_rank(self) -> tuple[torch.Tensor, ...]:
        local = self.param._local
        return local.ranks if isinstance(local, RankTensor) else (local,)

    # -- parameters that the program changes ----------------------------------------------------------------
    def is_changed(self) -> bool:
        """Whether a module has another parameter, or it was cast or moved."""
        if self.has_new_owners:
            return True
        param, kept = self.param, self.layouts.kept
        here = param._layout
        if here is not kept and here.replace(stride=kept.stride) is not kept:
            return True
        return any(module._parameters.get(name) is not param for module, name in self.owners)  # type: ignore[comparison-overlap]

    def add_owners(self, owners: Owners) -> None:
        """More modules that had this parameter before it was laid out."""
        for module, name in owners:
            module._parameters[name] = self.param  # type: ignore[assignment]
        self.owners += owners
        self.has_new_owners = True

    def tie_again(self) -> None:
        """After ``module.to_empty()`` and its kin, which make a new parameter for each owner: they share the first."""
        module, name = self.owners[0]
        now = module._parameters.get(name)
        if now is not self.param:  # type: ignore[comparison-overlap]
            for other, key in self.owners[1:]:
                if other._parameters.get(key) is not self.param:  # type: ignore[comparison-overlap]
                    other._parameters[key] = now

    def follow(self, caller: str) -> None:
        """Take up what the modules have now: to_empty(), to(dtype), load_state_dict(assign=True), materialize()."""
        module, name = self.owners[0]
        now = module._parameters.get(name)
        was = self.layouts.kept
        what = f"{caller}: parameter {name!r} of shape {was.shape}"
        for other, key in self.owners[1:]:
            if other._parameters.get(key) is not now:
                raise LayoutError(
                    f"{what} was one with {key!r} of {type(other).__name__}, and they are two now; tie them again: "
                    f"other.{key} = module.{name}"
                )
        if not isinstance(now, DTensor):
            raise LayoutError(
                f"{what} was taken away or replaced by a tensor that is not distributed; replace it by a DTensor on "
                f"{was.mesh!r} with placements {list(was.placements)}, or write into it: param.copy_(...), "
                f"load_state_dict(...)"
            )
        here = now._layout
        if (here.mesh, here.placements, here.shape) != (was.mesh, was.placements, was.shape):
            raise LayoutError(
                f"{what} on {was.mesh!r} with placements {list(was.placements)} was replaced by one of shape "
                f"{here.shape} on {here.mesh!r} with placements {list(here.placements)}; lay it out as it was: "
                f"distribute_tensor(value, mesh, placements)"
            )
        if self.unreduced is not None:
            raise LayoutError(
                f"{what} was cast, moved or replaced while gradients of it wait to be reduced; do it before the first "
                f"backward pass of an accumulation, or after the last"
            )
        if self.device == was.device:
            self.device = here.device
        self.param, self.layouts = now, moved(self.layouts, here.dtype, here.device)
        now._is_managed = True
        self.has_new_owners = False
        self.__dict__.pop("leaves", None)

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
        if self.waiting or any(leaf.grad is not None for leaf in self.leaves):
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
        """Drop the gradients that wait if the program has cleared or replaced those that it sees, and those of a pass
        that failed before anything could take note of it."""
        if self.unreduced is None:
            for leaf in self.leaves:
                if leaf.grad is not None:
                    self.drop_waiting()
                    break
        elif not all(
            value.grad is grad and grad._version == version
            for value, (grad, version) in zip(self.values, self.unreduced, strict=True)
        ):
            self.drop_waiting()

    def drop_waiting(self) -> None:
        self.unmark()
        self.waiting.clear()
        own = set(map(id, self.values))  # where there is one rank: these gradients are what the program sees
        for leaf in self.leaves:
            if id(leaf) not in own:
                leaf.grad = None

    # -- standing in ----------------------------------------------------------------------------------------
    def _local(self) -> torch.Tensor:
        return RankTensor(self.leaves) if self.layouts.kept.mesh.comm.simulated else self.leaves[0]

    def stand_in(self) -> torch.Tensor:
        """What stands in for the parameter where every rank computes on a plain batch of its own."""
        inner = self.layouts.inner
        if inner is None:
            return self._local()
        return wrap(self._local(), inner.replace(dtype=self.dtype, stride=None, device=self.device))

    @torch.enable_grad()  # the backward pass asks for one too, for forwards that are repeated
    def distributed_stand_in(self) -> DTensor:
        """What stands in for it where the batch is a DTensor: Replicate over the data axes.

        Its gradient must reach the leaves as parts of a sum. A call that is split over the data axes gives parts: it
        gets the leaf itself, the spread form of the tensor. Of the whole gradient of other uses, each takes a share;
        so it is with the data axes that a call is not split over."""
        layout = self.layouts.whole.replace(dtype=self.dtype, device=self.device)
        comm, shape = layout.mesh.comm, layout.mesh.shape
        axes = [a for a in self.layouts.axes if shape[a] > 1]
        replicas = [a for a, p in enumerate(layout.placements) if p.is_replicate()]
        others = [a for a in replicas if a not in axes and shape[a] > 1]
        leaf = share(comm, self._local(), [a for a in replicas if a not in axes])
        if not self.leaves[0].requires_grad or not axes:
            return wrap(share(comm, leaf, replicas), layout)

        def unsplit_over(rest: Sequence[int]) -> LocalValue:
            """The leaf for calls that are split over the data axes but these."""
            if not rest:
                return leaf
            part = 1 / math.prod(shape[a] for a in rest)
            shares = [_with_share_of_gradient(value, part) for value in comm.values(leaf)]
            return share(comm, comm.rebuild(leaf, shares), rest)

        local = unsplit_over(axes)
        local = share(comm, local, replicas)
        tensor = wrap(local, layout)
        version = comm.first(local)._version
        tensor._spreads = {}
        for mine, theirs in itertools.product(_subsets(axes), _subsets(others)):
            if mine:  # every set of axes that a call may be split over
                value = unsplit_over([a for a in axes if a not in mine])
                if theirs:
                    value = run_move(value, comm, (Spread(layout, theirs),), Note("data_parallel"))
                tensor._spreads[(tuple(sorted((*mine, *theirs))),)] = (local, version, value)
        return tensor


def _subsets(axes: Sequence[int]) -> list[tuple[int, ...]]:
    return [found for n in range(len(axes) + 1) for found in itertools.combinations(axes, n)]


def _with_share_of_gradient(value: torch.Tensor, part: float) -> torch.Tensor:
    """The same value; of its gradient, which is the same on every rank, this part reaches `value`."""
    seen = value.view_as(value)
    if seen.requires_grad:
        seen.register_hook(lambda grad: grad * part)
    return seen
