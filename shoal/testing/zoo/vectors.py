"""The data of most entries: vectors, with the outputs of a fixed layer as targets."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH = 16
"""Samples in a batch: 4 for each micro-batch of 2 on 2 ranks, 2 for each of 2 on 4 ranks."""

WIDTH = 8
"""Features of most models."""


class Block(nn.Module):
    """Two layers beside a residual stream `[..., width]`."""

    def __init__(self, width: int = WIDTH, inner: int = 12) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        return hidden + self.down(torch.tanh(self.up(hidden)))


def vectors(number: int, *shape: int) -> dict[str, Tensor]:
    """Return inputs `x` and targets `y`, of `shape` per sample, by default `[WIDTH]`.

    The first quarter of the batch has larger targets, so that the ranks' gradients differ.
    """
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(BATCH, *(shape or (WIDTH,)), generator=generator)
    scale = torch.ones(BATCH)
    scale[: BATCH // 4] = 3.0
    targets = inputs.roll(1, -1).sin() * scale.view(-1, *[1] * (inputs.ndim - 1))
    return {"x": inputs, "y": targets}


def images(number: int) -> dict[str, Tensor]:
    """Return images `x` `[batch, 3, 6, 6]` and their classes `y` `[batch]`, below 5."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(BATCH, 3, 6, 6, generator=generator)
    return {"x": inputs, "y": torch.randint(5, (BATCH,), generator=generator)}


def words(number: int, vocabulary: int = 13, length: int = 6) -> dict[str, Tensor]:
    """Return tokens `x` and the tokens after them `y`, int64 `[batch, length]`."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(vocabulary, (BATCH, length + 1), generator=generator)
    return {"x": tokens[:, :-1], "y": tokens[:, 1:]}


def error(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean squared error of the model's output for `x`."""
    return F.mse_loss(model(batch["x"]).float(), batch["y"])
