"""When ranks exchange the sizes of plain tensors that styles and local_map get, and that no change is missed."""

import torch
from torch import nn

import shardwise
from shardwise import DTensor, Replicate, Shard, debug, distribute_tensor, sizes
from shardwise.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from shardwise.parallel.styles import remembered
from tests.parallel.test_siblings import CUT, WIDTH, mixer, same, whole
from tests.workers import device_mesh, run_ranks


def part(x, mesh, rows):
    """This rank's rows of a (batch, sequence, width) tensor, of which each rank has so many."""
    return x.split(rows, 1)[mesh.get_local_rank()]


def exchanges(log):
    return sum(entry.reason == "sizes" for entry in log)


def sample(rows, seed):
    return torch.randn(3, rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def one_exchange_for_one_tensor(mesh):
    """The norm gets a new plain tensor; the projections get what the norm gave, whose layout is known."""
    model, plain = parallelize_module(mixer(), mesh, CUT), mixer()
    for step, grad in enumerate((True, True, False, False)):
        x = sample(7, step)
        with torch.set_grad_enabled(grad), debug.ledger() as log:
            out = model(part(x, mesh, (4, 3)))
        same(whole(out), part(plain(x), mesh, (4, 3)).detach())
        assert exchanges(log) == 1, grad


def none_between_styles(mesh):
    """A chain of modules that hand local tensors to each other: only the first exchanges anything."""
    torch.manual_seed(0)
    chain = nn.Sequential(nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, WIDTH)).double()
    plain = torch.nn.Sequential(*chain)
    want = [plain(sample(5, step)).detach() for step in range(3)]
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "1": SequenceParallel(use_local_output=True),
        "2": SequenceParallel(use_local_output=True),
        "3": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(chain, mesh, plan)
    for step in range(3):
        with torch.set_grad_enabled(step != 1), debug.ledger() as log:
            out = chain(sample(5, step))
        same(whole(out), want[step])
        assert exchanges(log) == 0


def a_change_on_one_rank(mesh):
    """The other rank cannot see it, and yet takes part in what follows with the right sizes."""
    model, plain = parallelize_module(mixer(), mesh, CUT), mixer()
    for step, rows in enumerate(((4, 4), (4, 4), (4, 3), (4, 4), (3, 3), (3, 2))):
        x = sample(sum(rows), step)
        out = model(part(x, mesh, rows))
        same(whole(out), part(plain(x), mesh, rows).detach(), f"{rows}")


def every_input_that_is_cut(mesh):
    model, plain = mixer(), mixer()
    parallelize_module(model, mesh, PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()))
    for rows in ((4, 3), (4, 2), (4, 0), (0, 4), (2, 4)):
        x = sample(sum(rows), 0)
        mine = part(x, mesh, rows)
        for again in range(2):
            with debug.ledger() as log:
                same(whole(model(mine)), plain(x).detach())
            assert exchanges(log) == (not again)


def a_tensor_that_changed_its_shape(mesh):
    """The same object in another shape is another tensor."""
    style = SequenceParallel(sequence_dim=0, use_local_output=True)
    norm = parallelize_module(nn.Identity(), mesh, style)
    x = norm(torch.arange(12.0).view(6, 2)[: 4 if mesh.get_local_rank() else 3])
    x.resize_(2, 2)
    laid = parallelize_module(nn.Identity(), mesh, SequenceParallel(sequence_dim=0))(x)
    assert laid.shape == (4, 2)


def functions_of_local_tensors(mesh):
    """local_map cannot know what a function gives: a change of its output on one rank alone is noticed."""
    rank, keep = mesh.get_local_rank(), {}
    taken = shardwise.local_map(lambda x: x[: keep[rank]], out_placements=[Shard(0)])
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    for rows in ((4, 4), (4, 4), (4, 1), (0, 1)):
        keep.update(enumerate(rows))
        want = torch.cat([torch.arange(4.0)[: rows[0]], torch.arange(4.0, 8)[: rows[1]]])
        same(taken(x).full_tensor(), want)


def on_ranks(rank, world_size):
    mesh = device_mesh((world_size,), ("tp",))
    for check in (
        one_exchange_for_one_tensor,
        none_between_styles,
        a_change_on_one_rank,
        every_input_that_is_cut,
        a_tensor_that_changed_its_shape,
        functions_of_local_tensors,
    ):
        check(mesh)
    hosts_exchange(mesh)


def hosts_exchange(mesh):
    """Where a group can exchange what is in the hosts' memory, the sizes of tensors on a device travel there."""
    laid = DTensor.from_local(torch.empty(2 + mesh.get_local_rank(), 3, device="meta"), mesh, [Shard(0)])
    assert laid.shape == (5, 3)
    asked = []
    inner = shardwise.mesh.as_mesh(mesh)
    local = torch.empty(2, 3, device="meta")
    assert sizes._hosts_can_gather(local, inner) and not sizes._hosts_can_gather(torch.empty(2), inner)
    before, inner.comm.all_kinds = inner.comm.all_kinds, lambda local: asked.append(local) or {(0,): ("", (2, 3))}
    try:
        sizes.exchange_kinds(local, inner)
    finally:
        inner.comm.all_kinds = before
    assert asked[0].device.type == "cpu" and asked[0].shape == (2, 3) and asked[0].untyped_storage().nbytes() == 4


def test_on_processes():
    run_ranks(on_ranks, 2)


def test_what_is_known_goes_with_its_tensor():
    mesh = shardwise.simulate(2)
    layout = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).layout
    mesh, before = shardwise.mesh.as_mesh(mesh), len(remembered._known)
    x = torch.ones(2)
    remembered.remember_layout(x, layout)
    assert remembered.known_layout(x, (Shard(0),), mesh) is layout
    assert remembered.known_layout(x, (Shard(-1),), mesh) is layout
    for other in (Replicate(), shardwise.Partial(), Shard(0, sizes=(1, 3))):
        assert remembered.known_layout(x, (other,), mesh) is None
    assert remembered.known_layout(x.clone(), (Shard(0),), mesh) is None
    del x
    assert len(remembered._known) == before
