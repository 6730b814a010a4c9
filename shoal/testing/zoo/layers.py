"""Entries whose layers keep statistics, draw random numbers, or keep their weights in a way of their own."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.task import Task
from shoal.testing.zoo.structure import Stack
from shoal.testing.zoo.vectors import WIDTH, Block, error, images, vectors, words

LENGTH = 6
"""Places in a sequence."""


class Recurrent(nn.Module):
    """A recurrent layer of two levels, and a head."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind(WIDTH, WIDTH, num_layers=2, batch_first=True)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps `[batch, LENGTH, WIDTH]` to the same shape."""
        hidden, _ = self.layers[0](inputs)
        return self.head(hidden)


class Positions(Stack):
    """Adds a buffer of positions, which is saved, and scales by one that is not."""

    places: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        places = torch.arange(LENGTH)[:, None] / 10 ** (torch.arange(WIDTH) / WIDTH)
        self.register_buffer("places", places.sin()[None])
        self.register_buffer("scale", torch.full((1,), math.sqrt(0.5)), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps `[batch, LENGTH, WIDTH]` to the same shape."""
        return super().forward((inputs + self.places) * self.scale)


class SparseEmbedding(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, 13)

    def forward(self, tokens: Tensor) -> Tensor:
        """From tokens `[batch, seq]` to logits `[batch, seq, 13]`."""
        return self.head(self.embed(tokens))


def _convolutions(between: nn.Module) -> nn.Module:
    """Two convolutions, a normalization, which would take a bias away, and a head."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        between,
        nn.GELU(),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.Flatten(),
        nn.Linear(32, 5),
    )


def _classes(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).float(), batch["y"])


def _sequences(number: int) -> dict[str, Tensor]:
    return vectors(number, LENGTH, WIDTH)


def attention_layers() -> Task:
    """torch's encoder layers read the weights of their children; in evaluation they call one fused kernel."""

    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, WIDTH)
        )

    return Task(build=build, batch=_sequences, loss=error)


def batch_norm() -> Task:
    """BatchNorm1d: each rank normalizes by its own rows, and has running statistics of these."""

    def build() -> nn.Module:
        layers = [
            nn.Sequential(nn.Conv1d(LENGTH, LENGTH, 1, bias=False), nn.BatchNorm1d(LENGTH), nn.Tanh())
            for _ in range(2)
        ]
        return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))

    return Task(build=build, batch=_sequences, loss=error)


def batch_norm_2d() -> Task:
    """BatchNorm2d between convolutions."""
    return Task(build=lambda: _convolutions(nn.BatchNorm2d(8)), batch=images, loss=_classes)


def channels_last() -> Task:
    """Convolutions whose weights are laid out channels last."""

    def build() -> nn.Module:
        model = _convolutions(nn.GroupNorm(2, 8))
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def batch(number: int) -> dict[str, Tensor]:
        made = images(number)
        return made | {"x": made["x"].contiguous(memory_format=torch.channels_last)}

    return Task(build=build, batch=batch, loss=_classes)


def convolutions() -> Task:
    """Convolutions, of which one is in groups."""
    return Task(build=lambda: _convolutions(nn.GroupNorm(2, 8)), batch=images, loss=_classes)


def dropout() -> Task:
    """torch's dropout: with a seed for each forward the masks are the same."""

    def build() -> nn.Module:
        blocks = [nn.Sequential(Block(), nn.Dropout(0.3)) for _ in range(3)]
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, WIDTH))

    return Task(build=build, batch=vectors, loss=error)


def gru() -> Task:
    """A GRU, which keeps a list of its weights."""
    return Task(build=lambda: Recurrent(nn.GRU), batch=_sequences, loss=error)


def lstm() -> Task:
    """An LSTM, which keeps a list of its weights."""
    return Task(build=lambda: Recurrent(nn.LSTM), batch=_sequences, loss=error)


def positions() -> Task:
    """Buffers are floating-point numbers: positions that are added to the inputs."""
    return Task(build=Positions, batch=_sequences, loss=error)


def sparse_embedding() -> Task:
    """An embedding has sparse=True."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]).float().flatten(0, 1), batch["y"].flatten())

    return Task(build=SparseEmbedding, batch=words, loss=loss)
