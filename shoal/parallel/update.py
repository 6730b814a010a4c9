"""Bringing weights that stay in memory up to date after the optimizer has changed its parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from shoal.parallel.bucket import Bucket

__all__ = ["WeightUpdate"]


class WeightUpdate:
    """Gathers every bucket's weights at the first forward after a change, overlapped with that forward.

    All gathers start when the model's forward begins, or before it by `start`. The root's are waited for
    there, and so come first; a block's where the block begins.

    Args:
        model: The whole model.
        buckets: Each with the blocks that its parameters belong to, none for the root; in forward order.

    A forward may also come between a backward and the optimizer's step. So the weights count as out of date
    for as long as there are gradients that a step could still use.
    """

    def __init__(self, model: nn.Module, buckets: Sequence[tuple[Sequence[nn.Module], Bucket]]) -> None:
        self._root = [bucket for blocks, bucket in buckets if not blocks]
        self._buckets = [*self._root, *(bucket for blocks, bucket in buckets if blocks)]
        self._stale = False
        model.register_forward_pre_hook(self._before_model)
        model.register_forward_hook(self._after_model)
        for blocks, bucket in buckets:
            for block in blocks:
                block.register_forward_pre_hook(self._before_block(bucket))

    def mark(self) -> None:
        """Says that the owners' parts have changed, or are about to."""
        self._stale = True

    def finish(self) -> None:
        """Brings all weights up to date now."""
        self.start()
        for bucket in self._buckets:
            bucket.finish_gather()

    def start(self) -> None:
        """Starts the gathers, if there is something to gather."""
        if self._stale:
            self._stale = any(
                owned.parameter.grad is not None for bucket in self._buckets for owned in bucket.owned
            )
            for bucket in self._buckets:
                bucket.start_gather()

    def _before_model(self, module: nn.Module, arguments: Any) -> None:
        self.start()
        for bucket in self._root:
            bucket.finish_gather()

    def _after_model(self, module: nn.Module, arguments: Any, output: Any) -> None:
        for bucket in self._buckets:  # of blocks that this forward left out
            bucket.finish_gather()

    @staticmethod
    def _before_block(bucket: Bucket) -> Any:
        def wait(module: nn.Module, arguments: Any) -> None:
            bucket.finish_gather()

        return wait
