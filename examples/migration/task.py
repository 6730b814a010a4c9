"""What the loops of this folder train: a model that puts eight numbers in order."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

_drawn = torch.randn(1024, 8, generator=torch.Generator().manual_seed(0))
NUMBERS = TensorDataset(_drawn, _drawn.sort().values)


class Block(nn.Module):
    """Two layers beside a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps `[batch, 64]` to the same shape."""
        return hidden + self.layers(hidden)


class Sorter(nn.Module):
    """Maps numbers `[batch, 8]` to the same numbers in order."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.leave = nn.Linear(64, 8)

    def forward(self, numbers: Tensor) -> Tensor:
        """The model's guess."""
        hidden = self.enter(numbers)
        for block in self.blocks:
            hidden = block(hidden)
        return self.leave(hidden)
