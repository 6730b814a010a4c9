"""How a rank's worker goes on with the others: in each step, by merges, or through parameter servers."""

from __future__ import annotations

from typing import NamedTuple, final

import torch

from shoal.errors import ModelError, TrainingError
from shoal.models import mixtures_of
from shoal.parallel import Axis, GuidedUpdates, LocalUpdates, Parallel, ServedUpdates
from shoal.parallel.axes import Axes
from shoal.train.passes import Passed
from shoal.train.randomness import begin_anew

__all__ = ["Progress", "Turn", "Workers"]


class Turn(NamedTuple):
    """The step to make.

    Attributes:
        step: Steps of the training before it.
        position: Position of its first sample in all data.
    """

    step: int
    position: int


class Progress(NamedTuple):
    """Where the training is after a step.

    Attributes:
        steps: Steps made.
        position: Samples consumed, over all ranks.
        shares: Number of workers' parts of a batch that were finished since the last step.
    """

    steps: int
    position: int
    shares: int = 1


@final
class Workers:
    """The course of a training, of which this rank's worker makes its part.

    Args:
        optimizer: The optimizer of this rank.
        number: Workers that a step's batch is cut for.
        steps: Steps of the whole training.
        batch: Samples in a step of this rank's worker, or of all workers that step together.
        axes: The axes of the Plan.
        seed: The run's seed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        number: int,
        steps: int,
        batch: int,
        *,
        axes: Axes,
        seed: int,
    ) -> None:
        self._local = optimizer if isinstance(optimizer, (LocalUpdates, GuidedUpdates)) else None
        self._served = optimizer if isinstance(optimizer, ServedUpdates) else None
        self._number = number
        self._steps = steps
        self._batch = batch
        self._axes = axes
        self._workers = axes.workers
        self._seed = seed

    @property
    def is_alone(self) -> bool:
        """Whether servers join the workers, and this one has not joined them yet."""
        return self._served is not None and self._served.worker < 0

    @property
    def number(self) -> int:
        """Number of this worker among those that servers join; 0 without servers."""
        return 0 if self._served is None else self._served.worker

    @property
    def leads(self) -> bool:
        """Whether this worker validates and saves; without servers all workers do so together."""
        return self._served is None or self._served.leads

    @property
    def has_merged(self) -> bool:
        """Whether the values here are those of all workers; without servers saving merges them."""
        return self._served is None or self._served.has_merged

    @property
    def staleness(self) -> int | None:
        """Updates of others that this worker's last contribution did not know; None without servers."""
        return None if self._served is None else self._served.staleness

    @property
    def counted_over(self) -> Axis:
        """The ranks over whose samples the next step's loss is a mean: all if workers average gradients."""
        is_dense = self._local is not None and self._local.is_dense
        return self._axes.data if is_dense else self._axes.averaged

    def begin(self, steps: int, position: int) -> Turn:
        """Return the step to make next.

        Raises:
            TrainingError: Other workers have made all.
        """
        if self._served is None:
            return Turn(steps, position)
        is_new = self._served.worker < 0
        if is_new:
            self._served.first = steps * self._number
        share = self._served.share()
        if share is None:
            raise TrainingError("no samples are left for this worker: the others train on the last of them")
        if is_new and self._served.worker > 0:  # worker 0 goes on with the generators that were saved
            place = self._served.worker * self._axes.data.size + self._axes.data.index
            begin_anew(self._seed, share // self._number, place)
        return Turn(share // self._number, share * self._batch)

    def require_like_counts(self, parallel: Parallel, passed: Passed) -> None:
        """Check that servers can sum the gradients of routers of this step.

        In a round a server weighs a worker's gradient by its targets. The auxiliary losses of Shoal's experts
        are means over samples, whichever targets count, and one vector has the gradients of both.

        Raises:
            ModelError: Workers may have unlike numbers of targets, and the model has such losses.
        """
        served = self._served
        if served is None or passed.counted is None or served.is_local or not served.mode.in_rounds:
            return
        if not any(each.balance_weight or each.z_weight for each in mixtures_of(parallel.module)):
            return
        tokens, counted = round(passed.tokens * self._axes.data.size), int(passed.counted)
        if counted != tokens:
            raise ModelError(
                f"{counted} of {tokens} tokens of a worker have targets that count: servers weigh its "
                "gradient by that number, and the auxiliary losses of experts count by samples",
                possible="batches in which all targets count; models without auxiliary losses; exchanges "
                "without servers",
                change="leave out exchange=server, or set balance_weight and z_weight of the model to 0",
            )

    def average(self, passed: Passed) -> None:
        """Average gradient and loss over the workers, if each summed its own and the step is dense."""
        if self._local is None or not self._local.is_dense or self._workers.size == 1:
            return
        self._local.average_gradients()
        loss = passed.loss.clone()
        self._workers.all_reduce(loss, "loss").wait()
        passed.loss = loss / self._workers.size

    def end(self, turn: Turn, passed: Passed) -> Progress:
        """Return where the training is after the optimizer's step.

        Workers agree on whether to stop, and the loss of `passed` becomes that of all workers, if servers
        join them and they exchange in each step.
        """
        if self._local is not None:
            if turn.step + 1 == self._steps:
                self._local.settle()
            passed.stop = self._local.agree(passed.stop)
        if self._served is None:
            return Progress(turn.step + 1, turn.position + self._batch)
        mean_loss = self._served.mean_loss
        if mean_loss is not None and (passed.loss.isfinite() or self._served.follows):
            passed.loss = torch.full_like(passed.loss, mean_loss)
        before, now = self._served.counted, self._served.finished
        self._served.counted = now
        if self._served.is_over:
            return Progress(self._steps, self._steps * self._number * self._batch, now - before)
        complete = self._served.complete
        made = min(complete // self._number, self._steps - 1)
        return Progress(made, complete * self._batch, now - before)

    def norm(self, own: torch.Tensor) -> torch.Tensor:
        """Return the norm of the gradient: `own`, or that of the mean of all workers if servers clip it."""
        if self._served is None or self._served.norm is None or not own.isfinite():
            return own
        return torch.full_like(own, self._served.norm)

    def retire(self) -> bool:
        """Wait until the end of the training is saved; return whether this worker has to save it now.

        The worker that leads saves at once. If servers join the workers, and it is lost before it has saved,
        the next one has to.
        """
        return self._served is not None and self._served.retire()

    def leave(self) -> None:
        """Leave the other workers, if servers join them; the last one ends the servers."""
        if self._served is not None:
            self._served.leave()
