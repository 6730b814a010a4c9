"""One optimizer step of a rank, from the batch to the changed weights."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, final

import torch

from shoal.data import Loader
from shoal.errors import ModelError
from shoal.models import mixtures_of
from shoal.parallel import Axis, Parallel, Replicas
from shoal.parallel.exchange.worker_exchange import Progress, Turn, WorkerExchange
from shoal.parallel.optimizer.optimizers import GradientNorm
from shoal.record import Recorder
from shoal.spec.timeline import Kind
from shoal.train.forward_backward import Asked, Passed, Passes
from shoal.train.learning_rate import RateCourse
from shoal.train.optimizer_step import Update
from shoal.train.snapshot import ChangingBuffers, begin_anew


@dataclass(frozen=True, slots=True)
class Made:
    """A step that was made, or left out.

    Attributes:
        turn: Which one it was.
        passed: The results of its forwards and backwards.
        norm: The gradient's norms.
        rate: Learning rate.
        progress: Where the training is after it.
        seconds: Seconds until the host went on.
    """

    turn: Turn
    passed: Passed
    norm: GradientNorm
    rate: float
    progress: Progress
    seconds: float


@final
@dataclass(frozen=True, slots=True)
class Stepping:
    """Make steps; nobody is told of them.

    Attributes:
        parallel: The model.
        loader: The data, in batches of one worker.
        passes: Runs forwards and backwards.
        update: Makes the optimizer's step.
        exchange: How the update reaches the other workers.
        rates: Sets learning rates.
        buffers: The buffers that steps change.
        recorder: Recorder of spans.
        replicas: Compares replicas, before the optimizer changes them.
        synchronises_buffers: Whether buffers that steps change are averaged over the ranks after each.
        steps: Steps of the whole training.
    """

    parallel: Parallel
    loader: Loader[Any]
    passes: Passes
    update: Update
    exchange: WorkerExchange
    rates: RateCourse
    buffers: ChangingBuffers
    recorder: Recorder
    replicas: Replicas
    synchronises_buffers: bool
    steps: int

    def make(self, steps: int, position: int, *, stop: Asked = False) -> Made:
        """Make a step, or leave weights as they are if its loss or its gradient is not finite.

        Args:
            steps: Steps of the training before it.
            position: Position of its first sample in all data.
            stop: Whether this rank was asked to stop, or a function that returns it late in the step.

        Raises:
            ReplicaError: Replicas hold different bits; see `Replicas`.
        """
        began = time.perf_counter()
        exchange, axes = self.exchange, self.parallel.axes
        turn = self._begin(steps, position)
        rate = self.rates.set(turn.step)
        self.buffers.begin_step()
        self.parallel.set_step(turn.step)
        with self.recorder.step(turn.step + 1):
            counted_over = axes.data if exchange.is_dense else axes.averaged
            passed = self.passes.run(turn.position, stop=stop, counted_over=counted_over)
            if exchange.weighs_by_elements:
                _require_equal_counts(self.parallel, passed)
            if exchange.is_dense:
                exchange.average_gradients()
                passed.loss = _mean(passed.loss, axes.workers)
            self.replicas.compare_if_due(turn.step)
            with self.recorder.span(Kind.OPTIMIZER):
                norm = self.parallel.measure_gradient()
                is_finite = self.update.make(passed.loss, norm.whole, passed.counted)
            self.buffers.end_step(is_finite)
            if self.synchronises_buffers:
                self.buffers.average(axes.averaged)
        if turn.step + 1 == self.steps:
            exchange.end()
        passed.stop = exchange.agree(passed.stop)
        passed.loss = exchange.loss_of_workers(passed.loss)
        progress = exchange.progress(turn, self.loader.batch_size)
        return Made(turn, passed, norm, rate, progress, time.perf_counter() - began)

    def _begin(self, steps: int, position: int) -> Turn:
        """Return the step to make; a worker that joins others draws random numbers of its own.

        Raises:
            TrainingError: Other workers have made all.
        """
        before, exchange, data = self.exchange.worker, self.exchange, self.parallel.axes.data
        turn = exchange.turn(steps, position, self.loader.batch_size)
        if before < 0 < exchange.worker:  # worker 0 goes on with the generators that were saved
            begin_anew(self.loader.seed, turn.step, exchange.worker * data.size + data.index)
        return turn


def _require_equal_counts(parallel: Parallel, passed: Passed) -> None:
    """Check that servers can sum the gradients of routers of this step.

    In a round a server weighs a worker's gradient by its targets. The auxiliary losses of Shoal's experts
    are means over samples, whichever targets count, and one vector has the gradients of both.

    Raises:
        ModelError: Workers may have unlike numbers of targets, and the model has such losses.
    """
    if passed.counted is None:
        return
    if not any(each.balance_weight or each.z_weight for each in mixtures_of(parallel.module)):
        return
    tokens, counted = round(passed.tokens * parallel.axes.data.size), int(passed.counted)
    if counted != tokens:
        raise ModelError(
            f"{counted} of {tokens} tokens of a worker have targets that count: servers weigh its "
            "gradient by that number, and the auxiliary losses of experts count by samples",
            possible="batches in which all targets count; models without auxiliary losses; exchanges "
            "without servers",
            change="leave out exchange=server, or set balance_weight and z_weight of the model to 0",
        )


def _mean(loss: torch.Tensor, workers: Axis) -> torch.Tensor:
    """Return the mean of the workers' losses."""
    summed = loss.clone()
    workers.all_reduce(summed, "loss").wait()
    return summed / workers.size
