"""The curvature of the loss along the way that the values have just gone."""

from __future__ import annotations

from typing import Any, final

import torch

from shoal.data import Loader, all_targets_count
from shoal.parallel import Parallel
from shoal.train.inputs import Inputs
from shoal.train.micro_batch import Reader


@final
class Curvature:
    """Measure the curvature along a movement d of the values from x; all ranks of a worker call it together.

        L = <g(x + d) - g(x), d> / |d|^2

    Both gradients are of the same samples, with dropout off, so that their noise is the same and cancels. It
    takes two forwards and backwards of a micro-batch, and two copies of a rank's part of the parameters.

    It assumes that the loss is nearly quadratic between x and x + d, and that these samples had no part in d:
    then the mean of L over samples is the curvature of the whole loss. L is a Rayleigh quotient of the
    Hessian, so its mean is at most the largest curvature, and usually far below it. Where steps are too
    large, movement turns into the direction that grows, as in a power iteration, and L becomes its curvature.

    Args:
        parallel: The model.
        loader: Distributes the samples.
        reader: Makes micro-batches of them.
        microbatch: Samples of one forward of one rank.
    """

    def __init__(self, parallel: Parallel, loader: Loader[Any], reader: Reader, microbatch: int) -> None:
        self._parallel = parallel
        self._loader = loader
        self._reader = reader
        self._microbatch = microbatch
        self._before: list[torch.Tensor] = []

    @property
    def is_held(self) -> bool:
        """Whether the beginning of a movement is held."""
        return bool(self._before)

    def hold(self) -> None:
        """Take the present values for the beginning of a movement."""
        self._before = [each.local.detach().clone() for each in self._parallel.owned]

    def let_go(self) -> None:
        """Forget the beginning of a movement."""
        self._before = []

    @torch.no_grad()
    def measure(self, position: int) -> float:
        """Return the curvature along the movement to the present values; 0 if nothing has moved.

        Args:
            position: Position in all data of the first of samples that no gradient in the movement is of.
        """
        owned = self._parallel.owned
        now = [each.local.detach().clone() for each in owned]
        gradients = self._gradients(position)
        for each, values in zip(owned, self._before, strict=True):
            each.local.copy_(values)
        self._parallel.changed()
        changes = torch._foreach_sub(gradients, self._gradients(position))
        for each, values in zip(owned, now, strict=True):
            each.local.copy_(values)
        self._parallel.changed()
        movement = torch._foreach_sub(now, self._before)
        self.let_go()
        told = torch.zeros(2, dtype=torch.float64, device=self._parallel.device)
        for each, moved, changed in zip(owned, movement, changes, strict=True):
            products = torch.stack([(changed * moved).double().sum(), moved.double().square().sum()])
            told += products / each.family.copies
        self._parallel.axes.parts.all_reduce(told, "curvature").wait()
        product, square = told.tolist()
        return product / square if square > 0 else 0.0

    def _gradients(self, position: int) -> list[torch.Tensor]:
        """Return the gradients of a micro-batch at the present values."""
        parallel, dp = self._parallel, self._parallel.axes.dp
        start = self._loader.start(position, 0, dp.index, dp.size, self._microbatch)
        batch = self._loader.fetch(start, self._microbatch)
        all_count = all_targets_count(self._loader.samples)
        read = Inputs(parallel.device).move(
            self._reader.read(batch, parallel, self._microbatch, all_count=all_count)
        )
        was_training = parallel.module.training
        parallel.module.eval()
        with torch.enable_grad():
            read.mean_loss(parallel(*read.arguments, **read.named)).backward()
        parallel.module.train(was_training)
        found = [
            torch.zeros_like(each.local) if each.gradient is None else each.gradient.detach().clone()
            for each in parallel.owned
        ]
        parallel.zero_grad()
        return found
