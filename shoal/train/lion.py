"""Lion: the sign of an average of gradients (Chen et al., arXiv:2302.06675)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import torch


@final
class Lion(torch.optim.Optimizer):
    """Move each element by the learning rate, against the sign of an average of its gradients.

    With the gradient g and its average m: `p -= lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * p)`,
    then `m = beta2 * m + (1 - beta2) * g`. It works element by element, so it takes any part of a parameter.

    Args:
        params: Parameters or groups, as torch optimizers take them.
        lr: Learning rate; three to ten times less than AdamW's, as the paper says.
        betas: Decay of the average, in the step and in the stored average.
        weight_decay: Decoupled weight decay; three to ten times AdamW's.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make a step with the present gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            if held:
                self._update(held, group["lr"], group["betas"], group["weight_decay"])
        return loss

    def _update(
        self, held: list[torch.Tensor], rate: float, betas: tuple[float, float], decay: float
    ) -> None:
        for parameter in held:
            if "exp_avg" not in self.state[parameter]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
        averages = [self.state[parameter]["exp_avg"] for parameter in held]
        gradients: list[Any] = [parameter.grad for parameter in held]
        signs = torch._foreach_lerp(averages, gradients, 1 - betas[0])
        torch._foreach_sign_(signs)
        torch._foreach_mul_(held, 1 - rate * decay)
        torch._foreach_add_(held, signs, alpha=-rate)
        torch._foreach_lerp_(averages, gradients, 1 - betas[1])
