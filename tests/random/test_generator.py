"""The stream: seeded, saved, restored and forked by torch's own means; the same on all ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import CommError, Replicate, Shard, simulate
from shardwise.mesh import as_mesh
from shardwise.random.draw import common_key
from tests.thread_ranks import run_threads
from tests.workers import device_mesh, run_ranks

MESH, PLACES = (4,), [Shard(0)]


def numbers(**options):
    return shardwise.rand(6, 3, device_mesh=simulate(MESH), placements=PLACES, **options).full_tensor()


SEEDS = {
    "torch.manual_seed": lambda: torch.manual_seed(5),
    "shardwise.manual_seed": lambda: shardwise.manual_seed(5),
    "shardwise.random.manual_seed": lambda: shardwise.random.manual_seed(5),
    "the generator's": lambda: torch.default_generator.manual_seed(5),
}


@pytest.mark.parametrize("name", SEEDS)
def test_every_way_to_seed(name):
    torch.manual_seed(5)
    want = [numbers(), numbers()]
    for _ in range(2):  # the same seed again starts anew
        SEEDS[name]()
        torch.rand(0)
        assert torch.equal(numbers(), want[0]) and torch.equal(numbers(), want[1])
    assert not torch.equal(want[0], want[1])


def test_state_is_saved_and_restored():
    numbers()
    for save, restore in (
        (shardwise.random.get_state, shardwise.random.set_state),
        (torch.get_rng_state, torch.set_rng_state),
    ):
        state = save()
        want = [numbers(), numbers()]
        restore(state)
        assert torch.equal(numbers(), want[0]) and torch.equal(numbers(), want[1])


def test_forks():
    for fork in (shardwise.random.fork, torch.random.fork_rng):
        torch.manual_seed(1)
        with fork():
            want = numbers()
            numbers()
        assert torch.equal(numbers(), want)
    with pytest.raises(ZeroDivisionError), shardwise.random.fork():
        state = shardwise.random.get_state()
        numbers()
        raise ZeroDivisionError
    assert torch.equal(shardwise.random.get_state(), state)


def test_generators_of_their_own():
    generator = shardwise.random.Generator().manual_seed(3)
    state = torch.get_rng_state()
    one, two = numbers(generator=generator), numbers(generator=generator)
    assert not torch.equal(one, two) and torch.equal(torch.get_rng_state(), state)
    generator.manual_seed(3)
    assert torch.equal(numbers(generator=generator), one)
    saved = generator.get_state()
    assert torch.equal(numbers(generator=generator), two)
    generator.set_state(saved)
    x = shardwise.zeros(6, 3, device_mesh=simulate(MESH), placements=PLACES)
    assert torch.equal(x.uniform_(generator=generator).full_tensor(), two)
    assert torch.equal(numbers(generator=torch.Generator().manual_seed(3)), one), "torch's own are as good"
    torch.empty(3).normal_(generator=generator)  # and ours where torch takes one


def test_generators_fork():
    parent = shardwise.random.Generator().manual_seed(3)
    child, other = parent.fork(), parent.fork()
    first = numbers(generator=child)
    assert not torch.equal(first, numbers(generator=other)) and not torch.equal(first, numbers(generator=parent))
    again = shardwise.random.Generator().manual_seed(3).fork()
    assert isinstance(again, shardwise.random.Generator) and torch.equal(numbers(generator=again), first)


def test_plain_draws_move_the_stream_as_they_do_on_one_device():
    torch.manual_seed(2)
    torch.rand(3)
    want = numbers()
    torch.manual_seed(2)
    assert not torch.equal(numbers(), want)


def test_unknown_stream():
    with pytest.raises(ValueError, match="stream = 'mersenne'; give 'philox' or 'torch'"):
        shardwise.random.use("mersenne")


def test_use_is_a_switch_and_a_context():
    torch.manual_seed(0)
    plain = torch.rand(6, 3)
    shardwise.random.use("torch")
    try:
        torch.manual_seed(0)
        assert torch.equal(numbers(), plain)
        with shardwise.random.use("philox"):
            assert not torch.equal(numbers(), plain)
        torch.manual_seed(0)
        assert torch.equal(numbers(), plain)
    finally:
        shardwise.random.use("philox")
    torch.manual_seed(0)
    assert not torch.equal(numbers(), plain)


@pytest.mark.parametrize("stream", ["philox", "torch"])
@pytest.mark.parametrize("placements", [[Shard(0)], [Shard(1)], [Replicate()]], ids=str)
def test_activation_checkpointing(placements, stream):
    """The forward pass that is run again drops what the first one dropped."""
    mesh = simulate((3,))

    def block(x):
        torch.rand(2)  # a plain draw in between
        return F.dropout(F.rrelu(F.dropout(x, 0.4), training=True), 0.3) ** 2

    found = []
    with shardwise.random.use(stream):
        for run in (block, lambda x: checkpoint(block, x, use_reentrant=False)):
            torch.manual_seed(4)
            x = shardwise.randn(5, 4, dtype=torch.float64, device_mesh=mesh, placements=placements, requires_grad=True)
            numbers()
            y = run(run(x) + 1)
            numbers()  # the stream has gone on when backward runs
            y.sum().backward()
            found.append((y.detach().full_tensor(), x.grad.full_tensor(), numbers()))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def checkpointing_on_processes(rank, world_size):
    mesh = device_mesh((2, 2))
    grads = []
    for run in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=False)):
        torch.manual_seed(4)
        x = shardwise.randn(5, 4, device_mesh=mesh, placements=[Shard(0), Shard(1)], requires_grad=True)
        run(lambda x: F.dropout(x, 0.5) ** 2, x).sum().backward()
        grads.append(x.grad.full_tensor())
    assert torch.equal(*grads)


def test_activation_checkpointing_on_processes():
    run_ranks(checkpointing_on_processes, 4)


def seeded_apart(rank, world_size):
    """Ranks whose generators differ hear of it, all of them, before they draw different numbers."""
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")  # nothing was drawn on it before
    torch.manual_seed(rank)
    with pytest.raises(CommError, match="different random numbers.*seen after 1 draws.*Seed all ranks alike with shardwise.manual_seed"):
        shardwise.rand(4, 3, device_mesh=mesh)
    shardwise.manual_seed(9)
    with shardwise.random.fork():  # what differs between ranks is drawn here
        torch.manual_seed(rank)
        torch.rand(rank + 1)
    x = shardwise.rand(4, 3, device_mesh=mesh)
    torch.manual_seed(9)
    assert torch.equal(x.full_tensor(), shardwise.rand(4, 3, device_mesh=simulate((1,))).full_tensor())
    state = torch.get_rng_state()
    compared = []
    for _ in range(8):
        with shardwise.debug.ledger() as log:
            shardwise.randn(5, device_mesh=mesh, placements=[Shard(0)])
        compared.append(len(log))
    assert compared == [1, 0, 1, 0, 0, 0, 1, 0], "ranks compare their keys after draws 2, 4 and 8"
    return state.tolist()


def test_ranks_that_disagree():
    states = run_ranks(seeded_apart, 2)
    assert states[0] == states[1]


def drawn_in_a_thread():
    where = {"device_mesh": shardwise.init_device_mesh("cpu", (2, 2)), "placements": [Shard(1), Shard(0)]}
    got = [shardwise.randn(5, 6, **where).full_tensor() for _ in range(2)]
    return [*got, F.dropout(shardwise.ones(5, 6, **where), 0.5).full_tensor()]


def test_ranks_as_threads():
    """Threads share torch's generator; their tensors are those of processes."""
    torch.manual_seed(6)
    mesh = simulate((2, 2))
    want = [shardwise.randn(5, 6, device_mesh=mesh).full_tensor() for _ in range(2)]
    want.append(F.dropout(shardwise.ones(5, 6, device_mesh=mesh), 0.5).full_tensor())
    torch.manual_seed(6)
    for results in run_threads(drawn_in_a_thread, 4):
        for got, expected in zip(results, want, strict=True):
            assert torch.equal(got, expected)


def test_meta_tensors_leave_the_stream():
    state = torch.get_rng_state()
    x = shardwise.distribute_tensor(torch.empty(4, 3, device="meta"), simulate((2,)), [Shard(0)])
    x.normal_(), F.dropout(x, 0.5), torch.rand_like(x)
    assert torch.equal(torch.get_rng_state(), state)


def test_keys_differ():
    mesh = as_mesh(simulate((2,)))
    torch.manual_seed(0)
    keys = {common_key(mesh) for _ in range(1000)}
    assert len(keys) == 1000 and max(keys) > 1 << 63
