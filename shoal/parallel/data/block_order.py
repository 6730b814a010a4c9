"""Visit a model's blocks in one order on all ranks, whichever blocks each rank runs.

Ranks that communicate for each block must do so in one order, but a rank may leave out a block that others
run, and its loss may reach other parameters. So a walk visits all blocks, from the first to the last in a
forward, and from the last to the first in a backward. If a rank jumps to a later block, the walk passes the
blocks between. When the forward or the backward ends, it passes the remaining ones.

A rank that runs a block which the walk has already passed begins the next walk, as a second forward does, so
all ranks must make equally many walks. Each rank may run a block several times in succession.

A rank comes to a block when the block is called. A forward may also call the block's children and not the
block, or read one of its weights from elsewhere: then it comes to the block at that point. A weight that is
read from elsewhere has no output whose backward would show when it is needed, so the block is pinned: its
weights stay until backward ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from shoal.models.task import tensors_in
from shoal.parallel.weight_hooks import between_graphs, outside_graphs, watch, watch_calls

NO_BACKWARD = -1
"""Autograd's current graph task outside of backward."""


def _nothing(*_: int) -> None:
    """Do nothing; the default visit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """The functions that a walk calls; each gets the index of a block.

    Attributes:
        begin_forward: Called before the model.
        come_forward: Called before a block is run or passed.
        leave_forward: Called when the walk goes on from a block.
        end_forward: Called after the model; the walk has come to the last block and not left it. It gets
            whether a backward may follow.
        begin_backward: Called before the first block of a backward.
        come_backward: Called before the backward of a block is run or passed.
        leave_backward: Called when the walk goes on from a block; the number of blocks stands for the part
            after them.
        settle: Called after `leave_backward`, if no more gradients of this block come in this backward.
        recompute: Called before a block is run again within backward, by the user's own recomputation.
        pin: Called when a weight of a block is used while no module of the block runs.
        use_root: Called when a weight of no block is used while the model's forward does not run.
    """

    begin_forward: Callable[[], None] = _nothing
    come_forward: Callable[[int], None] = _nothing
    leave_forward: Callable[[int], None] = _nothing
    end_forward: Callable[[bool], None] = _nothing
    begin_backward: Callable[[], None] = _nothing
    come_backward: Callable[[int], None] = _nothing
    leave_backward: Callable[[int], None] = _nothing
    settle: Callable[[int], None] = _nothing
    recompute: Callable[[int], None] = _nothing
    pin: Callable[[int], None] = _nothing
    use_root: Callable[[], None] = _nothing


class BlockOrder:
    """Follow a model by hooks, and call the visits.

    Autograd first runs the backward of what was computed last. So when it reaches a block's output, it has
    left all that was computed after that block.

    Args:
        model: The whole model.
        blocks: Its blocks, in forward order.
        visits: The functions to call.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], visits: Visits) -> None:
        self._end = len(blocks)
        self._visits = visits
        self._forward_at = -1
        self._forwards = 0  # open forwards of the model, nested
        self._running = [0] * self._end  # running modules of each block, nested
        self._outside: set[int] = set()  # modules of no block, used outside of the model's forward
        self._backward_at = self._end
        self._backward = NO_BACKWARD
        self._walks = 0  # walks with gradients since the last backward
        self._walks_back = 0
        self._is_open = False  # a forward runs, or has run since the last backward
        # torch.compile must compile only the computation of the model, not its communication.
        model.register_forward_pre_hook(between_graphs(self._before_model))
        model.register_forward_hook(between_graphs(self._after_model))
        model.register_forward_hook(between_graphs(self._leave_model), always_call=True)
        in_blocks: set[nn.Module] = set()
        for index, block in enumerate(blocks):
            for module in block.modules():
                in_blocks.add(module)
                is_owner = any(each is not None for each in module._parameters.values())
                if is_owner or module is block:
                    kept_out = between_graphs if module is block else outside_graphs
                    module.register_forward_pre_hook(kept_out(self._before_block(index)))
                    module.register_forward_hook(kept_out(self._after_block(index)))
                if is_owner:  # only now: the module is running when it uses its own parameters
                    watch(module, self._use_of_block(index), self._is_forward_open)
        for number, module in enumerate(model.modules()):
            if module not in in_blocks and any(each is not None for each in module._parameters.values()):
                watch(module, self._use_of_root(number), self._is_forward_open)
                if isinstance(module, nn.RNNBase):  # it keeps its parameters outside of their dict too
                    watch_calls(module, self._use_of_root(number))

    def end_backward(self) -> None:
        """Pass the remaining blocks; call it at the end of every backward."""
        if self._backward == NO_BACKWARD:  # no block took part in it
            self._begin_backward()
        self._walk_back(-1)
        self._backward = NO_BACKWARD
        self._is_open = False

    def clear(self) -> None:
        """Forget a backward that did not end, and the forwards before it."""
        self._backward = NO_BACKWARD
        self._walks = self._walks_back = 0
        self._running = [0] * self._end
        self._is_open = False

    # -- forward ------------------------------------------------------------------------------------

    def _before_model(self, module: nn.Module, arguments: Any) -> None:
        if not in_backward():
            self._forwards += 1
            self._begin_walk()
            self._visits.begin_forward()

    def _before_block(self, index: int) -> Callable[..., None]:
        def come(module: nn.Module, arguments: Any) -> None:
            if in_backward():
                self._visits.recompute(index)
                return
            self._use(index)
            self._running[index] += 1

        return come

    def _use(self, index: int, *, is_read: bool = False) -> None:
        """Note that a module of a block is called, or one of its weights read, in any forward."""
        if self._running[index]:
            return
        if any(self._running):  # another block uses this one, and must not be left now
            self._visits.recompute(index)
            self._visits.pin(index)
            return
        self._come(index)
        if is_read:
            self._visits.pin(index)

    def _is_forward_open(self) -> bool:
        return self._is_open

    def _use_of_block(self, index: int) -> Callable[[], None]:
        def use() -> None:
            if in_backward():
                self._visits.recompute(index)
            else:
                self._use(index, is_read=True)

        return use

    def _use_of_root(self, number: int) -> Callable[[], None]:
        def use() -> None:
            if not self._forwards and not in_backward():
                if number in self._outside or self._forward_at < 0:
                    self._begin_outside()
                self._outside.add(number)
                self._visits.use_root()

        return use

    def _come(self, index: int) -> None:
        if index < self._forward_at:
            self._walk(self._end - 1)
            self._visits.leave_forward(self._end - 1)
            self._begin_outside()
        elif self._forward_at < 0:
            self._begin_outside()
        elif index == self._forward_at:  # a backward may have dropped its weights
            self._visits.come_forward(index)
        self._walk(index)

    def _begin_outside(self) -> None:
        """Begin another walk, unless the model's own forward has begun it."""
        if self._forwards and self._forward_at < 0:
            return
        self._begin_walk()
        if not self._forwards:
            self._visits.begin_forward()

    def _begin_walk(self) -> None:
        self._forward_at = -1
        self._is_open = True
        self._running = [0] * self._end
        self._outside.clear()
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
            if not in_backward():
                self._running[index] -= 1
                if not self._running[index]:
                    _before_backward_of(output, lambda gradient: self._come_back(index))

        return follow

    def _after_model(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if not in_backward():
            self._walk(self._end - 1)
            self._visits.end_forward(_may_have_graph(output))
            _before_backward_of(output, lambda gradient: self._begin_backward())

    def _leave_model(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if not in_backward():
            self._forwards -= 1

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
    """Call `hook` when backward comes to any of the tensors in `output`."""
    graded = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if graded:
        register_multi_grad_hook(graded, hook, mode="any")


def _may_have_graph(output: Any) -> bool:
    """Return whether a backward may begin at the output; not if all its tensors are without gradients."""
    tensors = list(tensors_in(output))
    return torch.is_grad_enabled() and (not tensors or any(each.requires_grad for each in tensors))


def in_backward() -> bool:
    """Return whether autograd runs a backward in this thread, for example during recompute."""
    return torch._C._current_graph_task_id() != NO_BACKWARD
