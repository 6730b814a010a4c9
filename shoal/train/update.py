"""The optimizer's step: clipped, or left out if loss or gradient is not finite, without the host's help."""

from __future__ import annotations

from typing import Any, final

import torch

from shoal.parallel import Parallel
from shoal.parallel.exchange.worker_exchange import exchange_of
from shoal.parallel.optimizer.norm import limit_gradients


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
