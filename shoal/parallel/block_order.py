"""The order in which ranks come to a model's blocks: the same on all, whatever each of them runs.

Ranks that communicate for each block have to do so in one order, but a rank may leave out a block that others
run, and its loss may reach other parameters. So a walk goes over all blocks, from the first to the last in a
forward, and from the last to the first in a backward. Where a rank comes to a block further on, the walk
passes those between; what is left of them when the forward or the backward ends, it passes then.

A rank that comes to a block which the walk has passed begins the next walk, as a second forward does, so all
ranks must make as many walks. How often a block is run in succession is each rank's own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

__all__ = ["NO_BACKWARD", "BlockOrder", "Visits"]

NO_BACKWARD = -1
"""What autograd gives as the current graph task outside of backward."""


def _nothing(*_: int) -> None:
    """What is done where nothing is to be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """What is done on the way; blocks are given by their index.

    Attributes:
        begin_forward: Before the model.
        come_forward: Before a block is run or passed.
        leave_forward: When the walk goes on from a block.
        end_forward: After the model; the walk has come to the last block, and not left it.
        begin_backward: Before the first block of a backward.
        come_backward: Before the backward of a block is run or passed.
        leave_backward: When the walk goes on from a block; for the number of blocks, from what follows them.
        settle: After `leave_backward`, if no more gradients come from there in this backward.
        recompute: Before a block is run again within backward, by the user's own recomputation.
    """

    begin_forward: Callable[[], None] = _nothing
    come_forward: Callable[[int], None] = _nothing
    leave_forward: Callable[[int], None] = _nothing
    end_forward: Callable[[], None] = _nothing
    begin_backward: Callable[[], None] = _nothing
    come_backward: Callable[[int], None] = _nothing
    leave_backward: Callable[[int], None] = _nothing
    settle: Callable[[int], None] = _nothing
    recompute: Callable[[int], None] = _nothing


class BlockOrder:
    """Follows a model by hooks, and makes the visits.

    Autograd runs what was computed last first. So when it comes to what a block gave, it has left all that
    was computed after that block.

    Args:
        model: The whole model.
        blocks: In forward order.
        visits: What is done on the way.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], visits: Visits) -> None:
        self._end = len(blocks)
        self._visits = visits
        self._forward_at = -1
        self._backward_at = self._end
        self._backward = NO_BACKWARD
        self._walks = 0  # with gradients, in the forwards since the last backward
        self._walks_back = 0
        model.register_forward_pre_hook(self._before_model)
        model.register_forward_hook(self._after_model)
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(self._before_block(index))
            block.register_forward_hook(self._after_block(index))

    def end_backward(self) -> None:
        """Passes what is left; to be called at the end of every backward."""
        if self._backward == NO_BACKWARD:  # none of the blocks had a part in it
            self._begin_backward()
        self._walk_back(-1)
        self._backward = NO_BACKWARD

    def clear(self) -> None:
        """Forgets a backward that did not end, and the forwards before it."""
        self._backward = NO_BACKWARD
        self._walks = self._walks_back = 0

    # -- forward ------------------------------------------------------------------------------------

    def _before_model(self, module: nn.Module, arguments: Any) -> None:
        if not _in_backward():
            self._begin_walk()
            self._visits.begin_forward()

    def _before_block(self, index: int) -> Callable[..., None]:
        def come(module: nn.Module, arguments: Any) -> None:
            if _in_backward():
                self._visits.recompute(index)
                return
            if index < self._forward_at:
                self._walk(self._end - 1)
                self._visits.leave_forward(self._end - 1)
                self._begin_walk()
            self._walk(index)

        return come

    def _begin_walk(self) -> None:
        self._forward_at = -1
        if torch.is_grad_enabled():
            if self._walks_back:
                self._walks = self._walks_back = 0
            self._walks += 1

    def _walk(self, index: int) -> None:
        while self._forward_at < index:
            if self._forward_at >= 0:
                self._visits.leave_forward(self._forward_at)
            self._forward_at += 1
            self._visits.come_forward(self._forward_at)

    def _after_block(self, index: int) -> Callable[..., None]:
        def follow(module: nn.Module, arguments: Any, output: Any) -> None:
            if not _in_backward():
                _before_backward_of(output, lambda gradient: self._come_back(index))

        return follow

    def _after_model(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if not _in_backward():
            self._walk(self._end - 1)
            self._visits.end_forward()
            _before_backward_of(output, lambda gradient: self._begin_backward())

    # -- backward -----------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        current = torch._C._current_graph_task_id()
        if current != self._backward or current == NO_BACKWARD:
            self._visits.begin_backward()
            self._backward = current
            self._backward_at = self._end
            self._walks_back = 1

    def _come_back(self, index: int) -> None:
        self._begin_backward()
        if index > self._backward_at:
            self._walk_back(-1)
            self._backward_at = self._end
            self._walks_back += 1
        self._walk_back(index)

    def _walk_back(self, index: int) -> None:
        while self._backward_at > index:
            self._visits.leave_backward(self._backward_at)
            if self._walks_back >= self._walks:
                self._visits.settle(self._backward_at)
            self._backward_at -= 1
            if self._backward_at >= 0:
                self._visits.come_backward(self._backward_at)


def _before_backward_of(output: Any, hook: Callable[[torch.Tensor], None]) -> None:
    """Has `hook` called when backward comes to any of the tensors in `output`."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    graded = [tensor for tensor in tensors if tensor.requires_grad]
    if graded:
        register_multi_grad_hook(graded, hook, mode="any")


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != NO_BACKWARD
