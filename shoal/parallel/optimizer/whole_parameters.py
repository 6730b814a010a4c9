"""Optimizers that need whole parameters, for models whose ranks have rows of them.

Muon makes a matrix orthogonal, Adafactor takes means over its rows and columns and the norm of all of it:
neither can make its step from a part of a parameter. So one of the ranks that share a parameter makes its
step and keeps its state.

Parameters shared by rows: gather each whole on one rank, and return its rows to all.

Each parameter has one owner among the ranks that share it. Parameters are assigned in order of size, the
largest first, each to the rank with the fewest elements so far. Before an optimizer's step every rank sends
its rows of the gradient and of the value to the owner; after it the owner sends every rank its rows of the
new value. With P elements in total over d ranks, a rank sends 2 P (d - 1) / d^2 elements before the step and
P (d - 1) / d^2 after it, each in one all-to-all, and needs memory for 2 P / d elements meanwhile.
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
from shoal.parallel.local_shards import NO_NORM, Owned, part_of_rows
from shoal.parallel.optimizer.joined_optimizers import (
    Composed,
    OptimizerPart,
    copy_settings,
    loss_of,
    title_of,
)
from shoal.parallel.optimizer.optimizers import needs_all_parameters
from shoal.parallel.parallel import Parallel


@final
class Owners:
    """The parameters that the ranks of one axis share, each with its owner.

    Args:
        axis: The ranks that share the parameters.
        shared: This rank's parts of the parameters; every rank gives the same parameters in the same order.

    Attributes:
        shared: The argument `shared`.
        wholes: A tensor for all of each parameter; on its owner it has values between `collect` and
            `give_back`.
    """

    def __init__(self, axis: Axis, shared: Sequence[Owned]) -> None:
        self._axis = axis
        self.shared = shared
        self._owner: dict[str, int] = {}
        held = [0] * axis.size
        for each in sorted(shared, key=lambda each: math.prod(each.shape), reverse=True):
            least = held.index(min(held))
            held[least] += math.prod(each.shape)
            self._owner[each.name] = least
        self._absent = torch.full((), torch.nan, device=shared[0].local.device)
        self.wholes = [nn.Parameter(self._absent.expand(each.shape)) for each in shared]

    def is_mine(self, owned: Owned) -> bool:
        """Return whether this rank is the owner."""
        return self._owner.get(owned.name) == self._axis.index

    def collect(self) -> None:
        """Fill the `wholes` that this rank owns with values, and with gradients if they have one."""
        sent = [
            part.reshape(-1)
            for rank in range(self._axis.size)
            for owned, _ in self._owned_by(rank)
            for part in (owned.gradient, owned.local)
            if part is not None
        ]
        mine = self._owned_by(self._axis.index)
        for owned, whole in mine:
            whole.data = owned.local.new_empty(owned.shape)
            whole.grad = None if owned.gradient is None else owned.local.new_empty(owned.shape)
        into = [
            self._rows(owned, part, rank)
            for rank in range(self._axis.size)
            for owned, whole in mine
            for part in (whole.grad, whole.data)
            if part is not None
        ]
        here, there = self._elements_here(_tensors), self._elements_there(_tensors)
        self._send(sent, here, into, there, "whole parameters")

    def give_back(self) -> None:
        """Send every rank its rows of the values, and free the whole ones."""
        mine = self._owned_by(self._axis.index)
        sent = [
            self._rows(owned, whole.data, rank).reshape(-1)
            for rank in range(self._axis.size)
            for owned, whole in mine
        ]
        into = [owned.local for rank in range(self._axis.size) for owned, _ in self._owned_by(rank)]
        self._send(sent, self._elements_there(), into, self._elements_here(), "updated parameters")
        for owned, whole in mine:
            whole.grad = None
            whole.data = self._absent.expand(owned.shape)

    def _owned_by(self, rank: int) -> list[tuple[Owned, nn.Parameter]]:
        """Return the parameters that have this owner."""
        pairs = zip(self.shared, self.wholes, strict=True)
        return [pair for pair in pairs if self._owner[pair[0].name] == rank]

    def _send(
        self,
        parts: Sequence[torch.Tensor],
        sent_rows: Sequence[int],
        into: Sequence[torch.Tensor],
        received_rows: Sequence[int],
        name: str,
    ) -> None:
        """Send parts, in the order of the receiving ranks, and put the received parts into `into`."""
        empty = self._absent.new_empty(0)
        received = self._absent.new_empty(sum(received_rows))
        sent = torch.cat([empty, *parts])
        self._axis.all_to_all(received, sent, name, received_rows=received_rows, sent_rows=sent_rows).wait()
        came = received.split([each.numel() for each in into]) if into else ()
        for target, values in zip(into, came, strict=True):
            target.copy_(values.view(target.shape))

    def _rows(self, owned: Owned, whole: torch.Tensor, rank: int) -> torch.Tensor:
        rows = part_of_rows(owned.shape[0], self._axis.size, rank)
        return whole[rows.start : rows.stop]

    def _elements_here(self, tensors: Callable[[Owned], int] = lambda owned: 1) -> list[int]:
        """For each rank, return the elements here of `tensors(owned)` tensors of each that it owns."""
        return [
            sum(tensors(owned) * owned.local.numel() for owned, _ in self._owned_by(rank))
            for rank in range(self._axis.size)
        ]

    def _elements_there(self, tensors: Callable[[Owned], int] = lambda owned: 1) -> list[int]:
        """For each rank, return its elements of `tensors(owned)` tensors of each that this rank owns."""
        size, mine = self._axis.size, self._owned_by(self._axis.index)
        return [
            sum(
                tensors(each) * len(part_of_rows(each.shape[0], size, rank)) * math.prod(each.shape[1:])
                for each, _ in mine
            )
            for rank in range(size)
        ]


def _tensors(owned: Owned) -> int:
    """Return how many tensors of a parameter are collected: its value, and its gradient if it has one."""
    return 1 if owned.gradient is None else 2


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
