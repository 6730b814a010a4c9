"""Shoal, from DDP: `torchrun --nproc-per-node 2 ddp_after.py model.pt`."""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import NUMBERS, Sorter
from torch.utils.data import DataLoader, DistributedSampler

import shoal

dist.init_process_group("shoal")
torch.manual_seed(0)
model = shoal.parallelize(Sorter(), f"dp={dist.get_world_size()}")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=32)
sampler = DistributedSampler(NUMBERS)
loader = DataLoader(NUMBERS, batch_size=16, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for number, (inputs, targets) in enumerate(loader):
        is_last = number % 2 == 1  # two micro-batches make a step
        with nullcontext() if is_last else model.accumulate():
            loss = F.mse_loss(model(inputs), targets)
            (loss / 2).backward()
        if is_last:
            model.clip_gradients(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

weights = model.full_state_dict()  # all ranks call it; rank 0 gets the weights
if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}")
    torch.save(weights, sys.argv[1])
dist.destroy_process_group()
