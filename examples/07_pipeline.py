"""A pipeline of a model of one's own: `torchrun --nproc-per-node 2` and the file."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.parallel import StageLayout

BATCH, MICROBATCH = 64, 8


class Block(nn.Module):
    """Two layers beside a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps `[batch, 64]` to the same shape."""
        return hidden + self.layers(hidden)


class Sorter(nn.Module):
    """Eight numbers `[batch, 8]` to the same in order."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.leave = nn.Linear(64, 8)

    def forward(self, numbers: Tensor) -> Tensor:
        """What the model takes for the order."""
        hidden = self.enter(numbers)
        for block in self.blocks:
            hidden = block(hidden)
        return self.leave(hidden)


ranks = int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    dist.init_process_group("shoal")
torch.manual_seed(0)
stages = StageLayout(embed=("enter",), blocks="blocks", end=("leave",))
model = shoal.parallelize(Sorter(), f"pp={ranks},schedule=zb-h1,microbatch={MICROBATCH}", stages=stages)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for numbers in torch.randn(150, BATCH, 8):  # all ranks of pp take the same samples
    pairs = ((part, part.sort().values) for part in numbers.split(MICROBATCH))
    model.forward_backward(pairs, BATCH // MICROBATCH, F.mse_loss)
    model.clip_gradients(1.0)
    optimizer.step()
    optimizer.zero_grad()

with torch.no_grad():  # every rank gets the last stage's output
    numbers = torch.randn(256, 8)
    loss = F.mse_loss(model(numbers), numbers.sort().values)
own = sum(parameter.numel() for parameter in model.parameters())
print(f"loss {loss.item():.3f} with {own} parameters on this rank")
