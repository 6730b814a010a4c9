"""ZeRO-3: parameters are sharded too (Rajbhandari et al., "ZeRO", arXiv:1910.02054, stage 3).

The communications: a block's weights are all-gathered before its forward and freed after it, all-gathered
again before its backward and freed after it, and its gradients are reduce-scattered. Each rank sends
3 P (d - 1) / d elements for each micro-batch. The gather of the next block runs while one block computes. The
last block of a forward is the first of backward, and stays; the root's parameters stay for the whole of both.

All ranks must run the same blocks in the same order and use the same parameters in them: they gather
together, and a gradient that is missing on one rank alone makes the ranks wait until the time-out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from shoal.parallel.blocks import groups_by_block
from shoal.parallel.bucket import Bucket, Owned
from shoal.parallel.gradient import NO_BACKWARD, GradientReduction, GradientSum
from shoal.parallel.strategy import Setup, Strategy

__all__ = ["zero3"]


def zero3(setup: Setup) -> Strategy:
    """Weights are there only while a block computes with them."""
    return _ShardedWeights(setup)


@final
class _ShardedWeights(Strategy):
    def __init__(self, setup: Setup) -> None:
        self._root: list[Bucket] = []
        self._blocks: list[list[Bucket]] = [[] for _ in setup.blocks]
        grouped = setup.buckets(groups_by_block, resident=False)
        for group, bucket in grouped:
            (self._blocks[group.blocks[0]] if group.blocks else self._root).append(bucket)
        buckets = self._buckets = [bucket for _, bucket in grouped]
        self._owned = [owned for bucket in buckets for owned in bucket.owned]
        self._held_open = 0
        self._reduction = GradientReduction(
            buckets, finish=GradientSum.give_and_free, on_complete=self._drop, on_end=self._drop_all
        )
        setup.model.register_forward_pre_hook(self._before_model)
        setup.model.register_forward_hook(self._after_model)
        for index, block in enumerate(setup.blocks):
            block.register_forward_pre_hook(self._before_block(index))
            block.register_forward_hook(self._after_block(index))

    @property
    def owned(self) -> Sequence[Owned]:
        """See `Strategy.owned`."""
        return self._owned

    def accumulate(self) -> AbstractContextManager[None]:
        """See `Strategy.accumulate`. Whole sums would cost the memory that sharding saves."""
        return nullcontext()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """See `Strategy.gathered`."""
        self._drop_all()  # what a forward left may be from before the optimizer's step
        self._held_open += 1
        try:
            self._gather(self._buckets)
            yield
        finally:
            self._held_open -= 1
            self._drop_all()

    def clear(self) -> None:
        """See `Strategy.clear`."""
        self._reduction.clear()

    def changed(self) -> None:
        """See `Strategy.changed`. Weights are gathered anew in every forward."""
        self._drop_all()

    # -- hooks, in the order in which a step meets them ---------------------------------------------

    def _before_model(self, module: nn.Module, arguments: Any) -> None:
        if not _in_backward():
            self._drop_all()  # as in `gathered`
        self._start(self._root)
        if self._blocks and not _in_backward():
            self._start(self._blocks[0])
        self._gather(self._root)

    def _before_block(self, index: int) -> Callable[..., None]:
        def gather(module: nn.Module, arguments: Any) -> None:
            self._gather(self._blocks[index])
            if not _in_backward() and index + 1 < len(self._blocks):
                self._start(self._blocks[index + 1])

        return gather

    def _after_block(self, index: int) -> Callable[..., None]:
        def free(module: nn.Module, arguments: Any, output: Any) -> None:
            if _in_backward():
                return  # recomputed: backward itself follows at once
            last = index + 1 == len(self._blocks)
            if not (last and torch.is_grad_enabled()):
                for bucket in self._blocks[index]:
                    self._drop(bucket)
            _before_backward_of(output, self._gather_backwards(index))

        return free

    def _after_model(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            self._drop_all()
        # Another forward or backward may have freed the root's weights meanwhile.
        _before_backward_of(output, lambda gradient: self._gather(self._root))

    def _gather_backwards(self, index: int) -> Callable[[torch.Tensor], None]:
        def gather(gradient: torch.Tensor) -> None:
            self._gather(self._blocks[index])
            if index > 0:
                self._start(self._blocks[index - 1])

        return gather

    # -- what the hooks do --------------------------------------------------------------------------

    @staticmethod
    def _start(buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if bucket.dropped:
                bucket.start_gather()

    def _gather(self, buckets: Sequence[Bucket]) -> None:
        self._start(buckets)
        for bucket in buckets:
            bucket.finish_gather()

    def _drop(self, bucket: Bucket) -> None:
        if not self._held_open and not bucket.dropped:
            bucket.drop_weights()

    def _drop_all(self) -> None:
        for bucket in self._buckets:
            self._drop(bucket)


def _before_backward_of(output: Any, hook: Callable[[torch.Tensor], None]) -> None:
    """Has `hook` called when backward comes to any of the tensors in `output`."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    graded = [tensor for tensor in tensors if tensor.requires_grad]
    if graded:
        register_multi_grad_hook(graded, hook, mode="any")


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != NO_BACKWARD
