"""The notation of rules: what each mark means, and what is not a line."""

import pytest
import torch

from shardwise import Shard, distribute_tensor, register_sharding, simulate
from shardwise.errors import RuleError
from shardwise.layout import Layout, Partial, Replicate
from shardwise.mesh import as_mesh
from shardwise.strategy import registry
from shardwise.strategy.notation import parse
from shardwise.strategy.reading import factors, line_rule
from shardwise.strategy.spec import Operand
from shardwise.testing import check_rule

MESH = simulate(2)


def operands(*shapes, cut=None):
    """One operand for each shape, the first one cut along `cut`."""
    places = [Replicate() if cut is None or i else cut for i in range(len(shapes))]
    layouts = (Layout.make(as_mesh(MESH), [p], s, torch.float32) for p, s in zip(places, shapes, strict=True))
    return [Operand(layout, i) for i, layout in enumerate(layouts)]


@pytest.mark.parametrize(
    ("text", "shapes", "settings", "inputs", "outputs"),
    [
        ("m k, k n -> m n", [(2, 3), (3, 4)], {}, ["mk", "kn"], ["mn"]),
        ("*b k!, n? -> *b k", [(5, 2, 3)], {}, [("b0", "b1", None)], [("b0", "b1", None)]),
        ("*b, .. -> *b", [(5, 2), (2,), (5, 1)], {}, [("b0", "b1"), ("b1",), ("b0", None)], [("b0", "b1")]),
        ("*x!, *i -> *i", [(2, 3), (4,)], {}, [(None, None), ("i0",)], [("i0",)]),
        ("*d!dim -> *d", [(2, 3)], {"dim": -1}, [("d0", None)], [("d0", None)]),
        ("*d -> *d-dim", [(2, 3, 4)], {"dim": (0, 2)}, [("d0", "d1", "d2")], [("d1",)]),
        ("*d -> *d-dim", [(2, 3)], {"dim": 0, "keepdim": True}, [("d0", "d1")], [(None, "d1")]),
        ("*d -> *d-dim", [(2, 3)], {"dim": None}, [("d0", "d1")], [()]),
        ("*d, .. -> *d+dim", [(2, 3)] * 2, {"dim": -1}, [("d0", "d1")] * 2, [("d0", "d1", None)]),
        ("*d!dim -> *d-dim", [(2, 3)], {"dim": 0, "outputs": 2}, [(None, "d1")], [("d1",)] * 2),
    ],
)
def test_marks(text, shapes, settings, inputs, outputs):
    spec = factors(text, operands(*shapes), **settings)
    assert [tuple(names) for names in spec.inputs] == [tuple(names) for names in inputs]
    assert [tuple(names) for names in spec.outputs] == [tuple(names) for names in outputs]


@pytest.mark.parametrize(
    ("shapes", "outputs"),
    [(((3,), (3,)), [()]), (((2, 3), (3,)), [("m",)]), (((5, 2, 3), (3, 4)), [("b0", "m", "n")]), (((), ()), None)],
)
def test_of_several_lines_the_first_that_fits(shapes, outputs):
    rule = line_rule("k, k -> | m k, k -> m | *b m k, *b k n -> *b m n", "each")
    spec = rule(*operands(*shapes))
    assert (spec and [tuple(names) for names in spec.outputs]) == outputs


@pytest.mark.parametrize(
    ("cut", "sizes", "passes"),
    [
        (Shard(0), {}, True),  # two ranks, two blocks of three
        (Shard(0, sizes=(2, 4)), {}, False),  # within a block
        (Shard(0), {"g": 3}, False),  # two ranks, three blocks
        (Shard(0, sizes=(1, 5)), {"g": 6}, True),  # blocks of one element: any cut
    ],
)
def test_a_cut_between_blocks(cut, sizes, passes):
    other = (6,) if sizes == {"g": 6} else (4,)
    spec = factors("(g c), (g d) -> (g c)", operands((6,), other, cut=cut), sizes=sizes)
    assert [tuple(names) for names in (*spec.inputs, *spec.outputs)] == [("g",) if passes else (None,)] * 3


def test_addends_and_results():
    spec = factors("*b k, n k, +n? -> *b n", operands((2, 3), (4, 3), (4,)), "each", contiguous=True)
    assert spec.addends == {2} and spec.joint == {0, 1}
    assert spec.result.shape == (2, 4) and spec.result.stride() == (4, 1)
    assert factors("*b k, n k -> *b n", operands((2, 3), (4, 5)), contiguous=True).result is None  # torch's own error


def test_calls_that_do_not_fit():
    rule = line_rule("*d!dim -> *d", takes="x dim=-1")
    (x,) = operands((2, 3))
    assert [tuple(n) for n in rule(x).inputs] == [("d0", None)] and [tuple(n) for n in rule(x, 0).inputs] == [
        (None, "d1")
    ]
    assert rule(x, torch.float32) is None and line_rule("m n -> m n")(*operands((2,))) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m k, k n", "has no '->'"),
        ("m 2 -> m", "'2' is not a factor"),
        ("(g) -> g", r"'\(g\)' is not a factor"),
        ("*a *b -> *a", "two groups"),
    ],
)
def test_what_is_no_line(text, message):
    with pytest.raises(RuleError, match=message):
        parse(text)


@pytest.fixture
def user_rules():
    """Rules registered in a test are gone after it."""
    kept = dict(registry._user_rules)
    yield
    registry._user_rules.clear()
    registry._user_rules.update(kept)
    registry._by_function.clear()


def test_dims_by_argument_in_a_rule_of_the_user(user_rules):
    @torch.overrides.wrap_torch_function(lambda x, dim, keepdim=False: (x,))
    def energy(x, dim, keepdim=False):
        return x.square().sum(dim, keepdim)

    register_sharding(energy, "*d -> *d-dim")
    x = distribute_tensor(torch.ones(4, 6), MESH, [Shard(0)])
    assert energy(x, 0).placements == (Partial(),) and energy(x, dim=1).placements == (Shard(0),)
    assert check_rule(energy, [(torch.randn(5, 3), 0), (torch.randn(5, 3), 1, True)], mesh_shapes=[(2,)]) > 4

    @torch.overrides.wrap_torch_function(lambda x: (x,))
    def total(x):
        return x.sum()

    with pytest.raises(RuleError, match="has no argument of that name"):
        register_sharding(total, "*d -> *d-dim")


def test_several_lines_in_a_rule_of_the_user(user_rules):
    @torch.overrides.wrap_torch_function(lambda x, y: (x, y))
    def times(x, y):
        return x @ y

    register_sharding(times, "m k, k -> m | m k, k n -> m n", linear="each")
    x = distribute_tensor(torch.ones(4, 6), MESH, [Shard(1)])
    assert times(x, x[0]).placements == times(x, x.T).placements == (Partial(),)
    assert check_rule(times, [(torch.randn(5, 3), torch.randn(3)), (torch.randn(5, 3), torch.randn(3, 2))]) > 4
    with pytest.raises(RuleError, match="do not fit its line"):
        times(x[0], x.T)
    with pytest.raises(RuleError, match="has no argument of that name"):
        register_sharding(times, "m k, k -> m | *d, *d -> *d-dim", replace=True)
