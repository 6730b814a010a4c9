"""Tensor parallelism of a model of one's own: `torchrun --nproc-per-node 2` and the file."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.parallel import Split, TensorLayout


class Block(nn.Module):
    """Two layers beside a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 64)
        self.down = nn.Linear(64, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps `[batch, seq, 8]` to the same shape."""
        return inputs + self.down(F.gelu(self.up(inputs)))


ranks = int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    dist.init_process_group("shoal")
torch.manual_seed(0)
# `up` is split by its 64 outputs, `down` by the same 64 inputs; there is no vocabulary.
layout = TensorLayout({"[01]": Split({"up": 64}, {"down": 64})}, embedding=None, head=None)
model = shoal.parallelize(nn.Sequential(Block(), Block()), f"tp={ranks},tensor=plain", layout=layout)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for inputs in torch.randn(200, 64, 1, 8):  # all ranks of tp take the same samples
    loss = F.mse_loss(model(inputs), inputs.sort().values)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

own = sum(parameter.numel() for parameter in model.parameters())
print(f"loss {loss.item():.3f} with {own} parameters on this rank")
