"""State that modules keep in attributes, without buffers: stages, skipped steps and recompute agree on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.parallel import StageLayout
from shoal.spec.plan import Plan
from shoal.train import OptimizerConfig, Trainer

VOCABULARY, WIDTH, STEPS, MICRO_BATCHES = 31, 16, 4, 4
ROUNDING = 1e-5  # of fp32, with sums in another order, over four steps


class Growing(nn.Module):
    """A table that grows with the longest sample so far, and values that follow its length and its calls."""

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.keep = keep
        self.calls: list[int] = []
        self._set(4)

    def _set(self, length: int) -> None:
        table = torch.linspace(0, 1, length)
        if self.keep == "private buffer":
            self.register_buffer("_table", table, persistent=False)
            self._length = length
        elif self.keep == "tensor":
            self.table, self.length = table, length
        else:
            self.cache = {"table": table, "length": length}

    def forward(self, length: int) -> Tensor:
        held = {
            "private buffer": lambda: (self._table, self._length),
            "tensor": lambda: (self.table, self.length),
            "dict": lambda: (self.cache["table"], self.cache["length"]),
        }
        if length > held[self.keep]()[1]:
            self._set(length)
        self.calls.append(length)
        table, longest = held[self.keep]()
        return table[:length, None] + longest / 8 + 0.05 * len(self.calls)


class Block(nn.Module):
    def __init__(self, growing: Growing | None) -> None:
        super().__init__()
        self.growing = growing
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, shift: Tensor | None) -> Tensor:
        shift = self.growing(hidden.shape[1]) if self.growing is not None else shift
        return hidden + torch.tanh(self.inner(hidden * shift))


class Model(nn.Module):
    stage_layout = StageLayout(embed=("embed",), blocks="blocks", end=("head",))

    def __init__(self, keep: str, within: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.growing = Growing(keep) if within == "model" else None
        self.blocks = nn.ModuleList(Block(Growing(keep) if within == "blocks" else None) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        shift = None if self.growing is None else self.growing(tokens.shape[1])
        for block in self.blocks:
            hidden = block(hidden, shift)
        return self.head(hidden)


def sample(index: int) -> tuple[Tensor, Tensor]:
    length = (5, 9, 6, 12, 8, 7, 10, 5)[index % 8]
    tokens = torch.randint(VOCABULARY, (1, length + 1), generator=torch.Generator().manual_seed(index))
    return tokens[:, :-1], tokens[:, 1:]


class Samples:
    """Sequences of several lengths, one in a batch, in their order."""

    deterministic = True

    def __len__(self) -> int:
        return 32

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        return sample(int(indices[0]))


def trainer_of(plan: str, keep: str, within: str, skipped: int | None) -> Trainer:
    calls = iter(range(1000))

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        value = F.cross_entropy(output.flatten(0, 1), targets.flatten())
        is_broken = skipped is not None and next(calls) == MICRO_BATCHES * skipped
        return value * float("nan") if is_broken else value

    optimizer = OptimizerConfig(
        name="sgd", warmup=0, learning_rate=0.1, final=1.0, weight_decay=0.0, clip=None
    )
    return Trainer(
        Model(keep, within),
        Samples(),
        f"{plan},microbatch=1",
        batch=MICRO_BATCHES,
        steps=STEPS,
        optimizer=optimizer,
        loss=loss,
    )


def trained(plan: str, keep: str, within: str, skipped: int | None) -> list[float]:
    trainer = trainer_of(plan, keep, within, skipped)
    results = [trainer.step() for _ in range(STEPS)]
    trainer.close()
    assert [bool(each.skipped) for each in results] == [step == skipped for step in range(STEPS)]
    return [each.loss for each in results if not each.skipped]


def by_hand(keep: str, within: str, skipped: int | None) -> list[float]:
    """Losses of a plain loop; a step that is left out leaves no trace."""
    model = Model(keep, within)
    order = trainer_of("dp=1", keep, within, None)._loader
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        if step == skipped:
            continue
        samples = [order.fetch(step * MICRO_BATCHES + number, 1) for number in range(MICRO_BATCHES)]
        count = sum(targets.numel() for _, targets in samples)
        optimizer.zero_grad()
        total = 0.0
        for tokens, targets in samples:
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum") / count
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


@pytest.mark.parametrize("skipped", [None, 1])
@pytest.mark.parametrize(
    ("plan", "within"),
    [
        ("dp=1", "model"),
        ("dp=1,recompute=full", "blocks"),
        ("pp=2,schedule=interleaved", "model"),
        ("pp=2,recompute=full", "blocks"),
    ],
)
@pytest.mark.parametrize("keep", ["private buffer", "tensor", "dict"])
def test_it_is_that_of_one_device(ranks, keep, plan, within, skipped):
    expected = by_hand(keep, within, skipped)
    size = Plan.parse(plan).ranks
    found = (
        [trained(plan, keep, within, skipped)]
        if size == 1
        else ranks.run(trained, size, plan, keep, within, skipped)
    )
    for losses in found:
        assert losses == pytest.approx(expected, rel=ROUNDING)
