"""The optimizer's step: clipped, or left out if loss or gradient is not finite, without the host's help."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import torch

from shoal.checkpoint import Coordinator, ProcessGroupCoordinator, SingleProcess
from shoal.data import Loader
from shoal.errors import TrainingError
from shoal.models.task import tensors_in
from shoal.parallel import GradientNorm, Parallel, local_part
from shoal.parallel.exchange.worker_exchange import exchange_of
from shoal.parallel.optimizer.optimizers import limit_gradients
from shoal.train.result import StepResult


@final
class Update:
    """Make optimizer steps whose clipping and skipping the device decides.

    The fused optimizers of torch divide gradients by a number on the device, and leave everything unchanged
    if another number there is not 0: the interface of torch's GradScaler.

    Args:
        parallel: The model.
        optimizer: Its optimizer.
        clip: Norm to which a gradient is scaled down; None for none.

    Attributes:
        is_on_device: Whether the optimizer can do so. If not, the host has to know whether all is finite.
    """

    def __init__(self, parallel: Parallel, optimizer: torch.optim.Optimizer, clip: float | None) -> None:
        self._parallel = parallel
        self._optimizer: Any = optimizer
        self._clip = clip
        self._exchange = exchange_of(optimizer, parallel)
        takes_scale = getattr(optimizer, "_step_supports_amp_scaling", False)
        self.is_on_device = takes_scale and not self._exchange.needs_host

    def make(
        self, loss: torch.Tensor, norm: torch.Tensor, counted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Step, or leave everything unchanged if `loss` or `norm` is not finite. Gradients stay.

        Args:
            loss: Mean loss of the batch, a scalar.
            norm: Norm of the whole gradient, a scalar.
            counted: Number of elements in the mean loss, by which servers weigh the gradient; None if all
                workers have equally many.

        Returns:
            Whether both are finite, a scalar; or whether other workers stepped, if nothing counts here.
        """
        is_finite = torch.isfinite(loss) & torch.isfinite(norm)
        self._exchange.note(loss, counted)
        if not self.is_on_device:
            if is_finite.item():
                if self._clip is not None and not self._exchange.clips:
                    limit_gradients(self._parallel.owned, norm, self._clip)
                self._optimizer.step()
                return is_finite
            self._exchange.pass_over()
            return is_finite | self._exchange.follows
        self._optimizer.found_inf = is_finite.logical_not().float()
        if self._clip is not None:
            self._optimizer.grad_scale = (norm / self._clip).clamp(min=1.0).float()
        try:
            self._optimizer.step()
        finally:
            vars(self._optimizer).pop("found_inf", None)
            vars(self._optimizer).pop("grad_scale", None)
        return is_finite


_MOST_NAMED = 8


@dataclass(slots=True)
class Skips:
    """The number of steps that were left out.

    Attributes:
        limit: Allowed number, one after another.
        total: Number in total.
        in_a_row: Number since the last step that was made.
        step: The step that was noted last.
        reason: The reason why it was left out; empty if it was made.
    """

    limit: int
    total: int = 0
    in_a_row: int = 0
    step: int = 0
    reason: str = ""

    def note(self, step: int, reason: str) -> None:
        """Note a step and the reason why it was left out; empty if it was made."""
        self.total += bool(reason)
        self.in_a_row = self.in_a_row + 1 if reason else 0
        self.step, self.reason = step, reason

    def require_progress(self) -> None:
        """End the training once too many steps were left out.

        Raises:
            TrainingError: Too many were. Counting begins anew, for a state that goes on after them.
        """
        if self.in_a_row <= self.limit:
            return
        count, self.in_a_row = self.in_a_row, 0
        several = f"; it is the last of {count} such steps in a row" if count > 1 else ""
        raise TrainingError(
            f"step {self.step} has {self.reason}{several}, and optimizer.skip allows {self.limit or 'none'}. "
            "The weights are those from before this step"
        )


class Unsettled(NamedTuple):
    """A step whose values the host has not read yet.

    Attributes:
        result: Its result.
        position: Position of its first sample in all data.
        losses: For each micro-batch that counts, its mean loss, if this rank computed it.
        norm: Norms of its gradient.
    """

    result: StepResult
    position: int
    losses: Mapping[int, torch.Tensor]
    norm: GradientNorm


@final
class Explainer:
    """Find what was not finite in a step.

    Args:
        parallel: The model.
        loader: Loader that knows which samples a step had.
        names: Names of all parameters, in the model's order.
        microbatch: Samples of one forward of one rank.
    """

    def __init__(
        self, parallel: Parallel, loader: Loader[Any], names: Sequence[str], microbatch: int
    ) -> None:
        self._parallel = parallel
        self._loader = loader
        self._place = {name: number for number, name in enumerate(names)}
        self._microbatch = microbatch
        axis = parallel.axes.in_step  # with local updates, the ranks of one worker
        self._ranks: Coordinator = SingleProcess() if axis.size == 1 else ProcessGroupCoordinator(axis.group)

    def reason(self, step: Unsettled, *, has_gradients: bool) -> str:
        """Return what was not finite; all ranks that made the step together call it.

        Args:
            step: The step.
            has_gradients: Whether the gradients are still there; they are forgotten then.
        """
        if has_gradients:
            gradients = _not_finite_gradients(self._parallel)
            self._parallel.zero_grad()
        else:
            finite = torch.isfinite(step.norm.parts).tolist()
            gradients = [name for name, held in zip(step.norm.names, finite, strict=True) if not held]
        dp, shares = self._parallel.axes.dp, self._parallel.plan.shared
        suspects: list[int] = []
        for number, loss in step.losses.items():
            if not torch.isfinite(loss).all():
                start = self._loader.start(step.position, number, dp.index, dp.size, self._microbatch, shares)
                suspects += _suspects(self._loader, start, self._microbatch)
        weights = [owned.name for owned in self._parallel.owned if not _is_finite(owned.parameter)]
        told = self._ranks.all_gather_object((suspects, gradients, weights))

        def of_all(which: int) -> list[Any]:
            return list({each for rank in told for each in rank[which]})

        samples = sorted(of_all(0))
        graded, weighed = (
            sorted(of_all(which), key=lambda name: self._place.get(name, -1)) for which in (1, 2)
        )
        return _sentence(step.result.loss, step.result.gradient_norm, samples, graded, weighed)


def _not_finite_gradients(parallel: Parallel) -> list[str]:
    """Return the names of this rank's parts of parameters whose gradient is not finite."""
    return [
        owned.name
        for owned in parallel.owned
        if owned.parameter.grad is not None and not _is_finite(owned.parameter.grad)
    ]


def _sentence(loss: float, norm: float, samples: list[int], graded: list[str], weighed: list[str]) -> str:
    parts = []
    if not math.isfinite(loss):
        where = f" at {_counted('sample', [str(each) for each in samples])} of the data" if samples else ""
        nothing = "" if samples or graded else ", because no target of the batch counts"
        parts.append(f"a loss of {loss}{where}{nothing}")
    if graded:
        ends = f"{graded[0]!r}" if len(graded) == 1 else f"{graded[0]!r} first and {graded[-1]!r} last"
        what = "that is" if len(graded) == 1 else f"of {len(graded)} parameters that is"
        parts.append(f"a gradient {what} not finite, {ends} in the model's order")
    elif not math.isfinite(norm):
        parts.append(f"a gradient whose norm is {norm}, though each element is finite")
    if weighed:
        parts.append(f"a weight that is not finite, {weighed[0]!r}, which skipped steps cannot repair")
    return "; ".join(parts)


def _suspects(loader: Loader[Any], start: int, count: int) -> list[int]:
    """Return the samples of a micro-batch whose loss is not finite: those with such values, or else all."""
    indices = loader.indices(start, count)
    held = [
        int(index)
        for place, index in enumerate(indices)
        if not all(_is_finite(tensor) for tensor in tensors_in(loader.fetch(start + place, 1)))
    ]
    return held or [int(index) for index in np.unique(indices)]


def _is_finite(tensor: torch.Tensor) -> bool:
    held = local_part(tensor)
    return not held.is_floating_point() or bool(torch.isfinite(held).all())


def _counted(noun: str, items: Sequence[str]) -> str:
    named = ", ".join(items[:_MOST_NAMED])
    more = f" and {len(items) - _MOST_NAMED} more" if len(items) > _MOST_NAMED else ""
    return f"{noun}{'s' if len(items) > 1 else ''} {named}{more}"
