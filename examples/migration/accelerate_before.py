"""Accelerate, on CPUs: `torchrun --nproc-per-node 2 accelerate_before.py model.pt FOLDER`."""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from task import NUMBERS, Sorter
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, step_scheduler_with_optimizer=False)
torch.manual_seed(0)
model = Sorter()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16)
loader = DataLoader(NUMBERS, batch_size=16)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for inputs, targets in loader:
    with accelerator.accumulate(model):
        loss = F.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        scheduler.step()

accelerator.print(f"loss {loss.item():.3f}")
accelerator.save_state(sys.argv[2])
accelerator.save(accelerator.get_state_dict(model), sys.argv[1])
accelerator.end_training()
