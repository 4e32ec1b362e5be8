"""flex_attention on distributed tensors gives what torch gives on one device: any cut, score_mod, block masks."""

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.utils._pytree import tree_leaves

import shardwise
from shardwise import Partial, Replicate, RuleError, Shard, StrictError, distribute_tensor, simulate
from tests.values import seeded
from tests.workers import device_mesh, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*(flex_attention called|return_lse)")
R = Replicate()
LAYOUTS = [
    [Shard(0), R],
    [Shard(0), Shard(1)],
    [Shard(0), Shard(0)],
    [Shard(2), Shard(1)],
    [Shard(3), R],
    [R, Partial()],
    [Shard(0, sizes=(5, 0)), Shard(2)],
    [Shard(2, pieces=((((0, 4), (8, 12)), ((4, 8),)),)), Shard(1)],
]
DOCUMENTS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2])


def biased(score, b, h, q, kv):
    return score + 0.3 * b - h * (q - kv).abs()


def causal(b, h, q, kv):
    return q >= kv


def per_head(b, h, q, kv):
    return (q >= kv) & (q - kv <= b + h + 1)


def of_one_document(b, h, q, kv):
    return (DOCUMENTS[q] == DOCUMENTS[kv]) & (q >= kv)


def masked(mask_mod, batch=None, heads=None, block=4):
    return create_block_mask(mask_mod, batch, heads, 12, 12, device="cpu", BLOCK_SIZE=block)


def qkv(heads=(4, 4, 4), batches=(5, 5, 5), dtype=torch.float32):
    return [t.to(dtype) for t in seeded(*((b, h, 12, 8) for b, h in zip(batches, heads, strict=True)))]


CASES = {
    "plain": lambda: (qkv(), {}),
    "score_mod": lambda: (qkv(), {"score_mod": biased, "scale": 0.2}),
    "a mask for all": lambda: (qkv(), {"block_mask": masked(causal), "score_mod": biased}),
    "a mask per head": lambda: (qkv(), {"block_mask": masked(per_head, 5, 4), "return_aux": AuxRequest(lse=True)}),
    "documents": lambda: (qkv(), {"block_mask": masked(of_one_document, block=2)}),
    "groups of heads": lambda: (
        qkv((4, 2, 2)),
        {"enable_gqa": True, "score_mod": biased, "block_mask": masked(causal)},
    ),
    "one batch of keys": lambda: (qkv(batches=(5, 1, 1)), {"block_mask": masked(per_head, 5)}),
    "float64": lambda: (qkv(dtype=torch.float64), {"score_mod": biased, "return_lse": True}),
    "bfloat16": lambda: (qkv(dtype=torch.bfloat16), {"block_mask": masked(causal), "return_lse": True}),
}


def check(mesh, layouts, case):
    tensors, options = CASES[case]()
    want = tree_leaves(flex_attention(*tensors, **options))
    for placements in layouts:
        laid_out = [distribute_tensor(t, mesh, placements) for t in tensors]
        got = tree_leaves(flex_attention(*laid_out, **options))
        for mine, theirs in zip(got, want, strict=True):
            if theirs is None:
                assert mine is None
                continue
            assert mine.stride() == theirs.stride() and mine.dtype == theirs.dtype, placements
            torch.testing.assert_close(mine.full_tensor(), theirs, rtol=2e-2 if "bf" in case else 1e-5, atol=1e-5)
    return True


@pytest.mark.parametrize("case", CASES)
def test_as_on_one_device(case):
    layouts = LAYOUTS if case in ("score_mod", "a mask per head", "groups of heads") else LAYOUTS[1:4]
    assert check(simulate((2, 2)), layouts, case)


def test_more_ranks_than_batches_heads_or_blocks():
    for case in ("a mask per head", "score_mod"):
        assert check(simulate(7), [[Shard(0)], [Shard(1)], [Shard(2)]], case)


def test_three_axes():
    assert check(simulate((2, 1, 2)), [[Shard(0), Shard(1), Shard(2)]], "score_mod")


def on_processes(rank, world_size):
    check(device_mesh((2, 2), ("dp", "tp")), LAYOUTS[1:4], "a mask per head")
    return check(device_mesh((4,), ("dp",)), [[Shard(1, sizes=(2, 0, 1, 1))]], "a mask for all")


def test_on_processes():
    assert run_ranks(on_processes, 4) == [True] * 4


def test_queries_stay_cut_between_blocks_and_are_gathered_inside_of_one():
    mesh = simulate(3)
    q, k, v = (distribute_tensor(t, mesh, [Shard(2)]) for t in qkv())
    assert flex_attention(q, k, v, block_mask=masked(causal, block=4)).placements == (Shard(2),)
    assert flex_attention(q, k, v, block_mask=masked(causal, block=6)).placements == (R,)
    assert flex_attention(q, k, v, score_mod=biased).placements == (Shard(2),)


@pytest.mark.parametrize("shape, change", [
    ((4, 5, 12, 8), lambda t: t.transpose(0, 1)),
    ((5, 12, 4, 8), lambda t: t.transpose(1, 2)),
    ((5, 4, 8, 12), lambda t: t.transpose(2, 3)),
    ((1, 4, 12, 8), lambda t: t.expand(5, 4, 12, 8)),
])  # fmt: skip
def test_the_order_of_memory_is_that_of_the_queries(shape, change):
    _, k, v = qkv()
    q = torch.randn(shape)
    mine = flex_attention(change(distribute_tensor(q, simulate((2, 2)), [R, Shard(1)])), k, v)
    theirs = flex_attention(change(q), k, v)
    assert mine.stride() == theirs.stride()
    torch.testing.assert_close(mine.full_tensor(), theirs)


def test_nothing_moves_where_batch_and_heads_are_cut():
    mesh = simulate((2, 2))
    tensors = [distribute_tensor(t, mesh, [Shard(0), Shard(1)]) for t in qkv()]
    with shardwise.strict(), shardwise.debug.ledger() as log:
        flex_attention(*tensors, score_mod=biased, block_mask=masked(causal))
    assert not list(log)
    with pytest.raises(StrictError, match="flex_attention"), shardwise.strict():
        flex_attention(*[t.redistribute(placements=[Shard(2), R]) for t in tensors])


def test_plain_keys_count_as_replicated():
    q, k, v = qkv()
    got = flex_attention(distribute_tensor(q, simulate(2), [Shard(0)]), k, v, score_mod=biased)
    torch.testing.assert_close(got.full_tensor(), flex_attention(q, k, v, score_mod=biased))


def test_compiled_for_each_rank():
    q, k, v = qkv()
    options = {"score_mod": biased, "block_mask": masked(of_one_document, block=2)}
    tensors = [distribute_tensor(t, simulate(2), [Shard(0)]) for t in (q, k, v)]
    got = torch.compile(flex_attention)(*tensors, **options)
    torch.testing.assert_close(got.full_tensor(), flex_attention(q, k, v, **options), rtol=1e-5, atol=1e-5)


def test_a_mesh_without_values():
    mesh = shardwise.outline((64, 4))
    q, k, v = (shardwise.randn(128, 8, 32, 16, device_mesh=mesh, placements=[Shard(0), Shard(1)]) for _ in range(3))
    out, aux = flex_attention(q, k[:, ::2], v[:, ::2], enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert out.placements == (Shard(0), Shard(1)) and tuple(out.to_local().shape) == (2, 2, 32, 16)
    assert aux.lse.shape == (128, 8, 32)


def test_captured_functions_run_it_eagerly_and_say_so():
    q, k, v = qkv()
    tensors = [distribute_tensor(t, simulate(2), [Shard(0)]) for t in (q, k, v)]
    captured = shardwise.capture(lambda q, k, v: flex_attention(q, k, v, score_mod=biased).sin())
    for _ in range(2):
        got = captured(*tensors).full_tensor()
        torch.testing.assert_close(got, flex_attention(q, k, v, score_mod=biased).sin())
    assert "compile it by itself" in str(captured.explain())


def test_what_score_mod_may_read():
    mesh = simulate(2)
    tensors = [distribute_tensor(t, mesh, [Shard(0)]) for t in qkv()]
    bias = torch.ones(5, requires_grad=True)
    with pytest.raises(RuleError, match=r"requires grad, and each rank would have the gradient of its own part"):
        flex_attention(*tensors, score_mod=lambda score, b, h, q, kv: score * bias[b])
    spread = distribute_tensor(torch.ones(5), mesh, [R])
    for given in (tensors, [t.redistribute(placements=[R]) for t in tensors]):
        with pytest.raises(RuleError, match=r"distributed tensor of shape \(5,\).*x\.full_tensor\(\)"):
            flex_attention(*given, score_mod=lambda score, b, h, q, kv: score * spread[b])


class Attention(torch.nn.Module):
    """Modules whose score_mod reads some of their attributes, not their parameters."""

    def __init__(self):
        super().__init__()
        self.cap, self.slopes, self.project = 5.0, torch.ones(5), torch.nn.Linear(8, 8)
        self.table, self.small = torch.nn.Parameter(torch.ones(5)), torch.nn.Linear(5, 5)

    def capped(self, score):
        return self.cap * torch.tanh(score / self.cap)

    def shifted(self, score, b):
        return score + self.table[b]

    def forward(self, kind, *tensors):
        mods = {
            "a number": lambda score, b, h, q, kv: self.cap * torch.tanh(score / self.cap) + self.slopes[b],
            "a method": lambda score, b, h, q, kv: self.capped(score),
            "a parameter": lambda score, b, h, q, kv: score + self.table[b],
            "a parameter in a method": lambda score, b, h, q, kv: self.shifted(score, b),
            "a part's": lambda score, b, h, q, kv: score + self.small.bias[b],
            "by name": lambda score, b, h, q, kv: score + getattr(self, "table")[b],  # noqa: B009
        }
        return flex_attention(*tensors, score_mod=mods[kind])


@pytest.mark.parametrize("kind", ["a number", "a method"])
def test_score_mod_of_a_module_with_parameters(kind):
    attention, tensors = Attention(), qkv()
    spread = [distribute_tensor(t, simulate(2), [Shard(0)]) for t in tensors]
    torch.testing.assert_close(attention(kind, *spread).full_tensor(), attention(kind, *tensors))


@pytest.mark.parametrize("kind", ["a parameter", "a parameter in a method", "a part's", "by name"])
def test_score_mod_that_reads_parameters_of_a_module(kind):
    spread = [distribute_tensor(t, simulate(2), [Shard(0)]) for t in qkv()]
    with pytest.raises(RuleError, match="requires grad, and each rank would have the gradient of its own part"):
        Attention()(kind, *spread)


def test_torchs_own_errors():
    mesh = simulate(2)
    q, k, v = (distribute_tensor(t, mesh, [Shard(0)]) for t in qkv())
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(q.detach().requires_grad_(), k, v)
    with pytest.raises(ValueError, match="created for a smaller length|larger length"):
        flex_attention(q[:, :, :8], k, v, block_mask=masked(causal))
