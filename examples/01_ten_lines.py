"""A loop of one's own: `python examples/01_ten_lines.py`, or `torchrun --nproc-per-node 2` and the file."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shoal

ranks = int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    dist.init_process_group("shoal")
model = shoal.parallelize(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)), f"dp={ranks}")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for inputs in map(model.local, torch.randn(100, 64, 8)):  # all ranks draw the same; each takes its rows
    loss = F.mse_loss(model(inputs), inputs.sort().values)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

print(f"loss {loss.item():.3f}")
