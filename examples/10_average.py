"""Groups of parameters, clipping, an average of the weights: `torchrun --nproc-per-node 2` and the file."""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shoal

ranks = int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    dist.init_process_group("shoal")
torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
model = shoal.parallelize(layers, f"dp={ranks},shard=zero1")

groups = [  # parameters have their names and shapes, also where ranks share them
    {"params": [each for each in model.parameters() if each.dim() >= 2], "weight_decay": 0.01},
    {"params": [each for each in model.parameters() if each.dim() < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=1e-2)
average = {name: each.detach().clone() for name, each in model.named_parameters()}
for inputs in map(model.local, torch.randn(200, 64, 8)):
    F.mse_loss(model(inputs), inputs.sort().values).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    for name, each in model.named_parameters():
        average[name].lerp_(each.detach(), 0.05)

trained = copy.deepcopy(model.state_dict())
model.load_state_dict(average)  # of a model with buffers: strict=False, as these are not in the average
with torch.no_grad(), model.unchanged():  # nobody changes weights in here, so they are gathered once
    losses = [F.mse_loss(model(inputs), inputs.sort().values) for inputs in torch.randn(4, 256, 8)]
whole = model.full_state_dict()  # on rank 0 the average as a plain state_dict, to export; elsewhere empty
model.load_state_dict(trained)  # training could go on

print(f"loss {torch.stack(losses).mean():.3f}, {len(whole)} whole tensors")
