"""A warm op on a sharded tensor does no Python work that grows with the number of ranks."""

from tests.only_torch import run_with_torch

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise import sharded as S


def count_calls(run):
    '''How many functions of Python and C a call enters.'''
    seen = []
    sys.setprofile(lambda frame, event, arg: seen.append(event) if event in ("call", "c_call") else None)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(seen)


world = int(sys.argv[1])
dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
spec = S.ChunkShardingSpec(0, [f"rank:{r}/cpu" for r in range(world)])
tiles = [S.ShardMetadata([2 * r, 0], [2, 6], f"rank:{r}/cpu") for r in range(world)]
slabs = S.ones(spec, 2 * world, 6)
listed = S.ones(S.EnumerableShardingSpec(tiles[::-1]), 2 * world, 6)
ops = {
    "softmax": lambda: torch.softmax(slabs, 1),
    "view": lambda: slabs.view(2 * world, 2, 3),
    "listed": lambda: torch.cumsum(listed, 1),
    "in place": lambda: slabs.cumsum_(1),
    "to_dtensor": lambda: slabs.to_dtensor(),
    "elementwise": lambda: slabs * 2 + slabs,
    "chained": lambda: torch.softmax(torch.cumsum(slabs, 1), 1) * 2,
}
print({name: [op() is None, op() is None, count_calls(op)][2] for name, op in ops.items()})
"""


def calls(world):
    done = run_with_torch(PROGRAM, ["program", str(world)])
    assert done.returncode == 0, done.stderr
    return eval(done.stdout)


def test_calls_do_not_grow_with_the_ranks():
    assert calls(4) == calls(48)
