"""Operands that are no tensors, calls that are wrong, attributes of its own: as a plain tensor has it."""

import copy
import pickle
import weakref

import pytest
import torch

from shardwise import Replicate, Shard, distribute_tensor, simulate
from shardwise.parallel import data_parallel
from shardwise.wrapper import notes_of

ANSWERS = {
    "== None": lambda x: x == None,  # noqa: E711
    "!= None": lambda x: x != None,  # noqa: E711
    "== str": lambda x: x == "a",
    "== list": lambda x: x == [1],
    "== object": lambda x: x == _OBJECT,
    "in a list": lambda x: None in [x],
}
ERRORS = {
    "// str": lambda x: x // "a",
    "+ None": lambda x: x + None,
    "< str": lambda x: x < "a",
    "softmax": lambda x: x.softmax(4),
    "log_softmax": lambda x: x.log_softmax(-3),
    "softmax of a number": lambda x: x.sum().softmax(1),
    "sum": lambda x: x.sum(5),
    "transpose": lambda x: x.transpose(0, 5),
    "index": lambda x: x[10],
}
_OBJECT = object()


@pytest.fixture(params=[Shard(0), Shard(1), Replicate()], ids=str)
def tensor(request):
    return distribute_tensor(torch.ones(5, 4), simulate(4), [request.param])


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name, tensor):
    assert ANSWERS[name](tensor) is ANSWERS[name](torch.ones(5, 4))


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name, tensor):
    with pytest.raises(Exception) as plain:  # noqa: PT011
        ERRORS[name](torch.ones(5, 4))
    with pytest.raises(plain.type):
        ERRORS[name](tensor)


def test_a_copy_has_what_the_program_noted(tensor):
    tensor = torch.nn.Parameter(tensor)
    tensor.tag, tensor._mine, tensor.tied = "t", [1], [tensor]
    tensor.register_hook(lambda grad: grad * 2)
    optimizer = torch.optim.AdamW([tensor])
    for _ in range(2):
        (tensor @ tensor.detach().t()).sum().backward()
        optimizer.step()
    assert notes_of(tensor).keys() == {"tag", "_mine", "tied"}
    made = copy.deepcopy(tensor)
    assert made.tag == "t" and made._mine == [1] and made._mine is not tensor._mine and made.tied[0] is made
    del tensor.tied
    read = pickle.loads(pickle.dumps(tensor))
    assert read.tag == "t" and read._mine == [1] and notes_of(read.detach()) == {}


def test_what_the_library_keeps_on_a_tensor_is_no_note_of_the_program():
    mesh = simulate(2)
    model = data_parallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), mesh)
    tensors = [*model.parameters(), distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]).requires_grad_()]
    moved = tensors[-1].redistribute(placements=[Replicate()], async_op=True)
    tensors[-1].register_hook(lambda grad: None)
    (model(tensors[-1]) * moved).sum().backward()
    assert tensors[-1].grad is tensors[-1].grad and tensors[-1].data.sum() == 16
    for tensor in [*tensors, moved, *(t.grad for t in tensors)]:
        assert notes_of(tensor) == {}, tensor


def test_layouts_keep_the_contract_of_hashes(tensor):
    layout = tensor.layout
    assert layout is tensor.detach().layout and layout != torch.strided and torch.strided != layout
    other = tensor.double().layout
    assert {layout: 1, torch.strided: 2, other: 3}[layout] == 1 and layout in {layout} and layout not in {torch.strided}
    assert weakref.ref(layout)() is layout


def test_torch_is_told_how_memory_is_organized(tensor):
    torch.testing.assert_close(tensor, tensor + 0)  # compares the layouts of both
    torch.testing.assert_close(torch.masked.sum(tensor, 0, mask=tensor > 0).full_tensor(), torch.full((4,), 5.0))
    assert eval("x.layout", {"x": tensor, "__name__": "torch.some.module"}) is torch.strided
    assert eval("x.layout", {"x": tensor, "__name__": "torch"}) is torch.strided
    assert eval("x.layout", {"x": tensor, "__name__": "torchvision"}) is tensor._layout
    assert tensor.to_local().layout is torch.strided
