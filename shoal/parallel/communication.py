"""The axes of the mesh as one rank sees them: groups, and the collectives over them, recorded.

A collective is started at once and gives a `Pending`; its span lasts until it is complete, and waiting for it
is a span of its own on the compute lane. An axis of one rank communicates nothing and records nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch

# Optimizers import it anyway. Imported while a gloo group is there, it keeps the group's threads alive beyond
# `destroy_process_group`, and now and then one of them aborts the process at its exit (torch 2.13).
import torch._dynamo
import torch.distributed as dist

from shoal.collectives import Done, ProcessGroup, Work, empty
from shoal.errors import CommunicationError
from shoal.plan import Mesh, Plan
from shoal.record import NullRecorder, OpenSpan, Recorder
from shoal.timeline import Kind, Lane

__all__ = ["Axes", "Axis", "Pending", "new_buffer"]

# torch 2.13 renames the two collectives of equal parts; before it only the older names exist.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Pending(Protocol):
    """A collective that was started."""

    def wait(self) -> None:
        """Returns once the result may be used."""


class _Complete:
    """What an axis of one rank gives: there is nothing to wait for."""

    def wait(self) -> None:
        """Returns at once."""


class _Started:
    """A collective under way, with the span that it will end, and what remains to be done after it."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        span: OpenSpan,
        recorder: Recorder,
        name: str,
        *,
        on_cpu: bool,
        after: Callable[[], object] | None,
    ) -> None:
        self._works = works
        self._span = span
        self._recorder = recorder
        self._name = name
        self._after = after
        # The backend "shoal" knows when an operation was complete; of others a future tells.
        self._timed = [work for work in works if isinstance(work, (Done, Work))]
        if on_cpu and not self._timed and not isinstance(recorder, NullRecorder):
            self._running = list(works)
            for work in works:
                work.get_future().add_done_callback(self._one_is_complete)

    def wait(self) -> None:
        """Blocks until the collective is complete; raises what went wrong in it."""
        with self._recorder.span(Kind.WAIT, self._name), _as_communication_error(self._name):
            for work in self._works:
                work.wait()
        if self._timed:
            self._span.close(max(work.finished for work in self._timed), self._timed[0].algorithm)
        else:
            self._span.close()
        if self._after is not None:
            self._after()

    def _one_is_complete(self, future: object) -> None:
        self._running.pop()
        if not self._running:
            self._span.close()


def new_buffer(elements: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor `[elements]` to communicate from, whose content is not defined.

    Between CPUs it is where the ranks of a host reach it, if the backend is "shoal".
    """
    if device.type == "cpu" and dist.is_initialized() and dist.get_backend() == "shoal":
        return empty(elements, dtype=dtype)
    return torch.empty(elements, dtype=dtype, device=device)


class Axis:
    """One axis of the mesh: the ranks that differ along it alone, and the collectives over them.

    Args:
        name: The axis, as the Timeline names it.
        members: Global ranks of the group, in mesh order.
        rank: This process's global rank.
        group: Its process group; None if the axis has one rank.
        recorder: Where spans go.
    """

    def __init__(
        self,
        name: str,
        members: tuple[int, ...],
        rank: int,
        group: dist.ProcessGroup | None,
        recorder: Recorder,
    ) -> None:
        self.name = name
        self.members = members
        self.size = len(members)
        self.index = members.index(rank)
        self.group = group
        self._recorder = recorder
        self._is_gloo = self.size > 1 and dist.get_backend(group) == "gloo"

    def all_reduce(self, tensor: torch.Tensor, name: str) -> Pending:
        """Sums `tensor` over the axis, in place."""
        return self._start(f"all_reduce:{name}", tensor, (dist.all_reduce, tensor))

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, name: str) -> Pending:
        """Sums `full` [size x n] over the axis; rank i of the axis gets the i-th n elements in `shard` [n].

        `shard` may be this rank's own part of `full`.
        """
        name = f"reduce_scatter:{name}"
        if not self._is_gloo:
            return self._start(name, full, (_reduce_scatter, shard, full))
        # An all-to-all and a local sum take two thirds of the time of gloo's own (docs/log.md).
        received = torch.empty_like(full)
        return self._start(
            name,
            full,
            (dist.all_to_all_single, received, full),
            after=lambda: torch.sum(received.view(self.size, -1), dim=0, out=shard),
        )

    def all_gather(self, full: torch.Tensor, name: str) -> Pending:
        """Puts the i-th n elements of `full` [size x n] on rank i there on every rank, in place."""
        name = f"all_gather:{name}"
        parts = full.chunk(self.size)
        if not self._is_gloo:
            return self._start(name, full, (_all_gather, full, parts[self.index]))
        # A broadcast of each part takes three quarters of the time of gloo's own, and no memory.
        broadcasts = [(dist.broadcast, *pair) for pair in zip(parts, self.members, strict=True)]
        return self._start(name, full, *broadcasts)

    def broadcast(self, tensor: torch.Tensor, name: str) -> Pending:
        """Gives every rank of the axis the `tensor` of its first rank."""
        return self._start(f"broadcast:{name}", tensor, (dist.broadcast, tensor, self.members[0]))

    def _start(
        self,
        name: str,
        counted: torch.Tensor,
        *calls: tuple[Any, ...],
        after: Callable[[], object] | None = None,
    ) -> Pending:
        """Starts what is recorded as one collective.

        Args:
            name: As the Timeline names it.
            counted: The tensor whose bytes the Timeline counts.
            calls: Functions of `torch.distributed`, each with its arguments.
            after: What the one who waits does when they are complete.
        """
        if self.size == 1:
            return _Complete()
        span = self._recorder.open(
            Kind.COLLECTIVE,
            name,
            lane=Lane.COMMUNICATION,
            bytes=counted.numel() * counted.element_size(),
            group=self.members,
        )
        with _as_communication_error(name):
            works = [call(*arguments, group=self.group, async_op=True) for call, *arguments in calls]
        on_cpu = counted.device.type == "cpu"
        return _Started(works, span, self._recorder, name, on_cpu=on_cpu, after=after)


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes that data parallelism communicates over.

    Attributes:
        dp: All data-parallel ranks.
        shard: The ranks that together hold one sharded state; for gathers.
        reduce: The same ranks, in a group of their own for reductions. These start when gradients are there,
            and so keep no order with gathers on a rank where a parameter had none.
        replicate: The ranks that hold the same shard.
    """

    dp: Axis
    shard: Axis
    reduce: Axis
    replicate: Axis

    @classmethod
    def build(cls, plan: Plan, recorder: Recorder) -> Axes:
        """Makes the process groups of a Plan's mesh out of the default group, which all ranks must call.

        Raises:
            PlanError: The Plan is for another number of ranks than the default group has.
        """
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        plan.require_ranks(ranks)
        mesh = Mesh.of(plan)
        made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

        def axis(name: str, *, own: bool = False) -> Axis:
            for members in mesh.groups(name):
                if members not in made:
                    made[members] = _process_group(members, ranks, own=own)
            members = mesh.group(rank, name)
            return Axis(name, members, rank, made[members], recorder)

        shard = axis("shard")
        made.clear()
        return cls(dp=axis("dp"), shard=shard, reduce=axis("shard", own=True), replicate=axis("replicate"))


@contextmanager
def _as_communication_error(name: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(f"{name} failed: {error}") from error


def _process_group(members: tuple[int, ...], ranks: int, *, own: bool) -> dist.ProcessGroup | None:
    """The group of these ranks; None, which is the default group, also where there is nobody else."""
    if len(members) == 1 or (len(members) == ranks and not own):
        return None
    group: dist.ProcessGroup = dist.new_group(list(members), timeout=_default_timeout())
    return group


def _default_timeout() -> timedelta | None:
    """The time-out that the default group was made with, which torch does not pass on to new groups."""
    world = dist.group.WORLD
    assert world is not None
    if isinstance(world, ProcessGroup):
        return world.timeout
    options = world._get_backend(torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")).options
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout
