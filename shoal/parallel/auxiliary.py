"""The factor with which the auxiliary losses of a model's own routers join backward, in any loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn

from shoal.models.experts import mixtures_of, set_auxiliary_scale
from shoal.models.loss_factor import LossFactor


@final
class AuxiliaryLosses:
    """Scale the auxiliary losses of a model as its loop scales the mean loss of a forward.

    Args:
        model: The model.
        split: Number of ranks over which tensor parallelism splits the sequence: each adds its part of a sum.
    """

    def __init__(self, model: nn.Module, split: int) -> None:
        self._model = model
        self._split = split
        self._is_there = bool(mixtures_of(model))
        self._mean_of: float | None = None
        self._is_accumulating = False

    def divide_by(self, mean_of: float | None) -> None:
        """Divide them by this number; with None by what the loop divides `next_token_loss` by."""
        self._mean_of = mean_of
        if mean_of is not None:
            set_auxiliary_scale(self._model, 1 / (mean_of * self._split))

    def begin_micro_batch(self, *, counts: bool) -> None:
        """Set whether the losses of the next forward count, of those that are divided by a number."""
        if self._mean_of is not None:
            set_auxiliary_scale(self._model, counts / (self._mean_of * self._split))

    def run(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Return the model's output, which tells the loss to note its factor if nobody told the number."""
        if not self._is_there or self._mean_of is not None or not torch.is_grad_enabled():
            return self._model(*inputs, **named)
        factor = LossFactor(self._split, lambda: self._is_accumulating)
        set_auxiliary_scale(self._model, factor)
        return factor.put_on(self._model(*inputs, **named))

    @contextmanager
    def dividing_by(self, mean_of: float) -> Iterator[None]:
        """Divide them by this number within it."""
        before = self._mean_of
        self.divide_by(mean_of)
        try:
            yield
        finally:
            self.divide_by(before)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Take each backward within it for one of several."""
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before
