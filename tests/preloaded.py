"""What the workers load, loaded once: they are forked off a process that has imported this module.

Nothing here may start a thread, which a fork would lose: no process group, no mesh, no backward pass.
"""

import gc

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch
import torch.distributed.checkpoint
import torch.distributed.device_mesh  # noqa: F401

import shardwise  # noqa: F401
import shardwise.checkpoint
import shardwise.debug
import shardwise.experimental
import shardwise.parallel
import shardwise.sharded
import shardwise.testing  # noqa: F401


def warm_up():
    """The first step of an optimizer loads much of torch."""
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=0.1).step()


torch.set_num_threads(1)
warm_up()
gc.freeze()  # what all workers share is not looked through, nor copied, by their garbage collectors
