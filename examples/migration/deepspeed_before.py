"""DeepSpeed, on CPUs: `DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 deepspeed_before.py model.pt DIR`."""

import sys

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import NUMBERS, Sorter
from torch.utils.data import DataLoader, DistributedSampler

CONFIG = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 16,  # on two ranks two micro-batches make a step
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01, "torch_adam": True}},
}

deepspeed.init_distributed()
torch.manual_seed(0)
layers = Sorter()
engine, _, _, _ = deepspeed.initialize(model=layers, model_parameters=layers.parameters(), config=CONFIG)
for inputs, targets in DataLoader(NUMBERS, batch_size=16, sampler=DistributedSampler(NUMBERS)):
    inputs, targets = inputs.to(engine.device), targets.to(engine.device)
    loss = F.mse_loss(engine(inputs), targets)
    engine.backward(loss)
    engine.step()

engine.save_checkpoint(sys.argv[2])
if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}")
    torch.save(engine.module.state_dict(), sys.argv[1])
dist.destroy_process_group()
