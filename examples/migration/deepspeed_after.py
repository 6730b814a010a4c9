"""Shoal, from DeepSpeed: `torchrun --nproc-per-node 2 deepspeed_after.py model.pt FOLDER`."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import NUMBERS, Sorter
from torch.utils.data import DataLoader, DistributedSampler

import shoal

MICRO_BATCHES = 2

dist.init_process_group("shoal")
torch.manual_seed(0)
model = shoal.parallelize(Sorter(), f"dp={dist.get_world_size()},shard=zero2")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
loader = DataLoader(NUMBERS, batch_size=16, sampler=DistributedSampler(NUMBERS))
batches = iter(loader)
for _ in range(len(loader) // MICRO_BATCHES):
    loss = model.forward_backward(batches, MICRO_BATCHES, F.mse_loss)
    model.clip_gradients(1.0)
    optimizer.step()
    optimizer.zero_grad()

shoal.save(sys.argv[2], model, optimizer, step=16)
whole = model.full_state_dict()  # all ranks call it; rank 0 gets the weights
if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}")
    torch.save(whole, sys.argv[1])
dist.destroy_process_group()
