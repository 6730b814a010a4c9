"""Entries whose forward does not simply call one block after the other."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.models.task import Task
from shoal.testing.zoo.vectors import WIDTH, Block, error, vectors


class Stack(nn.Module):
    """A layer, three blocks in a ModuleList, and another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps `[batch, WIDTH]` to the same shape."""
        return self.leave(self.middle(self.enter(inputs)))

    def middle(self, hidden: Tensor) -> Tensor:
        """What the blocks make of a hidden state."""
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class ChildrenCalled(Stack):
    """Calls the layers of a block, and not the block."""

    def middle(self, hidden: Tensor) -> Tensor:
        """See `Stack`."""
        for block in self.blocks:
            hidden = hidden + block.down(torch.tanh(block.up(hidden)))  # type: ignore[operator]
        return hidden


class WeightRead(Stack):
    """Reads the weights of layers in a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def middle(self, hidden: Tensor) -> Tensor:
        """See `Stack`."""
        for layer in self.blocks:
            hidden = hidden + torch.tanh(F.linear(hidden, layer.weight, layer.bias))  # type: ignore[arg-type]
        return hidden


class OtherMethod(Stack):
    """Has a method that is called in place of forward."""

    def features(self, inputs: Tensor) -> Tensor:
        """Maps `[batch, WIDTH]` to the same shape, in the type of the weights."""
        return self.leave(self.middle(self.enter(inputs.to(self.enter.weight.dtype))))


class BlocksInReverse(Stack):
    """Calls its blocks in another order than it registers them, and one of them not in every batch."""

    def forward(self, inputs: Tensor) -> Tensor:
        """See `Stack`."""
        hidden = self.blocks[0](self.blocks[2](self.enter(inputs)))
        if inputs[0, 0] > 0:
            hidden = self.blocks[1](hidden)
        return self.leave(hidden)


class BlockTwice(Stack):
    """Calls one block three times, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()] * 3)


class NestedLists(Stack):
    """Has ModuleLists in a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))

    def middle(self, hidden: Tensor) -> Tensor:
        """See `Stack`."""
        for pair in self.blocks:
            for block in pair:  # type: ignore[attr-defined,union-attr]
                hidden = block(hidden)
        return hidden


class NoList(nn.Module):
    """Has its layers as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 12)
        self.second = Block(12)
        self.third = nn.Linear(12, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps `[batch, WIDTH]` to the same shape."""
        return self.third(self.second(torch.tanh(self.first(inputs))))


class Recomputed(Stack):
    """Recomputes its blocks by torch.utils.checkpoint."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def middle(self, hidden: Tensor) -> Tensor:
        """See `Stack`."""
        for block in self.blocks:
            if torch.is_grad_enabled():
                hidden = checkpoint(block, hidden, use_reentrant=self.reentrant)
            else:
                hidden = block(hidden)
        return hidden


def children_called() -> Task:
    """The layers of a block are called, and not the block (T5 style)."""
    return Task(build=ChildrenCalled, batch=vectors, loss=error)


def weight_read() -> Task:
    """The weights of layers in a ModuleList are read: F.linear(x, self.blocks[0].weight)."""
    return Task(build=WeightRead, batch=vectors, loss=error)


def other_method() -> Task:
    """A method is called in place of forward: model.module.features(x)."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(model.module.features(batch["x"]).float(), batch["y"])

    return Task(build=OtherMethod, batch=vectors, loss=loss)


def blocks_in_reverse() -> Task:
    """Blocks run in another order than they are registered, and one of them on some ranks only."""
    return Task(build=BlocksInReverse, batch=vectors, loss=error)


def block_twice() -> Task:
    """One block stands three times in a ModuleList."""
    return Task(build=BlockTwice, batch=vectors, loss=error)


def nested_lists() -> Task:
    """ModuleLists stand in a ModuleList."""
    return Task(build=NestedLists, batch=vectors, loss=error)


def no_list() -> Task:
    """There is no ModuleList and no Sequential."""
    return Task(build=NoList, batch=vectors, loss=error)


def recompute() -> Task:
    """Blocks are recomputed by torch.utils.checkpoint."""
    return Task(build=lambda: Recomputed(reentrant=False), batch=vectors, loss=error)


def recompute_reentrant() -> Task:
    """Blocks are recomputed by torch.utils.checkpoint with use_reentrant=True."""
    return Task(build=lambda: Recomputed(reentrant=True), batch=vectors, loss=error)


def two_forwards() -> Task:
    """The loss takes two forwards of the model."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        one, other = model(batch["x"]).float(), model(batch["x"].flip(-1)).float()
        return F.mse_loss(one, batch["y"]) + (one - other.flip(-1)).square().mean()

    return Task(build=Stack, batch=vectors, loss=loss)


def weight_penalty() -> Task:
    """The loss has the squares of all parameters in it, read from the module."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        told = error(model, batch)
        squares = [parameter.float().square().sum() for parameter in model.module.parameters()]
        return told + 0.01 * torch.stack(squares).sum()

    return Task(build=Stack, batch=vectors, loss=loss)
