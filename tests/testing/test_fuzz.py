"""The fuzzer of programs: it composes, judges and shrinks them; and every program that it once found wrong."""

import pytest

from shardwise.testing.fuzz import Program, compose, judge, shrink
from shardwise.testing.fuzz.campaign import simulated, try_seed
from shardwise.testing.fuzz.judge import INEXACT, NO_ERROR, OTHER_ERROR, RAISED, RIGHT, WRONG
from tests.workers import device_mesh, run_ranks

FOUND = """
# mesh (2,)
x1 = tensor((3,), seed=907, grad=True, at=[Shard(dim=0)])
y1 = torch.quantile(x1, 0.3, dim=0)
y1.register_hook(doubled)
g1 = grads(weigh(y1), [x1])

# mesh (2,)
x1 = tensor((1, 2, 1), seed=555, at=[Replicate()])
y1 = F.conv_transpose1d(x1.permute(0, 2, 1), tensor((1, 1, 1), seed=8, at=[Replicate()]))
y2 = F.conv1d(x1.permute(0, 2, 1), tensor((2, 1, 1), seed=9, at=[Replicate()]))

# mesh (2,)
x1 = tensor((3, 2), seed=8, grad=True, at=[Shard(dim=0)])
y1 = checkpoint(torch.tanh, x1, use_reentrant=False)
with torch.no_grad(): x1.mul_(2)
g1 = grads(weigh(y1), [x1])

# mesh (2,)
x1 = tensor((0, 17), seed=24, grad=True, at=[Replicate()])
y1 = checkpoint(torch.atan, x1, use_reentrant=False)
g1 = grads(weigh(y1), [x1])

# mesh (2,)
x1 = tensor((3, 2), torch.complex128, seed=8, at=[Partial("product")])
y1 = x1.real
y1.mul_(2)

# mesh (2,)
x1 = tensor((3, 2), torch.complex128, seed=8, at=[Partial("product")])
y1 = torch.view_as_real(x1)
y1[1].mul_(3)

# mesh (2,)
x1 = tensor((4, 6, 2), seed=8, at=[Shard(dim=2)])
y1 = torch.view_as_complex(x1)
y1.mul_(2j)

# mesh (2,)
x1 = tensor((6, 4), seed=8, at=[Shard(dim=0)])
y1 = x1[2]
y2 = x1[:, 1]
torch._foreach_add_([y1, y2, x1], [1.0, 2.0, 3.0])

# mesh (2,)
x1 = tensor((6, 4), seed=8, at=[Shard(dim=0)])
x2 = tensor((4,), seed=9, at=[Shard(dim=0)])
y1, y2 = x1[2], x1[3]
torch._foreach_copy_([y1, y2], [x2, y1])

# mesh (2,)
x1 = tensor((4, 3), seed=8, at=[Shard(dim=0)])
x2 = tensor((1,), seed=9, grad=True, at=[Replicate()])
with torch.no_grad(): torch.sum(x1, 0, out=x2)

# mesh (2,)
x1 = tensor((4, 4), seed=8, grad=True, at=[Shard(dim=1)])
y1 = x1 * 1
y2, y3, y4, y5 = y1.unbind(0)
y1.mul_(2)

# mesh (2,)
x1 = tensor((4, 4), seed=8, grad=True, at=[Shard(dim=0)])
y1 = x1 * 1
y2 = y1[0]
y1.t_()
y2.zero_()
g1 = grads(weigh(y1 * 1), [x1])

# mesh (2,)
x1 = tensor((4, 4), seed=8, at=[Shard(dim=0)])
y1 = x1[1]
x1.transpose_(0, 1)
x1.mul_(2)
y2 = y1 * 1
y1.mul_(3)

# mesh (2,)
x1 = tensor((4, 4), seed=8, at=[Shard(dim=0)])
y1 = x1[0]
y2 = y1[1:]
y1.unsqueeze_(0)
y1.mul_(3)
x1.add_(1)
y2.mul_(2)

# mesh (3,)
x1 = tensor((1, 6), seed=8, at=[Shard(dim=0)])
y1 = x1[0]
x1.squeeze_(0)
y1.mul_(3)
x1.add_(1)

# mesh (2,)
x1 = tensor((4, 4), seed=8, at=[Shard(dim=0)])
y1 = x1[0]
x1.as_strided_((2, 2), (1, 4))
y1.mul_(2)

# mesh (2,)
x1 = tensor((6, 4), seed=8, at=[Shard(dim=0)])
y1 = x1.T
y2 = x1[0]
x1.resize_(3, 5)
x1.mul_(2)
y2.mul_(3)

# mesh (2,)
x1 = tensor((4, 4), seed=8, at=[Shard(dim=0)])
y1 = x1[0]
x1.data = tensor((3,), seed=9, at=[Shard(dim=0)])
y1.mul_(2)
x1.mul_(5)

# mesh (2,)
x1 = tensor((4, 3), seed=8, at=[Shard(dim=0)])
x2 = tensor((5, 3), seed=9, at=[Shard(dim=0)])
y1 = x2[1]
torch.add(x1, x1, out=x2)
y2 = y1 * 1

# mesh (2,)
x1 = tensor((4, 4), seed=8, grad=True, at=[Shard(dim=1)])
y1 = x1 * 1
y2 = y1[0]
y2.register_hook(doubled)
y3 = y2 * 3
y2.mul_(2)
g1 = grads(weigh(y1, y2, y3), [x1])

# mesh (2,)
x1 = tensor((4, 4), seed=8, grad=True, at=[Shard(dim=0)])
y1 = x1 * 1
y2 = y1[0]
y2.register_hook(doubled)
with torch.no_grad(): y2.mul_(2)
g1 = grads(weigh(y1, y2), [x1])

# mesh (2,)
x1 = tensor((4, 4), seed=8, grad=True, at=[Shard(dim=1)])
y1, y2 = (x1 * 1).split(2)
y1.mul_(2)

# mesh (2,)
x1 = tensor((2, 4), seed=8, grad=True, at=[Shard(dim=0)])
y1, y2 = (x1 * 1).unbind(0)
y2.view(4).mul_(2)

# mesh (2,)
x1 = tensor((2, 4), seed=8, at=[Shard(dim=0)])
y1 = x1.put_(tensor((2,), torch.int32, seed=3, at=[Replicate()]), tensor((2,), seed=4, at=[Replicate()]))

# mesh (2,)
x1 = tensor((4, 3), seed=8, at=[Shard(dim=0)])
x2 = tensor((3,), seed=9, grad=True, at=[Replicate()])
y1 = F.batch_norm(x1, x2, x2 * x2 + 1, training=True)

# mesh (2,)
x1 = tensor((5,), seed=8, at=[Shard(dim=0)])
y1 = x1.masked_scatter(x1 == x1, tensor((2,), seed=4, at=[Replicate()]))

# mesh (2,)
x1 = tensor((1, 1, 1), seed=533, grad=True, at=[Replicate()])
x2 = tensor((0,), torch.int64, seed=528, at=[Replicate()])
x1.index_copy_(-1, x2, x1)

# mesh (2,)
x1 = tensor((1, 0, 2), seed=602, at=[Shard(dim=2)])
y1 = F.interpolate(x1, size=3, mode="linear")

# mesh (2,)
x1 = tensor((1, 1, 1), torch.float64, seed=969, at=[Shard(dim=1)])
y1 = x1[:, 0]
x2 = tensor((1, 1), torch.float64, seed=5, grad=True, at=[Replicate()])
y1.copy_(x2)
g1 = grads(weigh(x1, y1), [x1])

# mesh (2,)
x1 = tensor((10, 5), seed=827, grad=True, at=[Replicate()])
x2 = tensor((10, 5), seed=829, at=[Partial("product")])
y1 = x2.eq_(x1)

# mesh (2,)
x1 = tensor((0, 6, 3), seed=8, grad=True, at=[Shard(dim=0)])
y1 = F.local_response_norm(x1, 2)

# mesh (3,)
x1 = tensor((2, 3, 4, 4), seed=8, grad=True, at=[Shard(dim=0)])
g1 = second(weigh(F.scaled_dot_product_attention(x1, x1, x1)), [x1])

# mesh (2,)
x1 = tensor((5, 5, 5), seed=3, at=[Replicate()])
y1 = x1[:, 4]
y1.normal_()

# mesh (4,)
x1 = tensor((1, 6, 1), seed=127, grad=True, at=[Replicate()])
x2 = tensor((2, 6, 1), seed=47, grad=True, at=[Shard(dim=0, sizes=(0, 0, 1, 1))])
g1 = second(weigh(F.conv1d(x1, x2)), [x1, x2])

# mesh (3,)
x1 = tensor((4,), seed=618, grad=True, at=[Shard(dim=0, sizes=(0, 2, 2))])
x2 = tensor((5,), torch.int64, seed=566, at=[Replicate()])
g1 = second(weigh(x1[x2 % 4] ** 3), [x1])

# mesh (2,)
x1 = tensor((2, 3, 8), seed=6, grad=True, at=[Shard(dim=0, sizes=(0, 2))])
g1 = grads(weigh(F.avg_pool1d(x1, 2)), [x1], True)

# mesh (2,)
x1 = tensor((4, 2), seed=817, grad=True, at=[Shard(dim=1)])
y1 = x1 * 2
y1.register_hook(clamped)
g1 = grads(weigh(y1, y1), [x1, y1])

# mesh (2,)
x1 = tensor((1, 1), seed=225, grad=True, at=[Partial("sum")])
x1.register_hook(doubled)
backward_passes(weigh(x1), 2)

# mesh (2,)
x1 = tensor((2, 6, 3), seed=8, grad=True, at=[Shard(dim=2)])
y1, y2, y3 = torch.native_group_norm(x1, None, None, 2, 6, 3, 2, 1e-5)
g1 = grads(weigh(y1, y3), [x1])
g2 = grads(weigh(y1, y2, y3), [x1])

# mesh (2,)
x1 = tensor((0,), seed=8, grad=True, at=[Replicate()])
x2 = tensor((2, 3), seed=9, at=[Replicate()])
y1 = torch.cat([x1, x2])

# mesh (2,)
x1 = tensor((1, 6, 3), torch.int64, seed=8, at=[Shard(dim=0, sizes=(0, 1))])
y1 = F.local_response_norm(x1, 2)

# mesh (2,)
x1 = tensor((3, 2, 1), seed=8, at=[Replicate()])
y1 = torch.fft.fft(x1, dim=0)
y2 = torch.tanh(x1.T)
y3 = x1.unfold(0, 1, 1) + 1

# mesh (2,)
x1 = tensor((1,), seed=4, grad=True, at=[Shard(dim=0)])
g1 = grads(torch.view_as_real(x1 + 0j).sum(), [x1])

# mesh (2,)
x1 = tensor((2, 2, 3), seed=4, at=[Replicate()])
x2 = tensor((2, 1, 1), seed=5, at=[Replicate()])
y1 = F.conv_transpose1d(x1.new_full((2, 2, 3), 0.5, device="cpu"), x2)

# mesh (2,)
x1 = tensor((3, 4), seed=4, at=[Shard(dim=0)])
y1 = torch.rrelu(x1.T, 0.1, 0.3, True)
y2 = torch.isin(x1.T, x1)
y3 = torch.roll(x1.T, 1, 0)

# mesh (2,)
x1 = tensor((3, 4), seed=4, grad=True, at=[Shard(dim=0)])
y1 = torch.sigmoid(x1)
y1.t_()
g1 = grads(weigh(y1), [x1])

# mesh (2,)
x1 = tensor((3, 0), seed=4, at=[Shard(dim=0)])
y1 = F.cross_entropy(x1, torch.softmax(x1, 1), label_smoothing=0.1)
y2, y3, y4 = torch.native_layer_norm(x1, [0], None, None, 1e-5)
y5 = torch.func.jacfwd(torch.sin)(x1)

# mesh (2,)
x1 = tensor((6, 3), seed=4, grad=True, at=[Shard(dim=0)])
y1, y2 = torch.var_mean(x1, 0)
g1 = grads(weigh(y1), [y2])

# mesh (2,)
x1 = tensor((1, 0, 1), seed=141, at=[Replicate()])
y1 = F.group_norm(x1, 1)

# mesh (2,)
x1 = tensor((2, 0, 1), seed=141, grad=True, at=[Shard(0)])
y1 = F.group_norm(x1, 1)
g1 = grads(weigh(y1), [x1])

# mesh (2,)
x1 = given('nn.functional.embedding_bag', 'function', 3, 0, at=[Shard(dim=1)])
x2 = given('nn.functional.embedding_bag', 'function', 3, 1, at=[Replicate()])
x3 = given('nn.functional.embedding_bag', 'function', 3, 2, at=[Replicate()])
x4 = tensor((6,), seed=37, at=[Replicate()])
y1 = call('nn.functional.embedding_bag', 'function', 3, x1, x2, x3, x4)

# mesh (2,)
x1 = tensor((3, 2), seed=1, grad=True, at=[Shard(0)])
x1.t_()

# mesh (2,)
x1 = tensor((1, 1, 1), seed=117, at=[Replicate()])
x2 = tensor((1,), seed=9, grad=True, at=[Replicate()])
with torch.no_grad(): torch.sum(x1, 0, out=x2)

# mesh (2,)
x1 = tensor((), seed=9, grad=True, at=[Partial("max")])
y1 = x1.mT

# mesh (2,)
x1 = tensor((3, 2), torch.complex128, seed=9, grad=True, at=[Partial("sum")])
y1 = x1.mH
y2 = x1.conj().imag
y3 = y2.resolve_neg()

# mesh (2,)
x1 = tensor((3, 2), seed=9, grad=True, at=[Partial("max")])
y1 = x1.conj()
y2 = x1.real
y3 = torch.resolve_conj(x1)

# mesh (2,)
x1 = tensor((4, 3), seed=9, grad=True, at=[Shard(0)])
y1 = F.group_norm(x1, 3)
with torch.no_grad(): x1.mul_(2)
g1 = grads(weigh(y1), [x1])

# mesh (2,)
x1 = tensor((4, 3), seed=9, grad=True, at=[Shard(0)])
y1 = torch.softmax(x1, 0)
y1.mul_(2)
g1 = grads(weigh(y1), [x1])

# mesh (2,)
x1 = tensor((6, 1, 4), seed=755, at=[Replicate()])
x2 = tensor((6, 4, 1), seed=862, grad=True, at=[Shard(dim=1)])
y1 = torch.bmm(x1, x2)
x1.copy_(x1)
backward_passes(weigh(y1), 2)

# mesh (2,)
x1 = tensor((2,), seed=824, at=[Partial("product")])
x2 = tensor((1,), seed=631, grad=True, at=[Replicate()])
y1 = torch.outer(x2, x1)
x1[:] *= 2
backward_passes(weigh(y1), 2)

# mesh (2,)
x1 = tensor((2, 1), seed=824, at=[Shard(0)])
x2 = tensor((1, 1), seed=631, grad=True, at=[Replicate()])
y1, y2 = torch._foreach_add([x1, x2], 2.0)
g1 = grads(weigh(y1, y2), [x2])

# mesh (2, 3)
x1 = given('scatter_reduce [sum]', 'in-place', 1, 0, at=[Shard(dim=1, sizes=(5, 0)), Partial("product")])
x2 = given('scatter_reduce [sum]', 'in-place', 1, 1, at=[Shard(dim=1), Partial("sum")])
x3 = given('scatter_reduce [sum]', 'in-place', 1, 2, grad=True, at=[Shard(dim=1), Partial("min")])
y1 = call('scatter_reduce [sum]', 'in-place', 1, x1, x2, x3)
g1 = grads(weigh(y1), [x3])

# mesh (2,)
x1 = tensor((5, 4), seed=1, grad=True, at=[Shard(1)])
x2 = tensor((5, 4), torch.bool, seed=2, at=[Shard(1)])
y1 = torch.cumprod(torch.where(x2, x1, 0), 1)
g1 = second(weigh(y1), [x1])

# mesh (2,)
x1 = tensor((0, 3), seed=1, grad=True, at=[Shard(0)])
y1 = F.dropout(x1, 0.4)
x2 = tensor((0, 3), torch.bool, seed=1, at=[Replicate()])
x3 = tensor((0, 3), seed=1, at=[Replicate()])
y2 = torch.masked_scatter(x3, x2, x1)

# mesh (2,)
x1 = tensor((3,), seed=1, at=[Shard(0)])
x2 = tensor((0,), torch.int64, seed=1, at=[Replicate()])
y1 = torch.put(x1, x2, x1[:2])

# mesh (2,)
x1 = given('rad2deg', 'bool', 0, 0, at=[Replicate()])
x2 = tensor((3,), torch.int64, seed=934, at=[Shard(dim=0)])
x3 = tensor((3,), torch.int64, seed=173, at=[Replicate()])
y1 = torch.index_add(x1, 1, (x2 % 20), torch.index_select(x1, 1, (x3 % 20)))
y2 = y1.to(torch.float64)
y3 = y1 * 2.5
y4 = y1.sum()

# mesh (2,)
x1 = tensor((1,), seed=440, grad=True, at=[Replicate()])
y1 = x1.squeeze(-1)
y1.squeeze_()

# mesh (2,)
x1 = tensor((3,), seed=440, grad=True, at=[Shard(0)])
x2 = tensor((2,), seed=440, at=[Shard(0)])
y1 = x1 * 2
y1.resize_as_(x2)

# mesh (2,)
x1 = tensor((1, 0, 1), seed=983, at=[Shard(dim=1)])
y1 = F.scaled_dot_product_attention(x1 + 2, x1, x1 + 2)
x2 = tensor((0, 1, 1), seed=323, at=[Shard(dim=1)])
y2 = F.scaled_dot_product_attention(x2, x2, x2, is_causal=True)

# mesh (2,)
x1 = tensor((1, 1, 1, 3), seed=180, at=[Replicate()]).to(memory_format=torch.channels_last)
y1 = F.rms_norm(x1, (3,), tensor((3,), seed=187, at=[Replicate()]))

# mesh (2,)
x1 = tensor((5, 1), seed=70, grad=True, at=[Replicate()])
with torch.no_grad(): x1[3:3] *= 2

# mesh (2,)
x1 = tensor((5, 4), seed=70, grad=True, at=[Partial("max")])
y1 = torch.tile(x1, (2,))
y2 = torch.masked_scatter(y1, tensor((5, 8), torch.bool, seed=469, at=[Replicate()]), y1)
y1.unsqueeze_(0)
backward_passes(weigh(y2), 2)

# mesh (2,)
x1 = tensor((3, 1), seed=287, at=[Replicate()])
x2 = tensor((3, 2), seed=488, grad=True, at=[Shard(dim=0)])
y1 = torch.tensordot(x1, x2, 2)
with torch.no_grad(): x1.relu_()
g1 = grads(weigh(y1), [x2])

# mesh (2,)
x1 = tensor((3,), seed=287, grad=True, at=[Partial("sum")])
y1 = F.elu(x1 * 1, inplace=True)
y1.sub_(x1, alpha=2)
g1 = grads(weigh(y1), [x1])

# mesh (2,)
x1 = tensor((4, 2, 3), seed=845, grad=True, at=[Shard(dim=1, sizes=(0, 2))])
y1 = x1[1:]
with torch.no_grad(): x1.mul_(2)
g1 = second(weigh(y1.std()), [x1])

# mesh (2,)
x1 = tensor((4, 3), seed=5, at=[Shard(dim=0)])
y1 = x1.std(0).requires_grad_()
y2 = y1[1:]
with torch.no_grad(): y1.mul_(2)
g1 = grads(weigh(y2 * y2), [y1])

# mesh (2,)
x1 = tensor((2, 4, 3), seed=221, grad=True, at=[Shard(dim=2)])
y1 = x1.std(2)
with torch.no_grad(): y1[0] = 0
g1 = grads(weigh(y1), [x1])

# mesh (2,)
x1 = tensor((4, 4), seed=8, grad=True, at=[Shard(dim=0)])
y1 = x1 * 1
y2 = y1[0]
y2.mul_(3)
y1.register_hook(clamped)
y2.mul_(3)
g1 = grads(weigh(y1, y2), [x1])

# mesh (2,)
x1 = tensor((4, 4), seed=8, grad=True, at=[Shard(dim=0)])
y1 = x1 * 1
y1.register_hook(doubled)
y1.retain_grad()
y1.mul_(2)
backward_passes(weigh(y1), 2)

# mesh (2,)
x1 = tensor((1, 1), seed=16, grad=True, at=[Shard(dim=0)])
y3 = x1[0]
y3.transpose_(0, -1)

# mesh (2,)
x1 = tensor((1, 2), seed=39, grad=True, at=[Replicate()])
y1 = x1 * 1
y1.t_()
y2 = y1[1:3]
y1.copy_(y1.sum().detach())
g1 = grads(weigh(y1, y2, x1), [x1, y1])

# mesh (2,)
x1 = tensor((2, 3), seed=42, grad=True, at=[Replicate()])
y1 = x1 * 1
y2 = y1.as_strided((2, 2), (1, 4))
y1.unsqueeze_(0)
y1.register_hook(clamped)
g1 = grads(weigh(y1, y2, y2), [x1], create_graph=True)

# mesh (2,)
x1 = tensor((2, 3), seed=42, grad=True, at=[Shard(dim=1)])
y1 = x1 * 1
y2 = y1.T
y2.register_hook(doubled)
y2.unsqueeze_(0)
g1 = grads(weigh(y1, y2), [x1])

# mesh (2,)
x1 = tensor((2, 3), seed=44, grad=True, at=[Shard(dim=1)])
y1 = x1 * 1
y2 = y1[0]
y1.t_()
y1.retain_grad()
backward_passes(weigh(y1, y2, x1), 2)

# mesh (2,)
x1 = tensor((2, 2), seed=94, grad=True, at=[Partial("sum")])
y1 = x1 * 1
y1.retain_grad()
g1 = grads(weigh(y1, torch.relu(y1) ** 2), [x1], create_graph=True)
with torch.no_grad(): z1 = y1.grad
g2 = grads(weigh(y1.grad), [x1])

# mesh (2,)
x1 = tensor((2, 3), seed=26, grad=True, at=[Shard(dim=1)])
y1 = x1 * 1
y2 = y1.as_strided((2, 2), (1, 4))
y2.t_()
y2.mul_(3)
g1 = grads(weigh(y1, y2), [x1])

# mesh (2,)
x1 = tensor((2, 4, 3), seed=8, grad=True, at=[Shard(dim=0)])
y1 = F.max_pool1d(x1.permute(0, 2, 1), 2)
with torch.no_grad(): y2 = F.max_pool1d(x1.permute(0, 2, 1), kernel_size=2, ceil_mode=True)
y3 = torch.nn.MaxPool1d(2)(x1.detach().permute(0, 2, 1))
y4 = F.max_pool1d((x1 * 10).long(), 2)

# mesh (2,)
x1 = tensor((4, 4), seed=8, at=[Shard(dim=0)])
x1.mul_(x1)
x1.add_(x1[0])

# mesh (2,)
x1 = tensor((4, 4), seed=8, at=[Shard(dim=0)])
x1.mul_(x1)
x1[1:].add_(x1[:-1])

# mesh (2,)
x1 = tensor((4, 4), seed=8, at=[Shard(dim=0)])
x1.mul_(x1)
x1.copy_(x1.T)

# mesh (2,)
x1 = tensor((4, 4), seed=8, at=[Shard(dim=0)])
x1.mul_(x1)
torch.mul(x1[0:2], 2, out=x1[1:3])

# mesh (2,)
x1 = tensor((4, 4), seed=8, at=[Shard(dim=0)])
x1.mul_(x1)
x1.index_copy_(0, torch.tensor([0]), x1[1:2])

# mesh (2,)
x1 = tensor((4, 4), seed=8, at=[Shard(dim=0)])
x1.mul_(x1)
x1.put_(torch.tensor([0, 1]), x1[0, :2])

# mesh (2,)
x1 = tensor((4, 4), seed=8, at=[Shard(dim=0)])
x1.mul_(x1)
torch._foreach_lerp_([x1], [x1[0]], 0.5)
"""


@pytest.mark.parametrize("text", FOUND.strip().split("\n\n"))
def test_found(text):
    assert str(judge(Program.parse(text))) == RIGHT


FOUND_ON_PROCESSES = """
# mesh (2,)
x1 = tensor((4, 2, 3), seed=845, grad=True, at=[Shard(dim=1, sizes=(0, 2))])
y1 = x1[1:]
with torch.no_grad(): x1.mul_(2)
g1 = second(weigh(y1.std()), [x1])

# mesh (2,)
x1 = tensor((4, 4), seed=487, grad=True, at=[Shard(dim=0, sizes=(4, 0))])
x2 = tensor((3, 4), seed=801, grad=True, at=[Replicate()])
g1 = second(weigh(F.linear(x2, x1)), [x1])

# mesh (2,)
x1 = tensor((4, 1), torch.bfloat16, seed=613, grad=True, at=[Shard(dim=1)])
y1 = x1.double()
g1 = grads(weigh(y1 * y1), [x1])
g2 = grads(weigh(y1), [x1])
"""


def judged(rank, world_size, texts):
    mesh = device_mesh((world_size,))
    return [str(judge(Program.parse(text), mesh)) for text in texts]


def test_found_on_processes():
    texts = FOUND_ON_PROCESSES.strip().split("\n\n")
    assert run_ranks(judged, 2, texts) == [[RIGHT] * len(texts)] * 2


def test_a_program_is_its_text():
    for seed in range(20):
        program = compose(seed)
        assert Program.parse(str(program)) == program
        assert compose(seed) == program
    with pytest.raises(ValueError, match="the first line"):
        Program.parse("x = 1")


def test_programs_differ():
    words = " ".join(str(compose(seed)) for seed in range(60))
    for word in ("move(", "Partial(", "sizes=", "call(", "module(", "no_grad", "second(", "backward_passes"):
        assert word in words


BROKEN = "# mesh (2,)\nx1 = tensor((3, 2), grad=True, at=[Shard(0)])\n"


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("y1 = x1 * (1 if type(x1) is torch.Tensor else 2)", WRONG),
        ("y1 = x1.detach() if type(x1) is torch.Tensor else x1 * 1", WRONG),
        ("y1 = x1.float() if type(x1) is torch.Tensor else x1 * 1", WRONG),
        ("y1 = x1.T if type(x1) is torch.Tensor else x1.T.clone(memory_format=torch.contiguous_format)", WRONG),
        ("y1 = grads(weigh(x1 * x1 * (1 if type(x1) is torch.Tensor else 2)), [x1])", WRONG),
        ("y1 = x1[5] if type(x1) is torch.Tensor else 0", NO_ERROR),
        ("y1 = x1[5] if type(x1) is torch.Tensor else [][0]", RIGHT),
        ("y1 = x1[5] if type(x1) is torch.Tensor else {}[0]", OTHER_ERROR),
        ("y1 = 0 if type(x1) is torch.Tensor else x1[5]", RAISED),
        ("y1 = ((x1 - x1 * (1 + 1e-16)) * 1e16).sign() * (1 if type(x1) is torch.Tensor else 2)", INEXACT),
    ],
)
def test_what_differs_is_found(line, kind):
    assert judge(Program.parse(BROKEN + line)).kind in (kind, RIGHT if kind == INEXACT else kind)


def test_shrinking_keeps_what_fails():
    text = """# mesh (2, 2)
x1 = tensor((5, 4), seed=3, grad=True, at=[Shard(dim=0, sizes=(5, 0)), Partial("sum")])
x2 = tensor((5, 4), seed=4, grad=True, at=[Shard(0), Shard(1)])
y1 = torch.sin(x2)
y2 = torch.relu(x1 + y1)
y3 = y2 * (1 if type(y2) is torch.Tensor else 2)
y4 = y3.sum(0)
g1 = grads(weigh(y4, y1), [x1, x2])"""
    program = Program.parse(text)
    short, verdict = shrink(program, judge(program), judge)
    assert verdict.kind == WRONG
    assert short.mesh == (2,) and len(short.lines) == 2 and "type(" in short.lines[1]


def test_a_campaign_tells_of_every_program():
    found = list(simulated(0, 6, None, 2))
    assert sorted(f.seed for f in found) == list(range(6))


def test_random_programs():
    """A seeded part of the campaign."""
    failed = [f"{found.text}\n{found.message}" for seed in range(40) if not (found := try_seed(seed)).right]
    assert not failed, "\n\n".join(failed)
