"""The gradients of a bucket: summed over micro-batches in one flat buffer, then over ranks.

Autograd leaves each parameter's gradient at the parameter. `GradientSum` moves it into the bucket's fp32
buffer once. If types allow, it makes the gradient a view of the buffer, so that later micro-batches add to it
in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from shoal.parallel.communication import Axis, Pending, Then, new_buffer
from shoal.parallel.data.bucket import Bucket
from shoal.parallel.data.compressed_bucket import CompressedBucket

__all__ = ["GradientSum"]


class GradientSum:
    """The sum of one bucket's gradients, `[elements]` in fp32, and the number of ranks that have each.

    A parameter without a gradient on this rank counts as zero. A parameter without a gradient on any rank
    gets none: its optimizer's step must leave it unchanged. Only a rank that lacks a gradient has to look at
    these numbers.

    Args:
        bucket: The bucket whose gradients are summed.

    Attributes:
        exchange: The bucket's exchange where it is compressed.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._buffer: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._held = [False] * len(bucket.parameters)  # the sum has a gradient of this parameter
        self._scaled = [False] * len(bucket.parameters)
        self._missing: list[int] = []  # parameters without a gradient on this rank
        self._carried: list[torch.Tensor | None] = []
        self._replicated: torch.Tensor | None = None
        self._is_over_replicas = False
        self._pending: Pending | None = None
        self.exchange = CompressedBucket(bucket)

    def add(self, index: int, factor: float = 1.0) -> None:
        """Move the gradient that autograd left at parameter `index` into the sum.

        Args:
            index: Index of the parameter.
            factor: Factor on the sum afterwards; cheapest here, while the sum is in the cache.
        """
        if not any(self._held):
            self._begin()
        parameter, view = self.bucket.parameters[index], self._views[index]
        gradient = parameter.grad
        assert gradient is not None
        if gradient is view:  # autograd has added to the sum in place
            _scale(view, factor)
        elif self._held[index] and gradient.dtype != view.dtype:
            _scale(view.add_(gradient), factor)
        elif gradient.dtype == view.dtype and factor != 1.0:
            torch.mul(gradient, factor, out=view)
        else:
            _scale(view.copy_(gradient), factor)
        parameter.grad = view if view.dtype == parameter.dtype else None
        self._held[index] = True
        self._scaled[index] = factor != 1.0

    def start_reduction(self) -> None:
        """Begin to sum over the ranks that hold the bucket's shards.

        Sums without a gradient from the last backward are multiplied by the family's factor here.
        """
        if not any(self._held):
            self._begin()
        assert self._buffer is not None
        self._missing = []
        for index, view in enumerate(self._views):
            # A whole bucket's view may hold the average of an earlier backward, to which this one is added.
            if not self._held[index] and self.bucket.parameters[index].grad is not view:
                view.zero_()
                self._missing.append(index)
            elif not self._scaled[index]:
                _scale(view, self.bucket.family.factor)
        presence = self._presence().fill_(1.0)
        if self._missing:
            presence[:, self._missing] = 0.0
        self._pending = self._over_shards(self._buffer)

    def continue_reduction(self, *, may_wait: bool = True) -> None:
        """Begin to sum this rank's part over the replicas, once it is summed over the shards.

        Args:
            may_wait: Whether to wait for the sum over the shards, if there is more than one.
        """
        if self._is_over_replicas or not (may_wait or self.bucket.family.reduce.size == 1):
            return
        assert self._buffer is not None
        assert self._pending is not None
        self._pending.wait()
        self._is_over_replicas = True
        summed = self._buffer
        if self.bucket.family.summed.size > 1 and self.bucket.layout.shards > 1:
            # Only this rank's rows, packed into one message.
            summed = self._replicated = self._packed_parts()
        self._pending = self._over_replicas(summed)

    def _over_shards(self, buffer: torch.Tensor) -> Pending:
        bucket = self.bucket
        if self.exchange.compresses_shards:
            return self.exchange.reduce_scatter(buffer)
        return self._send(
            buffer, bucket.family.reduce, lambda sums: bucket.gradients.reduce_scatter(sums, bucket.name)
        )

    def _over_replicas(self, sums: torch.Tensor) -> Pending:
        bucket = self.bucket
        if self.exchange.compresses_replicas:
            return self.exchange.all_reduce(sums)
        summed = bucket.family.summed
        return self._send(sums, summed, lambda sums: summed.all_reduce(sums, bucket.name))

    def _send(self, sums: torch.Tensor, axis: Axis, start: Callable[[torch.Tensor], Pending]) -> Pending:
        """Start a collective on sums, or on a copy in the type in which ranks send them."""
        wire = self.bucket.wire
        if sums.dtype == wire or axis.size == 1:
            return start(sums)
        copy = new_buffer(sums.numel(), dtype=wire, device=sums.device).copy_(sums)
        return Then(start(copy), lambda: sums.copy_(copy))

    def clear(self) -> None:
        """Forget the sums, as if no backward had been."""
        if self._pending is not None:
            self._pending.wait()
        self._pending = None
        self._is_over_replicas = False
        self._held = [False] * len(self._held)
        self._scaled = [False] * len(self._scaled)
        self._carried = []
        self._detach()

    def give(self) -> None:
        """Wait for the sum, and make this rank's part the gradients of its owned parameters."""
        for index, part in self._finish():
            self.bucket.owned[index].give(self._with_carried(index, part))
        if not self.bucket.whole:
            self._detach()

    def give_and_free(self) -> None:
        """Wait for the sum, add this rank's part to the gradients of its owned parameters, free the rest."""
        if self.bucket.whole:  # the part is the whole bucket
            self.give()
            return
        for index, part in self._finish():
            stays = not self.bucket.stores_gradients
            self.bucket.owned[index].give(self._with_carried(index, part.clone() if stays else part))
        if self.bucket.stores_gradients:
            self.bucket.store_gradients()
        self._detach()
        self._buffer = None
        self._views = []

    def _begin(self) -> None:
        layout, owned = self.bucket.layout, self.bucket.owned
        if not self.bucket.whole:
            # They are None after zero_grad(); otherwise the caller wants this sum added to them, as autograd
            # does.
            self._carried = [each.gradient for each in owned]
            if self._buffer is not None:  # the gradients are in the buffer, which will be overwritten
                self._carried = [None if each is None else each.clone() for each in self._carried]
            for each in owned:
                each.give(None)
        if self._buffer is None:
            weights = self.bucket.weights
            self._buffer = new_buffer(layout.gradient_elements, dtype=torch.float32, device=weights.device)
            self._views = layout.views(self._buffer)

    def _with_carried(self, index: int, part: torch.Tensor) -> torch.Tensor:
        """Add the earlier gradient, and one that a penalty left at the owned part in this backward."""
        if self.bucket.whole:
            return part
        for other in (self._carried[index], self.bucket.owned[index].gradient):
            if other is not None:
                part.add_(other)
        self._carried[index] = None
        return part

    def _presence(self) -> torch.Tensor:
        """Return how many ranks have each gradient, `[shards, parameters]`; reduced in this rank's row."""
        assert self._buffer is not None
        return self._buffer[self.bucket.layout.elements :].view(-1, len(self._views))

    def _packed_parts(self) -> torch.Tensor:
        """Return a copy of this rank's rows of the sums, and which gradients are present."""
        assert self._buffer is not None
        layout, index = self.bucket.layout, self.bucket.family.shard.index
        packed = self._buffer.new_zeros(layout.packed_elements + len(self._views))
        torch._foreach_copy_(layout.packed_parts(packed, index), layout.parts(self._buffer, index))
        packed[layout.packed_elements :] = self._presence()[index]
        return packed

    def _finish(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Wait for the sum; yield the index of each parameter with a gradient, and this rank's rows of it."""
        assert self._buffer is not None
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        self._is_over_replicas = False
        self._held = [False] * len(self._held)
        self._scaled = [False] * len(self._scaled)
        layout, index = self.bucket.layout, self.bucket.family.shard.index
        if self._replicated is not None:
            parts = layout.packed_parts(self._replicated, index)
            presence = self._replicated[layout.packed_elements :]
            self._replicated = None
        else:
            parts = self._views if self.bucket.whole else layout.parts(self._buffer, index)
            presence = self._presence()[index]
        # The first and the last stage add up their shared gradients: a gradient on one counts on both.
        absent: set[int] = set()
        if self._missing and self.bucket.family.tied_ranks is None:
            counts = presence[self._missing].tolist()
            absent = {number for number, count in zip(self._missing, counts, strict=True) if count == 0}
        for number, part in enumerate(parts):
            if number not in absent and self.bucket.owned[number].parameter.requires_grad:
                yield number, part
            elif not self.bucket.whole and self._carried[number] is not None:
                self.bucket.owned[number].give(self._with_carried(number, torch.zeros_like(part)))

    def _detach(self) -> None:
        for parameter in self.bucket.parameters:
            parameter.grad = None


def _scale(tensor: torch.Tensor, factor: float) -> None:
    if factor != 1.0:
        tensor.mul_(factor)
