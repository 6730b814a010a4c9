"""The loop over the micro-batches of a step, without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from shoal.record import NullRecorder, Recorder
from shoal.timeline import Kind

__all__ = ["run_one_by_one"]


def run_one_by_one(
    forwards: Iterable[Callable[[], torch.Tensor]],
    count: int,
    accumulate: Callable[[], AbstractContextManager[None]],
    *,
    recorder: Recorder | None = None,
    before_last: Callable[[torch.Tensor], object] = lambda total: None,
) -> torch.Tensor:
    """Run forward and backward of one micro-batch after another.

    Args:
        forwards: For each micro-batch, a function that runs its forward and returns its mean loss.
        count: Number of micro-batches to run.
        accumulate: Context for all backwards but the last: gradients are kept, to combine with the last
            one's.
        recorder: Recorder of spans.
        before_last: Called with the mean loss before the last backward; communication that it starts runs
            beside it.

    Returns:
        The mean loss of all micro-batches.
    """
    recorder = NullRecorder() if recorder is None else recorder
    total: torch.Tensor | None = None
    coming = iter(forwards)
    for number in range(count):
        is_last = number + 1 == count
        forward = next(coming)
        with recorder.span(Kind.FORWARD):
            loss = forward() / count
            del forward  # its batch is freed before backward
            total = loss.detach() if total is None else total + loss.detach()
        if is_last:
            before_last(total)
        with recorder.span(Kind.BACKWARD), nullcontext() if is_last else accumulate():
            loss.backward()
    assert total is not None
    return total
