"""The forwards and backwards of one step: the gradient of a batch.

The weight of each micro-batch's mean loss in the gradient of a step.

The loss of a batch is the mean over all its elements that count, in all micro-batches, on all ranks with
other data. Each micro-batch gives the mean over its own elements. Gradients are averaged over micro-batches
and ranks, so a micro-batch's mean is multiplied by `its count x micro-batches of all ranks / the count of
all`: exactly 1 if all counts are equal. One all-reduce of a number, which runs during the first forward, sums
the counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import Any, final

import torch

from shoal.data import Feed, Loader, all_targets_count, open_feed
from shoal.models import tensors_in
from shoal.parallel import Axis, Parallel
from shoal.parallel.communication import Pending
from shoal.parallel.micro_batches import Arguments, require_scalar, run_one_by_one
from shoal.record import Recorder
from shoal.spec.timeline import Kind
from shoal.train.micro_batch import Inputs, MicroBatch, Reader


@final
class Weights:
    """The factors of a step's micro-batches.

    Args:
        counts: Counts of this rank's micro-batches.
        mean_of: Number of micro-batches over which this rank averages.
        data: The ranks with other data, each of which makes a Weights.
        device: Device of the losses.
    """

    def __init__(self, counts: Sequence[float], mean_of: float, data: Axis, device: torch.device) -> None:
        self._counts = counts
        self._means = mean_of * data.size
        self._total = torch.full((), float(sum(counts)), dtype=torch.float64, device=device)
        self._pending = data.all_reduce(self._total, "counted")
        self._is_there = False

    def of(self, number: int) -> torch.Tensor:
        """Return the factor of a micro-batch, fp64; at least one of its elements must count."""
        return self._counts[number] * self._means / self.total

    @property
    def total(self) -> torch.Tensor:
        """Return the number of elements that count in the whole batch."""
        if not self._is_there:
            self._pending.wait()
            self._is_there = True
        return self._total


def nothing_of(output: Any, loss: torch.Tensor) -> torch.Tensor:
    """Return a loss of zero, whose backward goes through the model with zeros.

    If no element counts, the mean is 0 / 0, and its gradients may be too. The backward is needed
    nevertheless: other ranks wait for its communication.
    """
    ends = [each for each in tensors_in(output) if each.requires_grad and each is not loss]
    if not ends and hasattr(output, "logits"):
        ends = [each for each in tensors_in(output.logits) if each.requires_grad]
    result: torch.Tensor = _Nothing.apply(*(ends or [loss]))
    return result


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*ends)
        return torch.zeros((), device=ends[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros_like(end) for end in ctx.saved_tensors)


Asked = bool | Callable[[], bool]
"""Whether a rank is asked to stop, or a function that returns it."""


@dataclass(slots=True)
class Passed:
    """The results of a step's forwards and backwards.

    Attributes:
        loss: Mean over all elements of the batch that count, a scalar; NaN if none does.
        stop: Number of ranks that asked to stop, a scalar.
        tokens: Elements of the inputs on this rank; with a Plan's `shares`, on a mean rank.
        losses: For each micro-batch that counts, its mean loss, if this rank computed it.
        counted: Number of elements that count, over the ranks that step together; None if it never differs.
    """

    loss: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    stop: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    tokens: float = 0
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    counted: torch.Tensor | None = None


@final
class Passes:
    """Run the forwards and backwards of steps.

    Args:
        parallel: The model.
        loader: Distributes the samples over ranks.
        reader: Makes micro-batches of batches of data.
        recorder: Recorder of spans.
        microbatch: Samples of one forward of one rank.
        workers: Processes that prepare data.
        device: Device on which this rank computes.

    Raises:
        PlanError: The batch does not divide into the ranks' micro-batches.
    """

    def __init__(
        self,
        parallel: Parallel,
        loader: Loader[Any],
        reader: Reader,
        recorder: Recorder,
        *,
        microbatch: int,
        workers: int,
        device: torch.device,
    ) -> None:
        self._parallel = parallel
        self._loader = loader
        self._reader = reader
        self._recorder = recorder
        self._workers = workers
        self._device = device
        self._inputs = Inputs(device, recorder)
        self._microbatch = microbatch
        self._shares = parallel.plan.shared
        dp = parallel.axes.dp
        self._own = loader.number(dp.index, dp.size, microbatch, self._shares)
        self._count = self._own
        if self._shares is not None and parallel.plan.is_padded:
            self._count = self._shares.most
        self._mean_of = parallel.mean_of(self._count)
        self._all_count = all_targets_count(loader.samples)
        self._feed: Feed[Any] | None = None
        self._follows: int | None = None  # position after the last batch
        parallel.set_micro_batches(self._count)

    def run(self, position: int, *, stop: Asked, counted_over: Axis | None = None) -> Passed:
        """Leave the gradient of a batch at the ranks' owned parameters.

        Args:
            position: Position of the batch's first sample in all data.
            stop: Whether this rank was asked to stop, or a function that returns it late in the step.
            counted_over: The ranks over whose elements that count the loss is a mean; by default those whose
                gradients are averaged here.
        """
        passed = Passed()
        if position != self._follows:
            self.close()
        self._follows = position + self._loader.batch_size
        averaged = self._parallel.axes.averaged if counted_over is None else counted_over
        micro_batches, weights = self._take(self._open_feed(position), passed, averaged)
        total = self._with_pipeline if self._parallel.plan.pp > 1 else self._one_by_one
        report = total(micro_batches, weights, passed, position, stop)
        loss, passed.stop = report.unbind()
        passed.loss = loss * (self._parallel.plan.pp / self._parallel.axes.in_step.size)
        if weights is not None:
            passed.counted = weights.total
            passed.loss = passed.loss.where(weights.total > 0, float("nan"))
        return passed

    def close(self) -> None:
        """End the processes that prepare data; the next step starts them anew."""
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    def _open_feed(self, position: int) -> Feed[Any]:
        if self._feed is None:
            dp = self._parallel.axes.dp
            self._feed = open_feed(
                self._loader,
                position,
                dp.index,
                dp.size,
                self._microbatch,
                shares=self._shares,
                ahead=max(2, self._own),  # a step may take all of its micro-batches at once
                workers=self._workers,
            )
        return self._feed

    def _take(
        self, feed: Iterator[Any], passed: Passed, averaged: Axis
    ) -> tuple[Iterator[MicroBatch], Weights | None]:
        """Return this rank's micro-batches of the step: one by one, or all if they must be counted first.

        If ranks are padded, the last one comes again, without elements that count.
        """

        def micro_batches() -> Iterator[MicroBatch]:
            for _ in range(self._own):
                with self._recorder.span(Kind.DATA_WAIT):
                    read = self._reader.read(
                        next(feed), self._parallel, self._microbatch, all_count=self._all_count
                    )
                passed.tokens += read.tokens * self._mean_of / self._own
                yield read
            yield from repeat(replace(read, counted=0), self._count - self._own)

        coming = micro_batches()
        first = next(coming)
        if not first.may_differ:
            return _joined([first], coming), None
        held = [first, *coming]
        return iter(held), Weights([each.counted for each in held], self._mean_of, averaged, self._device)

    def _one_by_one(
        self,
        micro_batches: Iterator[MicroBatch],
        weights: Weights | None,
        passed: Passed,
        position: int,
        stop: Asked,
    ) -> torch.Tensor:
        """Run one micro-batch after another; return the sum over ranks of loss and stop."""
        sent: list[tuple[torch.Tensor, Pending]] = []

        def forward(number: int, here: MicroBatch) -> torch.Tensor:
            self._parallel.begin_micro_batch(number)
            self._set_dropout(position, number, here.first)
            return self._share(weights, passed, number, here, self._parallel(*here.arguments, **here.named))

        def report(loss: torch.Tensor) -> None:
            """Send the report beside the last backward, so that it has arrived when that ends."""
            told = torch.stack([loss, torch.full_like(loss, _is_asked(stop))])
            sent.append((told, self._parallel.axes.in_step.all_reduce(told, "report")))

        forwards = (
            partial(forward, number, self._inputs.move(micro_batch))
            for number, micro_batch in enumerate(micro_batches)
        )
        run_one_by_one(
            forwards,
            self._count,
            self._parallel.accumulate,
            mean_of=self._mean_of,
            recorder=self._recorder,
            before_last=report,
        )
        ((told, pending),) = sent
        pending.wait()
        return told

    def _with_pipeline(
        self,
        micro_batches: Iterator[MicroBatch],
        weights: Weights | None,
        passed: Passed,
        position: int,
        stop: Asked,
    ) -> torch.Tensor:
        """Run forwards and backwards in the schedule's order; return the sum over ranks of loss and stop."""

        def pairs() -> Iterator[tuple[Any, Any]]:
            for number, micro_batch in enumerate(micro_batches):
                here = self._inputs.move(micro_batch)
                share = partial(self._share, weights, passed, number, here)
                yield Arguments(here.arguments, here.named), share

        def loss_of(output: Any, share: Any) -> torch.Tensor:
            loss: torch.Tensor = share(output)
            return loss

        loss = self._parallel.forward_backward(
            pairs(), self._count, loss_of, partial(self._set_dropout, position)
        )
        report = torch.stack([loss, torch.full_like(loss, _is_asked(stop))])
        self._parallel.axes.in_step.all_reduce(report, "report").wait()
        return report

    def _share(
        self, weights: Weights | None, passed: Passed, number: int, micro_batch: MicroBatch, output: Any
    ) -> torch.Tensor:
        """Return what a micro-batch adds to the mean loss over the micro-batches of all ranks."""
        loss = micro_batch.mean_loss(output)
        if not micro_batch.counted:
            return nothing_of(output, loss)
        require_scalar(loss)
        passed.losses[number] = loss.detach()
        return loss if weights is None else loss * weights.of(number).to(loss.dtype)

    def _set_dropout(self, position: int, number: int, inputs: Any) -> None:
        """Fix dropout's masks by the position of micro-batch `number`'s samples in all data."""
        inputs = next(tensors_in(inputs), None)
        if inputs is None or inputs.dim() < 2:
            return
        dp = self._parallel.axes.dp
        first = self._loader.start(position, number, dp.index, dp.size, self._microbatch, self._shares)
        samples = torch.arange(first, first + self._microbatch, device=self._device)
        self._parallel.set_dropout(self._loader.seed, samples, inputs)


def _is_asked(stop: Asked) -> bool:
    return stop() if callable(stop) else stop


def _joined(first: list[MicroBatch], rest: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    yield from first
    yield from rest
