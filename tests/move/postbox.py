"""Transfers of many ranks in one process, each in a thread of its own: every rank posts what it sends and takes what came."""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from unittest import mock

from shardwise.comm.messages import Along
from shardwise.move.transfer import Transfer


class Arrival:
    """What is copied from the sender's memory once it is waited for."""

    def __init__(self, posts, room):
        self.posts, self.room = posts, room

    def wait(self):
        value = self.posts.get(timeout=120)
        assert value.shape == self.room.shape and value.dtype == self.room.dtype
        self.room.copy_(value)


class Sent:
    def wait(self):
        pass


class PostBox:
    """One rank's end of a group; `posts` is shared by all."""

    def __init__(self, rank, posts):
        self.rank, self.posts = rank, posts

    def send(self, tensors, peer, tag):
        self.posts[self.rank, peer].put(tensors[0].clone())
        return Sent()

    def recv(self, tensors, peer, tag):
        return Arrival(self.posts[peer, self.rank], tensors[0])


class Arrivals(list):
    def wait(self):
        for arrival in self:
            arrival.wait()


def all_to_all(received, sizes, packed, counts, along):
    """What a collective does: everyone gets a cut of what everyone packed."""
    assert sum(counts) == packed.numel() and sum(sizes) == received.numel()
    group = along.group
    for peer, part in enumerate(packed.split(counts)):
        group.send([part], peer, 0)
    return Arrivals(group.recv([room], peer, 0) for peer, room in enumerate(received.split(sizes)))


def transfer_all(plan, held, peers):
    """What each of the peers holds after a plan, given the tensors that each holds before."""
    posts = defaultdict(SimpleQueue)
    everyone = tuple(peers)
    numbers = tuple(range(len(everyone)))
    with mock.patch("shardwise.move.transfer.start_swap", all_to_all):
        return _run(plan, held, everyone, numbers, posts)


def _run(plan, held, everyone, numbers, posts):
    begun = [
        Transfer(plan, held[peer], peer, Along(everyone, numbers, PostBox(i, posts), "gloo"))
        for i, peer in enumerate(everyone)
    ]
    with ThreadPoolExecutor(len(everyone)) as pool:
        found = dict(zip(everyone, pool.map(Transfer.finish, begun), strict=True))
    assert all(post.empty() for post in posts.values())  # nothing is left over
    return found
