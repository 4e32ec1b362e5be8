"""`grad_fn` of a distributed tensor. Its local tensors have a node each, so what hooks on one of them see is a part of
the gradient, of one rank: such hooks are refused. Everything else is read off the first local tensor's node.
"""

from __future__ import annotations

import functools
from typing import NoReturn

import torch
from torch.autograd import graph
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from shardwise.autograd.leaves import first_leaf
from shardwise.errors import AutogradError
from shardwise.torch_private.autograd import take_nodes
from shardwise.wrapper import Wrapper


@Node.register
class LocalNode:
    """The node of a rank's tensor, on which no hooks can be registered."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __getattr__(self, name: str) -> object:
        return getattr(self._node, name)

    def __dir__(self) -> list[str]:
        return dir(self._node)

    def __eq__(self, other: object) -> bool:
        return self._node is (other._node if isinstance(other, LocalNode) else other)

    def __hash__(self) -> int:
        return hash(self._node)

    def __repr__(self) -> str:
        return repr(self._node)

    def register_hook(self, fn: object) -> NoReturn:
        raise self._refusal("register_hook")

    def register_prehook(self, fn: object) -> NoReturn:
        raise self._refusal("register_prehook")

    def _refusal(self, what: str) -> AutogradError:
        return AutogradError(
            f"grad_fn.{what} of a distributed tensor: each rank has a {self._node.name()} of its own, which sees part "
            f"of the gradient. Call register_hook on the tensor itself; on a module, register_full_backward_hook"
        )


def node_of(tensor: Wrapper) -> Node | LocalNode | None:
    """The `grad_fn` of a distributed tensor. That of a Function of the program's is one node for all ranks, which gives
    its hooks distributed tensors; of others, a view of the first rank's."""
    node = first_leaf(tensor).grad_fn
    whole = isinstance(node, BackwardCFunction) and type(node).register_hook is not BackwardCFunction.register_hook
    return node if node is None or whole else LocalNode(node)


def _without_guard(node: Node | LocalNode) -> Node:
    return node._node if isinstance(node, LocalNode) else node


def take_graph_nodes() -> None:
    """Have register_multi_grad_hook find the nodes themselves, and get_gradient_edge refuse distributed tensors."""
    take_nodes(_without_guard)
    find = graph.get_gradient_edge

    @functools.wraps(find)
    def get_gradient_edge(tensor: torch.Tensor) -> GradientEdge:
        if isinstance(tensor, Wrapper):
            raise AutogradError(
                "get_gradient_edge of a distributed tensor: each rank has an edge of its own, to a part of the graph. "
                "Give the tensor itself to torch.autograd.grad or backward"
            )
        return find(tensor)

    graph.get_gradient_edge = get_gradient_edge
