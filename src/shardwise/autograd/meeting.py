"""Where the gradients of simulated ranks meet, so that a hook sees them as one tensor and may change them all.

Each rank's tensor has a graph of its own, and autograd comes to the node of one rank before it comes to the next one's.
So a backward pass is prepared where hooks wait: its graph is searched for the nodes at which they do. The nodes that
pass gradients on to those tell what they pass on, and those themselves run as late as they can. When autograd comes to
the first of them, the gradients of all ranks are there.

A node is found by what is noted on it, or on its leaf: what holds the node would keep the graph alive for ever.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from shardwise.comm.base import Comm
from shardwise.errors import AutogradError
from shardwise.protocols import LocalValue, Structure
from shardwise.torch_private.autograd import gradient_hooks, number_of_node, set_number_of_node, take_backward_passes
from shardwise.torch_private.tensors import storage_id

Grads = Sequence[torch.Tensor | None]
Hook = Callable[[LocalValue | None], LocalValue | None]  # None: no gradient came by
Roots = Sequence[torch.Tensor | GradientEdge]

_NOTE = "shardwise: hooks of simulated ranks"  # in the metadata of a node
_alive: weakref.WeakSet[Meeting] = weakref.WeakSet()


class Meeting:
    """The hooks on a tensor of simulated ranks, each a function of a local gradient."""

    def __init__(self, comm: Comm, structure: Structure, parts: Sequence[torch.Tensor]) -> None:
        self.hooks: OrderedDict[int, Hook] = OrderedDict()
        self.comm, self.structure = comm, structure
        self.kinds = [(part.shape, part.dtype, part.device) for part in parts]
        self.passes: list[_Pass] = []  # that are under way: a node may start another one
        for i, part in enumerate(parts):
            edge = edge_of(part)  # torch crashes without it if the part is a view that was written
            if edge is not None and not part.is_leaf:
                _notes_on(edge.node).setdefault(edge.output_nr, []).append((self, i))
            part.register_hook(_OfPart(self, i))
        _alive.add(self)

    def run_hooks(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """What the hooks make of the gradients, each in memory of its own: the next ones are added to it in place."""
        gradient: LocalValue | None = self.comm.assemble(self.structure, grads)
        for hook in list(self.hooks.values()):
            gradient = hook(gradient)
        made = self.comm.pick(self.structure, gradient)  # type: ignore[arg-type]
        memory = list(map(storage_id, made))
        return [grad.clone() if memory[i] in memory[:i] else grad for i, grad in enumerate(made)]


class _OfPart:
    """The hook on one rank's tensor."""

    def __init__(self, meeting: Meeting, i: int) -> None:
        self.meeting, self.i = meeting, i

    def __call__(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        if not self.meeting.hooks:
            return None
        if not self.meeting.passes:
            raise AutogradError(
                "register_hook: a backward pass that did not start with torch.autograd.backward or torch.autograd.grad "
                "came to a tensor of simulated ranks with hooks; start it with one of them"
            )
        return self.meeting.passes[-1].arrive(self.i, grad)


def meeting_of(comm: Comm, structure: Structure, parts: Sequence[torch.Tensor]) -> Meeting:
    """Where the gradients of these tensors, one for each rank that has its own, meet."""
    waiting = [list(_waiting_for(part)) for part in parts]
    for found, _ in waiting[0]:
        if all((found, i) in here for i, here in enumerate(waiting)) and len(found.kinds) == len(parts):
            return found
    if any(waiting):
        raise AutogradError(
            "register_hook: another tensor that some of the simulated ranks share has hooks; register them on a clone()"
        )
    return Meeting(comm, structure, parts)


def edge_of(part: torch.Tensor) -> GradientEdge | None:
    """Where a tensor's gradient comes to; None for a view that was made under no_grad: it says that it requires grad,
    as its base does, but only after `requires_grad_()` a gradient comes to it."""
    if part.requires_grad and part.grad_fn is None:
        with torch.enable_grad():
            node = part.view_as(part).grad_fn
        if node is None or node.next_functions[0][0] is None:
            return None
    return get_gradient_edge(part)


def _waiting_for(part: torch.Tensor) -> Iterator[tuple[Meeting, int]]:
    """Who waits for the gradient of a rank's tensor, and whose it is there."""
    edge = edge_of(part)
    return _of_leaf(part) if edge is None else _waiting_at(edge.node, edge.output_nr)


def _of_leaf(leaf: torch.Tensor) -> Iterator[tuple[Meeting, int]]:
    yield from ((hook.meeting, hook.i) for hook in gradient_hooks(leaf) if isinstance(hook, _OfPart))


def _waiting_at(node: Node, output: int) -> Iterator[tuple[Meeting, int]]:
    """Who waits for the gradient that comes to an output of a node, and whose tensor's it is there."""
    leaf = getattr(node, "variable", None)
    if leaf is not None:
        yield from _of_leaf(leaf)
    else:
        yield from _notes_on(node).get(output, ())


def _waiting_anywhere(node: Node) -> list[tuple[Meeting, int]]:
    """Who waits for the gradient of any of a node's outputs."""
    outputs = [0] if hasattr(node, "variable") else list(_notes_on(node))
    return [found for output in outputs for found in _waiting_at(node, output)]


def _notes_on(node: Node) -> dict[int, list[tuple[Meeting, int]]]:
    """By output of the node, who waits there."""
    return node.metadata.setdefault(_NOTE, {})  # type: ignore[attr-defined]


class _Pass:
    """What one backward pass brings to a meeting."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self.found: list[list[torch.Tensor]] = [[] for _ in meeting.kinds]
        self.nodes: set[Node] = set()  # of the meeting's tensors
        self.to_come = 0  # nodes that have not told what they pass on
        self.after: list[torch.Tensor] | None = None  # what the hooks made of it
        self.left: dict[int, torch.Tensor] = {}  # of that, what no node has taken yet

    def tell(self, i: int, at: int, grads: Grads, _: Grads) -> None:
        self.to_come -= 1
        if (grad := grads[at]) is not None:
            self.found[i].append(grad)

    def arrive(self, i: int, grad: torch.Tensor | None) -> torch.Tensor | None:
        if self.after is None:
            if self.to_come:
                raise AutogradError(
                    "register_hook: the gradients of simulated ranks do not come to this tensor together, since the "
                    "pass runs on several devices or was built by several threads; move the hook to another tensor"
                )
            if grad is None and not any(self.found):
                self.after = []
                for hook in list(self.meeting.hooks.values()):  # torch tells hooks that there is none
                    hook(None)
                return None
            self.after = self.meeting.run_hooks([self._of(j, grad if j == i else None) for j in range(len(self.found))])
            self.left = dict(enumerate(self.after))
        self.left.pop(i, None)
        return self.after[i] if self.after else None

    def _of(self, i: int, came: torch.Tensor | None) -> torch.Tensor:
        """The gradient of one of the tensors."""
        if came is not None:
            return came
        shape, dtype, device = self.meeting.kinds[i]
        zeros = torch.zeros(shape, dtype=dtype, device=device)
        return functools.reduce(torch.add, self.found[i]) if self.found[i] else zeros

    def check(self) -> None:
        """Raise if what the hooks made for a rank is lost, because the pass has no way to that rank's tensor."""
        if any(bool(grad.any()) for grad in self.left.values()):
            raise AutogradError(
                "register_hook: a hook gave a gradient to ranks that had none, and the backward pass does not reach "
                "their tensors; use the tensor on all ranks, or redistribute it"
            )


@contextmanager
def meeting(roots: Roots, seeds: Grads) -> Iterator[None]:
    """Prepare a backward pass from these roots for the hooks that wait on its way."""
    if not any(waiting.hooks for waiting in _alive):
        yield
        return
    with ExitStack() as stack:
        found = _search(roots, seeds, stack)
        _run_late([one.nodes for one in found.values()], stack)
        for waiting, one in found.items():
            waiting.passes.append(one)
            stack.callback(waiting.passes.remove, one)
        yield
        for one in found.values():
            one.check()


def _search(roots: Roots, seeds: Grads, stack: ExitStack) -> dict[Meeting, _Pass]:
    """What waits on the way of a pass. The nodes before it tell it what they pass on, until the stack is closed."""
    found: dict[Meeting, _Pass] = {}
    starts = [(_edge_of(root), seed) for root, seed in zip(roots, seeds, strict=True) if _is_recorded(root)]
    seen = {edge.node for edge, _ in starts}
    queue = list(seen)
    for edge, seed in starts:
        for waiting, i in _waiting_at(edge.node, edge.output_nr):
            found.setdefault(waiting, _Pass(waiting)).found[i] += [] if seed is None else [seed]
    while queue:
        node = queue.pop()
        for waiting, _ in _waiting_anywhere(node):  # torch calls the hooks of all its outputs
            found.setdefault(waiting, _Pass(waiting)).nodes.add(node)
        for at, (after, output) in enumerate(node.next_functions):
            if after is None:
                continue
            for waiting, i in _waiting_at(after, output):
                one = found.setdefault(waiting, _Pass(waiting))
                one.to_come += 1
                stack.callback(_add_hook(node, functools.partial(one.tell, i, at)).remove)
            if after not in seen:
                seen.add(after)
                queue.append(after)
    return found


def _add_hook(node: Node, hook: Callable[[Grads, Grads], None]) -> RemovableHandle:
    """Put a hook on the plain gradients that a node passes on; the nodes of a user's Function show distributed ones."""
    kind = BackwardCFunction if isinstance(node, BackwardCFunction) else type(node)
    return kind.register_hook(node, hook)


def _is_recorded(root: torch.Tensor | GradientEdge) -> bool:
    return isinstance(root, GradientEdge) or root.requires_grad


def _edge_of(root: torch.Tensor | GradientEdge) -> GradientEdge:
    return root if isinstance(root, GradientEdge) else get_gradient_edge(root)


def _run_late(groups: Sequence[set[Node]], stack: ExitStack) -> None:
    """Have autograd come to these nodes after all others that are ready; of two groups, first to the one that was
    made later. It takes the node of the highest number first, and leaves have the highest of all."""
    ends = lambda nodes: any(hasattr(node, "variable") for node in nodes)  # noqa: E731
    ordered = sorted(groups, key=lambda nodes: (not ends(nodes), max(map(number_of_node, nodes))))
    for number, nodes in enumerate(ordered):
        for node in nodes:
            stack.callback(set_number_of_node, node, number_of_node(node))
            set_number_of_node(node, number)


take_backward_passes(meeting, _alive.__len__)
