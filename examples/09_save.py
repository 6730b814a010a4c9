"""A loop of one's own that goes on where it was, on any number of ranks, and trains matrices by Muon.

torchrun --nproc-per-node 2 examples/09_save.py FOLDER, then python examples/09_save.py FOLDER
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.parallel import Together, WholeParameters

STEPS = 100  # of each start

folder, ranks = Path(sys.argv[1]), int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    dist.init_process_group("shoal")
torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
model = shoal.parallelize(layers, f"dp={ranks},shard={'zero3' if ranks > 1 else 'none'}")

named = list(model.named_parameters())
matrices = [(name, each) for name, each in named if each.dim() == 2]
vectors = [(name, each) for name, each in named if each.dim() < 2]
muon = WholeParameters(model, matrices, torch.optim.Muon, lr=1e-2, adjust_lr_fn="match_rms_adamw")
optimizer = Together([muon, torch.optim.AdamW(vectors, lr=1e-2)])

first = 0
if folder.exists():
    state = shoal.load(folder, model, optimizer)
    first = state["step"]
    print(f"goes on from step {first}, loss {state['loss']:.3f} on {state['ranks']} ranks")
for step in range(first, first + STEPS):
    # All ranks draw the same, and the step alone says what: the random generators need not be saved.
    batch = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))
    inputs = model.local(batch)
    loss = F.mse_loss(model(inputs), inputs.sort().values)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
path = shoal.save(folder, model, optimizer, step=first + STEPS, loss=loss.item(), ranks=ranks)
print(f"saved {path.name}, loss {loss.item():.3f}")
