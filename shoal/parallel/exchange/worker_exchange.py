"""How a worker's updates reach the other workers: one interface for every exchange of a Plan.

SynchronousExchange   gradients are averaged in each backward: whole, in buckets, or compressed
LocalUpdates          workers step by themselves, and merge in rounds
ServedUpdates         parameter servers step, or merge
GuidedUpdates         one of these at a time, which may change
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch.optim import Optimizer

from shoal.parallel.exchange.compressed_sums import CompressedSum
from shoal.parallel.exchange.merge_schedule import OuterState, divided
from shoal.parallel.local_shards import Owned
from shoal.parallel.optimizer.joined_optimizers import (
    Composed,
    OptimizerPart,
    copy_settings,
    loss_of,
    parts_of,
    title_of,
    unscaled,
)
from shoal.parallel.parallel import Parallel

STEPS = "exchange_steps"
"""Key of the steps made, in a checkpoint's state: the checkpoint's number may be another one."""


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


class WorkerExchange:
    """What a training asks of the exchange between workers. The defaults are those of synchronous steps.

    Attributes:
        worker: This worker's number among those that servers join; -1 before it has joined.
        leads: Whether this worker validates and saves; without servers all do so together.
        staleness: Updates of others that this worker's last contribution did not know; None without servers.
    """

    worker = 0
    leads = True
    staleness: int | None = None

    @property
    def is_dense(self) -> bool:
        """Whether to call `average_gradients` after the next backward, which leaves a worker's own."""
        return False

    @property
    def has_merged(self) -> bool:
        """Whether all workers have equal values."""
        return True

    @property
    def is_savable(self) -> bool:
        """Whether the state can be saved now, after `settle`."""
        return True

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped after they were exchanged, so that workers do not clip their own."""
        return False

    @property
    def needs_host(self) -> bool:
        """Whether the host has to know if a step is left out: `pass_over` takes part in the exchange."""
        return False

    @property
    def weighs_by_elements(self) -> bool:
        """Whether a worker's gradient counts by the number of its elements that count."""
        return False

    @property
    def follows(self) -> bool:
        """Whether others made the last step, in which no element of this worker counted."""
        return False

    def turn(self, steps: int, position: int, batch: int) -> Turn:
        """Return the step to make next, after `steps` steps and `position` samples of `batch` a step.

        Raises:
            TrainingError: Other workers have made all.
        """
        return Turn(steps, position)

    def progress(self, turn: Turn, batch: int) -> Progress:
        """Return where the training is after the step of a turn."""
        return Progress(turn.step + 1, turn.position + batch)

    def average_gradients(self) -> None:
        """Average the gradients over the workers, in a dense step; all ranks call it together."""

    def note(self, loss: torch.Tensor, counted: torch.Tensor | None) -> None:
        """Take note of a step's loss and number of elements that count, before its update."""

    def loss_of_workers(self, own: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the workers that made the last step; `own` if it is not known."""
        return own

    def norm_of_workers(self, own: torch.Tensor) -> torch.Tensor:
        """Return the norm of the mean gradient of all workers, if servers clip it; else `own`."""
        return own

    def pass_over(self) -> None:
        """Count a step that this worker leaves out."""

    def agree(self, flags: torch.Tensor) -> torch.Tensor:
        """Return the sum of a small tensor over the workers, if this step did not sum it already."""
        return flags

    def end(self) -> None:
        """Make workers equal after the last step of the training."""

    def settle(self) -> None:
        """Make the state here that of all workers, to be saved; all ranks call it together."""

    def exchanges(self) -> Mapping[str, CompressedSum]:
        """Return the compressed sums of merges, by name."""
        return {}

    def to_save(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the exchange beside the optimizer's state, as JSON."""
        return {}

    def load(self, steps: int, state: Mapping[str, Any]) -> None:
        """Go on after this many steps, with the state that was loaded and what `to_save` returned."""

    def begin(self) -> None:
        """Begin with the weights that were loaded, before the first step."""

    def retire(self) -> bool:
        """Wait until the end of the training is saved; return whether this worker has to save it now.

        The worker that leads saves at once. If it is lost before it has saved, the next one has to.
        """
        return False

    def leave(self) -> None:
        """Leave the other workers, if servers join them; the last one ends the servers."""


@final
class SynchronousExchange(WorkerExchange):
    """Gradients are averaged in each backward.

    Args:
        parallel: The model.
    """

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel

    def to_save(self) -> dict[str, Any]:
        """See `WorkerExchange.to_save`: the first steps may be dense."""
        steps = [each.compressing.step for each in self._parallel.strategies if each.compressing is not None]
        return {STEPS: max(steps)} if steps else {}


def exchange_of(optimizer: Optimizer | None, parallel: Parallel) -> WorkerExchange:
    """Return the exchange of an optimizer's updates; that of gradients if it has none of its own."""
    return optimizer if isinstance(optimizer, WorkerExchange) else SynchronousExchange(parallel)


class WorkerUpdates(Composed, WorkerExchange):
    """An optimizer around that of a worker, which exchanges what its steps change.

    Args:
        parallel: The model.
        optimizer: The optimizer of each worker.
    """

    def __init__(self, parallel: Parallel, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self._step_supports_amp_scaling = True  # a GradScaler calls `step` in each step
        self._parallel = parallel
        self._inner = optimizer

    @property
    def title(self) -> str:
        """See `Composed.title`."""
        return title_of(self._inner)

    @property
    def needs_host(self) -> bool:
        """See `WorkerExchange.needs_host`."""
        return True

    @property
    def outer(self) -> OuterState | None:
        """The state of the outer optimizer; None without one."""
        return None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step, and exchange what is due."""
        loss = loss_of(closure)
        if unscaled(self):
            copy_settings(self.param_groups, self._inner.param_groups)
            self.make_step()
        else:
            self.pass_over()
        return loss

    @abstractmethod
    def make_step(self) -> None:
        """Make a step whose gradients are finite, and exchange what is due."""

    def parts(self, owned: Sequence[Owned]) -> Sequence[OptimizerPart]:
        """See `Composed.parts`."""
        outer = self.outer
        return [*parts_of(self._inner, owned), *([] if outer is None else [(outer, owned)])]

    def show(self) -> None:
        """See `Composed.show`."""
        if isinstance(self._inner, Composed):
            self._inner.show()
        inner, outer = self._inner.state, self.outer
        self.state = inner
        if outer is not None:
            self.state = defaultdict(dict)
            for each in self._parallel.owned:
                parameter = each.parameter
                self.state[parameter] = {**inner.get(parameter, {}), **outer.state[parameter]}

    def take(self) -> None:
        """See `Composed.take`."""
        copy_settings(self.param_groups, self._inner.param_groups)
        if self.outer is None:
            self._inner.state = self.state
        else:
            self.outer.state, self._inner.state = divided(self.state)
        if isinstance(self._inner, Composed):
            self._inner.take()
