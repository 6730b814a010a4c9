"""A rank's rows of a batch, and the loop over the micro-batches of a step, without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from shoal.errors import PlanError
from shoal.parallel.communication import Axis
from shoal.plan import Plan, SettledPlan
from shoal.record import NullRecorder, Recorder
from shoal.timeline import Kind

__all__ = ["own_rows", "require_padded", "run_one_by_one"]


def own_rows(batch: torch.Tensor, plan: Plan, dp: Axis) -> torch.Tensor:
    """Return a rank's rows of a batch `[batch, ...]`: in the order of ranks, with the Plan's `shares`.

    Raises:
        PlanError: The batch does not divide, or the ranks would have to be padded.
    """
    if (shares := plan.shared) is None:
        SettledPlan.of(Plan(dp=dp.size), len(batch))  # raises
        return batch.chunk(dp.size)[dp.index]
    if plan.is_padded:
        raise PlanError(
            f"a batch was to be cut by the Plan {plan}, with which ranks need equally many micro-batches",
            possible="shoal.Trainer, which pads ranks; or shares with shard=none or zero1 and pp=1",
            change="use the Trainer, or leave out shares",
        )
    shares.require_batch(len(batch), None)
    size = len(batch) // shares.total
    return torch.split(batch, [size * shares.of_rank(rank) for rank in range(dp.size)])[dp.index]


def require_padded(plan: Plan, count: int) -> None:
    """Check that a rank makes as many micro-batches as the one with most, if the Plan pads ranks.

    Raises:
        PlanError: It makes another number.
    """
    most = plan.shared.most if plan.is_padded and plan.shared is not None else count
    if count != most:
        raise PlanError(
            f"{count} micro-batches were given under the Plan {plan}, with which each rank needs {most}",
            possible=f"{most} micro-batches on each rank, those beyond its own with a loss of zero",
            change="use the Trainer, which adds them, or leave out shares",
        )


def run_one_by_one(
    forwards: Iterable[Callable[[], torch.Tensor]],
    count: int,
    accumulate: Callable[[], AbstractContextManager[None]],
    *,
    mean_of: float | None = None,
    recorder: Recorder | None = None,
    before_last: Callable[[torch.Tensor], object] = lambda total: None,
) -> torch.Tensor:
    """Run forward and backward of one micro-batch after another.

    Args:
        forwards: For each micro-batch, a function that runs its forward and returns its mean loss.
        count: Number of micro-batches to run.
        accumulate: Context for all backwards but the last: gradients are kept, to combine with the last
            one's.
        mean_of: Number of micro-batches over which losses and gradients are averaged; `count` by default.
            Ranks with other numbers of micro-batches average over the mean of these, so that the mean over
            ranks is the mean over all micro-batches.
        recorder: Recorder of spans.
        before_last: Called with what is returned, before the last backward; communication that it starts runs
            beside it.

    Returns:
        The sum of all losses over `mean_of`.
    """
    mean_of = count if mean_of is None else mean_of
    recorder = NullRecorder() if recorder is None else recorder
    total: torch.Tensor | None = None
    coming = iter(forwards)
    for number in range(count):
        is_last = number + 1 == count
        forward = next(coming)
        with recorder.span(Kind.FORWARD):
            loss = forward() / mean_of
            del forward  # its batch is freed before backward
            total = loss.detach() if total is None else total + loss.detach()
        if is_last:
            before_last(total)
        with recorder.span(Kind.BACKWARD), nullcontext() if is_last else accumulate():
            loss.backward()
    assert total is not None
    return total
