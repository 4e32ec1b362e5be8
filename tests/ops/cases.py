"""The table of checks: an expression, and the tensors it is tried on. One line a case."""

import torch
import torch.nn.functional as F

from tests.values import seeded

IDS = torch.tensor([[3, 0, 6, 2], [1, 1, 5, 0], [4, 6, 2, 3], [0, 5, 5, 1], [2, 4, 6, 0]])
MASK = torch.tensor([[True, False, True, True, False, True, False]] * 5)


def x(*shape, seed=0):
    return seeded(shape, seed=seed)[0]


A, B, ROW, COLUMN, CUBE, ONE, EMPTY, WIDE = (
    x(5, 7), x(5, 7, seed=1), x(7, seed=2), x(5, 1, seed=3), x(4, 5, 6, seed=4), x(seed=5), x(0, 3, seed=6), x(2, 9, seed=7)
)  # fmt: skip

CASES = {
    # pointwise
    "add": (lambda a, b: a + b, [A, B]),
    "add broadcast": (lambda a, b: a + b, [A, ROW]),
    "add column": (lambda a, b: torch.add(a, b, alpha=3), [A, COLUMN]),
    "add number": (lambda a: 2 + a - 1.5, [A]),
    "sub": (lambda a, b: a - b * 2, [A, B]),
    "rsub": (lambda a: 1 - a, [A]),
    "mul": (lambda a, b: a * b, [A, ROW]),
    "div": (lambda a, b: a / (b.abs() + 1), [A, B]),
    "rdiv": (lambda a: 1 / (a.abs() + 1), [A]),
    "square": (lambda a: a * a + a**2, [A]),
    "relu gelu tanh": (lambda a: F.relu(a) + F.gelu(a) + a.tanh(), [A]),
    "silu sigmoid": (lambda a: F.silu(a) * a.sigmoid(), [A]),
    "clamp": (lambda a: a.clamp(-0.5, 0.5), [A]),
    "where": (lambda a, b: torch.where(a > 0, a, b), [A, B]),
    "where alone": (lambda a: torch.where(a > 0), [A]),
    "masked_fill": (lambda a: a.masked_fill(a > 0.5, -1.0), [A]),
    "maximum": (lambda a, b: torch.maximum(a, b), [A, B]),
    "lerp addcmul": (lambda a, b, c: torch.lerp(a, b, 0.3) + torch.addcmul(a, b, c), [A, B, A]),
    "compare": (lambda a, b: (a > b, a == a, ~(a <= b)), [A, B]),
    "scalar tensor": (lambda a, s: a * s + s, [A, ONE]),
    "empty": (lambda a: (a * 2).exp(), [EMPTY]),
    "0-d": (lambda s: (s * 3).sin(), [ONE]),
    "cast": (lambda a: a.to(torch.float32).double() + a.float().to(a.dtype), [A]),
    "cast to int": (lambda a: (a * 10).long() + (a * 10).to(torch.int32), [A]),
    "clone detach": (lambda a: a.clone() + a.detach(), [A]),
    "like": (lambda a: torch.zeros_like(a) + torch.ones_like(a) + torch.full_like(a, 2.0), [A]),
    "tril triu": (lambda a: a.tril() + a.triu(1), [A]),
    # matrix products
    "mm": (lambda a, b: a @ b, [A, x(7, 4)]),
    "mm nt": (lambda a, b: a @ b.t(), [A, B]),
    "matmul batched": (lambda a, b: a @ b, [CUBE, x(4, 6, 3)]),
    "matmul broadcast": (lambda a, b: a @ b, [CUBE, x(6, 3)]),
    "matmul vector": (lambda a, b: (a @ b, b @ a.transpose(-1, -2)), [CUBE, x(6)]),
    "bmm": (lambda a, b: torch.bmm(a, b), [CUBE, x(4, 6, 2)]),
    "mv dot outer": (lambda a, b: (torch.mv(a, b), torch.dot(b, b), torch.outer(b, b)), [A, ROW]),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), [x(4), A, x(7, 4)]),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b), [x(4, 5, 3), CUBE, x(4, 6, 3)]),
    "linear": (lambda a, w, b: F.linear(a, w, b), [CUBE, x(8, 6), x(8)]),
    "linear no bias": (lambda a, w: F.linear(a, w), [CUBE, x(3, 6)]),
    "linear vector": (lambda a, w, b: F.linear(a, w, b), [x(6), x(8, 6), x(8)]),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), [CUBE, x(4, 6, 2)]),
    "einsum sum": (lambda a, b: torch.einsum("bij,j->", a, b), [CUBE, x(6)]),
    "einsum ellipsis": (lambda a, b: torch.einsum("...ij,...jk->...ik", a, b), [CUBE, x(4, 6, 2)]),
    "mlp": (lambda a, w, v: F.linear(F.linear(a, w).relu(), v) + a, [A, x(8, 7), x(7, 8)]),
    # reductions
    "sum": (lambda a: a.sum(), [A]),
    "sum dim": (lambda a: (a.sum(0), a.sum(-1, keepdim=True), a.sum((0, 2))), [CUBE]),
    "mean": (lambda a: (a.mean(), a.mean(0), a.mean((0, 1), keepdim=True)), [CUBE]),
    "mean empty": (lambda a: a.mean(0), [EMPTY]),
    "prod": (lambda a: (a.prod(), a.prod(1)), [A]),
    "amax amin": (lambda a: (a.amax(0), a.amin(1), a.max(), a.min()), [A]),
    "amax ties": (lambda a: (a.round().amax(0), a.round().amax()), [A]),
    "max dim": (lambda a: a.max(1).values + a.min(1)[0], [A]),
    "argmax": (lambda a: (a.argmax(0), a.argmin(1), a.argmax()), [A]),
    "var std": (lambda a: (a.var(0), a.std(1), a.std()), [A]),
    "norm": (
        lambda a: (a.norm(), torch.linalg.vector_norm(a, dim=1), a.norm(dim=0), torch.linalg.vector_norm(a, 3)),
        [A],
    ),
    "norm of zeros": (lambda a: (a * 0).norm(), [A]),
    "logsumexp": (lambda a: (a.logsumexp(0), a.logsumexp((0, 1))), [A]),
    "any all": (lambda a: ((a > 1).any(), (a > -9).all(1), (a > 0).any(0)), [A]),
    "cumsum": (lambda a: a.cumsum(0) + a.cumprod(1), [A]),
    "count": (lambda a: torch.count_nonzero(a > 0, 0), [A]),
    # views
    "view": (lambda a: a.contiguous().view(4, 30), [CUBE]),
    "view merge": (lambda a: (a.reshape(20, 6), a.reshape(4, 30), a.reshape(-1)), [CUBE]),
    "view split": (lambda a: (a.reshape(2, 2, 5, 6), a.reshape(4, 5, 3, 2), a.unflatten(2, (2, 3))), [CUBE]),
    "view regroup": (lambda a: (a.reshape(10, 12), a.reshape(2, 10, 6), a.reshape(120)), [CUBE]),
    "view ones": (lambda a: a.reshape(1, 4, 5, 1, 6).reshape(4, 5, 6), [CUBE]),
    "flatten": (lambda a: (a.flatten(1), a.flatten(0, 1), a.ravel()), [CUBE]),
    "permute": (lambda a: (a.permute(2, 0, 1), a.transpose(0, -1), a.mT, a.movedim(0, 2)), [CUBE]),
    "t": (lambda a: a.t() + a.T, [A]),
    "squeeze": (lambda a: (a.unsqueeze(0), a.unsqueeze(-1).squeeze(-1), a.unsqueeze(1).squeeze()), [A]),
    "expand": (lambda a: (a.expand(5, 7), a.unsqueeze(1).expand(-1, 3, -1), a.expand(2, 5, 7)), [A]),
    "expand column": (lambda a: a.expand(5, 4) * 2, [COLUMN]),
    "heads": (lambda a: a.unflatten(-1, (3, 2)).transpose(1, 2).transpose(1, 2).flatten(2), [CUBE]),
    # slices
    "slice": (lambda a: (a[1:4], a[:, 2:6], a[1:, :-1]), [A]),
    "slice step": (lambda a: (a[::2], a[1::3, ::2]), [A]),
    "slice then add": (lambda a, b: a[1:4] + b[:3], [A, B]),
    "slice everything": (lambda a: a[:] * 2, [A]),
    "select": (lambda a: (a[2], a[-1], a[:, 3], a[1, 2]), [A]),
    "select then use": (lambda a: a[2] * a[3] + a.select(0, 1).exp(), [A]),
    "ellipsis none": (lambda a: (a[..., 1], a[None], a[:, None, 1:3]), [CUBE]),
    "narrow": (lambda a: a.narrow(0, 1, 3) + a.narrow(0, 2, 3), [A]),
    "split": (lambda a: (a.split(2), a.split([1, 6], 1), a.chunk(3, 1), a.tensor_split(3)), [A]),
    "flip": (lambda a: (a.flip(0), a.flip(0, 1)), [A]),
    "flip add": (lambda a, b: a.flip(0) + b, [A, B]),
    "unbind": (lambda a: sum(a.unbind(0)), [A]),
    "cat": (lambda a, b: (torch.cat([a, b]), torch.cat([a, b], 1)), [A, B]),
    "cat uneven": (lambda a, b: torch.cat([a, b, a]), [A, x(2, 7)]),
    "cat then slice": (lambda a, b: torch.cat([a, b])[3:8] * 2, [A, B]),
    "stack": (lambda a, b: (torch.stack([a, b]), torch.stack([a, b], -1)), [A, B]),
    "index": (lambda a: (a[torch.tensor([0, 3, 3])], a[:, torch.tensor([1, 1])], a[[0, 2]]), [A]),
    "index two": (lambda a: a[torch.tensor([0, 3]), torch.tensor([1, 6])], [A]),
    "index apart": (lambda a: a[torch.tensor([0, 3]), :, torch.tensor([1, 5])], [CUBE]),
    "index mask": (lambda a: a[MASK], [A]),
    "index_select": (lambda a: a.index_select(1, torch.tensor([6, 0, 2])), [A]),
    "gather": (lambda a, i: a.gather(1, i), [A, IDS]),
    # normalisation and losses
    "softmax": (lambda a: (a.softmax(-1), a.log_softmax(0), F.softmax(a, 1)), [A]),
    "layer_norm": (lambda a, w, b: F.layer_norm(a, (7,), w, b), [A, ROW, x(7)]),
    "layer_norm two": (lambda a: F.layer_norm(a, (5, 6)), [CUBE]),
    "rms_norm": (lambda a, w: F.rms_norm(a, (7,), w), [A, ROW]),
    "mse_loss": (lambda a, b: (F.mse_loss(a, b), F.mse_loss(a, b, reduction="sum"), F.l1_loss(a, b)), [A, B]),
    "bce": (lambda a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid()), [A, B]),
    "huber": (lambda a, b: F.smooth_l1_loss(a, b) + F.huber_loss(a, b, reduction="none").sum(), [A, B]),
    "kl_div": (lambda a, b: F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean"), [A, B]),
    "cross_entropy": (lambda a, t: F.cross_entropy(a, t), [A, IDS[:, 0]]),
    "cross_entropy sum": (lambda a, t: F.cross_entropy(a, t, reduction="sum"), [A, IDS[:, 0]]),
    "cross_entropy none": (lambda a, t: F.cross_entropy(a, t, reduction="none"), [A, IDS[:, 0]]),
    "cross_entropy ignore": (lambda a, t: F.cross_entropy(a, t, ignore_index=6), [A, IDS[:, 2]]),
    "cross_entropy weight": (
        lambda a, t, w: F.cross_entropy(a, t, w.detach().abs(), label_smoothing=0.1, ignore_index=0),
        [A, IDS[:, 0], ROW],
    ),
    "cross_entropy probabilities": (lambda a, b: F.cross_entropy(a, b.softmax(-1), label_smoothing=0.2), [A, B]),
    "cross_entropy images": (lambda a, t: F.cross_entropy(a, t), [x(4, 7, 3), torch.tensor([[1, 2, 0]] * 4)]),
    "nll_loss": (lambda a, t: F.nll_loss(a.log_softmax(-1), t), [A, IDS[:, 1]]),
    # embedding, attention
    "embedding": (lambda i, w: F.embedding(i, w), [IDS, x(7, 3)]),
    "embedding padding": (lambda i, w: F.embedding(i, w, padding_idx=2), [IDS, x(7, 3)]),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), [x(2, 3, 5, 4, seed=i) for i in range(3)]),
    "attention causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [x(2, 3, 5, 4, seed=i) for i in range(3)],
    ),
    "attention mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        [*(x(2, 3, 5, 4, seed=i) for i in range(3)), x(5, 5)],
    ),
    "attention grouped": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        [x(2, 4, 5, 4), x(2, 2, 5, 4), x(2, 2, 5, 4, seed=1)],
    ),
    # ops without a rule: decomposition and fallback
    "sort": (lambda a: a.sort(1).values, [A]),
    "topk": (lambda a: a.topk(3).values, [A]),
    "roll": (lambda a: a.roll(2, 0), [A]),
    "repeat": (lambda a: a.repeat(2, 3), [A]),
    "diagonal": (lambda a: a.diagonal(), [A]),
    "group_norm": (lambda a: F.group_norm(a, 5, None, None), [CUBE]),
    "conv1d": (lambda a, w: F.conv1d(a, w), [CUBE, x(3, 5, 2)]),
    "logcumsumexp": (lambda a: a.logcumsumexp(0), [A]),
    "inverse": (lambda a: torch.linalg.inv(a @ a.t() + torch.eye(5, dtype=a.dtype)), [A]),
    "pad": (lambda a: F.pad(a, (1, 2, 0, 1), value=3.0), [A]),
    # tensors given by name, in any order
    "named linear": (
        lambda a, w, b: F.linear(a, bias=b, weight=w) + F.linear(bias=b, weight=w, input=a),
        [A, x(7, 7), ROW],
    ),
    "named arithmetic": (
        lambda a, b: torch.sub(other=a, input=b) + torch.mul(a, other=b) + torch.div(other=b, input=a),
        [A, B],
    ),
    "named products": (lambda a, w: torch.mm(mat2=w, input=a) + torch.matmul(other=w, input=a), [A, x(7, 7)]),
    "named addmm": (lambda c, a, b: torch.addmm(mat2=b, mat1=a, input=c, beta=0.5), [x(4), A, x(7, 4)]),
    "named where": (lambda a, b: torch.where(other=b, input=a, condition=a > 0), [A, B]),
    "named reductions": (lambda a: (torch.sum(input=a, dim=0), torch.softmax(input=a, dim=-1)), [A]),
    "named cross_entropy": (lambda a, t: F.cross_entropy(target=t, input=a, reduction="sum"), [A, IDS[:, 0]]),
    "named cross_entropy weight": (
        lambda a, w, t: F.cross_entropy(a, weight=w.detach().abs(), target=t),
        [A, ROW, IDS[:, 0]],
    ),
    "named attention": (
        lambda q, k, v, m: F.scaled_dot_product_attention(attn_mask=m, value=v, key=k, query=q),
        [*(x(2, 3, 5, 4, seed=i) for i in range(3)), x(5, 5)],
    ),
    # odd inputs
    "kl_div of numbers": (lambda a, b: F.kl_div(a, b.abs(), reduction="batchmean"), [ONE, x(seed=9)]),
    "index_select of 0-d": (lambda a, i: a.index_select(0, i), [ONE, IDS[1:2, 3]]),
    "embedding sparse": (lambda i, w: F.embedding(i, w).sum() + F.embedding(i, w, sparse=True).sum(), [IDS, x(7, 3)]),
    "norm of nothing": (lambda a: (torch.linalg.norm(a[:0, :0]), a[:, :2].norm(dim=1)), [A]),
    "stft": (lambda a: torch.stft(a.t(), 4, window=torch.ones(4), return_complex=True).abs(), [x(12, 2)]),
}
