"""Several optimizers as one, such as Muon for matrices and AdamW for the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch.optim import Optimizer

from shoal.parallel.optimizer.composed import (
    Composed,
    OptimizerPart,
    copy_settings,
    loss_of,
    parts_of,
    title_of,
)
from shoal.parallel.owned import Owned


@final
class Together(Composed):
    """Step several optimizers one after another; its groups are those of all of them.

    Args:
        optimizers: The optimizers; no two may have the same parameter.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        super().__init__([group for each in optimizers for group in each.param_groups], {})

    @property
    def title(self) -> str:
        """See `Composed.title`."""
        return " and ".join(title_of(each) for each in self._optimizers)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step of each optimizer.

        Raises:
            LayoutError: A group was added after construction.
        """
        loss = loss_of(closure)
        copy_settings(self.param_groups, self._groups)
        for each in self._optimizers:
            each.step()
        self.show()
        return loss

    def parts(self, owned: Sequence[Owned]) -> Sequence[OptimizerPart]:
        """See `Composed.parts`."""
        return [part for each in self._optimizers for part in parts_of(each, owned)]

    def show(self) -> None:
        """See `Composed.show`."""
        for each in self._optimizers:
            if isinstance(each, Composed):
                each.show()
        self.state = defaultdict(
            dict, {key: state for each in self._optimizers for key, state in each.state.items()}
        )

    def take(self) -> None:
        """See `Composed.take`."""
        copy_settings(self.param_groups, self._groups)
        self.param_groups = self._groups
        for each in self._optimizers:
            own = {parameter for group in each.param_groups for parameter in group["params"]}
            each.state = defaultdict(dict, {key: state for key, state in self.state.items() if key in own})
            if isinstance(each, Composed):
                each.take()

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for each in self._optimizers for group in each.param_groups]
