"""Entries whose layers mix the places of a sequence, or count them, in a way of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.task import Task
from shoal.testing.zoo.structure import Stack
from shoal.testing.zoo.vectors import WIDTH, Block, error, vectors, words

LENGTH = 6
"""Places in a sequence."""


class CountedPositions(nn.Module):
    """Takes positions from a running count of the tokens that are no padding (token 0), as OPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        self.places = nn.Embedding(LENGTH + 1, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 13)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens `[batch, LENGTH]` to logits `[batch, LENGTH, 13]`."""
        is_real = (tokens != 0).long()
        hidden = self.embed(tokens) + self.places(is_real.cumsum(-1) * is_real)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class SequenceMixing(nn.Module):
    """A causal convolution and a linear recurrence along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)
        self.decay = nn.Parameter(torch.linspace(-1.0, 1.0, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[batch, LENGTH, WIDTH]` to the same shape."""
        mixed = self.convolution(F.pad(hidden.transpose(1, 2), (2, 0))).transpose(1, 2)
        state, states, decay = torch.zeros_like(mixed[:, 0]), [], self.decay.sigmoid()
        for place in mixed.unbind(1):
            state = decay * state + place
            states.append(state)
        return hidden + torch.stack(states, dim=1)


class ViewAttention(nn.Module):
    """Attention whose number of heads and width of a head are fixed when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.projected = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[batch, LENGTH, WIDTH]` to the same shape."""
        batch, length, _ = hidden.shape
        heads = self.projected(hidden).view(batch, length, 3, 2, WIDTH // 2)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class DynamicRates(Stack):
    """Slows the rates of its positions when a sequence is longer than all before, as dynamic rope does."""

    longest: Tensor
    rates: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("longest", torch.tensor(1), persistent=False)
        self.register_buffer("rates", torch.ones(WIDTH), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map `[batch, seq, WIDTH]` to the same shape."""
        length = inputs.shape[1]
        if length > self.longest:
            self.longest = torch.full_like(self.longest, length)
            self.rates = 1.0 / length ** (torch.arange(WIDTH, device=inputs.device) / WIDTH)
        places = torch.arange(length, device=inputs.device)[:, None] * self.rates
        return super().forward(inputs + places.sin().to(inputs.dtype))


def counted_positions() -> Task:
    """Positions are a running count of the tokens that are no padding (OPT style)."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]).float().flatten(0, 1), batch["y"].flatten())

    return Task(build=CountedPositions, batch=words, loss=loss)


def sequence_mixing() -> Task:
    """Layers mix the places of a sequence by a convolution and a recurrence (Mamba style)."""
    return _of_sequences(SequenceMixing)


def view_attention() -> Task:
    """Attention lays its heads out by fixed numbers: view(batch, seq, heads, width)."""
    return _of_sequences(ViewAttention)


def dynamic_rates() -> Task:
    """A sequence longer than all before changes buffers, which are not saved (dynamic rope)."""

    def batch(number: int) -> dict[str, Tensor]:
        return vectors(number, 2 + 2 * (number % 3), WIDTH)

    return Task(build=DynamicRates, batch=batch, loss=error)


def _of_sequences(kind: type[nn.Module]) -> Task:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), kind(), nn.Linear(WIDTH, WIDTH))

    return Task(build=build, batch=lambda number: vectors(number, LENGTH, WIDTH), loss=error)
