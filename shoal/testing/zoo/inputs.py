"""Entries whose inputs or outputs are no single tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.task import Task
from shoal.testing.zoo.structure import Stack
from shoal.testing.zoo.vectors import BATCH, WIDTH, vectors


@dataclass
class Pair:
    """A hidden state and its origin.

    Attributes:
        hidden: `[batch, WIDTH]`.
        place: `[batch]`, int64.
        source: Name of its origin.
    """

    hidden: Tensor
    place: Tensor
    source: str = ""


class DictModel(Stack):
    """A model that takes a dict and returns one."""

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Any]:  # type: ignore[override]
        """From `x` `[batch, WIDTH]` to `y` of the same shape."""
        return {"y": super().forward(inputs["x"] * inputs["mask"]), "name": "a dict"}


class NestedModel(Stack):
    """A model that takes dicts of lists and tuples."""

    def forward(self, inputs: dict[str, Any], *, more: list[Any]) -> tuple[Tensor, dict[str, Tensor]]:  # type: ignore[override]
        """From three halves to `[batch, WIDTH]`, and half of it in a dict."""
        left, right = inputs["halves"]["pair"]
        output = super().forward(torch.cat([left, right], -1) + more[0]["bias"])
        return output, {"half": output.chunk(2, -1)[0]}


class PairBlock(nn.Module):
    """A block from dataclass to dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(WIDTH, WIDTH)
        self.place = nn.Embedding(4, WIDTH)

    def forward(self, pair: Pair) -> Pair:
        """Return the pair that the layers make of this one."""
        hidden = pair.hidden + torch.tanh(self.mixed(pair.hidden)) + self.place(pair.place)
        return Pair(hidden, pair.place, "a block")


class PairModel(nn.Module):
    """Blocks that hand dataclasses to one another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PairBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: Pair) -> Pair:
        """See `PairBlock`."""
        for block in self.blocks:
            pair = block(pair)
        return Pair(self.head(pair.hidden), pair.place, "the model")


class Heads(Stack):
    """Two outputs of one trunk, and a third that is not trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, 5) for name in ("class", "other", "idle")})

    def forward(self, inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:  # type: ignore[override]
        """From `[batch, WIDTH]` to the same shape, and what the heads give, `[batch, 5]` each."""
        hidden = super().forward(inputs)
        return hidden, {name: head(hidden) for name, head in self.heads.items()}


def dict_inputs() -> Task:
    """The model takes a dict of tensors, and gives one."""

    def batch(number: int) -> dict[str, Tensor]:
        made = vectors(number)
        return made | {"mask": (made["x"] > -1).float()}

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        given = {name: tensor for name, tensor in batch.items() if name != "y"}
        return F.mse_loss(model(given)["y"].float(), batch["y"])

    return Task(build=DictModel, batch=batch, loss=loss)


def nested_inputs() -> Task:
    """The model takes tensors in dicts of tuples and lists, and gives a tuple with a dict."""

    def batch(number: int) -> dict[str, Any]:
        made = vectors(number)
        left, right = made["x"].chunk(2, -1)
        return {
            "inputs": {"halves": {"pair": (left, right)}},
            "more": [{"bias": made["x"][:, :1]}, None, "a word"],
            "y": made["y"],
        }

    def loss(model: Any, batch: dict[str, Any]) -> Tensor:
        output, more = model(batch["inputs"], more=batch["more"])
        return F.mse_loss(output.float(), batch["y"]) + more["half"].float().square().mean()

    return Task(build=NestedModel, batch=batch, loss=loss)


def dataclasses_in_and_out() -> Task:
    """The model and its blocks take and give dataclasses."""

    def batch(number: int) -> dict[str, Any]:
        made = vectors(number)
        return {"pair": Pair(made["x"], torch.arange(BATCH) % 4, "data"), "y": made["y"]}

    def loss(model: Any, batch: dict[str, Any]) -> Tensor:
        return F.mse_loss(model(batch["pair"]).hidden.float(), batch["y"])

    return Task(build=PairModel, batch=batch, loss=loss)


def heads() -> Task:
    """There are several outputs, and a head whose output is not in the loss."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        hidden, outputs = model(batch["x"])
        classes = batch["y"].argmax(-1) % 5
        told = [F.cross_entropy(outputs[name].float(), classes) for name in ("class", "other")]
        return F.mse_loss(hidden.float(), batch["y"]) + torch.stack(told).sum()

    return Task(build=Heads, batch=vectors, loss=loss)
