"""Every random op, as a function of a mesh and placements for a tensor of SHAPE."""

import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise import Partial, Replicate, Shard
from shardwise.testing.spread import spread_out, with_spare_bits

SHAPE = (7, 6)
R = Replicate()

# six layouts of a tensor of SHAPE: even and uneven, empty shards, both dims, strided, replicated and pending sums
LAYOUTS = {
    "rows": ((4,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "uneven and empty": ((3,), [Shard(0, sizes=(0, 6, 1))]),
    "both": ((2, 3), [Shard(1), Shard(0)]),
    "nested": ((2, 2), [Shard(0), Shard(0)]),
    "replicated and pending": ((2, 2), [R, Partial()]),
}
ALONE = ((1,), [R])


def laid_out(value, mesh, placements, **options):
    return spread_out(value, mesh, placements, **options)


def values(dtype=torch.float64):
    """Few bits each, so that sums of parts are exact."""
    return with_spare_bits(torch.linspace(-1, 1, 42, dtype=dtype)).view(SHAPE)


def filling(call, dtype=torch.float64):
    """An in-place fill of a tensor laid out (truth values do not add up)."""
    places_for = lambda places: [R if p.is_partial() and dtype == torch.bool else p for p in places]
    return lambda mesh, places: call(laid_out(torch.zeros(SHAPE, dtype=dtype), mesh, places_for(places)))


def of(call, value=None, **options):
    """A function of a tensor laid out."""
    return lambda mesh, places: call(laid_out(values() if value is None else value, mesh, places, **options))


def born(make, **options):
    """A factory; it makes whole values, so what would be pending is replicated."""
    return lambda mesh, places: make(
        device_mesh=mesh, placements=[R if p.is_partial() else p for p in places], **options
    )


CHANCES = values().abs()

FILLS = {
    "normal_": filling(lambda x: x.normal_(2, 3)),
    "normal_ float32": filling(lambda x: x.normal_(), torch.float32),
    "normal_ bfloat16": filling(lambda x: x.normal_(), torch.bfloat16),
    "normal_ complex": filling(lambda x: x.normal_(), torch.complex64),
    "uniform_": filling(lambda x: x.uniform_(-1, 4)),
    "uniform_ by name": filling(lambda x: x.uniform_(**{"from": 1, "to": 2})),
    "uniform_ float16": filling(lambda x: x.uniform_(), torch.float16),
    "exponential_": filling(lambda x: x.exponential_(1.5)),
    "geometric_": filling(lambda x: x.geometric_(0.3)),
    "log_normal_": filling(lambda x: x.log_normal_(0.1, 0.5)),
    "cauchy_": filling(lambda x: x.cauchy_(1, 2)),
    "random_": filling(lambda x: x.random_()),
    "random_ to": filling(lambda x: x.random_(9), torch.int64),
    "random_ from to": filling(lambda x: x.random_(-5, 1 << 40), torch.int64),
    "random_ from": filling(lambda x: x.random_(3, None), torch.int64),
    "random_ int8": filling(lambda x: x.random_(), torch.int8),
    "random_ bool": filling(lambda x: x.random_(), torch.bool),
    "bernoulli_": filling(lambda x: x.bernoulli_(0.3)),
    "bernoulli_ int": filling(lambda x: x.bernoulli_(0.3), torch.int64),
    "bernoulli_ of a tensor": of(lambda p: torch.zeros_like(p).bernoulli_(p), CHANCES),
}
NEW = {
    "rand": born(lambda **where: shardwise.rand(*SHAPE, **where)),
    "randn": born(lambda **where: shardwise.randn(SHAPE, **where), dtype=torch.float64),
    "randint": born(lambda **where: shardwise.randint(2, 50, SHAPE, **where)),
    "randperm": lambda mesh, places: shardwise.randperm(
        11, device_mesh=mesh, placements=[Shard(0) if p.is_shard() else R for p in ([places[0]] if mesh.ndim == 1 else places)]
    ) if not any(getattr(p, "pieces", None) for p in places) else shardwise.randperm(11, device_mesh=mesh),
    "rand_like": of(torch.rand_like),
    "randn_like": of(lambda x: torch.randn_like(x, dtype=torch.float32)),
    "randint_like": of(lambda x: torch.randint_like(x, 3, 17)),
    "new_empty.normal_": of(lambda x: x.new_empty(5, 9).normal_()),
}  # fmt: skip
BY_VALUE = {
    "bernoulli": of(torch.bernoulli, CHANCES),
    "bernoulli p": of(lambda x: torch.bernoulli(x, 0.5)),
    "normal": of(lambda m: torch.normal(m, m.abs())),
    "normal of a number": of(lambda m: torch.normal(2.0, m.abs()) + torch.normal(m, 3.0)),
    "normal broadcast": of(lambda m: torch.normal(m, m.abs()[0])),
    "multinomial": of(lambda p: torch.multinomial(p, 3), CHANCES),
    "multinomial with replacement": of(lambda p: torch.multinomial(p, 20, True), CHANCES),
    "multinomial of a vector": of(lambda p: torch.multinomial(p.sum(1), 4), CHANCES),
    "poisson": of(torch.poisson, CHANCES * 9),
    "binomial": of(lambda p: torch.binomial(torch.full_like(p, 10.0), p), CHANCES),
    "gamma": of(lambda p: torch._standard_gamma(p + 0.5), CHANCES),
    "dirichlet": of(lambda p: torch._sample_dirichlet(p + 0.5), CHANCES),
}
DROPS = {
    "dropout": of(lambda x: F.dropout(x, 0.5)),
    "dropout in place": of(lambda x: F.dropout(x * 1, 0.5, True, True)),
    "dropout all": of(lambda x: F.dropout(x, 1.0)),
    "dropout module": of(lambda x: nn.Dropout(0.5)(x)),
    "torch.dropout": of(lambda x: torch.dropout(x, 0.5, True)),
    "native_dropout": of(lambda x: torch.native_dropout(x, 0.5, True)[0]),
    "alpha_dropout": of(lambda x: F.alpha_dropout(x, 0.5, True)),
    "dropout1d": of(lambda x: F.dropout1d(x.unflatten(1, (2, 3)), 0.5)),
    "dropout2d": of(lambda x: F.dropout2d(x.unflatten(1, (2, 3)).unsqueeze(1).expand(7, 4, 2, 3), 0.5)),
    "dropout3d": of(lambda x: F.dropout3d(x.view(7, 3, 2, 1, 1), 0.5)),
    "feature_alpha_dropout": of(lambda x: F.feature_alpha_dropout(x.unflatten(1, (2, 3)), 0.5, True)),
    "rrelu": of(lambda x: F.rrelu(x, training=True)),
    "rrelu in place": of(lambda x: F.rrelu(x * 1, training=True, inplace=True)),
    "attention": of(lambda x: F.scaled_dot_product_attention(*[x.view(1, 7, 6)] * 3, dropout_p=0.3)),
}
OPS = FILLS | NEW | BY_VALUE | DROPS
