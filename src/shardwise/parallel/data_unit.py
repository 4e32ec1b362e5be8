"""A module whose parameters are gathered, used and freed together."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shardwise.comm.rank_tensor import RankTensor
from shardwise.errors import LayoutError
from shardwise.parallel.data_copies import Copies, Entry
from shardwise.parallel.data_freed import close
from shardwise.parallel.data_grads import GradBucket
from shardwise.wrapper import Wrapper

BUCKET_BYTES = 25 << 20


class Unit:
    """One module, the parameters it answers for, and where it stands between forward and backward."""

    def __init__(self, state: Any, module: torch.nn.Module, entries: Sequence[Entry]) -> None:
        self.state, self.module, self.entries = state, module, list(entries)
        module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.after_forward, always_call=True, with_kwargs=True)
        self._reset()

    def _reset(self) -> None:
        owners = {id(module): module for entry in self.entries for module, _ in entry.owners}
        self.recurrent = [module for module in owners.values() if isinstance(module, torch.nn.RNNBase)]
        self.copies: list[Copies] | None = None
        self.own = False  # whether the leaves are the parameters' own tensors: one rank has nothing to reduce
        self.buckets: list[GradBucket] = []
        self.trained: list[bool] | None = None
        self.slots: list[tuple[dict[str, Any], str, Any, Any]] = []  # where which leaf stands in for which parameter
        self.shown: list[Any] = []  # typed ones, made anew each time
        self.expected: frozenset[int] = frozenset()  # the leaves that need a gradient
        self.waiting: set[int] = set()
        self.running = False  # inside of its forward
        self.in_backward = self.inputs_done = self.installed = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the module makes leaves of its own."""
        kept = {"state": self.state, "module": self.module, "entries": self.entries}
        return kept

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__dict__.update(kept)
        self._reset()

    # -- the leaves -----------------------------------------------------------------------------------------
    def prepare(self) -> None:
        """Leaves for all parameters, that need a gradient where these do, and buckets for what they get."""
        if self.copies is None:
            with torch.inference_mode(False):  # they are for training too
                self._make_leaves()
        trained = [value.requires_grad for value in self.firsts]
        if trained != self.trained:
            self.trained = trained
            self._make_buckets()

    def _make_leaves(self) -> None:
        groups: dict[Any, list[Entry]] = {}
        for entry in self.entries:
            own = entry.home.own
            groups.setdefault((own.dtype, entry.dtype, own.device), []).append(entry)
        self.copies = [Copies(group, self.state.data) for group in groups.values()]
        self.own = self.state.data.size == 1 and all(copies.alias for copies in self.copies)
        for entry in self.entries:
            for leaf in {id(v): v for v in entry.leaves}.values():
                leaf.requires_grad_(entry.param.requires_grad)
        self.firsts = [entry.values[0] for entry in self.entries]
        for entry in self.entries:
            value = entry.plain()
            self.slots += [(module._parameters, name, value, entry.param) for module, name in entry.owners]

    def _make_buckets(self) -> None:
        self.buckets, groups = [], {}  # type: ignore[var-annotated]
        expected = []
        for entry, needed in zip(reversed(self.entries), reversed(self.trained or ()), strict=True):
            for leaf in {id(v): v for v in entry.leaves}.values():
                expected += [id(leaf)] if needed else []
                if leaf.requires_grad != needed:
                    leaf.requires_grad_(needed)
                if needed and not self.own and not getattr(leaf, "_reports", False):
                    leaf._reports = True  # type: ignore[attr-defined]
                    leaf.register_post_accumulate_grad_hook(functools.partial(_arrived, self))
            if needed and not self.own:
                groups.setdefault((entry.home.own.dtype, entry.dtype), []).append(entry)
        for group in groups.values():
            for part in _by_size(group):
                self.buckets.append(GradBucket(part, self.state.data, self.state.reduce_dtype))
        self.expected = frozenset(expected)
        self.all_trained = all(self.trained or ())
        self.state.buckets = None

    def start(self) -> None:
        if self.copies is None:
            self.prepare()
        if not self.own:
            for copies in self.copies or ():
                copies.start()

    def gather(self) -> None:
        if self.own:
            return
        self.start()
        for copies in self.copies or ():
            copies.finish()

    def free(self) -> None:
        for copies in self.copies or ():
            copies.free()
        for tensor in self.shown:
            close(tensor)
        self.shown = []

    # -- standing in ----------------------------------------------------------------------------------------
    def install(self) -> None:
        """The module computes with the leaves."""
        if self.installed:
            return
        for parameters, name, _, param in self.slots:
            if parameters.get(name) is not param:
                raise LayoutError(
                    f"data_parallel: parameter {name!r} of shape {tuple(param.shape)} was replaced or taken away after "
                    f"data_parallel(); change the module (dtype, parametrizations, new parameters) before, or write "
                    f"into it: param.copy_(...), load_state_dict(...)"
                )
        self.installed = True
        if self.state.typed:
            for entry in self.entries:
                value = entry.typed(self.state.data)
                if self.state.frees:
                    self.shown.append(value)
                for module, name in entry.owners:
                    module._parameters[name] = value
        else:
            for parameters, name, value, _ in self.slots:
                parameters[name] = value
        if self.recurrent:
            self._tell_recurrent()

    def uninstall(self) -> None:
        """The module shows its parameters again."""
        if not self.installed:
            return
        self.installed = False
        for parameters, name, _, param in self.slots:
            parameters[name] = param
        if self.recurrent:
            self._tell_recurrent()

    def _tell_recurrent(self) -> None:
        """RNNs keep a list of their parameters beside them."""
        for module in self.recurrent:
            module._flat_weights = [getattr(module, n, None) for n in module._flat_weights_names]

    # -- forward --------------------------------------------------------------------------------------------
    def before_forward(self, module: Any, args: Any, kwargs: Any) -> Any:
        state = self.state
        changed = state.enter(self, args, kwargs)
        self.running = True
        self.prepare()
        self.gather()
        self.install()
        state.prefetch(self, forward=not state.in_backward)
        if changed is not None:
            args, kwargs = changed
        if state.frees and not self.all_trained and torch.is_grad_enabled():
            self._watch_inputs(args, kwargs)
        return changed

    def _watch_inputs(self, args: Any, kwargs: Any) -> None:
        """Frozen parameters get no gradient that could say they are done with: the inputs' gradients do."""
        inputs = [v for v in plain_tensors((args, kwargs)) if v.requires_grad]
        if inputs:
            torch.autograd.graph.register_multi_grad_hook(inputs, lambda grads: self._inputs_have_theirs())

    def after_forward(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        state = self.state
        self.running = hooked = False
        if torch.is_grad_enabled():
            for value in plain_tensors(output):
                if value.requires_grad:
                    value.register_hook(self._backward_begins)
                    hooked = True
        if not self.in_backward:
            self.uninstall()
            needed = torch.is_grad_enabled() and (not hooked or self is state.root)
            if state.frees and not needed and not self._lends(output):
                self.free()
        state.exit(self, output)

    def _lends(self, output: Any) -> bool:
        """Whether an output is a view of a parameter: it stays until the backward pass ends, or the next forward."""
        rooms = {room.untyped_storage().data_ptr() for copies in self.copies or () for room in copies.held()}
        return any(v.untyped_storage().data_ptr() in rooms for v in plain_tensors(output))

    # -- backward -------------------------------------------------------------------------------------------
    def _backward_begins(self, grad: Any) -> None:
        if self.in_backward:
            return
        self.state.begin_backward()
        if torch.is_grad_enabled():  # create_graph=True: what this pass computes will be differentiated
            self.state.frees_after = False
        self.in_backward = True
        self.waiting = set(self.expected)
        self.gather()
        self.install()
        self.state.prefetch(self, forward=False)

    def arrived(self, leaf: torch.Tensor) -> None:
        self.state.begin_backward()
        self.waiting.discard(id(leaf))
        if self.state.sync:
            self.state.take(leaf)
        self._maybe_done()

    def _inputs_have_theirs(self) -> None:
        self.inputs_done = True
        self._maybe_done()

    def _maybe_done(self) -> None:
        if self.in_backward and not self.waiting and (self.all_trained or self.inputs_done):
            self.after_backward()

    def after_backward(self) -> None:
        self.in_backward = self.inputs_done = False
        self.waiting = set()
        if self.running:  # a gradient that the forward itself asks for
            return
        self.uninstall()
        if self.state.frees and self.state.frees_after:
            self.free()


def _arrived(unit: Unit, leaf: torch.Tensor) -> None:
    unit.arrived(leaf)


def _by_size(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """The entries in lists of up to BUCKET_BYTES."""
    bucket: list[Entry] = []
    size = 0
    for entry in entries:
        n = entry.leaves[0].nbytes
        if bucket and size + n > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(entry)
        size += n
    if bucket:
        yield bucket


def plain_tensors(tree: Any) -> list[torch.Tensor]:
    """The plain tensors inside arguments or results, those behind DTensors and of every simulated rank included."""
    if type(tree) is torch.Tensor:
        return [tree]
    found: dict[int, torch.Tensor] = {}
    for item in tree_leaves(tree):
        if isinstance(item, Wrapper):
            values: Sequence[torch.Tensor] = item._layout.mesh.comm.values(item._local)
        elif isinstance(item, RankTensor):
            values = item.ranks
        else:
            values = (item,) if isinstance(item, torch.Tensor) else ()
        found.update((id(v), v) for v in values)
    return list(found.values())
