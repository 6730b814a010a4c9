"""Faults that are planted into the runtime of pipelines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from shoal.data import Loader
from shoal.parallel.pipeline import pieces
from shoal.parallel.pipeline.messages import Messages
from shoal.parallel.pipeline.runtime import Pipeline
from shoal.spec.plan.schedules import Action, Payload
from shoal.spec.plan.stages import ranges_of

__all__ = ["PIPELINE_FAULTS"]

WRONG = 1
"""The micro-batch that goes wrong."""


@contextlib.contextmanager
def dropped_backward(stage: str) -> Iterator[None]:
    """The backward of a stage does nothing for one micro-batch."""
    backward = Pipeline._backward

    def skipping(self: Pipeline, action: Action, *, is_last: bool) -> None:
        if (action.stage, action.microbatch) == (int(stage), WRONG):
            self._kept[action.stage, action.microbatch].output = None
        backward(self, action, is_last=is_last)

    with patch.object(Pipeline, "_backward", skipping):
        yield


@contextlib.contextmanager
def backward_twice(stage: str) -> Iterator[None]:
    """A stage gets the gradient of one micro-batch twice as large, as if it had come twice."""
    take = Messages.take

    def doubling(self: Messages, payload: Payload, action: Action) -> torch.Tensor:
        taken = take(self, payload, action)
        is_it = payload is Payload.GRADIENT and (action.stage, action.microbatch) == (int(stage), WRONG)
        return taken * 2 if is_it else taken

    with patch.object(Messages, "take", doubling):
        yield


@contextlib.contextmanager
def stale_activation(stage: str) -> Iterator[None]:
    """A stage computes one micro-batch with what came for the one before."""
    take = Messages.take
    before: dict[int, torch.Tensor] = {}

    def stale(self: Messages, payload: Payload, action: Action) -> torch.Tensor:
        taken = take(self, payload, action)
        if payload is Payload.GRADIENT or action.stage != int(stage):
            return taken
        before[action.microbatch] = taken.detach().clone()
        return before[WRONG - 1].clone() if action.microbatch == WRONG else taken

    with patch.object(Messages, "take", stale):
        yield


@contextlib.contextmanager
def wrong_split(which: str) -> Iterator[None]:
    """The second stage begins one block later than the first one ends, or one earlier."""

    def moved(split: Sequence[int]) -> tuple[range, ...]:
        first, second, *others = ranges_of(split)
        start = second.start + (1 if which == "left out" else -1)
        return (first, range(start, second.stop), *others)

    with patch.object(pieces, "ranges_of", moved):
        yield


@contextlib.contextmanager
def lost_weight_gradient(stage: str) -> Iterator[None]:
    """The second half of a stage's backward is not made for one micro-batch."""
    weight_gradients = Pipeline._weight_gradients

    def skipping(self: Pipeline, action: Action, *, is_last: bool) -> None:
        if (action.stage, action.microbatch) == (int(stage), WRONG):
            del self._kept[action.stage, action.microbatch]
        else:
            weight_gradients(self, action, is_last=is_last)

    with patch.object(Pipeline, "_weight_gradients", skipping):
        yield


@contextlib.contextmanager
def ends_not_added_up(_: str) -> Iterator[None]:
    """The first and the last stage keep the gradient of what they share to themselves."""
    with patch.object(Pipeline, "_add_up_twins", lambda self: None):
        yield


@contextlib.contextmanager
def samples_of_its_own(_: str) -> Iterator[None]:
    """The last rank, whose stages see the micro-batches of another rank's, deals out its batch in reverse."""
    indices = Loader.indices

    def reversed_there(self: Loader, position: int, count: int) -> Any:
        if dist.get_rank() < dist.get_world_size() - 1:
            return indices(self, position, count)
        first = position - position % self.batch_size
        return indices(self, first, self.batch_size)[::-1][position - first :][:count].copy()

    with patch.object(Loader, "indices", reversed_there):
        yield


PIPELINE_FAULTS: dict[str, Any] = {
    function.__name__: function
    for function in (
        dropped_backward,
        backward_twice,
        stale_activation,
        wrong_split,
        lost_weight_gradient,
        ends_not_added_up,
        samples_of_its_own,
    )
}
