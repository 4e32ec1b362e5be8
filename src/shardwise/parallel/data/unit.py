"""Modules whose parameters are gathered, used and freed together."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm.capturing import unwritten
from shardwise.comm.rank_tensor import RankTensor
from shardwise.errors import LayoutError
from shardwise.layout import Layout
from shardwise.parallel.data.calls import Calls
from shardwise.parallel.data.gradients import GradBucket, in_buckets
from shardwise.parallel.data.layouts import DataMesh
from shardwise.parallel.data.leaves import LeafGroup, mark_freed
from shardwise.parallel.data.nested import values_in
from shardwise.parallel.data.parameter import ManagedParameter
from shardwise.parallel.data.policy import Policy
from shardwise.parallel.data.states import USE, State, Use
from shardwise.tensor import DTensor
from shardwise.torch_private.autograd import current_backward
from shardwise.torch_private.tensors import storage_id, weights_replaced
from shardwise.wrapper import Wrapper


class Unit:
    """One module or several, the parameters they answer for, and where they stand between forward and backward (`use`).

    It knows nothing of other units: `DataParallel` says what it does when."""

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        parameters: Sequence[ManagedParameter],
        data: DataMesh,
        policy: Policy,
    ) -> None:
        self.modules, self.parameters, self.data, self.policy = list(modules), list(parameters), data, policy
        self._reset()

    def _reset(self) -> None:
        self.use = State(f"a unit ({type(self.modules[0]).__name__})", Use.IDLE, USE)
        self.calls = Calls()
        self.forget_leaves()

    def forget_leaves(self) -> None:
        """Make new leaves when they are next needed."""
        owners = {id(module): module for p in self.parameters for module, _ in p.owners}
        self._recurrent = [module for module in owners.values() if isinstance(module, torch.nn.RNNBase)]
        self.groups: list[LeafGroup] | None = None
        self.is_alone = False  # one rank, whose leaves are the parameters' own tensors: nothing is gathered or reduced
        self.buckets: list[GradBucket] = []
        self._trained: list[bool] | None = None  # which parameters need a gradient
        self.all_trained = True
        # where each leaf stands in for which parameter: table of parameters, name in it, leaf, parameter
        self._slots: list[tuple[dict[str, Any], str, torch.Tensor, DTensor]] = []
        self._laid_out: list[tuple[ManagedParameter, Layout]] = []
        self._distributed: list[DTensor] = []  # stand-ins for one forward of DTensors
        self._expected: frozenset[int] = frozenset()  # the leaves that need a gradient, by id
        self.missing: set[int] = set()  # those of which this backward pass has not computed the gradient yet
        self.inputs_done = False  # whether the inputs of the forward have their gradients
        self._began_in = -1  # the backward pass in which its own began
        # Whether gradients come in passes inside of that one, of reentrant checkpoints in its forward: another of these
        # may need the parameters again, until the inputs have their gradients.
        self.has_inner_passes = False
        self._hooked: set[int] = set()  # leaves that were handed out by `new_leaves`

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the module makes leaves of its own."""
        return {name: self.__dict__[name] for name in ("modules", "parameters", "data", "policy")}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__dict__.update(kept)
        self._reset()

    @property
    def is_in_backward(self) -> bool:
        return self.use.now is Use.BACKWARD or self.use.now is Use.BOTH

    @property
    def is_done(self) -> bool:
        """Whether its backward is under way and needs its parameters no more."""
        return self.is_in_backward and not self.missing and (not self.watches_inputs or self.inputs_done)

    @property
    def watches_inputs(self) -> bool:
        """Whether gradients of its parameters do not tell when it needs them no more."""
        return self.has_inner_passes or not self.all_trained

    # -- the leaves -----------------------------------------------------------------------------------------
    def prepare(self) -> bool:
        """Make leaves for all parameters, that need a gradient where these do, and buckets for their gradients; tell
        whether there are new buckets."""
        if self.use.now is Use.IDLE:
            self._follow()
        if self.groups is None:
            with torch.inference_mode(False), unwritten():  # they are for training too, and made once for all
                self._make_leaves()
        trained = [value.requires_grad for value in self._first_values]
        if trained == self._trained:
            return False
        self._trained, self.all_trained = trained, all(trained)
        self._make_buckets(trained)
        return True

    def give_away(self, p: ManagedParameter) -> None:
        """Another unit answers for this parameter from now on."""
        self.parameters.remove(p)
        self.forget_leaves()

    def _follow(self) -> None:
        """Take up parameters that the program has moved, cast or replaced since, if they are laid out as before."""
        if self.groups is None:
            unchanged = not any(p.is_changed() for p in self.parameters)
        else:
            unchanged = self._is_unchanged()
        if unchanged:
            return
        for p in self.parameters:
            p.follow(self.data.caller)
        self.forget_leaves()

    def _is_unchanged(self) -> bool:
        """Whether the modules have the parameters that the leaves were made for, laid out as then."""
        for parameters, name, _, param in self._slots:
            if parameters.get(name) is not param:
                return False
        for p, layout in self._laid_out:  # noqa: SIM110 - quicker than a generator, in every warm pass
            if p.param.__dict__["_layout"] is not layout or p.has_new_owners:
                return False
        return True

    def _make_leaves(self) -> None:
        without_values = [p.owners[0][1] for p in self.parameters if p.layouts.kept.device.type == "meta"]
        if without_values:
            kind = "FSDP parameters" if self.data.caller == "fully_shard" else "parameters"
            raise LayoutError(
                f"{self.data.caller}: {kind} should be materialized from meta device before training, but the "
                f"following were still on meta device: {without_values}; call shardwise.materialize(model), or "
                f"model.to_empty(device=...) and initialise it"
            )
        by_kind: dict[Kind, list[ManagedParameter]] = {}
        for p in self.parameters:
            by_kind.setdefault(_kind(p), []).append(p)
        alone = self.data.size == 1 and self.policy.gives_sums_as_they_are and not any(map(_is_converted, by_kind))
        self.groups = [LeafGroup(alike, self.data, self.policy, alone) for alike in by_kind.values()]
        self.is_alone = alone
        self._first_values = [p.values[0] for p in self.parameters]
        self._laid_out = [(p, p.param._layout) for p in self.parameters]
        for p in self.parameters:
            for leaf in p.distinct_leaves():
                leaf.requires_grad_(p.param.requires_grad)
            if not alone:
                p.param._stand_ins = weakref.WeakMethod(p.distinct_leaves)
            value = p.stand_in()
            self._slots += [(module._parameters, name, value, p.param) for module, name in p.owners]

    def _make_buckets(self, trained: Sequence[bool]) -> None:
        by_kind: dict[Kind, list[ManagedParameter]] = {}
        expected = []
        for p, needed in zip(reversed(self.parameters), reversed(trained), strict=True):  # as their gradients come
            for leaf in p.distinct_leaves():
                if leaf.requires_grad != needed:
                    leaf.requires_grad_(needed)
                expected += [id(leaf)] if needed else []
            if needed and not self.is_alone:
                by_kind.setdefault(_kind(p), []).append(p)
        parts = [part for alike in by_kind.values() for part in in_buckets(alike)]
        self.buckets = [GradBucket(part, self.data, self.policy.reduce_dtype) for part in parts]
        self._expected = frozenset(expected)

    def new_leaves(self) -> list[torch.Tensor]:
        """The leaves that a bucket wants a gradient of, each handed out once."""
        leaves = [leaf for b in self.buckets for p in b.parameters for leaf in p.distinct_leaves()]
        found = [leaf for leaf in leaves if id(leaf) not in self._hooked]
        self._hooked.update(map(id, found))
        return found

    # -- gathering and freeing ------------------------------------------------------------------------------
    def start_gather(self) -> None:
        if not self.is_alone:
            for group in self.groups or ():
                group.start()

    def gather(self) -> None:
        if not self.is_alone:
            self.start_gather()
            for group in self.groups or ():
                group.finish()

    def free(self) -> None:
        """Give the memory of the leaves back, where parameters are kept in parts."""
        if not self.policy.frees:
            return
        for group in self.groups or ():
            group.free()
        for tensor in self._distributed:
            mark_freed(tensor)
        self._distributed = []

    def lends(self, output: Any) -> bool:
        """Whether an output is a view of a leaf, so that its memory cannot be given back yet."""
        storages = {storage for group in self.groups or () for storage in group.storages()}
        return any(storage_id(v) in storages for v in plain_tensors(output))

    # -- standing in ----------------------------------------------------------------------------------------
    def begin_forward(self, distributed: bool) -> None:
        """Gather, and let the module compute with the leaves; as DTensors where the batch is one."""
        self._begin(Use.BOTH if self.is_in_backward else Use.FORWARD, distributed)

    def end_forward(self) -> None:
        """The module shows its parameters again, unless its backward goes on, or a forward around this one."""
        if self.calls:
            return
        if self.use.now is Use.BOTH:
            self.use.to(Use.BACKWARD)
        elif self.use.now is Use.FORWARD:  # else it failed before it began
            self._uninstall()

    def give_up_forward(self) -> None:
        """The module shows its parameters again, whatever it was about."""
        self.calls.forget()
        if self.use.now is not Use.IDLE:
            self.end_forward()

    def begin_backward(self, distributed: bool) -> None:
        """Gather, and let the module compute with the leaves where its forward is repeated."""
        self.missing, self._began_in = set(self._expected), current_backward()
        self._begin(Use.BACKWARD if self.use.now is Use.IDLE else Use.BOTH, distributed)

    def gradient_came(self, leaf: torch.Tensor) -> None:
        self.missing.discard(id(leaf))
        if self.is_in_backward and self._began_in != current_backward():
            self.has_inner_passes = True

    def end_backward(self) -> None:
        self.inputs_done, self.missing = False, set()
        if self.use.now is Use.BOTH:
            self.use.to(Use.FORWARD)
        elif self.use.now is Use.BACKWARD:
            self._uninstall()

    def mark_unreduced(self, waits: bool) -> None:
        """Have the parameters know whether gradients of this pass wait to be reduced."""
        for p in self.parameters:
            if waits:
                p.mark_unreduced()
            elif p.unreduced is not None:
                p.unmark()

    def _begin(self, use: Use, distributed: bool) -> None:
        is_installed = self.use.now is not Use.IDLE
        self.use.to(use)
        self.gather()
        if not is_installed:
            self._install(distributed)

    def _install(self, distributed: bool) -> None:
        if distributed:
            for p in self.parameters:
                value = p.distributed_stand_in()
                if self.policy.frees:
                    self._distributed.append(value)
                for module, name in p.owners:
                    module._parameters[name] = value  # type: ignore[assignment]
        else:
            for parameters, name, leaf, _ in self._slots:
                parameters[name] = leaf
        self._tell_recurrent()

    def _uninstall(self) -> None:
        self.use.to(Use.IDLE)
        for parameters, name, _, param in self._slots:
            parameters[name] = param
        self._tell_recurrent()

    def _tell_recurrent(self) -> None:
        """RNNs keep a list of their parameters beside them."""
        for module in self._recurrent:
            weights_replaced(module)


Kind = tuple[torch.dtype, torch.dtype, torch.device, torch.device]  # of a parameter: kept and computed with


def _kind(p: ManagedParameter) -> Kind:
    return p.layouts.kept.dtype, p.dtype, p.layouts.kept.device, p.device


def _is_converted(kind: Kind) -> bool:
    """Whether a module computes in another dtype or on another device."""
    return kind[0] != kind[1] or kind[2] != kind[3]


def plain_tensors(tree: Any) -> list[torch.Tensor]:
    """The plain tensors inside arguments or results, those behind DTensors and of every simulated rank included."""
    if type(tree) is torch.Tensor:
        return [tree]
    found: dict[int, torch.Tensor] = {}
    for item in values_in(tree):
        if isinstance(item, Wrapper):
            values: Sequence[torch.Tensor] = item._layout.mesh.comm.values(item._local)
        elif isinstance(item, RankTensor):
            values = item.ranks
        else:
            values = (item,) if isinstance(item, torch.Tensor) else ()
        found.update((id(v), v) for v in values)
    return list(found.values())
