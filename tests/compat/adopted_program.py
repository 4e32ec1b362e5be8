"""A program written for torch.distributed.tensor, which imports nothing of ours: tests run it as it is and adopted.

It prints what it computed, and of which library its tensors are. Run under torchrun, or alone.
"""

import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._tensor import DTensor as Older
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def build(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.arange(30.0).reshape(5, 6) / 30
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
    return norms


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build(mesh)
    norms = train(model)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save(model.state_dict(), checkpoint_id=folder[0])
    other = build(mesh)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder[0])
    other.load_state_dict(state)
    again = build(mesh)
    set_model_state_dict(again, whole, options=StateDictOptions(full_state_dict=True))
    torch.testing.assert_close(other[0].weight, model[0].weight)
    torch.testing.assert_close(again[2].weight, model[2].weight)
    uneven = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    said = {
        "classes": sorted({type(p).__module__ for p in model.parameters()}),
        "is": [isinstance(model[0].weight, DTensor), Older is DTensor],
        "plain": all(type(value) is torch.Tensor for value in whole.values()),
        "norms": norms,
        "sums": [(v.full_tensor() if isinstance(v, DTensor) else v).double().sum().item() for v in whole.values()],
        "uneven": uneven.redistribute(placements=[Replicate()]).to_local().tolist(),
        "argv": sys.argv[1:],
        "main": [__name__, os.path.basename(__file__), os.path.basename(sys.path[0])],
    }
    if dist.get_rank() == 0:
        print(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
