"""Data parallelism by layout: DDP and ZeRO 1, 2 and 3, on top of any layout the parameters have over other axes.

The parameters become DTensors over the data axis: Replicate (DDP) or cut (ZeRO), so optimizers, clipping and state
dicts see ordinary distributed tensors. Inside the forward, *leaves* that are whole along the data axis stand in for
them. Every rank's leaves collect its own part of the gradient; buckets of them are summed while the backward pass goes
on.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.comm.rank_tensor import RankTensor
from shardwise.errors import LayoutError
from shardwise.parallel.data_copies import Entry
from shardwise.parallel.data_grads import GradBucket
from shardwise.parallel.data_home import DataAxis, common_mesh, home_of
from shardwise.parallel.data_rows import Rows
from shardwise.parallel.data_unit import Unit
from shardwise.tensor import DTensor
from shardwise.torch_private import at_end_of_backward
from shardwise.wrapper import wrap

SHARDS = ("none", "optimizer", "gradients", "parameters")
Units = Sequence[torch.nn.Module] | Callable[[str, torch.nn.Module], bool] | None


def data_parallel(
    module: torch.nn.Module,
    mesh: Any,
    shard: str = "none",
    *,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    master_dtype: torch.dtype | None = None,
    units: Units = None,
    unit_bytes: int = 1 << 20,
) -> torch.nn.Module:
    """The module itself, trained on a batch that is spread over the ranks of `mesh` (one axis, as in ``mesh["dp"]``).

    `shard` says what is kept in parts instead of on every rank: "none" (DDP), the state of the "optimizer" (ZeRO 1),
    the "gradients" too (ZeRO 2), the "parameters" too (ZeRO 3). Make the optimizer afterwards, from
    ``module.parameters()``.

    Feed each rank its own plain tensors: gradients are averaged over the ranks, as DDP does. Or feed DTensors that are
    cut over the data axis: everything is then as on one device with the whole batch. ``with module.no_sync():`` lets
    gradients add up without communication.

    With "parameters", a *unit* is gathered when its forward begins, freed when it ends, and gathered again for its
    backward, one unit ahead. Units are the elements of Sequential, ModuleList and ModuleDict with at least
    `unit_bytes` of parameters; or those listed, or of which `units(name, module)` is true. The rest belongs to the
    module as a whole. `compute_dtype` is that of the forward (floating-point inputs are cast), `reduce_dtype` that in
    which gradients are summed, `master_dtype` that of the parameters the optimizer sees.
    """
    if not isinstance(module, torch.nn.Module):
        raise LayoutError(f"data_parallel: module must be a torch.nn.Module, got {type(module).__name__}")
    if shard not in SHARDS:
        raise LayoutError(f"data_parallel: shard={shard!r} is not one of {', '.join(map(repr, SHARDS))}")
    for name, dtype in (("compute", compute_dtype), ("reduce", reduce_dtype), ("master", master_dtype)):
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise LayoutError(f"data_parallel: {name}_dtype must be a floating-point torch.dtype, got {dtype!r}")
    if "_data_parallel" in module.__dict__:
        raise LayoutError("data_parallel: the module is data parallel already")
    state = DataParallel(DataAxis(mesh), shard, compute_dtype, reduce_dtype)
    chosen = _units(module, units, unit_bytes)
    state.build(module, chosen if state.data.size > 1 else [], master_dtype)  # one rank has nothing to gather or free
    module._data_parallel = state  # type: ignore[assignment]
    module.no_sync = state.no_sync  # type: ignore[assignment]
    return module


def _units(module: torch.nn.Module, units: Units, unit_bytes: int) -> list[torch.nn.Module]:
    """The modules that are units of their own, in the order of the module tree."""
    if callable(units):
        return [m for name, m in module.named_modules() if m is not module and units(name, m)]
    if units is not None:
        chosen = {id(m) for m in units}
        found = [m for m in module.modules() if id(m) in chosen and m is not module]
        if len(found) < len(chosen - {id(module)}):
            raise LayoutError("data_parallel: units lists a module that is not part of the module")
        return found
    containers = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
    found = []

    def visit(parent: torch.nn.Module) -> None:
        for child in parent.children():
            elements = list(child.children()) if isinstance(child, containers) else []
            large = [m for m in elements if sum(p.numel() * p.itemsize for p in m.parameters()) >= unit_bytes]
            found.extend(m for m in large if not isinstance(m, (torch.nn.ModuleList, torch.nn.ModuleDict)))
            if not elements:
                visit(child)

    visit(module if not isinstance(module, containers) else torch.nn.ModuleList([module]))
    return found


class DataParallel:
    """What the units of one module share."""

    def __init__(
        self, data: DataAxis, shard: str, compute_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
    ) -> None:
        self.data, self.shard = data, shard
        self.compute_dtype, self.reduce_dtype = compute_dtype, reduce_dtype
        self.frees = shard == "parameters" and data.size > 1
        self.parts_only = shard in ("gradients", "parameters")  # no rank has room for all gradients whole
        self.units: list[Unit] = []
        self.sync = True
        self._reset()

    def _reset(self) -> None:
        self.buckets: list[GradBucket] | None = None
        self.order: dict[Unit, int] = {}  # in which forwards begin
        self.outermost: Unit | None = None
        self.typed = self.in_backward = False
        self.frees_after = True  # whether what this backward pass used may go
        self.ending: Callable[[], Any] = lambda: None  # the end of the pass that goes on, while autograd knows of it
        self.scale = 1.0
        self.launched = 0
        self.bucket_of: dict[int, GradBucket] = {}
        self.in_flight: list[GradBucket] = []

    def __getstate__(self) -> dict[str, Any]:
        names = ("data", "shard", "compute_dtype", "reduce_dtype", "frees", "parts_only", "units", "sync", "root")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__dict__.update(kept)
        self._reset()

    # -- setting up -----------------------------------------------------------------------------------------
    def build(self, module: torch.nn.Module, units: list[torch.nn.Module], master: torch.dtype | None) -> None:
        owners: dict[int, list[tuple[torch.nn.Module, str]]] = {}
        params: dict[int, Any] = {}
        for owner in module.modules():
            for name, param in owner._parameters.items():
                if param is not None:
                    owners.setdefault(id(param), []).append((owner, name))
                    params[id(param)] = param
        unit_of = {id(m): unit for unit in units for m in unit.modules()}  # an inner unit comes later and wins
        groups: dict[int, list[Entry]] = {id(m): [] for m in units}
        rest: list[Entry] = []
        common = common_mesh(params.values(), self.data)
        for key, param in params.items():
            entry = self._entry(param, owners[key], master, common)
            homes = {id(unit_of.get(id(owner))) for owner, _ in owners[key]}
            group = groups.get(homes.pop()) if len(homes) == 1 else None
            (rest if group is None else group).append(entry)
        self.units = [Unit(self, m, groups[id(m)]) for m in units if groups[id(m)]]
        self.root = Unit(self, module, rest)
        self.units.append(self.root)

    def _entry(
        self, param: Any, owners: list[tuple[torch.nn.Module, str]], master: torch.dtype | None, common: Any
    ) -> Entry:
        floats = param.dtype.is_floating_point
        kept_as = master if master is not None and floats else param.dtype
        home = home_of(param, self.data, self.shard != "none", kept_as, common)
        made = torch.nn.Parameter(self._laid_out(param, home, kept_as), requires_grad=param.requires_grad)
        for module, name in owners:
            module._parameters[name] = made
        return Entry(made, home, owners, self.compute_dtype if self.compute_dtype is not None and floats else kept_as)

    @torch.no_grad()
    def _laid_out(self, param: Any, home: Any, dtype: torch.dtype) -> Any:
        """The parameter as it is kept, with the values of the first rank along the data axis."""
        comm, data = home.own.mesh.comm, self.data.mesh.comm
        local = param._local if isinstance(param, DTensor) else data.shared(param.detach())
        local = data.first_of_replicas(local.detach() if not isinstance(local, RankTensor) else local, (0,))
        values = local.ranks if isinstance(local, RankTensor) else (local,)
        pieces = []
        for value, coords, place in zip(values, home.whole.mesh.comm.played(), self.data.coords, strict=True):
            rows = Rows([home.whole.local_shape_at(coords)], [home.dim], self.data.size)
            piece = rows.piece(0, value.detach(), place)
            pieces.append(piece.to(dtype).clone(memory_format=torch.contiguous_format))
        if not comm.simulated:
            return wrap(pieces[0], home.own)
        replicas = [axis for axis, p in enumerate(home.own.placements) if p.is_replicate()]
        return wrap(comm.first_of_replicas(RankTensor(pieces), replicas), home.own)

    # -- forward --------------------------------------------------------------------------------------------
    def enter(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        """A unit's forward begins. The outermost one decides how to compute, and casts its inputs."""
        if self.in_backward and self.ending() is None:
            self._give_up_backward()
        self.order.setdefault(unit, len(self.order))
        if self.in_backward or self.outermost not in (None, unit):  # an interrupted forward leaves its own behind
            return None
        self.outermost = unit
        for other in self.units:
            other.running = False
        self._drop_what_was_zeroed()
        self.typed = any(
            isinstance(x, DTensor) and self.data.within(x._layout.mesh) is not None for x in tree_leaves((args, kwargs))
        )
        if self.compute_dtype is None:
            return None
        return tree_map(self._cast, (args, kwargs))

    def _cast(self, value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self.compute_dtype) if is_float and value.dtype != self.compute_dtype else value

    def prefetch(self, unit: Unit, forward: bool) -> None:
        """Begin to gather the unit that will be needed next."""
        if self.data.size == 1 or unit not in self.order:
            return
        at = self.order[unit] + (1 if forward else -1)
        following = next((other for other, place in self.order.items() if place == at), self.root)
        if following is not self.root:
            following.start()

    def exit(self, unit: Unit, output: Any) -> None:
        if unit is not self.outermost:
            return
        self.outermost = None
        if not self.typed:
            self.scale = 1 / self.data.size
            for x in tree_leaves(output):
                if isinstance(x, DTensor) and self.data.within(x._layout.mesh) is not None and self.data.size > 1:
                    raise LayoutError(
                        f"data_parallel: the output of shape {tuple(x.shape)} is a DTensor over the data axis though "
                        f"the inputs were plain: a parameter was used outside of the forward of its unit. "
                        f"Name the units with data_parallel(..., units=[...]), so that it belongs to the one using it"
                    )
        else:
            self.scale = 1.0

    # -- backward -------------------------------------------------------------------------------------------
    def begin_backward(self) -> None:
        if not self.in_backward:
            self.in_backward = self.frees_after = True
            self._reset_buckets()
            # private: torch has no public hook at the end of a pass, and neither the last gradient of a parameter nor
            # that of an input is it (frozen parameters, reentrant checkpoints, autograd.grad of an activation)
            ending = functools.partial(self.end_backward)
            self.ending = weakref.ref(ending)
            at_end_of_backward(ending)

    def _reset_buckets(self) -> None:
        """All buckets are empty, and in the same order on all ranks: the last modules first."""
        if self.buckets is None:
            for unit in self.units:
                unit.prepare()
            self.buckets = [b for unit in (*reversed(self.units[:-1]), self.root) for b in unit.buckets]
            self.bucket_of = {leaf: b for b in self.buckets for leaf in b.spots}
        self.launched = 0
        for bucket in self.buckets:
            bucket.begin()

    def take(self, leaf: torch.Tensor) -> None:
        """The gradient of a leaf has come."""
        bucket = self.bucket_of[id(leaf)]
        bucket.take(leaf, self.scale)
        bucket.missing.discard(id(leaf))
        if self.parts_only and 2 * len(bucket.missing) < len(bucket.spots):  # what went before has had its time
            self._finish_all()
        if not bucket.missing:
            self._launch(everything=False)

    def _launch(self, everything: bool) -> None:
        """Start the reductions whose turn it is and that have all they need, or all that are left."""
        buckets = self.buckets or []
        while self.launched < len(buckets) and (everything or not buckets[self.launched].missing):
            bucket = buckets[self.launched]
            self.launched += 1
            if self.parts_only:  # what is being reduced must not pile up
                self._finish_all()
            bucket.start(self.scale)
            self.in_flight.append(bucket)

    def _finish_all(self) -> None:
        while self.in_flight:
            self.in_flight.pop(0).finish()

    def end_backward(self) -> None:
        """Autograd is done: reduce what is left, and put everything back."""
        for unit in self.units:
            unit.after_backward()
        if self.sync:
            self._launch(everything=True)
            self._finish_all()
            self._forget_marks()
        else:
            self._leave_marks()
        self.in_backward = False

    def _give_up_backward(self) -> None:
        """A backward pass ended in an error: what came of it is dropped, and everything put back."""
        for unit in self.units:
            unit.after_backward()
        while self.in_flight:
            self.in_flight.pop(0).drop()
        for bucket in self.buckets or ():
            bucket.matrices = None
        self.in_backward = False

    # -- gradients that wait --------------------------------------------------------------------------------
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside: gradients add up on each rank and are not reduced. The first backward pass outside reduces all."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    def _entries(self) -> Iterator[Entry]:
        for unit in self.units:
            if unit.copies is not None:
                yield from unit.entries

    def _leave_marks(self) -> None:
        """Remember what the optimizer sees, to notice if it is told to forget (zero_grad)."""
        for entry in self._entries():
            if any(leaf.grad is not None for leaf in entry.leaves):
                for value in entry.values:
                    if value.grad is None:
                        value.grad = torch.zeros_like(value)
                grads: list[Any] = [value.grad for value in entry.values]
                entry.mark = [(grad, grad._version) for grad in grads]
                entry.param._unreduced = True

    def _forget_marks(self) -> None:
        for entry in self._entries():
            if entry.mark is not None:
                entry.mark = None
                entry.param.__dict__.pop("_unreduced", None)

    def _drop_what_was_zeroed(self) -> None:
        for entry in self._entries():
            if entry.mark is not None and not all(
                value.grad is grad and grad._version == version  # type: ignore[union-attr]
                for value, (grad, version) in zip(entry.values, entry.mark, strict=True)
            ):
                entry.mark = None
                entry.param.__dict__.pop("_unreduced", None)
                for leaf in entry.leaves:
                    leaf.grad = None
