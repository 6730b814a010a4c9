"""An entry whose parameters get a gradient where samples happen to go."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.models.task import Task
from shoal.testing.zoo.vectors import WIDTH, error, vectors


class Experts(nn.Module):
    """A router sends each sample to one of four experts; the last gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        nn.init.normal_(self.router.weight, std=3.0)  # rounding must not decide where a sample goes
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return a tensor of the shape of `inputs`, `[batch, WIDTH]`."""
        shares = self.router(inputs).softmax(-1)
        chosen = shares.argmax(-1)
        outputs = torch.zeros_like(inputs)
        for index, expert in enumerate(self.experts):
            taken = (chosen == index).nonzero().squeeze(-1)
            if len(taken):
                outputs = outputs.index_add(0, taken, expert(inputs[taken]) * shares[taken, index, None])
        return inputs + outputs


def idle_experts() -> Task:
    """Experts get samples on some ranks only, and one of them never."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(), Experts(), nn.Linear(WIDTH, WIDTH))

    return Task(build=build, batch=vectors, loss=error)
