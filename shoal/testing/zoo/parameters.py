"""Entries whose parameters are of special kinds, or of which not all are trained."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from shoal.models.task import Task
from shoal.testing.zoo.structure import Stack
from shoal.testing.zoo.vectors import BATCH, WIDTH, Block, error, vectors, words


class Tied(nn.Module):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """From tokens `[batch, seq]` to logits `[batch, seq, 13]`."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Unused(Stack):
    """Has parameters that no forward uses, at the root and in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.blocks[1].spare = nn.Parameter(torch.ones(5))


class OneRank(Stack):
    """Uses a layer and a block for inputs with a mark only."""

    def __init__(self) -> None:
        super().__init__()
        self.special = nn.Linear(WIDTH, WIDTH)

    def forward(self, marked: Tensor) -> Tensor:
        """Maps `[batch, WIDTH + 1]`, of which the first says whether it has a mark, to `[batch, WIDTH]`."""
        mark, inputs = marked[:, 0], marked[:, 1:]
        hidden = self.blocks[0](self.enter(inputs))
        if bool(mark.any()):
            hidden = self.blocks[1](hidden) + self.special(hidden) * mark[:, None]
        return self.leave(self.blocks[2](hidden))


class LowRank(nn.Module):
    """A frozen layer, and two small ones beside it that are trained."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.reduce = nn.Parameter(torch.randn(rank, base.in_features) * 0.2)
        self.expand = nn.Parameter(torch.randn(base.out_features, rank) * 0.2)

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps `[batch, in_features]` to `[batch, out_features]`."""
        return self.base(inputs) + F.linear(F.linear(inputs, self.reduce), self.expand)


class Scalars(Stack):
    """Scales by parameters of shape []."""

    gain: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        for block in self.blocks:
            block.gain = nn.Parameter(torch.tensor(0.5))

    def middle(self, hidden: Tensor) -> Tensor:
        """See `Stack`."""
        for block in self.blocks:
            hidden = block(hidden * block.gain)  # type: ignore[operator]
        return hidden * self.gain


class Integers(Stack):
    """Has an order of features as a parameter, and counts and masks as buffers."""

    calls: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.arange(WIDTH) % 3 > 0)
        self.register_buffer("small", torch.arange(3, dtype=torch.uint8))

    def forward(self, inputs: Tensor) -> Tensor:
        """See `Stack`."""
        if self.training:
            self.calls += 1
        return super().forward(inputs.index_select(-1, self.order) * self.mask)


class Narrow(nn.Module):
    """Its weights have fewer rows than there are ranks, or none but one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH, inner) for inner in (1, 3))
        self.pool = nn.Linear(WIDTH, 1)
        self.spread = nn.Linear(1, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps `[batch, WIDTH]` to the same shape."""
        hidden = self.blocks[1](self.blocks[0](inputs))
        return hidden + self.spread(self.pool(hidden))


def tied_weights() -> Task:
    """The embedding and the head share a weight."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]).float().flatten(0, 1), batch["y"].flatten())

    return Task(build=Tied, batch=words, loss=loss)


def unused_parameters() -> Task:
    """Parameters that are trained but never used stay as they are, without decay."""
    return Task(build=Unused, batch=vectors, loss=error)


def one_rank_parameters() -> Task:
    """Parameters are used on one rank alone, in one of its micro-batches."""

    def batch(number: int) -> dict[str, Tensor]:
        made = vectors(number)
        mark = torch.zeros(BATCH, 1)
        mark[0] = 1.0
        return {"x": torch.cat([mark, made["x"]], 1), "y": made["y"]}

    return Task(build=OneRank, batch=batch, loss=error)


def frozen_parts() -> Task:
    """A layer, a block and the bias of another are not trained."""

    def build() -> nn.Module:
        model = Stack()
        model.enter.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        model.blocks[1].down.bias.requires_grad_(False)  # type: ignore[union-attr]
        return model

    return Task(build=build, batch=vectors, loss=error)


def lora() -> Task:
    """Adapters are trained beside layers that are not (LoRA)."""

    def build() -> nn.Module:
        model = Stack().requires_grad_(False)
        for block in model.blocks:
            block.up = LowRank(block.up)  # type: ignore[arg-type]
        return model

    return Task(build=build, batch=vectors, loss=error)


def scalar_parameters() -> Task:
    """Parameters have the shape []."""
    return Task(build=Scalars, batch=vectors, loss=error)


def integer_parameters() -> Task:
    """A parameter and buffers hold integers, and one buffer counts forwards."""
    return Task(build=Integers, batch=vectors, loss=error)


def narrow_parameters() -> Task:
    """Weights have fewer rows than there are ranks."""
    return Task(build=Narrow, batch=vectors, loss=error)


def weight_norm() -> Task:
    """Weights are made of a direction and a length in each forward."""

    def build() -> nn.Module:
        model = Stack()
        for block in model.blocks:
            parametrizations.weight_norm(block.up)  # type: ignore[arg-type]
        parametrizations.weight_norm(model.leave)
        return model

    return Task(build=build, batch=vectors, loss=error)


def spectral_norm() -> Task:
    """Weights are divided by their largest singular value, whose vectors are buffers that forwards change."""

    def build() -> nn.Module:
        model = Stack()
        for block in model.blocks:
            parametrizations.spectral_norm(block.up)  # type: ignore[arg-type]
        return model

    return Task(build=build, batch=vectors, loss=error)
