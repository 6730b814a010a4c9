"""The gradients of a bucket: summed over micro-batches in one flat buffer, then over ranks.

Autograd leaves each parameter's gradient at the parameter. `GradientSum` moves it into the bucket's fp32
buffer once. If types allow, it makes the gradient a view of the buffer, so that later micro-batches add to it
in place.

Hooks of users on parameters, called once the gradient is final: summed over micro-batches and ranks.

Autograd calls a parameter's hooks when this rank has the gradient of one micro-batch. An optimizer that steps
in such a hook would train with one rank's gradient. So hooks that users register are stored, and called at
the end of the last backward of a step, as FSDP2 calls them. They may be registered before or after the model
is laid over ranks, on the model's own parameter or on the one that the optimizer changes. A hook of
`register_hook` gets this rank's part of the new gradient, without what earlier steps left, and may return
another one. Then a hook of `register_post_accumulate_grad_hook` gets the parameter that the optimizer
changes.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, final

import torch
from torch import nn

from shoal.errors import LayoutError
from shoal.parallel.communication import Axis, Pending, Then, new_buffer
from shoal.parallel.data.bucket import Bucket, CompressedBucket
from shoal.parallel.device import on_device
from shoal.parallel.local_shards import Owned, local_part

_Hook = Callable[[Any], Any]
_Hooks = Mapping[int, _Hook]

_OURS = -1
"""The key of Shoal's own hook; torch's begin at 0."""


class _Stored(OrderedDict[int, _Hook]):
    """A parameter's dict of hooks, of which autograd calls none but Shoal's.

    Autograd reads the dict's memory; torch's functions that add and remove hooks use its methods.

    Args:
        hooks: Where users' hooks are stored.
        called: Shoal's own hook, which autograd calls once there are others.
    """

    def __init__(self, hooks: dict[int, _Hook], called: _Hook | None) -> None:
        super().__init__()
        self._hooks = hooks
        self._called = called

    def call_ours(self) -> None:
        """Make autograd call Shoal's own hook."""
        if self._called is not None:
            super().__setitem__(_OURS, self._called)

    def __setitem__(self, number: int, hook: _Hook) -> None:
        self._hooks[number] = hook
        self.call_ours()

    def __contains__(self, number: object) -> bool:
        return number in self._hooks

    def __delitem__(self, number: int) -> None:
        del self._hooks[number]


@final
class GradientHooks:
    """The hooks of users on one parameter.

    Args:
        owned: This rank's part of the parameter.
        computing: The model's own parameter, which may be `owned.parameter`.
        before: Called before autograd adds to a gradient for which there are hooks of `register_hook`.
        after: Called when autograd has added to the gradient of `computing`.
    """

    def __init__(
        self, owned: Owned, computing: nn.Parameter, before: Callable[[], None], after: _Hook
    ) -> None:
        self._owned = owned
        on_gradient: dict[int, _Hook] = {}
        on_parameter: dict[int, _Hook] = {}
        # The dicts in which hooks were registered earlier are kept: their handles remove hooks from them.
        earlier: _Hooks = computing._backward_hooks or {}
        self._on_gradient = (earlier, on_gradient)
        self._on_parameter: tuple[_Hooks, ...] = (computing._post_accumulate_grad_hooks or {}, on_parameter)

        def before_adding(_: torch.Tensor) -> None:
            before()

        for parameter in (owned.parameter, computing):  # if they are one, the second makes the difference
            gradient_hooks = _Stored(on_gradient, before_adding)
            if earlier:
                gradient_hooks.call_ours()
            parameter_hooks = _Stored(on_parameter, after if parameter is computing else None)
            if parameter is computing:
                parameter_hooks.call_ours()
            parameter._backward_hooks = gradient_hooks
            parameter._post_accumulate_grad_hooks = parameter_hooks

    @property
    def may_change_gradient(self) -> bool:
        """Whether there are hooks of `register_hook`."""
        return any(self._on_gradient)

    @torch.no_grad()
    def call(self, earlier: torch.Tensor | None) -> None:
        """Call the hooks.

        Args:
            earlier: The part's gradient that hooks got before, `[rows, ...]`, to be added to the new one.

        Raises:
            LayoutError: A hook returned a gradient of another shape.
        """
        owned = self._owned
        local, gradient = owned.gradient, owned.parameter.grad
        assert local is not None
        for hooks in self._on_gradient:
            for hook in list(hooks.values()):
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
        if gradient is not owned.parameter.grad:
            local.copy_(self._part_of(gradient))
        if earlier is not None:
            local.add_(earlier)
        for hooks in self._on_parameter:
            for hook in list(hooks.values()):
                hook(owned.parameter)

    def _part_of(self, gradient: Any) -> torch.Tensor:
        """Return this rank's part of what a hook returned."""
        whole: Any = self._owned.parameter
        if hasattr(gradient, "redistribute"):
            gradient = gradient.redistribute(placements=whole.placements)
        part = local_part(gradient)
        if part.shape != self._owned.local.shape:
            raise LayoutError(
                f"a hook on {self._owned.name} returned a gradient of shape {list(part.shape)}",
                possible=f"the shape of what it got, on this rank {list(self._owned.local.shape)}",
                change="compute the new gradient from the one that the hook gets",
            )
        return part


_BATCH_BYTES: Final = 2**24
"""Bytes of gradients on a GPU that wait to be moved together.

A kernel for fewer bytes ends before the host has started the next one. More would take more memory: what
waits is in memory twice.
"""


class _Arrived(NamedTuple):
    """A gradient that autograd left at a parameter, and what is to be done with it.

    Attributes:
        parameter: Index of the parameter.
        gradient: The gradient.
        is_added: Whether the sum has an earlier gradient that autograd did not add this one to.
        factor: Factor on the sum afterwards.
    """

    parameter: int
    gradient: torch.Tensor
    is_added: bool
    factor: float


class GradientSum:
    """The sum of one bucket's gradients, `[elements]` in fp32, and the number of ranks that have each.

    A parameter without a gradient on this rank counts as zero. A parameter without a gradient on any rank
    gets none: its optimizer's step must leave it unchanged. Only a rank that lacks a gradient has to look at
    these numbers.

    Args:
        bucket: The bucket whose gradients are summed.

    Attributes:
        exchange: The bucket's exchange where it is compressed.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._buffer: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._held = [False] * len(bucket.parameters)  # the sum has a gradient of this parameter
        self._scaled = [False] * len(bucket.parameters)
        self._waiting: list[_Arrived] = []  # counted as part of the sum, and not yet moved into it
        self._missing: list[int] = []  # parameters without a gradient on this rank
        self._carried: list[torch.Tensor | None] = []
        self._replicated: torch.Tensor | None = None
        self._is_over_replicas = False
        self._pending: Pending | None = None
        self._hooks: list[GradientHooks] = []
        self._set_aside: dict[int, torch.Tensor | None] = {}  # gradients that hooks got before, by parameter
        self._given: set[int] = set()  # parameters that got a gradient since hooks were called
        self.exchange = CompressedBucket(bucket)

    def hold_hooks(self, accumulated: Callable[[int], Callable[[torch.Tensor], None]]) -> None:
        """Keep autograd from calling users' hooks on the parameters; see `call_hooks`.

        Args:
            accumulated: Returns, for a parameter's index, what autograd calls after it has added to the
                gradient.
        """
        # A parameter's hook must not hold this object, which holds the parameter: see `GradientReduction`.
        reference = weakref.ref(self)

        def set_aside(index: int) -> None:
            gradient_sum = reference()
            if gradient_sum is not None:
                gradient_sum.set_aside(index)

        self._hooks = [
            GradientHooks(owned, computing, partial(set_aside, index), accumulated(index))
            for index, (owned, computing) in enumerate(
                zip(self.bucket.owned, self.bucket.parameters, strict=True)
            )
        ]

    def set_aside(self, index: int) -> None:
        """Keep what earlier steps left at a parameter apart from a new gradient that hooks may change."""
        if index not in self._set_aside:
            gradient = self.bucket.owned[index].gradient
            self._set_aside[index] = None if gradient is None else gradient.clone()
            self.bucket.owned[index].give(None)

    def call_hooks(self) -> None:
        """Call users' hooks on the parameters with a new gradient, after the last backward of a step."""
        given, self._given = self._given, set()
        set_aside, self._set_aside = self._set_aside, {}
        for index, hooks in enumerate(self._hooks):
            owned, earlier = self.bucket.owned[index], set_aside.get(index)
            is_new = index in given or (
                index in set_aside and owned.gradient is not None
            )  # of a penalty alone
            if is_new:
                hooks.call(earlier)
            elif earlier is not None:
                owned.give(earlier)

    def add(self, index: int, factor: float = 1.0) -> None:
        """Move the gradient that autograd left at parameter `index` into the sum.

        Args:
            index: Index of the parameter.
            factor: Factor on the sum afterwards; cheapest here, while the sum is in the cache.
        """
        if not any(self._held):
            self._begin()
        gradient = self.bucket.parameters[index].grad
        assert gradient is not None
        if gradient.requires_grad:  # the backward makes a graph
            gradient = gradient.detach()
        is_added = self._held[index] and gradient.dtype != self._views[index].dtype
        if waiting := [each for each in self._waiting if each.parameter == index]:
            self._waiting.remove(waiting[0])  # autograd has added to it, in a backward inside of this one
            is_added = waiting[0].is_added
        arrived = _Arrived(index, gradient, is_added, factor)
        self._held[index] = True
        self._scaled[index] = factor != 1.0
        most = batch_bytes(gradient.device)
        if gradient.nbytes >= most:
            self._move([arrived])
            return
        self._waiting.append(arrived)
        if sum(each.gradient.nbytes for each in self._waiting) >= most:
            self.move_waiting()

    def move_waiting(self) -> None:
        """Move the gradients that wait for others into the sum: at the latest when a backward ends."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._move(waiting)

    def _move(self, arrived: list[_Arrived]) -> None:
        """Move gradients into the sum, by as few kernels as there are kinds of them."""
        copied: list[_Arrived] = []
        added: list[_Arrived] = []
        scaled = []
        for each in arrived:
            parameter, view = self.bucket.parameters[each.parameter], self._views[each.parameter]
            is_only = len(arrived) == 1 and not each.is_added and each.gradient.dtype == view.dtype
            if _lies_at(each.gradient, view):  # autograd has added to the sum in place
                scaled.append(view)
            elif is_only and each.factor != 1.0:
                torch.mul(each.gradient, each.factor, out=view)  # reads and writes once
            else:
                (added if each.is_added else copied).append(each)
                scaled.append(view)
            parameter.grad = view.detach() if view.dtype == parameter.dtype else None
        if copied:
            torch._foreach_copy_(self._views_of(copied), [each.gradient for each in copied])
        if added:
            _add(self._views_of(added), [each.gradient for each in added])
        _scale(scaled, arrived[0].factor)  # gradients of one backward have one factor

    def _views_of(self, arrived: list[_Arrived]) -> list[torch.Tensor]:
        return [self._views[each.parameter] for each in arrived]

    def start_reduction(self) -> None:
        """Begin to sum over the ranks that hold the bucket's shards.

        Sums without a gradient from the last backward are multiplied by the family's factor here.
        """
        if not any(self._held):
            self._begin()
        self.move_waiting()
        assert self._buffer is not None
        self._missing = []
        unscaled = []
        for index, view in enumerate(self._views):
            if not self._held[index] and self._may_change(index):
                self.set_aside(index)
            # A whole bucket's view may hold the average of an earlier backward, to which this one is added.
            if not self._held[index] and not _lies_at(self.bucket.parameters[index].grad, view):
                self._missing.append(index)
            elif not self._scaled[index]:
                unscaled.append(view)
        _scale(unscaled, self.bucket.family.factor)
        presence = self._presence().fill_(1.0)
        if self._missing:
            torch._foreach_zero_([self._views[index] for index in self._missing])
            missing = set(self._missing)
            has_gradient = tuple(float(index not in missing) for index in range(len(self._views)))
            presence.copy_(on_device(has_gradient, presence.device))
        self._pending = self._over_shards(self._buffer)

    def continue_reduction(self, *, may_wait: bool = True) -> None:
        """Begin to sum this rank's part over the replicas, once it is summed over the shards.

        Args:
            may_wait: Whether to wait for the sum over the shards, if there is more than one.
        """
        if self._is_over_replicas or not (may_wait or self.bucket.family.reduce.size == 1):
            return
        assert self._buffer is not None
        assert self._pending is not None
        self._pending.wait()
        self._is_over_replicas = True
        summed = self._buffer
        if self.bucket.family.summed.size > 1 and self.bucket.layout.shards > 1:
            # Only this rank's rows, packed into one message.
            summed = self._replicated = self._packed_parts()
        self._pending = self._over_replicas(summed)

    def _over_shards(self, buffer: torch.Tensor) -> Pending:
        bucket = self.bucket
        if self.exchange.compresses_shards:
            return self.exchange.reduce_scatter(buffer)
        return self._send(
            buffer, bucket.family.reduce, lambda sums: bucket.gradients.reduce_scatter(sums, bucket.name)
        )

    def _over_replicas(self, sums: torch.Tensor) -> Pending:
        bucket = self.bucket
        if self.exchange.compresses_replicas:
            return self.exchange.all_reduce(sums)
        summed = bucket.family.summed
        return self._send(sums, summed, lambda sums: summed.all_reduce(sums, bucket.name))

    def _send(self, sums: torch.Tensor, axis: Axis, start: Callable[[torch.Tensor], Pending]) -> Pending:
        """Start a collective on sums, or on a copy in the type in which ranks send them."""
        wire = self.bucket.wire
        if sums.dtype == wire or axis.size == 1:
            return start(sums)
        copy = new_buffer(sums.numel(), dtype=wire, device=sums.device).copy_(sums)
        return Then(start(copy), lambda: sums.copy_(copy))

    def clear(self) -> None:
        """Forget the sums, as if no backward had been."""
        if self._pending is not None:
            self._pending.wait()
        self._pending = None
        self._is_over_replicas = False
        self._held = [False] * len(self._held)
        self._scaled = [False] * len(self._scaled)
        self._waiting = []
        self._carried = []
        self._set_aside = {}
        self._given = set()
        self._detach()

    def _may_change(self, index: int) -> bool:
        return bool(self._hooks) and self._hooks[index].may_change_gradient

    def give(self) -> None:
        """Wait for the sum, and make this rank's part the gradients of its owned parameters."""
        for index, part in self._finish():
            self.bucket.owned[index].give(self._with_carried(index, part))
        if not self.bucket.whole:
            self._detach()

    def give_and_free(self) -> None:
        """Wait for the sum, add this rank's part to the gradients of its owned parameters, free the rest."""
        if self.bucket.whole:  # the part is the whole bucket
            self.give()
            return
        found = dict(self._finish())
        parts = list(found.values())
        if not self.bucket.stores_gradients and parts:
            copies = [torch.empty_like(part) for part in parts]
            torch._foreach_copy_(copies, parts)
            parts = copies
        for index, part in zip(found, parts, strict=True):
            self.bucket.owned[index].give(self._with_carried(index, part))
        if self.bucket.stores_gradients:
            self.bucket.store_gradients()
        self._detach()
        self._buffer = None
        self._views = []

    def _begin(self) -> None:
        layout, owned = self.bucket.layout, self.bucket.owned
        if not self.bucket.whole:
            for index in range(len(owned)):
                if self._may_change(index):
                    self.set_aside(index)
            # They are None after zero_grad(); otherwise the caller wants this sum added to them, as autograd
            # does.
            self._carried = [each.gradient for each in owned]
            if self._buffer is not None:  # the gradients are in the buffer, which will be overwritten
                self._carried = [None if each is None else each.clone() for each in self._carried]
            for each in owned:
                each.give(None)
        if self._buffer is None:
            weights = self.bucket.weights
            self._buffer = new_buffer(layout.gradient_elements, dtype=torch.float32, device=weights.device)
            self._views = layout.views(self._buffer)

    def _with_carried(self, index: int, part: torch.Tensor) -> torch.Tensor:
        """Add the earlier gradient, and one that a penalty left at the owned part in this backward."""
        if self.bucket.whole:
            return part
        for other in (self._carried[index], self.bucket.owned[index].gradient):
            if other is not None:
                part.add_(other)
        self._carried[index] = None
        return part

    def _presence(self) -> torch.Tensor:
        """Return how many ranks have each gradient, `[shards, parameters]`; reduced in this rank's row."""
        assert self._buffer is not None
        return self._buffer[self.bucket.layout.elements :].view(-1, len(self._views))

    def _packed_parts(self) -> torch.Tensor:
        """Return a copy of this rank's rows of the sums, and which gradients are present."""
        assert self._buffer is not None
        layout, index = self.bucket.layout, self.bucket.family.shard.index
        packed = self._buffer.new_zeros(layout.packed_elements + len(self._views))
        torch._foreach_copy_(layout.packed_parts(packed, index), layout.parts(self._buffer, index))
        packed[layout.packed_elements :] = self._presence()[index]
        return packed

    def _finish(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Wait for the sum; yield the index of each parameter with a gradient, and this rank's rows of it."""
        assert self._buffer is not None
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        self._is_over_replicas = False
        self._held = [False] * len(self._held)
        self._scaled = [False] * len(self._scaled)
        layout, index = self.bucket.layout, self.bucket.family.shard.index
        if self._replicated is not None:
            parts = layout.packed_parts(self._replicated, index)
            presence = self._replicated[layout.packed_elements :]
            self._replicated = None
        else:
            parts = layout.views(self._buffer) if self.bucket.whole else layout.parts(self._buffer, index)
            presence = self._presence()[index]
        # The first and the last stage add up their shared gradients: a gradient on one counts on both.
        absent: set[int] = set()
        if self._missing and self.bucket.family.tied_ranks is None:
            family = self.bucket.family
            if family.reduce.size == family.summed.size == 1:
                absent = set(self._missing)
            else:  # the host waits, and only for the parameters of which this rank does not know
                counts = presence.tolist()
                absent = {number for number in self._missing if counts[number] == 0}
        for number, part in enumerate(parts):
            if number not in absent and self.bucket.owned[number].parameter.requires_grad:
                self._given.add(number)
                yield number, part
            elif not self.bucket.whole and self._carried[number] is not None:
                self.bucket.owned[number].give(self._with_carried(number, torch.zeros_like(part)))

    def _detach(self) -> None:
        for parameter in self.bucket.parameters:
            parameter.grad = None


def batch_bytes(device: torch.device) -> int:
    """Return the bytes of gradients to move together; a CPU moves each while it is in the cache."""
    return 0 if device.type == "cpu" else _BATCH_BYTES


def _lies_at(gradient: torch.Tensor | None, view: torch.Tensor) -> bool:
    """Return whether a gradient lies where a view does; it does not after `gradient.data = value`."""
    return gradient is not None and gradient.data_ptr() == view.data_ptr()


def _add(sums: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    """Add gradients of another dtype than the sums'; a GPU adds lists by one kernel only if all have one."""
    if len(sums) > 1:
        flat = sums[0].new_empty(sum(each.numel() for each in sums))
        parts = flat.split([each.numel() for each in sums])
        copies = [part.view_as(each) for part, each in zip(parts, sums, strict=True)]
        torch._foreach_copy_(copies, gradients)
        gradients = copies
    torch._foreach_add_(sums, gradients)


def _scale(tensors: list[torch.Tensor], factor: float) -> None:
    if tensors and factor != 1.0:
        torch._foreach_mul_(tensors, factor)
