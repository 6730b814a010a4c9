"""Optimizers that need whole parameters, for models whose ranks have rows of them.

Muon makes a matrix orthogonal, Adafactor takes means over its rows and columns and the norm of all of it:
neither can make its step from a part of a parameter. So one of the ranks that share a parameter makes its
step and keeps its state (`owners.py`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.errors import LayoutError
from shoal.parallel.communication import Axis
from shoal.parallel.optimizer.composed import Composed, OptimizerPart, copy_settings, loss_of, title_of
from shoal.parallel.optimizer.optimizers import needs_all_parameters
from shoal.parallel.optimizer.owners import Owners
from shoal.parallel.owned import NO_NORM, Owned
from shoal.parallel.parallel import Parallel


@final
class WholeParameters(Composed):
    """Step another optimizer on whole parameters, as on one device, under every sharding.

    If ranks share a parameter by rows, one of them gets its whole gradient and value, makes the step and
    returns to every rank its rows. With P elements of four bytes over d ranks, a rank sends 12 P (d - 1) /
    d^2 bytes a step, and keeps the state of P / d elements.

        muon = WholeParameters(parallel, matrices, torch.optim.Muon, lr=0.02)

    Args:
        parallel: The model.
        params: Parameters of the model, or groups of them, as torch optimizers take them.
        make: Makes the optimizer, such as `torch.optim.Muon`; called with groups, and the options.
        options: Options of `make`.

    Raises:
        LayoutError: Tensor or expert parallelism cuts one of the parameters, or one does not belong to
            `parallel`; or the optimizer needs all parameters, and a rank steps some of them.
    """

    def __init__(
        self, parallel: Parallel, params: Any, make: Callable[..., Optimizer], **options: Any
    ) -> None:
        super().__init__(params, dict(options))
        owned_of = {each.parameter: each for each in parallel.owned}
        given = [parameter for group in self.param_groups for parameter in group["params"]]
        trained: list[nn.Parameter] = [each for each in given if each.requires_grad]
        self._owned = [_require_uncut(parallel, each, owned_of) for each in trained]
        shared: dict[Axis, list[Owned]] = {}
        for each in self._owned:
            if _is_shared(each):
                shared.setdefault(each.family.shard, []).append(each)
        self._owners = [Owners(axis, each) for axis, each in shared.items()]
        self._whole_of = dict(self._wholes(given, owned_of))
        self._optimizer = make(
            [_with_params(group, self._whole_of) for group in self.param_groups], **options
        )
        if needs_all_parameters(self._optimizer) and (
            self._owners or any(hasattr(each, NO_NORM) for each in trained)
        ):
            raise LayoutError(
                f"{title_of(self._optimizer)} makes its step from all parameters together, and under the "
                f"Plan {parallel.plan} a rank steps some of them",
                possible="a Plan without shard, tp, ep and pp, or an optimizer such as AdamW",
                change="change the Plan or the optimizer",
            )
        self.defaults.update(self._optimizer.defaults)
        copy_settings(self._optimizer.param_groups, self.param_groups)

    @property
    def title(self) -> str:
        """See `Composed.title`."""
        return title_of(self._optimizer)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step with the present gradients; all ranks call it.

        Raises:
            LayoutError: A group was added after construction.
        """
        loss = loss_of(closure)
        copy_settings(self.param_groups, self._optimizer.param_groups)
        for owners in self._owners:
            owners.collect()
        for each in self._owned:
            if not _is_shared(each):
                self._whole_of[each.parameter].grad = each.gradient
        with self._own_parameters():
            self._optimizer.step()
        for owners in self._owners:
            owners.give_back()
        copy_settings(self._optimizer.param_groups, self.param_groups)
        self.show()
        return loss

    @contextmanager
    def _own_parameters(self) -> Iterator[None]:
        """Leave the optimizer only the parameters whose step this rank makes.

        Some optimizers step parameters without a gradient too.
        """
        groups = self._optimizer.param_groups
        every = [group["params"] for group in groups]
        others = {
            whole
            for owners in self._owners
            for owned, whole in zip(owners.shared, owners.wholes, strict=True)
            if not owners.is_mine(owned)
        }
        for group in groups:
            group["params"] = [each for each in group["params"] if each not in others]
        try:
            yield
        finally:
            for group, params in zip(groups, every, strict=True):
                group["params"] = params

    def parts(self, owned: Sequence[Owned]) -> Sequence[OptimizerPart]:
        """See `Composed.parts`: all of each parameter whose step this rank makes."""
        wholes = [
            replace(
                each,
                start=0,
                stop=math.prod(each.shape),
                parameter=self._whole_of[each.parameter],
            )
            for each in self._owned
            if not _is_shared(each) or any(owners.is_mine(each) for owners in self._owners)
        ]
        return [(self._optimizer, wholes)]

    def show(self) -> None:
        """See `Composed.show`."""
        states = self._optimizer.state
        self.state = defaultdict(
            dict, {each: states[whole] for each, whole in self._whole_of.items() if whole in states}
        )

    def take(self) -> None:
        """See `Composed.take`."""
        loaded = self.state
        self._optimizer.state = defaultdict(
            dict, {whole: loaded[each] for each, whole in self._whole_of.items() if each in loaded}
        )

    def _wholes(
        self, given: Sequence[nn.Parameter], owned_of: dict[nn.Parameter, Owned]
    ) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yield each parameter with the tensor that holds all of it."""
        shared = {
            owned.parameter: whole
            for owners in self._owners
            for owned, whole in zip(owners.shared, owners.wholes, strict=True)
        }
        for parameter in given:
            if parameter in shared:
                yield parameter, shared[parameter]
            elif hasattr(parameter, "_local_tensor") and parameter in owned_of:  # no dims: all ranks have it
                yield parameter, nn.Parameter(owned_of[parameter].local)
            else:
                yield parameter, parameter


def _is_shared(owned: Owned) -> bool:
    return owned.family.shard.size > 1


def _with_params(group: dict[str, Any], whole_of: dict[nn.Parameter, nn.Parameter]) -> dict[str, Any]:
    """Return a group with the whole parameters, and their names if it has any."""
    params: list[Any] = [whole_of[parameter] for parameter in group["params"]]
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    if "param_names" in group:
        params = list(zip(group["param_names"], params, strict=True))
    return {**settings, "params": params}


def _require_uncut(parallel: Parallel, parameter: nn.Parameter, owned_of: dict[nn.Parameter, Owned]) -> Owned:
    owned = owned_of.get(parameter)
    if owned is None:
        raise LayoutError(
            f"WholeParameters was given a parameter of shape {list(parameter.shape)} that the model does not "
            "have",
            possible="parameters() and named_parameters() of the object that shoal.parallelize returned",
            change="give these parameters",
        )
    if owned.cut is not None:
        raise LayoutError(
            f"WholeParameters was given {owned.name}, and under the Plan {parallel.plan} a rank has only a "
            "block of it",
            possible="parameters that tp and ep do not split; shard, cp and pp may have any value",
            change="change the Plan, or give such parameters to an elementwise optimizer, such as AdamW",
        )
    return owned
