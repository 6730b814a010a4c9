"""FSDP2: `torchrun --nproc-per-node 2 fsdp2_before.py model.pt FOLDER`."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from task import NUMBERS, Sorter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
model = Sorter()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(NUMBERS, batch_size=16, sampler=DistributedSampler(NUMBERS))
for number, (inputs, targets) in enumerate(loader):
    is_last = number % 2 == 1  # two micro-batches make a step
    model.set_requires_gradient_sync(is_last)
    loss = F.mse_loss(model(inputs), targets)
    (loss / 2).backward()
    if is_last:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

weights, state = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": state}, checkpoint_id=sys.argv[2])
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
whole = get_model_state_dict(model, options=options)
if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}")
    torch.save(whole, sys.argv[1])
dist.destroy_process_group()
