"""DDP: `torchrun --nproc-per-node 2 ddp_before.py model.pt`."""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import NUMBERS, Sorter
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Sorter())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=32)
sampler = DistributedSampler(NUMBERS)
loader = DataLoader(NUMBERS, batch_size=16, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for number, (inputs, targets) in enumerate(loader):
        is_last = number % 2 == 1  # two micro-batches make a step
        with nullcontext() if is_last else model.no_sync():
            loss = F.mse_loss(model(inputs), targets)
            (loss / 2).backward()
        if is_last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}")
    torch.save(model.module.state_dict(), sys.argv[1])
dist.destroy_process_group()
