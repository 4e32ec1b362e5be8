"""The decorators and checks with which torch's programs register ops of their own for sharded tensors, ops in the form
in which they are registered, `op(types, args, kwargs, process_group)`, and the logger that torch has for them."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.sharded import factories
from shardwise.sharded.metadata import ShardedTensorMetadata
from shardwise.sharded.ops import embedding, fills, methods, registry
from shardwise.sharded.ops.registry import Function, Op
from shardwise.sharded.shard import Shard
from shardwise.sharded.tensor import ShardedTensor, first_sharded

Parts = tuple[list[Shard], ShardedTensorMetadata]


def _basic_validation(op: Function, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None:
    """Raise where an op is called without a sharded tensor."""
    kwargs = kwargs or {}
    if not args and not kwargs:
        raise ValueError(f" No input for '{op.__name__}'!")
    if first_sharded((*args, *kwargs.values())) is None:
        raise TypeError(
            f"torch function '{op.__name__}', with args: {tuple(args)} and kwargs: {dict(kwargs)} are called without "
            f"any sharded tensor!"
        )


def _register_op(op: Function, func: Op, op_table: dict[Any, Op]) -> None:
    """Put a function `(types, args, kwargs, process_group)` into a table."""
    registry.put(op_table, op, "Custom sharded op function")(func)


def _decorator_func(wrapped_func: Op, op: Function, op_table: dict[Any, Op]) -> Op:
    _register_op(op, wrapped_func, op_table)
    return wrapped_func


def _register_default_op(op: Function, decorator: Callable[[Function], Callable[[Op], Op]]) -> None:
    """Register, by a decorator such as `custom_sharded_op_impl`, that `op` does what it does without registration: it
    runs on the tiles where they allow it, and over a mesh layout where they do not."""

    @decorator(op)
    def default(types: tuple[type, ...], args: Any, kwargs: Any, process_group: object) -> Any:
        _basic_validation(op, args, kwargs)
        return registry.default(op, args, kwargs or {})


def _sharded_op_common(
    op: Function, early_stop_func: Callable[..., bool] | None, extra_check: Callable[..., None] | None
) -> Callable[[Op], Op]:
    """Return a decorator that checks the arguments before the function runs, by `extra_check(*args, **kwargs)` too.

    Where `early_stop_func(*args, **kwargs)` is true, the function does not run and the result is its first argument.
    """

    def decorate(wrapped: Op) -> Op:
        @functools.wraps(wrapped)
        def run(types: tuple[type, ...], args: Any = (), kwargs: Any = None, pg: object = None) -> Any:
            kwargs = kwargs or {}
            _basic_validation(op, args, kwargs)
            if extra_check is not None:
                extra_check(*args, **kwargs)
            if early_stop_func is not None and early_stop_func(*args, **kwargs):
                return args[0]
            return wrapped(types, args, kwargs, pg)

        return run

    return decorate


def _register_sharded_op_on_local_shards(
    op: Function,
    early_stop_func: Callable[..., bool] | None = None,
    extra_check: Callable[..., None] | None = None,
    customized_func: Callable[..., Parts] | None = None,
) -> Op:
    """Register that `op` is called on each local shard of its first argument.

    With `customized_func(args, kwargs, pg)` that function is called instead; it returns local shards and metadata.
    """

    @registry.custom_sharded_op_impl(op)
    @_sharded_op_common(op, early_stop_func, extra_check)
    def on_local_shards(
        types: tuple[type, ...], args: Any = (), kwargs: Any = None, pg: object = None
    ) -> ShardedTensor:
        tensor: ShardedTensor = args[0]
        if customized_func is None:
            return tensor._with_parts([op(part, *args[1:], **(kwargs or {})) for part in tensor._parts])
        shards, metadata = customized_func(args, kwargs, pg)
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, metadata, process_group=tensor._process_group, init_rrefs=tensor._init_rrefs
        )

    return on_local_shards


tensor_like_creation_op_map: dict[Function, Callable[..., ShardedTensor]] = {
    torch.full_like: factories.full,
    torch.empty_like: factories.empty,
    torch.zeros_like: factories.zeros,
    torch.ones_like: factories.ones,
    torch.rand_like: factories.rand,
    torch.randn_like: factories.randn,
}


def validate_param(param: object, param_name: str) -> None:
    fills.check_not_none(**{param_name: param})


def register_tensor_creation_op(op: Function) -> None:
    """Register that `op`, such as `torch.full_like`, makes a tensor in the tiles of its first argument, by the factory
    that `tensor_like_creation_op_map` has for it."""

    @registry.custom_sharded_op_impl(op)
    def like(types: tuple[type, ...], args: Any = (), kwargs: Any = None, pg: object = None) -> ShardedTensor:
        tensor, *rest = args
        options = {"dtype": tensor.dtype} | (kwargs or {})
        size = [tensor.size()] if op is torch.full_like else list(tensor.size())
        return tensor_like_creation_op_map[op](
            tensor.sharding_spec(), *size, *rest, process_group=tensor._process_group, **options
        )


# -- ops as they are registered ------------------------------------------------------------------------------------
def _op(work: Callable[..., Any]) -> Op:
    return lambda types, args=(), kwargs=None, pg=None: work(*args, **(kwargs or {}))


def _op_on_parts(work: Callable[..., Any]) -> Callable[..., Parts]:
    """A function that returns the local shards and the metadata of a result."""

    def op(args: Sequence[Any], kwargs: Mapping[str, Any] | None, pg: object) -> Parts:
        made = work(*args, **(kwargs or {}))
        return made.local_shards(), made.metadata()

    return op


uniform_, normal_, constant_ = _op(fills.uniform_), _op(fills.normal_), _op(fills.constant_)
kaiming_uniform_ = _op(fills.kaiming_uniform_)
sharded_embedding, sharded_embedding_bag = _op(embedding.embedding), _op(embedding.embedding_bag)
tensor_device = _op(lambda tensor, *_: tensor.device)
st_is_meta = _op(lambda tensor, *_: tensor.is_meta)
sharded_inplace_copy, tensor_requires_grad_set = _op(torch.Tensor.copy_), _op(torch.Tensor.requires_grad_)
tensor_has_compatible_shallow_copy_type = _op(lambda *args: False)  # a sharded tensor takes over no other's memory
sharded_type_as = _op_on_parts(lambda tensor, other: tensor.to(other.dtype))
sharded_deepcopy, sharded_clone = _op_on_parts(copy.deepcopy), _op_on_parts(torch.clone)
sharded_detach = _op_on_parts(torch.detach)


def sharded_type_as_check(*args: object, **kwargs: object) -> None:
    """Raise where `type_as` is called without a tensor to take the type of."""
    if len(args) < 2:
        raise ValueError("Needs to give a tensor to cast type as!")
    if not isinstance(args[1], torch.Tensor):
        raise ValueError(f"Needs to give a Tensor or ShardedTensor to cast type as, got {type(args[1]).__name__}")


def same_dtype(*args: Any, **kwargs: object) -> bool:
    return args[0].dtype == args[1].dtype


def binary_cmp(
    cmp_fun: Any, types: tuple[type, ...], args: Any, kwargs: Any = None, process_group: object = None
) -> bool:
    """`torch.equal` or `torch.allclose` of two sharded tensors in any tiles."""
    if len(args) != 2:
        raise ValueError(f"Expected two arguments for torch.{cmp_fun.__name__}, got {len(args)}")
    compare = {torch.equal: methods.equal, torch.allclose: methods.allclose}[cmp_fun]
    return compare(*args, **(kwargs or {}))


equal, allclose = functools.partial(binary_cmp, torch.equal), functools.partial(binary_cmp, torch.allclose)


def _communicate_result(result: object, pg: dist.ProcessGroup) -> bool:
    return methods.true_on_all_ranks(bool(result), pg)


# -- the logger: silent unless somebody puts a handler in ----------------------------------------------------------
_log_handlers: dict[str, logging.Handler] = {"default": logging.NullHandler()}


def _get_or_create_logger() -> logging.Logger:
    handler, name = _get_logging_handler()
    logger = logging.getLogger(f"sharding-spec-{name}")
    logger.setLevel(logging.DEBUG)
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(filename)s:%(lineno)s %(levelname)s p:%(processName)s %(message)s")
    )
    logger.propagate = False
    if handler not in logger.handlers:
        logger.addHandler(handler)
    return logger


def _get_logging_handler(destination: str = "default") -> tuple[logging.Handler, str]:
    if destination not in _log_handlers:
        raise KeyError(f"destination: no handler for {destination!r}; there are {sorted(_log_handlers)}")
    handler = _log_handlers[destination]
    return handler, type(handler).__name__
